"""The work of the demo: tokenise source files, and count the tokens. Queues are not known here.

It is real work that exists on any machine: every source file of the Python that runs this, including its own test suite (where
the system has one). Some of those are broken on purpose; that they cannot be read is a result like any other.
"""

from __future__ import annotations

import keyword
import os
import sysconfig
import tokenize
from collections import Counter
from dataclasses import dataclass

from worqr.errors import UsageError

NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one file. `broken`: the file is not valid Python, and only the part before the error was counted."""

    lines: int
    tokens: int
    keywords: dict[str, int]
    broken: bool = False


def find_files(limit: int | None = None) -> list[str]:
    """Return the paths of the library's source files; with `limit`, only the largest ones.

    Raises:
        UsageError: there are none.
    """
    root = sysconfig.get_path("stdlib")
    found: list[tuple[int, str]] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in NOT_THE_LIBRARY]
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        found += [(os.path.getsize(path), path) for path in paths if os.path.isfile(path)]
    if not found:
        raise UsageError(
            f"no source files of Python's standard library under {root}: this Python has it in another form"
        )
    largest = sorted(found, reverse=True)[:limit]
    return sorted(path for _, path in largest)


def count_file(path: str) -> Counted:
    """Tokenise one file, and return the counts."""
    lines = tokens = 0
    words: Counter[str] = Counter()
    broken = False
    try:
        with open(path, "rb") as source:
            for token in tokenize.tokenize(source.readline):
                tokens += 1
                lines = token.end[0]
                if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                    words[token.string] += 1
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        broken = True
    return Counted(lines, tokens, dict(sorted(words.items())), broken)
