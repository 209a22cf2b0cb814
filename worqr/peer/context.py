"""What a handler can ask about its run: `Context`, found by `current()`.

A context is one claim that this process holds. Its fields are plain and its calls never wait, so that a coroutine, a thread and
an asyncio task can use it alike. `settling` decides how it ends; `Claim`, the class for claims by hand, is in `claims`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from worqr.errors import UsageError
from worqr.policy import POLICY_FIELDS, Broken, Policy
from worqr.records import CancelReason, Failed
from worqr.remote_error import failed_record, meta_of
from worqr.validation import Seconds, clean_text, from_ms
from worqr.validation import seconds as seconds_of

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer
    from worqr.peer.elsewhere import Elsewhere
    from worqr.peer.registration import Registration


_POLICY_FIELDS: Final = frozenset(name.encode() for name in POLICY_FIELDS)


class Context:
    """One run of one task. In a handler, ``worqr.current()`` returns it.

    Attributes:
        task: The payload.
        fence: The fencing token: a number that grows with every claim of the queue. A resource that stores the highest number
            it saw can reject a worker that was frozen and whose task was reassigned.
        failures: The number of earlier runs that failed.
        stalls: The number of workers that died while running this task.
        timeouts: The number of earlier runs that took too long.
        cancel_reason: Why this run is being cancelled; None if it is not. ``cancel``: a caller requested it. ``lost``: the
            task was reassigned to another worker. ``leaving``: the peer leaves, and the task returns to its queue.
            ``timeout``: the run took too long. A thread sees it at once.
        deadline: The time at which the run will be cancelled, on the clock of ``time.monotonic()``, which is also the clock
            of an asyncio loop. None: the run has no timeout.
    """

    __slots__ = (
        *("task", "fence", "failures", "stalls", "timeouts", "cancel_reason", "deadline"),
        *("_station", "_registration", "_record", "_policy", "_scope", "_settled", "_value", "_said", "_timer"),
        "_elsewhere",
    )

    def __init__(self, station: QueueConsumer, registration: Registration, fence: int, entry: Any) -> None:
        self.fence = fence
        self.cancel_reason: CancelReason | None = None
        self._station = station
        self._registration = registration
        self._scope: trio.CancelScope | None = None
        self._settled = False
        self._value: object = None
        self._said: tuple[float | None, str] | None = None
        self.deadline: float | None = None
        self._timer = 0
        self._elsewhere: Elsewhere | None = None
        self.task: bytes
        self.failures: int
        self.stalls: int
        self.timeouts: int
        self._record: dict[bytes, bytes] | None
        self._policy: Policy
        if isinstance(entry, bytes):
            self.task = entry
            self._record = None
            self._policy = station.policy
            self.failures = self.stalls = self.timeouts = 0
        else:
            record = self._record = dict(zip(entry[::2], entry[1::2], strict=True))
            self.task = record[b"task"]
            self.failures = int(record.get(b"failures", 0))
            self.stalls = int(record.get(b"stalls", 0))
            self.timeouts = int(record.get(b"timeouts", 0))
            own = tuple([(name, value) for name, value in record.items() if name in _POLICY_FIELDS])
            self._policy = station.policy_with(own) if own else station.policy

    @property
    def id(self) -> str:
        """The job's id. A plain task has none; this is the id that it would get."""
        return f"@{self.fence}{self._station.mark}" if self._record is None else self._record[b"id"].decode()

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._station.queue

    @property
    def run_at(self) -> datetime:
        """The time before which it was not to run, by the server's clock. For a task that was never scheduled, the time of the
        claim.
        """
        due = None if self._record is None else self._record.get(b"run_at")
        return from_ms(self.fence / 1000 if due is None else int(due))

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time of the firing, for a job of a schedule; else None."""
        nominal = None if self._record is None else self._record.get(b"scheduled_for")
        return None if nominal is None else from_ms(int(nominal))

    @property
    def meta(self) -> Mapping[str, str]:
        """The `meta` of its dispatch; empty if there is none."""
        return {} if self._record is None else meta_of(self._record.get(b"meta", b"").decode())

    @property
    def attempt(self) -> int:
        """The number of this run: 1 at the first. Runs that were not counted are left out."""
        return 1 + self.failures + self.stalls + self.timeouts

    @property
    def last_attempt(self) -> bool:
        """True if the task moves to the dead-letter queue when this run fails."""
        return self.failures + 1 >= self._policy.max_failures

    def progress(self, done: float | None = None, message: str = "") -> None:
        """Report the progress of this run, from any thread. This never waits.

        ``job.status()``, ``job.watch()`` and ``queue.running()`` show it until the run ends. Updates are limited to 10 per
        second; only the latest is kept.

        Args:
            done: A number, by convention from 0 to 1.
            message: A text for people. At most 1,000 characters are kept.

        Raises:
            UsageError: `done` is not a finite number, or `message` is not a str.
        """
        self._said = (_finite(done), _message(message))
        self._station.says(self)

    def extend(self, seconds: Seconds) -> None:
        """Move the deadline of this run, from any thread. This never waits.

        A run without a timeout stays without one. A run that is being cancelled already is not saved.

        Args:
            seconds: The deadline in seconds from now, or a timedelta; more than 0. It may be nearer than before.

        Raises:
            UsageError: `seconds` is not valid.
        """
        self._station.extends(self, seconds_of(seconds, "seconds of extend", positive=True))

    def check_cancelled(self) -> None:
        """Raise an exception if this run is being cancelled. A plain function in a thread has to call it to be cancelled.

        In a thread it raises ``trio.Cancelled``; in an asyncio handler and its threads, ``asyncio.CancelledError``. Do not
        catch it. In an async handler on the Trio loop it does nothing, because the next ``await`` is cancelled.

        Raises:
            UsageError: Called in a thread that the handler started by itself. Read `cancel_reason` there.
        """
        if trio.lowlevel.in_trio_task():
            return
        if self._elsewhere is not None:
            self._elsewhere.check_cancelled()
        else:
            check_thread()

    @property
    def state(self) -> Any:
        """The value that the mesh's lifespan yielded, as in ``mesh.state``; None without a lifespan."""
        return self._station.state

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fence} of {self.queue!r}, attempt {self.attempt}>"

    def _cancel(self, reason: CancelReason) -> None:
        """Cancel the run. The first reason stands, but a claim that is lost is lost."""
        if self.cancel_reason is None or reason == "lost":
            self.cancel_reason = reason
        if self._scope is not None:
            self._scope.cancel()


