"""`Scheduler`: how many units of work a peer holds at the same time, and which queue gets the next free unit.

All consumers of a peer share one `Scheduler`. A `Share` is the part of it that belongs to one consumer. A `Pool` is a second
limit (threads, processes) that some consumers share. Not here: requests to the server (`consumer`).

Consumers that could use more units than they have are *contenders*. Free units go to them in turns. The virtual time of a
consumer is the number of units that it was given, divided by its priority. The consumer with the least virtual time is next; if
it is equal, the higher priority is. So in the long run, each consumer gets units in proportion to its priority.

While there are contenders, no consumer exceeds its fair part: its priority divided by the sum of theirs, but at least one run.
Therefore long runs of one queue do not use up all units. Units that remain then may go to any consumer. A consumer whose last
runs all ended within `BRIEF` may use all free units in its turn. The others wait only briefly, and large batches cost less. If a
large run does not fit, smaller runs may bypass it `PATIENCE` times. After that, freed units are reserved for it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio
from trio_util import RepeatedEvent

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.run import current_run

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer


# Whether the runs of a queue fit into the concurrency of a peer.


AUTO_MAX: Final = 1000
"""The largest concurrency that "auto" chooses."""


def check_run_fits(queue: str, size: int, concurrency: int | Literal["auto"]) -> None:
    """Raise UsageError if a run of `size` units of `queue` would never fit."""
    if concurrency == "auto":
        if size > AUTO_MAX:
            raise UsageError(
                f"queue {queue!r}: a run of size {size} would never find room: concurrency='auto' is at most {AUTO_MAX} units"
            )
    elif size > concurrency:
        raise UsageError(
            f"queue {queue!r}: a run of size {size} would never find room: the concurrency of this peer is {concurrency} units"
        )


# How many cores a process may use, and how many it needs.


class CpuMeter:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._used = time.process_time()
        self._waited = _wait_times()

    def wanted(self) -> float:
        """Return the number of cores that the process has needed since its creation.

        This is the average number of threads that ran, or were ready to run without getting a core. Systems other than Linux do
        not report waiting threads; there, only running threads count.
        """
        waited = sum([wait - self._waited.get(thread, 0) for thread, wait in _wait_times().items()]) / 1e9
        return (time.process_time() - self._used + waited) / (time.monotonic() - self._began)


def _wait_times() -> dict[str, int]:
    """Return for each thread the nanoseconds in which it was ready to run without running."""
    found: dict[str, int] = {}
    threads = Path("/proc/self/task")
    try:
        names = os.listdir(threads)
    except OSError:
        return found
    for name in names:
        words = _read_words(threads / name / "schedstat")  # time on a core, time ready without one, times it ran
        if len(words) == 3:
            found[name] = int(words[1])
    return found


def default_processes(root: Path = Path("/")) -> int:
    """Return the default number of worker processes: the number of cores that this process may use, rounded up."""
    return max(1, math.ceil(usable_cores(root)))


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: its CPU affinity, limited by the quota of its control group."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cpus), *_quotas(root)])


def _quotas(root: Path) -> list[float]:
    """Return the quotas from the files of control groups, versions 2 and 1, where they can be read."""
    found: list[float] = []
    groups, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            folder = groups / path.strip("/")
            for level in [folder, *folder.parents]:
                if level == groups.parent:
                    break
                found += _parse_quota(_read_words(level / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for level in (groups / "cpu" / path.strip("/"), groups / "cpu"):
                found += _parse_quota(
                    _read_words(level / "cpu.cfs_quota_us") + _read_words(level / "cpu.cfs_period_us")
                )
    return found


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").split()
    except OSError:
        return []


def _parse_quota(words: list[str]) -> list[float]:
    """Return the cores of a quota and its period, both in microseconds: ``["150000", "100000"]`` is one and a half cores.

    "max" and -1 are no quota.
    """
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return [int(words[0]) / int(words[1])]
    return []


# `ClaimRequest`: whether a consumer should request tasks, whether a request is under way, and for how many tasks.
#
# Pure: no I/O and no clock. `consumer` sends the requests and reads the replies. `Scheduler` decides which consumer may send
# one.


class RequestState(Enum):
    """The states of a `ClaimRequest`; its docstring has the table."""

    IDLE = "idle"
    WANTED = "wanted"
    IN_FLIGHT = "in flight"
    IN_FLIGHT_AGAIN = "in flight, again afterwards"
    REJOINING = "the end of a hand-off is under way"


_IDLE: Final = RequestState.IDLE
_WANTED: Final = RequestState.WANTED
_IN_FLIGHT: Final = RequestState.IN_FLIGHT
_IN_FLIGHT_AGAIN: Final = RequestState.IN_FLIGHT_AGAIN
_REJOINING: Final = RequestState.REJOINING


class ClaimRequest:
    """At most one start request at a time. A request for 0 tasks forwards a wake-up to another worker.

    ================  ================  =======================  ==============  ==================  ===============
    state             `want`            `send(n)`, `send(0)`     `replied`       `refused`           `discarded`
    ================  ================  =======================  ==============  ==================  ===============
    IDLE              WANTED            -, IN_FLIGHT             -               -                   -
    WANTED            WANTED            IN_FLIGHT, ..._AGAIN     -               -                   -
    IN_FLIGHT (n)     IN_FLIGHT_AGAIN   -                        WANTED if more  IDLE                WANTED
    IN_FLIGHT (0)     IN_FLIGHT_AGAIN   -                        IDLE            IDLE                IDLE
    IN_FLIGHT_AGAIN   IN_FLIGHT_AGAIN   -                        WANTED          IDLE                WANTED
    REJOINING         WANTED            -, IN_FLIGHT             -               -                   -
    ================  ================  =======================  ==============  ==================  ===============

    "more": the reply left tasks behind, or the server did not say so. If not, the same script has registered the worker as
    waiting, and a wake-up will come. A wake-up is pending from `wake` until the next `send`, in every state.

    The end of a hand-off may do what a request would: `rejoin` makes REJOINING of WANTED. `rejoined` makes IDLE of that, or
    WANTED if the worker does not wait. It is no request: another reason to request tasks does not wait for this reply, which is
    then ignored.

    Attributes:
        state: see the table.
        reserved: how many tasks the request that is under way is for.
        wakeup_pending: a wake-up arrived for tasks that were not requested yet.
        recheck_on_reply: check for cancelled and stray claims when the reply has arrived.
        handed: of tasks that came with a wake-up, and that are neither run nor given back yet: by claim, what decides that.
        resting: the next request comes after the handler of such a task, which it would delay.
        rejoins: that a short run of such a task took it off the waiting workers is the only reason to request tasks.
        last_start: the number of the last request.
        workers_waiting: how many workers waited for tasks of this queue when the last reply was made; infinity: it is paused.
    """

    __slots__ = (
        "_endings",
        "_last_handed",
        "_refused",
        "handed",
        "last_start",
        "recheck_on_reply",
        "rejoins",
        "reserved",
        "resting",
        "state",
        "wakeup_pending",
        "workers_waiting",
    )

    def __init__(self) -> None:
        self.state: RequestState = _IDLE
        self.reserved: int = 0
        self.wakeup_pending: bool = False
        self.recheck_on_reply: bool = False
        self.workers_waiting: float = 0
        self.handed: dict[int, Callable[[], None]] = {}
        self.resting: bool = False
        self.rejoins: bool = False
        self.last_start: int = 0
        self._endings = 0
        self._last_handed = 0
        self._refused = 0

    @property
    def in_flight(self) -> bool:
        """A request is under way."""
        return self.state is _IN_FLIGHT or self.state is _IN_FLIGHT_AGAIN

    @property
    def is_wanted(self) -> bool:
        """There is a reason to request tasks, or tasks are being requested."""
        return self.reserved > 0 or self.state is _WANTED or self.state is _IN_FLIGHT_AGAIN

    def want(self) -> bool:
        """Note that there may be tasks. Return True if there was no reason to request any before."""
        self.resting = self.rejoins = False
        if self.state is _IDLE or self.state is _REJOINING:
            self.state = _WANTED
            return True
        if self.state is _IN_FLIGHT:
            self.state = _IN_FLIGHT_AGAIN
            return not self.reserved
        return False

    def wake(self) -> None:
        """Note a wake-up. It is pending until a request has been sent."""
        self.wakeup_pending = True

    def send(self, wanted: int, number: int = 0) -> None:
        """Note that a request of this number for `wanted` tasks is sent now. One for 0 only forwards a wake-up, and does not end
        the reason to request tasks.
        """
        self.state = _IN_FLIGHT_AGAIN if not wanted and self.state is _WANTED else _IN_FLIGHT
        self.reserved = wanted
        self.last_start = number
        self.wakeup_pending = self.rejoins = False

    def shrink(self, wanted: int) -> None:
        """Note that what is under way is for fewer tasks."""
        self.reserved = wanted

    def replied(self, more: bool, workers_waiting: float) -> None:
        """Note that the reply is used. With `more`, request again, because the reply left tasks behind."""
        again = self.state is _IN_FLIGHT_AGAIN or (more and self.reserved > 0)
        self.state = _WANTED if again else _IDLE
        self.reserved = 0
        self.workers_waiting = workers_waiting

    def refused(self) -> None:
        """Note that the server refused the request. The next scan of the leader is a new reason to request tasks."""
        self.state = _IDLE
        self.reserved = 0

    def discarded(self) -> None:
        """Note that the reply is not used, because the registration is over or the queue is being left. The reason to request
        tasks stays.
        """
        self.state = _WANTED if self.is_wanted else _IDLE
        self.reserved = 0

    def receive(self, claim: int) -> bool:
        """Note a task that came with a wake-up. Return False if it came before, or was given back before it came."""
        if claim <= self._last_handed:
            self._refused = claim
            return False
        self._last_handed = claim
        return True

    def keep(self, claim: int, decide: Callable[[], None]) -> None:
        """Keep such a task until `decide` can be called."""
        self.handed[claim] = decide

    def decide(self, claim: int) -> None:
        """Decide what becomes of such a task, unless that was decided before."""
        if decide := self.handed.pop(claim, None):
            decide()

    def rest(self) -> None:
        """Request tasks again when the run of a hand-off has ended, or soon. Any other reason to request ends the rest."""
        self.resting = self.rejoins = True

    def end_rest(self) -> None:
        """Request tasks again, because a run has ended."""
        self.resting = False

    def end_long_rest(self) -> None:
        """Request tasks again, because the run goes on. Meanwhile tasks may have come."""
        self.resting = self.rejoins = False

    def rejoin(self) -> int:
        """Note that the end of a hand-off is sent now, which takes the worker back among those that wait if no task is left.
        Return its number.
        """
        self.state = _REJOINING
        self.rejoins = False
        self._endings += 1
        return self._endings

    def rejoined(self, ending: int, workers_waiting: int) -> None:
        """Note the reply to the end of this number. 0 workers: this one does not wait, so it requests tasks."""
        if self.state is _REJOINING and ending == self._endings:
            self.state = _IDLE if workers_waiting else _WANTED
            self.workers_waiting = workers_waiting

    def gave_back(self, claims: set[int]) -> None:
        """Note that strays go back. The message of one of them may still be under way; then it comes too late.

        If one of them was refused although the server had it, the tokens of the queue have begun anew, and later ones are small.
        """
        newest = max(claims)
        self._last_handed = newest if self._refused in claims else max(self._last_handed, newest)

    def recheck(self) -> None:
        """Check the claims again when the reply under way has arrived: some of them may be cancelled or strays."""
        self.recheck_on_reply = True

    def take_recheck(self) -> bool:
        """Return True, once, if `recheck` was called."""
        recheck, self.recheck_on_reply = self.recheck_on_reply, False
        return recheck


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


class Scheduler:
    """The units of one peer, and how they are shared out. Changed only in the loop.

    Attributes:
        concurrency: units that may be held at once. If it falls, tasks that run already are not affected.
        auto: `adjust_forever` chooses the concurrency.
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
        self._keep_again_at = 0.0  # when a function that waits for permits may keep a unit
        self._reserved = 0
        self._virtual_clock = 0.0
        self._consumers: list[QueueConsumer] = []
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
        return not self.quiet and any(self.room < consumer.share.size for consumer in _contenders(self._consumers))

    def has_others_for(self, share: Share) -> bool:
        """Return True if another consumer than that of `share` would take more tasks."""
        return len(self._consumers) > 1 and any(
            each.share is not share and each.request.state is not _IDLE and each.wanted() > 0
            for each in self._consumers
        )

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

    def may_keep(self, seconds: float) -> bool:
        """Return True if a function that waits for permits may keep a unit now: one at a time, until `kept`, or for `seconds`."""
        now = trio.current_time()
        may = now >= self._keep_again_at
        if may:
            self._keep_again_at = now + seconds
        return may

    def kept(self, pause: float) -> None:
        """A function keeps its unit no more. The next one may in `pause` seconds."""
        self._keep_again_at = trio.current_time() + pause

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

    def add(self, consumer: QueueConsumer) -> None:
        """Add a consumer. Raise UsageError if its runs would never fit."""
        self.check_fits(consumer.queue, consumer.share.size)
        self._consumers.append(consumer)
        self.resize(self.concurrency)

    def remove(self, consumer: QueueConsumer) -> None:
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
        active = [  # after the end of a run, mostly none
            each
            for each in self._consumers
            if each.request.state is not _IDLE or each.request.wakeup_pending or each.wants_while_idle
        ]
        if not active:
            return
        if self.concurrency - self.used - self._reserved > 0:
            contenders = active if len(active) == 1 else _contenders(active)
            if len(contenders) == 1:
                if not contenders[0].request.in_flight:
                    self._grant(contenders[0], self.fits(contenders[0].share))
            elif contenders:
                self._share_out(contenders)
        for consumer in active:
            if consumer.request.wakeup_pending:
                consumer.forward_wakeup()

    def fits(self, share: Share) -> int:
        """Return how many runs of this share fit."""
        fits = self.room // share.size
        return fits if share.pool is None else min(fits, share.pool.room)

    def _share_out(self, contenders: list[QueueConsumer]) -> None:
        for share in [each.share for each in contenders]:
            # a consumer that waited long catches up by one round of the units at most
            share.virtual_time = max(share.virtual_time, self._virtual_clock - self.concurrency / share.priority)
        contenders.sort(key=_order_of)
        self._serve_in_turn(contenders, bounded=True)
        if self.room > 0 and not any(each.request.in_flight and each.wanted() > 0 for each in contenders):
            self._serve_in_turn([each for each in contenders if each.wanted() > 0], bounded=False)

    def _serve_in_turn(self, contenders: Sequence[QueueConsumer], *, bounded: bool) -> None:
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
            fits = min(self.fits(share), most)
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

    def _grant(self, consumer: QueueConsumer, fits: int) -> None:
        wanted = min(fits, consumer.wanted())
        if wanted > 0:
            share = consumer.share
            self._virtual_clock = max(self._virtual_clock, share.virtual_time)
            share.times_bypassed = 0
            consumer.send_request(wanted)


