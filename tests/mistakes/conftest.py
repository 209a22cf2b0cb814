"""Meshes on the tests' server, and short-lived programs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import worqr
from tests.support.children import ROOT
from tests.support.patience import PATIENCE
from tests.support.servers import Server, keep_one_kind

NewMesh = Callable[..., worqr.Mesh]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A message does not depend on the kind of server."""
    keep_one_kind(config, items, Path(__file__).parent)


@pytest.fixture
def new_mesh(server: Server, prefix: str) -> NewMesh:
    """`new_mesh(patience=1, ...)`: a mesh under the test's prefix; two of them are two applications with one prefix."""

    def make(**settings: Any) -> worqr.Mesh:
        return worqr.Mesh(**{"url": server.url, "prefix": prefix, "patience": PATIENCE, **settings})

    return make


@pytest.fixture
def mesh(new_mesh: NewMesh) -> worqr.Mesh:
    """A mesh under the test's prefix."""
    return new_mesh()


@dataclass(frozen=True)
class Ended:
    """The output of a program, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of the errors: that of the exception."""
        return self.err.rstrip().rpartition("\n")[2]


@pytest.fixture
def program(server: Server, prefix: str, tmp_path: Path) -> Callable[..., Ended]:
    """`program(source)`: a script, run to its end in its own folder, as ``python app.py``; or, with words, as ``worqr ...``."""

    def run(source: str, *words: str) -> Ended:
        (tmp_path / "app.py").write_text(source)
        command = [sys.executable, *(["-m", "worqr", *words] if words else ["app.py"])]
        env = {**os.environ, "WORQR_URL": server.url, "WORQR_PREFIX": prefix, "PYTHONPATH": os.fspath(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=3 * PATIENCE, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
