"""The snapshot of a mesh: how it is made of the queues and the workers, and how it is stored. Pure.

The leader writes snapshots while programs read them: `worqr.peer.leader.scan_poster`. `worqr.client.mesh_info` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from worqr.keys import QueueKeys
from worqr.limits import limits_text, parse_limits
from worqr.mesh_records import AppInfo, MeshInfo, QueueInfo, WorkerInfo
from worqr.stored_values import readable
from worqr.validation import from_ms

MAX_QUEUES: Final = 1000
"""Queues that a snapshot names; the others are added up."""
MAX_REASON: Final = 300
"""Characters of the reason of a pause, or of a refusal, that a snapshot has."""
OTHERS: Final = "(others)"
MAX_UNREADABLE: Final = 100
"""Queues that cannot be read that a snapshot names."""
MAX_UNHEALTHY: Final = 20
"""Workers in trouble that a snapshot names."""
LATE_LOOP: Final = 1.0
"""Seconds by which the event loop of a worker may be late before the worker counts as unhealthy."""


class _Queue(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `QueueInfo`: those that are zero are not stored. `limits`: as text (`worqr.limits`)."""

    name: str
    waiting: int = 0
    scheduled: int = 0
    blocked: int = 0
    running: int = 0
    failed: int = 0
    broken: int = 0
    paused: str | None = None
    oldest_job: float | None = None
    workers: int = 0
    counts: dict[str, int] = {}
    age: float | None = None
    age_estimated: bool = False
    limits: str = ""
    limits_overridden: bool = False
    held_back: Literal["", "paused", "concurrency", "rate", "lanes"] = ""
    held_for: float | None = None
    lanes: int = 0
    held_lanes: int = 0
    batches: int = 0
    relay_pending: bool = False
    open_batches: int = 0
    due_soon: int = 0


class _App(msgspec.Struct, omit_defaults=True):
    """The fields of `AppInfo`."""

    workers: int = 0
    running: int = 0
    room: int = 0
    full_since: int = 0


class _Snapshot(msgspec.Struct, omit_defaults=True):
    """`at`: the server's time in ms. `others`: the sum of the queues that are not named."""

    at: int
    leader: str = ""
    queues: list[_Queue] = []
    left_out: int = 0
    others: _Queue | None = None
    apps: dict[str, _App] = {}
    unhealthy: list[WorkerInfo] = []
    unreadable: dict[str, str] = {}


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Snapshot)


def apps_of(workers: Iterable[WorkerInfo]) -> dict[str, AppInfo]:
    """Return the workers that were not declared dead, added up by their application."""
    found: dict[str, AppInfo] = {}
    ready: dict[str, list[datetime | None]] = {}
    for worker in workers:
        if worker.state != "dead":
            seen = found.get(worker.app, AppInfo(0, 0, 0))
            found[worker.app] = AppInfo(seen.workers + 1, seen.running + worker.running, seen.room + worker.room)
        if worker.state == "ready":
            ready.setdefault(worker.app, []).append(worker.full_since)
    return {name: replace(app, full_since=_full_since(ready.get(name, []))) for name, app in sorted(found.items())}


def _full_since(workers: Iterable[datetime | None]) -> datetime | None:
    """Return since when all these workers were full; None if one is not, or there are none."""
    times = list(workers)
    known = [each for each in times if each is not None]
    return max(known) if known and len(known) == len(times) else None


