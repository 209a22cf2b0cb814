"""``worqr server``: a private Valkey or Redis server in the foreground, for development."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed
from worqr.cli.output import print_error
from worqr.embedded import EmbeddedServer, find_server
from worqr.escaping import escape

PORT: Final = 6379
"""The port that a mesh without a URL connects to."""
CHECK_EVERY: Final = 0.5
"""Seconds between two checks that the server is alive."""


def server(
    *,
    port: Annotated[int, Parameter(metavar="N", help="TCP port on 127.0.0.1. 0: only a unix socket.")] = PORT,
    dir: Annotated[
        Path | None, Parameter(help="Store the data in this folder. Default: delete them when the server stops.")
    ] = None,
) -> None:
    """Run a Valkey or Redis server for development, until Ctrl-C.

    Prints its URL. The server accepts connections from this machine only, without a password.
    """
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
