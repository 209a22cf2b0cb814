"""Schedules on a bench: they fire when the test lets time pass, as often as it says, and at no other moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import trio

import worqr
from tests.support.servers import Server
from worqr import testing

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


class Reports:
    """A function that notes for which moments it ran."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.moments: list[datetime | None] = []

        @mesh.task(name="report")
        async def report(region: str = "eu") -> None:
            self.moments.append(worqr.current().scheduled_for)

        self.function = report

    @property
    def times(self) -> list[datetime]:
        return [moment for moment in self.moments if moment is not None]


@pytest.fixture
def reports(mesh: worqr.Mesh) -> Reports:
    return Reports(mesh)


async def test_a_daily_schedule_fires_once_a_day(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.cron("0 3 * * *", reports.function.call("eu"))
    assert (await bench.run_until_empty()).finished == 0
    for n in range(1, 4):
        await bench.advance(DAY)
        assert (await bench.run_until_empty()).finished == 1
        assert len(reports.times) == n
    first, second, third = reports.times
    assert (first.hour, first.minute) == (3, 0)
    assert second - first == third - second == DAY


async def test_a_test_may_begin_at_any_time(mesh: worqr.Mesh, server: Server, reports: Reports) -> None:
    """Clocks go forward in Berlin: there is no half past two."""
    mesh.cron("30 2 * * *", reports.function.call("eu"), timezone="Europe/Berlin")
    begin = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    async with testing.bench(mesh, url=server.url, now=begin) as bench:
        (schedule,) = await mesh.schedules()
        assert schedule.next_run == datetime(2026, 3, 29, 1, tzinfo=UTC)
        await bench.advance(14 * HOUR - MINUTE)
        assert (await bench.run_until_empty()).finished == 0
        await bench.advance(MINUTE)
        assert (await bench.run_until_empty()).finished == 1
    assert reports.times == [datetime(2026, 3, 29, 1, tzinfo=UTC)]


async def test_a_test_begins_at_a_time_of_some_zone(mesh: worqr.Mesh, server: Server) -> None:
    with pytest.raises(worqr.UsageError, match="now of bench"):
        async with testing.bench(mesh, url=server.url, now=datetime(2026, 3, 28)):
            pytest.fail("it must not open")
    assert mesh.prefix == "worqr"


async def test_nothing_fires_by_itself(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(0.1, reports.function.call())
    async with mesh.join(grace=0):
        await trio.sleep(1)
    assert (await bench.run_until_empty()).finished == 0
    assert reports.moments == []


async def test_it_fires_when_the_time_has_come_and_not_before(
    bench: testing.Bench, mesh: worqr.Mesh, reports: Reports
) -> None:
    mesh.every(HOUR, reports.function.call())
    fired: list[int] = []
    for _ in range(6):
        await bench.advance(20 * MINUTE)
        fired.append((await bench.run_until_empty()).finished)
    assert sum(fired) == 2
    assert fired[:3] == fired[3:]


async def test_what_overlaps_is_skipped(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(MINUTE, reports.function.call())
    await bench.advance(DAY)
    assert (await bench.run_until_empty()).finished == 1
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 1
    first, second = reports.times
    assert second - first == DAY


async def test_what_overlaps_is_queued(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(HOUR, reports.function.call(), overlap="queue")
    await bench.advance(DAY)
    assert (await bench.run_until_empty()).finished == 24
    assert reports.times == [reports.times[0] + n * HOUR for n in range(24)]
    assert (await bench.run_until_empty()).finished == 0


async def test_what_is_queued_runs_after_an_error_of_the_first_run(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.every(HOUR, overlap="queue")
    @mesh.task(name="odd", retry=worqr.RetryPolicy(max_failures=1))
    async def odd() -> None:
        if first:
            raise KeyError(first.pop())

    first = ["nothing there"]
    await bench.advance(5 * HOUR)
    with pytest.raises(KeyError):
        await bench.run_until_empty()
    assert (await bench.run_until_empty()).finished == 4


async def test_what_overlaps_is_replaced(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(HOUR, reports.function.call(), overlap="cancel")
    await bench.advance(HOUR)
    await bench.advance(3 * HOUR)
    assert (await bench.run_until_empty()).finished == 1
    (schedule,) = await mesh.schedules()
    assert reports.times == [schedule.next_run - HOUR]


async def test_firings_come_in_the_order_of_their_times(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    @mesh.task(name="note")
    async def note(n: int) -> None:
        seen.append(n)

    mesh.every(6 * HOUR, note.call(6), name="a")
    mesh.every(5 * HOUR, note.call(5), name="b")
    mesh.every(4 * HOUR, note.call(4), name="c")
    await bench.advance(0)
    moments = {schedule.name: schedule.next_run for schedule in await mesh.schedules()}
    await bench.advance(DAY)
    await bench.run_until_empty(concurrency=1)
    names = sorted(moments, key=lambda name: (moments[name], name))
    assert seen == [{"a": 6, "b": 5, "c": 4}[name] for name in names]


async def test_jitter_makes_it_due_later(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(HOUR, reports.function.call(), jitter=1800)
    await bench.advance(HOUR)
    await bench.advance(1800)
    assert (await bench.run_until_empty()).finished == 1


async def test_a_paused_schedule_lets_its_firings_pass(
    bench: testing.Bench, mesh: worqr.Mesh, reports: Reports
) -> None:
    mesh.every(HOUR, reports.function.call(), name="hourly", overlap="queue")
    await bench.advance(0)
    await mesh.pause_schedule("hourly")
    await bench.advance(DAY)
    assert (await bench.run_until_empty()).finished == 0
    await mesh.pause_schedule("hourly", paused=False)
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 1


async def test_the_mesh_says_what_fired_and_what_comes(
    bench: testing.Bench, mesh: worqr.Mesh, reports: Reports
) -> None:
    mesh.every(HOUR, reports.function.call(), name="hourly")
    await bench.advance(DAY)
    await bench.run_until_empty()
    (schedule,) = await mesh.schedules()
    assert schedule.last_run == reports.times[0]
    assert schedule.next_run == reports.times[0] + DAY


async def test_running_what_is_due_fires_nothing(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(HOUR, reports.function.call())
    await reports.function.options(delay=DAY).dispatch("us")
    assert (await bench.run_until_empty(scheduled=True)).finished == 1
    assert reports.moments == [None]
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 1


async def test_firings_are_not_among_what_was_sent(bench: testing.Bench, mesh: worqr.Mesh, reports: Reports) -> None:
    mesh.every(HOUR, reports.function.call())
    await bench.advance(HOUR)
    await bench.run_until_empty()
    assert bench.sent(reports.function) == []


async def test_a_schedule_of_a_function_that_lives_elsewhere_waits_there(
    bench: testing.Bench, mesh: worqr.Mesh
) -> None:
    arguments: dict[str, Any] = {"region": "eu"}
    mesh.every(HOUR, mesh.call("elsewhere", **arguments))
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 0
    assert await mesh.queue("elsewhere").tasks() == [b'{"region":"eu"}']


async def test_a_stored_schedule_fires_when_the_clock_moves_and_ends(
    bench: testing.Bench, mesh: worqr.Mesh, reports: Reports
) -> None:
    call = reports.function.call("eu")
    assert await mesh.schedule("report/eu", call, cron="0 3 * * *", times=2) == "created"
    for n in (1, 2, 2):
        await bench.advance(DAY)
        await bench.advance(MINUTE)  # of its jitter
        await bench.run_until_empty()
        assert len(reports.times) == n
    info = await mesh.schedule_handle("report/eu").info()
    assert info is not None
    assert (info.runs, info.ended) == (2, True)


async def test_a_stored_schedule_that_is_paused_or_deleted_does_not_fire_on_a_bench(
    bench: testing.Bench, mesh: worqr.Mesh, reports: Reports
) -> None:
    for name in ("paused", "deleted", "fires"):
        await mesh.schedule(name, reports.function.call("eu"), every=3600, jitter=0, overlap="queue")
    await mesh.schedule_handle("paused").pause()
    await mesh.schedule_handle("deleted").delete()
    await bench.advance(2 * HOUR)
    assert (await bench.run_until_empty()).finished == 2


async def test_the_job_of_a_declared_schedule_has_the_options_of_its_call(
    bench: testing.Bench, mesh: worqr.Mesh
) -> None:
    seen: list[tuple[str | None, dict[str, str]]] = []

    @mesh.task(name="report", lanes=worqr.Lanes("tenant"), keep=worqr.Keep(jobs=2), tags={"reports"})
    async def report(tenant: str) -> None:
        assert tenant
        run = worqr.current()
        seen.append((run.lane, run.meta))

    mesh.every(HOUR, report.options(meta={"for": "ada"}).call("acme"), name="acme")
    for _ in range(3):
        await bench.advance(HOUR)
        await bench.run_until_empty()
    assert seen == [("acme", {"for": "ada"})] * 3
    kept = await report.queue.jobs(state="finished", tag="reports")
    assert [each.id for each in kept] == ["cron:acme"] * 2
    await mesh.run_schedule("acme")
    await bench.run_until_empty()
    assert seen == [("acme", {"for": "ada"})] * 4


def test_an_option_that_would_be_without_effect_is_an_error(mesh: worqr.Mesh) -> None:
    @mesh.task(name="report")
    async def report() -> None: ...

    with pytest.raises(worqr.UsageError, match="'delay' would be without effect"):
        mesh.every(HOUR, report.options(delay=5).call())
