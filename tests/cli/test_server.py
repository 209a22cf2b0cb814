"""``worqr server``: it runs, says where, keeps what it is told to keep, and ends with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import trio

import worqr
from tests.cli.conftest import Command
from tests.support.children import Child
from tests.support.servers import free_port

Start = Callable[..., Child]

LONG = 30.0
"""Seconds for a process to start or to end, however slow the machine."""

MAIN = "import sys; from worqr.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = pytest.mark.timeout(150)  # many processes, one after the other


@pytest.fixture
def start(spawn: Callable[..., Child]) -> Start:
    """`start("server", ...)`: a command as a process of its own."""

    def run(*arguments: str) -> Child:
        return spawn(MAIN, *arguments)

    return run


async def enqueued(url: str, *tasks: bytes) -> int:
    """Enqueue these; how many wait then."""
    mesh = worqr.Mesh(url, patience=10)
    async with mesh.connect():
        await mesh.queue("mails").enqueue(*tasks)
        return await mesh.queue("mails").count()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_prints_its_url_and_ends_with_a_signal(start: Start, number: signal.Signals) -> None:
    server = start("server", "--port", "0")
    url = await server.line(LONG)
    assert url.startswith("unix:///")
    assert await enqueued(url, b"a") == 1
    server.signal(number)
    assert await server.ended(LONG) == 0
    assert not await trio.Path(url.removeprefix("unix://")).exists()
    assert "data are deleted when it stops; press Ctrl-C to stop it" in server.errors
    assert server.errors.endswith("worqr: the server has stopped\n")


async def test_it_listens_on_a_port_and_keeps_its_data_in_a_folder(start: Start, tmp_path: Path) -> None:
    port = free_port()
    for n in (1, 2):
        server = start("server", "--port", str(port), "--dir", str(tmp_path / "a" / "b"))
        assert await server.line(LONG) == f"redis://127.0.0.1:{port}/0"
        assert await enqueued(f"redis://127.0.0.1:{port}/0", b"a") == n
        server.signal(signal.SIGTERM)
        assert await server.ended(LONG) == 0


async def test_it_ends_when_its_server_does(start: Start) -> None:
    server = start("server", "--port", "0")
    url = await server.line(LONG)
    with redis.Redis.from_url(url) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    assert await server.ended(LONG) == 1
    assert "worqr: the server stopped unexpectedly; the end of its log:" in server.errors
    assert "Traceback" not in server.errors


def test_a_port_that_is_taken_is_one_line(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = command("server", "--port", str(port))
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        f"worqr: port {port} is already in use; choose another with --port, or use --port 0 for a unix socket only\n"
    )


def test_no_port_is_one_line(command: Command) -> None:
    assert command("server", "--port", "99999").err.startswith("worqr: port 99999 is not a valid port; choose another")


def test_a_folder_that_cannot_be_is_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = command("server", "--port", "0", "--dir", str(tmp_path / "file"))
    assert answer.code == 1
    assert answer.err.startswith("worqr: cannot create the data folder: ")
    assert answer.err.count("\n") == 1
