"""Programs without worqr push tasks to the queue of a function with lanes: workers put them into their lanes.

`tests/ops/test_file_tasks.py` has what the script stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, eventually, spying, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys
from worqr.shard_layout import shard_of, shards_of

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
            await eventually(function.queue.broken.count, 1)
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
