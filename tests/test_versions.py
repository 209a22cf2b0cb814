"""Two versions of this library with the same wire version work side by side: the one that was frozen, and today's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import worqr
from tests import frozen as frozen_module
from tests.children import Child
from tests.frozen import CALLED_OTHERWISE, FrozenLink, as_then, freeze, frozen, frozen_scripts, how_it_is_called
from tests.ops.job_world import World
from tests.ops.test_job_machine import RANDOM, STEPS, JobMachine
from tests.patience import PATIENCE
from tests.peer.tools import QUICK, Held, Runs, eventually, serving, spying
from tests.servers import Server
from worqr.call import Call
from worqr.link import Link
from worqr.lua import all_scripts
from worqr.ops import WIRE_VERSION

pytestmark = pytest.mark.one_server

EXAMPLES = int(os.environ.get("WORQR_VERSIONS_EXAMPLES", "20"))


@pytest.fixture
def today(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, patience=20)


@pytest.fixture
def then(server: Server, prefix: str) -> worqr.Mesh:
    """The same mesh, as a program with the frozen version has it."""
    return frozen(worqr.Mesh(server.url, prefix=prefix, patience=20))


Pair = tuple[worqr.Mesh, worqr.Mesh]


@pytest.fixture(params=["frozen first", "today's first"])
def pair(request: pytest.FixtureRequest, today: worqr.Mesh, then: worqr.Mesh) -> Pair:
    """The mesh twice, each of another version."""
    return (then, today) if request.param == "frozen first" else (today, then)


# What was frozen


def test_every_script_was_frozen_whole() -> None:
    assert len(frozen_scripts()) > 40
    for each in frozen_scripts().values():
        assert each.source.startswith("#!lua")
        assert "-- RETURNS " in each.source
        assert "-- RESEND " in each.source


def test_the_frozen_scripts_are_called_as_they_were() -> None:
    """Requests are made by today's code: where it would not have been understood, it is told how to put them."""
    today = {each.name: each for each in all_scripts()}
    for name, old in frozen_scripts().items():
        assert name in today, f"peers of the frozen version still send {name!r}: a test must know what it did"
        if name not in CALLED_OTHERWISE:
            assert how_it_is_called(today[name]) == how_it_is_called(old), (
                f"{name} is called otherwise since it was frozen: add to CALLED_OTHERWISE how it was called"
            )


def test_freezing_writes_down_what_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(frozen_module, "HERE", tmp_path)
    (tmp_path / str(WIRE_VERSION)).mkdir()
    (tmp_path / str(WIRE_VERSION) / "gone.lua").touch()
    freeze()
    written = {path.stem: path.read_text("utf-8") for path in (tmp_path / str(WIRE_VERSION)).iterdir()}
    assert written == {each.name: each.source for each in all_scripts()}


def test_all_that_a_link_sends_is_frozen() -> None:
    sends = {
        name
        for name, method in vars(Link).items()
        if not name.startswith("_")
        and "Call[" in str([*getattr(method, "__annotations__", {}).values()]).replace("Callable[", "")
    }
    assert sends <= vars(FrozenLink).keys()


async def test_a_frozen_peer_sends_frozen_scripts_only(then: worqr.Mesh, server: Server, prefix: str) -> None:
    shas = {each.sha for each in frozen_scripts().values()}
    shas |= {each.sha for each in all_scripts() if each.name not in frozen_scripts()}  # what was not there then
    with spying(server, prefix) as spy:
        async with then.connect():
            await _use(then, then)
        lines = [line["command"].split() for line in spy.seen() if line["client_type"] != "lua"]
    sent = {words[1] for words in lines if words[0] == "EVALSHA" and prefix in " ".join(words)}
    assert len(sent) > 15
    assert sent <= shas


# Every transaction of a queue


