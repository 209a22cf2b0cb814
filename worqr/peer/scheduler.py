"""Capacity: how many units of work a peer holds at once, and which queue gets the next free unit.

Here: `Capacity`, shared by all stations of a peer, and `Pool`, a second limit (threads, processes) that some of them share.
Not here: requests to the server (`claiming`), and how "auto" finds its number (`pacing`).

Stations that could use more units than they have are *rivals*. Free units go to them in turns. A station's `turn` is the units
that it was given, each divided by its priority; the station with the least turn is next. So in the long run each gets units in
proportion to its priority; ties go to the higher priority. While there are rivals, no station exceeds its share (its priority
divided by the sum of theirs, but at least one run), so that long runs of one queue do not crowd out the others. Units that are
left then are for any station. A station whose last runs all ended within `BRIEF` may use all free units in its turn: the others
wait only briefly, and large batches cost less.

If a large run does not fit, smaller runs may overtake it `PATIENCE` times. After that, freed units are reserved for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from math import ceil
from typing import Final, Literal, Protocol

from trio_util import AsyncValue

from worqr.errors import UsageError

BRIEF: Final = 0.05
"""Seconds. A queue whose runs end within this time may take a turn with all free units."""
PATIENCE: Final = 10
"""How often smaller runs may overtake a run that needs more units than are free."""
AUTO_START: Final = 10
AUTO_MOST: Final = 1000
"""The first value of "auto", and its maximum."""


class Pool:
    """A limit on runs besides units, one place each: threads, processes, the concurrency of a handler. Changed only in the loop.

    Code that raises `limit` calls `Capacity.offer_soon`.
    """

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.taken: int = 0

    @property
    def room(self) -> int:
        """How many more runs have a place here; places for claims that were requested already are not counted twice."""
        return self.limit - self.taken


class Consumer(Protocol):
    """What `Capacity` sees of a `Station`.

    Attributes:
        size: units that each of its runs takes.
        priority: its weight among its rivals; the shards of a queue share the queue's.
        pool: the second limit of its runs.
        limit: the third limit, which is the handler's own.
        turn: units it was given, divided by its priority; the station with the least is next.
        overtaken: how often other stations overtook it while it did not fit.
        brief: none of its runs is active, and the last ones all ended within `BRIEF`.
        running: its claims.
        asking: a start request is under way.
        owes: a wake-up arrived for tasks that it has not requested yet.
    """

    size: int
    priority: float
    pool: Pool | None
    limit: Pool | None
    turn: float
    overtaken: int
    brief: bool

    @property
    def queue(self) -> str: ...
    @property
    def running(self) -> Sized: ...
    @property
    def asking(self) -> bool: ...
    @property
    def owes(self) -> bool: ...
    @property
    def held(self) -> int:
        """Its claims, and the claims that it is requesting."""
        ...

    def more(self) -> int:
        """How many more claims it would take now, beyond those it has and those it is requesting."""
        ...

    def ask(self, wanted: int) -> None: ...
    def pass_on(self) -> None: ...


class Capacity:
    """The room of one peer, in units. Changed only in the loop.

    Attributes:
        concurrency: units that may be held at once. If it falls, tasks that run already are not affected.
        used: units that are in use. Code that decreases this must call `offer_soon`.
        peak: the most that were in use since this was reset.
    """

    def __init__(self, concurrency: int | Literal["auto"]) -> None:
        self.concurrency: int = AUTO_START if concurrency == "auto" else concurrency
        self._auto = AsyncValue(concurrency == "auto")
        self.used: int = 0
        self.peak: int = 0
        self._reserved = 0
        self._reached = 0.0
        self._stations: list[Consumer] = []
        self.told_full: dict[str, object] = {}
        """Queues for which it was logged that a handler waits for a job there that cannot run; and that handler's queue."""
        self.offer_soon: Callable[[], None] = self.offer

    @property
    def auto(self) -> bool:
        """True while `pacing` chooses the concurrency."""
        return self._auto.value

    @auto.setter
    def auto(self, chosen: bool) -> None:
        self._auto.value = chosen

    @property
    def room(self) -> int:
        """How many more units could be claimed now; units for claims that were requested already are not counted twice."""
        return self.concurrency - self.used - self._reserved

    @property
    def running(self) -> int:
        """How many claims are held; from any thread."""
        return sum([len(station.running) for station in tuple(self._stations)])

    @property
    def least(self) -> int:
        """The size of the largest run that must fit."""
        return max([station.size for station in self._stations], default=1)

    @property
    def short(self) -> bool:
        """A station would take more now if there were more units."""
        return any(self.room < station.size for station in self._rivals())

    def is_full_for(self, queue: str) -> bool:
        """Return True if `queue` is served here and one more of its runs finds no free slot now. From any thread."""
        here = [station for station in tuple(self._stations) if station.queue == queue]
        return bool(here) and not any(
            self.room >= station.size
            and all(pool.room > 0 for pool in (station.pool, station.limit) if pool is not None)
            for station in here
        )

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Set the concurrency to `n` units; "auto" starts from the present number. Tasks that run already are not affected.

        Raises:
            UsageError: a queue is served whose runs are larger.
        """
        if n == "auto":
            self.auto = True
            self.resize(min(self.concurrency, AUTO_MOST))
            return
        self.check_concurrency(n)
        self.auto = False
        self.resize(n)

    def check_concurrency(self, n: int | Literal["auto"]) -> None:
        """UsageError if a queue is served whose runs are larger than `n` units. From any thread."""
        for station in tuple(self._stations):
            _check_fits(station.queue, station.size, n)

    async def wait_auto(self) -> None:
        """Wait until the concurrency is ``"auto"``."""
        await self._auto.wait_value(True)

    def resize(self, n: int) -> None:
        """Set `n` units, but no fewer than the largest run takes."""
        before, self.concurrency = self.concurrency, max(n, self.least)
        if self.concurrency > before:
            self.offer_soon()

    def check_fits(self, queue: str, size: int) -> None:
        """Raise UsageError if a run of `size` units of `queue` would never fit."""
        _check_fits(queue, size, "auto" if self.auto else self.concurrency)

    # Called by the stations

    def add(self, station: Consumer) -> None:
        """Raise UsageError if its runs would never fit."""
        self.check_fits(station.queue, station.size)
        self._stations.append(station)
        self.resize(self.concurrency)

    def remove(self, station: Consumer) -> None:
        self._stations.remove(station)

    def begin_wanting(self, station: Consumer) -> None:
        """`station` has reason to request tasks again. Time in which it wanted none gives it no priority now."""
        station.turn = max(station.turn, self._reached)
        station.overtaken = 0

    def reserve(self, units: int) -> None:
        """`n` units more (or fewer) are requested."""
        self._reserved += units

    def take(self, units: int) -> None:
        """`n` units more are held."""
        self.used += units
        if self.used > self.peak:
            self.peak = self.used

    # Sharing it out

    def offer(self) -> None:
        """Let the stations request tasks for the free units; a wake-up without a free unit is passed on to another worker."""
        if self.room > 0:
            rivals = self._rivals()
            if len(rivals) == 1:
                if not rivals[0].asking:
                    self._grant(rivals[0], self._fits(rivals[0]))
            elif rivals:
                self._share_out(rivals)
        for station in self._stations:
            if station.owes:
                station.pass_on()

    def _rivals(self) -> list[Consumer]:
        return [
            station
            for station in self._stations
            if station.more() > 0 and (station.asking or station.pool is None or station.pool.room > 0)
        ]

    def _fits(self, station: Consumer) -> int:
        """How many of its runs fit."""
        fits = self.room // station.size
        return fits if station.pool is None else min(fits, station.pool.room)

    def _share_out(self, rivals: list[Consumer]) -> None:
        for rival in rivals:  # a station that waited long is owed one round of the units, not all that it missed
            rival.turn = max(rival.turn, self._reached - self.concurrency / rival.priority)
        rivals.sort(key=_turn_of)
        self._serve_in_turn(rivals, bounded=True)
        if self.room > 0 and not any(rival.asking and rival.more() > 0 for rival in rivals):
            self._serve_in_turn([rival for rival in rivals if rival.more() > 0], bounded=False)

    def _serve_in_turn(self, rivals: Sequence[Consumer], *, bounded: bool) -> None:
        """One turn for each rival; `bounded`: within its share."""
        weights: Mapping[Pool | None, float] = {}
        waiting: list[Consumer] = []
        for station in rivals:
            if self.room <= 0:
                break
            if station.asking:
                continue
            share = self.concurrency
            if bounded and not station.brief:
                weights = weights or _weigh(rivals)
                share = self._share(station, weights) - station.held
            fits = min(self._fits(station), share)
            if fits > 0:
                self._grant(station, fits)
                for other in waiting:
                    other.overtaken += 1
            elif share > 0 and self.room < station.size:
                if station.overtaken >= PATIENCE:
                    break
                waiting.append(station)

    def _share(self, station: Consumer, weights: Mapping[Pool | None, float]) -> int:
        """How many claims it may have while all rivals want more; at least one."""
        share = ceil(self.concurrency * station.priority / weights[None] / station.size)
        if station.pool is not None:
            share = min(share, ceil(station.pool.limit * station.priority / weights[station.pool]))
        return share

    def _grant(self, station: Consumer, fits: int) -> None:
        wanted = min(fits, station.more())
        if wanted > 0:
            self._reached = max(self._reached, station.turn)
            station.overtaken = 0
            station.ask(wanted)


def _weigh(rivals: Sequence[Consumer]) -> Mapping[Pool | None, float]:
    """The sum of the rivals' priorities: under None of all of them, under each pool of those that share it."""
    weights: defaultdict[Pool | None, float] = defaultdict(float)
    for rival in rivals:
        weights[None] += rival.priority
        if rival.pool is not None:
            weights[rival.pool] += rival.priority
    return weights


def _turn_of(station: Consumer) -> tuple[float, float]:
    return station.turn, -station.priority


def _check_fits(queue: str, size: int, concurrency: int | Literal["auto"]) -> None:
    if concurrency == "auto":
        if size > AUTO_MOST:
            raise UsageError(
                f"queue {queue!r}: a run of size {size} would never find room: concurrency='auto' is at most {AUTO_MOST} units"
            )
    elif size > concurrency:
        raise UsageError(
            f"queue {queue!r}: a run of size {size} would never find room: the concurrency of this peer is {concurrency} units"
        )
