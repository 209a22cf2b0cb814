"""The demo: its parts, the whole of it as a process, and what is left when it is interrupted or killed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from tests.support.children import ROOT, is_running
from tests.support.patience import PATIENCE
from worqr.cli import demo as demo_command
from worqr.cli.demo import worker_processes as processes
from worqr.cli.demo import worker_processes as states
from worqr.cli.demo.worker_processes import (
    Counted,
    DemoState,
    FileResults,
    Killed,
    Line,
    LongTask,
    OrderRun,
    Report,
    WorkerRow,
    count_file,
    decode,
    encode,
    find_files,
    is_good,
    summarise,
)

ESCAPE = "\x1b"


# The work


def test_the_files_are_those_of_the_library_and_a_limit_takes_the_largest() -> None:
    files = find_files()
    assert files == sorted(files)
    assert any(path.endswith("/tokenize.py") for path in files)
    assert not any("site-packages" in path for path in files)
    largest = find_files(10)
    assert len(largest) == 10
    assert min(os.path.getsize(path) for path in largest) >= max(
        os.path.getsize(path) for path in set(files) - set(largest)
    )


def test_a_file_is_counted(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("if x:\n    return 1\n\nif y: pass  # twice\n")
    counted = count_file(str(source))
    assert counted.keywords == {"if": 2, "pass": 1, "return": 1}
    assert counted.tokens > 15
    assert not counted.broken


def test_what_is_no_python_is_a_result_too(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_bytes(b"# coding: no-such-encoding\n")
    assert count_file(str(source)).broken


def test_a_report_survives_its_way() -> None:
    report = Report("counted", "peer-1", 1.5, "/a", Counted(1, 2, {"if": 1}), 1)
    assert decode(encode(report)) == report


# The summary, which must be able to fail


def counted(path: str, **other: Any) -> Report:
    return Report(
        **{
            "kind": "counted",
            "worker": "peer-1",
            "at": 12.0,
            "path": path,
            "counted": Counted(1, 2, {"if": 1}),
            **other,
        }
    )


@pytest.fixture
def state(tmp_path: Path) -> DemoState:
    """What is known after a demo in which all went well: /b was in the hands of the killed peer."""
    again = tmp_path / "b.py"
    again.write_text("x\n")
    files = ["/a", str(again)]
    state = DemoState(FileResults(frozenset(files)), [WorkerRow("peer-1", 1), WorkerRow("peer-2", 2)], slots=4)
    state.add(counted("/a"))
    state.add(counted(str(again), counted=count_file(str(again)), stalls=1))
    state.killed = Killed("peer-2", 2, at=8.0, held=1)
    state.long_task = LongTask("peer-1", 1.0, 2.0, 2.001, 2.002, "cancel", acknowledged=1, runs=1)
    reports = [Report("charged", "peer-1", 1.0), Report("shipping", "peer-2", 7.5)]
    reports += [Report("shipping", "peer-1", 12.0), Report("shipped", "peer-1", 12.1)]
    state.order = OrderRun(reports, state="suspended", waits_since=2.0, approved_at=7.0)
    state.left = {"files": 0, "long": 0, "orders": 0, "results": 0}
    state.clock.ended = state.clock.began + 10
    return state


def by_name(lines: list[Line]) -> dict[str, Line]:
    return {line.what: line for line in lines}


def test_a_good_outcome_is_good(state: DemoState) -> None:
    lines = by_name(summarise(state))
    assert is_good(list(lines.values()))
    assert lines["files in"].value == lines["results out"].value == "2"
    assert lines["lost"].value == "0"
    assert lines["recovered"].value == "after 4.00 s"
    assert lines["long task cancelled"].value == "in 1.0 ms"
    assert lines["workflow waited"].value == "5.00 s"
    assert lines["workflow resumed"].value == "after 4.00 s"


def test_the_same_report_twice_is_no_harm_but_another_one_is(state: DemoState) -> None:
    state.add(counted("/a", at=13.0, worker="peer-2"))
    assert is_good(summarise(state))
    assert "1 file reported twice" in by_name(summarise(state))["results out"].note
    state.add(counted("/a", counted=Counted(9, 9, {})))
    assert not is_good(summarise(state))


def spoil(state: DemoState, how: str) -> None:
    match how:
        case "a file without a result":
            state.results.files |= {"/c"}
        case "a result of no file":
            state.add(counted("/nobody-asked"))
        case "a task left in a queue":
            state.left["files"] = 1
        case "nobody looked what is left":
            state.left = {}
        case "nobody killed":
            state.killed = None
        case "killed with nothing in its hands":
            state.killed = Killed("peer-2", 2, at=8.0, held=0)
        case "held more than ran again":
            state.killed = Killed("peer-2", 2, at=8.0, held=2)
        case "ran again before the kill":
            state.killed = Killed("peer-2", 2, at=99.0, held=1)
        case "a wrong second result":
            state.results.second_runs = {
                path: replace_counted(report) for path, report in state.results.second_runs.items()
            }
        case "the workflow held a worker while it waited":
            state.order.state = "active"
        case "the workflow charged the card again":
            state.order.reports.append(Report("charged", "peer-1", 12.0))
        case "the workflow was not killed":
            state.order.reports.remove(state.order.of("shipping")[0])
        case "the workflow did not go on":
            state.order.reports.remove(state.order.of("shipped")[0])
        case "never cancelled":
            state.long_task.cancelled_at = None
        case "cancelled for another reason":
            state.long_task.reason = "lost"
        case "not acknowledged":
            state.long_task.acknowledged = 0
        case _:
            assert how == "the cancelled task came back"
            state.long_task.runs = 2


def replace_counted(report: Report) -> Report:
    assert report.counted is not None
    return counted(report.path, counted=replace(report.counted, tokens=1), stalls=1)


@pytest.mark.parametrize(
    "how",
    [
        *("a file without a result", "a result of no file", "a task left in a queue", "nobody looked what is left"),
        *("nobody killed", "killed with nothing in its hands", "held more than ran again", "ran again before the kill"),
        *("a wrong second result", "never cancelled", "cancelled for another reason", "not acknowledged"),
        *("the workflow held a worker while it waited", "the workflow charged the card again"),
        *("the workflow was not killed", "the workflow did not go on", "the cancelled task came back"),
    ],
)
def test_whatever_is_wrong_is_said(state: DemoState, how: str) -> None:
    spoil(state, how)
    lines = summarise(state)
    assert not is_good(lines)
    assert demo_command.verdict(lines).startswith("FAILED: ")


@pytest.mark.parametrize("good", [True, False])
def test_the_exit_code_says_whether_all_is_there(state: DemoState, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not good:
        spoil(state, "a file without a result")

    async def told(*_arguments: object) -> DemoState:
        return state

    monkeypatch.setattr(demo_command, "run_scenario", told)
    monkeypatch.setattr(demo_command, "find_files", lambda _limit: sorted(state.results.files))
    assert demo_command.demo() == (0 if good else 1)


# The views


def text_of(picture: object) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(picture)
    console.file.close()
    return console.export_text()


def test_the_table_shows_peers_queue_and_progress(state: DemoState) -> None:
    state.waiting, state.workers[0].running, state.workers[0].state, state.workers[1].state = 7, 3, "busy", "killed"
    state.tell("something happened")
    text = text_of(demo_command.picture(state))
    assert re.search(r"peer-1 .*busy .*■■■· .*2", text)
    assert re.search(r"peer-2 .*killed", text)
    assert "7 waiting" in text
    assert "2 of 2" in text
    assert "something happened" in text


def test_the_last_table_marks_every_check(state: DemoState) -> None:
    assert re.search(r"✓ +lost +0", text_of(demo_command.picture_of_end(summarise(state))))
    spoil(state, "a file without a result")
    assert re.search(r"✗ +lost +1 +missing: /c", text_of(demo_command.picture_of_end(summarise(state))))


class Terminal:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, _text: str) -> int:
        return 0

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value", "plain"), [("TERM", "xterm", False), ("TERM", "dumb", True), ("NO_COLOR", "1", True)]
)
def test_lines_are_plain_where_a_table_is_not_wanted(
    name: str, value: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with demo_command.open_display() as shown:
        assert isinstance(shown, demo_command.PlainDisplay) == plain


def test_a_rate_is_that_of_late(state: DemoState) -> None:
    assert state.rate > 0
    state.results._recent.clear()
    state.results._recent.append(time.monotonic() - states.RATE_WINDOW - 1)
    assert state.rate == 0


# The processes of the workers


async def test_a_peer_that_dies_by_itself_is_noticed_with_its_last_words() -> None:
    async with processes.start_workers("redis://localhost:no-port", 1) as workers:
        await workers.all[0].process.wait()
        with pytest.raises(
            processes.WorkerDied, match=r"worker-1 \(pid \d+\) ended unexpectedly with exit code 1:\n(.*\n)*.*its port"
        ):
            workers.check()
        workers.all[0].killed = True
        workers.check()


# The whole


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "worqr", "demo", *options]


ENDLESS = "import sys; from worqr.cli import demo, main; demo.LONG_RUNS_FOR = 600; sys.exit(main(['demo']))"
"""It does not end before it is interrupted or killed, however late that is."""


def family(pid: int) -> set[int]:
    """The children of a process and theirs."""
    lines = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    parents = {int(child): int(parent) for child, parent in map(str.split, lines)}
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


async def until_gone(pids: set[int]) -> None:
    with trio.fail_after(PATIENCE):
        for pid in pids:
            while is_running(pid):
                await trio.sleep(0.02)


def test_it_runs_to_a_good_end_in_plain_lines() -> None:
    answer = subprocess.run(
        command("--files", "80"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=3 * PATIENCE
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert ESCAPE not in answer.stdout
    assert answer.stderr == ""
    assert re.search(r"killed worker-\d with SIGKILL while it ran \d files? and the workflow", answer.stdout)
    assert re.search(
        r"^  ok  workflow resumed +after [\d.]+ s +on worker-\d; card charged once$",
        answer.stdout,
        re.MULTILINE,
    )
    assert re.search(r"^  ok  lost +0 ", answer.stdout, re.MULTILINE)
    assert answer.stdout.endswith("\nNothing was lost.\n")


@pytest.fixture
def on_terminal() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The demo on a pseudo-terminal, and our end of it."""
    ours, its = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        cwd=ROOT,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**environment, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    )
    os.close(its)
    yield process, ours
    process.kill()
    process.wait()
    os.close(ours)


