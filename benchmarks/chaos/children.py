"""The peers and producers of a run as processes: start, freeze, kill and end them, and notice which died by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.chaos.child import Settings
from benchmarks.chaos.ledger import Ledger

ROOT = Path(__file__).parent.parent.parent
Role = Literal["peer", "producer"]
State = Literal["up", "frozen", "leaving", "killed", "gone"]


@dataclass
class Process:
    """One peer or producer."""

    name: str
    role: Role
    popen: subprocess.Popen[bytes]
    proxied: bool
    state: State = "up"

    @property
    def runs(self) -> bool:
        return self.popen.poll() is None


class Children:
    """All processes of a run, by name. Each fault is written to the ledger before it is injected."""

    def __init__(self, folder: Path, ledger: Ledger, seed: int, *, replicas: int) -> None:
        self._folder = folder
        self._ledger = ledger
        self._seed = seed
        self._replicas = replicas
        self.processes: dict[str, Process] = {}

    def start(self, role: Role, url: str, *, proxied: bool = False, patience: float = 30.0, deploy: int = 1) -> Process:
        name = f"{role}-{len(self.processes) + 1}"
        settings = Settings(name, url, os.fspath(self._folder), self._seed, self._replicas, patience, deploy)
        command = [sys.executable, "-X", "faulthandler", "-m", f"benchmarks.chaos.{role}"]
        with (self._folder / f"{name}.out").open("wb") as output:
            popen = subprocess.Popen(
                [*command, msgspec.json.encode(settings).decode()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        process = self.processes[name] = Process(name, role, popen, proxied)
        return process

    def of(self, role: Role, *states: State) -> list[Process]:
        """Those that run and are in one of `states` (default: up)."""
        wanted = states or ("up",)
        return [each for each in self.processes.values() if each.role == role and each.state in wanted and each.runs]

    def works(self, process: Process) -> bool:
        """It has joined, or the server has acknowledged something to it; or it has ended, which is for `bury` to tell."""
        file = self._folder / f"{process.name}.ledger"
        word = b'"registered"' if process.role == "peer" else b'"acked"'
        return not process.runs or (file.exists() and word in file.read_bytes())

    def kill(self, process: Process) -> None:
        process.state = "killed"
        self._ledger.write("killed", who=process.name)
        process.popen.kill()

    def freeze(self, process: Process) -> None:
        process.state = "frozen"
        self._ledger.write("froze", who=process.name)
        process.popen.send_signal(signal.SIGSTOP)

    def thaw(self, process: Process) -> None:
        if process.state == "frozen":
            process.state = "up"
            process.popen.send_signal(signal.SIGCONT)
            self._ledger.write("thawed", who=process.name)

    def terminate(self, process: Process) -> None:
        process.state = "leaving"
        self._ledger.write("terminated", who=process.name)
        process.popen.terminate()

    def bury(self) -> list[Process]:
        """Note which processes have ended: those that died by themselves, or failed to leave normally."""
        died: list[Process] = []
        for process in self.processes.values():
            code = process.popen.poll()
            if code is None or process.state == "gone":
                continue
            told_early = process.state == "leaving" and code == -signal.SIGTERM  # before it could install a handler
            if process.state != "killed" and not told_early and (process.state != "leaving" or code != 0):
                self._ledger.write("died", who=process.name, code=code)
                died.append(process)
            process.state = "gone"
        return died

    def end_hung(self, processes: list[Process]) -> None:
        """Note which processes hang, write the stacks of all their threads to their output, and kill them."""
        for process in processes:
            self._ledger.write("hung", who=process.name)
            process.state = "killed"
            process.popen.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """Kill all processes that still run, after an error."""
        for process in self.processes.values():
            if process.runs:
                process.popen.kill()
            process.popen.wait()
            if process.popen.stdin is not None:
                process.popen.stdin.close()
