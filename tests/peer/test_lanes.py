"""Lanes over several peers. Without periodic scans, so that a wake-up that is missing shows as a task that never starts."""

from __future__ import annotations

import enum
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, eventually, serving, spying, until
from tests.support.clusters import Cluster, cluster, cluster_of_module  # noqa: F401 - fixtures
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys, shard_of, shards_of


class Running:
    """What runs in each lane, and the most that did at once."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[tuple[str, bytes]] = []
        self.fails: dict[bytes, int] = {}

    async def __call__(self, task: bytes) -> None:
        lane = worqr.current().lane
        self.now[lane] += 1
        self.most[lane] = max(self.most[lane], self.now[lane])
        try:
            await trio.sleep(0.002)
            if self.fails.get(task):
                self.fails[task] -= 1
                raise worqr.Retry(delay=0.02)
        finally:
            self.now[lane] -= 1
        self.order.append((lane, task))


@pytest.mark.usefixtures("without_scans")
async def test_a_limit_of_each_lane_holds_over_several_peers(new_mesh: NewMesh) -> None:
    runs, meshes = Running(), [new_mesh() for _ in range(3)]
    lanes = worqr.Lanes(limit=worqr.Limit(1), limits={"wide": worqr.Limit(3)})
    async with meshes[0].connect(), AsyncExitStack() as stack:
        q = meshes[0].queue("Q1")
        for n in range(120):
            await q.dispatch(b"%d" % n, lane=("a", "b", "wide")[n % 3])
        for mesh in meshes:
            await stack.enter_async_context(serving(mesh, "Q1", runs, lanes=lanes))
        await until(lambda: len(runs.order) == 120)
        assert (runs.most["a"], runs.most["b"], runs.most["wide"]) == (1, 1, 3)
        await eventually(q.lanes, [])


@pytest.mark.usefixtures("without_periodic_scans")
@pytest.mark.leaves("{Q1}:lanes:rules", "{Q1}:lanes:opens")  # what an operator sets stays
@pytest.mark.parametrize("seed", range(4))
async def test_no_job_is_forgotten_while_peers_come_and_go(new_mesh: NewMesh, seed: int) -> None:
    """Peers join and leave, runs fail and are rate limited, and an operator changes limits and weights and pauses lanes."""
    random, done = Random(seed), set[bytes]()
    tried: Counter[bytes] = Counter()

    async def handler(task: bytes) -> None:
        tried[task] += 1
        await trio.sleep(0.001)
        if tried[task] == 1 and int(task) % 5 == 0:
            raise [worqr.Retry(delay=0.01), worqr.RateLimited(0.02), ValueError("once")][int(task) % 3]
        done.add(task)

    async def come_and_go(mesh: worqr.Mesh) -> None:
        while True:
            lanes = random.choice([worqr.Lanes(limit=worqr.Limit(1)), worqr.Lanes(strict=True), worqr.Lanes()])
            least = tried.total() + random.randint(1, 20)
            with trio.CancelScope() as life:
                async with serving(mesh, "Q1", handler, lanes=lanes, retry=worqr.RetryPolicy(min_backoff=0)):
                    await trio.sleep(0.05 + random.random() / 5)
                    await until(lambda least=least: tried.total() >= least)  # also on a slow machine
                    life.cancel()
                    await trio.sleep_forever()

    async def operate(q: worqr.Queue) -> None:
        while True:
            lane = random.choice("abc")
            await random.choice(
                [
                    partial(q.pause, lane=lane, duration=0.02),
                    partial(q.resume, lane=lane),
                    partial(q.set_limit, worqr.Limit(1), lane=lane),
                    partial(q.clear_limit, lane=lane),
                    partial(q.set_weight, lane, random.choice([None, 5])),
                ]
            )()
            await trio.sleep(0.005)

    main = new_mesh()
    async with main.connect(), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(come_and_go, new_mesh())
        nursery.start_soon(operate, main.queue("Q1"))
        for n in range(300):
            await main.queue("Q1").dispatch(b"%d" % n, lane=random.choice("abc"))
        with trio.fail_after(PATIENCE):
            while len(done) < 300:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("without_periodic_scans")
async def test_a_strict_lane_keeps_its_order_over_retries(new_mesh: NewMesh) -> None:
    runs, mesh = Running(), new_mesh()
    runs.fails = {b"2": 2, b"5": 1}
    async with serving(mesh, "Q1", runs, lanes=worqr.Lanes(strict=True)):
        q = mesh.queue("Q1")
        for n in range(8):
            await q.dispatch(b"%d" % n, lane="a")
            await q.dispatch(b"%d" % (100 + n), lane="b")
        await until(lambda: len(runs.order) == 16)
        assert [task for lane, task in runs.order if lane == "a"] == [b"%d" % n for n in range(8)]


async def test_other_rules_of_lanes_are_logged(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worqr")
    async with serving(new_mesh(), "Q1", Running(), lanes=worqr.Lanes(limit=worqr.Limit(1))):
        told = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "limits.changed"]
    assert told == ["limits.changed: queue 'Q1': its workers declare other rules of its lanes"]


class Plan(enum.Enum):
    FREE = "free"


UUID = uuid.UUID(int=7)


async def test_a_function_puts_its_calls_into_lanes(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.task(lanes=worqr.Lanes("customer"))
    async def named(day: int, *, customer: str | None) -> None: ...

    @mesh.task(lanes=worqr.Lanes(lambda plan, day: plan if day else None, max_length=2))
    async def computed(plan: Plan, day: int = 1) -> None: ...

    @mesh.task(lanes=worqr.Lanes("key"))
    async def keyed(key: uuid.UUID) -> None: ...

    async with mesh.connect():
        await named.enqueue(1, customer="acme")
        await named.dispatch(2, customer="acme")
        await named.enqueue(3, customer=None)
        await named.options(lane="urgent").dispatch(4, customer="acme")
        assert await mesh.enqueue_many([named.call(5, customer="acme"), named.call(6, customer=None)]) == 2
        found = {lane.name: lane.waiting for lane in await named.queue.lanes()}
        assert (found, (await named.queue.info()).waiting) == ({"acme": 3, "urgent": 1}, 6)
        await computed.enqueue(Plan.FREE)
        await computed.enqueue(Plan.FREE)
        with pytest.raises(worqr.QueueFull):
            await computed.enqueue(Plan.FREE)
        await computed.enqueue(Plan.FREE, 0)
        assert [(lane.name, lane.waiting) for lane in await computed.queue.lanes()] == [("free", 2)]
        await keyed.enqueue(UUID)
        assert [lane.name for lane in await keyed.queue.lanes()] == [str(UUID)]
        with pytest.raises(worqr.UsageError, match=r"the lane of a call of .*'customer', must have 1 to 200 bytes"):
            await named.enqueue(1, customer="")
        for queue in (named.queue, computed.queue, keyed.queue):
            await queue.delete()


def test_lanes_are_checked_where_they_are_declared(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    def declare(**options: Any) -> None:
        @mesh.task(name="f", **options)
        def f(customer: str) -> None: ...

    for lanes, why in (
        (worqr.Lanes("costumer"), "names a parameter 'costumer'; did you mean 'customer'"),
        ("customer", "must be a worqr.Lanes, not 'customer'"),
    ):
        with pytest.raises(worqr.UsageError, match=why):
            declare(lanes=lanes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"by": 7}, "by of Lanes must be the name of a parameter, or a function, not 7"),
        ({"limit": 7}, "limit of Lanes must be a worqr.Limit"),
        ({"weights": {"a": 0}}, "the weight of lane 'a' must be a whole number from 1 to 1,000, not 0"),
        ({"weights": {"a": 1.5}}, "the weight of lane 'a' must be a whole number"),
        ({"weights": {"": 1}}, "a lane must have 1 to 200 bytes"),
        ({"weights": [1]}, "weights of Lanes must be a dict by the names of lanes"),
        ({"weights": {str(n): 1 for n in range(1001)}}, "weights of Lanes may name 1,000 lanes, not 1,001"),
        ({"limits": {"a": 7}}, "the limit of lane 'a' must be a worqr.Limit"),
        ({"strict": 1}, "strict of Lanes must be True or False, not 1"),
        ({"strict": True, "limit": worqr.Limit(2)}, "strict lanes run one task at a time"),
        ({"strict": True, "limits": {"acme": worqr.Limit(2)}}, "strict lanes run one task at a time"),
        ({"max_length": 0}, "max_length of Lanes must be"),
    ],
)
def test_bad_lanes(options: Any, why: str) -> None:
    with pytest.raises(worqr.UsageError, match=why):
        worqr.Lanes(**options)


async def test_a_lane_is_cancelled_and_its_runs_end(new_mesh: NewMesh) -> None:
    mesh, started = new_mesh(), trio.Event()

    async def handler(_task: bytes) -> None:
        started.set()
        await trio.sleep_forever()

    async with serving(mesh, "Q1", handler, lanes=worqr.Lanes(limit=worqr.Limit(1))):
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(b"x", lane="a", result_ttl=60) for _ in range(3)]
        await q.dispatch(b"x", lane="a", delay=60)
        await started.wait()
        count = await q.cancel_lane("a", reason="left us", wait=PATIENCE)
        assert (count.waiting, count.running, count.acknowledged) == (3, 1, 1)
        with pytest.raises(worqr.JobCancelled, match="left us"):
            await jobs[1].result(timeout=PATIENCE)
        assert await q.lanes() == []


@pytest.mark.leaves("{Q1}:lanes:rules")
async def test_one_lane_of_more_than_are_listed_is_found(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.client.queue.MOST_LANES", 0)  # no page
    async with mesh.connect():
        q = mesh.queue("Q1")
        for lane in ("a", "b"):
            await q.dispatch(b"x", lane=lane)
        for lane, change in (("c", q.pause), ("d", partial(q.set_limit, worqr.Limit(3)))):
            await change(lane=lane)
        await q.set_weight("e", 2)
        assert await q.lanes() == []
        found = {lane: await q.lanes(lane=lane) for lane in "abcdef"}
        assert {lane: [each.name for each in some] for lane, some in found.items()} == {
            **{lane: [lane] for lane in "abcde"},
            "f": [],
        }
        assert (found["b"][0].waiting, found["c"][0].paused, found["e"][0].weight) == (1, "", 2)
        await q.delete()


async def test_in_several_shards_a_lane_is_in_one(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    async with mesh.connect():
        q = mesh.queue("Q1", shards=4)
        for n in range(12):
            await q.dispatch(b"x", lane=f"lane{n % 3}")
        assert sorted((lane.name, lane.waiting) for lane in await q.lanes()) == [
            ("lane0", 4),
            ("lane1", 4),
            ("lane2", 4),
        ]
        await q.pause("why", lane="lane1")
        assert {lane.name: lane.paused for lane in await q.lanes()} == {"lane0": None, "lane1": "why", "lane2": None}
        info = await q.info()
        assert (info.waiting, info.lanes, info.held_lanes) == (12, 3, 1)
        with pytest.raises(worqr.UsageError, match="has an id or a lane there, not both"):
            await q.dispatch(b"x", id="a", lane="b")
        await q.resume(lane="lane1")
        await q.delete()


@pytest.mark.one_server
async def test_on_a_cluster_limits_and_turns_hold_in_each_node(cluster: Cluster) -> None:
    runs, meshes = Running(), [worqr.Mesh(cluster.url, prefix="lanes") for _ in range(2)]
    lanes = worqr.Lanes(limit=worqr.Limit(1), limits={"wide": worqr.Limit(3)})
    async with meshes[0].connect():
        for name in ("Q1", "Q2", "Q3"):  # in three nodes
            q = meshes[0].queue(name)
            for n in range(30):
                await q.dispatch(b"%d" % n, lane=("a", "b", "wide")[n % 3], max_length=30, wait=PATIENCE)
            async with serving(meshes[0], name, runs, lanes=lanes), serving(meshes[1], name, runs, lanes=lanes):
                await until(lambda: len(runs.order) == 30)
                await eventually(q.lanes, [])
            assert (runs.most["a"], runs.most["b"]) == (1, 1)
            assert runs.most["wide"] <= 3
            runs.order.clear()


# Programs without worqr push tasks to the queue of a function with lanes: workers put them into their lanes.
#
# `tests/ops/test_file_tasks.py` has what the script stores.


Push = Callable[..., None]


@pytest.fixture
def push(server: Server, prefix: str) -> Push:
    """`push(b"...", b"...", tag="")`: pushes tasks to the queue `f`, or to a shard of it, as any program can."""

    def push(*tasks: bytes, tag: str = "") -> None:
        keys = QueueKeys(prefix, "f", tag=tag)
        with server.client() as client:
            client.lpush(keys.base, *tasks)
            client.publish(keys.base, "1")

    return push


class Runs:
    """What has run, and how many ran at once of each customer."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.done: list[tuple[str, int]] = []
        self.lanes: list[str] = []

    async def run(self, customer: str, n: int) -> None:
        self.now[customer] += 1
        self.most[customer] = max(self.most[customer], self.now[customer])
        await trio.sleep(0.002)
        self.now[customer] -= 1
        self.lanes.append(worqr.current().lane)
        self.done.append((customer, n))


