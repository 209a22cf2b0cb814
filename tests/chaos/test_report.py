"""The report of a chaos run: what it says, and that it shows the lines of the ledger that belong to a violation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.chaos.checker import check
from benchmarks.chaos.history import History
from benchmarks.chaos.ledger import Ledger, read
from benchmarks.chaos.report import recoveries, report
from benchmarks.chaos.world import Outcome, Plan
from tests.chaos.ledgers import correct

PLAN = Plan("redis", 30, 7)
OUTCOME = Outcome(Counter({"SIGKILL of a peer": 3}), Counter({"peers": 7}), ["clock jumps: no compiler"], 1.5, 1850.0)


def test_a_run_without_a_violation_says_so_and_how_to_repeat_it(tmp_path: Path) -> None:
    history = History.of(correct().entries)
    lines = report(PLAN, OUTCOME, history, check(history), tmp_path).splitlines()
    assert lines[0] == "chaos: 30 min of faults on redis, seed 7"
    assert lines[-2:] == [
        "repeat it: python -m benchmarks chaos --minutes 30 --seed 7 --server redis",
        "chaos passed: no violation",
    ]
    assert "left out: clock jumps: no compiler" in lines
    assert [line.split()[-1] for line in lines if "tasks refused" in line] == ["3"]


def test_a_violation_is_shown_with_its_lines(tmp_path: Path) -> None:
    story = correct()
    story.run(4.1, "raw", "full", peer="peer-3")
    for source in {entry.source for entry in story.entries}:
        ledger = Ledger(tmp_path, source)
        for entry in story.entries:
            if entry.source == source:
                ledger.write(entry.what, **entry.facts)
        ledger.close()
    history = History.of(read(tmp_path))
    text = report(PLAN, OUTCOME, history, check(history), tmp_path)
    assert "VIOLATION: a refused task ran: raw full" in text
    shown = [line.split()[1:3] for line in text.splitlines() if line.startswith("    ") and "full" in line]
    assert ["producer-1", "send"] in shown
    assert ["peer-3", "began"] in shown
    assert f"ledger: {tmp_path}" in text
    assert text.splitlines()[-1].startswith("chaos FAILED: ")


def test_the_wait_for_a_killed_workers_tasks_is_measured_from_its_death() -> None:
    assert recoveries(History.of(correct().entries)) == "4.0 / 4.0"
    assert recoveries(History.of([])) == "none"
