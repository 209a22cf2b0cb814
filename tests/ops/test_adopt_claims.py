"""find_claims and adopt_claims: claims that no worker holds are found, and recovered like those of a dead worker."""

from __future__ import annotations

import pytest
import redis

from tests.ops.driver import Desk, claim
from tests.support.servers import Server
from worqr import ops
from worqr.keys import QueueKeys


def find(desk: Desk, older_ms: int = 0) -> set[str]:
    """The claims that a whole pass finds, without the prefix."""
    found: set[str] = set()
    cursor = "0"
    while reply := desk.call(ops.find_claims(desk.q, cursor, 10, older_ms)):
        found |= {key.removeprefix(desk.prefix) for key in reply.keys}
        cursor = reply.cursor
        if cursor == "0":
            break
    return found


def test_claims_of_all_queues_are_found_and_no_other_keys(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    failures = QueueKeys(desk.prefix, "Q1", failures=True)
    desk.client.rpush(failures.claim(5), "x")
    desk.client.hset(desk.q.job("x:claim:7"), "state", "due")
    desk.client.sadd(desk.q.claims("9"), "9")
    assert find(desk) == {*(f":{{Q1}}:claim:{each}" for each in held), ":{Q1}-fail:claim:5"}


def test_new_claims_are_not_found(desk: Desk) -> None:
    desk.client.hdel(desk.q.counts, "fence")
    [new] = desk.hold("A", b"a")
    old = new - 7_200_000_000
    desk.client.rpush(desk.q.claim(old), "x")
    assert find(desk, 3_600_000) == {f":{{Q1}}:claim:{old}"}
    assert len(find(desk)) == 2


def test_a_user_who_may_not_look_at_all_keys_is_told_so(own_desk: Desk, own_server: Server) -> None:
    own_desk.client.execute_command("ACL", "SETUSER", "less", "on", ">less", "~*", "&*", "+@all", "-scan")
    with own_server.client(username="less", password="less") as client:
        assert Desk(client, own_desk.prefix).call(ops.find_claims(own_desk.q, "0", 10, 0)) is None


def test_what_a_worker_holds_stays_with_it_and_the_rest_is_recovered(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    [four] = desk.hold("B", b"d")
    desk.client.srem(desk.q.claims("A"), one, three)
    desk.client.hdel(desk.q.workers, "B")
    call = ops.adopt_claims(desk.q, "lost", ["A", "B"], [one, two, three, four, claim(99)])
    assert desk.call(call) == 2
    state = desk.state()
    assert state[":claims:lost"] == {str(one), str(three)}
    assert (state[":claims:A"], state[":claims:B"]) == ({str(two)}, {str(four)})
    assert desk.call(call) == 0, "a copy finds that they are held"
    assert desk.state() == state
    desk.call(ops.adopt_worker(desk.g, "lost", "Q1"))
    assert desk.call(ops.fail_worker(desk.q, "lost")).requeued == 2
    assert desk.waiting() == [b"a", b"c"]
    assert {":claims:lost", f":claim:{one}", f":claim:{three}"}.isdisjoint(desk.state())


def test_if_none_is_lost_nothing_is_written(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    with desk.nothing_changes():
        assert desk.call(ops.adopt_claims(desk.q, "lost", [], [*held, claim(99)])) == 0


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.wipe()
    with desk.nothing_changes():
        assert desk.call(ops.adopt_claims(desk.q, "lost", [], [1, 2])) == 0
        assert find(desk) == set()


def test_a_set_of_claims_that_was_overwritten_holds_none(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.client.set(desk.q.claims("A"), "foreign")
    assert desk.call(ops.adopt_claims(desk.q, "lost", ["A"], held)) == 1
    desk.client.delete(desk.q.claims("lost"))
    desk.client.set(desk.q.claims("lost"), "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.call(ops.adopt_claims(desk.q, "lost", ["A"], held))
