"""What is said of a command line that makes no sense: in one line, with what was meant."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Answer, Command
from worqr.cli import COMMANDS
from worqr.cli.errors import OTHER_NAMES, unknown_command


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("quues", "did you mean `worqr queues`?"),
        ("job", "did you mean `worqr status ID` or `worqr jobs`?"),
        ("peek", "did you mean `worqr jobs QUEUE`?"),
        ("purge", "did you mean `worqr delete QUEUE --yes`?"),
        ("result", "did you mean `worqr status ID`?"),
        ("worker", "did you mean `worqr run MODULE:MESH` or `worqr workers`?"),
        ("xyzzy", "`worqr --help` lists the commands"),
    ],
)
def test_an_unknown_command_has_its_hint(command: Command, name: str, hint: str) -> None:
    assert command(name) == Answer(2, "", f"worqr: unknown command {name!r}; {hint}\n")


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_others_lead_to_commands_that_exist(name: str) -> None:
    assert name not in COMMANDS
    assert OTHER_NAMES[name].split()[0] in COMMANDS
    assert f"`worqr {OTHER_NAMES[name]}`" in unknown_command(name, COMMANDS)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("delete",), "missing QUEUE; `worqr delete --help` shows the usage"),
        (("failed", "retry"), "missing QUEUE; `worqr failed retry --help` shows the usage"),
        (("jobs", "q", "--limit"), "--limit needs a value; `worqr jobs --help` shows the usage"),
        (("schedules", "rn"), "unexpected argument 'rn'; did you mean `worqr schedules run`?"),
        (("queues", "mails"), "unexpected argument 'mails'; `worqr queues --help` shows the usage"),
    ],
)
def test_arguments_that_are_missing_or_too_many(command: Command, words: tuple[str, ...], why: str) -> None:
    assert command(*words) == Answer(2, "", f"worqr: {why}\n")
