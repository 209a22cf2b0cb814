"""The life of a link: threads, the end, a fork, limits of the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.link.conftest import LinkTo
from tests.link.scripts import Outcomes, echo, until
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.errors import Unavailable, UsageError
from worqr.link import Link, LinkSettings, TrioDriver

PROMPT = 3.0
"""Seconds, of which a slow machine may need some; whoever waits for a silent server needs 5."""


async def test_nothing_happens_before_the_start(server: Server) -> None:
    before = threading.active_count()
    link = Link(LinkSettings(server.url), TrioDriver())
    assert threading.active_count() == before
    assert link.connections == 0
    with pytest.raises(UsageError, match="not started"):
        await link.call(echo("a"))
    link.close()
    with pytest.raises(Unavailable, match="closed"):
        link.start()


async def test_starting_twice_is_starting_once(link: Link, server: Server) -> None:
    link.start()
    assert await link.call(echo("a"), patience=1e15) == "a"
    with server.client() as client:
        assert [c["name"] for c in client.client_list()].count("worqr:test:data") == 1


async def test_endless_patience_is_no_overflow(own_link: Link, own_server: Server) -> None:
    own_server.stop()
    outcomes = Outcomes()
    own_link.post(echo("a"), outcomes, patience=1e15)
    await until(lambda: own_link._client.connector.state.name != "READY")
    own_server.start()
    await outcomes.wait(1)
    assert outcomes.all == [("a", None)]


async def test_stopped_hearts_are_forgotten(link: Link) -> None:
    for _ in range(5):
        heartbeat = link.heartbeat(make=lambda *_: echo("a"), replied=str, every=1, block_limit=60, describe=str)
        heartbeat.start()
        heartbeat.stop()
    assert len(link._heartbeats) == 1
    link.close()
    with pytest.raises(Unavailable, match="closed"):
        link.heartbeat(make=lambda *_: echo("a"), replied=str, every=1, block_limit=60, describe=str)


async def test_connections_are_named_after_the_application(link: Link, server: Server) -> None:
    await link.subscriptions.open(["a"], lambda *_: None, lambda: None).wait_confirmed()
    heartbeat = link.heartbeat(
        make=lambda n, turning: echo("a"), replied=lambda _: None, every=1, block_limit=60, describe=str
    )
    heartbeat.start()
    with server.client() as client:
        names = {"worqr:test:data", "worqr:test:subscribe", "worqr:test:beat"}
        await until(lambda: names <= {connection["name"] for connection in client.client_list()})


async def test_a_database_of_its_own(link_to: LinkTo, server: Server, prefix: str) -> None:
    from tests.link.scripts import log

    link = await link_to(f"{server.url}?db=9")
    await link.call(log(prefix, "a"))
    with server.client(db=9) as client:
        assert client.llen(f"{prefix}:{{Q}}") == 1
        client.delete(f"{prefix}:{{Q}}")


async def test_the_end_is_prompt_and_told_to_all_who_wait(proxied: Link, proxy: FaultProxy) -> None:
    await proxied.subscriptions.open(["a"], lambda *_: None, lambda: None).wait_confirmed()
    heartbeat = proxied.heartbeat(
        make=lambda n, turning: echo("a"), replied=lambda _: None, every=1, block_limit=60, describe=str
    )
    heartbeat.start()
    proxy.blackhole()
    fates: list[bool | None] = []

    async def ask() -> None:
        with pytest.raises(Unavailable, match="closed") as caught:
            await proxied.call(echo("a"))
        fates.append(caught.value.sent)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: proxied._client.requests.in_flight)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        began = time.monotonic()
        proxied.close()
        assert time.monotonic() - began < PROMPT
    assert sorted(fates, key=str) == [False, None]
    ours = [t.name for t in threading.enumerate() if t.name.startswith("worqr-")]
    assert not ours
    began = time.monotonic()
    proxied.close()
    assert time.monotonic() - began < PROMPT


async def test_after_the_end_there_is_an_error_and_no_wait(link: Link) -> None:
    link.close()
    with trio.fail_after(PATIENCE):
        with pytest.raises(Unavailable, match="closed"):
            await link.call(echo("a"))
        with pytest.raises(Unavailable, match="closed"):
            await link.wait_ready()
        with pytest.raises(Unavailable, match="closed"):
            link.start()
        outcomes = Outcomes()
        link.post(echo("a"), outcomes)
        await outcomes.wait(1)
    assert isinstance(outcomes.all[0][1], Unavailable)


async def test_calls_that_race_the_end_do_not_hang(link_to: LinkTo, server: Server) -> None:
    for _ in range(20):
        link = await link_to(server.url)
        ended = 0

        async def ask(link: Link = link) -> None:
            nonlocal ended
            try:
                while True:
                    await link.call(echo("a"))
            except Unavailable:
                ended += 1

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(ask)
                await trio.sleep(0.005)
                link.close()
        assert ended == 10


async def test_no_thread_to_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(LinkSettings("redis+cluster://127.0.0.1:1"), TrioDriver())

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unavailable, match=r"can't start new thread.*limit"):
            link.start()
    link.close()


@pytest.mark.parametrize(
    ("url", "name"), [("redis+cluster://127.0.0.1:1", "topology"), ("redis+sentinel://127.0.0.1:1/s", "sentinel")]
)
async def test_an_interrupt_while_a_thread_starts_leaves_none(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str
) -> None:
    link, real = Link(LinkSettings(url), TrioDriver()), threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        real(self)
        if self.name == f"worqr-{name}":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.start()
    await until(lambda: f"worqr-{name}" not in [each.name for each in threading.enumerate()], what="threads that end")


async def test_no_thread_to_dial_in_is_no_reason_not_to_dial(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "worqr-dial":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    wire = link._client.session.transport.wire
    assert wire is not None
    wire.interrupt()
    assert await link.call(echo("a")) == "a"
    assert link.connections == 2


CHILD = """
import os, sys, trio
from tests.link.scripts import echo, tries_in_a_child
from worqr.link import Link, LinkSettings, TrioDriver