def read_until(ours: int, pattern: str) -> str:
    text = b""
    while not re.search(pattern.encode(), text):
        text += os.read(ours, 65536)
    return text.decode("utf-8", "replace")


def read_on(ours: int) -> str:
    text = b""
    try:
        while more := os.read(ours, 65536):
            text += more
    except OSError:  # how Linux says that nobody holds the other end
        pass
    return text.decode("utf-8", "replace")


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="there are no pseudo-terminals here")
async def test_on_a_terminal_it_shows_the_table_and_ctrl_c_leaves_nothing_behind(
    on_terminal: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, ours = on_terminal
    await trio.to_thread.run_sync(read_until, ours, "busy")
    children = family(process.pid)
    assert len(children) >= 5
    process.send_signal(signal.SIGINT)
    rest = await trio.to_thread.run_sync(read_on, ours)
    assert await trio.to_thread.run_sync(process.wait) == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert f"{ESCAPE}[?25h" in rest  # the cursor is back
    await until_gone(children)


async def test_killed_it_takes_its_peers_and_its_server_along() -> None:
    program = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        await trio.to_thread.run_sync(process.stdout.readline)
        with trio.fail_after(PATIENCE):
            while len(children := family(process.pid)) < 5:
                await trio.sleep(0.05)
        process.kill()
        await until_gone(children)
