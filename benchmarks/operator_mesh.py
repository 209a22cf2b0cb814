"""A large mesh for `benchmarks.operator`: worqr's own scripts fill a server with queues, tasks, jobs, failures and workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.measuring import Plan
from benchmarks.server import command
from worqr import ops
from worqr.command import Command
from worqr.job_options import encode_options
from worqr.keys import QueueKeys, RegistryKeys
from worqr.records import RemoteError

PREFIX = "worqr"
DAY = 86_400
PER_CALL = 1000
PER_PIPELINE = 20
QUEUES_OF_WORKER = 10
FIRST = "queue-0000"
"""The queue that holds half of everything."""
TASK = b'{"order": %07d, "customer": "ada@example.org", "token": "x", "lines": [1, 2, 3, 4, 5, 6, 7]}'
FAILURE = RemoteError("ConnectionError", "the bank does not answer", "Traceback\n" + '  File "shop.py", line 1\n' * 20)


@dataclass(frozen=True, slots=True)
class Size:
    """How much the server holds."""

    queues: int
    waiting: int
    scheduled: int
    failed: int
    workers: int

    @classmethod
    def of(cls, plan: Plan) -> Size:
        """The sizes of the plan; a hundredth for a smoke run."""
        return cls(
            queues=plan.size(1000, 10),
            waiting=plan.size(1_000_000, 1_000),
            scheduled=plan.size(1_000_000, 1_000),
            failed=plan.size(100_000, 100),
            workers=plan.size(1000, 10),
        )

    def __str__(self) -> str:
        return (
            f"{self.waiting:,} waiting, {self.scheduled:,} scheduled, {self.failed:,} failed, "
            f"{self.workers:,} workers, {self.queues:,} queues"
        )


class LargeMesh:
    """Fills one server. Half of everything is in the first queue, the rest is spread over the others."""

    def __init__(self, client: redis.Redis, size: Size) -> None:
        self.size = size
        self._client = client
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._names = [f"queue-{n:04d}" for n in range(size.queues - 1)]  # the leader serves another one

    def fill(self) -> None:
        """Write everything."""
        self._send([ops.note_queues(RegistryKeys(PREFIX), self._names)])
        for name, count in self._spread(self.size.failed):
            self._fail(QueueKeys(PREFIX, name), count)
        self._send(
            ops.enqueue(QueueKeys(PREFIX, name), [TASK % n for n in part])
            for name, count in self._spread(self.size.waiting)
            for part in _parts(count)
        )
        self._send(
            ops.dispatch_jobs(QueueKeys(PREFIX, name), [_scheduled(name, n) for n in part])
            for name, count in self._spread(self.size.scheduled)
            for part in _parts(count)
        )
        self._register()

    def _spread(self, count: int) -> list[tuple[str, int]]:
        rest = count // 2 // (len(self._names) - 1)
        return [(FIRST, count - rest * (len(self._names) - 1)), *((name, rest) for name in self._names[1:])]

    def _register(self) -> None:
        """Workers that send no heartbeat, and never count as dead."""
        registry, calls = RegistryKeys(PREFIX), list[Command[Any]]()
        for n in range(self.size.workers - 1):
            worker = f"host-{n % 50:02d}:{n:032x}"
            facts = [
                ("app", f"app-{n % 5}"),
                ("host", f"host-{n % 50:02d}"),
                ("pid", n),
                ("version", "0.1"),
                ("room", 9),
            ]
            facts += [("started", round(time.time() * 1000)), ("python", "3.11.2"), ("keepalive_ms", 0)]
            calls.append(ops.start_worker(registry, worker, keepalive_ms=0, facts=facts))
            for step in range(min(QUEUES_OF_WORKER, len(self._names))):
                name = self._names[(n * QUEUES_OF_WORKER + step) % len(self._names)]
                calls.append(ops.map_work(registry, worker, name))
                calls.append(ops.start_work(QueueKeys(PREFIX, name), worker, max_stalls=3, keep_failed=1000, last=0))
        self._send(calls)

    def _fail(self, keys: QueueKeys, count: int) -> None:
        """Let a worker take tasks and give them up, then leave."""
        worker = f"filler:{keys.queue}"
        self._send([ops.start_work(keys, worker, max_stalls=3, keep_failed=count + 1, last=0)])
        for number, part in enumerate(_parts(count), 1):
            self._send([ops.dispatch_jobs(keys, [({"id": f"failed-{n}"}, TASK % n) for n in part])])
            (started,) = self._send([ops.start_tasks(keys, worker, number, PER_CALL)])
            claims = range(started.first, started.first + len(started.entries))
            self._send(ops.fail_task(keys, worker, claim, FAILURE) for claim in claims)
        self._send([ops.stop_work(keys, worker)])

    def _send(self, calls: Iterable[Command[Any]]) -> list[Any]:
        """Send calls in pipelines of moderate size, and return what they return."""
        found: list[Any] = []
        every = iter(calls)
        while part := list(itertools.islice(every, PER_PIPELINE)):
            pipe = self._client.pipeline(transaction=False)
            for call in part:
                number = next(self._numbers)
                pipe.evalsha(*command(call, number, number))
            found += [call.read(reply) for call, reply in zip(part, pipe.execute(), strict=True)]
        return found


def _parts(count: int) -> Iterable[range]:
    return (range(start, min(start + PER_CALL, count)) for start in range(0, count, PER_CALL))


def _scheduled(queue: str, number: int) -> tuple[dict[str, object], bytes]:
    return encode_options({"id": f"{queue}-job-{number}", "delay": DAY + number % DAY}), TASK % number
