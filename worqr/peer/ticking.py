"""Ticking: whichever peer leads the mesh enqueues the firings of all schedules, those of other applications too.

Every peer declares its own schedules when it joins, and says every ten minutes that they are still meant. The leader looks
at all of them every 3 s, and whenever one is about to fire. Judging comes first (`worqr.cron.judge`), then the firings, each
fenced on its queue by its nominal time, then the cursor, compared and set: whoever dies in between, or still believes to
lead, changes nothing twice, and what was not noted is judged again by the next leader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.cron import Definition, Plan, Schedule, at, jitter_ms, judge
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.ops import ScheduleRow
from worqr.peer.membership import LEASE, Registration
from worqr.shards import shard_of

if TYPE_CHECKING:
    from worqr.peer.peer import Peer

logger: logging.Logger = logging.getLogger(__name__)

IDLE = 0.5
"""Seconds between two looks whether we lead."""
RELOAD = 3.0
"""Seconds after which the leader sees a schedule that is new, at the latest."""
SHORTEST = 0.005
CHANGED_MS = 500
"""Milliseconds until the leader looks again at what somebody else has changed."""
REDECLARE = 600.0
UNSEEN_MS = 24 * 3600 * 1000
"""Milliseconds after which a schedule that no peer declares any more is dropped."""
LED_BEFORE_DROPPING = 2 * REDECLARE
"""Seconds: after an outage of days everybody gets the time to declare its schedules again."""
AT_ONCE = 100
MAX_OWED = 100
BUSY_FIRST, BUSY_MOST = 0.02, 0.5
"""Seconds between two tries of a firing that waits for the end of the one before; doubled each time."""


@dataclass
class _Known:
    """What the leader remembers of a schedule. `plan` None: it cannot be read here, which was said once."""

    definition: bytes
    plan: Plan | None
    cursor: int = -1
    next: int = 0
    busy: float = BUSY_FIRST
    retry_at: float = 0.0


class Ticker:
    """Declares the peer's own schedules, and ticks all of them while the peer leads. Changed only in the loop."""

    def __init__(self, peer: Peer, link: Link, keys: RegistryKeys, declared: Mapping[str, Definition]) -> None:
        self._peer = peer
        self._link = link
        self._keys = keys
        self._declared = declared
        self._told: set[str] = set()
        self._told_as: Registration | None = None
        self._tell_again = 0.0
        self._known: dict[str, _Known] = {}
        self._failing: dict[str, str] = {}
        self._leads_since: float | None = None

    # Declaring

    async def declare(self) -> None:
        """Put the schedules that were not declared yet into the registry, in place of what others meant by their names."""
        new = [definition for name, definition in self._declared.items() if name not in self._told]
        self._tell_again = trio.current_time() + REDECLARE
        self._told_as = self._peer.membership.registration
        if new:
            await self._tell(new, replace=True)

    async def _tell(self, definitions: list[Definition], *, replace: bool) -> None:
        pairs = [(definition.name, definition.encode()) for definition in definitions]
        await self._link.call(ops.declare_schedules(self._keys, pairs, replace=replace))
        self._told.update(definition.name for definition in definitions)
        queues = sorted({definition.queue for definition in definitions})
        names = [keys.name for queue in queues for keys in await self._peer.shards_of(queue)]
        self._link.post(ops.note_queues(self._keys, names), lambda _word, _failure: None, patience=REDECLARE)

    async def keep_declared(self) -> None:
        """Declare what is new; say that the rest is still meant, in time, or when the registry may have lost it."""
        if len(self._declared) > len(self._told):
            await self.declare()
        if not self._told:
            return
        lost = self._told_as is not self._peer.membership.registration
        if lost or trio.current_time() >= self._tell_again:
            await self._tell(list(self._declared.values()), replace=False)
            self._tell_again = trio.current_time() + REDECLARE
            self._told_as = self._peer.membership.registration

    # Ticking

    async def tick_forever(self) -> None:
        """Turn after turn, also while another leads: then only our own schedules are kept declared."""
        while True:
            until = trio.current_time() + IDLE
            try:
                await self.keep_declared()
                if self._peer.leader.leads:
                    until = await self.tick_once()
                else:
                    self._leads_since = None
                    self._known.clear()
            except Unavailable as error:
                logger.info("tick_schedule: not now: %s", error)
            except WorqrError as error:
                self._complain("", error)
                until = trio.current_time() + RELOAD
            await trio.sleep(max(SHORTEST, until - trio.current_time()))

    async def tick_once(self) -> float:
        """Look at all schedules, enqueue what is to be fired now; answers when to look again, by Trio's clock."""
        listed = await self._link.call(ops.list_schedules(self._keys), patience=LEASE)
        seen_at = trio.current_time()
        if self._leads_since is None:
            self._leads_since = seen_at
        again = [seen_at + RELOAD]

        async def tick(row: ScheduleRow) -> None:
            again.append(await self._tick_or_not(row, listed.now, seen_at))

        for start in range(0, len(listed.rows), AT_ONCE):
            async with trio.open_nursery() as nursery:
                for row in listed.rows[start : start + AT_ONCE]:
                    nursery.start_soon(tick, row)
        for name in self._known.keys() - {row.name for row in listed.rows}:
            del self._known[name]
        return min(again)

    async def _tick_or_not(self, row: ScheduleRow, now: int, seen_at: float) -> float:
        try:
            if now - row.seen > UNSEEN_MS and seen_at - (self._leads_since or seen_at) > LED_BEFORE_DROPPING:
                await self._drop(row.name)
                return seen_at + RELOAD
            known = self._know(row)
            if known.plan is None:
                return seen_at + RELOAD
            following = await self._tick(row, known, known.plan, now)
        except Unavailable as error:
            logger.info("fire_schedule: %r: not now: %s", row.name, error)
            return seen_at + IDLE
        except (
            WorqrError,
            ArithmeticError,
        ) as error:  # a time that no calendar has: nobody else's schedule must suffer
            self._complain(row.name, error)
            return seen_at + RELOAD
        self._failing.pop(row.name, None)
        return min(seen_at + (following - now) / 1000, known.retry_at or seen_at + RELOAD)

    async def _drop(self, name: str) -> None:
        if await self._link.call(ops.drop_schedule(self._keys, name, UNSEEN_MS), patience=LEASE) == "ok":
            logger.info("drop_schedule: %r: no peer has declared it for a day", name)

    def _know(self, row: ScheduleRow) -> _Known:
        """What is known of the schedule, made ready for its definition; said once if that cannot be read here."""
        known = self._known.get(row.name)
        if known is None or known.definition != row.definition:
            try:
                known = _Known(row.definition, Plan(Definition.decode(row.definition)))
            except UsageError as error:
                logger.warning("tick_schedule: %r is not fired while this peer leads: %s", row.name, error)
                known = _Known(row.definition, None)
            self._known[row.name] = known
        if known.plan is not None and known.cursor != row.last:
            known.cursor, known.next = row.last, known.plan.next_after(row.last)
        return known

    async def _tick(self, row: ScheduleRow, known: _Known, plan: Plan, now: int) -> int:
        """Enqueue what is to be fired now, and note how far it got; answers the next firing's nominal time."""
        due = known.next <= now
        owed, fired = list(row.owed), row.fired
        last, following = row.last, known.next
        if due:
            verdict = judge(plan, row.last, now, paused=row.paused)
            last, following = verdict.cursor, verdict.next
            owed += verdict.fire
            if verdict.missed:
                logger.warning(
                    "tick_schedule: %r: nobody fired it between %s and now: %d firings are made up for",
                    *(row.name, at(row.last).isoformat(timespec="seconds"), verdict.made_up),
                )
        if owed and not row.paused and (due or trio.current_time() >= known.retry_at):
            owed, newest = await self._fire(known, plan.definition, owed)
            fired = newest or fired
        if (last, tuple(owed), following, fired) != (row.last, row.owed, row.next, row.fired):
            call = ops.tick_schedule(self._keys, row, last=last, next=following, owed=owed, fired=fired)
            if await self._link.call(call, patience=LEASE) == "changed":
                return now + CHANGED_MS  # somebody declared, resumed or ticked it
        known.cursor, known.next = last, following
        if not owed or row.paused:
            known.retry_at, known.busy = 0.0, BUSY_FIRST
        return following

    async def _fire(self, known: _Known, definition: Definition, nominals: list[int]) -> tuple[list[int], int | None]:
        """Enqueue these firings in their order, as far as possible; answers those still owed, and the last that was."""
        keys, fired = shard_of(await self._peer.shards_of(definition.queue), definition.job), None
        for n, nominal in enumerate(nominals):
            call = ops.fire_schedule(
                *(keys, definition.name, nominal),
                run_at=nominal + jitter_ms(definition, nominal),
                overlap=definition.overlap,
                task=definition.task,
            )
            word = await self._link.call(call, patience=LEASE)
            if word == "busy":
                known.busy = BUSY_FIRST if n else min(2 * known.busy, BUSY_MOST)
                known.retry_at = trio.current_time() + known.busy
                return self._bounded(definition.name, nominals[n:]), fired
            logger.debug("fire_schedule: %r, nominal time %d: %s", definition.name, nominal, word)
            fired = nominal if word == "ok" else fired
        return [], fired

    def _bounded(self, name: str, owed: list[int]) -> list[int]:
        if len(owed) > MAX_OWED:
            logger.warning(
                "fire_schedule: %r: %d firings wait for the one before: the oldest are dropped", name, len(owed)
            )
        return owed[-MAX_OWED:]

    def _complain(self, name: str, error: Exception) -> None:
        """Log an error once, not at each try."""
        if self._failing.get(name) != str(error):
            self._failing[name] = str(error)
            logger.error("fire_schedule: %r cannot be fired: %s", name, error)


def schedule_of(row: ScheduleRow) -> Schedule:
    """What people want to know of a schedule. One that cannot be read, and that nobody fires, looks overdue."""
    following = row.next
    if following is None:
        try:
            following = Plan(Definition.decode(row.definition)).next_after(row.last)
        except UsageError:
            following = row.last
    return Schedule(row.name, at(following), None if row.fired is None else at(row.fired), row.paused)
