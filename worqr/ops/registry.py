"""The mesh as a whole: registered workers, heartbeats, the leader's lease, names of queues, the log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from worqr.command import (
    MAX_ITEMS,
    Argument,
    Command,
    Reply,
    expect,
    expect_ok,
    names_of,
    new_call,
    pairs,
    status_word,
    text,
    texts,
)
from worqr.errors import WrongVersion
from worqr.keys import QueueKeys, RegistryKeys
from worqr.limits import DECLARES_NOTHING
from worqr.mesh_records import LogEntry
from worqr.stored_values import exact, finite, whole
from worqr.validation import from_ms

# The snapshot of the mesh: the leader's scan stores it, and programs that look at the mesh read it.


MAX_LOG_TEXT: Final = 300
"""Characters of a text in the log."""
WAITING_EXPIRE_S: Final = 10
SNAPSHOT_EXPIRE_S: Final = 15
WATCHED_EXPIRE_S: Final = 30
"""How long the leader goes on writing snapshots after the last read."""


class StoredSnapshot(msgspec.Struct, frozen=True):
    """Reply of read_snapshot: the server's time, and the snapshot as it is stored; None if there is none. `memory`: the used part
    of the limit of the server's memory; None if there is none, or the user may not ask.
    """

    now_ms: int
    stored: bytes | None
    memory: float | None = None


def post_scan(keys: RegistryKeys, waiting: Sequence[str], snapshot: bytes = b"") -> Command[str]:
    """Announce the queues with waiting tasks to every heartbeat, and store the snapshot, if there is one."""
    args: tuple[bytes | str | int, ...] = (WAITING_EXPIRE_S, SNAPSHOT_EXPIRE_S, snapshot, *waiting)
    return new_call("post_scan", keys.base, args, expect_ok, size=len(snapshot))


def read_snapshot(keys: RegistryKeys) -> Command[StoredSnapshot]:
    """Return the newest snapshot, and let the leader go on writing snapshots."""

    def read(reply: Reply) -> StoredSnapshot:
        status_word(reply)
        used, limit = int(reply[3]), int(reply[4])
        return StoredSnapshot(int(reply[1]), reply[2], used / limit if limit else None)

    return new_call("read_snapshot", keys.base, (WATCHED_EXPIRE_S,), read)


WIRE_VERSION: Final = 1
QUEUES_EXPIRE_S: Final = 30 * 24 * 3600
INFO_EXPIRE_S: Final = 60
QUEUES_AT_ONCE: Final = 1000
"""Names in one page of list_queues: a millisecond of the server's time."""
WORKERS_AT_ONCE: Final = 300
"""Workers in one page of list_workers: some milliseconds of the server's time."""
WORK_MAPS_AT_ONCE: Final = 5000
"""Names of queues after which such a page ends."""
FORGET_AT_ONCE: Final = 100
MANY_DYING: Final = 20
"""The number of dead workers in recovery above which forget_queues does nothing, because it reads one key for each."""
UNUSED_MS: Final = 3_600_000
"""The age of the last note after which a name may be forgotten. A process notes its queues every NOTE_EVERY seconds."""
ANY_BEAT: Final = b"*"
"""For condemn_worker: evict the worker, whatever its heartbeat is."""
NOTE_EVERY: Final = 600.0
"""Seconds between two notes of a queue by a producer or peer that uses it."""


class Beat(msgspec.Struct, frozen=True):
    """Reply of keep_worker_alive.

    Attributes:
        alive: False: the worker was declared dead.
        revived: its keepalive key had expired, and was set again.
        leads: it holds the lease.
        waiting: the queues with waiting tasks.
        lease: the lease after this heartbeat; '' for none.
        request: what an operator asks of the worker, and it has not answered; '' for nothing.
    """

    alive: bool
    revived: bool
    leads: bool
    waiting: list[str]
    lease: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True)
