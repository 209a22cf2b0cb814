from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_each_queue_once_seen_or_served_by_the_living_or_the_dying(desk: Desk) -> None:
    desk.register("A", queues=["Q0", "Q2"])
    desk.register("B", queues=["Q2", "Q3"])
    desk.client.delete(desk.g.worker("B"), desk.g.queues)
    desk.call(ops.condemn_worker(desk.g, "B", None))
    desk.call(ops.note_queues(desk.g, ["Q1", "seen ä"]))
    with desk.nothing_changes():
        assert sorted(desk.call(ops.list_queues(desk.g))) == ["Q0", "Q1", "Q2", "Q3", "seen ä"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_queues(desk.g)) == [b"ok"]
    assert desk.state() == {}
