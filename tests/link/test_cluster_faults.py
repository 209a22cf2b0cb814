"""What a cluster does wrong, and how a link bears it: nobody waits for ever, nothing is done twice, and it goes on by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace as settings_with
from functools import partial
from itertools import count
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from tests.link.conftest import LinkTo
from tests.link.nodes import ALL, HALVES, NUMBERED, SILENT, FakeNode, Fakes, errs, fakes_of
from tests.link.scripts import ECHO_CALL, Outcomes, append, echo, lines, until
from tests.link.test_subscriptions import SubscriptionListener, listener
from tests.support.children import Child
from tests.support.patience import PATIENCE
from worqr.command import Command
from worqr.errors import ClaimLost, RefusedByServer, Unavailable, WorqrBug
from worqr.link import Link, LinkSettings, WorkerHandle
from worqr.link.cluster import ClusterRouter, NodeEndpoint, ShardEndpoint, TopologyView
from worqr.link.connector import EndpointWatcher
from worqr.link.messages import Subscriptions, receive_all
from worqr.link.node import NodeClient
from worqr.link.session import GUILTY_AFTER, SLOTS, BatchResult, Held, Request, slot_of
from worqr.link.settings import Endpoint
from worqr.link.thread_driver import ThreadDriver, run_blocking

LOW, HIGH = "Q0", "Q2"
"""Queues in the first and in the second half of all slots; the registry is in the second."""


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    """Three nodes; the first has all slots."""
    with fakes_of(3) as made:
        yield made


@pytest.fixture
async def link(link_to: LinkTo, fakes: Fakes) -> Link:
    return await link_to(fakes.url)


def router_of(link: Link) -> ClusterRouter:
    assert isinstance(link._client, ClusterRouter)
    return link._client


def client_to(link: Link, node: FakeNode) -> NodeClient | None:
    return next((client for place, client in router_of(link)._clients.items() if place.port == node.port), None)


def threads(name: str) -> int:
    return len([thread for thread in threading.enumerate() if thread.name == name])


def moved(queue: str, node: FakeNode) -> Callable[[list[str]], Any]:
    return errs(f"MOVED {slot_of(f't:{{{queue}}}')} {node.place}")


def numbers(node: FakeNode) -> list[tuple[str, str]]:
    """(number, lowest) of the numbered calls that it was sent."""
    return [(call[3], call[4]) for call in node.ran if len(call) == NUMBERED]


# Redirects


async def test_nodes_that_point_to_each_other_are_not_asked_all_the_time(
    fakes: Fakes, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = fakes.nodes
    rounds, pauses = count(), list[Request]()
    redirected = NodeClient._redirected

    def counted(self: NodeClient, result: BatchResult) -> list[Request]:
        tired = redirected(self, result)
        pauses.extend(tired)
        return tired

    monkeypatch.setattr(NodeClient, "_redirected", counted)

    def to_each_other(node: FakeNode, call: list[str]) -> Any:
        return fakes.run(call) if next(rounds) >= 30 else moved("Q", node)(call)

    first.does, second.does = partial(to_each_other, second), partial(to_each_other, first)
    assert await link.call(append("t", "x")) == ["ok", b"x", 1, 1]
    assert len(pauses) >= 10  # more, if a look at the cluster contradicts a redirect
    assert set(numbers(first) + numbers(second)) == {("1", "1")}
    assert len(numbers(first) + numbers(second)) == 31


async def test_a_redirect_by_a_node_that_refuses_to_count_replicas_loses_nothing(fakes: Fakes, link: Link) -> None:
    """A primary that was demoted points to the new one in reply to the call, and then refuses WAIT in the same pipeline."""
    first, second, _ = fakes.nodes
    first.does = moved("Q", second)
    fakes.give((ALL, second))  # else the next look at the cluster leads the call back to the first
    first.answers["WAIT"] = errs("ERR WAIT cannot be used with replica instances. Please also note ...")
    second.answers["WAIT"] = lambda _: 1
    with trio.fail_after(PATIENCE):
        assert await link.call(replace(append("t", "x"), replicas=1)) == ["ok", b"x", 1, 1]
    assert numbers(second) == [("1", "1")]


async def test_a_redirect_without_a_host_is_another_port_of_the_same(fakes: Fakes, link_to: LinkTo) -> None:
    first, second, _ = fakes.nodes
    fakes.slots = [(0, 16383, None, first.port)]
    link = await link_to(fakes.url)
    slot = slot_of("t:{Q}")
    first.does = errs(f"MOVED {slot} ?:{second.port}")
    second.slots = first.slots = [(0, 16383, "", first.port)]  # nobody else tells
    assert await link.call(append("t", "x")) == ["ok", b"x", 1, 1]
    assert numbers(second) == [("1", "1")]


async def test_nodes_on_ipv6(link_to: LinkTo) -> None:
    with fakes_of(2, "::1") as fakes:
        first, second = fakes.nodes
        assert first.place == f"[::1]:{first.port}"
        link = await link_to(fakes.url)
        first.does = errs(f"MOVED {slot_of('t:{Q}')} ::1:{second.port}")
        assert await link.call(append("t", "x")) == ["ok", b"x", 1, 1]


async def test_calls_that_wait_at_a_node_go_with_their_slots(fakes: Fakes, link: Link) -> None:
    """On their way, set aside and waiting; each is done once."""
    first, second, _ = fakes.nodes
    ready = threading.Event()

    def slow(_: list[str]) -> Any:
        ready.wait(PATIENCE)
        return errs("TRYAGAIN not all keys are here")(_)

    first.does = slow
    outcomes = Outcomes()
    for number in range(3):
        link.post(append("t", str(number)), outcomes)
        await until(lambda: len(first.ran) > 0)
    fakes.give((ALL, second))
    ready.set()
    await outcomes.wait(3)
    assert sorted(value[1] for value in outcomes.values) == [b"0", b"1", b"2"]
    assert sorted(value[2] for value in outcomes.values) == [1, 2, 3]
    assert len(fakes.stored) == 3


def in_order(fakes: Fakes) -> list[str]:
    """What was carried out, in the order in which it was."""
    return [reply[1] for reply in fakes.stored.values()]


@pytest.mark.parametrize("answer", ["TRYAGAIN some keys are away", "ASK 1 {second}"])
async def test_a_later_call_waits_behind_one_whose_keys_are_being_moved(fakes: Fakes, link: Link, answer: str) -> None:
    """Else a worker's stop_work would give back the tasks that the finish_tasks before it was to end."""
    first, second, _ = fakes.nodes
    tries: list[str] = []

    def moves_at_last(call: list[str]) -> Any:
        if tries.count("0") >= 5:
            fakes.give((ALL, second))  # else the next look at the cluster leads some of the calls back to the first
            return moved("Q", second)(call)
        tries.append(call[-1])
        return errs(answer.format(second=second.place))(call)

    first.does = moves_at_last
    outcomes = Outcomes()
    link.post(append("t", "0"), outcomes)
    for number in range(1, 4):
        await until(lambda: len(tries) >= number)  # noqa: B023 - it is called at once
        link.post(append("t", str(number)), outcomes)
    await outcomes.wait(4)
    assert in_order(fakes) == ["0", "1", "2", "3"]


