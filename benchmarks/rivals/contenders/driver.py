"""What all contenders in Python share: the three handlers, and the producer's end of the protocol. Standard library only.

The harness (`benchmarks.rivals`) starts a contender's file as ``FILE describe`` and ``FILE produce``, and its worker with the
command that ``describe`` prints. It passes these environment variables:

- ``RIVALS_URL``: the server. ``RIVALS_VARIANT``: one of the file's variants, or nothing.
- ``RIVALS_TALLY``: a file. Each `noop` counts; every ``RIVALS_EVERY`` of them, the handler appends the time as a double.
- ``RIVALS_EVENTS``: a FIFO. `ping` writes ``{"worker": RIVALS_WORKER, "ms": ...}``: how long ago the call was sent.

``produce`` reads one JSON object per line from its standard input and writes one reply per line:

- ``{"do": "enqueue", "how": "one" | "callers" | "bulk", "seconds": S, "most": N}``: ``{"tasks": n, "seconds": s}``
- ``{"do": "ping"}``: ``{}`` when the call of `ping` is stored
- ``{"do": "hold", "path": FIFO}``: ``{}`` when the call of `hold` is stored
- ``{"do": "cancel"}``: cancel the last `hold`, ``{"at": the time just before}``

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

URL = os.environ.get("RIVALS_URL", "redis://127.0.0.1:6379/0")
VARIANT = os.environ.get("RIVALS_VARIANT", "")
WORKER = os.environ.get("RIVALS_WORKER", "")
CONCURRENCY = 100
CALLERS = 100
BULK = 1000
"""Calls in one bulk request."""
TAIL = "x7Qm" * 22
"""Fills a payload up to 100 characters."""
HELD = 3600.0
"""Seconds that `hold` takes, which is longer than any run of the harness."""
_EVERY = int(os.environ.get("RIVALS_EVERY", "1"))
_counter = itertools.count(1)
_files: dict[tuple[int, str], int] = {}


def payload(number: int) -> str:
    """Return a text of 100 characters that no other number has."""
    return f"{number:012d}{TAIL}"


def _file(variable: str) -> int:
    """Return a descriptor to append to the file that an environment variable names; one per process."""
    key = (os.getpid(), variable)
    if key not in _files:
        _files[key] = os.open(os.environ[variable], os.O_WRONLY | os.O_APPEND)
    return _files[key]


def noop(payload: str) -> None:
    """Do nothing but count."""
    if next(_counter) % _EVERY == 0:
        os.write(_file("RIVALS_TALLY"), struct.pack("d", time.monotonic()))


def ping(sent: str) -> None:
    """Tell how long ago the call was sent."""
    told = {"worker": WORKER, "ms": (time.monotonic() - float(sent)) * 1000}
    os.write(_file("RIVALS_EVENTS"), json.dumps(told).encode() + b"\n")


@contextmanager
def holding(path: str) -> Iterator[None]:
    """Tell through a FIFO when the body begins and ends. If the process is killed, the harness sees the FIFO closed."""
    fifo = os.open(path, os.O_WRONLY)
    try:
        os.write(fifo, f"began {time.monotonic()!r}\n".encode())
        yield
    finally:
        os.write(fifo, f"ended {time.monotonic()!r}\n".encode())
        os.close(fifo)


def hold(path: str) -> None:
    """Run for an hour: `hold` of a library without async handlers."""
    with holding(path):
        time.sleep(HELD)


async def hold_asyncio(path: str) -> None:
    """Run for an hour, or until cancelled, on asyncio."""
    with holding(path):
        await asyncio.sleep(HELD)


class Producer:
    """What a contender's file implements. Methods are coroutines, or plain ones for a library that blocks."""

    def send(self, function: str, argument: str) -> Any:
        """Enqueue a call of ``noop``, ``ping`` or ``hold``; return what `cancel` needs."""
        raise NotImplementedError

    send_many: Callable[[list[str]], Any] | None = None
    """Enqueue calls of ``noop`` by the library's own bulk call; None: it has none."""
    cancel: Callable[[Any], Any] | None = None
    """Cancel a call that runs; None: the library cannot, from another process."""


