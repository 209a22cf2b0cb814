"""docs/reference/cli.md is true: the commands, options and fields that it names exist, and all of them are there.

Its commands are run by tests/docs/test_others.py. Below its last heading it is generated: after a change of the command line,
``python -m tests.cli.test_document`` writes that part anew.
"""

from __future__ import annotations

import re
from dataclasses import fields

import worqr
from tests.docs.tables import REFERENCE, rows, words
from tools.cli_reference import reference
from worqr.cli import GROUPS

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
    named = {word: set(re.findall(r"`(\w+)`", row[1])) for row in rows(PAGE, "Output") for word in words(row[0])}
    assert named["queues"] == {field.name for field in fields(worqr.QueueInfo)} | {"unserved"}
    assert named["workers"] == {field.name for field in fields(worqr.WorkerInfo)}
    assert named["schedules"] == {field.name for field in fields(worqr.Schedule)}
    status = {field.name for field in fields(worqr.Status)}
    assert named["status"] == status | {"queue", "id", "type"}
    error = {field.name for field in fields(worqr.RemoteError)}
    assert named["failed"] == {field.name for field in fields(worqr.Failed)} | error | {"encoding"}


if __name__ == "__main__":
    PATH.write_text(GENERATED.sub(lambda _: generated(), PATH.read_text("utf-8")), "utf-8")
