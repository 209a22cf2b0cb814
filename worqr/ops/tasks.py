"""The operations on the tasks and jobs of a queue: enqueue, dispatch, claim, settle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from worqr.command import (
    MAX_BYTES,
    MAX_ITEMS,
    MAX_SKIPPED,
    Argument,
    Command,
    Merge,
    Reply,
    error_of,
    expect,
    expect_ok,
    new_call,
    pairs,
    status_word,
    text,
    texts,
    waits_for_of,
    wholes,
)
from worqr.errors import at_max_length
from worqr.keys import LimitKeys, QueueKeys
from worqr.lua import script
from worqr.ops.operators import CancelReply
from worqr.records import RemoteError
from worqr.remote_error import fields_as_json
from worqr.stored_values import finite, stored_word, whole


class StartReply(msgspec.Struct, frozen=True):
    """Reply of start_tasks: its status word, the first claim's fence number, and one entry per claim.

    With the words `short`, `limited` and `resting`, it has the number of workers that wait for tasks of this queue, including
    this one. An entry is the payload of a plain task; for a job, the names and values of its record, then its id; None for a
    claim that is gone.
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
    base = keys.base
    if max_length is None and not front and len(tasks) == 1:
        return enqueue_one(keys, tasks[0], replicas)

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
    merge = Merge(number, _join_enqueues, number) if max_length is None and not front else None
    return Command(_ENQUEUE, base, args, read, True, sum(map(len, tasks)), merge, replicas)


def enqueue_one(keys: QueueKeys, task: bytes, replicas: int = 0) -> Command[int]:
    """Add one task to the back of the queue, as `enqueue` without a bound does."""
    return Command(_ENQUEUE, keys.base, (-1, 0, task), _read_number, True, len(task), _ONE, replicas)


def _read_number(reply: Reply) -> int:
    if reply[0] != b"ok":
        status_word(reply)
    return int(reply[1])


_ENQUEUE = script("enqueue")


def _join_enqueues(calls: Sequence[Command[int]]) -> Command[int]:
    """Return one enqueue of the tasks of several enqueues, in their order."""
    first = calls[0]
    args = (*first.args[:2], *[task for call in calls for task in call.args[2:]])
    return Command(_ENQUEUE, first.base, args, first.read, True, sum([call.size for call in calls]))


_ONE = Merge(1, _join_enqueues, 1)


def enqueue_traced(plain: Command[int], meta: str) -> Command[int]:
    """Return an `enqueue` as a call that stores its tasks with the context of a trace, as their `meta`."""
    args = (*plain.args[:2], meta, *plain.args[2:])
    return msgspec.structs.replace(plain, script=script("enqueue_traced"), args=args, merge=None)


def start_tasks(keys: QueueKeys, worker: str, number: int, wanted: int) -> Command[StartReply]:
    """Claim up to `wanted` tasks; with 0, only pass a wake-up on to another worker."""

    def read(reply: Reply) -> StartReply:
        word = text(reply[0])
        if word in {"short", "limited", "resting"}:
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


class Ended(dict[int, str]):
    """Reply of finish_tasks: the status words of the claims that did not end as finished, by claim: cancelled, mine, lost.

    Attributes:
        waiting_workers: how many workers wait for tasks, with this one; 0: it did not join them.
    """

    waiting_workers: int = 0


def _read_ended(reply: Reply) -> Ended:
    if text(reply[0]) != "waits":
        return Ended(_read_refusals(reply))
    ended = Ended(_read_refusals(reply[1:]))
    ended.waiting_workers = int(reply[1])
    return ended


def finish_tasks(
    keys: QueueKeys,
    worker: str,
    claims: Sequence[int],
    results: Mapping[int, Result] | None = None,
    *,
    rejoins: int | None = None,
) -> Command[Ended]:
    """End up to MAX_ITEMS claims as finished. With `rejoins`, the number of the worker's last start on this queue, the worker
    joins those that wait for tasks, if none is left and it has sent no start since.
    """
    after = "" if rejoins is None else rejoins
    if not results:
        return Command(_FINISH, keys.base, (worker, after, 0, *claims), _read_ended)
    kept: list[Argument] = []
    for claim, (kind, value) in results.items():
        kept += (claim, kind, value)
    size = sum(len(value) for _, value in results.values())
    return Command(_FINISH, keys.base, (worker, after, len(results), *kept, *claims), _read_ended, size=size)


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


