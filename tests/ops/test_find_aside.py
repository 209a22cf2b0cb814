from __future__ import annotations

from itertools import permutations

import pytest

from tests.ops.driver import Desk
from worqr import ops


def find(desk: Desk, *ids: str, undecodable: bool = False) -> list[int]:
    with desk.nothing_changes():
        return desk.call(ops.find_aside(desk.q, "undecodable" if undecodable else "failed", ids))


def set_aside(desk: Desk, *ids: str, undecodable: bool = False) -> list[int]:
    held = []
    for each in ids:
        held.append(desk.run("A", each))
        desk.fail("A", held[-1], undecodable=undecodable)
    return held


def test_the_newest_of_each_id(desk: Desk) -> None:
    first, second, third = set_aside(desk, "x", "y", "x")
    assert find(desk, "x", "y", "nobody") == [third, second]
    assert first not in find(desk, "x")


def test_named_as_often_as_many(desk: Desk) -> None:
    held = set_aside(desk, "x", "y", "x", "x")
    assert find(desk, "x", "y", "x") == [held[3], held[1], held[2]]
    assert find(desk, *["x"] * 5) == [held[3], held[2], held[0]]


def test_a_raw_task_by_the_id_that_was_made_for_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    assert find(desk, f"@{held}") == [held]


def test_only_in_the_list_that_is_meant(desk: Desk) -> None:
    one = set_aside(desk, "x")
    two = set_aside(desk, "x", undecodable=True)
    three = set_aside(desk, "x")
    assert find(desk, "x", "x", "x") == three + one
    assert find(desk, "x", "x", undecodable=True) == two


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whichever_goes_the_others_are_found(desk: Desk, order: tuple[int, ...]) -> None:
    held = set_aside(desk, "x", "x", "x")
    left = list(held)
    for n in order:
        desk.call(ops.drop_aside(desk.q, "failed", [held[n]]))
        left.remove(held[n])
        assert find(desk, *["x"] * 4) == left[::-1]
    assert not any(name.startswith(":aside") for name in desk.state())


def test_what_the_cap_has_taken_is_not_found(desk: Desk) -> None:
    held = set_aside(desk, "x", "y", "x")
    [last] = desk.hold("A", b"a")
    desk.enter("A", keep_failed=2)
    desk.fail("A", last)
    assert find(desk, "x", "x", "y") == [held[2]]
    assert desk.state()[":aside"] == {"x": str(held[2]), f"@{last}": str(last)}


def test_none_is_named_none_is_found(desk: Desk) -> None:
    set_aside(desk, "x")
    assert find(desk) == []


def test_a_thousand_at_once(desk: Desk) -> None:
    held = desk.hold("A", *[b"a"] * 1000)
    for one in held:
        desk.fail("A", one)
    assert find(desk, *[f"@{one}" for one in held]) == held


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert find(desk, "x") == []
    assert desk.state() == {}
