"""The order of requests: what travels together, what is put back where, who is given up."""

from __future__ import annotations

import math
import re
from pathlib import Path

from tests.link.scripts import append, echo
from worqr import lua
from worqr.errors import Unavailable
from worqr.link.log_thread import boottime
from worqr.link.session import (
    GUILTY_AFTER,
    MAX_BYTES,
    MAX_CALLS,
    SEND_AGAIN_WITHIN,
    Request,
    RequestQueue,
    WorkerHandle,
    too_old,
)


def request(
    patience: float = 30, *, size: int = 0, owner: WorkerHandle | None = None, now: float = 0, base: str = "t"
) -> Request:
    call = echo("x")
    return Request(type(call)(call.script, base, call.args, call.read, False, size), patience, now, owner)


def filled(*requests: Request) -> RequestQueue:
    request_queue = RequestQueue()
    for each in requests:
        request_queue.add(each)
    return request_queue


def test_a_batch_holds_so_many_calls_in_order() -> None:
    requests = [request() for _ in range(MAX_CALLS + 1)]
    request_queue = filled(*requests)
    assert request_queue.take() == requests[:-1]
    assert request_queue.take() == requests[-1:]


def test_a_batch_holds_so_many_bytes_and_a_larger_one_travels_alone() -> None:
    first, huge, last = request(size=1), request(size=MAX_BYTES + 1), request(size=1)
    request_queue = filled(first, huge, last)
    assert [request_queue.take(), request_queue.take(), request_queue.take()] == [[first], [huge], [last]]


def test_what_nobody_waits_for_is_not_taken() -> None:
    gone, wanted = request(), request()
    request_queue = filled(gone, wanted)
    gone.abandoned = True
    assert request_queue.take() == [wanted]


def test_put_back_means_to_the_front_in_order() -> None:
    old = [request(), request()]
    request_queue = filled(*old)
    request_queue.take()
    new = request()
    request_queue.add(new)
    request_queue.put_back(old)
    assert request_queue.take() == [*old, new]


def test_after_two_losses_in_company_each_travels_alone() -> None:
    requests = [request() for _ in range(3)]
    request_queue = filled(*requests)
    for _ in range(2):
        assert request_queue.take() == requests
        assert request_queue.blame(requests, 0) == []
    assert request_queue.take() == requests[:1]


def test_the_guilty_one_fails_after_three_losses_alone_and_the_others_do_not() -> None:
    guilty, innocent = request(), request()
    request_queue = filled(guilty, innocent)
    for _ in range(2):
        request_queue.blame(request_queue.take(), 0)
    for _ in range(2):
        assert request_queue.blame(request_queue.take(), 0) == []
    assert request_queue.blame(request_queue.take(), 0) == [guilty]
    assert request_queue.take() == [innocent]


def test_a_guilty_one_with_an_owner_goes_on_behind_the_others() -> None:
    guilty, innocent = request(owner=WorkerHandle("W1")), request()
    request_queue = filled(guilty, innocent)
    for _ in range(5):
        assert request_queue.blame(request_queue.take(), now=10) == []
    assert request_queue.take() == [innocent]
    request_queue.release_due(now=10)
    assert request_queue.next_pause() > 10
    assert request_queue.take() == []
    request_queue.release_due(now=100)
    assert request_queue.next_pause() == math.inf
    assert request_queue.take() == [guilty]


def test_the_overdue_are_taken_out_and_the_others_stay() -> None:
    short, long = request(1), request(10)
    request_queue = filled(short, long)
    assert request_queue.overdue(0.5) == ([], [])
    assert request_queue.overdue(1.5) == ([short], [])
    assert request_queue.take() == [long]


def test_the_overdue_in_flight_are_told_but_stay_until_their_reply() -> None:
    short = request(1)
    request_queue = filled(short)
    assert request_queue.take() == [short]
    assert request_queue.overdue(2) == ([short], [])
    assert request_queue.in_flight == [short]


