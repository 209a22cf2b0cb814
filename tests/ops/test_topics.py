"""What queues are subscribed to: declared by workers, read by publishers, dropped by people."""

from __future__ import annotations

import pytest
import redis

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import StoredTopics
from worqr.ops.registry import PATTERN_UNSEEN_MS

FACTS = b'{"app":"shop"}'


def stored(desk: Desk) -> list[tuple[str, bytes, list[str]]]:
    found: list[StoredTopics] = desk.call(ops.read_topics(desk.g))
    return [(each.queue, each.facts, sorted(each.patterns)) for each in found]


def age(desk: Desk, queue: str, pattern: str, seen: int) -> None:
    """The pattern was declared at `seen`."""
    value = desk.client.hget(desk.g.topics, queue)
    assert value is not None
    facts, *lines = value.decode().split("\n")
    lines = [f"{seen} {pattern}" if line.endswith(f" {pattern}") else line for line in lines]
    desk.client.hset(desk.g.topics, queue, "\n".join([facts, *lines]))


def test_a_queue_is_subscribed_until_it_is_dropped(desk: Desk) -> None:
    assert stored(desk) == []
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["order.paid", "#"]))
    desk.call(ops.declare_topics(desk.g, "a b", b"{}", ["order.*"]))
    with desk.nothing_changes():
        assert stored(desk) == [("a b", b"{}", ["order.*"]), ("mail", FACTS, ["#", "order.paid"])]
    assert desk.client.ttl(desk.g.topics) == -1
    assert desk.call(ops.drop_topics(desk.g, "mail"))
    with desk.nothing_changes():
        assert stored(desk) == [("a b", b"{}", ["order.*"])]
    assert not desk.call(ops.drop_topics(desk.g, "mail"))
    assert desk.call(ops.drop_topics(desk.g, "a b"))
    assert not desk.client.exists(desk.g.topics)


def test_the_patterns_of_two_deploys_are_added_up_until_one_is_gone_for_an_hour(desk: Desk) -> None:
    desk.call(ops.declare_topics(desk.g, "mail", b"{}", ["old", "both"]))
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new", "both"]))
    assert stored(desk) == [("mail", FACTS, ["both", "new", "old"])]
    age(desk, "mail", "old", desk.now() - PATTERN_UNSEEN_MS + 60_000)
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new", "both"]))
    assert stored(desk) == [("mail", FACTS, ["both", "new", "old"])]
    age(desk, "mail", "old", desk.now() - PATTERN_UNSEEN_MS)
    assert stored(desk) == [("mail", FACTS, ["both", "new", "old"])]  # without workers, it stays
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new", "both"]))
    assert stored(desk) == [("mail", FACTS, ["both", "new"])]


def test_a_time_from_the_future_was_noted_before_the_clock_was_set_back(desk: Desk) -> None:
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["old"]))
    age(desk, "mail", "old", desk.now() + 10**9)
    [found] = desk.call(ops.read_topics(desk.g))
    assert found.patterns == {"old": 0}
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new"]))
    age(desk, "mail", "old", desk.now() - PATTERN_UNSEEN_MS)
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new"]))
    assert stored(desk) == [("mail", FACTS, ["new"])]


@pytest.mark.parametrize(
    "value", ["", "odd", "\n\n", "{}\nx y", "{}\n1e999 a", b"\xff\n9 \xfe", "{}\n99999999999999999999 a"]
)
def test_what_another_program_wrote_is_replaced(desk: Desk, value: str | bytes) -> None:
    desk.client.hset(desk.g.topics, "mail", value)
    desk.call(ops.read_topics(desk.g))
    desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new"]))
    [found] = desk.call(ops.read_topics(desk.g))
    assert found.facts == FACTS
    assert found.patterns["new"] < 60_000


def test_a_key_of_another_type_is_refused(desk: Desk) -> None:
    desk.client.set(desk.g.topics, "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.call(ops.declare_topics(desk.g, "mail", FACTS, ["new"]))
