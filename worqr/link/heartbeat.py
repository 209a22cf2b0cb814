"""The keepalive: its own thread and connection, so that no long batch or busy loop lets a worker's keepalive key expire.

Here: `Heartbeat`, its connection, and the check of the loop. Not here: the content of a beat and of its reply (the peer's `make`
and `replied`).

A beat is sent every `every` seconds, even while replies to earlier beats are pending. So a slow line or an overloaded server
does not make the keepalive key expire. If a beat waits longer than `timeout` seconds for its reply, the connection is closed.
The next beat is then sent on a new connection at once.

Every half of `every` (at most 0.5 s) the thread checks the loop. If the loop has been blocked for `block_limit`, no more
beats are sent: a blocked worker must lose its tasks.

Nothing here logs directly, because a handler that blocks would stop the beat. Lines go to the log thread, after the beat was
sent. A failed beat is not logged: the data connection logs the outage, and `errors` counts failed beats. If only beats
fail, the peer logs `trouble` when the worker has missed its deadline.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from worqr.command import Command
from worqr.errors import Unavailable, WorqrError
from worqr.link.connector import (
    MOVED,
    ConnectionThread,
    EndpointResolver,
    Wire,
    WireHolder,
    loading,
    open_connection,
    pack,
)
from worqr.link.driver import Driver
from worqr.link.failures import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.log_thread import LogThread, boottime
from worqr.link.session import as_sent
from worqr.link.settings import LinkSettings

# `BeatConnection`: the connection of a keepalive, with the beats that wait for their replies.


R = TypeVar("R")


class Sent(msgspec.Struct, Generic[R]):
    """A command that waits for its reply: a beat, or a SCRIPT LOAD (`call` is None)."""

    call: Command[R] | None
    at: float  # on the clock of `boottime`
    deadline: float  # on the monotonic clock
    again: bool = False  # it was sent before, and the server did not have the script


class BeatConnection(WireHolder, Generic[R]):
    """The connection of one keepalive; only its thread uses it. After a loss the next beat opens another one.

    Attributes:
        sent: the commands that wait for their replies; they are forgotten with the connection.
        has_worked: the present connection has delivered a reply.

    Args:
        timeout: seconds for connecting, and for each reply.
        on_silence: called every 0.1 s while the server is silent.
    """

    def __init__(
        self, settings: LinkSettings, resolver: EndpointResolver, timeout: float, on_silence: Callable[[], None]
    ) -> None:
        super().__init__()
        self.sent: deque[Sent[R]] = deque()
        self.has_worked: bool = False
        self._settings = settings
        self._resolver = resolver
        self._timeout = timeout
        self._on_silence = on_silence

    def open(self) -> Wire:
        """Return the connection to the present address of the server, opened if necessary."""
        if self.wire is not None and not self._resolver.is_current(self.wire.endpoint):
            if self.sent:
                raise ConnectionLost(MOVED, innocent=True)
            self.drop()
        if self.wire is None:
            wire = open_connection(
                self._settings, self._resolver, "beat", timeout=self._timeout, on_silence=self._on_silence
            )
            return self.hold(wire)
        return self.wire

    def send(self, call: Command[R], *, again: bool = False) -> None:
        """Send a beat; `again`: load its script in front of it."""
        wire = self.open()
        script, keys = as_sent(call, clustered=self._settings.clustered)
        deadline = time.monotonic() + self._timeout
        pieces = [pack((b"EVALSHA", script.sha, len(keys), *keys, *call.args, *script.tail))]
        if again:
            pieces = loading([script]) + pieces
            self.sent.append(Sent(None, 0, deadline))
        self.sent.append(Sent(call, boottime(), deadline, again))
        wire.send(pieces)

    def read(self) -> tuple[R, float] | None:
        """Read the oldest pending reply. Return the value of a beat, and the `boottime()` at which it was sent."""
        assert self.wire is not None, "what is sent is forgotten with its connection"
        try:
            reply = self.wire.read()
        except ErrorReply as exc:
            sent = self.sent.popleft()
            if exc.action is not ErrorAction.NOSCRIPT or sent.call is None or sent.again:
                raise
            self.send(sent.call, again=True)
            return None
        sent = self.sent.popleft()
        if sent.call is None:
            return None
        value = sent.call.read(reply)
        self.has_worked = True
        return value, sent.at

    def check(self, now: float) -> None:
        """Raise ConnectionLost if the oldest reply is overdue."""
        if now > self.sent[0].deadline:
            raise ConnectionLost(f"no answer for {self._timeout:g} s")

    def drop(self) -> None:
        """Close the connection, and look for the server's address anew."""
        self.sent.clear()
        self.has_worked = False
        if self.wire is not None:
            self.close()
            self._resolver.invalidate()


