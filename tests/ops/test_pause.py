from __future__ import annotations

import pytest

from tests.ops.driver import Desk, Expires
from worqr import ops


@pytest.mark.parametrize("reason", ["", "why not", "ä\n"])
def test_notes_the_reason(desk: Desk, reason: str) -> None:
    before = desk.state()
    assert desk.send(ops.pause(desk.q, reason)) == [b"ok"]
    counts = Expires({**before[":counts"].value, "paused": "1"})
    assert desk.state() == {":counts": counts, ":paused": reason.encode().decode("latin-1")}
    assert desk.call(ops.inspect(desk.q)).paused == reason


def test_a_resend_does_not_undo_a_resume(desk: Desk) -> None:
    call = ops.pause(desk.q, "why")
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    desk.client.delete(desk.q.paused)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]


def test_a_late_copy_does_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.pause(desk.q, "why")) == [b"late"]


def test_enqueueing_goes_on_and_so_do_settles(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.pause(desk.q, "why"))
    desk.put(b"d")
    assert desk.call(ops.finish_tasks(desk.q, "A", [one])) == {}
    assert desk.retry("A", two) == "given"
    assert desk.call(ops.stop_tasks(desk.q, "A", [three])) == {}
    assert desk.waiting() == [b"c", b"d", b"b"]