def check_thread() -> None:
    """Raise ``trio.Cancelled`` if the task that waits for this thread of Trio's is cancelled."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        raise UsageError(
            "check_cancelled() is for the thread that runs the handler, not for one of its own; ask cancel_reason there"
        ) from None


def _message(message: object) -> str:
    """At most 1,000 characters that UTF-8 can encode: a progress message must not fail the run."""
    if not isinstance(message, str):
        raise UsageError(f"the message of progress must be a str, not {type(message).__name__}")
    return clean_text(message[:1000])


def _finite(done: object) -> float | None:
    if done is None:
        return None
    if isinstance(done, bool) or not isinstance(done, int | float) or not math.isfinite(done):
        raise UsageError(f"progress must be a finite number or None, not {done!r}")
    return float(done)


def failed_of(context: Context, queue: str) -> Failed:
    """Decode the payload of a failure job of `queue`.

    Raises:
        Broken: another program enqueued it.
    """
    facts = context._record.get(b"failed") if context._record is not None else None  # pyright: ignore[reportPrivateUsage]
    if facts is None:
        raise Broken("a task in a failure queue that no failure put there")
    return failed_record(queue, context.task, msgspec.msgpack.decode(facts, type=dict[str, Any]))


current_context: ContextVar[Context] = ContextVar("worqr.current")


def current() -> Context:
    """Return the run that this code belongs to, in a handler or in a thread of it.

    Raises:
        LookupError: Called outside a handler.
    """
    try:
        return current_context.get()
    except LookupError:
        raise LookupError("worqr.current() is only known inside a handler") from None
