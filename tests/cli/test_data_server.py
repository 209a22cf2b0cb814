"""``worqr server --data``, ``worqr backup`` and ``worqr restore``: real servers, one folder each."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import trio

import worqr
from benchmarks.power_cuts import PowerCuts
from tests.cli.conftest import Command
from tests.cli.test_server import LONG, MAIN, enqueued
from tests.cli.test_workers import children_of
from tests.support.children import Child
from tests.support.servers import Server, free_port
from worqr.cli import server as data_server
from worqr.cli.server import half_of_the_memory

pytestmark = [
    pytest.mark.timeout(200),  # many processes, one after the other
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

Start = Callable[..., Child]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a space and a quote in its name."""
    return tmp_path / 'a "data'


@pytest.fixture
def start(spawn: Callable[..., Child], folder: Path) -> Start:
    """`start("--port", "0")`: ``worqr server --data``."""

    def run(*options: str, **env: str) -> Child:
        return spawn(MAIN, "server", "--data", str(folder), *options, env={"WORQR_SERVER_PASSWORD": "", **env})

    return run


def at(folder: Path, password: str = "") -> redis.Redis:
    return redis.Redis(unix_socket_path=str(folder / "server.sock"), password=password or None)


def below(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def serving(server: Child) -> str:
    """Its URL, once it replies."""
    url = await server.line(LONG)
    with trio.fail_after(LONG):
        while "Ready to accept connections" not in server.errors and "ready to accept" not in server.errors:
            assert server.process.poll() is None, server.errors
            await trio.sleep(0.01)
    return url


async def stopped(server: Child, number: signal.Signals = signal.SIGTERM) -> None:
    server.signal(number)
    assert await server.ended(LONG) == 0


async def test_a_server_whose_data_have_moved_stays_a_replica_when_it_is_started_again(
    start: Start, folder: Path, command: Command, own_server: Server
) -> None:
    """Otherwise it would accept tasks with its old data."""
    port = str(free_port())
    options = ("--port", port)
    server = start(*options, WORQR_SERVER_PASSWORD="secret")
    await serving(server)
    url = f"unix://:secret@{folder}/server.sock".replace(" ", "%20").replace('"', "%22")
    own_server.look.config_set("requirepass", "secret")
    new = f"redis://:secret@127.0.0.1:{own_server.port}"
    done = await trio.to_thread.run_sync(lambda: command("move", new, "--url", url, "--from", f"127.0.0.1:{port}"))
    assert (done.code, done.err) == (0, ""), done
    assert "warning" not in done.out, "the server has a configuration file"
    for _ in range(2):
        await stopped(server)
        server = start(*options, WORQR_SERVER_PASSWORD="secret")
        await serving(server)
        with at(folder, "secret") as client:
            assert client.info("replication")["role"] == "slave"
            assert client.config_get("masterauth") == {"masterauth": "secret"}
    assert f"the data have moved to 127.0.0.1:{own_server.port}" in server.errors
    await stopped(server)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_keeps_tasks_and_has_a_socket_only(start: Start, folder: Path, number: signal.Signals) -> None:
    for n in (1, 2):
        server = start()
        url = await serving(server)
        assert await enqueued(url, b"a") == n
        with at(folder) as client:
            found = client.config_get("*")
            assert (
                client.info("server")["process_id"] == server.pid
            )  # no other process stands between it and the supervisor
        expected = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: found[name] for name in expected} == expected
        assert (found["port"], found["maxmemory"]) == ("0", str(half_of_the_memory()))
        await stopped(server, number)


async def test_a_server_that_is_killed_has_what_it_has_written_and_starts_again_at_once(
    start: Start, folder: Path
) -> None:
    """While the disk is busy, a write waits for up to two seconds."""
    server = start()
    assert await enqueued(await serving(server), b"a", b"b") == 2
    with at(folder) as client, trio.fail_after(LONG):
        while client.info("persistence")["aof_buffer_length"]:
            await trio.sleep(0.01)
    server.kill()
    server = start()
    assert await enqueued(await serving(server), b"c") == 3


async def test_only_its_user_and_group_reach_the_socket_and_only_its_user_the_files(start: Start, folder: Path) -> None:
    server = start("--socket-mode", "760")
    await serving(server)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert (mode(folder) & 0o007, mode(folder / "server.sock")) == (0, 0o760)
    files = [path for path in below(folder) if path.is_file()]
    assert len(files) >= 4
    assert {mode(path) & 0o077 for path in files} == {0}


