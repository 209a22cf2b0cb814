"""`Job`: a handle of one job, for its status, its result and its cancellation. It stores no data; the server has the record.

A handle from a dispatch means that dispatch: it has its number, and does not return the result of an earlier one. A handle made
from an id means the newest dispatch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypeVar, cast
from urllib.parse import quote, unquote

import msgspec

from worqr import ops
from worqr.argument_codec import decoder_of
from worqr.batches import follow_up_queues, followed_in, ref_in
from worqr.client.inspection import claim_name, deadline_of, info_at, nearest_served, status_of
from worqr.client.notifications import Notification, Watch, cancel_and_wait, subscribed
from worqr.client.time_line import time_line
from worqr.codecs import StoredValues, check_not_encoded
from worqr.command import text
from worqr.errors import JobCancelled, JobFailed, NoJob, NoResult, ResultTimeout, UsageError, WorqrError
from worqr.foreign import JOB, no_such_attribute
from worqr.job_states import ENDS, LIVE
from worqr.keys import QueueKeys
from worqr.ops import CancelReply, Everything, JobState, ResultReply, Stored, StoredResult
from worqr.policy import POLICY_FIELDS, UNLIMITED, Undecodable
from worqr.records import CancelCount, Ended, Failed, JobRecord, RemoteError, Status, TaskInfo, Try
from worqr.remote_error import failed_record, fields_of, meta_of, tracebacks_of
from worqr.stored_values import finite, public_name, whole
from worqr.tracebacks import text_of
from worqr.validation import Seconds, check_text, encode_json, end_moment, from_ms, seconds

if TYPE_CHECKING:
    from worqr.client.client import Client

# `JobRecord`: everything that is stored about one id, read in one request and put into the form for people.


_SECONDS: Final = frozenset({"min_backoff", "max_backoff", "retry_for", "timeout", "result_ttl"})
_Ms = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
_NOTHING: Final[Mapping[str, bytes]] = {}


def job_record(
    keys: QueueKeys, id: str, found: Everything, payload: bytes | None, values: StoredValues | None
) -> JobRecord:
    """Return the stored state of the job for people. `payload`: the whole payload, if it was read."""
    latest, fields = _latest(found)
    claim = _number(fields, "claim") if found.run else None
    return JobRecord(
        id=id,
        queue=keys.display_name,
        status=_status(found, None if values is None else values.readable),
        task=payload if payload is not None else fields.get("task", b""),
        size=latest.size if latest else len(payload or fields["task"]) if _kept(found) and "task" in fields else None,
        plain="twin" in fields,
        meta=meta_of(_text(fields, "meta")),
        options=own_options(fields),
        dispatched=None if "twin" in fields else _moment((_number(fields, "first") or 0) / 1000),
        scheduled_for=_moment(_number(fields, "scheduled_for")),
        expires_at=_expires_at(fields),
        failures=_number(fields, "failures") or 0,
        stalls=_number(fields, "stalls") or 0,
        timeouts=_number(fields, "timeouts") or 0,
        tries=_tries(fields.get("tries", b""), fields.get("step:@errors", b"")),
        claim=None if claim is None else claim_name(keys, claim),
        cancelling=found.cancelling,
        cancel_reason=_text(fields, "cancel_reason"),
        deadline=None if claim is None else deadline_of(claim, _number(fields, "timeout")),
        reserved=found.reserved_ms / 1000 if found.reserved_ms >= 0 else None,
        blocked=_blocked(id, found.job) if found.run and found.job else None,
        ended=tuple(_ended(each) for each in found.results if each is not None and not _is_twice(each, found)),
        dead_letters=tuple(_failed(keys, each) for each in found.records),
        twins=tuple(found.twins),
        lane=_text(fields, "lane"),
        batch=ref_in(fields.get("batch", b"")),
        **follow_up_queues(keys.prefix, fields.get("follow", b"")),
        follows=followed_in(fields),
        saved_size=_number(fields, "saved_size") or 0,
        time_line=time_line(keys.prefix, fields),
        life=_number(fields, "life") or 0,
        tags=tuple(filter(None, _text(fields, "tags").split("\n"))),
        kept=claim_name(keys, _number(ended.fields, "first") or 0) if (ended := _kept(found)) else None,
    )


def opened_record(record: JobRecord, values: StoredValues) -> JobRecord:
    """Return a record with those payloads decoded that are whole, and that the codec of the mesh can decode."""
    task, size = opened_payload(record.task, record.size, values)
    blocked = None if record.blocked is None else opened_info(record.blocked, values)
    letters = tuple(opened_failed(each, values) for each in record.dead_letters)
    return replace(record, task=task, size=size, blocked=blocked, dead_letters=letters)


def opened_infos(client: Client, infos: list[TaskInfo]) -> list[TaskInfo]:
    """Return the tasks of a list, with their payloads decoded as in `opened_record`."""
    values = client.values
    return infos if values is None else [opened_info(info, values) for info in infos]


def opened_info(info: TaskInfo, values: StoredValues) -> TaskInfo:
    """Return a task of a list, with its payload decoded as in `opened_record`."""
    task, size = opened_payload(info.task, info.size, values)
    return replace(info, task=task, size=size)


def opened_failed(failed: Failed, values: StoredValues) -> Failed:
    """Return an entry of a dead-letter queue, with its payload decoded as in `opened_record`."""
    return replace(failed, task=values.readable(failed.task))


def opened_payload(task: bytes, size: int | None, values: StoredValues) -> tuple[bytes, int | None]:
    """Return a payload for people and its size. Of a large one, only the beginning was read, which nothing decodes."""
    if size is not None and size != len(task):
        return task, size
    found = values.readable(task)
    return found, size if size is None else len(found)


def _latest(found: Everything) -> tuple[Stored | None, Mapping[str, bytes]]:
    """Return the newest record of the job, and its fields; without one, those that were kept with a result."""
    latest = found.run or found.job or next(iter(found.records), None)
    return latest, latest.fields if latest else _ended_fields(found)


def _ended_fields(found: Everything) -> Mapping[str, bytes]:
    """Return what is stored of a job that has ended, and was kept with its result."""
    return next((each.fields for each in found.results if each and "task" in each.fields), _NOTHING)


def _kept(found: Everything) -> StoredResult | None:
    """Return the kept job, which comes after the last two results."""
    return found.results[2] if len(found.results) > 2 else None


def _is_twice(ended: StoredResult, found: Everything) -> bool:
    """Return True for a result that is kept, too, as the kept job."""
    kept = _kept(found)
    return kept is not None and ended is not kept and ended.fields.get("first") == kept.fields.get("first")


def _status(found: Everything, opened: Callable[[bytes], bytes] | None) -> Status:
    """Return the state as the script job_status determines it: a live record first, then the newest result."""
    newest = found.results[0] if found.results and found.results[0] else _kept(found)
    if found.run is not None:
        return status_of(_state(found.run.fields, "active", 1), opened)
    if found.job is not None and (state := _text(found.job.fields, "state")) in LIVE:
        return status_of(_state(found.job.fields, state, 0), opened)
    if newest is not None and _text(newest.fields, "outcome") in ENDS:
        ended = _ended(newest)
        seen = JobState(
            state=ended.state,
            progress=ended.progress,
            message=ended.message,
            failures=ended.failures,
            attempts=ended.attempts,
            error=_short(ended.error),
            value=found.records[0].fields.get("value", b"") if ended.state == "failed" and found.records else b"",
        )
        return status_of(seen, opened)
    if found.records:
        fields = found.records[0].fields
        uncounted = 1 if public_name(_text(fields, "reason")) == "undecodable" else 0
        return status_of(_state(fields, "failed", uncounted), opened)
    return Status("gone")


def _short(error: RemoteError | None) -> RemoteError | None:
    return None if error is None else RemoteError(error.type, error.message, "")


def _state(fields: Mapping[str, bytes], word: str, uncounted: int) -> JobState:
    """`uncounted`: the tries that the three counters do not count."""
    counters = (_number(fields, "failures") or 0, _number(fields, "stalls") or 0, _number(fields, "timeouts") or 0)
    is_live = word != "failed"
    return JobState(
        state=word,
        claim=_number(fields, "claim") if is_live else None,
        worker=_text(fields, "worker") or None if is_live else None,
        run_at_ms=_number(fields, "run_at") if is_live else None,
        progress=_progress(fields),
        message=_text(fields, "message"),
        failures=counters[0],
        attempts=uncounted + sum(counters),
        error=_error(fields, traceback=False),
        waits_for="" if _text(fields, "error_type") else _text(fields, "error_message"),
        value=fields.get("value", b""),
    )


def _blocked(id: str, job: Stored) -> TaskInfo:
    run_at = _moment(_number(job.fields, "run_at"))
    state = public_name(_text(job.fields, "state"))
    return TaskInfo(cast("Any", state), run_at=run_at, id=id, task=job.fields.get("task", b""), size=job.size)


def _ended(result: StoredResult) -> Ended:
    fields = result.fields
    claim = _number(fields, "claim")
    return Ended(
        state=cast("Any", _text(fields, "outcome")),
        attempts=_number(fields, "attempts") or 0 if "attempts" in fields else 1,
        failures=_number(fields, "failures") or 0,
        progress=_progress(fields),
        message=_text(fields, "message"),
        error=_error(fields, traceback=True),
        reason=_text(fields, "reason"),
        expires_in=max(0, result.left_ms) / 1000,
        at=end_moment(_number(fields, "ended") or None, claim, _number(fields, "first")),
        started=_moment((claim or 0) / 1000),
        worker=_text(fields, "worker"),
    )


def _failed(keys: QueueKeys, record: Stored) -> Failed:
    fields = {**record.fields, "size": b"%d" % record.size}
    return failed_record(keys.display_name, record.fields.get("task", b""), fields)


def _error(fields: Mapping[str, bytes], *, traceback: bool) -> RemoteError | None:
    if not _text(fields, "error_type"):
        return None
    kind, message = _text(fields, "error_type"), _text(fields, "error_message")
    if not traceback:
        return RemoteError(kind, message, "")
    return RemoteError(kind, message, _text(fields, "error_traceback"), fields_of(_text(fields, "error_fields")))


def own_options(fields: Mapping[str, bytes]) -> dict[str, int | float | bool | str]:
    """Return the options that the dispatch of a job set, from its record. Times are in seconds; a count may be ``unlimited``."""
    found: dict[str, int | float | bool | str] = {}
    for name in sorted(POLICY_FIELDS & fields.keys()):
        number = _number(fields, name)
        if name.endswith("_on") or number is None:
            found[name] = _text(fields, name)
        elif name in {"jitter", "reset_on_progress"}:
            found[name] = number == 1
        elif name.startswith("max_") and number == UNLIMITED:
            found[name] = "unlimited"
        else:
            found[name] = number / 1000 if name in _SECONDS else number
    return found


def _expires_at(fields: Mapping[str, bytes]) -> datetime | None:
    if "started" in fields or "reason" in fields:
        return None
    after = _number(fields, "expires")
    if after is not None:
        return _moment((_number(fields, "run_at") or 0) + after)
    return _moment(_number(fields, "expires_at"))


def _tries(packed: bytes, saved: bytes) -> tuple[Try, ...]:
    """Return the stored tries, with the tracebacks that `worqr.peer.context.save_traceback` saved; none if another program
    stored something else.
    """
    try:
        entries = msgspec.msgpack.decode(packed, type=list[tuple[_Ms, _Ms, str, str, str, str]])
        texts = tracebacks_of(saved)
        return tuple(
            Try(
                from_ms(at),
                ms / 1000,
                worker,
                cast("Any", public_name(reason)),
                RemoteError(kind, message, texts.get(at - ms, "")),
            )
            for at, ms, worker, reason, kind, message in entries
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()


def _moment(ms: float | None) -> datetime | None:
    """Return a stored time; None if there is none, or if it is zero."""
    return from_ms(ms) if ms else None


def _text(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")


def _number(fields: Mapping[str, bytes], name: str) -> int | None:
    return whole(fields.get(name))


def _progress(fields: Mapping[str, bytes]) -> float | None:
    return finite(fields.get("progress"))


FROM_DECODER: Final = "The above exception was the direct cause"
"""A part of the traceback of a payload that cannot be decoded. Its frames are all worqr's own."""

