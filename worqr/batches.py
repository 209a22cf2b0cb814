"""The values of batches that users read: `BatchInfo` and `BatchRef`; what a follow-up reads; the checks of its options. Pure.

A batch is a set of jobs that is counted together, of one queue or of several. `worqr.client.batch` sends requests about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from worqr.argument_codec import decoder_of
from worqr.errors import UsageError
from worqr.job_options import FOLLOW_UPS
from worqr.keys import QueueKeys, keys_at
from worqr.records import BatchRef as BatchRef
from worqr.records import RemoteError
from worqr.remote_error import meta_of, packed_error
from worqr.stored_values import public_name, whole
from worqr.validation import Seconds, moment, seconds

BatchState = Literal["open", "sealed", "ended"]
KEEP: Final = 86400.0
OPEN_FOR: Final = 3600.0
_NOT_OF_FOLLOW_UPS: Final = {
    "id": "id",
    "unique_for": "unique_for",
    "exists": "if_exists",
    **dict.fromkeys(("data", "when", "counts", "policy", "at_most"), "update"),
}
"""Encoded options that a follow-up cannot have, by their names for users."""
_DROPPED: Final = frozenset({"max_length", "max_lane_length", "replicas", "wait"})
"""Encoded options of a function that mean nothing for a follow-up, because the server stores it."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """A batch at one moment."""

    id: str
    """Its id, unique in its home queue."""
    queue: str
    """The name of its home queue, which keeps its record."""
    state: BatchState
    """``open``: its producer may add jobs. ``sealed``: it ends when all its jobs have ended; running jobs may still add some.
    ``ended``: all have ended, and the follow-up was enqueued.
    """
    jobs: int
    """The number of jobs that were added."""
    finished: int
    """The number of jobs that finished."""
    failed: int
    """The number of jobs that failed for good, or were lost by a failover of the server."""
    cancelled: int
    """The number of jobs that were cancelled."""
    endings: int
    """How often it has ended. It ends again when failed jobs of it are put back."""
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    """The `meta` that it was given."""
    created: datetime | None = None
    """The time at which it was made, by the server's clock."""
    ended: datetime | None = None
    """The time at which it ended; None if it has not."""
    cancel_reason: str | None = None
    """Why it was cancelled; None if it was not."""
    queues: tuple[str, ...] = ()
    """The names of the queues of its jobs."""
    follow_up: tuple[str, str] | None = None
    """The queue and the id of the job that its last ending enqueued; None if there is none."""

    @property
    def pending(self) -> int:
        """The number of jobs that have not ended."""
        return max(0, self.jobs - self.finished - self.failed - self.cancelled)

    @property
    def succeeded(self) -> bool:
        """True if it has ended, and all its jobs have finished."""
        return self.state == "ended" and self.finished == self.jobs and self.cancel_reason is None


def _keys_in(base: str) -> QueueKeys:
    """Return the keys of the queue or shard whose base this is. No name and no prefix has a brace."""
    prefix = base.partition(":{")[0]
    return keys_at(prefix, base)


def ref_of(record: Mapping[bytes, bytes] | None) -> BatchRef | None:
    """Return the batch that the record of a job names, if any."""
    return ref_in((record or {}).get(b"batch", b""))


def ref_in(field: bytes) -> BatchRef | None:
    """Return the batch that the field `batch` of a record names; None if it is empty. The field has no prefix of the mesh."""
    lines = field.decode("utf-8", "replace").split("\n")
    if len(lines) not in (2, 3):
        return None
    token, home, *names = lines
    name = names[0] if names else ""
    home_keys = _keys_in(f":{home}")
    return BatchRef(home_keys.display_name, name or f"@{token}{home_keys.id_suffix}", home, token)


