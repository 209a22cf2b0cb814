"""The stored replies of a producer: what comes again, or late, changes nothing, and nothing piles up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from tests.ops.driver import Desk
from worqr import ops
from worqr.command import Command
from worqr.errors import WorqrBug


def kept(desk: Desk) -> set[int]:
    """The numbers whose reply has a field of its own."""
    fields = desk.client.hkeys(f"{desk.q.base}:producer:X")
    return {int(field) for field in fields if field != b"state"}


def state(desk: Desk) -> list[int]:
    """LOW FIRST LAST N OLDEST NEWEST."""
    stored = desk.client.hget(f"{desk.q.base}:producer:X", "state")
    assert stored is not None
    return [int(word) for word in stored.split()]


def put(desk: Desk, number: int, lowest: int, tasks: int = 1) -> list[Any]:
    return desk.send(ops.enqueue(desk.q, [b"%d" % number] * tasks), number=number, lowest=lowest)


def full(desk: Desk, number: int, lowest: int) -> list[Any]:
    """A reply that is no `ok` with a number."""
    return desk.send(ops.enqueue(desk.q, [b"%d" % number], max_length=0), number=number, lowest=lowest)


def test_equal_replies_to_successive_numbers_are_stored_together(desk: Desk) -> None:
    for number in range(1, 101):
        assert put(desk, number, 1) == [b"ok", 1]
    assert kept(desk) == set()
    assert state(desk)[:4] == [1, 1, 100, 1]
    with desk.nothing_changes():
        assert [put(desk, number, 1) for number in (1, 50, 100)] == [[b"ok", 1]] * 3
    for number in range(101, 201):
        put(desk, number, number)
    assert kept(desk) == set()
    with desk.nothing_changes():
        assert put(desk, 199, 1) == [b"late"]
        assert put(desk, 200, 1) == [b"ok", 1]


def test_another_reply_has_a_field_of_its_own_until_it_is_no_longer_needed(desk: Desk) -> None:
    put(desk, 1, 1)
    for number in (2, 4):
        assert full(desk, number, 1) == [b"full", 1]
    put(desk, 3, 1)
    assert kept(desk) == {2, 3, 4}, "3 may not join 1: 2 is between them"
    put(desk, 5, 3)
    assert kept(desk) == {3, 4}
    assert state(desk)[:4] == [3, 5, 5, 1], "of the run before, no number is needed"
    put(desk, 6, 6)
    assert kept(desk) == set()


def test_each_unanswered_one_gets_its_own_reply_again(desk: Desk) -> None:
    first = put(desk, 1, 1)
    desk.send(ops.enqueue(desk.q, [b"a", b"b"]), number=2, lowest=1)
    assert put(desk, 1, 1) == first == [b"ok", 1]
    assert put(desk, 2, 1) == [b"ok", 2]
    assert desk.waiting() == [b"1", b"a", b"b"]


def test_a_run_has_one_number_of_tasks(desk: Desk) -> None:
    for number in (1, 2):
        put(desk, number, 1, tasks=3)
    put(desk, 3, 1, tasks=2)
    put(desk, 4, 1, tasks=3)
    assert [put(desk, number, 1) for number in (1, 2, 3, 4)] == [[b"ok", 3], [b"ok", 3], [b"ok", 2], [b"ok", 3]]
    assert len(desk.waiting()) == 11


def test_numbers_may_come_out_of_order(desk: Desk) -> None:
    """One was refused (NOSCRIPT, say) while its neighbours ran, and is sent again."""
    put(desk, 2, 1)
    put(desk, 3, 1)
    put(desk, 5, 1)
    assert put(desk, 1, 1) == put(desk, 4, 1) == [b"ok", 1]
    assert desk.waiting() == [b"2", b"3", b"5", b"1", b"4"]
    with desk.nothing_changes():
        assert [put(desk, number, 1) for number in range(1, 6)] == [[b"ok", 1]] * 5


def test_a_copy_with_an_older_lowest_does_not_open_the_door_again(desk: Desk) -> None:
    put(desk, 5, 5)
    put(desk, 6, 2)
    assert put(desk, 4, 2) == [b"late"]
    assert desk.waiting() == [b"5", b"6"]


def test_what_was_given_up_is_late_at_once_however_many_replies_are_still_to_be_forgotten(desk: Desk) -> None:
    """1 was stuck while 5000 others ran, 3000 was given up; now 1 is answered."""
    with desk.client.pipeline(transaction=False) as pipe:
        pipe.hset(f"{desk.q.base}:producer:X", mapping={str(n): b"kept" for n in range(1, 3000)})
        pipe.hset(f"{desk.q.base}:producer:X", "state", "1 1 0 0 1 2999")
        pipe.execute()
    put(desk, 5001, 5001)
    with desk.nothing_changes():
        assert put(desk, 3000, 1) == [b"late"]
        assert put(desk, 2999, 1) == [b"late"]
    assert len(kept(desk)) == 1999
    for number in range(5002, 5008):
        put(desk, number, number)
    assert kept(desk) == set()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_copies_is_answered_as_if_every_reply_was_kept(desk: Desk, seed: int) -> None:
    """The oracle: one reply per number, and the lowest number that was ever named."""
    dice = random.Random(seed)
    replies, low, stored, top = dict[int, list[Any]](), 0, 0, 0
    for _ in range(150):
        number = top + 1 if dice.random() < 0.6 else dice.randint(max(1, top - 6), top + 3)
        lowest = min(number, dice.randint(max(1, top - 6), top + 1)) if dice.random() < 0.8 else number
        tasks, is_full = dice.choice((1, 1, 1, 2)), dice.random() < 0.15
        answer = full(desk, number, lowest) if is_full else put(desk, number, lowest, tasks)
        if number < low:
            expected = [b"late"]
        elif number in replies:
            expected = replies[number]
        else:
            expected = [b"full", stored] if is_full else [b"ok", tasks]
            replies[number], low = expected, max(low, lowest)
            stored += 0 if is_full else tasks
        top = max(top, number)
        assert answer == expected, (number, lowest)
        assert {each for each in kept(desk) if each < low} == set()
    assert desk.client.llen(desk.q.base) == stored


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


@pytest.mark.parametrize("number", [2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**32 + 1, 2**53 - 1])
def test_a_number_may_be_as_large_as_a_float_is_exact(desk: Desk, number: int) -> None:
    put(desk, number, number - 1)
    assert put(desk, number, number - 1) == [b"ok", 1]
    assert put(desk, number - 2, 1) == [b"late"]
    assert state(desk) == [number - 1, number, number, 1, 1, 0]


@pytest.mark.parametrize("odd", ["", "abc", "-1", "1.5", "1e308", "inf", "nan", str(2**53), "1" + "0" * 20])
def test_a_number_that_is_none_is_refused_and_where_it_is_stored_it_stops_nothing(desk: Desk, odd: str) -> None:
    call = ops.enqueue(desk.q, [b"a"])
    replies = f"{desk.q.base}:producer:X"
    for numbers in (odd, 1), (1, odd):
        with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="whole numbers below 2"):
            desk.client.execute_command("EVALSHA", call.script.sha, 1, desk.q.base, "X", *numbers, *call.args)
    for place in range(6):
        words = ["1", "1", "0", "1", "1", "0"]
        words[place] = odd
        desk.client.hset(replies, "state", " ".join(words))
        assert put(desk, 1, 1)[0] == b"ok"
        assert put(desk, 2, 2)[0] == b"ok"
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
