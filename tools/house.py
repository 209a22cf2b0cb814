"""Measures how much house there is: ``python -m tools.house`` prints files, lines, words, walks, and what an import costs.

Lines are lines of code: blank lines, comments and docstrings do not count. Words have a letter or a digit: the bars of a table
do not count, examples do. The walks are those of `tools.walks`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
IMPORT = """\
import sys, time
began = time.perf_counter()
import worqr
worqr.Mesh
took = time.perf_counter() - began
print(took, sum(name.partition(".")[0] == "worqr" for name in sys.modules))
"""
IMPORTS = 7
"""Processes of which the median time of the import is taken."""


def lines_of(text: str) -> int:
    """Return the lines of code in a Python file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        first = getattr(node, "body", None)
        if isinstance(first, list) and first and isinstance(first[0], ast.Expr):
            value = first[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(first[0].lineno, (first[0].end_lineno or 0) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def measure(folder: str, pattern: str = "*.py") -> tuple[int, int]:
    """Return the files of a folder, and their lines of code."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / folder).rglob(pattern))]
    if pattern == "*.py":
        return len(texts), sum(map(lines_of, texts))
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return len(texts), sum(bool(line) and not line.startswith("--") for line in lines)


def words_of(text: str) -> int:
    """Return the words of a page."""
    return sum(re.search(r"\w", word) is not None and "```" not in word for word in text.split())


def words(folder: str) -> tuple[int, int]:
    """Return the pages of a folder, and their words."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / folder).rglob("*.md"))]
    return len(texts), sum(map(words_of, texts))


def walks() -> Iterable[tuple[str, int]]:
    """Return the number of files that each walk passes."""
    printed = subprocess.check_output([sys.executable, "-m", "tools.walks"], cwd=ROOT, text=True)
    for name, files in re.findall(r"^(.*): (\d+) files", printed, re.MULTILINE):
        yield name, int(files)


def imports() -> tuple[float, int]:
    """Return the seconds that the import of ``worqr.Mesh`` takes, and how many modules of worqr it imports."""
    found = [
        subprocess.check_output([sys.executable, "-c", IMPORT], cwd=ROOT, text=True).split() for _ in range(IMPORTS)
    ]
    return median(float(took) for took, _ in found), int(found[0][1])


def main() -> None:
    (files, lines), (scripts, lua), (tests, test_lines) = (
        measure("worqr"),
        measure("worqr/lua", "*.lua"),
        measure("tests"),
    )
    took, modules = imports()
    pages, written = words("docs")
    rows = [
        ("files of Python in worqr/", f"{files:,}"),
        ("lines of code in them", f"{lines:,}"),
        ("files of Lua", f"{scripts:,}"),
        ("lines of code in them", f"{lua:,}"),
        ("files of tests", f"{tests:,}"),
        ("lines of code in them", f"{test_lines:,}"),
        ("pages of documentation", f"{pages:,}"),
        ("words in them", f"{written:,}"),
        *((f"files that {name} passes", f"{passed:,}") for name, passed in walks()),
        ("modules of worqr that worqr.Mesh imports", f"{modules:,}"),
        ("seconds that it takes", f"{took:.2f}"),
    ]
    for name, value in rows:
        print(f"{name:<45}{value:>10}")


if __name__ == "__main__":
    main()
