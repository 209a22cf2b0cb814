from __future__ import annotations

from tests.ops.driver import KEEPALIVE, Desk
from worqr import ops


def test_every_registered_worker_with_what_people_want_to_know(desk: Desk) -> None:
    desk.register("A", queues=["Q1", "Q2"])
    desk.beat("A")
    desk.register("P", keepalive_ms=0)
    desk.register("M")
    desk.client.delete(desk.g.worker("M"), desk.g.info("M"))
    with desk.nothing_changes():
        listed = {worker: rest for worker, *rest in desk.call(ops.list_workers(desk.g))}
    ttl, facts, queues = listed.pop("A")
    assert isinstance(ttl, int)
    assert isinstance(queues, list)
    assert KEEPALIVE / 2 < ttl <= KEEPALIVE
    assert (facts, sorted(queues)) == ({"host": "h", "running": "2", "room": "3"}, ["Q1", "Q2"])
    assert listed == {"P": [-1, {"host": "h"}, []], "M": [-2, {}, []]}


def test_the_dying_are_not_listed(desk: Desk) -> None:
    desk.register("A")
    desk.client.delete(desk.g.worker("A"))
    desk.call(ops.condemn_worker(desk.g, "A", None))
    assert desk.call(ops.list_workers(desk.g)) == []


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_workers(desk.g)) == [b"ok"]
    assert desk.state() == {}
