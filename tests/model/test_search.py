"""The engine itself: it finds what is wrong, by the shortest way, and does not pass what it did not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from tests.model import search as engine
from tests.model.search import By, Model, search


class Counter(Model[int]):
    """Counts from 0 by ones and threes up to `top`; each mistake is one kind of wrong."""

    moves: ClassVar[Mapping[str, By]] = {"one": By.MESH, "three": By.MESH, "back": By.MESH, "fault": By.FAULT}
    mistakes: ClassVar[Mapping[str, int]] = {"seven is broken": 3, "ten is no rest": 4, "no rest": 0, "unnamed": 0}
    least: ClassVar[int] = 11
    top: ClassVar[int] = 10

    def starts(self) -> Iterator[int]:
        yield 0

    def steps(self, state: int) -> Iterator[tuple[str, str, int]]:
        if state < self.top:
            yield "one", f"to {state + 1}", state + 1
        if state <= self.top - 3:
            yield "three", f"to {state + 3}", state + 3
        if self.mistake == "no rest" and state == self.top:
            yield "back", "", state - 1
        if self.mistake == "unnamed":
            yield "a step that no list names", "", -1
        yield "fault", "", state

    def broken(self, state: int) -> str | None:
        return "seven" if self.mistake == "seven is broken" and state == 7 else None

    def restless(self, state: int) -> str | None:
        return "ten" if self.mistake == "ten is no rest" else None


def test_a_correct_model_is_walked_to_its_end() -> None:
    found = search(Counter())
    assert (found.states, found.wrong, found.trace) == (11, None, ())


def test_a_step_that_changes_nothing_has_not_fired() -> None:
    assert dict(search(Counter()).fired) == {"one": 10, "three": 8}


def test_a_broken_state_is_found_by_the_shortest_way() -> None:
    found = search(Counter("seven is broken"))
    assert found.wrong == "seven"
    assert sorted(words.split(":")[0] for words in found.trace) == ["one", "three", "three"]
    assert str(found).endswith("=> seven")


def test_a_bad_rest_is_found_although_faults_go_on() -> None:
    found = search(Counter("ten is no rest"))
    assert (found.wrong, len(found.trace)) == ("ten", 4)


def test_a_mesh_that_never_rests_is_found() -> None:
    assert search(Counter("no rest")).wrong == "the mesh never comes to rest from here"


def test_an_unnamed_step_is_an_error() -> None:
    with pytest.raises(KeyError, match="a step that no list names"):
        search(Counter("unnamed"))


def test_an_unknown_mistake_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no mistake 'typo' in Counter"):
        Counter("typo")


def test_a_model_without_bounds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_STATES", 5)
    with pytest.raises(RuntimeError, match="more than 5 states"):
        search(Counter())
