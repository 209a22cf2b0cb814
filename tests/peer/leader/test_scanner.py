"""The leader's scans: they hold nothing else up, and forget what nobody uses."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import trio

import worqr
from tests.ops.driver import PAST
from tests.peer.conftest import NewMesh
from tests.peer.tools import Runs, at_most, eventually, serving, until
from tests.support.servers import Server
from worqr import ops
from worqr.client import inspection
from worqr.client.client import NotedQueues
from worqr.inside import client_of
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import UNUSED_MS, Inspected, QueuesPage, WorkerHeartbeats, operators, registry
from worqr.peer import consumer_runner
from worqr.peer.leader import scanner
from worqr.peer.leader.chore import Lease
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.scanner import (
    COMPARED,
    FRESH,
    FRESH_AT_ONCE,
    GRACE,
    LINES,
    MAX_WAITING,
    NOTHING_MISSED,
    PERIOD,
    QUIET_AT_ONCE,
    REMEMBERED,
    UNSEEN_AT_ONCE,
    KnownQueues,
    QueueInspector,
    UnservedQueueReporter,
)


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

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
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


class Nodes:
    """A link to nodes that hold so many keys each. Queue n is on node n modulo the nodes; each reply is a page of the keys."""

    def __init__(self, *keys: int) -> None:
        self.settings = SimpleNamespace(clustered=len(keys) > 1)
        self.keys = keys
        self.life = 0
        self.asked: Counter[int] = Counter()
        self.passes: Counter[int] = Counter()

    async def call(self, call: ops.Command[Any], *, patience: float) -> Any:
        await trio.lowlevel.checkpoint()
        assert call.script.name == "find_claims"
        queue, (cursor, budget, *_) = call.base, call.args
        node = int(queue.partition("{")[2].partition("}")[0]) % len(self.keys)
        after = int(str(cursor)) + int(str(budget))
        self.asked[node] += 1
        self.passes[node] += after >= self.keys[node]
        return registry.FoundClaims(f"{node}-{self.life}", str(after) if after < self.keys[node] else "0", [])


async def looked(nodes: Nodes, finder: scanner.ClaimFinder, queues: int, seconds: int, now: list[float]) -> None:
    """A leader scans as often as it does, for so many seconds."""
    for _ in range(0, seconds, 3):
        now[0] += 3
        await finder.look([str(n) for n in range(queues)])


@pytest.mark.parametrize("queues", [1, 7, 500])
@pytest.mark.parametrize("keys", [(0,), (300_000,), (0, 0, 0), (200_000, 0, 200_000)])
async def test_claims_are_looked_for_among_many_keys_with_a_request_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[int, ...], queues: int
) -> None:
    """And the passes end, however many queues there are, also after a server has started again."""
    now = [1000.0]
    monkeypatch.setattr(scanner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nodes: Any = Nodes(*keys)
    finder = scanner.ClaimFinder(nodes, RegistryKeys("p"), Lease())
    await looked(nodes, finder, queues, 6_000, now)
    assert sum(nodes.asked.values()) <= len(keys) * 6_000 / scanner.PAGE_EVERY
    used = range(min(queues, len(keys)))
    assert all(nodes.passes[node] >= 2 for node in used)
    nodes.life, nodes.passes = 1, Counter()
    await looked(nodes, finder, queues, 6_000, now)
    assert all(nodes.passes[node] >= 2 for node in used)


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

    async def ask(call: ops.Command[Any]) -> Any:
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
    monkeypatch.setattr("worqr.client.client.time", SimpleNamespace(monotonic=lambda: clock.now))
    noted = NotedQueues()
    assert [noted.is_due("Q1"), noted.is_due("Q1"), noted.is_due("Q2")] == [True, False, True]
    clock.now += ops.NOTE_EVERY - 1
    assert not noted.is_due("Q1")
    clock.now += 1
    assert noted.is_due("Q1")
    noted.forget("Q1")
    assert noted.is_due("Q1"), "the server was away"


async def test_what_a_producer_remembers_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.client.client.MANY_NAMES", 100)
    noted = NotedQueues()
    for n in range(1000):
        assert noted.is_due(f"Q{n}")
    assert len(noted) <= 100
    assert not noted.is_due("Q999")
    monkeypatch.setattr(
        "worqr.client.client.time", SimpleNamespace(monotonic=lambda: time.monotonic() + ops.NOTE_EVERY)
    )
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


async def test_what_is_kept_of_jobs_is_trimmed_although_the_queue_is_quiet(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    keys = QueueKeys(prefix, "Q1")
    async with mesh.connect():
        job = await mesh.queue("Q1").dispatch(b"1", keep=worqr.Keep())
        await job.cancel()
        [kept] = await mesh.queue("Q1").jobs(state="cancelled")
    assert server.client().delete(keys.kept_job(int(kept.kept or ""))) == 1  # as when it expires
    async with mesh.join():
        await eventually(lambda: exists(server, keys.kept, keys.kept_total), 0)


async def exists(server: Server, *names: str) -> int:
    return int(server.client().exists(*names))


# Which queues the leader looks at, and which names it forgets. No server is needed for it.


NOTHING = Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
LATE = 10_000_000_000.0
"""The server's time, in ms."""
LONG_AGO = LATE - 2 * UNUSED_MS


