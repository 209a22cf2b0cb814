"""Which mesh a command uses: options before the environment, and a wrong URL without its password."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest

import worqr
from tests.cli.conftest import Answer, Command, waiting

Beside = Callable[..., Awaitable[Answer]]


def test_a_wrong_url_is_one_line_without_its_password(command: Command) -> None:
    answer = command("queues", "--url", "redis://user:hush/hush@host")
    assert answer.code == 1
    assert "hush" not in answer.err
    assert answer.err.count("\n") == 1


def test_the_mesh_can_be_named_by_options(command: Command, mesh: worqr.Mesh) -> None:
    assert mesh.url is not None
    there = ("--url", mesh.url, "--prefix", mesh.prefix)
    assert command("enqueue", "mails", "a", *there).code == 0
    assert "mails" in command("queues", *there).out
    assert waiting(mesh, "mails") == [b"a"]


def test_options_go_before_the_environment(cli: Command, mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.environ["WORQR_URL"]
    monkeypatch.setenv("WORQR_URL", "redis://nowhere.invalid")
    assert cli("enqueue", "mails", "a", "--url", there).code == 0
    assert waiting(mesh, "mails") == [b"a"]
