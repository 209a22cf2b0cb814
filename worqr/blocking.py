"""The producer's side for plain threads, where no event loop runs: Django, Flask, scripts. ``mesh.blocking``, ``fn.blocking``.

Here: what blocks, around what is awaited elsewhere. A call runs the coroutine of the same name to its end in the calling thread,
by the one link that all plain threads of the process share (`worqr.connecting`). What is sent through a function goes through
``mesh.sender`` as ever. There is no second client, and nothing here talks to the server itself.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

from worqr.errors import Duplicate, NotReplicated, UsageError
from worqr.foreign import CALLS, no_such_method
from worqr.inside import client_of
from worqr.job import Job, Outcome
from worqr.link import loop_name_here
from worqr.options import RAW_OPTIONS, JobOptions, check_id, encode_options
from worqr.records import CancelCount, QueueInfo, Status, WorkerInfo
from worqr.task import Seconds

if TYPE_CHECKING:
    from worqr.client import Client
    from worqr.function import Call, Declared
    from worqr.mesh import Mesh
    from worqr.queue import Queue

P = ParamSpec("P")
R = TypeVar("R")


class BlockingMesh:
    """A mesh for plain threads; ``mesh.blocking``. Any number of threads may use it at once.

    It connects at first use and stays connected: until `close`, until the mesh is gone, or until the interpreter exits, which
    it holds up for about a second at most. A process that was forked connects anew.
    """

    __slots__ = ("_client", "_mesh")

    def __init__(self, mesh: Mesh[Any]) -> None:
        self._mesh = mesh
        self._client = client_of(mesh)

    def __repr__(self) -> str:
        return f"<BlockingMesh {self._mesh.prefix!r}>"

    def queue(self, name: str, *, shards: int = 1) -> BlockingQueue:
        """The queue of this name; no I/O, it need not exist. See ``mesh.queue``.

        Raises:
            UsageError: not 1 to 200 bytes of UTF-8, or with braces or control characters; another number of shards was declared
                in this program.
        """
        return BlockingQueue(self._client, self._mesh.queue(name, shards=shards))

    def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Enqueue calls as raw tasks, in one round trip per thousand; see ``mesh.enqueue_many``.

        Returns:
            How many: all of them.

        Raises:
            UsageError: a call with options, which make it a job.
            QueueFull, Unavailable: as ``queue.enqueue``; a note says how many were stored. NotReplicated: all were.
        """
        return _run(self._client, self._mesh.enqueue_many(calls))

    def dispatch_many(self, calls: Iterable[Call[R]]) -> list[BlockingJob[R]]:
        """Dispatch calls as jobs, in one round trip per thousand; see ``mesh.dispatch_many``.

        Returns:
            A handle of each job, in the order of the calls.

        Raises:
            UsageError: something that is no call.
            Duplicate: an id is taken, and ``if_exists="raise"``. Others of the calls may be stored.
            QueueFull: over `max_length`, or the server is out of memory; a note says how many were dispatched.
            NotReplicated: all were stored, but fewer `replicas` had them in time.
            Unavailable: no answer within `patience`; a note says how many were dispatched.
        """
        return [BlockingJob(self._client, job) for job in _run(self._client, self._mesh.dispatch_many(calls))]

    def queues(self) -> list[QueueInfo]:
        """All queues that hold something or are served, by name."""
        return _run(self._client, self._mesh.queues())

    def workers(self) -> list[WorkerInfo]:
        """All registered workers, by id. See ``mesh.workers``."""
        return _run(self._client, self._mesh.workers())

    def evict(self, worker_id: str) -> None:
        """Declare a worker dead and give its tasks back, now. See ``mesh.evict``.

        Args:
            worker_id: as in ``mesh.workers()``.

        Raises:
            UsageError: no worker has this id: it was mistyped, or the worker has left or was evicted before.
            RefusedByServer: your user lacks the rights of a peer; or a key of a queue has another type.
            Unavailable: no answer within `patience`. With a note: it is evicted, but some of its tasks are not back yet.
        """
        _run(self._client, self._mesh.evict(worker_id))

    def close(self) -> None:
        """Disconnect. Threads that wait for an answer get Unavailable; the next call, of any thread, connects anew.

        Not needed at the end of a program. From any thread, also where a loop runs; takes milliseconds, at most about a second.
        """
        self._client.connections.of_threads.close()


