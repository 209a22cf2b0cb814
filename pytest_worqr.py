"""Fixtures for the tests of applications that use worqr. pytest finds this module by its entry point.

It stands outside of the package, so that pytest does not import worqr and Trio for tests that have nothing to do with them.
`worqr_bench` is for tests on Trio, with pytest-trio; `worqr_asyncio_bench` for tests on asyncio, with pytest-asyncio or anyio's
plugin; `worqr_sync_bench` for tests without an event loop.

freezegun also freezes the monotonic clock, by which Trio and worqr wait: a bench would wait forever. So both are put on the
list of modules that freezegun leaves alone, when a test imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, ExitStack
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from datetime import datetime
    from importlib.machinery import ModuleSpec

    from worqr import Mesh
    from worqr.embedded import EmbeddedServer
    from worqr.testing import Bench, OpenBench, OpenSyncBench, Record, Sent


class _FreezegunFinder(MetaPathFinder):
    """Configures freezegun right after its import, so that tests without it do not import it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != "freezegun":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_configure(module: Any) -> None:
                run(module)
                _configure_freezegun(module)

            vars(spec.loader)["exec_module"] = run_and_configure
        return spec


def _configure_freezegun(freezegun: Any) -> None:
    configure = getattr(freezegun, "configure", None)
    if configure is not None:  # freezegun >= 1.1
        configure(extend_ignore_list=["worqr", "trio"])


def pytest_configure() -> None:
    """Let worqr and Trio see the real time in tests that freeze it."""
    if (freezegun := sys.modules.get("freezegun")) is not None:
        _configure_freezegun(freezegun)
    else:
        sys.meta_path.insert(0, _FreezegunFinder())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the right fixture to a test of pytest-asyncio that asks for the one of tests on Trio."""
    if "worqr_bench" not in getattr(item, "fixturenames", ()) or item.get_closest_marker("asyncio") is None:
        return
    if not item.config.pluginmanager.hasplugin("asyncio"):  # pytest says what is missing
        return
    mode = item.config.getoption("asyncio_mode", None) or item.config.getini("asyncio_mode")
    if str(mode) != "auto":  # else pytest-asyncio runs every async fixture
        pytest.fail(
            "worqr_bench is for tests on Trio: on asyncio write `bench = await worqr_asyncio_bench(mesh)`",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def worqr_server() -> EmbeddedServer:
    """Return the embedded server of all benches of this process: ``worqr.Mesh(worqr_server.url, prefix=...)`` is a mesh on it."""
    from worqr.testing.benches import bench_server

    return bench_server()


@pytest.fixture
async def worqr_bench() -> AsyncGenerator[OpenBench]:
    """Put a mesh on a bench until a test on Trio ends, as often as you call it.

    ``bench = await worqr_bench(mesh)``; see ``worqr.testing.bench``.

    Yields:
        OpenBench: The function to call.
    """
    from worqr import testing

    async with AsyncExitStack() as stack:

        async def put(mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench:
            return await stack.enter_async_context(testing.bench(mesh, url=url, now=now))

        yield put


@pytest.fixture
def worqr_asyncio_bench() -> Iterator[OpenBench]:
    """Put a mesh on a bench until a test on asyncio ends, as often as you call it.

    ``bench = await worqr_asyncio_bench(mesh)``; see ``worqr.testing.bench``.

    Yields:
        OpenBench: The function to call.
    """
    from worqr.testing.benches import BenchThread, open_threaded_bench

    with ExitStack() as stack:

        async def put(mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench:
            thread = BenchThread(mesh, url, now)
            bench = await open_threaded_bench(thread)
            stack.callback(thread.stop)  # no loop is needed for that, which may have ended by then
            return bench

        yield put


@pytest.fixture
def worqr_sync_bench() -> Iterator[OpenSyncBench]:
    """Put a mesh on a bench until a test without an event loop ends, as often as you call it.

    ``bench = worqr_sync_bench(mesh)``, then ``worqr.sync(bench.run_until_empty)``; see ``worqr.testing.bench``.

    Yields:
        OpenSyncBench: The function to call.
    """
    from worqr import sync_block, testing

    with ExitStack() as stack:

        def put(mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench:
            return stack.enter_context(sync_block(testing.bench, mesh, url=url, now=now))

        yield put


@pytest.fixture
def worqr_recording() -> Iterator[Record]:
    """Record what the functions of a mesh send until the test ends.

    ``sent = worqr_recording(mesh)``; see ``worqr.testing.recording``.

    Yields:
        Record: The function to call.
    """
    from worqr import testing

    with ExitStack() as stack:

        def record(mesh: Mesh[Any]) -> Sent:
            return stack.enter_context(testing.recording(mesh))

        yield record
