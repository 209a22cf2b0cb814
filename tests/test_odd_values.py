"""Whatever another program has stored in the keys of a mesh, every reader returns the rest, and leaders and workers go on.

Each case is a place (a field of a record, a key, a message) and an odd value. The cases of one test are written side by side,
each into a record or a queue of its own between honest ones, so that each list is read once for all of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import redis
import trio
from msgspec.structs import replace

import worqr
from tests.peer.tools import Runs, serving, until
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.cli import main
from worqr.cron import Definition
from worqr.dashboard import Dashboard, admin
from worqr.errors import WorqrBug, WorqrError
from worqr.keys import MARKER
from worqr.metrics.fleet import FleetReader
from worqr.peer.leader import chore

pytestmark = pytest.mark.leaves("*")

VALUES: dict[str, bytes] = {
    "empty": b"",
    "letters": b"abc",
    "negative": b"-1",
    "fraction": b"1.5",
    "huge float": b"1e308",
    "nan": b"nan",
    "inf": b"inf",
    "after 9999": b"999999999999999",
    "over 64 bits": b"99999999999999999999",
    "5,000 digits": b"9" * 5000,
    "other digits": "٣²".encode(),
    "not UTF-8": b"\xff\xfe",
    "10 kB": b"x" * 10_000,
    "msgpack": b"\x93\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc1",
    "deep JSON": b'{"a":' * 3000,
}


def honest(kind: str) -> tuple[str, str]:
    """Return the ids of the honest jobs of a kind, which are stored before and after the odd ones."""
    return f"{kind}.honest.1", f"{kind}.honest.2"


def _check_texts(value: object) -> None:
    """Raise UnicodeEncodeError if a text in the value cannot be printed or sent."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        _check_texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _check_texts(each)
    elif is_dataclass(value):
        _check_texts([getattr(value, name.name) for name in fields(value)])


