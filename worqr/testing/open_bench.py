"""`bench`: open a bench on the event loop that runs the test, Trio or asyncio."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

from worqr.errors import UsageError
from worqr.link import can_wait_here, loop_name_here
from worqr.mesh import Mesh
from worqr.testing.threaded_bench import bench_in_thread
from worqr.testing.trio_bench import Bench, bench_on_trio


def bench(
    mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None
) -> AbstractAsyncContextManager[Bench]:
    """Put the application's own mesh on a test server for the length of a block, connected, under Trio or asyncio.

    Its functions, queues and jobs then have a prefix of their own; all keys are deleted at the end of the block. One server
    serves all benches of a process: the first starts it, in a tenth of a second; the others take 4 ms. Under Trio, handlers
    run on the loop of the test. Under asyncio, they run in other threads, also those with ``runs_in="asyncio"``. In a test
    without an event loop, write ``with worqr.sync_block(testing.bench, mesh) as bench:``, and
    ``worqr.sync(bench.run_until_empty)``; handlers then run in other threads, and only during that call.

    Args:
        mesh: Any mesh. The server that it would connect to does not matter.
        url: The server. Default: ``$WORQR_TEST_URL``, else an embedded one (``pip install 'worqr[embedded]'``).
        now: A timezone-aware datetime at which the clock of the bench begins, for tests of schedules. Default: the present
            time.

    Returns:
        An async context manager, which gives the bench.

    Raises:
        UsageError: The mesh is connected, on a bench or recording already, no server program is installed, `now` has no
            timezone, or no event loop runs.
    """
    if loop_name_here() == "Trio":
        return bench_on_trio(mesh, url=url, now=now)
    if can_wait_here():
        return bench_in_thread(mesh, url=url, now=now)
    raise UsageError(
        "testing.bench() needs a running event loop, Trio or asyncio: install pytest-trio or pytest-asyncio and mark "
        "the test; in a plain test write `with worqr.sync_block(testing.bench, mesh) as bench:`"
    )
