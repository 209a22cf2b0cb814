"""A cancelled caller: what was not sent is withdrawn, what was is dropped when answered, no reply is anybody else's."""

from __future__ import annotations

import random

import pytest
import trio

from tests.link.conftest import LinkTo
from tests.link.scripts import Outcomes, append, echo, log, notice, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.link import Link


async def test_a_caller_who_is_cancelled_already_sends_nothing(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[object] = []
    monkeypatch.setattr(link._client, "submit", submitted.append)
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.call(echo("never"))
    assert scope.cancelled_caught
    assert not submitted


async def test_what_was_not_sent_is_withdrawn_and_uses_no_number(
    own_link: Link, own_server: Server, prefix: str
) -> None:
    own_server.stop()
    await notice(own_link)
    with trio.move_on_after(0.1) as scope:
        await own_link.call(append(prefix, "withdrawn"))
    assert scope.cancelled_caught
    own_server.start()
    assert await own_link.call(append(prefix, "a")) == ["ok", 1, 1, 1]


async def test_what_was_sent_may_take_effect_and_its_reply_is_dropped(
    proxied: Link, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    await proxied.call(append(prefix, "first"))  # so that the script is there
    await proxied.call(log(prefix, "second"))
    held = proxy.hold_reply(matching="xyzzy", on="data")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(proxied.call, append(prefix, "xyzzy"))
        await held.wait_fired()
        nursery.cancel_scope.cancel()
    later = Outcomes()
    proxied.post(append(prefix, "a"), later)
    held.release()
    await later.wait(1)
    assert later.values == [["ok", 4, 3, 3]]


async def test_what_was_sent_and_cancelled_is_not_sent_again(
    proxied: Link, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    await proxied.call(append(prefix, "first"))  # so that the script is there
    await proxied.call(log(prefix, "second"))
    held = proxy.hold(matching="xyzzy", on="data")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(proxied.call, log(prefix, "xyzzy"))
        await until(lambda: proxy.count("xyzzy"))
        nursery.cancel_scope.cancel()
    proxy.cut("data")
    assert await proxied.call(log(prefix, "a")) in (3, 4)  # the held one may come late, once
    assert proxy.count("xyzzy") == 1
    held.release()
    with server.client() as client:
        await until(lambda: client.llen(f"{prefix}:{{Q}}") == 4)


async def test_cancelling_never_breaks_the_connection(link: Link) -> None:
    wrong: list[str] = []
    done = cancelled = 0
    patience = 0.02

    async def ask(who: int) -> None:
        nonlocal done, cancelled
        for n in range(30):
            text = f"{who}.{n}"
            with trio.move_on_after(random.uniform(0, patience)) as scope:
                if await link.call(echo(text)) != text:
                    wrong.append(text)
                done += 1
            cancelled += scope.cancelled_caught

    while min(done, cancelled) <= 100:  # however fast the machine is
        done = cancelled = 0
        async with trio.open_nursery() as nursery:
            for who in range(100):
                nursery.start_soon(ask, who)
        patience *= 2 if done <= 100 else 0.5
    assert not wrong
    assert link.connections == 1
    assert await link.call(echo("still")) == "still"


async def test_a_cancelled_wait_for_the_first_connection_leaves_the_link_in_order(
    link_to: LinkTo, own_server: Server
) -> None:
    own_server.stop()
    link = await link_to(own_server.url, ready=False)
    with trio.move_on_after(0.05) as scope:
        await link.wait_ready()
    assert scope.cancelled_caught
    own_server.start()
    await link.wait_ready()
    assert await link.call(echo("a")) == "a"


async def test_a_cancelled_wait_for_a_subscription_leaves_it_in_order(own_link: Link, own_server: Server) -> None:
    own_server.stop()
    subscription = own_link.subscriptions.open(["a"], lambda *_: None, lambda: None)
    with trio.move_on_after(0.05) as scope:
        await subscription.wait_confirmed()
    assert scope.cancelled_caught
    own_server.start()
    with trio.fail_after(PATIENCE):
        await subscription.wait_confirmed()


@pytest.mark.parametrize("seconds", [0.0, 0.001])
async def test_many_cancelled_calls_leave_nothing_behind(link: Link, server: Server, seconds: float) -> None:
    for _ in range(200):
        with trio.move_on_after(seconds):
            await link.call(append("t", "x"), patience=60)
    await link.call(echo("last"))
    request_queue = link._client.requests
    await until(lambda: not request_queue.in_flight)
    assert not request_queue.pending
    assert not request_queue.numbers._open
    with server.client() as client:
        client.delete("t:{Q}", f"t:{{Q}}:producer:{link.producer}")
