"""The leader's scans: they hold nothing else up, and forget what nobody uses."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import trio

import worqr
from tests.ops.driver import PAST
from tests.peer.tools import Runs, at_most, eventually, serving, until
from tests.support.servers import Server
from worqr import ops
from worqr.client import connections, inspection
from worqr.client.connections import NotedQueues
from worqr.inside import client_of
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import QueuesPage, WorkerHeartbeats, operators, registry
from worqr.peer import consumer_runner
from worqr.peer.leader import scanner
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.scanner import QueueInspector


class StuckScan:
    """A link on which all that a scan asks is never answered. W1 is registered and has no beat."""

    def __init__(self, *stuck: str) -> None:
        self.settings = SimpleNamespace(clustered=False)
        self.connected_at = 0.0
        self.stuck = stuck
        self.asked: Counter[str] = Counter()
        self.swept = trio.Event()
        self.subscriptions = SimpleNamespace(open=lambda *_: SimpleNamespace(close=lambda: None))

    def post(self, *_args: object, **_more: object) -> None:
        """An entry in the log of the mesh goes nowhere."""

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        name = call.script.name
        self.asked[name] += 1
        if name in self.stuck:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        match name:
            case "look_at_workers":
                return WorkerHeartbeats("run", {} if self.swept.is_set() else {"W1": None}, [])
            case "list_queues":
                return QueuesPage(1000, {"Q1": 1000}, None)
            case "condemn_worker":
                return "ok"
            case "forget_worker":
                self.swept.set()
                return []
        raise AssertionError(name)


@pytest.mark.parametrize("stuck", ["list_queues", "inspect"])
async def test_a_scan_that_does_not_end_keeps_no_dead_worker_from_being_swept(stuck: str) -> None:
    link: Any = StuckScan(stuck)
    leader = Leader(link, RegistryKeys("p"), keepalive=3)
    leader.on_lease_granted(until=float("inf"))
    async with at_most(), trio.open_nursery() as nursery:
        for chore in (leader.scanner.scan_forever, leader.sweeper.sweep_forever):
            nursery.start_soon(chore)
        await until(lambda: link.asked[stuck])
        nursery.start_soon(leader.lead_forever)
        await link.swept.wait()
        looks = link.asked["look_at_workers"]
        await until(lambda: link.asked["look_at_workers"] > looks)
        assert leader.may_request_lease()
        nursery.cancel_scope.cancel()
    assert link.asked[stuck] == 1


def names_of(client: redis.Redis, prefix: str) -> set[str]:
    found: Any = client.zrange(RegistryKeys(prefix).queues, 0, -1)
    return {name.decode() for name in found}


def age(client: redis.Redis, prefix: str) -> None:
    """As if nobody had noted a name for long."""
    queues = RegistryKeys(prefix).queues
    names: Any = client.zrange(queues, 0, -1)
    client.zadd(queues, dict.fromkeys(names, PAST))


@pytest.mark.leaves("{failed}*", "{paused}*")
async def test_names_that_nobody_uses_are_forgotten_and_those_that_hold_something_are_not(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "FORGET_AFTER", 0.0)
    client = server.client()

    async def fail(_task: bytes) -> None:
        raise worqr.Failure("on purpose")

    async with mesh.connect():
        for n in range(30):
            await mesh.queue(f"run-{n}").enqueue(b"x")
            await mesh.queue(f"run-{n}").delete()
        async with serving(other, "failed", fail):
            await mesh.queue("failed").enqueue(b"x")
            await eventually(lambda: count(mesh, "failed", "failed"), 1)
        await mesh.queue("paused").pause("why")
        await mesh.queue("waiting").enqueue(b"x")
        await mesh.queue("due").dispatch(b"x", delay=1000)
        await until(lambda: len(names_of(client, prefix)) >= 34)
        client.zadd(RegistryKeys(prefix).queues, dict.fromkeys((f"old-{n}" for n in range(300)), PAST))
        held = {"failed", "paused", "waiting", "due"}
        async with serving(other, "served", Runs()):
            age(client, prefix)

            async def names() -> set[str]:
                return names_of(client, prefix)

            await eventually(names, held | {"served"})
            assert {info.name for info in await mesh.queues()} == held | {"served"}
        await mesh.queue("paused").resume()
        for name in held:
            await mesh.queue(name).delete()


async def count(mesh: worqr.Mesh, queue: str, what: str) -> int:
    return int(getattr(await mesh.queue(queue).info(), what))


async def test_a_counter_that_nobody_counts_runs_out_while_a_leader_looks(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    client, q = server.client(), mesh.queue("Q1")
    counts = QueueKeys(prefix, "Q1").counts
    async with mesh.join():
        await q.enqueue(b"x")
        await q.delete()
        client.expire(counts, 1000)
        for _ in range(3):
            await q.info()
        assert client.ttl(counts) <= 1000


# The names of queues


async def test_a_peer_notes_the_queues_that_it_serves_again_and_again(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_runner, "NOTE_EVERY", 0.1)
    client = server.client()
    async with serving(mesh, "Q1", Runs()):
        client.delete(RegistryKeys(prefix).queues)
        await until(lambda: names_of(client, prefix) == {"Q1"})
        age(client, prefix)
        await until(lambda: client.zscore(RegistryKeys(prefix).queues, "Q1") != PAST)


async def test_all_names_are_listed_page_by_page_also_those_that_are_noted_meanwhile(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "QUEUES_AT_ONCE", 10)
    client, queues = server.client(), RegistryKeys(prefix).queues
    client.zadd(queues, {f"Q{n}": PAST + n for n in range(95)})
    client.expire(queues, 1000)
    asked = 0

    async def ask(call: ops.Call[Any]) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            client.zadd(queues, {"Q0": time.time() * 1000 + 60_000, "new": time.time() * 1000 + 60_000})
        return await mesh._client.ask(call)

    async with mesh.connect():
        names = await inspection.queue_names(ask, RegistryKeys(prefix))
    assert sorted(names) == sorted(["new", *(f"Q{n}" for n in range(95))])
    client.delete(queues)


async def test_a_producer_notes_a_name_at_its_first_use_and_then_every_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock.now))
    noted = NotedQueues()
    assert [noted.is_due("Q1"), noted.is_due("Q1"), noted.is_due("Q2")] == [True, False, True]
    clock.now += ops.NOTE_EVERY - 1
    assert not noted.is_due("Q1")
    clock.now += 1
    assert noted.is_due("Q1")
    noted.forget("Q1")
    assert noted.is_due("Q1"), "the server was away"


async def test_what_a_producer_remembers_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MANY_NAMES", 100)
    noted = NotedQueues()
    for n in range(1000):
        assert noted.is_due(f"Q{n}")
    assert len(noted) <= 100
    assert not noted.is_due("Q999")
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ops.NOTE_EVERY))
    for n in range(1000, 1100):
        noted.is_due(f"Q{n}")
    assert len(noted) <= 100


async def test_a_scan_removes_what_a_program_deleted_that_has_ended(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan sends several batches. Here they are small, and one scan sends all of them."""
    monkeypatch.setattr(operators, "MAX_ITEMS", 10)
    keys, queue, scans = QueueKeys(prefix, "Q1"), mesh.queue("Q1"), Counter[str]()
    purge = QueueInspector.purge

    async def counted(self: QueueInspector, name: str) -> None:
        scans[name] += 1
        await purge(self, name)

    monkeypatch.setattr(QueueInspector, "purge", counted)
    async with mesh.join():
        for n in range(5):
            await queue.dispatch(b"1", id=f"job-{n}", delay=3600)
        await client_of(mesh).ask(ops.delete_queue(keys))

        async def left() -> int:
            return sum(1 for _ in server.client().scan_iter(f"*{keys.base}:trash*"))

        await eventually(left, 0)
    assert scans == {"Q1": 1}