async def test_a_port_needs_a_password_and_the_password_is_not_in_the_list_of_processes(
    start: Start, folder: Path, tmp_path: Path, command: Command
) -> None:
    refused = command("server", "--data", str(folder), "--port", "6390")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(
        "worqr: --port needs a password: pass --password-file FILE, or set WORQR_SERVER_PASSWORD"
    )
    port = free_port()
    (tmp_path / "password").write_text('s3"cret\\\n')
    server = start("--port", str(port), "--password-file", str(tmp_path / "password"))
    await serving(server)
    with redis.Redis(port=port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with redis.Redis(port=port, password='s3"cret\\') as client:
        assert client.ping()
    for name in ("cmdline", "environ"):
        assert b"s3" not in of_proc(server.pid, name)


async def test_a_password_of_the_environment_is_one_line(start: Start, folder: Path) -> None:
    server = start(WORQR_SERVER_PASSWORD="secret\nsave 1 1")
    assert await server.ended(LONG) == 1
    assert "WORQR_SERVER_PASSWORD must have the password, and nothing else, on one line" in server.errors
    await serving(start(WORQR_SERVER_PASSWORD="secret\n"))  # as a file of a secret ends
    assert at(folder, "secret").ping()


def of_proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_a_second_server_of_a_folder_is_refused(
    start: Start, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "LOCKED_WITHIN", 0.0)
    await serving(start())
    found = await trio.to_thread.run_sync(command, "server", "--data", str(folder))
    assert (found.code, found.out) == (1, "")
    assert re.fullmatch(r"worqr: a server uses .*; stop it first, or choose another folder with --data\n", found.err)


async def test_the_socket_of_another_server_is_not_taken_over(
    start: Start, tmp_path: Path, spawn: Callable[..., Child]
) -> None:
    path, other = tmp_path / "one.sock", tmp_path / "other"
    url = await serving(start("--socket", str(path)))
    assert await enqueued(url, b"a") == 1
    second = spawn(MAIN, "server", "--data", str(other), "--socket", str(path))
    assert await second.ended(LONG) == 1
    assert second.errors.endswith(f"another server listens at {path}; stop it first, or choose another --socket\n")
    assert await enqueued(url, b"b") == 2


async def test_systemd_hears_when_the_server_replies(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LONG)
        server = start(NOTIFY_SOCKET=str(tmp_path / "notify"), WORQR_SERVER_PASSWORD="secret")
        assert systemd.recv(100) == b"READY=1"
        assert b"NOTIFY_SOCKET" not in of_proc(server.pid, "environ")


async def test_systemd_hears_nothing_of_a_server_that_cannot_load_its_data(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("file none.rdb seq 1 type b\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        server = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert await server.ended(LONG) == 1
        await server.line(LONG)  # its URL
        with pytest.raises(AssertionError, match="the child ended"):
            await server.line(LONG)  # the process that waits for it has ended, too
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)


async def test_memory_is_bounded_and_a_full_server_refuses_tasks(start: Start) -> None:
    server = start("--max-memory", "8M")
    mesh = worqr.Mesh(await serving(server), patience=30)
    async with mesh.connect():
        with pytest.raises(worqr.QueueFull):
            for _ in range(100):
                await mesh.queue("mails").enqueue(os.urandom(1 << 18))


# Backups


async def test_a_backup_has_all_tasks_of_one_moment_and_is_restored_into_another_folder(
    start: Start, folder: Path, tmp_path: Path, command: Command, spawn: Callable[..., Child]
) -> None:
    server = start(WORQR_SERVER_PASSWORD="secret")
    await serving(server)
    url = f"unix://:secret@{folder}/server.sock"
    assert await enqueued(url, b"a", b"b") == 2
    file, other = tmp_path / "backup.rdb", tmp_path / "other"
    found = await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))
    assert (found.code, found.out) == (0, f"{file.stat().st_size} bytes written to {file}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await enqueued(url, b"later") == 3
    again = await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))
    assert (again.code, again.err) == (1, f"worqr: {file} exists; choose another name, or delete it\n")
    found = command("restore", str(file), "--data", str(other))
    assert (found.code, found.out) == (0, f"restored; start it with `worqr server --data {other}`\n")
    restored = spawn(MAIN, "server", "--data", str(other))
    assert await enqueued(await serving(restored), b"c") == 3
    await stopped(restored)  # one that is killed may lose what waits for a slow disk
    restored = spawn(MAIN, "server", "--data", str(other))
    assert await enqueued(await serving(restored), b"d") == 4