class MixedWorld(World):
    """Each request is sent by a program of either version, and so is its copy."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        super().__init__(client, prefix)
        self.random = Random(0)
        self.sent: Counter[str] = Counter()
        for each in frozen_scripts().values():
            client.script_load(each.source)

    def send(self, call: Call[Any], *, again: bool = False) -> list[Any]:
        old = self.random.random() < 0.5
        self.sent["frozen" if old else "today's"] += 1
        return super().send(as_then(replace(call)) if old else call, again=again)


class MixedMachine(JobMachine):
    world_type: ClassVar[type[World]] = MixedWorld

    def teardown(self) -> None:
        super().teardown()
        assert isinstance(self.world, MixedWorld)
        assert min(self.world.sent["frozen"], self.world.sent["today's"]) > 0 or self.world.sent.total() < 20


@pytest.mark.timeout(1800)  # making a failure small takes its time
def test_transactions_of_both_versions_do_what_the_model_says(server: Server) -> None:
    MixedMachine.server = server
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        MixedMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=not RANDOM,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# Peers and producers


ENDS = ("ok", "again", "never", "boom")


async def handle(task: bytes) -> bytes:
    """``ok`` returns, ``again`` does so the second time, ``never`` gives up, ``boom`` fails as often as it may."""
    what, first = task.partition(b" ")[0], worqr.current().attempt == 1
    if what == b"again" and first:
        raise worqr.Retry(delay=0)
    if what == b"never":
        raise worqr.Failure("as it was told to")
    if what == b"boom":
        raise ValueError("as it was told to")
    return b"done by " + task


TWICE = worqr.RetryPolicy(max_failures=2, min_backoff=0)


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_what_one_puts_in_the_other_works_off(pair: Pair) -> None:
    producer, worker = pair
    tasks = [f"{what} {n}".encode() for what in ENDS for n in range(25)]
    async with producer.connect():
        q = producer.queue("Q1")
        assert await q.enqueue(*tasks) == 100
        jobs = [await q.dispatch(task, id=task.decode(), result_ttl=60, meta={"n": "1"}) for task in tasks[::5]]
        async with serving(worker, "Q1", handle, retry=TWICE):
            await eventually(lambda: ended(q), 120)
            outcomes = [(await job.status()).state for job in jobs]
            assert Counter(outcomes) == {"finished": 10, "failed": 10}
            assert await q.job("ok 5").result() == b"done by ok 5"
        info = await q.info()
        assert (info.waiting, info.due, info.blocked, info.running, info.failed) == (0, 0, 0, 0, 60)
        counts = {name: info.counts.get(name, 0) for name in ("enqueued", "claimed", "finished", "retried", "failed")}
        assert counts == {"enqueued": 120, "claimed": 180, "finished": 60, "retried": 60, "failed": 60}
        assert Counter(record.task.split()[0] for record in await q.failed.list()) == {b"never": 30, b"boom": 30}


async def ended(q: worqr.Queue) -> int:
    counts = (await q.info()).counts
    return counts.get("finished", 0) + counts.get("failed", 0)


async def test_both_work_on_one_queue_at_once(today: worqr.Mesh, then: worqr.Mesh) -> None:
    one, other = Held(), Held()
    async with today.connect(), then.connect(), serving(today, "Q1", one, room=1), serving(then, "Q1", other, room=1):
        await today.queue("Q1").enqueue(b"a")
        await then.queue("Q1").enqueue(b"b", b"c")
        await one.wait(1)
        await other.wait(1)  # while the other one runs: each has one
        assert len(await today.workers()) == 2
        one.gate.set()
        other.gate.set()
        await eventually(lambda: ended(today.queue("Q1")), 3)
        assert sorted(one.tasks + other.tasks) == [b"a", b"b", b"c"]


async def test_what_one_began_the_other_goes_on_with(pair: Pair) -> None:
    first, second = pair
    runs = Runs()
    async with first.connect(), second.connect():
        q = first.queue("Q1")

        async def later(task: bytes) -> None:
            raise worqr.Retry(delay=3600)

        async with serving(first, "Q1", later):
            await q.enqueue(b"raw")
            job = await q.dispatch(b"job", id="x", result_ttl=60, retry=QUICK)
            await eventually(lambda: due(q), 2)
        assert (await second.queue("Q1").cancel(b"raw")).waiting == 1  # a raw task that became a job of the other's
        async with serving(second, "Q1", runs):
            again = await second.queue("Q1").dispatch(b"job", id="x", update=worqr.Update(counts=False))
            assert again.outcome == "updated"
            await runs.wait(1)
            assert runs.contexts[0].attempt == 2
            assert await job.result(PATIENCE) is None
        assert (await q.info()).counts["retried"] == 2


async def workers(mesh: worqr.Mesh) -> int:
    return len(await mesh.workers())


async def due(q: worqr.Queue) -> int:
    return (await q.info()).due


async def test_one_is_blocked_while_the_other_runs(pair: Pair) -> None:
    producer, worker = pair
    held = Held()
    async with producer.connect(), serving(worker, "Q1", held):
        q = producer.queue("Q1")
        await q.dispatch(b"first", id="x")
        await held.wait(1)
        job = await q.dispatch(b"second", id="x", result_ttl=60)
        assert job.outcome == "blocked"
        held.gate.set()
        assert await held.wait(2) == [b"first", b"second"]
        await job.result(PATIENCE)


async def test_one_cancels_what_the_other_runs(pair: Pair) -> None:
    producer, worker = pair
    held = Held()
    async with producer.connect(), serving(worker, "Q1", held):
        q = producer.queue("Q1")
        await q.enqueue(b"raw", b"all")
        await q.dispatch(b"job", id="x", result_ttl=60)
        await held.wait(3)
        count = await q.cancel(b"raw", reason="why", wait=PATIENCE)
        assert (count.running, count.acknowledged) == (1, 1)
        assert (await q.job("x").cancel(reason="why", wait=PATIENCE)).acknowledged == 1
        with pytest.raises(worqr.JobCancelled, match="why"):
            await q.job("x").result(PATIENCE)
        assert (await q.cancel_all(reason="enough", wait=PATIENCE)).acknowledged == 1
        assert sorted(task for task, _ in held.cancelled) == [b"all", b"job", b"raw"]
        assert (await q.info()).counts["cancelled"] == 3


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_one_operates_what_the_other_serves(pair: Pair) -> None:
    operator, worker = pair
    runs = Runs()
    async with operator.connect(), worker.connect():
        q = operator.queue("Q1")
        await q.pause("for a while")
        await worker.queue("Q1").enqueue(b"never 1", b"ok 1")
        async with serving(worker, "Q1", handle):
            assert (await worker.queue("Q1").info()).paused == "for a while"
            await q.resume()
            await eventually(lambda: ended(q), 2)
            (record,) = await q.failed.list()
        assert await q.failed.retry(record.id) == 1
        async with serving(worker, "Q1", runs):
            assert await runs.wait(1) == [b"never 1"]
            await q.delete()
        assert await q.count() == 0


@pytest.mark.leaves("{q}:job:cron:*", "{q}:due")  # the last firing, which nobody waits for
async def test_what_one_declares_the_other_fires(pair: Pair) -> None:
    declarer, leader = pair
    runs = Runs()
    declarer.every(0.2, declarer.call("q", b"tick"), name="s", overlap="queue")
    async with declarer.join(grace=0):
        pass
    async with serving(leader, "q", runs):
        assert {schedule.name for schedule in await leader.schedules()} == {"s"}
        await runs.wait(3)
    times = [context.scheduled_for.timestamp() for context in runs.contexts if context.scheduled_for]
    assert times == sorted(set(times))


PEER = """
import sys, trio, worqr
from functools import partial
from tests.frozen import frozen

