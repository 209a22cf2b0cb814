"""`Scheduler`: how many units of work a peer holds at the same time, and which queue gets the next free unit.

All consumers of a peer share one `Scheduler`. A `Share` is the part of it that belongs to one consumer. A `Pool` is a second
limit (threads, processes) that some consumers share. Not here: requests to the server (`consumer`), and how "auto" finds its
number (`adaptive_concurrency`).

Consumers that could use more units than they have are *contenders*. Free units go to them in turns. The virtual time of a
consumer is the number of units that it was given, divided by its priority. The consumer with the least virtual time is next; if
it is equal, the higher priority is. So in the long run, each consumer gets units in proportion to its priority.

While there are contenders, no consumer exceeds its fair part: its priority divided by the sum of theirs, but at least one run.
Therefore long runs of one queue do not use up all units. Units that remain then may go to any consumer. A consumer whose last
runs all ended within `BRIEF` may use all free units in its turn. The others wait only briefly, and large batches cost less. If a
large run does not fit, smaller runs may bypass it `PATIENCE` times. After that, freed units are reserved for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from math import ceil
from time import monotonic
from typing import Final, Literal, Protocol

from trio_util import RepeatedEvent

from worqr.peer.claim_request import ClaimRequest
from worqr.peer.run_sizes import AUTO_MAX, check_run_fits

BRIEF: Final = 0.05
"""Seconds. A queue whose runs end within this time may use all free units in its turn."""
PATIENCE: Final = 10
"""How often smaller runs may bypass a run that needs more units than are free."""
NEVER_FREE: Final = 1 << 40  # units that a quiet peer reserves: none is free, at no cost where units are counted
AUTO_START: Final = 10
"""The first value of "auto"."""


class Pool:
    """A limit on the number of runs, in addition to units: threads, processes, or the concurrency of a handler. Changed only in
    the loop.

    Only `Scheduler` writes `taken`. Code that raises `limit` calls `Scheduler.dispatch_soon`.
    """

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.taken: int = 0

    @property
    def room(self) -> int:
        """How many more runs may begin. Claims that were requested already count as runs."""
        return self.limit - self.taken


class Share:
    """The part of a `Scheduler` that belongs to one consumer. The first four are set once; the scheduler alone writes the rest.

    Attributes:
        size: units that each of its runs takes.
        priority: its weight among the contenders; the shards of a queue share the queue's.
        pool: the second limit of its runs.
        limit: the third limit, which is the handler's own, and which all shards of its queue share.
        virtual_time: units it was given, divided by its priority; the consumer with the least is next.
        times_bypassed: how often other consumers bypassed it while it did not fit.
        short_runs: none of its runs is active, and the last ones all ended within `BRIEF`.
        held: its claims that hold units, and the claims that it is requesting.
        busy_since: when its oldest active run began after a pause.
        released: claims whose units were freed early, and whether their place in the pool was freed too.
    """

    __slots__ = (
        "busy_since",
        "held",
        "limit",
        "pool",
        "priority",
        "released",
        "short_runs",
        "size",
        "times_bypassed",
        "virtual_time",
    )

    def __init__(
        self, size: int = 1, priority: float = 100, pool: Pool | None = None, limit: Pool | None = None
    ) -> None:
        self.size: int = size
        self.priority: float = priority
        self.pool: Pool | None = pool
        self.limit: Pool | None = limit
        self.virtual_time: float = 0.0
        self.times_bypassed: int = 0
        self.short_runs: bool = False
        self.held: int = 0
        self.busy_since: float = 0.0
        self.released: dict[int, bool] = {}


class Contender(Protocol):
    """The part of a consumer that `Scheduler` uses.

    Attributes:
        running: its claims.
    """

    @property
    def queue(self) -> str: ...
    @property
    def share(self) -> Share: ...
    @property
    def request(self) -> ClaimRequest: ...
    @property
    def running(self) -> Sized: ...

    def wanted(self) -> int:
        """Return how many more claims it would take now, beyond those that it has or requests."""
        ...

    def send_request(self, wanted: int) -> None: ...
    def forward_wakeup(self) -> None: ...


class Scheduler:
    """The units of one peer, and how they are shared out. Changed only in the loop.

    Attributes:
        concurrency: units that may be held at once. If it falls, tasks that run already are not affected.
        auto: `adaptive_concurrency` chooses the concurrency.
        quiet: no task is claimed until `resume`.
        used: units that are in use.
        peak: the most that were in use since `reset_peak`.
        reported_full: by queue, the detector that logged that a handler waits for a job of this queue which cannot run.
        dispatch_soon: called when units have become free, for one `dispatch` in this turn of the loop.
    """

    def __init__(self, concurrency: int | Literal["auto"]) -> None:
        self.concurrency: int = AUTO_START if concurrency == "auto" else concurrency
        self.auto: bool = concurrency == "auto"
        self.quiet: bool = False
        self.used: int = 0
        self.peak: int = 0
        self.reported_full: dict[str, object] = {}
        self.dispatch_soon: Callable[[], None] = self.dispatch
        self._reserved = 0
        self._virtual_clock = 0.0
        self._consumers: list[Contender] = []
        self._auto_chosen = RepeatedEvent()

    def dispatch_with(self, dispatch_soon: Callable[[], None]) -> None:
        """Set `dispatch_soon`."""
        self.dispatch_soon = dispatch_soon

    # How many units there are

    @property
    def room(self) -> int:
        """How many more units could be claimed now. Units for claims that were requested already do not count as free."""
        return self.concurrency - self.used - self._reserved

    @property
    def running(self) -> int:
        """How many claims are held. From any thread."""
        return sum([len(consumer.running) for consumer in tuple(self._consumers)])

    @property
    def largest_run(self) -> int:
        """The size of the largest run that must fit."""
        return max([consumer.share.size for consumer in self._consumers], default=1)

    @property
    def is_limiting(self) -> bool:
        """A consumer would take more now if there were more units."""
        return not self.quiet and any(self.room < consumer.share.size for consumer in self._contenders())

    def is_full_for(self, queue: str) -> bool:
        """Return True if `queue` is served here and one more of its runs finds no free slot now. From any thread."""
        here = [consumer.share for consumer in tuple(self._consumers) if consumer.queue == queue]
        return bool(here) and not any(
            self.room >= share.size and all(pool.room > 0 for pool in (share.pool, share.limit) if pool is not None)
            for share in here
        )

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Set the concurrency to `n` units; "auto" starts from the present number. Tasks that run already are not affected.

        Raises:
            UsageError: a queue is served whose runs are larger.
        """
        if n == "auto":
            self.auto = True
            self._auto_chosen.set()
            self.resize(min(self.concurrency, AUTO_MAX))
            return
        self.check_concurrency(n)
        self.auto = False
        self.resize(n)

    def check_concurrency(self, n: int | Literal["auto"]) -> None:
        """Raise UsageError if a queue is served whose runs are larger than `n` units. From any thread."""
        for consumer in tuple(self._consumers):
            check_run_fits(consumer.queue, consumer.share.size, n)

    async def wait_auto(self) -> None:
        """Wait until the concurrency is ``"auto"``."""
        while not self.auto:
            await self._auto_chosen.wait()

    def resize(self, n: int) -> None:
        """Set `n` units, but no fewer than the largest run takes."""
        before, self.concurrency = self.concurrency, max(n, self.largest_run)
        if self.concurrency > before:
            self.dispatch_soon()

    def be_quiet(self) -> None:
        """Claim nothing more until `resume`. Running tasks continue, and wake-ups are forwarded to other workers."""
        self._reserved += 0 if self.quiet else NEVER_FREE
        self.quiet = True
        self.dispatch_soon()

    def resume(self) -> None:
        """Claim tasks again after `be_quiet`."""
        self._reserved -= NEVER_FREE if self.quiet else 0
        self.quiet = False
        self.dispatch_soon()

    def reset_peak(self) -> None:
        """Measure `peak` from now on."""
        self.peak = self.used

    def check_fits(self, queue: str, size: int) -> None:
        """Raise UsageError if a run of `size` units of `queue` would never fit."""
        check_run_fits(queue, size, "auto" if self.auto else self.concurrency)

    # The consumers, and what they hold

    def add(self, consumer: Contender) -> None:
        """Add a consumer. Raise UsageError if its runs would never fit."""
        self.check_fits(consumer.queue, consumer.share.size)
        self._consumers.append(consumer)
        self.resize(self.concurrency)

    def remove(self, consumer: Contender) -> None:
        """Remove a consumer that has left its queue."""
        self._consumers.remove(consumer)

    def begin_wanting(self, share: Share) -> None:
        """Note that its consumer has a reason to request tasks again. Time in which it requested none gives it no precedence."""
        share.virtual_time = max(share.virtual_time, self._virtual_clock)
        share.times_bypassed = 0

    def reserve(self, share: Share, n: int) -> None:
        """Note that `n` more claims are being requested; a negative number ends a request."""
        self._reserved += n * share.size
        share.held += n
        if share.pool is not None:
            share.pool.taken += n
        if share.limit is not None:
            share.limit.taken += n

    def take(self, share: Share, n: int, *, first: bool) -> None:
        """Note that `n` more claims are held. `first`: nothing ran there before."""
        if first:
            share.busy_since = monotonic()
        share.short_runs = False
        share.held += n
        units = n * share.size
        share.virtual_time += units / share.priority
        self.used += units
        if self.used > self.peak:
            self.peak = self.used
        if share.pool is not None:
            share.pool.taken += n
        if share.limit is not None:
            share.limit.taken += n

    def release(self, share: Share, fence: int, last: bool) -> None:
        """Note that a claim is not held any more; what `release_early` has freed stays free. `last`: nothing runs there any
        more.
        """
        pool_is_free = share.released.pop(fence, None) if share.released else None
        if pool_is_free is None:
            self.used -= share.size
            share.held -= 1
            if share.limit is not None:
                share.limit.taken -= 1
        if share.pool is not None and not pool_is_free:
            share.pool.taken -= 1
        if last:
            share.short_runs = monotonic() - share.busy_since < BRIEF

    def release_early(self, share: Share, fence: int, *, place: bool) -> None:
        """Free the units of a claim that is still held, and its place under the handler's limit. May be called twice.

        Args:
            share: of its consumer.
            fence: the claim.
            place: free its place in the pool too.
        """
        if fence not in share.released:
            share.released[fence] = False
            self.used -= share.size
            share.held -= 1
            if share.limit is not None:
                share.limit.taken -= 1
        if place and not share.released[fence]:
            share.released[fence] = True
            if share.pool is not None:
                share.pool.taken -= 1
        self.dispatch_soon()

    # Sharing it out

    def dispatch(self) -> None:
        """Let the consumers request tasks for the free units, then forward wake-ups for which no unit is free."""
        if self.room > 0:
            contenders = self._contenders()
            if len(contenders) == 1:
                if not contenders[0].request.in_flight:
                    self._grant(contenders[0], self._fits(contenders[0].share))
            elif contenders:
                self._share_out(contenders)
        for consumer in self._consumers:
            if consumer.request.wakeup_pending:
                consumer.forward_wakeup()

    def _contenders(self) -> list[Contender]:
        return [
            each
            for each in self._consumers
            if each.wanted() > 0 and (each.share.pool is None or each.share.pool.room > 0 or each.request.in_flight)
        ]

    def _fits(self, share: Share) -> int:
        """Return how many runs of this share fit."""
        fits = self.room // share.size
        return fits if share.pool is None else min(fits, share.pool.room)

    def _share_out(self, contenders: list[Contender]) -> None:
        for share in [each.share for each in contenders]:
            # a consumer that waited long catches up by one round of the units at most
            share.virtual_time = max(share.virtual_time, self._virtual_clock - self.concurrency / share.priority)
        contenders.sort(key=_order_of)
        self._serve_in_turn(contenders, bounded=True)
        if self.room > 0 and not any(each.request.in_flight and each.wanted() > 0 for each in contenders):
            self._serve_in_turn([each for each in contenders if each.wanted() > 0], bounded=False)

    def _serve_in_turn(self, contenders: Sequence[Contender], *, bounded: bool) -> None:
        """Give each contender one turn; with `bounded`, within its fair part of the concurrency."""
        weights: Mapping[Pool | None, float] = {}
        waiting: list[Share] = []
        for consumer in contenders:
            if self.room <= 0:
                break
            if consumer.request.in_flight:
                continue
            share, most = consumer.share, self.concurrency
            if bounded and not share.short_runs:
                weights = weights or _sum_priorities(contenders)
                most = self._fair_part(share, weights) - share.held
            fits = min(self._fits(share), most)
            if fits > 0:
                self._grant(consumer, fits)
                for other in waiting:
                    other.times_bypassed += 1
            elif most > 0 and self.room < share.size:
                if share.times_bypassed >= PATIENCE:
                    break
                waiting.append(share)

    def _fair_part(self, share: Share, weights: Mapping[Pool | None, float]) -> int:
        """Return how many claims it may have while all contenders want more; at least one."""
        part = ceil(self.concurrency * share.priority / weights[None] / share.size)
        if share.pool is not None:
            part = min(part, ceil(share.pool.limit * share.priority / weights[share.pool]))
        return part

    def _grant(self, consumer: Contender, fits: int) -> None:
        wanted = min(fits, consumer.wanted())
        if wanted > 0:
            share = consumer.share
            self._virtual_clock = max(self._virtual_clock, share.virtual_time)
            share.times_bypassed = 0
            consumer.send_request(wanted)


def _sum_priorities(contenders: Sequence[Contender]) -> Mapping[Pool | None, float]:
    """Return the sum of the priorities: under None of all contenders, under each pool of those that share it."""
    weights: defaultdict[Pool | None, float] = defaultdict(float)
    for share in [each.share for each in contenders]:
        weights[None] += share.priority
        if share.pool is not None:
            weights[share.pool] += share.priority
    return weights


def _order_of(consumer: Contender) -> tuple[float, float]:
    return consumer.share.virtual_time, -consumer.share.priority