def ended_of(record: Mapping[bytes, bytes] | None) -> BatchInfo | None:
    """Return the batch that a follow-up is about, from its record; None for any other job."""
    packed = (record or {}).get(b"batch_ended")
    if packed is None:
        return None
    try:
        facts = msgspec.msgpack.decode(packed, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # another program has written it
    return BatchInfo(
        id=str(facts.get("id", "")),
        queue=_keys_in(str(facts.get("home", ""))).display_name,
        state="ended",
        jobs=_stored_number(facts, "added") or 0,
        finished=_stored_number(facts, "finished") or 0,
        failed=_stored_number(facts, "failed") or 0,
        cancelled=_stored_number(facts, "cancelled") or 0,
        endings=_stored_number(facts, "endings") or 0,
        meta=meta_of(str(facts.get("meta") or "")),
        ended=moment(_stored_number(facts, "ended_at")),
        cancel_reason=reason if isinstance(reason := facts.get("cancel_reason"), str) else None,
    )


def _stored_number(facts: Mapping[str, object], name: str) -> int | None:
    value = facts.get(name)
    return whole(value) if isinstance(value, int | str | bytes) else None


# `EndedJob`: what a follow-up of one job learns of it.


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, as its follow-up sees it: ``worqr.current().ended_job``."""

    id: str
    """Its id, unique in its queue."""
    queue: str
    """The name of its queue."""
    outcome: Literal["finished", "failed", "cancelled"]
    """How it ended. ``failed``: it is in the dead-letter queue, or has expired."""
    reason: str = ""
    """Why it failed: ``failed``, ``timeout``, ``stalled``, ``expired``, ``undecodable``, or ``lost`` if its record was damaged.
    Why it was cancelled, in the words of who did that. Empty if it has finished.
    """
    error: RemoteError | None = None
    """Its last error; None if it has not failed."""
    result_size: int | None = None
    """The bytes of its encoded result; None if it has not finished."""
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    """The `meta` of its dispatch."""
    ended: datetime | None = None
    """The time at which it ended, by the server's clock."""
    _result: bytes | None = field(default=None, repr=False)

    def result(self, kind: Any = Any) -> Any:
        """Return its result, decoded as the type `kind`.

        Args:
            kind: A type that JSON knows, such as the return annotation of its function. Default: as JSON has it.

        Raises:
            UsageError: It has not finished; its result is larger than 64 KiB, and was not passed on; or it is not of this type.
        """
        if self._result is None:
            why = (
                f"has {self.outcome}, and has no result: read its error and its reason"
                if self.result_size is None
                else f"has a result of {self.result_size:,} bytes, and a follow-up gets at most 64 KiB: store it elsewhere, and "
                "return its name"
            )
            raise UsageError(f"the job {self.id!r} of {self.queue!r} {why}")
        encoding, _, value = self._result.partition(b" ")
        try:
            if encoding == b"bytes":
                return msgspec.convert(value, kind)
            return decoder_of(kind)(b"null" if encoding == b"none" else value)
        except Exception as error:
            raise UsageError(f"the result of the job {self.id!r} of {self.queue!r} is no {kind!r}: {error}") from error


def with_result(job: EndedJob, result: bytes) -> EndedJob:
    """Return a job that has finished with an encoded result: its encoding, a space, and its bytes."""
    return replace(job, result_size=len(result.partition(b" ")[2]), _result=result)


def ended_job_of(record: Mapping[bytes, bytes] | None) -> EndedJob | None:
    """Return the job that a follow-up is about, from its record; None for any other job."""
    length, _, rest = (record or {}).get(b"job_ended", b"").partition(b" ")
    size = whole(length)
    try:
        facts = msgspec.msgpack.decode(rest[:size], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # there is none, or another program has written it
    told, value = str(facts.get("outcome", "")), rest[size:]
    outcome: Any = {"large": "finished", "gone": "failed"}.get(told, told)
    reason = {"gone": "lost", "cancelled": value.decode("utf-8", "replace")}.get(told, str(facts.get("reason") or ""))
    size = whole(value) if told == "large" else len(value.partition(b" ")[2]) if told == "finished" else None
    return EndedJob(
        *(str(facts.get("id", "")), _keys_in(str(facts.get("home", ""))).display_name, outcome, public_name(reason)),
        error=packed_error(value) if told == "failed" else None,
        result_size=size,
        meta=meta_of(str(facts.get("meta") or "")),
        ended=moment(_stored_number(facts, "ended_at")),
        _result=value if told == "finished" else None,
    )


def follow_up_queues(prefix: str, follow: bytes) -> dict[str, str]:
    """Return the queues of `then` and `otherwise` from the field `follow` of a record; an empty name: there is none."""
    _, *bases = follow.decode("utf-8", "replace").split("\n")
    names: dict[str, str] = {}
    for what, base in zip(("then", "otherwise"), bases, strict=False):
        with suppress(UsageError):  # another program has made it up
            names[what] = keys_at(prefix, base).display_name if base else ""
    return names


def followed_in(fields: Mapping[str, bytes]) -> tuple[str, str] | None:
    """Return the queue and the id of the job that a follow-up is about, from its record; None for any other job."""
    ended = ended_job_of({b"job_ended": fields.get("job_ended", b"")})
    return None if ended is None else (ended.queue, ended.id)


def sum_counts(parts: Iterable[tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Return jobs, finished, failed and cancelled from the counters of the parts. Lost jobs count as failed."""
    added = finished = failed = cancelled = 0
    for counts in parts:
        added += counts[0]
        finished += counts[1]
        failed += counts[2] + counts[4]
        cancelled += counts[3]
    return added, finished, failed, cancelled


def follow_up_options(options: Mapping[str, object], what: str) -> dict[str, object]:
    """Return the encoded options of a follow-up.

    Raises:
        UsageError: it has an option that a follow-up cannot have.
    """
    for name, public in _NOT_OF_FOLLOW_UPS.items():
        if name in options:
            raise UsageError(
                f"{what} is a new job with an id of its own, at each end: leave {public}= out of its options"
            )
    if FOLLOW_UPS in options and what == "otherwise":
        raise UsageError(
            "the call of otherwise= may run more than once, as its job can be put back and fail again, so it has no then= and "
            "otherwise= itself: let it dispatch the next call"
        )
    return {name: value for name, value in options.items() if name not in _DROPPED}


def milliseconds(value: Seconds, what: str) -> int:
    """Return seconds as milliseconds. Raises UsageError, which names `what`."""
    return round(seconds(value, what, positive=True) * 1000)
