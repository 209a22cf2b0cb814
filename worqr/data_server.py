"""The server of one machine: a folder with its data, configuration and lock, its start, and its backups.

``worqr server --data`` becomes the server program (exec), so no Python process stays. The program inherits the lock of the
folder, and holds it until it ends. A small process tells systemd when the server replies, because most builds of it cannot.

It uses just enough of the server's protocol to save a snapshot. Not here: the private server of a process (`worqr.embedded`).
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from worqr.embedded import SOCKET_PATH_LIMIT
from worqr.errors import Unavailable, UsageError

CONFIGURATION: Final = "server.conf"
LOCK: Final = "server.lock"
APPEND_ONLY: Final = "appendonlydir"
SNAPSHOT: Final = "dump.rdb"
BASE: Final = "appendonly.aof.1.base.rdb"
MANIFEST: Final = "appendonly.aof.manifest"
MAGIC: Final = (b"REDIS0", b"VALKEY")
"""How a snapshot begins."""
LOCKED_WITHIN: Final = 5.0
"""Seconds to wait for the lock: a server that was killed may have a process that still writes."""
REPLY_WITHIN: Final = 30.0
"""Seconds within which a server must reply to one request."""
POLL_EVERY: Final = 0.1
SETTINGS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "yes",
    "aof-use-rdb-preamble": "yes",
    "appenddirname": APPEND_ONLY,
    "appendfilename": "appendonly.aof",
    "dbfilename": SNAPSHOT,
    "save": "",
    "maxmemory-policy": "noeviction",
    "timeout": "0",
    "protected-mode": "yes",
    "daemonize": "no",
    "supervised": "no",
    "logfile": "",
}
"""The settings that do not depend on options."""


@dataclass(frozen=True, slots=True)
class DataServer:
    """The server of a folder.

    Attributes:
        folder: where its data are.
        socket: the path of its unix socket.
        socket_mode: the rights of the socket, in octal digits.
        port: a TCP port; 0: none.
        addresses: those of the port, with spaces.
        password: what clients must send, on the socket too; empty: none.
        max_memory: the most memory for data, in bytes.
    """

    folder: Path
    socket: Path
    socket_mode: str
    port: int
    addresses: str
    password: str
    max_memory: int

    def become(self, program: Path) -> NoReturn:
        """Replace this process by the server, which logs to the standard error. It ends with SIGTERM or SIGINT.

        Raises:
            UsageError: another server uses the folder, or the path of the socket is too long.
            OSError: the folder cannot be written.
        """
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"the path {str(self.socket)!r} is longer than {SOCKET_PATH_LIMIT} bytes: pass a shorter --socket"
            )
        os.umask(0o077)
        lock = take_lock(self.folder)
        os.set_inheritable(lock, True)
        path = self.folder / CONFIGURATION
        _write_whole(path, self.configuration().encode())
        environment = {**os.environ, "LC_ALL": "C"}  # Redis 7.2 does not start with a locale that is not installed
        _tell_systemd_when_ready(environment.pop("NOTIFY_SOCKET", ""), self.socket, self.password, lock)
        os.dup2(2, 1)
        os.execve(program, [os.fspath(program), os.fspath(path)], environment)  # noqa: S606

    def configuration(self) -> str:
        """Return the text of its configuration file."""
        settings = {
            **SETTINGS,
            "dir": os.fspath(self.folder),
            "unixsocket": os.fspath(self.socket),
            "unixsocketperm": self.socket_mode,
            "port": str(self.port),
            "maxmemory": str(self.max_memory),
        }
        lines = [f"{name} {_quoted(value)}" for name, value in settings.items()]
        if self.port:
            lines.append(f"bind {self.addresses}")
        if self.password:
            lines.append(f"requirepass {_quoted(self.password)}")
        return "\n".join(["# Written by `worqr server` at each start: change its options instead.", *lines, ""])


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def half_of_the_memory(root: Path = Path("/")) -> int:
    """Return half of the memory that this process may use: that of the machine, or of its control group if that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found = min(found, int((root / name).read_text()))
    return found // 2


def take_lock(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder.

    Raises:
        UsageError: a server uses the folder.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCKED_WITHIN
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise UsageError(
                    f"a server uses {folder}; stop it first, or choose another folder with --data"
                ) from None
            time.sleep(POLL_EVERY)
        else:
            return lock


def _tell_systemd_when_ready(address: str, path: Path, password: str, lock: int) -> None:
    """Start a process that sends ``READY=1`` when the server replies, if systemd has asked, and then ends."""
    server = os.getpid()
    if not address:
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork():
            return
        os.close(lock)
        while os.path.exists(f"/proc/{server}"):
            time.sleep(POLL_EVERY)
            with suppress(OSError, Unavailable), Connection(path, password) as connection:
                connection.ask("PING")  # refused while the server loads its data
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"READY=1", f"\0{address[1:]}" if address.startswith("@") else address)
                return
    finally:
        os._exit(0)


