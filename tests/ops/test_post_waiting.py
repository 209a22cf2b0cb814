from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_replaces_what_was_posted_and_expires_soon(desk: Desk) -> None:
    desk.call(ops.post_waiting(desk.g, ["Q1", "Q2"]))
    assert desk.send(ops.post_waiting(desk.g, ["Q2", "Q3"])) == [b"ok"]
    assert desk.state(":counts") == {":waiting": Expires({"Q2", "Q3"})}
    assert 0 < desk.client.ttl(desk.g.waiting) <= 10
    with desk.nothing_changes():
        desk.call(ops.post_waiting(desk.g, ["Q2", "Q3"]))


def test_nothing_waits_leaves_nothing(desk: Desk) -> None:
    desk.call(ops.post_waiting(desk.g, ["Q1"]))
    desk.call(ops.post_waiting(desk.g, []))
    assert desk.state(":counts") == {}
