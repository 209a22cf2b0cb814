from __future__ import annotations

import pytest
import redis

from tests.ops.driver import KEEPALIVE, Desk, Expires
from worqr import ops
from worqr.errors import WrongVersion
from worqr.ops import INFO_EXPIRE_S

FACTS: list[tuple[str, str | int]] = [("host", "h"), ("pid", 3)]


def test_registers_with_a_first_beat_and_its_facts(desk: Desk) -> None:
    call = ops.start_worker(desk.g, "A", keepalive_ms=KEEPALIVE, facts=FACTS)
    assert desk.send(call) == [b"ok"]
    assert desk.state(":counts") == {
        ":Workers": {"A"},
        ":worker:A": Expires("RUN 0"),
        ":info:A": Expires({"host": "h", "pid": "3"}),
        ":version": "1",
    }
    assert KEEPALIVE / 2 < desk.client.pttl(desk.g.worker("A")) <= KEEPALIVE
    assert 0 < desk.client.ttl(desk.g.info("A")) <= INFO_EXPIRE_S


def test_one_that_never_counts_as_dead_has_a_key_that_stays(desk: Desk) -> None:
    desk.register("A", keepalive_ms=0)
    assert desk.state()[":worker:A"] == "STAY"


def test_a_resend_does_not_register_it_again_after_it_left(desk: Desk) -> None:
    call = ops.start_worker(desk.g, "A", keepalive_ms=KEEPALIVE, facts=FACTS)
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    desk.call(ops.stop_worker(desk.g, "A"))
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]


def test_a_late_copy_registers_nobody(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.start_worker(desk.g, "A", keepalive_ms=KEEPALIVE, facts=FACTS)) == [b"late"]


def test_a_mesh_of_another_version_is_not_joined(desk: Desk) -> None:
    desk.client.set(desk.g.version, "2")
    call = ops.start_worker(desk.g, "A", keepalive_ms=KEEPALIVE, facts=FACTS)
    with desk.nothing_happens():
        assert desk.send(call) == [b"version", b"2"]
        with pytest.raises(WrongVersion, match="speaks wire version 2, this worqr speaks 1"):
            desk.call(call)


def test_its_facts_have_the_time_at_which_it_was_registered(desk: Desk) -> None:
    before = desk.now()
    desk.call(ops.start_worker(desk.g, "A", keepalive_ms=KEEPALIVE, facts=[]))
    assert desk.client.hkeys(desk.g.info("A")) == [b"started"]
    assert before <= int(desk.client.hget(desk.g.info("A"), "started") or 0) <= desk.now()


def test_a_registry_of_a_foreign_type_makes_no_new_mesh_either(desk: Desk) -> None:
    desk.client.set(desk.g.registered, "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.register("A")
