"""`Measuring`: what gets the peers of a mesh and their runs. `worqr.otel` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from worqr.peer.peer import Peer


class Measuring(Protocol):
    """The measuring of a mesh."""

    def run(self, context: Any, call_next: Callable[[], Awaitable[object]]) -> Awaitable[object]:
        """Run a handler. A middleware: see ``Mesh(middleware=...)``."""
        ...

    def joined(self, peer: Peer) -> AbstractContextManager[object]:
        """Return a context manager around the life of a peer that has joined."""
        ...