def _contenders(consumers: Iterable[QueueConsumer]) -> list[QueueConsumer]:
    """Return the consumers that want more tasks, and whose pool has room for them."""
    return [
        each
        for each in consumers
        if each.wanted() > 0 and (each.share.pool is None or each.share.pool.room > 0 or each.request.in_flight)
    ]


def _sum_priorities(contenders: Sequence[QueueConsumer]) -> Mapping[Pool | None, float]:
    """Return the sum of the priorities: under None of all contenders, under each pool of those that share it."""
    weights: defaultdict[Pool | None, float] = defaultdict(float)
    for share in [each.share for each in contenders]:
        weights[None] += share.priority
        if share.pool is not None:
            weights[share.pool] += share.priority
    return weights


def _order_of(consumer: QueueConsumer) -> tuple[float, float]:
    return consumer.share.virtual_time, -consumer.share.priority


# `adjust_forever`: adapts the concurrency of a peer with ``concurrency="auto"``, once a second.
#
# `ConcurrencyController` is the rule, without a clock or a loop. The rule has these cases:
#
# * *CPU high*: the process needs 90 % of its cores. CPU time that other programs took from it counts as needed. The concurrency
#   falls by 25 %, but not below the number of cores, because fewer units could not use them.
# * *Lag high*: the loop is 50 ms late on average, because a handler blocks it. The concurrency falls by 25 %, down to 1, whatever
#   the CPU load.
# * *Room*: the process needs less than 75 % of its cores, and the loop is less than 25 ms late. If all units were in use and more
#   were needed, the concurrency rises. It doubles each second until the load was high once. After that it rises by 1, then by 2,
#   4, 8.
# * Otherwise it does not change. It also does not change while the last decision has not taken effect, because longer runs go on.
# * *Unused*: less than half is in use. The concurrency falls by 5 %, down to its first value. So a burst after a quiet hour does
#   not start all at once.
#
# If the loop wakes up later than a thread may hold the interpreter's lock, Python code is the limit. Then the rule counts one
# core, however many the machine has.


