"""`ScheduleTicker`: the leader enqueues the firings of all schedules, including those of other applications.

The registry has all schedules in the order of their next due times. The leader reads only those that are due, at most every 20
ms. For each it decides what to fire (`worqr.cron.due_firings`) and enqueues the firings. Each firing is fenced on its queue by
its nominal time. Then the leader stores the new cursor and the next due time by compare-and-set. If the leader dies in between,
or another peer believes that it leads, nothing is enqueued twice. The next leader decides again on firings that were not stored.

Server clocks jump. docs/reference/schedules.md has what can fire twice and what cannot. The rules are in
`worqr.cron.due_firings`, `fire_schedule` and `rewind_schedules`. The time for which no peer has declared a schedule is not
measured by that clock. Instead, the leaders add up the time for which the mesh was led.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import trio

from worqr import ops
from worqr.client.schedules import fire
from worqr.cron import Definition, Trigger, at, due_firings, effective
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_PENDING, DueSchedules, ScheduleRow, Tick
from worqr.ops.replies import in_chunks
from worqr.peer.error_throttle import REPEAT_AFTER, ErrorThrottle, sleep_aligned
from worqr.peer.leader.chore import Chore, Lease
from worqr.peer.options import PeerSettings
from worqr.peer.session import LEASE, Session, ignore_outcome
from worqr.shard_layout import shard_of
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
        """After a new registration of `session`, all schedules are declared again."""
        self._shards_of = shards_of
        self._session = session
        self._link = link
        self._keys = RegistryKeys(settings.prefix)
        self._declared = settings.schedules
        self._stored: set[str] = set()
        self._declared_as: object = None
        self._renew_at = 0.0
        self._throttle = ErrorThrottle(logger)

    async def declare(self) -> None:
        """Store the schedules that were not declared yet. They replace schedules of the same names."""
        new = [definition for name, definition in self._declared.items() if name not in self._stored]
        self._renew_at = trio.current_time() + REDECLARE
        self._declared_as = self._session.registration
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
        lost = self._declared_as is not self._session.registration
        if lost or trio.current_time() >= self._renew_at:
            await self._renew()
            self._renew_at = trio.current_time() + REDECLARE
            self._declared_as = self._session.registration

    async def _store(self, definitions: list[Definition], *, replace: bool) -> None:
        pages = in_chunks(
            [(definition.name, definition.encode()) for definition in definitions],
            lambda pair: len(pair[1]),
            most=ops.SCHEDULES_AT_ONCE,
            most_bytes=ops.SCHEDULES_BYTES,
        )
        calls = [ops.declare_schedules(self._keys, page, replace=replace) for page in pages]
        for start in range(0, len(calls), PAGES_AT_ONCE):
            await self._link.call_all(calls[start : start + PAGES_AT_ONCE])

    async def _renew(self) -> None:
        names = [name for name in self._declared if name in self._stored]
        missing: list[str] = []
        for start in range(0, len(names), ops.SCHEDULES_AT_ONCE):
            call = ops.renew_schedules(self._keys, names[start : start + ops.SCHEDULES_AT_ONCE])
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
DROP_EVERY = 60.0
LED_EVERY, LED_MOST = 1.0, 10.0
"""Seconds between two notes of how long the mesh was led, and the most that a leader adds: more means that it was suspended."""
AT_ONCE = 100
FIRE_FOR = 0.25
"""Seconds for which one schedule enqueues firings that are owed, before the others have their turn again."""
BUSY_FIRST_MS, BUSY_MOST_MS = 20, 500
"""Milliseconds between two tries of a firing that waits for the end of the one before; doubled each time."""


class _Term:
    """The ticker's data about schedules while its peer leads. A new term begins without it, because it is out of date by then.

    Attributes:
        ticks: firings that are not stored yet.
        busy: by schedule: milliseconds until the next try of a firing that waits for the previous one.
        dropped_at: by schedule: when it was logged last that firings are dropped.
        unread: schedules that this version cannot read.
        unreachable_until: by queue: when its node is tried again.
        leads_since: the first read of the schedules; None if they were not read yet.
        led, led_at: milliseconds for which the mesh was led, and when that was noted last.
        drop_at: when to search for schedules that no peer declares.
    """

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self.busy: dict[str, int] = {}
        self.dropped_at: dict[str, float] = {}
        self.unread: set[str] = set()
        self.unreachable_until: dict[str, float] = {}
        self.leads_since: float | None = None
        self.led = 0
        self.led_at = 0.0
        self.drop_at = 0.0


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
                self._term = _Term()
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
        for start in range(0, len(due.rows), AT_ONCE):
            async with trio.open_nursery() as nursery:
                for row in due.rows[start : start + AT_ONCE]:
                    nursery.start_soon(self._tick_or_postpone, row, due.now)
        if seen_at >= self._term.drop_at:
            self._term.drop_at = seen_at + DROP_EVERY
            await self._drop_undeclared(seen_at)
        wait = RELOAD if due.next is None else min(RELOAD, (due.next - due.now) / 1000)
        return began + READ_AT_MOST_EVERY if due.rows else max(began + READ_AT_MOST_EVERY, seen_at + wait)

    async def _read_due(self, now: float) -> DueSchedules:
        """Store what has not been stored yet. If that fails, it is judged again: the queues know their last firings."""
        ticks, self._term.ticks = self._term.ticks, []
        was, led = self._term.led, self._term.led
        if self._term.leads_since is not None and now - self._term.led_at >= LED_EVERY:
            led += round(1000 * min(now - self._term.led_at, LED_MOST))
        due = await self._ask(ops.tick_schedules(self._keys, ticks, was_led=was, led=led))
        if self._term.leads_since is None:
            self._term.leads_since, self._term.led_at = now, now
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
        while names := await self._ask(ops.drop_schedules(self._keys, UNSEEN_MS)):
            for name in names:
                text = "schedule %(schedule)r was removed, because no worker has declared it for a day"
                emit(logger, "drop_schedules", text, schedule=name)

    # One schedule

    async def _tick_or_postpone(self, row: ScheduleRow, now: int) -> None:
        try:
            trigger = self._trigger_of(row)
            tick = None if trigger is None or self._is_unreachable(trigger) else await self._tick(row, trigger, now)
        except Unavailable as error:
            text = "schedule %(schedule)r is fired late, trying again: %(error)s"
            emit(logger, "fire_schedule", text, level=logging.INFO, schedule=row.name, error=str(error))
            tick = None
        except Exception as error:  # whatever any program has stored as a schedule, the others are fired
            text = "schedule %(schedule)r cannot be fired, trying again: %(error)s"
            why = str(error) if isinstance(error, WorqrError | ArithmeticError) else repr(error)
            self._throttle.error(row.name, "fire_schedule", text, schedule=row.name, error=why)
            tick = None
        self._term.ticks.append(tick or Tick(row, row.last, row.next, now + POSTPONE_MS, row.pending))

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

    async def _tick(self, row: ScheduleRow, trigger: Trigger, now: int) -> Tick:
        """Enqueue the firings that are due now; return how far it got."""
        decision = due_firings(trigger, row.last, now)
        if decision.missed:
            text = "schedule %(schedule)r was not fired between %(since)s and now: %(count)d missed firings are made up for"
            since = at(row.last).isoformat(timespec="seconds")
            emit_fields(
                *(logger, "tick_schedules", text, {"schedule": row.name, "since": since, "count": decision.caught_up}),
                level=logging.WARNING,
            )
            note = ops.note_event(
                self._keys, "schedule_missed", count=decision.caught_up, text=f"{row.name}, since {since}"
            )
            self._link.post(note, ignore_outcome, patience=LEASE)
        pending: Sequence[int] = [*row.pending, *decision.fire]
        fired, check_at = None, decision.next
        if pending:
            pending, fired = await self._fire(trigger.definition, pending, now)
        if pending:
            first = fired is not None or row.name not in self._term.busy
            busy = BUSY_FIRST_MS if first else min(2 * self._term.busy[row.name], BUSY_MOST_MS)
            self._term.busy[row.name] = busy
            check_at = min(check_at, now + busy)
        else:
            self._term.busy.pop(row.name, None)
        self._throttle.resolve(row.name)
        return Tick(row, decision.cursor, decision.next, check_at, self._limit_pending(row.name, pending), fired)

    async def _fire(
        self, definition: Definition, nominals: Sequence[int], now: int
    ) -> tuple[Sequence[int], int | None]:
        """Enqueue these firings in order, as far as possible; return those still pending, and the last that was enqueued.

        Many firings take several turns: each turn ends after `FIRE_FOR`, and the other schedules wait for its end.
        """
        until = trio.current_time() + FIRE_FOR
        keys, fired = shard_of(await self._shards_of(definition.queue), definition.job), None
        for n, nominal in enumerate(nominals):
            try:
                word = await fire(
                    *(self._link, keys, definition, nominal),
                    judged_at=now,
                    tracing=self._tracing,
                    patience=self._patience,
                )
            except Unavailable:
                self._term.unreachable_until[definition.queue] = trio.current_time() + POSTPONE_MS / 1000
                raise
            if word == "busy":
                return nominals[n:], fired
            _log_fired(definition.name, nominal, word)
            fired = nominal if word in {"ok", "again"} else fired
            if trio.current_time() >= until:
                return nominals[n + 1 :], fired
        return [], fired

    def _limit_pending(self, name: str, pending: Sequence[int]) -> Sequence[int]:
        if len(pending) > MAX_PENDING:
            now = trio.current_time()
            if now >= self._term.dropped_at.get(name, -math.inf) + REPEAT_AFTER:
                self._term.dropped_at[name] = now
                text = "schedule %(schedule)r: %(count)d firings wait for the one before; the oldest are dropped"
                emit(logger, "fire_schedule", text, schedule=name, count=len(pending))
        return pending[-MAX_PENDING:]


def _log_fired(schedule: str, nominal: int, outcome: str) -> None:
    text = "schedule %(schedule)r, nominal time %(nominal)d: %(outcome)s"
    emit(logger, "fire_schedule", text, level=logging.DEBUG, schedule=schedule, nominal=nominal, outcome=outcome)
