"""docs/reference/cli.md is true: every command and option is in it, and what it shows can be typed.

Some of its commands are run by tests/docs/test_others.py. After a change of the command line, ``python -m tools.cli_reference``
writes its generated parts anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.support.children import ROOT
from tools.cli_reference import EXAMPLES, PATH, arguments_of, commands, connection_options, name_of, parts, written
from tools.pages import DOCS, blocks_of
from tools.pages import name_of as name_of_page
from worqr.cli import COMMANDS, STDIN, make_app

APP = make_app()
ALL = dict(pair for name in COMMANDS for pair in commands(APP, name))


@cache
def texts() -> dict[str, str]:
    """Return the generated parts of the page, by the line before each."""
    return {first: "\n".join(lines) for first, lines in parts().items()}


def part(path: str) -> str:
    """The part of a command, or of the one that has the same subcommands and options."""
    text = texts()[f"### {' '.join(path.split()[:2])}"]
    twin = re.search(r"options of \[`(worqr [a-z-]+)`\]", text)
    return part(twin[1]) if twin else text


def test_the_generated_parts_are_those_of_the_program() -> None:
    """Write them with ``python -m tools.cli_reference``."""
    page = PATH.read_text("utf-8")
    assert written(page) == page


def test_the_generated_text_depends_on_the_code_alone() -> None:
    assert all(line.isprintable() for lines in parts().values() for line in lines)
    strange = {
        "WORQR_PREFIX": "other",
        "WORQR_URL": "redis://else",
        "COLUMNS": "30",
        "FORCE_COLOR": "1",
        "TERM": "xterm",
    }
    program = "from tools.cli_reference import PATH, written; print(end=written(PATH.read_text('utf-8')))"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **strange},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == PATH.read_text("utf-8")


@pytest.mark.parametrize("path", ALL)
def test_every_option_of_a_command_is_there(command: Command, path: str) -> None:
    text, shared = part(path), texts()["## Connection options"]
    connection = {name_of(each) for each in connection_options(ALL[path])}
    for name in {name_of(each) for each in arguments_of(ALL[path])} - connection:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", text), name
    assert not connection or {*re.findall(r"^--\S+", shared, re.MULTILINE)} == connection
    helped = command(*path.split()[1:], "--help").out
    for option in set(re.findall(r"^  (--[a-z-]+)", helped, re.MULTILINE)) - {"--help", "--version"}:
        assert option in text or option in connection
    for place in re.findall(r"^  ([A-Z]+):", helped.partition("Arguments:")[2].partition("\n\n")[0], re.MULTILINE):
        assert place in text


@pytest.mark.parametrize("path", ALL)
def test_everything_is_described(path: str) -> None:
    assert part(path).split("\n\n")[0].strip()
    for argument in arguments_of(ALL[path]):
        text = " ".join((argument.parameter.help or "").split())
        assert text.endswith((".", ")")), name_of(argument)
        assert "--json" in name_of(argument) or text.partition(". ")[0].strip(".") in flat(path), text


def flat(path: str) -> str:
    """What the page says of a command, in one line: its part, the options of the connection, and what is said once."""
    said_once = "Name of the queue. Only tasks of this queue. Queue of the job. Home queue of the batches. "
    said_once += "Id of the job. Id of the batch. Name of the schedule. Name of the function."
    return " ".join(f"{part(path)} {texts()['## Connection options']} {said_once}".split())


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_of_its_command(line: str) -> None:
    [name] = [name for name, lines in EXAMPLES.items() if line in lines]
    assert f"worqr {name} " in line


def commands_of(page: Path) -> Iterator[list[str]]:
    """What is typed behind ``worqr`` in the shell blocks of a page."""
    for block in blocks_of(page):
        if block.language in {"sh", "bash", "console"}:
            for line in block.code.replace("\\\n", " ").splitlines():
                if "worqr" not in line:
                    continue
                lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
                lexer.whitespace_split = True
                parts: list[list[str]] = [[]]
                for word in lexer:
                    if set(word) <= set("|&;<>"):
                        parts.append([word])
                    else:
                        parts[-1].append(word)
                for part in parts:
                    words_of_it = part[1:] if part[:1] and set(part[0]) <= set("|&;") else part
                    if words_of_it[:1] == ["worqr"]:
                        yield words_of_it[1:]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of_page)
def test_the_commands_of_a_page_can_be_typed(page: Path) -> None:
    """Also those that no test runs."""
    for typed in commands_of(page):
        typed = [STDIN if word == "-" else word for word in typed]
        if not {"--help", "--version"} & set(typed):
            APP.parse_args(typed, print_error=False, exit_on_error=False)