def queue(**facts: Any) -> Inspected:
    return replace(NOTHING, **facts)


def knowing(*names: str, noted_ms: float = LONG_AGO) -> KnownQueues:
    known = KnownQueues()
    for name in names:
        known.note(name, noted_ms, LATE, 0.0)
    return known


def scanned(known: KnownQueues, now: float, **found: Inspected) -> list[str]:
    """One scan that finds what `found` says, elsewhere nothing."""
    names = known.next_scan(now)
    for name in names:
        known.mark_read(name)
        known.record(name, found.get(name, NOTHING))
    return names


def many(n: int) -> list[str]:
    return [f"Q{i}" for i in range(n)]


def test_every_scan_looks_at_what_is_served_or_due_or_to_be_purged() -> None:
    urgent = {
        "served": queue(workers=["A"]),
        "held": queue(running=1),
        "due": queue(due=1),
        "deleted": queue(trash=True),
    }
    known = knowing(*urgent, *many(10 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0, **urgent)
    for _ in range(5):
        assert urgent.keys() <= set(scanned(known, 0.0, **urgent))


def test_all_other_names_take_turns() -> None:
    known = knowing(*many(5 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0)
    turns = [scanned(known, 0.0) for _ in range(10)]
    assert {len(turn) for turn in turns} == {QUIET_AT_ONCE}
    for five in (turns[:5], turns[5:]):
        assert len({name for turn in five for name in turn}) >= 4 * QUIET_AT_ONCE
    assert {name for turn in turns for name in turn} == set(many(5 * QUIET_AT_ONCE))


def test_few_names_are_all_looked_at_in_each_scan_and_once() -> None:
    known = knowing(*many(20))
    for _ in range(5):
        assert sorted(scanned(known, 0.0)) == sorted(many(20))


def test_new_names_are_looked_at_soon_but_not_all_at_once() -> None:
    known = knowing(*many(2 * UNSEEN_AT_ONCE))
    first, second = scanned(known, 0.0), scanned(known, 0.0)
    assert len(first) <= UNSEEN_AT_ONCE + QUIET_AT_ONCE
    assert set(first) | set(second) == set(many(2 * UNSEEN_AT_ONCE))
    assert not known.unseen


def test_a_name_that_was_just_noted_is_looked_at_in_each_scan_for_a_while() -> None:
    known = knowing(*many(10 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0)
    known.note("entered soon", LATE, LATE, 0.0)
    for now in (0.0, FRESH / 2, FRESH):
        assert "entered soon" in scanned(known, now)
    assert "entered soon" not in [name for _ in range(3) for name in scanned(known, FRESH + 1)]


def test_many_names_that_were_just_noted_take_turns() -> None:
    names = many(5 * FRESH_AT_ONCE)
    known = knowing(*names, noted_ms=LATE)
    turns: list[str] = []
    while known.unseen:
        looked_at = scanned(known, 0.0)
        assert len(looked_at) <= FRESH_AT_ONCE + UNSEEN_AT_ONCE + QUIET_AT_ONCE
        turns += looked_at[:FRESH_AT_ONCE]
    for _ in range(5):
        turns += scanned(known, 0.0)[:FRESH_AT_ONCE]
    assert set(names) <= set(turns[-len(names) :])


def test_after_hints_were_missed_all_that_is_in_use_is_looked_at_once_more() -> None:
    known = knowing(*many(10 * QUIET_AT_ONCE))
    used = [f"used {n}" for n in range(2 * QUIET_AT_ONCE)]
    for name in used:
        known.note(name, LATE - 300_000, LATE, 0.0)
    while known.unseen:
        scanned(known, 0.0)
    known.rescan(LATE)
    assert set(used) <= set(scanned(known, 0.0))


# Forgetting


def test_a_queue_that_waits_for_a_limit_is_not_announced() -> None:
    known = knowing("full", "limited", "paused", "free")
    waits = replace(NOTHING, waiting=5, workers=["A"])
    found = {
        "full": replace(waits, room=0),
        "limited": replace(waits, room=3),
        "paused": replace(waits, room=0, paused="why"),
        "free": waits,
    }
    assert known.waiting(found) == ["free", "limited"]


def test_a_name_that_was_long_not_noted_and_holds_nothing_may_be_forgotten() -> None:
    known = knowing("old")
    known.note("new", LATE - UNUSED_MS + 1, LATE, 0.0)
    assert known.unused({"old": NOTHING, "new": NOTHING}, LATE) == ["old"]
    known.note("old", LATE, LATE, 0.0)
    assert known.unused({"old": NOTHING, "new": NOTHING}, LATE) == []


def test_whatever_a_queue_holds_keeps_its_name() -> None:
    holding = {
        **{kind: queue(**{kind: 1}) for kind in ("waiting", "due", "suspended", "running", "failed", "undecodable")},
        "blocked": queue(blocked=1),
        "paused": queue(paused=""),
        "trash": queue(trash=True),
        "workers": queue(workers=["A"]),
        "overridden": queue(overridden=True),
        "lane_rules": queue(lane_rules=1),
        "batches": queue(batches=1),
        "kept": queue(kept=1),
        "needs_relay": queue(needs_relay=True),
    }
    others = {"counts", "next_in_ms", "oldest_ms", "limits", "room", "opens_in_ms"} | {
        "lanes",
        "held_lanes",
        "only_held",
        "open_batches",
        "due_soon",
        "kept_bytes",
    }
    assert set(holding) == set(Inspected.__slots__) - others
    known = knowing(*holding)
    assert known.unused(holding, LATE) == []
    assert known.unused(dict.fromkeys(holding, queue(counts={"enqueued": 7})), LATE) == list(holding)


def test_what_was_forgotten_is_looked_at_no_more() -> None:
    known = knowing("a", "b")
    scanned(known, 0.0, a=queue(due=1))
    known.forget(["a", "b", "c"])
    assert scanned(known, 0.0) == []
    assert known.noted == {}


# What the beats are told


def test_the_beats_are_told_of_queues_with_tasks_and_workers_that_are_not_paused() -> None:
    unserved = {f"off {n}": queue(waiting=1) for n in range(10 * MAX_WAITING)}
    found = {
        **unserved,
        "served": queue(waiting=1, workers=["A"]),
        "paused": queue(waiting=1, workers=["A"], paused="why"),
        "empty": queue(workers=["A"]),
    }
    assert KnownQueues().waiting(found) == ["served"]


def test_where_there_is_room_the_beats_are_told_of_shards_that_nobody_serves() -> None:
    served = {name: queue(waiting=1, workers=["A"]) for name in many(MAX_WAITING - 1)}
    shards = {f"{{hot~{n}}}-shard": queue(waiting=1) for n in range(3)}
    told = KnownQueues().waiting({**served, **shards, "off": queue(waiting=1)})
    assert set(told) == {*served, "{hot~0}-shard"}


def test_if_they_are_many_they_are_told_in_turns() -> None:
    known = KnownQueues()
    found = {name: queue(waiting=1, workers=["A"]) for name in many(2 * MAX_WAITING + 50)}
    told = [known.waiting(found) for _ in range(3)]
    assert {len(set(each)) for each in told} == {scanner.MAX_WAITING}
    assert {name for each in told for name in each} == set(found)


# Queues with waiting tasks and no worker: when the leader logs them, how often, and what it says.


NOTHING_FOUND = Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
WAITS = replace(NOTHING_FOUND, waiting=3)
SERVED = replace(NOTHING_FOUND, workers=["A"])
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines about unserved queues since the last call."""

    def taken() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == scanner.__name__]
        caplog.clear()
        return found

    return taken


def seen_for_long(judge: UnservedQueueReporter, found: dict[str, Inspected], at: float = 0.0) -> None:
    """Two scans that find the same, as far apart as it takes."""
    judge.report(found, at)
    judge.report(found, at + GRACE)


def test_a_queue_is_named_with_what_waits_what_was_meant_and_the_remedy(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"shop.sned": WAITS, "shop.send": SERVED, "other": SERVED}
    seen_for_long(UnservedQueueReporter(), found)
    (record,) = caplog.records
    assert (record.levelno, record.__dict__["queue"], record.__dict__["waiting"]) == (logging.WARNING, "shop.sned", 3)
    assert lines() == [
        "queue.unserved: 3 tasks wait in queue 'shop.sned' and no worker serves it; did you mean 'shop.send'? "
        "Start a worker that declares it, or delete the queue."
    ]


def test_without_a_name_that_is_close_none_is_proposed(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"mails": replace(WAITS, waiting=1), "report": SERVED})
    assert lines() == [
        "queue.unserved: 1 task waits in queue 'mails' and no worker serves it. "
        "Start a worker that declares it, or delete the queue."
    ]


def test_a_failure_queue_needs_a_failure_handler(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"{mails}-fail": WAITS, "mails": SERVED})
    assert lines() == [
        "queue.unserved: 3 tasks wait in queue '{mails}-fail' and no worker serves it. "
        "Start a worker that serves 'mails' and has a failure handler for it, or delete the queue."
    ]


def test_nothing_is_said_of_a_queue_whose_worker_restarts(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for restart in range(10):
        judge.report({"mails": WAITS}, restart * GRACE)
        judge.report({"mails": WAITS}, restart * GRACE + GRACE / 2)
        judge.report({"mails": replace(WAITS, workers=["A"])}, restart * GRACE + GRACE * 0.9)
    assert lines() == []


@pytest.mark.parametrize(
    "between", [NOTHING_FOUND, replace(WAITS, paused="why"), SERVED], ids=["empty", "paused", "served"]
)
def test_the_time_begins_anew_when_nothing_waited_in_vain(lines: Lines, between: Inspected) -> None:
    judge = UnservedQueueReporter()
    for now, queue in ((0.0, WAITS), (1.0, between), (GRACE, WAITS), (2 * GRACE - 1, WAITS)):
        judge.report({"mails": queue}, now)
    assert lines() == []
    judge.report({"mails": WAITS}, 2 * GRACE)
    assert len(lines()) == 1


def test_a_queue_that_is_empty_or_paused_is_never_named(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for now in range(100):
        judge.report(
            {"empty": NOTHING_FOUND, "due": replace(NOTHING_FOUND, due=1), "paused": replace(WAITS, paused="")}, now
        )
    assert lines() == []


def test_it_is_said_once_until_a_worker_has_served_the_queue(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    for now in range(1000):
        judge.report({"mails": WAITS if now % 100 else NOTHING_FOUND}, float(now))
    assert len(lines()) == 1
    judge.report({"mails": SERVED}, 1000)
    seen_for_long(judge, {"mails": WAITS}, 1001)
    assert len(lines()) == 1


def test_it_is_said_again_when_the_queue_was_forgotten_meanwhile(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    seen_for_long(judge, {"mails": WAITS})
    judge.forget(["mails", "unknown"])
    seen_for_long(judge, {"mails": WAITS}, 100)
    assert len(lines()) == 2


def test_a_new_leader_says_it_again_but_not_one_that_has_only_lost_its_lease_for_a_moment(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    judge.begin(0)
    seen_for_long(judge, {"mails": WAITS}, 0)
    judge.begin(GRACE + 5)
    seen_for_long(judge, {"mails": WAITS}, GRACE + 5)
    assert len(lines()) == 1
    later = 2 * GRACE + 5 + NOTHING_MISSED + 1
    judge.begin(later)
    judge.report({"mails": WAITS}, later)
    assert lines() == []
    judge.report({"mails": WAITS}, later + GRACE)
    assert len(lines()) == 1


def test_the_shards_of_a_queue_are_one_queue(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"hot": WAITS, "{hot~0}-shard": WAITS, "{hot~1}-shard": NOTHING_FOUND})
    (line,) = lines()
    assert line.startswith("queue.unserved: 6 tasks wait in queue 'hot' ")


def test_a_shard_of_a_queue_that_is_served_is_not_named(lines: Lines) -> None:
    seen_for_long(UnservedQueueReporter(), {"hot": SERVED, "{hot~0}-shard": WAITS})
    assert lines() == []


def test_of_many_queues_a_few_are_named_and_the_others_counted(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    found = {f"Q{n}": WAITS for n in range(1000)}
    seen_for_long(judge, found)
    said = lines()
    assert len(said) == LINES + 1
    assert said[-1] == (
        f"queue.unserved: tasks wait in {1000 - LINES} more queues and no worker serves them; `worqr queues` lists them"
    )
    for now in range(1000):
        judge.report(found, GRACE + now)
    assert lines() == []


def test_many_queues_that_come_one_by_one_are_counted_once_a_minute(lines: Lines) -> None:
    judge = UnservedQueueReporter()
    found: dict[str, Inspected] = {}
    for now in range(int(10 * PERIOD)):
        found[f"Q{now}"] = WAITS
        judge.report(found, float(now))
    said = lines()
    assert len(said) <= 10 * (LINES + 1)
    judge.report(found, 20 * PERIOD)
    judge.report(found, 30 * PERIOD)
    said += lines()
    assert sum(int(line.split()[4]) if "more queues" in line else 1 for line in said) == len(found)
    judge.report(found, 40 * PERIOD)
    assert lines() == []


def test_what_is_remembered_is_bounded() -> None:
    judge = UnservedQueueReporter()
    for page in range(3):
        seen_for_long(judge, {f"Q{page}-{n}": WAITS for n in range(REMEMBERED)}, page * 100.0)
    assert len(judge._since) <= REMEMBERED  # pyright: ignore[reportPrivateUsage]
    assert len(judge._logged) <= REMEMBERED  # pyright: ignore[reportPrivateUsage]


def test_few_names_are_compared(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def did_you_mean(_name: str, known: Any) -> str:
        compared.append(len(known))
        return ""

    monkeypatch.setattr(scanner, "did_you_mean", did_you_mean)
    served = {f"served-{n}": SERVED for n in range(COMPARED - 1)}
    seen_for_long(UnservedQueueReporter(), {**served, **{f"Q{n}": WAITS for n in range(5)}})
    assert len(lines()) == 5
    assert sum(compared) == COMPARED


async def test_the_leader_says_so(
    mesh: worqr.Mesh, new_mesh: NewMesh, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "SCAN_EVERY", 0.5)
    monkeypatch.setattr(scanner, "GRACE", 0.5)
    q, said = mesh.queue("shop.sned"), list[str]()

    def told() -> bool:
        said.extend(lines())
        return bool(said)

    async with serving(mesh, "shop.send", Runs()):
        await q.enqueue(b"x", b"y")
        await until(told)
        assert said == [
            "queue.unserved: 2 tasks wait in queue 'shop.sned' and no worker serves it; did you mean 'shop.send'? "
            "Start a worker that declares it, or delete the queue."
        ]
        runs = Runs()
        async with serving(new_mesh(), "shop.sned", runs):
            await runs.wait(2)
