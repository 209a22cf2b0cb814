"""A cancelled caller: what was not sent is withdrawn, what was is dropped when answered, no reply is anybody else's."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.link.loops import Loop, of_each_loop, until, with_link
from tests.link.scripts import Outcomes, append, echo, lines, log
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.link import Link

pytestmark = of_each_loop


def test_what_was_not_sent_is_withdrawn_and_uses_no_number(loop: Loop, own_server: Server, prefix: str) -> None:
    async def program(link: Link) -> None:
        own_server.stop()
        await until(loop, lambda: link.post(echo("a"), lambda *_: None) or link._client.connector.state.name != "READY")  # type: ignore[func-returns-value]
        async with loop.limit(0.1) as limit:
            await link.call(append(prefix, "withdrawn"))
        assert limit.passed
        own_server.start()
        assert await link.call(append(prefix, "a")) == ["ok", 1, 1, 1]

    with_link(loop, own_server.url, program)


def test_what_was_sent_may_take_effect_and_its_reply_is_dropped(
    loop: Loop, proxy: FaultProxy, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(link: Link) -> None:
        await link.call(append(prefix, "first"))  # so that the script is there
        held = proxy.hold_reply(matching="xyzzy", on="data")
        async with loop.running(partial(link.call, append(prefix, "xyzzy"))) as cancel:
            await until(loop, lambda: held.fired)
            cancel()
        later = Outcomes()
        link.post(append(prefix, "a"), later)
        held.release()
        await until(loop, lambda: later.all)
        assert later.values == [["ok", 3, 3, 3]]

    with_link(loop, proxy.url, program)
    assert not lines(caplog, "link.deliver")


def test_what_was_sent_and_cancelled_is_not_sent_again(
    loop: Loop, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    async def program(link: Link) -> None:
        await link.call(append(prefix, "first"))  # so that the script is there
        await link.call(log(prefix, "second"))
        held = proxy.hold(matching="xyzzy", on="data")
        async with loop.running(partial(link.call, log(prefix, "xyzzy"))) as cancel:
            await until(loop, lambda: proxy.count("xyzzy"))
            cancel()
        proxy.cut("data")
        assert await link.call(log(prefix, "a")) in (3, 4)  # the held one may come late, once
        assert proxy.count("xyzzy") == 1
        held.release()
        await until(loop, lambda: server.look.llen(f"{prefix}:{{Q}}") == 4)

    with_link(loop, proxy.url, program)


def test_many_calls_together_are_answered_and_cancelled_together(loop: Loop, proxy: FaultProxy, prefix: str) -> None:
    async def program(link: Link) -> None:
        texts = [str(n) for n in range(500)]
        assert await link.call_all([echo(text) for text in texts]) == texts
        assert await link.call_all([]) == []
        await link.call(log(prefix, "first"))
        held = proxy.hold_reply(matching="xyzzy", on="data")
        async with loop.running(partial(link.call_all, [log(prefix, "xyzzy"), log(prefix, "a")])) as cancel:
            await until(loop, lambda: held.fired)
            cancel()
        held.release()
        assert await link.call(log(prefix, "last")) == 4

    with_link(loop, proxy.url, program)


def test_cancelling_never_breaks_the_connection(loop: Loop, server: Server) -> None:
    async def program(link: Link) -> None:
        wrong: list[str] = []
        done = cancelled = 0
        patience = 0.02

        async def ask(who: int) -> None:
            nonlocal done, cancelled
            for n in range(30):
                text = f"{who}.{n}"
                async with loop.limit(random.uniform(0, patience)) as limit:
                    if await link.call(echo(text)) != text:
                        wrong.append(text)
                    done += 1
                cancelled += limit.passed

        while min(done, cancelled) <= 100:  # however fast the machine is
            done = cancelled = 0
            await loop.together(partial(ask, who) for who in range(100))
            patience *= 2 if done <= 100 else 0.5
        assert not wrong
        assert link.connections == 1
        assert await link.call(echo("still")) == "still"

    with_link(loop, server.url, program)


def test_a_cancelled_wait_for_the_first_connection_leaves_the_link_in_order(loop: Loop, own_server: Server) -> None:
    own_server.stop()

    async def program(link: Link) -> None:
        async with loop.limit(0.05) as limit:
            await link.wait_ready()
        assert limit.passed
        own_server.start()
        await link.wait_ready()
        assert await link.call(echo("a")) == "a"

    with_link(loop, own_server.url, program, ready=False)


def test_messages_come_and_a_cancelled_wait_for_a_subscription_leaves_it_in_order(
    loop: Loop, own_server: Server
) -> None:
    async def program(link: Link) -> None:
        own_server.stop()
        heard: list[bytes] = []
        subscription = link.subscriptions.open(["a"], lambda _channel, message: heard.append(message), lambda: None)
        async with loop.limit(0.05) as limit:
            await subscription.wait_confirmed()
        assert limit.passed
        own_server.start()
        await subscription.wait_confirmed()
        await until(loop, lambda: heard or own_server.look.publish("a", b"hello") < 0)  # again, until it arrives
        assert set(heard) == {b"hello"}
        subscription.close()

    with_link(loop, own_server.url, program)


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_many_cancelled_calls_leave_nothing_behind(loop: Loop, server: Server, prefix: str, seconds: float) -> None:
    async def program(link: Link) -> None:
        for _ in range(200):
            async with loop.limit(seconds):
                await link.call(append(prefix, "x"), patience=60)
        await link.call(echo("last"))
        requests = link._client.requests  # type: ignore[union-attr]
        await until(loop, lambda: not requests.in_flight)
        assert not requests.pending
        assert not requests.numbers.open
        server.look.delete(f"{prefix}:{{Q}}", f"{prefix}:{{Q}}:producer:{link.producer}")

    with_link(loop, server.url, program)
