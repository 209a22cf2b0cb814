"""`ListGatherer`: puts the claims of one list handler together into runs. Pure: no I/O and no clock.

One run at most is *open*: it waits for more claims. The others are *ready*, in the order in which they became so, until units of
the peer are free for them. A task whose earlier run failed, took too long, or ended with its worker is alone in its run. So it
takes no others along more than once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from worqr.peer.list_run import ListItem, ListRun


class ListGatherer:
    """The list runs of one consumer that have not begun. Changed only in the loop.

    Attributes:
        size: how many claims a run takes at most.
        open: the run that waits for more claims; None: there is none.
    """

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.open: ListRun | None = None
        self._ready: deque[ListRun] = deque()

    @property
    def room(self) -> int:
        """How many more claims the open run takes."""
        return 0 if self.open is None else self.size - len(self.open.claimed)

    def add(self, items: Iterable[ListItem]) -> None:
        """Add new claims, in their order: to the open run, or to new ones."""
        run, size = self.open, self.size
        for item in items:
            if item.is_alone:
                self._ready.append(ListRun(item))
                continue
            if run is None:
                run = self.open = ListRun(item)
            else:
                run.add(item)
            if run.unsettled == size:
                self.close()
                run = None

    def close(self) -> None:
        """Add no more claims to the open run: it is ready."""
        if self.open is not None:
            self._ready.append(self.open)
            self.open = None

    def remove(self, item: ListItem) -> None:
        """Remove a claim that was cancelled, and its run if that was its only claim."""
        run = item.run
        assert run is not None
        run.remove(item)
        if not run.claimed:
            if run is self.open:
                self.open = None
            else:
                self._ready.remove(run)

    def without_units(self) -> list[ListRun]:
        """Return the runs for which no units are reserved, the ready ones first."""
        waiting = [run for run in self._ready if not run.has_units]
        return waiting if self.open is None or self.open.has_units else [*waiting, self.open]

    def take_ready(self) -> list[ListRun]:
        """Return the ready runs that have units, once."""
        ready = [run for run in self._ready if run.has_units]
        if ready:
            self._ready = deque(run for run in self._ready if not run.has_units)
        return ready

    def items(self) -> list[ListItem]:
        """Return all claims whose run has not begun."""
        runs = [*self._ready] if self.open is None else [*self._ready, self.open]
        return [item for run in runs for item in run.claimed]
