"""The leader stores the history of the busiest queues, and asks for nothing while no queue changes."""

from __future__ import annotations

import logging
from binascii import crc32
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import worqr
from tests.ops.driver import Desk, desk_on
from tests.peer.tools import Runs, at_most, eventually, serving, spying, until
from tests.support.servers import Server
from worqr import ops
from worqr.errors import QueueFull, RefusedByServer, Unavailable
from worqr.history_records import COUNTERS, FROM_ZERO, Record
from worqr.keys import RegistryKeys
from worqr.ops import Inspected
from worqr.peer.leader.chore import Lease
from worqr.peer.leader.scanner import SPREAD, ChangedQueues, HistorySampler

# Which queues get a record in their history, and when.


T = 29_000_000
OWN = crc32(b"Q1") % SPREAD
"""The second of each minute in which the record of Q1 is due."""


def found(finished: int = 0, *, waiting: int = 0, workers: int = 1, running: int = 0) -> Inspected:
    counts = {"enqueued": finished, "claimed": finished, "finished": finished} if finished else {}
    names = [f"W{n}" for n in range(workers)]
    return Inspected(waiting, 0, running, 0, 0, None, False, names, counts, 0, None, None)


def record_of(queue: Inspected, minute: int) -> Record:
    totals = tuple(queue.counts.get(name, 0) for name in COUNTERS)
    gauges = (queue.waiting, queue.due, queue.running, queue.failed)
    return Record(minute * 60_000, 0, len(queue.workers), None, gauges, (*totals, 0, 0), (0,) * 20, (0,) * 16)


class Mesh:
    """A leader that scans Q1, and stores each record that is due."""

    def __init__(self) -> None:
        self.changed = ChangedQueues()
        self.since: list[int] = []

    def scan(self, queue: Inspected, minute: float, *, stored: Inspected | None = None, fails: bool = False) -> bool:
        """True if a record was due. `stored`: the queue when it was stored."""
        self.changed.record({"Q1": queue}, round(minute * 60_000), lambda *_: None)
        due = self.changed.take_due()
        for name in due:
            self.since.append(self.changed.since(name) - T if self.changed.since(name) else 0)
            if not fails:
                self.changed.store(name, record_of(stored or queue, int(minute)))
        return bool(due)


def at(second: float) -> float:
    return second / 60


def test_a_queue_that_was_never_used_gets_no_record() -> None:
    mesh = Mesh()
    assert not any(mesh.scan(found(workers=n % 3), T + n / 2) for n in range(10))


def test_the_first_record_of_a_new_queue_says_that_its_totals_were_zero() -> None:
    mesh = Mesh()
    mesh.scan(found(), T + 1)
    assert mesh.scan(found(5), T + 1.5)
    assert mesh.since == [1 | FROM_ZERO]


@pytest.mark.parametrize("queue", [found(5), found(5, waiting=1, workers=0), found(5, running=1)])
def test_a_queue_in_use_when_it_was_first_seen_gets_a_record_of_unknown_differences(queue: Inspected) -> None:
    mesh = Mesh()
    assert mesh.scan(queue, T + 1)
    assert mesh.since == [0]


def test_a_queue_at_rest_when_it_was_first_seen_gets_none_until_it_changes() -> None:
    mesh = Mesh()
    assert not any(mesh.scan(found(5, workers=0), T + n) for n in range(5))
    assert mesh.scan(found(6, workers=0), T + 5)
    assert mesh.since == [0]


