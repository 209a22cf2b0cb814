"""Workflows: what their runs do and write, and `WorkflowMaker`, by which a producer starts, cancels and sends to them.

The functions are found by this module, also in a process of its own: ledger and mesh come from the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, Final

import trio

import worqr
from benchmarks.chaos.handlers import DEPLOY, URL, Handlers, Run, ledger_of_process, policy_of
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.workload import (
    EVENT,
    FLOW,
    FLOW_ASYNCIO,
    FLOW_BRIEF,
    FLOW_JOBS,
    FLOW_NESTED,
    FLOW_PROCESS,
    FLOW_THREAD,
    FLOWS,
    FOLLOW_UPS,
    HELD,
    HELD_FOR,
    KEYS,
    LATE,
    LATE_BY,
    LIFETIME,
    MAIL,
    NESTS,
    NEXT_TRY,
    OVER,
    PREFIX,
    RESULT_TTL,
    SLEPT,
    STEP_FAILED,
    STOPS,
    SUSPENDED,
    TIMED_OUT,
    Behaviour,
    Script,
    follow_up_of,
    script_of,
)
from benchmarks.chaos.workload import MANY as MANY_RUNS
from worqr.peer.error_throttle import sleep_here

STEP_TRIES: Final = worqr.RetryPolicy(max_failures=3, min_backoff=0.05, max_backoff=0.2)
STEP_DELAYS: Final = (0.05, 0.05, 0.3, 5.2)
"""Seconds until a step is tried again. The last one suspends the run."""
PUTS_BACK: Final = (0, 1, 1, 3)
"""How often a producer puts a workflow back that has failed."""
FAILS_WITHIN: Final = 30.0
"""Seconds that it waits for that."""
LOOKS: Final = 40
"""How often a producer looks whether a wait that it is to end is open."""

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


async def _open_mailbox(timeout: float) -> AsyncIterator[str]:
    return worqr.wait_for(MAIL, str, timeout=timeout, many=True)


CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "take": take,
    "sleep": worqr.sleep,
    "wait_for": worqr.wait_for,
    "gather": worqr.gather,
    "first": worqr.first,
    "mailbox": _open_mailbox,
    "read": anext,
}
CALLS_NOW: Final[Mapping[str, Callable[..., Any]]] = {
    "take": take_now,
    "sleep": worqr.sleep_now,
    "wait_for": worqr.wait_for_now,
    "gather": worqr.gather_now,
    "first": worqr.first_now,
    "mailbox": lambda timeout: worqr.wait_for_now(MAIL, str, timeout=timeout, many=True),
    "read": next,
}


def _told(run: Run) -> Telling:
    """What a run of a workflow does: it writes what each durable call returns."""
    try:
        yield from _tell(run, script_of(run.task))
    except worqr.LifetimeOver:
        run.behaviour = Behaviour(0.0, "failure" if script_of(run.task).gives_up else "returned")


def _tell(run: Run, script: Script) -> Telling:
    yield from _take(run, f"step of {os.environ[DEPLOY]}")
    run.note("stepped", name="began with", value=run.context.began_with)
    for n in range(script.steps):
        if (yield from _take(run, f"step {n}")) == STEP_FAILED:
            yield from _take(run, f"undo {n}")
            run.behaviour = Behaviour(0.0, "failure")
            return
    jobs = {name: _start(name) for name in script.jobs}
    yield from _wait(run, "sleep", "sleep", script.seconds, empty=SLEPT)
    for n, timeout in enumerate(script.timeouts):
        yield from _wait(run, f"event {n}", "wait_for", EVENT, str, timeout=timeout)
    if script.mail:
        yield from _read_mail(run, script.mail)
    if script.held:
        yield from _wait(run, "held", "wait_for", HELD, str, timeout=HELD_FOR)
    if script.awaits != "not":
        yield from _await_jobs(run, script, jobs)


def _start(name: str) -> Any:
    if name.endswith(NESTS):
        return nested.run(name.encode())
    return job.options(delay=LATE_BY * name.endswith(LATE)).run(name.encode())


def _wait(
    run: Run, name: str, call: str, *args: Any, empty: str = TIMED_OUT, **options: Any
) -> Generator[Durable, Any, str]:
    """Wait, and write what the wait has returned: `empty` for None."""
    try:
        found = yield call, args, options
    except worqr.LifetimeOver:
        run.note("waited", name=name, value=OVER)
        raise
    value = empty if found is None else found
    run.note("waited", name=name, value=value)
    return value


def _read_mail(run: Run, timeout: float) -> Telling:
    """Read the mailbox until nothing has come for `timeout` seconds."""
    mailbox = yield "mailbox", (timeout,), {}
    for n in count():
        if (yield from _wait(run, f"mail {n}", "read", mailbox, None)) == TIMED_OUT:
            return


def _await_jobs(run: Run, script: Script, jobs: Mapping[str, Any]) -> Telling:
    if script.awaits == "first" and jobs:
        yield from _await_first(run, jobs)
    if script.awaits == "gather":
        yield from _outcome("gather", *jobs.values())
    for name in jobs:
        how, found = yield from _outcome("gather", jobs[name])
        run.note("waited", name=f"job {name}", value=f"{how} {found[0]}" if how == "finished" else how)
        if how != "finished" and script.gives_up:
            run.behaviour = Behaviour(0.0, "failure")


def _take(run: Run, name: str) -> Generator[Durable, Any, int]:
    """Take a step; return its result."""
    try:
        value: int = yield "take", (name,), {}
    except worqr.StepFailed:
        value = STEP_FAILED
    except worqr.LifetimeOver:
        run.note("waited", name=f"{NEXT_TRY}{name}", value=OVER)
        raise
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


@flows.workflow(**_options(FLOW_BRIEF), lifetime=LIFETIME)
async def with_lifetime(task: bytes, /) -> str:
    return await _play()


@flows.workflow(**_options(FLOW_NESTED))
async def nested(task: bytes, /) -> int:
    """A workflow that a workflow starts. Its result is the number of its claim."""
    await _play()
    return worqr.current().fence


@cache
def _mesh_of_process() -> worqr.Mesh[Any]:
    """The mesh by which a process of its own starts jobs."""
    mesh = worqr.Mesh(os.environ[URL], prefix=PREFIX)
    mesh.include(flows)
    return mesh


# Producers


class WorkflowMaker:
    """Starts workflows and sends events to them. Ends waits, cancels some, puts failed ones back, and waits for some results."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._rng = sender.rng
        sender.mesh.include(flows)

    async def make(self, nursery: trio.Nursery) -> None:
        """Start a workflow."""
        rng, mesh = self._rng, self._sender.mesh
        (queue,) = rng.choices(FLOWS, (5, 2, 2, 1, 2))
        task = self._sender.new_task(queue)
        follows = rng.random() < 0.3
        follow_ups = {kind: mesh.call(FOLLOW_UPS, follow_up_of(task, kind).encode()) for kind in ("then", "otherwise")}
        bound = mesh.functions[queue].options(id=task, **(follow_ups if follows else {}))
        dispatched = await self._sender.send(
            queue, [task], lambda: bound.dispatch(task.encode()), id=task, follows=follows
        )
        if dispatched is None:
            return
        script = script_of(task)
        for name, moments in ((EVENT, script.sends), (MAIL, script.mails)):
            nursery.start_soon(self._send_events, queue, task, dispatched, name, moments)
        for seconds, wait in script.ends:
            nursery.start_soon(self._end_wait, queue, task, dispatched, wait, seconds)
        nursery.start_soon(self._put_back, queue, task, dispatched)
        if rng.random() < 0.25:
            after = rng.choice((0, 0.02, 0.3, 1, 3, 6))
            nursery.start_soon(self._sender.cancel, queue, task, dispatched.cancel, after)
        elif rng.random() < 0.3:
            nursery.start_soon(self._sender.wait_for_result, queue, task, dispatched)

    async def _send_events(
        self, queue: str, task: str, flow: worqr.Job[str], name: str, moments: tuple[float, ...]
    ) -> None:
        for n, seconds in enumerate(sorted(moments)):
            await trio.sleep(seconds)
            value, again = f"{task} {name} {n}", name == MAIL or self._rng.random() < 0.5
            call = self._sender.begin("signal", queue=queue, task=task, value=value)
            try:
                answer: str = await flow.send(name, value, again=again)
            except worqr.NoJob:
                answer = "none"
            except worqr.WorqrError as error:
                self._sender.failed(call, error)
                continue
            self._sender.ledger.write("signalled", call=call, answer=answer)

    async def _end_wait(self, queue: str, task: str, flow: worqr.Job[str], wait: str, seconds: float) -> None:
        """End a wait once it is open."""
        for _ in range(LOOKS):
            await trio.sleep(seconds)
            call = self._sender.begin("end_wait", queue=queue, task=task, name=wait)
            try:
                answer = "ended" if await flow.end_wait(KEYS[wait]) else "closed"
            except worqr.NoJob:
                answer = "none"
            except worqr.WorqrError as error:
                self._sender.failed(call, error)
                return
            self._sender.ledger.write("wait_ended", call=call, answer=answer)
            if answer != "closed":
                return
            seconds = 1.0

    async def _put_back(self, queue: str, task: str, flow: worqr.Job[str]) -> None:
        """Put a workflow back when it has failed, at most so often."""
        for _ in range(self._rng.choice(PUTS_BACK)):
            try:
                await flow.result(FAILS_WITHIN)
            except worqr.JobFailed:
                await trio.sleep(self._rng.choice((0, 0.3, 2.0)))
            except worqr.WorqrError:
                return
            else:
                return
            call = self._sender.begin("retry", batch=task)
            try:
                count = await self._sender.mesh.queue(queue).failed.retry(task)
            except worqr.WorqrError as error:
                self._sender.failed(call, error)
            else:
                self._sender.ledger.write("retried", call=call, count=count)
