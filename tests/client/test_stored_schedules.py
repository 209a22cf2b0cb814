"""``mesh.schedule``: schedules that programs store at run time, and that only the server has."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import permutations
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import eventually
from tests.support.servers import Server
from worqr import ops
from worqr.client import schedules, stored_schedules
from worqr.client.schedules import StoredCall, find_schedule
from worqr.client.stored_schedules import _Line, _Plan
from worqr.cron import Definition, at
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import ScheduleRow
from worqr.peer.leader.chore import Lease
from worqr.peer.leader.schedule_ticker import ENDED_KEPT_MS, ScheduleTicker

pytestmark = [pytest.mark.leaves("schedules*", "{*}:schedules", "{*}:job:cron:*", "{*}:due", "{*}:active:*")]
WEEK = 7 * 24 * 3600
MONDAYS: dict[str, Any] = {"cron": "0 7 * * MON", "timezone": "Europe/Berlin"}


class World:
    """A mesh, and the server behind it."""

    def __init__(self, mesh: worqr.Mesh, server: Server) -> None:
        self.mesh, self.client = mesh, server.client()
        self.registry, self.queue = RegistryKeys(mesh.prefix), QueueKeys(mesh.prefix, "report")

    @property
    def report(self) -> worqr.Call[Any]:
        return self.mesh.call("report", b"acme")

    async def row(self, name: str = "report/acme") -> ScheduleRow:
        found = await find_schedule(self.mesh._client, name)
        assert found is not None
        return found[0]

    def now(self) -> int:
        seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def make_due(self, name: str, last: int) -> None:
        """It was judged up to `last`, and the leader is to look at it now."""
        self.client.hset(self.registry.schedules, f"last {name}", last)
        self.client.zadd(self.registry.schedules_due, {name: self.now()})

    def jobs(self) -> int:
        return int(self.client.hget(self.queue.counts, "enqueued") or 0)


@pytest.fixture
async def world(mesh: worqr.Mesh, server: Server) -> AsyncIterator[World]:
    async with mesh.connect():
        yield World(mesh, server)


@asynccontextmanager
async def ticking(world: World) -> AsyncGenerator[ScheduleTicker]:
    """A ticker that leads and ticks only when the test says so."""
    lease, mesh = Lease(), world.mesh
    lease.take(math.inf)

    async def shards_of(queue: str) -> tuple[QueueKeys, ...]:
        return (QueueKeys(mesh.prefix, queue),)

    yield ScheduleTicker(mesh._client.link, world.registry, lease, shards_of)


async def fired(world: World, ticker: ScheduleTicker, name: str = "report/acme") -> ScheduleRow:
    """Let a leader fire what is due, and store it."""
    await ticker.tick_once()
    await ticker.tick_once()
    return await world.row(name)


# Put


async def test_a_schedule_is_created_then_unchanged_then_updated(world: World) -> None:
    mesh = world.mesh
    assert await mesh.schedule("report/acme", world.report, **MONDAYS) == "created"
    before = await world.row()
    assert await mesh.schedule("report/acme", world.report, **MONDAYS) == "unchanged"
    row = replace(await world.row(), version=before.version, as_stored=before.as_stored)
    assert row == before, "but for its number"
    assert await mesh.schedule("report/acme", mesh.call("report", b"other"), **MONDAYS) == "updated"
    [schedule] = await mesh.schedules()
    assert (schedule.name, schedule.queue, schedule.cron) == ("report/acme", "report", "0 7 * * MON")
    assert (schedule.timezone, schedule.stored, schedule.ended) == ("Europe/Berlin", True, False)


async def test_its_call_is_only_in_the_slot_of_its_queue(world: World) -> None:
    await world.mesh.schedule("report/acme", world.mesh.call("report", b"secret"), **MONDAYS)
    registry: Any = world.client.hvals(world.registry.schedules)
    queue: Any = world.client.hget(world.queue.schedules, "report/acme")
    assert b"secret" not in b"".join(registry)
    assert b"secret" in queue


async def test_a_stored_schedule_never_expires_whatever_is_declared(world: World, new_mesh: NewMesh) -> None:
    declaring = new_mesh()
    declaring.every(3600, declaring.call("q"), name="declared")
    await world.mesh.schedule("report/acme", world.report, **MONDAYS)
    keys = world.registry
    for _ in range(2):
        async with declaring.join(grace=0):
            pass
        for key in (keys.schedules, keys.schedules_due, keys.schedules_stored, world.queue.schedules):
            assert world.client.ttl(key) == -1, key
    assert await world.mesh.schedule_handle("report/acme").delete()
    assert 0 < world.client.ttl(keys.schedules) <= 30 * 24 * 3600
    assert not world.client.exists(keys.schedules_stored, world.queue.schedules)


async def test_a_stored_schedule_stays_when_undeclared_ones_are_dropped(world: World) -> None:
    definition = Definition(name="old", queue="q", task=b"", every_ms=1000).encode()
    await world.mesh._client.ask(ops.declare_schedules(world.registry, [("old", definition)], replace=True))
    await world.mesh.schedule("report/acme", world.report, **MONDAYS)
    assert await world.mesh._client.ask(ops.renew_schedules(world.registry, ["report/acme"])) == []
    assert await world.mesh._client.ask(ops.drop_schedules(world.registry, 0)) == [("old", definition)]
    assert (await world.row()).version


async def test_a_change_of_arguments_forgets_nothing_and_a_change_of_times_does(world: World) -> None:
    mesh = world.mesh
    await mesh.schedule("report/acme", world.report, **MONDAYS)
    world.make_due("report/acme", 1000)
    await mesh.schedule("report/acme", mesh.call("report", b"other"), **MONDAYS)
    assert (await world.row()).last == 1000
    await mesh.schedule("report/acme", mesh.call("report", b"other"), cron="0 8 * * MON")
    assert (await world.row()).last > 1000


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("", {}, "1 to 200 bytes"),
        ("x" * 151, {}, "at most 150 bytes"),
        ("report//acme", {}, "empty segment"),
        ("a", {"every": 60}, r"cron= or every=, and not both"),
        ("a", {"cron": None}, r"cron= or every=, and not both"),
        ("a", {"cron": "nonsense"}, "five fields"),
        ("a", {"cron": "0 7 * * *", "timezone": "Mars"}, "timezone 'Mars' is not known"),
        ("a", {"cron": None, "every": 60}, "takes no timezone"),
        ("a", {"misfire": "never"}, "misfire must be"),
        ("a", {"overlap": "both"}, "overlap must be"),
        ("a", {"times": 0}, "times"),
        ("a", {"until": datetime(2030, 1, 1)}, "until"),
        ("a", {"colour": "red"}, "no option 'colour'"),
    ],
)
async def test_what_is_not_valid_is_refused_and_stores_nothing(
    world: World, name: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(worqr.UsageError, match=why):
        await world.mesh.schedule(name, world.report, **{**MONDAYS, **options})
    assert await world.mesh.schedules() == []
    assert not world.client.exists(world.queue.schedules)


async def test_a_large_payload_and_options_without_effect_are_refused(world: World) -> None:
    mesh = world.mesh

    @mesh.task(name="greet")
    async def greet(name: str) -> None: ...

    with pytest.raises(worqr.UsageError, match="at most 4,096 fit"):
        await mesh.schedule("a", mesh.call("report", b"x" * 4097), **MONDAYS)
    with pytest.raises(worqr.UsageError, match="'id' would be without effect"):
        await mesh.schedule("a", greet.options(id="x").call("Ada"), **MONDAYS)
    with pytest.raises(worqr.UsageError, match="a schedule takes a call"):
        await mesh.schedule("a", greet, **MONDAYS)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_name_of_another_function_is_a_conflict_unless_it_is_replaced(world: World) -> None:
    mesh = world.mesh
    await mesh.schedule("report/acme", world.report, **MONDAYS)
    with pytest.raises(worqr.UsageError, match=r"'report/acme' already: it calls 'report'"):
        await mesh.schedule("report/acme", mesh.call("payment", b""), **MONDAYS)
    payment = QueueKeys(mesh.prefix, "payment")
    assert not world.client.exists(payment.schedules)
    await mesh.schedule("report/acme", mesh.call("payment", b""), **MONDAYS, replace=True)
    assert (await mesh.schedules())[0].queue == "payment"
    assert not world.client.exists(world.queue.schedules)


@pytest.mark.leaves("*", "{*}*")
async def test_a_schedule_moves_when_its_queue_has_fewer_shards(new_mesh: NewMesh) -> None:
    names = [f"report/{letter}" for letter in "abcdefgh"]

    async def put(mesh: worqr.Mesh, **options: Any) -> list[str]:
        return [await mesh.schedule(name, mesh.call("report", b"acme"), every=3600, **options) for name in names]

    async with (before := new_mesh()).connect():
        before.queue("report", shards=4)
        assert await put(before) == ["created"] * 8
    async with (between := new_mesh()).connect():
        homes = {row.home for row in (await between._stored_rows("report/"))[0]}
        await between.queue("report").delete()
    async with (after := new_mesh()).connect():
        wanted = [(name, after.call("report", b"acme"), {"every": 3600}) for name in names]
        applied = await after.schedules_apply("report/", wanted)
        assert applied.updated + applied.unchanged == 8
        assert homes != {"report"} == {row.home for row in (await after._stored_rows("report/"))[0]}
        assert len(await after.export_schedules("report/")) == 8
    async with (later := new_mesh()).connect():
        later.queue("report", shards=4)
        assert await put(later, times=3) == ["updated"] * 8


PROGRAM = ContextVar("PROGRAM", default="")
"""Which of the programs sends a request."""


@pytest.mark.parametrize("order", sorted({"".join(order) for order in permutations("aaabbb")}))
async def test_two_programs_that_replace_a_schedule_at_once_leave_the_one_or_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Whichever of their requests comes first: its call is there, under the number that its times name."""
    mesh, link, turns = world.mesh, world.mesh._client.link, list(order)
    await mesh.schedule("report/acme", world.report, **MONDAYS)
    call = link.call

    async def in_turn(command: ops.Command[Any], **more: Any) -> Any:
        while (program := PROGRAM.get()) and turns and turns[0] != program:
            await trio.lowlevel.checkpoint()
        try:
            return await call(command, **more)
        finally:
            if program and turns:
                turns.pop(0)

    async def put(program: str, queue: str) -> None:
        PROGRAM.set(program)
        await mesh.schedule("report/acme", mesh.call(queue, b"acme"), **MONDAYS, replace=True)
        turns[:] = [each for each in turns if each != program]

    monkeypatch.setattr(link, "call", in_turn)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, "a", "payment")
        nursery.start_soon(put, "b", "report")
    row = await world.row()
    [found] = await call(ops.read_schedules(QueueKeys(mesh.prefix, row.home), ["report/acme"]))
    assert found is not None
    assert found[0] == row.version


