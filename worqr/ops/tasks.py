"""The operations on the tasks of a queue: enqueue, claim, settle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from worqr.command import Argument, Command, Merge
from worqr.errors import at_max_length
from worqr.keys import QueueKeys
from worqr.lua import script
from worqr.ops.replies import (
    MAX_BYTES,
    MAX_ITEMS,
    MAX_SKIPPED,
    Reply,
    expect,
    new_call,
    pairs,
    status_word,
    text,
    wholes,
)
from worqr.records import RemoteError
from worqr.remote_error import fields_as_json
from worqr.stored_values import stored_word


@dataclass(frozen=True, slots=True)
class StartReply:
    """Reply of start_tasks: its status word, the first claim's fence number, and one entry per claim.

    With the words `short` and `limited`, it has the number of workers that wait for tasks of this queue, including this one. An
    entry is the payload of a plain task; for a job, the names and values of its record, then its id; None for a claim that is
    gone.
    """

    status: str
    first: int
    entries: list[Any]
    waiting_workers: int = 0


def enqueue(
    keys: QueueKeys,
    tasks: Sequence[bytes],
    *,
    front: bool = False,
    max_length: int | None = None,
    waiter: str = "",
    replicas: int = 0,
) -> Command[int]:
    """Add up to MAX_ITEMS tasks to the queue; return how many. Its reader raises QueueFull.

    If the queue is full, and a `waiter` is given, the server notes that it waits for room.
    """

    def read(reply: Reply) -> int:
        if reply[0] != b"ok" and status_word(reply) == "full":
            raise at_max_length(
                f"queue {keys.queue!r} holds {int(reply[1])} tasks, {len(tasks)} more are over its max_length of "
                f"{max_length}"
            )
        return int(reply[1])

    bound: int | str = -1 if max_length is None else max_length
    args = (f"{bound} {waiter}" if waiter else bound, 1 if front else 0, *tasks)
    number = len(tasks)
    size = len(tasks[0]) if number == 1 else sum(map(len, tasks))
    merge: Merge[int] | None = None
    if max_length is None and not front:
        merge = _ONE if number == 1 else Merge(number, _join_enqueues, number)
    base = keys.base
    return Command(_ENQUEUE, base, args, read, True, size, merge, replicas)


_ENQUEUE = script("enqueue")


def _join_enqueues(calls: Sequence[Command[int]]) -> Command[int]:
    """Return one enqueue of the tasks of several enqueues, in their order."""
    first = calls[0]
    args = (*first.args[:2], *(task for call in calls for task in call.args[2:]))
    return Command(_ENQUEUE, first.base, args, first.read, True, sum(call.size for call in calls))


_ONE = Merge(1, _join_enqueues, 1)


def enqueue_traced(plain: Command[int], meta: str) -> Command[int]:
    """Return an `enqueue` as a call that stores its tasks with the context of a trace, as their `meta`."""
    args = (*plain.args[:2], meta, *plain.args[2:])
    return replace(plain, script=script("enqueue_traced"), args=args, merge=None)


def start_tasks(keys: QueueKeys, worker: str, number: int, wanted: int) -> Command[StartReply]:
    """Claim up to `wanted` tasks; with 0, only pass a wake-up on to another worker."""

    def read(reply: Reply) -> StartReply:
        word = text(reply[0])
        if word in {"short", "limited"}:
            return StartReply(word, int(reply[1]), reply[3:], int(reply[2]))
        return StartReply(word, int(reply[1]) if len(reply) > 1 else 0, reply[2:])

    return Command(_START, keys.base, (worker, number, wanted, MAX_BYTES, MAX_SKIPPED), read)


_START = script("start_tasks")


def _read_refusals(reply: Reply) -> dict[int, str]:
    """Return the status words of the claims that did not end as requested, by claim."""
    if len(reply) == 1:
        return {}
    return {int(claim): text(word) for claim, word in pairs(reply[1:])}


Result = tuple[str, bytes]
"""An encoded result: the encoding (bytes, json, none) and the value."""


def finish_tasks(
    keys: QueueKeys, worker: str, claims: Sequence[int], results: Mapping[int, Result] | None = None
) -> Command[dict[int, str]]:
    """End up to MAX_ITEMS claims as finished; return the claims for which that failed (cancelled, mine, lost)."""
    if not results:
        return Command(_FINISH, keys.base, (worker, 0, *claims), _read_refusals)
    kept: list[Argument] = []
    for claim, (kind, value) in results.items():
        kept += (claim, kind, value)
    size = sum(len(value) for _, value in results.values())
    return Command(_FINISH, keys.base, (worker, len(results), *kept, *claims), _read_refusals, size=size)


_FINISH = script("finish_tasks")


def stop_tasks(keys: QueueKeys, worker: str, claims: Sequence[int]) -> Command[dict[int, str]]:
    """Give up to MAX_ITEMS claims back to the front of the queue; return the claims for which that failed."""
    return new_call("stop_tasks", keys.base, (worker, *claims), _read_refusals)


def file_tasks(keys: QueueKeys, worker: str, lanes: Mapping[int, str]) -> Command[dict[int, str]]:
    """Put up to MAX_ITEMS claims at the back of their lanes, uncounted; return the claims for which that failed.

    Args:
        keys: those of the queue.
        worker: the id of the worker.
        lanes: the lane of each claim. A task that is in a lane already goes back to its front.
    """
    args = (worker, *(part for each in lanes.items() for part in each))
    return new_call("file_tasks", keys.base, args, _read_refusals)


def retry_task(
    keys: QueueKeys,
    worker: str,
    claim: int,
    error: RemoteError,
    *,
    counter: Literal["failures", "stalls", "timeouts", ""],
    limit: int,
    since_ms: int | None = None,
    delay_ms: int = 0,
    run_at_ms: int | None = None,
    pause_ms: int | None = None,
) -> Command[str]:
    """Put the task at the back of the queue, now or when it is due. If `counter` reaches `limit`, fail it; if that is 0, in any
    case. `since_ms`: when its first run that failed has begun, which its record keeps.

    With `pause_ms`, put it at the front, uncounted, and pause the queue.
    """
    when: tuple[Argument, Argument] = (delay_ms, "-") if run_at_ms is None else ("-", run_at_ms)
    pause = "-" if pause_ms is None else pause_ms
    facts = (error.type, error.message, error.traceback, fields_as_json(error))
    args = (worker, claim, counter, limit, *when, *facts, pause, "-" if since_ms is None else since_ms)
    read = expect("given", "aside", "cancelled", "dropped", "gone", "mine", "lost")
    return new_call("retry_task", keys.base, args, read)


def fail_task(
    keys: QueueKeys, worker: str, claim: int, error: RemoteError, *, undecodable: bool = False
) -> Command[str]:
    """Move the task to the dead-letter queue."""
    kind = "undecodable" if undecodable else "failed"
    args = (worker, claim, stored_word(kind), error.type, error.message, error.traceback, fields_as_json(error))
    read = expect("aside", "cancelled", "gone", "mine", "lost")
    return new_call("fail_task", keys.base, args, read)


def note_progress(keys: QueueKeys, worker: str, reports: Sequence[tuple[int, float | None, str]]) -> Command[int]:
    """Store the progress and message of runs, as (claim, progress, message); return how many of these claims still run."""
    args: list[Argument] = [worker]
    for claim, progress, message in reports:
        args += (claim, "" if progress is None else repr(progress), message)

    def read(reply: Reply) -> int:
        return int(reply[1])

    return new_call("note_progress", keys.base, tuple(args), read)


def save_state(
    keys: QueueKeys, worker: str, claim: int, number: int, step: str, value: bytes, *, progress: bool = False
) -> Command[str]:
    """Store the bytes that a run saves, or the result of a step, for later runs of its job: ok, full or lost.

    Args:
        keys: those of the queue.
        worker: the id of the worker.
        claim: the claim of the run.
        number: of a save, higher than that of the save before it; 0 for a step. Of a failed try of a step, the number of the try.
        step: the name of the step; empty for bytes.
        value: the bytes, the encoded result, or how the try failed.
        progress: the run has asked for all entries that it found in its record. If the step is new, the counters of the job
            begin anew.
    """
    args = (worker, claim, number, step, value, int(progress))
    return new_call("save_state", keys.base, args, expect("ok", "full", "lost"), size=len(value))


def note_runs(
    keys: QueueKeys, worker: str, number: int, counts: Mapping[str, int], ended: Sequence[bytes] = (), keep: int = 0
) -> Command[str]:
    """Add counts of runs (`worqr.history_records`) to the totals of the queue: ok, or gone.

    Args:
        keys: those of the queue.
        worker: the id of the worker.
        number: grows with each request.
        counts: how much to add to each field.
        ended: runs to store (`worqr.records`), at most MAX_ITEMS, the last one at the end.
        keep: how many of them the queue keeps.
    """
    args = (worker, number, keep, b"\n".join(ended), *(part for each in counts.items() for part in each))
    return new_call("note_runs", keys.base, args, expect("ok", "gone"))


def reconcile(keys: QueueKeys, worker: str, named: Sequence[int] = ()) -> Command[tuple[list[int], list[int]] | None]:
    """Return the (marked, gone) claims of the worker; None if it does not serve the queue."""

    def read(reply: Reply) -> tuple[list[int], list[int]] | None:
        if status_word(reply) == "not_serving":
            return None
        marked = int(reply[1])
        return wholes(reply[2 : 2 + marked]), wholes(reply[2 + marked :])

    return new_call("reconcile", keys.base, (worker, *named), read)


def list_own_claims(keys: QueueKeys, worker: str) -> Command[list[int] | None]:
    """Return up to `MAX_ITEMS` claims of the worker, oldest first; None if it does not serve the queue."""

    def read(reply: Reply) -> list[int] | None:
        return None if status_word(reply) == "not_serving" else wholes(reply[1:])

    return new_call("list_own_claims", keys.base, (worker, MAX_ITEMS), read)
