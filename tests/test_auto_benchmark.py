"""What the benchmark of "auto" makes of what it saw: where it settled, since when, and the figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.auto import FIGURE, Work, draw, waits


def work(seen: list[int]) -> Work:
    return Work("waits", waits, seen=seen)


def test_it_settles_where_it_is_in_the_last_third_and_arrived_when_it_came_near() -> None:
    found = work([10, 20, 40, 80, 100, 70, 90, 90, 90])
    assert (found.settled, found.arrived) == (90, 4)
    assert (work([7]).settled, work([7]).arrived) == (7, 1)
    assert work([10, 10, 1, 2, 1, 2]).arrived == 3


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw([work([1, 2])], 2, tmp_path / FIGURE).endswith("takes matplotlib (the dependency group `benchmarks`)")
    assert list(tmp_path.iterdir()) == []


def test_with_matplotlib_it_draws_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it is only needed to draw the figures of the docs")
    draw([work([1, 2])], 2, tmp_path / FIGURE)
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")