ADJUST_EVERY: Final = 1.0
PROBE_EVERY: Final = 0.05
IDLE_EVERY: Final = 0.5
"""Seconds between decisions, and between measurements of the loop's delay, while something runs and while nothing does."""
CPU_HIGH: Final = 0.9
CPU_LOW: Final = 0.75
"""Shares of the cores. From the first one on, the load is too high; below the second one, more runs may start."""
LAG_HIGH: Final = 0.05
LAG_LOW: Final = 0.025
"""Average delay of the loop in seconds. From the first one on, the load is too high; below the second one, more runs may start.
"""
IN_USE: Final = 0.9
"""Share of the concurrency, less a largest run, that counts as fully used."""
OVERLOAD_FACTOR: Final = 0.75
UNUSED_FACTOR: Final = 0.95
"""Factors of the concurrency after a second with too much load, and after a second in which half of it was unused."""


class Sample(msgspec.Struct, frozen=True):
    """The measurements of one second.

    Attributes:
        cpu: cores that this process needed, with all its threads.
        lag: average delay of the loop in seconds.
        peak: the largest number of units that were held at the same time.
        short: more units would have been used.
    """

    cpu: float
    lag: float
    peak: int
    short: bool


class ConcurrencyController:
    """The rule: it turns each sample into the concurrency of the next second.

    Attributes:
        cores: how many the process may use; a fraction if a quota allows less than one.
        concurrency: units, the present one.
    """

    def __init__(self, cores: float, concurrency: int = AUTO_START) -> None:
        self.cores = cores
        self.concurrency: int = concurrency
        self._step = concurrency

    def next_concurrency(self, seen: Sample, least: int = 1) -> int:
        """Return the concurrency from now on.

        Args:
            seen: the sample taken with the present concurrency.
            least: units, the size of the largest run.
        """
        cores = min(self.cores, 1) if seen.lag >= sys.getswitchinterval() else self.cores
        full, late = seen.cpu >= CPU_HIGH * cores, seen.lag >= LAG_HIGH
        roomy = seen.cpu < CPU_LOW * cores and seen.lag < LAG_LOW
        if full or late:
            self._step = 1
            if 0 < seen.peak <= self.concurrency:
                self._shrink(seen.peak * OVERLOAD_FACTOR, 1 if late else ceil(self.cores))
        elif roomy and seen.short and seen.peak > max(0, IN_USE * self.concurrency - least):
            self._step = min(self._step, self.concurrency)
            self.concurrency += self._step
            self._step *= 2
        elif seen.peak < self.concurrency / 2:
            self._shrink(self.concurrency * UNUSED_FACTOR, AUTO_START)
        self.concurrency = min(max(self.concurrency, least), AUTO_MAX)
        return self.concurrency

    def adopt(self, concurrency: int) -> None:
        """Take over a concurrency that was changed since the last sample."""
        self.concurrency = concurrency

    def _shrink(self, wanted: float, least: int) -> None:
        self.concurrency = min(self.concurrency, max(int(wanted), least))