class Faults:
    """What went wrong in some cases. A test fails with all of them at once."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.reads = 0

    async def read(self, what: str, call: Callable[[], Awaitable[Any]], *allowed: type[Exception]) -> Any:
        """Return what a reader returns. Note what it raises, unless that is allowed."""
        self.reads += 1
        try:
            found = await call()
            _check_texts(found)
        except allowed as error:
            if not isinstance(error, WorqrBug):
                return None
            self.found.append(f"{what}: {error!r}"[:200])
        except Exception as error:
            self.found.append(f"{what}: {error!r}"[:200])
        else:
            return found
        return None

    def note(self, what: str, *, held: object) -> None:
        if not held:
            self.found.append(what)

    def check(self) -> None:
        assert not self.found, f"{len(self.found)} faults in {self.reads} reads:\n" + "\n".join(self.found[:60])


@pytest.fixture
def raw(server: Server, prefix: str) -> Iterator[redis.Redis]:
    """A client of redis-py. Everything under the prefix is deleted afterwards."""
    with server.client() as client:
        yield client
        delete_all(client, prefix)


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, patience=10)


# Records of jobs

NUMBERS = ("run_at", "queued", "first", "last", "failures", "stalls", "timeouts", "progress", "expires", "expires_at")
TEXTS = ("message", "meta", "error_type", "error_message", "tries", "lane", "batch", "worker", "task", "twin", "state")
POLICY = ("timeout", "result_ttl", "max_failures", "max_stalls", "max_timeouts", "min_backoff", "max_backoff", "jitter")
MORE = (
    "retry_on",
    "fail_on",
    "scheduled_for",
    "saved",
    "saved_size",
    "saved_number",
    "started",
    "retried_at",
    "latest",
)
JOB = (*NUMBERS, *TEXTS, *POLICY, *MORE)
FIELDS = {
    "waiting": JOB,
    "due": JOB,
    "blocked": JOB,
    "active": (*JOB, "claim", "cancel_reason"),
    "failed": (*JOB, "at", "reason", "older", "newer", "error_traceback", "error_fields", "id"),
    "broken": (*JOB, "at", "reason", "older", "error_traceback", "error_fields", "id"),
    "result": (
        *(
            "outcome",
            "first",
            "last",
            "kind",
            "value",
            "reason",
            "failures",
            "attempts",
            "progress",
            "message",
            "error_type",
        ),
        *("error_message", "error_traceback", "error_fields"),
    ),
}
CLAIM = 1_700_000_000_000_000
STORED = {
    "task": b'{"n":1}',
    "run_at": b"1700000000000",
    "queued": b"9000000000000000",
    "first": b"1",
    "last": b"1",
    "failures": b"2",
    "progress": b"0.5",
    "message": b"half way",
    "error_type": b"ValueError",
    "error_message": b"no",
}


class Forger:
    """Writes records of jobs as any program with access to the server can."""

    def __init__(self, client: redis.Redis, prefix: str, queue: str, claim: int) -> None:
        self.pipe = client.pipeline(transaction=False)
        self.base = f"{prefix}:{{{queue}}}"
        self.claim = claim
        self.pipe.hset(f"{self.base}:workers", "W1", "1")

    def write(self, kind: str, id: str, field: str = "", value: bytes = b"") -> None:
        """Store a job of this kind with an odd value in one field."""
        self.claim += 1
        claim, base, pipe = str(self.claim), self.base, self.pipe
        reference = MARKER + id.encode()
        stored: dict[str, bytes] = {**STORED, "state": kind.encode()}
        match kind:
            case "waiting":
                key = f"{base}:job:{id}"
                pipe.lpush(base, reference)
            case "due":
                key = f"{base}:job:{id}"
                pipe.zadd(f"{base}:due", {id: 4_000_000_000_000})
            case "blocked":
                key = f"{base}:job:{id}"
                pipe.sadd(f"{base}:blocked", id)
            case "active":
                key = f"{base}:active:{id}"
                stored |= {"claim": claim.encode(), "worker": b"W1"}
                pipe.sadd(f"{base}:claims:W1", claim)
                pipe.rpush(f"{base}:claim:{claim}", reference)
            case "result":
                key = f"{base}:result:{id}"
                stored = {"outcome": b"finished", "first": b"0", "last": b"0", "kind": b"json", "value": b"1"}
                if field.startswith("error"):
                    stored |= {"outcome": b"failed", "error_type": b"ValueError"}
                elif field == "reason":
                    stored["outcome"] = b"cancelled"
            case _:
                key = f"{base}:aside:{claim}"
                stored |= {"id": id.encode(), "reason": kind.encode(), "at": b"1700000000000", "worker": b"W1"}
                pipe.zadd(f"{base}:{kind}", {claim: self.claim / 1000})
                pipe.hset(f"{base}:aside", id, claim)
        if field:
            stored[field] = value
        pipe.hset(key, mapping=stored)  # type: ignore[arg-type]

    def close(self) -> None:
        self.pipe.execute()


def forge_jobs(raw: redis.Redis, prefix: str, kind: str, only: Sequence[str] = ()) -> list[str]:
    """Store honest jobs, and one for each field and each value. Return the ids of the latter."""
    forger, ids = Forger(raw, prefix, "odd", CLAIM + 1_000_000 * list(FIELDS).index(kind)), list[str]()
    forger.write(kind, honest(kind)[0])
    for field in [name for name in FIELDS[kind] if not only or name in only]:
        for n, value in enumerate(VALUES.values()):
            ids.append(f"{kind}.{field}.{n}")
            forger.write(kind, ids[-1], field, value)
    forger.write(kind, honest(kind)[1])
    forger.close()
    return ids


async def lists_of(mesh: worqr.Mesh, kind: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the readers of lists that have the honest jobs of this kind."""
    q = mesh.queue("odd")
    match kind:
        case "waiting":
            return {"jobs": partial(q.jobs, limit=10_000, state="waiting")}
        case "due":
            return {"jobs": partial(q.jobs, limit=10_000, state="scheduled")}
        case "blocked":
            return {"jobs": partial(q.jobs, limit=10_000, state="blocked")}
        case "active":
            return {"jobs": partial(q.jobs, limit=10_000, state="active"), "running": q.running}
        case "failed":
            return {"failed.list": partial(q.failed.list, 10_000)}
        case "broken":
            return {"undecodable.list": partial(q.undecodable.list, 10_000)}
        case _:
            return {}


async def read_all_else(mesh: worqr.Mesh, faults: Faults, queue: str = "odd", case: str = "") -> None:
    """Call every reader of a queue, for what it raises."""
    q = mesh.queue(queue)
    readers: dict[str, Callable[[], Awaitable[Any]]] = {
        **{f"jobs {state}": partial(q.jobs, state=state) for state in ("waiting", "scheduled", "blocked", "active")},
        "newest": partial(q.jobs, newest=True),
        "running": q.running,
        "tasks": q.tasks,
        "info": q.info,
        "lanes": q.lanes,
        **{
            f"failed.{n}": f
            for n, f in (("list", q.failed.list), ("errors", q.failed.errors), ("count", q.failed.count))
        },
        "undecodable": q.undecodable.list,
        "batches": q.batches,
        "recent": q.recent,
        "history": partial(q.history, 3600),
        "find": partial(q.find, b'{"n":1}'),
        "count": q.count,
    }
    for name, reader in readers.items():
        await faults.read(f"{case}: {name}", reader)


