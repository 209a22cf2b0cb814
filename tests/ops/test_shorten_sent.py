from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops

ROW, OTHER = "0a" * 16, "0b" * 16


def test_a_row_that_was_deleted_is_known_for_ten_minutes_more(desk: Desk) -> None:
    desk.dispatch("x", row=ROW)
    desk.dispatch("y", row=OTHER)
    before = desk.state()
    assert desk.call(ops.shorten_sent(desk.q, [ROW])) == "ok"
    assert 500_000 < desk.client.pttl(desk.q.sent(ROW)) <= 600_000
    assert desk.client.pttl(desk.q.sent(OTHER)) > 600_000
    assert desk.state() == before
    assert desk.dispatch("x", row=ROW).outcome == "sent"


def test_a_copy_does_not_make_the_time_longer(desk: Desk) -> None:
    desk.dispatch("x", row=ROW)
    desk.client.pexpire(desk.q.sent(ROW), 5000)
    desk.call(ops.shorten_sent(desk.q, [ROW, ROW]))
    assert desk.client.pttl(desk.q.sent(ROW)) <= 5000


def test_a_row_that_is_not_known_is_left_out(desk: Desk) -> None:
    with desk.nothing_changes():
        assert desk.call(ops.shorten_sent(desk.q, [ROW])) == "ok"
    desk.client.set(desk.q.sent(ROW), "foreign")  # without an expiry
    desk.call(ops.shorten_sent(desk.q, [ROW]))
    assert desk.state()[f":sent:{ROW}"] == "foreign" or isinstance(desk.state()[f":sent:{ROW}"], Expires)