async def test_calls_of_other_queues_go_on_while_one_is_being_moved(fakes: Fakes, link: Link) -> None:
    first, _, _ = fakes.nodes
    first.does = lambda call: fakes.run(call) if "{Q}" not in call[0] else errs("TRYAGAIN some keys are away")(call)
    link.post(append("t", "x"), Outcomes())
    await until(lambda: first.ran)
    assert (await link.call(append("t", "other", HIGH)))[1] == b"other"


async def test_a_call_is_not_handed_over_before_an_earlier_one_that_has_to_wait(fakes: Fakes, link: Link) -> None:
    """The slot has moved between the two, which travel together."""
    first, second, _ = fakes.nodes
    refused = list[str]()

    def moves_now(call: list[str]) -> Any:
        refused.append(call[-1])
        if len(refused) > 1:
            fakes.give((ALL, second))  # else the next look at the cluster leads some of the calls back to the first
        return (errs("TRYAGAIN some keys are away") if len(refused) == 1 else moved("Q", second))(call)

    first.does = moves_now
    outcomes = Outcomes()
    with link.together:
        for number in range(3):
            link.post(append("t", str(number)), outcomes)
    await outcomes.wait(3)
    assert refused[:3] == ["0", "1", "2"]
    assert in_order(fakes) == ["0", "1", "2"]