def unhealthy_of(workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Return the workers that need an operator, the worst first, without their queues."""
    found = [worker for worker in workers if worker.state in ("missing", "dead") or (worker.lag or 0.0) > LATE_LOOP]
    found.sort(key=lambda worker: (worker.state not in ("missing", "dead"), -worker.beat_age, -(worker.lag or 0.0)))
    return [replace(worker, queues=frozenset()) for worker in found[:MAX_UNHEALTHY]]


def unreadable_of(refused: Mapping[str, str]) -> dict[str, str]:
    """Return the queues that the server refuses to read, by their names for people, with its words."""
    found = {readable(QueueKeys.of("", name).display_name): why[:MAX_REASON] for name, why in refused.items()}
    return dict(sorted(found.items())[:MAX_UNREADABLE])


def is_in_use(queue: QueueInfo) -> bool:
    """Return True if the queue is not empty, keeps batches, has a worker, or an operator has paused or limited it."""
    holds = queue.waiting or queue.running or queue.scheduled or queue.blocked or queue.failed or queue.broken
    return bool(holds or queue.batches or queue.workers or queue.limits_overridden) or queue.paused is not None


def most_active(queues: Iterable[QueueInfo]) -> tuple[list[QueueInfo], int, QueueInfo | None]:
    """Return the queues to name, the most active first; how many are left out, and their sum."""
    ordered = sorted(queues, key=_activity)
    rest = ordered[MAX_QUEUES:]
    return ordered[:MAX_QUEUES], len(rest), _sum_of(rest) if rest else None


def _activity(queue: QueueInfo) -> tuple[int, int, int, str]:
    return (-queue.running - queue.waiting, -queue.scheduled - queue.blocked, -queue.workers, queue.name)


def _sum_of(queues: Sequence[QueueInfo]) -> QueueInfo:
    counts: Counter[str] = Counter()
    for queue in queues:
        counts.update(queue.counts)
    oldest = max(queues, key=lambda queue: -1.0 if queue.age is None else queue.age)
    return QueueInfo(
        name=OTHERS,
        waiting=sum(queue.waiting for queue in queues),
        scheduled=sum(queue.scheduled for queue in queues),
        blocked=sum(queue.blocked for queue in queues),
        running=sum(queue.running for queue in queues),
        failed=sum(queue.failed for queue in queues),
        broken=sum(queue.broken for queue in queues),
        paused=None,
        oldest_job=max((queue.oldest_job for queue in queues if queue.oldest_job is not None), default=None),
        workers=sum(queue.workers for queue in queues),
        counts=dict(counts),
        batches=sum(queue.batches for queue in queues),
        relay_pending=any(queue.relay_pending for queue in queues),
        open_batches=sum(queue.open_batches for queue in queues),
        due_soon=sum(queue.due_soon for queue in queues),
        age=oldest.age,
        age_estimated=oldest.age_estimated,
    )


def encode_snapshot(info: MeshInfo) -> bytes:
    """Return the snapshot as msgpack: maps whose fields are those of the records, without zeros."""
    stored = _Snapshot(
        at=round(info.at.timestamp() * 1000),
        leader=info.leader or "",
        queues=[_stored(queue) for queue in info.queues],
        left_out=info.queues_left_out,
        others=None if info.others is None else _stored(info.others),
        apps={name: _stored_app(app) for name, app in info.apps.items()},
        unhealthy=list(info.unhealthy),
        unreadable=dict(info.unreadable),
    )
    return _encoder.encode(stored)


def decode_snapshot(stored: bytes, now_ms: int) -> MeshInfo | None:
    """Return the snapshot as of `now_ms`, the server's time; None if it cannot be decoded."""
    try:
        found = _decoder.decode(stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return MeshInfo(
        at=from_ms(found.at),
        source="leader",
        age=max(0, now_ms - found.at) / 1000,
        leader=found.leader or None,
        queues=[_queue(queue) for queue in found.queues],
        queues_left_out=found.left_out,
        others=None if found.others is None else _queue(found.others),
        apps={name: _app(app) for name, app in found.apps.items()},
        unhealthy=found.unhealthy,
        unreadable=found.unreadable,
    )


def _stored_app(app: AppInfo) -> _App:
    since = 0 if app.full_since is None else round(app.full_since.timestamp() * 1000)
    return _App(app.workers, app.running, app.room, since)


def _app(app: _App) -> AppInfo:
    return AppInfo(app.workers, app.running, app.room, from_ms(app.full_since) if app.full_since else None)


def _stored(queue: QueueInfo) -> _Queue:
    if queue.paused is not None:
        queue = replace(queue, paused=queue.paused[:MAX_REASON])
    values: dict[str, Any] = {name: getattr(queue, name) for name in _Queue.__struct_fields__}
    values["limits"] = limits_text(queue.limits, queue.name)
    return _Queue(**values)


def _queue(stored: _Queue) -> QueueInfo:
    values: dict[str, Any] = {name: getattr(stored, name) for name in _Queue.__struct_fields__}
    values["limits"] = parse_limits(stored.limits)
    return QueueInfo(**values)
