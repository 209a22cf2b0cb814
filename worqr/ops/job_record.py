"""Everything that is stored about one job, and its whole payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from worqr.keys import QueueKeys
from worqr.ops.replies import Reply, new_call, pairs, status_word, text, texts
from worqr.script_call import Call

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


def read_job(keys: QueueKeys, id: str) -> Call[Everything]:
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

    kept = (keys.job(id), keys.active(id), keys.result(id), keys.older_result(id))
    names = (keys.base, *kept, keys.counts, keys.dead_letter_index, keys.cancelling, keys.taken(id))
    return new_call("read_job", keys.base, names, (id, HEAD_BYTES, READ_BYTES, MANY_RECORDS), read)


def read_payload(keys: QueueKeys, id: str = "", claim: int | None = None) -> Call[bytes | None]:
    """Return the whole payload of the task that an id or a claim names; None if there is no such task."""

    def read(reply: Reply) -> bytes | None:
        return None if status_word(reply) == "gone" else bytes(reply[1])

    names = (keys.base, keys.job(id), keys.active(id), keys.dead_letter_index)
    return new_call("read_payload", keys.base, names, (id, "" if claim is None else claim), read)
