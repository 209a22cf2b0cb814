from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_forgets_the_reason_and_tells_every_peer(desk: Desk) -> None:
    before = desk.state()
    desk.client.set(desk.q.paused, "why")
    with desk.listening(desk.q.base) as heard:
        assert desk.send(ops.resume(desk.q)) == [b"ok"]
    assert heard == [("waiting", b"resumed")]
    assert desk.state() == {":counts": Expires({**before[":counts"].value, "resumed": "1"})}
    assert desk.call(ops.inspect(desk.q)).paused is None


def test_a_resend_does_not_undo_a_pause(desk: Desk) -> None:
    call = ops.resume(desk.q)
    desk.send(call)
    desk.client.set(desk.q.paused, "why")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]


def test_a_late_copy_does_nothing(desk: Desk) -> None:
    desk.client.set(desk.q.paused, "why")
    with desk.nothing_happens():
        assert desk.late(ops.resume(desk.q)) == [b"late"]


def test_on_an_empty_database_nothing_is_made_that_stays(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.call(ops.resume(desk.q))
    assert desk.state() == {":counts": Expires({"resumed": "1"})}
