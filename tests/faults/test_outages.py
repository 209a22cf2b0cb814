"""The server goes away, forgets, fills up, or drops connections, while a mesh is at work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import redis
import trio
import trio.testing

import worqr
from tests.link.scripts import notice
from tests.peer.tools import until
from tests.support.patience import PATIENCE, have_patience
from tests.support.servers import Server


class Load:
    """Producers and two peers at work; knows what was acknowledged, and what ran."""

    def __init__(self, server: Server, prefix: str, *, keepalive: float = PATIENCE) -> None:
        self.meshes = [worqr.Mesh(server.url, prefix=prefix, keepalive=keepalive) for _ in range(3)]
        self.acknowledged: list[bytes] = []
        self.unknown: list[bytes] = []
        self.runs: Counter[bytes] = Counter()
        self.cancelled: list[str | None] = []
        self.ids: list[str] = []
        self.peers: list[worqr.Peer] = []
        self._stop = False
        self._producers = trio.Event()

    async def handle(self, task: bytes) -> None:
        try:
            await trio.sleep(0.002)
        except trio.Cancelled:
            self.cancelled.append(worqr.current().cancel_reason)
            raise
        self.runs[task] += 1

    async def produce(self, name: bytes, pace: float) -> None:
        n = 0
        while not self._stop:
            n += 1
            task = b"%s-%d" % (name, n)
            try:
                await self.meshes[0].queue("Q1").enqueue(task)
            except worqr.Unavailable as error:
                assert error.sent is not True
                self.unknown.append(task)
            except worqr.QueueFull:
                await trio.sleep(0.05)
            else:
                self.acknowledged.append(task)
            await trio.sleep(pace)

    @asynccontextmanager
    async def running(self, *, pace: float = 0.002) -> AsyncGenerator[None]:
        """Under load for the length of the block; then everything acknowledged must run."""
        async with self.meshes[0].connect(), self.meshes[1].join() as one, self.meshes[2].join() as two:
            self.peers = [one, two]
            self.ids = [one.id, two.id]
            async with trio.open_nursery() as serving:
                for peer in self.peers:
                    await serving.start(partial(peer.serve, "Q1", self.handle))
                async with trio.open_nursery() as producing:
                    for name in (b"a", b"b", b"c"):
                        producing.start_soon(self.produce, name, pace)
                    yield
                    self._stop = True
                await self.wait_drained()
                serving.cancel_scope.cancel()

    async def wait_ran(self, n: int) -> None:
        """Until `n` more tasks have run."""
        target = self.runs.total() + n
        await until(lambda: self.runs.total() >= target)

    async def wait_drained(self, within: float = PATIENCE) -> None:
        with trio.move_on_after(within):
            while not all(self.runs[task] for task in self.acknowledged):
                await trio.sleep(0.02)
            return
        lost = [task for task in self.acknowledged if not self.runs[task]]
        raise AssertionError(
            f"{len(lost)} acknowledged tasks never ran, {lost[:5]}...; {await self.meshes[0].queue('Q1').info()}"
        )

    def assert_each_once(self) -> None:
        twice = {task: n for task, n in self.runs.items() if n > 1}
        assert not twice, f"ran more than once: {twice}"


async def restart(load: Load, server: Server) -> None:
    await load.wait_ran(100)
    server.restart()
    await load.wait_ran(100)


async def kill_server(load: Load, server: Server) -> None:
    await load.wait_ran(100)
    server.kill()
    server.start()
    await load.wait_ran(100)


async def flush_scripts(load: Load, server: Server) -> None:
    for _ in range(20):
        await load.wait_ran(10)
        server.look.script_flush()


async def kill_connections(load: Load, server: Server) -> None:
    for _ in range(10):
        await load.wait_ran(20)
        for kind in ("normal", "pubsub"):
            server.look.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


@pytest.mark.parametrize("harm", [restart, kill_server, flush_scripts, kill_connections])
async def test_what_is_shorter_than_the_keepalive_disturbs_nothing(
    harm: Callable[[Load, Server], Awaitable[None]], own_server: Server, prefix: str
) -> None:
    """A server that is killed has stored what it acknowledged."""
    load = Load(own_server, prefix)
    async with load.running():
        await harm(load, own_server)
        assert [peer.id for peer in load.peers] == load.ids, "nobody was swept"
    load.assert_each_once()
    assert "lost" not in load.cancelled


async def test_a_restart_longer_than_the_keepalive_revives_everybody(
    own_server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load = Load(own_server, prefix, keepalive=1)
    async with load.running():
        await load.wait_ran(100)
        own_server.stop()
        await trio.sleep(2.5)  # the length of the outage is what is tested
        own_server.start()
        await load.wait_ran(100)
        assert [peer.id for peer in load.peers] == load.ids, "their keys had lapsed, but nobody swept them"
    load.assert_each_once()
    assert "lost" not in load.cancelled
    gone = [r.getMessage() for r in caplog.records if r.getMessage().startswith("link.") and r.levelno > logging.INFO]
    assert len(gone) <= 2 * len(load.meshes), f"one line per link when the server goes, or two: {gone}"


async def test_a_server_that_comes_back_empty_gets_a_new_mesh(own_server: Server, prefix: str) -> None:
    load = Load(own_server, prefix, keepalive=1)
    async with load.running():
        await load.wait_ran(50)
        own_server.stop()
        await until(lambda: load.meshes[0]._client.link._client.connector.state.name != "READY")
        await trio.testing.wait_all_tasks_blocked(0.05)  # what the server had still acknowledged has arrived
        before = set(load.acknowledged)
        own_server.wipe()
        own_server.start()
        await until(lambda: not {peer.id for peer in load.peers} & set(load.ids))  # both join again under fresh ids
        await load.wait_ran(50)
        load.acknowledged = [task for task in load.acknowledged if task not in before]  # what the server lost is lost


async def test_a_full_server_refuses_new_tasks_and_lets_the_others_end(own_server: Server, prefix: str) -> None:
    client = own_server.client()
    mesh = worqr.Mesh(own_server.url, prefix=prefix, keepalive=3)
    done: list[bytes] = []
    begun, go_on = trio.Event(), trio.Event()

    async def handler(task: bytes) -> None:
        begun.set()
        await go_on.wait()
        done.append(task)

    async with mesh.join(concurrency=5) as peer, trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % n for n in range(20)])
        await nursery.start(partial(peer.serve, "Q1", handler))
        await begun.wait()
        client.config_set("maxmemory", 1)
        with pytest.raises(worqr.QueueFull, match="out of memory"):
            await q.enqueue(b"one too many")
        worker = peer.id
        await trio.sleep(3.5)  # longer than the keepalive: beats go on
        go_on.set()
        await until(lambda: len(done) == 20)
        assert peer.id == worker
        assert sorted(done) == sorted(b"%d" % n for n in range(20))
        client.config_set("maxmemory", 0)
        await q.enqueue(b"again")
        await until(lambda: b"again" in done)
        nursery.cancel_scope.cancel()
    assert len(done) == 21


async def test_enqueueing_while_the_server_is_away_says_so_in_time(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        have_patience(mesh, 2)
        own_server.stop()
        await notice(mesh._client.link)  # else it could be written to a connection that nobody reads any more
        with trio.fail_after(PATIENCE), pytest.raises(worqr.Unavailable) as caught:
            await mesh.queue("Q1").enqueue(b"T1")
        assert caught.value.sent is False
        own_server.start()
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    await mesh.queue("Q1").enqueue(b"T2")
                except worqr.Unavailable:
                    continue
                break
        assert await mesh.queue("Q1").tasks() == [b"T2"], "what was withdrawn never arrives"


async def test_a_key_of_a_foreign_type_stops_its_queue_and_no_other(
    server: Server, prefix: str, expects_left: Callable[..., None]
) -> None:
    client: redis.Redis = server.client()
    mesh = worqr.Mesh(server.url, prefix=prefix)
    ran = trio.Event()

    async def handler(_task: bytes) -> None:
        ran.set()

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        client.set(f"{prefix}:{{Q1}}", "not a list")
        await nursery.start(partial(peer.serve, "Q1", handler))
        await nursery.start(partial(peer.serve, "Q2", handler))
        with pytest.raises(worqr.RefusedByServer, match="WRONGTYPE|wrong kind"):
            await mesh.queue("Q1").enqueue(b"T1")
        await mesh.queue("Q2").enqueue(b"T2")
        with trio.fail_after(PATIENCE):
            await ran.wait()
        client.delete(f"{prefix}:{{Q1}}")
        ran = trio.Event()
        await mesh.queue("Q1").enqueue(b"T1")
        with trio.fail_after(PATIENCE):
            await ran.wait()
        nursery.cancel_scope.cancel()
