"""The output of the commands: tables and lines of JSON. All text is made safe by `worqr.escaping`; nothing reads markup.

On a terminal, tables fit its width, leave out empty columns, and mark in colour what needs attention. In a pipe or a file, a
table is plain: every column, every character, no colours. `worqr.views` has the columns.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from worqr.codecs import encoded_by
from worqr.escaping import escape
from worqr.views.tables import EMPTY, Column, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

T = TypeVar("T")
GAP: Final = "  "
NARROWEST: Final = 20
NOTE: Final = "yellow"
NOTE_WIDTH: Final = 24
"""Characters of a note beside its row, at least; in less room it stands below it."""


def print_error(message: str, detail: str = "") -> None:
    """Print a message to the standard error, and below it the `detail` (a log, a traceback)."""
    print("worqr:", escape(message.strip(), keep="\n"), file=sys.stderr, flush=True)
    if detail:
        print(escape(detail.strip("\n"), keep="\n"), file=sys.stderr, flush=True)


# JSON


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    print(json_line(value))


def json_line(value: Mapping[str, Any]) -> str:
    """Return JSON without any character that a terminal would act upon, or that its encoding lacks."""
    return printable_json(json.dumps(value, ensure_ascii=False, default=_as_json, separators=(",", ":")))


def printable_json(text: str, *, keep: str = "") -> str:
    """Return the same JSON with escapes for such characters; those of `keep` stay as they are."""
    return text if _can_print(text) else "".join(c if c in keep or _can_print(c) else _json_escaped(c) for c in text)


def _can_print(text: str) -> bool:
    """Return True if the text is printable, and the encoding of the standard output has all its characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return text.isprintable()


