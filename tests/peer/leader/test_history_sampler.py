"""The leader stores the history of the busiest queues, and asks for nothing while no queue changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import worqr
from tests.ops.driver import Desk, desk_on
from tests.peer.leader.test_changed_queues import found
from tests.peer.tools import Runs, at_most, eventually, serving, spying, until
from tests.support.servers import Server
from worqr import ops
from worqr.errors import QueueFull, RefusedByServer, Unavailable
from worqr.keys import RegistryKeys
from worqr.ops import Inspected
from worqr.peer.leader.chore import Lease
from worqr.peer.leader.scanner import HistorySampler


class DeskLink:
    """A link to a real server. It counts what is sent, and may fail."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.settings = SimpleNamespace(clustered=False)
        self.sent: Counter[str] = Counter()
        self.fails: dict[str, Exception] = {}

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        self.sent[call.script.name] += 1
        if error := self.fails.get(call.script.name):
            raise error
        return self.desk.call(call)


class Leader:
    """A leader that scans queues when the test says so."""

    def __init__(self, desk: Desk, limit: int = 100) -> None:
        self.desk = desk
        self.link = DeskLink(desk)
        self.lease = Lease()
        self.lease.take(float("inf"))
        self.begin = desk.now() // 60_000
        link: Any = self.link
        self.sampler = HistorySampler(link, RegistryKeys(desk.prefix), self.lease, limit)

    async def scan(self, minute: float, **queues: Inspected) -> Counter[str]:
        """What was sent after a scan so many minutes later that found this. A record has the minute of the server."""
        self.link.sent = Counter()
        self.look(minute, **queues)
        await self.sampler.sample_once()
        return self.link.sent

    def look(self, minute: float = 0, **queues: Inspected) -> None:
        self.sampler.record(queues, round((self.begin + minute) * 60_000), lambda *_: None)

    def rings(self) -> set[str]:
        """The queues that have a history."""
        keys = [key.decode() for key in self.desk.all_keys()]
        return {key.split("{")[1].split("}")[0] for key in keys if key.endswith(":history")}

    def noted(self) -> set[str]:
        return {name.decode() for name in self.desk.client.zrange(self.desk.g.histories, 0, -1)}


