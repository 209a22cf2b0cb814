from __future__ import annotations

import pytest
import redis

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import OutboxLease, StoredOutbox

ID, OTHER = "0c" * 16, "0d" * 16


def lease(desk: Desk, holder: str, lease_ms: int = 10_000, facts: str = "", outbox: str = ID) -> OutboxLease:
    return desk.call(ops.lease_outbox(desk.g, outbox, holder, lease_ms, facts))


def test_one_worker_holds_the_lease_of_an_outbox_and_others_see_what_it_said(desk: Desk) -> None:
    assert lease(desk, "A") == OutboxLease(True, "")
    assert lease(desk, "A", facts='{"rows":1}') == OutboxLease(True, '{"rows":1}')
    with desk.nothing_changes():
        assert lease(desk, "B", facts='{"rows":9}') == OutboxLease(False, '{"rows":1}')
    assert lease(desk, "B", outbox=OTHER).held
    assert lease(desk, "A") == OutboxLease(True, '{"rows":1}')
    assert desk.client.ttl(desk.g.outboxes) > 2_500_000


def test_a_lease_that_ended_or_was_given_back_is_taken_with_what_its_holder_said(desk: Desk) -> None:
    lease(desk, "A", facts="{}")
    lease(desk, "A", lease_ms=0)
    assert lease(desk, "B") == OutboxLease(True, "{}")
    desk.client.hset(desk.g.outboxes, ID, f"B {desk.now() - 1} seen")
    assert lease(desk, "C") == OutboxLease(True, "seen")


def test_a_lease_from_the_far_future_was_taken_before_the_clock_was_set_back(desk: Desk) -> None:
    desk.client.hset(desk.g.outboxes, ID, f"A {desk.now() + 3_600_000} seen")
    assert lease(desk, "B") == OutboxLease(True, "seen")


@pytest.mark.parametrize("value", ["", "odd", "A x y", "A 1e999 ", b"\xff\xfe 9 z", "A 99999999999999999999 z"])
def test_what_another_program_wrote_holds_no_lease(desk: Desk, value: str | bytes) -> None:
    desk.client.hset(desk.g.outboxes, ID, value)
    desk.call(ops.list_outboxes(desk.g))
    assert lease(desk, "B").held


def test_the_outboxes_are_listed_with_the_age_of_their_last_lease(desk: Desk) -> None:
    assert desk.call(ops.list_outboxes(desk.g)) == []
    lease(desk, "A", facts='{"rows":1}', outbox=OTHER)
    desk.client.hset(desk.g.outboxes, ID, f"A {desk.now() - 5000} {{}}")
    with desk.nothing_changes():
        gone, swept = desk.call(ops.list_outboxes(desk.g))
    assert swept == StoredOutbox(OTHER, '{"rows":1}', 0)
    assert (gone.id, gone.facts) == (ID, "{}")
    assert 5000 <= gone.idle_ms < 65_000


def test_outboxes_that_were_not_swept_for_30_days_are_forgotten_by_others(desk: Desk) -> None:
    day, now = 86_400_000, desk.now()
    old = {f"{n:032x}": f"A {now - 30 * day - 5000} {{}}" for n in range(30)}
    desk.client.hset(desk.g.outboxes, mapping={**old, ID: f"A {now - 29 * day} {{}}", "odd": "odd"})
    for _ in range(100):
        lease(desk, "A", outbox=OTHER)
    assert [each.id for each in desk.call(ops.list_outboxes(desk.g))] == [ID, OTHER]
    desk.client.hset(desk.g.outboxes, ID, f"A {now - 31 * day} {{}}")
    assert lease(desk, "B") == OutboxLease(True, "{}")


def test_a_key_of_another_type_is_refused(desk: Desk) -> None:
    desk.client.set(desk.g.outboxes, "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        lease(desk, "A")
    assert desk.call(ops.list_outboxes(desk.g)) == []
