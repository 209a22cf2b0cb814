"""Tables on a terminal: they fit its width, leave out empty columns, and mark in colour what needs attention.

In a pipe or a file, a table is plain: every column, every character, no colours. `worqr.cli.output` prints that form. Here each
cell is escaped before it is measured, cut or coloured.

If a table does not fit, the layout changes step by step. First names are folded and long texts are cut. Then notes and long texts
move to a line of their own below their row. Then headings are abbreviated. At last each row is a block of lines.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr.cli.output import escape, print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Fit = Literal["whole", "fold", "cut"]
"""What happens to a cell that is too long: nothing, it continues on the next line, or its end is left out."""

GAP: Final = "  "
NARROWEST: Final = 20
NOTE: Final = "yellow"
_NOTE_WIDTH: Final = 24
_SEPARATORS: Final = "._-/:"
_EMPTY: Final = (None, "", "-", 0, "0")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: the heading; `short` replaces it where there is little room.
        plain: a value as pipes get it; `shown`, if given, as terminals get it.
        style: the colour of a value, or one colour for all that are not empty.
        fit: what to do with a long cell; `least` is the number of characters that it keeps.
        words: a cell that continues on the next line is broken between words.
        right: numbers are aligned to the right.
        always: the column is shown even if all its values are empty.
        note: on a terminal the values are sentences about the row, in a column without a heading.
        spare: the column may move to a line below its row.
        hidden: terminals do not show it.
    """

    title: str
    short: str = ""
    plain: Callable[[Any], str] = str
    shown: Callable[[Any], str] | None = None
    style: str | Callable[[Any], str] = ""
    fit: Fit = "whole"
    least: int = 12
    words: bool = False
    right: bool = False
    always: bool = False
    note: bool = False
    spare: bool = False
    hidden: bool = False

    def text(self, value: object) -> str:
        """Return a value as a terminal shows it, escaped."""
        return _printable(escape((self.shown or self.plain)(value)))

    def colour(self, value: object) -> str:
        """Return the style of a value."""
        if value in _EMPTY:
            return "dim"
        return self.style if isinstance(self.style, str) else self.style(value)


def number(title: str, short: str = "", style: str = "", *, always: bool = False) -> Column:
    """A column of whole numbers."""
    return Column(title, short, shown="{:,}".format, style=style, right=True, always=always)


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print rows of values: for people if the standard output is a terminal, else plain."""
    values = [list(row) for row in rows]
    if not is_terminal():
        cells = [[column.plain(value) for column, value in zip(columns, row, strict=True)] for row in values]
        print_table([column.title for column in columns], cells)
        return
    console = open_console()
    for line in lay_out(columns, values, console.width):
        console.print(line, soft_wrap=True)


def show_facts(facts: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Print names and values below each other; on a terminal folded at its width, and coloured by `styles`."""
    width = max(map(len, facts))
    if not is_terminal():
        for name, value in facts.items():
            print(f"{name:{width}}{GAP}{escape(value)}")
        return
    console = open_console()
    for line in _facts(facts, styles, width, console.width):
        console.print(line, soft_wrap=True)


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


def _printable(text: str) -> str:
    """Return `text` with escapes for characters that the terminal's encoding lacks, so that its width is that of the output."""
    encoding = sys.stdout.encoding or "utf-8"
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


# The layout


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    style: str


@dataclass(frozen=True, slots=True)
class _Part:
    """One column in a layout: its heading, its cells, and how it may shrink."""

    title: str
    cells: list[_Cell]
    fit: Fit
    least: int
    right: bool = False
    words: bool = False

    @property
    def natural(self) -> int:
        return max(map(_width, (self.title, *(cell.text for cell in self.cells))))


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[object]], width: int) -> list[Text]:
    """Return the lines of a table that is at most `width` characters wide."""
    kept = [
        (column, [row[i] for row in rows])
        for i, column in enumerate(columns)
        if not column.hidden and not column.note and (i == 0 or column.always or _holds(row[i] for row in rows))
    ]
    notes = [_note(columns, row) for row in rows]
    for spare, short, beside in (
        (True, False, True),
        (True, False, False),
        (False, False, False),
        (False, True, False),
    ):
        parts = [_part(column, values, short=short) for column, values in kept if spare or not column.spare]
        if beside and any(note.text for note in notes):
            parts.append(_Part("", notes, "fold", _NOTE_WIDTH, words=True))
        widths = _fit([(part.natural, part.least, part.fit) for part in parts], width)
        if widths is not None:
            apart = [(column, values) for column, values in kept if column.spare and not spare]
            below = [_below(apart, None if beside else notes[n], n, width) for n in range(len(rows))]
            return _grid(parts, widths, below)
    return _blocks(kept, notes, width)


def _holds(values: Iterable[object]) -> bool:
    return any(value not in _EMPTY for value in values)


def _note(columns: Sequence[Column], row: Sequence[object]) -> _Cell:
    said = [column.text(value) for column, value in zip(columns, row, strict=True) if column.note]
    return _Cell("; ".join(filter(None, said)), NOTE)


def _part(column: Column, values: Sequence[object], *, short: bool) -> _Part:
    title = column.short if short and column.short else column.title
    cells = [_Cell(column.text(value), column.colour(value)) for value in values]
    return _Part(title, cells, column.fit, column.least, column.right, column.words)


