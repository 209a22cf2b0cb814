"""``worqr top`` on a pseudo-terminal, whose screen is read as a person sees it."""

from __future__ import annotations

import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from fcntl import ioctl
from typing import Any

import pyte
import pytest
import trio

import worqr
from tests.cli.conftest import Command
from tests.peer.tools import Held, eventually, serving, until
from tests.support.children import ROOT
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.cli.top import View, read_view

FAILED = ("{mails}:failed", "{mails}:aside*")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, width: int = 100, height: int = 24) -> None:
        self.ours, self.its = pty.openpty()
        self.screen = pyte.Screen(width, height)
        self.stream = pyte.ByteStream(self.screen)
        self.received = b""
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(height, width)

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    async def wait(self, condition: str | Callable[[str], bool]) -> str:
        """Read on until the screen contains the text, or meets the condition."""
        met = (lambda text: condition in text) if isinstance(condition, str) else condition
        with trio.move_on_after(PATIENCE):
            while not met(self.text):
                await trio.lowlevel.wait_readable(self.ours)
                try:
                    data = os.read(self.ours, 65536)
                except OSError:
                    break
                self.received += data
                self.stream.feed(data)
        assert met(self.text), self.text
        return self.text

    async def read_rest(self) -> bytes:
        """Read until the program has closed the terminal."""
        with trio.fail_after(PATIENCE):
            while True:
                await trio.lowlevel.wait_readable(self.ours)
                try:
                    data = os.read(self.ours, 65536)
                except OSError:
                    return self.received
                if not data:
                    return self.received
                self.received += data


@pytest.fixture
def environment(server: Server, prefix: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**kept, "WORQR_URL": server.url, "WORQR_PREFIX": prefix, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}


@asynccontextmanager
async def top(environment: dict[str, str], *options: str, **size: int) -> AsyncIterator[tuple[Terminal, trio.Process]]:
    """``worqr top`` on a terminal of its own, which it controls."""
    terminal = Terminal(**size)
    before = termios.tcgetattr(terminal.its)
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "worqr", "top", "--every", "0.2s", *options],
        stdin=terminal.its,
        stdout=terminal.its,
        stderr=terminal.its,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield terminal, process
        assert termios.tcgetattr(terminal.its) == before, "the settings of the terminal are those from before"
    finally:
        process.kill()
        await process.wait()
        os.close(terminal.its)
        os.close(terminal.ours)


async def ended(terminal: Terminal, process: trio.Process) -> int:
    """Wait for the end of the program, whose screen must have been taken away. Return its exit code."""
    with trio.fail_after(PATIENCE):
        code = await process.wait()
    while data := _read_now(terminal.ours):
        terminal.received += data
    assert b"\x1b[?1049l" in terminal.received
    assert b"Traceback" not in terminal.received
    return code


def _read_now(fd: int) -> bytes:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