class BlockingQueue:
    """One queue for plain threads. Made by ``mesh.blocking.queue(name)``."""

    __slots__ = ("_client", "_queue")

    def __init__(self, client: Client, queue: Queue) -> None:
        self._client = client
        self._queue = queue

    def __repr__(self) -> str:
        return f"<BlockingQueue {self.name!r}>"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    def enqueue(
        self,
        *tasks: bytes | bytearray | memoryview,
        unique: bool = False,
        front: bool = False,
        max_length: int | None = None,
        replicas: int | None = None,
    ) -> int:
        """Put tasks into the queue, to be taken in this order; answers how many: all of them. See ``queue.enqueue``.

        Raises:
            UsageError, PayloadTooLarge, Duplicate, QueueFull: nothing was stored.
            NotReplicated: all were stored, but fewer `replicas` had them in time.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.
        """
        queue = self._queue
        return _run(
            self._client,
            queue.enqueue(*tasks, unique=unique, front=front, max_length=max_length, replicas=replicas),
        )

    def dispatch(self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]) -> BlockingJob[bytes]:
        """Put a job into the queue; answers a handle of this very dispatch. See ``queue.dispatch`` and `JobOptions`.

        Raises:
            UsageError, PayloadTooLarge, Duplicate, QueueFull: nothing was stored.
            NotReplicated: it was stored, but fewer `replicas` had it in time; has the handle.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.
        """
        return BlockingJob(self._client, _run(self._client, self._queue.dispatch(task, **options)))

    def job(self, id: str) -> BlockingJob[bytes]:
        """A handle of the job of this id, which need not exist; no I/O."""
        return BlockingJob(self._client, self._queue.job(id))

    def info(self) -> QueueInfo:
        """All there is to know of the queue at one moment."""
        return _run(self._client, self._queue.info())

    def cancel(self, task: bytes | bytearray | memoryview, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel every task of this queue with this payload, waiting or running. See ``queue.cancel``.

        Args:
            reason: for people, and for whoever waits for a result.
            wait: seconds to wait until the running ones have really ended.
        """
        return _run(self._client, self._queue.cancel(task, reason=reason, wait=wait))


class BlockingJob(Generic[R]):
    """A handle of one job for plain threads. Made by the dispatches and ``job(id)`` of this module."""

    __slots__ = ("_client", "_job")

    def __init__(self, client: Client, job: Job[R]) -> None:
        self._client = client
        self._job = job

    def __repr__(self) -> str:
        return f"<BlockingJob {self.id!r} of {self.queue!r}>"

    def __eq__(self, other: object) -> bool:
        """The same id on the same queue of the same mesh, whichever dispatch."""
        if not isinstance(other, BlockingJob):
            return NotImplemented
        theirs: BlockingJob[Any] = other  # pyright: ignore[reportUnknownVariableType]
        return self._job == theirs._job

    def __hash__(self) -> int:
        return hash(self._job)

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._job.queue

    @property
    def outcome(self) -> Outcome | None:
        """What its dispatch did; None for a handle that was made from an id."""
        return self._job.outcome

    def result(self, timeout: Seconds | None = None) -> R:
        """Wait until it has ended, and answer what its handler returned. Told by the server, not found by asking again and again.

        Args:
            timeout: seconds to wait, then `ResultTimeout`; None: for ever; 0: only look.

        Raises:
            NoResult: at once: unknown, expired, replaced by a newer dispatch, or not kept.
            JobFailed, JobCancelled: it ended in another way, with the error, the reason.
            ResultTimeout: it has not ended in time.
        """
        return _run(self._client, self._job.result(timeout))

    def status(self) -> Status:
        """Where it is now."""
        return _run(self._client, self._job.status())

    def cancel(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel it wherever it is. See ``job.cancel``.

        Args:
            reason: for people and for `JobCancelled`.
            wait: seconds to wait until the run has really ended.
        """
        return _run(self._client, self._job.cancel(reason=reason, wait=wait))


class BlockingFunction(Generic[P, R]):
    """A function whose calls plain threads enqueue; ``fn.blocking``."""

    __slots__ = ("_declared", "_options")

    def __init__(self, declared: Declared, options: Mapping[str, object]) -> None:
        self._declared = declared
        self._options = options

    def __repr__(self) -> str:
        return f"<BlockingFunction {self._declared.name!r}>"

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a call as a raw task, which costs least and has no handle; for ids, times and results see `dispatch`.

        Raises:
            TypeError: the function does not take such arguments.
            UsageError: arguments that its handler would not take; options, which make it a job; where an event loop runs.
            QueueFull, PayloadTooLarge: nothing was stored.
            NotReplicated: it was stored, but fewer ``replicas`` had it in time.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.
        """
        declared = self._declared
        client = declared.home()
        if self._options.keys() - RAW_OPTIONS:
            raise UsageError(f"a call of {declared.name!r} with options is a job: use dispatch() instead of enqueue()")
        _run(client, client.sender.enqueue(declared.call(self._options, args, kwargs)))

    def dispatch(self, /, *args: P.args, **kwargs: P.kwargs) -> BlockingJob[R]:
        """Put a job into the function's queue; answers a handle of this very dispatch.

        Raises: as `enqueue`; Duplicate.
        """
        declared = self._declared
        client = declared.home()
        return BlockingJob(client, _run(client, client.sender.dispatch(declared.call(self._options, args, kwargs))))

    def options(self, **options: Unpack[JobOptions]) -> BlockingFunction[P, R]:
        """This function with options for its jobs: ``fn.blocking.options(delay=5).dispatch(...)``.

        Raises:
            UsageError: an option that does not exist or cannot be.
        """
        return BlockingFunction(self._declared, {**self._options, **encode_options(options)})

    def job(self, id: str) -> BlockingJob[R]:
        """A handle of the job of this id, which need not exist; no I/O."""
        declared = self._declared
        client = declared.home()
        return BlockingJob(client, Job(client, declared.keys(), check_id(id, generated=True), results=declared.results))

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> Any:
            """Asked only for what is not there."""
            hint = f"use `{{fn}}.blocking.{'options(delay=60).dispatch' if name == 'apply_async' else 'enqueue'}(...)`"
            raise AttributeError(
                no_such_method("BlockingFunction", self._declared.name, name, dict.fromkeys(CALLS, hint))
            )


def _run(client: Client, coroutine: Coroutine[Any, Any, R]) -> R:
    """Run it to its end in this thread. Every call of this module comes through here.

    Raises:
        UsageError: an event loop runs in this thread, which would stand still meanwhile.
    """
    loop = loop_name_here()
    if loop:
        coroutine.close()
        name: str = getattr(coroutine, "__name__", "this")
        raise UsageError(
            f"{name}() of a `blocking` view waits, and would stop the {loop} loop that runs in this thread: there, "
            f"`await fn.{name}(...)`, the same call without `.blocking`, inside `async with mesh.connect():`; "
            "or do it in a thread of its own"
        )
    try:
        return client.connections.drive(client, coroutine)
    except (Duplicate, NotReplicated) as error:
        if error.job is not None:  # a thread could do nothing with the other kind
            error.job = BlockingJob(client, cast("Job[Any]", error.job))
        raise
