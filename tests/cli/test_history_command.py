"""``worqr history``: rows for pipes, JSON Lines, curves and sums for terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.cli.conftest import Command
from tests.ops.driver import Desk, desk_on
from tests.ops.test_read_history import put
from tests.support.servers import Server
from worqr import ops
from worqr.cli import output
from worqr.history_records import COUNTERS
from worqr.keys import RegistryKeys


@pytest.fixture
def desk(server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk`; what it leaves is removed."""
    expects_left("*")
    yield from desk_on(server, prefix)


def fill(desk: Desk) -> None:
    """Every minute ten tasks were enqueued and finished, for the last two hours; not in the minutes 20 to 24 before now."""
    desk.call(ops.note_queues(RegistryKeys(desk.prefix), ["Q1"]))
    now = desk.call(ops.sample_queue(desk.q, create=True))
    assert now is not None
    for back in range(1, 120):
        if not 20 <= back < 25:
            done = 1200 - 10 * back
            totals = (done, done, done, *[0] * 9, 300 * done, 0)
            runs = (0, 0, 0, 0, 0, 0, 0, 0, 0, done, *[0] * 10)
            record = replace(now, at_ms=now.at_ms - back * 60_000, totals=totals, runs=runs, workers=2)
            put(desk, record, 1)
    desk.client.hset(desk.q.counts, mapping=dict.fromkeys(("enqueued", "claimed", "finished"), 1200))
    desk.client.hset(desk.q.runs, mapping={"r9": 1200, "rs": 360_000})


def test_in_a_pipe_each_minute_is_a_row(cli: Command, desk: Desk) -> None:
    fill(desk)
    head, *rows = cli("history", "Q1", "--minutes", "30").lines
    assert head.split() == [
        *("until", "enqueued", "finished", "retried", "failed", "cancelled", "timed", "out", "stalled", "waiting"),
        *("running", "workers", "longest", "wait", "run", "p50", "run", "p95", "wait", "p95", "state"),
    ]
    assert len(rows) == 30
    assert sum(row.endswith("no record") for row in rows) == 5
    assert rows[0].split()[2:4] == ["10", "10"]


def test_json_has_a_line_for_each_point(cli: Command, desk: Desk) -> None:
    fill(desk)
    found = cli("history", "Q1", "--minutes", "30", "--json").json
    assert len(found) == 30
    assert set(found[0]) == {
        *COUNTERS,
        *("at", "seconds", "waiting", "scheduled", "running", "failed_now", "workers", "age", "runs", "waits", "gap"),
    }
    assert (found[0]["finished"], found[0]["gap"], found[0]["runs"]["count"]) == (10, False, 10)
    assert 0.256 <= found[0]["runs"]["p95"] <= 0.512
    assert [point["finished"] for point in found].count(None) == sum(point["gap"] for point in found) == 5
    assert sum(point["finished"] or 0 for point in found) in {300, 290}  # if the test has met the end of a minute
    assert len(cli("history", "Q1", "--minutes", "481", "--json").json) == 49


class Terminal:
    """A standard output that says it is one, 100 columns wide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: str = "100") -> None:
        monkeypatch.setattr(output, "is_terminal", lambda: True)
        monkeypatch.setattr("worqr.cli.mesh_commands.is_terminal", lambda: True)
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("columns", ["100", "60"])
def test_a_terminal_shows_curves_and_at_most_twelve_sums(
    cli: Command, desk: Desk, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    fill(desk)
    Terminal(monkeypatch, columns)
    assert sys.stdout is not None
    title, *lines = cli("history", "Q1").lines
    assert title == "Q1, the last 60 min"
    finished, waiting, runs, empty, *table = lines
    assert finished.split()[0] == "finished"
    assert finished.split()[-1] in {"600", "590"}
    assert "·" in finished or columns == "60"
    assert waiting.endswith("0 now")
    assert runs.split()[:2] == ["run", "p95"]
    assert runs.endswith("499 ms")
    assert empty == ""
    assert max(map(len, lines)) <= int(columns)
    if columns == "100":
        assert len(table) == 13
        assert "no record" in table[8] or "no record" not in "".join(table)


def test_a_queue_without_records_and_one_that_is_unknown(cli: Command, desk: Desk) -> None:
    unknown = cli("history", "nothing")
    assert (unknown.code, unknown.out) == (0, "")
    assert unknown.err.startswith("worqr: no queue 'nothing' is in use; ")
    desk.put(b"a")
    desk.call(ops.note_queues(RegistryKeys(desk.prefix), ["Q1"]))
    known = cli("history", "Q1", "--minutes", "2")
    assert len(known.lines) == 3
    assert known.err == "worqr: queue 'Q1' has no records yet; the leader stores one a minute while tasks come and go\n"


@pytest.mark.parametrize("minutes", ["0", "-5", "4321"])
def test_other_numbers_of_minutes_are_refused(cli: Command, minutes: str) -> None:
    answer = cli("history", "Q1", f"--minutes={minutes}")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"worqr: --minutes must be 1 to 4320, not {minutes}\n"
