"""`tests/PREDECESSORS.md` has each of their features and defects in a row, and each row names a test that exists."""

from __future__ import annotations

import re

from tests.support.children import ROOT

PAGE = ROOT / "tests" / "PREDECESSORS.md"
TABLES = {
    "Features of Worqr": [f"W{n}" for n in range(1, 46)],
    "Defects of Worqr": [f"B-W{n}" for n in range(1, 27)],
    "hworker": [f"H{n}" for n in range(1, 28)],
    "Defects of hworker": [f"B-H{n}" for n in range(1, 19)],
    "Queasy": [f"Q{n}" for n in range(1, 36)],
    "Defects of Queasy": [f"B-Q{n}" for n in range(1, 34)],
}
LATER = [f"R{n}" for n in range(1, 22)]
"""Of later versions of Queasy: the second table below its heading."""


def rows(heading: str, skipped: int = 0) -> list[list[str]]:
    """The cells of the first table below a heading, or of one behind it."""
    section = re.split(rf"^#+ {heading}$", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[skipped]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def ids(heading: str, skipped: int = 0) -> list[str]:
    """The features or defects of a table; a row may be about several."""
    return [each for row in rows(heading, skipped) for each in row[0].split(", ")]


def all_rows() -> list[list[str]]:
    return [row for heading in TABLES for row in rows(heading)] + rows("Queasy", 1)


def test_every_feature_and_defect_of_the_predecessors_has_its_row() -> None:
    assert {heading: sorted(ids(heading)) for heading in TABLES} == {
        name: sorted(table) for name, table in TABLES.items()
    }
    assert sorted(ids("Queasy", 1)) == sorted(LATER)


def test_every_row_names_a_test() -> None:
    assert [row[0] for row in all_rows() if not row[2].startswith("`test_")] == []


def test_every_test_that_the_page_names_exists() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)", source))
    named = {name for row in all_rows() for name in re.findall(r"\btest_\w+", row[2])}
    assert named - there == set()
    assert len(named) > 150
