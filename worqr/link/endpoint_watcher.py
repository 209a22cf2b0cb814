"""`EndpointWatcher`: a thread that asks servers for addresses, regularly and soon after `invalidate()`.

It has a thread because a heartbeat needs the new address of the primary while the caller's loop is blocked.
Not here: what is asked (`topology`: nodes of a cluster, `sentinel`: Sentinels), and the consequences of a new address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from worqr.errors import Unavailable, WorqrError
from worqr.link.connection_thread import ConnectionThread, WireHolder
from worqr.link.reasons import is_unknown_host


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
