"""Named limits: blocks of several programs share one limit, on each loop and in threads, and nothing is kept from a dead one."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh  # noqa: F401 - fixtures
from tests.peer.tools import eventually
from tests.support.children import Child
from tests.support.patience import PATIENCE, have_patience
from tests.support.servers import Server
from worqr import ops
from worqr.client import permits
from worqr.errors import UsageError
from worqr.inside import client_of
from worqr.keys import LimitKeys
from worqr.link import Link
from worqr.testing import recording

ONE = worqr.Limit(1, name="api")


def keys_of(mesh: worqr.Mesh[Any]) -> LimitKeys:
    return LimitKeys(mesh.prefix, "api")


async def test_blocks_of_two_programs_share_a_limit_and_begin_in_order(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    other, inside, most, begun = new_mesh(), 0, 0, list[int]()

    async def use(of: worqr.Mesh[Any], n: int, task_status: trio.TaskStatus[None]) -> None:
        nonlocal inside, most
        task_status.started()
        async with of.limit(worqr.Limit(2, name="api")):
            inside += 1
            most = max(most, inside)
            begun.append(n)
            await trio.lowlevel.checkpoint()
            inside -= 1

    with trio.fail_after(PATIENCE):
        async with mesh.connect(), other.connect(), trio.open_nursery() as nursery:
            for n in range(20):
                await nursery.start(use, mesh if n % 2 else other, n)
    assert most <= 2
    for parity in (0, 1):
        assert (own := [n for n in begun if n % 2 == parity]) == sorted(own)


async def test_a_rate_is_never_exceeded_and_what_is_left_is_used(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    """By the moments in the server: in no period more than the rate; and each period that was waited for was full."""
    other, limit = new_mesh(), worqr.Limit(rate=10, per=0.5, name="api")
    moments = list[tuple[float, float]]()

    async def use(of: worqr.Mesh[Any]) -> None:
        asked = trio.current_time()
        async with of.limit(limit):
            moments.append((asked, trio.current_time()))

    with trio.fail_after(PATIENCE):
        async with mesh.connect(), other.connect(), trio.open_nursery() as nursery:
            for n in range(35):
                nursery.start_soon(use, mesh if n % 2 else other)
    ends = sorted(end for _, end in moments)
    assert len(ends) == 35
    assert ends[30] - min(asked for asked, _ in moments) >= 1.5  # three full periods come before the 31st


@pytest.mark.parametrize("how", ["error", "cancelled", "waiting"])
async def test_a_block_that_ends_in_any_way_gives_its_permit_back(mesh: worqr.Mesh, how: str) -> None:
    async with mesh.connect():
        with trio.fail_after(PATIENCE):
            if how == "error":
                with pytest.raises(ValueError, match="boom"):
                    async with mesh.limit(ONE):
                        raise ValueError("boom")
            elif how == "cancelled":
                with trio.CancelScope() as scope:
                    async with mesh.limit(ONE):
                        scope.cancel()
                        await trio.sleep_forever()
            else:
                async with mesh.limit(ONE):
                    with trio.move_on_after(0.05):
                        async with mesh.limit(ONE):
                            pytest.fail("both began")
            async with mesh.limit(ONE):
                assert client_of(mesh).permits.held_of(keys_of(mesh)) != []
        assert client_of(mesh).permits.held_of(keys_of(mesh)) == []
        assert await client_of(mesh).ask(ops.take_permits(keys_of(mesh), "1", ["x"], 1, 0)) == ops.PermitReply("ok", 1)


async def test_a_permit_is_renewed_while_its_block_runs_and_that_of_the_dead_is_free(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "RENEW_EVERY", 0.05)
    async with mesh.connect():
        ask = client_of(mesh).ask
        await ask(ops.take_permits(keys_of(mesh), "1", ["dead"], 1, 300))
        monkeypatch.setattr(permits, "LEASE", 1.0)
        with trio.fail_after(PATIENCE):
            async with mesh.limit(ONE):
                refused = partial(ask, ops.take_permits(keys_of(mesh), "1", ["x"], 1, 0))
                left = (await refused()).number
                while (now := (await refused()).number) <= left:  # less is left, until it is renewed
                    left = now


FORK_IN_A_BLOCK = """
import os, sys, threading, worqr
from worqr.client import permits
from worqr.inside import client_of

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
limit = worqr.Limit(2, name="api")
permits.RENEW_EVERY = 0.05
to_child, to_parent = os.pipe(), os.pipe()
renewed, renew = threading.Semaphore(0), permits.ops.renew_permits

