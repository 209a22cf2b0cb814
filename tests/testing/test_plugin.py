"""The fixtures for pytest, and the test-suite of a small application as its authors would write it, in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.children import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

SHOP = """
import trio
import worqr

mesh = worqr.Mesh("redis://nowhere.invalid")


@mesh.task(timeout=600, result_ttl=3600)
async def report(customer: int) -> str:
    context = worqr.current()
    for page in range(3):
        await trio.sleep(0)
        context.progress(page / 3, f"page {page}")
        context.extend(30)
    return f"/reports/{customer}.pdf"


@mesh.every(3600)
@mesh.task
def tidy() -> None: ...
"""

TESTS = """
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest
from worqr import testing
from worqr.embedded import EmbeddedServer

from shop import mesh, report


@pytest.fixture
async def bench() -> AsyncGenerator[testing.Bench]:
    async with testing.bench(mesh) as bench:
        yield bench


async def test_report_runs(bench: testing.Bench) -> None:
    job = await report.dispatch(7)
    assert (await bench.run_until_empty()).finished == 1
    assert await job.result() == "/reports/7.pdf"


async def test_due_later(bench: testing.Bench) -> None:
    await report.options(delay=timedelta(minutes=10)).dispatch(7)
    assert (await bench.run_until_empty()).finished == 0
    await bench.advance(timedelta(minutes=10))
    assert (await bench.run_until_empty()).finished >= 1
    assert bench.sent(report) == [report.call(7)]


async def test_direct_call() -> None:
    with testing.context(id="x") as context:
        await report(7)
    assert context.cancel_reason is None
    assert context.reported[-1] == (2 / 3, "page 2")


async def test_a_bench_of_the_fixture(worqr_bench: testing.OpenBench) -> None:
    bench = await worqr_bench(mesh)
    await report.enqueue(7)
    assert (await bench.run_until_empty()).finished == 1


def test_a_recording_of_the_fixture(worqr_recording: testing.Record) -> None:
    sent = worqr_recording(mesh)
    with pytest.raises(StopIteration):
        report.enqueue(7).send(None)
    assert sent.calls(report) == [report.call(7)]


async def test_the_server_is_there(worqr_server: EmbeddedServer, worqr_bench: testing.OpenBench) -> None:
    await worqr_bench(mesh)
    assert mesh.url == worqr_server.url


def test_the_mesh_is_its_own_again() -> None:
    assert (mesh.url, mesh.prefix) == ("redis://nowhere.invalid", "worqr")
"""

INERT = """
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_was_imported():
    assert "pytest_worqr" in sys.modules
    assert {"worqr", "redis", "msgspec"}.isdisjoint(sys.modules)
    yield
    assert "worqr" not in sys.modules


def test_nothing() -> None: ...
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest on these files, in a project of its own in which worqr is installed."""
    info = tmp_path / "site" / "worqr-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: worqr\nVersion: 0\n")
    (plugin,) = PROJECT["entry-points"]["pytest11"].items()
    (info / "entry_points.txt").write_text(f"[pytest11]\n{plugin[0]} = {plugin[1]}\n")
    project = tmp_path / "project"
    project.mkdir()

    def run(*options: str, **files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (project / f"{name}.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (info.parent, ROOT, project)))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider", *options]
        return subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=50
        )

    return run


def test_the_tests_of_the_page_run(run: Run) -> None:
    """Together, as one file: the later ones go on where the first begins."""
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    answer = run("-W", "error", "-o", "trio_mode=true", test_page="\n\n".join(snippets))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    tests = len(re.findall(r"^(?:async )?def test_", "".join(snippets), re.MULTILINE))
    assert f"{tests} passed" in answer.stdout
    assert tests == 6


def test_a_suite_of_an_application_runs(run: Run) -> None:
    answer = run("-W", "error", "-o", "trio_mode=true", shop=SHOP, test_shop=TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "7 passed" in answer.stdout


def test_the_error_of_a_handler_is_shown_with_its_lines(run: Run) -> None:
    broken = SHOP.replace("await trio.sleep(0)", "assert page == 0  # the line to be seen")
    answer = run("-o", "trio_mode=true", "-k", "test_report_runs", shop=broken, test_shop=TESTS)
    assert answer.returncode == 1
    assert "# the line to be seen" in answer.stdout
    assert "raised by the handler of 'shop.report', in attempt 1" in answer.stdout


def test_it_costs_nothing_where_nobody_asks_for_it(run: Run) -> None:
    answer = run("-p", "no:trio", test_inert=INERT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_pytest_lists_the_fixtures_with_what_they_do(run: Run) -> None:
    answer = run("--fixtures", "-p", "no:trio")
    for name in ("worqr_server", "worqr_bench", "worqr_recording"):
        assert f"\n{name} " in answer.stdout
