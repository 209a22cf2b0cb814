"""Power cuts: ``python -m benchmarks.power_cuts 1000`` loses nothing that `worqr server --data` promises.

Producers and a worker use a real server. At random moments it is frozen, and its files are copied, as a cut of the power would
leave them. Of the copy, what may not have been on the disk is cut off at a random byte: anything that was written in the last
`PROMISED_AFTER` seconds. A second server starts on the copy. Each task that was acknowledged earlier must be there, or have run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
import trio

import worqr
from worqr.embedded import EmbeddedServer
from worqr.errors import Unavailable

PROMISED_AFTER = 2.0
"""Seconds after its acknowledgement from which a task survives a cut: see docs/explain/durability.md, `everysec`."""
SAMPLE_EVERY = 0.02
SLOW = 0.1
"""The part of the tasks whose handler takes 5 s: they wait or run when the power is cut."""
REWRITES = 0.15
"""The part of the cuts before which the server begins to rewrite its append-only file."""
_TASK = re.compile(rb"task-(\d+);")
_DATA = "appendonlydir"


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        cuts: how often the power was cut.
        acknowledged: tasks whose enqueue had returned.
        checked: how often a task was looked for that had not run and was promised.
        lost: the tasks that were not there.
        refused: cuts after which the server did not start, with its log.
        cut_off: bytes that were cut off in all.
    """

    cuts: int = 0
    acknowledged: int = 0
    checked: int = 0
    cut_off: int = 0
    lost: int = 0
    refused: list[str] | None = None


class PowerCuts:
    """A server under load whose power is cut. Its tasks are numbered."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.report = Report(refused=[])
        self._folder = folder
        self._random = random.Random(seed)
        self._waiting: dict[int, float] = {}
        self._early: set[int] = set()  # these ran before their enqueue had returned
        self._sizes: list[tuple[float, dict[str, int]]] = []
        self._next = 0
        self._pid = 0

    async def run(self, cuts: int) -> Report:
        """Cut the power so many times."""
        command = [sys.executable, "-m", "worqr", "server", "--data", os.fspath(self._folder / "live")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:  # noqa: ASYNC220
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                self._pid = server.pid
                await self._run_loads(worqr.Mesh(url), url, cuts)
            finally:
                server.terminate()
        return self.report

    async def _run_loads(self, mesh: worqr.Mesh, url: str, cuts: int) -> None:
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            for name in ("plain", "jobs"):
                await nursery.start(partial(peer.serve, name, self._handle))
            nursery.start_soon(self._sample_forever)
            nursery.start_soon(self._produce_forever, mesh)
            for _ in range(cuts):
                await trio.sleep(self._random.uniform(0.0, 0.3))
                if self._random.random() < REWRITES:
                    with redis.Redis.from_url(url) as client, suppress(redis.ResponseError):
                        client.bgrewriteaof()
                    await trio.sleep(self._random.uniform(0.0, 0.05))
                await self._cut()
            nursery.cancel_scope.cancel()

    async def _handle(self, task: bytes) -> None:
        await trio.sleep(5.0 if self._random.random() < SLOW else 0.0)
        for number in _TASK.findall(task):
            if self._waiting.pop(int(number), None) is None:
                self._early.add(int(number))

    async def _produce_forever(self, mesh: worqr.Mesh) -> None:
        plain, jobs = mesh.queue("plain"), mesh.queue("jobs")
        while True:
            numbers = range(self._next, self._next + self._random.randint(1, 4))
            self._next += len(numbers)
            tasks = [b"task-%d;" % number for number in numbers]
            if self._random.random() < 0.5:
                await plain.enqueue(*tasks)
            else:
                for task in tasks:
                    await jobs.dispatch(task)
            now = time.monotonic()
            self._waiting.update({number: now for number in numbers if number not in self._early})
            self._early.difference_update(numbers)
            self.report.acknowledged += len(numbers)
            await trio.sleep(0.005)

    # Cuts

    async def _sample_forever(self) -> None:
        """Note how large the files are, so that it is known what was written when."""
        while True:
            self._sizes.append((time.monotonic(), self._sizes_now()))
            await trio.sleep(SAMPLE_EVERY)

    def _sizes_now(self) -> dict[str, int]:
        with os.scandir(self._folder / "live" / _DATA) as entries:
            found = dict[str, int]()
            for entry in entries:
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat().st_size
            return found

    async def _cut(self) -> None:
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        frozen = self._freeze()
        try:
            now = time.monotonic()
            shutil.copytree(self._folder / "live" / _DATA, copy / _DATA)
            on_disk = self._on_disk(now)
            promised = {number for number, at in self._waiting.items() if at < on_disk[0]}
        finally:
            for pid in reversed(frozen):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._cut_off(copy / _DATA, on_disk[1])
        self.report.cuts += 1
        self.report.checked += len(promised)
        there = await trio.to_thread.run_sync(self._tasks_in, copy)
        if there is not None:
            self.report.lost += len(promised - there)

    def _freeze(self) -> list[int]:
        """Stop the server, and the process that rewrites its file. Return both."""
        os.kill(self._pid, signal.SIGSTOP)
        while Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        for pid in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return [self._pid, *map(int, children)]

    def _on_disk(self, now: float) -> tuple[float, dict[str, int]]:
        """The newest sample that is at least `PROMISED_AFTER` seconds old. Older ones are forgotten."""
        before = [each for each in self._sizes if each[0] < now - PROMISED_AFTER]
        del self._sizes[: max(0, len(before) - 1)]
        return before[-1] if before else (0.0, {})

    def _cut_off(self, folder: Path, before: dict[str, int]) -> None:
        """Cut the newest file at a random byte behind those that were on the disk for sure."""
        lines = (folder / "appendonly.aof.manifest").read_text().splitlines()
        names = [words[1] for words in map(str.split, lines) if words and words[0] == "file" and words[-1] == "i"]
        path = folder / names[-1]
        size = path.stat().st_size
        length = self._random.randint(min(size, before.get(names[-1], 0)), size)
        os.truncate(path, length)
        self.report.cut_off += size - length

    def _tasks_in(self, folder: Path) -> set[int] | None:
        """The numbers of all tasks of a server that starts on these files; None: it does not start."""
        try:
            with EmbeddedServer(appendonly=True, dir=folder) as server, redis.Redis.from_url(server.url) as client:
                return {int(number) for value in values(client) for number in _TASK.findall(value)}
        except Unavailable as error:
            assert self.report.refused is not None
            self.report.refused.append(str(error))
            return None


def values(client: Any) -> list[bytes]:
    """Everything that lists, hashes and sorted sets hold."""
    found: list[bytes] = []
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        if kind == b"list":
            found += client.lrange(key, 0, -1)
        elif kind == b"hash":
            found += [part for pair in client.hgetall(key).items() for part in pair]
        elif kind == b"zset":
            found += client.zrange(key, 0, -1)
    return found


def main() -> int:
    """Print what was found; return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuts", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cuts-") as folder:
        report = trio.run(PowerCuts(Path(folder), given.seed).run, given.cuts)
    print(f"seed {given.seed}, {time.monotonic() - began:.0f} s: {report}")
    return 1 if report.lost or report.refused else 0


if __name__ == "__main__":
    sys.exit(main())
