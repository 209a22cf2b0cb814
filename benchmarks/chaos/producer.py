"""A producer of the chaos run, a process of its own: ``python -m benchmarks.chaos.producer SETTINGS``."""

from __future__ import annotations

import math
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import trio

import worqr
from benchmarks.chaos.batch_maker import BatchMaker
from benchmarks.chaos.child import Child
from benchmarks.chaos.rows import RowMaker
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.topics import EventMaker
from benchmarks.chaos.workflows import WorkflowMaker
from benchmarks.chaos.workload import (
    ASYNCIO,
    HAND,
    JOBS,
    LANE_NAMES,
    LANES,
    LIMITED,
    PREFIX,
    PROCESS,
    RAW,
    RESULT_TTL,
    ROOM,
    ROOM_LENGTH,
    SAVES,
    SINGLE,
    SLOW,
    THREAD,
    UPDATES,
)

LOOPS = 3
PAUSE = 0.12
"""Seconds between two requests of one loop, at most."""
WAITS_FOR_ROOM = 6
"""Calls that wait for room at a time, at most."""

IfExists = Literal["update", "skip", "raise", "cancel"]


class Producer:
    """Sends requests at random until SIGTERM, then waits for the results it wants and leaves."""

    def __init__(self, child: Child) -> None:
        settings = child.settings
        self._ledger = child.ledger
        self._rng = child.rng
        self._mesh = worqr.Mesh(
            settings.url, prefix=PREFIX, app=settings.name, patience=settings.patience, replicas=settings.replicas
        )
        self._stopped = False
        self._sender = Sender(settings.name, self._mesh, child.ledger, child.rng)
        self._batches = BatchMaker(self._sender)
        workflows = WorkflowMaker(self._sender)
        rows = RowMaker(self._sender, Path(settings.folder), settings.replicas)
        self._waits_for_room = trio.CapacityLimiter(WAITS_FOR_ROOM)
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
            (0.04, self._batches.make),
            (0.25, self._wait_for_room),
            (0.06, lambda _: self._dispatch_one(SAVES, {})),
            (0.02, lambda _: self._enqueue(SAVES, 2)),
            (0.06, rows.make),
            (0.12, workflows.make),
            (0.08, EventMaker(self._sender).publish),
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

    async def _enqueue(
        self, queue: str, most: int, end: str = "", facts: dict[str, Any] | None = None, **options: Any
    ) -> list[str]:
        tasks = [self._sender.new_task(queue, end) for _ in range(self._rng.randint(1, most))]
        payloads = [task.encode() for task in tasks]
        request = partial(self._mesh.queue(queue).enqueue, *payloads, **options)
        await self._sender.send(queue, tasks, request, **facts or {})
        return tasks

    async def _enqueue_raw(self, nursery: trio.Nursery) -> None:
        is_slow = self._rng.random() < 0.1
        if is_slow:
            tasks = await self._enqueue(RAW, 1, SLOW)
        else:
            tasks = await self._enqueue(RAW, 4, front=self._rng.random() < 0.1)
        if self._rng.random() < (0.6 if is_slow else 0.06):
            task = self._rng.choice(tasks)
            nursery.start_soon(self._sender.cancel, RAW, task, lambda: self._mesh.queue(RAW).cancel(task.encode()))

    async def _dispatch_one(self, queue: str, options: dict[str, Any]) -> tuple[str, worqr.Job[bytes] | None]:
        is_slow = queue in (JOBS, SAVES) and self._rng.random() < 0.1
        task = self._sender.new_task(queue, SLOW if is_slow else "")
        job = await self._sender.send(
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
            nursery.start_soon(self._sender.cancel, JOBS, task, job.cancel)
        if 0.07 < x < 0.25:  # some of them cancelled as well
            nursery.start_soon(self._sender.wait_for_result, JOBS, task, job)

    async def _dispatch_into_lane(self, nursery: trio.Nursery) -> None:
        delay = self._rng.choice([0, 0, 0, 0.5])
        task, job = await self._dispatch_one(LANES, {"delay": delay, "lane": self._rng.choice(LANE_NAMES)})
        if job is not None and self._rng.random() < 0.1:
            nursery.start_soon(self._sender.cancel, LANES, task, job.cancel)

    async def _wait_for_room(self, nursery: trio.Nursery) -> None:
        """Add tasks to a queue that is mostly full. The call waits beside the other requests."""
        if self._waits_for_room.available_tokens > 0:
            nursery.start_soon(self._add_when_room)

    async def _add_when_room(self) -> None:
        rng = self._rng
        wait, patience = rng.choice([0.5, 5, 60, 60]), rng.choice([0.3, 3, math.inf, math.inf])
        async with self._waits_for_room:
            with trio.move_on_after(patience):
                await self._enqueue(ROOM, 4, facts={"wait": wait}, max_length=ROOM_LENGTH, wait=wait)

    async def _pause(self, _nursery: trio.Nursery) -> None:
        """Pause a queue with limits, or with lanes; the pause ends by itself."""
        queue = self._mesh.queue(self._rng.choice([LIMITED, LANES]))
        with suppress(worqr.WorqrError):
            await queue.pause("at random", duration=self._rng.choice([0.05, 0.3, 1]))

    async def _dispatch_single(self, _nursery: trio.Nursery) -> None:
        job_id, task = f"s{self._rng.randrange(6)}", self._sender.new_task(SINGLE)
        delay = self._rng.choice([0, 0, 0.1])
        await self._sender.send(
            SINGLE,
            [task],
            lambda: self._mesh.queue(SINGLE).dispatch(task.encode(), id=job_id, delay=delay),
            id=job_id,
            delay=delay,
        )

    async def _dispatch_update(self, _nursery: trio.Nursery) -> None:
        """Debounce and throttle a few ids, and try what must be refused."""
        job_id, task = f"u{self._rng.randrange(8)}", self._sender.new_task(UPDATES)
        update = worqr.Update(
            data=self._rng.random() < 0.7, run_at=self._rng.choice([True, False, "if_later", "if_earlier"])
        )
        if self._rng.random() < 0.2:
            update = worqr.Update(run_at="if_later", at_most=1.5)
        exists: IfExists = self._rng.choice(("update", "update", "update", "skip", "raise", "cancel"))
        delay = self._rng.choice([0, 0.2, 1.0])
        await self._sender.send(
            UPDATES,
            [task],
            lambda: self._mesh.queue(UPDATES).dispatch(
                task.encode(), id=job_id, delay=delay, update=update, if_exists=exists
            ),
            id=job_id,
            keeps_data=not update.data,
        )


def main() -> None:
    trio.run(Producer(Child.of_command_line()).run)


if __name__ == "__main__":
    main()
