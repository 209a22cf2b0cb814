"""Workflows: what their runs do and write, and `WorkflowMaker`, by which a producer starts, cancels and sends to them.

The functions are found by this module, also in a process of its own: ledger and mesh come from the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import trio

import worqr
from benchmarks.chaos.handlers import URL, Handlers, Run, ledger_of_process, policy_of
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.workload import (
    EVENT,
    FLOW,
    FLOW_ASYNCIO,
    FLOW_JOBS,
    FLOW_PROCESS,
    FLOW_THREAD,
    FLOWS,
    FOLLOW_UPS,
    LATE,
    LATE_BY,
    PREFIX,
    RESULT_TTL,
    SLEPT,
    STEP_FAILED,
    STOPS,
    SUSPENDED,
    TIMED_OUT,
    Behaviour,
    follow_up_of,
    script_of,
)
from benchmarks.chaos.workload import MANY as MANY_RUNS
from worqr.peer.error_throttle import sleep_here

STEP_TRIES: Final = worqr.RetryPolicy(max_failures=3, min_backoff=0.05, max_backoff=0.2)
STEP_DELAYS: Final = (0.05, 0.05, 0.3, 5.2)
"""Seconds until a step is tried again. The last one suspends the run."""

flows: Final = worqr.Registry()


async def bury(failed: worqr.Failed) -> None:
    """The failure handler of all functions here."""
    await Handlers(*ledger_of_process()).bury(failed)


def _options(queue: str) -> dict[str, Any]:
    return {
        "name": queue,
        "retry": policy_of(queue),
        "keep_failed": MANY_RUNS,
        "result_ttl": RESULT_TTL,
        "on_failure": bury,
    }


# Steps


def _try_step(name: str) -> tuple[int, float]:
    """Call the step `name`: it fails at random. Return its result, and how long it takes."""
    ledger, rng = ledger_of_process()
    context = worqr.current()
    ledger.write("step", queue=context.queue, fence=context.fence, name=name)
    if rng.random() < 0.25:
        raise worqr.Retry("at random", delay=rng.choice(STEP_DELAYS))
    return context.fence, rng.choice((0, 0, 0.05))


@flows.step(name="take", retry=STEP_TRIES)
async def take(name: str) -> int:
    result, seconds = _try_step(name)
    await sleep_here(seconds)
    return result


@flows.step(name="take_now", retry=STEP_TRIES)
def take_now(name: str) -> int:
    result, seconds = _try_step(name)
    time.sleep(seconds)
    return result


# Jobs


@flows.task(**_options(FLOW_JOBS))
async def job(task: bytes, /) -> int:
    """A job that a workflow starts. Its result is the number of its claim."""
    run = Run(*ledger_of_process())
    with _noting_interruption(run):
        if run.task.endswith(STOPS):
            run.note("cancel", call=run.context.fence, task=run.task)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(job.job(run.context.id).cancel)
                await trio.sleep(1000)
        await trio.sleep(run.behaviour.seconds)
    run.end()
    return run.context.fence


# Workflows

Durable = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A durable call: its name, and its arguments."""
Telling = Generator[Durable, Any, None]

CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "take": take,
    "sleep": worqr.sleep,
    "wait_for": worqr.wait_for,
    "gather": worqr.gather,
    "first": worqr.first,
}
CALLS_NOW: Final[Mapping[str, Callable[..., Any]]] = {
    "take": take_now,
    "sleep": worqr.sleep_now,
    "wait_for": worqr.wait_for_now,
    "gather": worqr.gather_now,
    "first": worqr.first_now,
}


def _told(run: Run) -> Telling:
    """What a run of a workflow does: it writes what each durable call returns."""
    script = script_of(run.task)
    for n in range(script.steps):
        if (yield from _take(run, f"step {n}")) == STEP_FAILED:
            yield from _take(run, f"undo {n}")
            run.behaviour = Behaviour(0.0, "failure")
            return
    jobs = {name: job.options(delay=LATE_BY * name.endswith(LATE)).run(name.encode()) for name in script.jobs}
    yield "sleep", (script.seconds,), {}
    run.note("waited", name="sleep", value=SLEPT)
    for n, timeout in enumerate(script.timeouts):
        value = yield "wait_for", (EVENT, str), {"timeout": timeout}
        run.note("waited", name=f"event {n}", value=TIMED_OUT if value is None else value)
    if script.awaits == "first" and jobs:
        yield from _await_first(run, jobs)
    if script.awaits == "gather":
        yield from _outcome("gather", *jobs.values())
    for name in jobs if script.awaits != "not" else ():
        how, found = yield from _outcome("gather", jobs[name])
        run.note("waited", name=f"job {name}", value=f"{how} {found[0]}" if how == "finished" else how)


def _take(run: Run, name: str) -> Generator[Durable, Any, int]:
    """Take a step; return its result."""
    try:
        value: int = yield "take", (name,), {}
    except worqr.StepFailed:
        value = STEP_FAILED
    run.note("stepped", name=name, value=value)
    return value


