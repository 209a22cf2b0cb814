"""`StateSaver`: sends what runs save, for one peer. A handler saves from the loop, its thread, or an asyncio loop."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Final

import trio

from worqr import ops
from worqr.errors import ClaimLost, UsageError
from worqr.link import Link
from worqr.peer.run import Run, Save
from worqr.peer.saved_state import FULL
from worqr.policy import Failure

LOST: Final = (
    "the task was reassigned to another worker or has ended, so nothing more is saved for it here: let the run end"
)


class StateSaver:
    """Sends what the runs of one peer save.

    A save is resent until the server replies, or until its worker is declared dead. The requests of one queue keep their order,
    so that what a run has saved is stored before its claim ends.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send `save`. From any thread; never waits.

        Returns:
            A future that is done when the server has replied. Its error is ClaimLost, UsageError, Failure or RefusedByServer;
            Unavailable if the peer has left.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a task that stops waiting does not cancel it
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_task():
            self._send(run, save, done)
        else:
            try:
                self._token.run_sync_soon(self._send, run, save, done)
            except trio.RunFinishedError:
                done.set_exception(ClaimLost(LOST))
        return done

    def _send(self, run: Run[Any], save: Save, done: Future[None]) -> None:
        def replied(word: str | None, error: Exception | None) -> None:
            if word == "lost" or isinstance(error, ClaimLost):
                run.note_lost()
            outcome = _error_of(save, word, error)
            if outcome is None:
                done.set_result(None)
            else:
                done.set_exception(outcome)

        if run.settled or run.registration.dead:
            replied("lost", None)
            return
        call = ops.save_state(run.host.keys, run.registration.worker, run.fence, save.number, save.step, save.value)
        self._link.post(call, replied, owner=run.registration)


def _error_of(save: Save, word: str | None, error: Exception | None) -> Exception | None:
    """Return the error for the handler, or None."""
    if error is not None:
        return ClaimLost(LOST) if isinstance(error, ClaimLost) else error
    if word == "lost":
        return ClaimLost(LOST)
    if word == "full":
        if save.step:
            return Failure(f"step {save.step!r} was done, but its result cannot be saved: {FULL}")
        return UsageError(f"{len(save.value):,} bytes cannot be saved: {FULL}")
    return None
