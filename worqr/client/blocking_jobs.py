"""`BlockingJob`: a handle of one job for synchronous code; and how its calls run. For `worqr.client.blocking`."""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from worqr.client.client import Client
from worqr.client.job import Job, Outcome
from worqr.errors import Duplicate, NotReplicated, ResultTimeout, UsageError, set_job
from worqr.foreign import JOB, no_such_attribute
from worqr.link import loop_name_here
from worqr.records import CancelCount, Status
from worqr.validation import Seconds, seconds

R = TypeVar("R")
T = TypeVar("T")

WATCH: Final = "`async with job.watch() as states:`"


class BlockingJob(Generic[R]):
    """A handle of one job for synchronous code. The methods of `BlockingQueue` and `BlockingFunction` make it."""

    __slots__ = ("_client", "_job")

    def __init__(self, client: Client, job: Job[R]) -> None:
        self._client = client
        self._job = job

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("BlockingJob", name, JOB, wait=""))

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

    @contextmanager
    def watch(self, timeout: Seconds | None = None) -> Generator[Iterator[Status]]:
        """Follow the job for the length of a block, as an iterator of its `Status`. See ``job.watch``.

        The iterator begins with the present status, yields each change, and ends with the job. Short states may be left out.

        Args:
            timeout: Seconds for the whole block, or a timedelta. None: no limit.

        Yields:
            Iterator[Status]: The iterator. It raises `ResultTimeout` if the job has not ended within `timeout`.

        Raises:
            Unavailable: The server did not reply within `patience`.
        """
        patience = math.inf if timeout is None else seconds(timeout, "timeout")
        until = time.monotonic() + patience
        with entered(self._client, "watch", WATCH, self._job.watch()) as found:

            async def following() -> Status | None:
                with self._client.link.driver.move_on_after(until - time.monotonic()):
                    return await anext(found, None)
                raise ResultTimeout(f"{self!r} had not ended after {patience:g} s")

            def states() -> Iterator[Status]:
                while (status := run_coroutine(self._client, following())) is not None:
                    yield status

            yield states()

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


@contextmanager
def entered(
    client: Client, name: str, instead: str, block: AbstractAsyncContextManager[T, bool | None]
) -> Generator[T]:
    """Enter an async block in this thread. `instead`: what to write where an event loop runs."""
    refuse_loop(f"{name}()", instead)
    found = run_coroutine(client, block.__aenter__())
    try:
        yield found
    except BaseException as error:
        if not run_coroutine(client, block.__aexit__(type(error), error, error.__traceback__)):
            raise
    else:
        run_coroutine(client, block.__aexit__(None, None, None))
