"""Producing from plain threads: the same calls and one link for all of them, through outages, forks, closing and the end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest
import trio
import trio.lowlevel

import worqr
from tests.client.test_asyncio import NewMesh, mesh, new_mesh, our_threads  # noqa: F401 - fixtures
from tests.link.test_thread_driver import in_threads
from tests.peer.tools import Held, eventually, serving, spying
from tests.support.children import Child
from tests.support.patience import PATIENCE, wait_until
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr import testing
from worqr.client import notifications
from worqr.client.client import ThreadConnection
from worqr.client.sync import ONLY_WORQR
from worqr.link.thread_driver import ThreadDriver
from worqr.lua import all_scripts

pytestmark = pytest.mark.one_server

T = TypeVar("T")
Spawn = Callable[..., Child]

SHA = {script.name: script.sha for script in all_scripts()}


def connections(server: Server, app: str) -> list[str]:
    return sorted(c["name"] for c in server.client().client_list() if c["name"].startswith(f"worqr:{app}:"))


async def in_thread(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Beside a peer of the same test."""
    with trio.fail_after(PATIENCE):
        return await trio.to_thread.run_sync(partial(call, *args, **kwargs), abandon_on_cancel=True)


def waiting(server: Server, prefix: str, queue: str = "Q1") -> list[bytes]:
    """The tasks that wait, the first one first."""
    with server.client() as client:
        return client.lrange(f"{prefix}:{{{queue}}}", 0, -1)[::-1]


# Connecting


def test_it_connects_at_first_use_and_once(new_mesh: NewMesh, server: Server) -> None:
    there = {*threading.enumerate()}
    mesh = new_mesh(app="first")

    @mesh.task(name="f")
    def f(n: int) -> int:
        return n

    queue = mesh.queue("Q1")
    queue.job("x")
    f.options(id="x")
    f.job("x")
    assert {*threading.enumerate()} <= there
    assert in_threads(8, lambda n: worqr.sync(queue.enqueue, b"%d" % n)) == [1] * 8
    worqr.sync(f.enqueue, 1)
    assert worqr.sync(mesh.queue("Q1").info).waiting == 8
    assert connections(server, "first") == ["worqr:first:data"]


def test_closing_ends_it_and_the_next_call_connects_anew(new_mesh: NewMesh, server: Server) -> None:
    there = {*threading.enumerate()}  # those of another test may end meanwhile
    mesh = new_mesh(app="again")
    mesh.close()
    for n in (1, 2, 3):
        assert worqr.sync(mesh.queue("Q1").enqueue, b"a") == 1
        assert worqr.sync(mesh.queue("Q1").info).waiting == n
        mesh.close()
        assert [each.name for each in threading.enumerate() if each not in there] == []
        wait_until(lambda: connections(server, "again") == [])
    mesh.close()


def test_it_ends_with_the_mesh(server: Server, prefix: str) -> None:
    queue = worqr.Mesh(server.url, prefix=prefix, app=prefix).queue("Q1")
    worqr.sync(queue.enqueue, b"a")
    gc.collect()
    worqr.sync(queue.enqueue, b"b")  # which is there as long as one of its queues
    with server.client() as client:

        def connected() -> bool:
            return any(each["name"] == f"worqr:{prefix}:data" for each in client.client_list())

        assert connected()
        del queue
        gc.collect()
        wait_until(lambda: not connected())


def test_closing_ends_every_wait(mesh: worqr.Mesh) -> None:
    queue = mesh.queue("Q1")
    job = worqr.sync(queue.dispatch, b"a", result_ttl=60)
    failed: list[worqr.Unavailable] = []

    def wait() -> None:
        try:
            worqr.sync(job.result)
        except worqr.Unavailable as error:
            failed.append(error)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    mesh.close()
    while any(thread.is_alive() for thread in threads):  # one that came late has made a new connection
        mesh.close()
        threads[0].join(0.01)
    assert len(failed) == 8
    assert worqr.sync(job.cancel).waiting == 1


def test_a_wrong_password_is_told_each_time(own_server: Server, new_mesh: NewMesh) -> None:
    with own_server.client() as client:
        client.config_set("requirepass", "secret")
        mesh = new_mesh(url=own_server.tcp_url.replace("//", "//:wrong@"), patience=600)  # which it does not wait for
        for _ in range(2):
            with pytest.raises(worqr.RefusedByServer, match="check user and password"):
                worqr.sync(mesh.queues)
        client.config_set("requirepass", "wrong")
        assert worqr.sync(mesh.queues) == []
        client.config_set("requirepass", "")


def test_a_bad_address_is_told(new_mesh: NewMesh) -> None:
    with pytest.raises(worqr.UsageError, match="must begin with redis://"):
        worqr.sync(worqr.Mesh("http://localhost").queues)
    mesh = new_mesh(url="unix:///nowhere/at/all", patience=0.2)
    with pytest.raises(worqr.Unavailable) as caught:
        worqr.sync(mesh.queue("Q1").enqueue, b"a")
    assert caught.value.sent is False


