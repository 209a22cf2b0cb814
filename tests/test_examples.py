"""The examples run, as the processes that their first lines describe, and have the effect that they promise."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.children import ROOT, Child
from tests.leaks import delete_all
from tests.servers import Server

EXAMPLES = ROOT / "examples"
TESTED = {"peer.py", "producer.py", "batches.py", "cancel.py", "foreign.sh", "foreign.py"}

Run = Callable[..., Child]


@pytest.fixture
def run(server: Server, spawn: Callable[..., Child]) -> Iterator[Run]:
    """`run("peer.py", *args)`: an example as a process, on the server of the tests; what it leaves is cleared away."""

    def start(name: str, *args: str) -> Child:
        return spawn(EXAMPLES / name, *args, env={"WORQR_URL": server.tcp_url})

    with server.client() as client:
        delete_all(client, "worqr")
        yield start
        delete_all(client, "worqr")


def test_every_example_is_tested_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert programs == TESTED
    listed = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert set(listed) == TESTED


async def test_a_peer_greets_whom_a_producer_names(run: Run) -> None:
    peer = run("peer.py")
    producer = run("producer.py", "Ada", "Grace")
    assert await producer.line() == "2 enqueued"
    assert await producer.ended() == 0
    assert {await peer.line(), await peer.line()} == {"Hello, Ada!", "Hello, Grace!"}


async def test_batches_become_transactions(run: Run, tmp_path: Path) -> None:
    feeder = run("batches.py", "--feed", "250")
    assert await feeder.line() == "250 enqueued"
    database = tmp_path / "readings.db"
    writer = run("batches.py", str(database))
    lines = [await writer.line() for _ in range(3)]
    assert lines[:2] == ["100 stored, 0 of them lost to another worker meanwhile"] * 2
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*), min(number), max(number) FROM readings").fetchone() == (250, 0, 249)


async def test_a_film_is_stopped_from_another_process(run: Run, server: Server) -> None:
    worker = run("cancel.py", "render", "film-1")
    assert await worker.line() == "rendering film-1"
    stopper = run("cancel.py", "stop", "film-1")
    assert await stopper.line() == "0 removed from the queue; 1 of 1 running ones have ended"
    assert await worker.line() == "no longer rendering film-1: cancel"
    with server.client() as client:
        assert client.exists("worqr:{films}", "worqr:{films}:cancelling") == 0


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
async def test_redis_cli_is_a_producer(run: Run, server: Server) -> None:
    peer = run("peer.py")
    subprocess.run(  # noqa: ASYNC221 - the peer is another process
        ["/bin/sh", EXAMPLES / "foreign.sh", "Edsger", "Alan M."],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "WORQR_URL": server.tcp_url},
        check=True,
        capture_output=True,
        timeout=20,
    )
    assert {await peer.line(), await peer.line()} == {"Hello, Edsger!", "Hello, Alan M.!"}


async def test_redis_py_is_a_producer(run: Run) -> None:
    peer = run("peer.py")
    assert await run("foreign.py", "Barbara").ended() == 0
    assert await peer.line() == "Hello, Barbara!"


@pytest.mark.parametrize("name", ["batches.py", "cancel.py"])
async def test_without_arguments_it_says_how_to_use_it(run: Run, name: str) -> None:
    program = run(name)
    assert await program.ended() == 1
    assert program.errors.startswith(f"usage: {name}")
