"""The mesh as a whole: how many requests its lists take. What they list is in test_mesh and in tests/client/test_fleet."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import trio

import worqr
from tests.ops.conftest import desk  # noqa: F401 - a fixture
from tests.ops.driver import KEEPALIVE, Desk
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Held, eventually, serving
from tests.support.servers import Server
from worqr import ops
from worqr.client import inspection
from worqr.keys import QueueKeys
from worqr.link.session import Session
from worqr.mesh_records import (
    MAX_REASON,
    MAX_UNHEALTHY,
    MAX_UNREADABLE,
    apps_of,
    decode_snapshot,
    encode_snapshot,
    most_active,
    unhealthy_of,
    unreadable_of,
)
from worqr.peer.leader import scanner
from worqr.validation import from_ms


@contextmanager
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The names of the scripts of each batch that this process sends in the block: a batch is one round trip."""
    sent: list[list[str]] = []
    send = Session.send

    def noting(self: Session, batch: Any, now: float) -> Any:
        sent.append([request.call.script.name for request in batch])
        return send(self, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "send", noting)
        yield sent


@pytest.mark.leaves("{hot*")
async def test_all_queues_are_read_in_few_round_trips(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh.connect():
        for n in range(300):
            await mesh.queue(f"q{n:03}").enqueue(b"x")
        hot = mesh.queue("hot", shards=4)
        await hot.enqueue(*(b"%d" % n for n in range(8)))
        with batches(monkeypatch) as sent:
            found = await mesh.queues()
        assert [(info.name, info.waiting) for info in found] == [("hot", 8), *((f"q{n:03}", 1) for n in range(300))]
        assert len([names for names in sent if "inspect" in names]) == 1
        assert sum(names.count("inspect") for names in sent) == 304
        for info in found:
            await mesh.queue(info.name).delete()


# Workers


async def test_a_worker_tells_when_it_joined_and_how_it_is(mesh: worqr.Mesh) -> None:
    before = datetime.now(UTC)
    async with mesh.join(threads=7, processes=3):
        await eventually(lambda: leaders(mesh), 1)
        [worker] = await mesh.workers()
        assert worker.state == "ready"
        assert worker.started is not None
        assert before - timedelta(seconds=5) <= worker.started <= datetime.now(UTC) + timedelta(seconds=5)
        assert worker.lag is not None
        assert worker.lag >= 0
        assert (worker.python, worker.threads, worker.processes) == (platform.python_version(), 7, 3)


async def leaders(mesh: worqr.Mesh) -> int:
    return [worker.leads for worker in await mesh.workers()].count(True)


async def test_a_worker_that_drains_is_leaving(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held) as peer, trio.open_nursery() as nursery:
        await other.queue("Q1").enqueue(b"a")
        await held.wait(1)
        nursery.start_soon(peer.drain)
        await eventually(lambda: states(other), ["leaving"])
        held.gate.set()


async def test_a_worker_tells_since_when_it_is_full(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async def is_full() -> bool:
        [worker] = await other.workers()
        return worker.full_since is not None

    held = Held()
    async with other.connect(), serving(mesh, "Q1", held, room=2):
        for full in (False, True):
            await other.queue("Q1").enqueue(b"a")
            await held.wait(1 + full)
            await eventually(is_full, full)
        [worker] = await other.workers()
        assert (await other.info()).apps[""].full_since == worker.full_since
        held.gate.set()
        await eventually(is_full, False)


async def states(mesh: worqr.Mesh) -> list[str]:
    return [worker.state for worker in await mesh.workers()]


async def test_workers_are_read_page_by_page(mesh: worqr.Mesh, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{n:04}" for n in range(5 * ops.WORKERS_AT_ONCE // 2)]
    desk.register(*names)
    desk.call(ops.keep_worker_alive(desk.g, "w0001", 1, keepalive_ms=KEEPALIVE, lease_ms=KEEPALIVE, running=0, room=1))
    desk.client.delete(desk.g.worker("w0002"))
    desk.call(ops.condemn_worker(desk.g, "w0003", ops.ANY_BEAT))
    async with mesh.connect():
        with batches(monkeypatch) as sent:
            found = await mesh.workers()
    assert sent == [["list_workers"], 2 * ["list_workers"]]
    assert [worker.id for worker in found] == names
    assert [worker.id for worker in found if worker.leads] == ["w0001"]
    assert {worker.id: worker.state for worker in found if worker.state != "ready"} == {
        "w0002": "missing",
        "w0003": "dead",
    }


async def test_a_worker_of_an_older_version_is_listed_without_what_it_does_not_report(
    mesh: worqr.Mesh, desk: Desk
) -> None:
    desk.register("A")
    desk.client.hdel(desk.g.info("A"), "started")
    async with mesh.connect():
        [worker] = await mesh.workers()
    assert (worker.host, worker.state, worker.python) == ("h", "ready", "")
    assert worker.started is worker.lag is worker.threads is worker.processes is None


# The mesh at one moment


@pytest.mark.leaves("{failing}:*")
async def test_without_a_leader_the_caller_reads_the_mesh_itself(mesh: worqr.Mesh, desk: Desk) -> None:
    desk.register("A")
    desk.client.hset(desk.g.info("A"), mapping={"app": "shop", "running": 2, "room": 3})
    async with mesh.connect():
        await mesh.queue("busy").enqueue(b"x", b"y")
        await mesh.queue("quiet").dispatch(b"x", delay=3600)
        await mesh.queue("paused").pause("why")
        found = await mesh.info()
        for queue in ("busy", "quiet"):
            await mesh.queue(queue).cancel_all()
        await mesh.queue("paused").resume()
    assert (found.source, found.leader, found.queues_left_out, found.others) == ("direct", None, 0, None)
    assert [(queue.name, queue.waiting, queue.scheduled) for queue in found.queues] == [
        *(("busy", 2, 0), ("quiet", 0, 1), ("paused", 0, 0))
    ]
    assert found.apps == {"shop": worqr.AppInfo(workers=1, running=2, room=3)}
    assert found.age >= 0


async def test_a_process_reads_the_mesh_at_most_once_in_five_seconds(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "DIRECT_EVERY", 1000.0)  # however slow this machine is
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"x")
        with batches(monkeypatch) as sent:
            first = await mesh.info()
            second = await mesh.info()
            assert [names.count("inspect") for names in sent].count(1) == 1
            assert (second.source, second.at, second.queues) == ("direct", first.at, first.queues)
            mesh._client.mesh_info._began -= inspection.DIRECT_EVERY
            await mesh.queue("Q1").cancel_all()
            assert (await mesh.info()).queues == []


async def test_a_leader_writes_snapshots_while_they_are_read(mesh: worqr.Mesh, other: worqr.Mesh, desk: Desk) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held) as peer:
        await eventually(lambda: leaders(other), 1)
        assert not desk.client.exists(desk.g.snapshot, desk.g.watched)
        await other.queue("Q1").enqueue(b"a")
        await held.wait(1)
        await other.queue("alone").enqueue(b"a")
        await eventually(lambda: source(other), "leader")
        assert desk.client.exists(desk.g.watched)
        await eventually(lambda: seen(other), {"Q1": (0, 1, 1), "alone": (1, 0, 0)})
        found = await other.info()
        assert found.leader == peer.id
        assert found.apps[mesh.app].workers == 1
        assert 0 <= found.age < inspection.FRESH_FOR
        await other.queue("alone").cancel_all()
        await eventually(lambda: seen(other), {"Q1": (0, 1, 1)})  # it is no longer in the snapshot
        held.gate.set()


async def test_the_leader_estimates_how_long_plain_tasks_have_waited(
    mesh: worqr.Mesh, other: worqr.Mesh, desk: Desk
) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held, concurrency=1):
        await eventually(lambda: leaders(other), 1)
        await eventually(lambda: source(other), "leader")
        assert await age(other) == (None, False)
        desk.client.lpush(desk.q.base, b"a")
        desk.client.publish(desk.q.base, b"")
        await held.wait(1)
        before = desk.now()
        desk.client.lpush(desk.q.base, b"b")  # by a program without worqr
        after = desk.now()
        found = await other.info()
        while not found.queues[0].age_estimated:
            await trio.sleep(0.05)
            found = await other.info()
        [queue] = found.queues
        assert queue.age is not None
        at = found.at.timestamp() * 1000
        assert (at - after) / 1000 - SLACK <= queue.age <= (at - before) / 1000 + SLACK
        assert (await other.queue("Q1").info()).age is None
        held.gate.set()
        await held.wait(2)
        await eventually(lambda: age(other), (None, False))


