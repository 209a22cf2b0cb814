"""``worqr run --workers``: a parent that restarts and renews workers, in real processes that are killed for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.cli.conftest import Command
from tests.cli.test_run import HEARS_HANGUPS, HUP, INT, LONG, RUN, TERM, address_of, connected, enqueue
from tests.peer.processes import is_alive
from tests.peer.tools import eventually, until
from tests.support.children import ROOT, Child
from tests.support.http import get
from tests.support.servers import Server
from worqr.child_processes import resident_memory

__all__ = ["connected"]

pytestmark = [
    pytest.mark.timeout(200),  # many processes, one after the other
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

Start = Callable[..., Child]
Run = Callable[..., Awaitable[Child]]


@pytest.fixture
def start(spawn: Callable[..., Child], server: Server, prefix: str) -> Start:
    """`start("--workers", "2")`: ``worqr run tests.cli.app:mesh`` on the tests' server."""

    def begin(
        *options: str, code: str = HEARS_HANGUPS, target: str = "tests.cli.app:mesh", fresh: bool = False, **env: str
    ) -> Child:
        return spawn(code, target, "--prefix", prefix, *options, env={"WORQR_URL": server.url, **env}, fresh=fresh)

    return begin


@pytest.fixture
def run(start: Start) -> Run:
    """The same, once all workers serve."""

    async def begin(*options: str, **more: Any) -> Child:
        parent = start(*options, **more)
        await until(lambda: "workers.start: " in parent.errors or parent.process.poll() is not None, LONG, "it serves")
        assert parent.process.poll() is None, parent.errors
        return parent

    return begin