class WorkerHeartbeats:
    """Reply of look_at_workers: the server's run id, each registered worker's heartbeat (None: missing), and the dead workers."""

    run_id: str
    beats: dict[str, bytes | None]
    dying: list[str]


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker as `list_workers` returns it. `ttl_ms`: until its keepalive key expires; -1: never, -2: there is none."""

    worker: str
    dead: bool
    ttl_ms: int
    facts: dict[str, str]
    queues: list[str]


class WorkersPage(msgspec.Struct, frozen=True):
    """Reply of list_workers: the worker id of the leader ('' for none), workers by id, and the ids after which the further pages
    begin.
    """

    leader: str
    rows: list[WorkerRow]
    cursors: list[str]


class QueuesPage(msgspec.Struct, frozen=True):
    """Reply of list_queues: the server's time, names with the times in ms at which they were noted, the last noted first, where
    the next page begins (None: there is none), and whether a program reads snapshots of the mesh.
    """

    now_ms: int
    names: dict[str, float]
    next: tuple[bytes, bytes] | None
    watched: bool = False


def _check_version(keys: RegistryKeys, reply: Reply) -> None:
    """Raise WrongVersion if the reply is a refusal of the wire version."""
    if status_word(reply) == "version":
        raise WrongVersion(
            f"the mesh {keys.prefix!r} on this server speaks wire version {text(reply[1])}, this worqr speaks "
            f"{WIRE_VERSION}: upgrade the older side, or use another prefix"
        )


def start_worker(
    keys: RegistryKeys, worker: str, *, keepalive_ms: int, facts: Sequence[tuple[str, str | int]], text: str = ""
) -> Command[str]:
    """Register a worker. With keepalive_ms 0, it never counts as dead."""

    def read(reply: Reply) -> str:
        _check_version(keys, reply)
        return expect_ok(reply)

    flat = [part for fact in facts for part in fact]
    args = (worker, keepalive_ms, WIRE_VERSION, INFO_EXPIRE_S, text[:MAX_LOG_TEXT], *flat)
    return new_call("start_worker", keys.base, args, read, numbered=True)


def keep_worker_alive(
    keys: RegistryKeys,
    worker: str,
    beat: int,
    *,
    keepalive_ms: int,
    lease_ms: int,
    running: int,
    room: int,
    lag_ms: int = 0,
    leaving: bool = False,
    quiet: bool = False,
    stale_lease: str = "",
    answer: str = "",
) -> Command[Beat]:
    """Send one heartbeat. With lease_ms 0, do not ask for the lease. `stale_lease`: one to take over, because its holder does not
    renew it. `answer`: to the last request of an operator.
    """

    def read(reply: Reply) -> Beat:
        word = status_word(reply)
        if word == "dead":
            return Beat(False, False, False, [])
        return Beat(True, word == "revived", bool(reply[1]), texts(reply[4:]), exact(reply[2]), text(reply[3]))

    state = 2 if quiet and not leaving else int(leaving)
    args = (worker, beat, keepalive_ms, lease_ms, INFO_EXPIRE_S, running, room, lag_ms, state, stale_lease, answer)
    return new_call("keep_worker_alive", keys.base, args, read)


def ask_worker(keys: RegistryKeys, worker: str, mode: str, concurrency: str) -> Command[bool]:
    """Ask a worker to be quiet, to resume or to drain, or for another concurrency; '' for neither. False: it is unknown."""

    def read(reply: Reply) -> bool:
        return status_word(reply) != "unknown"

    args = (worker, mode, concurrency, INFO_EXPIRE_S)
    return new_call("ask_worker", keys.base, args, read, numbered=True)


def _still_mapped(reply: Reply) -> list[str]:
    return names_of(reply[1:]) if status_word(reply) == "busy" else []


def stop_worker(keys: RegistryKeys, worker: str) -> Command[list[str]]:
    """Leave the registry; return the queues that are still mapped. If there are any, stop them first: nothing was done."""
    return new_call("stop_worker", keys.base, (worker,), _still_mapped)


def map_work(keys: RegistryKeys, worker: str, queue: str) -> Command[str]:
    """Note that the worker is about to serve the queue: ok, or dead."""
    args = (worker, queue, QUEUES_EXPIRE_S)
    return new_call("map_work", keys.base, args, expect("ok", "dead"), numbered=True)


def unmap_work(keys: RegistryKeys, worker: str, queue: str) -> Command[str]:
    """Note that the worker no longer serves the queue."""
    return new_call("unmap_work", keys.base, (worker, queue), expect_ok, numbered=True)


def look_at_workers(keys: RegistryKeys) -> Command[WorkerHeartbeats]:
    """List the registered workers with their heartbeats."""

    def read(reply: Reply) -> WorkerHeartbeats:
        beats = {exact(worker): beat for worker, beat in pairs(reply[2])}
        return WorkerHeartbeats(text(reply[1]), beats, names_of(reply[3]))

    return new_call("look_at_workers", keys.base, (), read)


def condemn_worker(
    keys: RegistryKeys, worker: str, heartbeat: bytes | None, *, who: str = "", text: str = ""
) -> Command[str]:
    """Declare the worker dead if `heartbeat` is still its own (None: missing; ANY_BEAT: any). Returns ok, alive or gone."""
    args = (worker, heartbeat or b"", who, text[:MAX_LOG_TEXT])
    return new_call("condemn_worker", keys.base, args, expect("ok", "alive", "gone"))


def forget_worker(keys: RegistryKeys, worker: str) -> Command[list[str]]:
    """End a worker's recovery; return the queues that are still mapped, which must be failed and unmapped first."""
    return new_call("forget_worker", keys.base, (worker,), _still_mapped)