async def adjust_forever(scheduler: Scheduler) -> None:
    """Adjust the concurrency while it is "auto"; sleep while it is a number."""
    while True:
        await scheduler.wait_auto()
        controller = ConcurrencyController(usable_cores(), scheduler.concurrency)
        while scheduler.auto:
            await adjust_once(scheduler, controller)


async def adjust_once(scheduler: Scheduler, controller: ConcurrencyController) -> None:
    """Measure for `ADJUST_EVERY` seconds, and decide; first wait until the last decision has taken effect."""
    with trio.move_on_after(ADJUST_EVERY):
        while scheduler.used > scheduler.concurrency:  # noqa: ASYNC110 - an event would be set by each run
            await trio.sleep(PROBE_EVERY)
    seen = await _measure(scheduler)
    if scheduler.auto:
        controller.adopt(scheduler.concurrency)  # a large run may have raised it since
        scheduler.resize(controller.next_concurrency(seen, scheduler.largest_run))


async def _measure(scheduler: Scheduler) -> Sample:
    scheduler.reset_peak()
    meter = CpuMeter()
    now = trio.current_time()
    end, late, probes, short = now + ADJUST_EVERY, 0.0, 0, False
    while now < end:
        due = now + (PROBE_EVERY if scheduler.peak else IDLE_EVERY)
        await trio.sleep_until(due)
        now = trio.current_time()
        late, probes, short = late + now - due, probes + 1, short or scheduler.is_limiting
    return Sample(meter.wanted(), late / probes, scheduler.peak, short)