@pytest.mark.parametrize("password", ['pä\\xdf\t"', "secret"])
async def test_a_backup_is_possible_after_the_server_has_written_its_configuration(
    spawn: Callable[..., Child], tmp_path: Path, command: Command, password: str
) -> None:
    """As it does at the end of ``worqr move``: with escapes, such as ``\\xc3``."""
    folder = tmp_path / "données"
    await serving(spawn(MAIN, "server", "--data", str(folder), env={"WORQR_SERVER_PASSWORD": password}))
    for n in range(2):
        found = await trio.to_thread.run_sync(command, "backup", str(tmp_path / f"{n}.rdb"), "--data", str(folder))
        assert found.code == 0, found.err
        await trio.to_thread.run_sync(at(folder, password).config_rewrite)


async def test_backups_at_the_same_time_wait_for_each_other(start: Start, folder: Path, tmp_path: Path) -> None:
    assert await enqueued(await serving(start()), b"a") == 1
    files = [tmp_path / f"{n}.rdb" for n in range(4)]
    async with trio.open_nursery() as nursery:
        for file in files:
            nursery.start_soon(trio.to_thread.run_sync, data_server.back_up, folder, file)
    assert all(file.stat().st_size for file in files)


async def test_data_are_moved_aside_only_if_that_is_asked_for_and_not_under_a_server(
    start: Start, folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "LOCKED_WITHIN", 0.0)
    server = start()
    url = await serving(server)
    assert await enqueued(url, b"a") == 1
    file = tmp_path / "backup.rdb"
    assert (await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))).code == 0
    found = command("restore", str(file), "--data", str(folder), "--replace")
    assert (found.code, "a server uses" in found.err) == (1, True)
    assert await enqueued(url, b"b") == 2
    await stopped(server)
    found = command("restore", str(file), "--data", str(folder))
    assert found.code == 1
    assert "has data; pass --replace to move them aside, or choose another folder" in found.err
    found = command("restore", str(file), "--data", str(folder), "--replace")
    assert found.code == 0
    assert [path for path in below(folder) if path.name.startswith("appendonlydir.before-")]
    assert await enqueued(await serving(start()), b"c") == 2


async def test_a_part_of_a_backup_does_not_take_the_place_of_the_data(
    start: Start, folder: Path, tmp_path: Path, command: Command
) -> None:
    server = start()
    assert await enqueued(await serving(server), b"a") == 1
    file = tmp_path / "backup.rdb"
    assert (await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))).code == 0
    await stopped(server)
    whole = file.read_bytes()
    for part in (whole[:9], whole[: len(whole) // 2], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(part)
        found = command("restore", str(file), "--data", str(folder), "--replace")
        assert (found.code, f"the server cannot load {file}: " in found.err) == (1, True)
    assert await enqueued(await serving(start()), b"b") == 2


async def test_a_restored_folder_is_no_replica(
    start: Start, folder: Path, tmp_path: Path, command: Command, own_server: Server
) -> None:
    """The server to which the data had moved would replace the restored ones."""
    server = start()
    assert await enqueued(await serving(server), b"a") == 1
    file = tmp_path / "backup.rdb"
    assert (await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))).code == 0
    with at(folder) as client:
        client.replicaof("127.0.0.1", own_server.port)
        client.config_rewrite()
    await stopped(server)
    assert command("restore", str(file), "--data", str(folder), "--replace").code == 0
    server = start()
    assert await enqueued(await serving(server), b"b") == 2
    assert "the data have moved" not in server.errors