# Detect a blocked event loop: the loop confirms ticks, and the keepalive thread checks the age of the last one. No sockets,
# no threads.
#
# A loop that has not run a tick for over a second is logged, with the code that it is running. A loop that has not run one for
# the block limit counts as blocked. The time in which the keepalive thread itself could not run (a frozen process, a C call
# that holds the GIL) does not count.
#
# Nothing here logs directly, because a handler that blocks would stop the keepalive. The keepalive thread passes the collected
# lines to the log thread.


_TURNING = 1.0  # seconds: a loop that confirms a tick within this time is running
_LATE = 1.0  # seconds: the keepalive thread itself did not run for this time


class Line(NamedTuple):
    """A line for the log: the arguments of `emit`."""

    event: str
    text: str
    seconds: float
    where: str | None = None
    level: int | None = None


class LoopState(enum.Enum):
    """The state of a loop, by the time for which the last tick has waited."""

    TURNING = "it was confirmed, or has not waited for long"
    BLOCKED = "it has waited for over a second"
    STALLED = "it has waited for longer than the block limit"


class LoopMonitor:
    """The watch over one loop.

    Attributes:
        state: TURNING -> BLOCKED -> STALLED while a tick waits; TURNING when the loop has confirmed it.
    """

    def __init__(self, driver: Driver, describe: Callable[[], str], block_limit: float) -> None:
        self.state: LoopState = LoopState.TURNING
        self.blocks: int = 0
        self._driver = driver
        self._describe = describe
        self._block_limit = block_limit
        self._asked = 0  # changed only by the keepalive thread
        self._asked_at = 0.0
        self._answered = 0  # changed only in the loop, like:
        self._last_lag = 0.0
        self._blocked_since = 0.0
        self._slice_began = 0.0
        self._lines: list[Line] = []

    @property
    def lag(self) -> float:
        waiting = time.monotonic() - self._asked_at if self._answered != self._asked else 0.0
        return max(waiting, self._last_lag)

    def look(self, now: float) -> None:
        """Judge the last tick; post the next one if it was answered. Two ticks are never on their way."""
        if self._answered != self._asked:
            waited = now - self._asked_at
            if self.state is LoopState.TURNING:
                self._blocked_since = self._asked_at
            if waited > _TURNING and self.state is LoopState.TURNING:
                self.state = LoopState.BLOCKED
                self.blocks += 1
                self._line(
                    "loop.blocked",
                    "the event loop has not turned for %(duration).1f s; it is busy with %(where)s; let blocking code run in a "
                    "thread, as the handlers do that are declared with a plain def",
                    waited,
                )
            if waited > self._block_limit and self.state is not LoopState.STALLED:
                self.state = LoopState.STALLED
                self._line(
                    "loop.blocked",
                    "the event loop has not turned for %(duration).1f s, and this worker sends no heartbeats until it does: "
                    "it is busy with %(where)s",
                    waited,
                    logging.ERROR,
                )
            return
        if self.state is not LoopState.TURNING:
            gone = now - self._blocked_since
            self._lines.append(Line("loop.turns", "the event loop turns again, after %(duration).1f s", gone))
        self.state = LoopState.TURNING
        self._asked_at = now  # before `_asked`: any thread may read `lag` between the two
        self._asked += 1
        self._driver.post(partial(self._tick, self._asked))

    def forgive(self, late: float) -> None:
        """The keepalive thread woke up this much too late: the process was frozen, or the GIL held. The loop could not run
        either.
        """
        if late > _LATE:
            self._asked_at += late
            self._line(
                "heartbeat.late",
                "the heartbeat thread could not run for %(duration).1f s; the process was frozen, or held up by %(where)s",
                late,
            )

    def begin_slice(self, now: float) -> None:
        """The keepalive thread begins to wait for a reply."""
        self._slice_began = now

    def end_slice(self, now: float, expected: float) -> None:
        """It has waited for a slice of this length, and waits on. See `forgive`."""
        self.forgive(now - self._slice_began - expected)
        self._slice_began = now

    def lines(self) -> list[Line]:
        lines, self._lines = self._lines, []
        return lines

    def _line(self, event: str, text: str, seconds: float, level: int | None = None) -> None:
        try:
            where = self._describe()
        except Exception as exc:
            where = f"(unknown: {type(exc).__name__})"
        self._lines.append(Line(event, text, seconds, where, level))

    def _tick(self, number: int) -> None:
        """In the loop: confirm a tick."""
        self._last_lag = time.monotonic() - self._asked_at
        self._answered = number


