"""`Transport`: drives an open, encrypted and authenticated connection without blocking.

Here: sending as much as the socket accepts, keeping the rest, and reading, also through TLS. Not here: the meaning of the
bytes (`session`), opening connections (`connection`), waiting (the drivers).
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final

from worqr.link.connection import Wire
from worqr.link.driver import Driver
from worqr.link.server_errors import ConnectionLost, as_connection_lost

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
        self._watch = driver.watch(self._socket, readable, self._writable)

    def send(self, pieces: list[bytes]) -> None:
        """Send bytes, and keep those that the socket does not accept yet. Raises `ConnectionLost`."""
        self._out.extend(_sendable(pieces))
        if not self._watch.wants_write:
            self._flush()

    def _flush(self) -> None:
        out, send = self._out, self._socket.send
        try:
            while out:
                piece = out[0]
                sent = send(piece)
                if sent == len(piece):
                    out.popleft()
                else:
                    out[0] = memoryview(piece)[sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            out.clear()
            self._watch.want_write(False)
            raise as_connection_lost(error) from error
        if bool(out) != self._watch.wants_write:
            self._watch.want_write(bool(out))

    def _writable(self) -> None:
        try:
            self._flush()
        except ConnectionLost as lost:
            self._progress(lost)
        else:
            self._progress(None)

    def read(self) -> list[bytes]:
        """Read and return the input, in pieces; empty: nothing. Raises `ConnectionLost`."""
        pieces: list[bytes] = []
        size = 0
        receive, closed = self._socket.recv, False
        try:
            while size < _READ_AT_ONCE:
                data = receive(_READ)
                if not data:
                    closed = True
                    break
                pieces.append(data)
                size += len(data)
                if len(data) < _READ and not self._is_tls:  # TLS may have decrypted more than it returned
                    break
        except _WAITS:
            pass
        except ssl.SSLWantWriteError:
            self._watch.want_write(True)
        except OSError as error:
            if not pieces:
                raise as_connection_lost(error) from error
        if closed and not pieces:
            raise ConnectionLost(_CLOSED)
        if size >= _READ_AT_ONCE and self._is_tls:  # decrypted data does not make the socket readable
            self._driver.soon(self._readable)
        return pieces

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self._watch.close()
            self.wire.close()

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket; the parent continues to use the connection."""
        self._closed = True
        self.wire.abandon()


def _sendable(pieces: list[bytes]) -> list[bytes | memoryview]:
    """Return few pieces of moderate size: small ones joined (a send each would be slow), large ones cut without a copy."""
    if len(pieces) == 1 and len(pieces[0]) <= _PIECE:
        return list(pieces)
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
