"""Connecting and joining: one link per loop, counted; whatever is wrong is told at once, by type, with the remedy."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Runs, at_most, eventually, serving, until
from tests.support.children import Child
from tests.support.leaks import dump
from tests.support.patience import have_patience
from tests.support.servers import Server, free_port
from worqr.link import node

SECRET = "pa55:w0rd"


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("worqr")]


def connections(server: Server, app: str) -> list[str]:
    return [c["name"] for c in server.look.client_list() if c["name"].startswith(f"worqr:{app}:")]


# Making


async def test_making_a_mesh_does_nothing() -> None:
    before = our_threads()
    mesh = worqr.Mesh("redis://nowhere.invalid:1/0")
    assert our_threads() == before
    assert repr(mesh) == "<Mesh 'worqr'>"
    assert mesh.queue("Q1").name == "Q1"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefix": ""}, "prefix must have 1 to 200 bytes"),
        ({"prefix": "a{b}"}, "prefix 'a{b}' contains '{'"),
        ({"prefix": 7}, "prefix must be a str, not int"),
        ({"app": 7}, "app must be a str, not int"),
        ({"patience": 0}, "patience must be above 0"),
        ({"patience": -1}, "patience must be above 0"),
        ({"patience": "30"}, "patience must be seconds .* not '30'"),
        ({"patience": 3600}, "patience must be at most 1800 s, not 3600"),
        ({"keepalive": 0.5}, "keepalive must be at least 1 s .* not 0.5"),
        ({"keepalive": 0}, "keepalive must be above 0"),
        ({"block_limit": 0}, "block_limit must be above 0"),
        ({"max_payload": 0}, "max_payload must be a whole number of at least 1, not 0"),
        ({"max_payload": 1.5}, "max_payload must be a whole number"),
        ({"url": 7}, "url must be a str, not int"),
        ({"url": SECRET.encode()}, "url must be a str, not bytes$"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        worqr.Mesh(**settings)


@pytest.mark.parametrize(
    "name",
    ["", "a{b", "a}b", "x" * 201, "\u20ac" * 67, "a\nb", "\x00", "\x7f", "\x85", "\udcff", 7, b"Q1", None, ["Q1"]],
)
def test_bad_queue_names_are_refused(name: Any) -> None:
    with pytest.raises(worqr.UsageError, match="queue name"):
        worqr.Mesh().queue(name)


@pytest.mark.parametrize("name", ["x", "x" * 200, "\u20ac" * 66, "a:b", "*", " ", "error"])
def test_good_queue_names(name: str) -> None:
    assert worqr.Mesh().queue(name).name == name


# Connecting


async def test_connect_ends_with_its_block(new_mesh: NewMesh, server: Server) -> None:
    before = our_threads()
    mesh = new_mesh(app="ends")
    async with mesh.connect():
        assert await mesh.queue("Q1").count() == 0
        assert connections(server, "ends") == ["worqr:ends:data"]
    assert our_threads() == before
    await until(lambda: connections(server, "ends") == [])
    with pytest.raises(worqr.UsageError, match=r"not connected here.*mesh\.connect\(\).*mesh\.join\(\)"):
        await mesh.queue("Q1").count()
    async with mesh.connect():
        assert await mesh.queue("Q1").count() == 0


async def test_nested_and_parallel_blocks_share_one_link(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="shared")
    links = set()

    async def block(seconds: float) -> None:
        async with mesh.connect():
            links.add(mesh._client.link)
            await trio.sleep(seconds)
            await mesh.queue("Q1").count()
            async with mesh.connect(), mesh.join():
                links.add(mesh._client.link)
            await mesh.queue("Q1").count()

    async with trio.open_nursery() as nursery:
        for n in range(5):
            nursery.start_soon(block, n / 100)
    assert len(links) == 1
    await until(lambda: connections(server, "shared") == [])
    async with mesh.connect():
        assert mesh._client.link not in links


async def test_the_first_who_leaves_does_not_take_the_link_away(mesh: worqr.Mesh) -> None:
    outer, inner = mesh.connect(), mesh.connect()
    await outer.__aenter__()
    await inner.__aenter__()
    await outer.__aexit__(None, None, None)
    assert await mesh.queue("Q1").count() == 0
    await inner.__aexit__(None, None, None)
    with pytest.raises(worqr.UsageError, match="not connected"):
        await mesh.queue("Q1").count()


async def test_a_join_connects_and_shares_the_link(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="joins")
    async with mesh.join() as peer:
        wanted = {"worqr:joins:beat", "worqr:joins:data"}  # a leader listens to a channel as well
        await until(lambda: set(connections(server, "joins")) >= wanted)
        async with mesh.join() as second:
            assert peer.id != second.id
            assert len([name for name in connections(server, "joins") if name.endswith("data")]) == 1
            assert {worker.id for worker in await mesh.workers()} == {peer.id, second.id}
        assert [worker.id for worker in await mesh.workers()] == [peer.id]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        *(({"app": "shop", "deploy": deploy}, "deploy must be") for deploy in (0, -1, True, 1.5, "7", 10**15 + 1)),
        *(({"app": app, "deploy": 7}, "needs app=") for app in ("", "a\nb")),
    ],
)
def test_a_deploy_is_a_number_of_an_application(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(worqr.UsageError, match=remedy):
        worqr.Mesh(**options)


async def test_a_mesh_in_two_loops_has_two_links(mesh: worqr.Mesh) -> None:
    links = []

    async def use() -> None:
        async with mesh.connect():
            links.append(mesh._client.link)
            await mesh.queue("Q1").enqueue(b"a")

    async with mesh.connect():
        await trio.to_thread.run_sync(trio.run, use)
        assert mesh._client.link is not links[0]
        assert await mesh.queue("Q1").count() == 1


def test_connect_needs_a_loop() -> None:
    async def connect() -> None:
        async with worqr.Mesh("unix:///nowhere").connect():
            pytest.fail("no loop runs")

    with pytest.raises(worqr.UsageError, match=r"running loop.*trio\.run.*asyncio\.run.*worqr\.sync"):
        drive(connect())


def test_join_needs_a_loop() -> None:
    async def join() -> None:
        async with worqr.Mesh("unix:///nowhere").join():
            pytest.fail("no loop runs")

    with pytest.raises(worqr.UsageError, match=r"running loop.*trio\.run.*asyncio\.run.*mesh\.join_in_thread\(\)"):
        drive(join())


def drive(coroutine: Any) -> None:
    coroutine.send(None)


async def test_an_error_of_the_block_comes_out_as_it_is(mesh: worqr.Mesh) -> None:
    error = KeyError("of the application")
    with pytest.raises(KeyError) as caught:
        async with mesh.connect(), mesh.connect():
            raise error
    assert caught.value is error


async def test_the_url_comes_from_the_environment(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = worqr.Mesh(prefix=prefix)
    monkeypatch.setenv("WORQR_URL", server.url)
    monkeypatch.setenv("REDIS_URL", "unix:///nowhere")
    async with mesh.connect():
        await mesh.queue("Q1").count()
    monkeypatch.setenv("WORQR_URL", "unix:///nowhere")
    async with worqr.Mesh(server.url, prefix=prefix).connect():
        pass
    monkeypatch.delenv("WORQR_URL")
    monkeypatch.setenv("REDIS_URL", server.url)
    async with mesh.connect():
        await mesh.queue("Q1").count()


# What can be wrong with a server


async def refused(mesh: worqr.Mesh, error: type[Exception], words: str, within: float = 15) -> Exception:
    with pytest.raises(error, match=words) as caught:
        async with at_most(within), mesh.connect():
            pytest.fail("it must not connect")
    with pytest.raises(error, match=words):
        async with at_most(within), mesh.join():
            pytest.fail("it must not join")
    assert not [thread for thread in our_threads() if thread != "worqr-dial"]
    assert "pa55" not in f"{caught.value!r} {caught.value.__cause__!r}"
    return caught.value


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"http://user:{SECRET}@localhost/", r"http://\*\*\*@.*must begin with redis://"),
        (f"redis://user:{SECRET}@localhost:99999/", "port"),
        (f"redis://user:{SECRET}@localhost/abc", "'abc' should be a number"),
        (f"redis://user:{SECRET}#@localhost/", "as %23"),
        ("unix://", "names no socket"),
        ("localhost:6379", "must begin with redis://"),
        (
            "redis://localhost/?socket_timeout=3",
            "unknown URL option 'socket_timeout' in .*; redis:// accepts: db. Options of redis-py's client do not belong into",
        ),
        (
            "redis://localhost/?ssl_ca_certs=ca.pem",
            "unknown URL option 'ssl_ca_certs' in .*: it is for TLS, so write rediss:// instead of redis://",
        ),
        (
            "redis+cluster://localhost/?ssl_ca_certs=ca.pem",
            "so write rediss\\+cluster:// instead of redis\\+cluster://",
        ),
        ("unix:///tmp/x?ssl_ca_certs=ca.pem", "unknown URL option 'ssl_ca_certs' in .*: a unix socket has no TLS"),
        (
            "redis://localhost/?sentinel_username=a",
            "it is for Sentinels, so write redis\\+sentinel:// instead of redis://",
        ),
        ("embedded", "must begin with redis://.* embedded:, "),
    ],
)
async def test_a_bad_url_is_told_without_its_password(url: str, words: str) -> None:
    await refused(worqr.Mesh(url), worqr.UsageError, words)


async def test_a_wrong_port_is_unavailable_within_patience(caplog: pytest.LogCaptureFixture) -> None:
    port, start = free_port(), time.monotonic()
    error = await refused(worqr.Mesh(f"redis://:{SECRET}@127.0.0.1:{port}", patience=0.3), worqr.Unavailable, str(port))
    assert 0.6 <= time.monotonic() - start < 20
    assert isinstance(error, worqr.Unavailable)
    assert error.sent is False
    assert "pa55" not in caplog.text


async def test_a_server_that_never_answers_is_unavailable_within_patience() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        await refused(worqr.Mesh(f"redis://127.0.0.1:{port}", patience=0.3), worqr.Unavailable, str(port))


@pytest.fixture
def guarded_server(own_server: Server) -> Iterator[Server]:
    client = own_server.client()
    client.config_set("requirepass", SECRET)
    yield own_server
    own_server.client(password=SECRET).config_set("requirepass", "")


async def test_a_wrong_password_is_refused_at_once(guarded_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    port = guarded_server.port
    for url in (
        f"redis://:pa55wrong@127.0.0.1:{port}",
        f"redis://127.0.0.1:{port}",
        f"redis://nobody:pa55@127.0.0.1:{port}",
    ):
        await refused(worqr.Mesh(url, patience=20), worqr.RefusedByServer, "user and password")
    assert "pa55" not in caplog.text
    async with worqr.Mesh(f"redis://:{SECRET.replace(':', '%3A')}@127.0.0.1:{port}").connect():
        pass


async def test_a_producer_writes_nothing_into_a_mesh_of_another_wire_version(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    """However it comes; and once it is connected it pays no more for it."""
    client = server.client()
    client.set(f"{{{prefix}}}:version", "2")
    before = dump(client, prefix)

    def blocking() -> None:
        worqr.sync(mesh.queue("Q1").enqueue, b"a")

    async def connected() -> None:
        async with mesh.connect():
            await mesh.queue("Q1").enqueue(b"a")

    for produce in (connected, partial(trio.to_thread.run_sync, blocking)):
        with pytest.raises(
            worqr.WrongVersion, match=rf"'{prefix}' on this server speaks wire version 2, this worqr speaks 1"
        ):
            await produce()
    with pytest.raises(worqr.WrongVersion):
        await trio.to_thread.run_sync(asyncio.run, connected())
    assert dump(client, prefix) == before
    client.delete(f"{{{prefix}}}:version")
    await trio.to_thread.run_sync(blocking)  # on an empty mesh, and the same connection
    await connected()
    assert not client.exists(f"{{{prefix}}}:version"), "workers say which it is"
    await trio.to_thread.run_sync(mesh.close)


async def test_a_mesh_of_another_wire_version_cannot_be_joined(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    server.client().set(f"{{{prefix}}}:version", "2")
    with pytest.raises(worqr.WrongVersion, match=r"2.*1"):
        async with at_most(), mesh.join():
            pytest.fail("it must not join")
    assert server.client().get(f"{{{prefix}}}:version") == b"2"
    server.client().delete(f"{{{prefix}}}:version")
    async with mesh.join():
        assert server.client().get(f"{{{prefix}}}:version") == b"1"


async def test_enqueueing_while_the_server_is_away(
    own_server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "IDLE_CHECK", 0.0)  # a server may stop in less: what is sent then may have taken effect
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        have_patience(mesh, 2)
        own_server.stop()
        start = time.monotonic()
        with pytest.raises(worqr.Unavailable, match=r"enqueue waited 2\.0 s and was withdrawn") as caught:
            await q.enqueue(b"b")
            await q.enqueue(b"b")
        assert caught.value.sent is False
        assert 1.9 < time.monotonic() - start < 20
        own_server.start()
        await eventually(partial(count_or_not, q), 1)
        patient = worqr.Mesh(own_server.url, prefix=prefix)
        async with patient.connect():
            q = patient.queue("Q1")
            assert await q.enqueue(b"c") == 1
            assert (await q.tasks()) == [b"c", b"a"]


async def count_or_not(q: worqr.Queue) -> int | None:
    try:
        return await q.count()
    except worqr.Unavailable:  # it has not much patience
        return None


async def test_a_call_waits_for_a_server_that_comes_back_within_patience(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=20)
    async with mesh.connect(), trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        own_server.stop()
        nursery.start_soon(q.enqueue, b"b")
        await trio.sleep(0.3)
        own_server.start()
        await eventually(q.tasks, [b"b", b"a"])


async def test_connecting_waits_for_a_server_that_comes_within_patience(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=20)
    own_server.stop()
    async with trio.open_nursery() as nursery:
        connected = trio.Event()

        async def connect() -> None:
            async with mesh.connect():
                connected.set()

        nursery.start_soon(connect)
        nursery.start_soon(connect)
        await trio.sleep(0.2)
        assert not connected.is_set()
        own_server.start()
        async with at_most():
            await connected.wait()


async def test_a_link_that_was_forked_says_so(server: Server, prefix: str) -> None:
    child = Child(
        """
        import os, sys, trio, worqr
        async def main():
            mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
            async with mesh.connect():
                await mesh.queue("Q1").count()
                if os.fork() == 0:
                    try:
                        await mesh.queue("Q1").count()
                    except worqr.UsageError as error:
                        print(error, flush=True)
                    os._exit(0)
                os.wait()
                print(await mesh.queue("Q1").count())
        trio.run(main)
        """,
        server.url,
        prefix,
    )
    try:
        assert "before a fork" in await child.line()
        assert await child.line() == "0"
        assert await child.ended() == 0
    finally:
        child.close()


# The embedded server


async def test_embedded_blocks_share_one_server_and_stop_it(
    no_bench: None,
) -> None:
    one, two = worqr.Mesh("embedded:"), worqr.Mesh("embedded:")
    pids: set[int] = set()

    async def use(mesh: worqr.Mesh, task: bytes) -> None:
        async with mesh.connect():
            await mesh.queue("Q1").enqueue(task)
            link = mesh._client.link
            assert link.settings.url.startswith("unix://")
            pids.add(hash(link.settings.url))
            async with mesh.connect():
                assert mesh._client.link is link
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        for n in range(3):
            nursery.start_soon(use, one, b"%d" % n)
            nursery.start_soon(use, two, b"%d" % n)
    assert len(pids) == 1
    async with two.connect():
        assert await two.queue("Q1").count() == 0  # a new server
    with trio.move_on_after(0.001):
        async with one.connect():
            await trio.sleep_forever()
    runs = Runs()
    async with one.connect(), serving(one, "Q1", runs):
        await one.queue("Q1").enqueue(b"a")
        await runs.wait(1)


# Looking


async def test_workers_are_told_as_people_want_to_know_them(new_mesh: NewMesh) -> None:
    mesh, held = new_mesh(app="my app"), trio.Event()

    async def handler(task: bytes) -> None:
        await held.wait()

    async with mesh.connect():
        assert await mesh.workers() == []
        async with serving(mesh, "Q1", handler, room=5) as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q2", handler))
            await mesh.queue("Q1").enqueue(b"a", b"b")
            await eventually(lambda: running(mesh), 2)
            (worker,) = await mesh.workers()
            assert (worker.id, worker.host, worker.pid) == (peer.id, socket.gethostname(), os.getpid())
            assert worker.id.startswith("my-app:")
            assert (worker.app, worker.version, worker.queues) == ("my app", worqr.__version__, {"Q1", "Q2"})
            assert (worker.running, worker.room) == (2, 3)
            assert 0 <= worker.beat_age <= mesh.keepalive
            held.set()
            nursery.cancel_scope.cancel()
        assert await mesh.workers() == []


async def running(mesh: worqr.Mesh) -> int:
    workers = await mesh.workers()
    return workers[0].running if workers else 0


async def test_two_joins_of_one_process_have_ids_of_their_own(mesh: worqr.Mesh) -> None:
    seen: set[str] = set()
    for _ in range(3):
        async with mesh.join() as peer:
            seen.add(peer.id)
    assert len(seen) == 3


async def test_queues_are_listed_while_they_hold_something(mesh: worqr.Mesh, other: worqr.Mesh, prefix: str) -> None:
    async with mesh.connect(), other.connect():
        assert await mesh.queues() == []
        for name in ("b", "a", "gone"):
            await mesh.queue(name).enqueue(b"x")
        await mesh.queue("gone").delete()
        assert [(info.name, info.waiting) for info in await other.queues()] == [("a", 1), ("b", 1)]
        async with serving(mesh, "served", Runs()):
            assert [info.name for info in await other.queues()] == ["a", "b", "served"]
        for name in ("a", "b"):
            await mesh.queue(name).delete()
        assert await mesh.queues() == []


async def test_health_tells_whether_a_peer_is_ready(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.join(concurrency=7) as peer, trio.open_nursery() as nursery:
        health = peer.health()
        assert health == worqr.Health(True, True, "", 0, 7, health.loop_lag)
        await nursery.start(partial(peer.serve, "Q1", Runs()))
        assert peer.health().ready
        own_server.pause()
        await until(lambda: not peer.health().ready)
        assert peer.health().alive  # a server that is away is no reason to restart us
        assert "acknowledged a beat" in peer.health().why
        own_server.resume()
        await until(lambda: peer.health().ready)
        nursery.cancel_scope.cancel()


async def test_two_meshes_that_differ_by_prefix_differ_in_everything(
    new_mesh: NewMesh, prefix: str, server: Server
) -> None:
    mesh, stranger = new_mesh(), new_mesh(prefix=f"{prefix}:")
    async with mesh.connect(), stranger.connect():
        await mesh.queue("Q1").enqueue(b"a")
        assert await stranger.queue("Q1").count() == 0
        assert await stranger.queues() == []
        await mesh.queue("Q1").delete()


def test_logging_is_left_to_the_application() -> None:
    code = "import logging, worqr; worqr.Mesh(); log = logging.getLogger('worqr'); print(log.handlers, log.level)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", str(logging.NOTSET)]
