"""Read-only operations on a queue, with its history and its finished jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

import msgspec

from worqr.command import (
    MAX_BYTES,
    MAX_ITEMS,
    MAX_SKIPPED,
    Command,
    Reply,
    error_of,
    expect_ok,
    names_of,
    new_call,
    pairs,
    status_word,
    text,
    texts,
    waits_for_of,
    wholes,
)
from worqr.errors import WorqrBug
from worqr.history_records import Record, decode_record, decode_records
from worqr.keys import QueueKeys, RegistryKeys
from worqr.limits import Limit, parse_limits
from worqr.ops.operators import CANCEL_PAGE, CancelReply
from worqr.ops.tasks import JobState
from worqr.stored_values import exact, finite, public_name, readable, whole

Unstarted = Literal["waiting", "due", "suspended", "blocked"]
"""The states of a job that does not run."""

RUNNING_AT_ONCE: Final = 250
"""Running tasks that one script summarizes, at most: each takes the server about 15 us."""
FIND_DEPTH: Final = 100_000
"""Tasks at each end of a queue that one script compares with a payload: the server compares 100,000 in about 2 ms."""
HOLDERS_AT_ONCE: Final = 200
"""Workers whose claims one script looks at, at most."""
_NAMED_WORKERS: Final = 5
"""Workers with the same handler options that are named, at most."""
_NOT_TOTALS: Final = {"fence", "cleared", "cleared_why", "stale", "announced"}
"""Fields of the counters' hash that are not event counters."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """Reply of inspect. `workers` are the workers that serve the queue or leave it; `counts` are totals by name.

    Attributes:
        next_in_ms: ms until a job is due, or until a task that waits may start; None if neither is known.
        limits: those that hold.
        overridden: an operator has set them.
        room: how many tasks may start now; None for any number.
        opens_in_ms: ms until more may start, if only time makes room: a rate allows it, or a pause ends.
        lanes: lanes with tasks.
        held_lanes: those of them of which no task may start.
        only_held: tasks wait only in lanes of which none may start; then `room` is 0.
        lane_rules: how many fields say how lanes start. What workers declare is forgotten with the last of them.
        batches: how many batches have their home in the queue.
        needs_relay: there are messages for other queues, or batches that the leader is to look at.
        open_batches: how many of those batches have not ended; the script looks at 500 of them.
        due_soon: jobs that are due within 10 s.
        suspended: jobs whose run waits for an event, a time or other jobs.
        kept: jobs that have ended and are kept, with what they take in `kept_bytes`.
    """

    waiting: int
    due: int
    running: int
    failed: int
    undecodable: int
    paused: str | None
    trash: bool
    workers: list[str]
    counts: dict[str, int]
    blocked: int
    next_in_ms: int | None
    oldest_ms: int | None
    limits: tuple[Limit, ...] = ()
    overridden: bool = False
    room: int | None = None
    opens_in_ms: int | None = None
    lanes: int = 0
    held_lanes: int = 0
    lane_rules: int = 0
    only_held: bool = False
    batches: int = 0
    needs_relay: bool = False
    open_batches: int = 0
    due_soon: int = 0
    suspended: int = 0
    kept: int = 0
    kept_bytes: int = 0


def inspect(keys: QueueKeys) -> Command[Inspected]:
    """Return a snapshot of the queue's counters."""

    def read(reply: Reply) -> Inspected:
        waiting, due, running, failed, undecodable = (whole(part, 0) for part in reply[1:6])
        paused = None if reply[6] is None else text(reply[6])
        counts = {public_name(name): number for name, number in _totals(reply[9]).items() if name not in _NOT_TOTALS}
        next_in, oldest, room, opens_in = (whole(part) for part in (*reply[11:13], *reply[15:17]))
        declared, override = (None if part is None else text(part) for part in reply[13:15])
        limits = parse_limits(declared if override is None else override)
        return Inspected(
            *(waiting, due, running, failed, undecodable, paused, bool(reply[7]), names_of(reply[8]), counts),
            *(int(reply[10]), next_in, oldest, limits, override is not None, room, opens_in),
            *(int(reply[17]), int(reply[18]), int(reply[19]), bool(reply[20]), int(reply[21]), bool(reply[22])),
            *(int(reply[23]), int(reply[24]), int(reply[25]), int(reply[26]), int(reply[27])),
        )

    return new_call("inspect", keys.base, (), read)


