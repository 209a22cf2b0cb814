"""The words of the mesh as values: what an operator reads, what a claim answers, how an error travels. Pure.

Nothing here knows Trio, Redis or how anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, cast

import msgspec

from worqr.errors import PayloadTooLarge, UsageError
from worqr.foreign import not_bytes
from worqr.tracebacks import format_error, text_of

Seconds = float | timedelta
"""A duration: seconds as a number, or a timedelta."""

MAX_FAILURES: Final = 10
MAX_STALLS: Final = 3
KEEP_FAILED: Final = 1000

LONGEST: Final = 100 * 365 * 86400
"""Seconds of the longest duration: what is longer is a mistake, or infinity."""

FIELDS: Final = 4096
"""Bytes of an error's attributes, as JSON."""
MANY_FIELDS: Final = 100

CancelReason = Literal["cancel", "timeout", "lost", "leaving"]
"""Why a run is being cancelled."""


def seconds(value: object, what: str, *, positive: bool = False) -> float:
    """`value` as a finite float that is not negative (with `positive`: above 0), else UsageError naming `what`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} must be seconds (a number or a timedelta), not {value!r}")
    if not (value > 0 if positive else value >= 0) or value > LONGEST:
        least = "above 0" if positive else "at least 0"
        raise UsageError(f"{what} must be {least} and at most a century, not {repr(value)[:40]}")
    return float(value)


def check_text(value: object, what: str) -> str:
    """`value` as text that UTF-8 can carry, else UsageError naming `what`."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a str, not {type(value).__name__}")
    if (clean := clean_text(value)) != value:
        raise UsageError(f"{what} is not valid Unicode: {clean[:60]!r}")
    return value


def is_model(kind: type) -> bool:
    """True for a pydantic model, which this tells without importing pydantic."""
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


def _encode_custom(value: Any) -> object:
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if is_model(kind):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(f"JSON does not know {name_of(kind)}")


_encode = msgspec.json.Encoder(enc_hook=_encode_custom).encode


def encode_json(value: object) -> bytes:
    """`value` as JSON; pydantic models as pydantic has them.

    Raises:
        ValueError: it has a number that JSON has not (NaN, infinity), which would arrive as null. Else whatever msgspec, or a
            type of the user's, raises.
    """
    encoded = _encode(value)
    if b"null" in encoded and _has_odd_number(msgspec.to_builtins(value, enc_hook=_encode_custom)):
        raise ValueError("JSON has neither NaN nor infinity")
    return encoded


def _has_odd_number(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_odd_number, cast("dict[object, object]", value).values()))
    return isinstance(value, list | tuple) and any(map(_has_odd_number, cast("list[object]", value)))


def check_task(task: object, max_payload: int) -> bytes:
    """`task` as bytes, checked in the caller so that one bad argument cannot spoil a batch.

    Raises:
        UsageError: not bytes-like.
        PayloadTooLarge: over `max_payload` bytes.
    """
    if not isinstance(task, bytes):
        if not isinstance(task, bytearray | memoryview):
            raise UsageError(not_bytes(task))
        task = bytes(cast("bytearray", task))
    if len(task) > max_payload:
        raise PayloadTooLarge(
            f"a task of {len(task):,} bytes is over the limit of {max_payload:,} (Mesh(max_payload=...)): "
            "store the data elsewhere and enqueue its name"
        )
    return task


def name_of(kind: type) -> str:
    """A class as it is named in records and errors."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error as it is kept and sent: names and text only, at most 16 KiB of traceback.

    Of a run in a process, the traceback is followed by a line ``stderr:`` and the last 16 KiB of what the run wrote there, if it
    wrote anything.

    Attributes:
        type: the qualified name of its class.
        message: its text, at most 4,096 characters.
        traceback: the last frames, at most 16 KiB.
        fields: the public attributes that it was given and that are JSON: text, numbers, booleans, None, lists and dicts of them.
            Together at most 4 KiB; attributes that do not fit are left out. ``error.code = 42`` arrives as ``{"code": 42}``.
    """

    type: str
    message: str
    traceback: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """`error` with its qualified type name, its text, and the end of its traceback; of one that was raised in another process
        what was told of it there.
        """
        remote = getattr(error, "__worqr_remote__", None)
        if isinstance(remote, RemoteError):
            return remote
        message = text_of(error)
        lines = clean_text(format_error(error))[-16384:]
        return cls(name_of(type(error)), clean_text(message)[:4096], lines, _fields_of(error))

    @classmethod
    def told(cls, type: str, message: str) -> RemoteError:
        """An error that was told, not raised."""
        return cls(type, clean_text(message)[:4096], "")

    def fields_as_json(self) -> bytes:
        """The fields as they are sent; empty if there are none."""
        return encode_json(self.fields) if self.fields else b""

    def with_stderr(self, output: str) -> RemoteError:
        """This, and what the run wrote to its standard error."""
        output = output.strip("\n")
        if not output:
            return self
        parts = [part for part in (self.traceback.rstrip("\n"), "stderr:", output) if part]
        return replace(self, traceback="\n".join(parts) + "\n")


def _fields_of(error: BaseException) -> dict[str, Any]:
    """The attributes of an error that can be sent, as many as fit."""
    found: dict[str, Any] = {}
    left = FIELDS
    for name, value in list(vars(error).items())[:MANY_FIELDS]:
        if name.startswith("_") or not isinstance(value, str | int | float | list | tuple | dict | None):
            continue
        try:
            encoded = encode_json({name: cast("object", value)})
            sent: dict[str, Any] = msgspec.json.decode(encoded) if len(encoded) <= left else {}
        except Exception:  # noqa: S112 - whatever a type of the user's raises: it is no JSON
            continue
        left -= len(encoded) if sent else 0
        found |= sent
    return found


