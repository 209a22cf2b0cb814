"""How long the server takes for the scripts that run for each task, and what all scripts take in it.

The server measures itself: the time of EVALSHA in its statistics, by the number of calls. Each program that is there is measured:
the embedded Valkey, and ``redis-server`` of the PATH.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis

from benchmarks.measuring import Plan, Row, Table
from benchmarks.server import command, server_line
from worqr import ops
from worqr.command import Command
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys, RegistryKeys
from worqr.lua import all_scripts
from worqr.records import RemoteError

TASK: Final = b"x" * 100
KEYS: Final = QueueKeys("worqr", "Q1")
LANED: Final = QueueKeys("worqr", "Q2")
LIMITED: Final = QueueKeys("worqr", "Q3")
FIRST_SCRIPT: Final = (
    "import worqr.lua, time; began = time.process_time(); worqr.lua.script('enqueue').sha; "
    "first = time.process_time(); [each.sha for each in worqr.lua.all_scripts()]; "
    "print(first - began, time.process_time() - first)"
)


BOOM = RemoteError("Boom", "it broke", "")


class Calls:
    """The calls of one worker and one producer, sent one at a time. Each method measures one script, in us per call."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._numbers, self._starts = itertools.count(1), itertools.count(1)
        self._send(ops.start_worker(RegistryKeys("worqr"), "A", keepalive_ms=60_000, facts=[("host", "h")]))
        for keys in (KEYS, LANED, LIMITED):
            limits = ops.start_work(keys, "A", max_stalls=3, keep_failed=1000, last=0)
            self._send(limits)
        self._send(ops.set_limits(LIMITED, "1000 1000000/1000"))

    def _send(self, call: Command[Any]) -> Any:
        number = next(self._numbers)
        return self._client.evalsha(*command(call, number, number))

    def _timed(self, calls: list[tuple[Any, ...]]) -> float:
        """Return the server's time for these calls, in us for each."""
        before = self._spent()
        for each in calls:
            self._client.evalsha(*each)
        return (self._spent() - before) / len(calls)

    def _spent(self) -> int:
        stats: dict[str, Any] = self._client.info("commandstats")
        return int(stats.get("cmdstat_evalsha", {}).get("usec", 0))

    def _numbered(self, count: int, make: Callable[[int], Command[Any]]) -> list[tuple[Any, ...]]:
        return [command(make(n), n, n) for n in itertools.islice(self._numbers, count)]

    def enqueue(self, count: int) -> float:
        """An enqueue of one task, which no worker waits for."""
        return self._timed(self._numbered(count, lambda _: ops.enqueue(KEYS, [TASK])))

    def dispatch(self, count: int) -> float:
        """A dispatch of one job without options."""
        return self._timed(self._numbered(count, lambda _: ops.dispatch_jobs(KEYS, [({"delay": 0}, TASK)])))

    def dispatch_id(self, count: int) -> float:
        """A dispatch of one job with an id."""
        return self._timed(
            self._numbered(count, lambda n: ops.dispatch_jobs(KEYS, [({"id": f"j{n}", "delay": 0}, TASK)]))
        )

    def into_lane(self, count: int) -> float:
        """A dispatch of one job into one of ten lanes."""
        return self._timed(
            self._numbered(count, lambda n: ops.dispatch_jobs(LANED, [({"delay": 0, "lane": f"l{n % 10}"}, TASK)]))
        )

    def beat(self, count: int) -> float:
        """A heartbeat."""
        registry = RegistryKeys("worqr")
        return self._timed(
            [
                command(ops.keep_worker_alive(registry, "A", n, keepalive_ms=60_000, lease_ms=9000, running=2, room=3))
                for n in range(count)
            ]
        )

    def start(self, keys: QueueKeys, count: int, each: int = 1) -> float:
        """A start of so many tasks, which are there."""
        return self._timed(
            [command(ops.start_tasks(keys, "A", n, each)) for n in itertools.islice(self._starts, count)]
        )

    def finish(self, keys: QueueKeys, each: int = 1) -> float:
        """An end of so many runs."""
        held = sorted(int(claim) for claim in self._client.smembers(keys.claims("A")))
        parts = [held[n : n + each] for n in range(0, len(held), each)]
        return self._timed([command(ops.finish_tasks(keys, "A", part)) for part in parts])

    def retry(self) -> float:
        """A failed run that is put back."""
        held = sorted(int(claim) for claim in self._client.smembers(KEYS.claims("A")))
        return self._timed(
            [command(ops.retry_task(KEYS, "A", claim, BOOM, counter="failures", limit=9)) for claim in held]
        )

    def fail(self) -> float:
        """A failed run that goes to the dead-letter queue."""
        held = sorted(int(claim) for claim in self._client.smembers(KEYS.claims("A")))
        return self._timed([command(ops.fail_task(KEYS, "A", claim, BOOM)) for claim in held])

    def all(self, count: int) -> Iterator[tuple[str, float]]:
        """Measure each call, as often as `count`; first what fills the queues."""
        yield "enqueue", self.enqueue(count)
        yield "start of one", self.start(KEYS, count)
        yield "finish of one", self.finish(KEYS)
        self.enqueue(count)
        yield "start of 100", self.start(KEYS, count // 100, 100)
        yield "finish of 100", self.finish(KEYS, 100)
        yield "dispatch", self.dispatch(count)
        yield "start of one job", self.start(KEYS, count)
        yield "finish of one job", self.finish(KEYS)
        self.enqueue(count)
        self.start(KEYS, count // 100, 100)
        yield "retry of one", self.retry()
        self.start(KEYS, count // 100, 100)
        yield "failure of one", self.fail()
        yield "dispatch with an id", self.dispatch_id(count)
        self.start(KEYS, count // 100, 100)
        self.finish(KEYS, 100)
        yield "dispatch into a lane", self.into_lane(count)
        yield "start of one in lanes", self.start(LANED, count)
        yield "finish of one in lanes", self.finish(LANED)
        self._timed(self._numbered(count, lambda _: ops.enqueue(LIMITED, [TASK])))
        yield "start of one under limits", self.start(LIMITED, min(count, 900))
        yield "finish of one under limits", self.finish(LIMITED)
        yield "heartbeat", self.beat(count)


def used(client: redis.Redis) -> tuple[int, int]:
    """Return the bytes that the server and its Lua use."""
    memory = client.info("memory")
    return int(memory["used_memory"]), int(memory.get("used_memory_vm_eval", memory["used_memory_lua"]))


def collect(client: redis.Redis) -> None:
    """Let Lua free what it does not need."""
    client.eval("collectgarbage('collect') return collectgarbage('collect')", 0)


def loaded(client: redis.Redis) -> list[tuple[str, str, float]]:
    """Load all scripts into an empty server; return what, its unit, and the figure."""
    collect(client)
    before = used(client)
    pipe = client.pipeline(transaction=False)
    for source in {script.source for script in all_scripts()}:
        pipe.script_load(source)
    began = time.perf_counter()
    pipe.execute()
    took = time.perf_counter() - began
    collect(client)
    more = [now - then for now, then in zip(used(client), before, strict=True)]
    return [("all scripts: load", "ms", 1000 * took), ("all scripts: memory", "MB", sum(more) / 1e6)]


@contextmanager
def servers(embedded: EmbeddedServer) -> Iterator[list[redis.Redis]]:
    """Clients of the embedded server and, where it is, of Redis."""
    found = [redis.Redis(unix_socket_path=embedded.socket_path)]
    program = shutil.which("redis-server")
    if program is None:
        yield found
        return
    with EmbeddedServer(program=program) as other:
        yield [*found, redis.Redis(unix_socket_path=other.socket_path)]


def assembling() -> tuple[float, float]:
    """Return the ms of CPU that a process takes for its first script, and then for all others."""
    run = subprocess.run([sys.executable, "-c", FIRST_SCRIPT], capture_output=True, text=True, check=True)
    first, rest = run.stdout.split()
    return 1000 * float(first), 1000 * float(rest)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Every script in each server, the servers in turns."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    with servers(server) as clients:
        names = [server_line(client).removesuffix(" on a unix socket") for client in clients]
        for _ in range(plan.runs):
            for name, client in zip(names, clients, strict=True):
                client.flushall()
                client.script_flush()
                for what, unit, figure in loaded(client):
                    rows.setdefault((name, what, unit), []).append(figure)
                for what, figure in Calls(client).all(plan.size(2000, 100)):
                    rows.setdefault((name, what, "us"), []).append(figure)
    first, rest = zip(*[assembling() for _ in range(plan.runs)], strict=True)
    sent = sum(map(len, {script.source for script in all_scripts()})) / 1e6
    size = [
        Row("all scripts: sent", "MB", [sent]),
        Row("assemble the first script", "ms", list(first)),
        Row("assemble all others", "ms", list(rest)),
    ]
    times = [Row(f"{what}, {name}", unit, values) for (name, what, unit), values in rows.items()]
    return [
        Table("scripts: time of the server, one call at a time, warm", "", times),
        Table("scripts: what is sent", "", size),
    ]
