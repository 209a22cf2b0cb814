"""docs/command-line.md is true: its commands run, its options and fields exist, and all of them are there."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import trio

import worqr
from tests.children import ROOT, Child
from tests.cli.conftest import Command
from tests.peer.tools import until
from tests.servers import Server
from tests.test_docs import Snippet, rows, snippets, words
from worqr.cli import GROUPS

LONG = 30.0
"""Seconds for a process to start or to end, however slow the machine."""

PAGE = "command-line.md"
SHELL = [snippet for snippet in snippets("sh") if snippet.page.name == PAGE]
SHOP = next(snippet for snippet in snippets("python") if snippet.page.name == PAGE).code

pytestmark = pytest.mark.timeout(150)  # many processes, one after the other


@pytest.fixture
def environment(tmp_path: Path, server: Server, prefix: str) -> dict[str, str]:
    """Where `worqr` is this one, and `shop.py` is there."""
    (tmp_path / "shop.py").write_text(SHOP.replace('app="shop"', f'app="shop", prefix={prefix!r}'))
    (tmp_path / "worqr").write_text(f'#!/bin/sh\ncd {tmp_path}\nexec {sys.executable} -m worqr "$@"\n')
    (tmp_path / "worqr").chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.fspath(ROOT),
        "WORQR_URL": server.url,
        "WORQR_PREFIX": prefix,
    }


@pytest.mark.leaves("*")
@pytest.mark.parametrize("snippet", [each for each in SHELL if not each.prints], ids=str)
async def test_its_commands_run(snippet: Snippet, environment: dict[str, str], spawn: Callable[..., Child]) -> None:
    peer = spawn("import os; os.execvp('worqr', ['worqr', 'run', 'shop:mesh'])", env=environment)
    await until(lambda: "start: worqr" in peer.errors, LONG)
    code = "set -e\n" + snippet.code
    answer = await trio.run_process(
        ["/bin/sh", "-c", code],
        env={**os.environ, **environment},
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    if "--wait" in code and "call" in code:
        assert b'"hi, ada@example.org"\n' in answer.stdout
    peer.signal(signal.SIGTERM)
    assert await peer.ended(LONG) == 0


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("snippet", [each for each in SHELL if each.prints], ids=str)
async def test_its_programs_run(
    snippet: Snippet, environment: dict[str, str], spawn: Callable[..., Child], free_port: int
) -> None:
    command, wanted = (text.replace("6390", str(free_port)) for text in (snippet.code, snippet.prints))
    child = spawn(f"import os; os.execvp('worqr', {command.split()!r})", env=environment)
    if "run" in command:
        await until(lambda: wanted in child.errors, LONG)
    else:
        assert await child.line(LONG) == wanted
    child.signal(signal.SIGINT)
    assert await child.ended(LONG) == 0


def test_every_command_is_named() -> None:
    named = {word.removeprefix("worqr ") for row in rows(PAGE, "The command line") for word in words(row[0])}
    assert named == {name for commands in GROUPS.values() for name in commands}


def test_the_options_of_run_are_those_there_are(command: Command) -> None:
    there = set(re.findall(r"^  (--[a-z-]+)", command("run", "--help").out, re.MULTILINE)) - {"--help", "--version"}
    assert {word for row in rows(PAGE, "Running a peer") for word in words(row[0])} == there


def test_the_options_of_all_commands_are_those_there_are(command: Command) -> None:
    there = command("queues", "--help").out.partition("Connection:")[2]
    assert [words(row[0])[0] for row in rows(PAGE, "Which mesh")] == re.findall(r"^  (--[a-z]+)", there, re.MULTILINE)


def test_the_fields_are_those_there_are() -> None:
    named = {word: set(re.findall(r"`(\w+)`", row[1])) for row in rows(PAGE, "Looking") for word in words(row[0])}
    assert named["queues"] == {field.name for field in fields(worqr.QueueInfo)} | {"unserved"}
    assert named["workers"] == {field.name for field in fields(worqr.WorkerInfo)}
    assert named["schedules"] == {field.name for field in fields(worqr.Schedule)}
    error = {field.name for field in fields(worqr.RemoteError)}
    assert named["failed"] == {field.name for field in fields(worqr.Failed)} | error | {"encoding"}
