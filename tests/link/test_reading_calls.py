"""On Trio, a call that has the connection for itself reads its own reply: whatever happens to it, others get theirs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.link.scripts import Outcomes, append, echo, until
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.errors import Unavailable
from worqr.link import Link, driver, node
from worqr.link.driver import _Watch


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of a busy machine does not let the reading task go on."""
    monkeypatch.setattr(driver, "_UNREAD", 600.0)


async def one_at_a_time(link: Link) -> _Watch:
    """Call until calls read their own replies. Return the watch of the connection."""
    watch: Any
    for _ in range(10):
        assert await link.call(echo("a")) == "a"
    watch = link._client.session.transport.watch  # type: ignore[union-attr]
    assert watch._parked is not None, "the reading task has made room"
    return watch


async def test_calls_one_at_a_time_read_their_own_replies(link: Link) -> None:
    watch = await one_at_a_time(link)
    for n in range(20):
        assert await link.call(echo(str(n))) == str(n)
        assert watch._parked is not None


async def test_one_that_is_cancelled_leaves_the_others_their_replies(
    proxied: Link, proxy: FaultProxy, prefix: str
) -> None:
    await proxied.call(append(prefix, "first"))
    watch = await one_at_a_time(proxied)
    held = proxy.hold_reply(matching="xyzzy", on="data")
    others = Outcomes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(proxied.call, append(prefix, "xyzzy"))
        await until(lambda: held.fired)
        assert watch._is_read
        proxied.post(append(prefix, "posted"), others)
        nursery.cancel_scope.cancel()
    held.release()
    await until(lambda: others.all)
    assert others.values == [["ok", 3, 3, 3]]
    assert await proxied.call(echo("b")) == "b"


async def test_a_call_that_reads_gives_up_when_its_patience_ends(proxied: Link, proxy: FaultProxy) -> None:
    await one_at_a_time(proxied)
    held = proxy.hold_reply(matching="xyzzy", on="data")
    with pytest.raises(Unavailable) as caught:
        await proxied.call(echo("xyzzy"), patience=0.3)
    assert caught.value.sent is None
    held.release()
    assert await proxied.call(echo("b")) == "b"


async def test_a_call_that_reads_when_the_connection_breaks_is_sent_again(
    proxied: Link, proxy: FaultProxy, prefix: str
) -> None:
    await proxied.call(append(prefix, "first"))
    await one_at_a_time(proxied)
    proxy.drop_reply(matching="xyzzy", on="data")
    assert (await proxied.call(append(prefix, "xyzzy")))[:2] == ["again", 2]
    await one_at_a_time(proxied)


async def test_those_that_come_while_one_reads_get_their_replies(proxied: Link, proxy: FaultProxy) -> None:
    await one_at_a_time(proxied)
    held = proxy.hold_reply(matching="xyzzy", on="data")
    found: list[str] = []

    async def call(text: str) -> None:
        found.append(await proxied.call(echo(text)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "xyzzy")
        await until(lambda: held.fired)
        for n in range(5):
            nursery.start_soon(call, str(n))
        posted = Outcomes()
        proxied.post(echo("posted"), posted)
        held.release()
    await until(lambda: posted.all)
    assert (sorted(found), posted.values) == ([*map(str, range(5)), "xyzzy"], ["posted"])


async def test_a_posted_request_is_read_though_the_reading_task_has_made_room(link: Link) -> None:
    await one_at_a_time(link)
    posted = Outcomes()
    link.post(echo("posted"), posted)
    await until(lambda: posted.all)
    assert posted.values == ["posted"]


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_sends_has_a_reader(link: Link, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """No timer helps here: each reply is read because it is expected, whatever was sent how before."""
    monkeypatch.setattr(node, "_TICK", 600.0)
    await one_at_a_time(link)
    rng = random.Random(seed)
    for _ in range(30):
        posted, wanted = Outcomes(), rng.choice([0, 0, 0, 1, 2])
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for n in range(rng.choice([1, 1, 1, 1, 2, 3])):
                    nursery.start_soon(link.call, echo(str(n)))
                for n in range(wanted):
                    link.post(echo(str(n)), posted)
            await until(lambda posted=posted, wanted=wanted: len(posted.all) == wanted)  # type: ignore[misc]


async def test_a_connection_that_is_lost_after_such_calls_is_made_anew_without_a_call(
    own_link: Link, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_UNREAD", 0.25)
    await one_at_a_time(own_link)
    before = own_link.connections
    own_server.restart()  # nobody reads for a moment
    await until(lambda: own_link.connections > before)
    assert await own_link.call(echo("a")) == "a"


async def test_a_link_that_is_closed_ends_the_call_that_reads(proxied: Link, proxy: FaultProxy) -> None:
    await one_at_a_time(proxied)
    held = proxy.hold_reply(matching="xyzzy", on="data")

    async def call() -> None:
        with pytest.raises(Unavailable, match="was closed"):
            await proxied.call(echo("xyzzy"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await until(lambda: held.fired)
        proxied.close()
    held.withdraw()
