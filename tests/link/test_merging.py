"""Enqueues that wait at the same time go out as one script call, and every caller still gets an answer of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

import worqr
import worqr.command
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys
from worqr.link.session import GUILTY_AFTER, MergedRequest, Request, RequestQueue, give_up

Q1, Q2 = QueueKeys("p", "Q1"), QueueKeys("p", "Q2")


def _requests(*calls: worqr.command.Command[int]) -> tuple[RequestQueue, list[Request]]:
    request_queue = RequestQueue()
    requests = [Request(call, 30.0, 0.0) for call in calls]
    for request in requests:
        request_queue.add(request)
    return request_queue, requests


def test_those_of_one_queue_become_one_in_their_order() -> None:
    calls = [ops.enqueue(q, tasks) for q, tasks in ((Q1, [b"a"]), (Q1, [b"b", b"c"]), (Q2, [b"d"]), (Q1, [b"e"]))]
    request_queue, _ = _requests(*calls)
    one, two = request_queue.take()
    assert isinstance(one, MergedRequest)
    assert one.call.args[2:] == (b"a", b"b", b"c", b"e"), "also past those of another queue"
    assert two.call.args[2:] == (b"d",)


def test_none_overtakes_what_its_own_queue_was_asked_before() -> None:
    calls = [ops.enqueue(Q1, [b"a"]), ops.pause(Q1, "lunch"), ops.enqueue(Q2, [b"b"]), ops.enqueue(Q1, [b"c"])]
    request_queue, _ = _requests(*calls)
    assert [(r.call.script.name, r.call.base[-4:]) for r in request_queue.take()] == [
        *(("enqueue", "{Q1}"), ("pause", "{Q1}"), ("enqueue", "{Q2}"), ("enqueue", "{Q1}"))
    ]


@pytest.mark.parametrize("odd", [ops.enqueue(Q1, [b"b"], front=True), ops.enqueue(Q1, [b"b"], max_length=5)])
def test_what_has_conditions_of_its_own_stays_alone(odd: worqr.command.Command[int]) -> None:
    request_queue, _ = _requests(ops.enqueue(Q1, [b"a"]), odd, ops.enqueue(Q1, [b"c"]))
    assert [request.call.args[2:] for request in request_queue.take()] == [(b"a",), (b"b",), (b"c",)]


def test_a_withdrawn_one_is_left_out_and_what_was_written_is_not_touched() -> None:
    request_queue, requests = _requests(*(ops.enqueue(Q1, [b"%d" % n]) for n in range(4)))
    requests[1].abandoned = True
    requests[2].written_at = 1.0
    assert [request.call.args[2:] for request in request_queue.take()] == [(b"0",), (b"2",), (b"3",)]


def test_callers_with_another_patience_are_not_joined() -> None:
    request_queue, (one, _) = _requests(ops.enqueue(Q1, [b"a"]), ops.enqueue(Q1, [b"b"]))
    one.patience = 1.0
    assert len(request_queue.take()) == 2


def test_one_that_nobody_waits_for_any_more_is_not_sent_again() -> None:
    request_queue, parts = _requests(ops.enqueue(Q1, [b"a"]), ops.enqueue(Q1, [b"b"]))
    batch = request_queue.take()
    parts[0].abandoned = True
    request_queue.put_back(batch)
    assert request_queue.take() == batch, "somebody still waits"
    parts[1].abandoned = True
    request_queue.put_back(batch)
    assert not request_queue.take()


def test_each_part_has_its_own_patience() -> None:
    """In an outage they are joined at each try, however long one has waited before the other came."""
    request_queue, parts = (
        RequestQueue(),
        [Request(ops.enqueue(Q1, [b"%d" % n]), 6.0, now) for n, now in enumerate((0.0, 4.5))],
    )
    for part in parts:
        request_queue.add(part)
    [merged] = request_queue.take()
    assert isinstance(merged, MergedRequest)
    assert request_queue.overdue(6.1) == ([parts[0]], [])
    assert (parts[0].settled, parts[1].settled, merged.settled) == (True, False, False)
    request_queue.put_back([merged])
    assert request_queue.take() == [merged]
    assert request_queue.next_deadline == 10.5
    merged.value, merged.settled = 2, True
    merged.parts[0].error = error = worqr.Unavailable("it waited")
    merged._share()
    assert (parts[0].error, parts[0].value, parts[1].error, parts[1].value) == (error, None, None, 1)


def test_a_merged_request_is_over_with_its_last_part() -> None:
    request_queue, parts = RequestQueue(), [Request(ops.enqueue(Q1, [b"%d" % n]), 6.0, n) for n in range(3)]
    for part in parts:
        request_queue.add(part)
    [merged] = batch = request_queue.take()
    request_queue.put_back(batch)
    parts[2].abandoned = True
    assert request_queue.overdue(6.1) == ([parts[0]], [])
    assert request_queue.overdue(7.1) == ([parts[1]], [])
    assert merged.settled
    assert request_queue.is_empty()


def test_a_part_that_waited_too_long_knows_whether_it_was_sent() -> None:
    request_queue, parts = _requests(ops.enqueue(Q1, [b"a"]), ops.enqueue(Q1, [b"b"]))
    [merged] = request_queue.take()
    merged.written_at = 1.0
    late, _ = request_queue.overdue(31)
    give_up(late, [], "the server is away")
    for part in parts:
        assert isinstance(part.error, worqr.Unavailable)
        assert part.error.sent is None


def test_a_part_that_is_over_takes_no_share_of_another() -> None:
    """The ids that a dispatch answers are in the order of its parts."""
    request_queue = RequestQueue()
    parts = [Request(ops.dispatch_jobs(Q1, [({}, b"%d" % n)]), 30.0, 0.0) for n in range(3)]
    for part in parts:
        request_queue.add(part)
    parts[1].deadline = 1.0
    [merged] = request_queue.take()
    assert isinstance(merged, MergedRequest)
    assert request_queue.overdue(2, owners=True) == ([parts[1]], [])
    merged.value = ["first", "second", "third"]
    merged._share()
    assert [part.value for part in parts] == [["first"], None, ["third"]]


def test_one_that_loses_every_connection_waits_for_the_end_of_patience() -> None:
    request_queue, _ = _requests(ops.enqueue(Q1, [b"a"]), ops.enqueue(Q1, [b"b"]))
    for _ in range(GUILTY_AFTER):
        assert request_queue.blame(request_queue.take(), 0.0) == []
    assert not request_queue.take()
    assert len(request_queue.held) == 1, "tried again later, behind the others"


def test_a_merged_request_holds_a_thousand_tasks_at_most() -> None:
    request_queue, _ = _requests(*(ops.enqueue(Q1, [b"x"] * 400) for _ in range(5)))
    assert [len(request.call.args) - 2 for request in request_queue.take()] == [800, 800, 400]


async def _concurrently(mesh: worqr.Mesh, *tasks: bytes) -> list[object]:
    outcomes: list[object] = [None] * len(tasks)

    async def one(i: int) -> None:
        try:
            outcomes[i] = await mesh.queue("Q1").enqueue(tasks[i])
        except worqr.WorqrError as error:
            outcomes[i] = error

    async with trio.open_nursery() as nursery:
        for i in range(len(tasks)):
            nursery.start_soon(one, i)
    return outcomes


async def test_every_caller_gets_its_own_answer(server: Server, prefix: str, proxy: FaultProxy) -> None:
    mesh = worqr.Mesh(proxy.url, prefix=prefix)
    tasks = [b"%d" % n for n in range(50)]
    async with mesh.connect():
        assert await _concurrently(mesh, *tasks) == [1] * 50
        assert sorted(await mesh.queue("Q1").tasks()) == sorted(tasks)
    assert proxy.count(sent_as("enqueue")) < 10


async def test_a_lost_reply_stores_each_of_them_once(server: Server, prefix: str, proxy: FaultProxy) -> None:
    mesh = worqr.Mesh(proxy.url, prefix=prefix)
    tasks = [b"%d" % n for n in range(50)]
    async with mesh.connect():
        fault = proxy.drop_reply(sent_as("enqueue"))
        assert await _concurrently(mesh, *tasks) == [1] * 50
        assert fault.fired
        assert sorted(await mesh.queue("Q1").tasks()) == sorted(tasks)


async def test_an_error_is_everybodys_and_each_gets_a_copy(own_server: Server, prefix: str) -> None:
    client = own_server.client()
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.queue("Q1").count()
        client.config_set("maxmemory", 1)
        errors = await _concurrently(mesh, *[b"%d" % n for n in range(20)])
        client.config_set("maxmemory", 0)
    assert all(isinstance(error, worqr.QueueFull) for error in errors)
    assert len({id(error) for error in errors}) == 20


async def test_memory_that_ran_out_between_a_lost_reply_and_the_resend_is_no_refusal(
    own_server: Server, prefix: str, proxy_to: Callable[[Server], FaultProxy]
) -> None:
    proxy, client = proxy_to(own_server), own_server.client()
    mesh = worqr.Mesh(proxy.url, prefix=prefix)
    async with mesh.connect():
        await mesh.queue("Q1").count()
        fault = proxy.hold_reply(sent_as("enqueue"))
        async with trio.open_nursery() as nursery:
            stored: list[int] = []

            async def enqueue() -> None:
                stored.append(await mesh.queue("Q1").enqueue(b"T1"))

            nursery.start_soon(enqueue)
            await fault.wait_executed()
            client.config_set("maxmemory", 1)
            proxy.cut()
            await trio.sleep(0.3)  # the resends are refused meanwhile: nothing must be said
            assert not stored
            client.config_set("maxmemory", 0)
        assert stored == [1]
        assert await mesh.queue("Q1").tasks() == [b"T1"]