def test_no_number_stays_open_for_one_that_was_given_up() -> None:
    request_queue = RequestQueue()
    first, second = (Request(append("t", "x"), 1, now) for now in (0.0, 100.0))
    request_queue.add(first)
    request_queue.add(second)
    for each in request_queue.take():
        request_queue.numbers.give(each, 0.0)
    request_queue.put_back([first, second])
    assert request_queue.overdue(50) == ([first], [])
    assert request_queue.numbers.open[second.call.base][0] == 2


def test_those_of_a_dead_owner_are_orphans_when_asked_for() -> None:
    owner = WorkerHandle("W1")
    orphan, other = request(math.inf, owner=owner), request(math.inf)
    request_queue = filled(orphan, other)
    owner.dead = True
    assert request_queue.overdue(0, owners=True) == ([], [orphan])
    assert request_queue.take() == [other]


def test_the_abandoned_do_not_pile_up_in_an_outage() -> None:
    requests = [request(math.inf) for _ in range(100)]
    request_queue = filled(*requests)
    for each in requests:
        each.abandoned = True
    request_queue.overdue(0, owners=True)
    assert not request_queue.pending


def test_many_deadlines_do_not_cost_a_scan_each() -> None:
    request_queue = filled(*(request(1 + i / 1000) for i in range(100)))
    request_queue.overdue(1.0005)
    assert request_queue.next_deadline >= 1.05


def test_what_belongs_elsewhere_is_taken_out_in_its_order() -> None:
    """What was set aside came before what waits; a quarantined request stays until its pause is over."""
    aside, guilty, flying, waiting, ours = (request(base=base) for base in ("a", "g", "f", "a", "o"))
    request_queue = filled(guilty, aside)
    guilty.owner, guilty.losses = WorkerHandle("W1"), GUILTY_AFTER - 1
    assert request_queue.take() == [guilty]
    request_queue.blame([guilty], now=8)
    assert request_queue.take() == [aside]
    request_queue.put_back([aside])
    request_queue.set_aside(["a"], 9)
    request_queue.add(flying)
    request_queue.take()
    request_queue.add(waiting)
    request_queue.add(ours)
    assert request_queue.remove(lambda request: request is ours) == [aside, waiting]
    assert request_queue.in_flight == [flying]
    request_queue.put_back([flying])
    assert request_queue.remove(lambda request: request is ours) == [flying]
    request_queue.release_due(10)
    assert request_queue.remove(lambda _: False) == [ours, guilty]
    assert request_queue.is_empty()


def test_what_is_in_flight_is_not_overtaken_by_what_is_taken_out() -> None:
    flying, later, other = request(base="a"), request(base="a"), request(base="b")
    request_queue = filled(flying)
    request_queue.take()
    request_queue.add(later)
    request_queue.add(other)
    assert request_queue.remove(lambda _: False) == [other]
    request_queue.put_back([flying])
    assert request_queue.remove(lambda _: False) == [flying, later]


def test_later_requests_of_a_base_wait_behind_one_that_is_set_aside() -> None:
    first, second, third, other = request(base="a"), request(base="a"), request(base="a"), request(base="b")
    request_queue = filled(first, second)
    request_queue.take()
    request_queue.add(other)
    request_queue.put_back([first, second])
    request_queue.set_aside(["a"], until=10)
    request_queue.add(third)
    assert request_queue.take() == [other]
    assert (request_queue.is_empty(), bool(request_queue.held), request_queue.bases()) == (
        False,
        True,
        {"a", "b"},
    )
    request_queue.put_back([])
    request_queue.release_due(now=9.9)
    assert request_queue.next_pause() == 10
    assert request_queue.take() == []
    request_queue.release_due(now=10)
    assert request_queue.next_pause() == math.inf
    assert request_queue.take() == [first, second, third]