class Progress(NamedTuple):
    """What a run reports. An empty `value` leaves what is stored; another one has its encoding and a space in front."""

    claim: int
    done: float | None
    message: str
    value: bytes = b""


def note_progress(
    keys: QueueKeys, worker: str, reports: Sequence[tuple[int, float | None, str] | Progress]
) -> Command[int]:
    """Store what runs report; return how many of their claims still run."""
    args: list[Argument] = [worker]
    for claim, progress, message, *value in reports:
        args += (claim, "" if progress is None else repr(progress), message, *(value or [b""]))

    def read(reply: Reply) -> int:
        return int(reply[1])

    return new_call("note_progress", keys.base, tuple(args), read)


def save_state(
    keys: QueueKeys,
    worker: str,
    claim: int,
    number: int,
    step: str,
    value: bytes,
    *,
    progress: bool = False,
    took: int | None = None,
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
        took: ms that the step of a workflow took, and the job is one from now on. None: another job, or not known.
    """
    args = (worker, claim, number, step, value, int(progress), "" if took is None else took)
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


# A job: dispatch it, promote it when it is due, cancel it by its id, read its state and its result.

# Everything that is stored about one job, and its whole payload.


HEAD_BYTES: Final = 4096
"""Bytes of a payload that are returned with the record of its job."""
READ_BYTES: Final = 1 << 20
"""Bytes of payload that the server reads for one record and its dead letters: it reads 1 MiB in about 6 ms."""
MANY_RECORDS: Final = 10
"""Dead-letter records of one id that are read, at most; and other jobs with its payload."""


class Stored(msgspec.Struct, frozen=True):
    """One record: its fields, and the bytes of its whole payload. The field `task` has the beginning of it."""

    size: int
    fields: Mapping[str, bytes]


class StoredResult(msgspec.Struct, frozen=True):
    """The fields of a result without its value, and the ms until it expires."""

    left_ms: int
    fields: Mapping[str, bytes]


class Everything(msgspec.Struct, frozen=True):
    """Reply of read_job. `run` and `job` are None if the id does not run, or does not wait; `reserved_ms` is -1 if it is free.
    `results` are the newest and the one before it; None: it is not stored. `twins` are other jobs that were plain tasks with the
    same payload.
    """

    cancelling: bool
    reserved_ms: int
    run: Stored | None
    job: Stored | None
    results: list[StoredResult | None]
    records: list[Stored]
    twins: list[str]


def _fields(flat: Sequence[Any]) -> dict[str, bytes]:
    return {text(name): value for name, value in pairs(flat) if value is not None}


def _stored(entry: Sequence[Any]) -> Stored:
    return Stored(int(entry[0]), _fields(entry[1:]))


def read_job(keys: QueueKeys, id: str) -> Command[Everything]:
    """Return all records of an id, its last two results, and its newest dead-letter records."""

    def read(reply: Reply) -> Everything:
        status_word(reply)
        _, cancelling, reserved_ms, run, job, results, records, twins = reply
        return Everything(
            bool(cancelling),
            int(reserved_ms),
            _stored(run) if run else None,
            _stored(job) if job else None,
            [StoredResult(int(entry[0]), _fields(entry[1:])) if entry else None for entry in results],
            [_stored(entry) for entry in records],
            texts(twins),
        )

    return new_call("read_job", keys.base, (id, HEAD_BYTES, READ_BYTES, MANY_RECORDS), read)


def read_payload(keys: QueueKeys, id: str = "", claim: int | None = None) -> Command[bytes | None]:
    """Return the whole payload of the task that an id or a claim names; None if there is no such task."""

    def read(reply: Reply) -> bytes | None:
        return None if status_word(reply) == "gone" else bytes(reply[1])

    return new_call("read_payload", keys.base, (id, "" if claim is None else claim), read)


_DISPATCH: Final = script("dispatch_jobs")


class Dispatched(msgspec.Struct, frozen=True):
    """The outcome of one dispatch (created, updated, blocked, unchanged, duplicate, full or sent), with the id and number of its
    handle.
    """

    outcome: str
    id: str
    number: int


NewJob = tuple[Mapping[str, object], bytes]
"""The options of one dispatch, as ``jobs.lua`` names them, and its payload."""

_encode = msgspec.msgpack.Encoder().encode


def _dispatched(entry: Sequence[Any]) -> Dispatched:
    outcome, name, number = entry
    return Dispatched(text(outcome), text(name), int(number))


def _read_all(reply: Reply) -> list[Dispatched]:
    status_word(reply)
    return [_dispatched(entry) for entry in reply[1:]]


def dispatch_jobs(
    keys: QueueKeys,
    jobs: Sequence[NewJob],
    *,
    all_or_none: bool = False,
    replicas: int = 0,
    not_after: float = math.inf,
) -> Command[list[Dispatched]]:
    """Store up to MAX_ITEMS jobs. With `all_or_none`, store all or none; the last outcome then says which job was refused. With a
    `not_after`, it is not sent after that moment, and not joined with other calls.
    """
    args: list[Argument] = [int(all_or_none)]
    for options, task in jobs:
        args += (_encode(options), task)
    size = len(jobs[0][1]) if len(jobs) == 1 else sum(len(task) for _, task in jobs)
    merge: Merge[list[Dispatched]] | None = None
    if not all_or_none and not_after == math.inf:
        merge = _ONE_JOB if len(jobs) == 1 else Merge(len(jobs), _join, pick=_pick(len(jobs)))
    return Command(
        _DISPATCH,
        keys.base,
        tuple(args),
        _read_all,
        True,
        size,
        merge,
        replicas,
        not_after,
    )


def _join(calls: Sequence[Command[list[Dispatched]]]) -> Command[list[Dispatched]]:
    """Return one dispatch with the jobs of several dispatches, in their order."""
    first = calls[0]
    args = (first.args[0], *(arg for call in calls for arg in call.args[1:]))
    return Command(_DISPATCH, first.base, args, first.read, True, sum(call.size for call in calls))


def _pick(n: int) -> Callable[[list[Dispatched], int], list[Dispatched]]:
    def pick(value: list[Dispatched], before: int) -> list[Dispatched]:
        return value[before : before + n]

    return pick


_ONE_JOB: Final[Merge[list[Dispatched]]] = Merge(1, _join, pick=_pick(1))


def shorten_sent(keys: QueueKeys, rows: Sequence[str]) -> Command[str]:
    """Remember up to MAX_ITEMS rows of an outbox for ten minutes more: they were deleted from their database."""
    return new_call("shorten_sent", keys.base, tuple(rows), expect_ok)


class Promoted(NamedTuple):
    """Reply of promote_due: how many jobs were moved, the ms until there is more to do (None: not known), and whether the queue
    has messages for other queues, or batches to look at.
    """

    number: int
    next_in_ms: int | None
    needs_relay: bool


def promote_due(keys: QueueKeys, limit: int = MAX_ITEMS) -> Command[Promoted]:
    """Move up to `limit` due jobs into the queue."""

    def read(reply: Reply) -> Promoted:
        number, next_in, needs_relay = (int(part) for part in reply[1:])
        return Promoted(number, None if next_in < 0 else next_in, bool(needs_relay))

    return new_call("promote_due", keys.base, (limit,), read)


def promote_jobs(keys: QueueKeys, ids: Sequence[str]) -> Command[int]:
    """Make up to MAX_ITEMS scheduled jobs due now; return how many were."""

    def read(reply: Reply) -> int:
        status_word(reply)
        return int(reply[1])

    return new_call("promote_jobs", keys.base, tuple(ids), read, numbered=True)


def cancel_job(keys: QueueKeys, id: str, reason: str) -> Command[CancelReply]:
    """Cancel a job in any state."""

    def read(reply: Reply) -> CancelReply:
        status_word(reply)
        return CancelReply(False, int(reply[1]), wholes(reply[2:]), "-", "-")

    return new_call("cancel_job", keys.base, (id, reason), read, numbered=True)


@dataclass(frozen=True, slots=True)
class ResultReply:
    """Reply of read_result: its status word and the values that follow it."""

    status: str
    values: list[Any]


def read_result(keys: QueueKeys, id: str, number: int) -> Command[ResultReply]:
    """Return how the job ended, or whether its result will be kept; `number` as in `Dispatched`, 0: the newest dispatch."""

    def read(reply: Reply) -> ResultReply:
        return ResultReply(status_word(reply), reply[1:])

    return new_call("read_result", keys.base, (number, id), read)


@dataclass(frozen=True, slots=True)
class JobState:
    """Reply of job_status. A field is None if it is unknown or does not apply."""

    state: str
    claim: int | None = None
    worker: str | None = None
    run_at_ms: int | None = None
    progress: float | None = None
    message: str = ""
    failures: int = 0
    attempts: int = 0
    error: RemoteError | None = None
    waits_for: str = ""
    value: bytes = b""


def job_status(keys: QueueKeys, id: str, number: int) -> Command[JobState]:
    """Return the state of the job; `number` as in `Dispatched`, 0: the newest dispatch."""

    def read(reply: Reply) -> JobState:
        word = status_word(reply)
        if len(reply) == 1:
            return JobState(word)
        claim, worker, run_at, progress, message, failures, attempts, error_type, error_message, value = reply[1:]
        return JobState(
            state=word,
            claim=whole(claim),
            worker=text(worker) if worker else None,
            run_at_ms=whole(run_at),
            progress=finite(progress),
            message=text(message or ""),
            failures=whole(failures, 0),
            attempts=whole(attempts, 0),
            error=error_of(error_type, error_message),
            waits_for=waits_for_of(error_type, error_message),
            value=bytes(value or b""),
        )

    return new_call("job_status", keys.base, (number, id), read)


# Permits of named limits.


class PermitReply(msgspec.Struct, frozen=True):
    """Reply of take_permits.

    Attributes:
        word: ``ok``, ``wait``, ``never`` or ``unknown``.
        number: with ``ok`` how many were granted, with ``wait`` in how many ms to ask again, with ``never`` the highest cost that
            is possible.
        other: the limits of another program, which have been replaced; empty if there were none.
    """

    word: str
    number: int = 0
    other: str = ""


def take_permits(
    keys: LimitKeys, limits: str, permits: Sequence[str], cost: int, lease_ms: int, waiting: int = 1
) -> Command[PermitReply]:
    """Take permits of a named limit, as many as may be started now, from the first on.

    Args:
        keys: of the limit.
        limits: see `worqr.limits`; empty: those of other programs.
        permits: a unique text for each.
        cost: of each.
        lease_ms: for how long they are held, unless they are renewed.
        waiting: how many callers wait if none is granted.
    """

    def read(reply: Reply) -> PermitReply:
        match status_word(reply):
            case "ok" | "wait" as word:
                return PermitReply(word, int(reply[1]), text(reply[2]))
            case "never":
                return PermitReply("never", int(reply[1]))
            case word:
                return PermitReply(word)

    return new_call("take_permits", keys.base, (limits, cost, lease_ms, waiting, *permits), read)


def return_permit(keys: LimitKeys, permit: str, used: int | None = None) -> Command[bool]:
    """Give a permit back, or give up waiting for it. `used` replaces its cost. Return False if it was not held."""
    args = (permit, "" if used is None else used)
    return new_call("return_permit", keys.base, args, lambda reply: status_word(reply) == "ok")


def renew_permits(keys: LimitKeys, permits: Sequence[str], lease_ms: int) -> Command[str]:
    """Hold permits for another lease."""
    return new_call("renew_permits", keys.base, (lease_ms, *permits), expect_ok)


class LimitUse(msgspec.Struct, frozen=True):
    """Reply of look_at_limit.

    Attributes:
        limits: as text (`worqr.limits`).
        held: permits that programs hold.
        expired: permits among them that were not renewed in time, and are free.
        waiting: callers that wait.
        used: what each rate has started in its period, in the order of `limits`.
    """

    limits: str
    held: int
    expired: int
    waiting: int
    used: Sequence[int]


def look_at_limit(keys: LimitKeys) -> Command[LimitUse | None]:
    """Return how much of a named limit is in use; None if no program has used it in the last 30 days."""

    def read(reply: Reply) -> LimitUse | None:
        if status_word(reply) == "unknown":
            return None
        held, expired, waiting, *used = map(int, reply[2:])
        return LimitUse(text(reply[1]), held, expired, waiting, used)

    return new_call("look_at_limit", keys.base, (), read)
