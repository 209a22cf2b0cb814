"""Packages of npm that tests need: those that a lock file names, got once and kept in the cache of pytest."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

WITHIN, TRIES = 50, 3


def packages(folder: Path, config: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """Return ``node_modules`` with what package-lock.json in `folder` names, or the reason why it cannot be had."""
    if shutil.which("npm") is None:
        return "npm is not installed: try `apt-get install npm`"
    lock = hashlib.sha1((folder / "package-lock.json").read_bytes()).hexdigest()[:12]
    cache = getattr(config, "cache", None)
    kept = tmp_path_factory.mktemp("node") if cache is None else cache.mkdir("node")
    there = kept / lock
    if not there.exists():
        new = kept / f"{lock}.{secrets.token_hex(4)}"
        new.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(folder / name, new)
        problem = "?"
        for _ in range(TRIES):
            if problem:
                problem = _npm_ci(new)
        if problem:
            shutil.rmtree(new)
            return f"npm could not get the packages: {problem}"
        try:
            new.rename(there)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return there / "node_modules"


def _npm_ci(folder: Path) -> str:
    """Install what the lock file there names; answers what went wrong, if anything did."""
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=WITHIN)
    except subprocess.TimeoutExpired:
        return f"it took longer than {WITHIN} s"
    return answer.stderr or "it failed" if answer.returncode else ""
