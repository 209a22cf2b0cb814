"""How each figure is measured."""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.measuring import percentile
from benchmarks.rivals.children import Failed, Producer, end_of
from benchmarks.rivals.results import LOST, NOT_OFFERED, Entry
from benchmarks.rivals.stand import STAMP, Hold, Stand

SLOW = 50.0
"""Milliseconds; what takes longer is probably polled, and gets pauses of random length, so that it meets any phase."""
START_WITHIN = 60.0
ENOUGH = 10
"""Stamps of a drain that tell a rate."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    turns: int = 3
    enqueue: float = 0.7
    """Seconds of each way to enqueue."""
    most: int = 150_000
    """Tasks at most, of each way to enqueue."""
    drain: float = 2.0
    """Seconds of a drain, if there are enough tasks."""
    pings: int = 300
    """Pings at most. With 100 of them, the p99 would be the second-longest: luck rather than a figure."""
    pickup: float = 6.0
    """Seconds of pings at most."""
    cancels: int = 10
    cancel: float = 5.0
    idle: float = 15.0
    settle: float = 3.0
    """Seconds between the start of an idle worker and the first counted command."""
    recovery: float = 120.0
    """Seconds to wait for the second run of a task."""


QUICK = Plan(1, 0.1, 1000, 0.3, 10, 2.0, 3, 2.0, 1.0, 0.2, 60.0)


def enqueue(producer: Producer, plan: Plan, entry: Entry, *, keep: bool) -> int:
    """Enqueue in each way, and keep the rates unless the tasks are only for a drain; return how many tasks wait now."""
    bulk = bool(producer.ask("offers")["bulk"])
    fastest = "bulk" if bulk else "callers"
    sent = 0
    for how in (fastest, "one", "callers", "bulk") if keep else (fastest,):
        if how == "bulk" and not bulk:
            entry.texts["bulk"] = NOT_OFFERED
            continue
        warming = keep and not sent
        seconds = plan.enqueue / 3 if warming else plan.enqueue
        reply = producer.ask("enqueue", within=START_WITHIN + seconds, how=how, seconds=seconds, most=plan.most)
        if keep and not warming:
            entry.add(how, reply["tasks"] / reply["seconds"])
        sent += reply["tasks"]
    return sent


def memory(stand: Stand, plan: Plan, entry: Entry) -> None:
    """Keep the bytes per waiting task. The server is asked while the producer is not connected."""
    before = 0
    for most in (100, plan.most):  # the first time for what stays, such as scripts
        stand.client.flushall()
        before = stand.memory()
        with stand.producer() as producer:
            how = "bulk" if producer.ask("offers")["bulk"] else "callers"
            sent = int(producer.ask("enqueue", how=how, seconds=plan.enqueue, most=most)["tasks"])
    entry.add("memory", (stand.memory() - before) / sent)
    stand.client.flushall()


def drain(stand: Stand, plan: Plan, entry: Entry, waiting: int) -> None:
    """Start a worker on a full queue; keep its rate after a tenth of the tasks that it ran.

    Raises:
        Failed: It ran none, or too few to tell.
    """
    every = int(stand.prepared.about["every"])
    with stand.worker() as log:
        began = time.monotonic()
        first = 0.0
        while (count := stand.tally.stat().st_size // STAMP.size) < waiting // every:
            now = time.monotonic()
            first = first or (now if count else 0.0)
            enough = count >= ENOUGH and now > first + plan.drain
            if enough or now > began + START_WITHIN:
                break
            time.sleep(0.02)
        stamps = stand.stamps()
    entry.add("drain", rate(stamps, every, f"of {waiting} tasks; {end_of(log)}"))


def rate(stamps: list[float], every: int, what: str) -> float:
    """Tasks per second, from a tenth of the stamps to the last; each stands for `every` tasks.

    Raises:
        Failed: There are fewer than three.
    """
    warm = len(stamps) // 10
    if len(stamps) - warm < 3:
        raise Failed(f"the worker ran only {len(stamps) * every} {what}")
    return (len(stamps) - 1 - warm) * every / (stamps[-1] - stamps[warm])


def pickup(stand: Stand, producer: Producer, plan: Plan, entry: Entry) -> None:
    """Ping an idle worker again and again."""
    samples: list[float] = []
    ends = time.monotonic() + plan.pickup
    while len(samples) < plan.pings and (time.monotonic() < ends or len(samples) < 3):
        polled = bool(samples) and statistics.median(samples) > SLOW
        time.sleep(random.uniform(0, 0.6) if polled else random.uniform(0.01, 0.02))
        samples.append(stand.ping(producer, START_WITHIN)[1])
    entry.add("pickup50", percentile(samples, 50))
    entry.add("pickup99", percentile(samples, 99))


def cancel(stand: Stand, producer: Producer, plan: Plan, entry: Entry) -> None:
    """Cancel calls of `hold`, one at a time.

    Raises:
        Failed: A handler did not start, or was not cancelled.
    """
    samples: list[float] = []
    ends = time.monotonic() + plan.cancel
    while len(samples) < plan.cancels and (time.monotonic() < ends or len(samples) < 3):
        with stand.hold(producer) as hold:
            if hold.began(START_WITHIN) is None:
                raise Failed(f"the handler did not start within {START_WITHIN:g} s")
            polled = bool(samples) and statistics.median(samples) > SLOW
            time.sleep(random.uniform(0, 1) if polled else 0.05)
            at = float(producer.ask("cancel")["at"])
            ended = hold.ended(START_WITHIN)
            if ended is None:
                raise Failed(f"the handler did not end within {START_WITHIN:g} s")
            samples.append((ended - at) * 1000)
    entry.add("cancel", statistics.median(samples))


def idle(stand: Stand, plan: Plan, entry: Entry, stop: threading.Event) -> None:
    """Count the commands that clients send while a worker has nothing to do."""
    stop.wait(plan.settle)
    entry.add("idle", monitored(stand.server.socket_path, plan.idle, stop) / plan.idle)


def monitored(path: str, seconds: float, stop: threading.Event) -> int:
    """How many commands the server gets from its clients; those that scripts call do not count."""
    count = -1  # its reply to MONITOR itself
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"MONITOR\r\n")
        ends = time.monotonic() + seconds
        rest = b""
        while not stop.is_set() and (left := ends - time.monotonic()) > 0:
            connection.settimeout(min(left, 0.5))
            try:
                data = connection.recv(1 << 20)
            except TimeoutError:
                continue
            *lines, rest = (rest + data).split(b"\r\n")
            count += sum(b" lua] " not in line[:60] for line in lines)
    return count


def watched(
    stand: Stand, plan: Plan, entry: Entry, subjects: Set[str], gate: threading.Semaphore, stop: threading.Event
) -> None:
    """Measure what takes time and no CPU: the commands of an idle worker, then how soon the task of a killed one runs again.

    Raises:
        Failed: A worker got no task.
    """
    with ExitStack() as first:
        producer = first.enter_context(stand.producer())
        doomed = first.enter_context(ExitStack())
        with gate:  # starting is the only part that needs the CPU
            if stop.is_set():
                return
            stand.ready(producer, doomed.enter_context(stand.worker("a")))
        if "idle" in subjects:
            idle(stand, plan, entry, stop)
        if "recovery" not in subjects or stop.is_set():
            return
        hold = first.enter_context(stand.hold(producer))
        if hold.began(START_WITHIN) is None:
            raise Failed(f"the handler did not start within {START_WITHIN:g} s")
        with gate:
            if stop.is_set():
                return
            log = first.enter_context(stand.worker("b"))
            stand.ready(producer, log, "b")
        killed = hold.again_after(doomed.close)
        again = again_within(hold, plan.recovery, stop)
    if again is not None:
        entry.add("recovery", again - killed)
    else:
        entry.texts["recovery"] = f"> {plan.recovery:g} s" if stand.prepared.about["redelivers"] else LOST


def again_within(hold: Hold, seconds: float, stop: threading.Event) -> float | None:
    """When the handler began again; None: not in time, or the run was interrupted."""
    ends = time.monotonic() + seconds
    while not stop.is_set() and time.monotonic() < ends:
        if (began := hold.began(0.5)) is not None:
            return began
    return None