@pytest.mark.parametrize("kind", FIELDS)
async def test_a_record_with_an_odd_field_is_listed_like_the_others(
    kind: str, mesh: worqr.Mesh, raw: redis.Redis, prefix: str
) -> None:
    ids, faults = forge_jobs(raw, prefix, kind), Faults()
    async with mesh.connect():
        q = mesh.queue("odd")
        for name, reader in (await lists_of(mesh, kind)).items():
            found = await faults.read(name, reader)
            faults.note(f"{name} hides honest jobs", held={*honest(kind)} <= {each.id for each in found or ()})
            left_out = {*ids} - {each.id for each in found or ()}
            wrong = sorted(name for name in left_out if name.split(".")[1] not in {"state", "id"})
            faults.note(f"{name} hides {len(wrong)}: {wrong[:5]}", held=not wrong)
        for name in (*honest(kind), *ids):
            job = q.job(name)
            await faults.read(f"status of {name}", job.status)
            await faults.read(f"read of {name}", partial(q.read, name, payload=True))
            await faults.read(f"find of {name}", partial(mesh.find, name))
            await faults.read(f"payload of {name}", partial(q.payload, name))
            await faults.read(f"result of {name}", partial(job.result, timeout=0), WorqrError)
        await read_all_else(mesh, faults)
    faults.check()


# Keys of a queue

HASHES = {
    "counts": ("enqueued", "claimed", "finished", "stopped", "stale", "cleared", "cleared_why", "announced", b"\xff"),
    "runs": ("ok", "r0", "rs", "w0", "ws", b"\xff"),
    "limits": ("declared", "override"),
    "lanes": ("epoch", "waiting", "weights", "refile"),
    "lanes:rules": ("weight:L", "limit:L", "pause:L", "declared limit", "declared strict", "declared weight:L"),
    "lanes:running": ("L", b"\xff"),
    "lanes:claims": ("1", b"\xff"),
    "workers": ("W1", b"\xff"),
    "policy:W1": ("max_stalls", "keep_failed", "on_failure", "result_ttl", "options", "noted"),
    "aside": ("honest-1", "x"),
    "outbox": ("x",),
    "fired": ("x",),
    "batch:B": (
        "state",
        "token",
        "made_at",
        "ended_at",
        "endings",
        "keep",
        "open_until",
        "meta",
        "cancel_reason",
        "follow_up",
    ),
    "batch:B:parts": ("PREFIX:{q}", "x", b"\xff"),
    "part:T": ("added", "finished", "failed", "v", "home", "id", "closed"),
}
SETS = ("cancelling", "blocked", "limited", "claims:W1", "hungry", "trash:blocked", "part:T:members")
SORTED = {
    "due",
    "failed",
    "broken",
    "batches",
    "result_ttls",
    "lanes:names",
    "lanes:ring",
    "lanes:held",
    "lanes:opens",
    "trash:due",
}
LISTS = ("suspects", "recent", "starts:1000", "lane:0:L", "trash", "trash:suspects", "claim:1700000000000001")
STRINGS = ("paused", "history", "history10", "taken:honest-1")
KEYS = (
    *HASHES,
    *SETS,
    *sorted(SORTED),
    *LISTS,
    *STRINGS,
    "job:honest-1",
    "active:honest-1",
    "result:honest-1",
    "aside:7",
)


class OddQueues:
    """Queues with an honest job and an honest plain task each, and one odd value."""

    def __init__(self, raw: redis.Redis, prefix: str) -> None:
        self.names: dict[str, str] = {}
        self._pipe = raw.pipeline(transaction=False)
        self._prefix = prefix

    def add(self, case: str, write: Callable[[Any, str], object]) -> None:
        """Make a queue, in which `write(pipe, base)` writes the odd value."""
        name = f"q{len(self.names):04}"
        base, pipe = f"{self._prefix}:{{{name}}}", self._pipe
        self.names[name] = case
        pipe.hset(f"{base}:job:honest-1", mapping={**STORED, "state": "waiting"})  # type: ignore[arg-type]
        pipe.lpush(base, MARKER + b"honest-1", b"plain")
        pipe.zadd(f"{{{self._prefix}}}:queues", {name: time.time() * 1000})
        write(pipe, base)

    def close(self) -> None:
        self._pipe.execute()


