"""The keepalive: a thread and a connection of their own, so that no long batch or busy loop costs a worker its life.

Here: `Heart` and `boottime`. Not here: what a beat says and what its answer means (the peer gives `make` and
`replied`).

Each `every` seconds a beat is sent; every half of that (at most 0.5 s) a tick is posted into the loop, to see whether
it turns. A loop that has not run a tick for over a second is named in the log, with what it is busy with. One that
has not for `stall_limit` gets no beats any more: a wedged peer must lose its work. When the thread itself was kept
from running (a frozen process, a C call that holds the GIL), that time is not held against the loop.

Nothing here logs: a handler that blocks would stop the beat. Lines go to the scribe, after the beat was sent. A beat
that fails makes no line at all; the data connection tells of the outage, and `errors` counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from worqr.call import Call
from worqr.errors import Unavailable, WorqrError
from worqr.link.connection import Wire, open_connection, pack
from worqr.link.dialect import as_sent
from worqr.link.faults import Kind, Lost, Refused
from worqr.link.mailbox import Mailbox
from worqr.link.routes import Route, route_to
from worqr.link.scribe import Scribe
from worqr.link.settings import LinkSettings

logger: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")

_TIMEOUT = 1.0  # seconds for connecting and for an answer; three times less than a keepalive's life
_RETRY = 0.5  # seconds between attempts after a beat failed
_TICK = 0.5  # seconds between looks at the loop, at most
_TURNING = 1.0  # a loop that answers within this turns
_LATE = 1.0  # seconds; we ourselves did not run for so long
_END_WAIT = 0.2  # seconds that stopping waits for the thread; only one that is just connecting takes longer


if hasattr(time, "CLOCK_BOOTTIME"):

    def boottime() -> float:
        """Seconds of a clock that also runs while the machine sleeps: what was true before a nap is old after it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # not Linux

    def boottime() -> float:
        """Seconds of the monotonic clock, for want of one that runs while the machine sleeps."""
        return time.monotonic()


