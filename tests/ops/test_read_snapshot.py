from __future__ import annotations

import pytest

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_returns_the_snapshot_and_says_that_somebody_reads(desk: Desk) -> None:
    desk.call(ops.post_scan(desk.g, [], b"stored"))
    before = desk.now()
    found = desk.call(ops.read_snapshot(desk.g))
    assert found.stored == b"stored"
    assert before <= found.now_ms <= desk.now()
    assert desk.state(":counts") == {":snapshot": Expires("stored"), ":watched": Expires("1")}
    assert 0 < desk.client.ttl(desk.g.watched) <= ops.WATCHED_EXPIRE_S
    with desk.nothing_changes():
        desk.call(ops.read_snapshot(desk.g))


def test_each_read_prolongs_the_watch_and_the_list_of_queues_tells_of_it(desk: Desk) -> None:
    assert not desk.call(ops.list_queues(desk.g)).watched
    desk.call(ops.read_snapshot(desk.g))
    desk.client.expire(desk.g.watched, 5)
    desk.call(ops.read_snapshot(desk.g))
    assert desk.client.ttl(desk.g.watched) > 5
    assert desk.call(ops.list_queues(desk.g)).watched


def test_on_an_empty_database_there_is_no_snapshot(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.read_snapshot(desk.g)).stored is None
    assert desk.state() == {":watched": Expires("1")}


def test_a_snapshot_of_a_foreign_type_counts_as_none_so_that_a_leader_writes_one(desk: Desk) -> None:
    desk.client.rpush(desk.g.snapshot, "foreign")
    assert desk.call(ops.read_snapshot(desk.g)).stored is None
    assert desk.client.exists(desk.g.watched)


def test_the_memory_is_compared_with_its_limit(own_desk: Desk) -> None:
    assert own_desk.call(ops.read_snapshot(own_desk.g)).memory is None
    used = int(own_desk.client.info("memory")["used_memory"])
    own_desk.client.config_set("maxmemory", 2 * used)
    assert own_desk.call(ops.read_snapshot(own_desk.g)).memory == pytest.approx(0.5, abs=0.1)


def test_a_user_who_may_not_ask_for_the_memory_reads_the_snapshot(own_desk: Desk) -> None:
    own_desk.call(ops.post_scan(own_desk.g, [], b"stored"))
    own_desk.client.config_set("maxmemory", "1gb")
    own_desk.client.execute_command("ACL", "SETUSER", "default", "-info")
    found = own_desk.call(ops.read_snapshot(own_desk.g))
    assert (found.stored, found.memory) == (b"stored", None)
