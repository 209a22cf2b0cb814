"""Queues with waiting tasks and no worker: when the leader logs them, how often, and what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Runs, serving, until
from worqr.ops import Inspected
from worqr.peer.leader import scanner
from worqr.peer.leader.scanner import (
    COMPARED,
    GRACE,
    LINES,
    NOTHING_MISSED,
    PERIOD,
    REMEMBERED,
    UnservedQueueReporter,
)

NOTHING = Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
WAITS = replace(NOTHING, waiting=3)
SERVED = replace(NOTHING, workers=["A"])
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines about unserved queues since the last call."""

    def taken() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == scanner.__name__]
        caplog.clear()
        return found

    return taken


def seen_for_long(judge: UnservedQueueReporter, found: dict[str, Inspected], at: float = 0.0) -> None:
    """Two scans that find the same, as far apart as it takes."""
    judge.report(found, at)
    judge.report(found, at + GRACE)


def test_a_queue_is_named_with_what_waits_what_was_meant_and_the_remedy(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"shop.sned": WAITS, "shop.send": SERVED, "other": SERVED}
    seen_for_long(UnservedQueueReporter(), found)
    (record,) = caplog.records
    assert (record.levelno, record.__dict__["queue"], record.__dict__["waiting"]) == (logging.WARNING, "shop.sned", 3)
    assert lines() == [
        "queue.unserved: 3 tasks wait in queue 'shop.sned' and no worker serves it; did you mean 'shop.send'? "
        "Start a worker that declares it, or delete the queue."
    ]


def test_without_a_name_that_is_close_none_is_proposed(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"mails": replace(WAITS, waiting=1), "report": SERVED})
    assert lines() == [
        "queue.unserved: 1 task waits in queue 'mails' and no worker serves it. "
        "Start a worker that declares it, or delete the queue."
    ]


def test_a_failure_queue_needs_a_failure_handler(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"{mails}-fail": WAITS, "mails": SERVED})
    assert lines() == [
        "queue.unserved: 3 tasks wait in queue '{mails}-fail' and no worker serves it. "
        "Start a worker that serves 'mails' and has a failure handler for it, or delete the queue."
    ]


