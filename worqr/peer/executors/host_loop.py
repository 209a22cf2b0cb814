"""`HostLoop`: the application's own asyncio loop, on which the handlers of its peer run: for ``async with mesh.join():`` under
asyncio.

The peer's Trio loop runs in a thread of its own. So a handler or a route that blocks the asyncio loop does not delay the
heartbeat. The peer checks the loop periodically. It logs a loop that is blocked, and requests no tasks for it until it runs
again. If the loop ends inside the block, the peer leaves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import trio

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.executors.asyncio_loop import AsyncioLoop
from worqr.peer.scheduler import Pool

if TYPE_CHECKING:
    from worqr.peer.executors.asyncio_loop import AsyncioRun

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY: Final = 0.5
"""Seconds between two checks of the loop."""
BLOCKED_AFTER: Final = 1.0
"""Seconds without a turn of the loop after which it counts as blocked."""
UNLIMITED: Final = 1_000_000
"""Limit of runs on a loop that is not blocked; a peer has fewer units."""


class _Gate(Pool):
    """The limit of runs on the loop: none while it runs, 0 while it is blocked."""

    __slots__ = ()

    def close(self) -> None:
        """Prevent further runs from beginning."""
        self.limit = 0

    def open(self) -> None:
        """Permit any number of runs to begin."""
        self.limit = UNLIMITED


class HostLoop(AsyncioLoop):
    """The asyncio loop in which this object is made.

    Set once, by `attach`: `_token`. Changed in the asyncio loop: `_probe_sent_at`, to None. Changed in the Trio loop: the rest.
    """

    owned_by_application: ClassVar[bool] = True

    def __init__(self, is_exiting: Callable[[], bool]) -> None:
        """`is_exiting` returns True after the interpreter has begun to exit: then no loop of the main thread runs again."""
        super().__init__()
        self._is_exiting = is_exiting
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._gate = _Gate(UNLIMITED)
        self.pool: Pool | None = self._gate
        self._probe_sent_at: float | None = None
        self._checked_at = time.monotonic()
        self._blocked_since: float | None = None
        self._reported = False
        self._ended_inside = False

    @property
    def blocked(self) -> bool:
        """The loop has had no turn for `BLOCKED_AFTER` seconds."""
        return self._blocked_since is not None

    @property
    def lag(self) -> float:
        """Seconds for which the loop has had no turn. From any thread."""
        probe_sent_at = self._probe_sent_at
        if probe_sent_at is None or threading.current_thread() is self._thread:
            return 0.0
        return time.monotonic() - probe_sent_at

    # In the Trio loop

    def attach(self) -> None:
        """Connect this Trio loop, so that its runs can begin on the asyncio loop."""
        self._token = trio.lowlevel.current_trio_token()

    def start(self, run: AsyncioRun) -> None:
        """Begin `run` on the loop.

        On a closed loop it never begins. The peer then cancels it, and its task returns to the queue.
        """
        with suppress(RuntimeError):
            super().start(run)

    async def end(self) -> None:
        """Do nothing: the loop is the application's, and does not end with the peer."""
        await trio.lowlevel.checkpoint()

    def call_if_open(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the asyncio loop; return False if the loop has ended."""
        return not self._has_ended() and super().call_if_open(callback)

    async def watch_forever(self, block_limit: float, ended: Callable[[], object], turns: Callable[[], object]) -> None:
        """Check the loop periodically, until it has ended.

        Args:
            block_limit: seconds without a turn after which the log asks for a restart.
            ended: called when the loop has ended.
            turns: called when a blocked loop runs again, because runs may begin.
        """
        while not self._has_ended():
            self._check(block_limit, turns)
            await trio.sleep(CHECK_EVERY)
        self._ended_inside = True
        ended()

    def raise_if_ended(self) -> None:
        """Raise UsageError if the loop ended while the peer was there."""
        if self._ended_inside:
            raise UsageError(
                "the asyncio loop ended inside `async with mesh.join():`; leave the block before the loop ends"
            )

    def _has_ended(self) -> bool:
        """Return True if nothing runs on the loop any more.

        A loop that is only stopped may run again, unless the interpreter exits.
        """
        loop = self._loop
        return loop is None or loop.is_closed() or (self._is_exiting() and not loop.is_running())

    def _check(self, block_limit: float, turns: Callable[[], object]) -> None:
        """Evaluate the last probe, and send the next one if the loop has replied to it."""
        now = time.monotonic()
        overslept, self._checked_at = now - self._checked_at - CHECK_EVERY, now
        probe_sent_at = self._probe_sent_at
        if probe_sent_at is None:
            if self._blocked_since is not None:
                self._report_running(now - self._blocked_since)
                turns()
            self._probe_sent_at = now
            self.call_if_open(self._on_reply)
        elif overslept > BLOCKED_AFTER:
            self._probe_sent_at = probe_sent_at + overslept  # this thread could not run, and perhaps the loop could not
        elif now - probe_sent_at > BLOCKED_AFTER:
            self._report_blocked(now - probe_sent_at, block_limit)

    def _report_blocked(self, seconds: float, limit: float) -> None:
        if self._blocked_since is None:
            self._blocked_since = time.monotonic() - seconds
            self._gate.close()
            text = (
                "the application's asyncio loop has not turned for %(duration).1f s, and this worker takes no tasks for it "
                "until it does; let blocking code run in a thread; it is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, duration=seconds, where=self.current_stack())
        elif seconds > limit and not self._reported:
            self._reported = True
            text = (
                "the application's asyncio loop has not turned for %(duration).1f s, and the tasks on it stay with this worker; "
                "restart the process if it does not end; it is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, level=logging.ERROR, duration=seconds, where=self.current_stack())

    def _report_running(self, seconds: float) -> None:
        self._blocked_since, self._reported = None, False
        text = "the application's asyncio loop turns again, after %(duration).1f s"
        emit(logger, "asyncio.turns", text, duration=seconds)
        self._gate.open()

    # In the asyncio loop

    def _on_reply(self) -> None:
        self._probe_sent_at = None