async def test_a_declared_name_is_refused_and_a_declaration_of_a_stored_one_is_held(
    world: World, new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    declaring = new_mesh()
    declaring.every(3600, declaring.call("q"), name="nightly")
    async with declaring.join(grace=0):
        with pytest.raises(worqr.UsageError, match=r"'nightly' already: workers declare it"):
            await world.mesh.schedule("nightly", world.report, **MONDAYS)
        with pytest.raises(worqr.UsageError, match="workers declare it"):
            await world.mesh.schedule("nightly", world.report, **MONDAYS, adopt=True)
        with pytest.raises(worqr.UsageError, match="delete it from their code"):
            await world.mesh.schedule_handle("nightly").delete()
    world.client.hset(world.registry.schedules, "led", 20 * 60 * 1000 + 60_000)
    assert await world.mesh.schedule("nightly", world.report, **MONDAYS, adopt=True) == "created"
    async with declaring.join(grace=0):
        await eventually(_said(caplog, "'nightly' is not declared: a program has stored one of this name"), True)
        assert (await world.mesh.schedules())[0].queue == "report"


async def test_a_name_that_is_refused_changes_nothing_of_the_declared_schedule(world: World, new_mesh: NewMesh) -> None:
    declaring = new_mesh()
    declaring.every(3600, declaring.call("report"), name="nightly")
    async with declaring.join(grace=0):
        await (await declaring.run_schedule("nightly")).cancel(reason="not now")
        [before] = await declaring.schedules()
        with pytest.raises(worqr.UsageError, match="workers declare it"):
            await world.mesh.schedule("nightly", world.report, **MONDAYS)
        [after] = await declaring.schedules()
        assert before.last_outcome is not None
        assert after.last_outcome == before.last_outcome


def _said(caplog: pytest.LogCaptureFixture, text: str) -> Any:
    async def said() -> bool:
        return text in caplog.text

    return said


async def test_long_periods_are_spread_and_short_ones_are_not(world: World) -> None:
    mesh = world.mesh
    await mesh.schedule("a", world.report, every=3600)
    await mesh.schedule("b", world.report, every=3600)
    await mesh.schedule("c", world.report, cron="*/5 * * * *")
    await mesh.schedule("d", world.report, cron="0 7 * * *", jitter=0)
    found = {name: Definition.decode((await world.row(name)).definition) for name in "abcd"}
    assert {name: each.jitter_ms for name, each in found.items()} == {"a": 60_000, "b": 60_000, "c": 0, "d": 0}
    assert found["a"].phase_ms != found["b"].phase_ms
    first, second = await mesh.schedule_handle("a").next_runs(2)
    assert second - first == timedelta(hours=1)
    assert round(first.timestamp() * 1000) % 3_600_000 == found["a"].phase_ms


# Fired


@pytest.mark.leaves("{report}:lane:*", "{report}:lanes*")  # of a firing that comes while the worker leaves
async def test_its_jobs_have_the_lane_and_the_meta_of_its_call(mesh: worqr.Mesh) -> None:
    seen: list[worqr.Context] = []

    @mesh.task(name="report", lanes=worqr.Lanes())
    async def report(tenant: str) -> None:
        assert tenant == "acme"
        seen.append(worqr.current())

    call = report.options(lane="acme", meta={"tenant": "acme"}).call("acme")
    async with mesh.join(grace=0):
        await mesh.schedule("report/acme", call, every=0.2)
        await eventually(_count(seen), True)
    [first, *_] = seen
    assert (first.id, first.lane, first.meta) == ("cron:report/acme", "acme", {"tenant": "acme"})


def _count(seen: list[Any]) -> Any:
    async def enough() -> bool:
        return len(seen) >= 2

    return enough


async def test_a_schedule_ends_after_its_times_which_skipped_firings_do_not_use(world: World) -> None:
    await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0, times=2, misfire=100, overlap="cancel")
    phase = Definition.decode((await world.row()).definition).phase_ms
    async with ticking(world) as ticker:
        await world.mesh.schedule_handle("report/acme").run_now()
        assert (await world.row()).ran == 0
        hour = (world.now() - phase) // 3_600_000 * 3_600_000 + phase
        world.make_due("report/acme", hour - 1)
        assert ((await fired(world, ticker)).ran, (await world.row()).ended) == (1, None)
        world.make_due("report/acme", hour - 5 * 3_600_000 - 1)
        world.client.delete(world.queue.fired)
        row = await fired(world, ticker)
        assert (row.ran, row.ended is not None) == (2, True)
        [schedule] = await world.mesh.schedules()
        assert (schedule.ended, schedule.runs, schedule.times, schedule.next_runs()) == (True, 2, 2, [])
        world.make_due("report/acme", hour - 1)
        assert (await fired(world, ticker)).ran == 2
        world.client.hset(world.registry.schedules, "ended report/acme", world.now() - ENDED_KEPT_MS)
        world.client.zadd(world.registry.schedules_due, {"report/acme": world.now()})
        await ticker.tick_once()
    assert await world.mesh.schedules() == []
    assert not world.client.exists(world.queue.schedules)


