"""Measures how long a newcomer needs for the first task: ``python -m tools.newcomer``.

It clones this repository, and pastes the first two pages of the tutorial, to the line that the first task prints, into shells of
their own. The server has a free port. It prints the seconds of each step.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.pages import DOCS, ROOT, Block, blocks_of

LESSONS = (DOCS / "tutorial" / "install.md", DOCS / "tutorial" / "first-task.md")
PATIENCE = 600.0


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Newcomer:
    """Has a home folder, and types what the pages show."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self._port = port
        self._began = self._last = time.monotonic()
        self._beside: list[tuple[subprocess.Popen[bytes], Path]] = []
        kept = ("PATH", "LANG", "PIP_INDEX_URL", "PIP_CACHE_DIR", "SSL_CERT_FILE")
        self._environment = {
            **{name: os.environ[name] for name in kept if name in os.environ},
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "WORQR_URL": f"redis://127.0.0.1:{port}/0",
        }

    def note(self, what: str) -> None:
        """Print how long a step took."""
        now = time.monotonic()
        print(f"{now - self._last:7.1f} s  {what}", flush=True)
        self._last = now

    def total(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def run(self, code: str, folder: str) -> None:
        """Run lines as pasted, in an activated environment if there is one."""
        subprocess.run(self._command(code), cwd=self.home / folder, env=self._environment, check=True, stdout=2)

    def start(self, code: str, folder: str) -> Path:
        """Run a command in a terminal of its own; return the file of its output."""
        output = self.home / f"output-{len(self._beside)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._command(code),
                cwd=self.home / folder,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._beside.append((process, output))
        return output

    def _command(self, code: str) -> list[str]:
        activate = self.home / "worqr" / ".venv" / "bin" / "activate"
        first = f". {shlex.quote(str(activate))}; " if activate.exists() else ""
        code = re.sub(r"^worqr server$", f"worqr server --port {self._port}", code, flags=re.MULTILINE)
        return ["/bin/bash", "-ec", first + code]

    def wait_for(self, output: Path, line: str) -> None:
        """Wait until a command has printed this."""
        deadline = time.monotonic() + PATIENCE
        while line not in output.read_text("utf-8", "replace"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no line {line!r} in:\n{output.read_text('utf-8', 'replace')}")
            time.sleep(0.02)

    def leave(self) -> None:
        """Stop the running processes."""
        for process, _ in reversed(self._beside):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process, _ in reversed(self._beside):
            process.wait(PATIENCE)


def main() -> int:
    """Paste both pages."""
    install, first_task = (blocks_of(page) for page in LESSONS)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
        newcomer = Newcomer(Path(home), free_port())
        try:
            paste(newcomer, install, first_task)
        finally:
            newcomer.leave()
    print(f"{newcomer.total():7.1f} s  from `git clone` to the first task, all in all")
    return 0


def paste(newcomer: Newcomer, install: list[Block], first_task: list[Block]) -> None:
    """Type the blocks of both pages, in the folders that they name."""
    commands = [block for block in install if block.language == "bash"]
    newcomer.run(f"git clone --quiet {shlex.quote(str(ROOT))} worqr", ".")
    newcomer.run(next(block for block in commands if "venv" in block.code).code, "worqr")
    newcomer.note("git clone, python3 -m venv, pip install '.[all]'")
    newcomer.run(next(block for block in commands if "fastapi" in block.code).code, "worqr")
    newcomer.note("pip install fastapi uvicorn")
    newcomer.run("worqr demo", "worqr")
    newcomer.note("worqr demo")
    server = newcomer.start("worqr server", "worqr")
    newcomer.wait_for(server, "redis://")
    newcomer.note("worqr server")
    newcomer.run(next(block for block in commands if "mkdir" in block.code).code, "worqr")
    for block in first_task:
        if block.language == "python" and block.title:
            (newcomer.home / "reports" / block.title).write_text(block.code, "utf-8")
    worker = newcomer.start(next(block for block in first_task if block.title.startswith("Terminal")).code, "reports")
    newcomer.wait_for(worker, "start: worqr")
    newcomer.note("worqr run reports:mesh")
    newcomer.run("python order.py", "reports")
    newcomer.wait_for(worker, "report for ada")
    newcomer.note("python order.py, until the worker has printed the report")


if __name__ == "__main__":
    sys.exit(main())
