"""`RunTotalsReader`: what it returns, and that it asks only about queues in which something happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import worqr
from tests.ops.driver import Desk, desk_on
from tests.support.servers import Server
from worqr import ops
from worqr.client import inspection
from worqr.client.inspection import SETTLED_AFTER, RunTotalsReader
from worqr.command import Command
from worqr.keys import QueueKeys

Q2 = "Q2"


@pytest.fixture
def desk(server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk`; what it leaves is removed."""
    expects_left("*")
    yield from desk_on(server, prefix)


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, patience=10)


def queue(name: str, **counts: int) -> worqr.QueueInfo:
    return worqr.QueueInfo(name, 0, 0, 0, 0, 0, 0, None, None, 0, counts)


def ran(desk: Desk, keys: QueueKeys, number: int, **counts: int) -> None:
    desk.client.hset(keys.policy("A"), "max_stalls", 3)
    assert desk.call(ops.note_runs(keys, "A", number, counts)) == "ok"


async def test_a_queue_is_read_while_its_counters_move_and_a_while_longer(
    desk: Desk, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh.connect():
        reader, now, asked = RunTotalsReader(mesh._client), [1000.0], []
        call_all = mesh._client.link.call_all

        async def counted(calls: Sequence[Command[Any]]) -> list[Any]:
            asked.append([call.base for call in calls])
            return await call_all(calls)

        monkeypatch.setattr(mesh._client.link, "call_all", counted)
        monkeypatch.setattr(inspection, "monotonic", lambda: now[0])
        other = QueueKeys(desk.prefix, Q2)
        ran(desk, desk.q, 1, ok=1, rs=5)
        infos = [queue("Q1", finished=1), queue(Q2, finished=1), queue("never used")]
        assert await reader.read(infos) == {"Q1": {"ok": 1, "rs": 5}}
        ran(desk, other, 1, ok=7)  # counted after the first look
        assert await reader.read(infos) == {"Q1": {"ok": 1, "rs": 5}, Q2: {"ok": 7}}
        now[0] += SETTLED_AFTER
        await reader.read(infos)
        now[0] += 1
        asked.clear()
        assert await reader.read(infos) == {"Q1": {"ok": 1, "rs": 5}, Q2: {"ok": 7}}
        assert asked == [[]], "both queues rest"
        ran(desk, other, 2, raised=1)
        assert await reader.read([infos[0], queue(Q2, finished=2)]) == {
            "Q1": {"ok": 1, "rs": 5},
            Q2: {"ok": 7, "raised": 1},
        }
        assert asked[1:] == [[other.base]]
        assert await reader.read([]) == {}


async def test_the_shards_of_a_queue_are_one(desk: Desk, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("hot", shards=3).enqueue(b"x")
        shards = await mesh._client.sharding.shards(QueueKeys(desk.prefix, "hot"))
        assert len(shards) == 3
        for n, keys in enumerate(shards):
            ran(desk, keys, 1, ok=10**n)
        assert await RunTotalsReader(mesh._client).read([queue("hot", finished=1)]) == {"hot": {"ok": 111}}
