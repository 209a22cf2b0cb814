"""The stored replies of a producer: what comes again, or late, changes nothing, and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.ops.driver import Desk
from worqr import ops
from worqr.command import Command
from worqr.errors import WorqrBug


def kept(desk: Desk) -> set[int]:
    """The numbers whose reply is kept."""
    fields = desk.client.hkeys(f"{desk.q.base}:producer:X")
    return {int(field) for field in fields if field not in (b"low", b"oldest")}


def put(desk: Desk, number: int, lowest: int) -> list[Any]:
    return desk.send(ops.enqueue(desk.q, [b"%d" % number]), number=number, lowest=lowest)


def test_replies_are_kept_down_to_the_lowest_unanswered_number(desk: Desk) -> None:
    for number in (1, 2, 3):
        put(desk, number, 1)
    assert kept(desk) == {1, 2, 3}
    put(desk, 4, 3)
    assert kept(desk) == {3, 4}


def test_each_unanswered_one_gets_its_own_reply_again(desk: Desk) -> None:
    first = put(desk, 1, 1)
    desk.send(ops.enqueue(desk.q, [b"a", b"b"]), number=2, lowest=1)
    assert put(desk, 1, 1) == first == [b"ok", 1]
    assert put(desk, 2, 1) == [b"ok", 2]
    assert desk.waiting() == [b"1", b"a", b"b"]


def test_numbers_may_come_out_of_order(desk: Desk) -> None:
    """One was refused (NOSCRIPT, say) while its neighbours ran, and is sent again."""
    put(desk, 2, 1)
    put(desk, 3, 1)
    assert put(desk, 1, 1) == [b"ok", 1]
    assert desk.waiting() == [b"2", b"3", b"1"]


def test_a_copy_with_an_older_lowest_does_not_open_the_door_again(desk: Desk) -> None:
    put(desk, 5, 5)
    put(desk, 6, 2)
    assert put(desk, 4, 2) == [b"late"]
    assert desk.waiting() == [b"5", b"6"]


def test_what_was_given_up_is_late_at_once_however_many_replies_are_still_to_be_forgotten(desk: Desk) -> None:
    """1 was stuck while 5000 others ran, 3000 was given up; now 1 is answered."""
    with desk.client.pipeline(transaction=False) as pipe:
        pipe.hset(
            f"{desk.q.base}:producer:X", mapping={"low": 1, "oldest": 1, **{str(n): b"kept" for n in range(1, 3000)}}
        )
        pipe.execute()
    put(desk, 5001, 5001)
    with desk.nothing_changes():
        assert put(desk, 3000, 1) == [b"late"]
        assert put(desk, 2999, 1) == [b"late"]
    assert len(kept(desk)) == 2000
    for number in range(5002, 5008):
        put(desk, number, number)
    assert kept(desk) == {5007}


def test_replies_expire_an_hour_after_the_last_request_or_resend(desk: Desk) -> None:
    name = f"{desk.q.base}:producer:X"
    put(desk, 1, 1)
    assert 3500 < desk.client.ttl(name) <= 3600
    desk.client.expire(name, 10)
    put(desk, 1, 1)
    assert 3500 < desk.client.ttl(name) <= 3600


def test_two_producers_do_not_know_each_other(desk: Desk) -> None:
    call = ops.enqueue(desk.q, [b"a"])
    for producer in ("X", "Y"):
        desk.client.execute_command("EVALSHA", call.script.sha, 1, desk.q.base, producer, 1, 1, *call.args)
    assert desk.waiting() == [b"a", b"a"]


def test_a_number_may_be_as_large_as_a_float_is_exact(desk: Desk) -> None:
    number = 2**53 - 1
    put(desk, number, number - 1)
    assert put(desk, number, number - 1) == [b"ok", 1]
    assert put(desk, number - 2, 1) == [b"late"]
    assert kept(desk) == {number}


@pytest.mark.parametrize("odd", ["", "abc", "-1", "1.5", "1e308", "inf", "nan", str(2**53), "1" + "0" * 20])
def test_a_number_that_is_none_is_refused_and_where_it_is_stored_it_stops_nothing(desk: Desk, odd: str) -> None:
    call = ops.enqueue(desk.q, [b"a"])
    replies = f"{desk.q.base}:producer:X"
    for numbers in (odd, 1), (1, odd):
        with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="whole numbers below 2"):
            desk.client.execute_command("EVALSHA", call.script.sha, 1, desk.q.base, "X", *numbers, *call.args)
    for field in "low", "oldest":
        desk.client.hset(replies, field, odd)
        assert put(desk, 1, 1)[0] == b"ok"
        desk.client.delete(replies)


@pytest.mark.parametrize("make", [
    lambda desk: ops.enqueue(desk.q, [b"a"]),
    lambda desk: ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1, last=0),
    lambda desk: ops.stop_work(desk.q, "A"),
    lambda desk: ops.cancel_task(desk.q, b"a"),
    lambda desk: ops.cancel_all(desk.q),
    lambda desk: ops.delete_queue(desk.q),
    lambda desk: ops.pause(desk.q, "why"),
    lambda desk: ops.map_work(desk.g, "A", "Q1"),
])  # fmt: skip
def test_late_is_never_taken_for_success(desk: Desk, make: Any) -> None:
    call: Command[Any] = make(desk)
    with pytest.raises(WorqrBug, match="given up or answered before"):
        call.read([b"late"])