def children_of(pid: int) -> list[int]:
    """The processes that it is the parent of, also those that wait to be reaped."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


async def entries(mesh: worqr.Mesh, *kinds: str) -> list[worqr.LogEntry]:
    """Those of the log of the mesh, the oldest first."""
    return [each for each in await mesh.log(500) if each.kind in kinds]


async def of_process(mesh: worqr.Mesh, pid: int) -> str:
    """The id of the worker of a process."""
    [found] = [each.id for each in await mesh.workers() if each.pid == pid]
    return found


# Stopping


@pytest.mark.parametrize("number", [TERM, HUP])
async def test_a_signal_lets_the_tasks_of_all_workers_end(
    run: Run, connected: worqr.Mesh, number: signal.Signals
) -> None:
    parent = await run("--workers", "2")
    assert len(await connected.workers()) == len(children_of(parent.pid)) == 2
    await enqueue(connected, "nap", seconds=1)
    assert await parent.line(LONG) == "napping"
    parent.signal(number)
    assert await parent.line(LONG) == "awake"
    assert await parent.ended(LONG) == 0
    assert await connected.workers() == []
    assert "Traceback" not in parent.errors


async def test_the_second_signal_cancels_what_runs_and_gives_it_back(run: Run, connected: worqr.Mesh) -> None:
    parent = await run("--workers", "2", "--grace", "10m")
    await enqueue(connected, "hold")
    assert await parent.line(LONG) == "holding"
    parent.signal(INT)
    await until(lambda: parent.errors.count("stop: shutting down: waiting") == 2, LONG)
    parent.signal(TERM)
    assert await parent.line(LONG) == "let go: leaving"
    assert await parent.ended(LONG) == 0
    assert await connected.queue("tests.cli.app.hold").count() == 1


@pytest.mark.leaves("*")
async def test_the_third_signal_ends_all_though_a_handler_blocks_its_loop(run: Run, connected: worqr.Mesh) -> None:
    parent = await run("--workers", "2", "--grace", "10m")
    workers = children_of(parent.pid)
    await enqueue(connected, "block")
    assert await parent.line(LONG) == "blocking"
    for urgency in (1, 2, 3):
        parent.signal(TERM)
        await until(lambda urgency=urgency: f"urgency {urgency}" in parent.errors, LONG)  # type: ignore[misc]
    assert await parent.ended(LONG) == 1
    assert not any(map(is_alive, workers))


async def test_if_the_parent_is_killed_the_workers_give_their_tasks_back_and_end(
    run: Run, connected: worqr.Mesh
) -> None:
    parent = await run("--workers", "2", "--grace", "10m")
    workers = children_of(parent.pid)
    await enqueue(connected, "hold")
    assert await parent.line(LONG) == "holding"
    parent.kill()
    assert await parent.line(LONG) == "let go: leaving"
    await until(lambda: not any(map(is_alive, workers)), LONG)
    assert await connected.workers() == []
    assert await connected.queue("tests.cli.app.hold").count() == 1


# Restarting


@pytest.mark.leaves("*")
async def test_a_worker_that_dies_is_started_again_and_the_log_of_the_mesh_says_why(
    run: Run, connected: worqr.Mesh
) -> None:
    parent = await run("--workers", "2")
    dead, other = children_of(parent.pid)
    os.kill(dead, signal.SIGKILL)
    await until(lambda: "worker.restarted: " in parent.errors, LONG)

    async def restarted() -> list[str]:
        return [each.text for each in await entries(connected, "restarted")]

    await eventually(restarted, [f"the worker of process {dead} was ended by SIGKILL"], LONG)
    new = set(children_of(parent.pid)) - {dead, other}
    assert len(new) == 1
    assert other in children_of(parent.pid)
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


async def test_a_module_that_cannot_be_imported_ends_the_parent_too(start: Start) -> None:
    parent = start("--workers", "2", target="tests.cli.nowhere:mesh")
    assert await parent.ended(LONG) == 1
    assert "worqr: there is no module 'tests.cli.nowhere'" in parent.errors
    assert "Traceback" not in parent.errors
    assert not children_of(parent.pid)


async def test_a_program_that_ends_before_it_serves_is_started_again_after_a_pause(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(tmp_path)])
    parent = start("--workers", "1", target="ends:mesh", PYTHONPATH=path)
    await until(lambda: "ended with exit code 0; starting another in 1 s" in parent.errors, LONG)
    parent.signal(TERM)
    await parent.ended(LONG)


# Renewing


async def test_the_successor_serves_before_the_old_worker_takes_no_more_and_no_run_is_cut_short(
    run: Run, connected: worqr.Mesh, tmp_path: Path
) -> None:
    parent = await run("--max-runs", "5", "--grace", "0.1")
    [old] = children_of(parent.pid)
    worker = await of_process(connected, old)
    await enqueue(connected, "nap_until", path=str(tmp_path / "end"))
    assert await parent.line(LONG) == "napping"
    for _ in range(5):
        await enqueue(connected, "nap", seconds=0)
    await until(lambda: "because it has run" in parent.errors, LONG)
    await until(lambda: "this worker is renewed" in parent.errors, LONG)
    log = await entries(connected, "joined", "left")
    assert [each.kind for each in log] == ["joined", "joined"]
    [new] = set(children_of(parent.pid)) - {old}
    await trio.sleep(0.5)  # longer than the grace
    assert is_alive(old)
    await trio.Path(tmp_path, "end").touch()
    await until(lambda: "the old process" in parent.errors, LONG)
    assert [line for line in [await parent.line(LONG) for _ in range(11)] if line == "awake"] == ["awake"] * 6
    assert f"worker.renewed: the old process {old} ended with exit code 0" in parent.errors
    log = await entries(connected, "joined", "left", "restarted", "dead", "recovered")
    assert [each.kind for each in log] == ["joined", "joined", "left"]
    assert log[-1].worker == worker
    assert children_of(parent.pid) == [new]
    assert (await connected.queue("tests.cli.app.nap_until").info()).failed == 0
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


async def test_workers_are_renewed_one_after_the_other_and_the_counters_go_on(run: Run, connected: worqr.Mesh) -> None:
    pytest.importorskip("prometheus_client")
    parent = await run("--workers", "2", "--max-age", "10s", "--probe", "127.0.0.1:0")
    old = children_of(parent.pid)
    for _ in range(3):
        await enqueue(connected, "nap", seconds=0)
    for _ in range(6):
        await parent.line(LONG)
    address = address_of(parent)
    await until(lambda: runs_in(get(address, "/metrics").text) == 3, LONG)
    await until(lambda: not set(old) & set(children_of(parent.pid)), 2 * LONG, "both are renewed")
    await until(lambda: parent.errors.count("worker.renewed: the old process") >= 2, LONG)
    assert runs_in(get(address, "/metrics").text) == 3
    assert json.loads(get(address, "/ready", accept="application/json").text)["runs"] == 3
    running = 2
    for kind in [each.kind for each in await entries(connected, "joined", "left")][2:]:
        running += 1 if kind == "joined" else -1
        assert running in (2, 3)
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


async def test_a_worker_that_still_imports_the_application_does_not_hide_the_metrics_of_the_others(
    run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    slow = tmp_path / "slow"
    (tmp_path / "slow_app.py").write_text(
        "import pathlib, time\n"
        "from tests.cli.app import mesh\n"
        f"slow = pathlib.Path({str(slow)!r})\n"
        "if slow.exists():\n    slow.write_text('importing')\n"
        "while slow.exists():\n    time.sleep(0.1)\n"
    )
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(tmp_path)])
    parent = await run("--workers", "2", "--probe", "127.0.0.1:0", target="slow_app:mesh", PYTHONPATH=path)
    address = address_of(parent)
    await until(lambda: "worqr_peer_alive 2.0" in get(address, "/metrics").text, LONG)  # each replies within a second
    slow.touch()
    os.kill(children_of(parent.pid)[0], signal.SIGTERM)
    await until(lambda: slow.read_text() == "importing", LONG)
    await until(lambda: "worqr_peer_alive 1.0" in get(address, "/metrics").text, LONG)
    slow.rename(tmp_path / "done")
    await until(lambda: "worqr_peer_alive 2.0" in get(address, "/metrics").text, LONG)
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


def runs_in(metrics: str) -> float:
    return sum(float(each) for each in re.findall(r'^worqr_peer_runs_total\{.*outcome="ok".*\} (\S+)$', metrics, re.M))


async def test_a_worker_that_has_grown_is_renewed_but_not_one_that_is_large_from_the_start(
    run: Run, connected: worqr.Mesh
) -> None:
    parent = await run("--max-memory", "20M", "--probe", "127.0.0.1:0")
    [old] = children_of(parent.pid)
    address = address_of(parent)
    await until(lambda: get(address, "/ready").status == 200, LONG)
    await enqueue(connected, "nap", seconds=0)
    await until(lambda: "worker.renewed: the old process" in parent.errors, LONG)
    assert re.search(rf"process {old} is renewed, because it has \d+ MiB of memory after 1 runs", parent.errors)
    assert parent.errors.count("is renewed, because") == 1
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


# What watches it


@pytest.mark.leaves("{tests.cli.app.hold}*")  # the worker that stands still may have counted as dead
async def test_the_probes_are_those_of_all_workers_together(run: Run, connected: worqr.Mesh, tmp_path: Path) -> None:
    parent = await run("--workers", "2", "--concurrency", "7", WORQR_PROBE=f"unix:{tmp_path}/probe")
    address = address_of(parent)
    for path in ("/live", "/ready", "/startup"):
        assert get(address, path).status == 200
    assert get(address, "/nothing").status == 404
    await enqueue(connected, "hold")
    assert await parent.line(LONG) == "holding"

    def state() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get(address, "/ready", accept="application/json").text)
        return found

    await until(lambda: state()["running"] == 1, LONG)
    assert (state()["room"], sorted(state()["workers"])) == (13, sorted(children_of(parent.pid)))
    os.kill(children_of(parent.pid)[0], signal.SIGSTOP)
    await until(lambda: "it has not replied for" in get(address, "/live").text, 2 * LONG)
    ready = get(address, "/ready")
    assert (ready.status, "1 of 2 workers serve: it has not replied for" in ready.text) == (503, True)
    os.kill(children_of(parent.pid)[0], signal.SIGCONT)
    await until(lambda: get(address, "/live").status == 200, LONG)
    parent.signal(TERM)
    await until(lambda: get(address, "/ready").text == "the workers are stopping\n", LONG)
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


async def test_systemd_hears_of_the_parent_only(run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LONG)
        parent = await run("--workers", "2", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1000000")
        said = ""
        while "READY=1" not in said or "WATCHDOG=1" not in said:
            said += systemd.recv(4096).decode() + "\n"
        assert said.count("READY=1") == 1
        for pid in children_of(parent.pid):
            assert "NOTIFY_SOCKET" not in of_proc(pid, "environ")
        parent.signal(TERM)
        assert await parent.ended(LONG) == 0
        systemd.settimeout(0)
        while "STOPPING=1" not in said:
            said += systemd.recv(4096).decode() + "\n"
    assert said.count("READY=1") == 1


@pytest.mark.leaves("*")
async def test_under_a_watchdog_a_worker_that_does_not_reply_is_killed_and_the_others_go_on(run: Run) -> None:
    parent = await run("--workers", "2", WATCHDOG_USEC="1000000")
    frozen, other = children_of(parent.pid)
    os.kill(frozen, signal.SIGSTOP)
    await until(lambda: f"process {frozen} is killed: it has not replied for" in parent.errors, 2 * LONG)
    await until(lambda: parent.errors.count("start: worqr") == 3, LONG)
    assert other in children_of(parent.pid)
    assert frozen not in children_of(parent.pid)


async def test_the_parent_is_small_and_does_not_import_the_application(run: Run) -> None:
    parent = await run("--workers", "1", fresh=True)
    [worker] = children_of(parent.pid)
    assert "hiredis" in of_proc(worker, "maps")
    assert "hiredis" not in of_proc(parent.pid, "maps")
    assert resident_memory(parent.pid) < resident_memory(worker) / 2
    parent.signal(TERM)
    assert await parent.ended(LONG) == 0


def of_proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


# Process 1


def namespaces_work() -> bool:
    command = ["unshare", "-Urpf", "--mount-proc", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


@pytest.fixture
def as_process_1(spawn: Callable[..., Child], server: Server, prefix: str) -> Start:
    """`as_process_1("--workers", "2")`: ``worqr run tests.cli.app:mesh`` in a process namespace of its own."""

    def begin(*options: str, **env: str) -> Child:
        if not namespaces_work():
            pytest.skip("this user may not make a process namespace")
        command = [sys.executable, "-u", "-c", RUN, "tests.cli.app:mesh", "--prefix", prefix, *options]
        code = (
            f"import os, sys; os.execvp('unshare', ['unshare', '-Urpf', '--mount-proc', '--kill-child', *{command!r}])"
        )
        return spawn(code, env={"WORQR_URL": server.url, **env})

    return begin


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
async def test_as_process_1_it_reaps_what_handlers_leave_behind(
    as_process_1: Start, connected: worqr.Mesh, options: tuple[str, ...]
) -> None:
    parent = as_process_1(*options)
    await until(lambda: parent.errors.count("start: worqr") == max(1, len(options)), LONG)
    await enqueue(connected, "leave")
    left = int((await parent.line_with("left ", LONG)).split()[1])
    [first] = children_of(parent.pid)

    def zombies() -> list[str]:
        every = subprocess.run(
            ["ps", "-o", "stat=,args=", "--ppid", str(first)], capture_output=True, text=True, check=False
        )
        return [line for line in every.stdout.splitlines() if line.startswith("Z")]

    assert left > 1
    await until(lambda: "sleep" not in " ".join(commands_below(first)), LONG, "it has ended")
    await until(lambda: not zombies(), LONG, "it was reaped")
    os.kill(first, signal.SIGTERM)
    assert await parent.ended(LONG) == 0
    assert await connected.workers() == []


@pytest.mark.parametrize("by_option", [True, False])
async def test_as_process_1_it_serves_the_probes(as_process_1: Start, tmp_path: Path, by_option: bool) -> None:
    probe = f"unix:{tmp_path}/probe"
    parent = as_process_1("--probe", probe) if by_option else as_process_1(WORQR_PROBE=probe)
    await until(lambda: "workers.start: " in parent.errors, LONG, "it serves")
    for path in ("/live", "/ready", "/startup", "/metrics"):
        assert get(address_of(parent), path).status == 200
    [first] = children_of(parent.pid)
    os.kill(first, signal.SIGTERM)
    assert await parent.ended(LONG) == 0


def commands_below(pid: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "args=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()


# Options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--workers", "0"), "--workers must be a number from 1 to 512, or auto, got '0'"),
        (("--workers", "many"), "--workers must be a number from 1 to 512, or auto, got 'many'"),
        (("--max-runs", "0"), "--max-runs must be at least 1, got 0"),
        (("--max-memory", "800"), "--max-memory must be a size such as 800M or 2G (units: K, M, G), got '800'"),
        (("--max-age", "1s"), "--max-age must be at least 10 s, because a start takes some seconds"),
        (("--reload", "--workers", "2"), "--reload runs one worker; leave out --workers and --max-..."),
    ],
)
def test_an_option_that_cannot_be_is_one_line(command: Command, options: tuple[str, ...], text: str) -> None:
    found = command("run", "tests.cli.app:mesh", *options)
    assert (found.code, found.out, found.err) == (2, "", f"worqr: {text}\n")


async def test_probes_that_cannot_listen_are_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        parent = start("--workers", "2", "--probe", f"127.0.0.1:{taken.getsockname()[1]}")
        assert await parent.ended(LONG) == 1
    assert re.fullmatch(r"worqr: cannot listen at .*: address already in use; choose another address\n", parent.errors)
