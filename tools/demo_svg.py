"""A picture of ``worqr demo``: ``python -m tools.demo_svg docs/demo.svg``.

The demo runs on a pseudo-terminal of 80 columns, as it does for a user. What it wrote is played into a screen in memory, and the
last screen is written as SVG: real text, which can be selected and searched, on a dark window that reads well on light and dark
pages. Times and speeds are those of this machine; process ids are made up, so that two pictures differ only where runs do.

Needs `pyte <https://pypi.org/project/pyte/>`_, a terminal in memory (in the dependency group ``test``), and rich.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS, ROWS = 80, 60
TITLE: Final = "worqr demo"
FONT: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
THEME: Final = TerminalTheme(
    (30, 33, 39),
    (220, 223, 228),
    [
        *((60, 66, 78), (240, 113, 120), (152, 216, 120), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 200, 216), (220, 223, 228)),
    ],
    [
        *((143, 150, 163), (255, 135, 140), (170, 230, 140), (245, 210, 140)),
        *((125, 195, 255), (215, 145, 235), (110, 220, 235), (255, 255, 255)),
    ],
)
_NAMES: Final = {"brown": "yellow"}
"""Colours that pyte calls otherwise than rich."""
DIM: Final = 2
"""The attribute of dim text, which pyte does not know."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_svg", description="Write a picture of `worqr demo`.")
    parser.add_argument("out", type=Path, metavar="OUT.svg", help="the file to write")
    out: Path = parser.parse_args(arguments).out
    code, data = run_on_terminal([sys.executable, "-m", "worqr", "demo"])
    if code:
        sys.exit(f"worqr demo ended with exit code {code}:\n{data.decode(errors='replace')}")
    out.write_text(as_svg(last_screen(data)), "utf-8")


def run_on_terminal(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Run a command on a pseudo-terminal of `COLUMNS` columns. Returns its exit code and its output."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    clean |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(env or {})}
    clean.pop("COLORTERM", None)
    data = b""
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=clean) as process:
        os.close(its)
        try:
            while some := os.read(ours, 65536):
                data += some
        except OSError:  # how Linux reports that the other end is closed
            pass
    os.close(ours)
    return process.returncode, data


def last_screen(data: bytes) -> list[Text]:
    """Return the lines of the screen after all of `data`, with their styles, without empty lines around them."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(_with_dim(data.decode("utf-8", "replace")))
    lines = [_line(screen, row) for row in range(ROWS)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    while lines and not lines[0].plain.strip():
        lines.pop(0)
    return _without_pids(lines)


def _with_dim(text: str) -> str:
    """Replace the attribute dim, which pyte ignores, by a grey colour."""

    def change(match: re.Match[str]) -> str:
        codes = match[1].split(";")
        plain = not any(code.startswith(("3", "9")) for code in codes)
        return f"\x1b[{';'.join('90' if code == str(DIM) and plain else code for code in codes)}m"

    return re.sub(r"\x1b\[([0-9;]+)m", change, text)


def _line(screen: Any, row: int) -> Text:
    line = Text()
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    for (fg, bg, bold), some in groupby(cells, lambda cell: (cell.fg, cell.bg, cell.bold)):  # fewer and longer texts
        line.append("".join(cell.data for cell in some), Style(color=_colour(fg), bgcolor=_colour(bg), bold=bold))
    line.rstrip()
    return line


def _colour(name: str) -> str | None:
    """Return a colour of pyte as rich names it."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    name = _NAMES.get(name, name)
    return f"bright_{name[6:].replace('brown', 'yellow')}" if name.startswith("bright") else name


def _without_pids(lines: list[Text]) -> list[Text]:
    """Replace process ids by numbers that are the same in each picture."""
    for line in lines:
        match = re.search(r"(worker-(\d+)\s+)(\d{2,})(?=\s)", line.plain)
        if match:
            begin, end = match.span(3)
            number = str(4000 + int(match[2])).rjust(end - begin)[-(end - begin) :]
            spans = line.spans
            line.plain = line.plain[:begin] + number + line.plain[end:]
            line.spans = spans
    return lines


def as_svg(lines: Sequence[Text]) -> str:
    """Return the lines as a picture that loads nothing from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title=TITLE, theme=THEME, unique_id="demo", font_aspect_ratio=0.61)
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    svg = re.sub(r"font-family: [^;]+;", f"font-family: {FONT};", svg)
    svg = svg.replace("font-size: 20px;", "font-size: 21px;", 1)  # so that vertical lines have no gaps in usual fonts
    svg = svg.replace("<!-- Generated with Rich https://www.textualize.io -->", "")
    head, mark, rest = svg.partition(">")
    described = f'{head} role="img" aria-label="{TITLE}"{mark}\n    <title>{TITLE}</title>{rest}'
    return "\n".join(line.rstrip() for line in described.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    main()