def list_workers(keys: RegistryKeys, after: str = "", last: str = "") -> Command[WorkersPage]:
    """Return one page of the workers, by id: those after `after`, up to `last`."""

    def read(reply: Reply) -> WorkersPage:
        rows = [
            WorkerRow(
                exact(worker), bool(dead), int(ttl), {text(k): text(v) for k, v in pairs(facts)}, names_of(queues)
            )
            for worker, dead, ttl, facts, queues in reply[3:]
        ]
        status_word(reply)
        return WorkersPage(exact(reply[1]).rpartition(" ")[0], rows, names_of(reply[2]))

    args = (after, WORKERS_AT_ONCE, WORK_MAPS_AT_ONCE, last)
    return new_call("list_workers", keys.base, args, read)


def list_queues(keys: RegistryKeys, after: tuple[bytes, bytes] | None = None) -> Command[QueuesPage]:
    """Names of queues, the most recently noted first: the first page, or the page after `after`."""

    def read(reply: Reply) -> QueuesPage:
        status_word(reply)
        every = list(pairs(reply[2]))
        found = every[:QUEUES_AT_ONCE]
        last = (found[-1][1], found[-1][0]) if len(every) > len(found) else None
        names = {exact(name): finite(noted) or 0.0 for name, noted in found}
        return QueuesPage(int(reply[1]), names, last, bool(reply[3]))

    noted, name = after or (b"", b"")
    return new_call("list_queues", keys.base, (QUEUES_AT_ONCE + 1, noted, name), read)


def forget_queues(keys: RegistryKeys, names: Sequence[str]) -> Command[list[str]]:
    """Forget names of empty queues, at most FORGET_AT_ONCE; return the names that are no longer known.

    Forgets none while more than `MANY_DYING` dead workers are being recovered.
    """

    def read(reply: Reply) -> list[str]:
        status_word(reply)
        return names_of(reply[1:])

    args: tuple[str | int, ...] = (UNUSED_MS, MANY_DYING, *names)
    return new_call("forget_queues", keys.base, args, read)


def note_queues(keys: RegistryKeys, names: Sequence[str]) -> Command[str]:
    """Note that queues are in use now, so that their names are found."""
    return new_call("note_queues", keys.base, (QUEUES_EXPIRE_S, *names), expect_ok)


