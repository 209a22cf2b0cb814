"""A dashboard of the tests' mesh, called over ASGI in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server, keep_one_kind
from worqr.dashboard import Dashboard, Viewer, admin
from worqr.dashboard.access import Scope
from worqr.history_records import (
    COUNTERS,
    MINUTE_RECORDS,
    NO_RUNS,
    NO_WAITS,
    RECORD_BYTES,
    TEN_MINUTE_RECORDS,
    Record,
    encode_record,
)
from worqr.keys import QueueKeys
from worqr.link.session import Session

HOST = "http://127.0.0.1"
CONNECTING = ["list_shards"]
"""Every connection begins with it, beside its handshake."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The library handles the differences between servers."""
    keep_one_kind(config, items, Path(__file__).parent)


@dataclass
class Site:
    """A dashboard, and a browser that is logged in as `viewer`."""

    mesh: worqr.Mesh
    viewer: Viewer | None = field(default_factory=lambda: admin("ada"))
    options: dict[str, Any] = field(default_factory=dict)
    _app: Dashboard | None = None

    @property
    def app(self) -> Dashboard:
        if self._app is None:
            self._app = Dashboard(self.mesh, access=self._access, **{"allow_enqueue": True, **self.options})
        return self._app

    def _access(self, scope: Scope) -> Viewer | None:
        return self.viewer

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url=HOST, timeout=PATIENCE) as client:
            return await client.request(method, path, **options)

    async def get(self, path: str, **query: str) -> httpx.Response:
        return await self.ask("GET", path, params=query)

    async def post(self, path: str, **form: Any) -> httpx.Response:
        """A form that this site's own page sends."""
        return await self.ask("POST", path, data=form, headers={"sec-fetch-site": "same-origin"})


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, patience=10)


@pytest.fixture
async def connected(mesh: worqr.Mesh) -> AsyncIterator[worqr.Mesh]:
    async with mesh.connect():
        yield mesh


@pytest.fixture
def site(mesh: worqr.Mesh) -> Site:
    return Site(mesh)


@pytest.fixture
def unconnected() -> Callable[..., Site]:
    """A site whose server does not matter: nothing that it answers needs one."""
    return lambda **options: Site(worqr.Mesh("redis://127.0.0.1:1/0", patience=0.2), **options)


def write_quiet_hour(server: Server, prefix: str, queue: str) -> None:
    """Store records of the last hours of a queue, in which nothing has happened until now."""
    keys, now, zeros = QueueKeys(prefix, queue), int(time.time() * 1000), (0,) * (len(COUNTERS) + 2)
    with server.client() as client:
        for key, step, number in ((keys.history, 1, MINUTE_RECORDS), (keys.history10, 10, TEN_MINUTE_RECORDS)):
            ring = bytearray(RECORD_BYTES * number)
            for ago in range(1, number):
                record = Record(now - ago * step * 60_000, 0, 0, None, (0,) * 4, zeros, NO_RUNS.counts, NO_WAITS.counts)
                start = record.minute // step % number * RECORD_BYTES
                ring[start : start + RECORD_BYTES] = encode_record(record)
            client.set(key, bytes(ring), ex=600)


class Batches:
    """The batches that each link of this process has sent, by its producer id: the names of the scripts in each.

    What is sent together counts as one request, because it takes one round trip. A request that is submitted while another
    is under way is sent with all others that were submitted meanwhile.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[list[str]]] = defaultdict(list)

    def of_new_links(self, known: set[str]) -> list[list[str]]:
        (link,) = self.sent.keys() - known or {""}
        return [batch for batch in self.sent[link] if batch != CONNECTING]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    send, found = Session.send, Batches()

    def counting(self: Session, batch: list[Any], *args: Any) -> Any:
        found.sent[self._producer].append([each.call.script.name for each in batch])
        return send(self, batch, *args)

    monkeypatch.setattr(Session, "send", counting)
    return found
