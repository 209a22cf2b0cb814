"""`Leader`: the chores of the mesh, while this peer holds the lease. Here: the checks of workers.

Every half second the leader reads the keepalive keys; less often while it is the only worker. A worker is dead when its key
is missing at two checks at least 1.25 s apart. It is also dead when its heartbeat has not changed for nine keepalives, because
the server's clock may have jumped. After a reconnect of the leader, or a change of the server, no worker is declared dead for a
keepalive. In that time every worker can send a heartbeat. If the connection of a leader keeps breaking, its checks prove nothing.
After some time it gives up the lease, so that another peer can lead.

Not here: `Lease`; `FailureDetector`, which evaluates a check; `Sweeper`, which gives back the claims of dead workers; `Scanner`,
which reads the queues; `HistorySampler`, which stores their history; `DueJobPromoter`, which enqueues due jobs. Each of these has
a task of its own, so no chore delays a check.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.client.outbox_relay import relay_and_check
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys, keys_at
from worqr.link import Link, Subscription
from worqr.log_events import emit
from worqr.ops import WorkerHeartbeats
from worqr.peer.error_throttle import next_aligned_time, sleep_aligned
from worqr.peer.leader.chore import Chore, Lease
from worqr.peer.leader.scanner import SCAN_EVERY, Scanner, Sweeper
from worqr.peer.options import HISTORY_QUEUES
from worqr.peer.session import LEASE, ignore_outcome
from worqr.stored_values import as_bytes, exact, whole

# `DueJobPromoter`: the leading peer enqueues jobs when they are due, and has the messages of queues about batches delivered.
#
# It sleeps until the earliest known due time. Due times come from scans, from each promotion, and from hints: a script
# publishes a hint when a job becomes the earliest of its queue. The server's clock decides whether a job is due. If the leader
# asks too early, the job stays where it is, and the reply has the remaining time.


# `OutboxRelay`: the leader delivers what queues have to tell each other about batches, and checks batches.
#
# The promotion of a queue says that it has messages, or batches whose check is due. A script that writes a message tells the
# leader, and each scan finds what was missed. Queues are served side by side, each by one task. What a leader does not finish,
# the next one does. How a message is delivered is in `worqr.client.outbox_relay`.


logger: logging.Logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds after which messages that could not be delivered are tried again."""
QUEUES_AT_ONCE = 20


