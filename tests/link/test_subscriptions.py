"""Messages from a real server: confirmed, shared, closed, and confirmed anew after every way to lose them."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import redis
import trio
import trio.testing

from tests.link.conftest import LinkTo
from tests.link.scripts import echo, lines, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.client.notifications import subscribed
from worqr.errors import RefusedByServer, Unavailable, UsageError
from worqr.link import Link, LinkSettings, Subscription, TrioDriver
from worqr.link.connector import State, StaticEndpoint, pack
from worqr.link.log_thread import LogThread
from worqr.link.messages import Subscriptions


class SubscriptionListener:
    """A subscription, what it heard, and how often it was confirmed."""

    def __init__(self, link: Link, *channels: str) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.confirmations = 0
        self.subscription: Subscription = link.subscriptions.open(channels, self._deliver, self._confirmed)

    def _deliver(self, channel: str, message: bytes) -> None:
        self.heard.append((channel, message))

    def _confirmed(self) -> None:
        self.confirmations += 1

    async def wait(self, count: int) -> None:
        await until(lambda: len(self.heard) >= count, what=f"{count} messages, there are {self.heard}")

    async def hears(self, client: redis.Redis, channel: str) -> None:
        """Publish until a message arrives: what is published while the link connects once more is lost."""

        def publish() -> bool:
            client.publish(channel, "x")
            return bool(self.heard)

        await until(publish, what="a message")

    async def wait_confirmations(self, count: int, within: float = PATIENCE) -> None:
        await until(lambda: self.confirmations >= count, within, f"{count} confirmations")


async def listener(link: Link, *channels: str) -> SubscriptionListener:
    made = SubscriptionListener(link, *channels)
    with trio.fail_after(PATIENCE):
        await made.subscription.wait_confirmed()
    return made


def kill_subscribers(server: Server) -> None:
    with server.client() as client:
        for connection in client.client_list():
            if connection["name"] == "worqr:test:subscribe":
                client.execute_command("CLIENT", "KILL", "ID", connection["id"])


async def test_a_message_is_heard_by_all_who_listen_and_nobody_else(link: Link, server: Server, prefix: str) -> None:
    one, both, other = (
        await listener(link, f"{prefix}a"),
        await listener(link, f"{prefix}a", f"{prefix}b"),
        await listener(link, "c"),
    )
    with server.client() as client:
        client.publish(f"{prefix}a", "1")
        client.publish(f"{prefix}b", b"\xff\x00")
    await both.wait(2)
    await one.wait(1)
    assert one.heard == [(f"{prefix}a", b"1")]
    assert both.heard == [(f"{prefix}a", b"1"), (f"{prefix}b", b"\xff\x00")]
    assert not other.heard
    assert link.subscriptions.connections == 1


async def test_requests_and_subscriptions_need_no_thread(link: Link) -> None:
    await listener(link, "a")
    assert await link.call(echo("a")) == "a"
    await until(lambda: not [thread.name for thread in threading.enumerate() if thread.name.startswith("worqr-")])


async def test_when_it_is_confirmed_nothing_is_missed(link: Link, server: Server, prefix: str) -> None:
    with server.client() as client:
        for i in range(50):
            made = await listener(link, f"{prefix}{i}")
            assert client.publish(f"{prefix}{i}", "x") == 1
            await made.wait(1)
            assert made.confirmations == 1


async def test_a_subscription_is_made_at_once_also_while_the_thread_sleeps(link_to: LinkTo, server: Server) -> None:
    link = await link_to(server.url, ping_every=60)
    await listener(link, "a")
    took: list[float] = []
    for i in range(20):
        await trio.sleep(0.01)
        began = time.monotonic()
        await listener(link, f"b{i}")
        took.append(time.monotonic() - began)
    assert sorted(took)[10] < 3  # not at the next ping


async def test_a_closed_subscription_hears_nothing_and_leaves_the_channel(
    link: Link, server: Server, prefix: str
) -> None:
    leaves, stays = await listener(link, f"{prefix}a", f"{prefix}b"), await listener(link, f"{prefix}a")
    leaves.subscription.close()
    leaves.subscription.close()
    with server.client() as client:
        await until(lambda: client.pubsub_numsub(f"{prefix}b") == [(f"{prefix}b".encode(), 0)])
        assert client.publish(f"{prefix}a", "1") == 1
        await stays.wait(1)
        assert not leaves.heard
        stays.subscription.close()
        await until(lambda: client.pubsub_numsub(f"{prefix}a") == [(f"{prefix}a".encode(), 0)])
        again = await listener(link, f"{prefix}a")
        client.publish(f"{prefix}a", "2")
        await again.wait(1)


async def test_what_is_on_its_way_when_it_is_closed_is_not_delivered(link: Link, server: Server, prefix: str) -> None:
    made, other = await listener(link, f"{prefix}a"), await listener(link, f"{prefix}a")
    with server.client() as client:
        client.publish(f"{prefix}a", "1")
    time.sleep(0.05)
    made.subscription.close()
    await other.wait(1)
    assert not made.heard


async def test_messages_that_arrive_together_are_one_delivery(link: Link, server: Server, prefix: str) -> None:
    made = await listener(link, f"{prefix}a")
    posts = 0
    driver = link.subscriptions.driver

    class Counting:
        def post(self, deliver: Any) -> None:
            nonlocal posts
            posts += 1
            driver.post(deliver)

    link.subscriptions.driver = Counting()  # type: ignore[assignment]
    with server.client() as client, client.pipeline(transaction=True) as pipe:
        for i in range(5000):
            pipe.publish(f"{prefix}a", str(i))
        pipe.execute()
    await made.wait(5000)
    assert [message for _, message in made.heard] == [str(i).encode() for i in range(5000)]
    assert posts < 500


@pytest.mark.parametrize("way", ["kill", "cut", "half-open"])
async def test_a_lost_connection_is_made_again_and_confirmed_again(
    link_to: LinkTo, server: Server, proxy: FaultProxy, prefix: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    impatient = {"ping_every": 0.2, "pong_timeout": 0.4} if way == "half-open" else {}
    link = await link_to(proxy.url, **impatient)
    began = time.monotonic()
    made, other = await listener(link, f"{prefix}a", f"{prefix}b"), await listener(link, f"{prefix}a")
    if way == "kill":
        kill_subscribers(server)
    elif way == "cut":
        assert proxy.cut("subscribe") == 1
    else:
        proxy.blackhole("subscribe")
        await until(lambda: proxy.count("SETNAME", on="subscribe") > 1, what="a half-open connection to be noticed")
        assert time.monotonic() - began > 0.5
        proxy.pass_all()
        proxy.cut("subscribe")
    await made.wait_confirmations(2)
    await other.wait_confirmations(2)
    with server.client() as client:
        await made.hears(client, f"{prefix}b")
    assert not lines(caplog, "link.")


async def test_any_traffic_counts_as_a_sign_of_life(
    link_to: LinkTo, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    link = await link_to(proxy.url, ping_every=0.8, pong_timeout=PATIENCE)
    made = await listener(link, f"{prefix}a")
    pings: list[int] = []
    while 0 not in pings:  # the machine may stand still between two messages, but hardly each time
        assert len(pings) < 15, pings
        proxy.forget_requests()
        with server.client() as client:
            for _ in range(40):
                client.publish(f"{prefix}a", "x")
                await trio.sleep(0.05)
        pings.append(proxy.count("PING", on="subscribe"))
    await until(lambda: proxy.count("PING", on="subscribe") >= 2)
    assert link.subscriptions.connections == 1
    assert made.confirmations == 1


async def test_nobody_who_listens_is_nobody_who_pings(link_to: LinkTo, proxy: FaultProxy) -> None:
    link = await link_to(proxy.url, ping_every=0.05)
    made = await listener(link, "a")
    await until(lambda: proxy.count("PING"))
    made.subscription.close()
    await until(lambda: proxy.count("UNSUBSCRIBE"))
    proxy.forget_requests()
    await trio.sleep(0.3)
    assert proxy.count("PING") == 0
    await listener(link, "b")
    await until(lambda: proxy.count("PING"))
    assert link.subscriptions.connections == 1


async def test_a_server_that_restarts_is_subscribed_again(own_link: Link, own_server: Server) -> None:
    made = await listener(own_link, "a")
    await trio.to_thread.run_sync(own_server.restart)
    await made.wait_confirmations(2)
    with own_server.client() as client:
        await made.hears(client, "a")


async def test_subscriptions_opened_and_closed_in_an_outage_are_put_right(own_link: Link, own_server: Server) -> None:
    stays, leaves = await listener(own_link, "a"), await listener(own_link, "b")
    own_server.stop()
    comes, shares = SubscriptionListener(own_link, "c"), SubscriptionListener(own_link, "a")
    leaves.subscription.close()
    await trio.sleep(0.1)
    assert not shares.confirmations  # "a" stood, on a connection that is gone
    own_server.start()
    await comes.wait_confirmations(1)
    await stays.wait_confirmations(2)
    with own_server.client() as client:
        assert dict(client.pubsub_numsub("a", "b", "c")) == {b"a": 1, b"b": 0, b"c": 1}


async def test_a_channel_we_may_not_hear_is_refused_alone(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "resetchannels", "&mine*", "+@all")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"))
    good, bad = SubscriptionListener(link, "mine"), SubscriptionListener(link, "theirs")
    with pytest.raises(RefusedByServer, match="theirs"):
        await bad.subscription.wait_confirmed()
    await good.subscription.wait_confirmed()
    await until(lambda: lines(caplog, "link.refused"))


async def test_a_channel_that_was_refused_is_asked_for_again(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "allchannels", "+@all")
        link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"), ping_every=0.1)
        old = await listener(link, "a")
        client.execute_command("ACL", "SETUSER", "bob", "resetchannels")  # which ends the connection
        await until(lambda: lines(caplog, "link.refused"))
        new = SubscriptionListener(link, "a")
        with trio.fail_after(PATIENCE), pytest.raises(RefusedByServer, match="NOPERM"):
            await new.subscription.wait_confirmed()
        await trio.sleep(0.5)
        assert len(lines(caplog, "link.refused")) == 2, "each listener is told once"
        client.execute_command("ACL", "SETUSER", "bob", "allchannels")
        await old.wait_confirmations(2)
        await new.wait_confirmations(1)
        await old.hears(client, "a")


async def test_who_waits_in_vain_hears_why_there_is_no_second_connection(link_to: LinkTo, own_server: Server) -> None:
    with own_server.client() as client:
        link = await link_to(own_server.url)
        patient, link.settings = link.settings, replace(link.settings, patience=1.0)
        client.config_set("maxclients", len(client.client_list()))
        link.subscriptions.open(["b"], lambda *_: None, lambda: None)
        await until(lambda: "max number of clients" in link.subscriptions.problem)  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="within 1 s: .*max number of clients"):
            async with subscribed(link, "a", lambda _message: None):
                raise AssertionError("it is confirmed")
        client.config_set("maxclients", 100)
        link.settings = patient
        async with subscribed(link, "a", lambda _message: None):
            pass


async def test_a_callback_that_fails_keeps_the_message_from_nobody_else(
    link: Link, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:

    def fail(channel: str, message: bytes) -> None:
        raise ZeroDivisionError

    broken = link.subscriptions.open([f"{prefix}a"], fail, lambda: None)
    await broken.wait_confirmed()
    made = await listener(link, f"{prefix}a")
    with server.client() as client:
        client.publish(f"{prefix}a", "x")
    await made.wait(1)
    assert lines(caplog, "link.deliver")


async def test_thousands_of_channels(link: Link, server: Server, prefix: str) -> None:
    names = [f"{prefix}{i}" for i in range(3000)]
    made = await listener(link, *names)
    listeners = [SubscriptionListener(link, name) for name in names[:500]]
    await listeners[-1].subscription.wait_confirmed()
    kill_subscribers(server)
    await made.wait_confirmations(2)
    with server.client() as client:
        await made.hears(client, names[-1])


async def test_the_end_of_the_link_is_told_to_those_who_wait(own_link: Link, own_server: Server) -> None:
    own_server.stop()
    waiting = own_link.subscriptions.open(["a"], lambda *_: None, lambda: None)

    async def wait() -> None:
        with pytest.raises(Unavailable, match="closed"):
            await waiting.wait_confirmed()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            own_link.close()
    with pytest.raises(Unavailable, match="closed"):
        own_link.subscriptions.open(["b"], lambda *_: None, lambda: None)
    with pytest.raises(Unavailable, match="closed"):
        await waiting.wait_confirmed()


async def test_a_subscription_to_nothing_is_a_mistake(link: Link) -> None:
    with pytest.raises(UsageError, match="channel"):
        link.subscriptions.open([], lambda *_: None, lambda: None)


async def test_listening_costs_no_processor(link: Link) -> None:
    await listener(link, "a")
    gc.collect()
    gc.disable()  # one collection among the objects of thousands of tests takes longer than all else here
    try:
        took = []
        while not took or took[-1] >= 0.02:  # others who have something left to do may use some, but hardly each time
            assert len(took) < 4, took
            before = time.process_time()
            await trio.sleep(1)
            took.append(time.process_time() - before)
    finally:
        gc.enable()


class SilentTransport:
    """A connection on which nothing arrives but what a test puts into `arrived`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.arrived: list[bytes] = []

    def read(self, feed: Callable[[bytes], object]) -> int:
        arrived, self.arrived = self.arrived, []
        for piece in arrived:
            feed(piece)
        return sum(map(len, arrived))

    def send(self, pieces: list[bytes]) -> None:
        self.sent += pieces


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Subscriptions, SilentTransport]]:
    """Subscriptions with a channel, whose connection has been silent for 10 s."""
    settings, transport = LinkSettings("redis://h:1"), SilentTransport()
    subscriptions = Subscriptions(
        settings,
        TrioDriver(),
        LogThread(),
        resolver=StaticEndpoint(settings.address.redacted, settings.address.seeds[0]),
    )
    subscriptions.connector.state = State.READY
    subscriptions._transport = cast("Any", transport)
    subscriptions.open(["a"], lambda *_: None, lambda: None)
    transport.sent.clear()
    subscriptions._heard_at -= 10
    yield subscriptions, transport
    subscriptions._alarm.cancel()


async def test_a_server_is_not_silent_for_the_time_in_which_the_loop_was_blocked(
    silent: tuple[Subscriptions, SilentTransport],
) -> None:
    subscriptions, transport = silent
    subscriptions._look(10.0)
    assert transport.sent == []
    subscriptions._heard_at -= 10
    subscriptions._look(0.0)
    assert transport.sent == [pack(("PING",))]


async def test_the_alarm_for_a_pong_is_moved_to_the_next_ping_when_the_pong_arrives(
    silent: tuple[Subscriptions, SilentTransport],
) -> None:
    subscriptions, transport = silent
    subscriptions._look(0.0)
    assert subscriptions._pinged
    transport.arrived = [b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"]
    subscriptions._readable()
    assert not subscriptions._pinged
    assert subscriptions._alarm.at == subscriptions._silent_until()