def test_a_busy_queue_gets_one_record_a_minute_in_its_own_second() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    times = [(n, mesh.scan(found(n + 1), T + at(3 * n))) for n in range(100)]
    first, *later = [n for n, due in times if due]
    assert first == 0
    assert len(later) == 4 or OWN < 3  # minutes 1 to 4
    for n in later:
        assert OWN <= (3 * n) % 60 < OWN + 3
    assert len({3 * n // 60 for n in [first, *later]}) == len([first, *later])


def test_after_the_last_change_one_more_record_follows_and_then_none() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    assert mesh.scan(found(5), T + at(3))
    due = [n for n in range(1, 400) if mesh.scan(found(5), T + at(3 + 3 * n))]
    assert len(due) == 1
    assert 60 <= 3 + 3 * due[0] < 120


def test_a_change_after_a_rest_is_recorded_at_once_with_the_minute_until_which_it_rested() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    for n in range(200):
        mesh.scan(found(5), T + at(6 + 3 * n))
    assert mesh.scan(found(6), T + 15)
    assert mesh.since[-1] == 10  # the last scan before was at T + 10:03


def test_changes_between_the_scan_and_the_record_are_seen_by_the_next_scan() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(1), stored=found(8))
    assert mesh.scan(found(8), T + 2)  # it follows the last change
    assert not mesh.scan(found(8), T + 4)
    mesh.scan(found(9), T + 6, stored=found(10))
    mesh.scan(found(10), T + 8)
    assert not mesh.scan(found(10), T + 10)


def test_a_record_that_could_not_be_stored_is_due_at_the_next_scan() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    assert mesh.scan(found(5), T + at(3), fails=True)
    assert mesh.scan(found(5), T + at(6))
    assert mesh.since == [FROM_ZERO, FROM_ZERO]


@pytest.mark.parametrize("other", [found(5, waiting=1), found(5, workers=2), found(5, running=1)])
def test_a_change_of_other_numbers_is_recorded_too(other: Inspected) -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    assert mesh.scan(found(5), T + 1.9)
    assert not mesh.scan(found(5), T + 5)
    assert mesh.scan(other, T + 6)


def test_queues_that_an_earlier_leader_has_recorded_get_a_record_at_once() -> None:
    mesh = Mesh()
    assert not mesh.scan(found(5, workers=0), T)
    mesh.changed.begin(["Q1", "gone"])
    assert mesh.scan(found(5, workers=0), T + at(3))
    assert mesh.since == [0]
    mesh.changed.begin(["Q1"])
    assert not mesh.scan(found(5, workers=0), T + at(6))


def test_what_was_cleared_or_forgotten_is_new_again() -> None:
    mesh = Mesh()
    mesh.scan(found(5, running=1), T)
    mesh.changed.forget(["Q1", "nothing"])
    assert mesh.scan(found(5, running=1), T + at(3))
    mesh.changed.clear()
    assert mesh.scan(found(5, running=1), T + at(6))
    assert mesh.changed.since("nothing") == mesh.changed.written("nothing") == mesh.changed.activity("nothing") == 0


def test_the_most_active_queues_come_first_and_activity_fades() -> None:
    changed = ChangedQueues()
    changed.record({"a": found(1), "b": found(1)}, T * 60_000, lambda *_: None)
    changed.record({"a": found(10), "b": found(90)}, T * 60_000 + 3000, lambda *_: None)
    assert list(changed.take_due()) == ["b", "a"]
    before = changed.activity("b")
    changed.record({"a": found(60), "b": found(90)}, (T + 20) * 60_000, lambda *_: None)
    assert changed.activity("b") == pytest.approx(before / 16)
    assert changed.activity("a") > changed.activity("b")


def test_after_the_servers_clock_was_set_back_records_go_on() -> None:
    mesh, early = Mesh(), T - 5_000_000
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    assert sum([mesh.scan(found(6 + n), early + at(3 * n)) for n in range(20)]) == 1
    assert sum([mesh.scan(found(50 + n), early + 1 + at(3 * n)) for n in range(20)]) == 1


def test_the_age_of_the_oldest_task_is_that_of_the_scan() -> None:
    changed = ChangedQueues()
    changed.record({"Q1": found(5, waiting=2)}, T * 60_000, lambda name, queue: len(name) + queue.waiting)
    assert bool(changed)
    assert changed.take_due() == {"Q1": 4}
    assert not changed


class DeskLink:
    """A link to a real server. It counts what is sent, and may fail."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.settings = SimpleNamespace(clustered=False)
        self.sent: Counter[str] = Counter()
        self.fails: dict[str, Exception] = {}

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
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

    async def begin_again(request: ops.Command[Any], *, patience: float) -> Any:
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
