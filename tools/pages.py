"""Runs a page of the documentation as its reader would: block by block, in one empty folder, with a server to talk to.

* ```` ```python title="NAME.py" ```` is a file. `pytest` runs it if its name starts with ``test_``. Any other file must be
  run or imported by a later block.
* ```` ```python ```` without a title is a program, which runs at once.
* ```` ```sh ```` is run line by line. A title that starts with ``Terminal`` lets it run beside the blocks that follow, until
  the page ends. A `text` block with the same title is what it prints by then. A line that starts `worqr server` is left
  out, because there is a server already.
* ```` ```text title="Output" ```` after one of these: its lines are printed, in this order; ``...`` stands for any text.
  A program that goes on when it has printed them gets Ctrl-C. Without this block, a program must end by itself.
* ```` ```js title="NAME.mjs" ```` and ```` ```ruby title="NAME.rb" ```` are files as well.
* ```` ```yaml ````, ``toml`` and ``json`` are parsed. All other blocks, such as ``bash``, are not run: they install software,
  or need another machine.

A line ``--8<-- "PATH"`` in a block stands for the file of the repository, as in MkDocs.

The ports 8000, 9464 and 9465 on the page stand for free ports.

Pages about migration have programs of another library in sections whose headings start with ``Before``. They need an
environment in which that library is installed, so they are read apart: `Reader.read` takes the sections to read. For this
reason the module needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PATIENCE = 60.0
"""Seconds in which a program prints its next line, or ends."""
ENDS_WITHIN = 20.0
"""Seconds after its last line in which a program ends, or its last command is still to start. Then it is one that goes on."""
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w+)(?P<attributes>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks)$",
    re.DOTALL | re.MULTILINE,
)
INCLUDE = re.compile(r'^--8<-- "([^"]+)"\n', re.MULTILINE)
"""A line that stands for the text of a file of the repository, by its path from there."""
PORTS = ("8000", "9464", "9465")


@dataclass(frozen=True)
class Block:
    """One fenced block, and the heading of its section (of the second level)."""

    page: Path
    line: int
    section: str
    language: str
    title: str
    code: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found: list[Block] = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', match["attributes"])
        headings = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)
        section, line = headings[-1] if headings else "", text.count("\n", 0, match.start()) + 1
        code = INCLUDE.sub(lambda file: (ROOT / file[1]).read_text("utf-8"), textwrap.dedent(match["code"]))
        found.append(Block(page, line, section, match["language"], title[1] if title else "", code))
    return found


def is_before(section: str) -> bool:
    """The section shows a program of another library."""
    return section.startswith("Before")


def pages_of(folder: str) -> list[Path]:
    """The pages of a folder of the documentation that have something to run; of ``""``, those at its top, and README.md."""
    pages = sorted((DOCS / folder).rglob("*.md")) if folder else [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [page for page in pages if any(block.language in {"python", "sh"} for block in blocks_of(page))]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


class Process:
    """A command of a page, in a session of its own; both of its outputs are one text."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.command = shlex.join(command)
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = bytearray()
        self._grown = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        while piece := os.read(stream.fileno(), 65536):
            with self._grown:
                self._output += piece
                self._grown.notify_all()
        with self._grown:
            self._closed = True
            self._grown.notify_all()

    @property
    def output(self) -> str:
        return self._output.decode("utf-8", "replace")

    def wait_for(self, lines: list[str]) -> None:
        """Until it has printed these lines, in this order."""
        pattern = re.compile(".*?".join(_pattern(line) for line in lines), re.DOTALL | re.MULTILINE)
        deadline = time.monotonic() + PATIENCE
        with self._grown:
            while not pattern.search(self.output):
                left = deadline - time.monotonic()
                is_over = left <= 0 or self._closed
                assert not is_over, f"`{self.command}` did not print {lines}, but:\n{self.output}"
                self._grown.wait(left)

    def ended(self, within: float | None = None) -> int:
        """Its exit code, once it has ended."""
        try:
            code = self._process.wait(within or PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"`{self.command}` did not end; its output:\n{self.output}") from None
        self._reader.join()
        return code

    def is_running(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Ctrl-C: every process of the session gets it."""
        os.killpg(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _pattern(line: str) -> str:
    """A regular expression for a line of an output block."""
    return ".*?".join(re.escape(part) for part in line.strip().split("..."))


class Reader:
    """Reads one page and runs it."""

    def __init__(self, page: Path, folder: Path, url: str, port: int) -> None:
        self._page = page
        self._blocks: list[Block] = []
        self._folder = folder
        self._ports = dict(zip(PORTS, (str(port), *map(str, _free_ports(len(PORTS) - 1))), strict=True))
        self._beside: dict[str, Process] = {}
        self._unused: dict[str, Block] = {}
        programs = folder / ".programs"
        programs.mkdir()
        _write_program(programs / "worqr", sys.executable, "-m", "worqr")
        _write_program(programs / "python", sys.executable)
        _write_program(programs / "pytest", sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
        if path := shutil.which("redis-cli"):
            _write_program(programs / "redis-cli", path, "-e", "-u", url)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "WORQR_"))},
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "WORQR_URL": url,
        }

    def read(self, takes: Callable[[str], bool] = lambda section: not is_before(section)) -> None:
        """Do what the sections say that `takes` takes."""
        self._blocks = [block for block in blocks_of(self._page) if takes(block.section)]
        for block, output in self._with_outputs():
            if block.language == "text" and block.title in self._beside and output is None:
                self._beside[block.title].wait_for(block.code.strip().splitlines())
            elif block.language in PARSERS:
                PARSERS[block.language](block.code)
            elif block.language == "python" and block.title:
                self._save(block, output)
            elif block.language == "python":
                path = self._folder / "example.py"
                path.write_text(self._own(block.code), "utf-8")
                self._run([sys.executable, path.name], block, output)
            elif block.language in {"js", "ruby"} and block.title:
                (self._folder / block.title).write_text(self._own(block.code), "utf-8")
            elif block.language == "sh":
                self._run_lines(block, output)
        for block in self._unused.values():
            self._run([sys.executable, "-c", f"import {Path(block.title).stem}"], block, None)

    def close(self) -> None:
        """Stop the processes beside the page: Ctrl-C, then SIGKILL."""
        running = [process for process in self._beside.values() if process.is_running()]
        for process in running:
            process.interrupt()
        for process in running:
            if not _ends_soon(process, within=10):
                process.interrupt()  # Python loses the first one while it starts
        try:
            for process in self._beside.values():
                code = process.ended()
                assert process in running or code == 0, f"`{process.command}` ended with {code}:\n{process.output}"
        finally:
            for process in self._beside.values():
                process.close()

    def _with_outputs(self) -> Iterator[tuple[Block, list[str] | None]]:
        for block, after in zip_longest(self._blocks, self._blocks[1:]):
            if block.language == "text" and block.title == "Output":
                continue
            has_output = after is not None and after.language == "text" and after.title == "Output"
            yield block, after.code.strip().splitlines() if after is not None and has_output else None

    def _own(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self._ports[found[0]], text)

    def _save(self, block: Block, output: list[str] | None) -> None:
        path = self._folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._own(block.code), "utf-8")
        if path.name.startswith("test_"):
            self._run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", block.title], block, output)
        elif "/" not in block.title:
            assert output is None, f"{block}: a file prints nothing; put the output after the command that runs it"
            self._unused[block.title] = block

    def _run_lines(self, block: Block, output: list[str] | None) -> None:
        code = self._own(block.code)
        for title in [title for title in self._unused if title in code or re.search(rf"\b{Path(title).stem}\b", code)]:
            del self._unused[title]
        lines = [line for line in code.splitlines() if not line.startswith("worqr server")]
        if not lines:
            return
        command = ["/bin/sh", "-ec", "\n".join(lines)]
        if not block.title.startswith("Terminal"):
            self._run(command, block, output)
            return
        assert block.title not in self._beside, f"{block}: something runs in {block.title!r} already"
        self._beside[block.title] = Process(command, self._folder, self._environment)
        if output:
            self._beside[block.title].wait_for(output)

    def _run(self, command: list[str], block: Block, output: list[str] | None) -> None:
        process = Process(command, self._folder, self._environment)
        try:
            if output is not None:
                process.wait_for(output)
                if not _ends_soon(process, within=ENDS_WITHIN):
                    process.interrupt()
                    process.ended()
                    assert "Traceback" not in process.output, f"{block}:\n{process.output}"
                    return
            code = process.ended()
            assert code == 0, f"{block}: exit code {code}:\n{process.output}"
        finally:
            process.close()


def _free_ports(count: int) -> list[int]:
    """Return ports that no program listens at now. The system assigns none of them by itself, and tests choose higher ones."""
    found = set[int]()
    while len(found) < count:
        port = random.randrange(15_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def _ends_soon(process: Process, within: float) -> bool:
    """A program that has printed everything may be about to end by itself, and must then end well."""
    try:
        process.ended(within)
    except AssertionError:
        return False
    return True


def _write_program(path: Path, *command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def _parse_yaml(text: str) -> None:
    import yaml

    list(yaml.safe_load_all(text))


PARSERS = {"yaml": _parse_yaml, "toml": tomllib.loads, "json": json.loads}
