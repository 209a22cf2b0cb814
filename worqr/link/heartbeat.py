"""The keepalive: its own thread and connection, so that no long batch or busy loop lets a worker's keepalive key expire.

Here: `Heartbeat`. Not here: the content of a beat and of its reply (the peer's `make` and `replied`), its connection
(`beat_connection`), and how the loop is checked (`loop_monitor`).

A beat is sent every `every` seconds, even while replies to earlier beats are pending. So a slow line or an overloaded server
does not make the keepalive key expire. If a beat waits longer than `timeout` seconds for its reply, the connection is closed.
The next beat is then sent on a new connection at once.

Every half of `every` (at most 0.5 s) the thread checks the loop. If the loop has been blocked for `block_limit`, no more
beats are sent: a blocked worker must lose its tasks.

Nothing here logs directly, because a handler that blocks would stop the beat. Lines go to the log thread, after the beat was
sent. A failed beat is not logged: the data connection logs the outage, and `errors` counts failed beats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from worqr.errors import Unavailable, WorqrError
from worqr.link.beat_connection import BeatConnection
from worqr.link.connection_thread import ConnectionThread
from worqr.link.driver import Driver
from worqr.link.endpoints import EndpointResolver
from worqr.link.log_thread import LogThread
from worqr.link.loop_monitor import LoopMonitor, LoopState
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.settings import LinkSettings
from worqr.script_call import Call

logger: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")

_LONGEST_TIMEOUT = 30.0  # seconds: even a worker with a keepalive of an hour must detect a dead connection
_PERMANENT_TIMEOUT = 5.0  # seconds, for a worker without an expiry
_RETRY = 0.5  # seconds between attempts after a beat failed
_TICK = 0.5  # seconds between looks at the loop, at most
_SLICE = 0.1  # seconds between checks while a reply is awaited; as in `connection`


def answer_timeout(keepalive: float | None) -> float:
    """Return how long to wait for the reply to a beat: half a keepalive, but at least a second.

    A late reply is better than a new connection. But a lost beat must be detected in time to send another one before the key
    expires. With the default keepalive of 3 s that is one second until the beat, and 1.5 s more.
    """
    if keepalive is None:
        return _PERMANENT_TIMEOUT
    return max(1.0, min(keepalive / 2, _LONGEST_TIMEOUT))


class _Schedule:
    """The times of the beats.

    Attributes:
        begun: set when beats are to be sent.
        every: seconds between two beats.
        next: the monotonic time of the next one.
        count: how many were due, and sent.
    """

    def __init__(self, every: float) -> None:
        self.begun: threading.Event = threading.Event()
        self.every: float = every
        self.next: float = time.monotonic()
        self.count: int = 0

    @property
    def pause(self) -> float:
        """Seconds between two looks at the loop."""
        return min(self.every / 2, _TICK)

    def begin(self) -> None:
        """Send the first beat at once."""
        self.next = time.monotonic()
        self.begun.set()

    def advance(self, now: float) -> int:
        """Plan the next beat in step; a late beat is not followed by a burst. Return the number of this one."""
        self.next = max(self.next + self.every, now)
        self.count += 1
        return self.count

    def postpone(self, seconds: float) -> None:
        """Send the next beat after this time."""
        self.next = time.monotonic() + seconds


class Heartbeat(Generic[R]):
    """Sends beats from `start` to `stop`.

    Attributes, changed by the keepalive thread only, readable from any thread:
        acked_at: `boottime()` at which the last acknowledged beat was sent; 0 before the first.
        errors: the number of failed beats; last_error is the text of the last failure.

    Attribute, changed in the loop:
        heard_at: `boottime()` at which the beat was sent whose reply `replied` handles now, or handled last.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        *,
        make: Callable[[int, bool], Call[R]],
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
        self.errors: int = 0
        self.last_error: str = ""
        self._driver = driver
        self._make = make
        self._replied = replied
        self._log_thread = log_thread
        self._loop = LoopMonitor(driver, describe, block_limit)
        self._connection: BeatConnection[R] = BeatConnection(settings, resolver, timeout, self._while_silent)
        self._schedule = _Schedule(every)
        self._thread = ConnectionThread("worqr-heartbeat", self._run)

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
        self._schedule.begin()

    @property
    def beats(self) -> int:
        """The number of beats sent."""
        return self._schedule.count

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
            self._thread.end(self._interrupt)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the keepalive thread exists in the parent only."""
        self._thread.poison(error)
        self._connection.abandon()

    def _interrupt(self) -> None:
        self._schedule.begun.set()
        self._connection.interrupt()

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
        if not self._schedule.begun.is_set():
            self._schedule.begun.wait(_RETRY if self._connection.wire is None else None)
            return
        wake = min(self._schedule.next, time.monotonic() + self._schedule.pause)
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
                self._schedule.postpone(0)
        except ErrorReply as exc:
            self._failed(str(exc))
            if exc.action in (ErrorAction.DROP, ErrorAction.MOVED):
                self._connection.drop()
        except WorqrError as exc:
            self._failed(str(exc))

    def _look(self) -> None:
        """Check the loop, send a beat if it is due, and pass log lines to the log thread."""
        now = time.monotonic()
        if not self._schedule.begun.is_set():
            self._connection.open()
            return
        self._loop.look(now)
        if now >= self._schedule.next:
            if self._loop.state is LoopState.STALLED:
                self._schedule.postpone(self._schedule.pause)
            else:
                number = self._schedule.advance(now)
                self._connection.send(self._make(number, self._loop.state is LoopState.TURNING))
        self._tell()

    def _read(self) -> None:
        """Read the oldest pending reply."""
        self._loop.begin_slice(time.monotonic())
        reply = self._connection.read()
        if reply is not None:
            value, sent_at = reply
            self.acked_at = sent_at
            self._driver.post(partial(self._deliver, value, sent_at))

    def _while_silent(self) -> None:
        """Called every 0.1 s while the thread waits for a reply or for the handshake."""
        self._thread.check()
        now = time.monotonic()
        if self._connection.wire is not None:
            self._loop.end_slice(now, _SLICE)
            self._connection.check(now)
            self._look()
        elif self._schedule.begun.is_set():
            self._loop.look(now)

    def _deliver(self, value: R, sent_at: float) -> None:
        """In the loop: hand the value of a reply to the peer."""
        if not self.stopped:
            self.heard_at = sent_at
            self._replied(value)

    def _failed(self, why: str) -> None:
        """Count a failed beat; send the next one soon."""
        self.errors += 1
        self.last_error = why
        self._schedule.postpone(min(_RETRY, self._schedule.every))

    def _tell(self) -> None:
        for event, text, seconds, where, level in self._loop.lines():
            if where is None:
                self._log_thread.emit(logger, event, text, duration=seconds)
            else:
                self._log_thread.emit(logger, event, text, level=level, duration=seconds, where=where)
