"""The sockets of plain threads, for which the driving thread waits. Used by `thread_driver`."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from worqr.link.driver import BUG
from worqr.log_events import emit

logger: logging.Logger = logging.getLogger(__name__)


class Reactor:
    """The sockets of a driver. The driving thread calls `wait`; all other methods need the lock."""

    __slots__ = ("_bell", "_listener", "selector")

    def __init__(self) -> None:
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._listener, self._bell = socket.socketpair()
        self._listener.setblocking(False)
        self._bell.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ)

    def wait(self, timeout: float | None) -> list[tuple[ReactorWatch, int]]:
        """Return the ready sockets; none after a timeout or a wake-up."""
        ready: list[tuple[ReactorWatch, int]] = []
        for key, mask in self.selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._listener.recv(4096)
            else:
                ready.append((key.data, mask))
        return ready

    def ring(self) -> None:
        with suppress(OSError):  # the buffer is full, so the thread wakes anyway
            self._bell.send(b"!")

    def close(self) -> None:
        self.selector.close()
        self._listener.close()
        self._bell.close()


class ReactorWatch:
    """A socket that is watched while any thread waits."""

    __slots__ = ("_closed", "_reactor", "_readable", "_socket", "_writable", "wants_write")

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        readable: Callable[[], object],
        writable: Callable[[], object],
    ) -> None:
        self.wants_write: bool = False
        self._reactor = reactor
        self._socket = sock
        self._readable = readable
        self._writable = writable
        self._closed = False
        reactor.selector.register(sock, selectors.EVENT_READ, self)

    def want_write(self, wanted: bool) -> None:
        if wanted != self.wants_write and not self._closed:
            self.wants_write = wanted
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._reactor.selector.modify(self._socket, events, self)
            self._reactor.ring()

    def close(self) -> None:
        if not self._closed:
            self._closed, self.wants_write = True, False
            with suppress(KeyError, ValueError, OSError, RuntimeError):  # the driver was closed first
                self._reactor.selector.unregister(self._socket)

    def ready(self, mask: int) -> None:
        """Handle a socket that is ready, or was ready a moment ago."""
        if mask & selectors.EVENT_WRITE and self.wants_write:
            run_callback(self._writable)
        if mask & selectors.EVENT_READ and not self._closed:
            run_callback(self._readable)


def run_callback(callback: Callable[[], object]) -> None:
    """Run a callback and log its error. A BaseException, for example from a signal handler, propagates."""
    try:
        callback()
    except Exception as error:
        emit(logger, "link.deliver", BUG, exc_info=error)
