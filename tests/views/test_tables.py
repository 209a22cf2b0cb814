"""The tables that people see: one description for the terminal, ``worqr top``, the pages and the live numbers. No server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import worqr
from worqr.cron import Schedule, ScheduleOverride
from worqr.mesh_records import LaneInfo, QueueInfo, WorkerInfo
from worqr.records import Failed, RemoteError, TaskInfo
from worqr.views import tables
from worqr.views.tables import LANES, QUEUES, RUNNING, Column, Table, queue_notes, schedule_notes, worker_notes

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
TABLES = {name: each for name, each in vars(tables).items() if isinstance(each, Table)}
TASK = TaskInfo(state="active", id="film-1", task=b"\x1b[2Jraw", worker="shop:" + "ab" * 16, since=NOW, attempts=2)


def queue(name: str = "q", **fields: Any) -> QueueInfo:
    numbers = dict.fromkeys(("waiting", "scheduled", "blocked", "running", "failed", "undecodable", "workers"), 0)
    return QueueInfo(**{**numbers, "name": name, "paused": None, "oldest_job": None, "counts": {}, **fields})


def worker(**fields: Any) -> WorkerInfo:
    given = {"id": "shop:w", "host": "box", "pid": 7, "app": "shop", "version": "1", "queues": frozenset({"b", "a"})}
    return WorkerInfo(**{**given, "running": 1, "room": 2, "beat_age": 0.5, **fields})


ROWS: dict[str, Any] = {
    "QUEUES": queue(waiting=12345, oldest_job=93.0),
    "LANES": LaneInfo("acme", 3, 1, 2, (worqr.Limit(2),)),
    "WORKERS": worker(),
    "TASKS": TASK,
    "FAILED": Failed("j", "q", b"x", "failed", RemoteError("smtplib.Gone", "bye", ""), 1, 0, 0, "w", NOW, {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_column_has_a_word_of_its_own(name: str) -> None:
    columns = TABLES[name].columns
    for texts in ([each.title for each in columns], [each.short or each.title for each in columns]):
        assert len(set(texts)) == len(texts)
    assert all(each.title == each.title.strip() and "_" not in each.title for each in columns)
    assert all(len(each.short) < len(each.title) for each in columns if each.short)


@pytest.mark.parametrize("name", ROWS)
def test_each_cell_is_written_for_pipes_terminals_and_pages(name: str) -> None:
    for column in TABLES[name].columns:
        for text in (column.plain(ROWS[name]), column.shown(ROWS[name]), column.on_page(ROWS[name])):
            assert isinstance(text, str)
            assert "\x1b" not in text


def cells(columns: tuple[Column, ...], row: object) -> dict[str, tuple[str, str, str]]:
    return {each.title: (each.plain(row), each.shown(row), each.on_page(row)) for each in columns}


def test_pipes_get_exact_values_and_people_short_ones() -> None:
    found = cells(QUEUES.columns, ROWS["QUEUES"])
    assert found["waiting"] == ("12345", "12,345", "12,345")
    assert found["longest wait"] == ("93.0 s", "1 min", "1 min")
    found = cells(RUNNING, ("mails", TASK))
    assert found["queue"] == ("mails", "mails", "mails")
    assert found["worker"] == (TASK.worker, "shop:abababab", "shop:abababab")
    assert found["task"][0] == "\\x1b[2Jraw"
    assert found["progress"] == ("-", "-", "–")
    assert cells(TABLES["FAILED"].columns, ROWS["FAILED"])["error"][0] == "smtplib.Gone: bye"
    assert cells(TABLES["WORKERS"].columns, worker(beat_age=float("inf")))["last beat"][0] == "never"


def test_live_texts_are_those_of_the_page() -> None:
    info = ROWS["QUEUES"]
    assert QUEUES.live(info, "waiting running") == {"queue.q.waiting": "12,345", "queue.q.running": "0"}
    assert tables.WORKERS.live(worker(lag=2.04), "beat_age lag") == {
        "worker.shop:w.beat_age": "500 ms",
        "worker.shop:w.lag": "2 s",
    }


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, ""),
        ({"held_back": "concurrency"}, "limit reached"),
        ({"held_back": "rate", "held_for": 2.0}, "rate reached, for 2 s"),
        ({"held_back": "lanes", "held_for": 120.0, "lanes": 2, "held_lanes": 2}, "all lanes held, for 2 min"),
        ({"held_back": "paused", "paused": "429", "held_for": 2.0}, "paused: 429, for 2 s"),
        ({"held_back": "paused", "paused": ""}, "paused"),
        ({"held_back": "concurrency", "waiting": 0}, ""),
        ({"workers": 0}, "no worker"),
        ({"workers": 0, "paused": "why"}, "no worker; paused: why"),
        ({"workers": 0, "waiting": 0}, ""),
    ],
)
def test_the_notes_of_a_queue_say_why_nothing_starts_and_until_when(fields: dict[str, Any], state: str) -> None:
    info = queue(**{"waiting": 1, "workers": 1, **fields})
    assert QUEUES.state_of(info) == state
    assert (
        "; ".join(note.word for note in queue_notes(info))
        == state.replace(": why", "").partition(",")[0].partition(":")[0]
    )


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, ""),
        ({"paused": "", "held": True}, "paused"),
        ({"paused": "429", "held": True, "held_for": 2.0}, "paused: 429, for 2 s"),
        ({"held": True}, "limit reached"),
        ({"held": True, "held_for": 2.0}, "rate reached, for 2 s"),
    ],
)
def test_the_notes_of_a_lane_say_the_same(fields: dict[str, Any], state: str) -> None:
    assert LANES.state_of(replace(ROWS["LANES"], **fields)) == state


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({}, []),
        ({"leads": True}, ["leader"]),
        ({"state": "quiet"}, ["quiet"]),
        ({"state": "leaving"}, ["leaving"]),
        ({"state": "missing"}, ["no heartbeat"]),
        ({"state": "dead", "leads": True}, ["leader", "dead"]),
        ({"request": "drain"}, ["has not answered yet: drain"]),
        ({"answer": "done"}, []),
        ({"answer": "refused: why"}, ["has refused: why"]),
    ],
)
def test_the_notes_of_a_worker_say_what_is_unusual(fields: dict[str, Any], texts: list[str]) -> None:
    assert [note.text for note in worker_notes(worker(**fields))] == texts


def test_versions_are_noted_only_if_there_are_several() -> None:
    one, other = worker(), worker(version="")
    assert tables.workers_table([one, one]) is tables.WORKERS
    found = tables.workers_table([one, other])
    assert [found.state_of(each) for each in (one, other)] == ["version 1", "version unknown"]


def test_deploys_are_noted_only_where_an_application_has_several() -> None:
    old, new, none = worker(app="shop", deploy=7), worker(app="shop", deploy=8), worker(app="shop")
    other = worker(app="mail", deploy=3)
    assert tables.workers_table([new, other]) is tables.WORKERS
    found = tables.workers_table([old, new, none, other])
    assert [found.state_of(each) for each in (old, new, none, other)] == ["deploy 7", "deploy 8", "no deploy", ""]
    assert tables.fields_of(new)["deploy"] == 8


def test_the_notes_of_a_schedule() -> None:
    schedule = Schedule("s", NOW, None, paused=False, every=60.0)
    assert not schedule_notes(schedule, NOW)
    assert [note.text for note in schedule_notes(schedule, NOW + timedelta(minutes=2))] == ["overdue"]
    override = ScheduleOverride("0 3 * * *", "UTC", "ada", NOW)
    changed = replace(schedule, paused=True, problem="no such zone", override=override)
    assert [note.text for note in schedule_notes(changed)] == ["problem: no such zone", "paused", "overridden by ada"]


def test_json_has_no_infinity() -> None:
    assert tables.fields_of(worker(beat_age=float("inf")))["beat_age"] is None
    assert tables.fields_of(worker())["beat_age"] == 0.5