def declared(
    mesh: worqr.Mesh, runs: Runs, lanes: worqr.Lanes, **options: int
) -> worqr.Function[[str | None, int], None]:
    @mesh.task(name="f", lanes=lanes, retry=QUICK, **options)  # type: ignore[call-overload, untyped-decorator]
    async def f(customer: str | None, n: int = 0) -> None:
        await runs.run(customer or "", n)

    return f  # type: ignore[no-any-return]


def call_of(customer: str, n: int) -> bytes:
    return b'{"customer":"%s","n":%d}' % (customer.encode(), n)


@pytest.mark.usefixtures("without_scans")
async def test_one_per_customer_runs_at_a_time_whoever_has_pushed(new_mesh: NewMesh, push: Push) -> None:
    runs, meshes = Runs(), [new_mesh() for _ in range(3)]
    functions = [declared(mesh, runs, worqr.Lanes("customer", limit=worqr.Limit(1))) for mesh in meshes]
    async with AsyncExitStack() as stack:
        for mesh in meshes:
            await stack.enter_async_context(mesh.join())
        for n in range(20):
            push(*(call_of(customer, n) for customer in ("acme", "initech")))
            await functions[0].enqueue("acme", 100 + n)
        await until(lambda: len(runs.done) == 60)
        assert runs.most == {"acme": 1, "initech": 1}
        assert Counter(runs.done) == dict.fromkeys(
            [*((c, n) for c in ("acme", "initech") for n in range(20)), *(("acme", 100 + n) for n in range(20))], 1
        )
        assert runs.lanes == [customer for customer, _ in runs.done]
        await eventually(functions[0].queue.lanes, [])
        await eventually(lambda: finished(functions[0]), 60)