class OutboxRelay(Chore):
    """Relays messages while this peer leads. Changed only in the loop."""

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, promoter: DueJobPromoter) -> None:
        super().__init__(link, keys, lease, logger)
        self._promoter = promoter
        self._todo: set[str] = set()
        self._under_way: set[str] = set()
        self._more = trio.Event()

    def request(self, queue: str) -> None:
        """Relay the messages of `queue`, and check its batches, soon."""
        self._todo.add(queue)
        self._more.set()

    async def relay_forever(self) -> None:
        """Relay the messages of the requested queues."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._more.wait()
                self._more = trio.Event()
                free = QUEUES_AT_ONCE - len(self._under_way)
                for queue in sorted(self._todo - self._under_way)[: max(0, free)]:
                    self._todo.discard(queue)
                    self._under_way.add(queue)
                    nursery.start_soon(self._relay, queue)

    async def _relay(self, queue: str) -> None:
        try:
            if self._lease.held:
                self._tell_old(queue, await relay_and_check(self._ask_queue, self._keys.prefix, self._queue(queue)))
        except Unavailable as error:
            text = "messages of queue %(queue)r are to be delivered again: %(error)s"
            emit(logger, "relay", text, queue=queue, error=str(error))
            self._promoter.expect(queue, RETRY_AFTER)
        except WorqrError as error:
            text = "messages of queue %(queue)r about batches cannot be delivered, trying again: %(error)s"
            self._throttle.error(queue, "relay", text, queue=queue, error=str(error))
            self._promoter.expect(queue, RETRY_AFTER)
        finally:
            self._under_way.discard(queue)
            self._more.set()

    def _tell_old(self, queue: str, topics: set[str]) -> None:
        """Log that messages of an earlier form are in the outbox; else, that the queue has no error any more."""
        if not topics:
            self._throttle.resolve(queue)
            return
        text = (
            "messages in the outbox of queue %(queue)r have the form of an earlier version of worqr, which carries a task of "
            "another queue. Nothing delivers them (%(count)d): enqueue the tasks yourself if you trust them, then HDEL %(error)s"
        )
        some = ", ".join(sorted(topics)[:3])
        self._throttle.error(queue, "relay", text, count=len(topics), queue=queue, error=some)


AT_MOST_EVERY = 0.005
"""Seconds between two promotions of one queue. Jobs that become due in that time are promoted together."""
"""Seconds after which a promotion that failed is tried again."""


class DueJobPromoter(Chore):
    """Promotes jobs at the due times that this peer has learned while it leads. Changed only in the loop."""

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease) -> None:
        super().__init__(link, keys, lease, logger)
        self._due: dict[str, float] = {}
        self._earlier = RepeatedEvent()
        self._subscription: Subscription | None = None
        self.relay: OutboxRelay = OutboxRelay(link, keys, lease, self)

    def begin(self, missed: Callable[[], None]) -> None:
        """Listen for hints, because this peer leads now. Earlier hints do not matter, because `missed` requests a scan."""
        if self._subscription is None:
            self._subscription = self._link.subscriptions.open([self._keys.due_channel], self._on_hint, missed)

    def end(self) -> None:
        """Stop listening, because another peer leads."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._due.clear()

    def _on_hint(self, _channel: str, message: bytes) -> None:
        ms, _, base = exact(message).partition(" ")
        within = whole(ms)
        if within is not None and base.startswith(f"{self._keys.prefix}:{{"):
            self.expect(keys_at(self._keys.prefix, base).name, within / 1000)

    def expect(self, queue: str, within: float) -> None:
        """Note that a job of `queue` is due in `within` seconds."""
        when = trio.current_time() + within
        if when < self._due.get(queue, math.inf):
            self._due[queue] = when
            self._earlier.set()

    async def promote_forever(self) -> None:
        """Promote the jobs of a queue when one of them is due."""
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._earlier.wait()
                continue
            if self._lease.held:
                await self.promote_once()
            else:
                self._due.clear()

    async def promote_once(self) -> None:
        """Promote the jobs that are due by now, all queues at once."""
        now = trio.current_time()
        async with trio.open_nursery() as nursery:
            for queue, when in tuple(self._due.items()):
                if when <= now:
                    del self._due[queue]
                    nursery.start_soon(partial(self._promote, queue))

    async def _promote(self, queue: str) -> None:
        try:
            found = await self._ask(ops.promote_due(self._queue(queue)))
        except Unavailable as error:
            emit(logger, "promote_due", "queue %(queue)r: trying again: %(error)s", queue=queue, error=str(error))
            self.expect(queue, RETRY_AFTER)
        except WorqrError as error:
            text = "queue %(queue)r: the server refuses to put scheduled jobs in line, trying again: %(error)s"
            self._throttle.error(queue, "promote_due", text, queue=queue, error=str(error))
            self.expect(queue, RETRY_AFTER)
        else:
            self._throttle.resolve(queue)
            if found.needs_relay:
                self.relay.request(queue)
            if found.next_in_ms is not None:
                self.expect(queue, max(found.next_in_ms / 1000, AT_MOST_EVERY))


# `FailureDetector`: which workers are dead.
#
# Pure: no I/O, and no clock except the times they are given, which are seconds of one monotonic clock.


CHECK_EVERY = 0.5
ALONE_EVERY = 2.5
"""Seconds between two checks while the leader is the only worker, and at most five sixths of a keepalive. So a worker that
registers meanwhile is seen before its first heartbeat can expire, and its death is noticed as soon as that of any other.
"""
MISSING_FOR = 1.25
STALE_KEEPALIVES = 9
"""Keepalives for which a heartbeat must not have changed. The documentation promises ten; a heartbeat and a check take the
tenth.
"""
MAX_CHECK_GAP = 5.0
"""Seconds without a check, because another peer led, after which earlier checks prove nothing."""


