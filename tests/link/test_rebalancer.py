"""Who gets the new requests of a slot that has moved."""

from __future__ import annotations

from worqr.link.cluster import SlotOrder
from worqr.link.settings import Endpoint

A, B = Endpoint("a", 1), Endpoint("b", 2)


def test_a_slot_that_stays_has_its_owners_pipe() -> None:
    order = SlotOrder()
    assert order.choose(7, A) == order.choose(7, A) == (A, False)
    assert not order.is_passing(A)


def test_new_requests_of_a_moved_slot_go_to_the_old_pipe_until_it_has_none_left() -> None:
    order = SlotOrder()
    order.choose(7, A)
    order.choose(8, A)
    assert order.choose(7, B) == (A, True), "which is told once"
    assert order.choose(7, B) == order.choose(8, B) == (A, False)
    order.passed(A, left=[7])
    assert order.is_passing(A)
    assert order.choose(8, B) == (B, False)
    assert order.choose(7, B) == (A, False)
    order.passed(A, left=[])
    assert not order.is_passing(A)
    assert order.choose(7, B) == (B, False)


def test_a_pipe_that_has_ended_gets_nothing() -> None:
    order = SlotOrder()
    order.choose(7, A)
    order.choose(9, A)
    order.choose(7, B)
    order.forget(A)
    assert not order.is_passing(A)
    assert order.choose(7, B) == order.choose(9, B) == (B, False)
