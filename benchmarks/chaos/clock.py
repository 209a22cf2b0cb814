"""A server's wall clock that can be moved: `clockshim.c`, built with the system's compiler and preloaded into the server."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("clockshim.c")
CLOCK_FILE = "WORQR_CLOCK_FILE"


class ServerClock:
    """The offset of a server's wall clock, in whole seconds. Servers that start inside `preloaded` obey it."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library = library
        self._file = file
        self.offset = 0
        self.furthest = 0
        self.move_to(0)

    def move_to(self, offset: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", offset))
        self.offset = offset
        self.furthest = max(self.furthest, offset)

    @contextmanager
    def preloaded(self) -> Generator[None]:
        """Processes started inside see this clock."""
        names = {"LD_PRELOAD": os.fspath(self._library), CLOCK_FILE: os.fspath(self._file)}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def build_clock(folder: Path) -> ServerClock | str:
    """A clock built in `folder`; a string has the reason why there is none."""
    if sys.platform != "linux":
        return "the clock is moved by LD_PRELOAD, which needs Linux"
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler `cc`"
    library = folder / "clockshim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        return f"{SOURCE.name} could not be built: {built.stderr.strip()[:300]}"
    return ServerClock(library, folder / "clock")
