"""`Connector`: keeps one connection to a server open: attempts, the pauses between them, and the end. `ReadyWaiters`: the
callers that wait until a connection is open.

Each attempt has a thread, because name resolution and a handshake can block for long. Not here: the open connection
(`live_connection`, `subscriptions`), log lines (`outage`).

States and their transitions:

==========  ================================================  =====================================================
state       meaning                                           leads to
==========  ================================================  =====================================================
NEW         nothing was dialled yet                           DIALLING by `dial`
DIALLING    no connection; an attempt is being made           READY, or WAITING when it fails
WAITING     no connection; the next attempt has a time        DIALLING when the time has come
READY       connected                                         HELD, DIALLING or WAITING when the connection is lost
HELD        connected; the server cannot work at the moment   READY when a batch was answered, DIALLING or WAITING
ENDED       no connection any more                            -
==========  ================================================  =====================================================
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from worqr.errors import Unavailable, WorqrBug, WorqrError
from worqr.link.connection import Wire
from worqr.link.driver import Driver, Waiter, settle_soon
from worqr.link.endpoints import EndpointResolver
from worqr.link.server_errors import ConnectionLost
from worqr.link.timers import Alarm
from worqr.link.transport import Transport

_FIRST_PAUSE = 0.05  # seconds before the third attempt in a row; the second is made at once
_LONGEST_PAUSE = 1.0
_REFUSED_PAUSE = 2.0  # a wrong password: trying often fills the server's log and mends nothing


def pause_after(attempts: int, *, refused: bool = False) -> float:
    """Return the seconds to wait after this number of failures in a row: 0, then doubling, with jitter against herds."""
    if attempts <= 1 and not refused:
        return 0.0
    longest = _REFUSED_PAUSE if refused else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempts - 2, 10))
    return longest * random.uniform(0.5, 1.0)


Connect = Callable[..., Wire]
"""`open_connection` for one server, without the argument `on_silence`."""


class State(enum.Enum):
    """The state of a connection; see the module."""

    NEW = "nothing was dialled yet"
    DIALLING = "an attempt to connect is being made"
    WAITING = "until the next attempt to connect"
    READY = "connected"
    HELD = "the server cannot work at the moment"
    ENDED = "no connection any more"


class Connector:
    """The attempts to keep one connection open. All methods belong to the driver's loop, except `_attempt`.

    Attributes:
        state: see the module.
        resolver: finds the server's address.
        attempts: failed attempts and lost connections in a row.

    Args:
        connect: connects, in a thread.
        connected: gets an open connection.
        failed: gets the error of an attempt.
        dialling: called when an attempt begins.
    """

    def __init__(
        self,
        driver: Driver,
        resolver: EndpointResolver,
        connect: Connect,
        connected: Callable[[Wire], object],
        *,
        failed: Callable[[WorqrError], object] = lambda _: None,
        dialling: Callable[[], object] = lambda: None,
    ) -> None:
        self.state: State = State.NEW
        self.resolver: EndpointResolver = resolver
        self.attempts: int = 0
        self._driver = driver
        self._connect = connect
        self._connected = connected
        self._failed = failed
        self._dialling = dialling
        self._alarm = Alarm(driver, lambda _: self.dial())
        self._next_try = 0.0
        self._number = 0  # of the latest attempt; the results of older ones are discarded

    # The states

    def dial(self) -> None:
        """Begin an attempt. The result of an earlier one is discarded."""
        self._alarm.cancel()
        self._dialling()
        self.state = State.DIALLING
        self._number += 1
        self._start(partial(self._attempt, self._number))

    def works(self) -> None:
        """The connection is of use: the next loss begins a new row of attempts."""
        self.state, self.attempts = State.READY, 0

    def hold(self) -> None:
        """The server replied that it cannot work at the moment."""
        self.state = State.HELD

    def lost(self) -> None:
        """The connection was lost. `retry` continues."""
        self._count()
        self.resolver.invalidate()

    def retry(self) -> None:
        """Dial at once or after a pause, if the connection was lost."""
        if self.state is State.WAITING:
            if self._next_try <= time.monotonic():
                self.dial()
            else:
                self._alarm.set(self._next_try)

    def redial(self) -> None:
        """The server may be elsewhere: begin an attempt at once, unless one has just begun."""
        if self.state is State.WAITING:
            self.dial()

    def close(self) -> None:
        """End: make no more attempts."""
        self.state = State.ENDED
        self._alarm.cancel()

    def poison(self) -> None:
        """In a forked child: the timers are the parent's."""
        self.state = State.ENDED

    def _count(self, *, refused: bool = False) -> None:
        self.state = State.WAITING
        self.attempts += 1
        self._next_try = time.monotonic() + pause_after(self.attempts, refused=refused)

    # One attempt

    def transport(
        self, wire: Wire, readable: Callable[[], object], progress: Callable[[ConnectionLost | None], object]
    ) -> Transport | None:
        """Return the transport of a connection that was just opened; None if it is lost already."""
        try:
            return Transport(wire, self._driver, readable, progress)
        except (ConnectionLost, Unavailable) as exc:
            wire.close()
            self._give_up(Unavailable(str(exc)))
        return None

    def _start(self, attempt: Callable[[], None]) -> None:
        try:
            threading.Thread(target=attempt, name="worqr-dial", daemon=True).start()
        except RuntimeError:  # the system is out of threads: block here, and expire requests late
            attempt()

    def _attempt(self, number: int) -> None:
        """Connect. Runs in the attempt's thread."""
        wire: Wire | None = None
        error: WorqrError | None = None
        try:
            wire = self._connect(on_silence=self._check)
        except WorqrError as exc:
            error = exc
        except BaseException as exc:
            error = WorqrBug(f"connecting failed ({type(exc).__name__}: {exc}); please report this")
            error.__cause__ = exc
        if self.state is State.ENDED and wire is not None:
            wire.close()
        else:
            self._driver.post(partial(self._end, number, wire, error))

    def _check(self) -> None:
        """Called every 0.1 s while the server is silent."""
        if self.state is State.ENDED:
            raise ConnectionLost("the link was closed", innocent=True)

    def _end(self, number: int, wire: Wire | None, error: WorqrError | None) -> None:
        """In the loop: the attempt has ended."""
        if number != self._number or self.state is State.ENDED:
            if wire is not None:
                wire.close()
        elif wire is not None:
            self.state = State.READY
            self._connected(wire)
        else:
            assert error is not None, "an attempt ends with a connection or an error"
            self._give_up(error)

    def _give_up(self, error: WorqrError) -> None:
        self._count(refused=not isinstance(error, Unavailable))
        self._failed(error)
        self.retry()


class ReadyWaiters:
    """Callers of ``wait_ready``, each with its deadline."""

    __slots__ = ("_driver", "_waiters")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._waiters: list[tuple[Waiter, float]] = []

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, waiter: Waiter, deadline: float) -> None:
        """Add a caller that waits until the deadline (monotonic)."""
        self._waiters.append((waiter, deadline))

    def take(self) -> list[tuple[Waiter, float]]:
        """Remove and return all callers."""
        waiters, self._waiters = self._waiters, []
        return waiters

    def take_late(self, now: float) -> list[Waiter]:
        """Remove and return the callers whose deadline has passed."""
        late = [waiter for waiter, deadline in self._waiters if deadline <= now]
        if late:
            self._waiters = [each for each in self._waiters if each[1] > now]
        return late

    def tell(self, error: WorqrError | None) -> None:
        """Settle all callers; without an error, a connection is open."""
        settle_soon(self._driver, [waiter for waiter, _ in self.take()], error)
