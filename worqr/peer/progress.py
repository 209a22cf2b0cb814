"""`ProgressReporter`: sends the progress of runs, at most ten times a second, and only the latest report of each run.

A handler reports from the loop or from its thread, and never waits. One task per peer collects the reports, and sends one request
per queue.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS
from worqr.peer.consumer import QueueConsumer
from worqr.peer.run import Run

logger: logging.Logger = logging.getLogger(__name__)

SEND_EVERY = 0.1


class ProgressReporter:
    """The unsent progress of the runs of one peer. `report` is called from any thread, everything else in the loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._latest: dict[Run[QueueConsumer], tuple[float | None, str]] = {}
        self._unsent: dict[Run[QueueConsumer], None] = {}
        self._reported = RepeatedEvent()

    def report(self, run: Run[QueueConsumer], done: float | None, message: str) -> None:
        """Keep the progress of `run`, to be sent. From any thread: adding to a dict is atomic.

        The thread may run another loop, in which the event of the peer's loop must not be set. The thread may also outlive the
        peer's loop. The report is kept first: `send_once` reads it after it has taken the run off the list.
        """
        self._latest[run] = (done, message)
        if run not in self._unsent:
            self._unsent[run] = None
            if threading.get_ident() == self._thread and trio.lowlevel.in_trio_task():
                self._reported.set()
            else:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._reported.set)

    async def send_forever(self) -> None:
        """Send the reports, wait, and send those that arrived while it waited."""
        while True:
            if not self._unsent:
                await self._reported.wait()
            self.send_once()
            await trio.sleep(SEND_EVERY)

    def send_once(self) -> None:
        """Send the latest report of each run; reports of ended runs are dropped."""
        reports: dict[QueueConsumer, list[tuple[int, float | None, str]]] = {}
        for run in list(self._unsent):
            del self._unsent[run]
            report = self._latest.pop(run, None)
            if report is not None and not run.settled and not run.registration.dead:
                reports.setdefault(run.host, []).append((run.fence, *report))
        for consumer, batch in reports.items():
            registration = consumer.registration
            if registration is not None and not registration.dead:
                for start in range(0, len(batch), MAX_ITEMS):
                    call = ops.note_progress(consumer.keys, registration.worker, batch[start : start + MAX_ITEMS])
                    self._link.post(call, self._answered, owner=registration)

    @staticmethod
    def _answered(_noted: int | None, failure: Exception | None) -> None:
        if failure is not None:
            emit(logger, "note_progress", "the progress of tasks was not stored: %(error)s", error=str(failure))
