"""Runs that happen elsewhere than on the loop, in a thread or on an asyncio loop, and the slot that waits for them.

Such a run cannot be stopped from here, only told to stop. So its slot waits until it has really ended, even if the slot is
cancelled meanwhile; the claim is settled by what the handler then returned or raised. Only a peer that leaves does not wait for
ever: it lets go of a run that does not end.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import trio

from worqr.peer.context import current_context

Abort = Callable[[Callable[[], Any]], trio.lowlevel.Abort]


class Elsewhere:
    """One such run, made in the slot that waits for it.

    Changed only by the code that runs the handler: `raised` (what came out of the slot is the handler's own), `_value`, `_error`,
    `_ended`. Changed only in the loop: the rest.
    """

    __slots__ = ("_ended", "_error", "_token", "_value", "_waiting", "raised")

    overdue_remedy: ClassVar[str] = ""
    """What its author can do about a handler that goes on after its timeout."""
    stoppable: ClassVar[bool] = True
    """It can be made to stop from outside, if its handler lets it."""

    def __init__(self) -> None:
        context = current_context.get(None)
        if context is not None:
            context._elsewhere = self
        self.raised: bool = False
        self._token = trio.lowlevel.current_trio_token()
        self._value: object = None
        self._error: BaseException | None = None
        self._ended = False
        self._waiting: trio.lowlevel.Task | None = None

    # What its watchers may do, in the loop

    @property
    def can_be_let_go(self) -> bool:
        """A slot waits for nothing but this."""
        return self._waiting is not None

    def where(self) -> str:
        """Where the handler is at this moment, as in a traceback; empty if it has ended, or not begun."""
        raise NotImplementedError

    def replace(self) -> bool:
        """The handler is stuck: let another one run in its place; False if there is none to give. Twice is harmless."""
        return False

    def let_go(self) -> None:
        """Wait no longer for a run that was cancelled: the slot goes on as if the handler had ended."""
        self._wake()

    # What its handler may do, there

    def check_cancelled(self) -> None:
        """Raise in the way of that place if the run is being cancelled."""
        raise NotImplementedError

    def _has_ended(self) -> None:
        """The handler has ended; called where it ran, last of all."""
        self._ended = True
        if self._waiting is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    # What its slot does

    async def _park(self, abort: Abort) -> None:
        """Wait until it has ended, or until the slot is to wait no longer.

        Either this task sees that the run has ended, or the run sees that this task waits. Both together do no harm.
        """
        self._waiting = trio.lowlevel.current_task()
        if self._ended:
            self._waiting = None
        else:
            await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _outcome(self) -> object:
        """What the handler returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        self.raised = True
        try:
            raise error
        finally:
            del error


def no_abort(_: object) -> trio.lowlevel.Abort:
    """A wait that is not cut short by a cancellation."""
    return trio.lowlevel.Abort.FAILED
