"""Reading the tables of a page, so that tests can compare them with the code."""

from __future__ import annotations

import re

from tools.pages import DOCS

REFERENCE = DOCS / "reference"
TITLES = ("default", "failure handlers")


def section(page: str, heading: str) -> str:
    """The text of docs/reference/`page` below a heading, to the end of the page."""
    return re.split(rf"^#+ {re.escape(heading)}$", (REFERENCE / page).read_text("utf-8"), flags=re.MULTILINE)[1]


def table(page: str, heading: str, skipped: int = 0) -> list[list[str]]:
    """All lines of the first table below a heading, or of one behind it: each is its cells, the first are the titles."""
    lines = re.findall(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)[skipped].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in [lines[0], *lines[2:]]]


def rows(page: str, heading: str, skipped: int = 0) -> list[list[str]]:
    """The cells of a table, without its titles."""
    return table(page, heading, skipped)[1:]


def columns(page: str, heading: str, skipped: int = 0) -> dict[str, dict[str, str]]:
    """The first word of each row -> title of a column -> cell."""
    titles, *found = table(page, heading, skipped)
    assert all(len(row) == len(titles) for row in found), f"{page}, {heading}: a row has another number of cells"
    return {words(row[0])[0]: _split(dict(zip(titles, row, strict=True))) for row in found}


def _split(row: dict[str, str]) -> dict[str, str]:
    """Divide the cell `value`: the type, then lines that begin with a title, and the bounds. A default left out is None."""
    if "value" not in row:
        return row
    found = {**row, "bounds": ""}
    found["type"], *lines = row["value"].split("<br>")
    for line in lines:
        title, colon, text = line.partition(": ")
        found |= {title: text} if colon and title in TITLES else {"bounds": line}
    found.setdefault("default", "`None`")
    found.setdefault("failure handlers", found["default"])
    return found


def words(cell: str) -> list[str]:
    """The code in a cell."""
    return re.findall(r"`([^`]+)`", cell)
