"""`Connector`: keeps one connection to a server open: attempts, the pauses between them, and the end. `ReadyWaiters`: the
callers that wait until a connection is open.

Each attempt has a thread, because name resolution and a handshake can block for long. Not here: the requests on the open
connection (`session`, `subscriptions`).

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
import logging
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from worqr.errors import Unavailable, WorqrBug, WorqrError
from worqr.link.driver import Alarm, Driver, Waiter, Watch, settle_soon
from worqr.link.failures import ConnectionLost, as_connection_lost, is_unknown_host, remedy_for
from worqr.link.log_thread import LogThread
from worqr.link.opening import EndpointResolver, Wire
from worqr.link.settings import LinkSettings

# An outage of the server: its begin, its cause, and its two log lines.
#
# One WARNING when it begins and one INFO when it ends, regardless of the number of attempts. Not here: the attempts
# (`connector`), threads and sockets.


_WORTH_TELLING = 0.1  # seconds


@dataclass(slots=True)
class Outage:
    """The outage of one server, if there is one now.

    Attributes:
        address: the server's, for messages.
        since: when it began (monotonic); None: the server works.
        cause, remedy: of the last attempt.
        stood: there has been a connection.
        answers: the server is connected, but replies that it cannot work.
    """

    log_thread: LogThread
    logger: logging.Logger
    address: str
    since: float | None = None
    cause: str = ""
    remedy: str = ""
    stood: bool = False
    answers: bool = False
    _told: bool = field(default=False)

    def begin(
        self, cause: str, *, waiting: int = 0, quiet: bool = False, remedy: str = "", answers: bool = False
    ) -> None:
        """The server cannot be used, or still cannot.

        Args:
            cause: why.
            waiting: the number of pending requests.
            quiet: the server may only have closed an idle connection; do not log before the next attempt.
            remedy: sentences about what to do.
            answers: the server is connected, and replies that it cannot work.
        """
        now = time.monotonic()
        if self.since is None:
            self.since = now
        self.cause, self.remedy, self.answers = cause.removesuffix("."), remedy, answers
        if not self._told and not quiet:
            self._told = True
            self.log_thread.watchers.lost(id(self), self.address, cause)
            pending = f", {waiting} requests pending" if waiting or self.stood else ""
            text = f"{self._what()}; retrying{pending}.{self._hint()}".replace("%", "%%")
            self.log_thread.emit(self.logger, "link.lost", text, server=self.address, error=self.cause, pending=waiting)

    def failed_to_connect(self, error: WorqrError, settings: LinkSettings, *, waiting: int) -> WorqrError | None:
        """An attempt failed. Requests wait as long as their patience allows.

        Returns:
            The error for callers that are connecting, if waiting does not help; None: they wait as well.
        """
        cause = str(error).removeprefix(f"the server at {self.address} refused the connection: ")
        self.begin(cause, waiting=waiting, remedy=remedy_for(error, settings, stood=self.stood))
        if not isinstance(error, Unavailable):
            return error
        if self.stood or settings.clustered or not is_unknown_host(error):
            return None  # a host name that resolved before comes back; the nodes of a cluster name each other
        unknown = Unavailable(self.text(time.monotonic()))
        unknown.__cause__ = error.__cause__
        return unknown

    def connected(self) -> None:
        """There is a connection. The outage ends when the server works."""
        self.stood = True

    def forget(self) -> None:
        """The server is not needed any more."""
        self.log_thread.watchers.back(id(self))

    def end(self) -> None:
        """The server works again."""
        self.forget()
        if self.since is not None and self._told:
            gone = time.monotonic() - self.since
            text = "connected to %(server)s after %(duration).1f s"
            self.log_thread.emit(self.logger, "link.back", text, server=self.address, duration=gone)
        self.since, self.cause, self.remedy = None, "", ""
        self.answers = self._told = False

    def text(self, now: float) -> str:
        """Return the text of an Unavailable: server, duration, cause and remedy. Ends with a full stop."""
        if self.since is None:
            return f"The server at {self.address} has not replied."
        gone = now - self.since
        what = self._what(f" for {gone:.1f} s" if gone >= _WORTH_TELLING else "", lost="no connection")
        return f"{what[0].upper()}{what[1:]}.{self._hint()}"

    def _what(self, how_long: str = "", *, lost: str = "lost connection") -> str:
        if self.answers:
            return f"the server at {self.address} has not been able to work{how_long}: {self.cause}"
        return f"{lost if self.stood else 'could not connect'} to {self.address}{how_long}: {self.cause}"

    def _hint(self) -> str:
        return f" {self.remedy}" if self.remedy else ""


# `Transport`: drives an open, encrypted and authenticated connection without blocking.
#
# Here: sending as much as the socket accepts, keeping the rest, and reading, also through TLS. Not here: the meaning of the
# bytes (`session`), opening connections (`opening`), waiting (the drivers).


_READ: Final = 64 * 1024
_READ_AT_ONCE: Final = 1024 * 1024
"""Bytes that are read in one turn of the loop, so that other tasks have their turn."""

_JOINED: Final = 64 * 1024  # bytes: smaller pieces are sent together
_PIECE: Final = 256 * 1024  # bytes per send

_WAITS = (BlockingIOError, ssl.SSLWantReadError)
_CLOSED = "Connection closed by server."


class Transport:
    """The socket of one connection. All methods belong to the driver's loop.

    Attributes:
        wire: the connection.
        watch: how the driver waits for its socket.

    Args:
        wire: the connection; no other code may use it from now on.
        driver: waits for the socket.
        readable: called when the socket has input; calls `read`.
        progress: called after a part of the remaining bytes was sent, or with the reason if the connection was lost.
    """

    def __init__(
        self,
        wire: Wire,
        driver: Driver,
        readable: Callable[[], object],
        progress: Callable[[ConnectionLost | None], object],
    ) -> None:
        self.wire: Wire = wire
        self._socket: socket.socket = wire.hand_over()
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._out: deque[bytes | memoryview] = deque()
        self._driver = driver
        self._readable = readable
        self._progress = progress
        self._closed = False
        self.watch: Watch = driver.watch(self._socket, readable, self._writable)

    def send(self, pieces: list[bytes]) -> None:
        """Send bytes, and keep those that the socket does not accept yet. Raises `ConnectionLost`."""
        self._out += pieces if len(pieces) == 1 and len(pieces[0]) <= _PIECE else _sendable(pieces)
        if not self.watch.wants_write:
            self._flush()

    def _flush(self) -> None:
        out, send = self._out, self._socket.send
        try:
            while out:
                piece = out[0]
                sent = send(piece)
                if sent == len(piece):
                    del out[0]
                else:
                    out[0] = memoryview(piece)[sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            out.clear()
            self.watch.want_write(False)
            raise as_connection_lost(error) from error
        if bool(out) != self.watch.wants_write:
            self.watch.want_write(bool(out))

    def _writable(self) -> None:
        try:
            self._flush()
        except ConnectionLost as lost:
            self._progress(lost)
        else:
            self._progress(None)

    def read(self, feed: Callable[[bytes], object]) -> int:
        """Read the input, and pass it on in pieces; return how many bytes there were. Raises `ConnectionLost`."""
        size = 0
        receive, closed = self._socket.recv, False
        try:
            while size < _READ_AT_ONCE:
                data = receive(_READ)
                if not data:
                    closed = True
                    break
                feed(data)
                read = len(data)
                size += read
                if read < _READ and not self._is_tls:  # TLS may have decrypted more than it returned
                    break
        except _WAITS:
            pass
        except ssl.SSLWantWriteError:
            self.watch.want_write(True)
        except OSError as error:
            if not size:
                raise as_connection_lost(error) from error
        if closed and not size:
            raise ConnectionLost(_CLOSED)
        if size >= _READ_AT_ONCE and self._is_tls:  # decrypted data does not make the socket readable
            self._driver.soon(self._readable)
        return size

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self.watch.close()
            self.wire.close()

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket; the parent continues to use the connection."""
        self._closed = True
        self.wire.abandon()


