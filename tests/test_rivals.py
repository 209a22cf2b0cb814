"""The harness that sets worqr beside other task queues, with a fake one, and worqr for real. How fast any is, is not asserted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rivals import figures, running
from benchmarks.rivals.__main__ import main, prepared_all
from benchmarks.rivals.children import Failed, descendants, kill
from benchmarks.rivals.contender import Contender, find, header, select
from benchmarks.rivals.figures import QUICK, rate
from benchmarks.rivals.page import section
from benchmarks.rivals.results import FIGURES, LOST, NOT_OFFERED, SUBJECTS, Entry, Results, load, plain, remarks
from tests.support.children import ROOT
from tests.support.patience import PATIENCE, wait_until

FAKES = Path(__file__).parent / "rivals_contenders"


def results_of(*entries: Entry) -> Results:
    return Results(["2 cores", "valkey 9"], list(entries))


# Contenders


def test_a_header_is_read_from_python_and_from_javascript() -> None:
    lines = ['dependencies = ["x==1"]', "[tool.rivals]", 'title = "X"']
    for mark in ("#", "//"):
        text = "\n".join(f"{mark} {line}" for line in ("/// script", *lines, "///")) + "\nimport x\n"
        assert header(text) == {"dependencies": ["x==1"], "tool": {"rivals": {"title": "X"}}}
    with pytest.raises(ValueError, match="begin it with"):
        header("import x\n")


def test_worqr_comes_first_and_all_that_is_installed_is_pinned() -> None:
    found = find()
    assert [each.name for each in found[:3]] == ["worqr-trio", "worqr-asyncio", "worqr-jobs"]
    assert len({each.name for each in found}) == len(found)
    assert all(re.search(r"==\d|@\d", package) for each in found for package in each.dependencies), found


def test_a_name_selects_a_library_or_a_variant(capsys: pytest.CaptureFixture[str]) -> None:
    found = find()
    assert [each.name for each in select(found, ["taskiq", "huey"])] == ["huey", "taskiq-stream", "taskiq-list"]
    assert [each.title for each in select(found, ["taskiq-list"])] == ["taskiq, list broker"]
    for arguments in (["--only", "celry"], ["--figures", "drian"], ["--page", "--quick"]):
        with pytest.raises(SystemExit):
            main(arguments)
    complaint = capsys.readouterr().err
    assert "no contender 'celry'; known: worqr-trio" in complaint
    assert "no figure 'drian'; known: drain" in complaint
    assert main(["--list", "--only", "huey"]) == 0
    assert capsys.readouterr().out.startswith("huey ")


# Figures


def test_a_rate_leaves_out_the_first_tenth() -> None:
    slow_start = [0.0, 50.0, *(100 + n / 10 for n in range(19))]  # 21 stamps: two of them are warm-up
    assert rate(slow_start, 100, "tasks") == pytest.approx(1000)
    with pytest.raises(Failed, match="only 200 tasks"):
        rate([1.0, 2.0], 100, "tasks")


def test_a_cell_is_a_median_a_text_or_empty() -> None:
    entry = Entry("x", "X")
    for value in (3.0, 1.0, 2000.0):
        entry.add("drain", value)
    entry.texts["bulk"] = NOT_OFFERED
    entry.fail({"cancel", "drain"}, "no handler started")
    cells = [entry.cell(key) for key in ("drain", "bulk", "cancel", "idle")]
    assert cells == ["3", NOT_OFFERED, "failed", ""]
    assert entry.notes == ["cancel, drain failed: no handler started"]


def test_the_best_is_the_highest_rate_and_the_lowest_time() -> None:
    slow, fast = (
        Entry("s", "S", values={"drain": [1], "pickup50": [9]}),
        Entry("f", "F", values={"drain": [2], "pickup50": [3]}),
    )
    results = results_of(slow, fast, Entry("n", "N", failed="cannot be installed"))
    by_key = {figure.key: figure for figure in FIGURES}
    for key in ("drain", "pickup50"):
        assert [entry.title for _, entry in results.best(by_key[key])] == ["F", "S"]


def test_the_table_has_what_was_measured_and_comes_back_from_its_file(tmp_path: Path) -> None:
    worqr = Entry("worqr-trio", "worqr, Trio", {"worqr": "1"}, ["one process"], values={"drain": [50000, 60000, 70000]})
    other = Entry("x", "X", {"x": "2"}, ["defaults"], values={"drain": [1000]}, texts={"recovery": LOST})
    absent = Entry("y", "Y", failed="no compiler")
    results = results_of(worqr, other, absent)
    results.write(tmp_path / "run.json")
    again = load(tmp_path / "run.json")
    assert again == results
    lines = plain(again.rows()).splitlines()
    assert [line.split() for line in lines[-4:]] == [
        ["tasks/s", "s"],
        ["worqr,", "Trio", "60,000"],
        ["X", "1,000", LOST],
        ["Y"],
    ]
    assert remarks(results.entries)[-1] == "Y (not installed): not measured: no compiler"
    written = section(results)
    assert "| **worqr, Trio** | 60,000 |" in written
    assert "| Y | not measured |" in written
    assert "    - Not measured: no compiler." in written


def test_a_run_says_that_its_turns_disagree() -> None:
    quiet = Entry("q", "Q", values={"drain": [90, 100, 110], "pickup50": [1, 9]})
    assert results_of(quiet).disturbed() == ""
    busy = Entry("b", "B", values={"drain": [40, 100]})
    assert results_of(quiet, busy).disturbed().startswith("1 of 2 rates differ by more than 2 times")


# Processes


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self/stat").exists()
    return state != "Z"


def test_a_worker_is_killed_with_all_that_it_started() -> None:
    child = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    program = f"import subprocess; print({child}.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        below = int(process.stdout.readline())
        assert descendants(process.pid) == [below]
        kill(process)
    wait_until(lambda: not alive(below), what="the process below the worker still runs")


def fakes(*names: str) -> list[Contender]:
    return select(find(FAKES), names)


def measured(names: list[str], subjects: set[str], tmp_path: Path) -> Results:
    results = results_of()
    pairs = prepared_all(fakes(*names), tmp_path, results)
    running.run(pairs, replace(QUICK, recovery=1.0), frozenset(subjects), lambda line: None)
    return results


def test_every_figure_of_a_fake_is_measured_and_one_that_does_not_start_is_named(tmp_path: Path) -> None:
    results = measured(["fake-sound", "fake-broken"], set(SUBJECTS), tmp_path)
    sound, broken = results.entries
    assert broken.failed == "ImportError: no module named fake"
    assert sound.notes == []
    assert sound.texts == {"bulk": NOT_OFFERED, "cancel": NOT_OFFERED, "recovery": LOST}
    assert set(sound.values) == {figure.key for figure in FIGURES} - set(sound.texts)
    assert sound.values.pop("idle") == [0.0]  # it waits in one blocking command
    assert all(value > 0 for values in sound.values.values() for value in values), sound.values


def test_a_worker_that_runs_nothing_fails_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "START_WITHIN", 0.5)
    monkeypatch.setattr("benchmarks.rivals.stand.READY_WITHIN", 5.0)
    (deaf,) = measured(["fake-deaf"], {"drain", "pickup"}, tmp_path).entries
    assert {key: deaf.cell(key) for key in ("drain", "pickup50")} == {"drain": "failed", "pickup50": "failed"}
    assert "its log ends with: no ears" in deaf.notes[-1]


def harness(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rivals", "--quick", "--only", "worqr-trio", *arguments]


def test_a_quick_run_measures_every_figure_of_worqr(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = subprocess.run(
        harness("--json", str(file)), cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(file.read_text("utf-8"))["entries"]
    assert (entry["notes"], entry["texts"], entry["failed"]) == ([], {}, ""), done.stderr
    assert set(entry["values"]) == {figure.key for figure in FIGURES}
    assert "worqr, Trio" in done.stdout


def test_an_interrupted_run_leaves_no_process() -> None:
    with subprocess.Popen(harness("--figures", "recovery"), cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        seen: set[int] = set()

        def started() -> bool:
            running = descendants(process.pid)
            seen.update(running)
            return len(running) >= 5  # the server with its keeper, which are three, a producer and a worker

        assert process.stderr is not None
        assert process.stderr.readline().startswith("side by side")
        wait_until(started, what="the worker did not start")
        process.send_signal(signal.SIGTERM)
        assert "interrupted; all processes were ended" in process.stderr.read()
        assert process.wait(PATIENCE) == 130
    wait_until(lambda: not any(alive(pid) for pid in seen), what="processes of the harness still run")
