"""The order of requests: what travels together, what is put back where, who is given up."""

from __future__ import annotations

import math

from tests.link.scripts import append, echo
from worqr.link.backlog import GUILTY_AFTER, MAX_BYTES, MAX_CALLS, Backlog
from worqr.link.request import Owner, Request


def request(patience: float = 30, *, size: int = 0, owner: Owner | None = None, now: float = 0) -> Request:
    call = echo("x")
    return Request(
        type(call)(call.script, call.base, call.keys, call.args, call.read, False, size), patience, now, owner
    )


def filled(*requests: Request) -> Backlog:
    backlog = Backlog()
    for each in requests:
        backlog.add(each)
    return backlog


def test_a_batch_holds_so_many_calls_in_order() -> None:
    requests = [request() for _ in range(MAX_CALLS + 1)]
    backlog = filled(*requests)
    assert backlog.take() == requests[:-1]
    assert backlog.take() == requests[-1:]


def test_a_batch_holds_so_many_bytes_and_a_larger_one_travels_alone() -> None:
    first, huge, last = request(size=1), request(size=MAX_BYTES + 1), request(size=1)
    backlog = filled(first, huge, last)
    assert [backlog.take(), backlog.take(), backlog.take()] == [[first], [huge], [last]]


def test_what_nobody_waits_for_is_not_taken() -> None:
    gone, wanted = request(), request()
    backlog = filled(gone, wanted)
    gone.abandoned = True
    assert backlog.take() == [wanted]


def test_put_back_means_to_the_front_in_order() -> None:
    old = [request(), request()]
    backlog = filled(*old)
    backlog.take()
    new = request()
    backlog.add(new)
    backlog.put_back(old)
    assert backlog.take() == [*old, new]


def test_after_two_losses_in_company_each_travels_alone() -> None:
    requests = [request() for _ in range(3)]
    backlog = filled(*requests)
    for _ in range(2):
        assert backlog.take() == requests
        assert backlog.blame(requests, 0) == []
    assert backlog.take() == requests[:1]


def test_the_guilty_one_fails_after_three_losses_alone_and_the_others_do_not() -> None:
    guilty, innocent = request(), request()
    backlog = filled(guilty, innocent)
    for _ in range(2):
        backlog.blame(backlog.take(), 0)
    for _ in range(2):
        assert backlog.blame(backlog.take(), 0) == []
    assert backlog.blame(backlog.take(), 0) == [guilty]
    assert backlog.take() == [innocent]


def test_a_guilty_one_with_an_owner_goes_on_behind_the_others() -> None:
    guilty, innocent = request(owner=Owner("W1")), request()
    backlog = filled(guilty, innocent)
    for _ in range(5):
        assert backlog.blame(backlog.take(), now=10) == []
    assert backlog.take() == [innocent]
    assert backlog.readmit(now=10) > 10
    assert backlog.take() == []
    assert backlog.readmit(now=100) == math.inf
    assert backlog.take() == [guilty]


def test_the_overdue_are_taken_out_and_the_others_stay() -> None:
    short, long = request(1), request(10)
    backlog = filled(short, long)
    assert backlog.overdue(0.5) == ([], [])
    assert backlog.overdue(1.5) == ([short], [])
    assert backlog.take() == [long]


def test_the_overdue_in_flight_are_told_but_stay_until_their_reply() -> None:
    short = request(1)
    backlog = filled(short)
    assert backlog.take() == [short]
    assert backlog.overdue(2) == ([short], [])
    assert backlog.in_flight == [short]


def test_no_number_stays_open_for_one_that_was_given_up() -> None:
    backlog = Backlog()
    first, second = (Request(append("t", "x"), 1, now) for now in (0.0, 100.0))
    backlog.add(first)
    backlog.add(second)
    for each in backlog.take():
        each.number = backlog.numbers.give(each.call.base)
    backlog.put_back([first, second])
    assert backlog.overdue(50) == ([first], [])
    assert backlog.numbers.lowest(second.call.base) == 2


def test_those_of_a_dead_owner_are_orphans_when_asked_for() -> None:
    owner = Owner("W1")
    orphan, other = request(math.inf, owner=owner), request(math.inf)
    backlog = filled(orphan, other)
    owner.dead = True
    assert backlog.overdue(0, owners=True) == ([], [orphan])
    assert backlog.take() == [other]


def test_the_abandoned_do_not_pile_up_in_an_outage() -> None:
    requests = [request(math.inf) for _ in range(100)]
    backlog = filled(*requests)
    for each in requests:
        each.abandoned = True
    backlog.overdue(0, owners=True)
    assert not backlog.pending


def test_many_deadlines_do_not_cost_a_scan_each() -> None:
    backlog = filled(*(request(1 + i / 1000) for i in range(100)))
    backlog.overdue(1.0005)
    assert backlog.next_scan() >= 1.05


def test_what_belongs_elsewhere_is_taken_out_in_its_order() -> None:
    """What was set aside came before what waits; what is in flight stays, and so does a guilty one until its pause is over."""
    aside, guilty, flying, waiting, ours = (request() for _ in range(5))
    backlog = filled(aside, guilty)
    backlog.take()
    backlog.put_back([])
    backlog.set_aside([aside, guilty], 9)
    guilty.lost_alone = GUILTY_AFTER
    backlog.add(flying)
    backlog.take()
    backlog.add(waiting)
    backlog.add(ours)
    assert backlog.take_out(lambda request: request is ours) == [aside, waiting]
    assert backlog.in_flight == [flying]
    backlog.put_back([flying])
    assert backlog.take_out(lambda request: request is ours) == [flying]
    backlog.readmit(10)
    assert backlog.take_out(lambda _: False) == [ours, guilty]
    assert backlog.is_empty()
