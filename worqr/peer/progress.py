"""`ProgressReporter`: sends the progress of runs, at most ten times a second, and only the latest report of each run.

A handler reports from the loop or from its thread, and never waits. One task per peer collects the reports, and sends one request
per queue. The last report of a run is sent right before the request that ends its claim: requests of one queue keep their order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS
from worqr.peer.consumer import QueueConsumer
from worqr.peer.registration import Registration
from worqr.peer.run import Run

logger: logging.Logger = logging.getLogger(__name__)

SEND_EVERY = 0.1


class ProgressReporter:
    """The unsent progress of the runs of one peer. `report` is called from any thread, everything else in the loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._unsent: dict[tuple[str, int], tuple[Run[QueueConsumer], float | None, str]] = {}  # by base and claim
        self._reported = RepeatedEvent()

    def report(self, run: Run[QueueConsumer], done: float | None, message: str) -> None:
        """Keep the progress of `run`, to be sent. From any thread: adding to a dict is atomic.

        The thread may run another loop, in which the event of the peer's loop must not be set. The thread may also outlive the
        peer's loop.
        """
        claim = (run.host.keys.base, run.fence)
        is_listed = claim in self._unsent
        self._unsent[claim] = (run, done, message)
        if not is_listed:
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
        """Send the latest report of each run. The server ignores reports of claims that have ended."""
        reports: dict[QueueConsumer, list[tuple[int, float | None, str]]] = {}
        for claim in list(self._unsent):
            run, done, message = self._unsent.pop(claim)
            if not run.registration.dead:
                reports.setdefault(run.host, []).append((run.fence, done, message))
        for consumer, batch in reports.items():
            registration = consumer.registration
            if registration is not None and not registration.dead:
                for start in range(0, len(batch), MAX_ITEMS):
                    self._send(consumer.keys, registration, batch[start : start + MAX_ITEMS])

    def send_before_end(self, keys: QueueKeys, registration: Registration, claims: Sequence[int]) -> None:
        """Send the unsent reports of claims which the next request ends. Costs nothing if there are none."""
        if self._unsent:
            ending = [(claim, self._unsent.pop((keys.base, claim), None)) for claim in claims]
            reports = [(claim, *report[1:]) for claim, report in ending if report is not None]
            if reports:
                self._send(keys, registration, reports)

    def _send(
        self, keys: QueueKeys, registration: Registration, reports: Sequence[tuple[int, float | None, str]]
    ) -> None:
        self._link.post(ops.note_progress(keys, registration.worker, reports), self._answered, owner=registration)

    @staticmethod
    def _answered(_noted: int | None, failure: Exception | None) -> None:
        if failure is not None:
            emit(logger, "note_progress", "the progress of tasks was not stored: %(error)s", error=str(failure))