async def finished(function: worqr.Function[..., None]) -> int:
    return (await function.queue.info()).counts.get("finished", 0)


@pytest.mark.usefixtures("without_scans")
async def test_the_order_of_a_lane_is_that_in_which_they_were_pushed(new_mesh: NewMesh, push: Push) -> None:
    runs, mesh = Runs(), new_mesh()
    function = declared(mesh, runs, worqr.Lanes("customer", strict=True))
    push(*(call_of("acme", n) for n in range(50)))
    async with mesh.join():
        await until(lambda: len(runs.done) == 50)
        await eventually(function.queue.lanes, [])
    assert runs.done == [("acme", n) for n in range(50)]


async def test_one_without_a_lane_runs_as_ever(
    new_mesh: NewMesh, push: Push, server: Server, prefix: str, expects_left: Callable[..., None]
) -> None:
    runs, mesh = Runs(), new_mesh()

    def lane_of(customer: str | None, n: int) -> str | None:
        if n == 3:
            raise ValueError("no lane")
        return {0: customer, 1: "", 2: "x" * 201}[n]

    function = declared(mesh, runs, worqr.Lanes(lane_of))
    push(b'{"customer":null}', call_of("no name", 1), call_of("too long", 2), call_of("raises", 3), b"no call")
    with spying(server, prefix) as spy:
        async with mesh.join():
            await until(lambda: len(runs.done) == 4)
            await eventually(function.queue.undecodable.count, 1)
        assert spy.calls()["file_tasks"] == 0
    assert sorted(runs.done) == [("", 0), ("no name", 1), ("raises", 3), ("too long", 2)]
    assert runs.lanes == [""] * 4
    expects_left("{f}:broken", "{f}:aside*")


