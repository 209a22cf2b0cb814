"""`BlockingJob`: a handle of one job for synchronous code; and how its calls run. For `worqr.client.blocking`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, TypeVar, cast

from worqr.client.client import Client
from worqr.client.job import Job, Outcome
from worqr.errors import Duplicate, NotReplicated, UsageError, set_job
from worqr.link import loop_name_here
from worqr.records import CancelCount, Status
from worqr.validation import Seconds

R = TypeVar("R")


class BlockingJob(Generic[R]):
    """A handle of one job for synchronous code. The methods of `BlockingQueue` and `BlockingFunction` make it."""

    __slots__ = ("_client", "_job")

    def __init__(self, client: Client, job: Job[R]) -> None:
        self._client = client
        self._job = job

    def __repr__(self) -> str:
        return f"<BlockingJob {self.id!r} of {self.queue!r}>"

    def __eq__(self, other: object) -> bool:
        """True for the same id on the same queue of the same mesh, whatever the dispatch."""
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
        """What its dispatch did, as in `Job`; None for a handle made from an id."""
        return self._job.outcome

    def result(self, timeout: Seconds | None = None) -> R:
        """Wait until the job has ended, and return what its handler returned. See ``job.result``.

        The server notifies the thread when the job ends. In a handler, the wait also ends when the run is cancelled, with the
        exception of ``check_cancelled()``.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit; 0: do not wait.

        Returns:
            The result.

        Raises:
            NoResult: There is no result, and there will be none. The message says why.
            JobFailed: The job failed and will not be run again.
            JobCancelled: The job was cancelled.
            ResultTimeout: The job has not ended within `timeout`.
            Unavailable: The server did not reply within `patience`.
        """
        return run_coroutine(self._client, self._job.result(timeout))

    def status(self) -> Status:
        """Return the job's state, the number of its tries, and the error of the last one. See ``job.status``."""
        return run_coroutine(self._client, self._job.status())

    def cancel(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel the job, waiting or running. See ``job.cancel``.

        Args:
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the run has ended.

        Returns:
            The number of jobs that waited, that ran, and that ended within `wait`.
        """
        return run_coroutine(self._client, self._job.cancel(reason=reason, wait=wait))


def run_coroutine(client: Client, coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end in this thread. Every call of a `blocking` view comes through here.

    Raises:
        UsageError: An event loop runs in this thread, which the call would block.
    """
    name: str = getattr(coroutine, "__name__", "this")
    try:
        refuse_loop(f"{name}()", f"`await fn.{name}(...)`")
    except UsageError:
        coroutine.close()
        raise
    try:
        return client.connections.run_blocking(coroutine)
    except (Duplicate, NotReplicated) as error:
        if error.job is not None:  # replace the async handle, which a thread could not use
            set_job(error, BlockingJob(client, cast("Job[Any]", error.job)))
        raise


def refuse_loop(call: str, instead: str) -> None:
    """Raise UsageError if an event loop runs in this thread, which the `call` of a `blocking` view would stop."""
    loop = loop_name_here()
    if loop:
        raise UsageError(
            f"{call} of a `blocking` view waits, and would stop the {loop} loop that runs in this thread: there, "
            f"{instead}, the same call without `.blocking`, inside `async with mesh.connect():`; "
            "or do it in a thread of its own"
        )
