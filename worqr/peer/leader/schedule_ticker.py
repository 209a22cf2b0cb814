"""`ScheduleTicker`: the leader enqueues the firings of all schedules, including those of other applications.

The registry has all schedules in the order of their next due times. The leader reads only those that are due, at most every 20
ms. For each it decides what to fire (`worqr.cron.due_firings`) and enqueues the firings, those of one queue in batches. Each
firing is fenced on its queue by its nominal time. Then the leader stores the new cursor and the next due time by
compare-and-set. If more are due than one read returns, those whose names begin with the same segment take turns with the
others. If the leader dies in between, or another peer believes that it leads, nothing is enqueued twice. The next leader decides
again on firings that were not stored.

Server clocks jump. docs/reference/schedules.md has what can fire twice and what cannot. The rules are in
`worqr.cron.due_firings`, `fire_schedules` and `rewind_schedules`. The time for which no peer has declared a schedule is not
measured by that clock. Instead, the leaders add up the time for which the mesh was led.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import trio
from msgspec.structs import replace as changed

from worqr import ops
from worqr.client.schedules import StoredCall, fire
from worqr.client.stored_schedules import finish_storing
from worqr.command import in_chunks
from worqr.cron import ON_TIME_MS, Definition, DueFirings, Trigger, at, due_firings, effective
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.keys import QueueKeys, RegistryKeys, shard_of
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_PENDING, DueSchedules, ScheduleRow, Tick
from worqr.peer.error_throttle import REPEAT_AFTER, ErrorThrottle, sleep_aligned
from worqr.peer.leader.chore import Chore, Lease
from worqr.peer.options import PeerSettings
from worqr.peer.session import LEASE, Session, ignore_outcome
from worqr.stored_values import whole
from worqr.tracing import Tracing

# `ScheduleDeclarer`: stores the schedules of an application when its peer joins, and renews them every ten minutes.
#
# Definitions are sent at the join, in pages. Later only names are sent; a definition follows if the registry has lost it. So a
# peer that joined before a deployment does not undo the changes of that deployment.


logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY = 2.0
"""Seconds between two checks for schedules that were declared after the join."""
REDECLARE = 600.0
DECLARE_AGAIN_AFTER = 3.0
"""Seconds until the next try after the server has refused."""
PAGES_AT_ONCE = 4


class ScheduleDeclarer:
    """Keeps the schedules of one peer declared. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        settings: PeerSettings,
        shards_of: Callable[[str], Awaitable[Sequence[QueueKeys]]],
        session: Session,
    ) -> None:
        """After a new registration of `session`, and after a reconnect, all schedules are declared again."""
        self._shards_of = shards_of
        self._session = session
        self._link = link
        self._keys = RegistryKeys(settings.prefix)
        self._declared = settings.schedules
        self._owner = settings.owner
        self._stored: set[str] = set()
        self._declared_as: object = None
        self._renew_at = 0.0
        self._throttle = ErrorThrottle(logger)

    async def declare(self) -> None:
        """Store the schedules that were not declared yet. They replace schedules of the same names."""
        new = [definition for name, definition in self._declared.items() if name not in self._stored]
        self._renew_at = trio.current_time() + REDECLARE
        self._declared_as = self._known_by()
        if new:
            await self._store(new, replace=True)
            self._stored.update(definition.name for definition in new)
            await self._note_queues(new)

    async def declare_forever(self) -> None:
        """Declare new schedules, and renew the others before the registry drops them."""
        while True:
            wait = CHECK_EVERY
            try:
                await self.keep_declared()
            except Unavailable as error:
                emit(logger, "declare_schedules", "the server is away, trying again: %(error)s", error=str(error))
            except WorqrError as error:
                self._throttle.error(
                    "",
                    "declare_schedules",
                    "the server refuses the schedules, trying again: %(error)s",
                    error=str(error),
                )
                wait = DECLARE_AGAIN_AFTER
            await sleep_aligned(wait)

    async def keep_declared(self) -> None:
        """Declare new schedules. Renew the others if it is time, or if the registry may have lost them."""
        if len(self._declared) > len(self._stored):
            await self.declare()
        if not self._stored:
            return
        known_by = self._known_by()
        if known_by != self._declared_as or trio.current_time() >= self._renew_at:
            await self._renew()
            self._renew_at = trio.current_time() + REDECLARE
            self._declared_as = known_by

    def _known_by(self) -> object:
        """What changes when the registry may have lost the schedules, also to a server that took over without them."""
        return (self._session.registration, self._link.connected_at)

    async def _store(self, definitions: list[Definition], *, replace: bool) -> None:
        pages = in_chunks(
            [(definition.name, definition.encode()) for definition in definitions],
            lambda pair: len(pair[1]),
            most=ops.SCHEDULES_AT_ONCE,
            most_bytes=ops.SCHEDULES_BYTES,
        )
        calls = [ops.declare_schedules(self._keys, page, replace=replace, owner=self._owner) for page in pages]
        for start in range(0, len(calls), PAGES_AT_ONCE):
            for held in await self._link.call_all(calls[start : start + PAGES_AT_ONCE]):
                for name in held:
                    text = "schedule %(schedule)r is not declared: a program has stored one of this name; give one another name"
                    self._throttle.error(name, "declare_schedules", text, schedule=name)

    async def _renew(self) -> None:
        names = [name for name in self._declared if name in self._stored]
        missing: list[str] = []
        for start in range(0, len(names), ops.SCHEDULES_AT_ONCE):
            some = names[start : start + ops.SCHEDULES_AT_ONCE]
            call = ops.renew_schedules(self._keys, some, self._owner)
            missing += await self._link.call(call)
        if missing:
            await self._store([self._declared[name] for name in missing], replace=False)
        await self._note_queues([self._declared[name] for name in names])

    async def _note_queues(self, definitions: list[Definition]) -> None:
        queues = sorted({definition.queue for definition in definitions})
        names = [keys.name for queue in queues for keys in await self._shards_of(queue)]
        for start in range(0, len(names), ops.MAX_ITEMS):
            call = ops.note_queues(self._keys, names[start : start + ops.MAX_ITEMS])
            self._link.post(call, lambda _word, _failure: None, patience=REDECLARE)


