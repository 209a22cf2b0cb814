"""The server of all benches of a process: started by the first, ended with the process."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from typing import Final

from worqr.embedded import EmbeddedServer, shared_server

_servers: Final[dict[int, EmbeddedServer]] = {}
"""By process id: a forked child starts one of its own."""
_lock = threading.Lock()


def kept_server() -> EmbeddedServer:
    """The embedded server of this process, which runs until the process ends; started at the first call, in some 20 ms.

    ``worqr.Mesh("embedded:")`` uses the same.

    Raises:
        UsageError: no server program is installed; the message says what to install.
    """
    with _lock:
        server = _servers.get(os.getpid())
        if server is None:
            stack = ExitStack()
            server = _servers[os.getpid()] = stack.enter_context(shared_server())
            atexit.register(stack.close)
    return server