def test_nothing_is_said_of_a_queue_whose_worker_restarts(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for restart in range(10):
        judge.report({"mails": WAITS}, restart * GRACE)
        judge.report({"mails": WAITS}, restart * GRACE + GRACE / 2)
        judge.report({"mails": replace(WAITS, workers=["A"])}, restart * GRACE + GRACE * 0.9)
    assert lines() == []


@pytest.mark.parametrize("between", [NOTHING, replace(WAITS, paused="why"), SERVED], ids=["empty", "paused", "served"])
def test_the_time_begins_anew_when_nothing_waited_in_vain(lines: Lines, between: Inspected) -> None:
    judge = UnservedQueueReporter()
    for now, queue in ((0.0, WAITS), (1.0, between), (GRACE, WAITS), (2 * GRACE - 1, WAITS)):
        judge.report({"mails": queue}, now)
    assert lines() == []
    judge.report({"mails": WAITS}, 2 * GRACE)
    assert len(lines()) == 1


def test_a_queue_that_is_empty_or_paused_is_never_named(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for now in range(100):
        judge.report({"empty": NOTHING, "due": replace(NOTHING, due=1), "paused": replace(WAITS, paused="")}, now)
    assert lines() == []


def test_it_is_said_once_until_a_worker_has_served_the_queue(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for now in range(1000):
        judge.report({"mails": WAITS if now % 100 else NOTHING}, float(now))
    assert len(lines()) == 1
    judge.report({"mails": SERVED}, 1000)
    seen_for_long(judge, {"mails": WAITS}, 1001)
    assert len(lines()) == 1


def test_it_is_said_again_when_the_queue_was_forgotten_meanwhile(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    seen_for_long(judge, {"mails": WAITS})
    judge.forget(["mails", "unknown"])
    seen_for_long(judge, {"mails": WAITS}, 100)
    assert len(lines()) == 2


def test_a_new_leader_says_it_again_but_not_one_that_has_only_lost_its_lease_for_a_moment(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    judge.begin(0)
    seen_for_long(judge, {"mails": WAITS}, 0)
    judge.begin(GRACE + 5)
    seen_for_long(judge, {"mails": WAITS}, GRACE + 5)
    assert len(lines()) == 1
    later = 2 * GRACE + 5 + NOTHING_MISSED + 1
    judge.begin(later)
    judge.report({"mails": WAITS}, later)
    assert lines() == []
    judge.report({"mails": WAITS}, later + GRACE)
    assert len(lines()) == 1


def test_the_shards_of_a_queue_are_one_queue(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"hot": WAITS, "{hot~0}-shard": WAITS, "{hot~1}-shard": NOTHING})
    (line,) = lines()
    assert line.startswith("queue.unserved: 6 tasks wait in queue 'hot' ")


def test_a_shard_of_a_queue_that_is_served_is_not_named(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"hot": SERVED, "{hot~0}-shard": WAITS})
    assert lines() == []


def test_of_many_queues_a_few_are_named_and_the_others_counted(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    found = {f"Q{n}": WAITS for n in range(1000)}
    seen_for_long(judge, found)
    said = lines()
    assert len(said) == LINES + 1
    assert said[-1] == (
        f"queue.unserved: tasks wait in {1000 - LINES} more queues and no worker serves them; `worqr queues` lists them"
    )
    for now in range(1000):
        judge.report(found, GRACE + now)
    assert lines() == []


def test_many_queues_that_come_one_by_one_are_counted_once_a_minute(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    found: dict[str, Inspected] = {}
    for now in range(int(10 * PERIOD)):
        found[f"Q{now}"] = WAITS
        judge.report(found, float(now))
    said = lines()
    assert len(said) <= 10 * (LINES + 1)
    judge.report(found, 20 * PERIOD)
    judge.report(found, 30 * PERIOD)
    said += lines()
    assert sum(int(line.split()[4]) if "more queues" in line else 1 for line in said) == len(found)
    judge.report(found, 40 * PERIOD)
    assert lines() == []


def test_what_is_remembered_is_bounded() -> None:
    judge = UnservedQueueReporter()
    for page in range(3):
        seen_for_long(judge, {f"Q{page}-{n}": WAITS for n in range(REMEMBERED)}, page * 100.0)
    assert len(judge._since) <= REMEMBERED  # pyright: ignore[reportPrivateUsage]
    assert len(judge._logged) <= REMEMBERED  # pyright: ignore[reportPrivateUsage]


def test_few_names_are_compared(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def did_you_mean(_name: str, known: Any) -> str:
        compared.append(len(known))
        return ""

    monkeypatch.setattr(scanner, "did_you_mean", did_you_mean)
    served = {f"served-{n}": SERVED for n in range(COMPARED - 1)}
    seen_for_long(UnservedQueueReporter(), {**served, **{f"Q{n}": WAITS for n in range(5)}})
    assert len(lines()) == 5
    assert sum(compared) == COMPARED


async def test_the_leader_says_so(
    mesh: worqr.Mesh, new_mesh: NewMesh, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "SCAN_EVERY", 0.5)
    monkeypatch.setattr(scanner, "GRACE", 0.5)
    q, said = mesh.queue("shop.sned"), list[str]()

    def told() -> bool:
        said.extend(lines())
        return bool(said)

    async with serving(mesh, "shop.send", Runs()):
        await q.enqueue(b"x", b"y")
        await until(told)
        assert said == [
            "queue.unserved: 2 tasks wait in queue 'shop.sned' and no worker serves it; did you mean 'shop.send'? "
            "Start a worker that declares it, or delete the queue."
        ]
        runs = Runs()
        async with serving(new_mesh(), "shop.sned", runs):
            await runs.wait(2)