async def test_a_new_call_does_not_overtake_those_that_wait_at_the_old_node(fakes: Fakes, link: Link) -> None:
    """Everybody knows the new node already, and one call is still on its way to the old one."""
    first, second, _ = fakes.nodes
    gate = threading.Event()

    def slow(call: list[str]) -> Any:
        gate.wait(PATIENCE)
        return moved("Q", second)(call)

    first.does = slow
    outcomes = Outcomes()
    link.post(append("t", "0"), outcomes)
    await until(lambda: first.ran)
    link.post(append("t", "1"), outcomes)
    # the first node keeps a slot, so that its pipe stays
    low, high = (0, slot_of("t:{Q}") - 1), (slot_of("t:{Q}"), 16383)
    fakes.give((low, first), (high, second))
    router_of(link).topology.invalidate()
    await until(lambda: len(router_of(link).topology.view.primaries) == 2)
    link.post(append("t", "2"), outcomes)
    link.post(append("t", "other", LOW), outcomes)
    gate.set()
    await outcomes.wait(3)
    await until(lambda: not router_of(link)._order._passing, what="the end of the hand-over")
    ran = len(first.ran)
    assert (await link.call(append("t", "3")))[1] == b"3"
    assert len(first.ran) == ran, "from now on calls go to the new node at once"
    assert [each for each in in_order(fakes) if each != "other"] == ["0", "1", "2", "3"]


