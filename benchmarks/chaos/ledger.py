"""The ledger: one file per process, one JSON object per line, appended with a single write and never flushed to disk.

A process that is killed loses no line that it has written: the kernel has it. ``t`` is the machine's boot time in seconds, which
all processes share and no clock change affects. `ENTRIES` lists what is written, by whom, and with which facts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

ENTRIES: Final = {
    # producers
    "send": "before a request: call, queue, tasks; of jobs also id, delay, keeps_data, batch, follows; of waiting calls wait",
    "acked": "the request was acknowledged: call; of jobs also outcome",
    "refused": "the request was refused, nothing may run: call, error",
    "unknown": "the producer cannot tell whether the request took effect: call, error",
    "gave_up": "the producer cancelled its request, which may still take effect: call",
    "opened": "a batch was opened: batch, parent",
    "retry": "before the failed jobs of a batch, or a failed workflow, are put back: call, batch (or the task)",
    "retried": "they were put back: call, count",
    "cancel": "before a cancellation: call, queue, task",
    "cancelled": "the cancellation was acknowledged: call, waiting, running",
    "signal": "before an event is sent to a workflow: call, queue, task, value",
    "signalled": "the server has answered: call, answer",
    "end_wait": "before a wait of a workflow is ended: call, queue, task, name",
    "wait_ended": "the server has answered: call, answer",
    "result": "a wait for a result ended: queue, task, outcome, value",
    # peers
    "registered": "the peer has a worker id, the first or a new one: worker",
    "began": "a run began: queue, task, id, fence; of firings also nominal (ms), of laned jobs lane, of `saves` saved",
    "saved": "the server acknowledged what a run saved: queue, fence, value",
    "step": "a step calls its function: queue, fence, name",
    "stepped": "a step returned, so the server has its result: queue, fence, name, value",
    "waited": "a wait of a workflow returned: queue, fence, name, value",
    "ended": "a run ended: queue, fence, how, counted",
    "settled": "a claim held by hand was settled: queue, fence, answer",
    "buried": "a failure handler was called: queue, task, reason",
    # both
    "gap": "the process did not get the CPU: begin, end",
    "leaving": "the process was told to leave",
    "left": "the process left in good order",
    "left_queue": "the peer left a queue, and goes on with the others: queue; at, when it began to leave",
    "log": "worqr logged a warning or an error: level, text",
    # the world
    "fault": "a fault was injected: kind, who; only for the report",
    "killed": "SIGKILL is about to be sent: who",
    "froze": "SIGSTOP is about to be sent: who",
    "thawed": "SIGCONT was sent: who",
    "terminated": "SIGTERM is about to be sent: who",
    "length": "how many tasks wait in the queue `room`, read from the server: waiting",
    "trouble": "the server or a connection did not work: begin, end, who (None: everybody), why",
    "failover": "a primary may have been replaced without its last writes: begin, end",
    "clock": "the server's wall clock was moved: offset in seconds, against the true time",
    "calm": "no more faults: server_ms, the server's time; epoch, the server's time minus boot time in seconds",
    "undrained": "a queue was not empty when patience ended: queue, left",
    "committed": "a line of the database that was committed, with a row of the outbox: queue, task",
    "silent": "a schedule did not fire any more when patience ended: schedule",
    "dead": "a dead-letter entry found at the end: queue, task, id, reason",
    "batch": "a batch found at the end: the facts of `history.Batch`",
    "key": "a key found at the end: name, type, expires (seconds; None: never)",
    "died": "a process ended by itself or with an error: who, code",
    "hung": "a process did not end within patience: who",
}
"""The meaning of each entry, and its facts."""


class Entry(NamedTuple):
    """One line of the ledger, with the name of the process that wrote it."""

    source: str
    t: float
    what: str
    facts: dict[str, Any]


def now() -> float:
    """Seconds since the machine started, the same in all processes."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Ledger:
    """One process's own file. `write` may be called from any thread."""

    def __init__(self, folder: Path, source: str, part: str = "") -> None:
        name = f"{source}.{part}.ledger" if part else f"{source}.ledger"
        self._file = os.open(folder / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, what: str, **facts: Any) -> None:
        line = msgspec.json.encode({"t": round(now(), 6), "what": what, **facts})
        os.write(self._file, line + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> Iterator[Entry]:
    """All entries of all processes, file by file; within a file in the order of writing."""
    for path in sorted(folder.glob("*.ledger")):
        source = path.name.partition(".")[0]
        with path.open("rb") as lines:
            for line in lines:
                facts = msgspec.json.decode(line)
                yield Entry(source, facts.pop("t"), facts.pop("what"), facts)


NEAR: Final = 2.0
"""Seconds around what a violation mentions in which the fate of its processes and the trouble of the server are shown, too."""
FATES: Final = frozenset({"killed", "froze", "thawed", "terminated", "died", "registered", "leaving", "left", "gap"})
WEATHER: Final = frozenset({"trouble", "failover", "clock"})


def lines_about(folder: Path, words: set[str | int], at_most: int = 40) -> list[str]:
    """The ledger's lines about `words`, by time: the words' own, the ends of their runs, the replies to their requests, and what
    happened to the processes and the server meanwhile.
    """
    named = [entry for entry in read(folder) if _mentions(entry, words)]
    if not named:
        return []
    begin, end = min(entry.t for entry in named) - NEAR, max(entry.t for entry in named) + NEAR
    fences = {entry.facts.get("fence") for entry in named} - {None}
    calls = {(entry.source, entry.facts["call"]) for entry in named if "call" in entry.facts}
    processes = {entry.source for entry in named} - {"world"}
    found: list[Entry] = []
    for entry in read(folder):
        _, t, what, facts = entry
        is_near = begin <= t <= end
        who = facts.get("who", entry.source)
        if (
            _mentions(entry, words)
            or facts.get("fence") in fences
            or (entry.source, facts.get("call")) in calls
            or (is_near and what in FATES and who in processes)
            or (is_near and what in WEATHER and (who is None or who in processes or what == "clock"))
        ):
            found.append(entry)
    return [_told(entry) for entry in sorted(found, key=lambda entry: entry.t)[:at_most]]


def _mentions(entry: Entry, words: set[str | int]) -> bool:
    return any(
        not words.isdisjoint(value) if isinstance(value, list) else name != "call" and value in words
        for name, value in entry.facts.items()
        if not isinstance(value, dict)
    )


def _told(entry: Entry) -> str:
    told = " ".join(f"{name}={value!r}" for name, value in entry.facts.items() if value is not None)
    return f"{entry.t:.3f} {entry.source} {entry.what} {told}"
