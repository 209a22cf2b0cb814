"""Lists of queues with shards and with lanes, on one server and on a cluster: each shard makes lists of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.test_lists import FOREVER, Lists, count_of, numbers, running, taking
from tests.peer.tools import QUICK, at_most, eventually, until
from tests.support.clusters import Cluster, cluster, cluster_of_module  # noqa: F401 - fixtures
from tests.support.patience import PATIENCE
from worqr.keys import QueueKeys, shard_of, shards_of

CUSTOMERS = ("acme", "globex", "hooli", "initech", "umbrella")
EACH = 12
ALL_DONE = {customer: list(range(EACH)) for customer in CUSTOMERS}


@pytest.fixture
def mesh(new_mesh: NewMesh) -> worqr.Mesh:
    return new_mesh()


@dataclass
class Row:
    customer: str
    n: int


def customer_of(row: Row) -> str:
    return row.customer


class Imports:
    """Runs lists of rows, and notes them: `done` by lane, in order, and the `most` of each lane that ran at once.

    Rows whose number is in `fails` are to be retried once.
    """

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.lists: list[list[Row]] = []
        self.done: defaultdict[str, list[int]] = defaultdict(list)
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._fails = {(customer, n) for customer in CUSTOMERS for n in fails}

    async def __call__(self, rows: list[Row]) -> list[Exception | None]:
        items = worqr.current().items
        assert [item.lane for item in items] == [row.customer for row in rows]
        assert len(rows) == 1 or {item.attempt for item in items} == {1}, "what is retried is alone"
        mine = Counter(map(customer_of, rows))
        self.lists.append(rows)
        self._now += mine
        self.most |= self._now
        await trio.sleep(0.002)
        self._now -= mine
        return [self._outcome(row) for row in rows]

    def _outcome(self, row: Row) -> Exception | None:
        if (row.customer, row.n) in self._fails:
            self._fails.remove((row.customer, row.n))
            return worqr.Retry(delay=0)
        self.done[row.customer].append(row.n)
        return None


def importing(mesh: worqr.Mesh, imports: Imports, *, shards: int, **lanes: Any) -> Any:
    """The function ``Q1``, which runs lists of rows, with a lane for each customer."""

    @mesh.task(
        name="Q1", batch_size=8, batch_wait=0.02, retry=QUICK, shards=shards, lanes=worqr.Lanes(customer_of, **lanes)
    )
    async def rows(rows: list[Row]) -> list[Exception | None]:
        return await imports(rows)

    return rows


async def dispatch_all(mesh: worqr.Mesh, function: Any) -> None:
    await mesh.dispatch_many(function.call(Row(customer, n)) for n in range(EACH) for customer in CUSTOMERS)


def sizes(mesh: worqr.Mesh) -> Callable[[], Awaitable[tuple[int, ...]]]:
    """How many calls have finished, run and wait."""

    async def look() -> tuple[int, ...]:
        info = await mesh.queue("Q1").info()
        return info.counts.get("finished", 0), info.running, info.waiting + info.scheduled

    return look


@pytest.mark.leaves("shards")
async def test_each_shard_makes_lists_of_its_own(mesh: worqr.Mesh, prefix: str) -> None:
    handler, shards = Lists(), shards_of(QueueKeys(prefix, "Q1"), 3)
    by_shard: defaultdict[QueueKeys, set[bytes]] = defaultdict(set)
    for task in numbers(30):
        by_shard[shard_of(shards, task.decode())].add(task)
    assert len(by_shard) == 3
    async with mesh.connect():
        queue = mesh.queue("Q1", shards=3)
        for task in numbers(30):
            await queue.dispatch(task, id=task.decode())
        async with taking(mesh, handler, batch_size=30):
            await eventually(sizes(mesh), (30, 0, 0))
    assert sorted(map(sorted, handler.lists)) == sorted(map(sorted, by_shard.values()))


@pytest.mark.leaves("shards")
async def test_a_list_waits_for_more_of_its_shard_only(mesh: worqr.Mesh, prefix: str) -> None:
    handler, shards = Lists(), shards_of(QueueKeys(prefix, "Q1"), 2)
    here = [f"{n}" for n in range(30) if shard_of(shards, f"{n}") is shards[0]][:3]
    there = next(f"{n}" for n in range(30) if shard_of(shards, f"{n}") is shards[1])
    async with mesh.connect():
        queue = mesh.queue("Q1", shards=2)
        async with taking(mesh, handler, batch_size=3, batch_wait=FOREVER):
            for name in (*here[:2], there):
                await queue.dispatch(name.encode(), id=name)
            await eventually(partial(running, mesh), 3)
            assert handler.lists == []
            await queue.dispatch(here[2].encode(), id=here[2])
            await eventually(count_of(mesh, "finished"), (3,))
            assert handler.lists == [[name.encode() for name in here]]
            async with at_most():
                await queue.job(there).cancel(wait=PATIENCE)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.leaves("shards")
async def test_a_list_has_calls_of_several_lanes_within_the_limit_of_each(mesh: worqr.Mesh, shards: int) -> None:
    imports = Imports(fails=(3,))
    function = importing(mesh, imports, shards=shards, limit=worqr.Limit(2))
    async with mesh.connect():
        await dispatch_all(mesh, function)
    async with mesh.join():
        await eventually(sizes(mesh), (EACH * len(CUSTOMERS), 0, 0))
        await eventually(mesh.queue("Q1").lanes, [])
    assert {customer: sorted(done) for customer, done in imports.done.items()} == ALL_DONE
    assert max(imports.most.values()) == 2
    assert max(len(set(map(customer_of, each))) for each in imports.lists) > 1


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.leaves("shards")
async def test_lists_keep_the_order_of_strict_lanes_also_when_calls_are_retried(mesh: worqr.Mesh, shards: int) -> None:
    imports = Imports(fails=(0, 5))
    function = importing(mesh, imports, shards=shards, strict=True)
    async with mesh.connect():
        await dispatch_all(mesh, function)
    async with mesh.join():
        await eventually(sizes(mesh), (EACH * len(CUSTOMERS), 0, 0))
    assert imports.done == ALL_DONE
    assert dict(imports.most) == dict.fromkeys(CUSTOMERS, 1)


async def test_a_lane_that_is_cancelled_takes_its_calls_out_of_a_list_that_waits(mesh: worqr.Mesh) -> None:
    handler = Lists()
    async with taking(mesh, handler, batch_size=3, batch_wait=FOREVER, lanes=worqr.Lanes()) as peer:
        queue = mesh.queue("Q1")
        for task, lane in ((b"a1", "acme"), (b"i1", "initech")):
            await queue.dispatch(task, lane=lane)
        await eventually(partial(running, mesh), 2)
        async with at_most():
            count = await queue.cancel_lane("acme", wait=PATIENCE)
        assert (count.running, count.acknowledged) == (1, 1)
        assert [lane.name for lane in await queue.lanes()] == ["initech"]
        await queue.dispatch(b"i2", lane="initech")
        await queue.dispatch(b"h1", lane="hooli")
        await eventually(count_of(mesh, "finished"), (3,))
        await until(lambda: peer.health().room == 100)
    assert [sorted(each) for each in handler.lists] == [[b"h1", b"i1", b"i2"]]  # lanes take turns


@pytest.mark.one_server
@pytest.mark.parametrize("shards", [1, 6])
async def test_on_a_cluster_two_workers_run_all_calls_in_lists(cluster: Cluster, shards: int) -> None:
    imports, meshes = Imports(fails=(2, 7)), [worqr.Mesh(cluster.url, prefix="lists") for _ in range(2)]
    functions = [importing(mesh, imports, shards=shards, limit=worqr.Limit(2)) for mesh in meshes]
    async with meshes[0].connect():
        await dispatch_all(meshes[0], functions[0])
        async with meshes[0].join(), meshes[1].join():
            await eventually(sizes(meshes[0]), (EACH * len(CUSTOMERS), 0, 0))
    assert {customer: sorted(done) for customer, done in imports.done.items()} == ALL_DONE
    assert max(imports.most.values()) == 2
    assert max(map(len, imports.lists)) > 1
