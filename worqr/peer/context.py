"""What a handler may ask about its run: `Context`, found by `current()`.

A context is one claim in the hands of this process. Its fields are plain and its calls never wait, so that a coroutine, a
thread and an asyncio task see the same thing. How it ends is decided in `settling`; `Claim`, the same held by hand, is in
`claims`.
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
from worqr.remote import failed_record, meta_of
from worqr.task import Seconds, clean_text, from_ms
from worqr.task import seconds as seconds_of

if TYPE_CHECKING:
    from worqr.peer.claiming import Station
    from worqr.peer.elsewhere import Elsewhere
    from worqr.peer.membership import Registration


_POLICY_FIELDS: Final = frozenset(name.encode() for name in POLICY_FIELDS)


class Context:
    """One run of one task.

    Attributes:
        id: the job's id; of a task that has no record, the one that its record would get.
        task: the payload, byte for byte.
        fence: a number that grows with every claim on the queue; a resource that remembers the highest one it saw can refuse
            a worker that was frozen and woke up after its task was given to another (it is the claim's id).
        failures: runs of this task that failed before.
        stalls: workers that died while they ran it.
        timeouts: runs that took too long.
        cancel_reason: why this run is being cancelled: ``cancel`` (somebody asked for it), ``lost`` (the claim is no longer
            ours), ``leaving`` (the peer leaves, the task goes back uncounted), ``timeout``; None while it is not. A thread
            sees it at once.
        deadline: when the run will be cancelled, by ``time.monotonic()``, which means the same in the loop, in a thread and in
            an asyncio loop (where it is the loop's own time); None: it has no timeout.
    """

    __slots__ = (
        *("task", "fence", "failures", "stalls", "timeouts", "cancel_reason", "deadline"),
        *("_station", "_registration", "_record", "_policy", "_scope", "_settled", "_value", "_said", "_timer"),
        "_elsewhere",
    )

    def __init__(self, station: Station, registration: Registration, fence: int, entry: Any) -> None:
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
        return f"@{self.fence}{self._station.mark}" if self._record is None else self._record[b"id"].decode()

    @property
    def queue(self) -> str:
        """The name of the queue it came from."""
        return self._station.queue

    @property
    def run_at(self) -> datetime:
        """When it was due; of a task that was never due later, when it was claimed. By the server's clock."""
        due = None if self._record is None else self._record.get(b"run_at")
        return from_ms(self.fence / 1000 if due is None else int(due))

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time of the firing of a schedule that this is; None if it is none."""
        nominal = None if self._record is None else self._record.get(b"scheduled_for")
        return None if nominal is None else from_ms(int(nominal))

    @property
    def meta(self) -> Mapping[str, str]:
        """What the dispatch sent along."""
        return {} if self._record is None else meta_of(self._record.get(b"meta", b"").decode())

    @property
    def attempt(self) -> int:
        """1 at the first run; runs that were given back uncounted do not count."""
        return 1 + self.failures + self.stalls + self.timeouts

    @property
    def last_attempt(self) -> bool:
        """True if a failure of this run is final."""
        return self.failures + 1 >= self._policy.max_failures

    def progress(self, done: float | None = None, message: str = "") -> None:
        """Say how far this run is; never waits. At most ten a second are sent, and the last one wins. Seen by ``job.status()``,
        ``job.watch()`` and ``queue.running()`` until the run ends. From any thread.

        Args:
            done: a number, by custom from 0 to 1.
            message: for people, at most 1,000 characters of it.
        """
        self._said = (_finite(done), _message(message))
        self._station.says(self)

    def extend(self, seconds: Seconds) -> None:
        """Move the deadline of this run to `seconds` from now; never waits. From any thread.

        A run without a timeout stays without one. One that is being cancelled already is not saved.

        Args:
            seconds: more than 0, or a timedelta; it may also bring the deadline nearer.
        """
        self._station.extends(self, seconds_of(seconds, "seconds of extend", positive=True))

    def check_cancelled(self) -> None:
        """Raise if this run is being cancelled; in a thread, a plain function learns of it in no other way.

        In a thread of a handler it raises ``trio.Cancelled``, in an asyncio handler and its threads ``asyncio.CancelledError``;
        let it pass. In a coroutine on the loop it does nothing: that is cancelled at its next ``await`` by itself.

        Raises:
            UsageError: called in a thread that the handler started by itself; ask `cancel_reason` there.
        """
        if trio.lowlevel.in_trio_task():
            return
        if self._elsewhere is not None:
            self._elsewhere.check_cancelled()
        else:
            check_thread()

    @property
    def state(self) -> Any:
        """What the mesh's lifespan yielded: ``mesh.state``; None without one."""
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
    """At most 1,000 characters that UTF-8 can carry: what it says must not fail the run."""
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
    """What a failure job of `queue` tells.

    Raises:
        Broken: it was put there by somebody else.
    """
    facts = context._record.get(b"failed") if context._record is not None else None  # pyright: ignore[reportPrivateUsage]
    if facts is None:
        raise Broken("a task in a failure queue that no failure put there")
    return failed_record(queue, context.task, msgspec.msgpack.decode(facts, type=dict[str, Any]))


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