@dataclass
class FailureDetector:
    """The results of earlier checks.

    Attributes:
        keepalive: seconds after which a worker without a heartbeat counts as dead.
        inconclusive: the last check came too soon after a reconnect, or after a change of the server, to declare a worker
            dead.
        alone: the last check found one worker, and nothing to recover.
    """

    keepalive: float
    inconclusive: bool = False
    alone: bool = False
    inconclusive_until: float = 0.0
    run_id: str | None = None
    checked_at: float = 0.0
    missing: dict[str, float] = field(default_factory=dict[str, float])
    beats: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])

    def find_dead(self, look: WorkerHeartbeats, now: float, connected_at: float) -> list[tuple[str, bytes | None]]:
        """Return the workers that this check proves dead, each with its last known heartbeat (None: missing)."""
        if now - self.checked_at > MAX_CHECK_GAP:
            self.missing.clear()  # workers that were missing may have sent heartbeats since then
        self.checked_at = now
        if self.run_id is not None and look.run_id != self.run_id:
            self.inconclusive_until = now + self.keepalive
        self.run_id = look.run_id
        self.inconclusive_until = max(self.inconclusive_until, connected_at + self.keepalive)
        self.inconclusive = now < self.inconclusive_until
        dead: list[tuple[str, bytes | None]] = []
        for worker, beat in look.beats.items():
            if beat is None:
                since = self.missing.setdefault(worker, now)
                if not self.inconclusive and now - since >= MISSING_FOR:
                    dead.append((worker, None))
                continue
            self.missing.pop(worker, None)
            last = self.beats.get(worker)
            if last is None or last[0] != beat:
                self.beats[worker] = (beat, now)
            elif (
                beat.startswith(b"RUN") and not self.inconclusive and now - last[1] >= STALE_KEEPALIVES * self.keepalive
            ):
                dead.append((worker, beat))
        for kept in (self.missing, self.beats):
            for worker in kept.keys() - look.beats.keys():
                del kept[worker]
        self.alone = len(look.beats) == 1 and not (self.missing or look.dying or self.inconclusive)
        return dead

    def next_check_in(self, now: float) -> float:
        """Return the seconds until the next check: the usual interval, or less when a worker is about to be proven dead."""
        if self.alone:
            return max(CHECK_EVERY, min(ALONE_EVERY, self.keepalive * 5 / 6))
        due = [since + MISSING_FOR - now for since in self.missing.values()]
        return max(0.0, min([CHECK_EVERY, *(d for d in due if d > 0)]))

    def remember_lease(self, lease: str, since: float) -> None:
        """Take `lease`, a worker id and the number of its heartbeat, as a heartbeat of that worker seen at `since`."""
        worker, _, beat = lease.rpartition(" ")
        if worker:
            self.beats.setdefault(worker, (b"RUN " + as_bytes(beat), since))


__all__ = ["CHECK_EVERY", "MISSING_FOR", "SCAN_EVERY", "Leader"]


ROUND = 2 * LEASE
"""Seconds that a round of a working leader takes at most. A check waits for its reply no longer than a lease."""
FOLLOW_EVERY = 1.0
"""Seconds between two rounds of a peer that does not lead. A blocked loop has no rounds, and its peer must not become leader."""
UNABLE_FOR = 1.5
"""Seconds beyond a keepalive after which a leader whose checks prove nothing gives up the lease. One reconnect takes a keepalive
at most.
"""
DECLINE_LEASE_FOR = 2 * LEASE
"""Seconds for which it does not request the lease after that. It still holds the lease for 2 s, and another peer can take it in
the 2 s that follow.
"""