logger: logging.Logger = logging.getLogger(__name__)


_LONGEST_TIMEOUT = 30.0  # seconds: even a worker with a keepalive of an hour must detect a dead connection
_PERMANENT_TIMEOUT = 5.0  # seconds, for a worker without an expiry
_RETRY = 0.5  # seconds between attempts after a beat failed
_TICK = 0.5  # seconds between looks at the loop, at most
_SLICE = 0.1  # seconds between checks while a reply is awaited; as in `opening`


def answer_timeout(keepalive: float | None) -> float:
    """Return how long to wait for the reply to a beat: half a keepalive, but at least a second.

    A late reply is better than a new connection. But a lost beat must be detected in time to send another one before the key
    expires. With the default keepalive of 3 s that is one second until the beat, and 1.5 s more.
    """
    if keepalive is None:
        return _PERMANENT_TIMEOUT
    return max(1.0, min(keepalive / 2, _LONGEST_TIMEOUT))


class Heartbeat(Generic[R]):
    """Sends beats from `start` to `stop`.

    Attributes, changed by the keepalive thread only, readable from any thread:
        acked_at: `boottime()` at which the last acknowledged beat was sent; 0 before the first.
        beats: the number of beats sent.
        errors: the number of failed beats; last_error is the text of the last failure.

    Attributes, changed in the loop:
        heard_at: `boottime()` at which the beat was sent whose reply `replied` handles now, or handled last.
        trouble: why the beat before that one failed; empty if it did not.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        *,
        make: Callable[[int, bool], Command[R]],
        replied: Callable[[R], None],
        every: float,
        block_limit: float,
        describe: Callable[[], str],
        timeout: float = 1.5,
        log_thread: LogThread,
        resolver: EndpointResolver,
    ) -> None:
        self.acked_at: float = 0.0
        self.heard_at: float = 0.0
        self.trouble: str = ""
        self.beats: int = 0
        self.errors: int = 0
        self.last_error: str = ""
        self._driver = driver
        self._make = make
        self._replied = replied
        self._log_thread = log_thread
        self._loop = LoopMonitor(driver, describe, block_limit)
        self._connection: BeatConnection[R] = BeatConnection(settings, resolver, timeout, self._while_silent)
        self._every = every
        self._next = 0.0  # the monotonic time of the next beat
        self._trouble = ""  # why the last beat failed; only in the thread
        self._look_every = min(every / 2, _TICK)  # seconds between two looks at the loop
        self._thread = ConnectionThread("worqr-heartbeat", self._run, lambda: (self._connection,))
        self._begun = self._thread.woken  # set when beats are to be sent

    def open(self) -> None:
        """Begin to connect, so that the first beat finds a connection. Raises Unavailable if the system cannot start a thread."""
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise Unavailable(f"cannot start the keepalive ({exc}): this process is at its limit (ulimit -u)") from exc

    def start(self) -> None:
        """Begin to beat, at once. Raises Unavailable if the system cannot start a thread."""
        if not self._thread.is_started:
            self.open()
        self._next = time.monotonic()
        self._begun.set()

    @property
    def blocks(self) -> int:
        """How often the loop was found blocked for over a second."""
        return self._loop.blocks

    @property
    def stopped(self) -> bool:
        return self._thread.ended.is_set()

    @property
    def lag(self) -> float:
        """Seconds that the last tick waited for the loop, or the present one has waited so far."""
        return self._loop.lag

    def stop(self) -> None:
        """Stop sending and reporting beats. Idempotent; the thread has ended afterwards, unless it is connecting."""
        if not self.stopped and self._thread.refused is None:
            self._thread.end()

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the keepalive thread exists in the parent only."""
        self._thread.poison(error)

    # The keepalive thread

    def _run(self) -> None:
        while not self.stopped:
            try:
                self._step()
            except Exception as exc:  # whatever the error, the next beat must be sent
                self._failed(f"{type(exc).__name__}: {exc}")
                self._connection.drop()  # a reply may be left on it
            self._rest()
        self._connection.drop()

    def _rest(self) -> None:
        """Wait until the next beat, or the next look at the loop."""
        if not self._begun.is_set():
            self._begun.wait(_RETRY if self._connection.wire is None else None)
            return
        wake = min(self._next, time.monotonic() + self._look_every)
        self._thread.ended.wait(max(wake - time.monotonic(), 0.001))
        self._loop.forgive(time.monotonic() - wake)

    def _step(self) -> None:
        """Send a beat if it is time, and read all pending replies; beats continue meanwhile."""
        try:
            self._look()
            while self._connection.sent and not self.stopped:
                self._read()
        except (ConnectionLost, Unavailable) as exc:
            at_once = self._connection.has_worked
            self._failed(str(exc))
            self._connection.drop()
            if at_once:
                self._next = time.monotonic()
        except ErrorReply as exc:
            self._failed(str(exc))
            if exc.action in (ErrorAction.DROP, ErrorAction.MOVED):
                self._connection.drop()
        except WorqrError as exc:
            self._failed(str(exc))

    def _look(self) -> None:
        """Check the loop, send a beat if it is due, and pass log lines to the log thread."""
        now = time.monotonic()
        if not self._begun.is_set():
            self._connection.open()
            return
        self._loop.look(now)
        if now >= self._next:
            if self._loop.state is LoopState.STALLED:
                self._next = time.monotonic() + self._look_every
            else:
                self._next = max(self._next + self._every, now)  # a late beat is not followed by a burst
                self.beats += 1
                self._connection.send(self._make(self.beats, self._loop.state is LoopState.TURNING))
        self._tell()

    def _read(self) -> None:
        """Read the oldest pending reply."""
        self._loop.begin_slice(time.monotonic())
        reply = self._connection.read()
        if reply is not None:
            value, sent_at = reply
            self.acked_at = sent_at
            trouble, self._trouble = self._trouble, ""
            self._driver.post(partial(self._deliver, value, sent_at, trouble))

    def _while_silent(self) -> None:
        """Called every 0.1 s while the thread waits for a reply or for the handshake."""
        self._thread.check()
        now = time.monotonic()
        if self._connection.wire is not None:
            self._loop.end_slice(now, _SLICE)
            self._connection.check(now)
            self._look()
        elif self._begun.is_set():
            self._loop.look(now)

    def _deliver(self, value: R, sent_at: float, trouble: str) -> None:
        """In the loop: hand the value of a reply to the peer."""
        if not self.stopped:
            self.heard_at, self.trouble = sent_at, trouble
            self._replied(value)

    def _failed(self, why: str) -> None:
        """Count a failed beat; send the next one soon."""
        self.errors += 1
        self.last_error = self._trouble = why
        self._next = time.monotonic() + min(_RETRY, self._every)

    def _tell(self) -> None:
        for event, text, seconds, where, level in self._loop.lines():
            if where is None:
                self._log_thread.emit(logger, event, text, duration=seconds)
            else:
                self._log_thread.emit(logger, event, text, level=level, duration=seconds, where=where)
