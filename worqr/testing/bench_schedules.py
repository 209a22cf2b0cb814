"""The schedules of a bench: they fire when the test moves the clock, and at no other time.

So a test does not depend on when it runs: a full minute that passes in real time fires nothing. Firings have a clock of their
own, which only `advance` moves; a day fires a daily schedule once. No task runs while the clock moves, so a schedule that skips
overlapping firings enqueues one, however many pass.
"""

from __future__ import annotations

from typing import Any

from worqr import ops
from worqr.client.firing import fire
from worqr.client.schedules import all_schedules
from worqr.cron import Definition, Trigger, effective
from worqr.inside import client_of, declarations_of
from worqr.keys import QueueKeys, RegistryKeys
from worqr.mesh import Mesh
from worqr.ops import MAX_PENDING
from worqr.ops.replies import in_chunks


class BenchSchedules:
    """Fires the schedules of one bench. Only the loop of the bench changes it."""

    def __init__(self, mesh: Mesh[Any]) -> None:
        self._client = client_of(mesh)
        self._declarations = declarations_of(mesh)
        self._keys = RegistryKeys(mesh.prefix)
        self._now = 0
        self._pending: dict[str, list[int]] = {}

    async def begin(self, now_ms: int) -> None:
        """Declare the schedules. Firings count from `now_ms` on."""
        self._now = now_ms
        await self._declare()

    async def advance(self, ms: int) -> None:
        """Let `ms` pass: enqueue the firings of that time in the order of their nominal times."""
        since, self._now = self._now, self._now + ms
        declared = self._declarations.schedules
        if not declared:
            return
        await self._declare()
        rows = {row.name: row for row in (await all_schedules(self._client.ask, self._keys))[0]}
        triggers = {
            name: _trigger(each, rows[name])
            for name, each in declared.items()
            if name in rows and not rows[name].paused
        }
        fired: dict[str, int] = {}
        firings = [(at, name) for name, trigger in triggers.items() for at in _between(trigger, since, self._now)]
        for nominal, name in sorted(firings):
            self._pending.setdefault(name, []).append(nominal)
            if await self._fire(declared[name]):
                fired[name] = nominal
        for name, nominal in fired.items():
            following = triggers[name].next_after(self._now)
            tick = ops.Tick(rows[name], nominal, following, following, fired=nominal)
            await self._client.ask(ops.tick_schedules(self._keys, [tick]))

    async def _declare(self) -> None:
        pairs = [(each.name, each.encode()) for each in self._declarations.schedules.values()]
        for page in in_chunks(
            pairs, lambda pair: len(pair[1]), most=ops.SCHEDULES_AT_ONCE, most_bytes=ops.SCHEDULES_BYTES
        ):
            await self._client.ask(ops.declare_schedules(self._keys, page, replace=True))

    async def fire_pending(self) -> bool:
        """Enqueue firings whose previous run has ended. Return True if any was enqueued."""
        fired = [await self._fire(self._declarations.schedules[name]) for name in tuple(self._pending)]
        return any(fired)

    async def _fire(self, definition: Definition) -> bool:
        """Enqueue the pending firings of one schedule until one has to wait. Return True if any was enqueued."""
        keys = await self._client.sharding.shard_of_id(
            QueueKeys(self._client.settings.prefix, definition.queue), definition.job
        )
        pending, fired = self._pending.pop(definition.name), False
        for n, nominal in enumerate(pending):
            outcome = await fire(
                *(self._client.link_to(keys.name), keys, definition, nominal),
                judged_at=self._now,
                tracing=self._client.settings.tracing,
            )
            if outcome == "busy":
                self._pending[definition.name] = pending[n:][-MAX_PENDING:]
                break
            fired = fired or outcome == "ok"
        return fired


def _trigger(declared: Definition, stored: ops.ScheduleRow) -> Trigger:
    """Return the times of a schedule: those of its override, if it has one."""
    return Trigger(effective(declared.name, declared.encode(), stored.override))


def _between(trigger: Trigger, since: int, until: int) -> list[int]:
    """Return the firings after `since` and up to `until`, without those that have no effect while no task runs."""
    match trigger.definition.overlap:
        case "skip":
            first = trigger.next_after(since)
            return [first] if first <= until else []
        case "cancel":
            return trigger.last_between(since, until, 1)
        case "queue":
            return trigger.last_between(since, until, MAX_PENDING)
