"""`StarvationDetector`: detects a handler that waits for a job which cannot run, because waiting handlers hold all slots.

A handler keeps its slot while it waits for the result of another job. With a concurrency of 1, that job never gets a slot.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from worqr.log_events import emit
from worqr.peer.run import current_run
from worqr.peer.scheduler import Scheduler

logger: logging.Logger = logging.getLogger(__name__)

CHECK_AFTER: Final = 10.0
"""Seconds that a handler waits before the first check for a slot, and between two checks."""


class StarvationDetector:
    """Watches one call that waits for a job of `queue`.

    Detects something only if the call is in a handler on the loop, on asyncio or in a thread.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._run = current_run.get(None)
        scheduler = getattr(getattr(self._run, "host", None), "scheduler", None)
        # None: no handler, or a handler in a worker process
        self._scheduler = scheduler if isinstance(scheduler, Scheduler) else None
        self._check_at = time.monotonic() + CHECK_AFTER

    def should_check(self) -> bool:
        """Return True if the caller should check the job now: the worker has no slot for it, and nothing was logged."""
        if self._scheduler is None or time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + CHECK_AFTER
        return self._queue not in self._scheduler.reported_full and self._scheduler.is_full_for(self._queue)

    def warn(self, id: str) -> None:
        """Log that the job of this id still waits, once per worker and queue."""
        if self._run is None or self._scheduler is None:
            return
        # setdefault is atomic: calls in other threads may wait for the same queue
        if self._scheduler.reported_full.setdefault(self._queue, self) is not self:
            return
        emit(
            logger,
            "result.no_slot",
            "a handler of queue %(queue)r has waited %(duration)g s for the result of job %(awaited_job)r of queue "
            "%(awaited_queue)r, and this worker has no free slot to run that job. A handler keeps its slot while it waits. "
            "Raise the concurrency of the worker or of the function, or let another worker serve %(awaited_queue)r.",
            queue=self._run.queue,
            duration=CHECK_AFTER,
            awaited_queue=self._queue,
            awaited_job=id,
        )
