"""The embedded server of all benches of a process. The first bench starts it; it ends with the process."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from typing import Final

from worqr.embedded import EmbeddedServer, shared_server

_servers: Final[dict[int, tuple[EmbeddedServer, ExitStack]]] = {}
"""The server and its release, by process id, because a forked child starts a server of its own."""
_lock = threading.Lock()


def bench_server() -> EmbeddedServer:
    """Return the embedded server of this process. The first call starts it, and it runs until the process ends.

    ``worqr.Mesh("embedded:")`` uses the same server.

    Raises:
        UsageError: no server program is installed; the message says what to install.
    """
    with _lock:
        if os.getpid() not in _servers:
            stack = ExitStack()
            _servers[os.getpid()] = stack.enter_context(shared_server(warns=False)), stack
            atexit.register(stack.close)
        return _servers[os.getpid()][0]


def release_bench_server() -> None:
    """Release the server, which ends now unless a mesh uses it. The next bench starts another."""
    with _lock:
        if os.getpid() in _servers:
            _servers.pop(os.getpid())[1].close()
