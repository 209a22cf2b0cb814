"""The handlers of a peer: each run writes that it began and how it ended, and behaves at random in between.

`in_process` runs in a process of its own, which finds this module by name and its ledger by the environment.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import trio

import worqr
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.workload import (
    CONCURRENCY,
    FLOW_PROCESS,
    JOBS,
    LANES,
    LIMITED,
    MAX_FAILURES,
    MAX_STALLS,
    MAX_TIMEOUTS,
    PERIOD,
    PROCESS,
    ROOM,
    SAVES,
    SLOW,
    SPOILT,
    STARTS,
    STEPS,
    TICKS,
    TIMEOUT,
    behaviour,
    result_of,
)
from benchmarks.chaos.workload import MANY as MANY_RUNS

FOLDER, NAME, URL = "WORQR_CHAOS_FOLDER", "WORQR_CHAOS_NAME", "WORQR_CHAOS_URL"
DEPLOY = "WORQR_CHAOS_DEPLOY"
"""Environment variables by which functions of modules find the ledger, the mesh and the version of their peer."""


def policy_of(queue: str) -> worqr.RetryPolicy:
    return worqr.RetryPolicy(
        max_failures=MANY_RUNS if queue == TICKS else MAX_FAILURES,
        max_stalls=MAX_STALLS.get(queue, MANY_RUNS),
        max_timeouts=MAX_TIMEOUTS,
        min_backoff=0.1,
        max_backoff=0.5,
    )


def options_of(queue: str) -> dict[str, Any]:
    """The arguments of the peer's `serve`."""
    options: dict[str, Any] = {"retry": policy_of(queue), "keep_failed": MANY_RUNS}
    if queue == JOBS:
        options["timeout"] = TIMEOUT
    elif queue == LIMITED:
        options["limit"] = worqr.Limit(CONCURRENCY[queue], rate=STARTS, per=PERIOD)
    elif queue == ROOM:
        options["limit"] = worqr.Limit(CONCURRENCY[queue])
    elif queue == LANES:
        options["lanes"] = worqr.Lanes(limit=worqr.Limit(CONCURRENCY[queue]), weights={"a": 3})
    return options


class Run:
    """One run of a handler: its lines in the ledger, and how it is to end."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        context = worqr.current()
        self.context = context
        self.task = context.task.decode()
        self._ledger = ledger
        nominal = context.scheduled_for
        ledger.write(
            "began",
            queue=context.queue,
            task=self.task,
            id=context.id,
            lane=context.lane,
            fence=context.fence,
            nominal=None if nominal is None else round(nominal.timestamp() * 1000),
            **({"saved": int(context.saved or b"0")} if context.queue == SAVES else {}),
        )
        self.behaviour = behaviour(rng, context.queue, self.task)

    def note(self, what: str, **facts: Any) -> None:
        """Write a line about this run."""
        self._ledger.write(what, queue=self.context.queue, fence=self.context.fence, **facts)

    def ended(self, how: str, counted: bool = False) -> None:
        """Write it before the end is known to worqr, so that no other run can begin in between."""
        self.note("ended", how=how, counted=counted)

    def cancelled(self) -> None:
        self.ended(f"cancelled: {self.context.cancel_reason}")

    def end(self) -> bytes:
        """Write how it ends, and end so."""
        how = self.behaviour.how
        self.ended(how, counted=how == "error")
        match how:
            case "error":
                raise ValueError("at random")
            case "retry":
                raise worqr.Retry("at random", delay=0.2, counted=False)
            case "rate limited":
                raise worqr.RateLimited(0.2)
            case "failure":
                raise worqr.Failure("at random")
            case "undecodable":
                raise worqr.Undecodable("at random")
            case "crash":
                os._exit(1)
            case _:
                return result_of(self.task).encode()


class Handlers:
    """The handlers of the loop, of threads, of asyncio, and for failures, around one ledger."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self._ledger = ledger
        self._rng = rng

    async def in_loop(self, task: bytes) -> bytes:
        run = Run(self._ledger, self._rng)
        try:
            await trio.sleep(1000 if run.behaviour.how == "timeout" else run.behaviour.seconds)
        except trio.Cancelled:
            if self._unwinds_slowly(run):
                with trio.CancelScope(shield=True):
                    await trio.sleep(self._rng.uniform(0.2, 1.5))
            run.cancelled()
            raise
        return run.end()

    def _unwinds_slowly(self, run: Run) -> bool:
        """Every other cancelled run of a slow task takes its time to unwind."""
        return run.task.endswith(SLOW) and run.context.cancel_reason == "cancel" and self._rng.random() < 0.5

    async def in_loop_saving(self, task: bytes) -> bytes:
        """The handler of the queue `saves`: each save is higher than the one before, also of earlier runs."""
        run = Run(self._ledger, self._rng)
        saved = int(run.context.saved or b"0")
        try:
            for name in STEPS:
                saved = await self._save(run, saved + 1)
                await self._step(run, name)
                await trio.sleep(run.behaviour.seconds / len(STEPS))
            await self._save(run, saved + 1)
        except (trio.Cancelled, worqr.WorqrError) as error:
            run.ended(f"cancelled: {run.context.cancel_reason}, {type(error).__name__}")
            raise
        return run.end()

    async def _save(self, run: Run, value: int) -> int:
        await run.context.save(b"%d" % value)
        run.note("saved", value=value)
        return value

    async def _step(self, run: Run, name: str) -> None:
        fence = run.context.fence

        def call() -> int:
            run.note("step", name=name)
            return fence

        value = await worqr.step(name, call)
        run.note("stepped", name=name, value=value)

    async def in_asyncio(self, task: bytes) -> bytes:
        run = Run(self._ledger, self._rng)
        try:
            await asyncio.sleep(run.behaviour.seconds)
        except asyncio.CancelledError:
            run.cancelled()
            raise
        return run.end()

    def in_thread(self, task: bytes) -> bytes:
        run = Run(self._ledger, self._rng)
        until = time.monotonic() + run.behaviour.seconds
        while time.monotonic() < until:
            if run.context.cancel_reason is not None:
                run.cancelled()
                run.context.check_cancelled()
                return b"unreachable, if check_cancelled() raises"
            time.sleep(0.01)
        return run.end()

    async def bury(self, failed: worqr.Failed) -> None:
        """The failure handler of all queues."""
        if failed.id.startswith(SPOILT):
            return
        self._ledger.write("buried", queue=failed.queue, task=failed.task.decode(), reason=failed.reason)

    async def around(self, context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
        """Middleware: a process that is killed cannot write that its run has ended, and a spoilt job is none of the ledger's."""
        if (context.id or "").startswith(SPOILT):
            return b""
        try:
            return await call_next()
        except BaseException:
            if context.queue in (PROCESS, FLOW_PROCESS):
                how = f"killed: {context.cancel_reason}"
                self._ledger.write("ended", queue=context.queue, fence=context.fence, how=how, counted=False)
            raise


@cache
def ledger_of_process() -> tuple[Ledger, random.Random]:
    """The ledger and the random numbers of functions that are found by their module, also in a process of their own."""
    name = os.environ[NAME]
    return Ledger(Path(os.environ[FOLDER]), name, str(os.getpid())), random.Random(f"{name} {os.getpid()}")


def in_process(task: bytes) -> bytes:
    """The handler of the queue `process`."""
    run = Run(*ledger_of_process())
    time.sleep(run.behaviour.seconds)
    return run.end()
