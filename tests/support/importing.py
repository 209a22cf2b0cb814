"""How processes that collect the same tests at the same time share the work of compiling them."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def import_all(config: pytest.Config) -> None:
    """Import all test files, if all are to be collected, each process of pytest-xdist from another one on.

    pytest rewrites the asserts of each file once, and keeps the bytecode. In a fresh clone all processes would rewrite the
    same file at the same moment, one after the other all files: 10 s of CPU each. So each rewrites a share of them.
    """
    process = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not process or [config.rootpath / each for each in config.args] != [TESTS]:
        return
    files = sorted(TESTS.rglob("test_*.py"))
    first = int(process.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in (*files[first:], *files[:first]):
        with suppress(Exception):  # pytest will meet it, too, and say so
            importlib.import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))
