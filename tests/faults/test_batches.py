"""Batches whose workers, producers, leaders and servers die: each ends, with one follow-up, and its counts add up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.faults.child_batches import MEMBERS, declare
from tests.peer.tools import eventually, until
from tests.support.children import Child
from tests.support.clusters import Cluster, cluster, cluster_of_module, fail_over, move_slot
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.client import notifications
from worqr.link.session import slot_of

assert cluster, cluster_of_module  # fixtures

CHILD = Path(__file__).parent / "child_batches.py"
Spawn = Callable[..., Child]

pytestmark = pytest.mark.leaves("{*}:batch*", "{*}:part:*", "{*}:outbox")


class Story:
    """A mesh of this process with the functions of the child, and the file in which each follow-up writes a line."""

    def __init__(self, url: str, prefix: str, done: Path) -> None:
        self.url = url
        self.prefix = prefix
        self.done = done
        self.mesh = worqr.Mesh(url, prefix=prefix, keepalive=1)
        self.members = declare(self.mesh)

    def ends(self, **options: Any) -> dict[str, Any]:
        """The options of a batch with both follow-ups."""
        return {name: self.mesh.call("done", word=name) for name in ("then", "otherwise")} | options

    def lines(self) -> list[str]:
        return self.done.read_text().splitlines() if self.done.exists() else []

    async def ended(self, batch: worqr.Batch, *lines: str, within: float = PATIENCE) -> None:
        """Until the batch has ended, and the follow-ups have run: these, each once, and no other."""
        await batch.wait(within)
        await until(lambda: len(self.lines()) >= len(lines), within, "the follow-ups")
        for queue in ("done", "home", *(f"M{n}" for n in range(MEMBERS))):
            await eventually(partial(self.left_in, queue), 0)
        assert self.lines() == [f"{line.split()[0]} {batch.id} {line.partition(' ')[2]}" for line in lines]

    async def alone(self) -> None:
        """Until the worker of this process is the only one, and those that died are forgotten."""

        async def workers() -> int:
            return len(await self.mesh.workers())

        await eventually(workers, 1)

    async def left_in(self, queue: str) -> int:
        info = await self.mesh.queue(queue).info()
        return info.waiting + info.running + info.scheduled

    async def add(self, batch: worqr.Batch, count: int, ms: int = 0) -> None:
        """Add this many jobs, in turns to each queue."""
        await batch.dispatch_many(self.members[n % MEMBERS].call(ms) for n in range(count))

    @asynccontextmanager
    async def rescuing(self) -> AsyncGenerator[worqr.Peer]:
        """One more worker, in the process of the test."""
        other = worqr.Mesh(self.url, prefix=self.prefix, keepalive=1)
        declare(other)
        async with other.join() as peer:
            yield peer


@pytest.fixture
def new_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Story]:
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    monkeypatch.setattr(notifications, "POLL_EVERY", 0.1)
    return lambda url, prefix: Story(url, prefix, tmp_path / "done")


@pytest.fixture
def story(new_story: Callable[[str, str], Story], server: Server, prefix: str) -> Story:
    return new_story(server.url, prefix)


# Workers


async def test_a_killer_takes_one_worker_after_the_other(
    story: Story, spawn: Spawn, request: pytest.FixtureRequest
) -> None:
    """With --all: 100,000 jobs, and one kill in 2 s for a minute."""
    is_long = request.config.getoption("--all")
    count, kills, ms, within = (100_000, 30, 30, 600.0) if is_long else (2000, 3, 150, PATIENCE)
    workers = [spawn(CHILD, story.url, story.prefix, "work") for _ in range(2 + (0 if is_long else kills))]
    for worker in workers:
        await worker.line_with("joined")
    async with story.mesh.connect():
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, count, ms=ms)
        for kill in range(kills):
            if is_long:
                workers.append(spawn(CHILD, story.url, story.prefix, "work"))
                await workers[-1].line_with("joined")
                await trio.sleep(2)
            await eventually(partial(_has_finished, batch, (kill + 1) * count // 100), True)
            workers.pop(0).kill()
        await story.ended(batch, f"then {count} {count} 0 0 1", within=within)
        for worker in workers:
            worker.kill()
        async with story.rescuing():
            await story.alone()
        stalled = [(await story.mesh.queue(f"M{n}").info()).counts.get("stalled", 0) for n in range(MEMBERS)]
        assert sum(stalled) > 0, "the kills met jobs that ran"


async def _has_finished(batch: worqr.Batch, count: int) -> bool:
    return (await batch.info()).finished >= count


async def test_a_frozen_worker_that_adds_to_its_batch_when_it_has_ended_is_refused(story: Story, spawn: Spawn) -> None:
    async with story.mesh.connect():
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            zombie = spawn(CHILD, story.url, story.prefix, "work")
            await batch.dispatch(story.mesh.call("hold"))
            await zombie.line_with("run")
        zombie.pause()
        async with story.rescuing():
            await story.ended(batch, "then 1 1 0 0 1")
            zombie.resume()
            zombie.send("go")
            assert await zombie.line_with("refused") == "refused BatchEnded"
            zombie.kill()
            await story.alone()
            await story.ended(batch, "then 1 1 0 0 1")


async def test_a_frozen_worker_may_add_to_its_batch_while_it_goes_on(story: Story, spawn: Spawn) -> None:
    """Its job runs elsewhere by then. What it adds is a member as any other, and the batch ends with it."""
    async with story.mesh.connect():
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            zombie = spawn(CHILD, story.url, story.prefix, "work")
            await batch.dispatch(story.mesh.call("hold"))
            await zombie.line_with("run")
            zombie.pause()
            async with story.rescuing():
                await eventually(partial(_finished, batch), 1)
                zombie.resume()
                zombie.send("go")
                await zombie.line_with("added")
                await eventually(partial(_finished, batch), 2)
        zombie.kill()
        async with story.rescuing():
            await story.ended(batch, "then 2 2 0 0 1")
            await story.alone()


async def _finished(batch: worqr.Batch) -> int:
    return (await batch.info()).finished


# Producers


@pytest.mark.parametrize(("mode", "line"), [("open", "opened"), ("add", "added")])
async def test_a_producer_that_is_killed_leaves_a_batch_that_is_cancelled(
    story: Story, spawn: Spawn, mode: str, line: str
) -> None:
    """Between the opening of a part and the first job; and between the jobs and the end of the block."""
    async with story.mesh.connect(), story.rescuing():
        producer = spawn(CHILD, story.url, story.prefix, mode)
        name = (await producer.line_with(line)).split()[1]
        producer.kill()
        batch = story.mesh.queue("home").batch(name)
        jobs = MEMBERS if mode == "add" else 0
        await story.ended(batch, f"otherwise {jobs} 0 0 {jobs} 1")
        assert (await batch.info()).cancel_reason == "its producer left it open"


# The leader


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["report_part", "drop_outbox", "put_follow_up"])
async def test_a_leader_is_killed_in_the_middle_of_a_delivery(
    new_story: Callable[[str, str], Story],
    server: Server,
    prefix: str,
    proxy: FaultProxy,
    spawn: Spawn,
    step: str,
    when: str,
) -> None:
    """Its request has not arrived, or was executed and the reply was lost."""
    story = new_story(server.url, prefix)
    fault = (proxy.hold if when == "before" else proxy.hold_reply)(sent_as(step))
    async with story.mesh.connect():
        leader = spawn(CHILD, proxy.url, prefix, "lead")
        await leader.line_with("leads")
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, MEMBERS)
            await eventually(partial(_finished, batch), MEMBERS)
        # the producer has sealed the batch and delivered what there was; the last report is due to a member that ends later
        async with story.mesh.batch(**story.ends(queue="home")) as late:
            await late.dispatch(story.members[0].call(300))
        await fault.wait_fired()
        if when == "after":
            await fault.wait_executed()
        leader.kill()
        fault.release()
        async with story.rescuing():
            for each in (batch, late):
                info = await each.wait(PATIENCE)
                assert (info.jobs, info.finished, info.endings) == (info.jobs, info.jobs, 1)
            await until(lambda: len(story.lines()) >= 2)
            for queue in ("done", "home"):
                await eventually(partial(story.left_in, queue), 0)
            await story.alone()
            assert sorted(line.split()[1] for line in story.lines()) == sorted([batch.id, late.id])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["put_follow_up", "drop_outbox"])
async def test_a_leader_is_killed_between_the_end_of_a_job_and_its_follow_up(
    new_story: Callable[[str, str], Story],
    server: Server,
    prefix: str,
    proxy: FaultProxy,
    spawn: Spawn,
    step: str,
    when: str,
) -> None:
    """The worker that ran the job is the leader, too: nobody of them is left."""
    story = new_story(server.url, prefix)
    async with story.mesh.connect():
        leader = spawn(CHILD, proxy.url, prefix, "lead")
        await leader.line_with("leads")
        job = await story.members[0].options(**story.ends(), delay=600).dispatch()
        await eventually(partial(_outbox, server, prefix), 0)  # the message of the dispatch
        fault = (proxy.hold if when == "before" else proxy.hold_reply)(sent_as(step))
        assert await story.mesh.queue("M0").run_now(job.id) == 1
        await fault.wait_fired()
        if when == "after":
            await fault.wait_executed()
        leader.kill()
        fault.release()
        async with story.rescuing():
            await until(story.lines)
            await story.alone()
            await eventually(partial(story.left_in, "done"), 0)
    assert story.lines() == [f"then {job.id} finished"]


async def _outbox(server: Server, prefix: str) -> int:
    return int(server.client().hlen(f"{prefix}:{{M0}}:outbox"))


# The server


async def test_no_message_arrives(story: Story, server: Server) -> None:
    """All subscriptions are cut again and again: scans, and callers that look once a second, make up for it."""
    async with story.mesh.connect(), story.rescuing(), story.rescuing(), trio.open_nursery() as nursery:
        nursery.start_soon(_again, lambda: server.look.client_kill_filter(_type="pubsub"), 0.02)
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, 400, ms=200)
        await story.ended(batch, "then 400 400 0 0 1")
        nursery.cancel_scope.cancel()


async def test_the_server_forgets_all_scripts_again_and_again(story: Story, server: Server) -> None:
    async with story.mesh.connect(), story.rescuing(), trio.open_nursery() as nursery:
        nursery.start_soon(_again, server.look.script_flush, 0.005)
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, 300)
        await story.ended(batch, "then 300 300 0 0 1")
        nursery.cancel_scope.cancel()


async def _again(action: Callable[[], object], pause: float) -> None:
    while True:
        await trio.to_thread.run_sync(action)
        await trio.sleep(pause)


async def test_the_server_loses_everything(
    new_story: Callable[[str, str], Story], own_server: Server, prefix: str
) -> None:
    """Callers learn that the batch is gone, in the block and after it; a new batch ends as any other."""
    story = new_story(own_server.url, prefix)
    async with story.mesh.connect(), story.rescuing():
        with pytest.raises(worqr.BatchEnded, match=r"is unknown|was deleted"):
            async with story.mesh.batch(**story.ends(queue="home")) as lost:
                await lost.dispatch(story.members[0].options(delay=600).call())
                own_server.look.flushall()
                await lost.dispatch(story.members[1].call())
        with pytest.raises(worqr.NoResult, match="is unknown"):
            await lost.wait(PATIENCE)
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, 30)
        await story.ended(batch, "then 30 30 0 0 1")


# A cluster


async def test_a_slot_moves_and_a_primary_fails_over_while_a_batch_is_at_work(
    new_story: Callable[[str, str], Story], cluster: Cluster
) -> None:
    """Its home, its follow-up and its jobs are on all three nodes."""
    story = new_story(cluster.url, "worqr")
    source = cluster.owner("worqr:{M0}")
    names = [f"worqr:{{{name}}}" for name in ("home", "done", *(f"M{n}" for n in range(MEMBERS)))]
    assert len({cluster.owner(name).port for name in names}) == 3
    target = next(node for node in map(cluster.owner, names) if node is not source)
    async with story.mesh.connect(), story.rescuing():
        async with story.mesh.batch(**story.ends(queue="home")) as batch:
            await story.add(batch, 300, ms=5)
            await trio.to_thread.run_sync(move_slot, cluster, slot_of("worqr:{M0}"), target)
            await story.add(batch, 300, ms=5)
            replica = cluster.replica_of(cluster.owner("worqr:{home}"))
            await trio.to_thread.run_sync(fail_over, replica)
            await story.add(batch, 300, ms=5)
        await story.ended(batch, "then 900 900 0 0 1")
        assert (await batch.info()).queues == ("M0", "M1", "M2")
    await trio.to_thread.run_sync(cluster.settle)
    await trio.to_thread.run_sync(move_slot, cluster, slot_of("worqr:{M0}"), source)