async def test_a_call_of_its_own_has_its_lane_and_is_not_filed(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    runs, mesh = Runs(), new_mesh()
    function = declared(mesh, runs, worqr.Lanes("customer"))
    with spying(server, prefix) as spy:
        async with mesh.join():
            await function.enqueue("acme", 1)
            await function.options(lane="urgent").dispatch("acme", 2)
            await function.enqueue(None, 3)
            await mesh.queue("f").dispatch(call_of("acme", 4))
            await until(lambda: len(runs.done) == 4)
        assert spy.calls()["file_tasks"] == 0
    assert sorted(zip(runs.done, runs.lanes, strict=True)) == [
        *((("", 3), ""), (("acme", 1), "acme"), (("acme", 2), "urgent"), (("acme", 4), "")),
    ]


async def test_one_whose_worker_has_died_is_filed_although_it_is_a_job(
    new_mesh: NewMesh, push: Push, prefix: str
) -> None:
    runs, mesh = Runs(), new_mesh()
    function, keys = declared(mesh, runs, worqr.Lanes("customer")), QueueKeys(prefix, "f")
    push(call_of("acme", 1))
    async with mesh.connect():
        ask = mesh._client.ask
        await ask(ops.start_work(keys, "dead", max_stalls=3, keep_failed=10, last=0))
        assert len((await ask(ops.start_tasks(keys, "dead", 1, 1))).entries) == 1
        await ask(ops.fail_worker(keys, "dead"))
        async with mesh.join():
            await until(lambda: runs.lanes == ["acme"])
            await eventually(function.queue.lanes, [])


@pytest.mark.usefixtures("without_scans")
async def test_calls_of_a_function_that_takes_a_list(new_mesh: NewMesh, push: Push) -> None:
    mesh, seen = new_mesh(), list[tuple[str, str]]()

    @mesh.task(name="f", batch_size=10, batch_wait=0.01, lanes=worqr.Lanes("names"))
    async def f(names: list[str]) -> None:
        lanes = [each.lane for each in worqr.current().items]
        seen.extend(zip(names, lanes, strict=True))

    push(*(b'"lane %d"' % (n % 3) for n in range(30)))
    async with mesh.join():
        await until(lambda: len(seen) == 30)
        await eventually(f.queue.lanes, [])
    assert Counter(seen) == {(f"lane {n}", f"lane {n}"): 10 for n in range(3)}


@pytest.mark.leaves("shards")
async def test_in_another_shard_than_that_of_its_lane_it_runs_where_it_is(
    new_mesh: NewMesh, push: Push, prefix: str
) -> None:
    runs, mesh = Runs(), new_mesh()
    function = declared(mesh, runs, worqr.Lanes("customer"), shards=4)
    shards = shards_of(QueueKeys(prefix, "f"), 4)
    home = shard_of(shards, "acme")
    for n, keys in enumerate(shards):
        push(call_of("acme", n), tag=keys.tag)
    async with mesh.join():
        await until(lambda: len(runs.done) == 4)
        await eventually(function.queue.lanes, [])
    expected = {("acme", n): "acme" if keys == home else "" for n, keys in enumerate(shards)}
    assert dict(zip(runs.done, runs.lanes, strict=True)) == expected


async def test_a_queue_is_left_while_tasks_are_being_filed(new_mesh: NewMesh, push: Push) -> None:
    """Peers that come and go: each task runs once, however often its filing is interrupted."""
    runs, mesh = Runs(), new_mesh()
    function = declared(mesh, runs, worqr.Lanes("customer", limit=worqr.Limit(2)))
    push(*(call_of(f"customer {n % 7}", n) for n in range(200)))
    with trio.fail_after(PATIENCE):
        while len(runs.done) < 200:
            async with mesh.join(grace=1):
                await trio.sleep(0.02)
    async with mesh.connect():
        await eventually(function.queue.lanes, [])
    assert sorted(n for _, n in runs.done) == list(range(200))