async def test_a_schedule_with_fewer_times_than_it_had_fires_no_more(world: World) -> None:
    options: dict[str, Any] = {"every": 3600, "jitter": 0, "misfire": 100, "overlap": "cancel"}
    await world.mesh.schedule("report/acme", world.report, **options, times=2)
    world.client.hset(world.registry.schedules, "ran report/acme", 3)
    world.make_due("report/acme", world.now() - 5 * 3_600_000)
    async with ticking(world) as ticker:
        row = await fired(world, ticker)
    assert (row.ran, row.ended is not None, world.jobs()) == (3, True, 0)


async def test_a_firing_that_is_judged_twice_is_counted_once(world: World) -> None:
    """A leader dies between the firing and its note."""
    await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0, times=5)
    phase = Definition.decode((await world.row()).definition).phase_ms
    hour = (world.now() - phase) // 3_600_000 * 3_600_000 + phase
    world.make_due("report/acme", hour - 1)
    async with ticking(world) as dies, ticking(world) as follows:
        await dies.tick_once()
        row = await fired(world, follows)
        assert (row.ran, row.fired, world.jobs()) == (1, hour, 1)
        await dies.tick_once()
        assert (await world.row()).ran == 1


async def test_a_change_while_the_last_firing_is_noted_holds(world: World) -> None:
    """As a handler does that gives its own schedule more times."""
    await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0, times=1)
    world.make_due("report/acme", world.now() - 3_600_000)
    async with ticking(world) as ticker:
        await ticker.tick_once()
        assert world.jobs() == 1
        assert await world.mesh.schedule_handle("report/acme").change(times=2) == "updated"
        await ticker.tick_once()
        row = await fired(world, ticker)
    assert (row.ran, row.ended) == (1, None)


