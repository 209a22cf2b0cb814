"""A mesh and its queues for plain threads, where no event loop runs: Django, Flask, scripts. ``mesh.blocking``.

This module wraps coroutines of other modules. A call runs the coroutine of the same name to its end in the calling thread. All
plain threads of the process share one link (`worqr.client.connections`). There is no second client, and nothing here sends
requests itself. ``fn.blocking`` is in `worqr.functions.function`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from worqr.client.blocking_batch import AsyncBatches, AsyncQueueBatches, BlockingBatches, BlockingQueueBatches
from worqr.client.blocking_controls import AsyncControls, BlockingControls
from worqr.client.blocking_jobs import BlockingJob, run_coroutine
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.job import Job
from worqr.client.queue import Queue
from worqr.client.raw_options import EnqueueOptions, check_names
from worqr.foreign import MESH_ATTRIBUTES, QUEUE, no_such_attribute
from worqr.history_records import History
from worqr.job_options import JobOptions
from worqr.mesh_records import LogEntry, MeshInfo, QueueInfo, WorkerInfo
from worqr.ops import MAX_ITEMS
from worqr.records import CancelCount, EndedRun, JobRecord, Matches, Status, TaskInfo
from worqr.validation import Seconds

R = TypeVar("R")


class AsyncMesh(AsyncControls, AsyncBatches, Protocol):
    """What a `BlockingMesh` calls: the methods of `worqr.Mesh`."""

    @property
    def prefix(self) -> str: ...
    def queue(self, name: str, *, shards: int = 1) -> Queue: ...
    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int: ...
    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]: ...
    async def queues(self) -> list[QueueInfo]: ...
    async def workers(self) -> list[WorkerInfo]: ...
    async def info(self) -> MeshInfo: ...
    async def log(self, limit: int = 100, after: str = "") -> list[LogEntry]: ...
    async def evict(self, worker_id: str) -> None: ...
    async def find(self, id: str) -> dict[str, Status]: ...


class BlockingMesh(BlockingControls, BlockingBatches):
    """A mesh for synchronous code; ``mesh.blocking``. Any number of threads may use it at once.

    It connects at first use. It stays connected until `close`, until the mesh is garbage-collected, or until the interpreter
    exits, which may take up to a second longer. A forked process connects again.
    """

    __slots__ = ("_mesh",)

    def __init__(self, mesh: AsyncMesh, client: Client) -> None:
        super().__init__(mesh, client)
        self._mesh = mesh

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("BlockingMesh", name, MESH_ATTRIBUTES, wait=""))

    def __repr__(self) -> str:
        return f"<BlockingMesh {self._mesh.prefix!r}>"

    @property
    def _parts(self) -> tuple[Client, AsyncBatches]:
        return self._client, self._mesh

    def queue(self, name: str, *, shards: int = 1) -> BlockingQueue:
        """Return a raw queue by its name. This does no I/O; the queue does not have to exist. See ``mesh.queue``.

        Args:
            name: 1 to 200 bytes of UTF-8, without braces and control characters.
            shards: The number of lists that the queue consists of.

        Raises:
            UsageError: The name is not valid, or this program declared another number of shards before.
        """
        return BlockingQueue(self._client, self._mesh.queue(name, shards=shards))

    def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Enqueue calls as raw tasks, a thousand in one round trip; see ``mesh.enqueue_many``.

        Args:
            calls: Made by ``function.call(...)`` or ``mesh.call(...)``.

        Returns:
            The number of calls, all of which were stored.

        Raises:
            UsageError: A call has options, which make it a job.
            QueueFull: A queue is at its `max_length`, after the `wait` of its calls. A note says how many calls were stored.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            Unavailable: The server did not reply within `patience`. A note says how many calls were stored.
        """
        return run_coroutine(self._client, self._mesh.enqueue_many(calls))

    def dispatch_many(self, calls: Iterable[Call[R]]) -> list[BlockingJob[R]]:
        """Dispatch calls as jobs, a thousand in one round trip; see ``mesh.dispatch_many``.

        Args:
            calls: Made by ``function.call(...)``, ``function.options(...).call(...)`` or ``mesh.call(...)``.

        Returns:
            The handle of each job, in the order of the calls.

        Raises:
            UsageError: A value is not a call.
            Duplicate: An id is taken, and ``if_exists="raise"``. Other calls may be stored.
            QueueFull: A queue is at its `max_length`, after the `wait` of its calls. A note says how many calls were dispatched.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            Unavailable: The server did not reply within `patience`. A note says how many calls were dispatched.
        """
        return [BlockingJob(self._client, job) for job in run_coroutine(self._client, self._mesh.dispatch_many(calls))]

    def queues(self) -> list[QueueInfo]:
        """Return all queues that are not empty or that a worker serves, by name."""
        return run_coroutine(self._client, self._mesh.queues())

    def workers(self) -> list[WorkerInfo]:
        """Return all registered workers, by id. See ``mesh.workers``."""
        return run_coroutine(self._client, self._mesh.workers())

    def info(self) -> MeshInfo:
        """Return the whole mesh at one moment. See ``mesh.info``."""
        return run_coroutine(self._client, self._mesh.info())

    def log(self, limit: int = 100, after: str = "") -> list[LogEntry]:
        """Return what has happened in the mesh, the oldest first. See ``mesh.log``.

        Args:
            limit: At most this many entries, 1 to 1,000.
            after: The id of an entry: return the entries after it. Empty: return the newest entries.

        Raises:
            UsageError: An argument is not valid.
        """
        return run_coroutine(self._client, self._mesh.log(limit, after))

    def evict(self, worker_id: str) -> None:
        """Declare a worker dead, and return its tasks to their queues now. See ``mesh.evict``.

        Args:
            worker_id: As in ``mesh.workers()``.

        Raises:
            UsageError: There is no worker with this id: it was mistyped, or the worker left or was evicted before.
            RefusedByServer: Your user lacks the permissions of a worker, or a key of a queue has another type.
            Unavailable: The server did not reply within `patience`. If it has a note, the worker is evicted, but some of its
                tasks are not back yet.
        """
        run_coroutine(self._client, self._mesh.evict(worker_id))

    def find(self, id: str) -> dict[str, Status]:
        """Return the queues that know a job of this id, with its status there. See ``mesh.find``.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        return run_coroutine(self._client, self._mesh.find(id))

    def close(self) -> None:
        """Disconnect. Calls of other threads that wait for a reply raise `Unavailable`; the next call connects again.

        You do not need it at the end of a program. Call it from any thread, also where an event loop runs; it takes at most
        about a second.
        """
        self._client.connections.for_threads.close()


class BlockingQueue(BlockingQueueBatches):
    """A raw queue for synchronous code; ``mesh.blocking.queue(name)`` makes it."""

    __slots__ = ("_client", "_queue")

    def __init__(self, client: Client, queue: Queue) -> None:
        self._client = client
        self._queue = queue

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("BlockingQueue", name, QUEUE, wait=""))

    def __repr__(self) -> str:
        return f"<BlockingQueue {self.name!r}>"

    @property
    def _parts(self) -> tuple[Client, AsyncQueueBatches]:
        return self._client, self._queue

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    def enqueue(self, *tasks: bytes | bytearray | memoryview, **options: Unpack[EnqueueOptions]) -> int:
        """Enqueue raw tasks in this order; see ``queue.enqueue``.

        Args:
            *tasks: The payloads. They are delivered unchanged.
            **options: See `EnqueueOptions`: `unique`, `front`, `max_length`, `wait` and `replicas`.

        Returns:
            The number of tasks stored, which is all of them.

        Raises:
            UsageError: A task is not bytes-like, an option does not exist or is not valid, the call does not fit one request
                and has to, or `wait` has no `max_length`.
            PayloadTooLarge: A task is larger than the mesh's `max_payload`.
            Duplicate: With `unique`: one of the tasks waits or runs already. Nothing was stored.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: All tasks were stored, but fewer `replicas` than requested had them in time.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the tasks may have been stored.
        """
        check_names(options)  # first, so that an event loop in this thread does not hide the mistake
        return run_coroutine(self._client, self._queue.enqueue(*tasks, **options))

    def dispatch(self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]) -> BlockingJob[bytes]:
        """Put a job into the queue; see ``queue.dispatch``.

        Args:
            task: The payload. It is delivered unchanged.
            **options: See `JobOptions`.

        Returns:
            A handle of this dispatch, with its `outcome`.

        Raises:
            UsageError: The task is not bytes-like, or an option does not exist or is not valid.
            PayloadTooLarge: The task is larger than the mesh's `max_payload`.
            Duplicate: The id is taken, and ``if_exists="raise"``. Nothing was stored.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it in time. The error has the handle.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        return BlockingJob(self._client, run_coroutine(self._client, self._queue.dispatch(task, **options)))

    def job(self, id: str) -> BlockingJob[bytes]:
        """Return a handle of the job with this id. This does no I/O; the job does not have to exist.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        return BlockingJob(self._client, self._queue.job(id))

    def info(self) -> QueueInfo:
        """Return the queue's counters."""
        return run_coroutine(self._client, self._queue.info())

    def cancel(self, task: bytes | bytearray | memoryview, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all tasks of this queue with this payload, waiting or running. See ``queue.cancel``.

        Args:
            task: The payload.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running tasks have ended.

        Returns:
            The number of tasks that waited, that ran, and that ended within `wait`.
        """
        return run_coroutine(self._client, self._queue.cancel(task, reason=reason, wait=wait))

    def running(self, limit: int = MAX_ITEMS, *, worker: str = "") -> list[TaskInfo]:
        """Return the tasks that run now, the longest-running first. See ``queue.running``.

        Args:
            limit: At most this many, up to 10,000.
            worker: Only tasks of the worker with this id. Empty: of all workers.

        Raises:
            UsageError: `limit` is less than 1, or `worker` is not a str.
        """
        return run_coroutine(self._client, self._queue.running(limit, worker=worker))

    def history(self, minutes: int = 60) -> History:
        """Return what has happened in the queue lately. See ``queue.history``.

        Args:
            minutes: How many minutes, 1 to 4,320.

        Raises:
            UsageError: `minutes` is not valid.
        """
        return run_coroutine(self._client, self._queue.history(minutes))

    def find(self, task: bytes | bytearray | memoryview, limit: int = 100) -> Matches:
        """Return where the plain tasks with this payload are, and the jobs that were such tasks. See ``queue.find``.

        Args:
            task: The payload.
            limit: At most this many tasks of each kind, up to 1,000.

        Raises:
            UsageError: The task is not bytes-like, or `limit` is less than 1.
        """
        return run_coroutine(self._client, self._queue.find(task, limit))

    def recent(self, limit: int = 100) -> list[EndedRun]:
        """Return the runs that ended last, the last one first. See ``queue.recent``.

        Args:
            limit: At most this many, up to 1,000.

        Raises:
            UsageError: `limit` is less than 1.
        """
        return run_coroutine(self._client, self._queue.recent(limit))

    def read(self, id: str, *, payload: bool = False) -> JobRecord:
        """Return everything that is stored about one job. See ``queue.read``.

        Args:
            id: The job's id.
            payload: Read the whole payload, not only its first 4,096 bytes.

        Raises:
            UsageError: The id is not valid.
        """
        return run_coroutine(self._client, self._queue.read(id, payload=payload))

    def payload(self, id: str | None = None, *, claim: str | None = None) -> bytes | None:
        """Return the whole payload of a job, of a running task, or of a dead-letter record. See ``queue.payload``.

        Args:
            id: The job's id.
            claim: The `claim` of a task in ``queue.running()``.

        Raises:
            UsageError: Neither or both are given, or one is not valid.
        """
        return run_coroutine(self._client, self._queue.payload(id, claim=claim))

    def cancel_claims(self, *claims: str, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel running tasks by their claims. See ``queue.cancel_claims``.

        Args:
            *claims: The `claim` of tasks in ``queue.running()``.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the runs have ended.

        Returns:
            The number of tasks that ran, and that ended within `wait`.

        Raises:
            UsageError: A claim or `wait` is not valid.
        """
        return run_coroutine(self._client, self._queue.cancel_claims(*claims, reason=reason, wait=wait))

    def run_now(self, *ids: str) -> int:
        """Make scheduled jobs due now. See ``queue.run_now``.

        Args:
            *ids: The ids of the jobs.

        Returns:
            The number of jobs that were scheduled and now wait.

        Raises:
            UsageError: An id is not valid.
        """
        return run_coroutine(self._client, self._queue.run_now(*ids))
