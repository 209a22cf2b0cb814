"""Requests over HTTP, also to a unix socket."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from typing import NamedTuple

from tests.support.patience import PATIENCE


class Reply(NamedTuple):
    """A reply to `get`."""

    status: int
    text: str
    type: str


class _Connection(HTTPConnection):
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._unix = port if host == "unix" else ""
        super().__init__("localhost" if self._unix else host.strip("[]") or "127.0.0.1", 80, timeout=PATIENCE)
        if not self._unix:
            self.port = int(port)

    def connect(self) -> None:
        if not self._unix:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._unix)


def get(address: str, path: str, *, method: str = "GET", accept: str = "") -> Reply:
    """The reply of a server at ``HOST:PORT``, ``:PORT`` or ``unix:PATH``."""
    connection = _Connection(address)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        reply = connection.getresponse()
        return Reply(reply.status, reply.read().decode(), reply.getheader("Content-Type", ""))
    finally:
        connection.close()
