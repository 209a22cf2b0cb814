#!/usr/bin/env python3
"""Runs a nox session of this project on a machine that has Python >= 3.11 and nothing else: ``python3 run.py tests``.

The first run makes a private environment in ``.nox`` and installs nox there; nothing outside this folder is written but
pip's cache, so that an externally managed Python (Debian's, Homebrew's) is left alone, as it asks to be. Options
after the session's name go to the session: ``python3 run.py tests -k embedded``. Without arguments: a list of sessions.

Only the standard library is used here. Why not ``python3 -m venv .venv && .venv/bin/pip install nox``: Debian's Python
comes without ``ensurepip``, and that line fails. Here pip is taken from wherever it is: ``ensurepip``, the pip of
the Python that runs this, and where there is neither, pip's own ``get-pip.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.request
from itertools import takewhile
from pathlib import Path

OLDEST = (3, 11)
NOX = "nox>=2025.5.1"
GET_PIP = "https://bootstrap.pypa.io/get-pip.py"
ROOT = Path(__file__).resolve().parent
HOME = ROOT / ".nox" / "_run"
"""The private environment; beside those of the sessions, which nox names after themselves."""


def main(arguments: list[str]) -> int:
    """Run the sessions named at the front of `arguments`, passing them the rest."""
    if sys.version_info < OLDEST:
        return complain(
            f"this is Python {sys.version.split()[0]}; Python 3.11 or newer is needed: try python3.11 run.py"
        )
    python = HOME / "bin" / "python"
    if not is_complete(python):
        print(f"setting up nox in {HOME.relative_to(ROOT)} (once)", file=sys.stderr, flush=True)
        problem = set_up(python)
        if problem:
            return complain(problem)
    os.chdir(ROOT)
    return subprocess.call([python, "-m", "nox", *nox_arguments(arguments)])


def nox_arguments(arguments: list[str]) -> list[str]:
    """``tests lint -k x`` as nox has it: ``-s tests lint -- -k x``; nothing: the list of sessions."""
    if not arguments:
        return ["--list"]
    sessions = [*takewhile(lambda argument: not argument.startswith("-"), arguments)]
    rest = arguments[len(sessions) :]
    return ["-s", *sessions, *(rest if rest[:1] == ["--"] else ["--", *rest])]


def is_complete(python: Path) -> bool:
    """Nox can be started there: the set-up was not interrupted, and the Python it was made with is still there."""
    return python.exists() and subprocess.call([python, "-c", "import nox"], stderr=subprocess.DEVNULL) == 0


def set_up(python: Path) -> str | None:
    """Make the environment and install nox into it; answers what is wrong, if anything is."""
    if importlib.util.find_spec("venv") is None:
        return f"{sys.executable} has no venv: {remedy()}"
    import venv

    venv.create(HOME, clear=True, symlinks=True)
    pip: list[str | Path] = [python, "-m", "pip"]
    if importlib.util.find_spec("ensurepip") is not None:
        subprocess.call([python, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
    elif importlib.util.find_spec("pip") is not None:  # Debian with python3-pip and without python3-venv
        pip = [sys.executable, "-m", "pip", "--python", python]
    else:  # Debian with neither
        problem = get_pip(python)
        if problem:
            return f"{sys.executable} has neither ensurepip nor pip, and {problem}: {remedy()}"
    if subprocess.call([*pip, "install", "--quiet", "--disable-pip-version-check", NOX]) != 0:
        return "pip could not install nox, see above; is there a network?"
    return None


def get_pip(python: Path) -> str | None:
    """Install pip into the private environment with the script that pip's authors offer for this."""
    try:
        with urllib.request.urlopen(GET_PIP, timeout=60) as answer:
            script = answer.read()
    except OSError as error:
        return f"{GET_PIP} cannot be reached ({error})"
    if subprocess.run([python, "-", "--quiet"], input=script, check=False).returncode != 0:
        return f"{GET_PIP} failed, see above"
    return None


def remedy() -> str:
    """What to install, in the words of the system's package manager."""
    debian = Path("/etc/debian_version").exists()
    return ("run `apt-get install python3-venv`" if debian else "install Python's venv and pip") + " and try again"


def complain(problem: str) -> int:
    """Say in one sentence what is missing."""
    print(f"run.py: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
