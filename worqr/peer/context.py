"""What a handler may ask about its run: `Context`, found by `current()`.

A context is one claim in the hands of this process. Its fields are plain and its calls never wait, so that a coroutine and a
thread see the same thing. How it ends is decided in `settling`; `Claim`, the same held by hand, is in `claims`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import trio

from worqr.errors import UsageError
from worqr.task import CancelReason

if TYPE_CHECKING:
    from worqr.peer.claiming import Station
    from worqr.peer.membership import Registration


class Context:
    """One run of one task.

    Attributes:
        task: the payload, byte for byte.
        fence: a number that grows with every claim on the queue; a resource that remembers the highest one it saw can refuse
            a worker that was frozen and woke up after its task was given to another (it is the claim's id).
        failures: runs of this task that failed before.
        stalls: workers that died while they ran it.
        timeouts: runs that took too long.
        cancel_reason: why this run is being cancelled: ``cancel`` (somebody asked for it), ``lost`` (the claim is no longer
            ours), ``leaving`` (the peer leaves, the task goes back uncounted); None while it is not.
    """

    __slots__ = (
        *("task", "fence", "failures", "stalls", "timeouts", "cancel_reason"),
        *("_station", "_registration", "_job", "_scope", "_settled"),
    )

    def __init__(self, station: Station, registration: Registration, fence: int, entry: Any) -> None:
        self.fence = fence
        self.cancel_reason: CancelReason | None = None
        self._station = station
        self._registration = registration
        self._scope: trio.CancelScope | None = None
        self._settled = False
        self.task: bytes
        self._job: str | None
        self.failures: int
        self.stalls: int
        self.timeouts: int
        if isinstance(entry, bytes):
            self.task = entry
            self._job = None
            self.failures = self.stalls = self.timeouts = 0
        else:
            self.task, job, self.failures, self.stalls, self.timeouts = entry
            self._job = job.decode()

    @property
    def id(self) -> str:
        """The job's id; of a task that has no record, the claim's number."""
        return self._job if self._job is not None else str(self.fence)

    @property
    def queue(self) -> str:
        """The name of the queue it came from."""
        return self._station.keys.queue

    @property
    def attempt(self) -> int:
        """1 at the first run; runs that were given back uncounted do not count."""
        return 1 + self.failures + self.stalls + self.timeouts

    @property
    def last_attempt(self) -> bool:
        """True if a failure of this run is final."""
        return self.failures + 1 >= self._station.policy.max_failures

    def check_cancelled(self) -> None:
        """In a thread: raise ``trio.Cancelled`` if this run is being cancelled. A plain function learns of it in no other way.

        Raises:
            UsageError: called outside a thread of a handler; a coroutine is cancelled at its next ``await`` by itself.
        """
        try:
            trio.from_thread.check_cancelled()
        except RuntimeError:
            raise UsageError("check_cancelled() is for plain functions in a thread; a coroutine just awaits") from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fence} of {self.queue!r}, attempt {self.attempt}>"

    def _cancel(self, reason: CancelReason) -> None:
        """Cancel the run. The first reason stands, but a claim that is lost is lost."""
        if self.cancel_reason is None or reason == "lost":
            self.cancel_reason = reason
        if self._scope is not None:
            self._scope.cancel()


current_context: ContextVar[Context] = ContextVar("worqr.current")


def current() -> Context:
    """The run this code belongs to, in a handler or a thread of it.

    Raises:
        LookupError: called outside a handler.
    """
    try:
        return current_context.get()
    except LookupError:
        raise LookupError("worqr.current() is only known inside a handler") from None