RETRY_AFTER = 0.5
"""Seconds until the schedules are read again after the server did not respond."""
RELOAD = 3.0
"""Seconds after which the leader reads a new schedule, at the latest."""
READ_AT_MOST_EVERY = 0.02
"""Seconds between two reads, at least. Firings that become due in that time are read, fired and stored together."""
POSTPONE_MS = 5_000
"""Milliseconds until a firing that failed is tried again. A new leader may succeed, and must find the firing while it is on
time.
"""
UNSEEN_MS = 24 * 3600 * 1000
"""Milliseconds for which the mesh must have been led before a schedule that no peer declares any more is dropped."""
LED_BEFORE_DROPPING = 2 * REDECLARE
"""Seconds. After an outage, every peer must have the time to declare its schedules again."""
LED_BEFORE_OUTDATED = 30.0
"""Seconds. After an outage, the workers of every deploy must have the time to register again."""
DROP_EVERY = 20.0
LED_EVERY, LED_MOST = 1.0, 10.0
"""Seconds between two notes of how long the mesh was led, and the most that a leader adds: more means that it was suspended."""
HERD = 100_000
"""Due schedules that take turns, at most. The others follow."""
PAGES_IN_FLIGHT = 2
"""Pages of a herd that are read and fired at the same time: one is decided about while the server enqueues the other."""
NO_VERSION: Final = "0"
"""The number of no stored schedule."""
ENDED_KEPT_MS = 7 * 24 * 3600 * 1000
"""Milliseconds for which a stored schedule that fires no more is shown."""
BUSY_FIRST_MS, BUSY_MOST_MS = 20, 500
"""Milliseconds between two tries of a firing that waits for the end of the one before; doubled each time."""