def write_of_type(pipe: Any, base: str, *, key: str) -> None:
    """Write a value of a type that worqr does not write there."""
    pipe.delete(f"{base}:{key}")
    if key in STRINGS:
        pipe.rpush(f"{base}:{key}", "x")
    else:
        pipe.set(f"{base}:{key}", "x")


def write_odd(pipe: Any, base: str, *, key: str, field: str | bytes, value: bytes) -> None:
    """Write an odd value of the right type."""
    full = f"{base}:{key}"
    if key in HASHES:
        if key == "lanes:rules":
            pipe.zadd(f"{base}:lanes:names", {"L": 0})
        elif key.startswith(("batch:B", "part:T")):
            pipe.zadd(f"{base}:batches", {"B": 4_000_000_000_000})
            pipe.hset(f"{base}:batch:B", mapping={"state": "open", "token": "T", "made_at": "1700000000000"})
            pipe.hset(f"{base}:batch:B:parts", base, "1 1 1 0 0 0 0 0")
        elif key == "policy:W1":
            pipe.hset(f"{base}:workers", "W1", "1")
        pipe.hset(full, base if field == "PREFIX:{q}" else field, value)
    elif key in SORTED:
        pipe.zadd(full, {value: field})
    elif key in SETS:
        pipe.sadd(full, value, "1700000000000002")
        pipe.hset(f"{base}:workers", "W1", "1")
    elif key in LISTS:
        pipe.rpush(full, value)
        if key == "starts:1000":
            pipe.hset(f"{base}:limits", "declared", "- 5/1000")
    else:
        pipe.set(full, value)


def write_odd_everywhere(pipe: Any, base: str, *, value: bytes) -> None:
    """Write an odd value into each key, and into each field of a hash."""
    for key in (*HASHES, *SETS, *LISTS, *STRINGS):
        for field in HASHES.get(key, ("",)):
            write_odd(pipe, base, key=key, field=field, value=value)


def write_odd_scores(pipe: Any, base: str, *, score: str) -> None:
    """Give odd members of each sorted set an odd score."""
    for key in SORTED:
        for member in (b"abc", b"\xff", b"9" * 5000):
            write_odd(pipe, base, key=key, field=score, value=member)


def odd_queues(raw: redis.Redis, prefix: str) -> OddQueues:
    """Make a queue for each key of another type, and for each odd value."""
    queues = OddQueues(raw, prefix)
    for key in KEYS:
        queues.add(f"{key} of another type", partial(write_of_type, key=key))
    for name, value in VALUES.items():
        queues.add(f"{name} everywhere", partial(write_odd_everywhere, value=value))
    for score in ("-1", "1.5", "1e308", "inf", "-inf", "99999999999999999999"):
        queues.add(f"score {score}", partial(write_odd_scores, score=score))
    queues.close()
    return queues


async def test_a_queue_with_an_odd_key_is_listed_like_the_others_and_hides_none(
    mesh: worqr.Mesh, raw: redis.Redis, prefix: str
) -> None:
    raw.set(f"{prefix}:{{wrong}}", "x")
    raw.zadd(f"{{{prefix}}}:queues", {"wrong": time.time() * 1000})
    queues, faults = odd_queues(raw, prefix), Faults()
    async with mesh.connect():
        found = await faults.read("queues", mesh.queues)
        missing = {*queues.names} - {info.name for info in found or ()}
        faults.note(f"queues hides {[queues.names[name] for name in sorted(missing)]}", held=not missing)
        seen = await faults.read("info", mesh.info)
        assert seen is not None
        faults.note("mesh.info does not name the key", held=f"{prefix}:{{wrong}}" in seen.unreadable.get("wrong", ""))
        async with trio.open_nursery() as nursery:
            limit = trio.CapacityLimiter(50)

            async def look(name: str, case: str) -> None:
                async with limit:
                    info = await faults.read(f"{case}: info", mesh.queue(name).info)
                    faults.note(f"{case}: {info}", held=info is None or info.waiting >= 1)
                    await read_all_else(mesh, faults, name, case)
                    await faults.read(f"{case}: read", partial(mesh.queue(name).read, "honest-1"))
                    await faults.read(f"{case}: status", mesh.queue(name).job("honest-1").status)
                    await faults.read(
                        f"{case}: result", partial(mesh.queue(name).job("honest-1").result, timeout=0), WorqrError
                    )
                    await faults.read(f"{case}: batch", mesh.queue(name).batch("B").info, worqr.NoResult)

            for name, case in queues.names.items():
                nursery.start_soon(look, name, case)
        await faults.read("metrics", FleetReader(mesh).read)
    faults.check()


