"""Threads of the link that have connections of their own: the keepalive, and those that ask for addresses.

Here: `ConnectionThread`, which can be ended from another thread, and `WireHolder`, the place of a connection of such a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from worqr.errors import WorqrError
from worqr.link.connection import Wire
from worqr.link.server_errors import ConnectionLost

_END_WAIT: Final = 0.2  # seconds that ending waits for the thread; a thread that is connecting takes longer


class WireHolder:
    """The place of one connection. Only its thread opens and closes it.

    Attributes:
        wire: the open connection.
    """

    def __init__(self) -> None:
        self.wire: Wire | None = None

    def hold(self, wire: Wire) -> Wire:
        """Keep a connection that was just opened, and return it."""
        self.wire = wire
        return wire

    def close(self) -> None:
        """Close the connection, if there is one."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()

    def interrupt(self) -> None:
        """From another thread: make a pending read fail at once."""
        wire = self.wire
        if wire is not None:
            wire.interrupt()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.abandon()


class ConnectionThread:
    """A daemon thread that works until it is ended.

    Attributes:
        ended: set when the thread must end.
        refused: why it cannot be used: it exists in the parent process only.
    """

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.ended: threading.Event = threading.Event()
        self.refused: WorqrError | None = None
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Start it. Raises RuntimeError if the system cannot start a thread."""
        if self.refused is not None:
            raise self.refused
        self._thread.start()

    def end(self, interrupt: Callable[[], object]) -> None:
        """End it: `interrupt` wakes it. The thread has ended afterwards, unless it is connecting."""
        self.ended.set()
        interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)

    def check(self) -> None:
        """In the thread, while a server is silent: raise ConnectionLost if it must end."""
        if self.ended.is_set():
            raise ConnectionLost("the link was closed", innocent=True)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the thread does not exist here."""
        self.refused = error