class _Term:
    """The ticker's data about schedules while its peer leads.

    A new term begins without it, because it is out of date by then. It takes over the firings that are not stored yet, each of
    which is stored only if its schedule is as it was; and, after a moment without the lease, which firings are on time.

    Attributes:
        ticks: firings that are not stored yet.
        busy: by schedule: milliseconds until the next try of a firing that waits for the previous one.
        dropped_at: by schedule: when it was logged last that firings are dropped.
        unread: schedules that this version cannot read.
        unreachable_until: by queue: when its node is tried again.
        leads_since: the first read of the schedules; None if they were not read yet.
        led, led_at: milliseconds for which the mesh was led, and when that was noted last.
        drop_at: when to search for schedules that no peer declares.
        caught_up_at: when it last read the schedules with none left from the read before: since then no firing was overlooked.
        missed: the schedules that missed firings in this tick, each with since when, and how many are made up for.
        put_off: by schedule: when a firing of it was put off first, and `caught_up_at` then: it stays on time for a while.
        read_at: when it last read the schedules.
        resumes: the term of this peer before, from which `caught_up_at` goes on if that ended a moment ago.
    """

    def __init__(self, resumes: _Term | None = None) -> None:
        self.ticks: list[Tick] = []
        self.busy: dict[str, int] = {}
        self.dropped_at: dict[str, float] = {}
        self.unread: set[str] = set()
        self.unreachable_until: dict[str, float] = {}
        self.leads_since: float | None = None
        self.led = 0
        self.led_at = 0.0
        self.drop_at = 0.0
        self.caught_up_at = -math.inf
        self.missed: list[tuple[str, int, int]] = []
        self.put_off: dict[str, tuple[float, float]] = {}
        self.read_at = -math.inf
        self.resumes = resumes and (resumes.read_at, resumes.caught_up_at)
        if resumes is not None:
            self.ticks = resumes.ticks


class _Plan:
    """The firings of one schedule in one tick. Changed by the ticker that fires them."""

    def __init__(self, row: ScheduleRow, definition: Definition, decision: DueFirings) -> None:
        self.row = row
        self.definition = definition
        self.decision = decision
        left = max(0, definition.times - row.ran) if definition.times else None
        until = definition.until_ms or math.inf
        self.pending: list[int] = [nominal for nominal in (*row.pending, *decision.fire) if nominal <= until][:left]
        self.fired: int | None = None
        self.ran = 0
        self.stopped = ""

    def leave_lane(self) -> None:
        """Fire without the lane of the call, which may lie in another shard than the job's id."""
        options = {name: value for name, value in self.definition.options.items() if name != "lane"}
        self.definition = changed(self.definition, options=options)

    @property
    def ended(self) -> bool:
        """True if it fires no more."""
        definition = self.definition
        used_up = definition.times and self.row.ran + self.ran >= definition.times
        return not self.pending and bool(used_up or (definition.until_ms and self.decision.next > definition.until_ms))

    def note(self, word: str) -> None:
        """Note the reply to the first pending firing. After one that is busy or was changed, the later ones wait too."""
        if self.stopped or word in {"busy", "gone", "stale", "broken"}:
            self.stopped = self.stopped or word
            return
        nominal = self.pending.pop(0)
        _log_fired(self.definition.name, nominal, word)
        if word in {"ok", "again"}:
            self.fired = nominal
            self.ran += 1


