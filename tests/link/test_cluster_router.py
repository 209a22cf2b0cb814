"""A link to a real cluster: everything gets to the node that has it, also while slots and primaries change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.link.conftest import LinkTo
from tests.link.scripts import append, echo, knows_why, lines, until
from tests.link.test_subscriptions import listener
from tests.support.clusters import Cluster, Node, cluster, cluster_of_module, fail_over, move_slot
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.errors import NotReplicated, RefusedByServer, Unavailable, UsageError
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.link.session import slot_of
from worqr.lua import Script

assert cluster, cluster_of_module  # fixtures

QUEUES = ("Q0", "Q2", "Q1", "Q5", "Q3", "Q4")
"""The first three lie on three nodes, and so do the last three."""


class Load:
    """Producers that append numbers to queues, one at a time each, and write down what was acknowledged."""

    def __init__(self, link: Link, prefix: str = "t") -> None:
        self.link = link
        self.prefix = prefix
        self.acknowledged: list[tuple[str, bytes]] = []
        self.ended = False
        self.pause = 0.0

    async def produce(self, queue: str, name: str) -> None:
        number = 0
        while not self.ended:
            number += 1
            text = f"{name}-{number}"
            await self.link.call(append(self.prefix, text, queue))
            self.acknowledged.append((queue, text.encode()))
            await trio.sleep(self.pause)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Twelve of them for the length of a block; then wait until each has its answer."""
        async with trio.open_nursery() as nursery:
            for queue in QUEUES:
                for each in range(2):
                    nursery.start_soon(self.produce, queue, f"{queue}{each}")
            await self.more(200)
            yield
            await self.more(200)
            self.ended = True

    async def election(self, replica: Node) -> None:
        """Until it is the primary: seconds, in which those on other nodes need not use all of a core."""
        self.pause = 0.05
        await until(lambda: replica.role == "master", what="an election")
        self.pause = 0.0

    async def more(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        await until(lambda: len(self.acknowledged) >= goal, what="more answers")

    def check(self, cluster: Cluster, *, may_lose: bool = False) -> int:
        """Each is there once. Answers how many are lost, if that may be."""
        lost = 0
        for queue in QUEUES:
            stored = Counter(cluster.get("LRANGE", f"{self.prefix}:{{{queue}}}", 0, -1))
            assert max(stored.values()) == 1, f"{queue}: stored twice: {[t for t, n in stored.items() if n > 1]}"
            lost += len({text for name, text in self.acknowledged if name == queue} - set(stored))
        assert may_lose or lost == 0
        return lost


class Replicated(Load):
    """The same, of tasks that a replica must have; `unsure`: how many it had not in time."""

    unsure = 0

    async def produce(self, queue: str, name: str) -> None:
        number = 0
        while not self.ended:
            number += 1
            text = f"{name}-{number}".encode()
            try:
                await self.link.call(ops.enqueue(QueueKeys(self.prefix, queue), [text], replicas=1))
            except NotReplicated:
                self.unsure += 1
            else:
                self.acknowledged.append((queue, text))
            await trio.sleep(self.pause)


@pytest.fixture
async def link(link_to: LinkTo, cluster: Cluster) -> Link:
    return await link_to(cluster.url)


async def test_each_call_goes_to_the_node_that_has_its_queue(cluster: Cluster, link: Link) -> None:
    answers = await link.call_all([append("t", str(number), queue) for number in range(3) for queue in QUEUES])
    assert [(word, length) for word, length, *_ in answers] == [("ok", 1 + i // 6) for i in range(18)]
    for queue in QUEUES:
        assert cluster.get("LRANGE", f"t:{{{queue}}}", 0, -1) == [b"0", b"1", b"2"]
    owners = {cluster.owner(f"t:{{{queue}}}").port for queue in QUEUES[:3]}
    assert len(owners) == 3


async def test_one_seed_is_enough_whichever_it_is(cluster: Cluster, link_to: LinkTo) -> None:
    for node in (cluster.nodes[0], cluster.nodes[-1]):  # a replica can tell as well
        link = await link_to(f"redis+cluster://127.0.0.1:1,127.0.0.1:{node.port}")
        for queue in QUEUES[:3]:
            await link.call(append("t", "x", queue))


async def test_nobody_answers(link_to: LinkTo) -> None:
    link = await link_to("redis+cluster://127.0.0.1:1,127.0.0.1:2", ready=False, patience=0.5)
    await knows_why(link, "refused")
    with pytest.raises(
        Unavailable,
        match=r"^Could not connect to redis\+cluster://127\.0\.0\.1:1,127\.0\.0\.1:2.*refused",
    ):
        await link.wait_ready()
    with pytest.raises(Unavailable) as caught:
        await link.call(echo("a"))
    assert caught.value.sent is False
    link.close()
    with pytest.raises(Unavailable, match="closed"):
        await link.call(echo("a"))


async def test_whoever_waits_for_a_cluster_hears_of_the_end(link_to: LinkTo) -> None:
    link = await link_to("redis+cluster://127.0.0.1:1", ready=False)
    errors: list[Exception] = []

    async def wait(what: Any) -> None:
        try:
            await what()
        except Unavailable as error:
            errors.append(error)

    subscription = link.subscriptions.open(["t:{Q1}"], lambda *_: None, lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, link.wait_ready)
        nursery.start_soon(wait, lambda: link.call(echo("a")))
        nursery.start_soon(wait, subscription.wait_confirmed)
        await trio.testing.wait_all_tasks_blocked()
        link.close()
    assert len(errors) == 3


@pytest.mark.one_server
async def test_a_server_that_is_no_node_says_so(server: Server, link_to: LinkTo) -> None:
    link = await link_to(server.tcp_url.removesuffix("/0").replace("redis:", "redis+cluster:"), ready=False)
    with pytest.raises(RefusedByServer, match=r"no node of a cluster.*write redis://"):
        await link.wait_ready()


async def test_a_node_that_is_taken_for_a_server_says_so(cluster: Cluster, link_to: LinkTo) -> None:
    other = cluster.owner("t:{Q0}")
    node = next(each for each in cluster.nodes[:3] if each is not other and each.role == "master")
    link = await link_to(node.tcp_url)
    with pytest.raises(RefusedByServer, match=r"MOVED.*write redis\+cluster://"):
        await link.call(append("t", "x", "Q0"))


async def test_a_wrong_password_is_told_at_once(cluster: Cluster, link_to: LinkTo) -> None:
    link = await link_to(cluster.url.replace("//", "//u:wrong@"), ready=False)
    with pytest.raises(RefusedByServer, match="check user and password"):
        await link.wait_ready()


async def test_a_channel_is_heard_from_the_node_that_has_it(cluster: Cluster, link: Link) -> None:
    listeners = {queue: await listener(link, f"t:{{{queue}}}", f"t:{{{queue}}}:wake:W") for queue in QUEUES}
    for queue in QUEUES:
        assert cluster.get("SPUBLISH", f"t:{{{queue}}}:wake:W", queue) == 1
    for queue, each in listeners.items():
        await each.wait(1)
        assert each.heard == [(f"t:{{{queue}}}:wake:W", queue.encode())]
        each.subscription.close()
    for queue in QUEUES:
        await until(lambda queue=queue: cluster.get("SPUBLISH", f"t:{{{queue}}}", "x") == 0)  # type: ignore[misc]
    with pytest.raises(UsageError, match="share a slot"):
        link.subscriptions.open(["t:{Q0}", "t:{Q1}"], lambda *_: None, lambda: None)


async def test_the_registrys_channels_are_plain(cluster: Cluster, link: Link) -> None:
    listening = await listener(link, "{worqr}:due")
    for node in cluster.running:  # from wherever it comes

        def heard(node: Node = node) -> bool:
            node.ask("PUBLISH", "{worqr}:due", node.port)  # again: what is published while the link reconnects is lost
            return ("{worqr}:due", b"%d" % node.port) in listening.heard

        await until(heard, what=f"a message from {node.port}")


async def test_a_failover_under_load_loses_nothing(cluster: Cluster, link: Link) -> None:
    load = Load(link)
    listening = await listener(link, "t:{Q0}")
    before = cluster.owner("t:{Q0}")
    replica = cluster.replica_of(before)
    async with load.going_on():
        await trio.to_thread.run_sync(fail_over, replica)
        await until(lambda: cluster.owner("t:{Q0}") is replica, what="a failover")
        await load.more(500)
    assert load.check(cluster) == 0
    await listening.wait_confirmations(2)
    await until(lambda: cluster.get("SPUBLISH", "t:{Q0}", "x") == 1, what="a subscription that has followed")
    await listening.wait(1)


async def test_a_primary_that_is_killed_under_load_is_replaced(
    cluster: Cluster, link_to: LinkTo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    link = await link_to(cluster.url)
    load = Load(link)
    listening = await listener(link, "t:{Q0}")
    victim = cluster.owner("t:{Q0}")
    replica = cluster.replica_of(victim)
    async with load.going_on():
        victim.kill()
        await load.more(300)  # the others go on
        await load.election(replica)
        await load.more(500)
    load.check(cluster, may_lose=True)  # what the replica had not got yet
    await listening.wait_confirmations(2)
    await until(lambda: cluster.get("SPUBLISH", "t:{Q0}", "x") == 1)
    place = f"127.0.0.1:{victim.port}"
    await until(lambda: [line for line in lines(caplog, "link.moved") if place in line])
    assert len([line for line in lines(caplog, "link.lost") if place in line]) == 1


async def test_what_a_replica_has_survives_a_primary_that_is_killed(cluster: Cluster, link: Link) -> None:
    load = Replicated(link)
    victim = cluster.owner("t:{Q0}")
    replica = cluster.replica_of(victim)
    async with load.going_on():
        victim.kill()
        await load.election(replica)
        await until(lambda: load.unsure, what="calls on a node that has no replica any more")
        await load.more(300)  # the others go on
    assert load.check(cluster) == 0


async def test_a_primary_that_is_frozen_under_load_is_replaced(cluster: Cluster, link: Link) -> None:
    load = Load(link)
    victim = cluster.owner("t:{Q0}")
    replica = cluster.replica_of(victim)
    try:
        async with load.going_on():
            victim.pause()
            await load.more(300)
            await load.election(replica)
            await load.more(500)
    finally:
        victim.resume()
    await until(lambda: victim.role == "slave", what="a primary that learns that it is none any more")
    load.check(cluster, may_lose=True)


async def test_a_slot_that_is_moved_key_by_key_under_load(cluster: Cluster, link: Link) -> None:
    load = Load(link)
    listening = await listener(link, "t:{Q0}")
    source = cluster.owner("t:{Q0}")
    target = cluster.owner("t:{Q1}")
    assert source is not target
    for number in range(30):
        source.ask("SET", f"t:{{Q0}}:more:{number}", "x")  # so that it takes a while
    async with load.going_on():
        await trio.to_thread.run_sync(move_slot, cluster, slot_of("t:{Q0}"), target)
        await load.more(500)
    assert cluster.owner("t:{Q0}") is target
    assert load.check(cluster) == 0
    await listening.wait_confirmations(2)
    await until(lambda: target.ask("SPUBLISH", "t:{Q0}", "x") == 1)
    await trio.to_thread.run_sync(move_slot, cluster, slot_of("t:{Q0}"), source)


@pytest.fixture
def modern_cluster(cluster: Cluster) -> Cluster:
    """One that moves slots as a whole."""
    if b"MIGRATESLOTS" not in b" ".join(cluster.nodes[0].ask("CLUSTER", "HELP")):
        pytest.skip("this server moves slots key by key only")
    return cluster


async def test_a_slot_that_is_moved_at_once_under_load(modern_cluster: Cluster, link_to: LinkTo) -> None:
    cluster = modern_cluster
    source, target = cluster.owner("t:{Q0}"), cluster.owner("t:{Q1}")
    slot = slot_of("t:{Q0}")
    link = await link_to(cluster.url)
    load = Load(link)
    async with load.going_on():
        source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        await until(lambda: cluster.owner("t:{Q0}") is target, what="a slot that has moved")
        await load.more(500)
    assert load.check(cluster) == 0
    await trio.to_thread.run_sync(move_slot, cluster, slot, source)


HALF = Script(
    "half", "#!lua\nreturn {'ok', redis.call('EXISTS', KEYS[1] .. ':a') + redis.call('EXISTS', KEYS[1] .. ':b')}"
)


async def test_no_script_runs_on_half_a_slot(cluster: Cluster, link: Link) -> None:
    """Whose only declared key is still here, while one that it looks for has gone already."""
    source, target = cluster.owner("t:{Q0}"), cluster.owner("t:{Q1}")
    for key in ("t:{Q0}", "t:{Q0}:a", "t:{Q0}:b"):
        source.ask("SET", key, "x")
    slot = slot_of("t:{Q0}")
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    source.ask("MIGRATE", "127.0.0.1", target.port, "t:{Q0}:a", 0, 5000)
    call = Command(HALF, "t:{Q0}", (), lambda reply: reply[1])
    found: list[int] = []

    async def look() -> None:
        found.append(await link.call(call))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        with trio.fail_after(PATIENCE):
            await link.call(append("t", "x", "Q1"))  # the others go on
            await link.call(append("t", "x", "Q2"))
        assert found == []
        await trio.to_thread.run_sync(move_slot, cluster, slot, target)
    assert found == [2]
    await trio.to_thread.run_sync(move_slot, cluster, slot, source)


async def test_a_beat_follows_its_slot(cluster: Cluster, link: Link) -> None:
    home = cluster.owner("{worqr}")
    beats: list[str] = []
    call = Command(Script("beat", "#!lua\nreturn {'ok', redis.call('INCR', KEYS[1] .. ':beat')}"), "{worqr}", (), str)
    heartbeat = link.heartbeat(
        make=lambda _number, _turning: call, replied=beats.append, every=0.1, block_limit=60, describe=lambda: ""
    )
    heartbeat.start()
    await until(lambda: len(beats) > 2)
    replica = cluster.replica_of(home)
    await trio.to_thread.run_sync(fail_over, replica)
    await until(lambda: cluster.owner("{worqr}") is replica)
    seen = len(beats)
    await until(lambda: len(beats) > seen + 2, what="beats on the new primary")
    assert int(cluster.get("GET", "{worqr}:beat")) >= len(beats)