def _await_first(run: Run, jobs: Mapping[str, Any]) -> Telling:
    how, found = yield from _outcome("first", *jobs.values(), timeout=3.0)
    value = TIMED_OUT if found is None else f"finished {found[1]}" if how == "finished" else how
    run.note("waited", name="first", value=value)


def _outcome(call: str, *jobs: Any, **options: Any) -> Generator[Durable, Any, tuple[str, Any]]:
    """Wait for jobs; return how they have ended, and what the call returned."""
    try:
        return "finished", (yield call, jobs, options)
    except worqr.JobCancelled:
        return "cancelled", ()
    except worqr.JobFailed as error:
        return ("lost" if error.error.type == "Lost" else "failed"), ()


@contextmanager
def _noting_interruption(run: Run) -> Generator[None]:
    """Write how a run ends that is suspended, cancelled or has lost its claim."""
    try:
        yield
    except BaseException as error:
        reason = run.context.cancel_reason
        run.ended(SUSPENDED if run.context.suspending else f"cancelled: {reason or type(error).__name__}")
        raise


async def _play() -> str:
    run = Run(*ledger_of_process())
    with _noting_interruption(run):
        told = _told(run)
        resume = told.__next__
        while (call := _next(resume)) is not None:
            name, args, options = call
            try:
                resume = partial(told.send, await CALLS[name](*args, **options))
            except Exception as error:
                resume = partial(told.throw, error)
        await sleep_here(run.behaviour.seconds)
    return run.end().decode()


def _play_now() -> str:
    run = Run(*ledger_of_process())
    with _noting_interruption(run):
        told = _told(run)
        resume = told.__next__
        while (call := _next(resume)) is not None:
            name, args, options = call
            try:
                resume = partial(told.send, CALLS_NOW[name](*args, **options))
            except Exception as error:
                resume = partial(told.throw, error)
        time.sleep(min(run.behaviour.seconds, 1.0))
    return run.end().decode()


def _next(resume: Callable[[], Durable]) -> Durable | None:
    """The next durable call; None at the end."""
    try:
        return resume()
    except StopIteration:
        return None


@flows.workflow(**_options(FLOW))
async def on_trio(task: bytes, /) -> str:
    return await _play()


@flows.workflow(**_options(FLOW_ASYNCIO), runs_in="asyncio")
async def on_asyncio(task: bytes, /) -> str:
    return await _play()


@flows.workflow(**_options(FLOW_THREAD))
def in_thread(task: bytes, /) -> str:
    return _play_now()


@flows.workflow(**_options(FLOW_PROCESS), runs_in="process")
def in_process(task: bytes, /) -> str:
    _mesh_of_process()
    return _play_now()


@cache
def _mesh_of_process() -> worqr.Mesh[Any]:
    """The mesh by which a process of its own starts jobs."""
    mesh = worqr.Mesh(os.environ[URL], prefix=PREFIX)
    mesh.include(flows)
    return mesh


# Producers


class WorkflowMaker:
    """Starts workflows, sends events to them, cancels some, and waits for the results of some."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._rng = sender.rng
        sender.mesh.include(flows)

    async def make(self, nursery: trio.Nursery) -> None:
        """Start a workflow."""
        rng, mesh = self._rng, self._sender.mesh
        (queue,) = rng.choices(FLOWS, (5, 2, 2, 1))
        task = self._sender.new_task(queue)
        follows = rng.random() < 0.3
        follow_ups = {kind: mesh.call(FOLLOW_UPS, follow_up_of(task, kind).encode()) for kind in ("then", "otherwise")}
        bound = mesh.functions[queue].options(id=task, **(follow_ups if follows else {}))
        dispatched = await self._sender.send(
            queue, [task], lambda: bound.dispatch(task.encode()), id=task, follows=follows
        )
        if dispatched is None:
            return
        nursery.start_soon(self._send_events, queue, task, dispatched)
        if rng.random() < 0.25:
            after = rng.choice((0, 0.02, 0.3, 1, 3, 6))
            nursery.start_soon(self._sender.cancel, queue, task, dispatched.cancel, after)
        elif rng.random() < 0.3:
            nursery.start_soon(self._sender.wait_for_result, queue, task, dispatched)

    async def _send_events(self, queue: str, task: str, flow: worqr.Job[str]) -> None:
        for n, seconds in enumerate(sorted(script_of(task).sends)):
            await trio.sleep(seconds)
            value, again = f"{task} event {n}", self._rng.random() < 0.5
            call = self._sender.begin("signal", queue=queue, task=task, value=value)
            try:
                answer: str = await flow.send(EVENT, value, again=again)
            except worqr.NoJob:
                answer = "none"
            except worqr.WorqrError as error:
                self._sender.failed(call, error)
                continue
            self._sender.ledger.write("signalled", call=call, answer=answer)
