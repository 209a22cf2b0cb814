"""`EndpointWatcher`: a thread that asks servers for addresses, regularly and soon after `invalidate()`.

It has a thread because a heartbeat needs the new address of the primary while the caller's loop is blocked.
Not here: what is asked (`topology`: nodes of a cluster, `sentinel`: Sentinels), and the consequences of a new address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from worqr.errors import Unavailable, WorqrError
from worqr.link.connection import ConnectionLost, Wire, is_unknown_host

# Threads of the link that have connections of their own: the keepalive, and those that ask for addresses.
#
# Here: `ConnectionThread`, which can be ended from another thread, and `WireHolder`, the place of a connection of such a
# thread.


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


class EndpointWatcher:
    """The pace of the questions, and the end of the thread.

    Args:
        name: of the thread.
        look: asks once; must not raise. Returns the seconds to wait in any case, and those to wait further unless an address
            is invalidated.
        holders: returns the connections of the thread.
    """

    def __init__(
        self, name: str, look: Callable[[], tuple[float, float]], holders: Callable[[], Iterable[WireHolder]]
    ) -> None:
        self._look = look
        self._holders = holders
        self._invalidated = threading.Event()
        self._thread = ConnectionThread(name, self._run)
        self.check: Callable[[], None] = self._thread.check

    @property
    def has_ended(self) -> bool:
        return self._thread.ended.is_set()

    def start(self) -> None:
        """Begin to ask. Raises RuntimeError if the system cannot start a thread."""
        self._thread.start()

    def invalidate(self) -> None:
        """An address was wrong: ask soon."""
        self._invalidated.set()

    def close(self) -> None:
        """End the thread."""
        self._thread.end(self._interrupt)

    def poison(self) -> None:
        """In a forked child: the thread does not exist here, and the sockets belong to the parent."""
        self._thread.ended.set()
        for holder in self._holders():
            holder.abandon()

    def _interrupt(self) -> None:
        self._invalidated.set()
        for holder in self._holders():
            holder.interrupt()

    def _run(self) -> None:
        while not self.has_ended:
            self._invalidated.clear()
            pause, longest = self._look()
            self._thread.ended.wait(pause)
            if longest > 0:
                self._invalidated.wait(longest)
        for holder in self._holders():
            holder.close()


def error_of(errors: Sequence[WorqrError]) -> WorqrError:
    """Return why no server could be asked: a refusal if all refuse, because waiting does not help then; else Unavailable."""
    if not errors:
        return Unavailable("the link was closed")
    refusals = [error for error in errors if not isinstance(error, Unavailable)]
    if len(refusals) == len(errors):
        return refusals[0]
    first = next(iter(refusals), None) or min(errors, key=is_unknown_host)  # a name may be wrong only if all are
    error = Unavailable(str(first))
    error.__cause__ = None if refusals else first
    return error
