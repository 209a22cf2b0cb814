"""The benchmarks run, all of them, and print what they should. How fast anything is, is not asserted anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SUBJECTS, main
from benchmarks.measuring import Bar, Row, Table, percentile, shown
from benchmarks.report import print_plain, write_markdown

ROOT = Path(__file__).parent.parent
TABLES = {
    "dispatch": 2,
    **dict.fromkeys(("drain", "saving", "batches", "fleet", "cluster", "startup", "threads", "tracing"), 2),
    "functions": 3,
    "jobs": 2,
    "producers": 3,
    "scripts": 2,
    "operator": 6,
}
"""How many tables a subject prints, if it is not one."""
AT_ONCE = 4
"""Subjects that one process measures: a process takes a second to start, and a long test keeps the whole run waiting."""
PARTS = [SUBJECTS[n : n + AT_ONCE] for n in range(0, len(SUBJECTS), AT_ONCE)]


def test_every_benchmark_is_listed() -> None:
    modules = (ROOT / "benchmarks").glob("*.py")
    assert {*SUBJECTS} == {file.stem for file in modules if "async def measure(" in file.read_text("utf-8")}


@pytest.mark.sweep(keep=2)
@pytest.mark.timeout(900)  # processes start, and a killed peer's tasks take seconds to come back
@pytest.mark.parametrize("names", PARTS, ids=", ".join)
def test_a_quick_run_prints_every_table_and_no_error(names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", str(file), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    tables = json.loads(file.read_text("utf-8"))["tables"]
    assert len(tables) == sum(TABLES.get(name, 1) for name in names)
    for table in tables:
        assert table["title"][:25] in done.stdout
        for row in table["rows"]:
            assert row["values"], row["what"]
            assert len(row["limits"]) in {0, len(row["values"])}, row["what"]


def test_an_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drian"])
    complaint = capsys.readouterr().err
    assert "'drian'" in complaint
    assert all(name in complaint for name in SUBJECTS)


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() -> None:
    disturbed = Row("x", "tasks/s", [10, 20, 90], [100, 20, 100])
    assert disturbed.ratio == 0.9
    assert (disturbed.median, disturbed.limit) == (20, 100)


def test_best_and_worst_know_which_way_is_better() -> None:
    rate = Row("x", "tasks/s", [1, 2, 3], bar=Bar(2))
    wait = Row("x", "ms", [1, 2, 3], bar=Bar(2, most=True))
    assert (rate.best, rate.worst_run, rate.met) == (3, 1, True)
    assert (wait.best, wait.worst_run, wait.met) == (1, 3, True)
    assert Row("x", "s", [1, 2, 3], bar=Bar(2, most=True), worst=True).met is False


def test_a_percentile_is_a_sample() -> None:
    samples = [float(n) for n in range(1, 101)]
    assert [percentile(samples, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 99) == 7


def test_figures_show_three_digits_that_matter() -> None:
    assert [shown(value) for value in (378689.4, 123.4, 1.234, 0.0525)] == ["378,689", "123", "1.23", "0.0525"]


def test_the_tables_are_written_as_the_docs_have_them(tmp_path: Path) -> None:
    file = tmp_path / "figures.md"
    rows = [Row("x", "ms", [3, 1, 2], [1, 1, 1], Bar(1, most=True)), Row("y", "bytes", [1000.4])]
    write_markdown(file, ["a machine"], [Table("title: more", "the least", rows, ["a note"])])
    assert file.read_text("utf-8").splitlines() == [
        "a machine",
        "",
        "| what, and its limit | median | bar |",
        "|---|--:|--:|",
        "| **title: more; limit: the least** | | |",
        "| x, ms | 2 (2.00) **missed** | <= 1 |",
        "| y, bytes | 1,000 |  |",
        "",
        "- title: a note",
    ]


def test_without_rich_the_table_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_plain(Table("title", "the least", notes=["a note"]), [])
    assert capsys.readouterr().out.splitlines()[0] == "title"