async def hold(task):
    print("run", task.decode(), flush=True)
    await trio.sleep_forever()

async def main(url, prefix, version):
    mesh = worqr.Mesh(url, prefix=prefix)
    if version == "frozen":
        frozen(mesh)
    async with mesh.join() as peer:
        await peer.serve("Q1", hold)

trio.run(main, *sys.argv[1:])
"""


@pytest.mark.parametrize("victim", ["frozen", "today's"])
async def test_one_gives_back_what_the_other_held_when_it_died(
    victim: str, today: worqr.Mesh, then: worqr.Mesh, server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    survivor = today if victim == "frozen" else then
    runs = Runs()
    async with survivor.connect():
        q = survivor.queue("Q1")
        await q.enqueue(b"a", b"b")
        await q.dispatch(b"c", id="x")
        child = spawn(PEER, server.url, prefix, victim)
        assert {await child.line() for _ in range(3)} == {"run a", "run b", "run c"}
        assert (await q.dispatch(b"d", id="x")).outcome == "blocked"
        child.kill()
        async with serving(survivor, "Q1", runs, room=1):
            assert await runs.wait(3) == [b"a", b"b", b"d"]
            assert [context.stalls for context in runs.contexts] == [1, 1, 0]  # new data counts anew
            await eventually(lambda: ended(q), 3)
        assert (await q.info()).counts["stalled"] == 3
        await eventually(lambda: workers(survivor), 0)


async def _use(producer: worqr.Mesh, worker: worqr.Mesh) -> None:
    """What sends most of the scripts there are."""
    held = Held()
    q = producer.queue("Q1")
    async with serving(worker, "Q1", held):
        await q.enqueue(b"a", b"b")
        job = await q.dispatch(b"c", id="x", result_ttl=60)
        await q.dispatch(b"d", id="later", delay=3600)
        await held.wait(3)
        await q.cancel(b"a", wait=PATIENCE)
        await q.job("later").cancel()
        held.gate.set()
        await job.result(PATIENCE)
        await q.pause("why")
        await q.resume()
        await q.info()
        await producer.workers()
        await eventually(lambda: ended(q), 2)
