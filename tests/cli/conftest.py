"""Commands run in this process, against the tests' server, under the test's prefix."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.support.children import ROOT
from tests.support.servers import Server, keep_one_kind
from worqr.cli import main


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The library handles the differences between servers: commands are tested on one."""
    keep_one_kind(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command sets up logging, for its process."""
    loggers = [logging.getLogger(), logging.getLogger("worqr")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@dataclass(frozen=True)
class Answer:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


Command = Callable[..., Answer]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """``worqr run`` sets up logging for its process, which is this one."""
    root, own = logging.getLogger(), logging.getLogger("worqr")
    levels = root.level, own.level
    yield
    root.handlers[:] = [each for each in root.handlers if type(each) is not logging.StreamHandler]
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("queues", "--json")`: run ``worqr queues --json``; on no particular server."""

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run


@pytest.fixture
def cli(command: Command, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same on the tests' server, under the test's prefix."""
    monkeypatch.setenv("WORQR_URL", server.url)
    monkeypatch.setenv("WORQR_PREFIX", prefix)
    return command


@pytest.fixture
def beside(cli: Command) -> Callable[..., Any]:
    """The same beside the test's own loop: `await beside("cancel", ...)`."""

    async def run(*arguments: str) -> Answer:
        return await trio.to_thread.run_sync(partial(cli, *arguments))

    return run


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    """The mesh that the commands mean."""
    return worqr.Mesh(server.url, prefix=prefix, patience=10)


def piped(stdin: bytes, *arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A command with a standard input, which only a process has; the environment says which mesh."""
    command = [sys.executable, "-m", "worqr", *arguments]
    return subprocess.run(command, input=stdin, cwd=ROOT, capture_output=True, check=False, timeout=60, **options)


async def tasks(mesh: worqr.Mesh, queue: str) -> list[bytes]:
    """What waits, the oldest first; it is cleared away."""
    async with mesh.connect():
        found = await mesh.queue(queue).tasks(10_000)
        await mesh.queue(queue).cancel_all()
    return found[::-1]


def waiting(mesh: worqr.Mesh, queue: str) -> list[bytes]:
    return trio.run(tasks, mesh, queue)