R = TypeVar("R")

Outcome = Literal["created", "updated", "blocked", "unchanged"]
"""The outcome of a dispatch: a new job; a change of the job with its id; blocked, until the run of that id ends; nothing."""

ENDED = frozenset({"finished", "failed", "cancelled", "gone"})

EXPLAIN_WITHIN: Final = 2.0
"""Seconds in which the state of the job is read for the text of `ResultTimeout`."""
LONGEST_ERROR: Final = 500
"""Characters of the last error in the message of `ResultTimeout`."""


# Sending a value to a workflow


Delivery = Literal["woke", "stored", "already", "full"]
"""What became of a value that was sent to a workflow."""
MAX_SENT: Final = 64 * 1024
"""The most bytes of a value that is sent to a workflow."""


async def send_value(
    client: Client,
    keys: QueueKeys,
    id: str,
    name: str,
    value: object,
    *,
    number: int = 0,
    life: int = 0,
    again: bool = False,
) -> Delivery:
    """Send a value to a workflow; see `Job.send`. `number`, `life`: of a dispatch, of an address; 0: any."""
    encoded = _encoded(check_event(name), value)
    if client.values is not None:
        encoded = check_sent(name, client.values.encode_tagged(encoded))
    request = ops.send_event(keys, id, name, encoded, number=number, life=life, again=again)
    sent = await client.ask(request)
    if sent.status == "none":
        raise NoJob(
            f"the job {id!r} of queue {keys.display_name!r} {_why_none(sent.state)}: nothing was sent", sent.state
        )
    return cast("Delivery", sent.status)