async def test_a_node_that_lost_its_slots_is_left_and_found_again(
    fakes: Fakes, link_to: LinkTo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second, _ = fakes.nodes
    link = await link_to(fakes.url)
    await link.call(append("t", "x"))
    fakes.give((ALL, second))
    first.does = moved("Q", second)
    assert (await link.call(append("t", "y")))[2] == 2
    await until(lambda: client_to(link, first) is None, what="a pipe that retires")
    await until(lambda: [line for line in lines(caplog, "link.moved") if first.place in line])
    fakes.give((ALL, first))
    first.does, second.does = None, moved("Q", first)
    assert (await link.call(append("t", "z")))[2] == 3
    assert link.connections == 3


async def test_a_call_that_was_suspected_follows_its_slot_when_its_pause_is_over(fakes: Fakes, link: Link) -> None:
    first, second, _ = fakes.nodes
    pipe, outcomes = client_to(link, first), Outcomes()
    assert pipe is not None
    request = Request(append("t", "x"), PATIENCE, time.monotonic(), WorkerHandle("W1"))
    request.losses = GUILTY_AFTER
    request.wake = lambda: outcomes(request.value, request.error)
    pipe.requests.held[request] = Held(time.monotonic() + 1, deque((request,)))
    fakes.give((ALL, second))
    first.does = moved("Q", second)
    await link.call(append("t", "y"))
    await until(lambda: router_of(link).topology.view.primaries == {Endpoint("127.0.0.1", second.port)})
    assert (outcomes.all, client_to(link, first)) == ([], pipe)
    await outcomes.wait(1)
    assert outcomes.values == [["ok", b"x", 2, 2]]
    await until(lambda: client_to(link, first) is None, what="a pipe that retires")


async def test_a_node_that_is_down_and_has_no_slots_is_left_even_if_it_was_busy(
    fakes: Fakes, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = fakes.nodes
    await link.call(append("t", "x"))
    busy = iter([True, True, True])
    is_idle = NodeClient.is_idle
    monkeypatch.setattr(NodeClient, "is_idle", lambda self: not next(busy, False) and is_idle(self))
    fakes.give((ALL, second))
    first.close()
    assert (await link.call(append("t", "y")))[2] == 2
    await until(lambda: client_to(link, first) is None, what="a pipe that retires")


async def test_what_was_on_its_way_to_a_node_that_lost_its_slots_keeps_its_number(
    fakes: Fakes, link_to: LinkTo
) -> None:
    """And leaves it at once. Also while the new node is out of memory: it cannot know yet that an earlier copy was done."""
    first, second, _ = fakes.nodes
    link = await link_to(fakes.url, socket_timeout=10 * PATIENCE)

    def done_in_silence(call: list[str]) -> Any:
        fakes.run(call)
        return SILENT

    full = iter(range(3))

    def out_of_memory(call: list[str]) -> Any:
        return fakes.run(call) if next(full, None) is None else errs("OOM command not allowed")(call)

    first.does, second.does = done_in_silence, out_of_memory
    outcomes = Outcomes()
    link.post(append("t", "x"), outcomes)
    await until(lambda: first.ran)
    fakes.give((ALL, second))
    await outcomes.wait(1)
    assert outcomes.all == [(["ok", b"x", 1, 1], None)]
    assert numbers(second) == [("1", "1")] * 4


@pytest.mark.parametrize("answer", ["silence", "TRYAGAIN some keys are away"])
async def test_while_a_node_does_not_work_others_are_asked_who_has_its_slots(
    fakes: Fakes, link: Link, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    first, _, _ = fakes.nodes
    doubts: list[NodeEndpoint] = []
    invalidate = NodeEndpoint.invalidate
    monkeypatch.setattr(NodeEndpoint, "invalidate", lambda self: doubts.append(self) or invalidate(self))
    first.does = errs(answer) if answer != "silence" else lambda _: SILENT
    link.post(append("t", "x"), Outcomes())
    await until(lambda: len(doubts) > 5)


async def test_a_beat_that_is_redirected_has_the_nodes_asked(
    fakes: Fakes, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a worker that beats at the wrong node for long is taken for dead."""
    first, second, _ = fakes.nodes
    doubted = threading.Event()
    invalidate = ShardEndpoint.invalidate
    monkeypatch.setattr(ShardEndpoint, "invalidate", lambda self: doubted.set() or invalidate(self))
    call, beats = Command(ECHO_CALL.script, "{worqr}", ("a",), str), list[str]()
    heartbeat = link.heartbeat(
        make=lambda _number, _turning: call, replied=beats.append, every=0.05, block_limit=60, describe=lambda: ""
    )
    heartbeat.start()
    await until(lambda: beats)
    assert not doubted.is_set()
    first.does = errs(f"MOVED {slot_of('{worqr}')} {second.place}")
    await until(doubted.is_set)
    fakes.give((ALL, second))
    await until(lambda: second.ran, what="a beat at the other node")


# Patience, owners, the end


@pytest.mark.parametrize("answer", ["TRYAGAIN some keys are away", "ASK 1 {second}", "CLUSTERDOWN it is", "MOVED"])
async def test_patience_ends_wherever_a_call_is(fakes: Fakes, link: Link, answer: str) -> None:
    first, second, _ = fakes.nodes
    first.does = errs(answer.format(second=second.place)) if answer != "MOVED" else moved("Q", second)
    second.does = moved("Q", first)
    with pytest.raises(Unavailable) as caught:
        await link.call(append("t", "x"), patience=0.3)
    assert caught.value.sent is None
    first.does = second.does = None
    text, number, total = (await link.call(append("t", "y"), patience=PATIENCE))[1:]
    assert (text, number) == (b"y", 2)
    assert total in {1, 2}  # the first was on its way when its patience ended, or in a pause


async def test_calls_together_are_unsent_only_if_all_of_them_are(fakes: Fakes, link_to: LinkTo) -> None:
    first, _, _ = fakes.nodes
    fakes.give((HALVES[1], first))
    link = await link_to(fakes.url)
    link.settings = settings_with(link.settings, patience=0.2)  # only now: a slow machine may take longer to connect
    for others, sent in (([], False), ([append("t", "y", LOW)], False), ([append("t", "y", HIGH)], None)):
        for calls in ([append("t", "x", LOW), *others], [*others, append("t", "x", LOW)]):
            with pytest.raises(Unavailable, match="No node of") as caught:
                await link.call_all(calls)
            assert caught.value.sent is sent


async def test_a_slot_that_nobody_has_is_waited_for(fakes: Fakes, link_to: LinkTo) -> None:
    first, second, _ = fakes.nodes
    fakes.give((HALVES[1], first))
    link = await link_to(fakes.url)
    await link.call(append("t", "x", HIGH))
    with pytest.raises(
        Unavailable, match="No node of .* is known to have the slot. The request append waited 0.2 s"
    ) as caught:
        await link.call(append("t", "x", LOW), patience=0.2)
    assert caught.value.sent is False
    outcomes = Outcomes()
    link.post(append("t", "y", LOW), outcomes)
    listening = SubscriptionListener(link, f"t:{{{LOW}}}")
    fakes.give((HALVES[1], first), (HALVES[0], second))
    await outcomes.wait(1)
    assert outcomes.values == [["ok", b"y", 1, 1]]
    await listening.wait_confirmations(1)
    assert second.said("SSUBSCRIBE") == 1


async def test_patience_ends_in_the_lobby_while_silent_nodes_are_asked(link_to: LinkTo) -> None:
    """One after the other, each for a second."""
    with fakes_of(40) as fakes:
        for node in fakes.nodes:
            node.answers["CLUSTER SLOTS"] = lambda _: SILENT
        link = await link_to(fakes.url, ready=False)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="No node of .* has replied yet"):
            await link.call(ECHO_CALL, patience=0.2)
        assert time.monotonic() - began < PATIENCE / 2  # not after a whole look


async def test_whoever_waits_for_a_node_waits_for_the_next_one_that_has_its_slots(
    fakes: Fakes, link_to: LinkTo
) -> None:
    first, second, _ = fakes.nodes
    first.answers["CLIENT SETNAME"] = lambda _: SILENT
    link = await link_to(f"redis+cluster://{second.place}", ready=False)
    ready = trio.Event()

    async def wait() -> None:
        await link.wait_ready()
        ready.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await until(lambda: first.said("CLIENT", "SETNAME"))
        assert not ready.is_set()
        fakes.give((ALL, second))
        with trio.fail_after(PATIENCE):
            await ready.wait()


@pytest.mark.parametrize("where", ["lobby", "aside"])
async def test_what_a_dead_worker_wanted_is_given_up(fakes: Fakes, link_to: LinkTo, where: str) -> None:
    if where == "lobby":
        fakes.give((HALVES[1], fakes.nodes[0]))
    else:
        fakes.nodes[0].does = errs("TRYAGAIN some keys are away")
    link = await link_to(fakes.url)
    outcomes, owner = Outcomes(), WorkerHandle("W1")
    link.post(append("t", "x", LOW), outcomes, owner=owner)
    if where == "aside":
        await until(lambda: len(fakes.nodes[0].ran) > 1)
    owner.dead = True
    await outcomes.wait(1)
    [(_, error)] = outcomes.all
    assert isinstance(error, ClaimLost)
    assert "W1 is dead; append was given up" in str(error)


async def test_nobody_waits_when_a_link_is_closed(fakes: Fakes, link_to: LinkTo) -> None:
    """On their way, set aside, in the lobby, pointed to and fro, and those who listen."""
    first, second, third = fakes.nodes
    fakes.give(((0, 4000), first), ((4001, 8191), second), ((9000, 12000), third))
    link = await link_to(fakes.url)
    first.does, second.does = lambda _: SILENT, errs("TRYAGAIN some keys are away")
    third.does = errs(f"MOVED {slot_of('t:{Q2}')} {third.place}")
    outcomes = Outcomes()
    for queue in ("Q0", "Q1", "Q2", "Q3"):
        for number in range(3):
            link.post(append("t", str(number), queue), outcomes)
    homeless, listening = SubscriptionListener(link, "t:{Q3}"), SubscriptionListener(link, "t:{Q0}")
    await until(lambda: all(node.ran for node in fakes.nodes))
    before = len(outcomes.all)
    link.close()
    await outcomes.wait(12)
    assert before == 0
    assert {str(error) for _, error in outcomes.all} == {f"the link to {fakes.url} was closed"}
    for each in (homeless, listening):
        with pytest.raises(Unavailable, match="closed"), trio.fail_after(PATIENCE):
            await each.subscription.wait_confirmed()


class Boom(BaseException):
    """A bug that nothing catches."""


async def test_a_pipe_that_dies_of_a_bug_ends_the_link(
    fakes: Fakes, link_to: LinkTo, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = fakes.nodes
    fakes.give((HALVES[0], first), ((8192, 12000), second))
    second.does = lambda _: SILENT
    link = await link_to(fakes.url)
    outcomes = Outcomes()
    link.post(append("t", "on its way", HIGH), outcomes)
    link.post(append("t", "in the lobby", "Q3"), outcomes)
    await until(lambda: second.ran)

    def read(_: Any) -> Any:
        raise Boom("here")

    with pytest.raises(WorqrBug, match="Boom: here"), trio.fail_after(PATIENCE):
        await link.call(Command(echo("a").script, "t:{Q0}", ("a",), read))
    await outcomes.wait(2)
    assert any(isinstance(error, WorqrBug) for _, error in outcomes.all)
    with pytest.raises(WorqrBug):
        await link.call(ECHO_CALL)
    await until(lambda: len(lines(caplog, "link.died")) == 1)
    await until(lambda: threads("worqr-topology") == 0, what="threads that end")


# What nodes say of the cluster


@pytest.mark.parametrize("nonsense", ["OK", [["x", "y", ["127.0.0.1", 1]]], [[0, 99999, ["127.0.0.1", 1]]]])
async def test_an_answer_that_cannot_be_read_costs_a_look(
    fakes: Fakes, link_to: LinkTo, caplog: pytest.LogCaptureFixture, nonsense: Any
) -> None:
    for node in fakes.nodes:
        node.answers["CLUSTER SLOTS"] = lambda _: nonsense
    link = await link_to(fakes.url, ready=False)
    with pytest.raises(WorqrBug, match="the nodes cannot be asked"):
        await link.wait_ready()
    await until(lambda: lines(caplog, "link.topology"))
    outcomes = Outcomes()
    link.post(append("t", "x"), outcomes)
    for node in fakes.nodes:
        node.answers.clear()
    await outcomes.wait(1)
    assert outcomes.values == [["ok", b"x", 1, 1]]


@pytest.mark.parametrize("busy", ["BUSY a script runs", "LOADING the dataset", "MASTERDOWN the link"])
async def test_nodes_that_cannot_tell_just_now_are_asked_again(fakes: Fakes, link_to: LinkTo, busy: str) -> None:
    for node in fakes.nodes:
        node.answers["CLUSTER SLOTS"] = errs(busy)
    link = await link_to(fakes.url, ready=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wait_ready)
        await until(lambda: all(node.said("CLUSTER", "SLOTS") > 1 for node in fakes.nodes))
        for node in fakes.nodes:
            node.answers.clear()


async def test_a_node_that_says_that_the_cluster_works_is_believed(fakes: Fakes, link_to: LinkTo) -> None:
    first, second, third = fakes.nodes
    first.works = second.works = False
    third.slots = [(0, 16383, "127.0.0.1", second.port)]
    link = await link_to(fakes.url)
    await link.call(append("t", "x"))
    assert (len(first.ran), len(second.ran)) == (0, 1)


async def test_a_replica_knows_as_well_as_a_primary(fakes: Fakes, link_to: LinkTo) -> None:
    first, second, _ = fakes.nodes
    second.answers["INFO"] = lambda _: "redis_version:7.4.0\r\nrole:slave\r\n"
    link = await link_to(f"redis+cluster://{second.place}")
    await link.call(append("t", "x"))
    assert (len(first.ran), len(second.ran)) == (1, 0)


async def test_one_node_that_refuses_us_costs_its_own_queues_only(fakes: Fakes, link_to: LinkTo) -> None:
    first, second, _ = fakes.nodes
    first.answers["CLIENT SETNAME"] = errs("NOAUTH Authentication required.")
    fakes.give((HALVES[0], first), (HALVES[1], second))
    link = await link_to(fakes.url)
    await link.call(append("t", "x", HIGH))
    link.post(append("t", "x", LOW), Outcomes(), patience=0.1)  # which asks for a connection
    await until(lambda: (pipe := client_to(link, first)) and "check user and password" in pipe.outage.cause)
    with pytest.raises(Unavailable, match=r"check user and password"):
        await link.call(append("t", "x", LOW), patience=0.5)
    await link.call(append("t", "x", HIGH))


async def test_all_nodes_refuse_us(fakes: Fakes, link_to: LinkTo) -> None:
    for node in fakes.nodes:
        node.answers["CLUSTER SLOTS"] = errs("NOPERM this user has no permissions to run the 'cluster|slots' command")
    link = await link_to(fakes.url, ready=False)
    with pytest.raises(RefusedByServer, match="the right to CLUSTER SLOTS"):
        await link.wait_ready()


# Listening


async def test_the_registrys_channels_are_heard_at_its_node(fakes: Fakes, link: Link) -> None:
    """Not at one that had it before: it may be in the cluster no more, and hear nothing."""
    first, second, _ = fakes.nodes
    listening = await listener(link, "{worqr}:due")
    assert (first.said("SUBSCRIBE"), second.said("SUBSCRIBE")) == (1, 0)
    fakes.give((ALL, second))
    first.does = moved("Q", second)
    await link.call(append("t", "x"))
    await listening.wait_confirmations(2)
    assert second.said("SUBSCRIBE") == 1


async def test_a_channel_is_heard_where_its_slot_is(fakes: Fakes, link: Link) -> None:
    first, second, _ = fakes.nodes
    low, high = await listener(link, f"t:{{{LOW}}}"), await listener(link, f"t:{{{HIGH}}}")
    assert len(link.subscriptions._hubs) == 1  # type: ignore[union-attr]
    fakes.give((HALVES[0], first), (HALVES[1], second))
    first.answers["SSUBSCRIBE"] = moved(HIGH, second)
    first.cut()
    await high.wait_confirmations(2)
    del first.answers["SSUBSCRIBE"]
    await low.wait_confirmations(2)
    assert second.said("SSUBSCRIBE", f"t:{{{HIGH}}}") == 1
    assert second.said("SSUBSCRIBE", f"t:{{{LOW}}}") == 0
    fakes.give((ALL, second))
    first.cut()
    await until(lambda: len(link.subscriptions._hubs) == 1, what="the end of a connection that leads nowhere")  # type: ignore[union-attr]
    await until(lambda: second.said("SSUBSCRIBE", f"t:{{{LOW}}}"))
    low.subscription.close()
    await until(lambda: second.said("SUNSUBSCRIBE", f"t:{{{LOW}}}") == 1)


async def test_channels_are_asked_for_slot_by_slot(fakes: Fakes, link: Link) -> None:
    first, _, _ = fakes.nodes
    listening = [await listener(link, f"t:{{{queue}}}", f"t:{{{queue}}}:events") for queue in (LOW, HIGH)]
    first.cut()
    for each in listening:
        await each.wait_confirmations(2)
    assert sorted(words[1:] for words in first.heard if words[0] == "SSUBSCRIBE") == sorted(
        2 * [[f"t:{{{queue}}}", f"t:{{{queue}}}:events"] for queue in (LOW, HIGH)]
    )


async def test_a_channel_that_a_node_takes_away_is_asked_for_again(fakes: Fakes, link: Link) -> None:
    """Also if its slot came back before anybody looked."""
    first, _, _ = fakes.nodes
    listening = await listener(link, "t:{Q}")
    first.push("sunsubscribe", "t:{Q}", 0)
    await listening.wait_confirmations(2)
    assert first.said("SSUBSCRIBE") == 2
    first.push("smessage", "t:{Q}", "still")
    await until(lambda: listening.heard == [("t:{Q}", b"still")])


async def test_what_was_said_where_a_channel_was_before_is_not_heard(fakes: Fakes, link: Link) -> None:
    """Its owner looks for what was said meanwhile when it stands at the new place, and hears nothing twice."""
    first, second, _ = fakes.nodes
    stays, listening = await listener(link, f"t:{{{LOW}}}"), await listener(link, f"t:{{{HIGH}}}")
    before = listening.subscription.listener
    assert before is not None
    second.answers["SSUBSCRIBE"] = lambda _: SILENT
    fakes.give((HALVES[0], first), (HALVES[1], second))
    first.does = moved(HIGH, second)
    await link.call(append("t", "x", HIGH))
    await until(lambda: first.said("SUNSUBSCRIBE", f"t:{{{HIGH}}}"))
    first.push("smessage", f"t:{{{HIGH}}}", "late")
    first.push("smessage", f"t:{{{LOW}}}", "still")
    await stays.wait(1)
    receive_all([(before, f"t:{{{HIGH}}}", b"on its way into the loop"), (before, None, b"")])
    assert (listening.heard, listening.confirmations) == ([], 1)


# No thread to be had


async def test_a_channel_that_is_opened_while_the_link_ends_is_told(link: Link) -> None:
    await listener(link, "t:{Q}")
    [hub] = link.subscriptions._hubs.values()  # type: ignore[union-attr]
    assert isinstance(hub, Subscriptions)
    subscriptions = [SubscriptionListener(link, "t:{Q}") for _ in range(50)]
    link.close()
    for each in subscriptions:
        with trio.fail_after(PATIENCE):
            if not each.subscription._stood:
                with pytest.raises(Unavailable):
                    await each.subscription.wait_confirmed()


# Many threads


def test_plain_threads_call_many_nodes_together(fakes: Fakes) -> None:
    first, second, _ = fakes.nodes
    fakes.give((HALVES[0], first), (HALVES[1], second))
    link = Link(LinkSettings(fakes.url, app="test", patience=PATIENCE), ThreadDriver())
    link.start()
    try:
        for _ in range(20):
            calls = [append("t", str(number), (LOW, HIGH)[number % 2]) for number in range(20)]
            assert [value[1] for value in run_blocking(link.call_all(calls))] == [
                str(number).encode() for number in range(20)
            ]
    finally:
        link.close()
    assert len(fakes.stored) == 400


def test_an_interrupt_while_requests_leave_the_lobby_leaves_no_thread_waiting(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(LinkSettings("redis+cluster://127.0.0.1:1", patience=PATIENCE), ThreadDriver())
    link.start()
    router, start, failed = router_of(link), NodeClient.start, list[str]()

    def wait() -> None:
        with pytest.raises(Unavailable) as caught:
            run_blocking(link.call(echo("a")))
        failed.append(str(caught.value))

    def interrupted(self: NodeClient) -> None:
        start(self)
        raise KeyboardInterrupt

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not router._lobby.pending:
        time.sleep(0.005)
    router.topology.watcher.end()  # else its thread may send what is in the lobby, and Ctrl-C is the main thread's
    router.topology.view = TopologyView([Endpoint("127.0.0.1", fakes.nodes[0].port)] * SLOTS)
    monkeypatch.setattr(NodeClient, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_blocking(link.call(echo("b")))
    waiting.join(PATIENCE / 2)
    assert failed == ["the link was interrupted by KeyboardInterrupt while it was in use"]
    assert link.has_ended
    link.close()


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/s"])
def test_an_interrupt_while_the_link_ends_leaves_no_thread_waiting(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(LinkSettings(url), ThreadDriver())
    link.start()
    end, failed = EndpointWatcher.end, list[str]()

    def wait() -> None:
        with pytest.raises(Unavailable) as caught:
            run_blocking(link.call(echo("a"), patience=2 * PATIENCE))
        failed.append(str(caught.value))

    def interrupted(self: EndpointWatcher) -> None:
        end(self)
        raise KeyboardInterrupt

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    client = link._client
    while not (client._lobby if isinstance(client, ClusterRouter) else client.requests).pending:
        time.sleep(0.005)
    monkeypatch.setattr(EndpointWatcher, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.close()
    waiting.join(PATIENCE)
    assert ["was closed" in each for each in failed] == [True]


async def test_slots_wander_under_load_and_every_number_is_used_once(fakes: Fakes, link: Link) -> None:
    """Producers on two queues, while halves of the slots go round the nodes, which learn of it at their own time."""

    def run(node: FakeNode, queue_slots: dict[str, int], call: list[str]) -> Any:
        base = call[0]
        owner = next(port for first, last, _, port in fakes.slots if first <= queue_slots[base] <= last)
        if owner != node.port:
            return errs(f"MOVED {queue_slots[base]} 127.0.0.1:{owner}")(call)
        return fakes.run(call)

    slots = {f"t:{{{queue}}}": slot_of(f"t:{{{queue}}}") for queue in (LOW, HIGH)}
    for node in fakes.nodes:
        node.does = partial(run, node, slots)
    acknowledged: list[str] = []

    async def produce(queue: str, name: str) -> None:
        for number in range(60):
            text = f"{queue}{name}{number}"
            await link.call(append("t", text, queue))
            acknowledged.append(text)

    async with trio.open_nursery() as nursery:
        for queue in (LOW, HIGH):
            for name in "abc":
                nursery.start_soon(produce, queue, name)
        for turn in range(8):
            goal = len(acknowledged) + 30
            await until(lambda: len(acknowledged) >= min(goal, 360))  # noqa: B023
            one, other = fakes.nodes[turn % 3], fakes.nodes[(turn + 1) % 3]
            fakes.give((HALVES[0], one), (HALVES[1], other))
            if turn % 4 == 3:
                one.cut()
    texts = [value[1] for value in fakes.stored.values()]
    assert sorted(texts) == sorted(acknowledged)
    assert len(texts) == len(set(texts)) == 360
    for queue in (LOW, HIGH):
        used = sorted(int(number) for base, _, number in fakes.stored if queue in base)
        assert used == list(range(1, 181))


# A fork

CHILD = """
import os, sys
import trio
from tests.link.scripts import echo, tries_in_a_child
from worqr.link import Link, LinkSettings, TrioDriver

async def main():
    link = Link(LinkSettings(sys.argv[1]), TrioDriver())
    link.start()
    await link.wait_ready()
    subscriptions = [link.subscriptions.open([name], lambda *_: None, lambda: None) for name in ("t:{Q}", "{worqr}:due")]
    for subscription in subscriptions:
        await subscription.wait_confirmed()
    pid = os.fork()
    if pid == 0:
        import threading
        said = tries_in_a_child(link, "t:{Q}")
        link.close()
        print("child", *said, threading.active_count(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("parent", await link.call(echo("still here")), link.connections, flush=True)
    link.close()

trio.run(main)
"""


async def test_a_forked_child_refuses_and_the_parent_goes_on(fakes: Fakes, spawn: Callable[..., Child]) -> None:
    child = spawn(CHILD, fakes.url)
    assert await child.line() == "child fork fork fork 1"
    assert await child.line() == "parent still here 1"
    assert await child.ended() == 0
