"""The diagrams of the documentation are what their program makes, and the life of a job shows the table of states."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.test_layering import NAMES, RANK
from tools import diagrams
from worqr.job_states import TRANSACTIONS, moves

DOCS = Path(__file__).parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"
LIFE = "life-of-a-job.svg"


def elements(name: str, kind: str, mark: str) -> Iterator[dict[str, Any]]:
    """The attributes of the elements of a committed diagram that have this mark."""
    for element in ET.parse(diagrams.ASSETS / name).iter(SVG + kind):
        if mark in element.attrib:
            yield dict(element.attrib)


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_the_committed_file_is_what_the_program_makes(name: str) -> None:
    made = diagrams.DIAGRAMS[name]()
    assert (diagrams.ASSETS / name).read_text("utf-8") == made, "run python -m tools.diagrams"


def test_the_life_of_a_job_shows_the_moves_of_the_table_and_no_other() -> None:
    expected: dict[tuple[str, str], list[str]] = defaultdict(list)
    for transaction, before, after in moves():
        expected[before, after].append(transaction)
    drawn = [
        (edge["data-from"], edge["data-to"], edge["data-by"].split()) for edge in elements(LIFE, "path", "data-to")
    ]
    assert {(before, after): by for before, after, by in drawn} == expected
    assert len(drawn) == len(expected)


def test_the_life_of_a_job_shows_the_states_of_the_table_by_their_public_names() -> None:
    states = {state for _, before, after in moves() for state in (before, after)}
    assert {box["data-state"] for box in elements(LIFE, "rect", "data-state")} == states
    text = unescape(diagrams.life_of_a_job())
    for state in states:
        assert f'class="name">{diagrams.shown(state)}<' in text


def test_each_arrow_runs_from_the_edge_of_its_state_to_the_edge_of_the_other() -> None:
    boxes = {
        box["data-state"]: [float(box[side]) for side in ("x", "y", "width", "height")]
        for box in elements(LIFE, "rect", "data-state")
    }
    for edge in elements(LIFE, "path", "data-to"):
        points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+),([\d.]+)", edge["d"])]
        for state, (x, y) in ((edge["data-from"], points[0]), (edge["data-to"], points[-1])):
            left, top, width, height = boxes[state]
            inside = left <= x <= left + width and top <= y <= top + height
            at_an_edge = x in {left, left + width} or y in {top, top + height}
            assert inside and at_an_edge, (edge["data-from"], edge["data-to"], state)


def test_the_timeline_keeps_the_promise_with_the_times_of_the_code() -> None:
    seconds = re.findall(r">([\d.]+) s: ", diagrams.death_of_a_worker())
    assert [float(second) for second in seconds] == sorted({diagrams.MISSED, diagrams.DEAD})
    assert diagrams.DEAD < diagrams.BOUND == 5


def test_a_move_that_is_not_drawn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(diagrams.ROUTES, ("waiting", "active"))
    with pytest.raises(ValueError, match="waiting"):
        diagrams.life_of_a_job()


def test_every_move_of_an_operator_alone_is_drawn_as_one() -> None:
    for edge in elements(LIFE, "path", "data-to"):
        actors = {TRANSACTIONS[name].by for name in edge["data-by"].split()}
        assert (edge["class"] == "operator") == (actors == {"operator"})


def test_the_layers_have_every_folder_in_the_order_of_imports() -> None:
    spine = [[RANK.get(part, 0) for part in layer.parts.split()] for layer in diagrams.SPINE]
    for above, below in pairwise(spine):
        assert min(above) > max(below), (above, below)
    shown = {part for layer in (*diagrams.SPINE, *diagrams.BESIDE.values()) for part in layer.parts.split()}
    folders = {name.partition(".")[0] for name in NAMES if "." in name}
    assert folders <= shown <= {name.partition(".")[0] for name in NAMES}


def test_every_diagram_stands_on_a_page_with_a_text_for_those_who_cannot_see_it() -> None:
    text = "\n".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    for name in diagrams.DIAGRAMS:
        shown = re.search(rf"!\[([^\]]+)\]\([^)]*{re.escape(name)}\)", text)
        assert shown and len(shown[1]) > 40, name
