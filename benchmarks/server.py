"""The server without worqr: a bare client, worqr's own scripts called by it, and the server's statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from worqr import ops
from worqr.command import Command
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys
from worqr.lua import all_scripts

PRODUCER = "bare"
ASKED_BY_CLIENTS = frozenset({"evalsha", "ping", "subscribe", "unsubscribe"})
"""The requests of a worker that claims tasks. All other statistics of a quiet server come from scripts, or from the benchmark."""


def bare(server: EmbeddedServer) -> redis.Redis:
    """A plain redis-py client, with worqr's scripts loaded."""
    client = redis.Redis(unix_socket_path=server.socket_path)
    for script in all_scripts():
        client.script_load(script.source)
    return client


def fill(client: redis.Redis, key: str, count: int, size: int = 100) -> None:
    """Put `count` different tasks of `size` bytes into a list, as a foreign producer would."""
    for start in range(0, count, 100_000):
        pipe = client.pipeline(transaction=False)
        for chunk in range(start, min(start + 100_000, count), 1000):
            pipe.lpush(key, *(b"%0*d" % (size, n) for n in range(chunk, min(chunk + 1000, count))))
        pipe.execute()


Options = Mapping[str, object]


def fill_jobs(
    client: redis.Redis, keys: QueueKeys, count: int, options: Options | Callable[[int], Options], size: int = 100
) -> None:
    """Dispatch `count` jobs with different tasks of `size` bytes; `options` as `job_options.encode_options` returns them, for all
    or for each.
    """
    options_of = options if callable(options) else lambda _n: options
    numbers = itertools.count(time.time_ns() // 1000)
    for start in range(0, count, 10_000):
        pipe = client.pipeline(transaction=False)
        for chunk in range(start, min(start + 10_000, count), 100):
            jobs = [(options_of(n), b"%0*d" % (size, n)) for n in range(chunk, min(chunk + 100, count))]
            number = next(numbers)
            pipe.evalsha(*command(ops.dispatch_jobs(keys, jobs), number, number))
        pipe.execute()


def command(call: Command[Any], number: int = 0, lowest: int = 0) -> tuple[Any, ...]:
    """The link's request for `call`: script, number of keys, keys, arguments."""
    numbering = (PRODUCER, number, lowest) if call.numbered else ()
    return (call.script.sha, 1, call.base, *numbering, *call.args, *call.script.tail)


@dataclass(frozen=True, slots=True)
class Account:
    """The server's totals: requests by clients, all commands, time in scripts, CPU time; times in seconds."""

    at: float
    requests: dict[str, int]
    commands: int
    script_time: float
    cpu: float

    def since(self, before: Account) -> Account:
        """The difference; `at` is the time between."""
        requests = {name: count - before.requests.get(name, 0) for name, count in self.requests.items()}
        return Account(
            self.at - before.at,
            {name: count for name, count in requests.items() if count},
            self.commands - before.commands,
            self.script_time - before.script_time,
            self.cpu - before.cpu,
        )

    @property
    def rate(self) -> float:
        """Requests per second."""
        return sum(self.requests.values()) / self.at


def account(client: redis.Redis) -> Account:
    """The server's books; the request that asks for them is not in them."""
    stats: dict[str, dict[str, Any]] = client.info("commandstats")
    cpu = client.info("cpu")
    names = {name.removeprefix("cmdstat_"): of for name, of in stats.items()}
    return Account(
        time.perf_counter(),
        {name: int(of["calls"]) for name, of in names.items() if name in ASKED_BY_CLIENTS},
        sum(int(of["calls"]) for name, of in names.items() if name != "info"),
        float(names.get("evalsha", {}).get("usec", 0)) / 1e6,
        float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
    )


def describe(requests: Iterable[tuple[str, int]], seconds: float) -> str:
    """``evalsha 1.0/s, ping 1.0/s``."""
    return ", ".join(f"{name} {count / seconds:.2f}/s" for name, count in sorted(requests, key=lambda item: -item[1]))


def server_line(client: redis.Redis) -> str:
    """Which server this is."""
    about = client.info("server")
    name = about.get("server_name", "redis")
    version = about.get("valkey_version") if name == "valkey" else about["redis_version"]
    return f"{name} {version} on a unix socket"
