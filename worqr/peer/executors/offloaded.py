"""`OffloadedRun`: a run in a thread or on an asyncio loop, for which a slot on the Trio loop waits.

The Trio loop cannot stop such a run, only request that it stops. So its slot waits until the run has really ended, even if the
slot is cancelled. The claim is then settled by the return value or the error of the handler. Only a peer that leaves limits the
wait: it leaves a run behind that does not end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import trio

from worqr.peer.results import describe_end, encoded_outcome
from worqr.peer.run import current_run

Abort = Callable[[Callable[[], Any]], trio.lowlevel.Abort]


class OffloadedRun:
    """One such run. The slot that waits for it makes it.

    Only the code that runs the handler changes `raised`, `_value`, `_error` and `_ended`. `raised`: the error that left the slot
    is the handler's own. The rest is changed only in the loop.
    """

    __slots__ = ("_claim", "_ended", "_error", "_token", "_value", "_waiting", "raised")

    overdue_remedy: ClassVar[str] = ""
    """A remedy for the author of a handler that still runs after its timeout."""
    stoppable: ClassVar[bool] = True
    """The run can be stopped from outside, if its handler cooperates."""

    def __init__(self) -> None:
        self._claim = run = current_run.get(None)
        if run is not None:
            run.offload(self)
        self.raised: bool = False
        self._token = trio.lowlevel.current_trio_token()
        self._value: object = None
        self._error: BaseException | None = None
        self._ended = False
        self._waiting: trio.lowlevel.Task | None = None

    # Called by its peer, in the Trio loop

    @property
    def killed_output(self) -> str:
        """The standard error of a process that was killed; empty if none was killed."""
        return ""

    @property
    def detachable(self) -> bool:
        """A slot waits for this run and nothing else."""
        return self._waiting is not None

    def current_stack(self) -> str:
        """Return the present stack of the handler, formatted as in a traceback; empty if it does not run."""
        raise NotImplementedError

    def allow_replacement(self) -> bool:
        """Let another run take the place of a handler that is stuck. Return False if there is no such place.

        May be called twice.
        """
        return False

    def detach(self) -> None:
        """Stop waiting for a run that was cancelled. The slot continues as if the handler had ended."""
        self._wake()

    # Called by its handler, in the handler's thread or loop

    def check_cancelled(self) -> None:
        """Raise the cancellation error of that thread or loop, if the run is being cancelled."""
        raise NotImplementedError

    def _note_value(self, value: object, max_result: int | None) -> None:
        """Note what the handler returned; with `max_result`, encode it here, and not on the Trio loop."""
        self._value = value
        if max_result is not None:
            try:
                self._value = encoded_outcome(self._claim, value, max_result)
            except BaseException:  # noqa: S110 - its settler encodes it, and handles what that raises
                pass

    def _note_error(self, error: BaseException) -> None:
        """Note what the handler raised, and describe it here, and not on the Trio loop."""
        self._error = error
        try:
            describe_end(self._claim, error)
        except BaseException:  # noqa: S110 - its settler describes it, and handles what that raises
            pass

    def _has_ended(self) -> None:
        """Note that the handler has ended. Called as the last step, in the thread or loop in which it ran."""
        self._ended = True
        if self._waiting is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    # Called by its slot

    async def _wait_ended(self, abort: Abort) -> None:
        """Wait until the run has ended, or until the slot has to stop waiting.

        The run sets `_ended` before it reads `_waiting`, and this task sets `_waiting` before it reads `_ended`. So at least one
        of them notices the other. If both do, the task does not wait, and the wake-up finds no task.
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
    """Continue to wait after a cancellation."""
    return trio.lowlevel.Abort.FAILED
