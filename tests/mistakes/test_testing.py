"""Mistakes in the tests of an application."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import worqr
import worqr.testing
from tests.support.children import ROOT
from tests.support.patience import PATIENCE

TEST = """
import pytest, worqr
mesh = worqr.Mesh()

@pytest.mark.asyncio
async def test_it({fixture}):
    bench = await {fixture}(mesh)
    assert (await bench.run_until_empty()).finished == 0
"""
pytestmark = pytest.mark.skipif(find_spec("pytest_asyncio") is None, reason="pytest-asyncio is not installed")


def outcome(tmp_path: Path, fixture: str, mode: str) -> tuple[int, str]:
    (tmp_path / "test_app.py").write_text(TEST.format(fixture=fixture))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:trio", "-o", f"asyncio_mode={mode}", "test_app.py"]
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )
    return done.returncode, done.stdout


async def test_a_bench_without_async() -> None:
    block: Any = worqr.testing.bench(worqr.Mesh())
    with pytest.raises(worqr.UsageError, match=re.escape("write `async with worqr.testing.bench(mesh) as bench:`")):
        with block:
            pass


def test_the_fixture_for_trio_in_a_test_on_asyncio(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "worqr_bench", "strict")
    assert code == 1
    assert "worqr_bench is for tests on Trio: on asyncio write `bench = await worqr_asyncio_bench(mesh)`" in said


@pytest.mark.parametrize(("fixture", "mode"), [("worqr_asyncio_bench", "strict"), ("worqr_bench", "auto")])
def test_the_fixtures_that_work_there(tmp_path: Path, fixture: str, mode: str) -> None:
    code, said = outcome(tmp_path, fixture, mode)
    assert code == 0, said
