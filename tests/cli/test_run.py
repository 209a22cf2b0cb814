"""``worqr run`` and ``mesh.run()`` as processes: signals, what refuses to end, servers that are away, logs."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

import worqr
from tests.cli.conftest import Command
from tests.peer.tools import eventually, until
from tests.support.children import Child
from tests.support.http import get
from tests.support.servers import Server

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
LONG = 30.0
"""Seconds for a process to start or to end, however slow the machine."""

RUN = "import sys; from worqr.cli import main; sys.exit(main(['run', *sys.argv[1:]]))"
HEARS_HANGUPS = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{RUN}"
"""Also if the tests run under nohup, which children inherit."""
HASTY = f"from worqr.hosting import service; service.WARN_AFTER, service.EXIT_AFTER = 0.2, 0.5\n{RUN}"
"""What refuses to end is ended soon."""
PATIENT = f"from worqr.hosting import service; service.EXIT_AFTER = 600\n{RUN}"
"""What refuses to end goes on."""

Run = Callable[..., Awaitable[Child]]

pytestmark = pytest.mark.timeout(150)  # many processes, one after the other


@pytest.fixture
def run(spawn: Callable[..., Child], server: Server, prefix: str) -> Run:
    """`await run("--grace", "5")`: ``worqr run tests.cli.app:mesh`` on the tests' server, once it has started."""

    async def start(*options: str, code: str = HEARS_HANGUPS, target: str = "tests.cli.app:mesh") -> Child:
        child = spawn(code, target, "--prefix", prefix, *options, env={"WORQR_URL": server.url})
        await started(child)
        return child

    return start


async def started(child: Child) -> None:
    """Until it serves."""
    await until(lambda: "start: worqr" in child.errors or child.process.poll() is not None, LONG, "it started")
    assert child.process.poll() is None, child.errors


async def enqueue(mesh: worqr.Mesh, name: str, **arguments: Any) -> None:
    call = mesh.call(f"tests.cli.app.{name}", **arguments)
    await mesh.enqueue_many([call])


@pytest.fixture
async def connected(mesh: worqr.Mesh) -> Any:
    async with mesh.connect():
        yield mesh


# Signals


@pytest.mark.parametrize("number", [TERM, INT, HUP])
async def test_the_first_signal_lets_what_runs_end(run: Run, connected: worqr.Mesh, number: signal.Signals) -> None:
    peer = await run()
    await enqueue(connected, "nap", seconds=1)
    assert await peer.line(LONG) == "napping"
    peer.signal(number)
    assert await peer.line(LONG) == "awake"
    assert await peer.ended(LONG) == 0
    assert "stop: shutting down: waiting up to 25 s for running tasks" in peer.errors
    assert "Traceback" not in peer.errors
    assert await connected.workers() == []


