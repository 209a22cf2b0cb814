"""`BlockingBatch`: a batch for synchronous code; and the parts of `BlockingMesh` and `BlockingQueue` that make it.

A call runs the coroutine of the same name to its end in the calling thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack

from worqr.batches import BatchInfo
from worqr.client.batch import Batch, BatchOptions
from worqr.client.blocking_jobs import BlockingJob, entered, run_coroutine
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.foreign import BATCH, explain_arguments
from worqr.validation import Seconds

R = TypeVar("R")

BLOCK: Final = "`async with mesh.batch(...) as batch:`"
WATCH: Final = "`async with batch.watch() as infos:`"


class AsyncBatches(Protocol):
    """What `BlockingBatches` calls: the methods of `worqr.Mesh`."""

    def batch(
        self, *, parent: Batch | None = None, **options: Unpack[BatchOptions]
    ) -> AbstractAsyncContextManager[Batch, bool | None]: ...
    def current_batch(self) -> Batch | None: ...


class AsyncQueueBatches(Protocol):
    """What `BlockingQueueBatches` calls: the methods of `worqr.Queue`."""

    def batch(self, id: str) -> Batch: ...
    async def batches(self, limit: int = 100) -> list[BatchInfo]: ...


class BlockingBatch:
    """A batch for synchronous code. ``mesh.blocking.batch(...)`` makes one. Several threads may add jobs to it at once."""

    __slots__ = ("_batch", "_client")

    def __init__(self, client: Client, batch: Batch) -> None:
        self._client = client
        self._batch = batch

    def __repr__(self) -> str:
        return repr(self._batch).replace("<Batch", "<BlockingBatch")

    @property
    def id(self) -> str:
        """Its id, unique in its home queue.

        Raises:
            UsageError: Its home queue is that of its first job, and none was added yet.
        """
        return self._batch.id

    @property
    def queue(self) -> str:
        """The name of its home queue, which keeps its record.

        Raises:
            UsageError: That is the queue of its first job, and none was added yet.
        """
        return self._batch.queue

    def dispatch(self, call: Call[R]) -> BlockingJob[R]:
        """Add a job. It may run at once, while others are still added. See ``batch.dispatch``.

        Args:
            call: Made by ``function.call(...)``, ``function.options(...).call(...)`` or ``mesh.call(...)``.

        Returns:
            A handle of the job.

        Raises:
            BatchEnded: The batch was sealed by the end of its block, has ended, or was cancelled. Nothing was stored.
            Duplicate: The id of the call is taken. Nothing was stored: a job of a batch is always a new one.
            QueueFull: The queue is at its `max_length`, or the server is out of memory.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it in time. The error has the handle.
            UsageError: It is no call.
            Unavailable: The server did not reply within `patience`.
        """
        return BlockingJob(self._client, run_coroutine(self._client, self._batch.dispatch(call)))

    if not TYPE_CHECKING:  # a type checker knows the signature
        dispatch = explain_arguments("dispatch() of a batch", BATCH)(dispatch)

    def dispatch_many(self, calls: Iterable[Call[R]]) -> list[BlockingJob[R]]:
        """Add jobs, a thousand in one round trip. See ``batch.dispatch_many``.

        Args:
            calls: As for `dispatch`. An iterator is read as the calls are sent.

        Returns:
            The handle of each job, in the order of the calls.

        Raises:
            BatchEnded: As `dispatch`. Jobs before that are stored.
            Duplicate: The id of a call is taken. Other calls of its thousand may be stored.
            QueueFull: A queue is at its `max_length`. Other calls of its thousand may be stored.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            UsageError: One is no call.
            Unavailable: The server did not reply within `patience`. A note says how many jobs were added.
        """
        jobs = run_coroutine(self._client, self._batch.dispatch_many(calls))
        return [BlockingJob(self._client, job) for job in jobs]

    def info(self) -> BatchInfo:
        """Return the state of the batch, and how many of its jobs have ended. See ``batch.info``.

        Raises:
            NoResult: It is unknown: it never existed, or its record was deleted after its end.
            Unavailable: The server did not reply within `patience`.
        """
        return run_coroutine(self._client, self._batch.info())

    def wait(self, timeout: Seconds | None = None) -> BatchInfo:
        """Wait until the batch has ended, whether its jobs finished or not. See ``batch.wait``.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit; 0: do not wait.

        Returns:
            The batch.

        Raises:
            NoResult: It is unknown: it never existed, or its record was deleted after its end.
            ResultTimeout: It has not ended within `timeout`.
            Unavailable: The server did not reply within `patience`.
        """
        return run_coroutine(self._client, self._batch.wait(timeout))

    def result(self, timeout: Seconds | None = None) -> Any:
        """Wait until all jobs have finished and the follow-up `then` has ended, and return what that returned.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit.

        Returns:
            The result of the follow-up; None if the batch has none.

        Raises:
            BatchFailed: A job failed or was cancelled, or the batch was cancelled. The error has the `BatchInfo`.
            NoResult: The batch is unknown, or the follow-up keeps no result.
            ResultTimeout: It has not ended within `timeout`.
            JobFailed: The follow-up failed.
        """
        return run_coroutine(self._client, self._batch.result(timeout))

    @contextmanager
    def watch(self) -> Generator[Iterator[BatchInfo]]:
        """Follow the batch for the length of a block, as an iterator of its `BatchInfo`. See ``batch.watch``.

        Yields:
            Iterator[BatchInfo]: The iterator.
        """
        with entered(self._client, "watch", WATCH, self._batch.watch()) as infos:

            async def following() -> BatchInfo | None:
                return await anext(infos, None)

            def states() -> Iterator[BatchInfo]:
                while (info := run_coroutine(self._client, following())) is not None:
                    yield info

            yield states()

    def cancel(self, *, reason: str = "") -> bool:
        """Cancel the batch: it takes no more jobs, and its jobs are cancelled, waiting or running. See ``batch.cancel``.

        Args:
            reason: A text for people.

        Returns:
            False if the batch had ended already.

        Raises:
            NoResult: It is unknown.
            Unavailable: The server did not reply within `patience`.
        """
        return run_coroutine(self._client, self._batch.cancel(reason=reason))

    def retry_failed(self) -> int:
        """Put its failed jobs back from the dead-letter queues. See ``batch.retry_failed``.

        Returns:
            The number of jobs put back.

        Raises:
            NoResult: It is unknown.
            Unavailable: The server did not reply within `patience`.
        """
        return run_coroutine(self._client, self._batch.retry_failed())


class BlockingBatches:
    """The part of `BlockingMesh` that makes batches."""

    __slots__ = ()

    @property
    def _parts(self) -> tuple[Client, AsyncBatches]:
        raise NotImplementedError

    @contextmanager
    def batch(
        self, *, parent: BlockingBatch | None = None, **options: Unpack[BatchOptions]
    ) -> Generator[BlockingBatch]:
        """Make a batch for the length of a block; see ``mesh.batch``.

        The end of the block seals the batch, and an error in it cancels the batch.

        Args:
            parent: A batch that this one is a job of: it does not end before. The batch of a running job is
                ``mesh.blocking.current_batch()``.
            **options: See `BatchOptions`.

        Yields:
            BlockingBatch: The batch.

        Raises:
            UsageError: An option does not exist or is not valid.
            Duplicate: The home queue has a batch with this id, which has not ended, or ended less than its `keep` ago.
            BatchEnded: `parent` has ended, or was cancelled.
            Unavailable: The server did not reply within `patience`.
        """
        client, mesh = self._parts
        outer = None if parent is None else parent._batch  # pyright: ignore[reportPrivateUsage]
        with entered(client, "batch", BLOCK, mesh.batch(parent=outer, **options)) as batch:
            yield BlockingBatch(client, batch)

    def current_batch(self) -> BlockingBatch | None:
        """Return the batch that the running job belongs to, to add jobs to it; None if it belongs to none.

        Raises:
            LookupError: Called outside a handler.
        """
        client, mesh = self._parts
        batch = mesh.current_batch()
        return None if batch is None else BlockingBatch(client, batch)


class BlockingQueueBatches:
    """The part of `BlockingQueue` for its batches."""

    __slots__ = ()

    @property
    def _parts(self) -> tuple[Client, AsyncQueueBatches]:
        raise NotImplementedError

    def batch(self, id: str) -> BlockingBatch:
        """Return a handle of the batch with this id whose home queue is this one. This does no I/O.

        Args:
            id: The id of the batch.

        Raises:
            UsageError: The id is not valid.
        """
        client, queue = self._parts
        return BlockingBatch(client, queue.batch(id))

    def batches(self, limit: int = 100) -> list[BatchInfo]:
        """Return batches whose home queue is this one. See ``queue.batches``.

        Args:
            limit: At most this many, up to 1,000.

        Raises:
            UsageError: `limit` is less than 1.
        """
        client, queue = self._parts
        return run_coroutine(client, queue.batches(limit))
