"""The parent of several workers, with workers that do not exist. `tests/cli/test_workers.py` has the processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import wait_until
from worqr.hosting import supervisor
from worqr.hosting.supervisor import ControlledChild, Limits, Plan

# pyright: reportPrivateUsage=false


class FakeWorker(supervisor._Worker):
    """It serves at once."""

    def __init__(self, number: int, command: list[str], limits: Limits, restarted: str) -> None:
        super().__init__(number, command, limits, restarted)
        self.restarted = restarted
        self.status: Mapping[str, Any] = {"ready": True, "alive": True, "runs": 0}


class FakeChild:
    pid = 1

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_only_the_worker_that_is_started_for_one_that_died_notes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ControlledChild", FakeChild)
    monkeypatch.setattr(supervisor, "_Worker", FakeWorker)
    monkeypatch.setattr(supervisor, "STEADY_AFTER", 0.0)
    parent: Any = supervisor._Supervisor(Plan([], 1, Limits(age=0.0), grace=0, probe=None))
    parent._start_missing()
    parent._renew()
    parent._start_missing()
    old, successor = parent._workers
    parent._on_end(old, -9)  # before it was asked to retire, so that its successor has been started already
    parent._start_missing()
    assert parent._workers == [successor]
    parent._on_end(successor, -11)
    parent._start_missing()
    [third] = parent._workers
    assert third.restarted == "the worker of process 1 was ended by SIGSEGV"
    parent._renew()
    parent._start_missing()
    parent._on_end(third, -9)
    parent._start_missing()
    parent._renew()
    parent._start_missing()
    assert [each.restarted for each in parent._workers] == ["", ""]


def test_the_parent_imports_no_file_of_the_folder_that_it_is_started_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "operator.py").write_text("raise RuntimeError('json imports a module of this name')")
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _program, command: commands.append(command))
    plan = Plan([sys.executable, "-c", "raise SystemExit(7)"], 1, Limits(), grace=0, probe=None)
    supervisor.become_supervisor(plan, None, log_json=False)
    ended = subprocess.run(commands[0], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 7, ended.stderr


def test_a_hangup_does_not_count_as_the_first_signal() -> None:
    parent: Any = supervisor._Supervisor(Plan([], 1, Limits(), grace=0, probe=None))
    levels: list[int] = []
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        parent._on_signal(number, None)
        levels.append(parent._level)
    assert levels == [1, 1, 1, 2, 3, 3]


def test_a_watchdog_ends_no_worker_that_is_still_starting_and_many_of_them_cost_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    monkeypatch.setattr(supervisor, "REPLY_WITHIN", 0.5)  # longer than the watchdog's time
    imports = ["/bin/sleep", "600"]
    parent: Any = supervisor._Supervisor(Plan(imports, 60, Limits(), grace=0, probe=None))
    monkeypatch.setattr(parent, "_reap", lambda: None)  # it would reap the other children of the tests
    parent._start_missing()
    pids = [worker.child.pid for worker in parent._workers]
    try:
        began = time.monotonic()
        parent._once()
        assert time.monotonic() - began < 60 * 0.5 / 2  # even if the machine stands still
        parent._once()
        assert [os.waitpid(pid, os.WNOHANG) for pid in pids] == [(0, 0)] * len(pids)
        monkeypatch.setattr(supervisor, "SILENT_AFTER", 0.0)
        parent._once()
        assert [os.waitpid(pid, os.WNOHANG) for pid in pids] == [(0, 0)] * len(pids)  # they are found silent only now
        parent._once()  # the control: silent for too long, and for longer than the watchdog's time
        assert {os.waitpid(pid, 0)[1] for pid in pids} == {signal.SIGKILL}
    finally:
        for worker in parent._workers:
            worker.child.kill()
            worker.child.close()


REPLIES = """
import json, os, time
channel, received = int(os.environ["WORQR_CONTROL"]), b""
while data := os.read(channel, 4096):
    *lines, received = (received + data).split(b"\\n")
    for line in lines:
        reply = {"number": int(line.split()[1]), "status": 200, "body": "x" * SIZE, "type": "text/plain"}
        data = memoryview(json.dumps(reply).encode() + b"\\n")
        while data:
            data = data[os.write(channel, data[:65536]) :]
            time.sleep(0.005)  # as long as a busy thread keeps the interpreter
"""
SILENT = "import time; time.sleep(600)"
TALKS = "import os\nwhile True: os.write(int(os.environ['WORQR_CONTROL']), b'LINE\\n' * 50)"


@pytest.fixture
def children() -> Iterator[Callable[..., list[ControlledChild]]]:
    made: list[ControlledChild] = []

    def start(*programs: str) -> list[ControlledChild]:
        made.extend(ControlledChild([sys.executable, "-c", program]) for program in programs)
        return made

    yield start
    for child in made:
        child.kill()
        os.waitpid(child.pid, 0)
        child.close()


def sizes(children: list[ControlledChild]) -> list[int | None]:
    return [reply and len(reply.body) for reply in ControlledChild.ask_all(children, "/metrics", "text/plain")]


@pytest.mark.parametrize(
    "line", ['{"level": "info"}', "1", '{"number": 1, "status": 200, "body": null}', '{"number": 0}']
)
def test_what_something_else_writes_to_its_descriptor_costs_only_the_reply_of_that_worker(
    children: Callable[..., list[ControlledChild]], line: str
) -> None:
    both = children(TALKS.replace("LINE", line), REPLIES.replace("SIZE", "7"))
    wait_until(lambda: sizes(both) == [None, 7])


def test_a_silent_worker_costs_no_other_its_long_reply(
    children: Callable[..., list[ControlledChild]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REPLY_WITHIN", 3)
    long = 1_000_000  # more than the channel holds
    several = children(SILENT, *[REPLIES.replace("SIZE", str(long))] * 4)
    wait_until(lambda: sizes(several[1:]) == [long] * 4)
    wanted = [None, *[long] * 4]  # another one may be as slow once, but not each time
    wait_until(lambda: [sizes(several) for _ in range(2)] == [wanted] * 2)


STOPS = """
import os
channel, received = int(os.environ["WORQR_CONTROL"]), b""
while b"\\n1\\n" not in received:
    received += os.read(channel, 4096)
"""


def test_a_worker_that_was_frozen_for_long_still_gets_the_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    parent: Any = supervisor._Supervisor(Plan([sys.executable, "-c", STOPS], 1, Limits(), grace=100, probe=None))
    monkeypatch.setattr(parent, "_reap", lambda: None)  # it would reap the other children of the tests
    monkeypatch.setattr(supervisor, "REPLY_WITHIN", 0.001)
    parent._start_missing()
    [worker] = parent._workers
    try:
        os.kill(worker.child.pid, signal.SIGSTOP)
        worker.child._socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:  # as questions of many minutes would
                worker.child._socket.send(b"get 0 /ready *\n")
        parent._level = 1
        parent._once()
        os.kill(worker.child.pid, signal.SIGCONT)
        wait_until(lambda: parent._once() or os.waitpid(worker.child.pid, os.WNOHANG)[0])
    finally:
        worker.child.kill()
        worker.child.close()
