"""The fixtures for pytest, and the test-suite of a small application as its authors would write it, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.children import ROOT
from tests.support.patience import PATIENCE

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
import worqr
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
    worqr.sync(report.enqueue, 7)
    assert sent.calls(report) == [report.call(7)]


async def test_the_server_is_there(worqr_server: EmbeddedServer, worqr_bench: testing.OpenBench) -> None:
    await worqr_bench(mesh)
    assert mesh.url == worqr_server.url


def test_the_mesh_is_its_own_again() -> None:
    assert (mesh.url, mesh.prefix) == ("redis://nowhere.invalid", "worqr")
"""

ASYNCIO_SHOP = """
import asyncio
import worqr

mesh = worqr.Mesh("redis://nowhere.invalid", runs_in="asyncio")


@mesh.task(result_ttl=3600)
async def report(customer: int) -> str:
    await asyncio.sleep(0)
    return f"/reports/{customer}.pdf"
"""

ASYNCIO_TESTS = """
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest
import pytest_asyncio
import worqr
from worqr import testing

from shop import mesh, report


@pytest_asyncio.fixture
async def bench() -> AsyncGenerator[testing.Bench]:
    async with testing.bench(mesh) as bench:
        yield bench


@pytest.mark.asyncio
async def test_report_runs(bench: testing.Bench) -> None:
    job = await report.dispatch(7)
    assert (await bench.run_until_empty()).finished == 1
    assert await job.result() == "/reports/7.pdf"


@pytest.mark.asyncio
async def test_a_bench_in_a_block() -> None:
    async with testing.bench(mesh) as bench:
        await report.options(delay=timedelta(minutes=10)).dispatch(7)
        assert (await bench.run_until_empty()).finished == 0
        await bench.advance(timedelta(minutes=10))
        assert (await bench.run_until_empty()).finished == 1


@pytest.mark.asyncio
async def test_a_bench_of_the_fixture(worqr_asyncio_bench: testing.OpenBench) -> None:
    bench = await worqr_asyncio_bench(mesh)
    await report.enqueue(7)
    assert (await bench.run_until_empty()).finished == 1
    assert bench.sent(report) == [report.call(7)]


def test_a_sync_bench_of_the_fixture(worqr_sync_bench: testing.OpenSyncBench) -> None:
    bench = worqr_sync_bench(mesh)
    job = worqr.sync(report.dispatch, 7)
    assert worqr.sync(bench.run_until_empty).finished == 1
    assert worqr.sync(job.result) == "/reports/7.pdf"


def test_the_mesh_is_its_own_again() -> None:
    assert (mesh.url, mesh.prefix) == ("redis://nowhere.invalid", "worqr")
"""

AUTO_TESTS = """
from worqr import testing

from shop import mesh, report


async def test_the_fixture_of_tests_on_trio_does_it_too(worqr_bench: testing.OpenBench) -> None:
    bench = await worqr_bench(mesh)
    job = await report.dispatch(7)
    assert (await bench.run_until_empty()).finished == 1
    assert await job.result() == "/reports/7.pdf"
"""