# Backups


class Connection:
    """A connection to the server, for a few requests whose replies are one line or one text.

    Raises:
        Unavailable: the server cannot be reached, or refuses a request.
    """

    def __init__(self, path: Path, password: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(REPLY_WITHIN)
        try:
            self._socket.connect(os.fspath(path))
            self._replies: BinaryIO = self._socket.makefile("rb")
            if password:
                self.ask("AUTH", password)
        except (OSError, Unavailable) as error:
            self._socket.close()
            raise Unavailable(f"the server at {path} cannot be reached: {error}") from None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self._replies.close()
        self._socket.close()

    def ask(self, *words: str) -> str:
        """Send a request, and return the reply."""
        parts = [word.encode() for word in words]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
        line = self._replies.readline().decode("utf-8", "replace").rstrip("\r\n")
        if line.startswith("$"):
            return self._replies.read(int(line[1:]) + 2).decode("utf-8", "replace")
        if not line or line.startswith("-"):
            raise Unavailable(line[1:] or "the connection was closed")
        return line[1:]

    def persistence(self) -> dict[str, str]:
        """Return the section ``persistence`` of INFO."""
        lines = self.ask("INFO", "persistence").splitlines()
        return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def back_up(folder: Path, file: Path) -> int:
    """Write a snapshot of the running server of a folder to a new file, and return its size in bytes.

    The file has all data of one moment. It appears under its name when it is complete, and on the disk.

    Raises:
        UsageError: the folder has no server, or the file exists.
        Unavailable: the server does not run, or cannot save.
        OSError: the file cannot be written.
    """
    if file.exists():
        raise UsageError(f"{file} exists; choose another name, or delete it")
    path, password = _address(folder)
    with Connection(path, password) as connection:
        saves = int(connection.persistence()["rdb_saves"])
        connection.ask("BGSAVE", "SCHEDULE")
        while int((found := connection.persistence())["rdb_saves"]) == saves or found["rdb_bgsave_in_progress"] == "1":
            if found["rdb_bgsave_in_progress"] == "0" and found["rdb_last_bgsave_status"] != "ok":
                raise Unavailable("the server could not save a snapshot; its log says why")
            time.sleep(POLL_EVERY)
    snapshot = folder / SNAPSHOT
    with snapshot.open("rb") as source:
        _write_whole(file, source)
    snapshot.unlink()
    return file.stat().st_size


def _address(folder: Path) -> tuple[Path, str]:
    """Return the socket and the password of the server of a folder."""
    try:
        text = (folder / CONFIGURATION).read_text("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is not the folder of a server: start one with `worqr server --data {folder}`"
        ) from None
    found = {words[0]: words[1] for line in text.splitlines() if len(words := shlex.split(line, comments=True)) > 1}
    return Path(found["unixsocket"]), found.get("requirepass", "")


def restore(file: Path, folder: Path, *, replace: bool = False) -> Path | None:
    """Make a folder from a backup. Return where its earlier data are now; None: it had none.

    Raises:
        UsageError: the file is not a backup, a server uses the folder, or the folder has data and `replace` is False.
        OSError: a file cannot be read or written.
    """
    with file.open("rb") as source:
        if not source.read(len(MAGIC[0])).startswith(MAGIC):
            raise UsageError(f"{file} is not a backup: it does not begin as a snapshot of Redis or Valkey does")
        source.seek(0)
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = take_lock(folder)
        try:
            data, new = folder / APPEND_ONLY, folder / f"{APPEND_ONLY}.new"
            if data.exists() and any(data.iterdir()) and not replace:
                raise UsageError(f"{folder} has data; pass --replace to move them aside, or choose another folder")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(mode=0o700)
            _write_whole(new / BASE, source)
            _write_whole(new / MANIFEST, f"file {BASE} seq 1 type b\n".encode())
            aside = None
            if data.exists():
                aside = folder / f"{APPEND_ONLY}.before-{time.strftime('%Y%m%dT%H%M%S')}"
                data.rename(aside)
            new.rename(data)
            _sync_folder(folder)
            return aside
        finally:
            os.close(lock)


def _write_whole(path: Path, content: bytes | BinaryIO) -> None:
    """Write a file that appears under its name when it is complete and on the disk. Only its owner may read it."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
            if isinstance(content, bytes):
                target.write(content)
            else:
                shutil.copyfileobj(content, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
