"""Runs in a thread or on an asyncio loop, and the slot on the Trio loop that waits for them.

Such a run cannot be stopped from the Trio loop, only asked to stop. So its slot waits until the run has really ended, even if
the slot is cancelled meanwhile. The claim is then settled by what the handler returned or raised. Only a peer that leaves does
not wait without limit: it leaves a run behind that does not end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import trio

from worqr.peer.run import current_run

Abort = Callable[[Callable[[], Any]], trio.lowlevel.Abort]


class OffloadedRun:
    """One such run, made in the slot that waits for it.

    Changed only by the code that runs the handler: `raised` (what came out of the slot is the handler's own), `_value`, `_error`,
    `_ended`. Changed only in the loop: the rest.
    """

    __slots__ = ("_ended", "_error", "_token", "_value", "_waiting", "raised")

    overdue_remedy: ClassVar[str] = ""
    """A remedy for the author of a handler that runs on after its timeout."""
    stoppable: ClassVar[bool] = True
    """The run can be stopped from outside, if its handler cooperates."""

    def __init__(self) -> None:
        run = current_run.get(None)
        if run is not None:
            run.offload(self)
        self.raised: bool = False
        self._token = trio.lowlevel.current_trio_token()
        self._value: object = None
        self._error: BaseException | None = None
        self._ended = False
        self._waiting: trio.lowlevel.Task | None = None

    # For the code that watches it, in the loop

    @property
    def killed_output(self) -> str:
        """What a process that was killed had written to its standard error; empty: nothing was killed."""
        return ""

    @property
    def detachable(self) -> bool:
        """A slot waits for this run and nothing else."""
        return self._waiting is not None

    def current_stack(self) -> str:
        """The stack of the handler at this moment, as in a traceback; empty if it has ended, or not begun."""
        raise NotImplementedError

    def allow_replacement(self) -> bool:
        """The handler is stuck: let another run take its place; return False if there is none. May be called twice."""
        return False

    def detach(self) -> None:
        """Stop waiting for a run that was cancelled: the slot continues as if the handler had ended."""
        self._wake()

    # For its handler, in the handler's thread or loop

    def check_cancelled(self) -> None:
        """Raise the cancellation error of that thread or loop, if the run is being cancelled."""
        raise NotImplementedError

    def _has_ended(self) -> None:
        """The handler has ended; called where it ran, as the last step."""
        self._ended = True
        if self._waiting is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    # For its slot

    async def _wait_ended(self, abort: Abort) -> None:
        """Wait until the run has ended, or until the slot is to stop waiting.

        Either this task sees that the run has ended, or the run sees that this task waits. Both at once do no harm.
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
        """Return what the handler returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        self.raised = True
        try:
            raise error
        finally:
            del error


def no_abort(_: object) -> trio.lowlevel.Abort:
    """Wait without being cut short by a cancellation."""
    return trio.lowlevel.Abort.FAILED
