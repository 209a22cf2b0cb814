"""The leader's lease, as one peer holds it."""

from __future__ import annotations

from worqr.link import boottime
from worqr.peer.leader.chore import Lease


def test_it_is_held_until_it_expires() -> None:
    lease = Lease()
    assert not lease.held
    assert lease.take(boottime() + 100)
    assert lease.held
    assert not lease.take(boottime() + 200), "it was held before"
    assert lease.take(boottime() - 1) is False
    assert not lease.held
    assert lease.take(boottime() + 100), "it is taken anew"


def test_a_peer_that_gave_it_up_does_not_ask_for_it_for_a_while() -> None:
    lease = Lease()
    lease.take(boottime() + 100)
    lease.give_up(100)
    assert (lease.held, lease.may_request) == (False, False)
    lease.give_up(0)
    assert lease.may_request
