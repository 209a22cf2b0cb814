"""A job: dispatch it, promote it when it is due, cancel it by its id, read its state and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from worqr.command import Argument, Command, Merge
from worqr.keys import QueueKeys
from worqr.lua import script
from worqr.ops.operators import CancelReply
from worqr.ops.replies import (
    MAX_ITEMS,
    Reply,
    error_of,
    expect_ok,
    new_call,
    pairs,
    status_word,
    text,
    texts,
    waits_for_of,
    wholes,
)
from worqr.records import RemoteError
from worqr.stored_values import finite, whole

# Everything that is stored about one job, and its whole payload.


HEAD_BYTES: Final = 4096
"""Bytes of a payload that are returned with the record of its job."""
READ_BYTES: Final = 1 << 20
"""Bytes of payload that the server reads for one record and its dead letters: it reads 1 MiB in about 6 ms."""
MANY_RECORDS: Final = 10
"""Dead-letter records of one id that are read, at most; and other jobs with its payload."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One record: its fields, and the bytes of its whole payload. The field `task` has the beginning of it."""

    size: int
    fields: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The fields of a result without its value, and the ms until it expires."""

    left_ms: int
    fields: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Everything:
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


@dataclass(frozen=True, slots=True)
class Dispatched:
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
        merge = _ONE if len(jobs) == 1 else Merge(len(jobs), _join, pick=_pick(len(jobs)))
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


_ONE: Final[Merge[list[Dispatched]]] = Merge(1, _join, pick=_pick(1))


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


def job_status(keys: QueueKeys, id: str, number: int) -> Command[JobState]:
    """Return the state of the job; `number` as in `Dispatched`, 0: the newest dispatch."""

    def read(reply: Reply) -> JobState:
        word = status_word(reply)
        if len(reply) == 1:
            return JobState(word)
        claim, worker, run_at, progress, message, failures, attempts, error_type, error_message = reply[1:]
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
        )

    return new_call("job_status", keys.base, (number, id), read)