def _fit(wishes: Sequence[tuple[int, int, Fit]], width: int) -> list[int] | None:
    """Return the widths of the columns, taken from the widest that may shrink; None if that is not enough."""
    widths = [natural for natural, _, _ in wishes]
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    while over > 0:
        able = [i for i, (_, least, fit) in enumerate(wishes) if fit != "whole" and widths[i] > least]
        if not able:
            return None
        widest = max(able, key=widths.__getitem__)
        widths[widest] -= 1
        over -= 1
    return widths


def _grid(parts: Sequence[_Part], widths: Sequence[int], below: Sequence[Sequence[Text]]) -> list[Text]:
    heads = [_Part(part.title, [_Cell(part.title, "bold")], "fold", 0, part.right, words=True) for part in parts]
    lines = _row(heads, widths, 0)
    for n, more in enumerate(below):
        lines += [*_row(parts, widths, n), *more]
    return lines


def _row(parts: Sequence[_Part], widths: Sequence[int], n: int) -> list[Text]:
    """Return the lines of one row: as many as its longest cell takes."""
    from rich.text import Text

    cells = [_broken(part.cells[n].text, width, part) for part, width in zip(parts, widths, strict=True)]
    lines: list[Text] = []
    for k in range(max(map(len, cells))):
        line = Text()
        for part, cell_lines, width in zip(parts, cells, widths, strict=True):
            cell_line = cell_lines[k] if k < len(cell_lines) else ""
            fill = " " * (width - _width(cell_line))
            line.append(fill if part.right else "")
            line.append(cell_line, part.cells[n].style)
            line.append(GAP if part.right else fill + GAP)
        line.rstrip()
        lines.append(line)
    return lines


def _broken(text: str, width: int, part: _Part) -> list[str]:
    if part.fit == "cut":
        return [cut(text, width)]
    return _wrap(text, width) if part.words else _fold(text, width)


def _below(apart: Sequence[tuple[Column, Sequence[object]]], note: _Cell | None, n: int, width: int) -> list[Text]:
    """Return the lines below a row: its note, and the columns that have no room beside it."""
    from rich.text import Text

    room = width - len(GAP)
    lines = [Text(GAP + each, note.style) for each in _wrap(note.text, room)] if note and note.text else []
    for column, values in apart:
        if values[n] not in _EMPTY:
            text = column.text(values[n])
            broken = [cut(text, room)] if column.fit == "cut" else _wrap(text, room)
            lines += [Text(GAP + each, column.colour(values[n])) for each in broken]
    return lines


def _blocks(kept: Sequence[tuple[Column, Sequence[object]]], notes: Sequence[_Cell], width: int) -> list[Text]:
    """Return one block of lines for each row."""
    from rich.text import Text

    lines: list[Text] = []
    (first, names), *others = kept
    for n, note in enumerate(notes):
        lines += [Text(each, "bold") for each in _fold(first.text(names[n]), width)]
        if note.text:
            lines += [Text(GAP + each, note.style) for each in _wrap(note.text, width - len(GAP))]
        facts = {column.title: column.text(values[n]) for column, values in others if values[n] not in _EMPTY}
        styles = {column.title: column.colour(values[n]) for column, values in others}
        title_width = max((len(title) + len(GAP) for title in facts), default=0)
        lines += _facts({GAP + title: text for title, text in facts.items()}, styles, title_width, width)
    return lines


def _facts(facts: Mapping[str, str], styles: Mapping[str, str], title_width: int, width: int) -> list[Text]:
    from rich.text import Text

    lines: list[Text] = []
    for name, value in facts.items():
        room = max(1, width - title_width - len(GAP))
        for k, part in enumerate(_wrap(_printable(escape(value)), room)):
            line = Text.assemble((f"{name if k == 0 else '':{title_width}}{GAP}", "dim"))
            lines.append(line.append(part, styles.get(name.strip(), "")))
    return lines


# Texts


def cut(text: str, width: int, *, anywhere: bool = False) -> str:
    """Return `text`, or its beginning and an ellipsis if it is wider than `width`.

    Args:
        anywhere: cut at the width itself, and not at a separator before it.
    """
    if _width(text) <= width:
        return text
    mark = "…" if (sys.stdout.encoding or "utf-8").lower().startswith("utf") else "..."
    head = _fold(text, max(1, width - len(mark)), "" if anywhere else _SEPARATORS)[0]
    return (head + mark)[: max(1, width)]


def _wrap(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width`, broken between words where that is possible."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if _width(longer) <= width:
            lines[-1] = longer
        else:
            lines = [*(lines if lines[-1] else lines[:-1]), *_fold(word, width)]
    return lines


def _fold(text: str, width: int, separators: str = _SEPARATORS) -> list[str]:
    """Return `text` in lines of at most `width`, broken after a separator in the second half of the line, else anywhere."""
    lines, used = [""], 0
    for character in text:
        character_width = _width(character)
        if used + character_width > width and lines[-1]:
            full = lines[-1]
            end = max(map(full.rfind, separators), default=-1) + 1
            kept = full[end:] if len(full) // 2 < end < len(full) else ""
            lines[-1] = full[: len(full) - len(kept)]
            lines.append(kept)
            used = _width(kept)
        lines[-1] += character
        used += character_width
    return lines


def _width(text: str) -> int:
    from rich.cells import cell_len

    return len(text) if text.isascii() else cell_len(text)
