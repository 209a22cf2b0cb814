"""``worqr schedules``: the list, a pause, and a run now."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, piped
from tests.peer.tools import eventually, until

Beside = Callable[..., Awaitable[Answer]]


async def test_schedules_are_listed_paused_and_resumed(beside: Beside, mesh: worqr.Mesh) -> None:
    mesh.every(3600, mesh.call("report", b"x"), name="hourly")
    async with mesh.join(grace=0):
        before = datetime.now(UTC)
        (schedule,) = (await beside("schedules", "--json")).json
        assert schedule["name"] == "hourly"
        assert not schedule["paused"]
        assert schedule["last_run"] is None
        assert datetime.fromisoformat(schedule["next_run"]) > before
        _, row = (await beside("schedules")).lines
        assert row.split()[0] == "hourly"
        assert row.endswith("-")
        assert (await beside("schedules", "pause", "hourly")) == Answer(0, "Paused schedule hourly\n", "")
        assert (await beside("schedules")).lines[1].endswith("paused")
        assert (await beside("schedules", "resume", "hourly")) == Answer(0, "Resumed schedule hourly\n", "")
        assert not (await beside("schedules", "list", "--json")).json[0]["paused"]
        wrong = await beside("schedules", "pause", "hourli")
        assert wrong == Answer(1, "", "worqr: there is no schedule 'hourli' in this mesh; did you mean 'hourly'?\n")


@pytest.mark.leaves("*")
async def test_a_schedule_is_run_now(beside: Beside, mesh: worqr.Mesh) -> None:
    held, runs = trio.Event(), list[datetime | None]()

    async def report(_task: bytes) -> None:
        runs.append(worqr.current().scheduled_for)
        await held.wait()

    mesh.every(86400, mesh.call("report", b"x"), name="daily")
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await mesh.pause_schedule("daily")
        said = "Enqueued schedule daily on queue report\n"
        first = await beside("schedules", "run", "daily")
        assert (first.code, first.out) == (0, said)
        assert "no worker serves queue 'report' now" in first.err
        again = await beside("schedules", "run", "daily")
        why = "the previous run of schedule 'daily' has not ended; see `worqr status 'cron:daily' --queue 'report'`"
        assert again == Answer(1, "", f"worqr: {why}\n")
        await nursery.start(partial(peer.serve, "report", report))
        await until(lambda: runs == [None])
        assert (await beside("schedules", "run", "daily")).code == 1
        held.set()
        await eventually(mesh.queue("report").running, [])
        assert await beside("schedules", "run", "daily") == Answer(0, said, "")
        await until(lambda: len(runs) == 2)
        wrong = await beside("schedules", "run", "dayli")
        assert wrong == Answer(1, "", "worqr: there is no schedule 'dayli' in this mesh; did you mean 'daily'?\n")
        await eventually(mesh.queue("report").running, [])
        (listed,) = (await beside("schedules", "--json")).json
        assert (listed["last_outcome"]["outcome"], listed["last_outcome"]["scheduled_for"]) == ("finished", None)
        assert "finished" in (await beside("schedules")).lines[1]
        nursery.cancel_scope.cancel()


@pytest.mark.leaves("*")
async def test_the_times_of_a_schedule_are_overridden_and_reset(beside: Beside, mesh: worqr.Mesh) -> None:
    mesh.every(86400, mesh.call("report", b"x"), name="daily")
    async with mesh.join(grace=0):
        done = await beside("schedules", "override", "daily", "0 0 1 1 *", "--as", "ann")
        assert done.code == 0
        assert done.out.startswith("Schedule daily now runs at 0 0 1 1 * UTC; next run ")
        row = (await beside("schedules")).lines[1]
        assert "0 0 1 1 * UTC" in row
        assert row.endswith("overridden by ann")
        zone = await beside("schedules", "override", "daily", "0 4 * * *", "--timezone", "Europe/Berlin", "--json")
        (found,) = zone.json
        assert (found["cron"], found["timezone"], found["override"]["cron"]) == (
            *("0 4 * * *", "Europe/Berlin"),
            "0 4 * * *",
        )
        wrong = await beside("schedules", "override", "daily", "61 4 * * *")
        assert (wrong.code, wrong.out) == (1, "")
        assert wrong.err.startswith("worqr: cron expression '61 4 * * *' is wrong")
        assert await beside("schedules", "reset", "daily") == Answer(
            0, "Schedule daily runs at the times of its code\n", ""
        )
        (found,) = (await beside("schedules", "reset", "daily", "--json")).json
        assert (found["every"], found["override"]) == (86400, None)
        (ran,) = (await beside("schedules", "run", "daily", "--json")).json
        assert ran == {"schedule": "daily", "queue": "report", "id": "cron:daily", "outcome": "created"}


@pytest.mark.leaves("*")
async def test_a_stored_schedule_is_added_changed_and_deleted(beside: Beside, mesh: worqr.Mesh) -> None:
    times = ("--cron", "0 7 * * MON", "--timezone", "Europe/Berlin", "--until", "2099-01-01T00:00Z", "--max-runs", "9")
    more = ("--lane", "acme", "--meta", "tenant=acme", "--misfire", "3", "--overlap", "queue", "--jitter", "2m")
    added = await beside("schedules", "add", "report/acme", "report", "tenant=acme", "pages:=3", *times, *more)
    assert added.out.startswith("Added schedule report/acme, which runs at 0 7 * * MON Europe/Berlin; next run ")
    again = await beside("schedules", "add", "report/acme", "report", "--every", "1h")
    why = "there is a schedule 'report/acme' already; to change it, run `worqr schedules set`"
    assert again == Answer(1, "", f"worqr: {why}\n")
    (line,) = (await beside("schedules", "export", "report/")).json
    assert (line["payload"], line["options"]["lane"]) == ({"tenant": "acme", "pages": 3}, "acme")
    stored = {"misfire": 3, "overlap": "queue", "jitter_ms": 120_000, "times": 9, "until_ms": 4_070_908_800_000}
    assert line["times"] | stored == line["times"]
    (found,) = (await beside("schedules", "set", "report/acme", "--every", "1h", "--until", "never", "--json")).json
    assert (found["cron"], found["every"], found["until"], found["times"]) == ("", 3600, None, 9)
    assert (await beside("schedules", "set", "report/acme")).code == 2
    assert (await beside("schedules", "--stored", "report/")).lines[1].startswith("report/acme")
    assert (await beside("schedules", "--stored", "mail/")).out == ""
    assert await beside("schedules", "delete", "report/acme") == Answer(0, "Deleted schedule report/acme\n", "")
    gone = Answer(1, "", "worqr: there is no schedule 'report/acme' in this mesh\n")
    assert await beside("schedules", "delete", "report/acme") == gone


async def imported(lines: str) -> subprocess.CompletedProcess[bytes]:
    return await trio.to_thread.run_sync(partial(piped, lines.encode(), "schedules", "import"))


@pytest.mark.leaves("*")
async def test_schedules_are_exported_and_imported(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.schedule("report/a", mesh.call("report", b"\xff"), every=3600)
        await mesh.schedule("report/b", mesh.call("report", x="1\x85\u2028"), cron="0 7 * * *", times=2)
        await mesh.pause_schedule("report/b")
        saved = (await beside("schedules", "export")).out
        for name in ("report/a", "report/b"):
            await mesh.schedule_handle(name).delete()
        assert (await imported(saved)).stdout == b"2 created, 0 updated, 0 unchanged\n"
        assert (await imported(saved)).stdout == b"0 created, 0 updated, 2 unchanged\n"
        assert (await beside("schedules", "export")).out == saved
        wrong = await imported(saved + "{}")
        assert (wrong.returncode, wrong.stdout) == (1, b"")
        assert wrong.stderr.startswith(b"worqr: line 3 is no exported schedule: ")


async def test_an_expression_is_checked_without_a_server(beside: Beside) -> None:
    answer = await beside("schedules", "next", "0 7 1 1 *", "--timezone", "Europe/Berlin", "--count", "2")
    assert [line[4:] for line in answer.lines] == ["-01-01 07:00:00 CET"] * 2
    (found,) = (
        await beside("schedules", "next", "0 7 1 1 *", "--timezone", "Europe/Berlin", "--count", "1", "--json")
    ).json
    assert found["at"].endswith("-01-01T06:00:00+00:00")
    wrong = await beside("schedules", "next", "61 7 * * *")
    assert (wrong.code, wrong.out) == (1, "")
    assert "minutes are 0 to 59" in wrong.err


@pytest.mark.leaves("*")
async def test_an_exported_text_may_have_any_separator_of_lines(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.schedule("odd", mesh.call("report", text="a\u2028b\u0085c"), every=3600)
        saved = (await beside("schedules", "export")).out
        await mesh.schedule_handle("odd").delete()
        assert (await imported(saved)).stdout == b"1 created, 0 updated, 0 unchanged\n"
        assert (await beside("schedules", "export")).out == saved


@pytest.mark.leaves("*")
async def test_an_export_is_json_in_an_encoding_that_lacks_characters(
    beside: Beside, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh.connect():
        await mesh.schedule("né", mesh.call("report", text="漢🙂"), every=3600)
        saved = (await beside("schedules", "export")).out
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        escaped = await trio.to_thread.run_sync(partial(piped, b"", "schedules", "export"))
        monkeypatch.delenv("PYTHONIOENCODING")
        await mesh.schedule_handle("né").delete()
        assert (await imported(escaped.stdout.decode("ascii"))).stdout == b"1 created, 0 updated, 0 unchanged\n"
        assert (await beside("schedules", "export")).out == saved


async def test_an_import_in_another_encoding_is_refused(beside: Beside) -> None:
    line = '{"name":"né","queue":"report","payload":{},"times":{"every_ms":3600000}}'
    wrong = await trio.to_thread.run_sync(partial(piped, line.encode("latin-1"), "schedules", "import"))
    assert wrong.returncode == 1
    assert wrong.stderr == b"worqr: the standard input is not UTF-8, at byte 10: nothing was stored\n"
    assert (await beside("schedules", "export")).out == ""
