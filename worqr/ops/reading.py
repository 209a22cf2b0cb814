"""Looking at a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worqr.call import Call
from worqr.keys import QueueKeys
from worqr.ops.replies import MAX_BYTES, MAX_ITEMS, MAX_SKIPPED, Reply, new_call, pairs, text, texts

_NOT_TOTALS: Final = {"fence", "cleared", "cleared_why", "stale"}
"""Fields of the counters' hash that count nothing which happened."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """Reply of inspect; `workers` are the members of the fence and those who leave it, `counts` totals by name."""

    waiting: int
    due: int
    running: int
    failed: int
    broken: int
    paused: str | None
    trash: bool
    workers: list[str]
    counts: dict[str, int]
    blocked: int
    next_in_ms: int | None
    oldest_ms: int | None


def inspect(keys: QueueKeys) -> Call[Inspected]:
    """What there is to know of the queue."""

    def read(reply: Reply) -> Inspected:
        waiting, due, running, failed, broken = (int(part) for part in reply[1:6])
        paused = None if reply[6] is None else text(reply[6])
        counts = {name: int(value) for field, value in pairs(reply[9]) if (name := text(field)) not in _NOT_TOTALS}
        next_in, oldest = (None if ms < 0 else ms for ms in (int(part) for part in reply[11:13]))
        return Inspected(
            *(waiting, due, running, failed, broken, paused, bool(reply[7]), texts(reply[8]), counts),
            *(int(reply[10]), next_in, oldest),
        )

    names = (
        *(keys.base, keys.workers, keys.due, keys.failed, keys.broken),
        *(keys.paused, keys.counts, keys.trash, keys.trash_suspects, keys.trash_due, keys.trash_blocked, keys.blocked),
    )
    return new_call("inspect", keys.base, names, (), read)


def list_tasks(keys: QueueKeys, limit: int, *, from_front: bool = False) -> Call[tuple[int, list[bytes]]]:
    """How many tasks wait, and up to `limit` payloads, newest first or in the order in which they will be taken."""

    def read(reply: Reply) -> tuple[int, list[bytes]]:
        return int(reply[1]), reply[2:]

    args = (limit, 1 if from_front else 0, MAX_BYTES, MAX_SKIPPED)
    return new_call("list_tasks", keys.base, (keys.base, keys.suspects), args, read)


@dataclass(frozen=True, slots=True)
class Held:
    """One claim, as `list_claims` answers; the rest is known of jobs only."""

    claim: int
    worker: str
    failures: int
    progress: float | None
    message: str
    run_at_ms: int | None


def list_claims(keys: QueueKeys, limit: int = MAX_ITEMS) -> Call[list[Held]]:
    """What runs."""

    def held(claim: bytes, worker: bytes, *rest: bytes | None) -> Held:
        failures, progress, message, run_at = rest
        return Held(
            *(int(claim), text(worker), int(failures or 0), float(progress) if progress else None),
            *(text(message or ""), int(run_at) if run_at else None),
        )

    def read(reply: Reply) -> list[Held]:
        return [held(*entry) for entry in reply[1:]]

    return new_call("list_claims", keys.base, (keys.base, keys.workers), (limit,), read)


def list_marks(keys: QueueKeys, claims: Sequence[int]) -> Call[list[int]]:
    """Those of up to MAX_ITEMS claims whose cancellation is asked for and not settled yet."""

    def read(reply: Reply) -> list[int]:
        return [int(claim) for claim in reply[1:]]

    return new_call("list_marks", keys.base, (keys.cancelling,), tuple(claims), read)
