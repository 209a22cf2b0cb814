"""docs/reference/cli.md is true: the options and fields that it names exist, and all of them are there.

Its commands are run by tests/docs/test_others.py.
"""

from __future__ import annotations

import re
from dataclasses import fields

import worqr
from tests.cli.conftest import Command
from tests.docs.tables import REFERENCE, columns, rows, words
from worqr.cli import GROUPS

PAGE = "cli.md"
TEXT = (REFERENCE / PAGE).read_text("utf-8")


def test_every_command_is_named() -> None:
    assert {name for commands in GROUPS.values() for name in commands if f"worqr {name}" not in TEXT} == set()


def test_the_options_of_all_commands_are_those_there_are(command: Command) -> None:
    there = re.split(r"^(?:Which mesh|Connection):$", command("queues", "--help").out, flags=re.MULTILINE)[1]
    assert list(columns(PAGE, "Options of all commands")) == re.findall(r"^  (--[a-z]+)", there, re.MULTILINE)


def test_the_commands_without_these_options_are_named(command: Command) -> None:
    exempt = {
        name for commands in GROUPS.values() for name in commands if "--prefix" not in command(name, "--help").out
    }
    assert exempt == {"server", "demo", "script"}, "worqr run has options of its own with these names"


def test_the_fields_are_those_there_are() -> None:
    named = {word: set(re.findall(r"`(\w+)`", row[1])) for row in rows(PAGE, "Output") for word in words(row[0])}
    assert named["queues"] == {field.name for field in fields(worqr.QueueInfo)} | {"unserved"}
    assert named["workers"] == {field.name for field in fields(worqr.WorkerInfo)}
    assert named["schedules"] == {field.name for field in fields(worqr.Schedule)}
    status = {field.name for field in fields(worqr.Status)}
    assert named["status"] == status | {"queue", "id", "type"}
    error = {field.name for field in fields(worqr.RemoteError)}
    assert named["failed"] == {field.name for field in fields(worqr.Failed)} | error | {"encoding"}
