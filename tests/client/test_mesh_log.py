"""``mesh.log``: what workers and operators have done, who did it, and what a wrong argument gets."""

from __future__ import annotations

from typing import Any

import pytest

import worqr
from tests.ops.conftest import desk  # noqa: F401 - a fixture
from tests.ops.driver import Desk
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Held, eventually, serving
from worqr import ops
from worqr.client import dead_letters


async def kinds(mesh: worqr.Mesh) -> list[str]:
    return [entry.kind for entry in await mesh.log()]


async def facts(mesh: worqr.Mesh, *kinds: str) -> list[dict[str, Any]]:
    """The entries of these kinds, without what is empty, and without their ids and times."""
    return [
        {name: value for name in LOG_FIELDS if (value := getattr(entry, name)) not in ("", None)}
        for entry in await mesh.log()
        if entry.kind in kinds
    ]


LOG_FIELDS = ("kind", "who", "queue", "worker", "job", "count", "text")


async def test_the_actions_of_operators_are_in_the_log(new_mesh: NewMesh) -> None:
    mesh = new_mesh(app="shop")
    queue = mesh.queue("Q1")
    async with mesh.connect():
        await queue.enqueue(b"a", b"b")
        await queue.pause("the mail server is down")
        await queue.resume()
        await queue.cancel_all(reason="why")
        await queue.delete()
        assert [entry.who for entry in await mesh.log()] == 4 * ["shop"]
        assert await facts(mesh, "paused", "resumed", "cancelled_all", "deleted") == [
            {"kind": "paused", "who": "shop", "queue": "Q1", "text": "the mail server is down"},
            {"kind": "resumed", "who": "shop", "queue": "Q1"},
            {"kind": "cancelled_all", "who": "shop", "queue": "Q1", "count": 2, "text": "why"},
            {"kind": "deleted", "who": "shop", "queue": "Q1"},
        ]


async def test_what_is_done_to_dead_letters_is_in_the_log(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(task: bytes) -> None:
        raise worqr.Failure("on purpose")

    queue = mesh.queue("Q1")
    async with mesh.connect(), serving(mesh, "Q1", fail):
        await queue.enqueue(b"a", b"b")
        await eventually(lambda: failed(queue), 2)
        assert await queue.failed.retry_all() == 2
        await eventually(lambda: failed(queue), 2)
        monkeypatch.setattr(dead_letters, "PIECE", 1)
        assert await queue.failed.drop_all() == 2
        assert await queue.failed.drop_all() == 0  # which is not worth an entry
        assert await facts(mesh, "retried", "bulk_begun", "dropped") == [
            {"kind": "retried", "queue": "Q1", "count": 2, "text": "failed"},
            {"kind": "bulk_begun", "queue": "Q1", "count": 2, "text": "failed tasks to be dropped"},
            {"kind": "dropped", "queue": "Q1", "count": 2, "text": "failed"},
        ]


async def failed(queue: worqr.Queue) -> int:
    return (await queue.info()).failed


async def test_a_schedule_that_is_paused_is_in_the_log(mesh: worqr.Mesh) -> None:
    mesh.every(3600, mesh.call("Q1", b""), name="hourly")
    async with mesh.join():
        await mesh.pause_schedule("hourly")
        await mesh.pause_schedule("hourly", paused=False)
        assert await facts(mesh, "schedule_paused", "schedule_resumed") == [
            {"kind": "schedule_paused", "text": "hourly"},
            {"kind": "schedule_resumed", "text": "hourly"},
        ]


async def test_workers_that_join_lead_leave_and_are_evicted(new_mesh: NewMesh) -> None:
    mesh, other, held = new_mesh(), new_mesh(app="ops"), Held()
    async with other.connect():
        async with serving(mesh, "Q1", held) as peer:
            first = peer.id
            await eventually(lambda: kinds(other), ["joined", "leader"])
            await other.queue("Q1").enqueue(b"a")
            await held.wait(1)
            await other.evict(first)
            await held.wait(2)
            last = peer.id
            held.gate.set()
        [joined, joined_again] = await facts(other, "joined")
        assert (joined["worker"], joined_again["worker"]) == (first, last)
        assert f"worqr {worqr.__version__}" in joined["text"]
        assert (await facts(other, "leader"))[0] == {"kind": "leader", "worker": first}
        assert await facts(other, "dead") == [{"kind": "dead", "who": "ops", "worker": first, "text": "evicted"}]
        assert await facts(other, "left") == [{"kind": "left", "worker": last}]


async def test_a_dead_worker_and_what_becomes_of_its_tasks(mesh: worqr.Mesh, desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    desk.put(b"a", b"b")
    desk.take("A", 2)
    desk.client.delete(desk.g.worker("A"))
    async with mesh.join():
        await eventually(lambda: facts(mesh, "recovered"), [RECOVERED])
        assert await facts(mesh, "dead") == [{"kind": "dead", "worker": "A", "text": "its heartbeat key has expired"}]
        await mesh.queue("Q1").cancel_all()


RECOVERED = {
    "kind": "recovered",
    "worker": "A",
    "count": 2,
    "text": "2 tasks given back, 0 moved to a dead-letter queue",
}


async def test_an_action_does_not_fail_because_of_the_log(mesh: worqr.Mesh, desk: Desk) -> None:
    desk.client.set(desk.g.log, "foreign")
    async with mesh.connect():
        await mesh.queue("Q1").pause("why")
        assert (await mesh.queue("Q1").info()).paused == "why"
        await mesh.queue("Q1").resume()
        with pytest.raises(worqr.RefusedByServer, match="WRONGTYPE"):
            await mesh.log()


async def test_the_log_is_read_on_from_an_entry(mesh: worqr.Mesh, desk: Desk) -> None:
    for n in range(5):
        desk.call(ops.note_event(desk.g, f"k{n}"))
    async with mesh.connect():
        entries = await mesh.log(limit=3)
        assert [entry.kind for entry in entries] == ["k2", "k3", "k4"]
        assert await mesh.log(after=entries[-1].id) == []
        assert await mesh.log(after=entries[0].id) == entries[1:]
        assert [entry.kind for entry in await mesh.log(limit=2, after="0")] == ["k0", "k1"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"limit": 0}, "limit must be"),
        ({"limit": 1001}, "limit must be at most 1000, not 1001"),
        ({"limit": "9"}, "limit must be"),
        ({"after": "newest"}, "after= must be the id of an entry of mesh.log"),
        ({"after": "1-"}, "after= must be"),
        ({"after": 5}, "after must be a str"),
    ],
)
async def test_a_wrong_argument_is_an_error(mesh: worqr.Mesh, wrong: dict[str, Any], why: str) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=why):
            await mesh.log(**wrong)


def test_the_log_in_plain_threads(new_mesh: NewMesh, desk: Desk) -> None:
    desk.call(ops.note_event(desk.g, "paused", who="Ada"))
    mesh = new_mesh()
    [entry] = worqr.sync(mesh.log)
    assert (entry.kind, entry.who) == ("paused", "Ada")
    assert worqr.sync(mesh.log, limit=5, after=entry.id) == []
    mesh.close()
