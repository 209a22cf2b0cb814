"""`StuckHandlerMonitor`: reports runs that were cancelled, for any reason, and do not end.

The peer cannot end such a run. Its coroutine swallows Trio's cancellation, its thread does not check for one, or its task blocks
the asyncio loop. After some time, the monitor logs it once, with the name and the stack of its handler. It gives the slot to
another task, so that the peer does not run out of slots. The run keeps its claim, so that its task does not run a second time in
parallel. When the run ends, the claim is settled like any other cancelled one.

It also finds *orphans*: runs that hold units while no slot has them, because an error ended the slot before the claim was
settled. That is a bug of worqr. The peer is not ready from then on, and gives their claims back when it leaves.
"""

from __future__ import annotations

import logging
from typing import Any

import trio

from worqr.log_events import emit_fields
from worqr.peer.consumer import ActiveConsumers, HandlerConsumer, QueueConsumer, Slots
from worqr.peer.error_throttle import sleep_aligned
from worqr.peer.executors.offloaded import describe, name_of
from worqr.peer.run import Run
from worqr.peer.task_log import RUN, run_fields

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY = 1.0
"""Seconds between two checks of cancelled runs, at most."""
OVERDUE_AFTER = 1.0
"""Seconds after its timeout within which a cancelled coroutine should end. A thread is reported at once, because it cannot be
stopped.
"""
TRIO_REMEDY = "it swallows trio.Cancelled, or shields itself from it: let it pass, and put a deadline on each shield"


class StuckHandlerMonitor:
    """Watches the runs of one peer; `after`: seconds until a cancelled one counts as stuck. Changed only in the loop.

    Attributes:
        orphaned: how many runs no slot had at the last check.
    """

    def __init__(self, consumers: ActiveConsumers, slots: Slots, *, after: float) -> None:
        self.after: float = after
        self.orphaned: int = 0
        self._consumers = consumers
        self._slots = slots
        self._since: dict[Run[QueueConsumer], float] = {}
        self._reported: set[Run[QueueConsumer]] = set()
        self._overdue: set[Run[QueueConsumer]] = set()

    @property
    def stuck(self) -> int:
        """How many runs are stuck; from any thread."""
        return len(self._reported)

    async def watch_forever(self) -> None:
        """Check the runs periodically."""
        while True:
            await sleep_aligned(min(CHECK_EVERY, self.after / 4))
            self.check_once()
            self._check_orphans()

    def check_once(self) -> None:
        """Find cancelled runs, log those that were cancelled long ago, and forget those that have ended.

        A run is found in its consumer's `running`, even after the queue was left without it.
        """
        now = trio.current_time()
        for consumer in self._consumers:
            if isinstance(consumer, HandlerConsumer):
                for run in consumer.executing.values():
                    if run.cancel_reason is not None:
                        self._since.setdefault(run, now)
        for run, since in tuple(self._since.items()):
            if run.host.executing.get(run.fence) is not run:
                self._forget(run, now - since)
            else:
                self._check(run, now - since)

    def orphans_of(self, consumer: QueueConsumer) -> list[Run[Any]]:
        """Return the runs, or the list runs, of a consumer that no slot has. A run that is being suspended keeps its units until
        the server has replied.
        """
        if not isinstance(consumer, HandlerConsumer):
            return []
        held = self._slots.held()
        return [run for run in consumer.executing.values() if run not in held and run.suspension is None]

    def _check_orphans(self) -> None:
        found = [run for consumer in self._consumers for run in self.orphans_of(consumer)]
        if len(found) > self.orphaned:
            text = (
                f"{RUN}: no handler runs this task any more, and its slot is lost; this is a bug of worqr, please report it, and "
                "restart this worker"
            )
            emit_fields(logger, "task.orphaned", text, run_fields(found[-1]))
        self.orphaned = len(found)

    def _check(self, run: Run[QueueConsumer], seconds: float) -> None:
        if run.cancel_reason == "timeout" and run not in self._overdue:
            offloaded = run.offloaded
            if seconds >= OVERDUE_AFTER or (
                offloaded is not None and not offloaded.stoppable and offloaded.current_stack()
            ):
                self._overdue.add(run)
                self._report_overdue(run)
        if seconds >= self.after and run not in self._reported:
            self._report(run, seconds)

    def _report_overdue(self, run: Run[QueueConsumer]) -> None:
        remedy = (run.offloaded.overdue_remedy if run.offloaded is not None else "") or TRIO_REMEDY
        fields = {**self.fields(run), "timeout": run.policy.timeout}
        text = f"{RUN}: %(handler)s still runs after its timeout of %(timeout)g s; {remedy}; it is at\n%(where)s"
        emit_fields(logger, "task.overdue", text, fields)

    def _report(self, run: Run[QueueConsumer], seconds: float) -> None:
        self._reported.add(run)
        text = (
            f"{RUN}: %(handler)s still runs %(duration)s s after it was cancelled (%(reason)s); another task gets its slot; "
            "it is at\n%(where)s"
        )
        fields = {**self.fields(run), "duration": round(seconds, 1), "reason": run.cancel_reason}
        emit_fields(logger, "task.stuck", text, fields)
        offloaded = run.offloaded
        run.host.release_slot_of_stuck_run(run, place=offloaded is not None and offloaded.allow_replacement())

    def _forget(self, run: Run[QueueConsumer], seconds: float) -> None:
        del self._since[run]
        self._overdue.discard(run)
        if run in self._reported:
            self._reported.discard(run)
            fields = {**run_fields(run), "handler": self._name(run), "duration": round(seconds, 1)}
            text = f"{RUN}: %(handler)s ended %(duration)s s after it was cancelled"
            emit_fields(logger, "task.unstuck", text, fields)

    def fields(self, run: Run[QueueConsumer]) -> dict[str, object]:
        """Return the fields for a log line about a run, with the present stack of its handler."""
        return {**run_fields(run), "handler": self._name(run), "where": self.where(run)}

    def _name(self, run: Run[QueueConsumer]) -> str:
        consumer = run.host
        return name_of(consumer.handler) if isinstance(consumer, HandlerConsumer) else ""

    def where(self, run: Run[QueueConsumer]) -> str:
        """Return the present stack of its handler, formatted as in a traceback."""
        offloaded = run.offloaded
        where = "" if offloaded is None else offloaded.current_stack()
        return where or describe(self._slots.frames_of(run))
