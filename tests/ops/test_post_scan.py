from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_replaces_what_was_posted_and_expires_soon(desk: Desk) -> None:
    desk.call(ops.post_scan(desk.g, ["Q1", "Q2"]))
    assert desk.send(ops.post_scan(desk.g, ["Q2", "Q3"])) == [b"ok"]
    assert desk.state(":counts") == {":waiting": Expires({"Q2", "Q3"})}
    assert 0 < desk.client.ttl(desk.g.waiting) <= 10
    with desk.nothing_changes():
        desk.call(ops.post_scan(desk.g, ["Q2", "Q3"]))


def test_nothing_waits_leaves_nothing(desk: Desk) -> None:
    desk.call(ops.post_scan(desk.g, ["Q1"]))
    desk.call(ops.post_scan(desk.g, []))
    assert desk.state(":counts") == {}


def test_a_snapshot_is_stored_and_announced_and_expires_soon(desk: Desk) -> None:
    with desk.listening(desk.g.snapshots_channel) as heard:
        desk.call(ops.post_scan(desk.g, ["Q1"], b"\x80"))
    assert heard == [(":snapshots", b"written")]
    assert desk.state(":counts") == {":waiting": Expires({"Q1"}), ":snapshot": Expires("\x80")}
    assert 0 < desk.client.ttl(desk.g.snapshot) <= ops.SNAPSHOT_EXPIRE_S
    with desk.nothing_changes():
        desk.call(ops.post_scan(desk.g, ["Q1"], b"\x80"))
    desk.call(ops.post_scan(desk.g, [], b"newer"))
    assert desk.state(":counts") == {":snapshot": Expires("newer")}


def test_a_scan_without_a_snapshot_announces_none_and_leaves_the_last_one(desk: Desk) -> None:
    desk.call(ops.post_scan(desk.g, [], b"old"))
    with desk.listening(desk.g.snapshots_channel) as heard:
        desk.call(ops.post_scan(desk.g, ["Q1"]))
    assert heard == []
    assert desk.state(":counts")[":snapshot"] == Expires("old")
