"""docs/reference/cli.md is true: the commands, options and fields that it names exist, and all of them are there.

Some of its commands are run by tests/docs/test_others.py. Below its last heading it is generated: after a change of the
command line, ``python -m tests.cli.test_document`` writes that part anew.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import worqr
from tests.docs.tables import REFERENCE, rows, words
from tools.cli_reference import reference
from tools.pages import DOCS, blocks_of, name_of
from worqr.cli import GROUPS, STDIN, make_app

PAGE = "cli.md"
PATH = REFERENCE / PAGE
GENERATED = re.compile(r"(?<=<!-- commands -->\n).*(?=<!-- end -->)", re.DOTALL)


def generated() -> str:
    """What the program says of itself, as a part of the page: one level lower, without its examples being run."""
    lines = list(reference())
    table = next(i for i, line in enumerate(lines) if line.startswith("| command"))
    text = "\n".join(lines[table:])
    text = re.sub(r"^## Exit codes$.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)  # the page has its own
    text = re.sub(r"^## ", "### ", text, flags=re.MULTILINE)
    return re.sub(r"^```sh$", "```bash", text, flags=re.MULTILINE).rstrip() + "\n"


def test_the_generated_part_is_that_of_the_program() -> None:
    """Write it with ``python -m tests.cli.test_document``."""
    [found] = GENERATED.findall(PATH.read_text("utf-8"))
    assert found == generated()


def test_every_command_is_named() -> None:
    text = GENERATED.sub("", PATH.read_text("utf-8"))
    assert {name for commands in GROUPS.values() for name in commands if f"worqr {name}" not in text} == set()


def test_the_fields_are_those_there_are() -> None:
    named: dict[str, set[str]] = {}
    for row in rows(PAGE, "Output"):
        for word in words(row[0]):
            named.setdefault(word, set()).update(re.findall(r"(?<!\[)`(\w+)`", row[1]))
    assert named["queues"] == {field.name for field in fields(worqr.QueueInfo)} | {"unserved"}
    assert named["workers"] == {field.name for field in fields(worqr.WorkerInfo)}
    assert named["schedules"] == {field.name for field in fields(worqr.Schedule)}
    status = {field.name for field in fields(worqr.Status)}
    record = {field.name for field in fields(worqr.JobRecord)}
    assert named["status"] == (status | record | {"type", "encoding"}) - {"status"}
    error = {field.name for field in fields(worqr.RemoteError)}
    listed = {field.name for field in fields(worqr.TaskInfo)}
    assert named["running"] == listed - status | {"queue", "encoding"}
    assert named["failed"] == {field.name for field in fields(worqr.Failed)} | error | {"encoding"}


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


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_the_commands_of_a_page_can_be_typed(page: Path) -> None:
    """Also those that no test runs."""
    app = make_app()
    for typed in commands_of(page):
        typed = [STDIN if word == "-" else word for word in typed]
        if not {"--help", "--version"} & set(typed):
            app.parse_args(typed, print_error=False, exit_on_error=False)


if __name__ == "__main__":
    PATH.write_text(GENERATED.sub(lambda _: generated(), PATH.read_text("utf-8")), "utf-8")
