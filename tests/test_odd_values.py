"""Whatever another program has stored in the keys of a mesh, every reader returns the rest, and leaders and workers go on.

Each case is a place (a field of a record, a key, a message) and an odd value. The cases of one test are written side by side, each
into a record or a queue of its own between honest ones, so that each list is read once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import redis
import trio

import worqr
from tests.support.leaks import delete_all
from tests.support.servers import Server
from worqr.errors import WorqrBug, WorqrError
from worqr.keys import MARKER
from worqr.metrics.fleet_reader import FleetReader

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
HONEST = ("honest-1", "honest-2")


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
            return found
        except allowed as error:
            if not isinstance(error, WorqrBug):
                return None
            self.found.append(f"{what}: {error!r}"[:200])
        except Exception as error:
            self.found.append(f"{what}: {error!r}"[:200])
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

    def __init__(self, client: redis.Redis, prefix: str, queue: str) -> None:
        self.pipe = client.pipeline(transaction=False)
        self.base = f"{prefix}:{{{queue}}}"
        self.claim = CLAIM
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


def forge_jobs(raw: redis.Redis, prefix: str, kind: str) -> list[str]:
    """Store honest jobs, and one for each field and each value. Return the ids of the latter."""
    forger, ids = Forger(raw, prefix, "odd"), list[str]()
    forger.write(kind, HONEST[0])
    for field in FIELDS[kind]:
        for n, value in enumerate(VALUES.values()):
            ids.append(f"{kind}.{field}.{n}")
            forger.write(kind, ids[-1], field, value)
    forger.write(kind, HONEST[1])
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
            return {"broken.list": partial(q.broken.list, 10_000)}
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
        "broken": q.broken.list,
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
            faults.note(f"{name} hides honest jobs", held={*HONEST} <= {each.id for each in found or ()})
            left_out = {*ids} - {each.id for each in found or ()}
            wrong = sorted(name for name in left_out if name.split(".")[1] not in {"state", "id"})
            faults.note(f"{name} hides {len(wrong)}: {wrong[:5]}", held=not wrong)
        for name in (*HONEST, *ids):
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
