from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import WorkerHeartbeats


def test_tells_every_beat_the_missing_ones_and_the_dying(desk: Desk) -> None:
    desk.register("A", "B", "C", "D e")
    desk.register("P", keepalive_ms=0)
    desk.beat("A", 5)
    desk.client.delete(desk.g.worker("B"), desk.g.worker("C"))
    desk.call(ops.condemn_worker(desk.g, "C", None))
    run_id = str(desk.client.info("server")["run_id"])
    with desk.nothing_changes():
        assert desk.call(ops.look_at_workers(desk.g)) == WorkerHeartbeats(
            run_id, {"A": b"RUN 5", "B": None, "D e": b"RUN 0", "P": b"STAY"}, ["C"]
        )


def test_without_the_right_to_info_the_run_id_is_empty(desk: Desk) -> None:
    desk.register("A")
    desk.client.execute_command("ACL", "SETUSER", desk.prefix, "on", ">secret", "~*", "&*", "+@all", "-info")
    try:
        desk.client.execute_command("AUTH", desk.prefix, "secret")
        assert desk.call(ops.look_at_workers(desk.g)) == WorkerHeartbeats("", {"A": b"RUN 0"}, [])
    finally:
        desk.client.connection_pool.disconnect()
        desk.client.execute_command("ACL", "DELUSER", desk.prefix)


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    look = desk.call(ops.look_at_workers(desk.g))
    assert (look.beats, look.dying) == ({}, [])
    assert desk.state() == {}
