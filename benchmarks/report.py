"""Tables for people, with rich if it is there and plain if not, and JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.measuring import Row, Table, shown

HEADS = ("what", "unit", "median", "best", "worst", "limit", "ratio", "bar", "met", "runs")
WIDE = 140
"""Columns of a table that goes to a file or a pipe."""


def cells(row: Row) -> list[str]:
    """One line as text."""
    return [
        row.what,
        row.unit,
        shown(row.median),
        shown(row.best),
        shown(row.worst_run),
        "" if row.limit is None else shown(row.limit),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.bar is None else str(row.bar) + (" (worst)" if row.worst else ""),
        {None: "", True: "yes", False: "NO"}[row.met],
        str(len(row.values)),
    ]


def print_table(table: Table) -> None:
    """Print it at once: the whole takes minutes."""
    lines = [cells(row) for row in table.rows]
    try:
        from rich.console import Console
    except ImportError:
        print_plain(table, lines)
    else:
        print_rich(Console(), table, lines)


def print_rich(console: object, table: Table, lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    assert isinstance(console, Console)
    if not console.is_terminal:
        console.width = WIDE
    drawn = RichTable(title=table.title, title_justify="left", caption_justify="left")
    for head in HEADS:
        drawn.add_column(head, justify="left" if head in {"what", "unit", "met"} else "right", overflow="fold")
    for row, line in zip(table.rows, lines, strict=True):
        drawn.add_row(*line, style="bold red" if row.met is False else None)
    console.print(drawn, markup=False)
    for note in notes(table):
        console.print(note, markup=False, highlight=False)
    console.print()


def print_plain(table: Table, lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(HEADS, *lines, strict=True)]
    print(table.title)
    for line in (HEADS, *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\n".join(notes(table)), end="\n\n", flush=True)


def notes(table: Table) -> list[str]:
    limit = [f"limit: {table.limit}"] if table.limit else []
    return limit + table.notes


def write_markdown(path: Path, heading: Sequence[str], tables: Iterable[Table]) -> None:
    """All tables as one, as ``docs/explain/benchmarks.md`` has it, and below it what a reader must know of each."""
    lines = [*heading, "", "| what, and its limit | median | bar |", "|---|--:|--:|"]
    remarks: list[str] = []
    for table in tables:
        limit = f"; limit: {table.limit}" if table.limit else ""
        lines.append(f"| **{table.title}{limit}** | | |")
        for row in table.rows:
            ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
            missed = " **missed**" if row.met is False else ""
            bar = "" if row.bar is None else str(row.bar)
            lines.append(f"| {row.what}, {row.unit} | {shown(row.median)}{ratio}{missed} | {bar} |")
        remarks += [f"- {table.title.partition(':')[0]}: {note}" for note in table.notes]
    path.write_text("\n".join([*lines, "", *remarks]) + "\n", "utf-8")


def machine() -> str:
    """Where this runs, and how busy that is, in one line."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, load average {load}"


def write_json(path: Path, heading: Sequence[str], tables: Iterable[Table]) -> None:
    """All runs of all figures."""
    found = [
        {
            "title": table.title,
            "limit": table.limit,
            "notes": table.notes,
            "rows": [
                {
                    "what": row.what,
                    "unit": row.unit,
                    "median": row.median,
                    "best": row.best,
                    "ratio": row.ratio,
                    "bar": None if row.bar is None else str(row.bar),
                    "met": row.met,
                    "values": row.values,
                    "limits": row.limits,
                }
                for row in table.rows
            ],
        }
        for table in tables
    ]
    path.write_text(json.dumps({"heading": list(heading), "tables": found}, indent=1) + "\n", "utf-8")