def test_an_embedded_server_will_do(new_mesh: NewMesh) -> None:
    mesh = new_mesh(url="embedded:")
    assert worqr.sync(mesh.queue("Q1").enqueue, b"a") == 1
    assert worqr.sync(mesh.queue("Q1").info).waiting == 1


# Many calls


def test_an_iterator_may_enqueue_by_itself(mesh: worqr.Mesh) -> None:
    @mesh.task(name="f")
    def f(n: int) -> None: ...

    def calls() -> Iterator[worqr.Call[None]]:
        for n in range(1500):
            if n % 500 == 0:
                worqr.sync(mesh.queue("Q1").enqueue, b"a")
                in_threads(1, lambda _: worqr.sync(mesh.queue("Q1").enqueue, b"b"))
            yield f.call(n)

    assert worqr.sync(mesh.enqueue_many, calls()) == 1500
    assert worqr.sync(mesh.queue("Q1").info).waiting == 6


# Many threads


def test_threads_at_once_store_everything_once(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    @mesh.task(name="f")
    def f(n: int, /) -> None: ...

    queue = mesh.queue("Q1")

    def work(n: int) -> None:
        for i in range(50):
            worqr.sync(queue.enqueue, b"%d-%d" % (n, i))
            worqr.sync(f.enqueue, 1000 * n + i)
            assert worqr.sync(queue.dispatch, b"", id=f"{n}-{i}", delay=60).outcome == "created"
        worqr.sync(mesh.enqueue_many, (f.call(1000 * n + i) for i in range(50, 100)))

    in_threads(8, work)
    stored = waiting(server, prefix)
    assert Counter(stored) == Counter(b"%d-%d" % (n, i) for n in range(8) for i in range(50))
    for n in range(8):
        own = [task for task in stored if task.startswith(b"%d-" % n)]
        assert own == [b"%d-%d" % (n, i) for i in range(50)]  # those of one thread in their order
    found = Counter(int(task) for task in waiting(server, prefix, "f"))
    assert found == Counter(1000 * n + i for n in range(8) for i in range(100))
    assert worqr.sync(queue.info).scheduled == 400
    trio.run(clear, mesh)


async def clear(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").delete()


def test_a_lost_reply_doubles_nothing(new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy) -> None:
    queue = new_mesh(url=proxy.url).queue("Q1")
    worqr.sync(queue.enqueue, b"first")
    faults = [proxy.drop_reply(matching=SHA["enqueue"], nth=n) for n in (1, 5, 20)]

    def work(n: int) -> None:
        for i in range(20):
            worqr.sync(queue.enqueue, b"%d-%d" % (n, i))

    in_threads(8, work)
    assert all(fault.fired for fault in faults[:2])
    found = Counter(waiting(server, prefix))
    assert found == Counter([b"first", *[b"%d-%d" % (n, i) for n in range(8) for i in range(20)]])


# Outages


def test_calls_wait_for_a_server_that_comes_back(own_server: Server, new_mesh: NewMesh, prefix: str) -> None:
    queue = new_mesh(patience=60).queue("Q1")
    own_server.stop()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(worqr.sync, queue.enqueue, b"%d" % n) for n in range(2)]  # the first use, without a server
        own_server.start()
        assert [call.result(PATIENCE) for call in calls] == [1, 1]
        own_server.stop()
        calls = [pool.submit(worqr.sync, queue.enqueue, b"%d" % n) for n in range(2, 4)]
        own_server.start()
        assert [call.result(PATIENCE) for call in calls] == [1, 1]
    assert Counter(waiting(own_server, prefix)) == Counter([b"0", b"1", b"2", b"3"])


def test_patience_ends(own_server: Server, new_mesh: NewMesh, prefix: str) -> None:
    queue = new_mesh(patience=1).queue("Q1")
    own_server.stop()
    for _ in range(2):
        with pytest.raises(worqr.Unavailable) as caught:
            worqr.sync(queue.enqueue, b"never")
        assert caught.value.sent is False
    own_server.start()
    wait_until(lambda: stored(queue, b"a"))
    assert waiting(own_server, prefix) == [b"a"]


def stored(queue: worqr.Queue, task: bytes) -> bool:
    try:
        return worqr.sync(queue.enqueue, task) == 1
    except worqr.Unavailable:
        return False


# Beside peers


async def test_a_result_is_told_and_not_asked_for(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "POLL_EVERY", 3600)
    begun, gate = trio.Event(), trio.Event()

    @mesh.task(name="wait", result_ttl=60)
    async def wait() -> int:
        begun.set()
        await gate.wait()
        return 7

    async with mesh.join(grace=0), trio.open_nursery() as nursery:
        job = await in_thread(worqr.sync, wait.dispatch)
        await begun.wait()
        found: list[int] = []

        def read() -> None:
            found.append(worqr.sync(job.result))

        with spying(server, prefix) as spy:
            for _ in range(4):
                nursery.start_soon(in_thread, read)
            asked = 0
            while asked < 8:  # each of the four looks, subscribes, and looks again
                asked += spy.calls()["read_result"]
                await trio.sleep(0.01)
            await trio.sleep(0.3)
            assert spy.calls()["read_result"] == 0
            gate.set()
            with trio.fail_after(PATIENCE):
                while len(found) < 4:
                    await trio.sleep(0.01)
    assert found == [7] * 4


async def test_a_result_that_does_not_come_is_not_waited_for_longer(mesh: worqr.Mesh) -> None:
    queue = mesh.queue("Q1")
    job = await in_thread(worqr.sync, queue.dispatch, b"a", result_ttl=60)
    for timeout in (0, 0.05):
        with pytest.raises(worqr.ResultTimeout):
            await in_thread(worqr.sync, job.result, timeout)
    with pytest.raises(TimeoutError):
        await in_thread(worqr.sync, job.result, timeout=0)
    with pytest.raises(worqr.NoResult):
        await in_thread(worqr.sync, (await in_thread(worqr.sync, queue.dispatch, b"b")).result)
    for each in (b"a", b"b"):
        assert (await in_thread(worqr.sync, queue.cancel, each)).waiting == 0  # jobs are cancelled by their id
    assert (await in_thread(worqr.sync, job.cancel, reason="no more")).waiting == 1
    with pytest.raises(worqr.JobCancelled) as caught:
        await in_thread(worqr.sync, job.result)
    assert caught.value.reason == "no more"
    await clear(mesh)


async def test_a_job_is_followed_to_its_end(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    seen: list[tuple[str, float | None]] = []
    held = Held()

    async def handler(task: bytes) -> None:
        worqr.current().progress(0.5)
        await held(task)
        worqr.current().progress(1.0)

    def follow() -> None:
        job = worqr.sync(mesh.queue("Q1").dispatch, b"a", result_ttl=60)
        with worqr.sync_block(job.watch, timeout=PATIENCE) as states:
            for status in states:
                seen.append((status.state, status.progress))
                if status.progress == 0.5:
                    trio.from_thread.run_sync(held.gate.set)
            assert list(states) == []

    def give_up() -> None:
        job = worqr.sync(mesh.queue("Q2").dispatch, b"a")
        with (
            pytest.raises(worqr.ResultTimeout, match=r"had not ended after 0\.2 s"),
            worqr.sync_block(job.watch, timeout=0.2) as states,
        ):
            assert [status.state for status in states] == []  # pragma: no cover - the iterator raises
        with worqr.sync_block(job.watch) as states:
            assert next(states).state == "waiting"  # and no more: the block ends it
        worqr.sync(job.cancel)

    async with serving(mesh, "Q1", handler):
        await trio.to_thread.run_sync(follow)
        assert (seen[-1], ("active", 0.5) in seen) == (("finished", 1.0), True)
        await trio.to_thread.run_sync(give_up)
        await eventually(lambda: watchers(server, prefix), 0)


async def watchers(server: Server, prefix: str) -> int:
    return len(server.client().pubsub_channels(f"{prefix}:*:job:*"))


def test_following_does_not_stop_a_loop(mesh: worqr.Mesh) -> None:
    async def follow() -> None:
        with worqr.sync_block(mesh.queue("Q1").job("x").watch):
            pass

    with pytest.raises(worqr.UsageError, match="async with job.watch"):
        asyncio.run(follow())


async def test_a_result_outlasts_an_outage(own_server: Server, new_mesh: NewMesh) -> None:
    mesh = new_mesh(patience=60)
    job = await in_thread(worqr.sync, mesh.queue("Q1").dispatch, b"a", id="x", result_ttl=60)
    found: list[bytes] = []
    async with trio.open_nursery() as nursery:

        def read() -> None:
            found.append(worqr.sync(job.result))

        nursery.start_soon(in_thread, read)
        await in_thread(wait_until, lambda: subscribed(own_server))
        await in_thread(own_server.restart)

        async def echo(task: bytes) -> bytes:
            return task

        async with mesh.join(grace=0) as peer, trio.open_nursery() as inner:
            await inner.start(peer.serve, "Q1", echo)
            with trio.fail_after(PATIENCE):
                while not found:
                    await trio.sleep(0.01)
            inner.cancel_scope.cancel()
    assert found == [b"a"]


def subscribed(server: Server) -> bool:
    with server.client() as client:
        return any(b":job:" in channel for channel in client.pubsub_channels("*"))


async def test_plain_handlers_produce_on_the_mesh_that_runs_them(mesh: worqr.Mesh, server: Server) -> None:
    ends: list[int] = []
    done = trio.Event()

    @mesh.task(name="double", result_ttl=60)
    async def double(n: int) -> int:
        return 2 * n

    @mesh.task(name="last")
    async def last(n: int) -> None:
        ends.append(n)
        if len(ends) == 20:
            done.set()

    @mesh.task(name="first")
    def first(n: int) -> None:
        worqr.sync(last.enqueue, worqr.sync(worqr.sync(double.dispatch, n).result, timeout=PATIENCE))

    async with mesh.join(grace=0):
        await mesh.enqueue_many(first.call(n) for n in range(20))
        with trio.fail_after(PATIENCE):
            await done.wait()
    assert sorted(ends) == [2 * n for n in range(20)]


# Where a loop runs


def calls_of(mesh: worqr.Mesh) -> dict[str, Callable[..., Any]]:
    """Every call that waits, as the message names it."""

    @mesh.task(name="f")
    def f() -> None: ...

    queue = mesh.queue("Q1")
    job = queue.job("x")
    return {
        "f.enqueue": f.enqueue,
        "f.dispatch": f.dispatch,
        "fn.options(...).dispatch": f.options(delay=1).dispatch,
        "queue.enqueue": partial(worqr.sync, queue.enqueue, b"a"),
        "queue.dispatch": partial(worqr.sync, queue.dispatch, b"a"),
        "queue.info": queue.info,
        "job.result": job.result,
        "job.status": job.status,
        "mesh.enqueue_many": partial(worqr.sync, mesh.enqueue_many, []),
        "mesh.queues": mesh.queues,
    }


def refuses(mesh: worqr.Mesh, loop: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for name, call in calls_of(mesh).items():
            expected = rf"{loop} loop .*`await {re.escape(name)}\(\.\.\.\)` inside `async with mesh\.connect\(\)"
            with pytest.raises(worqr.UsageError, match=expected):
                call() if isinstance(call, partial) else worqr.sync(call)
        with pytest.raises(worqr.UsageError, match=rf"{loop} loop .*`async with mesh\.batch\(\.\.\.\)`"):
            worqr.sync_block(mesh.batch)
        gc.collect()
    assert [str(each.message) for each in warned] == []
    assert "worqr-link" not in our_threads()


async def test_it_does_not_stop_a_trio_loop(mesh: worqr.Mesh) -> None:
    refuses(mesh, "Trio")
    assert await in_thread(worqr.sync, mesh.queue("Q1").enqueue, b"a") == 1
    await in_thread(mesh.close)


def test_it_does_not_stop_an_asyncio_loop(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        refuses(mesh, "asyncio")
        assert await asyncio.to_thread(worqr.sync, mesh.queue("Q1").enqueue, b"a") == 1

    asyncio.run(main())
    assert worqr.sync(mesh.queue("Q1").enqueue, b"b") == 1


async def test_a_loop_and_threads_have_their_own_links(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="both")
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a")
        await in_thread(worqr.sync, mesh.queue("Q1").enqueue, b"b")
        assert connections(server, "both") == ["worqr:both:data"] * 2
        await in_thread(mesh.close)
        assert await mesh.queue("Q1").count() == 2
    with pytest.raises(worqr.UsageError, match="not connected here"):
        await mesh.queue("Q1").count()


def test_a_thread_needs_sync(mesh: worqr.Mesh) -> None:
    worqr.sync(mesh.queue("Q1").enqueue, b"a")
    with pytest.raises(worqr.UsageError, match=r"not connected here.*worqr\.sync\(fn\.enqueue"):
        mesh.queue("Q1").count().send(None)


# What is refused, and what it says


def silent(call: Callable[[], object], match: str) -> None:
    """The call raises, and leaves no coroutine behind that nobody awaits: it ends with the error, and would warn then."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(worqr.UsageError, match=match) as caught:
            call()
        del caught
    assert [str(each.message) for each in warned] == []


def test_what_cannot_be_run_is_refused_with_the_line_to_write(mesh: worqr.Mesh) -> None:
    ran: list[str] = []

    @mesh.task(name="shop.confirm")
    def confirm(order: int) -> None:
        ran.append("confirm")

    @mesh.task(name="shop.awaited")
    async def awaited(order: int) -> None:
        ran.append("awaited")

    async def mine(n: int) -> int:
        ran.append("mine")
        return n

    anything: Any = worqr.sync
    block: Any = worqr.sync_block
    job = mesh.queue("Q1").job("x")
    for handler in (confirm, awaited):
        for given in (handler, partial(handler, 1), partial(partial(handler), 1)):
            silent(lambda given=given: anything(given), rf"sync\({handler.__name__}\.enqueue, \.\.\.\)")
    silent(lambda: anything(job.status()), r"not a call: write worqr\.sync\(\.\.\.\.status, \.\.\.\)")
    silent(lambda: anything(mine(1)), r"not a call: write worqr\.sync\(\.\.\.\.mine")
    silent(lambda: anything(3), "not int")
    silent(lambda: anything(len, "x"), r"len\(\) has returned int, which is nothing to wait for")
    silent(lambda: anything(mesh.queue("Q1").job, "x"), r"queue\.job\(\) has returned Job")
    silent(lambda: anything(job.watch), r"with worqr\.sync_block\(job\.watch, \.\.\.\)")
    silent(lambda: anything(job.watch()), r"with worqr\.sync_block\(job\.watch\)")
    silent(lambda: block(job.status), r"write worqr\.sync\(job\.status, \.\.\.\)")
    silent(lambda: block(job.status()), "not a call")
    silent(lambda: block(job.watch()), r"with worqr\.sync_block\(job\.watch\)")
    silent(lambda: block(len, "x"), r"call len\(\.\.\.\) without sync_block")
    silent(lambda: block(mesh.connect).__enter__(), "connects by itself")
    silent(lambda: block(mesh.join).__enter__(), r"mesh\.join_in_thread\(\)")
    assert ran == []


def test_a_call_that_nothing_could_await_is_refused_at_once(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    @mesh.task(name="shop.confirm", lanes=worqr.Lanes("order"))
    def confirm(order: int) -> None: ...

    queue = mesh.queue("Q1")
    batch = queue.batch("x")
    sends: dict[str, Callable[[], object]] = {
        "confirm.enqueue": lambda: confirm.enqueue(1),
        "confirm.dispatch": lambda: confirm.dispatch(1),
        r"confirm.options(...).dispatch": lambda: confirm.options(delay=1).dispatch(1),
        r"confirm.options(...).enqueue": lambda: confirm.options(max_length=9).enqueue(1),
        "queue.enqueue": lambda: queue.enqueue(b"a"),
        "queue.dispatch": lambda: queue.dispatch(b"a"),
        "mesh.enqueue_many": lambda: mesh.enqueue_many([confirm.call(1)]),
        "mesh.dispatch_many": lambda: mesh.dispatch_many([confirm.call(1)]),
        "batch.dispatch": lambda: batch.dispatch(confirm.call(1)),
        "batch.dispatch_many": lambda: batch.dispatch_many([confirm.call(1)]),
    }
    for name, send in sends.items():
        silent(send, rf"^{re.escape(name)}\(\) has sent nothing: .*worqr\.sync\({re.escape(name)}, \.\.\.\)")

    async def connected() -> None:  # the loop of another thread makes no difference
        async with mesh.connect():
            for name, send in sends.items():
                await trio.to_thread.run_sync(silent, send, rf"^{re.escape(name)}\(\) has sent nothing")

    trio.run(connected)
    assert waiting(server, prefix, "shop.confirm") == waiting(server, prefix) == []
    silent(lambda: confirm.enqueue("one"), "Expected `int`")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    silent(lambda: asyncio.run(confirm.enqueue(1)), "inside an `async def` that asyncio.run or trio.run runs")


def test_a_commit_that_forgets_sync_says_so(mesh: worqr.Mesh) -> None:
    """As ``transaction.on_commit`` of Django, which calls what it is given, and looks at nothing that it returns."""

    @mesh.task(name="f")
    def f(n: int) -> None: ...

    def on_commit(call: Callable[[], object]) -> None:
        call()

    silent(lambda: on_commit(partial(f.enqueue, 1)), r"worqr\.sync\(f\.enqueue, \.\.\.\)")
    on_commit(lambda: worqr.sync(f.enqueue, 1))
    assert worqr.sync(f.queue.count) == 1


# Coroutines of users


def test_a_coroutine_of_a_program_waits_by_calls_of_any_mesh(new_mesh: NewMesh) -> None:
    one, two = new_mesh(), new_mesh(app="two")

    async def both(n: int) -> int:
        await one.queue("Q1").enqueue(b"a")
        await two.queue("Q1").enqueue(*[b"b"] * n)
        return await one.queue("Q1").count()

    assert worqr.sync(both, 2) == 3
    assert worqr.sync(partial(both, n=1)) == 5


def test_a_coroutine_that_waits_for_a_loop_is_told_so(mesh: worqr.Mesh) -> None:
    async def trios() -> None:
        await trio.sleep(1)

    async def stubborn() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)

    for wait in (partial(asyncio.sleep, 1), trios):
        with pytest.raises(RuntimeError) as caught:
            worqr.sync(wait)
        assert caught.value.__notes__ == [ONLY_WORQR]
    for bare in (partial(asyncio.sleep, 0), stubborn):
        silent(lambda bare=bare: worqr.sync(bare), "waits for an event loop, and none runs in this thread")

    async def own() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        worqr.sync(own)
    assert not hasattr(caught.value, "__notes__")
    assert worqr.sync(mesh.queue("Q1").count) == 0


# Blocks


def test_a_job_is_watched(mesh: worqr.Mesh) -> None:
    queue = mesh.queue("Q1")
    job = worqr.sync(queue.dispatch, b"a", delay=600)
    with worqr.sync_block(job.watch) as states:
        assert next(states).state == "scheduled"
        worqr.sync(job.cancel)
        assert [each.state for each in states] == ["gone"]
        assert list(states) == []
    late = worqr.sync(queue.dispatch, b"b", delay=600)
    for limit in (0, 0.05):
        with worqr.sync_block(late.watch, limit) as states:
            assert next(states).state == "scheduled"
            with pytest.raises(worqr.ResultTimeout, match=f"had not ended after {limit:g} s"):
                next(states)
    with pytest.raises(worqr.UsageError, match="timeout"):
        worqr.sync_block(late.watch, -1).__enter__()
    worqr.sync(late.cancel)


def test_a_block_may_swallow_an_error_and_sees_it(mesh: worqr.Mesh) -> None:
    seen: list[type[BaseException] | None] = []

    class Block:
        def __init__(self, *, swallows: bool) -> None:
            self.swallows = swallows

        async def __aenter__(self) -> int:
            return await mesh.queue("Q1").count()

        async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
            await mesh.queue("Q1").count()
            seen.append(kind)
            return self.swallows

    block: Any = Block
    with worqr.sync_block(block, swallows=True) as found:
        assert found == 0
        raise KeyError
    with pytest.raises(KeyError), worqr.sync_block(block, swallows=False):
        raise KeyError
    with worqr.sync_block(block, swallows=False):
        pass
    assert seen == [KeyError, KeyError, None]


# What frameworks and mocks see


def test_methods_that_send_are_coroutine_functions_for_all_who_ask(mesh: worqr.Mesh) -> None:
    @mesh.task(name="f")
    def f(n: int) -> None: ...

    batch = mesh.queue("Q1").batch("x")
    methods: list[Any] = [f.enqueue, f.dispatch, f.options(delay=1).dispatch, f.options(wait=0, max_length=1).enqueue]
    methods += [mesh.queue("Q1").enqueue, mesh.queue("Q1").dispatch, mesh.enqueue_many, mesh.dispatch_many]
    methods += [batch.dispatch, batch.dispatch_many]
    is_one = asyncio.iscoroutinefunction if sys.version_info < (3, 12) else inspect.iscoroutinefunction
    for method in methods:
        assert is_one(method), method
        assert "self" not in inspect.signature(method).parameters
    double = mock.create_autospec(f, instance=True)
    assert isinstance(double.enqueue, mock.AsyncMock)
    assert isinstance(mock.create_autospec(mesh.queue("Q1")).dispatch, mock.AsyncMock)

    async def main() -> None:
        await double.enqueue(1)

    asyncio.run(main())
    double.enqueue.assert_awaited_once_with(1)
    with mock.patch.object(f, "enqueue", autospec=True) as patched:
        # the mock of Python 3.12.1 marks it for asyncio alone
        assert isinstance(patched, mock.AsyncMock) or is_one(patched) or asyncio.iscoroutinefunction(patched)
        worqr.sync(f.enqueue, 2)
    patched.assert_awaited_once_with(2)


async def test_they_are_async_handlers_too(mesh: worqr.Mesh) -> None:
    forward = mesh.queue("Q2").enqueue
    async with serving(mesh, "Q1", forward):
        await mesh.queue("Q1").enqueue(b"a", b"b")
        await eventually(mesh.queue("Q2").count, 2)


async def test_they_are_marked_in_a_program_that_imports_asyncio_later(spawn: Spawn) -> None:
    child = spawn(
        """
        import sys
        import worqr
        mesh = worqr.Mesh()
        print("asyncio" in sys.modules)
        import asyncio, inspect
        @mesh.task
        def f() -> None: ...
        is_one = asyncio.iscoroutinefunction if sys.version_info < (3, 12) else inspect.iscoroutinefunction
        print(is_one(f.enqueue), is_one(mesh.queue("q").enqueue), is_one(mesh.dispatch_many))
        """,
        fresh=True,
    )
    assert (await child.line(), await child.line()) == ("False", "True True True")


# Tests of users


def test_a_recording_takes_what_threads_send() -> None:
    mesh = worqr.Mesh("redis://nowhere.invalid")

    @mesh.task(name="f", result_ttl=60)
    def f(n: int) -> int:
        return n

    there = {*threading.enumerate()}
    with testing.recording(mesh) as sent:
        worqr.sync(f.enqueue, 1)
        job = worqr.sync(f.options(id="x", delay=5).dispatch, 2)
        assert worqr.sync(mesh.enqueue_many, (f.call(n) for n in (3, 4))) == 2
        assert worqr.sync(job.status).state == "waiting"
        with pytest.raises(worqr.NoResult):
            worqr.sync(job.result)
        with pytest.raises(worqr.UsageError, match="recording"):
            worqr.sync(mesh.queues)
    assert sent.calls(f) == [f.call(n) for n in (1, 2, 3, 4)]
    assert {*threading.enumerate()} <= there


async def test_plain_handlers_produce_on_a_bench(server: Server) -> None:
    mesh = worqr.Mesh("redis://nowhere.invalid")

    @mesh.task(name="second")
    def second(n: int) -> None: ...

    @mesh.task(name="first")
    def first(n: int) -> None:
        worqr.sync(second.options(delay=3600).dispatch, n)
        worqr.sync(mesh.enqueue_many, [second.call(n + 1)])

    async with testing.bench(mesh, url=server.url) as bench:
        await first.enqueue(1)
        assert (await bench.run_until_empty()).finished == 2
        await bench.advance(3600)
        assert (await bench.run_until_empty()).finished == 1
        assert bench.sent(second) == [second.call(1), second.call(2)]
    gc.collect()
    await in_thread(wait_until, lambda: our_threads() == [])


# Processes

QUIET = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}  # forking with threads around is what these tests are about
FORKS = """
import os, sys, threading, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
queue = mesh.queue("Q1")

def enqueue(name, times=50):
    for i in range(times):
        worqr.sync(queue.enqueue, f"{name}-{i}".encode())

def in_threads(name, count):
    threads = [threading.Thread(target=enqueue, args=(f"{name}-{n}",)) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads

enqueue("before", 1)
busy = in_threads("parent", 4)
for child in range(4):
    if os.fork() == 0:
        enqueue(f"child{child}", 1)
        for thread in in_threads(f"child{child}", 2):
            thread.join()
        if child == 3 and os.fork() == 0:
            enqueue("grandchild", 1)
        sys.exit()  # the whole way out, not os._exit
codes = [os.wait()[1] for _ in range(4)]
for thread in busy:
    thread.join()
enqueue("after", 1)
print(codes, flush=True)
"""


async def test_forked_children_connect_anew(server: Server, prefix: str, spawn: Spawn) -> None:
    child = spawn(FORKS, server.url, prefix, env=QUIET)
    assert await child.line(2 * PATIENCE) == "[0, 0, 0, 0]", child.errors
    assert await child.ended() == 0
    assert child.errors == ""
    wanted = [f"{name}-0" for name in ("before", "after", "grandchild", *[f"child{n}" for n in range(4)])]
    wanted += [f"parent-{n}-{i}" for n in range(4) for i in range(50)]
    wanted += [f"child{c}-{n}-{i}" for c in range(4) for n in range(2) for i in range(50)]
    await in_thread(wait_until, lambda: Counter(waiting(server, prefix)) == Counter(text.encode() for text in wanted))


async def test_a_program_that_ends_leaves_no_socket_open(server: Server, prefix: str, spawn: Spawn) -> None:
    code = "import sys, worqr; worqr.sync(worqr.Mesh(sys.argv[1], prefix=sys.argv[2]).queue('Q1').info)"
    kept = code.replace("worqr.sync(worqr.Mesh", "mesh = worqr.Mesh").replace(").queue", "); worqr.sync(mesh.queue")
    for program in (code, kept):
        child = spawn(program, server.url, prefix, env={"PYTHONDEVMODE": "1"})
        assert await child.ended() == 0
        assert child.errors == ""


FORK_MEANWHILE = """
import os, sys, threading, time, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2], patience=600)
queue = mesh.queue("Q1")
first = threading.Thread(target=worqr.sync, args=(queue.enqueue, b"first"))
first.start()
children = []
while len(children) < (10 if first.is_alive() else 3):  # more of them would keep a slow machine from the first call
    child = os.fork()
    if not child:
        try:
            worqr.sync(queue.enqueue, b"child")
        finally:
            os._exit("redis" not in sys.modules)
    children.append(child)
    first.join(0.1)
first.join()
print({os.waitpid(child, 0)[1] for child in children}, flush=True)
"""


async def test_a_fork_during_the_first_call_leaves_no_child_with_half_of_a_module(
    server: Server, prefix: str, spawn: Spawn
) -> None:
    """The first call imports redis-py, in another thread than the one that forks."""
    child = spawn(FORK_MEANWHILE, server.url, prefix, env=QUIET, fresh=True)
    assert await child.line(2 * PATIENCE) == "{0}", child.errors
    assert await child.ended() == 0
    assert child.errors == ""
    tasks = await in_thread(waiting, server, prefix)
    assert set(tasks) == {b"first", b"child"}


EMBEDDED_FORK = """
import os, sys, worqr

mesh = worqr.Mesh("embedded:")
queue = mesh.queue("Q1")
worqr.sync(queue.enqueue, b"parent")
if os.fork() == 0:
    worqr.sync(queue.enqueue, b"child")
    print("child", worqr.sync(queue.info).waiting, flush=True)
    sys.exit()
os.wait()
worqr.sync(queue.enqueue, b"parent")
print("parent", worqr.sync(queue.info).waiting, flush=True)
print(mesh._client.connections.for_threads._connection.link.settings.address.path, flush=True)
"""


async def test_a_child_leaves_the_embedded_server_of_its_parent_alone(spawn: Spawn) -> None:
    child = spawn(EMBEDDED_FORK, env=QUIET)
    assert await child.line() == "child 1"  # it has started one of its own
    assert await child.line() == "parent 2"
    path = await child.line()
    assert await child.ended() == 0, child.errors
    assert [line[:29] for line in child.errors.splitlines()] == [f"embedded.lost: tasks lost: {n}." for n in (1, 2)]
    await in_thread(wait_until, lambda: not os.path.exists(path))


ENDS = """
import sys, threading, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2], patience=600)
queue = mesh.queue("Q1")
job = worqr.sync(queue.dispatch, b"a", id="x", result_ttl=600)
waits = {"result": lambda: worqr.sync(job.result), "enqueue": lambda: worqr.sync(queue.enqueue, b"b"), "nothing": lambda: None}

def wait():
    try:
        waits[sys.argv[3]]()
    except worqr.Unavailable as error:
        print(error, flush=True)

for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("wait", ["nothing", "result", "enqueue"])
async def test_the_interpreter_ends_soon(
    own_server: Server, new_mesh: NewMesh, prefix: str, spawn: Spawn, wait: str
) -> None:
    child = spawn(ENDS, own_server.url, prefix, wait)
    await child.line_with("ready")
    if wait == "enqueue":
        own_server.pause()
    child.send("end")
    assert await child.ended(PATIENCE) == 0, child.errors
    assert child.errors == ""
    own_server.resume()
    await clear(new_mesh())


LATE = """
import atexit, sys, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
queue = mesh.queue("Q1")
atexit.register(lambda: print(worqr.sync(queue.enqueue, b"last"), flush=True))
worqr.sync(queue.enqueue, b"first")
"""


async def test_what_an_application_does_at_exit_may_produce(server: Server, prefix: str, spawn: Spawn) -> None:
    child = spawn(LATE, server.url, prefix)
    assert await child.line() == "1"
    assert await child.ended() == 0
    assert child.errors == ""
    assert waiting(server, prefix) == [b"first", b"last"]


IN_FINALIZER = """
import sys
from worqr import Mesh, UsageError, sync

mesh = Mesh(sys.argv[1], prefix=sys.argv[2])
queue = mesh.queue("Q1")

class Resource:
    def __del__(self):
        try:
            sync(queue.enqueue, b"last")
        except UsageError as error:
            print(error, flush=True)

sync(queue.enqueue, b"first")
resource = Resource()
resource.itself = resource
"""


async def test_a_finalizer_that_runs_too_late_is_refused(server: Server, prefix: str, spawn: Spawn) -> None:
    child = spawn(IN_FINALIZER, server.url, prefix)
    assert "connects no more" in await child.line()
    assert await child.ended() == 0
    assert waiting(server, prefix) == [b"first"]


INTERRUPTED = """
import sys, threading, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
job = worqr.sync(mesh.queue("Q1").dispatch, b"a", id="x", delay=600, result_ttl=600)
for call in (lambda: worqr.sync(job.result), lambda: worqr.sync(job.result, 600)):
    try:
        print("waits", flush=True)
        call()
    except KeyboardInterrupt:
        print("interrupted", worqr.sync(job.status).state, flush=True)
print(worqr.sync(job.cancel).waiting, flush=True)
"""


async def test_an_interrupt_ends_a_wait(server: Server, prefix: str, spawn: Spawn) -> None:
    child = spawn(INTERRUPTED, server.url, prefix)
    for _ in range(2):
        await child.line_with("waits")
        await trio.sleep(0.2)  # or it has not begun to wait, which must do as well
        child.signal(signal.SIGINT)
        assert await child.line() == "interrupted scheduled"
    assert await child.line() == "1"
    assert await child.ended() == 0, child.errors


def test_the_mailbox_of_threads_is_meant(mesh: worqr.Mesh) -> None:
    worqr.sync(mesh.queue("Q1").enqueue, b"a")
    connection = mesh._client.connections.for_threads.get()
    assert isinstance(connection.link.driver, ThreadDriver)


FORGOTTEN = """
import asyncio, sys, worqr

mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
kept = []

async def forget() -> None:
    kept.append(mesh.connect())
    await kept[-1].__aenter__()
    await mesh.queue("Q1").info()

for _ in range(2):
    asyncio.run(forget())
"""


async def test_asyncio_closes_a_block_that_a_program_forgot_without_a_word(
    server: Server, prefix: str, spawn: Spawn
) -> None:
    child = spawn(FORGOTTEN, server.url, prefix)
    assert await child.ended() == 0
    assert child.errors == ""


def test_a_thread_that_finds_the_connection_ended_ends_no_newer_one() -> None:
    made: list[Any] = []
    looks: list[None] = []

    class Ended(SimpleNamespace):
        @property
        def has_ended(self) -> bool:
            """While one thread sees this, another one connects again."""
            looks.append(None)
            if len(looks) == 1:
                threads.get()
            return True

    def make() -> Any:
        link = SimpleNamespace(has_ended=False) if made else Ended()
        link.closed = 0
        link.start = lambda: None
        link.close = lambda: setattr(link, "closed", link.closed + 1)
        made.append(SimpleNamespace(link=link, server=None, was_ready=True))
        return made[-1]

    threads = ThreadConnection(make)
    assert [threads.get(), threads.get(), threads.get()] == [made[0], made[1], made[1]]
    assert [connection.link.closed for connection in made] == [1, 0]