async def end_wait(client: Client, keys: QueueKeys, id: str, key: str, *, number: int = 0, life: int = 0) -> bool:
    """End a wait of a workflow; see `Job.end_wait`. `number`, `life`: of a dispatch, of an address; 0: any."""
    ended = await client.ask(ops.end_wait(keys, id, check_text(key, "the key of a wait"), number=number, life=life))
    if ended.status == "none":
        raise NoJob(
            f"the job {id!r} of queue {keys.display_name!r} {_why_none(ended.state)}: no wait was ended", ended.state
        )
    if ended.status == "children":
        raise UsageError(f"{key!r} waits for jobs: cancel them, and the wait ends")
    return ended.status != "closed"


async def rewind(client: Client, keys: QueueKeys, id: str, key: str, *, number: int = 0, life: int = 0) -> int:
    """Let a workflow run again from an entry of its time line; see `Job.rewind`. `number`, `life`: as `end_wait`."""
    found = await client.ask(ops.rewind_job(keys, id, check_text(key, "the key of an entry"), number=number, life=life))
    if found.status == "ok":
        return found.dropped
    where = f"the job {id!r} of queue {keys.display_name!r}"
    if found.status == "none":
        why = "is no workflow" if found.state == "plain" else _ENDED.get(found.state, "is gone")
        why = "has failed, and is not in the dead-letter queue any more" if found.state == "failed" else why
        raise NoJob(f"{where} {why}: it does not run again, so dispatch it anew", found.state)
    if found.status == "unknown":
        names = ", ".join(map(repr, found.keys)) or "nothing yet"
        raise UsageError(f"{where} has no entry {key!r} in its time line, which has {names}")
    raise UsageError(f"{where} {_NOT_REWOUND[found.status].format(*map(repr, found.keys))}")