def declare_shards(keys: RegistryKeys, declared: Mapping[str, int]) -> Command[dict[str, int]]:
    """Store the number of shards of queues that have none stored yet; return the stored numbers."""

    def read(reply: Reply) -> dict[str, int]:
        status_word(reply)
        return {name: whole(stored, 1) for name, stored in zip(declared, reply[1:], strict=True)}

    flat = tuple(part for each in declared.items() for part in each)
    return new_call("declare_shards", keys.base, flat, read, numbered=True)


def list_shards(keys: RegistryKeys) -> Command[dict[str, int | None]]:
    """Return the number of shards of each queue that has several; raise WrongVersion. Every new connection calls it first.

    A number that cannot be read is None.
    """

    def read(reply: Reply) -> dict[str, int | None]:
        _check_version(keys, reply)
        return {exact(name): whole(number) for name, number in pairs(reply[1:])}

    return new_call("list_shards", keys.base, (WIRE_VERSION,), read)


def drop_shards(keys: RegistryKeys, queue: str, known: int) -> Command[str]:
    """Forget that the queue has `known` shards. Returns ok, or changed."""
    read = expect("ok", "changed")
    return new_call("drop_shards", keys.base, (queue, known), read, numbered=True)


def adopt_worker(keys: RegistryKeys, worker: str, queue: str) -> Command[str]:
    """Start the recovery of a worker that serves the queue but is not registered. Returns ok, or alive."""
    return new_call("adopt_worker", keys.base, (worker, queue), expect("ok", "alive"))


# The outboxes in databases: who sweeps their tables, and what is in them.


class OutboxLease(msgspec.Struct, frozen=True):
    """Reply of lease_outbox: whether the caller holds the lease, and the JSON that is stored about the table; '' for none."""

    held: bool
    facts: str


class StoredOutbox(msgspec.Struct, frozen=True):
    """One outbox as list_outboxes returns it. `idle_ms`: since the last lease ended; 0: a worker holds it."""

    id: str
    facts: str
    idle_ms: int


def lease_outbox(keys: RegistryKeys, outbox: str, holder: str, lease_ms: int, facts: str = "") -> Command[OutboxLease]:
    """Take or renew the lease of an outbox, or with 0 ms give it back, and store what its table has, unless `facts` is empty."""

    def read(reply: Reply) -> OutboxLease:
        return OutboxLease(status_word(reply) == "ok", text(reply[1] or b""))

    return new_call("lease_outbox", keys.base, (outbox, holder, lease_ms, facts), read)


def list_outboxes(keys: RegistryKeys) -> Command[list[StoredOutbox]]:
    """Return the outboxes of the mesh, by id."""

    def read(reply: Reply) -> list[StoredOutbox]:
        status_word(reply)
        rows = zip(reply[2::3], reply[3::3], reply[4::3], strict=True)
        return sorted(
            (StoredOutbox(text(each), text(facts), int(idle)) for each, facts, idle in rows), key=lambda row: row.id
        )

    return new_call("list_outboxes", keys.base, (), read)


# The named limits that programs use.


def note_limit(keys: RegistryKeys, name: str, unit: str) -> Command[str]:
    """Note that this program uses a named limit."""
    return new_call("note_limit", keys.base, (name, unit), expect_ok)


def list_limits(keys: RegistryKeys) -> Command[dict[str, str]]:
    """Return the unit of each named limit, by name; empty for one that counts calls."""

    def read(reply: Reply) -> dict[str, str]:
        status_word(reply)
        return {text(name): text(unit) for name, unit in zip(reply[1::2], reply[2::2], strict=True)}

    return new_call("list_limits", keys.base, (), read)


# The topics to which queues are subscribed.

NO_DEPLOY: Final = "0 "
"""The owner of what a worker declares that has neither a deploy nor an application: a number and a name, with a space between."""

PATTERN_UNSEEN_MS: Final = 3_600_000
"""Milliseconds after which a pattern is dropped that the workers of its queue no longer declare: six times as long as between two
declarations of one worker.
"""


