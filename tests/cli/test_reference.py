"""The generated reference of the command line: every command and option is in it, and its examples can be typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from cyclopts import App

from tests.cli.conftest import Command
from tests.support.children import ROOT
from tools.cli_reference import EXAMPLES, EXITS, arguments_of, commands, name_of, reference
from worqr.cli import COMMANDS, STDIN, make_app

PAGE = list(reference())
APP = make_app()
ALL = dict(pair for name in COMMANDS for pair in commands(APP, name))


def section(path: str) -> str:
    """What stands under the heading of a command."""
    text = "\n".join(PAGE)
    _, _, rest = text.partition(f"\n## {path}\n")
    return rest.partition("\n## ")[0]


def test_every_command_has_its_heading_once() -> None:
    headings = [line.removeprefix("## ") for line in PAGE if line.startswith("## worqr")]
    assert headings == list(ALL)
    for path in ("worqr queues", "worqr failed retry", "worqr schedules run", "worqr workers evict"):
        assert path in headings


@pytest.mark.parametrize("path", ALL)
def test_every_option_of_a_command_is_there(command: Command, path: str) -> None:
    text = section(path)
    for argument in arguments_of(ALL[path]):
        assert f"`{name_of(argument)}`" in text, name_of(argument)
    helped = command(*path.split()[1:], "--help").out
    for option in set(re.findall(r"^  (--[a-z-]+)", helped, re.MULTILINE)) - {"--help", "--version"}:
        assert f"`{option}`" in text
    for place in re.findall(r"^  ([A-Z]+):", helped.partition("Arguments:")[2].partition("\n\n")[0], re.MULTILINE):
        assert f"`{place}`" in text


@pytest.mark.parametrize("path", ALL)
def test_everything_is_described(path: str) -> None:
    text = section(path)
    assert text.split("\n\n")[0].strip()
    for row in re.findall(r"^\| `.*$", text, re.MULTILINE):
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 4
        assert cells[-1].strip().endswith((".", ")"))


def test_every_table_is_whole() -> None:
    rows: list[int] = []
    for line in [*PAGE, ""]:
        if line.startswith("|"):
            rows.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(rows)) <= 1, line
            rows = []


def test_it_is_plain_text_and_always_the_same() -> None:
    assert all(line.isprintable() for line in PAGE)
    assert list(reference()) == PAGE
    strange = {
        "WORQR_PREFIX": "other",
        "WORQR_URL": "redis://else",
        "COLUMNS": "30",
        "FORCE_COLOR": "1",
        "TERM": "xterm",
    }
    printed = subprocess.run(
        [sys.executable, "-m", "tools.cli_reference"],
        cwd=ROOT,
        env={**os.environ, **strange},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.splitlines() == PAGE


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_can_be_typed(line: str) -> None:
    (words,) = [shlex.split(part)[1:] for part in re.split(r" \| ", line) if part.split()[0] == "worqr"]
    bind(APP, words)


def bind(app: App, words: list[str]) -> None:
    """Parse the words as the program does, and run nothing."""
    app.parse_args([STDIN if word == "-" else word for word in words], print_error=False, exit_on_error=False)


def test_examples_and_exit_codes_are_of_commands_that_exist() -> None:
    assert {*EXAMPLES, *EXITS} <= ALL.keys()
    assert {path for path in ALL if not path.endswith(" list")} == EXAMPLES.keys()