def counted(*args):
    renewed.release()
    return renew(*args)

def child():
    with worqr.sync_block(mesh.limit, limit):
        permits.ops.renew_permits = counted
        os.read(to_child[0], 1)
        for _ in range(3):
            renewed.acquire()
        os.write(to_parent[1], b"%d" % worqr.sync(mesh.limits)[0].held)

with worqr.sync_block(mesh.limit, limit):
    with client_of(mesh).permits._lock:  # as if its thread looked at what is held
        pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(0)
os.write(to_child[1], b"x")
print(os.read(to_parent[0], 1).decode(), flush=True)
os.waitpid(pid, 0)
"""


async def test_a_forked_process_renews_its_own_permits_only(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    program = spawn(FORK_IN_A_BLOCK, server.url, prefix, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert await program.line() == "1", program.errors
    assert await program.ended() == 0


async def test_a_limit_whose_node_does_not_answer_delays_the_permits_of_no_other(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed, all_renewed, post = Counter[str](), threading.Event(), Link.post

    def lose(link: Link, call: Any, deliver: Any, **options: Any) -> None:
        if call.script.name == "renew_permits":
            name = "away" if "away" in call.base else "near"
            renewed[name] += 1
            if renewed["near"] >= 4:
                all_renewed.set()
            if name == "away":
                return
        post(link, call, deliver, **options)

    monkeypatch.setattr(permits, "RENEW_EVERY", 0.05)
    monkeypatch.setattr(Link, "post", lose)
    async with mesh.connect(), mesh.limit(worqr.Limit(1, name="away")), mesh.limit(worqr.Limit(1, name="near")):
        assert await trio.to_thread.run_sync(all_renewed.wait, PATIENCE)
    assert renewed["away"] == 1


async def test_a_permit_that_the_server_grants_too_late_goes_back(
    own_server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is not awaited."""
    monkeypatch.setattr(permits, "LEASE", PATIENCE)
    mesh = worqr.Mesh(url=own_server.tcp_url, prefix=prefix)
    async with mesh.connect():
        async with mesh.limit(ONE):
            pass
        have_patience(mesh, 4)
        own_server.pause()
        with pytest.raises(worqr.Unavailable) as caught:
            async with mesh.limit(ONE):
                pass
        assert caught.value.sent is None
        own_server.resume()
        have_patience(mesh, PATIENCE)
        with trio.fail_after(PATIENCE / 2):
            async with mesh.limit(ONE):
                pass


async def test_the_connection_that_renews_ends_with_the_permits(
    mesh: worqr.Mesh, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "RENEW_EVERY", 0.05)

    async def connections() -> int:
        listed = await trio.to_thread.run_sync(server.look.client_list)
        return sum(each["name"] == f"worqr:{mesh.prefix}:data" for each in listed)

    async with mesh.connect():
        async with mesh.limit(ONE):
            await eventually(connections, 2)
        await eventually(connections, 1)