def test_what_is_no_backup_and_no_folder_of_a_server_is_one_line(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no snapshot")
    found = command("restore", str(file), "--data", str(tmp_path / "data"))
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert "is not a backup: it does not begin as a snapshot of Redis or Valkey does" in found.err
    assert not (tmp_path / "data").exists()
    found = command("restore", str(tmp_path / "none"), "--data", str(tmp_path / "data"))
    assert found.err.startswith("worqr: cannot restore the backup: ")
    found = command("backup", str(tmp_path / "b"), "--data", str(tmp_path))
    assert "is not the folder of a server: start one with `worqr server --data" in found.err


async def test_a_port_has_to_be_free_at_the_addresses_of_the_server_only(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        server = start("--port", port, "--bind", "127.0.0.2", WORQR_SERVER_PASSWORD="secret")
        await serving(server)
        other = start("--port", port, "--bind", "127.0.0.3,127.0.0.2", WORQR_SERVER_PASSWORD="secret")
        assert await other.ended(LONG) == 1
        assert other.errors.startswith(f"worqr: port {port} is already in use; choose another with --port")
        await stopped(server)


async def test_a_backup_that_could_not_be_saved_is_not_one_from_before(
    start: Start, folder: Path, tmp_path: Path, command: Command
) -> None:
    server = start()
    await serving(server)
    file = tmp_path / "b"
    with at(folder) as client:
        client.set("key", "value")
        client.bgsave()  # a backup that was interrupted leaves the same
        with trio.fail_after(LONG):
            while client.info("persistence")["rdb_bgsave_in_progress"]:
                await trio.sleep(0.01)
        assert (folder / "dump.rdb").exists()
        client.config_set("rdb-key-save-delay", 10_000_000)

    async def back_up() -> None:
        found = await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))
        assert (found.code, found.err) == (1, "worqr: the server could not save a snapshot; its log says why\n")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(back_up)
        with trio.fail_after(LONG):
            while not (saving := children_of(server.pid)):
                await trio.sleep(0.01)
        os.kill(saving[0], signal.SIGKILL)
    assert not file.exists()


async def test_a_backup_waits_for_the_save_of_one_that_was_interrupted(
    start: Start, folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    await serving(server)
    with at(folder) as client:
        client.set("key", "value")
        client.config_set("rdb-key-save-delay", 100_000_000)
        client.bgsave()
        client.config_set("rdb-key-save-delay", 0)
    with trio.fail_after(LONG):
        while not (saving := children_of(server.pid)):
            await trio.sleep(0.01)

    def sleep(seconds: float) -> None:
        while saving:
            os.kill(saving.pop(), signal.SIGKILL)
        time.sleep(seconds)

    monkeypatch.setattr(data_server, "time", SimpleNamespace(sleep=sleep))
    found = await trio.to_thread.run_sync(command, "backup", str(tmp_path / "b"), "--data", str(folder))
    assert (found.code, found.err, saving) == (0, "", [])


async def test_a_backup_that_cannot_be_written_leaves_nothing_beside_the_data(
    start: Start, folder: Path, tmp_path: Path, command: Command
) -> None:
    await serving(start())
    before = {*below(folder)}
    found = await trio.to_thread.run_sync(command, "backup", str(tmp_path / "none" / "b"), "--data", str(folder))
    assert found.err.startswith("worqr: cannot write the backup: ")
    assert {*below(folder)} == before
    file = folder / "dump.rdb"
    found = await trio.to_thread.run_sync(command, "backup", str(file), "--data", str(folder))
    assert (found.code, found.err) == (1, f"worqr: the server writes its own snapshot to {file}; choose another name\n")
    assert {*below(folder)} == before


async def test_a_backup_of_a_server_that_does_not_run_is_one_line(
    start: Start, folder: Path, tmp_path: Path, command: Command
) -> None:
    server = start()
    await serving(server)
    await stopped(server)
    found = command("backup", str(tmp_path / "b"), "--data", str(folder))
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert "server.sock cannot be reached: " in found.err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--max-memory", "2G"), "--socket, --socket-mode, --bind, --password-file and --max-memory need --data"),
        (("--data", "d", "--dir", "e"), "--dir is for development, --data for production; leave out one of them"),
        (("--data", "d", "--socket-mode", "9"), "--socket-mode must be three octal digits such as 770, got '9'"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("server", *options)
    assert (found.code, found.err) == (2, f"worqr: {text}\n")
    assert list(tmp_path.iterdir()) == []


def test_the_memory_is_that_of_the_control_group_if_that_is_less(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    machine = half_of_the_memory(tmp_path)
    (group / "memory.max").write_text("max\n")
    assert half_of_the_memory(tmp_path) == machine
    (group / "memory.max").write_text("1000000\n")
    assert half_of_the_memory(tmp_path) == 500_000


# Power


@pytest.mark.timeout(300)
async def test_a_power_cut_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    """`python -m benchmarks.power_cuts 1000` does the same more often."""
    report = await PowerCuts(tmp_path, seed=7).run(12)
    assert (report.cuts, report.lost, report.refused) == (12, 0, [])
    assert report.checked
    assert report.cut_off
