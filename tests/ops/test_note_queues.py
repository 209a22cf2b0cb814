from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_remembers_names_for_30_days_from_the_last(desk: Desk) -> None:
    desk.call(ops.note_queues(desk.g, ["Q1"]))
    desk.client.expire(desk.g.queues, 10)
    assert desk.send(ops.note_queues(desk.g, ["Q1", "Q2"])) == [b"ok"]
    assert desk.state(":counts") == {":queues": Expires(["Q1", "Q2"])}
    assert 0 <= 30 * 24 * 3600 - desk.client.ttl(desk.g.queues) < 60


def test_notes_when_they_were_used_by_the_servers_clock(desk: Desk) -> None:
    desk.client.zadd(desk.g.queues, {"Q1": 1000, "Q2": 1000})
    before = desk.now()
    desk.call(ops.note_queues(desk.g, ["Q1"]))
    assert desk.client.zscore(desk.g.queues, "Q2") == 1000
    noted = desk.client.zscore(desk.g.queues, "Q1")
    assert noted is not None
    assert before <= noted <= desk.now()


def test_thousands_of_names_at_once(desk: Desk) -> None:
    desk.call(ops.note_queues(desk.g, [f"Q{n}" for n in range(9000)]))
    assert desk.client.zcard(desk.g.queues) == 9000


def test_no_names_make_nothing(desk: Desk) -> None:
    desk.call(ops.note_queues(desk.g, []))
    assert desk.state(":counts") == {}