# `StarvationDetector`: detects a handler that waits for a job which cannot run, because waiting handlers hold all slots.
#
# A handler keeps its slot while it waits for the result of another job. With a concurrency of 1, that job never gets a slot.


logger: logging.Logger = logging.getLogger(__name__)

CHECK_AFTER: Final = 10.0
"""Seconds that a handler waits before the first check for a slot, and between two checks."""


class StarvationDetector:
    """Watches one call that waits for a job of `queue`.

    Detects something only if the call is in a handler on the loop, on asyncio or in a thread.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._run = current_run.get(None)
        scheduler = getattr(getattr(self._run, "host", None), "scheduler", None)
        # None: no handler, or a handler in a worker process
        self._scheduler = scheduler if isinstance(scheduler, Scheduler) else None
        self._check_at = time.monotonic() + CHECK_AFTER

    def should_check(self) -> bool:
        """Return True if the caller should check the job now: the worker has no slot for it, and nothing was logged."""
        if self._scheduler is None or time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + CHECK_AFTER
        return self._queue not in self._scheduler.reported_full and self._scheduler.is_full_for(self._queue)

    def warn(self, id: str) -> None:
        """Log that the job of this id still waits, once per worker and queue."""
        if self._run is None or self._scheduler is None:
            return
        # setdefault is atomic: calls in other threads may wait for the same queue
        if self._scheduler.reported_full.setdefault(self._queue, self) is not self:
            return
        emit(
            logger,
            "result.no_slot",
            "a handler of queue %(queue)r has waited %(duration)g s for the result of job %(awaited_job)r of queue "
            "%(awaited_queue)r, and this worker has no free slot to run that job. A handler keeps its slot while it waits. "
            "Raise the concurrency of the worker or of the function, or let another worker serve %(awaited_queue)r.",
            queue=self._run.queue,
            duration=CHECK_AFTER,
            awaited_queue=self._queue,
            awaited_job=id,
        )
