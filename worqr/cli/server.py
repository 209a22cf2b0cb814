"""``worqr server``: a Valkey or Redis server in the foreground, for development or for one machine; its backups."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn
from urllib.parse import quote

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import flag, parse_size
from worqr.cli.output import print_error
from worqr.data_server import DataServer, back_up, half_of_the_memory
from worqr.data_server import restore as restore_folder
from worqr.embedded import EmbeddedServer, find_server
from worqr.escaping import escape

PORT: Final = 6379
"""The port that a mesh without a URL connects to."""
CHECK_EVERY: Final = 0.5
"""Seconds between two checks that the server is alive."""


@Parameter(name="*", group="Production")
@dataclass(frozen=True, slots=True)
class ProductionOptions:
    """The options of ``worqr server --data``."""

    socket: Annotated[Path | None, Parameter(help="Path of the unix socket. Default: server.sock in the folder.")] = (
        None
    )
    socket_mode: Annotated[
        str, Parameter(metavar="MODE", help="Rights of the socket. 770: the user and the group of the server.")
    ] = "770"
    addresses: Annotated[
        str, Parameter(name="--bind", metavar="ADDRESSES", help="Addresses of --port, comma-separated.")
    ] = "127.0.0.1"
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
    _check_free(port)
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        folder = folder.resolve()
        path = (options.socket or folder / "server.sock").absolute()
        limit = parse_size(options.max_memory, "--max-memory") or half_of_the_memory()
        found = DataServer(folder, path, options.socket_mode, port, addresses, password, limit)
        program = find_server()
        print(f"unix://{quote(str(path))}", flush=True)
        print_error(
            f"{program.name} keeps its data in {escape(str(folder))}, at most {limit >> 20} MiB; press Ctrl-C to stop it"
        )
        found.become(program)
    except OSError as error:
        raise CommandFailed(f"cannot use the data folder: {error}; choose another with --data") from None


def _password(file: Path | None) -> str:
    if file is None:
        return os.environ.pop("WORQR_SERVER_PASSWORD", "")
    try:
        text = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"cannot read the password: {error}") from None
    if not text or "\n" in text:
        raise CommandFailed(f"{file} must have the password, and nothing else, on one line")
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
        Path | None, Parameter(help="Store the data in this folder. Default: delete them when the server stops.")
    ] = None,
    data: Annotated[
        Path | None, Parameter(help="For production: keep the data in this folder, as `Run on one machine` explains.")
    ] = None,
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
    _check_free(port)
    if dir is not None:
        try:
            dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandFailed(f"cannot create the data folder: {error}; choose another with --dir") from None
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    with EmbeddedServer(port=port, appendonly=dir is not None, dir=dir) as running:
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


def _check_free(port: int) -> None:
    """Raise CommandFailed if the port is in use: the message of the server itself is long."""
    if not port:
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = "is already in use" if isinstance(error, OSError) else "is not a valid port"
        raise CommandFailed(
            f"port {port} {why}; choose another with --port, or use --port 0 for a unix socket only"
        ) from None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
