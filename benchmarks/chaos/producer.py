"""A producer of the chaos run, a process of its own: ``python -m benchmarks.chaos.producer SETTINGS``."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

import trio

import worqr
from benchmarks.chaos.child import Child
from benchmarks.chaos.workload import (
    ASYNCIO,
    FOLLOW_UPS,
    HAND,
    HOMES,
    JOBS,
    LANE_NAMES,
    LANES,
    LIMITED,
    OPEN_FOR,
    PREFIX,
    PROCESS,
    RAW,
    SINGLE,
    SLOW,
    THREAD,
    UPDATES,
    follow_up_of,
)

LOOPS = 3
PAUSE = 0.12
"""Seconds between two requests of one loop, at most."""
WAITS = 10
"""Results that are waited for at a time."""
PATIENT = 60.0
RESULT_TTL = 3600.0
"""Longer than a run, clock jumps included: a result that was kept must still be there."""

IfExists = Literal["update", "skip", "raise", "cancel"]


class Producer:
    """Sends requests at random until SIGTERM, then waits for the results it wants and leaves."""

    def __init__(self, child: Child) -> None:
        settings = child.settings
        self._name = settings.name
        self._ledger = child.ledger
        self._rng = child.rng
        self._mesh = worqr.Mesh(
            settings.url, prefix=PREFIX, app=settings.name, patience=settings.patience, replicas=settings.replicas
        )
        self._stopped = False
        self._tasks = 0
        self._calls = 0
        self._batches = 0
        self._waits = trio.CapacityLimiter(WAITS)
        self._operations: list[tuple[float, Callable[[trio.Nursery], Awaitable[object]]]] = [
            (0.30, self._enqueue_raw),
            (0.10, lambda _: self._enqueue(THREAD, 3)),
            (0.10, lambda _: self._enqueue(ASYNCIO, 2)),
            (0.14, lambda _: self._enqueue(HAND, 5)),
            (0.19, self._dispatch),
            (0.02, lambda _: self._dispatch_one(PROCESS, {})),
            (0.09, self._dispatch_single),
            (0.06, self._dispatch_update),
            (0.08, lambda _: self._enqueue(LIMITED, 5)),
            (0.01, self._pause),
            (0.12, self._dispatch_into_lane),
            (0.03, self._make_batch),
        ]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._stop_on_sigterm)
            connected = False
            while not (connected or self._stopped):
                try:
                    async with self._mesh.connect(), trio.open_nursery() as work:
                        connected = True
                        for _ in range(LOOPS):
                            work.start_soon(self._produce, work)
                except worqr.Unavailable:  # the server has been away for longer than the patience
                    if connected:
                        raise
            nursery.cancel_scope.cancel()
        self._ledger.write("left")

    async def _stop_on_sigterm(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                self._ledger.write("leaving")
                self._stopped = True

    async def _produce(self, nursery: trio.Nursery) -> None:
        weights = [weight for weight, _ in self._operations]
        while not self._stopped:
            ((_, operation),) = self._rng.choices(self._operations, weights)
            await operation(nursery)
            await trio.sleep(self._rng.uniform(0, PAUSE))

    # Requests

    def _new_task(self, queue: str, end: str = "") -> str:
        self._tasks += 1
        return f"{queue}/{self._name}/{self._tasks}{end}"

    async def _send(self, queue: str, tasks: list[str], request: Callable[[], Awaitable[Any]], **facts: Any) -> Any:
        """Make a request, with a line before and one after it; None if it failed."""
        self._calls += 1
        call = self._calls
        self._ledger.write("send", call=call, queue=queue, tasks=tasks, **facts)
        try:
            answer = await request()
        except worqr.NotReplicated as error:
            self._ledger.write("unknown", call=call, error=repr(error)[:200])  # a failover may lose it
            return error.job
        except worqr.WorqrError as error:
            sent = error.sent if isinstance(error, worqr.Unavailable) else False
            what = {False: "refused", None: "unknown", True: "acked"}[sent]
            self._ledger.write(what, call=call, error=repr(error)[:200])
            return None
        self._ledger.write("acked", call=call, outcome=getattr(answer, "outcome", None))
        return answer

    async def _enqueue(self, queue: str, most: int, end: str = "", **options: Any) -> list[str]:
        tasks = [self._new_task(queue, end) for _ in range(self._rng.randint(1, most))]
        payloads = [task.encode() for task in tasks]
        await self._send(queue, tasks, lambda: self._mesh.queue(queue).enqueue(*payloads, **options))
        return tasks

    async def _enqueue_raw(self, nursery: trio.Nursery) -> None:
        is_slow = self._rng.random() < 0.1
        if is_slow:
            tasks = await self._enqueue(RAW, 1, SLOW)
        else:
            tasks = await self._enqueue(RAW, 4, front=self._rng.random() < 0.1)
        if self._rng.random() < (0.6 if is_slow else 0.06):
            task = self._rng.choice(tasks)
            nursery.start_soon(self._cancel, RAW, task, lambda: self._mesh.queue(RAW).cancel(task.encode()))

    async def _dispatch_one(self, queue: str, options: dict[str, Any]) -> tuple[str, worqr.Job[bytes] | None]:
        is_slow = queue == JOBS and self._rng.random() < 0.1
        task = self._new_task(queue, SLOW if is_slow else "")
        job = await self._send(
            queue,
            [task],
            lambda: self._mesh.queue(queue).dispatch(task.encode(), id=task, **options),
            id=task,
            delay=options.get("delay", 0),
        )
        return task, job

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        delay = self._rng.choice([0, 0, 0.05, 0.5, 1.5])
        task, job = await self._dispatch_one(JOBS, {"delay": delay, "result_ttl": RESULT_TTL})
        if job is None:
            return
        x = self._rng.random()
        if x < (0.6 if task.endswith(SLOW) else 0.10):
            nursery.start_soon(self._cancel, JOBS, task, job.cancel)
        if 0.07 < x < 0.25 and self._waits.available_tokens > 0:  # some of them cancelled as well
            nursery.start_soon(self._wait_for_result, task, job)

    async def _dispatch_into_lane(self, nursery: trio.Nursery) -> None:
        delay = self._rng.choice([0, 0, 0, 0.5])
        task, job = await self._dispatch_one(LANES, {"delay": delay, "lane": self._rng.choice(LANE_NAMES)})
        if job is not None and self._rng.random() < 0.1:
            nursery.start_soon(self._cancel, LANES, task, job.cancel)

    async def _make_batch(self, _nursery: trio.Nursery) -> None:
        """Add jobs of several queues to a batch. Its block may end with an error, or the batch be cancelled."""
        self._batches += 1
        name, rng = f"{self._name}.{self._batches}", self._rng
        follow_ups = {
            kind: self._mesh.call(FOLLOW_UPS, follow_up_of(name, kind).encode()) for kind in ("then", "otherwise")
        }
        options = worqr.BatchOptions(
            id=name,
            queue=rng.choice(HOMES),
            open_for=OPEN_FOR,
            on_failed=rng.choice(("continue", "continue", "cancel")),
            then=follow_ups["then"],
            otherwise=follow_ups["otherwise"],
        )
        with suppress(worqr.WorqrError, ZeroDivisionError):
            async with self._mesh.batch(**options) as batch:
                for _ in range(rng.randint(0, 8)):
                    await self._add(batch, name)
                    await trio.sleep(rng.uniform(0, 0.05))
                x = rng.random()
                if x < 0.1:
                    await batch.cancel(reason="at random")
                elif x < 0.15:
                    raise ZeroDivisionError

    async def _add(self, batch: worqr.Batch, name: str) -> None:
        queue = self._rng.choice((RAW, THREAD, ASYNCIO, JOBS))
        task = self._new_task(queue)
        call = self._mesh.call(queue, task.encode())
        await self._send(queue, [task], lambda: batch.dispatch(call), batch=name)

    async def _pause(self, _nursery: trio.Nursery) -> None:
        """Pause a queue with limits, or with lanes; the pause ends by itself."""
        queue = self._mesh.queue(self._rng.choice([LIMITED, LANES]))
        with suppress(worqr.WorqrError):
            await queue.pause("at random", duration=self._rng.choice([0.05, 0.3, 1]))

    async def _dispatch_single(self, _nursery: trio.Nursery) -> None:
        job_id, task = f"s{self._rng.randrange(6)}", self._new_task(SINGLE)
        delay = self._rng.choice([0, 0, 0.1])
        await self._send(
            SINGLE,
            [task],
            lambda: self._mesh.queue(SINGLE).dispatch(task.encode(), id=job_id, delay=delay),
            id=job_id,
            delay=delay,
        )

    async def _dispatch_update(self, _nursery: trio.Nursery) -> None:
        """Debounce and throttle a few ids, and try what must be refused."""
        job_id, task = f"u{self._rng.randrange(8)}", self._new_task(UPDATES)
        update = worqr.Update(
            data=self._rng.random() < 0.7, run_at=self._rng.choice([True, False, "if_later", "if_earlier"])
        )
        if self._rng.random() < 0.2:
            update = worqr.Update(run_at="if_later", at_most=1.5)
        exists: IfExists = self._rng.choice(("update", "update", "update", "skip", "raise", "cancel"))
        delay = self._rng.choice([0, 0.2, 1.0])
        await self._send(
            UPDATES,
            [task],
            lambda: self._mesh.queue(UPDATES).dispatch(
                task.encode(), id=job_id, delay=delay, update=update, if_exists=exists
            ),
            id=job_id,
            keeps_data=not update.data,
        )

    async def _cancel(self, queue: str, task: str, cancel: Callable[[], Awaitable[worqr.CancelCount]]) -> None:
        await trio.sleep(self._rng.choice([0, 0, 0.02, 0.3]))
        self._calls += 1
        call = self._calls
        self._ledger.write("cancel", call=call, queue=queue, task=task)
        try:
            count = await cancel()
        except worqr.WorqrError as error:
            self._ledger.write("unknown", call=call, error=repr(error)[:200])
        else:
            self._ledger.write("cancelled", call=call, waiting=count.waiting, running=count.running)

    async def _wait_for_result(self, task: str, job: worqr.Job[bytes]) -> None:
        async with self._waits:
            outcome, value = "finished", None
            try:
                value = (await job.result(PATIENT)).decode()
            except worqr.JobFailed as error:
                outcome, value = "failed", error.error.type
            except worqr.JobCancelled:
                outcome = "cancelled"
            except worqr.NoResult as error:
                outcome, value = "none", str(error)
            except worqr.WorqrError as error:
                outcome, value = "unknown", type(error).__name__
            self._ledger.write("result", queue=JOBS, task=task, outcome=outcome, value=value)


def main() -> None:
    trio.run(Producer(Child.of_command_line()).run)


if __name__ == "__main__":
    main()
