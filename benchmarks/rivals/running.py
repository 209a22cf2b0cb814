"""A whole run: every contender in turns on one server, then what only takes time, side by side."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.nodes import free_port
from benchmarks.rivals import figures
from benchmarks.rivals.children import Failed
from benchmarks.rivals.environments import Prepared
from benchmarks.rivals.figures import Plan
from benchmarks.rivals.results import NOT_OFFERED, Entry
from benchmarks.rivals.stand import Stand
from worqr.embedded import EmbeddedServer

AT_ONCE = 2
"""Contenders that start at the same time where all are measured side by side."""
BUSY = frozenset({"drain", "enqueue", "memory", "pickup", "cancel"})
"""Subjects that need a quiet machine, and so are measured in turns."""
Say = Callable[[str], None]


@contextmanager
def on_server(prepared: Prepared, server: EmbeddedServer) -> Iterator[Stand]:
    """A stand with an empty server, whose folder is removed on leaving."""
    folder = Path(tempfile.mkdtemp(prefix="rivals-"))
    stand = Stand(prepared, server, folder)
    try:
        yield stand
    finally:
        with contextlib.suppress(redis.RedisError):
            stand.client.flushall()
        stand.close()
        shutil.rmtree(folder, ignore_errors=True)


def turn(prepared: Prepared, server: EmbeddedServer, plan: Plan, entry: Entry, subjects: frozenset[str]) -> None:
    """Measure one contender once. Its memory does not change from turn to turn, and is measured in the first."""
    if "memory" in subjects and "memory" not in entry.values:
        with on_server(prepared, server) as stand, noted(entry, {"memory"}):
            figures.memory(stand, plan, entry)
    if loads := subjects & {"drain", "enqueue"}:
        with on_server(prepared, server) as stand, noted(entry, loads):
            with stand.producer() as producer:
                waiting = figures.enqueue(producer, plan, entry, keep="enqueue" in subjects)
            if "drain" in subjects:
                figures.drain(stand, plan, entry, waiting)
    if asks := subjects & {"pickup", "cancel"}:
        with on_server(prepared, server) as stand, noted(entry, asks):
            answer(stand, plan, entry, subjects)


def answer(stand: Stand, plan: Plan, entry: Entry, subjects: frozenset[str]) -> None:
    """Measure how soon an idle worker does what it is asked."""
    with stand.producer() as producer, stand.worker() as log:
        stand.ready(producer, log)
        for _ in range(5):
            stand.ping(producer, figures.START_WITHIN)
        if "pickup" in subjects:
            figures.pickup(stand, producer, plan, entry)
        if "cancel" in subjects:
            if producer.ask("offers")["cancel"]:
                figures.cancel(stand, producer, plan, entry)
            else:
                entry.texts["cancel"] = NOT_OFFERED


@contextmanager
def noted(entry: Entry, subjects: Set[str]) -> Iterator[None]:
    """Keep the failure of a contender in its entry, and go on."""
    try:
        yield
    except Failed as failure:
        entry.fail(subjects, str(failure))


def run(contenders: Sequence[tuple[Prepared, Entry]], plan: Plan, subjects: frozenset[str], say: Say) -> None:
    """Measure all of them."""
    if subjects & BUSY:
        with EmbeddedServer(port=free_port()) as server:
            for number in range(plan.turns):
                for offset in range(len(contenders)):
                    prepared, entry = contenders[(number + offset) % len(contenders)]
                    began = time.monotonic()
                    turn(prepared, server, plan, entry, subjects)
                    say(f"turn {number + 1} of {plan.turns}: {entry.title}, {time.monotonic() - began:.0f} s")
    if subjects - BUSY:
        say(f"side by side: {', '.join(sorted(subjects - BUSY))}")
        side_by_side(contenders, plan, subjects)


def side_by_side(contenders: Sequence[tuple[Prepared, Entry]], plan: Plan, subjects: frozenset[str]) -> None:
    """Measure each on a server of its own, all at the same time, because most of the time is waiting."""
    stop, gate = threading.Event(), threading.Semaphore(AT_ONCE)

    def one(prepared: Prepared, entry: Entry) -> None:
        with (
            EmbeddedServer(port=free_port()) as server,
            on_server(prepared, server) as stand,
            noted(entry, subjects - BUSY),
        ):
            figures.watched(stand, plan, entry, subjects, gate, stop)

    with ThreadPoolExecutor(max(1, len(contenders))) as pool:
        try:
            for done in [pool.submit(one, *pair) for pair in contenders]:
                done.result()
        finally:
            stop.set()