class Heart(Generic[R]):
    """Sends beats from `start` to `stop`.

    Attributes, changed by the thread alone, readable from anywhere:
        acked_at: `boottime()` at which the last acknowledged beat was sent; 0 before the first.
        beats: how many were sent.
        errors: how many failed; last_error says why the last one did.
    """

    def __init__(
        self,
        settings: LinkSettings,
        mailbox: Mailbox,
        *,
        make: Callable[[int, bool], Call[R]],
        replied: Callable[[R], None],
        every: float,
        stall_limit: float,
        describe: Callable[[], str],
        scribe: Scribe | None = None,
        route: Route | None = None,
    ) -> None:
        self.acked_at: float = 0.0
        self.beats: int = 0
        self.errors: int = 0
        self.last_error: str = ""
        self._settings = settings
        self._route = route or route_to(settings)
        self._mailbox = mailbox
        self._make = make
        self._replied = replied
        self._every = every
        self._scribe = scribe or Scribe()
        self._own_scribe = scribe is None
        self._loop = _LoopWatch(mailbox, describe, stall_limit)
        self._wire: Wire | None = None
        self._stopped = threading.Event()
        self._refused: WorqrError | None = None
        self._thread = threading.Thread(target=self._run, name="worqr-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat, at once. Raises Unavailable if the system gives us no thread."""
        if self._refused is not None:
            raise self._refused
        try:
            if self._own_scribe:
                self._scribe.start()
            self._thread.start()
        except RuntimeError as exc:
            raise Unavailable(f"cannot start the keepalive ({exc}): this process is at its limit (ulimit -u)") from exc

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def lag(self) -> float:
        """Seconds that the last tick waited for the loop, or the present one has waited so far."""
        return self._loop.lag

    def stop(self) -> None:
        """Send no more beats, and report none. Idempotent; the thread has ended then, unless it is just connecting."""
        if self._stopped.is_set() or self._refused is not None:
            return
        self._stopped.set()
        wire = self._wire
        if wire is not None:
            wire.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)
        if self._own_scribe:
            self._scribe.stop()

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the thread stayed in the parent."""
        self._refused = error
        if self._wire is not None:
            self._wire.abandon()

    def _run(self) -> None:
        pause = min(self._every / 2, _TICK)
        next_beat = time.monotonic()
        while not self._stopped.is_set():
            try:
                now = time.monotonic()
                self._loop.look(now)
                if now >= next_beat:
                    stalled = self._loop.stalled
                    next_beat = now + pause if stalled else self._when_next(next_beat, beaten=self.beat_once())
                self._tell()
            except Exception as exc:  # whatever it is, the next beat must go out
                self._failed(f"{type(exc).__name__}: {exc}")
                self._drop()  # a reply may be left on it
                next_beat = time.monotonic() + min(_RETRY, self._every)
            wake = min(next_beat, time.monotonic() + pause)
            self._stopped.wait(max(wake - time.monotonic(), 0.001))
            self._loop.forgive(time.monotonic() - wake)
        self._drop()

    def _when_next(self, due: float, *, beaten: bool) -> float:
        now = time.monotonic()
        if not beaten:
            return now + min(_RETRY, self._every)
        return max(due + self._every, now)  # in step; a beat that was late is not made up for by a volley

    def beat_once(self) -> bool:
        """Send one beat and wait for its answer, at most a second or two. False if there was none."""
        self.beats += 1
        call = self._make(self.beats, self._loop.turning)
        try:
            wire = self._wire
            if wire is not None and not self._route.leads_to(wire.endpoint):
                self._drop()
                wire = None
            if wire is None:
                look = self._while_silent
                wire = self._wire = open_connection(
                    self._settings, self._route, "beat", timeout=_TIMEOUT, on_silence=look
                )
            sent_at, reply = self._exchange(wire, call)
            value = call.read(reply)
        except (Lost, Unavailable) as exc:
            self._failed(str(exc))
            self._drop()
        except Refused as exc:
            self._failed(str(exc))
            if exc.kind in (Kind.DROP, Kind.MOVED):
                self._drop()
        except WorqrError as exc:
            self._failed(str(exc))
        else:
            self.acked_at = sent_at
            self._mailbox.post(partial(self._reply, value))
            return True
        return False

    def _exchange(self, wire: Wire, call: Call[R]) -> tuple[float, list[object]]:
        script, keys = as_sent(call, clustered=self._settings.clustered)
        packed = [pack((b"EVALSHA", script.sha, len(keys), *keys, *call.args))]
        sent_at = boottime()
        wire.send(packed)
        try:
            return sent_at, wire.read()
        except Refused as exc:
            if exc.kind is not Kind.NOSCRIPT:
                raise
        for why in wire.load([script]).values():
            raise why
        sent_at = boottime()
        wire.send(packed)
        return sent_at, wire.read()

    def _while_silent(self) -> None:
        if self._stopped.is_set():
            raise Lost("the heart was stopped", innocent=True)

    def _reply(self, value: R) -> None:
        """In the loop."""
        if not self._stopped.is_set():
            self._replied(value)

    def _failed(self, why: str) -> None:
        self.errors += 1
        self.last_error = why

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            self._route.doubt()

    def _tell(self) -> None:
        for level, message, seconds, what in self._loop.lines():
            self._scribe.log(logger, level, message, seconds, what)


class _LoopWatch:
    """Does the loop turn? It answers ticks; the heart's thread looks how long the last one has waited.

    Attributes:
        turning: the last tick was answered, or has not waited for long.
        stalled: it has waited for longer than the stall limit.
    """

    def __init__(self, mailbox: Mailbox, describe: Callable[[], str], stall_limit: float) -> None:
        self.turning = True
        self.stalled = False
        self._mailbox = mailbox
        self._describe = describe
        self._stall_limit = stall_limit
        self._asked = 0  # changed only by the thread
        self._asked_at = 0.0
        self._answered = 0  # changed only in the loop, like:
        self._last_lag = 0.0
        self._blocked_since: float | None = None
        self._lines: list[tuple[int, str, float, str]] = []

    @property
    def lag(self) -> float:
        waiting = time.monotonic() - self._asked_at if self._answered != self._asked else 0.0
        return max(waiting, self._last_lag)

    def look(self, now: float) -> None:
        """Judge the last tick; post the next one if it was answered. Two ticks are never on their way."""
        if self._answered != self._asked:
            waited = now - self._asked_at
            self.turning = waited <= _TURNING
            if not self.turning and self._blocked_since is None:
                self._blocked_since = self._asked_at
                self._line(
                    logging.WARNING,
                    "loop.blocked: the event loop has not turned for %.1f s; it is busy with %s",
                    waited,
                )
            if waited > self._stall_limit and not self.stalled:
                self.stalled = True
                self._line(
                    logging.ERROR,
                    "loop.stalled: the event loop has not turned for %.1f s: no more beats until it does; %s",
                    waited,
                )
            return
        if self._blocked_since is not None:
            self._line(
                logging.WARNING, "loop.turns: the event loop turns again, after %.1f s%s", now - self._blocked_since, ""
            )
        self.turning, self.stalled, self._blocked_since = True, False, None
        self._asked += 1
        self._asked_at = now
        self._mailbox.post(partial(self._tick, self._asked))

    def forgive(self, late: float) -> None:
        """This thread woke up so much too late: the process was frozen, or the GIL held. Nor could the loop turn."""
        if late > _LATE:
            self._asked_at += late
            self._line(
                logging.WARNING,
                "heart.late: the keepalive's thread could not run for %.1f s; the process was frozen, or held up by %s",
                late,
            )

    def lines(self) -> list[tuple[int, str, float, str]]:
        lines, self._lines = self._lines, []
        return lines

    def _line(self, level: int, message: str, seconds: float, what: str | None = None) -> None:
        if what is None:
            try:
                what = self._describe()
            except Exception as exc:
                what = f"(unknown: {type(exc).__name__})"
        self._lines.append((level, message, seconds, what))

    def _tick(self, number: int) -> None:
        """In the loop: it turns."""
        self._last_lag = time.monotonic() - self._asked_at
        self._answered = number
