"""A frozen process (SIGSTOP) that thaws: its handlers are cancelled, its finish refused, its tasks ran once more elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import worqr
from tests.faults.rescuer import rescuer
from tests.support.children import Child
from tests.support.leaks import assert_no_leaks, delete_all
from tests.support.patience import PATIENCE, until
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server

CHILD = Path(__file__).parent / "child_peer.py"


async def _enqueue(server: Server, prefix: str, *tasks: bytes) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*tasks)


async def _joins_again(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        with trio.fail_after(PATIENCE):
            while len([w for w in await mesh.workers() if w.queues]) < 2:
                await trio.sleep(0.05)


async def _only_runs_another(server: Server, prefix: str, zombie: Child) -> None:
    """It runs what is enqueued now, and has run nothing that it had found in its sockets."""
    await _enqueue(server, prefix, b"ok-3")
    lines = [await zombie.line()]
    while not lines[-1].startswith("ended ok-3"):
        lines.append(await zombie.line())
    assert not [line for line in lines if "hold-" in line]
    zombie.send("leave")
    assert await zombie.ended() == 0


async def test_a_peer_frozen_longer_than_its_keepalive_learns_that_it_lost_its_tasks(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    await _enqueue(server, prefix, b"hold-1", b"hold-2")
    zombie = spawn(CHILD, server.url, prefix, "Q1")
    first_id = (await zombie.line_with("joined")).split()[1]
    running = {(await zombie.line_with("run")).split()[1] for _ in range(2)}
    assert running == {"hold-1", "hold-2"}
    async with rescuer(server.url, prefix) as rescue:
        zombie.pause()
        await rescue.wait_all(b"hold-1", b"hold-2")
        assert rescue.attempts == {b"hold-1": 2, b"hold-2": 2}, "a death is counted"
        zombie.resume()
        for _ in range(2):
            assert (await zombie.line_with("ended")).endswith("lost")
        mesh = worqr.Mesh(server.url, prefix=prefix)
        async with mesh.connect():
            with trio.fail_after(PATIENCE):  # back under a fresh worker id, on the same queue
                while len(peers := [w.id for w in await mesh.workers() if w.queues == {"Q1"}]) < 2:
                    await trio.sleep(0.05)
            assert first_id not in peers
            assert (await mesh.queue("Q1").info()).counts["finished"] == 2
    assert rescue.runs == {b"hold-1": 1, b"hold-2": 1}
    await _enqueue(server, prefix, b"ok-3")
    await zombie.line_with("ended ok-3 done")
    zombie.send("leave")
    assert await zombie.ended() == 0


async def test_what_a_zombie_finished_while_nobody_heard_it_is_refused(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    # The handler blocks its thread (and so the whole process, frozen in the middle of it); when it thaws, the handler
    # returns at once, before any beat was answered: its finish is fenced by the claim.
    await _enqueue(server, prefix, b"block-1")
    zombie = spawn(CHILD, server.url, prefix, "Q1")
    await zombie.line_with("run block-1")
    zombie.pause()
    async with rescuer(server.url, prefix) as rescue:
        await rescue.wait_all(b"block-1")
        zombie.resume()
        await zombie.line_with("ended block-1")
        mesh = worqr.Mesh(server.url, prefix=prefix)
        async with mesh.connect():
            with trio.fail_after(PATIENCE):
                while len(await mesh.workers()) < 2:
                    await trio.sleep(0.05)
            counts = (await mesh.queue("Q1").info()).counts
    assert counts["finished"] == 1, "the zombie's finish was refused"
    assert rescue.runs[b"block-1"] == 1
    zombie.send("leave")
    assert await zombie.ended() == 0


@pytest.mark.parametrize("beat_too", [False, True], ids=["claim", "claim-and-beat"])
async def test_a_claim_that_a_zombie_finds_in_its_socket_does_not_begin(
    server: Server, prefix: str, proxy: FaultProxy, spawn: Callable[..., Child], beat_too: bool
) -> None:
    # Also when the answer to a beat from before the freeze lies in the other socket, and says that all is well.
    zombie = spawn(CHILD, proxy.url, prefix, "Q1")
    await zombie.line_with("joined")
    faults = [proxy.hold_reply(sent_as("start_tasks"), on="data")]
    await _enqueue(server, prefix, b"hold-1", b"hold-2")  # two: one alone would be handed to it
    await faults[0].wait_executed()
    if beat_too:
        faults.append(proxy.hold_reply(sent_as("keep_worker_alive"), on="beat"))
        await faults[1].wait_executed()
    zombie.pause()
    async with rescuer(server.url, prefix) as rescue:
        await rescue.wait_all(b"hold-1", b"hold-2")
        for fault in faults:
            fault.release()
        await trio.sleep(0.2)  # both replies are in the zombie's sockets
        zombie.resume()
        await _joins_again(server, prefix)
    await _only_runs_another(server, prefix, zombie)


async def test_a_task_that_is_handed_to_a_frozen_worker_runs_elsewhere_and_once(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    client = server.client()
    zombie = spawn(CHILD, server.url, prefix, "Q1")
    first_id = (await zombie.line_with("joined")).split()[1]
    await until(lambda: bool(client.sismember(f"{prefix}:{{Q1}}:hungry", first_id)))
    zombie.pause()
    await _enqueue(server, prefix, b"hold-1")
    assert client.scard(f"{prefix}:{{Q1}}:claims:{first_id}") == 1, "it has the message in its socket"
    async with rescuer(server.url, prefix) as rescue:
        await rescue.wait_all(b"hold-1")
        assert rescue.attempts == {b"hold-1": 2}, "a death is counted"
        zombie.resume()
        await _joins_again(server, prefix)
        assert rescue.runs == {b"hold-1": 1}
    await _only_runs_another(server, prefix, zombie)


async def test_freezing_for_less_than_the_keepalive_again_and_again_costs_nothing(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    for keepalive in (6, 18):  # a machine that stands still for seconds is given more time
        if await keeps_its_task_while_frozen(server, f"{prefix}{keepalive}", spawn, keepalive):
            return
    raise AssertionError("it was swept")


async def keeps_its_task_while_frozen(
    server: Server, prefix: str, spawn: Callable[..., Child], keepalive: float
) -> bool:
    """Whether a worker that is frozen for a third of its keepalive, three times, is left alone."""
    await _enqueue(server, prefix, b"hold-1")
    child = spawn(CHILD, server.url, prefix, "Q1", env={"KEEPALIVE": f"{keepalive}"})
    first_id = (await child.line_with("joined")).split()[1]
    await child.line_with("run hold-1")
    async with rescuer(server.url, prefix, keepalive=keepalive) as rescue:
        for _ in range(3):
            child.pause()
            await trio.sleep(keepalive / 3)
            child.resume()
            await trio.sleep(keepalive / 6)
        if rescue.runs:
            child.kill()
            return False
        mesh = worqr.Mesh(server.url, prefix=prefix)
        async with mesh.connect():
            assert first_id in [w.id for w in await mesh.workers()]
            count = await mesh.queue("Q1").cancel(b"hold-1", wait=PATIENCE)
            assert count == worqr.CancelCount(waiting=0, running=1, acknowledged=1)
    child.send("leave")
    assert await child.ended() == 0
    with server.client() as client:
        assert_no_leaks(client, prefix)
        delete_all(client, prefix)
    return True


async def test_a_loop_blocked_for_5_s_keeps_its_tasks(server: Server, prefix: str, spawn: Callable[..., Child]) -> None:
    """Nor is it blamed for the time in which the machine stands still, which it hardly does each time."""
    wrong: list[str] = []
    while not wrong or wrong[-1]:
        assert len(wrong) < 3, wrong
        wrong.append(await what_goes_wrong_when_blocked(server, f"{prefix}{len(wrong)}", spawn))


async def what_goes_wrong_when_blocked(server: Server, prefix: str, spawn: Callable[..., Child]) -> str:
    await _enqueue(server, prefix, b"block-1", b"hold-2")
    child = spawn(CHILD, server.url, prefix, "Q1", env={"KEEPALIVE": "3"})
    await child.line_with("run block-1")  # it has claimed both
    async with rescuer(server.url, prefix) as rescue:
        ended = await child.line_with("ended block-1")
        if kept := "done" in ended and not rescue.runs:  # its heartbeat beats off the loop
            mesh = worqr.Mesh(server.url, prefix=prefix)
            async with mesh.connect():
                assert (await mesh.queue("Q1").cancel(b"hold-2", wait=PATIENCE)).acknowledged == 1
    # the log names who blocks
    right = kept and "loop.blocked" in child.errors and "handler of queue 'Q1'" in child.errors
    if kept:
        child.send("leave")
        assert await child.ended() == 0
    else:
        child.kill()
    with server.client() as client:
        if kept:
            assert_no_leaks(client, prefix)
        delete_all(client, prefix)
    return "" if right else f"{ended}, ran elsewhere: {[*rescue.runs]}, errors: {child.errors}"


async def test_a_task_that_kills_its_workers_is_set_aside_and_takes_nobody_with_it(
    server: Server, prefix: str, spawn: Callable[..., Child], expects_left: Callable[..., None]
) -> None:
    expects_left("{Q1}:failed", "{Q1}:aside*")
    await _enqueue(server, prefix, b"hold-poison", b"hold-neighbour")
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        q = mesh.queue("Q1")
        for death in range(1, 4):
            child = spawn(CHILD, server.url, prefix, "Q1", env={"CONCURRENCY": "2"})
            await child.line_with("run hold-poison")
            if death == 2:  # the neighbour ends well this time
                with trio.fail_after(PATIENCE):
                    while (await q.cancel(b"hold-neighbour", wait=PATIENCE)).acknowledged != 1:
                        await trio.sleep(0.05)
            child.kill()
            async with worqr.Mesh(server.url, prefix=prefix, keepalive=1).join():
                with trio.fail_after(PATIENCE):
                    while await mesh.workers() and [w for w in await mesh.workers() if w.queues]:
                        await trio.sleep(0.05)
        info = await q.info()
        assert (info.waiting, info.failed) == (0, 1), "the third death was the last"
