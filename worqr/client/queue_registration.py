"""`NotedQueues`: when a producer stores the names of its queues, for `mesh.queues()`. Pure, except for the clock."""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import Final

from worqr import ops

MANY_NAMES: Final = 10_000
"""Names that one connection remembers. A program that uses more queues stores their names more often."""


class NotedQueues:
    """Decides when the name of a queue is noted in the server: at its first use, then every NOTE_EVERY seconds while it is used.

    From any thread.

    Attributes:
        until: when each name must be stored again, on the monotonic clock, the earliest first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.until)

    def is_due(self, queue: str) -> bool:
        """Return True if the name is to be noted now; it counts as noted then."""
        now = time.monotonic()
        if now < self.until.get(queue, now):
            return False
        with self._lock:
            self.until.pop(queue, None)
            self.until[queue] = now + ops.NOTE_EVERY
            for oldest in list(islice(self.until, 2)):  # each new name removes up to two old ones
                if self.until[oldest] <= now or len(self.until) > MANY_NAMES:
                    del self.until[oldest]
        return True

    def forget(self, queue: str) -> None:
        """Let the next use store the name again, because the server did not store it."""
        with self._lock:
            self.until.pop(queue, None)