class StoredTopics(msgspec.Struct, frozen=True):
    """The subscription of one queue: its facts, and for each pattern how many ms ago a worker has declared it."""

    queue: str
    facts: bytes
    patterns: dict[str, int]


def declare_topics(
    keys: RegistryKeys, queue: str, facts: bytes, patterns: Sequence[str], owner: str = NO_DEPLOY
) -> Command[str]:
    """Subscribe a queue to topics, or say again that it is. `owner` is the deploy of the worker, and its application."""
    args: tuple[bytes | str | int, ...] = (queue, facts, PATTERN_UNSEEN_MS, owner, *patterns)
    return new_call("declare_topics", keys.base, args, expect_ok, numbered=True)


def read_topics(keys: RegistryKeys) -> Command[list[StoredTopics]]:
    """Return the subscriptions of all queues, by queue."""

    def read(reply: Reply) -> list[StoredTopics]:
        status_word(reply)
        now = int(reply[1])
        found = [_topics(exact(queue), stored, now) for queue, stored in pairs(reply[2:])]
        return sorted(found, key=lambda each: each.queue)

    return new_call("read_topics", keys.base, (), read)


def _topics(queue: str, stored: bytes, now: int) -> StoredTopics:
    facts, *lines = stored.split(b"\n")
    parts = [line.split(b" ", 2) for line in lines if b" " in line]
    seen = {text(pattern): whole(time) for time, pattern, *_ in parts}
    patterns = {pattern: max(0, now - time) for pattern, time in seen.items() if time is not None and pattern}
    return StoredTopics(queue, facts, patterns)


def drop_topics(keys: RegistryKeys, queue: str) -> Command[bool]:
    """End the subscription of a queue. False: there is none."""

    def read(reply: Reply) -> bool:
        return status_word(reply) == "ok"

    return new_call("drop_topics", keys.base, (queue,), read, numbered=True)


def drop_outdated_topics(keys: RegistryKeys) -> Command[tuple[list[str], list[tuple[str, str]]]]:
    """Drop patterns of deploys that are older than all that run.

    The reply has the queues that are not subscribed any more, and each pattern with its queue.
    """

    def read(reply: Reply) -> tuple[list[str], list[tuple[str, str]]]:
        status_word(reply)
        return texts(reply[1]), [(exact(queue), text(pattern)) for queue, pattern in reply[2]]

    return new_call("drop_outdated_topics", keys.base, (), read)


# The log of the mesh: what has happened in it, for people.


def note_event(
    keys: RegistryKeys,
    kind: str,
    *,
    who: str = "",
    queue: str = "",
    worker: str = "",
    job: str = "",
    count: int | None = None,
    text: str = "",
) -> Command[str]:
    """Append an entry."""
    args = (kind, who, queue, worker, job, "" if count is None else count, text[:MAX_LOG_TEXT])
    return new_call("note_event", keys.base, args, expect_ok, numbered=True)


def list_events(keys: RegistryKeys, limit: int, after: str = "") -> Command[list[LogEntry]]:
    """Return the newest entries, or those after the entry with the id `after`; the oldest first."""

    def read(reply: Reply) -> list[LogEntry]:
        status_word(reply)
        found = [
            _entry(text(entry), {text(name): text(value) for name, value in pairs(fields)})
            for entry, fields in reply[1:]
        ]
        return found if after else found[::-1]

    return new_call("list_events", keys.base, (limit, after), read)


def _entry(id: str, fields: dict[str, str]) -> LogEntry:
    return LogEntry(
        id=id,
        at=from_ms(whole(id.partition("-")[0], 0)),
        kind=fields.get("kind", ""),
        who=fields.get("who", ""),
        queue=fields.get("queue", ""),
        worker=fields.get("worker", ""),
        job=fields.get("job", ""),
        count=whole(fields.get("n")),
        text=fields.get("text", ""),
    )


