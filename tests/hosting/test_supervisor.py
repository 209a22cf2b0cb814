"""The parent of several workers, with workers that do not exist. `tests/cli/test_workers.py` has the processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from worqr.hosting import supervisor
from worqr.hosting.supervisor import Limits, Plan

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


@pytest.mark.skipif(sys.platform != "linux", reason="posix_spawn with descriptors as on Linux")
def test_a_watchdog_ends_no_worker_that_is_still_starting_and_many_of_them_cost_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setattr(supervisor, "REPLY_WITHIN", 0.5)  # longer than the watchdog's time
    imports = [sys.executable, "-c", "import time; time.sleep(600)"]
    parent: Any = supervisor._Supervisor(Plan(imports, 12, Limits(), grace=0, probe=None))
    monkeypatch.setattr(parent, "_reap", lambda: None)  # it would reap the other children of the tests
    parent._start_missing()
    pids = [worker.child.pid for worker in parent._workers]
    try:
        began = time.monotonic()
        parent._once()
        assert time.monotonic() - began < 12 * 0.5 / 2
        parent._once()
        assert [os.waitpid(pid, os.WNOHANG) for pid in pids] == [(0, 0)] * len(pids)
        monkeypatch.setattr(supervisor, "SILENT_AFTER", 0.0)
        parent._once()  # the control: silent for too long, and for longer than the watchdog's time
        assert {os.waitpid(pid, 0)[1] for pid in pids} == {signal.SIGKILL}
    finally:
        for worker in parent._workers:
            worker.child.kill()
            worker.child.close()