# The registry: workers, schedules, the log and single keys

INFO = (
    *("host", "pid", "app", "version", "running", "room", "lag_ms", "leaving", "started", "full_since", "keepalive_ms"),
    *("python", "threads", "processes", "request", "answer", "capacity"),
)
SCHEDULE_FACTS = ("last", "next", "fired", "owed", "paused", "over")
HONEST_SCHEDULE = Definition(name="honest", queue="ticks", task=b"tick", every_ms=1000)
DEFINITION: dict[str, tuple[object, ...]] = {
    "name": ("", "other", "x" * 10_000, None),
    "queue": ("", "{x}", "x" * 10_000, "a\x00b", 7),
    "task": ("not base64!", "QUJD" * 30_000, 5),
    "cron": ("0," * 5000 + "0 * * * *", "* * * * *" + "x" * 10_000, "1.5 * * * *", "0 0 30 2 *", "", "a b c d e", 5),
    "timezone": (
        "a/" * 300 + "b",
        "x" * 10_000,
        "../../etc/passwd",
        "/etc/passwd",
        "",
        "Mars/Olympus",
        "UTC\x00",
        "zone.tab",
    ),
    "every_ms": (1, -1, 10**20, 1.5, 99, "x", 10**15),
    "misfire": (10**7, -1, 10**20, "x"),
    "overlap": ("abc", 5),
    "jitter_ms": (-1, 10**20, "x"),
    "more": ("unknown",),
}


def odd_definitions() -> Iterator[tuple[str, bytes]]:
    """Yield the names of schedules and their definitions, each of which has an odd value."""
    for field, values in DEFINITION.items():
        for n, value in enumerate(values):
            name = f"odd-{field}-{n}"
            times = {"every_ms": 1000} if field not in {"cron", "timezone"} else {"cron": "* * * * *"}
            stored = {"name": name, "queue": "ticks", "task": "dGljaw==", **times, field: value}
            yield name, json.dumps(stored).encode()
    for n, value in enumerate(VALUES.values()):
        yield f"odd-def-{n}", value


def forge_registry(raw: redis.Redis, prefix: str) -> None:
    """Store workers and schedules with odd values, and honest ones."""
    base, pipe = f"{{{prefix}}}", raw.pipeline(transaction=False)

    def add_worker(name: str | bytes, **facts: bytes) -> None:
        known = name.encode() if isinstance(name, str) else name
        pipe.sadd(f"{base}:Workers", known)
        pipe.set(f"{base}:worker:".encode() + known, "STAY")
        pipe.hset(f"{base}:info:".encode() + known, mapping={"host": "h", "pid": "7", "app": "a", **facts})  # type: ignore[arg-type]
        pipe.sadd(f"{base}:WorkMap:".encode() + known, "mail")

    def add_schedule(name: str | bytes, definition: bytes, **facts: bytes) -> None:
        known = name.encode() if isinstance(name, str) else name
        now = round(time.time() * 1000)
        stored = {"def": definition, "last": b"%d" % now, **facts}
        pipe.hset(f"{base}:schedules", mapping={fact.encode() + b" " + known: value for fact, value in stored.items()})
        pipe.zadd(f"{base}:schedules_due", {known: 1})
        pipe.zadd(f"{base}:schedules_seen", {known: 0})

    for n, value in enumerate(VALUES.values()):
        for fact in INFO:
            add_worker(f"odd-{fact}-{n}", **{fact: value})
        pipe.sadd(f"{base}:WorkMap:honest:1", value)
        for fact in SCHEDULE_FACTS:
            name = f"odd-{fact}-{n}"
            add_schedule(name, replace(HONEST_SCHEDULE, name=name).encode(), **{fact: value})
        pipe.hset(f"{base}:schedules", f"{n}", value)
        pipe.hset(f"{base}:shards", f"odd{n}", value)
        pipe.xadd(f"{base}:log", {"kind": value or b"x", "n": value, b"\xff": b"x"}, id=f"99999999999999999{n:02}-0")
    for name, definition in odd_definitions():
        add_schedule(name, definition)
    for odd in (b"\xff", b"ghost\xfe:1", b"", b"9" * 5000):
        add_worker(odd)
        add_schedule(odd, HONEST_SCHEDULE.encode())
        pipe.zadd(f"{base}:queues", {odd: 5})
        pipe.zadd(f"{base}:histories", {odd: "inf"})
        pipe.sadd(f"{base}:waiting", odd)
        pipe.sadd(f"{base}:Dying", odd + b"dying")
    pipe.hset(f"{base}:schedules", mapping={"led": "abc", "clock": "nan"})
    pipe.zadd(f"{base}:schedules_due", {"unknown": "inf", "no such": "-inf"})
    add_worker("honest:1")
    add_schedule("honest", HONEST_SCHEDULE.encode())
    pipe.execute()