_NOT_REWOUND: Final = {
    "active": "runs: wait until it is suspended, or cancel it and dispatch it anew",
    "unordered": "has {}, of which no place in the time line is known, because an older version has stored it: cancel the job "
    "and dispatch it anew",
    "taken": "is in the dead-letter queue, and another job has its id now: wait until that one has ended",
    "closing": "is a member of a batch that is being cancelled: dispatch it anew",
}


def _why_none(state: str) -> str:
    """Return why a job has no waits and no events."""
    return "is no workflow, which alone can wait for events" if state == "plain" else _ENDED.get(state, "is gone")


async def note_ended(client: Client, queue: str, id: str, key: str) -> None:
    """Write into the log of the mesh that a person has ended a wait."""
    await client.note("sent", queue=queue, job=id, count=1, text=f"the end of: {key}")


async def note_rewound(client: Client, queue: str, id: str, key: str, dropped: int) -> None:
    """Write into the log of the mesh that a person lets a workflow run again from an entry."""
    await client.note("rewound", queue=queue, job=id, count=dropped, text=f"from: {key}")


async def note_sent(client: Client, queue: str, id: str, name: str, value: object) -> None:
    """Write into the log of the mesh that a person has sent a value: its name and its size, never the value."""
    kind, _, stored = _encoded(name, value).partition(b" ")
    text = f"{name}, {len(stored):,} bytes" if kind != b"none" else name
    await client.note("sent", queue=queue, job=id, count=1, text=text)


