"""``worqr server``: a Valkey or Redis server in the foreground, for development or for one machine; its backups.

With ``--data`` it has a folder with its data, configuration and lock, and becomes the server program (exec), so no Python process
stays. The program inherits the lock of the folder, and holds it until it ends. A small process tells systemd when the server
replies, because most builds of it cannot. Just enough of the server's protocol is here to save a snapshot.

Not here: the private server of a process (`worqr.embedded`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Annotated, BinaryIO, Final, NoReturn
from urllib.parse import quote

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import flag, parse_size
from worqr.cli.output import print_error
from worqr.embedded import SOCKET_PATH_LIMIT, EmbeddedServer, find_server
from worqr.errors import Unavailable, UsageError
from worqr.escaping import escape

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

NOT_SAVED: Final = "the server could not save a snapshot; its log says why"

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

_ESCAPED: Final = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_CONTROLS: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b"}

OF_REPLICAS: Final = ("replicaof", "masteruser", "masterauth", "primaryuser", "primaryauth", "tls-replication")
"""What `worqr move` has stored in the configuration of a server whose data are on another one now."""


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
        """Print the URL, and become the server, which logs to the standard error. It ends with SIGTERM or SIGINT.

        Raises:
            UsageError: another server uses the folder or the socket, or the path of the socket is too long.
            OSError: the folder cannot be written.
        """
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"the path {str(self.socket)!r} is longer than {SOCKET_PATH_LIMIT} bytes: pass a shorter --socket"
            )
        os.umask(0o077)
        lock = take_lock(self.folder)
        self._check_socket_free()
        os.set_inheritable(lock, True)
        path = self.folder / CONFIGURATION
        _write_whole(path, self.configuration().encode())
        self._announce(program)
        environment = {**os.environ, "LC_ALL": "C"}  # Redis 7.2 does not start with a locale that is not installed
        _tell_systemd_when_ready(environment.pop("NOTIFY_SOCKET", ""), self.socket, self.password, lock)
        os.dup2(2, 1)
        os.execve(program, [os.fspath(program), os.fspath(path)], environment)  # noqa: S606

    def _announce(self, program: Path) -> None:
        print(f"unix://{quote(str(self.socket))}", flush=True)
        folder, limit = escape(str(self.folder)), self.max_memory >> 20
        print_error(f"{program.name} keeps its data in {folder}, at most {limit} MiB; press Ctrl-C to stop it")
        if primary := [line.split()[1:] for line in self.settings_of_replica() if line.startswith("replicaof ")]:
            print_error(
                f"the data have moved to {escape(':'.join(primary[0]))}: this server sends programs there, and accepts no "
                f"writes. To use the folder otherwise, delete {CONFIGURATION} in it"
            )

    def _check_socket_free(self) -> None:
        """Raise UsageError if a server of another folder listens there: the program would take its path away."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(REPLY_WITHIN)
            if probe.connect_ex(os.fspath(self.socket)) == 0:
                raise UsageError(f"another server listens at {self.socket}; stop it first, or choose another --socket")

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
        lines += self.settings_of_replica()
        return "\n".join(["# Written by `worqr server` at each start: change its options instead.", *lines, ""])

    def settings_of_replica(self) -> list[str]:
        """Return the lines of the present configuration file that make the server a replica; empty if it is none."""
        try:
            lines = (self.folder / CONFIGURATION).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if line.partition(" ")[0] in OF_REPLICAS]


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

    The file has all data of one moment. It appears under its name when it is complete, and on the disk. Another backup of the
    folder waits until this one has ended.

    Raises:
        UsageError: the folder has no server, or the file exists, or has the name of the snapshot.
        Unavailable: the server does not run, or cannot save.
        OSError: the file cannot be written.
    """
    if file.exists():
        raise UsageError(f"{file} exists; choose another name, or delete it")
    path, password = _address(folder)
    snapshot = folder / SNAPSHOT
    if file.resolve() == snapshot.resolve():
        raise UsageError(f"the server writes its own snapshot to {file}; choose another name")
    turn = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)  # all backups of a folder have one snapshot
        with Connection(path, password) as connection:
            _save_snapshot(connection)
        try:
            with snapshot.open("rb") as source:
                _write_whole(file, source)
        finally:
            snapshot.unlink(missing_ok=True)  # it takes as much of the disk as the data
    finally:
        os.close(turn)
    return file.stat().st_size


def _save_snapshot(connection: Connection) -> None:
    """Let the server save a snapshot, and wait until it is complete. Raises Unavailable."""
    while (found := connection.persistence())["rdb_bgsave_in_progress"] == "1":  # of a backup that was interrupted
        time.sleep(POLL_EVERY)
    saves = found["rdb_saves"]
    connection.ask("BGSAVE", "SCHEDULE")  # it may begin later, after the server has rewritten its append-only file
    while (found := connection.persistence())["rdb_saves"] == saves or found["rdb_bgsave_in_progress"] == "1":
        time.sleep(POLL_EVERY)
    if found["rdb_last_bgsave_status"] != "ok":
        raise Unavailable(NOT_SAVED)


def _address(folder: Path) -> tuple[Path, str]:
    """Return the socket and the password of the server of a folder."""
    try:
        text = (folder / CONFIGURATION).read_text("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is not the folder of a server: start one with `worqr server --data {folder}`"
        ) from None
    found = {name: value for name, _, value in (line.partition(" ") for line in text.splitlines())}
    return Path(_unquoted(found["unixsocket"])), _unquoted(found.get("requirepass", ""))


def _unquoted(value: str) -> str:
    """Return a value of the configuration file, also with the escapes with which the server writes it (CONFIG REWRITE)."""
    if not value.startswith('"'):
        return value
    return os.fsdecode(_ESCAPED.sub(_unescaped, os.fsencode(value[1:-1])))


def _unescaped(found: re.Match[bytes]) -> bytes:
    sign = found[1]
    return bytes([int(sign[1:], 16)]) if len(sign) > 1 else _CONTROLS.get(sign, sign)


def restore_folder(file: Path, folder: Path, *, replace: bool = False) -> Path | None:
    """Make a folder from a backup. Return where its earlier data are now; None: it had none.

    Raises:
        UsageError: the file is not a backup that the server can load, a server uses the folder, or the folder has data and
            `replace` is False.
        OSError: a file cannot be read or written.
    """
    _check_snapshot(file)
    with file.open("rb") as source:
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
            (folder / CONFIGURATION).unlink(missing_ok=True)  # as a replica, the server would replace the data
            new.rename(data)
            _sync_folder(folder)
            return aside
        finally:
            os.close(lock)


def _check_snapshot(file: Path) -> None:
    """Raise UsageError if the server could not load a file: it is no snapshot, a part of one, or of a newer server."""
    with file.open("rb") as source:
        if not source.read(len(MAGIC[0])).startswith(MAGIC):
            raise UsageError(f"{file} is not a backup: it does not begin as a snapshot of Redis or Valkey does")
    command = ["redis-check-rdb", os.fspath(file)]  # under this name, the program of the server checks a file
    if subprocess.run(command, executable=find_server(), capture_output=True, check=False).returncode:
        raise UsageError(
            f"the server cannot load {file}: the file is cut off or damaged, or of a newer server; copy the backup again, or "
            "take another one"
        )


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


PORT: Final = 6379

"""The port that a mesh without a URL connects to."""

LOCAL: Final = "127.0.0.1"

CHECK_EVERY: Final = 0.5

"""Seconds between two checks that the server is alive."""


@Parameter(name="*", group="Production")
@dataclass(frozen=True, slots=True)
class ProductionOptions:
    """The options of ``worqr server --data``."""

    socket: Annotated[Path | None, Parameter(help="Path of the unix socket. Default: server.sock in the folder.")] = (
        None
    )
    socket_mode: Annotated[str, Parameter(metavar="MODE", help="Rights of the socket.")] = "770"
    addresses: Annotated[
        str, Parameter(name="--bind", metavar="ADDRESSES", help="Addresses of --port, comma-separated.")
    ] = LOCAL
    password_file: Annotated[
        Path | None,
        Parameter(help="File with the password, which --port needs. Default: $WORQR_SERVER_PASSWORD."),
    ] = None
    max_memory: Annotated[
        str | None,
        Parameter(metavar="SIZE", help="Most memory for data: 512M, 4G. Default: half of the machine's memory."),
    ] = None


NO_PRODUCTION: Final = ProductionOptions()


def _become(folder: Path, port: int, options: ProductionOptions) -> NoReturn:
    """Replace this process by the server of a folder."""
    password = _password(options.password_file)
    if port and not password:
        raise InvalidArguments(
            "--port needs a password: pass --password-file FILE, or set WORQR_SERVER_PASSWORD, for example to the output of "
            "`openssl rand -hex 32`"
        )
    if not re.fullmatch("[0-7]{3}", options.socket_mode):
        raise InvalidArguments(f"--socket-mode must be three octal digits such as 770, got {options.socket_mode!r}")
    try:
        addresses = " ".join(str(ip_address(each.strip())) for each in options.addresses.split(","))
    except ValueError as error:
        raise InvalidArguments(f"--bind must be IP addresses such as 127.0.0.1,10.0.0.5: {error}") from None
    _check_free(port, addresses)
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        folder = folder.resolve()
        path = (options.socket or folder / "server.sock").absolute()
        limit = parse_size(options.max_memory, "--max-memory") or half_of_the_memory()
        found = DataServer(folder, path, options.socket_mode, port, addresses, password, limit)
        found.become(find_server())
    except OSError as error:
        raise CommandFailed(f"cannot use the data folder: {error}; choose another with --data") from None


def _password(file: Path | None) -> str:
    try:
        text = (os.environ.pop("WORQR_SERVER_PASSWORD", "") if file is None else file.read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"cannot read the password: {error}") from None
    if (file is not None and not text) or len(text.splitlines()) > 1:
        raise CommandFailed(f"{file or 'WORQR_SERVER_PASSWORD'} must have the password, and nothing else, on one line")
    return text


DataFolder = Annotated[Path, Parameter(help="Folder of `worqr server --data`.")]


def backup(file: Annotated[Path, Parameter(help="New file.")], /, *, data: DataFolder) -> None:
    """Write a snapshot of the running server of a folder to a file.

    The file has all data of one moment. Handlers and producers go on.
    """
    try:
        size = back_up(data, file)
    except OSError as error:
        raise CommandFailed(f"cannot write the backup: {error}") from None
    print(f"{size} bytes written to {escape(str(file))}")


def restore(
    file: Annotated[Path, Parameter(help="File that `worqr backup` has written.")],
    /,
    *,
    data: DataFolder,
    replace: Annotated[bool, flag("Move the data that the folder has aside.")] = False,
) -> None:
    """Make the folder of a server from a backup, before you start the server.

    Tasks that have ended since the backup run again.
    """
    try:
        aside = restore_folder(file, data, replace=replace)
    except OSError as error:
        raise CommandFailed(f"cannot restore the backup: {error}") from None
    if aside is not None:
        print(f"the earlier data are in {escape(str(aside))}")
    print(f"restored; start it with `worqr server --data {escape(str(data))}`")


def server(
    *,
    port: Annotated[
        int | None,
        Parameter(metavar="N", help="TCP port on 127.0.0.1. 0: only a unix socket. Default: 6379; with --data 0."),
    ] = None,
    dir: Annotated[
        Path | None, Parameter(help="Keep the data in this folder. Default: delete them at the end.")
    ] = None,
    data: Annotated[Path | None, Parameter(help="Keep the data in this folder, for production.")] = None,
    production: ProductionOptions = NO_PRODUCTION,
) -> None:
    """Run a Valkey or Redis server, until Ctrl-C: for development, or with --data for a site on one machine.

    Prints its URL. For development, the server accepts connections from this machine only, without a password. With --data it has
    a unix socket only, unless you pass --port and a password.
    """
    if data is not None:
        if dir is not None:
            raise InvalidArguments("--dir is for development, --data for production; leave out one of them")
        _become(data, 0 if port is None else port, production)
    if production != NO_PRODUCTION:
        raise InvalidArguments("--socket, --socket-mode, --bind, --password-file and --max-memory need --data")
    _run_for_development(PORT if port is None else port, dir)


def _run_for_development(port: int, dir: Path | None) -> None:
    """Run a server that ends with this process."""
    _check_free(port, LOCAL)
    if dir is not None:
        try:
            dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandFailed(f"cannot create the data folder: {error}; choose another with --dir") from None
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    with EmbeddedServer(port=port, appendonly=dir is not None, dir=dir) as running:
        for number in (signal.SIGINT, signal.SIGTERM):  # not earlier: it may load its data for minutes
            signal.signal(number, request_stop)
        print(f"redis://127.0.0.1:{port}/0" if port else running.url, flush=True)
        kept = f"data are stored in {escape(str(dir))}" if dir is not None else "data are deleted when it stops"
        print(
            f"worqr: {find_server().name} is running, also at {running.url}; {kept}; press Ctrl-C to stop it",
            file=sys.stderr,
            flush=True,
        )
        while not stop.wait(CHECK_EVERY):
            if not _is_alive(running.pid):
                raise CommandFailed("the server stopped unexpectedly; the end of its log:", running.log[-1000:])
    print_error("the server has stopped")


def _check_free(port: int, addresses: str) -> None:
    """Raise CommandFailed if the port cannot be used at an address: the message of the server itself is long."""
    for address in addresses.split() if port else ():
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if probe.family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except (OSError, OverflowError) as error:
            raise CommandFailed(
                f"port {port} {_why_not(error)}; choose another with --port, or use --port 0 for a unix socket only"
            ) from None


def _why_not(error: OSError | OverflowError) -> str:
    if isinstance(error, OverflowError):
        return "is not a valid port"
    return "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
