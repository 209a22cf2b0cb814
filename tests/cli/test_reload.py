"""``worqr run --reload``: which changes count, and a peer that is started again, broken, mended, and gone with us."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import trio

import worqr
from tests.cli.conftest import Command
from tests.peer.tools import eventually, until
from tests.support.children import ROOT, Child
from tests.support.servers import Server
from worqr.cli import run
from worqr.cli.run import CHANNEL, command_without_reload, describe_change, scan, supervise

LONG = 30.0

PROGRAM = """
import os, sys
os.chdir({folder!r})
os.execv(sys.executable, [sys.executable, "-u", "-P", "-m", "worqr", "run", "app:mesh", "--reload", *sys.argv[1:]])
"""

APP = """
import trio, worqr
mesh = worqr.Mesh()

@mesh.task(name="say")
async def say() -> None:
    print({text!r}, flush=True)

@mesh.task(name="hold")
async def hold() -> None:
    print("holding", flush=True)
    try:
        await trio.sleep_forever()
    finally:
        print("let go:", worqr.current().cancel_reason, flush=True)
"""

pytestmark = pytest.mark.timeout(150)  # many processes, one after the other


@pytest.fixture
def app(tmp_path: Path) -> trio.Path:
    (tmp_path / "app.py").write_text(APP.format(text="one"))
    return trio.Path(tmp_path / "app.py")


@pytest.fixture
def supervisor(spawn: Callable[..., Child], app: trio.Path, server: Server, prefix: str) -> Child:
    environment = {"WORQR_URL": server.url, "PYTHONPATH": os.fspath(ROOT)}
    return spawn(PROGRAM.format(folder=os.fspath(app.parent)), "--prefix", prefix, env=environment)


async def write(file: trio.Path, text: str) -> None:
    """Write a file at once, so that no look finds it empty."""
    part = file.with_suffix(".part")
    await part.write_text(text)
    await part.replace(file)


def starts(child: Child) -> int:
    return child.errors.count("start: worqr")


@pytest.mark.parametrize("word", ["--reload", "--reload=true", "--reload=1"])
def test_the_child_does_not_reload_again(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "worqr", "run", "app:mesh", word, "--threads=2"])
    assert command_without_reload() == [sys.executable, "-m", "worqr", "run", "app:mesh", "--threads=2"]


def test_a_signal_counts_also_while_files_change_all_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks = count()

    def changing(_folder: Path) -> run.Snapshot:
        number = next(looks)
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert number < 9
        return {"generated.py": (number, 1)}

    monkeypatch.setattr(run, "scan", changing)
    monkeypatch.setattr(run, "POLL_EVERY", 0.01)
    command = [sys.executable, "-c", f"import os; os.read(int(os.environ[{CHANNEL!r}]), 1)"]
    assert supervise(command, tmp_path) == 0


def test_a_file_that_is_gone_again_after_the_first_look_is_no_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = count()

    def changing(_folder: Path) -> run.Snapshot:
        number = next(looks)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"generated.py": (1, 1)} if number == 1 else {}

    monkeypatch.setattr(run, "scan", changing)
    monkeypatch.setattr(run, "POLL_EVERY", 0.01)
    command = [sys.executable, "-c", f"import os; os.read(int(os.environ[{CHANNEL!r}]), 1)"]
    assert supervise(command, tmp_path) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.timeout(30)
def test_the_third_signal_ends_also_a_child_that_is_frozen(tmp_path: Path) -> None:
    program = f"""
import os, signal
supervisor = os.getppid()
if os.fork():
    os.kill(os.getpid(), signal.SIGSTOP)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
    os.kill(supervisor, number)
    os.read(int(os.environ[{CHANNEL!r}]), 2)  # it has handled the signal: two of a number that come together are one
