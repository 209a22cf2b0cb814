"""The states of a start request, as the table in the docstring of `ClaimRequest` has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from worqr.peer.scheduler import ClaimRequest, RequestState

IDLE, WANTED, IN_FLIGHT, AGAIN = RequestState

Event = Callable[[ClaimRequest], object]


def request_in(state: RequestState, reserved: int = 0) -> ClaimRequest:
    """A request in this state, reached by its methods."""
    request = ClaimRequest()
    if state is not IDLE:
        request.want()
    if state in {IN_FLIGHT, AGAIN}:
        if reserved:
            request.send(reserved)
        else:
            request.refused()
            request.send(0)
        if state is AGAIN:
            request.want()
    assert (request.state, request.reserved) == (state, reserved)
    return request


WANT: Event = ClaimRequest.want
MORE: Event = lambda request: request.replied(True, 0)  # noqa: E731
SHORT: Event = lambda request: request.replied(False, 0)  # noqa: E731
TABLE = [
    (IDLE, 0, WANT, WANTED),
    (WANTED, 0, WANT, WANTED),
    (IN_FLIGHT, 3, WANT, AGAIN),
    (IN_FLIGHT, 0, WANT, AGAIN),
    (AGAIN, 3, WANT, AGAIN),
    (IDLE, 0, lambda request: request.send(0), IN_FLIGHT),
    (WANTED, 0, lambda request: request.send(3), IN_FLIGHT),
    (WANTED, 0, lambda request: request.send(0), AGAIN),
    (IN_FLIGHT, 3, MORE, WANTED),
    (IN_FLIGHT, 3, SHORT, IDLE),
    (IN_FLIGHT, 0, MORE, IDLE),
    (IN_FLIGHT, 0, SHORT, IDLE),
    (AGAIN, 3, SHORT, WANTED),
    (AGAIN, 0, SHORT, WANTED),
    (IN_FLIGHT, 3, ClaimRequest.refused, IDLE),
    (IN_FLIGHT, 0, ClaimRequest.refused, IDLE),
    (AGAIN, 3, ClaimRequest.refused, IDLE),
    (IN_FLIGHT, 3, ClaimRequest.discarded, WANTED),
    (IN_FLIGHT, 0, ClaimRequest.discarded, IDLE),
    (AGAIN, 0, ClaimRequest.discarded, WANTED),
    (AGAIN, 3, ClaimRequest.discarded, WANTED),
]


@pytest.mark.parametrize(("before", "reserved", "event", "after"), TABLE)
def test_the_states_follow_each_other_as_the_table_says(
    before: RequestState, reserved: int, event: Event, after: RequestState
) -> None:
    request = request_in(before, reserved)
    event(request)
    assert request.state is after
    assert request.in_flight == (after in {IN_FLIGHT, AGAIN})
    if not request.in_flight:
        assert request.reserved == 0


@pytest.mark.parametrize(
    ("before", "reserved", "began"), [(IDLE, 0, True), (WANTED, 0, False), (IN_FLIGHT, 3, False), (IN_FLIGHT, 0, True)]
)
def test_want_tells_whether_there_was_no_reason_before(before: RequestState, reserved: int, began: bool) -> None:
    assert request_in(before, reserved).want() is began


@pytest.mark.parametrize("before", [IDLE, WANTED])
@pytest.mark.parametrize("wanted", [0, 3])
def test_a_wake_up_is_pending_until_the_next_request(before: RequestState, wanted: int) -> None:
    request = request_in(before)
    request.wake()
    assert request.wakeup_pending
    request.send(wanted)
    assert not request.wakeup_pending
    request.wake()
    request.replied(False, 0)
    assert request.wakeup_pending


def test_a_recheck_is_taken_once() -> None:
    request = request_in(IN_FLIGHT, 3)
    request.recheck()
    assert [request.take_recheck(), request.take_recheck()] == [True, False]