def _totals(flat: Sequence[Any]) -> dict[str, int]:
    """Return the totals among names and values in turn. What another program has written there is no total."""
    return {text(name): number for name, value in pairs(flat) if (number := whole(value)) is not None}


def read_runs(keys: QueueKeys) -> Command[dict[str, int]]:
    """Return the totals of the runs of a queue, by field (`worqr.history_records.FIELDS`)."""

    def read(reply: Reply) -> dict[str, int]:
        status_word(reply)
        return _totals(reply[1])

    return new_call("read_runs", keys.base, (), read)


class ServedPolicy(msgspec.Struct, frozen=True):
    """Handler options with which workers serve a queue.

    `workers`: the first of them by id. `number`: how many they are. `fields`: the options as a job's record has them, with
    `keep_failed` and `on_failure`.
    """

    number: int
    workers: list[str]
    fields: dict[str, str]


def list_policies(
    keys: QueueKeys, limit: int = MAX_ITEMS, named: int = _NAMED_WORKERS
) -> Command[tuple[list[ServedPolicy], int]]:
    """Return the handler options of up to `limit` workers, those of most workers first; and how many workers are left out."""

    def group(number: int, kept: list[bytes | None], workers: list[bytes]) -> ServedPolicy:
        *stored, options = (None if value is None else text(value) for value in kept)
        fields = dict(zip(("max_stalls", "keep_failed", "on_failure", "result_ttl"), stored, strict=True))
        known = {name: value for name, value in fields.items() if value is not None}
        return ServedPolicy(int(number), texts(workers), {**_shown_options(options), **known})

    def read(reply: Reply) -> tuple[list[ServedPolicy], int]:
        status_word(reply)
        return sorted((group(*each) for each in reply[2:]), key=lambda found: -found.number), int(reply[1])

    return new_call("list_policies", keys.base, (limit, named), read)


def _shown_options(stored: str | None) -> dict[str, str]:
    """Decode what a worker stored for people. Of another application's value, nothing is shown."""
    try:
        found = json.loads(stored or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): str(value) for name, value in cast("dict[object, object]", found).items()}


class FoundTask(msgspec.Struct, frozen=True):
    """Reply of find_task: places in the queue, ids of jobs, and claims. `complete`: no task with this payload is left out."""

    complete: bool
    places: list[int]
    ids: list[str]
    claims: list[int]


def find_task(keys: QueueKeys, task: bytes, most: int) -> Command[FoundTask]:
    """Return where the tasks with this payload are: up to `most` that wait, that run, and that became jobs."""

    def read(reply: Reply) -> FoundTask:
        status_word(reply)
        _, complete, places, ids, claims = reply
        return FoundTask(bool(complete), [int(place) for place in places], texts(ids), wholes(claims[::2]))

    args = (task, most, FIND_DEPTH, MAX_ITEMS)
    return new_call("find_task", keys.base, args, read, size=len(task))


def list_ended(keys: QueueKeys, limit: int) -> Command[list[bytes]]:
    """Return up to `limit` of the runs that ended last (`worqr.records`), the last one first."""

    def read(reply: Reply) -> list[bytes]:
        status_word(reply)
        return reply[1:]

    return new_call("list_ended", keys.base, (limit,), read)


