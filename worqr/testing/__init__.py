"""Testing code that uses worqr: a bench with a real server, a recording without one, a context for a handler alone.

`bench` puts the application's own mesh on a server of the tests', runs what was enqueued, and moves the clock, in tests on Trio
and on asyncio, and by `worqr.sync_block` in tests without an event loop. `recording` notes what would be sent, for tests of
code that only enqueues. `context` makes ``worqr.current()`` work where a handler is called as the function that it is. Fixtures
for pytest are in ``pytest_worqr``, which pytest finds by itself.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from worqr.functions.depends import replaced
from worqr.mesh import Mesh
from worqr.testing.bench_run import Summary
from worqr.testing.benches import Bench, bench
from worqr.testing.direct_context import DirectContext, context
from worqr.testing.recording import RecordedJob, Sent, SentBatch, recording

__all__ = [
    "Bench",
    "DirectContext",
    "OpenBench",
    "OpenSyncBench",
    "Record",
    "RecordedJob",
    "Sent",
    "SentBatch",
    "Summary",
    "bench",
    "context",
    "recording",
    "replaced",
]


class OpenBench(Protocol):
    """The type of the fixtures ``worqr_bench`` and ``worqr_asyncio_bench``: call it to put a mesh on a bench until the test
    ends.
    """

    async def __call__(self, mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench:
        """Put a mesh on a bench; see `bench`."""
        ...


class OpenSyncBench(Protocol):
    """The type of the fixture ``worqr_sync_bench``: call it to put a mesh on a bench until the test ends."""

    def __call__(self, mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench:
        """Put a mesh on a bench; see `bench`."""
        ...


Record = Callable[[Mesh[Any]], Sent]
"""The type of the fixture ``worqr_recording``: call it to record what is sent until the test ends."""