def _json_escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, frozenset | set):
        return sorted(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise TypeError(f"{type(value).__name__} is not for JSON")


def payload_fields(data: bytes) -> dict[str, str]:
    """Return a payload for JSON: as text if it is UTF-8, else as base64; the field ``encoding`` says which. If it is still
    encoded by a codec, ``encoded`` names that.
    """
    if name := encoded_by(data):
        return {"task": base64.b64encode(data).decode(), "encoding": "base64", "encoded": name}
    try:
        return {"task": data.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"task": base64.b64encode(data).decode(), "encoding": "base64"}


# Lists


def print_list(
    table: Table | Sequence[Column],
    rows: Sequence[T],
    fields: Callable[[T], Mapping[str, Any]],
    *,
    json: bool,
    nothing: str,
) -> None:
    """Print a list as JSON Lines or as a table; `nothing` is the message about an empty one."""
    if json:
        for row in rows:
            print_json(fields(row))
    elif rows:
        show_table(table, rows)
    else:
        print_error(nothing)


def show_table(table: Table | Sequence[Column], rows: Sequence[object]) -> None:
    """Print rows: for people if the standard output is a terminal, else plain."""
    if is_terminal():
        console = open_console()
        for part in lay_out(table, rows, console.width):
            console.print(part)
        return
    columns = (*table.columns, table.state) if isinstance(table, Table) else table
    print_plain([column.title for column in columns], [[column.plain(row) for column in columns] for row in rows])


def print_plain(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns, numbers to the right, without cutting or wrapping anything."""
    from rich.cells import cell_len

    lines = [list(header), *([escape(str(value)) for value in row] for row in rows)]
    for column in range(len(header)):
        width = max(cell_len(line[column]) for line in lines)
        right = all(_is_number(line[column]) for line in lines[1:])
        for line in lines:
            fill = " " * (width - cell_len(line[column]))
            line[column] = fill + line[column] if right else line[column] + fill
    for line in lines:
        print(GAP.join(line).rstrip())


def _is_number(text: str) -> bool:
    return text == "-" or text.removesuffix(" s").replace(".", "", 1).isdigit()


def show_facts(facts: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Print names and values below each other; on a terminal folded at its width, and coloured by `styles`."""
    if is_terminal():
        open_console().print(_facts(facts, styles))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}{GAP}{escape(value)}")


# The terminal


def is_terminal() -> bool:
    """Return True if the standard output is one."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Return False if the user does not want colours, or the terminal has none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def open_console(*, follow_size: bool = False) -> Console:
    """Return the standard output for text with styles. Nothing in it is read as markup.

    Args:
        follow_size: the console has the present size of the terminal each time it is used, not that of this call.
    """
    from rich.console import Console

    return Console(
        width=None if follow_size else max(NARROWEST, shutil.get_terminal_size().columns),
        color_system="standard" if has_colours() else None,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def printable(text: str) -> str:
    """Return a text escaped, also for characters that the terminal's encoding lacks: so its width is that of the output."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = escape(text)
    return shown if shown.isascii() else shown.encode(encoding, "backslashreplace").decode(encoding)


def has_ellipsis() -> bool:
    """Return True if the terminal's encoding has the character for what was cut off."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def one_line(text: str, style: str = "") -> Text:
    """Return a text that is cut at the width of its place."""
    from rich.text import Text

    return Text(printable(text), style, no_wrap=True, overflow="ellipsis" if has_ellipsis() else "crop")


# The layout of a table on a terminal. If it does not fit, notes move below their row, then long texts, then headings are
# abbreviated. At last each row is a block of lines. rich folds, cuts and aligns the cells.


def lay_out(table: Table | Sequence[Column], rows: Sequence[object], width: int) -> list[RenderableType]:
    """Return what shows a table in at most `width` characters."""
    columns = table.columns if isinstance(table, Table) else tuple(table)
    notes = [printable(table.state_of(row)) if isinstance(table, Table) else "" for row in rows]
    kept = [
        column
        for place, column in enumerate(columns)
        if not column.hidden and (place == 0 or column.always or any(column.value(row) not in EMPTY for row in rows))
    ]
    for has_long, is_short, has_notes in ((1, 0, any(notes)), (1, 0, 0), (0, 0, 0), (0, 1, 0)):
        beside = [column for column in kept if has_long or not column.below]
        titles = [column.short if is_short and column.short else column.title for column in beside]
        cells = [[printable(column.shown(row)) for column in beside] for row in rows]
        widths = fit(beside, titles, cells, width - (len(GAP) + NOTE_WIDTH if has_notes else 0))
        if widths is not None:
            below = [] if has_long else [column for column in kept if column.below]
            if has_notes:
                widths.append(width - sum(widths) - len(GAP) * len(widths))
            return [
                grid(beside, widths, [titles + [""] * bool(has_notes)], "bold"),
                *(
                    part
                    for row, texts, note in zip(rows, cells, notes, strict=True)
                    for part in (
                        grid(beside, widths, [texts + ([note] if has_notes else [])], row=row),
                        *_below(below, row, "" if has_notes else note),
                    )
                ),
            ]
    return [part for row, note in zip(rows, notes, strict=True) for part in _block(kept, row, note)]


def fit(
    columns: Sequence[Column], titles: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> list[int] | None:
    """Return the widths of the columns, taken from the widest that may shrink; None if that is not enough."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, texts)) for texts in zip(titles, *cells, strict=True)]
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    while over > 0:
        able = [n for n, each in enumerate(columns) if each.fit != "whole" and widths[n] > each.least]
        if not able:
            return None
        widths[max(able, key=widths.__getitem__)] -= 1
        over -= 1
    return widths


def grid(
    columns: Sequence[Column],
    widths: Sequence[int],
    rows: Iterable[Sequence[str]],
    style: str = "",
    row: object = None,
    *,
    one_line: bool = False,
) -> Grid:
    """Return rows of cells in columns of these widths, one more than there are columns for notes."""
    from rich.table import Table as Grid
    from rich.text import Text

    found = Grid.grid(padding=(0, len(GAP), 0, 0))
    for place, width in enumerate(widths):
        column = columns[place] if place < len(columns) else None
        cuts = one_line or (column is not None and column.fit == "cut")
        found.add_column(
            justify="right" if column is not None and column.form.right else "left",
            width=width,
            no_wrap=cuts,
            overflow="fold" if not cuts else "ellipsis" if has_ellipsis() else "crop",
        )
    styles = [style or ("" if row is None else each.colour(row)) for each in columns]
    for texts in rows:
        found.add_row(*map(Text, texts, [*styles, style or NOTE]))
    return found


def _below(columns: Sequence[Column], row: object, note: str) -> Iterable[RenderableType]:
    """Yield the lines below a row: its note, and the columns that have no room beside it."""
    from rich.padding import Padding
    from rich.text import Text

    if note:
        yield Padding(Text(note, NOTE, overflow="fold"), (0, 0, 0, len(GAP)))
    for column in columns:
        if column.value(row) not in EMPTY:
            text = one_line(column.shown(row), column.colour(row))
            if column.fit != "cut":
                text.no_wrap, text.overflow = False, "fold"
            yield Padding(text, (0, 0, 0, len(GAP)))


def _block(columns: Sequence[Column], row: object, note: str) -> Iterable[RenderableType]:
    """Yield one row as a block of lines."""
    from rich.padding import Padding
    from rich.text import Text

    first, *others = columns
    yield Text(printable(first.shown(row)), "bold", overflow="fold")
    yield from _below((), row, note)
    named = {column.title: column for column in others if column.value(row) not in EMPTY}
    if named:
        facts = {title: column.shown(row) for title, column in named.items()}
        yield Padding(_facts(facts, {title: each.colour(row) for title, each in named.items()}), (0, 0, 0, len(GAP)))


def _facts(facts: Mapping[str, str], styles: Mapping[str, str]) -> Grid:
    from rich.table import Table as Grid
    from rich.text import Text

    found = Grid.grid(padding=(0, len(GAP), 0, 0))
    found.add_column(style="dim", no_wrap=True)
    found.add_column(overflow="fold")
    for name, value in facts.items():
        found.add_row(name, Text(printable(value), styles.get(name, "")))
    return found