ANYIO_TESTS = """
import pytest
from worqr import testing

from shop import mesh, report

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_bench_in_a_block() -> None:
    async with testing.bench(mesh) as bench:
        job = await report.dispatch(7)
        assert (await bench.run_until_empty()).finished == 1
        assert await job.result() == "/reports/7.pdf"
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

ON_ASYNCIO = ("-W", "error", "-p", "no:trio", "-p", "no:anyio", "-o", "asyncio_default_fixture_loop_scope=function")
needs_pytest_asyncio = pytest.mark.skipif(find_spec("pytest_asyncio") is None, reason="pytest-asyncio is not installed")

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
        if options[: len(ON_ASYNCIO)] != ON_ASYNCIO:
            options = ("-p", "no:asyncio", *options)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider", *options]
        return subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=3 * PATIENCE
        )

    return run


def test_a_suite_of_an_application_runs(run: Run) -> None:
    answer = run("-W", "error", "-o", "trio_mode=true", shop=SHOP, test_shop=TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "7 passed" in answer.stdout


@needs_pytest_asyncio
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_suite_of_an_application_on_asyncio_runs(run: Run, mode: str) -> None:
    answer = run(*ON_ASYNCIO, "-o", f"asyncio_mode={mode}", shop=ASYNCIO_SHOP, test_shop=ASYNCIO_TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "5 passed" in answer.stdout


@needs_pytest_asyncio
def test_in_the_auto_mode_of_pytest_asyncio_one_fixture_is_for_both_loops(run: Run) -> None:
    answer = run(*ON_ASYNCIO, "-o", "asyncio_mode=auto", shop=ASYNCIO_SHOP, test_shop=AUTO_TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_without_pytest_asyncio_pytest_says_that_it_is_missing(run: Run) -> None:
    test = "import pytest\n\n@pytest.mark.asyncio\nasync def test_it(worqr_bench): ...\n"
    answer = run("-p", "no:trio", "-p", "no:anyio", test_it=test)
    assert "no plugin or hook that handled it" in answer.stdout


def test_tests_of_anyio_run_on_either_loop(run: Run) -> None:
    answer = run("-W", "error", "-p", "no:trio", "-p", "no:asyncio", shop=ASYNCIO_SHOP, test_shop=ANYIO_TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "2 passed" in answer.stdout


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
    benches = ("worqr_bench", "worqr_asyncio_bench", "worqr_sync_bench")
    for name in ("worqr_server", *benches, "worqr_recording"):
        assert f"\n{name} " in answer.stdout


FROZEN = """
import time
from datetime import datetime

import freezegun
import pytest
import worqr
from worqr import testing

mesh = worqr.Mesh(prefix="frozen")
seen = []

@mesh.task(result_ttl=60)
def double(x: int) -> int:
    seen.append(datetime.now().year)
    return 2 * x

@mesh.task(result_ttl=60)
def freezes() -> int:
    with freezegun.freeze_time("2031-05-01"):
        return datetime.now().year

def run_one(bench) -> None:
    job = worqr.sync(double.dispatch, 7)
    assert worqr.sync(bench.run_until_empty).finished == 1
    assert worqr.sync(job.result, timeout=30) == 14
    assert seen[-1] == 2031

@pytest.mark.parametrize("tick", [False, True])
def test_inside(worqr_sync_bench, tick) -> None:
    bench = worqr_sync_bench(mesh)
    with freezegun.freeze_time("2031-05-01", tick=tick):
        run_one(bench)

@freezegun.freeze_time("2031-05-01")
def test_around() -> None:
    with worqr.sync_block(testing.bench, mesh) as bench:
        run_one(bench)

def test_in_a_handler(worqr_sync_bench) -> None:
    bench = worqr_sync_bench(mesh)
    job = worqr.sync(freezes.dispatch)
    assert worqr.sync(bench.run_until_empty).finished == 1
    assert worqr.sync(job.result, timeout=30) == 2031

def test_a_timeout_passes(worqr_server) -> None:
    other = worqr.Mesh(worqr_server.url, prefix="timeout")
    nothing = other.task(name="g", result_ttl=60)(lambda: None)
    with freezegun.freeze_time("2031-05-01"):
        job = worqr.sync(nothing.dispatch)
        with pytest.raises(worqr.ResultTimeout):
            worqr.sync(job.result, timeout=0.2)
"""


def test_tests_that_freeze_time_with_freezegun_run(run: Run) -> None:
    answer = run("-p", "no:trio", test_frozen=FROZEN)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "5 passed" in answer.stdout


def test_freezegun_is_not_imported_for_tests_without_it(run: Run) -> None:
    text = "import sys\ndef test_it() -> None:\n    assert 'freezegun' not in sys.modules\n"
    answer = run("-p", "no:trio", test_without=text)
    assert answer.returncode == 0, answer.stdout + answer.stderr