def _sendable(pieces: list[bytes]) -> list[bytes | memoryview]:
    """Return few pieces of moderate size: small ones joined (a send each would be slow), large ones cut without a copy."""
    if sum(map(len, pieces)) <= _JOINED:
        return [b"".join(pieces)]
    out: list[bytes | memoryview] = []
    small: list[bytes] = []
    waiting = 0
    for piece in pieces:
        if waiting + len(piece) > _JOINED:
            out.append(b"".join(small))
            small, waiting = [], 0
        if len(piece) <= _JOINED:
            small.append(piece)
            waiting += len(piece)
        else:
            view = memoryview(piece)
            out += [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
    out.append(b"".join(small))
    return out


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
    """Callers of ``wait_ready``.

    Attributes:
        waiting: each with its deadline (monotonic).
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.waiting: list[tuple[Waiter, float]] = []

    def add(self, waiter: Waiter, deadline: float) -> None:
        """Add a caller that waits until the deadline (monotonic)."""
        self.waiting.append((waiter, deadline))

    def take(self) -> list[tuple[Waiter, float]]:
        """Remove and return all callers."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def take_late(self, now: float) -> list[Waiter]:
        """Remove and return the callers whose deadline has passed."""
        late = [waiter for waiter, deadline in self.waiting if deadline <= now]
        if late:
            self.waiting = [each for each in self.waiting if each[1] > now]
        return late

    def tell(self, error: WorqrError | None) -> None:
        """Settle all callers; without an error, a connection is open."""
        settle_soon(self._driver, [waiter for waiter, _ in self.take()], error)