def test_those_that_are_set_aside_expire_too_and_block_nobody_then() -> None:
    short, long = request(1, base="a"), request(10, base="a")
    request_queue = filled(short)
    request_queue.put_back(request_queue.take())
    request_queue.set_aside(["a"], until=100)
    assert request_queue.overdue(2) == ([short], [])
    assert request_queue.held == {}
    request_queue.add(long)
    assert request_queue.take() == [long]


def test_the_end_finds_those_that_are_set_aside() -> None:
    aside, waiting = request(base="a"), request(base="b")
    request_queue = filled(aside, waiting)
    request_queue.set_aside(["a"], until=100)
    assert request_queue.clear() == [aside, waiting]
    assert request_queue.is_empty()


def test_a_quarantined_request_does_not_hold_up_its_queue() -> None:
    """It breaks every connection. If others waited for it, its queue would stand still until its worker is dead."""
    guilty, later = request(base="a", owner=WorkerHandle("W1")), request(base="a")
    request_queue = filled(guilty)
    for _ in range(GUILTY_AFTER):
        request_queue.blame(request_queue.take(), now=0)
    request_queue.add(later)
    assert request_queue.take() == [later]


def test_a_quarantined_request_that_is_released_while_its_base_is_set_aside_waits_too() -> None:
    guilty, waiting = request(base="a", owner=WorkerHandle("W1")), request(base="a")
    request_queue = filled(guilty)
    for _ in range(GUILTY_AFTER):
        request_queue.blame(request_queue.take(), now=0)
    request_queue.add(waiting)
    request_queue.set_aside(["a"], until=100)
    request_queue.release_due(now=50)
    assert request_queue.next_pause() == 100
    assert request_queue.take() == []
    request_queue.release_due(now=100)
    assert request_queue.take() == [waiting], "a quarantined request is sent alone"
    request_queue.put_back([])
    assert request_queue.take() == [guilty]


def numbered(request_queue: RequestQueue) -> Request:
    """One that was sent before."""
    sent = Request(append("t", "x"), math.inf, 0)
    request_queue.numbers.give(sent, 0.0)
    sent.written_at = boottime()
    request_queue.add(sent)
    return sent


def test_a_numbered_request_is_not_sent_again_when_the_server_may_have_forgotten_it() -> None:
    request_queue = RequestQueue()
    old, young = numbered(request_queue), numbered(request_queue)
    old.written_at -= SEND_AGAIN_WITHIN + 1
    assert request_queue.take() == [young]
    too_old(request_queue.take_too_old())
    assert isinstance(old.error, Unavailable)
    assert old.error.sent is None
    assert request_queue.too_old == []


def test_a_request_is_neither_sent_nor_sent_again_when_its_time_has_passed() -> None:
    request_queue = RequestQueue()
    late, again, young = numbered(request_queue), numbered(request_queue), numbered(request_queue)
    late.written_at = math.inf
    for each, left in ((late, -1), (again, -1), (young, 60)):
        each.call.not_after = boottime() + left
    assert request_queue.take() == [young]
    too_old(request_queue.take_too_old())
    assert isinstance(late.error, Unavailable)
    assert isinstance(again.error, Unavailable)
    assert (late.error.sent, again.error.sent) == (False, None)


def test_what_has_no_number_is_sent_again_however_old_it_is() -> None:
    """A settle names its claim: the server knows it for as long as it is held."""
    settle = request(owner=WorkerHandle("W1"))
    request_queue = filled(settle)
    settle.written_at = boottime() - 2 * SEND_AGAIN_WITHIN
    assert request_queue.take() == [settle]
    assert request_queue.too_old == []


def test_requests_are_sent_again_for_less_time_than_the_server_remembers_them() -> None:
    assert (
        int(re.findall(r"REPLIES_EXPIRE = (\d+)", (Path(lua.__file__).parent / "values.lua").read_text("utf-8"))[0])
        - SEND_AGAIN_WITHIN
        >= 600
    )
