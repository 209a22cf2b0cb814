"""Whatever another program has stored in the keys of a mesh, every reader returns the rest, and leaders and workers go on.

Each case is a place (a field of a record, a key, a message) and an odd value. The cases of one test are written side by side, each
into a record or a queue of its own between honest ones, so that each list is read once for all of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import redis
import trio

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


class Faults:
    """What went wrong in some cases. A test fails with all of them at once."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.reads = 0

    async def read(self, what: str, call: Callable[[], Awaitable[Any]], *allowed: type[Exception]) -> Any:
        """Return what a reader returns. Note what it raises, unless that is allowed."""
        self.reads += 1
        try:
            return await call()
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


async def read_all_else(mesh: worqr.Mesh, faults: Faults, queue: str = "odd") -> None:
    """Call every reader of a queue and of the mesh, for what it raises."""
    q = mesh.queue(queue)
    readers: dict[str, Callable[[], Awaitable[Any]]] = {
        **{f"jobs {state}": partial(q.jobs, state=state) for state in ("waiting", "scheduled", "blocked", "active")},
        **{
            "newest": partial(q.jobs, newest=True),
            "running": q.running,
            "tasks": q.tasks,
            "info": q.info,
            "lanes": q.lanes,
        },
        **{
            f"failed.{n}": f
            for n, f in (("list", q.failed.list), ("errors", q.failed.errors), ("count", q.failed.count))
        },
        **{"broken": q.broken.list, "batches": q.batches, "recent": q.recent, "history": partial(q.history, 3600)},
        **{"find": partial(q.find, b'{"n":1}'), "count": q.count},
    }
    for name, reader in readers.items():
        await faults.read(f"{queue!r} {name}", reader)


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
            wrong = sorted(id for id in left_out if id.split(".")[1] not in {"state", "id"})
            faults.note(f"{name} hides {len(wrong)}: {wrong[:5]}", held=not wrong)
        for id in (*HONEST, *ids):
            job = q.job(id)
            await faults.read(f"status of {id}", job.status)
            await faults.read(f"read of {id}", partial(q.read, id, payload=True))
            await faults.read(f"find of {id}", partial(mesh.find, id))
            await faults.read(f"payload of {id}", partial(q.payload, id))
            await faults.read(f"result of {id}", partial(job.result, timeout=0), WorqrError)
        await read_all_else(mesh, faults)
    faults.check()
