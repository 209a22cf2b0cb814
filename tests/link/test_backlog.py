"""The order of requests: what travels together, what is put back where, who is given up."""

from __future__ import annotations

import math
import re

from tests.link.scripts import append, echo
from worqr.errors import Unavailable
from worqr.link.backlog import GUILTY_AFTER, MAX_BYTES, MAX_CALLS, SEND_AGAIN_WITHIN, Backlog
from worqr.link.clocks import boottime
from worqr.link.giving_up import too_old
from worqr.link.request import Owner, Request
from worqr.lua import script


def request(
    patience: float = 30, *, size: int = 0, owner: Owner | None = None, now: float = 0, base: str = "t"
) -> Request:
    call = echo("x")
    return Request(type(call)(call.script, base, call.keys, call.args, call.read, False, size), patience, now, owner)


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
    backlog.readmit(now=10)
    assert backlog.next_pause() > 10
    assert backlog.take() == []
    backlog.readmit(now=100)
    assert backlog.next_pause() == math.inf
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
    assert backlog.next_deadline >= 1.05


def test_what_belongs_elsewhere_is_taken_out_in_its_order() -> None:
    """What was set aside came before what waits; an outcast stays until its pause is over."""
    aside, guilty, flying, waiting, ours = (request(base=base) for base in ("a", "g", "f", "a", "o"))
    backlog = filled(guilty, aside)
    guilty.owner, guilty.lost_alone, guilty.losses = Owner("W1"), GUILTY_AFTER - 1, GUILTY_AFTER
    assert backlog.take() == [guilty]
    backlog.blame([guilty], now=8)
    assert backlog.take() == [aside]
    backlog.put_back([aside])
    backlog.set_aside(["a"], 9)
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


def test_what_is_in_flight_is_not_overtaken_by_what_is_taken_out() -> None:
    flying, later, other = request(base="a"), request(base="a"), request(base="b")
    backlog = filled(flying)
    backlog.take()
    backlog.add(later)
    backlog.add(other)
    assert backlog.take_out(lambda _: False) == [other]
    backlog.put_back([flying])
    assert backlog.take_out(lambda _: False) == [flying, later]


def test_later_requests_of_a_base_wait_behind_one_that_is_set_aside() -> None:
    first, second, third, other = request(base="a"), request(base="a"), request(base="a"), request(base="b")
    backlog = filled(first, second)
    backlog.take()
    backlog.add(other)
    backlog.put_back([first, second])
    backlog.set_aside(["a"], until=10)
    backlog.add(third)
    assert backlog.take() == [other]
    assert (backlog.is_empty(), backlog.is_usual(), backlog.bases()) == (False, False, {"a", "b"})
    backlog.put_back([])
    backlog.readmit(now=9.9)
    assert backlog.next_pause() == 10
    assert backlog.take() == []
    backlog.readmit(now=10)
    assert backlog.next_pause() == math.inf
    assert backlog.take() == [first, second, third]


def test_those_that_are_set_aside_expire_too_and_block_nobody_then() -> None:
    short, long = request(1, base="a"), request(10, base="a")
    backlog = filled(short)
    backlog.put_back(backlog.take())
    backlog.set_aside(["a"], until=100)
    assert backlog.overdue(2) == ([short], [])
    assert backlog.held == {}
    backlog.add(long)
    assert backlog.take() == [long]


def test_the_end_finds_those_that_are_set_aside() -> None:
    aside, waiting = request(base="a"), request(base="b")
    backlog = filled(aside, waiting)
    backlog.set_aside(["a"], until=100)
    assert backlog.clear() == [aside, waiting]
    assert backlog.is_empty()


def test_an_outcast_does_not_hold_up_its_queue() -> None:
    """It breaks every connection. If others waited for it, its queue would stand still until its worker is dead."""
    guilty, later = request(base="a", owner=Owner("W1")), request(base="a")
    backlog = filled(guilty)
    for _ in range(GUILTY_AFTER):
        backlog.blame(backlog.take(), now=0)
    backlog.add(later)
    assert backlog.take() == [later]


def test_an_outcast_that_is_readmitted_while_its_base_is_set_aside_waits_too() -> None:
    guilty, waiting = request(base="a", owner=Owner("W1")), request(base="a")
    backlog = filled(guilty)
    for _ in range(GUILTY_AFTER):
        backlog.blame(backlog.take(), now=0)
    backlog.add(waiting)
    backlog.set_aside(["a"], until=100)
    backlog.readmit(now=50)
    assert backlog.next_pause() == 100
    assert backlog.take() == []
    backlog.readmit(now=100)
    assert backlog.take() == [waiting], "an outcast travels alone"
    backlog.put_back([])
    assert backlog.take() == [guilty]


def numbered(backlog: Backlog) -> Request:
    """One that was sent before."""
    sent = Request(append("t", "x"), math.inf, 0)
    sent.number, sent.written, sent.written_at = backlog.numbers.give(sent.call.base), True, boottime()
    backlog.add(sent)
    return sent


def test_a_numbered_request_is_not_sent_again_when_the_server_may_have_forgotten_it() -> None:
    backlog = Backlog()
    old, young = numbered(backlog), numbered(backlog)
    old.written_at -= SEND_AGAIN_WITHIN + 1
    assert backlog.take() == [young]
    assert [request.error for request in too_old(backlog)] != [None]
    assert isinstance(old.error, Unavailable)
    assert old.error.sent is None
    assert backlog.too_old == []


def test_what_has_no_number_is_sent_again_however_old_it_is() -> None:
    """A settle names its claim: the server knows it for as long as it is held."""
    settle = request(owner=Owner("W1"))
    backlog = filled(settle)
    settle.written, settle.written_at = True, boottime() - 2 * SEND_AGAIN_WITHIN
    assert backlog.take() == [settle]
    assert backlog.too_old == []


def test_requests_are_sent_again_for_less_time_than_the_server_remembers_them() -> None:
    assert int(re.findall(r"REPLIES_EXPIRE = (\d+)", script("enqueue").source)[0]) - SEND_AGAIN_WITHIN >= 600
