"""Testing what is built on worqr: a bench with a real server, a recording without one, a context for a handler alone.

`bench` puts the application's own mesh on a server of the tests', runs what was enqueued, and moves the clock. `recording`
notes what would be sent, for tests of code that only enqueues. `context` makes ``worqr.current()`` work where a handler is
called as the function that it is. Fixtures for pytest are in ``pytest_worqr``, which pytest finds by itself.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from worqr.mesh import Mesh
from worqr.testing.benches import Bench, bench
from worqr.testing.contexts import DirectContext, context
from worqr.testing.recording import RecordedJob, recording
from worqr.testing.running import Summary
from worqr.testing.staging import Sent

__all__ = [
    "Bench",
    "DirectContext",
    "OpenBench",
    "Record",
    "RecordedJob",
    "Sent",
    "Summary",
    "bench",
    "context",
    "recording",
]


class OpenBench(Protocol):
    """What the fixture ``worqr_bench`` gives: puts a mesh on a bench until the test ends. The arguments are those of `bench`."""

    async def __call__(self, mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None) -> Bench: ...


Record = Callable[[Mesh[Any]], Sent]
"""What the fixture ``worqr_recording`` gives: records what is sent until the test ends."""
