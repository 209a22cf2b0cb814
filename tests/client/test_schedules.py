"""``mesh.run_schedule`` and ``mesh.override_schedule``: what they change, what they leave, and what a wrong argument gets."""

from __future__ import annotations

import re
import time
import zoneinfo
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Runs, eventually, serving, until
from tests.support.servers import Server
from worqr.client.schedules import all_schedules, schedule_of
from worqr.client.stored_schedules import call_with
from worqr.cron import Definition, Override, outcome_of
from worqr.keys import RegistryKeys
from worqr.ops import ScheduleRow

YEARLY = "0 0 1 1 *"
T = 1_700_000_000_000
LEFT = pytest.mark.leaves("{q}:job:cron:*", "{q}:due")


async def one(mesh: worqr.Mesh) -> worqr.Schedule:
    [found] = await mesh.schedules()
    return found


async def planned(mesh: worqr.Mesh) -> worqr.Schedule:
    """The schedule, once a leader has planned its next run."""
    client, keys = mesh._client, RegistryKeys(mesh.prefix)

    async def next_run() -> bool:
        [row] = (await all_schedules(client.ask, keys))[0]
        return row.next is not None

    await eventually(next_run, True)
    return await one(mesh)


async def log(mesh: worqr.Mesh) -> list[tuple[str, str, str, str]]:
    return [
        (entry.kind, entry.who, entry.queue, entry.text)
        for entry in await mesh.log()
        if entry.kind.startswith("schedule")
    ]


async def test_the_task_of_a_schedule_is_enqueued_and_its_plan_stays(new_mesh: NewMesh) -> None:
    mesh = new_mesh(app="shop")
    mesh.cron(YEARLY, mesh.call("Q1", b"x"), name="yearly")
    runs = Runs()
    async with mesh.join():
        before = await planned(mesh)
        await mesh.pause_schedule("yearly")
        job = await mesh.run_schedule("yearly")
        assert (job.id, job.queue, job.outcome) == ("cron:yearly", "Q1", "created")
        assert (await mesh.run_schedule("yearly")).outcome == "unchanged"
        await mesh.pause_schedule("yearly", paused=False)
        async with serving(mesh, "Q1", runs):
            await until(lambda: len(runs.tasks) == 1)
        after = await planned(mesh)
        assert (after.next_run, after.last_run) == (before.next_run, None)
        assert ("schedule_run", "shop", "Q1", "yearly") in await log(mesh)


@pytest.mark.leaves("shards", "{*}*")
async def test_a_call_with_a_lane_is_run_by_hand_in_a_queue_with_shards(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    queue = mesh.queue("Q1", shards=3)
    mesh.cron(YEARLY, call_with(mesh.call("Q1", b"x"), lane="acme"), name="yearly")
    async with mesh.join():
        await planned(mesh)
        assert (await mesh.run_schedule("yearly")).outcome == "created"
        assert (await mesh.run_schedule("yearly")).outcome == "unchanged"
        assert (await queue.job("cron:yearly").status()).state == "waiting"


async def test_a_schedule_runs_at_the_times_of_its_override_until_it_is_reset(new_mesh: NewMesh) -> None:
    mesh = new_mesh(app="shop")
    mesh.every(3600, mesh.call("Q1", b"x"), name="s", jitter=0)
    async with mesh.join():
        declared = await planned(mesh)
        assert (declared.every, declared.cron, declared.override, declared.queue) == (3600, "", None, "Q1")
        await mesh.override_schedule("s", " 0  0 1 1 * ", timezone=zoneinfo.ZoneInfo("Europe/Berlin"))
        found = await planned(mesh)
        assert (found.cron, found.every, found.timezone, found.problem) == (YEARLY, None, "Europe/Berlin", "")
        year = datetime.now(UTC).year
        assert found.next_run == datetime(year, 12, 31, 23, tzinfo=UTC)
        assert found.next_runs(2) == [found.next_run, datetime(year + 1, 12, 31, 23, tzinfo=UTC)]
        assert found.override is not None
        assert (found.override.cron, found.override.timezone, found.override.by) == (YEARLY, "Europe/Berlin", "shop")
        assert abs(datetime.now(UTC) - found.override.at) < timedelta(minutes=5)
        await mesh.override_schedule("s", None)
        back = await planned(mesh)
        assert (back.every, back.override) == (3600, None)
        assert back.next_run - datetime.now(UTC) <= timedelta(hours=1, minutes=5)
        assert await log(mesh) == [
            ("schedule_overridden", "shop", "", "s: 0 0 1 1 * Europe/Berlin"),
            ("schedule_reset", "shop", "", "s"),
        ]


async def test_an_override_survives_a_changed_declaration_and_a_change_of_the_leader(new_mesh: NewMesh) -> None:
    for period in (3600, 1800):
        mesh = new_mesh()
        mesh.every(period, mesh.call("Q1", b"x"), name="s")
        async with mesh.join():
            if period == 3600:
                await mesh.override_schedule("s", YEARLY)
            found = await planned(mesh)
            assert (found.cron, found.problem) == (YEARLY, "")
            assert found.next_run.month == found.next_run.day == 1


@LEFT
async def test_a_leader_fires_at_the_times_of_the_override(mesh: worqr.Mesh, server: Server) -> None:
    mesh.every(86400 * 365, mesh.call("Q1", b"x"), name="s")
    runs = Runs()
    async with mesh.join(), serving(mesh, "Q1", runs):
        await mesh.override_schedule("s", "* * * * *")
        await planned(mesh)
        keys, client = RegistryKeys(mesh.prefix), server.client()
        minute_ago = (client.time()[0] - 60) * 1000
        client.hset(keys.schedules, "last s", minute_ago)
        client.zadd(keys.schedules_due, {"s": 1})
        await until(lambda: bool(runs.tasks))


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("s", "61 * * * *"), {}, "cron expression '61 * * * *' is wrong"),
    (("s", "hourly"), {}, "must have five fields"),
    (("s", ""), {}, "must have five fields"),
    (("s", "0 0 30 2 *"), {}, "is wrong: Bad day-of-month"),
    (("s", 5), {}, "cron must be an expression such as '30 3 * * *', or None, not 5"),
    (("s", "* " * 400), {}, "a cron expression has at most 500 characters"),
    (("s", YEARLY), {"timezone": "Europe/Berln"}, "did you mean 'Europe/Berlin'"),
    (("s", YEARLY), {"timezone": 5}, "timezone must be an IANA name"),
    (("s", None), {"timezone": "UTC"}, "timezone= needs cron="),
    ((5, YEARLY), {}, "schedule name must be a str"),
]