class ScheduleTicker(Chore):
    """Fires all schedules while the peer leads. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        lease: Lease,
        shards_of: Callable[[str], Awaitable[tuple[QueueKeys, ...]]],
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(link, keys, lease, logger)
        self._shards_of = shards_of
        self._tracing = tracing
        self._term = _Term()

    async def tick_forever(self) -> None:
        """Tick while this peer leads."""
        while True:
            if self._lease.held:
                until = await self._try_tick()
                await trio.sleep(max(0.0, until - trio.current_time()))
                continue
            if self._term.leads_since is not None:
                self._term = _Term(self._term)
            await self._lease.wait_held()

    async def _try_tick(self) -> float:
        try:
            return await self.tick_once()
        except Unavailable as error:
            emit(logger, "tick_schedules", "the schedules are read late, trying again: %(error)s", error=str(error))
            return trio.current_time() + RETRY_AFTER
        except WorqrError as error:
            text = "the schedules cannot be read, trying again: %(error)s"
            self._throttle.error("", "tick_schedules", text, error=str(error))
            return trio.current_time() + RELOAD

    async def tick_once(self) -> float:
        """Store the last firings, read the due schedules, and fire them.

        Returns:
            The time of the next read, by Trio's clock.
        """
        began = trio.current_time()
        due = await self._read_due(began)
        seen_at = trio.current_time()
        if due.clock_set_back:
            await self._rewind()
            return seen_at
        try:
            if due.due > len(due.rows):
                await self._fire_herd()
            else:
                await self._fire_page(due)
                self._term.caught_up_at = began
        finally:
            self._log_missed()
        if seen_at >= self._term.drop_at:
            self._term.drop_at = seen_at + DROP_EVERY
            await self._drop_undeclared(seen_at)
            await self._drop_outdated(seen_at)
        wait = RELOAD if due.next is None else min(RELOAD, (due.next - due.now) / 1000)
        return began + READ_AT_MOST_EVERY if due.rows else max(began + READ_AT_MOST_EVERY, seen_at + wait)

    async def _fire_herd(self) -> None:
        """Fire all that is due, in turns, and store what was fired page by page."""
        names: list[str] = []
        while len(names) < HERD:
            some = await self._ask(ops.list_due_schedules(self._keys, len(names)))
            names += some
            if len(some) < ops.DUE_AT_ONCE:
                break
        pages = in_chunks(in_turns(names), len, most=ops.SCHEDULES_AT_ONCE)
        failed: list[WorqrError] = []

        async def fire_pages() -> None:
            try:
                for page in pages:
                    if failed or not self._lease.held:
                        return
                    due = await self._read_due(trio.current_time(), page)
                    if due.clock_set_back:
                        return
                    await self._fire_page(due)
            except WorqrError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(PAGES_IN_FLIGHT):
                nursery.start_soon(fire_pages)
        if failed:
            raise failed[0]

    async def _read_due(self, now: float, names: Sequence[str] = ()) -> DueSchedules:
        """Store what has not been stored yet. If that fails, it is judged again: the queues know their last firings."""
        ticks, self._term.ticks = self._term.ticks, []
        was, led = self._term.led, self._term.led
        if self._term.leads_since is not None and now - self._term.led_at >= LED_EVERY:
            led += round(1000 * min(now - self._term.led_at, LED_MOST))
        due = await self._ask(ops.tick_schedules(self._keys, ticks, names, was_led=was, led=led))
        if self._term.leads_since is None:
            self._term.leads_since, self._term.led_at = now, now
            read_at, caught_up_at = self._term.resumes or (-math.inf, 0.0)
            self._term.caught_up_at = caught_up_at if now - read_at <= ON_TIME_MS / 1000 else now
        self._term.read_at = now
        if led != was:
            self._term.led_at = now
        if not due.clock_set_back:
            self._term.led = due.led
        return due

    async def _rewind(self) -> None:
        cursor, rewound = "0", 0
        while True:
            cursor, some = await self._ask(ops.rewind_schedules(self._keys, cursor))
            rewound += some
            if cursor == "0":
                break
        text = "the clock of the server was set back by more than a minute: %(count)d schedules go on from the new time"
        emit(logger, "rewind_schedules", text, count=rewound)

    async def _drop_undeclared(self, now: float) -> None:
        """Forget schedules that no peer declares any more."""
        if now - (self._term.leads_since or now) < LED_BEFORE_DROPPING:
            return
        while dropped := await self._ask(ops.drop_schedules(self._keys, UNSEEN_MS)):
            for name, definition in dropped:
                text = "schedule %(schedule)r was removed, because no worker has declared it for a day"
                emit(logger, "drop_schedules", text, schedule=name)
                await self._forget_firings(name, definition)

    async def _drop_outdated(self, now: float) -> None:
        """Forget schedules and subscriptions of deploys that are older than all that run of their applications."""
        if now - (self._term.leads_since or now) < LED_BEFORE_OUTDATED:
            return
        start = 0
        while start >= 0:
            start, dropped = await self._ask(ops.drop_outdated_schedules(self._keys, start))
            for name, definition in dropped:
                text = "schedule %(schedule)r was removed, because only older deploys of its application declare it"
                emit(logger, "drop_schedules", text, schedule=name)
                await self._forget_firings(name, definition)
        left, patterns = await self._ask(ops.drop_outdated_topics(self._keys))
        for queue, pattern in patterns:
            text = "queue %(queue)r is no longer subscribed to %(pattern)r: only older deploys of its application declare it"
            emit(logger, "drop_topics", text, queue=queue, pattern=pattern)
        for queue in left:
            note = ops.note_event(self._keys, "unsubscribed", queue=queue, text="by a newer deploy")
            self._link.post(note, ignore_outcome, patience=LEASE)

    async def _forget_firings(self, name: str, definition: bytes) -> None:
        """Delete what its queue knows of a schedule that was dropped, but none that was stored meanwhile: it has a number."""
        with suppress(WorqrError):  # it expires by itself
            found = Definition.decode(definition)
            keys = shard_of(await self._shards_of(found.queue), found.job)
            await self._ask_queue(ops.unstore_schedule(keys, name, NO_VERSION))

    def _log_missed(self) -> None:
        """Log which schedules missed firings in this tick, in one line."""
        missed, self._term.missed = self._term.missed, []
        if not missed:
            return
        name, last, _ = min(missed, key=lambda each: each[1])
        since, count = at(last).isoformat(timespec="seconds"), sum(each[2] for each in missed)
        others = f" and {len(missed) - 1} others" if len(missed) > 1 else ""
        text = f"schedule %(schedule)r{others} was not fired between %(since)s and now: %(count)d missed firings are made up for"
        fields = {"schedule": name, "since": since, "count": count}
        emit_fields(logger, "tick_schedules", text, fields, level=logging.WARNING)
        note = ops.note_event(self._keys, "schedule_missed", count=count, text=f"{name}{others}, since {since}")
        self._link.post(note, ignore_outcome, patience=LEASE)

    # One page

    async def _fire_page(self, due: DueSchedules) -> None:
        """Fire what was read, the queues side by side."""
        waited_ms = max(0, round(1000 * (trio.current_time() - self._term.caught_up_at)))
        queues: dict[QueueKeys, list[_Plan]] = {}
        for row in due.rows:
            plan, keys = None, None
            try:
                if row.ended is not None:
                    if trio.current_time() < self._term.unreachable_until.get(row.home, 0.0):
                        self._postpone(row, due.now)
                    else:
                        await self._forget_ended(row, due.now)
                    continue
                plan = self._plan(row, due.now, waited_ms)
                if plan is not None and plan.pending:
                    keys = await self._home(plan)
            except Exception as error:  # whatever any program has stored as a schedule, the others are fired
                if isinstance(error, Unavailable) and row.home:
                    self._term.unreachable_until[row.home] = trio.current_time() + POSTPONE_MS / 1000
                self._log_unfired(row.name, error)
                plan = None
            if plan is None:
                self._postpone(row, due.now)
            elif keys is None:
                self._note(plan, due.now)
            else:
                queues.setdefault(keys, []).append(plan)
        async with trio.open_nursery() as nursery:
            for keys, plans in queues.items():
                nursery.start_soon(self._fire_queue, keys, plans, due.now)

    def _plan(self, row: ScheduleRow, now: int, waited_ms: int) -> _Plan | None:
        """Return what is to be fired; None if it cannot be fired now."""
        trigger = self._trigger_of(row)
        if trigger is None or self._is_unreachable(trigger):
            return None
        since, caught_up_at = self._term.put_off.get(row.name, (-math.inf, 0.0))
        if trio.current_time() - since <= ON_TIME_MS / 1000:  # it was on time when it was put off
            waited_ms = max(waited_ms, round(1000 * (trio.current_time() - caught_up_at)))
        decision = due_firings(trigger, row.last, now, waited_ms)
        if decision.missed:
            self._term.missed.append((row.name, row.last, decision.caught_up))
        return _Plan(row, trigger.definition, decision)

    async def _home(self, plan: _Plan) -> QueueKeys:
        """Return the shard in which a schedule fires: that of its id, or that in which its call is stored."""
        if plan.row.home:
            return self._queue(plan.row.home)
        shards = await self._shards_of(plan.definition.queue)
        if len(shards) > 1:
            plan.leave_lane()
        return shard_of(shards, plan.definition.job)

    async def _forget_ended(self, row: ScheduleRow, now: int) -> None:
        """Delete a stored schedule a week after it has fired for the last time."""
        until = (row.ended or 0) + ENDED_KEPT_MS
        if now < until:
            self._term.ticks.append(Tick(row, row.last, row.next, until, row.pending))
            return
        await self._ask_queue(ops.unstore_schedule(self._queue(row.home), row.name, row.version))
        await self._ask(ops.unindex_schedule(self._keys, row))

    async def _resolve(self, plan: _Plan, keys: QueueKeys) -> None:
        """Follow a program that has changed or deleted the call of a schedule, and not yet its times."""
        row = plan.row
        [found] = await self._ask_queue(ops.read_schedules(keys, [row.name]))
        if found is None:
            await self._ask(ops.unindex_schedule(self._keys, row))
        elif whole(found[0], 0) < whole(row.version, 0):
            raise UsageError("its queue has an older call, because a server has lost the newer one; store it again")
        elif plan.stopped == "stale" and found[0] != row.version:
            await finish_storing(self._ask, self._keys, row, found)
        else:
            StoredCall.decode(found[1])
            raise UsageError("what is stored of its call is not valid; store it again")

    def _log_unfired(self, name: str, error: Exception) -> None:
        text = "schedule %(schedule)r cannot be fired, trying again: %(error)s"
        why = str(error) if isinstance(error, WorqrError | ArithmeticError) else repr(error)
        self._throttle.error(name, "fire_schedule", text, schedule=name, error=why)

    def _postpone(self, row: ScheduleRow, now: int) -> None:
        if row.ended is None:
            self._term.put_off.setdefault(row.name, (trio.current_time(), self._term.caught_up_at))
        self._term.ticks.append(Tick(row, row.last, row.next, now + POSTPONE_MS, row.pending))

    def _note(self, plan: _Plan, now: int) -> None:
        """Store how far a schedule got at the next read."""
        row, check_at = plan.row, plan.decision.next
        self._term.put_off.pop(row.name, None)
        if plan.pending:
            first = plan.fired is not None or row.name not in self._term.busy
            busy = BUSY_FIRST_MS if first else min(2 * self._term.busy[row.name], BUSY_MOST_MS)
            self._term.busy[row.name] = busy
            check_at = min(check_at, now + busy)
        else:
            self._term.busy.pop(row.name, None)
        self._throttle.resolve(row.name)
        pending = self._limit_pending(row.name, plan.pending)
        ran = plan.ran if plan.definition.times else None
        check_at = 0 if plan.ended else check_at
        self._term.ticks.append(Tick(row, plan.decision.cursor, plan.decision.next, check_at, pending, plan.fired, ran))

    def _trigger_of(self, row: ScheduleRow) -> Trigger | None:
        """Return the trigger of a schedule.

        It is None if another version declared or overrode the schedule, or if a requirement is missing here. This is logged
        once.
        """
        try:
            return Trigger(effective(row.name, row.definition, row.override))
        except UsageError as error:
            if row.name not in self._term.unread:
                self._term.unread.add(row.name)
                text = "schedule %(schedule)r is not fired while this worker is the leader: %(error)s"
                emit(logger, "tick_schedules", text, level=logging.WARNING, schedule=row.name, error=str(error))
            return None

    def _is_unreachable(self, trigger: Trigger) -> bool:
        """Return True if the node of the queue did not reply a short time ago.

        On a cluster, its schedules must not delay those of other queues at every read.
        """
        return trio.current_time() < self._term.unreachable_until.get(trigger.definition.queue, 0.0)

    async def _fire_queue(self, keys: QueueKeys, plans: list[_Plan], now: int) -> None:
        """Enqueue the firings of one queue, in batches. Those of one schedule come in order."""
        for batch in in_chunks(plans, _bytes_of, most=ops.FIRINGS_AT_ONCE, most_bytes=ops.SCHEDULES_BYTES):
            await self._fire_batch(keys, batch, now)

    async def _fire_batch(self, keys: QueueKeys, plans: list[_Plan], now: int) -> None:
        """Enqueue what is pending of these schedules. If the queue refuses the batch, each half is tried for itself."""
        try:
            while waiting := [plan for plan in plans if plan.pending and not plan.stopped]:
                share = max(1, ops.FIRINGS_AT_ONCE // len(waiting))
                firings = [(plan, nominal) for plan in waiting for nominal in plan.pending[:share]]
                words = await fire(
                    *(self._link, keys, [(plan.definition, nominal, plan.row.version) for plan, nominal in firings]),
                    judged_at=now,
                    tracing=self._tracing,
                    patience=self._patience,
                )
                for (plan, _), word in zip(firings, words, strict=True):
                    plan.note(word)
        except Unavailable as error:
            self._term.unreachable_until[plans[0].definition.queue] = trio.current_time() + POSTPONE_MS / 1000
            others = f" and {len(plans) - 1} others" if len(plans) > 1 else ""
            text = f"schedule %(schedule)r{others} is fired late, trying again: %(error)s"
            emit(logger, "fire_schedule", text, level=logging.INFO, schedule=plans[0].row.name, error=str(error))
            for plan in plans:
                self._postpone(plan.row, now)
        except Exception as error:
            if len(plans) > 1:
                half = len(plans) // 2
                await self._fire_batch(keys, plans[:half], now)
                await self._fire_batch(keys, plans[half:], now)
                return
            self._log_unfired(plans[0].row.name, error)
            self._postpone(plans[0].row, now)
        else:
            for plan in plans:
                if plan.stopped in {"gone", "stale", "broken"}:
                    await self._try_resolve(plan, keys, now)
                else:
                    self._note(plan, now)

    async def _try_resolve(self, plan: _Plan, keys: QueueKeys, now: int) -> None:
        try:
            await self._resolve(plan, keys)
        except Exception as error:  # of what others have stored
            self._log_unfired(plan.row.name, error)
            self._postpone(plan.row, now)

    def _limit_pending(self, name: str, pending: Sequence[int]) -> Sequence[int]:
        if len(pending) > MAX_PENDING:
            now = trio.current_time()
            if now >= self._term.dropped_at.get(name, -math.inf) + REPEAT_AFTER:
                self._term.dropped_at[name] = now
                text = "schedule %(schedule)r: %(count)d firings wait for the one before; the oldest are dropped"
                emit(logger, "fire_schedule", text, schedule=name, count=len(pending))
        return pending[-MAX_PENDING:]


def in_turns(names: Iterable[str]) -> list[str]:
    """Return names of schedules such that those with the same first segment (up to a slash) take turns with the others."""
    turns: Counter[str] = Counter()
    ordered: list[tuple[int, str]] = []
    for name in names:
        tenant = name.partition("/")[0]
        ordered.append((turns[tenant], name))
        turns[tenant] += 1
    return [name for _, name in sorted(ordered, key=lambda each: each[0])]


def _bytes_of(plan: _Plan) -> int:
    return len(plan.definition.task)


def _log_fired(schedule: str, nominal: int, outcome: str) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    text = "schedule %(schedule)r, nominal time %(nominal)d: %(outcome)s"
    emit(logger, "fire_schedule", text, level=logging.DEBUG, schedule=schedule, nominal=nominal, outcome=outcome)
