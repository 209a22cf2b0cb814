"""The walks of "How it is built" pass the files that the page names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explain" / "how-it-is-built.md"
WALKS = ("a task", "a typed call", "a call in a process", "a cancellation", "a batch", "a dead worker")
LONGEST = 120
"""Seconds for all walks; 15 on a quiet machine, of which a dead worker takes 5."""


def walks() -> dict[str, set[str]]:
    """The files that each walk passes, as the program prints them."""
    printed = subprocess.run(
        [sys.executable, "-m", "tools.walks", "--files"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LONGEST,
    ).stdout
    found: dict[str, set[str]] = {}
    for line in printed.splitlines():
        if line.startswith(" "):
            found[list(found)[-1]].add(line.strip())
        else:
            name, _, counts = line.partition(": ")
            assert re.fullmatch(r"\d+ files, \d+ functions", counts)
            found[name] = set()
    return found


def sections() -> dict[str, set[str]]:
    """The files of ``worqr/`` that the page names, by the heading above them."""
    parts = re.split(r"^##+ (.*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return {
        heading.lower(): set(re.findall(r"`([a-z_/]+\.py)`", text))
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_each_walk_passes_the_files_that_the_page_names() -> None:
    taken, told = walks(), sections()
    assert tuple(taken) == WALKS
    for name, files in taken.items():
        assert len(told[name]) >= 5, f"the page does not tell {name}"
        assert told[name] <= files, f"{name} does not pass {sorted(told[name] - files)}"


def test_the_page_names_no_file_that_does_not_exist() -> None:
    for heading, files in sections().items():
        for file in files:
            assert (ROOT / "worqr" / file).exists() or (ROOT / file).exists(), f"{heading}: {file}"