@pytest.mark.parametrize(("args", "more", "said"), WRONG)
async def test_a_wrong_override_is_refused_before_anything_is_sent(
    mesh: worqr.Mesh, args: tuple[Any, ...], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(worqr.UsageError, match=said.replace("*", r"\*").replace("(", r"\(")):
        await mesh.override_schedule(*args, **more)  # outside `connect`: so nothing is sent


async def test_an_unknown_schedule_is_named(mesh: worqr.Mesh) -> None:
    mesh.every(3600, mesh.call("Q1", b"x"), name="hourly")
    async with mesh.join():
        with pytest.raises(worqr.UsageError, match="no schedule 'hourli' in this mesh; did you mean 'hourly'"):
            await mesh.override_schedule("hourli", YEARLY)
        with pytest.raises(worqr.UsageError, match="no schedule 'hourli' in this mesh; did you mean 'hourly'"):
            await mesh.run_schedule("hourli")
        with pytest.raises(worqr.UsageError, match="count must be at most 100, not 101"):
            (await one(mesh)).next_runs(101)


def row(**more: Any) -> ScheduleRow:
    definition = Definition(name="s", queue="Q1", task=b"x", every_ms=3_600_000).encode()
    override = Override(cron=YEARLY).encode()
    return replace(ScheduleRow("s", definition, T, None, None, (), False, b"", override, T), **more)


PROBLEMS = [
    (row(), T + 1000, ""),
    (row(), T + 60_000, "no leader has planned a run since it was overridden"),
    (row(next=T + 5), T + 60_000, "the leader plans other times: it runs an older version"),
    (row(next=1_704_067_200_000), T + 60_000, ""),  # 2024-01-01
    (row(next=T + 5, paused=True), T + 60_000, ""),
    (row(override=b'{"cron": "", "moon": 1}'), T + 60_000, "this version of worqr cannot read the override"),
    (row(definition=b"{}"), T + 60_000, "this version of worqr cannot read the definition"),
]


@pytest.mark.parametrize(("stored", "now", "said"), PROBLEMS)
def test_an_override_that_is_not_followed_is_a_problem(stored: ScheduleRow, now: int, said: str) -> None:
    problem = schedule_of(stored, now).problem
    assert problem.startswith(said) if said else not problem


def test_synchronous_code_controls_schedules(mesh: worqr.Mesh) -> None:
    mesh.every(3600, mesh.call("Q1", b"x"), name="s")

    async def main() -> None:
        async with mesh.join():
            await trio.to_thread.run_sync(control)

    def control() -> None:
        assert worqr.sync(mesh.run_schedule, "s").outcome == "created"
        worqr.sync(mesh.override_schedule, "s", YEARLY, timezone="UTC")
        worqr.sync(mesh.pause_schedule, "s")
        [found] = worqr.sync(mesh.schedules)
        assert (found.cron, found.paused) == (YEARLY, True)
        worqr.sync(mesh.override_schedule, "s", None)
        worqr.sync(mesh.pause_schedule, "s", paused=False)
        assert worqr.sync(mesh.queue("Q1").job("cron:s").cancel).waiting == 1
        mesh.close()

    trio.run(main)


# Declared in a program that only connects


def undeclared(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [record for record in caplog.records if "schedules_undeclared" in record.getMessage()]
    return [(record.levelname, record.getMessage()) for record in records]


@pytest.mark.leaves("{Q1}:job:cron:*")
async def test_a_program_that_only_connects_says_once_which_schedules_do_not_fire(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, worker = new_mesh(), new_mesh()
    for each in (mesh, worker):
        each.every(3600, each.call("Q1", b"x"), name="hourly")
    mesh.every(3600, mesh.call("Q1", b"x"), name="daily")
    mesh.every(3600, mesh.call("Q1", b"x"), name="weekly")
    async with worker.join():
        for _ in range(2):
            async with mesh.connect():
                pass
        [(level, text)] = undeclared(caplog)
        assert level == "WARNING"
        assert (
            "no worker has declared schedule 'daily' and 1 others, which fires only then: start a worker with" in text
        )
        async with mesh.connect():
            with pytest.raises(
                worqr.UsageError, match="no worker has declared schedule 'daily', which is in the code of"
            ):
                await mesh.run_schedule("daily")
            assert (await mesh.run_schedule("hourly")).outcome == "created"


def test_a_program_without_a_loop_says_so_at_its_first_call(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, joined = new_mesh(), new_mesh()
    for each in (mesh, joined):
        each.every(3600, each.call("Q1", b"x"), name="daily")
    for _ in range(2):
        worqr.sync(mesh.queue("Q1").count)
        mesh.close()
    assert [level for level, _ in undeclared(caplog)] == ["WARNING"]
    with joined.join_in_thread():
        worqr.sync(joined.queue("Q1").count)
    joined.close()
    assert len(undeclared(caplog)) == 1


async def test_nothing_is_said_if_a_worker_has_declared_them_or_there_are_none(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, worker = new_mesh(), new_mesh()
    async with mesh.connect():
        pass
    for each in (mesh, worker):
        each.every(3600, each.call("Q1", b"x"), name="hourly")
    async with worker.join(), mesh.connect():
        pass
    async with mesh.join():
        pass
    assert undeclared(caplog) == []


@pytest.mark.leaves("*")
async def test_a_schedule_whose_run_no_worker_takes_for_a_day_says_so(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh()
    mesh.every(3600, mesh.call("Q1", b"x"), name="hourly")
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        job = await mesh.run_schedule("hourly")
        assert [each.problem for each in await mesh.schedules()] == [""]
        day_ago = round(time.time() * 1000) - 24 * 3600 * 1000
        since = {"run_at": day_ago, "first": 1000 * day_ago}
        server.client().hset(f"{mesh.prefix}:{{Q1}}:job:{job.id}", mapping=since)
        [found] = await mesh.schedules()
        assert re.match(r"no worker serves its queue 'Q1': its run of \d{4}-\d\d-\d\d \d\d:\d\d UTC", found.problem)
        runs = Runs()
        await nursery.start(peer.serve, "Q1", runs)
        await runs.wait(1)
        assert [each.problem for each in await mesh.schedules()] == [""]
        nursery.cancel_scope.cancel()


# The last outcome


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.leaves("*")
async def test_the_last_outcome_of_a_declared_schedule(new_mesh: NewMesh, shards: int) -> None:
    mesh = new_mesh()
    fails = True

    @mesh.every(0.1)
    @mesh.task(name="Q1", retry=worqr.RetryPolicy(max_failures=1), shards=shards)
    async def tidy() -> None:
        if fails:
            raise KeyError("left")

    async def outcome() -> str:
        last = (await one(mesh)).last_outcome
        return last.outcome if last else ""

    async with mesh.join():
        await eventually(outcome, "failed")
        last = (await one(mesh)).last_outcome
        assert last is not None
        assert (last.error_type, last.error) == ("KeyError", "'left'")
        assert last.scheduled_for is not None
        assert last.seconds is not None
        assert last.scheduled_for <= last.ended
        fails = False
        await eventually(outcome, "finished")


@LEFT
async def test_the_last_outcome_of_one_that_never_fired_and_was_run_by_hand(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    mesh.cron(YEARLY, mesh.call("Q1", b"x"), name="yearly")
    async with mesh.join():
        assert (await planned(mesh)).last_outcome is None
        await (await mesh.run_schedule("yearly")).cancel(reason="not now")
        last = (await one(mesh)).last_outcome
        assert last is not None
        assert (last.outcome, last.error, last.seconds, last.scheduled_for) == ("cancelled", "not now", None, None)


@given(st.binary() | st.binary().map(b"failed 1 2 3\n%b".__mod__))
def test_an_outcome_of_any_bytes_is_read(stored: bytes) -> None:
    found = outcome_of(stored)
    assert found is None or found.outcome in ("finished", "failed", "cancelled")
