"""Tools for the tests of worker processes: a pool of them, runs without a queue, and views of processes."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from worqr.peer.executors.processes.pool import ProcessPool
from worqr.peer.run import Run, Save, Timer, current_run
from worqr.policy import Policy

FENCE = 1_900_000_000_000_000
MEMORY = 1 << 40
LONG = 30.0
"""Seconds that nothing here takes, however slow the machine is."""


class Desk:
    """Stands where a peer's station would: notes what its runs say."""

    queue = "Q1"
    base = ""
    id_suffix = ""
    state = None
    values = None
    hides_arguments = False
    deploy = 0

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.said: list[tuple[float | None, str]] = []
        self.extended: list[float] = []
        self.saves: list[Save] = []
        self.costs: list[int] = []
        self._news = trio.Event()

    def policy_with(self, own: tuple[tuple[bytes, bytes], ...]) -> Policy:
        return self.policy.with_overrides({name.decode(): value.decode() for name, value in own})

    def report_progress(self, run: Run[Any], done: float | None, message: str, value: bytes = b"") -> None:
        self.said.append((done, message))
        self._tell()

    def extend(self, run: Run[Any], seconds: float) -> None:
        self.extended.append(seconds)
        self._tell()

    def note_cost(self, run: Run[Any], used: int) -> None:
        self.costs.append(used)
        self._tell()

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        self.saves.append(save)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def wait_said(self, text: str) -> None:
        """Until a run has said `text`."""
        with trio.fail_after(LONG):
            while not any(message == text for _, message in self.said):
                await self._news.wait()


class Pool:
    """A pool of worker processes, and runs in them without a queue."""

    def __init__(self, children: ProcessPool) -> None:
        self.children = children
        self.desk = Desk(Policy(result_ttl=60.0))

    async def run(
        self,
        handler: Callable[[bytes], object],
        task: bytes = b"",
        *,
        record: Mapping[str, str] | None = None,
        policy: Policy | None = None,
        raw: bool = False,
        desk: Desk | None = None,
        deadline: float | None = None,
        fence: int = FENCE,
    ) -> Any:
        """The result of a job's run, not decoded: (kind, bytes), or None."""
        run = self.children.prepare(handler)
        desk = desk or self.desk
        if policy is not None:
            desk.policy = policy
        fields = {"id": "x", **(record or {})}
        entry = [part.encode() for pair in fields.items() for part in pair] + [b"task", task]
        own = Run(desk, None, fence, task if raw else entry)
        if deadline is not None:
            Timer(own, deadline)
        token = current_run.set(own)
        try:
            with trio.fail_after(LONG):
                return await run(task)
        finally:
            current_run.reset(token)


@asynccontextmanager
async def open_pool(limit: int = 2, **settings: Any) -> AsyncGenerator[Pool]:
    """A pool for the length of a block; afterwards there is no process of its any more."""
    children = ProcessPool(limit, **{"max_result": 1 << 24, **settings})
    async with trio.open_nursery() as nursery:
        await nursery.start(children.run_forever)
        yield Pool(children)
        nursery.cancel_scope.cancel()
    assert children.pids == []


def is_alive(pid: int) -> bool:
    """True if the process runs, and does not only wait to be reaped by its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    except ProcessLookupError:
        return False
    return state not in "ZX"


async def wait_dead(*pids: int) -> None:
    """Until these processes are gone."""
    deadline = time.monotonic() + LONG
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        await trio.sleep(0.01)