def describe(*, packages: list[str], worker: list[str], settings: list[str], every: int, at_least_once: bool) -> None:
    """Print what the harness and the table need to know.

    Args:
        packages: Distributions, whose versions are printed.
        worker: The command of the worker.
        settings: How producer and worker are set up, for the reader of the table.
        every: 1 if handlers run in several processes, 100 if all run in one.
        at_least_once: Whether a task of a killed worker is meant to run again.
    """
    from importlib.metadata import version

    versions = {name: version(name) for name in packages}
    told = {"versions": versions, "worker": worker, "settings": settings, "every": every, "redelivers": at_least_once}
    print(json.dumps(told))


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _reply(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class _Budget:
    """How many calls may still be sent, and until when. Numbers each."""

    def __init__(self, seconds: float, most: int) -> None:
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.most = most
        self.sent = 0
        self._numbers = itertools.count()

    def next(self) -> str | None:
        """The next payload; None: enough."""
        number = next(self._numbers)  # one C call, and so one number per thread
        late = number > 0 and time.monotonic() > self.ends
        return None if late or number >= self.most else payload(number)

    def next_many(self) -> list[str]:
        """The next payloads of a bulk request; empty: enough."""
        return [each for _ in range(BULK) if (each := self.next()) is not None]

    def tell(self) -> None:
        _reply(tasks=self.sent, seconds=time.monotonic() - self.began)


def run_blocking(producer: Producer) -> None:
    """Serve the protocol for a library whose calls block. 100 callers are 100 threads."""
    handle: Any = None
    for command in _commands():
        match command:
            case {"do": "enqueue", "how": how, "seconds": seconds, "most": most}:
                budget = _Budget(seconds, most)
                if how == "bulk":
                    _bulk_blocking(producer, budget)
                else:
                    _loops_blocking(producer, budget, CALLERS if how == "callers" else 1)
                budget.tell()
            case {"do": "ping"}:
                producer.send("ping", repr(time.monotonic()))
                _reply()
            case {"do": "hold", "path": path}:
                handle = producer.send("hold", path)
                _reply()
            case {"do": "cancel"}:
                assert producer.cancel is not None
                at = time.monotonic()
                producer.cancel(handle)
                _reply(at=at)
            case {"do": "offers"}:
                _reply(bulk=producer.send_many is not None, cancel=producer.cancel is not None)


def _bulk_blocking(producer: Producer, budget: _Budget) -> None:
    assert producer.send_many is not None
    while many := budget.next_many():
        producer.send_many(many)
        budget.sent += len(many)


def _loops_blocking(producer: Producer, budget: _Budget, callers: int) -> None:
    sent = [0] * callers

    def loop(caller: int) -> None:
        while (each := budget.next()) is not None:
            producer.send("noop", each)
            sent[caller] += 1

    threads = [threading.Thread(target=loop, args=(caller,)) for caller in range(1, callers)]
    for thread in threads:
        thread.start()
    loop(0)
    for thread in threads:
        thread.join()
    budget.sent = sum(sent)


Gather = Callable[[int, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs so many instances of a coroutine function at once."""


async def _serve(producer: Producer, read: Callable[[], Awaitable[str]], gather: Gather) -> None:
    handle: Any = None
    while line := await read():
        match json.loads(line):
            case {"do": "enqueue", "how": how, "seconds": seconds, "most": most}:
                budget = _Budget(seconds, most)
                await _enqueue(producer, budget, how, gather)
                budget.tell()
            case {"do": "ping"}:
                await producer.send("ping", repr(time.monotonic()))
                _reply()
            case {"do": "hold", "path": path}:
                handle = await producer.send("hold", path)
                _reply()
            case {"do": "cancel"}:
                assert producer.cancel is not None
                at = time.monotonic()
                await producer.cancel(handle)
                _reply(at=at)
            case {"do": "offers"}:
                _reply(bulk=producer.send_many is not None, cancel=producer.cancel is not None)


async def _enqueue(producer: Producer, budget: _Budget, how: str, gather: Gather) -> None:
    async def loop() -> None:
        while (each := budget.next()) is not None:
            await producer.send("noop", each)
            budget.sent += 1

    if how == "one":
        await loop()
    elif how == "callers":
        await gather(CALLERS, loop)
    else:
        assert producer.send_many is not None
        while many := budget.next_many():
            await producer.send_many(many)
            budget.sent += len(many)


async def serve_asyncio(producer: Producer) -> None:
    """Serve the protocol under asyncio."""

    async def gather(count: int, function: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(function() for _ in range(count)))

    await _serve(producer, lambda: asyncio.to_thread(sys.stdin.readline), gather)


async def serve_trio(producer: Producer) -> None:
    """Serve the protocol under Trio."""
    import trio

    async def gather(count: int, function: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(function)

    await _serve(producer, lambda: trio.to_thread.run_sync(sys.stdin.readline), gather)