_ENDED: Final = {
    "finished": "has finished",
    "failed": "has failed, and goes on only if it is put back from the dead-letter queue",
    "cancelled": "was cancelled",
}


def _encoded(name: str, value: object) -> bytes:
    """Return a value that is sent as it is stored. Raises UsageError if it cannot be."""
    return check_sent(name, tagged(value, f"the value of {name!r}"))


def tagged(value: object, what: str) -> bytes:
    """Return a value as it is stored: its kind, a space, and its bytes. Raises UsageError if it is neither bytes nor JSON."""
    try:
        if value is None:
            return b"none "
        if isinstance(value, bytes | bytearray | memoryview):
            return b"bytes " + cast("bytes", value)
        return b"json " + encode_json(value)
    except Exception as error:  # any error from encoding a user's type
        raise UsageError(f"{what} is neither bytes nor JSON: {text_of(error, 500)}") from error


def check_sent(name: str, found: bytes) -> bytes:
    """Return an encoded value. Raises UsageError if it is too large to be sent."""
    if len(found) > MAX_SENT:
        raise UsageError(
            f"the value of {name!r} has {len(found):,} bytes, and at most {MAX_SENT:,} can be sent: send what names it (an id)"
        )
    return found


MAX_EVENT: Final = 200
"""The most bytes of the name of an event."""


def check_event(name: object) -> str:
    """Return the name of an event. Raises UsageError if it is not valid."""
    text = check_text(name, "the name of an event")
    if not 0 < len(text.encode()) <= MAX_EVENT or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise UsageError(
            f"the name of an event must have 1 to {MAX_EVENT} bytes, without control characters, not {text[:200]!r}"
        )
    return text


MAX_LIFE: Final = 16
"""The most digits of the number of a dispatch."""


def address_of(queue: str, life: int, id: str) -> str:
    """Return the address of one life of a job, for links: it has letters, digits and ``-._~=`` alone. It has no ``%``: web
    frameworks decode that before they look for the route of a path.
    """
    return f"{_quoted(queue)}~{life}~{_quoted(id)}"