HOLDER = """
import sys, trio, worqr
from worqr.client import permits

permits.LEASE, permits.RENEW_EVERY = 5.0, 0.2
mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])

@mesh.task
async def call() -> None:
    async with mesh.limit(worqr.Limit(1, name="api")):
        print("holds", flush=True)
        await trio.sleep_forever()

async def main() -> None:
    async with mesh.join():
        await call.enqueue()
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.leaves("{*}", "{*}:*", "*")
async def test_a_worker_that_is_killed_in_a_handler_keeps_no_permit(mesh: worqr.Mesh, server: Server) -> None:
    with closing(Child(HOLDER, server.url, mesh.prefix)) as child:
        await child.line_with("holds")
        await look_after_the_kill(mesh, child)


async def look_after_the_kill(mesh: worqr.Mesh, child: Child) -> None:
    async with mesh.connect():
        keys = keys_of(mesh)

        async def take_at_once() -> str:
            return (await client_of(mesh).ask(ops.take_permits(keys, "1", ["x"], 1, 0))).word

        await eventually(take_at_once, "wait")  # not at first, if the lease ended while the machine stood still
        child.kill()
        with trio.fail_after(PATIENCE):
            async with mesh.limit(ONE):
                pass


async def test_what_was_used_replaces_the_estimate(mesh: worqr.Mesh) -> None:
    tokens = worqr.Limit(rate=100, per=3600, name="api")
    async with mesh.connect():
        with trio.fail_after(PATIENCE):
            for used in (90, 5):
                async with mesh.limit(tokens, cost=10) as permit:
                    permit.cost(used)
            async with mesh.limit("api", cost=5):  # by its name alone
                pass
            with trio.move_on_after(0.05) as waited:
                async with mesh.limit(tokens):
                    pytest.fail("101 of 100")
    assert waited.cancelled_caught


def test_threads_and_asyncio_use_a_limit(mesh: worqr.Mesh) -> None:
    async def use() -> None:
        async with mesh.connect(), mesh.limit(ONE):
            await asyncio.sleep(0)

    with worqr.sync_block(mesh.limit, ONE, cost=1) as permit:
        permit.cost(1)
    asyncio.run(use())
    with worqr.sync_block(mesh.limit, ONE):
        pass
    mesh.close()


async def test_other_numbers_are_logged_once(
    mesh: worqr.Mesh, new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    other = new_mesh()
    async with mesh.connect(), other.connect():
        for _ in range(2):
            for each, most in ((mesh, 1), (other, 2)):
                async with each.limit(worqr.Limit(most, name="api")):
                    pass
    told = [record for record in caplog.records if getattr(record, "event", "") == "limit.replaced"]
    assert [record.levelno for record in told] == [logging.WARNING] * 2
    assert "limit 'api' as 1 at once; 2 at once holds" in told[0].getMessage()


async def test_limits_are_listed_with_what_is_in_use(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    tokens, other = worqr.Limit(2, rate=500, per=60, name="api", unit="tokens"), new_mesh()
    assert str(tokens) == "2 at once, 500 tokens per minute"

    async def use(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with mesh.limit(tokens, cost=100):
            task_status.started()
            await trio.sleep_forever()

    async with mesh.connect(), other.connect(), trio.open_nursery() as nursery:
        assert await other.limits() == []
        async with other.limit(worqr.Limit(1, name="Api")):
            pass
        for _ in range(2):
            await nursery.start(use)
        for _ in range(3):
            nursery.start_soon(use)
        with trio.fail_after(PATIENCE):
            while (found := await other.limits())[1].waiting < 3:
                await trio.lowlevel.checkpoint()
        assert found == [
            worqr.LimitInfo("Api", 1, 0, None, None, "", None, 0, 0),
            worqr.LimitInfo("api", 2, 2, 500, 60.0, "tokens", 200, 3, 0),
        ]
        assert [each.bound for each in found] == ["1 at once", "2 at once, 500 tokens per minute"]
        nursery.cancel_scope.cancel()


async def test_wrong_uses_have_a_remedy(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        for limit, cost, words in (
            (worqr.Limit(1), 1, "needs a limit with a name"),
            ("nobody", 1, "no program has used limit 'nobody'"),
            (worqr.Limit(rate=5, name="api"), 6, "cost 6 is above limit 'api', which allows 5 in"),
            (worqr.Limit(rate=5, name="api", unit="tokens"), 6, "limit 'api', which allows 5 tokens in"),
            (ONE, -1, "cost of a permit"),
        ):
            with pytest.raises(UsageError, match=words):
                async with mesh.limit(limit, cost=cost):
                    pass
    with pytest.raises(UsageError, match="name of a Limit"):
        worqr.Limit(1, name="a{b")
    with pytest.raises(UsageError, match="must be a word like 'tokens'"):
        worqr.Limit(rate=1, name="api", unit="\n")
    for wrong in ({"concurrency": 1, "name": "api"}, {"rate": 1}):
        with pytest.raises(UsageError, match="a unit only with a rate and a name"):
            worqr.Limit(**wrong, unit="tokens")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leave the name out here"):
        worqr.Lanes(limit=ONE)


async def test_a_recorded_test_needs_no_server(mesh: worqr.Mesh) -> None:
    with recording(mesh):
        async with mesh.limit(ONE), mesh.limit(ONE):
            pass


async def test_limits_of_many_customers_are_not_remembered_for_ever(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "MANY_LIMITS", 3)
    async with mesh.connect():
        for customer in range(5):
            async with mesh.limit(worqr.Limit(1, name=f"customer-{customer}")):
                pass
        client = client_of(mesh)
        gc.collect()
        assert not client.connections.for_current_loop().permits._lines
        assert [*client.permits._noted] == ["customer-2", "customer-3", "customer-4"]
