"""``mesh.ask_worker``: what a worker does when an operator asks it to be quiet, to resume, to drain, or for other places."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Held, Runs, eventually, serving, until
from worqr.peer.session import OperatorRequests


async def worker(mesh: worqr.Mesh) -> worqr.WorkerInfo:
    [found] = await mesh.workers()
    return found


async def answered(mesh: worqr.Mesh, answer: str = "done") -> worqr.WorkerInfo:
    async def given() -> str:
        return (await worker(mesh)).answer

    await eventually(given, answer)
    return await worker(mesh)


async def test_a_quiet_worker_takes_nothing_new_and_stays(new_mesh: NewMesh) -> None:
    mesh = new_mesh(app="shop")
    held, queue = Held(), mesh.queue("Q1")
    async with serving(mesh, "Q1", held) as peer:
        await queue.enqueue(b"before")
        await until(lambda: held.tasks == [b"before"])
        await mesh.ask_worker(peer.id, "quiet")
        info = await answered(mesh)
        assert (info.state, info.request, info.room, info.running) == ("quiet", "", 0, 1)
        await queue.enqueue(b"after")
        held.gate.set()
        await eventually(lambda: numbers(queue), (1, 0))
        assert held.tasks == [b"before"]
        assert peer.health().ready
        await mesh.ask_worker(peer.id, "resume")
        await until(lambda: held.tasks == [b"before", b"after"])
        assert (await answered(mesh)).state == "ready"
        asked = [(entry.kind, entry.worker, entry.text) for entry in await mesh.log() if "_" in entry.kind]
        assert asked[:2] == [("worker_asked", peer.id, "quiet"), ("worker_answered", peer.id, "quiet -: done")]


async def numbers(queue: worqr.Queue) -> tuple[int, int]:
    info = await queue.info()
    return info.waiting, info.running


async def test_another_worker_takes_the_tasks_of_a_quiet_one(new_mesh: NewMesh) -> None:
    one, two = new_mesh(), new_mesh()
    mine, theirs = Runs(), Runs()
    async with serving(one, "Q1", mine) as peer, serving(two, "Q1", theirs):
        await one.ask_worker(peer.id, "quiet")
        await until(lambda: peer._engine.scheduler.quiet)
        for n in range(5):
            await one.queue("Q1").enqueue(b"%d" % n)
        await until(lambda: len(theirs.tasks) == 5)
        assert not mine.tasks


async def test_a_worker_gets_another_concurrency_also_while_it_is_quiet(mesh: worqr.Mesh) -> None:
    async with mesh.join(concurrency=3) as peer:
        await mesh.ask_worker(peer.id, "quiet", concurrency=7)
        assert (await answered(mesh)).state == "quiet"
        assert peer._engine.scheduler.concurrency == 7
        await mesh.ask_worker(peer.id, "resume")
        await until(lambda: peer._engine.scheduler.room == 7)
        await mesh.ask_worker(peer.id, concurrency="auto")
        await until(lambda: peer._engine.scheduler.auto)


async def test_a_concurrency_that_is_too_small_for_a_run_is_refused(mesh: worqr.Mesh) -> None:
    async with serving(mesh, "Q1", Runs(), room=8, size=5) as peer:
        await mesh.ask_worker(peer.id, concurrency=4)
        refused = "refused: queue 'Q1': a run of size 5 would never find room: the concurrency of this peer is 4 units"
        await answered(mesh, refused)
        assert peer._engine.scheduler.concurrency == 8


async def test_a_worker_drains_when_it_is_asked(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: held.tasks == [b"a"])
        await mesh.ask_worker(peer.id, "drain")
        await until(lambda: peer._engine.leaving)
        assert (await worker(other)).state in ("ready", "leaving")
        held.gate.set()
        await peer.wait()
        assert (await mesh.queue("Q1").info()).running == 0


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("A",), {}, "needs"),
    (("A", "sleep"), {}, "a worker can be asked for 'quiet', 'resume', 'drain', not 'sleep'"),
    (("A",), {"concurrency": 0}, "concurrency must be a whole number of at least 1, not 0"),
    (("A",), {"concurrency": "many"}, "concurrency must be a whole number of at least 1, not 'many'"),
    (("A",), {"concurrency": 10_000_000}, "concurrency must be at most 1,000,000"),
    ((5, "quiet"), {}, "worker_id must be a str"),
]


@pytest.mark.parametrize(("args", "more", "said"), WRONG)
async def test_a_wrong_request_is_refused_before_it_is_sent(
    mesh: worqr.Mesh, args: tuple[Any, ...], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(worqr.UsageError, match=said):
        await mesh.ask_worker(*args, **more)


async def test_an_unknown_worker_is_named(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=f"there is no worker '{peer.id[:-1]}'.*did you mean '{peer.id}'"):
            await mesh.ask_worker(peer.id[:-1], "quiet")


class Recorded:
    """The units of a peer, which note what is done to them."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def set_concurrency(self, n: object) -> None:
        self.calls.append(n)

    def be_quiet(self) -> None:
        self.calls.append("quiet")

    def resume(self) -> None:
        self.calls.append("resume")


def test_a_request_is_carried_out_once_and_answered_until_the_server_has_it() -> None:
    units, reports = Recorded(), list[str]()
    requests = OperatorRequests(units, lambda: units.calls.append("drain"), reports.append)
    for _ in range(2):
        requests.on_request("5 quiet 3")
        assert requests.answer == "5 done"
    requests.on_request("")
    assert requests.answer == ""
    requests.on_request("6 drain -")
    assert units.calls == [3, "quiet", "drain"]
    assert reports == ["quiet 3: done", "drain -: done"]


@pytest.mark.parametrize("wanted", ["dance -", "quiet 0", "quiet x", "quiet", "quiet 1 2", ""])
def test_what_a_worker_does_not_understand_is_refused_and_changes_nothing(wanted: str) -> None:
    units = Recorded()
    requests = OperatorRequests(units, lambda: None, lambda _text: None)
    requests.on_request(f"5 {wanted}")
    assert requests.answer.startswith("5 refused: ")
    assert len(requests.answer) < 220
    assert not units.calls


def test_synchronous_code_asks_a_worker(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with mesh.join() as peer:
            await trio.to_thread.run_sync(lambda: worqr.sync(mesh.ask_worker, peer.id, "quiet", concurrency=2))
            await until(lambda: peer._engine.scheduler.quiet)
            await trio.to_thread.run_sync(mesh.close)

    trio.run(main)