async def test_several_hangups_are_one_and_none_if_they_are_ignored(run: Run, connected: worqr.Mesh) -> None:
    peer = await run(code=f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{RUN}")
    peer.signal(HUP)
    await enqueue(connected, "nap", seconds=0)
    assert await peer.line(LONG) == "napping"
    assert "stop:" not in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
    peer = await run()
    await enqueue(connected, "nap", seconds=1)
    await peer.line_with("napping", LONG)
    for _ in range(4):
        peer.signal(HUP)
        await until(lambda: "stop: shutting down" in peer.errors, LONG)
    assert await peer.line(LONG) == "awake"
    assert await peer.ended(LONG) == 0
    assert "cancelling the running tasks" not in peer.errors


async def test_a_fork_of_a_handler_is_ended_by_the_first_signal(run: Run, connected: worqr.Mesh) -> None:
    peer = await run()
    await enqueue(connected, "terminate")
    assert await peer.line(LONG) == f"ended by -{int(TERM)}"
    assert "stop:" not in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


async def test_what_has_not_ended_within_the_grace_is_given_back(run: Run, connected: worqr.Mesh) -> None:
    peer = await run("--grace", "100ms")
    await enqueue(connected, "hold")
    assert await peer.line(LONG) == "holding"
    peer.signal(TERM)
    assert await peer.line(LONG) == "let go: leaving"
    assert await peer.ended(LONG) == 0
    assert await connected.queue("tests.cli.app.hold").count() == 1


async def test_the_second_signal_cancels_what_runs_and_gives_it_back(run: Run, connected: worqr.Mesh) -> None:
    peer = await run("--grace", "10m")
    await enqueue(connected, "hold")
    assert await peer.line(LONG) == "holding"
    peer.signal(INT)
    await until(lambda: "stop: shutting down" in peer.errors, LONG)
    peer.signal(TERM)
    assert await peer.line(LONG) == "let go: leaving"
    assert await peer.ended(LONG) == 0
    assert "stop: cancelling the running tasks" in peer.errors
    assert await connected.queue("tests.cli.app.hold").count() == 1
    assert await connected.workers() == []


@pytest.mark.leaves("*")
async def test_the_third_ends_it_though_a_handler_blocks_the_loop(run: Run, connected: worqr.Mesh) -> None:
    peer = await run("--grace", "10m", code=PATIENT)
    await enqueue(connected, "block")
    assert await peer.line(LONG) == "blocking"
    with trio.fail_after(LONG):
        while peer.process.poll() is None:  # signals that come at once may be one
            peer.signal(TERM)
            await trio.sleep(0.2)
    assert peer.process.returncode == 1


@pytest.mark.leaves("*")
async def test_a_handler_that_refuses_to_end_is_named_and_left_behind(run: Run, connected: worqr.Mesh) -> None:
    peer = await run("--grace", "100ms", code=HASTY)
    await enqueue(connected, "block")
    assert await peer.line(LONG) == "blocking"
    peer.signal(TERM)
    assert await peer.ended(LONG) == 1
    assert "stuck: still running: 1 of 'tests.cli.app.block'; the loop is blocked by handler" in peer.errors
    assert "app.py" in peer.errors
    assert "the process ends without it" in peer.errors


@pytest.mark.leaves("*")
async def test_a_handler_that_shields_itself_does_not_keep_the_process(run: Run, connected: worqr.Mesh) -> None:
    peer = await run("--grace", "100ms", code=HASTY)
    await enqueue(connected, "stubborn")
    assert await peer.line(LONG) == "stubborn"
    peer.signal(TERM)
    assert await peer.ended(LONG) == 1
    assert "stuck: " in peer.errors


@pytest.mark.leaves("*")
async def test_a_thread_that_lingers_does_not_keep_the_process(run: Run, connected: worqr.Mesh) -> None:
    code = f"from worqr.cli import run; run.EXIT_AFTER = 0.5\n{RUN}"
    peer = await run(code=code)
    await enqueue(connected, "linger")
    assert await peer.line(LONG) == "lingering"
    peer.signal(TERM)
    assert await peer.ended(LONG) == 1
    assert "stuck: these threads have not ended, and the process ends without them: lingering" in peer.errors
    assert await connected.workers() == []


# Probes


def address_of(peer: Child) -> str:
    """Where it serves its probes."""
    (found,) = re.findall(r"probe: serving probes at (\S+)", peer.errors)
    return str(found)


@pytest.mark.parametrize("way", ["option", "variable", "unix"])
async def test_probes_tell_of_the_worker_until_it_has_ended(
    spawn: Callable[..., Child], server: Server, prefix: str, connected: worqr.Mesh, way: str, tmp_path: Path
) -> None:
    given = f"unix:{tmp_path}/probe" if way == "unix" else "127.0.0.1:0"
    options = () if way == "variable" else ("--probe", given)
    env = {"WORQR_URL": server.url, "WORQR_PROBE": given if way == "variable" else ""}
    peer = spawn(RUN, "tests.cli.app:mesh", "--prefix", prefix, *options, env=env)
    await started(peer)
    address = address_of(peer)
    for path in ("/live", "/ready", "/startup"):
        await until(lambda path=path: get(address, path).status == 200, LONG)  # type: ignore[misc]
    await enqueue(connected, "nap_until", path=str(tmp_path / "end"))
    assert await peer.line(LONG) == "napping"
    peer.signal(TERM)
    await until(lambda: get(address, "/ready").status == 503, LONG)
    assert get(address, "/ready").text == "the peer is leaving\n"
    assert get(address, "/live").status == 200
    await trio.Path(tmp_path, "end").touch()
    assert await peer.line(LONG) == "awake"
    assert await peer.ended(LONG) == 0
    assert not (tmp_path / "probe").exists()


async def test_probes_answer_before_the_server_can_be_reached(spawn: Callable[..., Child]) -> None:
    env = {"WORQR_URL": "redis://127.0.0.1:1/0"}
    peer = spawn(RUN, "tests.cli.app:mesh", "--probe", "127.0.0.1:0", env=env)
    await until(lambda: "serving probes" in peer.errors, LONG)
    address = address_of(peer)
    assert get(address, "/live").status == 200
    assert get(address, "/ready")[:2] == get(address, "/startup")[:2] == (503, "joining the mesh\n")


@pytest.mark.leaves("*")
async def test_ready_is_false_as_soon_as_it_is_to_stop_though_the_loop_is_blocked(
    run: Run, connected: worqr.Mesh
) -> None:
    peer = await run("--probe", "127.0.0.1:0", "--grace", "100ms", code=PATIENT)
    address = address_of(peer)
    await enqueue(connected, "block")
    assert await peer.line(LONG) == "blocking"
    peer.signal(TERM)
    await until(lambda: get(address, "/ready").status == 503, LONG)
    assert get(address, "/ready").text == "the peer is leaving\n"


def test_a_probe_that_finds_no_port_is_an_error_of_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for options in (("--probe", address), ()):
            monkeypatch.setenv("WORQR_PROBE", address)
            found = command("run", "tests.cli.app:mesh", *options)
            assert (found.code, found.out) == (1, "")
            assert found.err == f"worqr: cannot listen at {address}: address already in use; choose another address\n"


def test_a_probe_that_is_no_address(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = command("run", "tests.cli.app:mesh", "--probe", "here")
    assert (found.code, found.err) == (
        2,
        "worqr: --probe must be [HOST:]PORT or unix:PATH, for example 9465, not 'here'\n",
    )
    monkeypatch.setenv("WORQR_PROBE", "there")
    found = command("run", "tests.cli.app:mesh")
    assert (found.code, found.err) == (
        1,
        "worqr: WORQR_PROBE must be [HOST:]PORT or unix:PATH, for example 9465, not 'there'\n",
    )


def test_mesh_run_serves_probes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = worqr.Mesh("redis://127.0.0.1:1/0")
    mesh.task(name="f")(lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(worqr.UsageError, match="address already in use"):
            mesh.run(probe=f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(worqr.UsageError, match="probe must be"):
        mesh.run(probe="x")


# Options


async def test_the_start_says_what_is_served_where_and_how(run: Run, server: Server, prefix: str) -> None:
    peer = await run("--concurrency", "7", "--threads", "3", "--processes", "1", "--queues", "*.fail,*.nap")
    for fact in (
        server.url,
        prefix,
        "7 concurrent tasks, 3 threads, 1 processes",
        "thread, timeout 30 s, concurrency 5, also old.fail",
    ):
        assert fact in peer.errors
    assert "tests.cli.app.nap" in peer.errors
    assert "tests.cli.app.hold" not in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


async def test_the_mesh_may_be_the_only_one_of_its_module(
    spawn: Callable[..., Child], server: Server, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "only.py").write_text(
        "import worqr\nmesh = worqr.Mesh('redis://nowhere.invalid')\n@mesh.task\nasync def f() -> None: ...\n"
    )
    code = f"import os; os.chdir({str(tmp_path)!r})\n{RUN}"
    peer = spawn(code, "only", "--url", server.url, "--prefix", prefix)
    await started(peer)
    assert "only.f" in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


PROCESS_APP = """
import worqr
mesh = worqr.Mesh("redis://nowhere.invalid", prefix="written", credentials=lambda: ("default", "any"), patience={patience})

@mesh.task(runs_in="process")
def where() -> None:
    print(mesh.url, mesh.prefix, mesh.credentials is not None, flush=True)
"""


async def test_its_processes_use_the_server_and_prefix_of_the_command_line(
    spawn: Callable[..., Child], connected: worqr.Mesh, server: Server, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "moved.py").write_text(PROCESS_APP.format(patience=LONG))
    code = f"import os; os.chdir({str(tmp_path)!r})\n{RUN}"
    peer = spawn(code, "moved:mesh", "--url", server.url, "--prefix", prefix)
    await started(peer)
    await connected.queue("moved.where").enqueue(b"{}")
    assert await peer.line(LONG) == f"{server.url} {prefix} True"
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


@pytest.mark.leaves("*:failed", "*:aside*")
async def test_every_line_of_the_log_is_an_object(run: Run, connected: worqr.Mesh, prefix: str) -> None:
    peer = await run("--log-json")
    await enqueue(connected, "fail", text="evil \x1b[31m\n")

    async def failed() -> int:
        return len(await connected.queue("tests.cli.app.fail").failed.list())

    await eventually(failed, 1, within=LONG)
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
    records = [json.loads(line) for line in peer.errors.splitlines()]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    (start,) = [record for record in records if record["logger"] == "worqr.service" and "start:" in record["message"]]
    assert start["level"] == "info"
    assert start["prefix"] == prefix
    assert "tests.cli.app.nap" in start["functions"]
    (failed_line,) = [record for record in records if record.get("event") == "task.failed"]
    assert failed_line["message"].startswith("task.failed: queue 'tests.cli.app.fail', job ")
    assert {"queue", "job", "attempt", "attempts", "worker", "error"} <= failed_line.keys()
    assert [record for record in records if "event" not in record] == []
    assert "\x1b" not in peer.errors


@pytest.mark.leaves("*:failed", "*:aside*")
async def test_a_payload_in_an_error_does_not_reach_the_terminal(run: Run, connected: worqr.Mesh) -> None:
    peer = await run()
    await enqueue(connected, "fail", text="evil \x1b[31m")
    await until(lambda: "task.failed" in peer.errors, LONG)
    assert "evil \\x1b[31m" in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


async def test_a_module_that_sets_up_logging_keeps_it(
    spawn: Callable[..., Child], server: Server, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "logs.py").write_text(
        "import logging, worqr\nlogging.basicConfig(format='MINE %(message)s')\nmesh = worqr.Mesh()\n"
        "@mesh.task\nasync def f() -> None: ...\n"
    )
    code = f"import os; os.chdir({str(tmp_path)!r})\n{RUN}"
    peer = spawn(code, "logs:mesh", "--url", server.url, "--prefix", prefix)
    await started(peer)
    assert "MINE start: worqr" in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.leaves("*:failed", "*:aside*")
async def test_a_configuration_that_disables_all_loggers_does_not_disable_those_of_worqr(
    spawn: Callable[..., Child], server: Server, prefix: str, tmp_path: Path, later: bool
) -> None:
    """`dictConfig` does so by default, in the module or in a handler."""
    (tmp_path / "configured.py").write_text(
        f"""
import logging.config, worqr
mesh = worqr.Mesh({server.url!r}, prefix={prefix!r})

def configure():
    logging.config.dictConfig({{
        "version": 1,
        "handlers": {{"console": {{"class": "logging.StreamHandler"}}}},
        "root": {{"handlers": ["console"], "level": "INFO"}},
    }})

if not {later}:
    configure()

@mesh.task(name="f", retry=worqr.RetryPolicy(max_failures=1))
def f() -> None:
    configure()
    raise ValueError("seen")
"""
    )
    peer = spawn(f"import os; os.chdir({str(tmp_path)!r})\n{RUN}", "configured:mesh")
    await started(peer)
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.enqueue_many([mesh.call("f")])
        await until(lambda: "task.failed: queue 'f'" in peer.errors, LONG)
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
    assert "stop_worker:" in peer.errors


async def test_a_private_server_is_a_warning_and_its_tasks_are_counted_at_the_end(
    spawn: Callable[..., Child], tmp_path: Path
) -> None:
    (tmp_path / "private.py").write_text(
        "import worqr\nmesh = worqr.Mesh('embedded:')\n@mesh.task\ndef f() -> None: ...\n"
        "@mesh.task(shards=2, lanes=worqr.Lanes(by='tenant'))\ndef g(tenant: str) -> None: ...\n"
    )
    begin = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, '')\n"
    peer = spawn(begin + RUN, "private:mesh")
    await started(peer)
    assert "embedded.private: this mesh uses embedded:, a private server" in peer.errors
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
    assert "embedded.lost" not in peer.errors
    sends = (
        "worqr.sync(f.enqueue); worqr.sync(f.options(delay=60).dispatch); [worqr.sync(g.enqueue, t) for t in 'abcde']"
    )
    producer = spawn(f"{begin}import worqr; from private import f, g; {sends}")
    assert await producer.ended(LONG) == 0
    assert "embedded.lost: tasks lost: 7. They wait on the private server" in producer.errors


async def test_ctrl_c_ends_it_while_its_modules_are_imported(spawn: Callable[..., Child], tmp_path: Path) -> None:
    """Also where the KeyboardInterrupt would be swallowed, as Python does it in callbacks of the import system."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    time.sleep(600)\n"
    )
    peer = spawn(f"import os; os.chdir({str(tmp_path)!r})\n{RUN}", "slow:mesh")
    assert await peer.line() == "importing"
    peer.signal(INT)
    assert await peer.ended(LONG) == 130


# Servers


async def test_it_waits_for_a_server_that_is_not_there_yet(spawn: Callable[..., Child], own_server: Server) -> None:
    own_server.stop()
    peer = spawn(RUN, "tests.cli.app:mesh", env={"WORQR_URL": own_server.tcp_url})
    await until(lambda: "link.lost" in peer.errors, LONG)
    own_server.start()
    await started(peer)
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0


async def test_it_tries_on_when_its_patience_is_over_and_leaves_when_it_is_told(
    spawn: Callable[..., Child], tmp_path: Path
) -> None:
    (tmp_path / "hasty.py").write_text(
        "import worqr\nmesh = worqr.Mesh('redis://127.0.0.1:1/0', patience=0.2)\n@mesh.task\nasync def f() -> None: ...\n"
    )
    peer = spawn(f"import os; os.chdir({str(tmp_path)!r})\n{RUN}", "hasty:mesh")
    await until(lambda: peer.errors.count("; retrying") >= 2, LONG)
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
    assert "Traceback" not in peer.errors


async def test_a_wrong_password_is_one_line(spawn: Callable[..., Child], own_server: Server) -> None:
    with redis.Redis.from_url(own_server.tcp_url) as client:
        client.config_set("requirepass", "right")
        peer = spawn(RUN, "tests.cli.app:mesh", env={"WORQR_URL": own_server.tcp_url.replace("//", "//:wrong@")})
        assert await peer.ended(LONG) == 1
    last = peer.errors.splitlines()[-1]
    assert last.startswith("worqr: the server at redis://:***@127.0.0.1")
    assert "Traceback" not in peer.errors
    assert "wrong" not in peer.errors


# What cannot be run


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (
            ("tests.cli.app:empty",),
            1,
            "there is nothing to serve: tests.cli.app:empty has no function declared with @mesh.task",
        ),
        (("tests.cli.app:mesh", "--queues", "*.nup"), 1, "--queues: no function is named '*.nup'"),
        (("tests.cli.app:mash",), 1, "did you mean 'mesh'?"),
        (("tests.cli.app:mesh", "--concurrency", "0"), 1, "concurrency must be"),
        (("tests.cli.app:mesh", "--url", "http://x"), 1, "must begin with redis://"),
        (("tests.cli.app:mesh", "--prefix", "{x}"), 1, "braces"),
        (("tests.cli.app:mesh", "--concurrency", "many"), 2, "--concurrency must be a whole number or auto"),
        (("tests.cli.app:mesh", "--grace", "long"), 2, "--grace must be a duration"),
        (("tests.cli.app:mesh", "--log-level", "loud"), 2, "--log-level"),
        ((), 2, "TARGET"),
    ],
)
def test_what_cannot_be_run_is_one_line(command: Command, words: tuple[str, ...], code: int, why: str) -> None:
    answer = command("run", *words)
    assert (answer.code, answer.out) == (code, "")
    assert why in answer.err
    assert answer.err.startswith("worqr: ")
    assert answer.err.count("\n") == 1


def test_what_cannot_be_run_is_an_object_with_log_json(command: Command) -> None:
    answer = command("run", "tests.cli.app:empty", "--log-json")
    assert answer.code == 1
    (record,) = map(json.loads, answer.err.splitlines())
    assert record["level"] == "error"
    assert record["message"].startswith("run: there is nothing to serve")


# mesh.run()


SCRIPT = """
import worqr

mesh = worqr.Mesh(prefix={prefix!r})


@mesh.task
async def hello(name: str) -> None:
    print("hello,", name, flush=True)


if __name__ == "__main__" or {unguarded}:
    mesh.run(grace=5, only=["*.hello"])
    print("over", flush=True)
"""


async def test_a_script_runs_its_mesh(
    spawn: Callable[..., Child], connected: worqr.Mesh, server: Server, prefix: str, tmp_path: Path
) -> None:
    script = tmp_path / "greeter.py"
    script.write_text(SCRIPT.format(prefix=prefix, unguarded=False))
    peer = spawn(script, env={"WORQR_URL": server.url})
    await started(peer)
    await connected.enqueue_many([connected.call("greeter.hello", name="Ada")])
    assert await peer.line(LONG) == "hello, Ada"
    peer.signal(INT)
    assert await peer.line(LONG) == "over"
    assert await peer.ended(LONG) == 0
    assert "waiting up to 5 s for running tasks" in peer.errors


async def test_a_script_that_runs_when_it_is_imported_is_told_so(
    spawn: Callable[..., Child], prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "eager.py").write_text(SCRIPT.format(prefix=prefix, unguarded=True))
    peer = spawn(f"import os; os.chdir({str(tmp_path)!r})\n{RUN}", "eager:mesh")
    assert await peer.ended(LONG) == 1
    assert "put it under `if __name__ == '__main__':`" in peer.errors


async def test_a_running_loop_is_no_place_for_it(mesh: worqr.Mesh) -> None:
    with pytest.raises(worqr.UsageError, match="inside a running one use `async with mesh.join"):
        mesh.run()
    with pytest.raises(worqr.UsageError, match="needs the main thread"):
        await trio.to_thread.run_sync(mesh.run)


def test_a_mesh_without_functions_is_refused(mesh: worqr.Mesh) -> None:
    with pytest.raises(worqr.UsageError, match="there is nothing to serve: no function is declared on <Mesh"):
        mesh.run()
    assert signal.getsignal(TERM) == signal.SIG_DFL


async def test_async_handlers_run_where_the_mesh_says(run: Run, connected: worqr.Mesh) -> None:
    peer = await run(target="tests.cli.asyncio_app:mesh")
    banner = peer.errors
    assert "tests.cli.asyncio_app.nap      asyncio" in banner
    assert "tests.cli.asyncio_app.plain    thread" in banner
    assert "tests.cli.asyncio_app.on_trio  loop" in banner
    await connected.enqueue_many([connected.call("tests.cli.asyncio_app.nap")])
    assert await peer.line(LONG) == "awake"
    peer.signal(TERM)
    assert await peer.ended(LONG) == 0