@pytest.mark.leaves(*FAILED)
async def test_an_operator_looks_around_cancels_and_retries(environment: dict[str, str], mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise worqr.Failure("no such user\x1b[2J")
        worqr.current().progress(0.5, "page 5")
        await held(task)

    async with mesh.connect(), serving(mesh, "mails", handler):
        queue = mesh.queue("mails")
        await queue.dispatch(b"long", id="film-1")
        await held.wait(1)
        await queue.dispatch(b"bad", id="mail-2")
        await eventually(lambda: _failed(queue), 1)
        await mesh.queue("orphaned").enqueue(b"a")
        async with top(environment) as (terminal, process):
            await terminal.wait(lambda text: all(part in text for part in ("orphaned", "no worker")))
            terminal.type("2")
            await terminal.wait(lambda text: all(part in text for part in ("film-1", "page 5", "50%")))
            terminal.type("c")
            await terminal.wait("cancel job film-1? y: yes")
            terminal.type("y")
            await terminal.wait("its worker has acknowledged it after")
            terminal.type("4")
            await terminal.wait(lambda text: all(part in text for part in ("mail-2", "Failure: no such user\\x1b[2J")))
            terminal.type("r")
            await terminal.wait("retry mail-2 of queue mails?")
            terminal.type("y")
            await terminal.wait("Retried mail-2")
            terminal.type("1")
            await terminal.wait("orphaned")
            terminal.type("\x1b[Bp")
            await terminal.wait("pause queue orphaned?")
            terminal.type("y")
            await terminal.wait("paused: worqr top")
            terminal.type("3")
            await terminal.wait("last beat")
            terminal.type("5")
            await terminal.wait("no worker has declared a schedule")
            terminal.type("?")
            await terminal.wait("choose a table")
            terminal.type("qq")
            assert await ended(terminal, process) == 0
        await mesh.queue("orphaned").resume()
        await mesh.queue("orphaned").cancel_all()
        await eventually(queue.running, [])


async def _failed(queue: worqr.Queue) -> int:
    return (await queue.info()).failed


async def test_the_table_follows_the_mesh_and_the_size_of_the_terminal(
    environment: dict[str, str], mesh: worqr.Mesh
) -> None:
    wide = 90 * "w"
    async with mesh.connect(), top(environment) as (terminal, process):
        await terminal.wait("no queue holds tasks")
        await mesh.queue(wide).enqueue(b"a")
        await terminal.wait("www…")
        terminal.resize(160, 24)
        await terminal.wait(wide)
        process.send_signal(signal.SIGINT)
        assert await ended(terminal, process) == 0
        await mesh.queue(wide).cancel_all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it_and_restores_the_terminal(environment: dict[str, str], number: int) -> None:
    async with top(environment) as (terminal, process):
        await terminal.wait("no queue holds tasks")
        process.send_signal(number)
        assert await ended(terminal, process) == 128 + number


async def test_ctrl_z_gives_the_terminal_back_until_it_continues(environment: dict[str, str]) -> None:
    async with top(environment) as (terminal, process):
        before = termios.tcgetattr(terminal.its)
        await terminal.wait("no queue holds tasks")
        unbuffered = termios.tcgetattr(terminal.its)
        process.send_signal(signal.SIGTSTP)
        await trio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert termios.tcgetattr(terminal.its) != unbuffered
        terminal.screen.reset()
        process.send_signal(signal.SIGCONT)
        await terminal.wait("no queue holds tasks")
        assert termios.tcgetattr(terminal.its) == unbuffered != before
        terminal.type("q")
        assert await ended(terminal, process) == 0


async def test_a_server_that_is_away_is_named_and_comes_back(own_server: Server, environment: dict[str, str]) -> None:
    environment["WORQR_URL"] = own_server.url
    async with top(environment) as (terminal, process):
        await terminal.wait("no queue holds tasks")
        await trio.to_thread.run_sync(own_server.kill)
        await terminal.wait("the figures are of then")
        await trio.to_thread.run_sync(own_server.start)
        await terminal.wait("waiting 0")
        terminal.type("q")
        assert await ended(terminal, process) == 0


async def test_a_worker_is_made_quiet_and_the_log_tells_it(environment: dict[str, str], mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        short = peer.id.rpartition(":")[2][:8]
        async with top(environment, "--view", "workers") as (terminal, process):
            await terminal.wait(short)
            terminal.type("w")
            await terminal.wait("quiet, resume, drain, auto or a number? type one and Enter")
            terminal.type("quiet\r")
            await terminal.wait("Asked worker")
            await until(lambda: peer._engine.scheduler.quiet)
            terminal.type("6")
            await terminal.wait(
                lambda text: all(kind in text for kind in ("joined", "worker_asked", "worker_answered"))
            )
            terminal.type("3")
            await terminal.wait(
                lambda text: any(
                    short in row[:20] and "quiet" in row and "answered" not in row for row in text.splitlines()[3:-1]
                )
            )
            terminal.type("wresume\r")
            await terminal.wait(": resume")
            await until(lambda: not peer._engine.scheduler.quiet)
            terminal.type("w7\r")
            await terminal.wait("to run 7 tasks at once")
            await until(lambda: peer.health().running + peer.health().room == 7)
            terminal.type("wseven\r")
            await terminal.wait("nothing was done")
            terminal.type("w\x1b")
            await terminal.wait("nothing was done")
            terminal.type("q")
            assert await ended(terminal, process) == 0


async def test_an_operator_looks_at_lanes_and_changes_one(environment: dict[str, str], mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        for lane in ("acme", "acme", "initech"):
            await queue.dispatch(b"a", lane=lane)
        async with top(environment, width=80) as (terminal, process):
            await terminal.wait("mails")
            terminal.type("l")
            await terminal.wait(lambda text: all(part in text for part in ("7 lanes  of mails", "initech", "weight")))
            terminal.type("w5\r")
            await terminal.wait("The weight of lane acme is 5")
            await terminal.wait(lambda text: row_of(text, "acme") == ["mails", "acme", "2", "5"])
            terminal.type("m2 100/1m\r")
            await terminal.wait("The limits of lane acme: 2 at once, 100 per minute")
            await terminal.wait(lambda text: "2 at once" in " ".join(row_of(text, "acme")))
            terminal.type("p")
            await terminal.wait("pause lane acme of queue mails? y: yes")
            terminal.type("y")
            await terminal.wait("Paused lane acme of queue mails")
            await terminal.wait(lambda text: "paused: worqr top" in " ".join(row_of(text, "acme")))
            assert [(lane.name, lane.paused, lane.weight) for lane in await queue.lanes()] == [
                ("acme", "worqr top", 5),
                ("initech", None, 1),
            ]
            terminal.type("py")
            await terminal.wait("Resumed lane acme")
            await terminal.wait(lambda text: "paused" not in " ".join(row_of(text, "acme")))
            terminal.type("mnone\r")
            await terminal.wait("The limits of lane acme: no limit")
            terminal.type("mclear\r")
            await terminal.wait("The limits of lane acme are what the code declares")
            terminal.type("w0\r")
            await terminal.wait("The weight of lane acme is what the code declares")
            terminal.type("cmails\r")
            await terminal.wait("nothing was done")
            terminal.type("cacme\r")
            await terminal.wait("Cancelled 2 jobs of lane acme of queue mails")
            await terminal.wait(lambda text: not row_of(text, "acme"))
            assert row_of(terminal.text, "initech") == ["mails", "initech", "1", "1"]
            terminal.type("\x1b")
            await terminal.wait("no worker")
            terminal.type("q")
            assert await ended(terminal, process) == 0
        assert [lane.name for lane in await queue.lanes()] == ["initech"]
        await queue.cancel_lane("initech")


async def test_a_running_job_of_a_lane_is_cancelled_with_it(environment: dict[str, str], mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "mails", held):
        queue = mesh.queue("mails")
        await queue.dispatch(b"long", lane="acme")
        await held.wait(1)
        async with top(environment, "--view", "lanes") as (terminal, process):
            await terminal.wait("no task waits in a lane; for other lanes, select a queue and press l")
            terminal.type("1")
            await terminal.wait("mails")
            terminal.type("l")
            await terminal.wait("acme")
            terminal.type("cacme\r")
            await terminal.wait("Cancelled 1 jobs of lane acme of queue mails")
            terminal.type("q")
            assert await ended(terminal, process) == 0
        assert held.cancelled == [(b"long", "cancel")]


def row_of(text: str, name: str) -> list[str]:
    """The words of the row of a lane."""
    return next((words for row in text.splitlines()[3:-1] if (words := row.split())[1:2] == [name]), [])


async def test_read_only_changes_nothing(environment: dict[str, str], mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").enqueue(b"a")
        async with top(environment, "--read-only") as (terminal, process):
            await terminal.wait("mails")
            terminal.type("p")
            await terminal.wait("nothing can be changed")
            terminal.type("q")
            assert await ended(terminal, process) == 0
        await mesh.queue("mails").cancel_all()


def test_in_a_pipe_the_table_is_printed_once(cli: Command, mesh: worqr.Mesh) -> None:
    trio.run(_enqueue, mesh)
    table = cli("top")
    assert table.code == 0
    assert table.lines[0].split()[:2] == ["queue", "waiting"]
    assert table.lines[1].split()[:2] == ["mails", "2"]
    [line] = cli("top", "--json").json
    assert (line["queue"], line["waiting"]) == ("mails", 2)
    [line] = cli("top", "--view", "lanes", "--json").json
    assert (line["queue"], line["name"], line["waiting"], line["weight"]) == ("mails", "acme", 1, 1)
    assert cli("top", "--view", "lanes", "--once").lines[1].split() == ["mails", "acme", "1", "0", "1", "-", "-"]
    for view in ("running", "workers", "failed", "schedules"):
        assert cli("top", "--view", view, "--json").lines == []
    trio.run(_clear, mesh)


@pytest.mark.leaves("*")
async def test_of_many_stored_schedules_a_page_is_read(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.cli.top.SCHEDULES_READ", 2)
    mesh.every(3600, mesh.call("report"), name="hourly")
    async with mesh.join(grace=0):
        for user in ("a", "b", "c"):
            await mesh.schedule(f"report/{user}", mesh.call("report"), every=3600)
        reading = await read_view(mesh, View.SCHEDULES, "")
    assert [row.key for row in reading.rows] == ["hourly", "report/a", "report/b"]
    assert reading.more == "1 schedules left out: see `worqr schedules --stored PREFIX`"


async def _enqueue(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").enqueue(b"a")
        await mesh.queue("mails").dispatch(b"b", lane="acme")


async def _clear(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").cancel_all()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--every", "0.1s"), "--every must be at least 0.2s"),
        (("--every", "soon"), "--every"),
        (("--view", "mails"), "--view"),
    ],
)
def test_a_bad_option_is_refused(cli: Command, words: tuple[str, ...], why: str) -> None:
    answer: Any = cli("top", *words)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
