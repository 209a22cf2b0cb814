"""``worqr health``: ask the probe of a worker, without importing the application."""

from __future__ import annotations

import os
import socket
from http.client import HTTPConnection, HTTPException
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import duration_option, parse_duration
from worqr.errors import UsageError
from worqr.escaping import escape
from worqr.http_server import BindAddress

MOST_TEXT: Final = 500
"""Characters of a reply that are printed."""


def health(
    address: Annotated[
        str | None,
        Parameter(
            name="ADDRESS",
            help="The value of --probe: [HOST:]PORT or unix:PATH. Also http://HOST:PORT. Default: $WORQR_PROBE.",
        ),
    ] = None,
    /,
    *,
    check: Annotated[Literal["live", "ready", "startup"], Parameter(help="The probe to ask.")] = "ready",
    timeout: Annotated[str, duration_option("Give up after this time.")] = "2s",
) -> None:
    """Ask a worker that runs with --probe for its health.

    Exit code 1 if it is not well. The application is not imported.
    """
    given = address or os.environ.get("WORQR_PROBE")
    if not given:
        raise InvalidArguments("missing ADDRESS: type that of `worqr run --probe`, or set WORQR_PROBE")
    try:
        bind = BindAddress.parse(given.removeprefix("http://").rstrip("/"), "ADDRESS")
    except UsageError as error:
        raise InvalidArguments(str(error)) from None
    status, text = _ask(bind, f"/{check}", parse_duration(timeout, "--timeout") or 0)
    if status != 200:
        raise CommandFailed(f"{check}: {text or f'the reply was HTTP {status}'}")
    print(f"{check}: {escape(text)}")


class _UnixConnection(HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _ask(bind: BindAddress, path: str, timeout: float) -> tuple[int, str]:
    """Return the status and the text of the reply."""
    if bind.path:
        connection: HTTPConnection = _UnixConnection(bind.path, timeout)
    else:
        here = bind.host in {"", "0.0.0.0", "::"}  # noqa: S104 - where it listens
        connection = HTTPConnection("127.0.0.1" if here else bind.host, bind.port, timeout=timeout)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read(MOST_TEXT).decode("utf-8", "replace").strip()
    except TimeoutError:
        raise CommandFailed(f"no reply from {bind} within {timeout:g} s") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandFailed(f"no reply from {bind}: {reason}; start the worker with `worqr run --probe`") from None
    finally:
        connection.close()
