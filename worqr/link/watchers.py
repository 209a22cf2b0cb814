"""The listeners for lost and restored servers, which get as events what the log gets as lines.

The link calls `lost` and `back` in its loop or in one of its threads. A listener must return at once, as `Driver.post` does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

Change = tuple[Literal["lost", "back"], str, str, float]
"""``lost`` or ``back``, the server's address without its password, why it was lost, and for how many seconds."""


class Watchers:
    """The listeners of one link, and its lost servers by outage. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: dict[int, tuple[str, str, float]] = {}
        self._listeners: list[Callable[[Change], None]] = []

    def add(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` at each change from now on, and first for the servers that are lost already."""
        with self._lock:
            for server, cause, since in self._lost.values():
                listener(("lost", server, cause, time.monotonic() - since))
            self._listeners.append(listener)

    def remove(self, listener: Callable[[Change], None]) -> None:
        """Remove `listener`."""
        with self._lock:
            self._listeners.remove(listener)

    def lost(self, outage: int, server: str, cause: str) -> None:
        """The server cannot be used. `outage` distinguishes it from the link's other servers."""
        with self._lock:
            self._lost[outage] = server, cause, time.monotonic()
            self._tell(("lost", server, cause, 0.0))

    def back(self, outage: int) -> None:
        """The server can be used again, or is no longer needed. Does nothing if the server was not lost."""
        with self._lock:
            known = self._lost.pop(outage, None)
            if known is not None:
                server, cause, since = known
                self._tell(("back", server, cause, time.monotonic() - since))

    def _tell(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)