@pytest.fixture
def desk(server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk` on the shared server; what it leaves is removed."""
    expects_left("*")
    yield from desk_on(server, prefix)


@pytest.fixture
def leader(desk: Desk) -> Leader:
    return Leader(desk)


async def test_a_queue_is_noted_before_its_history_begins(leader: Leader) -> None:
    await leader.scan(0, Q1=found())
    assert leader.rings() == set()
    assert await leader.scan(0.1, Q1=found(5)) == {"note_histories": 1, "sample_queue": 1}
    assert leader.rings() == leader.noted() == {"Q1"}


async def test_a_queue_that_does_not_change_is_asked_for_nothing(desk: Desk, leader: Leader) -> None:
    await leader.scan(0, Q1=found())
    await leader.scan(0.1, Q1=found(5))
    desk.client.hset(desk.q.counts, mapping={"enqueued": 5, "claimed": 5, "finished": 5})
    desk.client.hset(desk.q.workers, "W0", "0 0 0 0")
    assert (await leader.scan(2.9, Q1=found(5)))["sample_queue"] == 1
    assert (await leader.scan(4, Q1=found(5)))["sample_queue"] == 1  # it follows the last change
    for n in range(6, 50):
        assert not await leader.scan(n, Q1=found(5))


async def test_at_its_limit_a_queue_at_rest_gives_its_place_to_one_in_use(desk: Desk) -> None:
    leader = Leader(desk, limit=2)
    await leader.scan(0, a=found(), b=found(), c=found())
    await leader.scan(0.1, a=found(1), b=found(1))
    assert leader.rings() == {"a", "b"}
    assert (await leader.scan(0.2, a=found(2), b=found(2), c=found(1)))[
        "drop_history"
    ] == 0  # no queue rests or is less busy
    sent = await leader.scan(13, c=found(2))
    assert sent["drop_history"] == 1
    assert leader.rings() == leader.noted() > {"c"}
    assert len(leader.rings()) == 2


async def test_at_its_limit_a_much_busier_queue_takes_the_place_of_the_least_busy_one(desk: Desk) -> None:
    leader = Leader(desk, limit=2)
    await leader.scan(0, a=found(1, running=1), b=found(1, running=1))
    await leader.scan(0, a=found(10, running=1), b=found(5, running=1), c=found(1, running=1))
    await leader.scan(0, c=found(3, running=1))
    assert leader.rings() == {"a", "b"}
    await leader.scan(0, c=found(80, running=1))
    assert leader.rings() == leader.noted() == {"a", "c"}


async def test_histories_above_a_limit_that_was_lowered_are_deleted(desk: Desk, leader: Leader) -> None:
    names = [f"q{n}" for n in range(5)]
    await leader.scan(0, **{name: found(1, running=1) for name in names})
    assert leader.rings() == set(names)
    smaller = Leader(desk, limit=3)
    for n in range(4):
        await smaller.scan(n, **{name: found(n + 2, running=1) for name in names})
    assert len(smaller.rings()) == len(smaller.noted()) == 3


async def test_without_a_history_nothing_is_sent(desk: Desk) -> None:
    leader = Leader(desk, limit=0)
    leader.look(Q1=found(5, running=1))
    with trio.move_on_after(0.05):
        await leader.sampler.sample_forever()
    assert not leader.link.sent


async def test_a_new_leader_records_the_queues_of_the_one_before_and_no_other(desk: Desk, leader: Leader) -> None:
    await leader.scan(0, Q1=found(5, running=1))
    newer = Leader(desk)
    assert await newer.scan(1, Q1=found(5, workers=0), other=found(9, workers=0)) == {"note_histories": 1}
    assert await newer.scan(1.1, Q1=found(5, workers=0), other=found(9, workers=0)) == {"sample_queue": 1}
    assert newer.rings() == {"Q1"}


async def test_an_older_leader_brings_no_history_back(desk: Desk, leader: Leader) -> None:
    await leader.scan(0, Q1=found(5, running=1))
    desk.call(ops.drop_history(desk.q))  # as a newer leader does, for a busier queue
    desk.call(ops.note_histories(desk.g, dropped="Q1"))
    await leader.scan(2.9, Q1=found(6, running=1))
    assert leader.rings() == set()
    await leader.scan(4.9, Q1=found(7, running=1))  # it has learnt of it, and begins anew
    assert leader.rings() == {"Q1"}


async def test_one_that_does_not_lead_any_more_sends_no_record(leader: Leader) -> None:
    leader.lease.give_up(100)
    assert (await leader.scan(0, Q1=found(5, running=1)))["sample_queue"] == 0


async def test_one_that_leads_again_in_the_middle_of_a_record_begins_anew(leader: Leader) -> None:
    """It has lost and won the lease while a request was under way."""
    await leader.scan(2.9, Q1=found(5), Q2=found(5))
    call = leader.link.call

    async def begin_again(request: ops.Call[Any], *, patience: float) -> Any:
        leader.sampler.begin()
        return await call(request, patience=patience)

    leader.link.call = begin_again  # type: ignore[method-assign]
    await leader.scan(4, Q1=found(6), Q2=found(6))


async def test_of_a_noted_queue_without_rings_the_rings_are_made(desk: Desk, leader: Leader) -> None:
    """The leader before died between the two."""
    desk.call(ops.note_histories(desk.g, ["Q1"]))
    await leader.scan(0, Q1=found(5, running=1))
    await leader.scan(0.1, Q1=found(5, running=1))
    assert leader.rings() == leader.noted() == {"Q1"}


async def test_full_memory_is_a_debug_line_and_nothing_else(leader: Leader, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "worqr")
    leader.link.fails["sample_queue"] = QueueFull("the server is out of memory")
    leader.look(Q1=found(5, running=1), Q2=found(5, running=1))
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.sampler.sample_forever)
        await until(lambda: caplog.records)
        nursery.cancel_scope.cancel()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "leader: the history was not stored: the server is out of memory")
    ]
    assert leader.link.sent["sample_queue"] == 1
    leader.link.fails.clear()
    assert (await leader.scan(0.1, Q1=found(6, running=1), Q2=found(6, running=1)))["sample_queue"] == 2


@pytest.mark.parametrize("script", ["sample_queue", "note_histories"])
async def test_a_refusal_is_logged_once_and_an_outage_is_not(
    leader: Leader, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr")
    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(leader.sampler.sample_forever)
        for error in (Unavailable("away"), RefusedByServer("no"), RefusedByServer("no")):
            leader.link.fails[script] = error
            leader.link.sent = Counter()
            leader.look(Q1=found(5, running=1))
            await until(lambda: leader.link.sent[script])
        nursery.cancel_scope.cancel()
    [line] = [record.getMessage() for record in caplog.records]
    assert "cannot be stored: no" in line


# In a mesh


async def test_what_a_queue_does_is_in_its_history_within_seconds(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async def finished() -> int:
        return (await mesh.queue("Q1").history(3)).total("finished")

    async with mesh.connect(), serving(other, "Q1", Runs()):
        q = mesh.queue("Q1")
        async with at_most():  # the history begins when the leader has seen the queue
            while not (begun := await finished()):
                await q.enqueue(b"x")
                await trio.sleep(0.05)
        await eventually(lambda: waiting(q), 0)
        begun = await finished()
        await q.enqueue(*[b"x"] * 20)
        await eventually(finished, begun + 20)
        assert (await q.history(3)).points[-1].workers == 1


async def waiting(queue: worqr.Queue) -> int:
    info = await queue.info()
    return info.waiting + info.running


async def test_a_leader_at_rest_sends_nothing_for_the_history(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    asked: Counter[str] = Counter()
    with spying(server, prefix) as spy:
        async with serving(mesh, "Q1", Runs()):
            await until(lambda: asked.update(spy.calls()) or asked["inspect"] >= 2)
    assert not {"sample_queue", "note_histories", "drop_history"} & asked.keys()
