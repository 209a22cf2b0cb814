"""A mesh with one of everything that the dashboard shows, and the addresses of all pages on which it appears.

A new route is asked for with `GENERAL`. If it needs another query, add one to `QUERIES`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

import trio

import worqr
from tests.support.patience import PATIENCE
from worqr import ops
from worqr.dashboard.app import ROUTES
from worqr.inside import client_of
from worqr.keys import LimitKeys, RegistryKeys

JOB = "job-1"
QUERIES: dict[str, list[dict[str, str]]] = {
    "/": [{}],
    "/queues": [{}, {"sort": "waiting", "q": "{queue}"}],
    "/queue": [
        *({"name": "{queue}", "tab": tab} for tab in ("waiting", "scheduled", "blocked")),
        {"name": "{flow}", "tab": "suspended"},
        *({"name": "{" + name + "}", "tab": "waiting", "order": "end"} for name in ("queue", "laned")),
        {"name": "{slow}", "tab": "running"},
        {"name": "{failing}", "tab": "failed"},
        {"name": "{failing}", "tab": "failed", "count": "errors"},
        {"name": "{batched}", "tab": "failed", "home": "{batched}", "batch": "{batch}"},
        {"name": "{typed}", "tab": "undecodable"},
        {"name": "{failing}", "tab": "ended"},
    ],
    "/lanes": [{"queue": "{laned}"}],
    "/batches": [{"queue": "{batched}"}],
    "/batch": [{"queue": "{batched}", "id": "{batch}"}],
    "/api/v1/batches": [{"queue": "{batched}"}, {"queue": "{batched}", "format": "csv"}],
    "/api/v1/batch": [{"queue": "{batched}", "id": "{batch}"}],
    "/api/v1/lanes": [{"queue": "{laned}"}, {"queue": "{laned}", "format": "csv"}],
    "/job": [
        {"queue": "{queue}", "id": "{job}"},
        {"queue": "{failing}", "id": "{job}"},
        {"queue": "{slow}", "id": "{job}"},
        {"queue": "{flow}", "id": "{job}"},
    ],
    "/running": [{}, {"worker": "{worker}"}],
    "/failed": [{}],
    "/workers": [{}, {"app": "{app}"}],
    "/worker": [{"id": "{worker}"}],
    "/schedules": [{}, {"name": "{schedule}"}, {"name": "report/acme"}],
    "/schedule-form": [{}, {"queue": "{typed}"}, {"edit": "yes", "name": "report/acme"}],
    "/topics": [{}],
    "/api/v1/topics": [{}, {"format": "csv"}],
    "/api/v1/limits": [{}, {"format": "csv"}],
    "/log": [{}, {"kind": "paused", "queue": "{queue}"}],
    "/server": [{}],
    "/search": [{"q": "{job}"}, {"q": "{queue}"}, {"queue": "{queue}", "payload": "{job}"}],
    "/api/v1/scale": [{"queue": "{queue}", "places": "10"}],
    "/api/v1/schema": [{}],
    "/api/v1/queues": [{}, {"format": "csv"}],
    "/api/v1/tasks": [
        *({"queue": "{queue}", "state": state} for state in ("waiting", "scheduled", "blocked")),
        {"queue": "{slow}", "state": "running", "format": "csv"},
    ],
    "/api/v1/running": [{}, {"worker": "{worker}", "format": "csv"}],
    "/api/v1/ended": [{"queue": "{failing}"}, {"queue": "{failing}", "format": "csv"}],
    "/api/v1/dead-letters": [
        {"queue": "{failing}", "list": "failed"},
        {"queue": "{typed}", "list": "undecodable", "format": "csv"},
    ],
    "/api/v1/workers": [{}, {"format": "csv"}],
    "/api/v1/schedules": [{}, {"format": "csv"}],
    "/api/v1/log": [{}, {"format": "csv"}],
    "/api/v1/bulk": [{}, {"format": "csv"}],
    "/api/v1/job": [
        {"queue": "{queue}", "id": "{job}"},
        {"queue": "{flow}", "id": "{job}"},
        {"queue": "{failing}", "id": "{job}"},
    ],
    "/new": [{}, {"queue": "{queue}"}, {"queue": "{typed}"}],
    "/bulk": [{}],
    "/confirm": [
        *({"act": act, "queue": "{failing}"} for act in ("retry", "drop")),
        *({"act": act, "queue": "{queue}"} for act in ("run", "cancel", "delete")),
        *({"act": act, "queue": "{batched}", "batch": "{batch}"} for act in ("cancel-batch", "retry-batch")),
    ],
    "/payload": [{"queue": "{queue}", "id": "{job}"}],
}
"""The queries of each page, with the names of the scene in braces."""
OTHERS = ("slow", "failing", "typed", "laned", "batched", "unserved", "flow")
"""The queues besides `queue`, by the ends of their names."""
GENERAL = {"queue": "{failing}", "name": "{failing}", "id": "{job}"}
"""The query of pages that are not in `QUERIES`."""
VIEWS = [
    *({"view": view} for view in ("overview", "queues", "running", "failed", "workers", "log")),
    {"view": "queue", "name": "{slow}", "tab": "running"},
    {"view": "job", "queue": "{slow}", "id": "{job}"},
    {"view": "lanes", "queue": "{laned}"},
    {"view": "batch", "queue": "{batched}", "id": "{batch}"},
]
"""The queries of streams."""


@dataclass(frozen=True)
class Texts:
    """The texts that other people choose, and that pages show."""

    queue: str = "orders"
    job: str = JOB
    batch: str = "import-7"
    app: str = "shop"
    payload: bytes = b'{"order": 7, "password": "s3cr3t-payload"}'
    meta: str = "acme"
    lane: str = "acme"
    error: str = "the bank refused it"
    reason: str = "maintenance"
    schedule: str = "nightly"
    progress: str = "page 4 of 10"
    event: str = "approved"


@dataclass(frozen=True)
class Scene:
    """A filled mesh. `queue` has tasks that wait, `slow` has tasks that run, `failing` and `typed` have dead letters, and
    `laned` has a lane. `batched` is the home of a batch with a job that has failed, and one in `unserved` that waits. `flow` has
    a workflow that waits for an event.
    """

    mesh: worqr.Mesh
    texts: Texts
    worker: str

    @property
    def names(self) -> dict[str, str]:
        queue, texts = self.texts.queue, self.texts
        queues = {"queue": queue, **{name: f"{queue}-{name}" for name in OTHERS}}
        return queues | {
            "job": texts.job,
            "batch": texts.batch,
            "worker": self.worker,
            "app": texts.app,
            "schedule": texts.schedule,
        }

    def addresses(self) -> list[str]:
        """The pages, and the downloads; streams are in `views`."""
        paths = [path for path, route in ROUTES.items() if route.method == "GET" and path != "/live"]
        return [self.address(path, query) for path in paths for query in QUERIES.get(path, [GENERAL])]

    def views(self) -> list[str]:
        return [self.address("/live", query) for query in VIEWS]

    def address(self, path: str, query: Mapping[str, str]) -> str:
        filled = {
            key: self.names.get(value.strip("{}"), value) if value[:1] == "{" else value for key, value in query.items()
        }
        return f"{path}?{urlencode(filled)}".rstrip("?")


def why_not(address: str, status: int) -> str:
    """What to do if a page of the scene has another status than expected."""
    path = address.partition("?")[0]
    return f"{address} has the status {status}. Is the route new? Add a query that it accepts to QUERIES in {__file__}: {path!r}"


@asynccontextmanager
async def open_scene(
    server_url: str, prefix: str, texts: Texts | None = None, **settings: Any
) -> AsyncGenerator[Scene]:
    """Fill a mesh, and keep a peer in it that leads and runs two tasks. `settings` are those of the mesh."""
    texts = Texts() if texts is None else texts
    mesh = worqr.Mesh(server_url, prefix=prefix, app=texts.app, patience=PATIENCE, **settings)
    names = Scene(mesh, texts, "").names

    async def fails(task: bytes) -> None:
        raise worqr.Failure(texts.error)

    async def runs(task: bytes) -> None:
        worqr.current().progress(0.4, texts.progress)
        await trio.sleep_forever()

    @mesh.task(name=names["typed"], schedulable=True)
    async def typed(number: int) -> None: ...

    @mesh.workflow(name=names["flow"])
    async def flow(text: str) -> None:
        await worqr.step(f"charge {texts.meta}"[:100], str.upper, texts.meta)
        await worqr.wait_for(texts.event, dict[str, int])

    mesh.every(86_400, mesh.call(names["typed"], number=1), name=texts.schedule)
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, result_ttl=60, recent=100), names["failing"], fails)
        await nursery.start(peer.serve, names["batched"], fails)
        await nursery.start(peer.serve, names["slow"], runs)
        await _fill(mesh, names, texts)
        yield Scene(mesh, texts, peer.id)
        nursery.cancel_scope.cancel()


async def _fill(mesh: worqr.Mesh, names: Mapping[str, str], texts: Texts) -> None:
    queue, meta = mesh.queue(names["queue"]), {"tenant": texts.meta, "auth_token": "s3cr3t-meta"}
    await queue.enqueue(texts.payload, b"\x00binary")
    await queue.dispatch(texts.payload, id=texts.job, meta=meta)
    await queue.dispatch(texts.payload, id="later", delay=3600)
    await queue.pause(texts.reason)
    await mesh.queue(names["laned"]).dispatch(texts.payload, lane=texts.lane)
    await mesh.queue(names["laned"]).pause(texts.reason, lane=texts.lane)
    await mesh.queue(names["failing"]).dispatch(texts.payload, id=texts.job, meta=meta)
    async with mesh.batch(queue=names["batched"], id=texts.batch, meta=meta) as batch:
        await batch.dispatch_many([mesh.call(names[name], text=texts.meta) for name in ("batched", "unserved")])
    await mesh.queue(names["typed"]).enqueue(texts.payload)
    facts = json.dumps({"app": texts.app}).encode()
    await client_of(mesh).ask(ops.declare_topics(RegistryKeys(mesh.prefix), names["typed"], facts, [texts.lane]))
    await client_of(mesh).ask(ops.note_limit(RegistryKeys(mesh.prefix), "api", texts.lane))
    await client_of(mesh).ask(ops.take_permits(LimitKeys(mesh.prefix, "api"), "1 9/60000", ["held"], 1, 60_000))
    await mesh.queue(names["slow"]).dispatch(texts.payload, id=texts.job, meta=meta)
    await mesh.queue(names["slow"]).enqueue(texts.payload)
    flow = mesh.functions[names["flow"]].options(id=texts.job)
    await flow.dispatch(texts.meta)
    with trio.fail_after(PATIENCE):
        while (await mesh.queue(names["batched"]).batch(texts.batch).info()).failed < 1:
            await trio.sleep(0.01)
        while not await mesh.queue(names["failing"]).recent():
            await trio.sleep(0.01)
        while (await mesh.queue(names["typed"]).info()).undecodable < 1:
            await trio.sleep(0.01)
        while [each.message for each in await mesh.queue(names["slow"]).running()] != [texts.progress] * 2:
            await trio.sleep(0.01)
        while (await mesh.queue(names["flow"]).info()).suspended < 1:
            await trio.sleep(0.01)
        await mesh.schedule("report/acme", mesh.call(names["typed"], number=1), every=86_400)
        while len(await mesh.schedules()) < 2:
            await trio.sleep(0.01)
        while (await mesh.info()).source != "leader":
            await trio.sleep(0.05)