async def test_odd_workers_and_schedules_hide_no_others(mesh: worqr.Mesh, raw: redis.Redis, prefix: str) -> None:
    forge_registry(raw, prefix)
    faults = Faults()
    async with mesh.connect():
        await mesh.queue("mail").enqueue(b"honest")
        workers = await faults.read("workers", mesh.workers) or []
        assert len(workers) >= len(INFO) * len(VALUES)
        faults.note("workers hides", held=[each.pid for each in workers if each.id == "honest:1"] == [7])
        schedules = await faults.read("schedules", mesh.schedules) or []
        expected = {*(name for name, _ in odd_definitions()), "honest"}
        faults.note("schedules hides", held=expected <= {each.name for each in schedules})
        for each in schedules:
            await faults.read(f"next runs of {each.name[:20]}", as_async(each.next_runs), worqr.UsageError)
        faults.note(
            "queues hides", held="mail" in [info.name for info in await faults.read("queues", mesh.queues) or ()]
        )
        await faults.read("log", mesh.log)
        await faults.read("info", mesh.info)
        await faults.read("metrics", FleetReader(mesh).read)
        await faults.read("pause", partial(mesh.pause_schedule, "honest"))
        for name, _ in odd_definitions():
            await faults.read(f"run {name}", partial(mesh.run_schedule, name), worqr.UsageError)
    faults.check()


