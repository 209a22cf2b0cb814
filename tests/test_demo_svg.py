"""The picture of the demo: made of what a program writes to a terminal, as text, and without anything from the net."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree as ET

import pytest

from tests.support.children import ROOT

pytest.importorskip("pyte")

from tools.demo_svg import COLUMNS, as_svg, last_screen, run_on_terminal

PICTURE = ROOT / "docs" / "demo.svg"
PROGRAM = r"""
import os, sys
assert sys.stdout.isatty() and os.get_terminal_size().columns == 80
print("\x1b[1mworker\x1b[0m        \x1b[2mpid\x1b[0m")
print("gone\x1b[2K\r\x1b[31mkilled\x1b[0m & <b>")
print("worker-2   73912  \x1b[2;32m####\x1b[0m x")
"""


def text_of(svg: str) -> str:
    return "\n".join(
        "".join(node.itertext()) for node in ET.fromstring(svg).iter() if node.tag.endswith("}text")
    ).replace("\xa0", " ")


def test_the_last_screen_of_a_program_is_drawn_as_text() -> None:
    code, data = run_on_terminal([sys.executable, "-c", PROGRAM])
    assert code == 0, data
    lines = last_screen(data)
    assert [line.plain for line in lines] == [
        "worker        pid",
        "killed & <b>",
        "worker-2    4002  #### x",
    ]
    svg = as_svg(lines)
    assert svg == as_svg(lines)
    text = text_of(svg)
    assert "killed" in text
    assert "& <b>" in text
    assert "gone" not in text


def check(svg: str) -> None:
    """It has a title, fits a page, and loads nothing."""
    assert "worqr demo" in text_of(svg)
    assert re.findall(r"https?://[^\"' ]+", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.findall(r"@font-face|@import|url\((?!#)|<script|<image|href", svg)
    assert len(svg) < 60_000


def test_a_picture_loads_nothing() -> None:
    _, data = run_on_terminal([sys.executable, "-c", PROGRAM])
    check(as_svg(last_screen(data)))


def test_the_picture_of_the_docs_is_that_of_a_good_end() -> None:
    svg = PICTURE.read_text("utf-8")
    check(svg)
    text = text_of(svg)
    assert "Nothing was lost." in text
    assert "SIGKILL" in text
    assert "✗" not in text
    assert all(len(line) <= COLUMNS for line in text.splitlines())
