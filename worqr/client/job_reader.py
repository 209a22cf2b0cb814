"""`JobRecord`: everything that is stored about one id, read in one request and put into the form for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, cast

import msgspec

from worqr.batches import ref_in
from worqr.client.running import claim_name, deadline_of
from worqr.client.stats import status_of
from worqr.job_states import DISPLAY_NAMES
from worqr.keys import QueueKeys
from worqr.ops import Everything, JobState, Stored, StoredResult
from worqr.policy import POLICY_FIELDS
from worqr.records import Ended, Failed, JobRecord, RemoteError, Status, TaskInfo, Try
from worqr.remote_error import failed_record, fields_of, meta_of
from worqr.validation import from_ms

_SECONDS: Final = frozenset({"min_backoff", "max_backoff", "timeout", "result_ttl"})
_NOTHING: Final[Mapping[str, bytes]] = {}


def job_record(keys: QueueKeys, id: str, found: Everything, payload: bytes | None = None) -> JobRecord:
    """Return the stored state of the job for people. `payload`: the whole payload, if it was read."""
    live = found.run or found.job
    latest = live or next(iter(found.records), None)
    fields = latest.fields if latest else _NOTHING
    claim = _number(fields, "claim") if found.run else None
    return JobRecord(
        id=id,
        queue=keys.display_name,
        status=_status(found),
        task=payload if payload is not None else fields.get("task", b""),
        size=latest.size if latest else None,
        plain="twin" in fields,
        meta=meta_of(_text(fields, "meta")),
        options=own_options(fields),
        dispatched=None if "twin" in fields else _moment((_number(fields, "first") or 0) / 1000),
        scheduled_for=_moment(_number(fields, "scheduled_for")),
        expires_at=_expires_at(fields),
        failures=_number(fields, "failures") or 0,
        stalls=_number(fields, "stalls") or 0,
        timeouts=_number(fields, "timeouts") or 0,
        tries=_tries(fields.get("tries", b"")),
        claim=None if claim is None else claim_name(keys, claim),
        cancelling=found.cancelling,
        cancel_reason=_text(fields, "cancel_reason"),
        deadline=None if claim is None else deadline_of(claim, _number(fields, "timeout")),
        reserved=found.reserved_ms / 1000 if found.reserved_ms >= 0 else None,
        blocked=_blocked(id, found.job) if found.run and found.job else None,
        ended=tuple(_ended(each) for each in found.results if each is not None),
        dead_letters=tuple(_failed(keys, each) for each in found.records),
        twins=tuple(found.twins),
        lane=_text(fields, "lane"),
        batch=ref_in(fields.get("batch", b"")),
        saved_size=_number(fields, "saved_size") or 0,
    )


def _status(found: Everything) -> Status:
    """Return the state as the script job_status determines it: a live record first, then the newest result."""
    newest = found.results[0] if found.results else None
    if found.run is not None:
        return status_of(_state(found.run.fields, "active", 1))
    if found.job is not None:
        return status_of(_state(found.job.fields, _text(found.job.fields, "state"), 0))
    if newest is not None:
        ended = _ended(newest)
        seen = JobState(
            state=ended.state,
            progress=ended.progress,
            message=ended.message,
            failures=ended.failures,
            attempts=ended.attempts,
            error=_short(ended.error),
        )
        return status_of(seen)
    if found.records:
        fields = found.records[0].fields
        return status_of(_state(fields, "failed", 1 if _text(fields, "reason") == "broken" else 0))
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
    )


def _blocked(id: str, job: Stored) -> TaskInfo:
    run_at = _moment(_number(job.fields, "run_at"))
    state = DISPLAY_NAMES.get(_text(job.fields, "state"), _text(job.fields, "state"))
    return TaskInfo(cast("Any", state), run_at=run_at, id=id, task=job.fields.get("task", b""), size=job.size)


def _ended(result: StoredResult) -> Ended:
    fields = result.fields
    return Ended(
        state=cast("Any", _text(fields, "outcome")),
        attempts=_number(fields, "attempts") or 0 if "attempts" in fields else 1,
        failures=_number(fields, "failures") or 0,
        progress=_progress(fields),
        message=_text(fields, "message"),
        error=_error(fields, traceback=True),
        reason=_text(fields, "reason"),
        expires_in=max(0, result.left_ms) / 1000,
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
    """Return the options that the dispatch of a job set, from its record. Times are in seconds."""
    found: dict[str, int | float | bool | str] = {}
    for name in sorted(POLICY_FIELDS & fields.keys()):
        number = _number(fields, name)
        if name.endswith("_on") or number is None:
            found[name] = _text(fields, name)
        elif name == "jitter":
            found[name] = number == 1
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


def _tries(packed: bytes) -> tuple[Try, ...]:
    """Return the stored tries; none if another program stored something else."""
    try:
        entries = msgspec.msgpack.decode(packed, type=list[tuple[int, int, str, str, str, str]])
        return tuple(
            Try(from_ms(at), ms / 1000, worker, cast("Any", reason), RemoteError(kind, message, ""))
            for at, ms, worker, reason, kind, message in entries
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError, OSError):
        return ()


def _moment(ms: float | None) -> datetime | None:
    """Return a stored time; None if there is none, or one that no calendar has."""
    try:
        return from_ms(ms) if ms else None
    except (OverflowError, ValueError, OSError):
        return None


def _text(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")


def _number(fields: Mapping[str, bytes], name: str) -> int | None:
    value = fields.get(name, b"")
    return int(value) if value.isdigit() else None


def _progress(fields: Mapping[str, bytes]) -> float | None:
    value = fields.get("progress", b"")
    return float(value) if value else None