async def test_an_ended_schedule_that_goes_on_has_missed_nothing(world: World) -> None:
    await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0, times=1, misfire=100)
    async with ticking(world) as ticker:
        world.make_due("report/acme", world.now() - 3_600_000)
        row = await fired(world, ticker)
        assert (row.ran, row.ended is not None, world.jobs()) == (1, True, 1)
        await world.mesh.queue("report").job("cron:report/acme").cancel()
        world.client.hset(world.registry.schedules, "last report/acme", row.last - 5 * 3_600_000)
        world.client.delete(world.queue.fired)
        await world.mesh.schedule_handle("report/acme").change(times=3)
        row = await fired(world, ticker)
    assert (row.ran, row.ended, world.jobs()) == (1, None, 1)


async def test_until_is_the_last_nominal_time(world: World) -> None:
    await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0)
    phase = Definition.decode((await world.row()).definition).phase_ms
    hour = (world.now() - phase) // 3_600_000 * 3_600_000 + phase
    for until, ended in ((hour + 3_600_000, False), (hour, True), (hour - 1, True)):
        world.client.delete(world.queue.fired)
        await world.mesh.schedule("report/acme", world.report, every=3600, jitter=0, until=at(until), misfire=5)
        world.make_due("report/acme", hour - 1)
        async with ticking(world) as ticker:
            row = await fired(world, ticker)
        assert (row.ended is not None) is ended
        assert world.client.hexists(world.queue.fired, "report/acme") is (until >= hour)


