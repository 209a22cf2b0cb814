"""Schedules, end to end: one enqueue per firing whoever leads, what was missed, what overlaps, paused and resumed."""

from __future__ import annotations

import builtins
import logging
import math
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.ops.schedules import fire_schedule
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, eventually, serving, until
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import cron, ops
from worqr.cron import Definition, jitter_ms
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import ScheduleRow
from worqr.peer.leader import schedule_ticker
from worqr.peer.leader.chore import Lease
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.schedule_ticker import ScheduleTicker

pytestmark = [pytest.mark.leaves("{q}:job:cron:*", "{q}:due", "{foreign}:job:cron:*"), pytest.mark.one_server]
"""Of the last firings, which nobody waits for."""

HOUR = 3600.0
DAY_MS = 24 * 3600 * 1000


class Registry:
    """The hash of schedules, seen and changed from outside."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.client = server.client()
        self.prefix = prefix
        self.keys = RegistryKeys(prefix)

    def rows(self) -> dict[str, ScheduleRow]:
        pages: list[ops.Schedules] = []
        while not pages or pages[-1].cursor != "0":
            call = ops.list_schedules(self.keys, pages[-1].cursor if pages else "0")
            script = self.client.register_script(call.script.source)
            pages.append(call.read(script(keys=[call.base], args=list(call.args))))
        return {row.name: row for row in ops.Schedules.join(pages)}

    def row(self, name: str = "s") -> ScheduleRow:
        return self.rows()[name]

    def stand(self, last: int, name: str = "s") -> None:
        """It was judged up to `last`, and the leader is to look at it now."""
        self.client.hset(self.keys.schedules, f"last {name}", last)
        self.client.zadd(self.keys.schedules_due, {name: self.now()})

    def seen(self, name: str = "s") -> float | None:
        """When a peer declared it, in ms for which the mesh was led."""
        return self.client.zscore(self.keys.schedules_seen, name)

    def judged(self, queue: str = "q", name: str = "s") -> tuple[int, str]:
        """The last firing that reached the queue, and what became of it."""
        nominal, _, word = (self.client.hget(QueueKeys(self.prefix, queue).fired, name) or b"0 ").partition(b" ")
        return int(nominal), word.decode()

    def now(self) -> int:
        seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.fixture(autouse=True)
def _not_when_the_hour_is_full() -> None:
    """To tests of hourly schedules it must not strike."""
    if (left := HOUR - time.time() % HOUR) < 15:
        time.sleep(left + 0.1)


@pytest.fixture
def registry(server: Server, prefix: str) -> Registry:
    return Registry(server, prefix)


def nominals(runs: Runs) -> list[int]:
    """The nominal times of the runs, in ms."""
    found: list[int] = []
    for context in runs.contexts:
        assert context.id == "cron:s"
        assert context.scheduled_for is not None
        found.append(round(context.scheduled_for.timestamp() * 1000))
    return found


def assert_each_once(found: list[int], period: int) -> None:
    """No firing twice, none left out, in their order."""
    assert found == list(range(found[0], found[-1] + 1, period))
    assert found[0] % period == 0


def declare(mesh: worqr.Mesh, period: float, **how: Any) -> None:
    mesh.every(period, mesh.call("q", b"tick"), **{"name": "s", **how})


# Once


async def test_three_peers_that_all_declare_it_fire_it_once(new_mesh: NewMesh) -> None:
    runs = Runs()
    async with AsyncExitStack() as stack:
        for _ in range(3):
            mesh = new_mesh()
            declare(mesh, 0.2, overlap="queue")
            await stack.enter_async_context(serving(mesh, "q", runs))
        await runs.wait(15)
    assert_each_once(nominals(runs), 200)
    assert set(runs.tasks) == {b"tick"}
    for context in runs.contexts:
        assert context.run_at == context.scheduled_for


async def test_whoever_leads_fires_what_others_declare(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs()
    declare(other, 0.2)
    async with serving(mesh, "q", runs) as peer:
        await until(lambda: peer._engine.leader.leads)
        monkeypatch.setattr(
            Leader, "may_request_lease", lambda leader: leader is peer._engine.leader
        )  # nobody else asks for the lease
        async with other.join(grace=0) as second:
            await runs.wait(3)
            assert not second._engine.leader.leads


CHILD = """
import sys, trio, worqr
mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
mesh.every(0.25, mesh.call("q", b"tick"), name="s", overlap="queue")
async def main():
    async with mesh.join() as peer:
        while not peer._engine.leader.leads:
            await trio.sleep(0.01)
        print("leads", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_leader_that_is_killed_is_followed_by_one_that_leaves_nothing_out(
    server: Server, prefix: str, new_mesh: NewMesh, spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, mesh = Runs(), new_mesh()
    declare(mesh, 0.25, overlap="queue")
    child = spawn(CHILD, server.url, prefix)
    assert await child.line() == "leads"
    alive = child.process.poll
    monkeypatch.setattr(Leader, "may_request_lease", lambda _leader: alive() is not None)  # asks for no lease before
    async with serving(mesh, "q", runs) as peer:
        await runs.wait(4)
        assert not peer._engine.leader.leads
        child.kill()
        before = len(runs.tasks)
        await until(lambda: peer._engine.leader.leads)
        await runs.wait(before + 10)
        await eventually(partial(workers, mesh), [peer.id])
    assert_each_once(nominals(runs), 250)


async def workers(mesh: worqr.Mesh) -> list[str]:
    return [worker.id for worker in await mesh.workers()]


async def test_two_who_both_believe_to_lead_fire_once(new_mesh: NewMesh, registry: Registry) -> None:
    names = [f"s{n}" for n in range(30)]
    one, two = new_mesh(), new_mesh()
    for mesh in (one, two):
        for name in names:
            mesh.every(HOUR, mesh.call("q", b"tick"), name=name)
    async with one.join(grace=0) as a, two.join(grace=0) as b:
        last = registry.row("s0").last - 5 * 3_600_000
        for name in names:
            registry.stand(last, name)
        async with trio.open_nursery() as nursery:
            for peer in (a, b):
                nursery.start_soon(tick_twice, peer)
        info = await one.queue("q").info()
        assert info.counts["enqueued"] == len(names)
        for name in names:
            assert registry.row(name).fired == registry.row(name).last > last


async def tick_twice(peer: worqr.Peer) -> None:
    """What is fired in one turn is noted in the next."""
    for _ in range(2):
        await peer._engine._ticker.tick_once()  # pyright: ignore[reportPrivateUsage]


async def test_a_leader_that_died_before_it_noted_a_firing_has_fired_it(mesh: worqr.Mesh, registry: Registry) -> None:
    """The next leader judges it again: the queue knows it."""
    declare(mesh, HOUR)
    async with mesh.join(grace=0):
        pass
    nominal = registry.row().last // 3_600_000 * 3_600_000
    registry.stand(nominal - 1)
    runs = Runs()
    async with serving(mesh, "q", runs):
        keys = QueueKeys(registry.prefix, "q")
        by_hand = fire_schedule(keys, "s", nominal, judged_at=nominal, run_at=nominal, overlap="skip", task=b"by hand")
        await mesh._client.ask(by_hand)
        await eventually(_of(lambda: registry.row().last), nominal)
        await runs.wait(1)
        assert registry.row().fired == nominal
    assert runs.tasks in ([b"by hand"], [b"tick"])
    assert nominals(runs) == [nominal]


def _of(look: Callable[[], Any]) -> Callable[[], Any]:
    async def looked() -> Any:
        return look()

    return looked


# Missed


@pytest.mark.parametrize(("misfire", "caught_up"), [("skip", 0), ("once", 1), (3, 3)])
async def test_what_was_missed_while_nobody_lived(
    mesh: worqr.Mesh, registry: Registry, misfire: Any, caught_up: int
) -> None:
    declare(mesh, HOUR, misfire=misfire, overlap="queue")
    async with mesh.join(grace=0):
        pass
    newest = registry.row().last // 3_600_000 * 3_600_000
    registry.stand(newest - 5 * 3_600_000 + 1)
    runs = Runs()
    async with serving(mesh, "q", runs):
        await eventually(_of(lambda: registry.row().last), newest)
        await runs.wait(caught_up)
        await eventually(_of(lambda: registry.row().pending), ())
        assert registry.row().fired == (newest if caught_up else None)
        assert registry.row().next == newest + 3_600_000
        await eventually(lambda: missed(mesh), [caught_up])
    assert nominals(runs) == [newest - n * 3_600_000 for n in reversed(range(caught_up))]


async def missed(mesh: worqr.Mesh) -> list[int | None]:
    """How many firings the entries in the log of the mesh make up for."""
    return [entry.count for entry in await mesh.log() if entry.kind == "schedule_missed"]


async def test_a_new_or_changed_schedule_has_missed_nothing(
    mesh: worqr.Mesh, other: worqr.Mesh, registry: Registry
) -> None:
    declare(mesh, HOUR, misfire=3)
    async with mesh.join(grace=0):
        registry.stand(registry.row().last - 10 * 3_600_000)
    declare(other, HOUR, misfire=2)
    since = registry.now()
    async with other.join(grace=0):
        assert registry.row().last >= since
        await eventually(_of(lambda: registry.row().next is not None), True)
        assert registry.row().fired is None


# Many at once


@asynccontextmanager
async def ticking(mesh: worqr.Mesh) -> AsyncGenerator[ScheduleTicker]:
    """A ticker that leads and ticks only when the test says so."""
    lease = Lease()
    lease.take(math.inf)

    async def shards_of(queue: str) -> tuple[QueueKeys, ...]:
        return (QueueKeys(mesh.prefix, queue),)

    async with mesh.connect():
        ticker = ScheduleTicker(mesh._client.link, RegistryKeys(mesh.prefix), lease, shards_of)
        await ticker.tick_once()
        yield ticker


async def stored(mesh: worqr.Mesh, registry: Registry, names: list[str], *, ago: float, **options: Any) -> int:
    """Schedules of the queue q that were due so many seconds ago; return their nominal time."""
    when = registry.now() - round(ago * 1000)
    period = when // 400
    pages = [
        [
            (n, Definition(name=n, queue="q", task=b"x", every_ms=period, **options).encode())
            for n in names[start:][:250]
        ]
        for start in range(0, len(names), 250)
    ]
    await mesh._client.link.call_all([ops.declare_schedules(registry.keys, page, replace=True) for page in pages])
    registry.client.hset(registry.keys.schedules, mapping={f"last {name}": 400 * period - 1 for name in names})
    registry.client.zadd(registry.keys.schedules_due, dict.fromkeys(names, 400 * period))
    return 400 * period


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of each batch that was sent."""
    sent: list[list[str]] = []
    usual = ops.fire_schedules

    def recorded(keys: QueueKeys, firings: Any, **how: Any) -> Any:
        sent.append([each.name for each in firings])
        return usual(keys, firings, **how)

    monkeypatch.setattr(ops, "fire_schedules", recorded)
    return sent


@pytest.mark.parametrize("busy", [True, False])
async def test_what_became_due_while_the_leader_was_busy_is_on_time(
    mesh: worqr.Mesh, registry: Registry, busy: bool
) -> None:
    async with ticking(mesh) as ticker:
        nominal = await stored(mesh, registry, ["s"], ago=20, misfire=0)
        ticker._term.caught_up_at -= 30 if busy else 0  # pyright: ignore[reportPrivateUsage]
        await ticker.tick_once()
        assert registry.judged() == ((nominal, "ok") if busy else (0, ""))
        await ticker.tick_once()
        assert registry.row().fired == (nominal if busy else None)


async def test_the_time_in_which_the_leader_was_busy_ends_when_nothing_is_left(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ticking(mesh) as ticker:
        term = ticker._term  # pyright: ignore[reportPrivateUsage]
        term.caught_up_at = since = trio.current_time() - 30
        names = [f"s{n}" for n in range(251)]
        await stored(mesh, registry, names, ago=1)
        await ticker.tick_once()
        assert term.caught_up_at == since
        await ticker.tick_once()
        assert term.caught_up_at > since + 30
        await mesh.queue("q").delete()


async def test_a_herd_goes_in_batches_and_tenants_take_turns(
    mesh: worqr.Mesh, registry: Registry, batches: list[list[str]]
) -> None:
    names = [f"a/{n}" for n in range(600)]
    async with ticking(mesh) as ticker:
        nominal = await stored(mesh, registry, [*names, "b/1", "b/2", "z"], ago=1, misfire=0)
        await ticker.tick_once()
        await ticker.tick_once()
        assert {row.fired for row in registry.rows().values()} == {nominal}
        await mesh.queue("q").delete()
    assert [len(batch) for batch in batches] == [250, 250, 103]
    assert batches[0][:5] == ["a/0", "b/1", "z", "a/1", "b/2"]


async def test_what_a_herd_has_missed_is_one_line_and_one_entry(
    mesh: worqr.Mesh, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"s{n}" for n in range(300)]
    async with ticking(mesh) as ticker:
        await stored(mesh, registry, names, ago=60)
        await ticker.tick_once()
        await eventually(lambda: missed(mesh), [300])
        await mesh.queue("q").delete()
    [line] = [each.getMessage() for each in caplog.records if "not fired between" in each.getMessage()]
    assert "and 299 others was not fired" in line
    assert "300 missed firings are made up for" in line


async def test_one_that_the_queue_refuses_costs_no_other_of_its_batch(
    mesh: worqr.Mesh, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"s{n}" for n in range(9)]
    key = f"{QueueKeys(registry.prefix, 'q').base}:active:cron:s4"
    registry.client.set(key, "of another application")
    async with ticking(mesh) as ticker:
        nominal = await stored(mesh, registry, names, ago=1)
        await ticker.tick_once()
        await ticker.tick_once()
        assert {name for name, row in registry.rows().items() if row.fired == nominal} == {*names} - {"s4"}
        registry.client.delete(key)
        assert (await mesh.queue("q").info()).waiting == 8
        await mesh.queue("q").delete()
    assert caplog.text.count("'s4' cannot be fired") == 1


def at_call(monkeypatch: pytest.MonkeyPatch, operation: str, number: int, act: Callable[[], None]) -> list[int]:
    """Call `act` before the call of this number of an operation is made. Return a list that grows with each call."""
    usual, calls = getattr(ops, operation), list[int]()

    def called(*args: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return usual(*args, **how)

    monkeypatch.setattr(ops, operation, called)
    return calls


def is_away() -> None:
    raise worqr.Unavailable("away", sent=None)


async def test_a_server_that_goes_away_in_the_middle_of_a_herd_ends_no_leader(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s{n}" for n in range(600)]
    async with ticking(mesh) as ticker:
        nominal = await stored(mesh, registry, names, ago=1)
        at_call(monkeypatch, "tick_schedules", 3, is_away)
        with pytest.raises(worqr.Unavailable):
            await ticker.tick_once()
        for _ in range(3):
            await ticker.tick_once()
        assert {row.fired for row in registry.rows().values()} == {nominal}
        assert (await mesh.queue("q").info()).counts["enqueued"] == 600
        await mesh.queue("q").delete()


async def test_a_herd_that_is_put_off_once_stays_on_time(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_ticker, "POSTPONE_MS", 200)
    async with ticking(mesh) as ticker:
        ticker._term.caught_up_at -= 30
        nominal = await stored(mesh, registry, [f"s{n}" for n in range(600)], ago=20, misfire=0)
        at_call(monkeypatch, "fire_schedules", 2, is_away)
        with trio.fail_after(PATIENCE):
            while {row.fired for row in registry.rows().values()} != {nominal}:
                await ticker.tick_once()
                assert not any(row.last >= nominal and row.fired is None for row in registry.rows().values()), "dropped"
                await trio.sleep(0.02)
        assert (await mesh.queue("q").info()).counts["enqueued"] == 600
        await mesh.queue("q").delete()


async def test_a_herd_goes_on_after_a_lease_that_was_lost_for_a_moment(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ticking(mesh) as ticker, trio.open_nursery() as nursery:
        lease = ticker._lease
        ticker._term.caught_up_at -= 12
        nominal = await stored(mesh, registry, [f"s{n}" for n in range(2000)], ago=11, misfire=0)
        calls = at_call(monkeypatch, "fire_schedules", 3, lambda: setattr(lease, "_until", 0.0))
        nursery.start_soon(ticker.tick_forever)
        with trio.fail_after(PATIENCE):
            while len(calls) < 3 or ticker._term.leads_since is not None:
                await trio.sleep(0.01)
            lease.take(math.inf)
            while {row.fired for row in registry.rows().values()} != {nominal}:
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert "was not fired" not in caplog.text
    async with mesh.connect():
        assert (await mesh.queue("q").info()).counts["enqueued"] == 2000
        await mesh.queue("q").delete()


async def test_ended_schedules_of_a_node_that_is_away_are_asked_for_once(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    async with ticking(mesh) as ticker:
        names = [f"s{n}" for n in range(5)]
        await stored(mesh, registry, names, ago=1)
        week_ago = registry.now() - 8 * DAY_MS
        for name in names:
            registry.client.hset(
                registry.keys.schedules, mapping={f"ver {name}": "7 far", f"ended {name}": str(week_ago)}
            )

        async def away(call: Any) -> Any:
            asked.append(call.base)
            raise worqr.Unavailable("node is away", sent=False)

        monkeypatch.setattr(ticker, "_ask_queue", away)
        await ticker.tick_once()
        assert len(asked) == 1


# A clock that jumps


async def test_what_a_clock_far_ahead_has_noted_silences_nothing(mesh: worqr.Mesh, registry: Registry) -> None:
    """A cursor, a look, and the queue's memory of the last firing, all of tomorrow."""
    declare(mesh, 0.2)
    async with mesh.join(grace=0):
        pass
    tomorrow = (registry.now() + DAY_MS) // 200 * 200
    fields = {"last s": tomorrow, "next s": tomorrow + 200, "clock": tomorrow}
    registry.client.hset(registry.keys.schedules, mapping=fields)
    registry.client.zadd(registry.keys.schedules_due, {"s": tomorrow + 200})
    registry.client.hset(QueueKeys(registry.prefix, "q").fired, "s", f"{tomorrow} ok")
    registry.client.expire(QueueKeys(registry.prefix, "q").fired, 1000)
    runs = Runs()
    async with serving(mesh, "q", runs):
        await runs.wait(3)
        assert (await mesh.schedules())[0].next_run < datetime.now(UTC) + timedelta(minutes=1)
    assert max(nominals(runs)) < tomorrow - DAY_MS + 60_000


async def test_a_leader_that_slept_does_not_count_the_time_in_which_it_slept(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_ticker, "RELOAD", 0.05)
    declare(mesh, HOUR)

    def led() -> int:
        return int(registry.client.hget(registry.keys.schedules, "led") or b"0")

    async with mesh.join(grace=0) as peer:
        ticker = peer._engine._ticker  # pyright: ignore[reportPrivateUsage]
        await until(lambda: led() > 0)
        before = led()
        ticker._term.led_at -= 24 * HOUR  # pyright: ignore[reportPrivateUsage]
        await until(lambda: led() > before)
        assert led() - before <= 10_000


# Overlap


async def test_skip_lets_firings_pass_while_one_runs(mesh: worqr.Mesh, registry: Registry) -> None:
    held = Held()
    declare(mesh, 0.2)
    async with serving(mesh, "q", held):
        await held.wait(1)
        await until(lambda: registry.judged()[1] == "skipped")
        skipped = registry.judged()[0]
        await until(lambda: registry.judged()[0] > skipped)
        assert len(held.tasks) == 1
        held.gate.set()
        await held.wait(2)
    first, second = nominals(held)[:2]
    assert second > skipped > first


async def test_queue_runs_every_firing_one_after_another(mesh: worqr.Mesh, registry: Registry) -> None:
    held = Held()
    running: list[int] = []

    async def handler(task: bytes) -> None:
        running.append(1)
        assert len(running) == 1
        await held(task)
        running.pop()

    declare(mesh, 0.2, overlap="queue")
    async with serving(mesh, "q", handler):
        await held.wait(1)
        await until(lambda: len(registry.row().pending) >= 3)
        assert len(held.tasks) == 1
        assert registry.row().pending[0] == nominals(held)[0] + 200
        held.gate.set()
        await held.wait(12)
        await until(lambda: registry.row().pending == (), what="the backlog is worked off")
    assert_each_once(nominals(held), 200)


async def test_cancel_ends_the_previous_one_first(mesh: worqr.Mesh) -> None:
    held = Held()
    declare(mesh, 0.5, overlap="cancel")
    async with serving(mesh, "q", held):
        await held.wait(3)
        assert {reason for _, reason in held.cancelled} == {"cancel"}
        assert len(held.tasks) - 1 <= len(held.cancelled) <= len(held.tasks)
    found = nominals(held)
    assert found == sorted(set(found))


async def test_too_many_that_wait_are_dropped_the_oldest_first(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedule_ticker, "MAX_PENDING", 3)
    held = Held()
    declare(mesh, 0.1, overlap="queue")
    async with serving(mesh, "q", held):
        await held.wait(1)
        await until(lambda: registry.row().last >= nominals(held)[0] + 1000)
        owed = registry.row().pending
    assert len(owed) == 3
    assert owed[0] > nominals(held)[0] + 100
    assert re.search(r"'s': \d+ firings wait for the one before; the oldest are dropped", caplog.text)


# Jitter


async def test_jitter_is_added_to_the_nominal_time(mesh: worqr.Mesh) -> None:
    runs = Runs()
    declare(mesh, 0.5, jitter=0.4)
    async with serving(mesh, "q", runs):
        await runs.wait(3)
    definition = Definition(name="s", queue="q", task=b"tick", every_ms=500, jitter_ms=400)
    for nominal, context in zip(nominals(runs), runs.contexts, strict=True):
        assert context.run_at == context.scheduled_for + timedelta(milliseconds=jitter_ms(definition, nominal))
        assert datetime.now(UTC) >= context.run_at


# Seen and paused at run time


async def test_a_paused_schedule_lets_its_firings_pass_and_makes_up_for_none(
    mesh: worqr.Mesh, other: worqr.Mesh, registry: Registry
) -> None:
    runs = Runs()
    declare(mesh, 0.2, misfire=100, overlap="queue")
    async with serving(mesh, "q", runs), other.connect():
        await runs.wait(2)
        await other.pause_schedule("s")
        [schedule] = await other.schedules()
        assert schedule.paused
        paused_at = registry.now()
        await until(lambda: registry.now() > paused_at + 600)
        assert max(nominals(runs)) <= paused_at
        [schedule] = await other.schedules()
        assert schedule.next_run > datetime.fromtimestamp(paused_at / 1000 + 0.5, UTC)
        resumed_at, before = registry.now(), len(runs.tasks)
        await other.pause_schedule("s", paused=False)
        await runs.wait(before + 2)
        [schedule] = await other.schedules()
        assert not schedule.paused
    assert all(nominal <= paused_at or nominal > resumed_at for nominal in nominals(runs))


async def test_a_pause_outlives_restarts_and_changes(new_mesh: NewMesh, registry: Registry) -> None:
    for period in (0.2, 0.2, 0.3):
        mesh, runs = new_mesh(), Runs()
        declare(mesh, period)
        async with serving(mesh, "q", runs):
            await mesh.pause_schedule("s")
            before, since = len(runs.tasks), registry.now()
            await until(lambda: registry.now() > since + 500)  # noqa: B023
            assert (await mesh.schedules())[0].paused
        assert len(runs.tasks) <= before + 1
        mine = registry.judged()[0]
        assert mine <= since


async def test_schedules_are_shown_by_name_with_their_last_and_next_run(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    mesh.cron("0 3 * * *", mesh.call("q"), name="nightly", timezone="Europe/Berlin")
    declare(mesh, 0.2)
    async with other.connect():
        assert await other.schedules() == []
        async with mesh.join(grace=0):
            [nightly, s] = await other.schedules()  # known at once, before anybody ticked it
            assert (nightly.name, nightly.last_run, nightly.paused) == ("nightly", None, False)
            assert timedelta(0) < nightly.next_run - datetime.now(UTC) < timedelta(hours=26)
            assert nightly.next_run.tzinfo is UTC
            await eventually(lambda: _has_run(other), True)
            s = (await other.schedules())[1]
            assert s.last_run is not None
            assert s.last_run < s.next_run


async def _has_run(mesh: worqr.Mesh) -> bool:
    return (await mesh.schedules())[1].last_run is not None


async def test_pausing_what_is_not_there_says_what_is(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=r"there is no schedule 'nigthly' in this mesh; there are none"):
            await mesh.pause_schedule("nigthly")
        mesh.cron("0 3 * * *", mesh.call("q"), name="nightly")
        async with mesh.join(grace=0):
            with pytest.raises(worqr.UsageError, match=r"there is no schedule 'nigthly' .*; did you mean 'nightly'\?"):
                await mesh.pause_schedule("nigthly")
            with pytest.raises(worqr.UsageError, match=r"there are 'nightly'"):
                await mesh.pause_schedule("xyz")


# Declaring


async def test_one_that_is_declared_after_joining_is_fired_too(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with serving(mesh, "q", runs):
        declare(mesh, 0.2)
        await runs.wait(2)


async def test_a_registry_that_lost_it_is_told_again_and_a_newer_definition_stays(
    mesh: worqr.Mesh, other: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_ticker, "REDECLARE", 0.2)
    monkeypatch.setattr(schedule_ticker, "LED_EVERY", 0.05)
    monkeypatch.setattr(schedule_ticker, "RELOAD", 0.05)
    declare(mesh, HOUR)
    async with mesh.join(grace=0):
        registry.client.delete(registry.keys.schedules)
        await until(lambda: "s" in registry.rows())
        declare(other, 2 * HOUR)
        async with other.join(grace=0):
            pass
        for _ in range(3):
            seen = registry.seen() or 0.0
            await until(lambda: (registry.seen() or 0.0) > seen)  # noqa: B023
        assert registry.row().definition == other._declarations.schedules["s"].encode()


async def test_definitions_are_sent_once_and_then_only_names(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_ticker, "REDECLARE", 0.0)
    declared: list[int] = []
    renewed: list[int] = []
    declare_page, renew_page = ops.declare_schedules, ops.renew_schedules

    def declare_counted(keys: RegistryKeys, page: Any, **how: Any) -> Any:
        declared.append(len(page))
        return declare_page(keys, page, **how)

    def renew_counted(keys: RegistryKeys, page: Any, *owner: str) -> Any:
        renewed.append(len(page))
        return renew_page(keys, page, *owner)

    monkeypatch.setattr(ops, "declare_schedules", declare_counted)
    monkeypatch.setattr(ops, "renew_schedules", renew_counted)
    for n in range(600):
        mesh.every(HOUR, mesh.call("q"), name=f"s{n}")
    async with mesh.join(grace=0):
        await until(lambda: len(renewed) >= 3)
        assert declared == [250, 250, 100]
        assert renewed[:3] == [250, 250, 100]
        assert len(await mesh.schedules()) == 600


async def test_hundreds_that_are_due_at_once_are_all_fired(mesh: worqr.Mesh, registry: Registry) -> None:
    names = [f"s{n}" for n in range(600)]
    for name in names:
        mesh.every(HOUR, mesh.call("q"), name=name)
    async with mesh.join(grace=0):
        pass
    hour = registry.now() // 3_600_000 * 3_600_000
    registry.client.hset(registry.keys.schedules, mapping={f"last {name}": hour - 1 for name in names})
    registry.client.zadd(registry.keys.schedules_due, dict.fromkeys(names, hour))
    async with mesh.join(grace=0):
        await until(lambda: all(row.fired == hour for row in registry.rows().values()))
        assert (await mesh.queue("q").info()).counts["enqueued"] == len(names)
        assert registry.client.zcount(registry.keys.schedules_due, "-inf", registry.now()) == 0
        await mesh.queue("q").delete()


async def test_what_nobody_declares_any_more_is_dropped_when_the_mesh_was_led_for_a_day(
    mesh: worqr.Mesh, other: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_ticker, "DROP_EVERY", 0.0)
    monkeypatch.setattr(schedule_ticker, "RELOAD", 0.05)
    declare(other, HOUR)
    async with other.join(grace=0):
        pass
    registry.client.hset(registry.keys.schedules, "led", DAY_MS)
    async with mesh.join(grace=0) as peer:
        await until(lambda: peer._engine.leader.leads)
        await eventually(_of(lambda: registry.row().next is not None), True)
        await trio.sleep(0.2)
        assert "s" in registry.rows()  # not by a new leader
        monkeypatch.setattr(schedule_ticker, "LED_BEFORE_DROPPING", 0)
        await until(lambda: "s" not in registry.rows())


def version(mesh: worqr.Mesh, *names: str) -> None:
    """A version of an application: schedules with these names, and handlers of a topic."""
    for name in names:

        @mesh.on("order.paid", name=name)
        async def handle(number: int) -> None: ...

        mesh.every(HOUR, mesh.call(name, 1), name=name)


async def test_a_rolling_deploy_keeps_what_runs_and_drops_what_only_older_ones_declare(
    new_mesh: NewMesh, registry: Registry, monkeypatch: pytest.MonkeyPatch, expects_left: Callable[..., None]
) -> None:
    expects_left("topics", "{*}*")
    for name, value in {"DROP_EVERY": 0.0, "RELOAD": 0.05, "LED_BEFORE_OUTDATED": 0.0}.items():
        monkeypatch.setattr(schedule_ticker, name, value)
    first, second, third = (new_mesh(app="shop", deploy=deploy) for deploy in (1, 2, 3))
    version(first, "gone", "both")
    version(second, "both", "new")
    version(third, "new")
    looks = 0

    async def is_looked_at() -> None:
        """Until the leader has looked for outdated ones twice."""
        before = looks
        await until(lambda: looks >= before + 2)

    drop = ScheduleTicker._drop_outdated

    async def counted(self: ScheduleTicker, now: float) -> None:
        nonlocal looks
        await drop(self, now)
        looks += 1

    monkeypatch.setattr(ScheduleTicker, "_drop_outdated", counted)

    async def holds(*names: str) -> None:
        await is_looked_at()
        assert registry.rows().keys() == set(names)
        assert {each.queue for each in await second.topics()} == set(names)

    async with second.connect():
        async with first.join(grace=0):
            async with second.join(grace=0):
                await holds("gone", "both", "new")
                assert (await second.publish("order.paid", 1)).to == ("both", "gone", "new")
        async with second.join(grace=0):
            await holds("both", "new")
            async with first.join(grace=0):  # one more of the older ones
                await holds("gone", "both", "new")
            await holds("both", "new")
        async with first.join(grace=0):  # a roll-back
            await holds("gone", "both", "new")
        async with third.join(grace=0):
            await holds("new")
            assert {each.queue for each in await second.log() if each.kind == "unsubscribed"} == {"gone", "both"}


async def test_no_schedules_cost_one_look_in_three_seconds(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[tuple[float, float]] = []
    tick = ScheduleTicker.tick_once

    async def counted(self: ScheduleTicker) -> float:
        began = trio.current_time()
        again = await tick(self)
        ticks.append((again - trio.current_time(), again - began))
        return again

    monkeypatch.setattr(ScheduleTicker, "tick_once", counted)
    async with mesh.join(grace=0):
        await until(lambda: ticks)
    assert ticks[0][0] <= 3 <= ticks[0][1]  # 3 s from somewhere in between


# What cannot be read here


async def test_a_leader_without_the_extra_says_so_once_and_fires_the_others(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.cron("* * * * *", mesh.call("q"), name="cron")
    declare(mesh, 0.2)
    usual = builtins.__import__

    def without_cronsim(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cronsim":
            raise ImportError(name)
        return usual(name, *args, **kwargs)

    cron._cron_times.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.delitem(sys.modules, "cronsim")
    monkeypatch.setattr(builtins, "__import__", without_cronsim)
    runs = Runs()
    async with serving(mesh, "q", runs):
        await runs.wait(5)
    [record] = [
        each
        for each in caplog.records
        if each.name == "worqr.peer.leader.schedule_ticker" and each.levelno >= logging.WARNING
    ]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "tick_schedules: schedule 'cron' is not fired while this worker is the leader: "
        "cron expressions need cronsim: run `pip install 'worqr[cron]'`"
    )


async def test_what_was_spoilt_keeps_nobody_from_firing_the_others(mesh: worqr.Mesh, registry: Registry) -> None:
    runs = Runs()
    declare(mesh, 0.2)
    for name in ("a", "b", "c"):
        mesh.every(HOUR, mesh.call("q"), name=name)
    async with mesh.join(grace=0):
        pass
    fields = {"last a": "nonsense", "def b": '{"name":"b","moon":"full"}', "last c": 10**15 - 1}
    registry.client.hset(registry.keys.schedules, mapping={**fields, "owed c": "1 x 2"})
    registry.client.zadd(registry.keys.schedules_due, dict.fromkeys("abc", 0))
    registry.client.hdel(registry.keys.schedules, "next a", "next b", "next c")
    other = worqr.Mesh(mesh.url, prefix=mesh.prefix)
    async with serving(other, "q", runs):
        found = {schedule.name: schedule for schedule in await other.schedules()}
        assert set(found) == {"a", "b", "c", "s"}
        assert found["b"].next_run < datetime.now(UTC)
        await runs.wait_for(lambda: sum(context.id == "cron:s" for context in runs.contexts) >= 5)


async def test_a_queue_that_refuses_delays_only_its_own_schedules(
    mesh: worqr.Mesh, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it refused is fired when it takes it again."""
    monkeypatch.setattr(schedule_ticker, "POSTPONE_MS", 200)
    foreign = QueueKeys(registry.prefix, "foreign").suspects
    registry.client.set(foreign, "of another application")
    mesh.every(0.5, mesh.call("foreign"), name="foreign")
    declare(mesh, 0.2)
    runs = Runs()
    async with serving(mesh, "q", runs):
        await until(lambda: "'foreign' cannot be fired" in caplog.text)
        await runs.wait(5)
        registry.client.delete(foreign)
        await until(lambda: registry.row("foreign").fired is not None)
    assert caplog.text.count("'foreign' cannot be fired") == 1


async def test_joining_fails_if_the_registry_refuses(mesh: worqr.Mesh, registry: Registry) -> None:
    declare(mesh, 1)
    registry.client.set(registry.keys.schedules, "of another application", ex=100)
    with pytest.raises(worqr.RefusedByServer, match="declare_schedules"):
        async with mesh.join(grace=0):
            raise AssertionError("joined")
    async with mesh.connect():
        assert await mesh.workers() == []


async def test_leaving_takes_no_longer_with_schedules(mesh: worqr.Mesh) -> None:
    declare(mesh, 0.1)
    async with mesh.join(grace=0) as peer:
        await until(lambda: peer._engine.leader.leads)
        started = trio.current_time()
    assert trio.current_time() - started < 15