def list_tasks(keys: QueueKeys, limit: int, *, from_front: bool = False) -> Command[tuple[int, list[bytes]]]:
    """Count the waiting tasks; return up to `limit` payloads, newest first or in the order in which workers take them."""

    def read(reply: Reply) -> tuple[int, list[bytes]]:
        return int(reply[1]), reply[2:]

    args = (limit, 1 if from_front else 0, MAX_BYTES, MAX_SKIPPED)
    return new_call("list_tasks", keys.base, args, read)


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A summary of one task for display. A raw task has no id and no record, only the beginning of its payload.

    `size`: bytes of the whole payload, if they are known. `timeout_ms`: the job's own timeout, if it has one. `place`: its place
    among the waiting tasks of its `lane`, or of those outside lanes, 1 for the next; None if it does not wait.
    """

    id: str | None
    task: bytes
    state: JobState
    size: int | None = None
    timeout_ms: int | None = None
    place: int | None = None
    lane: str = ""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """One claim, as `list_running` returns it. `cancelling`: its cancellation was requested."""

    claim: int
    worker: str
    cancelling: bool
    summary: TaskSummary


class RunningPage(msgspec.Struct, frozen=True):
    """Reply of list_running: the tasks, the longest-running first, and the last worker whose claims were looked at."""

    more: bool
    worker: str
    tasks: list[RunningTask]


def _summary(
    state_word: str, tries: int, id: bytes | None, task: bytes, size: int | None, *record: bytes | None
) -> TaskSummary:
    """Decode one task. `tries`: its attempts beyond those that failed, stalled or timed out."""
    if id is None or not record:
        return TaskSummary(None, task, JobState(state_word, attempts=tries), size)
    _, claim, worker, run_at, progress, message, failures, stalls, timeouts, error_type, error_message, timeout = record
    state = JobState(
        state=state_word,
        claim=whole(claim),
        worker=text(worker) if worker else None,
        run_at_ms=whole(run_at),
        progress=finite(progress),
        message=text(message or b""),
        failures=whole(failures, 0),
        attempts=tries + sum(whole(count, 0) for count in (failures, stalls, timeouts)),
        error=error_of(error_type, error_message),
        waits_for=waits_for_of(error_type, error_message),
    )
    return TaskSummary(text(id), task, state, size, whole(timeout))


def list_running(
    keys: QueueKeys,
    limit: int = RUNNING_AT_ONCE,
    *,
    after_worker: str = "",
    after_claim: int = 0,
    before_claim: int = 0,
    only: str = "",
) -> Command[RunningPage]:
    """Return the longest-running tasks of some workers, those after `after_worker`. The claims limit which tasks count; 0: no
    limit. `only`: the one worker whose tasks count; empty: all.
    """

    def task(claim: bytes, worker: bytes, cancelling: int, fields: list[Any]) -> RunningTask:
        return RunningTask(whole(claim, 0), text(worker), bool(cancelling), _summary("active", 1, *fields))

    def read(reply: Reply) -> RunningPage:
        return RunningPage(status_word(reply) == "more", exact(reply[1]), [task(*entry) for entry in reply[2:]])

    args = (limit, MAX_BYTES, after_worker, after_claim, before_claim, HOLDERS_AT_ONCE, MAX_ITEMS, only)
    return new_call("list_running", keys.base, args, read)


class JobPage(msgspec.Struct, frozen=True):
    """Reply of list_jobs: list positions in order, each with its cursor. The summary is None if no job of the state is there."""

    more: bool
    positions: list[tuple[str, TaskSummary | None]]


def list_jobs(
    keys: QueueKeys, state: Unstarted, limit: int = MAX_ITEMS, *, after: str = "", from_end: bool = False
) -> Command[JobPage]:
    """Return one page of waiting, due, suspended or blocked jobs: up to `limit` positions after the cursor `after`. `from_end`:
    waiting jobs from the end of each list.
    """

    def position(
        cursor: bytes, fields: list[Any] | None = None, place: int | None = None
    ) -> tuple[str, TaskSummary | None]:
        at = exact(cursor)
        if fields is None:
            return at, None
        lane = readable(at.split(" ", 3)[3]) if place is not None and at.startswith("lane ") else ""
        return at, replace(_summary(state, 0, *fields), place=place, lane=lane)

    def read(reply: Reply) -> JobPage:
        return JobPage(status_word(reply) == "more", [position(*parts) for parts in reply[1:]])

    return new_call("list_jobs", keys.base, (state, limit, after, MAX_BYTES, int(from_end)), read)


def list_marks(keys: QueueKeys, claims: Sequence[int]) -> Command[list[int]]:
    """Return those of up to MAX_ITEMS claims whose cancellation was requested and is not settled yet."""

    def read(reply: Reply) -> list[int]:
        return wholes(reply[1:])

    return new_call("list_marks", keys.base, tuple(claims), read)


# The history of a queue: the leader stores records of it in the server, and callers read them (`worqr.history_records`).

HISTORY_EXPIRE_S: Final = 8 * 86400
"""How long a history is kept after its last record."""

Step = Literal[1, 10]
"""Minutes of a record: there are two rings."""


class StoredHistory(msgspec.Struct, frozen=True):
    """Reply of read_history: the queue at this moment, and the stored records: those asked for and the newest one before them."""

    now: Record
    records: list[Record]


def _record(stored: bytes) -> Record:
    record = decode_record(stored)
    if record is None:
        raise WorqrBug("the server returned an empty record of the history")
    return record


def sample_queue(
    keys: QueueKeys, *, create: bool = False, since: int = 0, age_ms: int | None = None
) -> Command[Record | None]:
    """Store a record in the history of a queue, and return it; None if the queue has no history.

    Args:
        keys: the keys of the queue.
        create: begin a history if there is none.
        since: as in a record.
        age_ms: for how long the oldest task has waited, for a plain task.
    """

    def read(reply: Reply) -> Record | None:
        return None if status_word(reply) == "missing" else _record(reply[1])

    args = (HISTORY_EXPIRE_S, 1 if create else 0, since, -1 if age_ms is None else age_ms)
    return new_call("sample_queue", keys.base, args, read)


def read_history(keys: QueueKeys, step: Step, number: int) -> Command[StoredHistory]:
    """Return the last records of a queue: those of this many minutes, or of ten times as many."""

    def read(reply: Reply) -> StoredHistory:
        parts = [part for part in reply[2:] if part is not None]
        return StoredHistory(_record(reply[1]), [record for part in parts for record in decode_records(part)])

    return new_call("read_history", keys.base, (step, number), read)


def drop_history(keys: QueueKeys) -> Command[str]:
    """Delete the history of a queue."""
    return new_call("drop_history", keys.base, (), expect_ok)


def note_histories(keys: RegistryKeys, names: Sequence[str] = (), *, dropped: str = "") -> Command[dict[str, int]]:
    """Note that these queues have a history, and that one has none any more. Return all that have one, with the minute of the
    last note of each.
    """

    def read(reply: Reply) -> dict[str, int]:
        status_word(reply)
        return {exact(name): whole(minute, 0) for name, minute in pairs(reply[1:])}

    return new_call("note_histories", keys.base, (HISTORY_EXPIRE_S, dropped, *names), read)


# Jobs that have ended and are kept, and jobs by their tags: list, cancel and forget them.

EndState = Literal["finished", "failed", "cancelled", "ended"]
"""How a job has ended; ``ended``: in any way."""
AnyState = Literal["waiting", "due", "suspended", "blocked", "active", "finished", "failed", "cancelled", "ended", ""]
FORGET_PAGE: Final = 200
"""Jobs that one script forgets, at most: each takes the server about 30 us."""
_TOO_LARGE: Final = "large"


@dataclass(frozen=True, slots=True)
class FoundJob:
    """One job of a list by tag, or of the kept jobs: its cursor, the number of its first dispatch, its state, and what is known
    of its end. `kept`: it is a kept job, which can be dropped by its number. `dead_letter`: the claim of its dead letter.
    """

    cursor: str
    id: str
    task: bytes
    size: int
    number: int
    state: JobState
    tags: tuple[str, ...]
    ended_ms: int | None
    kept: bool
    lane: str = ""
    dead_letter: int | None = None


class FoundPage(msgspec.Struct, frozen=True):
    """Reply of list_kept and list_tagged. `too_large`: not all jobs of the tag are in its set."""

    more: bool
    after: str
    jobs: list[FoundJob]
    too_large: bool = False


def _found(entry: Sequence[Any]) -> FoundJob:
    cursor, name, word, task, size, first, claim, worker, run_at, progress, message, *more = entry
    failures, stalls, timeouts, attempts, error_type, error_message, tags, ended, at, kept_size, lane, reason = more[
        :12
    ]
    is_live = text(word) in {"waiting", "due", "suspended", "blocked", "active"}
    tried = sum(whole(each, 0) for each in (failures, stalls, timeouts)) + (text(word) == "active")
    state = JobState(
        state=text(word),
        claim=whole(claim),
        worker=text(worker) if worker else None,
        run_at_ms=whole(run_at) if is_live else None,
        progress=finite(progress),
        message=text(message or (reason if text(word) == "cancelled" else b"") or b""),
        failures=whole(failures, 0),
        attempts=whole(attempts, tried),
        error=error_of(error_type, error_message),
        waits_for=waits_for_of(error_type, error_message) if is_live else "",
    )
    names = tuple(filter(None, text(tags or b"").split("\n")))
    ended_ms = None if is_live else whole(ended) or whole(at)
    number, is_kept = whole(first, 0), kept_size is not None
    shown = FoundJob(exact(cursor), text(name), task, int(size), number, state, names, ended_ms, is_kept)
    return replace(shown, lane=readable(text(lane or b"")), dead_letter=whole(more[12]) if len(more) > 12 else None)


def _page(reply: Reply) -> FoundPage:
    word = status_word(reply)
    if word == _TOO_LARGE:
        return FoundPage(False, "", [], too_large=True)
    return FoundPage(word == "more", exact(reply[1]), [_found(entry) for entry in reply[2:]])


def list_kept(
    keys: QueueKeys,
    state: EndState = "ended",
    limit: int = MAX_ITEMS,
    *,
    after: str = "",
    since_ms: int | None = None,
    tag: str = "",
) -> Command[FoundPage]:
    """Return one page of the kept jobs, the one that ended last first."""
    args = (state, limit, MAX_ITEMS, MAX_BYTES, after, "-inf" if since_ms is None else since_ms, tag)
    return new_call("list_kept", keys.base, args, _page)


def list_tagged(
    keys: QueueKeys,
    tag: str,
    state: AnyState = "",
    limit: int = MAX_ITEMS,
    *,
    after: str = "",
    since_ms: int | None = None,
) -> Command[FoundPage]:
    """Return one page of the jobs with a tag, in any state, the one that was dispatched last first."""
    args = (tag, state, limit, MAX_ITEMS, MAX_BYTES, after or "+inf", "-inf" if since_ms is None else since_ms)
    return new_call("list_tagged", keys.base, args, _page)


def cancel_tagged(
    keys: QueueKeys, tag: str, after: str = "-", *, reason: str = "", budget: int = CANCEL_PAGE
) -> Command[CancelReply | None]:
    """Cancel jobs of a tag; call again with `after` while there is more. None: the tag has too many jobs."""

    def read(reply: Reply) -> CancelReply | None:
        word = status_word(reply)
        if word == _TOO_LARGE:
            return None
        return CancelReply(word == "more", int(reply[1]), wholes(reply[4:]), "-", exact(reply[3]))

    return new_call("cancel_tagged", keys.base, (tag, after, budget, reason), read, numbered=True)


class ForgetReply(msgspec.Struct, frozen=True):
    """Reply of forget_tagged: numbers of what was deleted, and where the next step begins."""

    more: bool
    last: str
    waiting: int
    running: int
    kept: int
    results: int
    dead_letters: int


def forget_tagged(
    keys: QueueKeys, tag: str, last: str = "0", *, reason: str = "", budget: int = FORGET_PAGE
) -> Command[ForgetReply | None]:
    """Delete what is stored of jobs of a tag; call again with `last` while there is more. None: the tag has too many jobs."""

    def read(reply: Reply) -> ForgetReply | None:
        word = status_word(reply)
        if word == _TOO_LARGE:
            return None
        return ForgetReply(word == "more", text(reply[1]), *(int(each) for each in reply[2:]))

    return new_call("forget_tagged", keys.base, (tag, last, budget, reason), read, numbered=True)


def _number(reply: Reply) -> int:
    status_word(reply)
    return int(reply[1])


def drop_kept_jobs(keys: QueueKeys, numbers: Sequence[int]) -> Command[int]:
    """Delete up to MAX_ITEMS kept jobs by the numbers of their dispatches; return how many there were."""
    return new_call("drop_kept_jobs", keys.base, tuple(numbers), _number, numbered=True)


class RunAgain(msgspec.Struct, frozen=True):
    """Reply of run_again: ok, gone or cut; the id and the number of the new job."""

    word: str
    id: str = ""
    number: int = 0


def run_again(keys: QueueKeys, number: int, random: str) -> Command[RunAgain]:
    """Dispatch a kept job once more, under an id that is made with `random`."""

    def read(reply: Reply) -> RunAgain:
        word = status_word(reply)
        return RunAgain(word, text(reply[1]), int(reply[2])) if len(reply) == 3 else RunAgain(word)

    return new_call("run_again", keys.base, (number, random), read, numbered=True)


def trim_kept(keys: QueueKeys, limit: int = MAX_ITEMS) -> Command[bool]:
    """Remove entries of kept jobs that have expired; return whether there may be more."""

    def read(reply: Reply) -> bool:
        return status_word(reply) == "more"

    return new_call("trim_kept", keys.base, (limit,), read)