async def test_after_a_delete_nothing_is_fired_and_its_job_is_kept_or_cancelled(world: World) -> None:
    handle = world.mesh.schedule_handle("report/acme")
    for what, left in (("keep", 1), ("cancel", 0)):
        await world.mesh.schedule("report/acme", world.report, every=3600)
        await handle.run_now()
        assert await handle.delete(job=what)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert await world.mesh.queue("report").count() == left
        assert await handle.info() is None
        assert await handle.next_runs() == []
        assert not await handle.delete()
    with pytest.raises(worqr.UsageError, match="'keep' or 'cancel'"):
        await handle.delete(job="drop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_leader_that_has_read_the_old_schedule_fires_nothing_of_it(world: World) -> None:
    """The queue knows the number of the call: a change or a delete in between is exact."""
    await world.mesh.schedule("report/acme", world.report, every=3600)
    row = await world.row()
    firing = ops.Firing("report/acme", 1, 1, "skip", b"", version=row.version)
    ask = world.mesh._client.ask
    await world.mesh.schedule("report/acme", world.mesh.call("report", b"new"), every=3600)
    assert await ask(ops.fire_schedules(world.queue, [firing], judged_at=1)) == ["stale"]
    await world.mesh.schedule_handle("report/acme").delete()
    assert await ask(ops.fire_schedules(world.queue, [firing], judged_at=1)) == ["gone"]
    assert world.jobs() == 0


async def test_a_program_that_died_between_the_two_steps_is_followed_by_the_leader(world: World) -> None:
    await world.mesh.schedule("report/acme", world.report, every=3600)
    before = await world.row()
    plan = stored_schedules._Plan.of(  # pyright: ignore[reportPrivateUsage]
        "report/acme", world.mesh.call("report", b"newer"), {"every": 7200}, world.mesh._client
    )
    _, version = await world.mesh._client.ask(ops.store_schedule(world.queue, "report/acme", plan.blob))
    world.make_due("report/acme", 1000)
    async with ticking(world) as ticker:
        await fired(world, ticker)
        row = await world.row()
        assert (row.version, row.version != before.version) == (version, True)
        assert Definition.decode(row.definition).every_ms == 7_200_000
        world.client.delete(world.queue.schedules)
        world.make_due("report/acme", 1000)
        await ticker.tick_once()
    assert await world.mesh.schedules() == []


async def test_a_call_that_a_failover_has_set_back_is_said_and_tried_at_intervals(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.mesh.schedule("report/acme", world.report, every=3600)
    older: Any = world.client.hget(world.queue.schedules, "report/acme")
    await world.mesh.schedule("report/acme", world.mesh.call("report", b"new"), every=3600)
    world.client.hset(world.queue.schedules, "report/acme", older)
    world.make_due("report/acme", world.now() - 3_600_000)
    async with ticking(world) as ticker:
        await fired(world, ticker)
        assert "'report/acme' cannot be fired, trying again: its queue has an older call" in caplog.text
        assert (world.client.zscore(world.registry.schedules_due, "report/acme") or 0) > world.now() + 1000
        await world.mesh.schedule("report/acme", world.mesh.call("report", b"new"), every=3600)
        world.make_due("report/acme", world.now() - 3_600_000)
        await fired(world, ticker)
    assert world.jobs() == 1


async def test_a_call_that_another_program_has_spoilt_is_said_and_harms_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        await world.mesh.schedule(name, world.report, every=3600, jitter=0)
        world.make_due(name, world.now() - 3_600_000)
    version = (await world.row("a")).version
    world.client.hset(world.queue.schedules, "a", f"{version} nonsense")
    async with ticking(world) as ticker:
        await fired(world, ticker, "b")
        assert ((await world.row("b")).fired is None, (await world.row("a")).fired) == (False, None)
    assert "'a' cannot be fired" in caplog.text


async def test_a_pause_stays_when_the_schedule_changes(world: World) -> None:
    handle = world.mesh.schedule_handle("report/acme")
    await world.mesh.schedule("report/acme", world.report, every=3600)
    await handle.pause()
    await world.mesh.schedule("report/acme", world.report, every=7200)
    info = await handle.info()
    assert info is not None
    assert info.paused
    assert world.client.zscore(world.registry.schedules_due, "report/acme") is None
    await handle.resume()
    assert world.client.zscore(world.registry.schedules_due, "report/acme") is not None


# Many


def wanted(world: World, *tenants: str, **options: Any) -> list[Any]:
    return [
        (f"report/{tenant}", world.mesh.call("report", tenant.encode()), {**MONDAYS, **options}) for tenant in tenants
    ]


async def test_apply_adds_changes_and_deletes_what_begins_with_the_prefix(world: World) -> None:
    mesh = world.mesh
    await mesh.schedule("reports", world.report, **MONDAYS)
    apply = mesh.schedules_apply
    assert await apply("report/", wanted(world, "a", "b", "c")) == worqr.AppliedSchedules(created=3)
    again = [*wanted(world, "a"), *wanted(world, "b", misfire="skip"), *wanted(world, "d")]
    assert await apply("report/", again) == worqr.AppliedSchedules(1, 1, 1, 1)
    assert [each.name for each in await mesh.schedules("report/")] == ["report/a", "report/b", "report/d"]
    assert len(await mesh.schedules()) == 4


async def test_apply_replaces_the_schedule_of_another_function_if_it_is_told_to(world: World) -> None:
    mesh, other = world.mesh, world.mesh.call("mail", b"acme")
    await mesh.schedule("report/acme", world.report, **MONDAYS)
    with pytest.raises(worqr.UsageError, match="it calls 'report', which replace=True replaces"):
        await mesh.schedules_apply("report/", [("report/acme", other, MONDAYS)])
    await mesh.schedules_apply("report/", [("report/acme", other, MONDAYS | {"replace": True})])
    assert (await world.row()).home == "mail"


async def test_apply_deletes_nothing_if_wanted_was_not_read_to_its_end(world: World) -> None:
    await world.mesh.schedules_apply("report/", wanted(world, "a", "b"))

    async def broken() -> AsyncIterator[Any]:
        yield wanted(world, "a")[0]
        raise OSError("the database is away")

    with pytest.raises(OSError, match="the database is away"):
        await world.mesh.schedules_apply("report/", broken())
    assert len(await world.mesh.schedules("report/")) == 2


async def test_the_event_loop_goes_on_while_many_are_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, seen, check = list[str](), set[int](), _Plan.of

    def of(name: str, *rest: Any) -> _Plan:
        checked.append(name)
        return check(name, *rest)

    async def watch() -> None:
        while True:
            seen.add(len(checked))
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(_Plan, "of", of)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await world.mesh.schedules_apply("report/", wanted(world, *map(str, range(120))))
        nursery.cancel_scope.cancel()
    assert len(checked) == 120
    assert seen & {*range(1, 120)}


async def test_the_event_loop_goes_on_while_many_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.mesh.schedules_apply("report/", wanted(world, *map(str, range(120))))
    reads = {"schedule_of": 0, "outcome_of": 0}
    seen = set[tuple[int, ...]]()

    def counting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            reads[name] += 1
            return read(*args)

        return counted

    async def watch() -> None:
        while True:
            seen.add(tuple(reads.values()))
            await trio.lowlevel.checkpoint()

    for name in reads:
        monkeypatch.setattr(schedules, name, counting(name, getattr(schedules, name)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        assert len(await world.mesh.schedules("report/")) == 120
        nursery.cancel_scope.cancel()
    read, outcomes = (set(each) for each in zip(*seen, strict=True))
    assert read & {*range(1, 120)}
    assert outcomes & {*range(1, 120)}


async def test_what_is_stored_while_wanted_is_read_stays(world: World) -> None:
    """As a program does that serves users, after the database was read."""
    mesh = world.mesh
    await mesh.schedules_apply("report/", wanted(world, "gone", "changed"))

    async def database() -> AsyncIterator[Any]:
        yield wanted(world, "a")[0]
        await mesh.schedule("report/new", world.report, **MONDAYS)
        await mesh.schedule("report/changed", world.report, every=3600)

    assert await mesh.schedules_apply("report/", database()) == worqr.AppliedSchedules(created=1, deleted=1)
    assert [each.name for each in await mesh.schedules("report/")] == ["report/a", "report/changed", "report/new"]


async def test_apply_refuses_to_delete_many_unless_it_is_told_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_schedules, "MOST_DELETED", 2)
    await world.mesh.schedules_apply("report/", wanted(world, "a", "b", "c"))
    with pytest.raises(worqr.UsageError, match=r"3 of 3 schedules .* pass delete_at_most=3"):
        await world.mesh.schedules_apply("report/", [])
    assert len(await world.mesh.schedules("report/")) == 3
    assert (await world.mesh.schedules_apply("report/", [], delete_at_most=3)).deleted == 3


@pytest.mark.parametrize(
    ("prefix", "tenants", "why"),
    [("report", ["a"], "must end with a slash"), ("mail/", ["a"], "does not begin"), ("report/", ["a", "a"], "twice")],
)
async def test_apply_refuses_what_its_prefix_does_not_cover(
    world: World, prefix: str, tenants: list[str], why: str
) -> None:
    with pytest.raises(worqr.UsageError, match=why):
        await world.mesh.schedules_apply(prefix, wanted(world, *tenants))
    assert await world.mesh.schedules() == []


async def test_what_another_program_has_stored_alike_is_unchanged(world: World, new_mesh: NewMesh) -> None:
    stored = await world.mesh.schedules_apply("report/", wanted(world, "a", "b"))
    other = new_mesh(app="other")
    async with other.connect():
        assert await other.schedules_apply("report/", wanted(world, "a", "b")) == worqr.AppliedSchedules(unchanged=2)
    assert stored.created == 2


async def test_a_page_has_a_thousand_and_all_are_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    page, pages = ops.page_schedules, list[str]()

    def small(keys: RegistryKeys, prefix: str, after: str = "", limit: int = 3) -> Any:
        pages.append(after)
        return page(keys, prefix, after, min(limit, 3))

    await world.mesh.schedules_apply("report/", wanted(world, *"abcdefgh"))
    monkeypatch.setattr(ops, "page_schedules", small)
    monkeypatch.setattr(ops, "SCHEDULES_PER_PAGE", 3)
    assert [each.name[-1] for each in await world.mesh.schedules("report/")] == list("abcdefgh")
    assert pages == ["", "report/c", "report/f"]


def test_a_program_without_an_event_loop_reaches_all_of_it(mesh: worqr.Mesh) -> None:
    call = mesh.call("report", b"x")
    assert worqr.sync(mesh.schedule, "report/a", call, every=3600) == "created"
    handle = mesh.schedule_handle("report/a")
    worqr.sync(handle.pause)
    assert worqr.sync(mesh.schedules)[0].paused
    assert len(worqr.sync(handle.next_runs, 2)) == 2
    assert worqr.sync(mesh.schedules_apply, "report/", [("report/a", call, {"every": 3600})]).unchanged == 1
    assert worqr.sync(handle.delete)


# Change, export, import


async def test_a_change_keeps_what_it_does_not_name(world: World) -> None:
    call = world.mesh.call("report", b"acme")
    more: dict[str, Any] = {"misfire": "skip", "overlap": "queue", "jitter": 5, "times": 9}
    await world.mesh.schedule("report/acme", call, **MONDAYS, **more)
    handle = world.mesh.schedule_handle("report/acme")
    [before] = await world.mesh.export_schedules()
    assert await handle.change(times=9) == "unchanged"
    assert await handle.change(every=3600) == "updated"
    assert await handle.change(**MONDAYS) == "updated"
    assert await world.mesh.export_schedules() == [before]
    assert await handle.change(world.mesh.call("report", b"other"), times=None) == "updated"
    found = await handle.info()
    assert found is not None
    assert (found.times, found.cron) == (None, MONDAYS["cron"])
    with pytest.raises(worqr.UsageError, match="it calls 'report', which replace=True replaces"):
        await handle.change(world.mesh.call("mail", b""))
    assert await handle.change(world.mesh.call("mail", b""), replace=True) == "created"


async def test_the_default_jitter_follows_a_change_of_the_times(world: World) -> None:
    handle = world.mesh.schedule_handle("report/acme")
    await world.mesh.schedule("report/acme", world.report, **MONDAYS)
    for changes, jitter_ms in (({"every": 5}, 0), (MONDAYS, 60_000), ({"jitter": 7}, 7000), ({"every": 5}, 7000)):
        await handle.change(**changes)
        assert Definition.decode((await world.row()).definition).jitter_ms == jitter_ms


async def test_only_a_stored_schedule_is_changed(world: World) -> None:
    definition = Definition(name="old", queue="q", task=b"", every_ms=1000).encode()
    await world.mesh._client.ask(ops.declare_schedules(world.registry, [("old", definition)], replace=True))
    with pytest.raises(worqr.UsageError, match="workers declare the schedule 'old': change it in their code"):
        await world.mesh.schedule_handle("old").change(every=3)
    with pytest.raises(worqr.UsageError, match="there is no schedule 'new'"):
        await world.mesh.schedule_handle("new").change(every=3)


NAMES = st.text("ab/\u20ac", min_size=1, max_size=30).filter(lambda name: all(name.split("/")))
TIMES = st.one_of(
    st.fixed_dictionaries({"every_ms": st.integers(100, 10**9), "phase_ms": st.integers(0, 99)}),
    st.fixed_dictionaries({"cron": st.just("0 7 * * MON"), "timezone": st.sampled_from(["UTC", "Europe/Berlin"])}),
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "misfire": st.integers(0, 100),
        "overlap": st.sampled_from(["skip", "queue", "cancel"]),
        "jitter_ms": st.integers(0, 10**6),
        "until_ms": st.integers(1, 10**13),
        "times": st.integers(1, 10**9),
        "by": st.text(max_size=5),
    },
)
JOB = st.fixed_dictionaries(
    {}, optional={"lane": st.text(min_size=1), "fields": st.just({"timeout": "5"}), "workflow": st.booleans()}
)
PAYLOADS = st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode)


@given(NAMES, TIMES, RULES, JOB, PAYLOADS, st.booleans())
def test_a_line_has_all_of_a_schedule(
    name: str, times: dict[str, Any], rules: dict[str, Any], job: dict[str, Any], task: bytes, paused: bool
) -> None:
    definition = Definition(name=name, queue="q", task=b"", **times, **rules)
    stored = StoredCall(dict(sorted(job.items())), task, definition)
    text = _Line.of(stored, paused=paused).text
    assert "\n" not in text
    plan, was_paused = _Line.read(text, 1)
    assert (plan.blob, was_paused) == (stored.encode(), paused)


GOOD: dict[str, Any] = {"name": "a", "queue": "q", "payload": 1, "times": {"every_ms": 1000}}
WRONG_LINES = [
    "",
    "x",
    "[]",
    *(GOOD | wrong for wrong in ({"name": "a//b"}, {"queue": "{}"}, {"options": {"id": "x"}}, {"extra": 1})),
    *(
        GOOD | {"times": times}
        for times in ({}, {"every_ms": 1}, {"cron": "61 * * * *"}, {"cron": "* * * * *", "every_ms": 1000})
    ),
    GOOD | {"payload": "x" * 5000},
]


@pytest.mark.parametrize("line", WRONG_LINES)
async def test_a_wrong_line_stores_nothing(world: World, line: object) -> None:
    good = msgspec.json.encode(GOOD).decode()
    text = line if isinstance(line, str) else msgspec.json.encode(line).decode()
    if not text:
        assert (await world.mesh.import_schedules([text])).created == 0
        return
    with pytest.raises(worqr.UsageError, match="line 2 is no exported schedule: "):
        await world.mesh.import_schedules([good, text])
    assert await world.mesh.schedules() == []


async def test_a_paused_schedule_is_paused_again_before_others_are_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, seen = [f"report/{letter}" for letter in "abc"], list[str]()
    for name in names:
        await world.mesh.schedule(name, world.report, every=3600)
    await world.mesh.schedule_handle("report/b").pause()
    lines = await world.mesh.export_schedules()
    for name in names:
        await world.mesh.schedule_handle(name).delete()
    store, pause = worqr.Mesh._store, worqr.Mesh.pause_schedule

    async def noted_store(mesh: worqr.Mesh, plan: Any, force: str) -> stored_schedules.Stored:
        seen.append(f"store {plan.definition.name}")
        return await store(mesh, plan, force)

    async def noted_pause(mesh: worqr.Mesh, name: str, *, paused: bool = True) -> None:
        seen.append(f"pause {name}")
        await pause(mesh, name, paused=paused)

    monkeypatch.setattr(worqr.Mesh, "_store", noted_store)
    monkeypatch.setattr(worqr.Mesh, "pause_schedule", noted_pause)
    assert (await world.mesh.import_schedules(lines)).created == 3
    assert seen[seen.index("store report/b") + 1] == "pause report/b"
    assert (await world.mesh.import_schedules(lines)).unchanged == 3
    assert (seen.count("pause report/b"), (await world.row("report/b")).paused) == (1, True)


@pytest.mark.parametrize("task", [b"[" * 4000, b'["\xff"]'], ids=["deep", "bytes"])
def test_a_payload_that_is_no_json_is_exported_as_it_is(task: bytes) -> None:
    stored = StoredCall({}, task, Definition(name="nightly", queue="reports", task=b"", every_ms=1000))
    line = _Line.of(stored, paused=False).text
    plan, paused = _Line.read(line, 1)
    assert (StoredCall.decode(plan.blob).task, paused) == (task, False)


@pytest.mark.parametrize(
    "options", [b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0", b"\x81", b"\xc1"], ids=["deep", "cut", "odd"]
)
def test_a_call_that_another_program_wrote_cannot_be_read(options: bytes) -> None:
    with pytest.raises(worqr.UsageError, match="cannot read the call of a stored schedule"):
        StoredCall.decode(b"%d 0 %b{}" % (len(options), options))


async def test_an_export_names_the_schedule_that_cannot_be_read(world: World) -> None:
    await world.mesh.schedules_apply("report/", wanted(world, "a", "b"))
    world.client.hset(world.queue.schedules, "report/b", "7 spoilt")
    with pytest.raises(worqr.UsageError, match="schedule 'report/b': this version of worqr cannot read"):
        await world.mesh.export_schedules()


async def test_one_program_applies_a_prefix_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_schedules, "APPLY_WAIT", 0.1)
    monkeypatch.setattr(stored_schedules, "APPLY_AGAIN", 0.01)
    mesh, wanted = world.mesh, [("report/a", world.report, MONDAYS)]

    async def ours() -> AsyncIterator[Any]:
        for each in wanted:
            yield each

    async with mesh._applying("report/"):
        with pytest.raises(worqr.UsageError, match="another program applies the schedules that begin with 'report/'"):
            await mesh.schedules_apply("report/", ours())
        assert await mesh.schedules() == []
        assert (await mesh.schedules_apply("mail/", [])).deleted == 0
    assert (await mesh.schedules_apply("report/", ours())).created == 1


async def test_after_a_refusal_the_same_prefix_is_applied_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_schedules, "APPLY_WAIT", 0)
    mesh = world.mesh
    await mesh.schedules_apply("report/", wanted(world, "a", "b"))
    with pytest.raises(worqr.UsageError, match="pass delete_at_most=2"):
        await mesh.schedules_apply("report/", [], delete_at_most=0)
    assert (await mesh.schedules_apply("report/", [], delete_at_most=2)).deleted == 2


async def test_a_program_that_has_lost_its_lease_stops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_schedules, "LEASE_MS", 0)
    keys = world.registry
    with pytest.raises(worqr.UsageError, match="another program applies the schedules that begin with 'report/'"):
        async with world.mesh._applying("report/") as renew:
            assert await world.mesh._client.ask(ops.lease_prefix(keys, "report/", "another", 20_000))
            await renew()
    assert await world.mesh._client.ask(ops.lease_prefix(keys, "report/", "another", 0))
