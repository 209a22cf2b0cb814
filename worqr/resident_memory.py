"""The resident memory of another process of this user."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0: it cannot be read. Elsewhere than on Linux it runs `ps`."""
    with suppress(OSError, ValueError, IndexError):
        if sys.platform == "linux":
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(found.stdout) * 1024
    return 0