def clean_text(text: str) -> str:
    """`text` without the lone surrogates that UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Failed:
    """A task that was set aside, as ``queue.failed``, ``queue.broken`` and failure handlers see it.

    Attributes:
        id: of its job; of a raw task one that was made for it.
        task: the payload, byte for byte.
        reason: failed (its run said so, or its failures reached the limit), stalled (its workers died), timeout, expired (it
            was not started in time), broken (it could not be decoded).
        error: what the last run raised.
        failures, stalls, timeouts: how often each has happened.
        worker: that had it last.
        at: when it was set aside, by the server's clock.
        meta: as it was dispatched with.
    """

    id: str
    queue: str
    task: bytes
    reason: Literal["failed", "stalled", "timeout", "expired", "broken"]
    error: RemoteError
    failures: int
    stalls: int
    timeouts: int
    worker: str
    at: datetime
    meta: Mapping[str, str]

    @classmethod
    def of(cls, queue: str, task: bytes, facts: Mapping[str, bytes | str]) -> Failed:
        """Of the facts that were written when it was set aside."""

        def told(name: str) -> str:
            value = facts.get(name, "")
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

        return cls(
            id=told("id"),
            queue=queue,
            task=task,
            reason=cast('Literal["failed", "stalled", "timeout", "expired", "broken"]', told("reason")),
            error=RemoteError(
                told("error_type"), told("error_message"), told("error_traceback"), fields_of(told("error_fields"))
            ),
            failures=int(told("failures") or 0),
            stalls=int(told("stalls") or 0),
            timeouts=int(told("timeouts") or 0),
            worker=told("worker"),
            at=from_ms(int(told("at") or 0)),
            meta=meta_of(told("meta")),
        )


def meta_of(text: str) -> Mapping[str, str]:
    """`meta` as it is stored; of a producer that stored no JSON object of texts, none."""
    try:
        return msgspec.json.decode(text, type=dict[str, str]) if text else {}
    except msgspec.MsgspecError:
        return {}


def fields_of(text: str) -> dict[str, Any]:
    """The fields of an error as they are stored; none if somebody stored something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.MsgspecError:
        return {}


def from_ms(ms: float) -> datetime:
    """A moment of the server's clock."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def to_ms(moment: object, what: str) -> int:
    """An aware datetime in milliseconds since 1970, rounded up; else UsageError naming `what`."""
    if not isinstance(moment, datetime):
        raise UsageError(f"{what} must be a datetime, not {type(moment).__name__}")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise UsageError(f"{what} must know its timezone: {moment!r} does not; use datetime.now(UTC), say")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    if since < timedelta(0):
        raise UsageError(f"{what} must be after 1970, not {moment!r}")
    return -(-since // timedelta(milliseconds=1))


def check_count(value: object, what: str) -> int:
    """`value` as a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what} must be a whole number of at least 1, not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class CancelCount:
    """What a cancel met: waiting tasks removed, running ones marked, and how many of those acknowledged in time."""

    waiting: int
    running: int
    acknowledged: int


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a task, and what is known of its tries. Of a plain task only `state`, `worker` and `since` are known.

    Attributes:
        state: where it is. ``scheduled``: its time is still to come. ``gone``: nothing is known of it any more.
        worker: of a running task, the worker that runs it.
        since: of a running task, when this run began, by the server's clock.
        run_at: when it was, or will be, due; None if it has ended.
        progress: what the handler reported last in this run, or in the last one if the job has ended.
        message: the text that was reported with it.
        failures: how many tries ended with an error.
        attempts: how many tries have begun, the present one among them. Tries that were given back uncounted do not count.
        error: what the last try raised: its type, and the first 500 bytes of its message. A job has it while it waits for its
            next try, during that try, and if it has failed. The traceback is empty here; see ``queue.failed``.
        next_run: of a job in the state ``scheduled``, when it will be run next, at the earliest; else None.
    """

    state: Literal["waiting", "scheduled", "blocked", "active", "finished", "failed", "cancelled", "gone"]
    worker: str | None = None
    since: datetime | None = None
    run_at: datetime | None = None
    progress: float | None = None
    message: str = ""
    failures: int = 0
    attempts: int = 0
    error: RemoteError | None = None
    next_run: datetime | None = None


@dataclass(frozen=True, slots=True)
class TaskInfo(Status):
    """The `Status` of one task in a list of many.

    Attributes:
        id: the job's id; None for a plain task, which has none.
        task: the first 100 bytes of the payload. Empty if the list has shown 8 MiB of payload already.
        cursor: the place in a list of ``queue.jobs()``. Pass that of the last entry as ``after`` to get the next page.
    """

    id: str | None = None
    task: bytes = b""
    cursor: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue at one moment.

    Attributes:
        oldest_job: how many seconds ago the job at the front was due. None if a plain task is at the front, or nothing.
        counts: totals since the counters were last empty for 30 days.
    """

    name: str
    waiting: int
    scheduled: int
    blocked: int
    running: int
    failed: int
    broken: int
    paused: str | None
    oldest_job: float | None
    workers: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One registered worker as people want to know it. ``beat_age`` is in seconds, infinite without a keepalive key."""

    id: str
    host: str
    pid: int
    app: str
    version: str
    queues: frozenset[str]
    running: int
    room: int
    beat_age: float


@dataclass(frozen=True, slots=True)
class Health:
    """``alive``: the loop turns. ``ready``: registered, beating, subscribed and not leaving; else ``why`` says what not.

    ``running`` counts tasks; ``room`` is the free part of the concurrency, in units, of which a task may take several.
    """

    alive: bool
    ready: bool
    why: str
    running: int
    room: int
    loop_lag: float
