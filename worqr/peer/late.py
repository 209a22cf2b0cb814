"""Serve functions that are declared after their mesh has joined: in a module that is imported late, in a notebook.

`join` serves what is declared when it is entered. Each later declaration tells the peers of the mesh, from whichever thread it
is made in, and each of them serves the new function soon afterwards. A function that is declared anew in place of another one is
not exchanged, because runs of the older one may be under way: that is logged, and the next join serves the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from worqr.errors import WorqrError
from worqr.log_events import emit
from worqr.peer.complaints import Complaints
from worqr.peer.options import Handling, Only

if TYPE_CHECKING:
    from worqr.peer.peer import Peer

logger: logging.Logger = logging.getLogger(__name__)

SETTLE: Final = 0.1
"""Seconds after a declaration, in which its failure handler and more functions are declared."""
AGAIN: Final = 3.0
"""Seconds until the next try to serve a function."""


class Served(Protocol):
    """What is needed of a `Function`."""

    def served(self) -> list[tuple[str, Callable[[Any], object], Handling]]:
        """The queues that a peer serves it from, each with its handler."""
        ...


class Declaring(Protocol):
    """What is needed of a `Mesh`."""

    @property
    def functions(self) -> Mapping[str, Served]:
        """What is declared, by name."""
        ...

    def when_declared(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `tell` after each declaration."""
        ...


@contextmanager
def serving_late(peer: Peer, mesh: Declaring, only: Only, known: Mapping[str, Served]) -> Generator[None]:
    """Serve what is declared on `mesh` for the length of the block, and was not before.

    Args:
        only: the names that this peer may serve.
        known: what was declared before.
    """
    late = _Late(peer, mesh, only, known)
    if peer.spawn(late.serve_forever):
        with mesh.when_declared(late.tell):
            late.tell()  # of what was declared while the peer joined
            yield
    else:
        yield


class _Late:
    """Serves them, for one peer. `tell` is called from any thread, all else in the loop."""

    def __init__(self, peer: Peer, mesh: Declaring, only: Only, known: Mapping[str, Served]) -> None:
        self._peer = peer
        self._mesh = mesh
        self._only = only
        self._known = dict(known)
        self._token = trio.lowlevel.current_trio_token()
        self._news = trio.Event()
        self._missing = False
        self._complaints = Complaints(logger)

    def tell(self) -> None:
        """Something was declared."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._hear, idempotent=True)

    def _hear(self) -> None:
        self._news.set()

    async def serve_forever(self) -> None:
        """Serve what is new, whenever told, until the peer leaves."""
        while not self._peer.leaving:
            with trio.move_on_after(AGAIN if self._missing else inf):
                await self._news.wait()
            self._news = trio.Event()
            await trio.sleep(SETTLE)
            self._missing = False
            for name, function in dict(self._mesh.functions).items():
                if name in self._only and function is not self._known.get(name) and not self._peer.leaving:
                    await self._serve(name, function)

    async def _serve(self, name: str, function: Served) -> None:
        if name in self._known:
            self._known[name] = function
            text = "%(function)r was declared again; this worker runs the older one until it joins again"
            emit(logger, "function.replaced", text, function=name)
            return
        here = {station.queue for station in self._peer.entered_stations()}
        try:
            await self._peer.serve_all(each for each in function.served() if each[0] not in here)
        except WorqrError as error:
            if not self._peer.leaving:
                self._missing = True
                text = "%(function)r, declared after the join, is not served: %(error)s; trying again"
                self._complaints.error(name, "function.unserved", text, function=name, error=error)
            return
        self._known[name] = function
        self._complaints.resolve(name)
        emit(logger, "function.served", "%(function)r, declared after the join, is served now", function=name)
