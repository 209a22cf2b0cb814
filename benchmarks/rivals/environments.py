"""An environment for each library: made once, and made again when its requirements change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rivals.contender import FOLDER, Contender, Unusable

ROOT = Path(__file__).parent.parent.parent
INSTALL_WITHIN = 600.0
DESCRIBE_WITHIN = 120.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A contender that can be started.

    Attributes:
        contender: Which one.
        command: What starts its file; a role follows.
        env: Its environment variables, without those of one run.
        about: What ``describe`` printed.
    """

    contender: Contender
    command: tuple[str, ...]
    env: dict[str, str]
    about: dict[str, Any]


def prepare(contender: Contender, folder: Path) -> Prepared:
    """Install what the contender needs below `folder`, unless it is there, and ask the contender to describe itself.

    Raises:
        Unusable: A requirement cannot be installed, or the file does not run on this Python.
    """
    home = folder / contender.library
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RIVALS_", "PYTHON", "NODE_"))}
    env["RIVALS_VARIANT"] = contender.variant
    if contender.is_node:
        command = _node(contender, home)
        env["RIVALS_MODULES"] = str(home / "node_modules")
    else:
        python = _python(contender, home)
        command = (python, str(FOLDER / "launch.py"))
        ours = [] if contender.dependencies else [str(ROOT)]
        env["PYTHONPATH"] = os.pathsep.join([str(contender.path.parent), str(FOLDER), *ours])
    command = (*command, str(contender.path))
    return Prepared(contender, command, env, _describe(command, env, contender))


def _describe(command: tuple[str, ...], env: dict[str, str], contender: Contender) -> dict[str, Any]:
    done = _run([*command, "describe"], DESCRIBE_WITHIN, env=env, cwd=contender.path.parent)
    about: dict[str, Any] = json.loads(done)
    return about


def _python(contender: Contender, home: Path) -> str:
    """Return the Python of the environment."""
    if not contender.dependencies:
        return sys.executable
    python = home / "bin" / "python"
    if not _is_there(contender, home):
        _run([sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(home)], INSTALL_WITHIN)
        _run([str(python), "-m", "pip", "install", "--quiet", *contender.dependencies], INSTALL_WITHIN)
        _note(contender, home)
    return str(python)


def _node(contender: Contender, home: Path) -> tuple[str, ...]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unusable("node and npm are not installed")
    if not _is_there(contender, home):
        home.mkdir(parents=True, exist_ok=True)
        _run([npm, "install", "--silent", "--no-save", "--prefix", str(home), *contender.dependencies], INSTALL_WITHIN)
        _note(contender, home)
    return (node,)


def _is_there(contender: Contender, home: Path) -> bool:
    note = home / "requirements.json"
    return note.exists() and json.loads(note.read_text("utf-8")) == list(contender.dependencies)


def _note(contender: Contender, home: Path) -> None:
    (home / "requirements.json").write_text(json.dumps(contender.dependencies), "utf-8")


def _run(command: list[str], within: float, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Return what the command prints; its error's last line is the reason of an `Unusable`."""
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise Unusable(f"`{Path(command[0]).name}` took longer than {within:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unusable(lines[-1])
    return done.stdout