# A worker and a queue: start to serve it, stop to serve it, and recover its claims after the worker's death.

_CHANGES: Final[tuple[Literal["", "limits", "lanes"], ...]] = ("", "limits", "lanes")


class ReleasedClaims(msgspec.Struct, frozen=True):
    """Reply of stop_work and fail_worker: whether there is more to do, and how many claims ended in which way."""

    more: bool
    requeued: int
    cancelled: int
    dead_lettered: int


def start_work(
    keys: QueueKeys,
    worker: str,
    *,
    max_stalls: int,
    keep_failed: int,
    last: int,
    on_failure: bool = False,
    result_ttl_ms: int | None = None,
    limits: str = DECLARES_NOTHING,
    lanes: str | bytes = DECLARES_NOTHING,
    options: str = "",
    deploy: int = 0,
    secret: str = "",
    handoffs: bool = False,
) -> Command[Literal["", "limits", "lanes"]]:
    """Let the worker claim tasks of the queue; return what that has changed.

    "limits": other limits hold now, and perhaps other rules of lanes. "lanes": only the workers' rules of its lanes are others.

    `last` is the highest start request number that the worker sent to this queue before. `limits`: see
    `worqr.limits`. `lanes`: see `worqr.limits`. `options`: JSON, other options of the handler, for people.
    `deploy`: of the worker, 0: none. `secret`: with it, scripts prove that they cancel a claim of the worker; '': it asks.
    `handoffs`: it takes tasks that come with their wake-up.

    The server refuses it if the user lacks a right that the scripts of a worker need on this queue.
    """
    ttl = "-" if result_ttl_ms is None else result_ttl_ms
    handler = (max_stalls, keep_failed, int(on_failure), ttl, last, limits, lanes, options)
    args = (worker, *handler, deploy, secret, int(handoffs))
    return new_call("start_work", keys.base, args, _read_changed, numbered=True)


def _read_changed(reply: Reply) -> Literal["", "limits", "lanes"]:
    return _CHANGES[int(reply[1])] if status_word(reply) == "ok" else ""


def _read_released(reply: Reply) -> ReleasedClaims:
    return ReleasedClaims(status_word(reply) == "more", int(reply[1]), int(reply[2]), int(reply[3]))


def stop_work(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Command[ReleasedClaims]:
    """Stop serving the queue; call again while there is more."""
    return new_call("stop_work", keys.base, (worker, limit), _read_released, numbered=True)


class FoundClaims(msgspec.Struct, frozen=True):
    """Reply of find_claims: the server that was asked, the cursor of the next call (0: this was the last), and keys of claims."""

    run_id: str
    cursor: str
    keys: list[str]


def find_claims(keys: QueueKeys, cursor: str, budget: int, older_ms: int) -> Command[FoundClaims | None]:
    """Look at some keys of the server, or of the node of this queue, for claims of any queue that are older than that.

    Returns None if the user may not look at the names of all keys.
    """

    def read(reply: Reply) -> FoundClaims | None:
        if status_word(reply) == "denied":
            return None
        return FoundClaims(text(reply[1]), text(reply[2]), texts(reply[3:]))

    pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", keys.prefix) + ":{*:claim:*"
    return new_call("find_claims", keys.base, (cursor, budget, pattern, older_ms), read)


def adopt_claims(keys: QueueKeys, worker: str, known: Iterable[str], claims: Sequence[int]) -> Command[int]:
    """Give those claims that no worker holds to `worker`, which is no worker of the registry. Returns how many these are.

    `known`: all workers of the registry.
    """
    args: tuple[Argument, ...] = (worker, "\n".join(known), *claims)
    return new_call("adopt_claims", keys.base, args, lambda reply: int(reply[1]) if status_word(reply) == "ok" else 0)


def fail_worker(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Command[ReleasedClaims]:
    """Give a dead worker's claims back to the queue; call again while there is more."""
    return new_call("fail_worker", keys.base, (worker, limit), _read_released)
