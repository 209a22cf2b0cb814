"""Calling a handler directly: a `Context` without a run, for handlers that call ``worqr.current()``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from worqr.errors import UsageError
from worqr.job_options import check_id, encode_options
from worqr.peer.context import Context, current_context
from worqr.policy import Policy
from worqr.validation import Seconds, check_task
from worqr.validation import seconds as seconds_of

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer
    from worqr.peer.registration import Registration

_MOST: Final = 16 * 1024 * 1024


class _Nowhere:
    """The part of a queue's station that a context uses."""

    queue: Final = "test"
    mark: Final = ""
    policy: Final = Policy()

    def __init__(self, state: object) -> None:
        self.state = state
        self.said: list[tuple[float | None, str]] = []

    def says(self, context: Context) -> None:
        said = context._said  # pyright: ignore[reportPrivateUsage]
        assert said is not None
        self.said.append(said)


class DirectContext(Context):
    """What ``worqr.current()`` returns inside `context`.

    Attributes:
        reported: What the handler reported with `progress`, in order: the number and the message.
        extended: What it passed to `extend`, in seconds.
    """

    def __init__(self, entry: list[bytes], state: object) -> None:
        station = _Nowhere(state)
        fence = time.time_ns() // 1000
        super().__init__(cast("QueueConsumer", station), cast("Registration", None), fence, entry)
        self.reported: list[tuple[float | None, str]] = station.said
        self.extended: list[float] = []

    def extend(self, seconds: Seconds) -> None:
        """Add the seconds to `extended`; this run has no deadline.

        Args:
            seconds: More than 0, or a timedelta.

        Raises:
            UsageError: `seconds` is not valid.
        """
        self.extended.append(seconds_of(seconds, "seconds of extend", positive=True))

    def check_cancelled(self) -> None:
        """Raise ``trio.Cancelled`` in a thread of ``trio.to_thread`` that the test has cancelled; else do nothing."""
        if not trio.lowlevel.in_trio_task():
            try:
                trio.from_thread.check_cancelled()
            except RuntimeError:
                pass  # the test calls the function directly


@contextmanager
def context(
    *,
    id: str = "test",
    task: bytes = b"",
    failures: int = 0,
    meta: Mapping[str, str] | None = None,
    state: Any = None,
) -> Generator[DirectContext]:
    """Make ``worqr.current()`` work inside the block, to call a handler directly, without a mesh or a server.

    The run is of a queue ``test`` with the default retry policy. It is not settled, and not cancelled. Child tasks and
    threads of ``trio.to_thread`` see it too.

    Args:
        id: The job's id.
        task: The payload.
        failures: The number of earlier failures; 9 makes this the last attempt.
        meta: The `meta` of the dispatch.
        state: The value that the mesh's lifespan would yield.

    Yields:
        DirectContext: The run.

    Raises:
        UsageError: An argument is not valid.
    """
    if isinstance(failures, bool) or not isinstance(failures, int) or failures < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"failures must be a whole number, at least 0, not {failures!r}")
    entry = [b"id", check_id(id, generated=True).encode(), b"task", check_task(task, _MOST)]
    entry += [b"failures", str(failures).encode()]
    if meta:
        entry += [b"meta", str(encode_options({"meta": meta})["meta"]).encode()]
    found = DirectContext(entry, state)
    token = current_context.set(found)
    try:
        yield found
    finally:
        current_context.reset(token)