async def main():
    link = Link(LinkSettings(sys.argv[1]), TrioDriver())
    link.start()
    await link.wait_ready()
    subscription = link.subscriptions.open(["a"], lambda *_: None, lambda: None)
    await subscription.wait_confirmed()
    pid = os.fork()
    if pid == 0:
        said = tries_in_a_child(link, "b")
        link.close()
        print("child", *said, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("parent", await link.call(echo("still here")), link.connections, flush=True)
    link.close()

trio.run(main)
"""


async def test_a_forked_child_refuses_and_the_parent_goes_on(server: Server, spawn: Callable[..., Child]) -> None:
    child = spawn(CHILD, server.url)
    assert await child.line() == "child fork fork fork"
    assert await child.line() == "parent still here 1"
    assert await child.ended() == 0


FULL = """
import resource, socket, sys, trio
from tests.link.scripts import echo
from worqr.errors import Unavailable
from worqr.link import Link, LinkSettings, TrioDriver

async def main():
    old = Link(LinkSettings(sys.argv[1], patience=60), TrioDriver())
    new = Link(LinkSettings(sys.argv[1], patience=1.5), TrioDriver())
    old.start()
    await old.wait_ready()
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    while True:
        try:
            taken.append(socket.socket())
        except OSError:
            break
    print(await old.call(echo("goes on")), flush=True)
    new.start()
    while "ulimit" not in new._client.outage.cause:
        await trio.sleep(0.01)
    try:
        await new.wait_ready()
    except Unavailable as error:
        print(error, flush=True)
    for each in taken:
        each.close()
    while True:
        try:
            await new.wait_ready()
            print(await new.call(echo("recovered")), flush=True)
            break
        except Unavailable:
            pass  # a slow machine
    old.close()
    new.close()

trio.run(main)
"""


async def test_a_process_without_file_descriptors_is_told_so_and_recovers(
    server: Server, spawn: Callable[..., Child]
) -> None:
    child = spawn(FULL, server.url)
    assert await child.line() == "goes on"
    assert "ulimit -n" in await child.line()
    assert await child.line() == "recovered"
    assert await child.ended() == 0
