"""`StuckHandlerMonitor`: reports runs that were cancelled, for any reason, and do not end.

Such a run cannot be ended from outside: a coroutine that swallows Trio's cancellation, a thread that does not check for it, a
task that blocks its asyncio loop. After a while it is logged, once, with the name and the stack of its handler. Its slot is
given to another task, so that the peer does not run out of slots. The run keeps its claim, so that its task does not run a
second time beside it. When it ends at last, the claim is settled like any other cancelled one.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import trio

from worqr.log_events import emit_fields
from worqr.peer.consumer import HandlerConsumer, QueueConsumer
from worqr.peer.context import Context
from worqr.peer.in_step import next_step
from worqr.peer.running import name_of
from worqr.peer.stacks import Frames, describe
from worqr.peer.task_log import RUN, run_fields

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds, at most, between two checks of cancelled runs."""
OVERDUE_AFTER = 1.0
"""Seconds after its timeout at which a cancelled coroutine should have ended; a thread cannot be stopped at all."""
TRIO_REMEDY = "it swallows trio.Cancelled, or shields itself from it: let it pass, and put a deadline on each shield"


class StuckHandlerMonitor:
    """Watches the cancelled runs of one peer; `after`: seconds until one counts as stuck. Changed only in the loop."""

    def __init__(
        self, consumers: Iterable[QueueConsumer], frames_of: Callable[[Context], Frames], *, after: float
    ) -> None:
        self.after: float = after
        self._consumers = consumers
        self._frames_of = frames_of
        self._since: dict[Context, float] = {}
        self._reported: set[Context] = set()
        self._overdue: set[Context] = set()

    async def watch_forever(self) -> None:
        """Check again and again."""
        while True:
            await next_step(min(LOOK_EVERY, self.after / 4))
            self.look_once()

    def look_once(self) -> None:
        """Note which runs have been cancelled, log those that were cancelled long ago, forget those that ended.

        A run is found in its consumer's `running`, also after the queue was left without it.
        """
        now = trio.current_time()
        for consumer in self._consumers:
            if isinstance(consumer, HandlerConsumer):
                for context in consumer.running.values():
                    if context.cancel_reason is not None:
                        self._since.setdefault(context, now)
        for context, since in tuple(self._since.items()):
            if context._station.running.get(context.fence) is not context:
                self._forget(context, now - since)
            else:
                self._look_at(context, now - since)

    def _look_at(self, context: Context, seconds: float) -> None:
        if context.cancel_reason == "timeout" and context not in self._overdue:
            elsewhere = context._elsewhere
            if seconds >= OVERDUE_AFTER or (elsewhere is not None and not elsewhere.stoppable and elsewhere.where()):
                self._overdue.add(context)
                self._tell_overdue(context)
        if seconds >= self.after and context not in self._reported:
            self._report(context, seconds)

    def _tell_overdue(self, context: Context) -> None:
        remedy = TRIO_REMEDY if context._elsewhere is None else context._elsewhere.overdue_remedy
        fields = {**self.fields(context), "timeout": context._policy.timeout}
        text = f"{RUN}: %(handler)s still runs after its timeout of %(timeout)g s; {remedy}; it is at\n%(where)s"
        emit_fields(logger, "task.overdue", text, fields)

    def _report(self, context: Context, seconds: float) -> None:
        self._reported.add(context)
        text = (
            f"{RUN}: %(handler)s still runs %(duration)s s after it was cancelled (%(reason)s); another task gets its slot; "
            "it is at\n%(where)s"
        )
        fields = {**self.fields(context), "duration": round(seconds, 1), "reason": context.cancel_reason}
        emit_fields(logger, "task.stuck", text, fields)
        elsewhere = context._elsewhere
        context._station.release_slot_of_stuck_run(context, place=elsewhere is not None and elsewhere.replace())

    def _forget(self, context: Context, seconds: float) -> None:
        del self._since[context]
        self._overdue.discard(context)
        if context in self._reported:
            self._reported.discard(context)
            fields = {**run_fields(context), "handler": self._name(context), "duration": round(seconds, 1)}
            text = f"{RUN}: %(handler)s ended %(duration)s s after it was cancelled"
            emit_fields(logger, "task.unstuck", text, fields)

    def fields(self, context: Context) -> dict[str, object]:
        """The run, and the current stack of its handler: fields for the log."""
        return {**run_fields(context), "handler": self._name(context), "where": self.where(context)}

    def _name(self, context: Context) -> str:
        return name_of(context._station.handler)

    def where(self, context: Context) -> str:
        """The current stack of its handler, as in a traceback."""
        elsewhere = context._elsewhere
        where = "" if elsewhere is None else elsewhere.where()
        return where or describe(self._frames_of(context))