SLACK = 2 * scanner.SCAN_EVERY
"""Seconds by which an estimate is off at most. In the worst case it is one interval of scans; a slow machine scans less often."""


async def age(mesh: worqr.Mesh) -> tuple[float | None, bool]:
    [queue] = (await mesh.info()).queues
    return queue.age, queue.age_estimated


async def test_a_job_at_the_front_has_its_exact_age(mesh: worqr.Mesh, desk: Desk) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").dispatch(b"a", id="x")
        desk.client.hset(desk.q.job("x"), "run_at", desk.now() - 60_000)
        info = await mesh.queue("Q1").info()
        assert (info.age, info.age_estimated) == (info.oldest_job, False)
        assert info.age is not None
        assert info.age >= 60
        await mesh.queue("Q1").cancel_all()


async def source(mesh: worqr.Mesh) -> str:
    return (await mesh.info()).source


async def seen(mesh: worqr.Mesh) -> dict[str, tuple[int, int, int]]:
    found = await mesh.info()
    return {queue.name: (queue.waiting, queue.running, queue.workers) for queue in found.queues}


@pytest.mark.parametrize("stored", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80", b"\x81\xa2at\xa1x"])
async def test_a_snapshot_that_cannot_be_read_or_is_old_is_not_used(
    mesh: worqr.Mesh, desk: Desk, stored: bytes
) -> None:
    desk.client.set(desk.g.snapshot, stored, ex=60)
    async with mesh.connect():
        assert (await mesh.info()).source == "direct"
        old = encode_snapshot(replace(await mesh.info(), at=datetime.now(UTC) - timedelta(seconds=60)))
        desk.client.set(desk.g.snapshot, old, ex=60)
        assert (await mesh.info()).source == "direct"


@pytest.mark.leaves("{broken}*")
async def test_a_queue_that_cannot_be_read_hides_no_other(mesh: worqr.Mesh, desk: Desk) -> None:
    async with mesh.connect():
        for name in ("a", "b", "broken", "c"):
            await mesh.queue(name).enqueue(b"x")
        keys = QueueKeys(mesh.prefix, "broken")
        desk.client.delete(keys.base)
        desk.client.set(keys.base, "no list")
        found = await mesh.info()
        assert [queue.name for queue in found.queues] == ["a", "b", "c"]
        assert set(found.unreadable) == {"broken"}
        assert "WRONGTYPE" in found.unreadable["broken"]
        for name in ("a", "b", "c"):
            await mesh.queue(name).cancel_all()
        mesh._client.mesh_info._began -= inspection.DIRECT_EVERY
        for name in ("a", "b", "c"):
            desk.client.zrem(desk.g.queues, name)
        found = await mesh.info()
        assert (found.queues, set(found.unreadable)) == ([], {"broken"})
        assert keys.base in found.unreadable["broken"]
        assert await mesh.queues() == []


@pytest.mark.leaves("{broken}*")
async def test_the_leader_names_the_queues_that_cannot_be_read_until_they_can(
    mesh: worqr.Mesh, other: worqr.Mesh, desk: Desk
) -> None:
    async with other.connect(), mesh.join():
        await other.queue("a").enqueue(b"x")
        await other.queue("broken").enqueue(b"x")
        keys = QueueKeys(mesh.prefix, "broken")
        desk.client.delete(keys.base)
        desk.client.set(keys.base, "no list")
        await eventually(lambda: unreadable(other), ("leader", ["broken"]))
        assert "WRONGTYPE" in (await other.info()).unreadable["broken"]
        desk.client.delete(keys.base)
        await eventually(lambda: unreadable(other), ("leader", []))
        await other.queue("a").cancel_all()


async def unreadable(mesh: worqr.Mesh) -> tuple[str, list[str]]:
    found = await mesh.info()
    return found.source, list(found.unreadable)


async def test_the_part_of_the_memory_that_is_used_comes_with_each_look(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        assert (await mesh.info()).memory is None
        with own_server.client() as client:
            client.config_set("maxmemory", 4 * int(client.info("memory")["used_memory"]))
        assert (await mesh.info()).memory == pytest.approx(
            0.25, abs=0.1
        )  # though the queues are those of the look before


def test_the_mesh_at_one_moment_in_plain_threads(mesh: worqr.Mesh) -> None:
    assert worqr.sync(mesh.info).queues == []
    mesh.close()


def queue_info(name: str, **more: Any) -> worqr.QueueInfo:
    zeros = dict.fromkeys(("waiting", "scheduled", "blocked", "running", "failed", "undecodable", "workers"), 0)
    return worqr.QueueInfo(name=name, **{**zeros, "paused": None, "oldest_job": None, "counts": {}, **more})


def test_a_snapshot_names_the_most_active_queues_and_adds_up_the_rest() -> None:
    queues = [queue_info(f"q{n:04}", waiting=n, failed=1, counts={"enqueued": n}) for n in range(1003)]
    named, left_out, others = most_active(queues)
    assert [queue.name for queue in named] == [f"q{n:04}" for n in range(1002, 2, -1)]
    assert left_out == 3
    aged = [replace(queue, age=1.5 if n == 1 else None, age_estimated=n == 1) for n, queue in enumerate(queues)]
    _, _, rest = most_active(aged)
    assert rest is not None
    assert (rest.age, rest.age_estimated) == (1.5, True)
    assert others == queue_info("(others)", waiting=3, failed=3, counts={"enqueued": 3})
    assert most_active(queues[:2]) == (queues[1::-1], 0, None)


def worker(id: str, **fields: Any) -> worqr.WorkerInfo:
    given = {
        "id": id,
        "host": "h",
        "pid": 1,
        "app": "",
        "version": "",
        "queues": frozenset[str](),
        "running": 0,
        "room": 1,
    }
    return worqr.WorkerInfo(**{**given, "beat_age": 0.5, **fields})


def test_the_workers_in_trouble_are_named_the_worst_first() -> None:
    late, later = worker("late", lag=1.1), worker("later", lag=9.0)
    dead, missing = (
        worker("dead", state="dead", beat_age=7.0),
        worker("missing", state="missing", beat_age=float("inf")),
    )
    served = worker("served", state="dead", beat_age=1.0, queues=frozenset({"Q1"}))
    healthy = [worker("well", lag=1.0), worker("old"), worker("quiet", state="quiet")]
    found = unhealthy_of([*healthy, late, served, dead, later, missing])
    assert found == [missing, dead, replace(served, queues=frozenset()), later, late]
    assert len(unhealthy_of([late] * 50)) == MAX_UNHEALTHY


LIMITED: dict[str, object] = {
    "limits": (worqr.Limit(10), worqr.Limit(rate=5, per=0.5)),
    "limits_overridden": True,
    "held_back": "rate",
    "held_for": 0.25,
}


def test_an_application_is_full_if_all_its_ready_workers_are() -> None:
    early, late = from_ms(1000), from_ms(2000)
    full = [worker("A", full_since=early), worker("B", full_since=late)]
    others = [worker("quiet", state="quiet"), worker("leaving", state="leaving"), worker("missing", state="missing")]
    assert apps_of([*full, *others, worker("dead", state="dead")])[""] == worqr.AppInfo(5, 0, 5, late)
    assert apps_of([*full, worker("C")])[""].full_since is None
    assert apps_of(others)[""].full_since is None
    assert apps_of([*full, worker("D", app="other")])["other"].full_since is None


def test_a_snapshot_is_read_as_it_was_written() -> None:
    every = {field.name: n for n, field in enumerate(fields(worqr.QueueInfo)) if field.name != "name"}
    full = queue_info(
        "full",
        **{
            **every,
            "paused": "",
            "oldest_job": 1.5,
            "counts": {"enqueued": 7, "undecodable": 3},
            "age_estimated": True,
            "relay_pending": True,
            **LIMITED,
        },
    )
    info = worqr.MeshInfo(
        at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        source="leader",
        age=2.0,
        leader="W1",
        queues=[full, queue_info("zero")],
        queues_left_out=3,
        others=queue_info("(others)", waiting=1),
        apps={"": worqr.AppInfo(1, 2, 3), "full": worqr.AppInfo(1, 2, 0, from_ms(1_700_000_000_001))},
        unhealthy=[worker("W2", lag=1.5, started=from_ms(1))],
        unreadable={"broken": "WRONGTYPE"},
    )
    stored = encode_snapshot(info)
    assert decode_snapshot(stored, round(info.at.timestamp() * 1000) + 2000) == info
    assert len(stored) < 730
    as_others_read = msgspec.msgpack.decode(stored)["queues"][0]
    assert (as_others_read["broken"], as_others_read["counts"]) == (full.undecodable, {"enqueued": 7, "broken": 3})
    long = replace(info, queues=[queue_info("x", paused=1000 * "y")])
    found = decode_snapshot(encode_snapshot(long), 0)
    assert found is not None
    assert found.queues[0].paused == MAX_REASON * "y"


def test_the_queues_that_cannot_be_read_are_limited_in_number_and_in_words() -> None:
    found = unreadable_of({f"q{n:03}": 1000 * "x" for n in range(2 * MAX_UNREADABLE)})
    assert list(found) == [f"q{n:03}" for n in range(MAX_UNREADABLE)]
    assert set(found.values()) == {MAX_REASON * "x"}
