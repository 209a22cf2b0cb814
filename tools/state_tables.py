"""Copies the state tables of docstrings into "How it is built": ``python -m tools.state_tables``.

A docstring has one table, between lines of ``=`` or with ``|``. The page has a comment with the name of the object, and the
table in Markdown below it. ``tests/test_state_tables.py`` compares the committed page with the output.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explain" / "how-it-is-built.md"
PLACE = re.compile(r"<!-- state table of ([\w.]+) -->\n\n?(?:\|.*\n)*")
RULE = re.compile(r"=+(?: +=+)+")

Row = list[str]


def docstring_of(name: str) -> str:
    """Return the docstring of a module, or of a class as ``module.Class``, without its indentation."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last) if last[0].isupper() else importlib.import_module(name)
    return inspect.getdoc(found) or ""


def table_of(docstring: str) -> list[Row]:
    """Return the rows of the table in a docstring, the names of its columns first.

    Raises:
        ValueError: there is no table.
    """
    lines = docstring.splitlines()
    rules = [number for number, line in enumerate(lines) if RULE.fullmatch(line)]
    if len(rules) == 3:
        starts = [match.start() for match in re.finditer("=+", lines[rules[0]])]
        head = _rows(lines[rules[0] + 1 : rules[1]], starts)
        names = [" ".join(parts).strip() for parts in zip(*head, strict=True)]
        return [names, *_joined(_rows(lines[rules[1] + 1 : rules[2]], starts))]
    bars = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if len(bars) < 3:
        raise ValueError("no table")
    return [bars[0], *bars[2:]]


def _rows(lines: list[str], starts: list[int]) -> list[Row]:
    bounds = list(itertools.pairwise([*starts, None]))
    return [[line[start:end].strip() for start, end in bounds] for line in lines]


def _joined(rows: list[Row]) -> list[Row]:
    """Append the lines without a first cell to the row that they continue."""
    joined: list[Row] = []
    for row in rows:
        if row[0]:
            joined.append(row)
        else:
            joined[-1] = [f"{before} {more}".strip() for before, more in zip(joined[-1], row, strict=True)]
    return joined


def markdown(rows: list[Row]) -> str:
    """The table as Markdown."""
    head, *body = [f"| {' | '.join(row)} |\n" for row in rows]
    return f"{head}|{'---|' * len(rows[0])}\n{''.join(body)}"


def filled(page: str) -> str:
    """Return the page with the tables of today's docstrings."""
    return PLACE.sub(
        lambda place: f"<!-- state table of {place[1]} -->\n\n{markdown(table_of(docstring_of(place[1])))}", page
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
