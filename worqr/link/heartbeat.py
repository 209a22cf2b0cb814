"""The keepalive: its own thread and connection, so that no long batch or busy loop lets a worker's keepalive key expire.

Here: `Heartbeat`. Not here: the content of a beat and of its reply (the peer's `make` and `replied`), and how the loop is checked
(`loop_monitor`).

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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from worqr.errors import Unavailable, WorqrError
from worqr.link.clocks import boottime
from worqr.link.connection import MOVED, Wire, loading, open_connection, pack
from worqr.link.driver import Driver
from worqr.link.endpoints import EndpointResolver, resolver_for
from worqr.link.log_thread import LogThread
from worqr.link.loop_monitor import LoopMonitor
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.settings import LinkSettings
from worqr.link.wire_form import as_sent
from worqr.script_call import Call

logger: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")

_LONGEST_TIMEOUT = 30.0  # seconds: even a worker with a keepalive of an hour must detect a dead connection
_PERMANENT_TIMEOUT = 5.0  # seconds, for a worker without an expiry
_RETRY = 0.5  # seconds between attempts after a beat failed
_TICK = 0.5  # seconds between looks at the loop, at most
_SLICE = 0.1  # seconds between checks while a reply is awaited; as in `connection`
_END_WAIT = 0.2  # seconds that stopping waits for the thread; a thread that is connecting takes longer


def answer_timeout(keepalive: float | None) -> float:
    """Return how long to wait for the reply to a beat: half a keepalive, but at least a second.

    A late reply is better than a new connection. But a lost beat must be detected in time to send another one before the key
    expires. With the default keepalive of 3 s that is one second until the beat, and 1.5 s more.
    """
    if keepalive is None:
        return _PERMANENT_TIMEOUT
    return max(1.0, min(keepalive / 2, _LONGEST_TIMEOUT))


@dataclass(slots=True)
class _Sent(Generic[R]):
    """A command that waits for its reply: a beat, or a SCRIPT LOAD (`call` is None)."""

    call: Call[R] | None
    at: float  # on the clock of `boottime`
    deadline: float  # on the monotonic clock
    again: bool = False  # it was sent before, and the server did not have the script


class Heartbeat(Generic[R]):
    """Sends beats from `start` to `stop`.

    Attributes, changed by the keepalive thread only, readable from any thread:
        acked_at: `boottime()` at which the last acknowledged beat was sent; 0 before the first.
        beats: the number of beats sent.
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
        log_thread: LogThread | None = None,
        resolver: EndpointResolver | None = None,
    ) -> None:
        self.acked_at: float = 0.0
        self.heard_at: float = 0.0
        self.beats: int = 0
        self.errors: int = 0
        self.last_error: str = ""
        self._settings = settings
        self._resolver = resolver or resolver_for(settings)
        self._driver = driver
        self._make = make
        self._replied = replied
        self._every = every
        self._timeout = timeout
        self._log_thread = log_thread or LogThread()
        self._owns_log_thread = log_thread is None
        self._loop = LoopMonitor(driver, describe, block_limit)
        self._wire: Wire | None = None
        self._sent: deque[_Sent[R]] = deque()
        self._next_beat = self._looked = time.monotonic()  # last check of the clock while a reply is awaited
        self._has_worked = False  # the present connection has delivered a reply
        self._begun = threading.Event()
        self._stopped = threading.Event()
        self._refused: WorqrError | None = None
        self._thread = threading.Thread(target=self._run, name="worqr-heartbeat", daemon=True)

    def open(self) -> None:
        """Begin to connect, so that the first beat finds a connection. Raises Unavailable if the system cannot start a thread."""
        if self._refused is not None:
            raise self._refused
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise Unavailable(f"cannot start the keepalive ({exc}): this process is at its limit (ulimit -u)") from exc

    def start(self) -> None:
        """Begin to beat, at once. Raises Unavailable if the system cannot start a thread."""
        if self._thread.ident is None:
            self.open()
        self._next_beat = time.monotonic()
        self._begun.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def lag(self) -> float:
        """Seconds that the last tick waited for the loop, or the present one has waited so far."""
        return self._loop.lag

    def stop(self) -> None:
        """Stop sending and reporting beats. Idempotent; the thread has ended afterwards, unless it is connecting."""
        if self._stopped.is_set() or self._refused is not None:
            return
        self._stopped.set()
        self._begun.set()
        wire = self._wire
        if wire is not None:
            wire.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)
        if self._owns_log_thread:
            self._log_thread.stop()

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the keepalive thread exists in the parent only."""
        self._refused = error
        if self._wire is not None:
            self._wire.abandon()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._step()
            except Exception as exc:  # whatever the error, the next beat must be sent
                self._failed(f"{type(exc).__name__}: {exc}")
                self._drop()  # a reply may be left on it
            self._rest()
        self._drop()

    def _rest(self) -> None:
        """Until the next beat, or the next look at the loop."""
        if not self._begun.is_set():
            self._begun.wait(_RETRY if self._wire is None else None)
            return
        wake = min(self._next_beat, time.monotonic() + self._pause)
        self._stopped.wait(max(wake - time.monotonic(), 0.001))
        self._loop.forgive(time.monotonic() - wake)

    @property
    def _pause(self) -> float:
        return min(self._every / 2, _TICK)

    def _step(self) -> None:
        """Send a beat if it is time, and read all pending replies; beats continue meanwhile."""
        try:
            self._look()
            while self._sent and not self._stopped.is_set():
                self._hear()
        except (ConnectionLost, Unavailable) as exc:
            at_once = self._has_worked
            self._failed(str(exc))
            self._drop()
            if at_once:
                self._next_beat = time.monotonic()
        except ErrorReply as exc:
            self._failed(str(exc))
            if exc.action in (ErrorAction.DROP, ErrorAction.MOVED):
                self._drop()
        except WorqrError as exc:
            self._failed(str(exc))

    def _look(self) -> None:
        """The regular work: check the loop, send a beat, and hand on log lines."""
        now = time.monotonic()
        if not self._begun.is_set():
            self._connection()
            return
        self._loop.look(now)
        if now >= self._next_beat:
            if self._loop.stalled:
                self._next_beat = now + self._pause
            else:
                # in step; a late beat is not followed by a burst
                self._next_beat = max(self._next_beat + self._every, now)
                self._beat()
        self._tell()

    def _beat(self) -> None:
        self.beats += 1
        call = self._make(self.beats, self._loop.turning)
        self._send(self._connection(), call)

    def _connection(self) -> Wire:
        wire = self._wire
        if wire is not None and not self._resolver.is_current(wire.endpoint):
            if self._sent:
                raise ConnectionLost(MOVED, innocent=True)
            self._drop()
            wire = None
        if wire is None:
            look = self._while_silent
            wire = self._wire = open_connection(
                self._settings, self._resolver, "beat", timeout=self._timeout, on_silence=look
            )
        return wire

    def _send(self, wire: Wire, call: Call[R], *, again: bool = False) -> None:
        script, keys = as_sent(call, clustered=self._settings.clustered)
        deadline = time.monotonic() + self._timeout
        pieces = [pack((b"EVALSHA", script.sha, len(keys), *keys, *call.args))]
        if again:
            pieces = loading([script]) + pieces
            self._sent.append(_Sent(None, 0, deadline))
        self._sent.append(_Sent(call, boottime(), deadline, again))
        wire.send(pieces)

    def _hear(self) -> None:
        """Read the oldest pending reply."""
        wire = self._wire
        assert wire is not None, "what is sent is forgotten with its connection"
        self._looked = time.monotonic()
        try:
            reply = wire.read()
        except ErrorReply as exc:
            sent = self._sent.popleft()
            if exc.action is not ErrorAction.NOSCRIPT or sent.call is None or sent.again:
                raise
            self._send(wire, sent.call, again=True)
            return
        sent = self._sent.popleft()
        if sent.call is not None:
            value = sent.call.read(reply)
            self._has_worked = True
            self.acked_at = sent.at
            self._driver.post(partial(self._reply, value, sent.at))

    def _while_silent(self) -> None:
        """Called every 0.1 s while the thread waits for a reply or for the handshake."""
        if self._stopped.is_set():
            raise ConnectionLost("the heartbeat was stopped", innocent=True)
        now = time.monotonic()
        if self._wire is not None:
            self._loop.forgive(now - self._looked - _SLICE)
            self._looked = now
            if now > self._sent[0].deadline:
                raise ConnectionLost(f"no answer for {self._timeout:g} s")
            self._look()
        elif self._begun.is_set():
            self._loop.look(now)

    def _reply(self, value: R, sent_at: float) -> None:
        """In the loop."""
        if not self._stopped.is_set():
            self.heard_at = sent_at
            self._replied(value)

    def _failed(self, why: str) -> None:
        """Try again soon."""
        self.errors += 1
        self.last_error = why
        self._next_beat = time.monotonic() + min(_RETRY, self._every)

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        self._sent.clear()
        self._has_worked = False
        if wire is not None:
            wire.close()
            self._resolver.invalidate()

    def _tell(self) -> None:
        for event, text, seconds, where, level in self._loop.lines():
            if where is None:
                self._log_thread.emit(logger, event, text, duration=seconds)
            else:
                self._log_thread.emit(logger, event, text, level=level, duration=seconds, where=where)
