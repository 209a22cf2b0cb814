"""The schedules of a bench: they fire when its clock is moved, and at no other time.

So a test does not depend on when it runs: a full minute that passes meanwhile fires nothing. Firings have a clock of their own,
which moves only by the time that the test lets pass: a day fires a daily schedule once. Moving the clock takes no time, so no
task runs meanwhile: a schedule that skips overlapping firings enqueues one, however many pass.
"""

from __future__ import annotations

from typing import Any, Final

from worqr import ops
from worqr.cron import Definition, Plan, jitter_ms
from worqr.inside import client_of, declarations_of
from worqr.keys import QueueKeys, RegistryKeys
from worqr.mesh import Mesh
from worqr.ops.replies import in_pieces
from worqr.peer.ticking import all_schedules

MAX_OWED: Final = 100
"""Firings of one schedule that wait for each other; a leader remembers no more of them."""


class BenchSchedules:
    """Fires the schedules of one bench. Changed only in the loop."""

    def __init__(self, mesh: Mesh[Any]) -> None:
        self._client = client_of(mesh)
        self._declarations = declarations_of(mesh)
        self._keys = RegistryKeys(mesh.prefix)
        self._now = 0
        self._owed: dict[str, list[int]] = {}

    async def begin(self, now_ms: int) -> None:
        """Count firings from now on."""
        self._now = now_ms
        await self._declare()

    async def advance(self, ms: int) -> None:
        """Let that much time pass: enqueue the firings in it, in the order of their nominal times."""
        since, self._now = self._now, self._now + ms
        declared = self._declarations.schedules
        if not declared:
            return
        await self._declare()
        rows = {row.name: row for row in (await all_schedules(self._client.ask, self._keys))[0]}
        plans = {name: Plan(each) for name, each in declared.items() if name in rows and not rows[name].paused}
        fired: dict[str, int] = {}
        firings = [(at, name) for name, plan in plans.items() for at in _between(plan, since, self._now)]
        for nominal, name in sorted(firings):
            self._owed.setdefault(name, []).append(nominal)
            if await self._fire(declared[name]):
                fired[name] = nominal
        for name, nominal in fired.items():
            following = plans[name].next_after(self._now)
            tick = ops.Tick(rows[name], nominal, following, following, fired=nominal)
            await self._client.ask(ops.tick_schedules(self._keys, [tick]))

    async def _declare(self) -> None:
        pairs = [(each.name, each.encode()) for each in self._declarations.schedules.values()]
        for page in in_pieces(
            pairs, lambda pair: len(pair[1]), most=ops.SCHEDULES_AT_ONCE, most_bytes=ops.SCHEDULES_BYTES
        ):
            await self._client.ask(ops.declare_schedules(self._keys, page, replace=True))

    async def fire_owed(self) -> bool:
        """Enqueue the firings that wait for the end of a previous one, if it has ended; return False if there were none."""
        fired = [await self._fire(self._declarations.schedules[name]) for name in tuple(self._owed)]
        return any(fired)

    async def _fire(self, definition: Definition) -> bool:
        """Enqueue the owed firings of one schedule, as far as possible; return True if there were any."""
        keys = await self._client.sharding.by_id(
            QueueKeys(self._client.settings.prefix, definition.queue), definition.job
        )
        owed, fired = self._owed.pop(definition.name), False
        for n, nominal in enumerate(owed):
            call = ops.fire_schedule(
                *(keys, definition.name, nominal),
                judged_at=self._now,
                run_at=nominal + jitter_ms(definition, nominal),
                overlap=definition.overlap,
                task=definition.task,
            )
            word = await self._client.link_to(keys.name).call(call)
            if word == "busy":
                self._owed[definition.name] = owed[n:][-MAX_OWED:]
                break
            fired = fired or word == "ok"
        return fired


def _between(plan: Plan, since: int, until: int) -> list[int]:
    """The firings later than `since` and not later than `until` that can make a difference, while nothing runs."""
    match plan.definition.overlap:
        case "skip":
            first = plan.next_after(since)
            return [first] if first <= until else []
        case "cancel":
            return plan.last_between(since, until, 1)
        case "queue":
            return plan.last_between(since, until, MAX_OWED)