def as_async(call: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def called() -> Any:
        return call()

    return called


REGISTRY = (
    *("Workers", "Dying", "queues", "waiting", "watched", "snapshot", "histories", "log", "schedules", "schedules_due"),
    *("schedules_seen", "shards", "leader", "version", "worker:honest:1", "info:honest:1", "WorkMap:honest:1"),
)


@pytest.mark.parametrize("key", REGISTRY)
async def test_a_registry_key_of_another_type_is_named_or_does_no_harm(
    key: str, mesh: worqr.Mesh, raw: redis.Redis, prefix: str
) -> None:
    raw.sadd(f"{{{prefix}}}:Workers", "honest:1")
    full, faults, refused = f"{{{prefix}}}:{key}", Faults(), list[str]()
    raw.delete(full)
    if key in {"watched", "snapshot", "leader", "version", "worker:honest:1"}:
        raw.rpush(full, "x")
    else:
        raw.set(full, "x")

    async def named(call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except worqr.RefusedByServer as error:
            refused.append(str(error))

    async with AsyncExitStack() as stack:
        await faults.read("connect", partial(named, partial(stack.enter_async_context, mesh.connect())))
        readers = {
            "queues": mesh.queues,
            "workers": mesh.workers,
            "schedules": mesh.schedules,
            "info": mesh.info,
            "log": mesh.log,
        }
        if not refused:
            for name, reader in readers.items():
                await faults.read(name, partial(named, reader))
            await faults.read("enqueue", partial(mesh.queue("mail").enqueue, b"x"))
            faults.note("count", held=await faults.read("count", mesh.queue("mail").count) == 1)
    for text in refused:
        faults.note(f"{text} names no key", held=full in text and "redis-cli TYPE" in text)
    faults.check()


# Commands and pages


async def test_commands_and_pages_show_what_is_honest_beside_what_is_odd(
    server: Server,
    mesh: worqr.Mesh,
    raw: redis.Redis,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for kind in FIELDS:
        forge_jobs(
            raw, prefix, kind, only=("run_at", "failures", "at", "progress", "claim", "timeout", "message", "value")
        )
    odd_queues(raw, prefix)
    forge_registry(raw, prefix)
    raw.set(f"{prefix}:{{wrong}}", "x")
    raw.zadd(f"{{{prefix}}}:queues", {"wrong": time.time() * 1000, "odd": time.time() * 1000})
    monkeypatch.setenv("WORQR_URL", server.url)
    monkeypatch.setenv("WORQR_PREFIX", prefix)
    faults = Faults()

    async def command(expected: str, *words: str) -> None:
        for more in ((), ("--json",)):
            capfd.readouterr()
            code = await trio.to_thread.run_sync(main, [*words, *more])
            out, err = capfd.readouterr()
            faults.note(f"worqr {' '.join([*words, *more])}: {code} {err[-300:]}", held=code == 0 and expected in out)

    await command("odd", "queues")
    await command("honest:1", "workers")
    await command("honest", "schedules")
    await command("", "info")
    await command("", "log")
    for kind, state in (("waiting", "waiting"), ("due", "scheduled"), ("blocked", "blocked"), ("active", "active")):
        await command(honest(kind)[0], "jobs", "odd", "--state", state, "--limit", "9999")
    await command(honest("active")[0], "running", "odd")
    await command(honest("failed")[0], "failed", "odd", "--limit", "9999")
    await command(honest("broken")[0], "undecodable", "odd", "--limit", "9999")
    for name, state in ((honest("due")[0], "scheduled"), ("active.run_at.7", "active"), ("failed.at.1", "failed")):
        await command(state, "status", name)
    await command("", "lanes", "odd")
    await command("", "history", "odd")
    async with mesh.connect():
        app = Dashboard(mesh, access=lambda _: admin("ada"), allow_enqueue=True)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=PATIENCE
        ) as client:
            for path, expected in (
                *(
                    ("/", ""),
                    ("/queues", "odd"),
                    ("/workers", "honest:1"),
                    ("/schedules", "honest"),
                    ("/log", ""),
                    ("/server", ""),
                ),
                *((f"/queue?name=odd&state={state}", "") for state in ("waiting", "scheduled", "blocked", "active")),
                *(
                    ("/queue?name=odd", honest("waiting")[0]),
                    ("/running", ""),
                    ("/failed", ""),
                    ("/metrics", "worqr_"),
                    ("/lanes?queue=odd", ""),
                ),
                *((f"/job?queue=odd&id={kind}.{field}.{n}", kind) for kind, field, n in PAGES),
                *((f"/schedules?name={name}", name) for name, _ in odd_definitions()),
                *(
                    (f"/api/v1/{name}", "")
                    for name in ("queues", "workers", "schedules", "jobs?queue=odd", "failed?queue=odd")
                ),
            ):
                reply = await client.get(path)
                held = reply.status_code in {200, 404} and expected in reply.text
                faults.note(f"{path}: {reply.status_code} {reply.text[:200]}", held=held)
            for zone in DEFINITION["timezone"]:
                form = {"name": "honest", "cron": "* * * * *", "timezone": zone}
                reply = await client.post("/schedule-times", data=form, headers={"sec-fetch-site": "same-origin"})  # type: ignore[arg-type]
                faults.note(f"zone {zone!r}: {reply.status_code}", held=reply.status_code < 500)
    faults.check()


PAGES = [
    ("waiting", "run_at", 7),
    ("due", "run_at", 7),
    ("active", "claim", 9),
    ("active", "progress", 5),
    ("failed", "at", 7),
    ("result", "progress", 1),
    ("active", "timeout", 7),
    ("waiting", "message", 11),
]


# Leaders and workers


def messages() -> list[bytes]:
    """Return what another program may publish."""
    return [
        *VALUES.values(),
        b"5000 x",
        b"0 \xff",
        b"%d {x}" % 10**30,
        b"0 worqr:{",
        b"finished x",
        b"1 2 3",
        b"\n\n\n",
        b"c",
    ]


async def test_odd_messages_are_ignored_without_a_traceback(
    mesh: worqr.Mesh, raw: redis.Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs, base, home = Runs(), f"{prefix}:{{Q1}}", f"{{{prefix}}}"
    async with serving(mesh, "Q1", runs) as peer:
        q, worker = mesh.queue("Q1"), peer.id
        await until(lambda: raw.pubsub_numsub(f"{home}:due")[0][1], what="a leader that listens")
        async with q.events() as events:
            channels = (
                base,
                f"{base}_cancel",
                f"{base}_cancelled",
                f"{base}:wake:{worker}",
                f"{base}:events",
                f"{base}:event_ids",
            )
            for channel in (*channels, f"{home}:due", f"{home}:snapshots", f"{base}:job:x", f"{base}:batch:x"):
                for message in messages():
                    raw.publish(channel, message)
            await q.enqueue(b"honest")
            await runs.wait(1)
            async for event in events:
                if event.type == "enqueued":
                    break
    said = [record for record in caplog.records if "bug" in record.getMessage() or record.exc_info]
    assert not said
    assert len([record for record in caplog.records if "another program" in record.getMessage()]) <= 1


async def test_a_leader_fires_honest_schedules_on_time_whatever_others_are_stored(
    mesh: worqr.Mesh, raw: redis.Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    forge_registry(raw, prefix)
    owed = " ".join(str(ms) for ms in range(1, 100_000))
    raw.hset(f"{{{prefix}}}:schedules", "owed odd-owed-0", owed)
    base, fired = f"{{{prefix}}}", list[float]()

    async def tick(task: bytes) -> None:
        context = worqr.current()
        if context.id == "cron:honest" and context.scheduled_for is not None:
            fired.append(time.time() - context.scheduled_for.timestamp())

    async with serving(mesh, "ticks", tick, room=1000) as peer:
        await until(lambda: len(fired) >= 4, what="an honest schedule fires")
        await until(lambda: raw.smembers(f"{base}:Dying") == set(), what="the dead workers are removed")
        assert peer.health().alive
    assert min(fired[-2:]) < 2.5  # seconds: another test may have the machine for this long
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [line for line in lines if "bug" in line or "Traceback" in line]
    assert len(lines) < 4 * len(list(odd_definitions())) + 40, lines


async def test_a_leader_removes_workers_whose_id_is_not_utf_8(mesh: worqr.Mesh, raw: redis.Redis, prefix: str) -> None:
    base, odd = f"{{{prefix}}}", b"\xff:1"
    raw.sadd(f"{base}:Workers", odd)
    raw.sadd(f"{base}:WorkMap:".encode() + odd, b"Q\xfe", "Q1")
    raw.sadd(f"{prefix}:{{Q1}}:claims:".encode() + odd, "1700000000000001")
    raw.rpush(f"{prefix}:{{Q1}}:claim:1700000000000001", "given back")
    raw.hset(f"{prefix}:{{Q1}}:workers", odd, "1")
    runs = Runs()
    async with serving(mesh, "Q1", runs):
        assert await runs.wait(1) == [b"given back"]
        await until(lambda: odd not in raw.smembers(f"{base}:Workers") and not raw.exists(f"{base}:Dying"))


@pytest.mark.parametrize("lease", [b"\xff\xff", b"", b"ghost:1", b"ghost:1 999", b"\xff 1", b"9" * 5000])
async def test_a_lease_that_nobody_holds_is_taken_over(
    lease: bytes, mesh: worqr.Mesh, raw: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chore, "STALE_AFTER", 0.5)
    raw.set(f"{{{prefix}}}:leader", lease)
    async with mesh.join() as peer:
        await until(lambda: str(raw.get(f"{{{prefix}}}:leader")).startswith(f"b'{peer.id} "))


PER_WORKER = ("info:honest:1", "WorkMap:honest:1", "worker:honest:1")
LEADS = ("leader",)
"""Keys that a worker writes anew when it becomes the leader."""


@pytest.mark.parametrize("key", REGISTRY)
async def test_a_worker_joins_beside_a_registry_key_of_another_type_or_says_which(
    key: str, mesh: worqr.Mesh, raw: redis.Redis, prefix: str
) -> None:
    full = f"{{{prefix}}}:{key}"
    if key in {"watched", "snapshot", "leader", "version"}:
        raw.rpush(full, "x")
    elif key not in PER_WORKER:
        raw.set(full, "x")
    odd_type = raw.type(full)
    runs, refused = Runs(), ""
    try:
        async with serving(mesh, "Q1", runs) as peer:
            if key in PER_WORKER:
                full = f"{{{prefix}}}:{key.partition(':')[0]}:{peer.id}"
                with raw.pipeline() as both:  # at once: the peer writes the key again at any moment
                    both.delete(full)
                    (both.rpush if key.startswith("worker") else both.set)(full, "x")
                    both.execute()
            else:
                await until(lambda: raw.type(full) != odd_type or key not in LEADS, what="a leader")
            await mesh.queue("Q1").enqueue(b"honest")
            await runs.wait(1)
            assert peer.health().ready
    except* worqr.RefusedByServer as group:
        refused = str(group.exceptions[0])
    assert not refused or key in {"Workers", "Dying", "queues", "version"}
    assert not refused or full in refused, refused
