"""On a terminal: tables fit its width, worker ids are short, colours mark what needs somebody, and foreign text has no power."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fcntl import ioctl
from functools import partial
from io import StringIO
from operator import itemgetter
from termios import TIOCSWINSZ
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

import worqr
from tests.cli.conftest import Command
from tests.cli.test_output import NASTY
from tests.ops.driver import Desk
from tests.peer.tools import Held, eventually, serving
from tests.support.children import ROOT
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.cli import main
from worqr.cli.output import lay_out
from worqr.escaping import escape
from worqr.views.tables import COUNT, QUEUES, Column, Note, Table

ESCAPE = "\x1b"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
RED, YELLOW = "\x1b[1;31m", "\x1b[33m"


# The layout


def lines(table: Table, rows: Sequence[object], width: int) -> list[list[Segment]]:
    console = Console(width=width, color_system="standard", force_terminal=True, markup=False, highlight=False)
    return [line for part in lay_out(table, rows, width) for line in console.render_lines(part, pad=False)]


def plain(rows: Sequence[object], width: int, table: Table | None = None) -> list[str]:
    return ["".join(each.text for each in line).rstrip() for line in lines(table or TABLE, rows, width)]


TABLE = Table(
    (
        Column("name", "name", itemgetter(0), fit="fold"),
        Column("n", "n", itemgetter(1), COUNT, always=True),
        Column("failed", "failed", itemgetter(2), COUNT, "fail", "bold red"),
        Column("words", "words", itemgetter(3), fit="fold", below=True),
        Column("long", "long", itemgetter(4), fit="cut", below=True),
    ),
    lambda row: [Note("held", row[5])] if row[5] else (),
)


@given(
    st.integers(20, 130),
    st.lists(st.tuples(st.text(), st.integers(0, 10**9), st.integers(0, 10**9), st.text(), st.text(), st.text())),
)
def test_no_line_is_wider_than_the_terminal_or_plays_with_it(width: int, rows: list[tuple[object, ...]]) -> None:
    for line in plain(rows, width):
        assert cell_len(line) <= width
        assert escape(line) == line


def test_a_name_that_is_folded_loses_nothing() -> None:
    name = "warehouse.inventory.reconcile_all_shelves"
    head, *rows = plain([(name, 1, 0, "", "", "")], 24)
    assert head.split() == ["name", "n"]
    assert "".join(row.split()[0] for row in rows) == name


def test_what_has_no_room_beside_a_row_stands_below_it() -> None:
    rows = [("mails", 5, 2, "", "x" * 50, "paused: the server is down")]
    assert plain(rows, 120) == [
        "name   n  failed  long",
        f"mails  5       2  {'x' * 50}  paused: the server is down",
    ]
    assert plain(rows, 40) == [
        "name   n  failed  long",
        f"mails  5       2  {'x' * 21}…",
        "  paused: the server is down",
    ]
    assert plain(rows, 28) == [
        "name   n  failed",
        "mails  5       2",
        "  paused: the server is down",
        f"  {'x' * 25}…",
    ]


def test_on_a_very_narrow_terminal_each_row_is_a_block() -> None:
    rows = [("mails", 1_000_000, 1_000_000, "", "", "")]
    assert plain(rows, 22) == ["mails", "  n       1,000,000", "  failed  1,000,000"]


def test_empty_columns_are_dropped_and_zeros_are_dim() -> None:
    rows = [("a", 0, 0, "", "", ""), ("b", 7, 0, "", "", "")]
    assert plain(rows, 80) == ["name  n", "a     0", "b     7"]
    _, first, second = lines(TABLE, rows, 80)
    assert [each.style.dim for each in first if each.text == "0" and each.style] == [True]
    assert not any(each.style and each.style.dim for each in second if each.text.strip())


def test_every_counter_of_a_queue_fits_80_columns() -> None:
    info = worqr.QueueInfo("shop.send_mail", *[12345] * 6, "the mail server is down", 99.0, 0, {})
    found = plain([info], 80, QUEUES)
    assert all(len(line) <= 80 for line in found)
    text = "\n".join(found)
    assert text.count("12,345") == 6
    assert "no worker; paused: the mail server is down" in text


# The command, on a pseudo-terminal

OnTerminal = Callable[..., str]


def read_all(ours: int) -> bytes:
    data = b""
    try:
        while more := os.read(ours, 65536):
            data += more
    except OSError:  # how Linux reports that the other end is closed
        pass
    return data


@pytest.fixture
def environment(server: Server, prefix: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**kept, "WORQR_URL": server.url, "WORQR_PREFIX": prefix, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def on_terminal(environment: dict[str, str]) -> OnTerminal:
    """`on_terminal(80, "queues")`: what ``worqr queues`` prints on a terminal of 80 columns."""

    def run(width: int, *words: str, **more: str) -> str:
        ours, its = pty.openpty()
        ioctl(its, TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "worqr", *words],
            cwd=ROOT,
            stdin=its,
            stdout=its,
            stderr=subprocess.PIPE,
            env={**environment, **more},
        )
        os.close(its)
        text = read_all(ours).decode().replace("\r\n", "\n")
        _, errors = process.communicate(timeout=PATIENCE)
        os.close(ours)
        assert process.returncode == 0, errors
        return text

    return run


class Screen(StringIO):
    """What the command takes for a terminal, in this process."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_screen(cli: Command, monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    """The same in this process, which is quicker."""

    def run(width: int, *words: str) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            patch.setenv("TERM", "xterm")
            patch.delenv("NO_COLOR", raising=False)
            patch.setattr(sys, "stdout", Screen())
            assert main(words) == 0
            return cast("Screen", sys.stdout).getvalue()

    return run


def lines_of(text: str, width: int) -> list[str]:
    """The lines without their colours: each fits, and there is no other escape sequence."""
    lines = COLOURS.sub("", text).splitlines()
    assert ESCAPE not in "".join(lines)
    assert all(cell_len(line) <= width for line in lines), lines
    return lines


LONG = "warehouse.inventory.reconcile_all_shelves_with_the_ledger_of_the_other_warehouse"


@pytest.mark.leaves("*")
async def test_a_fleet_on_terminals_of_several_widths(
    on_terminal: OnTerminal, on_screen: OnTerminal, cli: Command, mesh: worqr.Mesh
) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise worqr.Failure(NASTY)
        worqr.current().progress(0.25, NASTY)
        await held(task)

    async def show(width: int, *words: str) -> list[str]:
        text = await trio.to_thread.run_sync(partial(on_screen, width, *words))
        assert ESCAPE in text
        return lines_of(text, width)

    async with mesh.connect(), serving(mesh, LONG, handler) as peer:
        short = peer.id[:-24]
        queue = mesh.queue(LONG)
        await queue.dispatch(b"film " + NASTY.encode("utf-8", "replace") * 5, id="film-1")
        await held.wait(1)
        await queue.dispatch(b"bad", id="mail-2")
        await eventually(lambda: failed(queue), 1)
        await mesh.queue("orphaned").enqueue(b"a")
        await mesh.queue("slow").dispatch(b"a", delay=3600)
        await mesh.queue("slow").pause("\x1b[2J the server is down, and it will be down until Monday; ask Grace")
        for width in (80, 60, 40):
            queues = " ".join(await show(width, "queues"))
            assert "no worker" in queues
            assert "paused: \\x1b[2J the server" in queues
            assert "undecodable" not in queues
            workers = "\n".join(await show(width, "workers"))
            assert short in workers
            assert peer.id not in workers
            running = "\n".join(await show(width, "running"))
            assert short in running
            assert "25%" in running
            assert "film-1" in running
            assert "mail-2" in "\n".join(await show(width, "failed"))
            await show(width, "jobs", "slow", "--state", "scheduled")
            await show(width, "status", "film-1", "--queue", LONG)
        assert len(await show(260, "queues")) == 4
        for words in (("workers",), ("running",), ("status", "film-1", "--queue", LONG)):
            wide = "\n".join(await show(260, *words))
            assert short in wide
            assert peer.id not in wide
        text = await trio.to_thread.run_sync(partial(on_terminal, 80, "queues"))
        assert re.search(rf"{re.escape(RED)} *1{ESCAPE}\[0m", text)  # the dead-letter entry
        assert f"{YELLOW}no worker" in text
        assert "no worker" in " ".join(lines_of(text, 80))
        for quiet in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            text = await trio.to_thread.run_sync(partial(on_terminal, 80, "queues", **quiet))
            assert ESCAPE not in text
            lines_of(text, 80)
        piped = await trio.to_thread.run_sync(partial(cli, "workers"))
        assert piped.lines[1].split()[0] == peer.id
        assert piped.lines[0].split() == [
            *("worker", "host", "pid", "app", "running", "room", "last", "beat", "lag", "since"),
            *("version", "deploy", "python", "threads", "processes", "queues", "state"),
        ]
        held.gate.set()
        await eventually(queue.running, [])


def test_a_terminal_tells_what_is_unusual_about_workers(on_screen: OnTerminal, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    told = {"keepalive_ms": 100_000, "lease_ms": 0, "running": 0, "room": 1}
    desk.register("shop:a", "shop:b")
    desk.call(ops.keep_worker_alive(desk.g, "shop:a", 1, **told))
    shown = COLOURS.sub("", on_screen(200, "workers"))
    assert "version" not in shown
    assert "lag" not in shown
    desk.client.hset(desk.g.info("shop:a"), "version", "0.1.0")
    desk.client.hset(desk.g.info("shop:b"), "version", "0.2.0")
    desk.call(ops.keep_worker_alive(desk.g, "shop:a", 1, **{**told, "lease_ms": 60_000}))
    desk.call(ops.keep_worker_alive(desk.g, "shop:b", 1, **told, lag_ms=12_000, leaving=True))
    desk.register("shop:c", "shop:d")
    desk.client.delete(desk.g.worker("shop:c"), desk.g.worker("shop:d"))
    desk.call(ops.condemn_worker(desk.g, "shop:d", None))
    text = on_screen(200, "workers")
    head, *rows = lines_of(text, 200)
    assert head.split() == ["worker", "host", "running", "room", "last", "beat", "lag", "since"]
    for row, note in zip(
        rows,
        (
            "leader; version 0.1.0",
            "leaving; version 0.2.0",
            "no heartbeat; version unknown",
            "dead; version unknown",
        ),
        strict=True,
    ):
        assert note in row
    assert re.search(rf"{re.escape(RED)} *12 s", text)
    desk.wipe()


async def failed(queue: worqr.Queue) -> int:
    return (await queue.info()).failed


def test_new_entries_of_the_log_are_followed_until_ctrl_c(
    environment: dict[str, str], server: Server, prefix: str
) -> None:
    desk = Desk(server.client(), prefix)
    for n in range(3):
        desk.call(ops.note_event(desk.g, f"k{n}"))
    words = ("log", "--follow", "--json", "--limit", "1")
    with subprocess.Popen(
        [sys.executable, "-m", "worqr", *words], cwd=ROOT, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert '"kind":"k2"' in process.stdout.readline()
        desk.call(ops.note_event(desk.g, "later"))
        assert '"kind":"later"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == ""
    desk.wipe()


@pytest.mark.one_server
def test_the_log_is_followed_through_an_outage(own_server: Server, environment: dict[str, str], prefix: str) -> None:
    desk = Desk(own_server.client(), prefix)
    desk.call(ops.note_event(desk.g, "first"))
    own = {**environment, "WORQR_URL": own_server.url, "WORQR_PREFIX": prefix, "WORQR_PATIENCE": "10s"}
    command = [sys.executable, "-m", "worqr", "log", "--follow", "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=own, text=True, **pipes) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        assert '"kind":"first"' in process.stdout.readline()
        own_server.kill()
        assert process.stderr.readline().endswith("; trying again\n")
        own_server.start()
        own_server.client().xadd(desk.g.log, {"kind": "later"})
        assert '"kind":"later"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


WIDE = 100 * "w"


async def test_watching_redraws_at_the_size_of_the_terminal_until_ctrl_c(
    environment: dict[str, str], mesh: worqr.Mesh
) -> None:
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    async with mesh.connect():
        await mesh.queue("mails").enqueue(b"a")
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "worqr", "queues", "--watch"],
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(its)
        try:
            await trio.to_thread.run_sync(read_until, ours, b"mails")
            await mesh.queue("films").enqueue(b"a")
            await trio.to_thread.run_sync(read_until, ours, b"films")
            await mesh.queue(WIDE).enqueue(b"a")
            ioctl(ours, TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
            await trio.to_thread.run_sync(read_until, ours, WIDE.encode())  # a line of 80 columns has no room for it
            process.send_signal(2)
            rest = await trio.to_thread.run_sync(read_all, ours)
            assert await process.wait() == 0
            assert b"Traceback" not in rest
            assert b"\x1b[?1049l" in rest  # the screen from before is back
        finally:
            process.kill()
            os.close(ours)
        for name in ("mails", "films", WIDE):
            await mesh.queue(name).cancel_all()


def read_until(ours: int, wanted: bytes) -> None:
    data = b""
    while wanted not in data:
        data += os.read(ours, 65536)


@pytest.mark.parametrize(
    ("words", "why"),
    [(("--watch",), "--watch needs a terminal; in a pipe"), (("--watch", "--json"), "omit --json")],
)
def test_what_cannot_be_watched(cli: Command, words: tuple[str, ...], why: str) -> None:
    answer = cli("queues", *words)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err


# Short ids


def test_a_worker_is_evicted_by_its_short_id(cli: Command, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    one, two, three = "shop:" + "ab12cd34" * 4, "shop:" + "ab12cd35" * 4, "mail:" + "ff" * 16
    desk.register(one, two, three)
    with desk.nothing_changes():
        wrong = cli("workers", "evict", "ab12cd3")
        assert (wrong.code, wrong.out) == (1, "")
        assert wrong.err == (
            f"worqr: 'ab12cd3' is ambiguous: 2 worker ids begin with it ({one}, {two}); "
            "type more characters. Nothing was done\n"
        )
        unknown = cli("workers", "evict", "0123abcd")
        assert unknown.code == 1
        assert "there is no worker '0123abcd'" in unknown.err
        assert cli("workers", "evict", "").code == 1
    assert cli("workers", "evict", "ab12cd34").out == f"Evicted worker {one}; its tasks are back in their queues\n"
    assert cli("workers", "evict", "shop:ab12cd35").code == 0
    assert cli("workers", "evict", "").code == 1
    assert [row["id"] for row in cli("workers", "--json").json] == [three]
    desk.wipe()


def test_a_prefix_of_an_app_and_of_digits_is_ambiguous(cli: Command, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    desk.register("cafe:" + "11" * 16, "shop:cafe" + "1" * 28)
    with desk.nothing_changes():
        assert "is ambiguous" in cli("workers", "evict", "cafe").err
    desk.wipe()