"""
    assert supervise([sys.executable, "-c", program], tmp_path) == 1


async def test_a_change_starts_the_peer_again(supervisor: Child, app: trio.Path, mesh: worqr.Mesh) -> None:
    await until(lambda: starts(supervisor) == 1, LONG)
    async with mesh.connect():
        await mesh.queue("hold").enqueue(b"{}")
        assert await supervisor.line(LONG) == "holding"
        await write(app, APP.format(text="number two"))
        assert await supervisor.line(LONG) == "let go: leaving"
        assert await supervisor.line(LONG) == "holding"  # it was given back, and is taken again
        assert "worqr: app.py changed; restarting" in supervisor.errors
        await mesh.queue("say").enqueue(b"{}")
        assert await supervisor.line(LONG) == "number two"

        await write(app, "1 / 0\n")
        await until(lambda: "it restarts when a file changes" in supervisor.errors, LONG)
        assert "ZeroDivisionError" in supervisor.errors
        await (app.parent / "helper.py").write_text("")
        await until(lambda: supervisor.errors.count("when a file changes") == 2, LONG)
        await write(app, APP.format(text="mended, and that is three"))
        assert await supervisor.line_with("holding", LONG) == "holding"
        await mesh.queue("say").enqueue(b"{}")
        assert await supervisor.line(LONG) == "mended, and that is three"

        supervisor.signal(signal.SIGINT)
        await until(lambda: "stop: shutting down" in supervisor.errors, LONG)
        supervisor.signal(signal.SIGINT)
        assert await supervisor.line(LONG) == "let go: leaving"
        assert await supervisor.ended(LONG) == 0
        assert await mesh.workers() == []


async def test_ctrl_c_on_their_terminal_counts_once(supervisor: Child, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("hold").enqueue(b"{}")
        assert await supervisor.line(LONG) == "holding"
        os.killpg(supervisor.pid, signal.SIGINT)
        await until(lambda: "stop: shutting down" in supervisor.errors, LONG)
        await trio.sleep(0.5)  # whatever came twice would have come by now
        assert "stop: cancelling the running tasks" not in supervisor.errors
        os.killpg(supervisor.pid, signal.SIGINT)
        assert await supervisor.line(LONG) == "let go: leaving"
        assert await supervisor.ended(LONG) == 0
        assert await mesh.queue("hold").count() == 1


async def test_the_peer_leaves_when_its_supervisor_is_killed(supervisor: Child, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("hold").enqueue(b"{}")
        assert await supervisor.line(LONG) == "holding"
        supervisor.kill()
        assert await supervisor.line(LONG) == "let go: leaving"

        async def workers() -> int:
            return len(await mesh.workers())

        await eventually(workers, 0, within=LONG)
        assert await mesh.queue("hold").count() == 1


async def test_it_ends_while_the_peer_is_not_there(supervisor: Child, app: trio.Path) -> None:
    await until(lambda: starts(supervisor) == 1, LONG)
    await write(app, "1 / 0\n")
    await until(lambda: "it restarts when a file changes" in supervisor.errors, LONG)
    supervisor.signal(signal.SIGTERM)
    assert await supervisor.ended(LONG) == 0


def test_wrong_options_are_said_once(command: Command) -> None:
    assert command("run", "app:mesh", "--reload", "--grace", "long").code == 2


# Which files count


def test_what_is_looked_at(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "b/c.py",
        "b/d.txt",
        ".hidden/e.py",
        "venv/lib/f.py",
        "mine/pyvenv.cfg",
        "mine/g.py",
        "__pycache__/h.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert {os.path.relpath(path, tmp_path) for path in scan(tmp_path)} == {"a.py", "b/c.py"}


def test_a_change_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "b.py").write_text("x")
    before = scan(tmp_path)
    assert scan(tmp_path) == before
    (tmp_path / "a.py").write_text("other")
    assert describe_change(before, scan(tmp_path)) == "a.py"
    (tmp_path / "b.py").unlink()
    (tmp_path / "c.py").write_text("x")
    assert describe_change(before, scan(tmp_path)) == "a.py and 2 more"


def test_a_folder_that_is_gone_has_no_files(tmp_path: Path) -> None:
    assert scan(tmp_path / "nowhere") == {}
