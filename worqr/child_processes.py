"""What the processes that worqr starts need: their memory, read from outside, and a guard of their imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from worqr.errors import UsageError


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0: it cannot be read. Elsewhere than on Linux it runs `ps`."""
    with suppress(OSError, ValueError, IndexError):
        if sys.platform == "linux":
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(found.stdout) * 1024
    return 0


# Keep a script from starting the application again in each of its worker processes.
#
# A worker process imports the module of the function that it runs. If that module starts the application outside of
# ``if __name__ == "__main__":``, `refuse_while_importing` raises.

_importing: list[str] = []

"""The module that this worker process is importing."""


@contextmanager
def importing(module: str) -> Generator[None]:
    """Refuse peers and connections in the block, in which a worker process imports `module`."""
    _importing.append(module)
    try:
        yield
    finally:
        _importing.pop()


def refuse_while_importing(what: str) -> None:
    """Check that this process may start `what`, a connection for instance.

    Raises:
        UsageError: this is a worker process that imports the application.
    """
    if _importing:
        raise UsageError(
            f"no {what} while a worker process imports {_importing[-1]!r}, where it finds a function with "
            "runs_in='process': put what starts the application under `if __name__ == \"__main__\":`"
        )
