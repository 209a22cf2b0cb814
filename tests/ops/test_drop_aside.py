from __future__ import annotations

from tests.ops.driver import Desk, Expires, claim, policy
from worqr import ops


def drop(desk: Desk, *claims: int, undecodable: bool = False) -> int:
    return desk.call(ops.drop_aside(desk.q, "undecodable" if undecodable else "failed", claims))


def test_forgets_it_and_leaves_nothing(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.fail("A", one)
    desk.fail("A", two)
    before = desk.state()
    assert desk.send(ops.drop_aside(desk.q, "failed", [one])) == [b"ok", 1]
    del before[f":aside:{one}"], before[":aside"][f"@{one}"]
    before[":failed"] = [str(two)]
    assert desk.state() == before
    assert drop(desk, two) == 1
    assert desk.state() == {
        ":workers": {"A": f"1 {claim(1)} 2 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(2)), "enqueued": "2", "claimed": "2", "failed": "2"}),
    }


def test_as_many_as_there_are(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    for one in held:
        desk.fail("A", one, undecodable=True)
    assert drop(desk, held[0], held[0], held[2], 1, undecodable=True) == 2
    assert desk.state()[":broken"] == [str(held[1])]


def test_only_from_the_list_that_is_meant(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.fail("A", one)
    desk.fail("A", two, undecodable=True)
    with desk.nothing_happens():
        assert drop(desk, two) == drop(desk, one, undecodable=True) == 0


def test_an_older_one_of_the_same_id_is_its_newest_then(desk: Desk) -> None:
    first = desk.run("A", "x")
    desk.fail("A", first)
    second = desk.run("A", "x")
    desk.fail("A", second)
    assert desk.state()[f":aside:{second}"]["older"] == str(first)
    assert desk.state()[f":aside:{first}"]["newer"] == str(second)
    drop(desk, second)
    state = desk.state()
    assert state[":aside"] == {"x": str(first)}
    assert "newer" not in state[f":aside:{first}"]


def test_what_waits_or_runs_under_its_id_is_not_touched(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.fail("A", held)
    desk.dispatch("x")
    drop(desk, held)
    assert desk.waiting() == [b"a"]


def test_a_resend_drops_nothing_newer(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    call = ops.drop_aside(desk.q, "failed", [held])
    desk.send(call)
    desk.client.zadd(desk.q.failed, {str(held): 1})
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 1]


def test_a_late_copy_drops_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    with desk.nothing_happens():
        assert desk.late(ops.drop_aside(desk.q, "failed", [held])) == [b"late"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert drop(desk, 1, 2) == 0
    assert desk.state() == {}
