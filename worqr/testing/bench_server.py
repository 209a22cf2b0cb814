"""The server of all benches of a process: started by the first, ended with the process."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from typing import Final

from worqr.embedded import EmbeddedServer, shared_server

_servers: Final[dict[int, tuple[EmbeddedServer, ExitStack]]] = {}
"""By process id: a forked child starts a server of its own. With each, the function that releases it."""
_lock = threading.Lock()


def bench_server() -> EmbeddedServer:
    """The embedded server of this process, which runs until the process ends; started at the first call, in some 20 ms.

    ``worqr.Mesh("embedded:")`` uses the same.

    Raises:
        UsageError: no server program is installed; the message says what to install.
    """
    with _lock:
        if os.getpid() not in _servers:
            stack = ExitStack()
            _servers[os.getpid()] = stack.enter_context(shared_server()), stack
            atexit.register(stack.close)
        return _servers[os.getpid()][0]


def release_bench_server() -> None:
    """Release the server. It ends now, unless it is in use elsewhere; the next bench starts another."""
    with _lock:
        if os.getpid() in _servers:
            _servers.pop(os.getpid())[1].close()