class Leader(Chore):
    """Runs the leader's chores while this peer holds the lease.

    The heartbeat thread calls `may_request_lease` and `stale_lease`. Everything else runs in the loop.
    """

    def __init__(
        self, link: Link, keys: RegistryKeys, *, keepalive: float, history_queues: int = HISTORY_QUEUES
    ) -> None:
        self.lease: Lease = Lease()
        super().__init__(link, keys, self.lease, logger)
        self._detector = FailureDetector(keepalive)
        self.due_jobs: DueJobPromoter = DueJobPromoter(link, keys, self.lease)
        self.scanner: Scanner = Scanner(link, keys, self.lease, self.due_jobs, history_queues, self._detector.beats)
        self.sweeper: Sweeper = Sweeper(link, keys, self.lease)
        self._round_ended = time.monotonic()
        self._unable_since: float | None = None
        self._stopping = False
        self._idle = trio.Event()
        self._idle.set()

    # The lease

    def on_lease_granted(self, *, until: float, worker: str = "") -> None:
        """Hold the lease until `until`, by CLOCK_BOOTTIME."""
        if not self._lease.may_request:
            return  # the heartbeat was sent before this peer gave up the lease
        if self._lease.take(until):
            emit(logger, "leader", "this worker is the leader of the mesh now")
            self._detector.remember_lease(*self._lease.seen)
            self._unable_since = None
            self.due_jobs.begin(self.scanner.rescan)
            self.scanner.begin()
            self._link.post(ops.note_event(self._keys, "leader", worker=worker), ignore_outcome, patience=LEASE)

    def on_lease_seen(self, lease: str) -> None:
        """Store the lease that the reply to a heartbeat named. It may belong to any peer."""
        self._lease.observe(lease)

    def stale_lease(self) -> str:
        """Return the lease to take from its holder, which does not renew it; '' if there is none. From any thread."""
        return self._lease.stale()

    @property
    def leads(self) -> bool:
        return self._lease.held

    async def wait_leading(self) -> None:
        """Wait until this peer leads."""
        await self._lease.wait_held()

    def may_request_lease(self) -> bool:
        """Return True if this peer may request the lease: its rounds end, and its checks work. From any thread."""
        return self._lease.may_request and time.monotonic() - self._round_ended < ROUND

    # The rounds

    async def lead_forever(self) -> None:
        """Check the workers while this peer leads. Otherwise only record that the loop runs, for `may_request_lease`."""
        while not self._stopping:
            if self.leads:
                self._idle = trio.Event()
                wait = await self._try_check()
                self._idle.set()
                self._round_ended = time.monotonic()
                if wait < CHECK_EVERY:
                    await trio.sleep(wait)
                else:
                    await sleep_aligned(wait)
            else:
                self.due_jobs.end()
                self._round_ended = time.monotonic()
                with trio.move_on_at(next_aligned_time(FOLLOW_EVERY)):
                    await self.wait_leading()

    async def _try_check(self) -> float:
        conclusive = False
        try:
            await self.check_once()
            conclusive = not self._detector.inconclusive
        except Unavailable as error:  # the link has logged it
            text = "the workers were not looked at: %(error)s"
            emit(logger, "leader", text, level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            self._throttle.error("look", "leader", "the workers cannot be looked at: %(error)s", error=str(error))
        else:
            if self._throttle.resolve("look"):
                emit(logger, "leader", "the workers are looked at again")
        self._give_up_lease_unless(conclusive)
        return self._detector.next_check_in(time.monotonic())

    def _give_up_lease_unless(self, conclusive: bool) -> None:
        """Give up the lease if checks were inconclusive for longer than one reconnect explains."""
        now = time.monotonic()
        if conclusive:
            self._unable_since = None
        elif self._unable_since is None:
            self._unable_since = now
        elif now - self._unable_since > self._detector.keepalive + UNABLE_FOR:
            text = "this worker cannot tell which workers are dead, because its connection keeps breaking; another may lead"
            emit(logger, "leader", text)
            self._lease.give_up(DECLINE_LEASE_FOR)
            self._unable_since = None

    async def check_once(self) -> None:
        """Check the workers. Start the recovery of dead ones, and of those whose recovery another leader did not finish."""
        look = await self._ask(ops.look_at_workers(self._keys))
        self.sweeper.recover(self._detector.find_dead(look, time.monotonic(), self._link.connected_at), look.dying)

    async def stop(self) -> None:
        """Start no more chores, and return when those under way have ended. Another leader finishes incomplete recoveries."""
        self._stopping = True
        await self._idle.wait()
        await self.sweeper.stop()
