"""kill -9 of a peer before and after each step of join, claim, run, settle, leave and sweep, and each request of a workflow.

At the requests of a workflow, the server is killed as well.

A proxy holds the request of a script (before: the server never sees it until the process is dead) or its reply (after: executed,
and nobody knows). Then the process is killed, and another peer must find every task, run it, and leave no key behind.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

import worqr
from tests.faults.child_workflow import RESULT, declare
from tests.faults.rescuer import rescuer, wait_for_nobody
from tests.support.children import Child
from tests.support.leaks import assert_no_leaks, delete_all
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys, RegistryKeys

CHILD = Path(__file__).parent / "child_peer.py"
WORKFLOW = Path(__file__).parent / "child_workflow.py"
REQUESTS = 36
"""At which of its requests the worker of a workflow is killed; it sends fewer than this."""
AT_ONCE = 4
OF_A_WORKFLOW = {
    "start_tasks",
    "save_state",
    "note_children",
    "dispatch_jobs",
    "suspend_task",
    "finish_tasks",
    "store_end",
}


@dataclass(frozen=True)
class Crash:
    """One crash: at which script, with which tasks waiting, and what brings the peer to that step."""

    script: str
    tasks: tuple[bytes, ...] = (b"ok-1", b"hold-2", b"ok-3")
    nth: int = 1
    then: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    dead_worker: bool = False
    gone: frozenset[bytes] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.script}-{self.nth}{'-' + self.then if self.then else ''}{'-by-hand' if 'BY_HAND' in self.env else ''}"


BY_HAND = {"BY_HAND": "1"}
JOINING = [
    Crash("start_worker"),
    Crash("map_work"),
    Crash("start_work"),
    Crash("reconcile"),
    Crash("keep_worker_alive"),
]
CLAIMING = [Crash("start_tasks"), Crash("start_tasks", env={"CONCURRENCY": "1"}, nth=2)]
SETTLING = [
    Crash("finish_tasks", (b"ok-1", b"ok-2")),
    Crash("finish_tasks", (b"ok-1", b"ok-2", b"ok-3"), nth=2, env={"CONCURRENCY": "1"}),
    Crash("retry_task", (b"fail-1", b"ok-2")),
    Crash("stop_tasks", (b"stop-1", b"ok-2"), env=BY_HAND),
    Crash("fail_task", (b"set-aside-1", b"ok-2"), env=BY_HAND, gone=frozenset({b"set-aside-1"})),
]
FILING = [
    Crash("file_tasks", env={"LANED": "1"}),
    Crash("file_tasks", env={"LANED": "1", "CONCURRENCY": "1"}, nth=2),
    Crash("start_tasks", env={"LANED": "1", "CONCURRENCY": "1"}, nth=3),
]
LEAVING = [
    Crash("stop_work", (b"hold-1", b"ok-2"), then="leave"),
    Crash("unmap_work", (b"hold-1", b"ok-2"), then="leave"),
    Crash("stop_worker", (b"hold-1", b"ok-2"), then="leave"),
]
SWEEPING = [
    *(
        Crash(name, (b"hold-1", b"ok-2"), dead_worker=True)
        for name in (
            "look_at_workers",
            "condemn_worker",
            "forget_worker",
            "fail_worker",
            "unmap_work",
            "list_queues",
            "inspect",
        )
    ),
    # One task of the three is held by the dead worker, one by the killed peer: so a scan finds one that waits.
    Crash("post_scan", (b"hold-1", b"hold-2", b"ok-3"), dead_worker=True, env={"CONCURRENCY": "1"}),
]
GROUPS = {
    "joining": JOINING,
    "claiming": CLAIMING,
    "settling": SETTLING,
    "filing": FILING,
    "leaving": LEAVING,
    "sweeping": SWEEPING,
}


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("group", GROUPS)
async def test_a_peer_killed_at_this_step_loses_nothing(
    group: str, when: str, server: Server, proxy_to: Callable[[Server], FaultProxy], spawn: Callable[..., Child]
) -> None:
    async with trio.open_nursery() as nursery:
        for i, crash in enumerate(GROUPS[group]):
            prefix = f"c{os.urandom(3).hex()}{i}"
            nursery.start_soon(_one, crash, when, server, proxy_to(server), spawn, prefix)


async def _one(
    crash: Crash, when: str, server: Server, proxy: FaultProxy, spawn: Callable[..., Child], prefix: str
) -> None:
    client = server.client()
    try:
        mesh = worqr.Mesh(server.url, prefix=prefix)
        async with mesh.connect():
            await mesh.queue("Q1").enqueue(*crash.tasks)
            if crash.dead_worker:
                await _die_holding(mesh, prefix)
        sha = sent_as(crash.script)
        fault = (proxy.hold if when == "before" else proxy.hold_reply)(sha, nth=crash.nth)
        child = spawn(CHILD, proxy.url, prefix, "Q1", env=crash.env)
        if crash.then:
            running = set(crash.tasks)
            while running:
                running.discard((await child.line_with("run")).split()[1].encode())
            child.send(crash.then)
        await fault.wait_fired()
        if when == "after":
            await fault.wait_executed()
        child.kill()
        fault.release()  # a request that was held is executed late, when its sender is dead
        async with rescuer(server.url, prefix) as rescue:
            # The `ok` ones may have ended in the child; what was set aside for good has.
            await rescue.wait_all(*(t for t in crash.tasks if not t.startswith(b"ok") and t not in crash.gone))
            await _nobody_else(mesh)
        assert_no_leaks(client, prefix, ["{Q1}:failed", "{Q1}:aside*"] if crash.gone else [])
    except BaseException as error:
        error.add_note(f"crash point: {when} {crash.name}, prefix {prefix}")
        raise
    finally:
        delete_all(client, prefix)


async def _nobody_else(mesh: worqr.Mesh) -> None:
    """Until the dead are forgotten, nothing waits and nothing runs."""
    async with mesh.connect():
        with trio.fail_after(PATIENCE):
            while True:
                info = await mesh.queue("Q1").info()
                if len(await mesh.workers()) == 1 and info.workers == 1 and info.waiting == info.running == 0:
                    counts = info.counts
                    ended = counts.get("finished", 0) + counts.get("failed", 0)
                    assert ended == counts["enqueued"], f"{counts}: every task ends exactly once"
                    return
                await trio.sleep(0.05)


async def _die_holding(mesh: worqr.Mesh, prefix: str) -> None:
    """Register a worker that claims a task and is never heard of again."""
    registry, queue, worker = RegistryKeys(prefix), QueueKeys(prefix, "Q1"), f"dead:{os.urandom(16).hex()}"
    await mesh._client.ask(ops.start_worker(registry, worker, keepalive_ms=100, facts=[]))
    await mesh._client.ask(ops.map_work(registry, worker, "Q1"))
    await mesh._client.ask(ops.start_work(queue, worker, max_stalls=3, keep_failed=10, last=0))
    started = await mesh._client.ask(ops.start_tasks(queue, worker, 1, 1))
    assert len(started.entries) == 1


# Each request of a workflow


async def _send_number(job: worqr.Job[str]) -> None:
    """Send the number that the workflow waits for, when it waits."""
    while (await job.status()).waits_for != "number":
        await trio.sleep(0.02)
    await job.send("number", 3)


def done(effects: Path) -> list[str]:
    """What the workflow has done, in order."""
    return effects.read_text().splitlines()


async def test_the_worker_of_a_workflow_sends_each_of_its_requests_before_the_last_crash_point(
    server: Server, prefix: str, proxy: FaultProxy, spawn: Callable[..., Child], tmp_path: Path
) -> None:
    """So the test below leaves none of them out."""
    mesh, effects = worqr.Mesh(server.url, prefix=prefix), tmp_path / "effects"
    fulfil = declare(mesh, str(effects))
    child = spawn(WORKFLOW, proxy.url, prefix, str(effects))
    await child.line_with("joined")
    async with mesh.connect():
        proxy.forget_requests()
        job = await fulfil.dispatch(7)
        with trio.fail_after(PATIENCE):
            await _send_number(job)
        assert await job.result(PATIENCE) == RESULT
        await until_idle(mesh)
        assert done(effects) == RESULT.split(", ")
        sent = {name: proxy.count(sent_as(name).strip(), on=":data") for name in OF_A_WORKFLOW}
        assert all(sent.values()), sent
        assert sum(sent.values()) < REQUESTS, (
            "the others are those of an idle worker, of which a slow machine sees more"
        )
    child.send("leave")
    await child.ended()


async def until_idle(mesh: worqr.Mesh) -> None:
    """Wait until both jobs of the workflow have finished, by the counts of their queues."""
    with trio.fail_after(PATIENCE):
        for queue in ("fulfil", "pack"):
            while (await mesh.queue(queue).info()).counts.get("finished", 0) < 1:
                await trio.sleep(0.05)


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("first", range(1, REQUESTS, AT_ONCE), ids=lambda first: f"request {first}")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_workflow_whose_worker_is_killed_at_this_request_goes_on(
    when: str,
    first: int,
    server: Server,
    proxy_to: Callable[[Server], FaultProxy],
    spawn: Callable[..., Child],
    tmp_path: Path,
) -> None:
    async with trio.open_nursery() as nursery:
        for nth in range(first, first + AT_ONCE):
            nursery.start_soon(_kill_at, nth, when, server, proxy_to(server), spawn, tmp_path / f"effects {nth}")


async def _kill_at(
    nth: int, when: str, server: Server, proxy: FaultProxy, spawn: Callable[..., Child], effects: Path
) -> None:
    client, prefix = server.client(), f"c{os.urandom(4).hex()}"
    mesh = worqr.Mesh(server.url, prefix=prefix)
    fulfil = declare(mesh, str(effects))
    try:
        child = spawn(WORKFLOW, proxy.url, prefix, str(effects))
        await child.line_with("joined")
        async with mesh.connect(), trio.open_nursery() as nursery:
            fault = (proxy.hold if when == "before" else proxy.hold_reply)(nth=nth, on=":data")
            job = await fulfil.dispatch(7)
            nursery.start_soon(_send_number, job)
            await fault.wait_fired()  # at the latest by what an idle worker sends
            if when == "after":
                await fault.wait_executed()
            child.kill()
            fault.release()  # a request that was held is executed late, when its sender is dead
            await _take_over(server, prefix, str(effects), job)
        async with mesh.connect():
            count = Counter(done(effects))
            assert set(count) == set(RESULT.split(", "))
            assert count.total() <= len(count) + 1, f"{count}: only what was cut runs again"
            await _each_was_started_once(mesh)
        assert_no_leaks(client, prefix)
    except BaseException as error:
        error.add_note(f"crash point: {when} request {nth}, prefix {prefix}")
        raise
    finally:
        delete_all(client, prefix)


async def _each_was_started_once(mesh: worqr.Mesh) -> None:
    """The workflow, and its job."""
    for queue in ("fulfil", "pack"):
        counts = (await mesh.queue(queue).info()).counts
        assert (counts["enqueued"], counts["finished"]) == (1, 1), f"{queue}: {counts}"


async def _take_over(server: Server, prefix: str, effects: str, job: worqr.Job[str]) -> None:
    """Another worker ends the workflow, and forgets the dead one."""
    other = worqr.Mesh(server.url, prefix=prefix, keepalive=1)
    declare(other, effects)
    async with other.join(grace=0) as peer:
        assert await job.result(PATIENCE) == RESULT
        await wait_for_nobody(server.url, prefix, but=peer.id)
        await until_idle(other)


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("first", range(1, REQUESTS, AT_ONCE), ids=lambda first: f"request {first}")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_workflow_whose_server_is_killed_at_this_request_does_everything_once(
    when: str, first: int, own_server: Server, proxy_to: Callable[[Server], FaultProxy], tmp_path: Path
) -> None:
    """The server has an append-only file, and comes back at once. The worker goes on."""
    proxy = proxy_to(own_server)
    for nth in range(first, first + AT_ONCE):
        try:
            await _kill_server_at(nth, when, own_server, proxy, tmp_path / f"effects {nth}")
        except BaseException as error:
            error.add_note(f"crash point: {when} request {nth}")
            raise


async def _kill_server_at(nth: int, when: str, server: Server, proxy: FaultProxy, effects: Path) -> None:
    prefix = f"c{os.urandom(4).hex()}"
    worker, sender = (worqr.Mesh(url, prefix=prefix, keepalive=PATIENCE) for url in (proxy.url, server.url))
    declare(worker, str(effects))
    fulfil = declare(sender, str(effects))
    async with sender.connect(), worker.join(grace=0), trio.open_nursery() as nursery:
        fault = (proxy.hold if when == "before" else proxy.hold_reply)(nth=nth, on=":data")
        job = await fulfil.dispatch(7)
        nursery.start_soon(_send_number, job)
        await fault.wait_fired()
        if when == "after":
            await fault.wait_executed()
        server.kill()
        server.start()
        fault.release()
        assert await job.result(PATIENCE) == RESULT
        await until_idle(sender)
        assert sorted(done(effects)) == sorted(RESULT.split(", "))
        await _each_was_started_once(sender)
    assert_no_leaks(server.client(), prefix)