def _quoted(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E").replace("%", "=")


def _unquoted(text: str) -> str:
    return unquote(text.replace("=", "%"))


def read_address(address: object) -> tuple[str, int, str]:
    """Return the queue, the life and the id of an address.

    Raises:
        UsageError: it is none.
    """
    parts = check_text(address, "an address").split("~", 2)  # an older version left those of an id
    if len(parts) != 3 or not all(parts) or not parts[1].isdecimal() or len(parts[1]) > MAX_LIFE:
        raise UsageError(f"{address!r} is no address: it comes from worqr.current().address, in a workflow")
    return _unquoted(parts[0]), int(parts[1]), _unquoted(parts[2])


class Results(msgspec.Struct, frozen=True):
    """How to decode the results of a function, by kind and bytes, and whether its workers keep them."""

    decode: Callable[[str, bytes], Any]
    kept: bool


class Job(Generic[R]):
    """A handle of one job. ``queue.dispatch(...)``, ``queue.job(id)`` and the methods of functions make it.

    A handle from a dispatch means that dispatch, and does not return the result of an earlier one. A handle made from an id
    means the newest dispatch. Two handles of one id on one queue are equal.

    Attributes:
        id: The job's id.
        queue: The name of its queue.
        outcome: What its dispatch did: ``created`` a job, ``updated`` the one that waits, ``blocked`` the new one until the
            present run has ended, or left it ``unchanged``. None for a handle made from an id.
    """

    __slots__ = ("_at", "_client", "_keys", "_number", "_results", "id", "outcome", "queue")

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        id: str,
        number: int = 0,
        outcome: Outcome | None = None,
        results: Results | None = None,
        *,
        at: QueueKeys | None = None,
    ) -> None:
        self.id: str = id
        self.queue: str = keys.display_name
        self.outcome: Outcome | None = outcome
        self._client = client
        self._keys = keys
        self._number = number
        self._results = results
        self._at = at

    async def _shard(self) -> QueueKeys:
        """Return the shard that stores the job: that of its dispatch, or that of its id for a handle made from an id."""
        return self._at or await self._client.sharding.shard_of_id(self._keys, self.id)

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("Job", name, JOB))

    def __repr__(self) -> str:
        return f"<Job {self.id!r} of {self.queue!r}>"

    def __eq__(self, other: object) -> bool:
        """True for the same id on the same queue of the same mesh, whatever the dispatch."""
        if not isinstance(other, Job):
            return NotImplemented
        theirs: Job[Any] = other  # pyright: ignore[reportUnknownVariableType]
        return self.id == theirs.id and self._keys == theirs._keys and self._client is theirs._client

    def __hash__(self) -> int:
        return hash((self.id, self._keys))

    @property
    def dispatched(self) -> datetime | None:
        """The time of its dispatch, by the server's clock; None for a handle made from an id."""
        return _moment(self._number / 1000)

    async def status(self, kind: Any = None) -> Status:
        """Return the job's state, the number of its tries, and the error of the last one.

        ``finished`` and ``cancelled`` are known as long as results are kept. ``failed`` is known as long as results are kept
        or the job is in ``queue.failed`` or ``queue.undecodable``. Afterwards, and for an unknown id, the state is ``gone``.

        Args:
            kind: The type as which `value` is decoded: what the run passes to ``worqr.state``. None: as JSON has it.

        Raises:
            UsageError: Its `value` is not of this type, or the codec of this mesh cannot decode it; or outside `connect` and
                `join`. Without a `kind`, `value` is what is stored then.
            Unavailable: The server did not reply within `patience`.
        """
        found = await self._client.ask(ops.job_status(await self._shard(), self.id, self._number))
        values = self._client.values
        status = status_of(found, None if values is None else values.readable)
        return (
            status if kind is None or status.value is None else replace(status, value=self._typed(status.value, kind))
        )

    def _typed(self, value: object, kind: Any) -> object:
        if kind is bytes and isinstance(value, bytes):
            return value
        try:
            return decoder_of(kind)(value if isinstance(value, bytes) else encode_json(value))
        except Exception as error:  # any error of a type of the application
            raise UsageError(f"the value of {self!r} is not of the type {kind!r}: {text_of(error, 500)}") from error

    async def result(self, timeout: Seconds | None = None) -> R:
        """Wait until the job has ended, and return what its handler returned.

        A function returns the type of its annotation. A handler of a raw queue returns bytes unchanged, None as None, and
        other values as decoded from JSON.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit; 0: do not wait.

        Returns:
            The result.

        Raises:
            NoResult: There is no result, and there will be none. The message says why: the id is unknown, no `result_ttl` is
                set, the result has expired, or a newer dispatch replaced this one.
            JobFailed: The job failed and will not be run again. This is known without a `result_ttl`, too, as long as the job
                is in ``queue.failed`` or ``queue.undecodable``.
            JobCancelled: The job was cancelled.
            ResultTimeout: The job has not ended within `timeout`. The message has its state, the length of its queue, and the
                number of workers that serve it; reading these takes up to 2 s more if the server is slow.
            UsageError: The stored result is not of the function's return type, or not JSON; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        patience = math.inf if timeout is None else seconds(timeout, "timeout")
        if (found := await self._read_result()).status != "wait":
            return self._value(found)
        link = self._client.link
        notification, slots = Notification(link), self._client.slot_watch(self.queue)
        with link.driver.move_on_after(patience):
            async with subscribed(link, (await self._shard()).job(self.id), lambda _message: notification.set()):
                while (found := await self._read_result()).status == "wait":
                    await notification.wait()
                    if slots.should_check() and await self._still_waits():
                        slots.warn(self.id)
            return self._value(found)
        raise await self._timed_out(patience)

    async def _still_waits(self) -> bool:
        with suppress(WorqrError):
            return (await self.status()).state == "waiting"
        return False

    async def _timed_out(self, patience: float) -> ResultTimeout:
        """Return the error about a job that has not ended. It says why, if the server replies in time."""
        texts: list[str] = []
        facts: dict[str, Any] = {}
        if patience > 0:
            with self._client.link.driver.move_on_after(EXPLAIN_WITHIN), suppress(WorqrError):
                await self._explain(texts, facts)
        why = f": {'; '.join(texts)}" if texts else ""
        return ResultTimeout(f"{self!r} had not ended after {patience:g} s{why}", **facts)

    async def _explain(self, texts: list[str], facts: dict[str, Any]) -> None:
        """Add the state of the job and of its queue. A user without the permission to read queues still gets the job's state."""
        status = await self.status()
        facts["state"] = status.state
        if status.state in ENDED:
            texts.append(f"it has ended since ({status.state}), ask again")
            return
        texts.append(f"its state is {status.state!r}")
        if status.error is not None:
            texts.append(f"its last try raised {status.error.type}: {status.error.message[:LONGEST_ERROR]}")
        if status.state == "suspended" and status.waits_for:
            texts.append(f"it waits for {status.waits_for}")
        elif status.next_run is not None:
            texts.append(f"its next run is due at {status.next_run.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC")
        info = await info_at(self._client, self._keys)
        facts.update(waiting=info.waiting, workers=info.workers)
        waits = "1 task waits" if info.waiting == 1 else f"{info.waiting:,} tasks wait"
        if info.workers:
            serve = "1 worker serves it" if info.workers == 1 else f"{info.workers:,} workers serve it"
            texts.append(f"{waits} in the queue, and {serve}")
            return
        texts.append(f"{waits} in the queue, and no worker serves it")
        texts.append(await nearest_served(self._client, self.queue) or self._where())

    def _where(self) -> str:
        """Return where it looked, for a worker that runs elsewhere."""
        settings = self._client.link.settings
        return f"if one runs, compare its prefix ({settings.prefix!r} here) and its server ({settings.address.redacted} here)"

    async def _read_result(self) -> ResultReply:
        found = await self._client.ask(ops.read_result(await self._shard(), self.id, self._number))
        if found.status == "never" and self._results is not None and self._results.kept:
            return replace(
                found, status="wait"
            )  # no worker has joined yet; the workers of the function will keep the result
        return found

    def _value(self, found: ResultReply) -> R:
        if found.status == "finished":
            kind, value = text(found.values[0] or b""), found.values[1] or b""
            return cast(
                "R", self._decode(kind, value if kind == "none" or self._client.values is None else self._opened(value))
            )
        texts = [b"" if fact is None else fact for fact in found.values]
        if found.status == "failed":
            kind, message, traceback, fields = (fact.decode("utf-8", "replace") for fact in texts)
            error = RemoteError(kind, message, traceback, fields_of(fields))
            failed = JobFailed(f"{self!r} failed: {error.type}: {error.message}", error)
            if error.traceback and not (error.type.endswith(".Undecodable") and FROM_DECODER in error.traceback):
                failed.add_note(f"The worker's traceback:\n{error.traceback.rstrip()}")
            raise failed
        if found.status == "cancelled":
            reason = texts[0].decode("utf-8", "replace")
            raise JobCancelled(f"{self!r} was cancelled" + (f": {reason}" if reason else ""), reason)
        raise NoResult(self._missing_reason(found.status))

    def _opened(self, value: bytes) -> bytes:
        """Return a stored result, decoded by the codec of the mesh.

        Raises:
            WrongKey: It has a key that this mesh does not have, or the mesh has no codec.
            UsageError: It was changed, or is plain and must not be.
        """
        if (values := self._client.values) is None:
            return value
        try:
            return values.decode(value)
        except Undecodable as error:
            raise UsageError(f"the stored result of {self!r} cannot be decoded: {error}") from error

    def _missing_reason(self, status: str) -> str:
        """Return the reason why there is no result, and the remedy if there is one."""
        job = f"job {self.id!r} of queue {self.queue!r}"
        if status == "never":
            return (
                f"{job} keeps no result: neither its dispatch nor a worker of its queue has a result_ttl. Set result_ttl= on the "
                "function, on the handler, or at the dispatch"
            )
        if status == "replaced":
            return f"{job} has a newer dispatch, and the result of this one was not kept or has expired"
        unknown = "the id is unknown, or " if self._number == 0 else ""
        return f"no result of {job} is stored: {unknown}it was not kept (no result_ttl) or has expired"

    def _decode(self, kind: str, value: bytes) -> object:
        if self._results is not None:
            return self._results.decode(kind, value)
        if kind != "json":
            return None if kind == "none" else value
        try:
            return msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            check_not_encoded(value)
            raise UsageError(
                f"the stored result of {self!r} is not JSON ({error}): another program has written it"
            ) from None

    async def send(self, name: str, value: object = None, /, *, again: bool = False) -> Delivery:
        """Send a value to the workflow, which takes it with ``await worqr.wait_for(name, type)``, now or later.

        A send never starts a job. A handle from a dispatch sends to that dispatch alone; a handle made from an id, to the
        job that has the id now: for links and forms, use ``worqr.current().address`` and ``mesh.send``.

        Args:
            name: The name of the event, 1 to 200 bytes.
            value: What JSON can encode, bytes, or None; at most 64 KiB.
            again: Send it although a value of this name lies there that no wait has taken.

        Returns:
            ``woke``: the workflow waits for it, and runs again. ``stored``: it will find it. ``already``: a value lies there
            that no wait has taken; nothing was stored. ``full``: 1,000 values lie there, or the job has no room.

        Raises:
            NoJob: There is no such job, it has ended, or it is no workflow.
            UsageError: The name or the value is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await send_value(
            self._client, await self._shard(), self.id, name, value, number=self._number, again=again
        )

    async def end_wait(self, key: str) -> bool:
        """End a wait of the workflow now, as if its time were over: ``worqr.wait_for`` returns None, and ``worqr.sleep`` returns.

        Args:
            key: The key of the wait, as in ``(await queue.read(id)).time_line``: ``"wait for approved"``, ``"sleep #2"``.

        Returns:
            False if the workflow has no such wait, or it has ended already.

        Raises:
            NoJob: There is no such job, it has ended, or it is no workflow.
            UsageError: It waits for jobs, which can be cancelled; the key is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await end_wait(self._client, await self._shard(), self.id, key, number=self._number)

    async def rewind(self, key: str) -> int:
        """Let the workflow run again from an entry of its time line: drop this entry and all that was stored later.

        Steps are called again, waits begin anew, and jobs are started again. Jobs that were dropped and have not ended are
        cancelled. A value that a dropped wait has taken is dropped, so send it again. A job in the dead-letter queue is put back.

        Args:
            key: The key of a step, a wait or a job, as in ``(await queue.read(id)).time_line``: ``"charge {...}"``.

        Returns:
            The number of entries that were dropped.

        Raises:
            NoJob: There is no such job, it has finished or was cancelled, or it is no workflow.
            UsageError: The job runs; it has no such entry; another job has its id; its batch is being cancelled; an older version
                of worqr has stored an entry without its place; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await rewind(self._client, await self._shard(), self.id, key, number=self._number)

    async def cancel(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel the job: delete it if it waits, cancel its handler if it runs.

        A job that is cancelled while it runs never runs again, whatever its handler raises, and even if its worker dies. Both
        the run and a blocked job of the same id are cancelled.

        Args:
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the run has ended. A slow handler raises nothing.

        Returns:
            The number of jobs that waited, that ran, and that ended within `wait`; all 0 if there was nothing to cancel.

        Raises:
            UsageError: `wait` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        check_text(reason, "reason")

        async def step(keys: QueueKeys, _last: CancelReply | None) -> CancelReply:
            return await self._client.ask(ops.cancel_job(keys, self.id, reason))

        patience = seconds(wait, "wait")
        return await cancel_and_wait(self._client.link, [await self._shard()], step, patience)

    @asynccontextmanager
    async def watch(self, timeout: Seconds | None = None) -> AsyncGenerator[AsyncIterator[Status]]:
        """Follow the job for the length of a block, as an iterator of its `Status`.

        The iterator begins with the present status, yields each change, and ends with the job. Short states may be left out.

        Args:
            timeout: Seconds for the whole block, or a timedelta. None: no limit; 0: the present state only.

        Yields:
            AsyncIterator[Status]: The iterator. It raises `ResultTimeout` if the job has not ended within `timeout`.

        Raises:
            UsageError: `timeout` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        watch = Watch(self._client.link, timeout, self, self.status, lambda status: status.state in ENDED)
        async with watch.on((await self._shard()).job(self.id)) as states:
            yield states
