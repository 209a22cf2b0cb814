"""`RunReports`: what the runs of a peer send while their handlers run: progress, at most ten times a second, and what they save.

A handler reports and saves from the loop, its thread, or an asyncio loop. A report never waits: one task per peer collects the
reports, and sends one request per queue, with the latest report of each run. The last report of a run is sent right before the
request that ends its claim, because requests of one queue keep their order. For the same reason, what a run has saved is stored
before its claim ends. A save is resent until the server replies, or until its worker is declared dead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from trio_util import RepeatedEvent

from worqr import child_processes, ops
from worqr.codecs import StoredValues, WrongKey
from worqr.errors import ClaimLost, UsageError
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Child, NotedChildren, Progress
from worqr.peer.run import FULL, Run, Save, opened_end, redacted_save, sealed_save
from worqr.policy import Failure, Undecodable

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer
    from worqr.peer.session import Registration

logger: logging.Logger = logging.getLogger(__name__)

SEND_EVERY = 0.1
LOST: Final = (
    "the task was reassigned to another worker or has ended, so nothing more is saved for it here: let the run end"
)


class RunReports:
    """What the runs of one peer report and save. `report` and `save` are called from any thread, everything else in the loop.

    Attributes:
        unsent: the latest progress of runs, by base and claim.
    """

    def __init__(self, link: Link, values: StoredValues | None = None, *, redacts: bool = False) -> None:
        self.unsent: dict[tuple[str, int], tuple[Run[QueueConsumer], Progress]] = {}
        self._adding = threading.Lock()
        self._link = link
        self._values = values
        self._redacts = redacts
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._forks = child_processes.forks
        self._reported = RepeatedEvent()

    @property
    def _in_loop(self) -> bool:
        """This thread runs the loop of the peer, and a task of it: not an asyncio loop, and not a thread of a handler."""
        return threading.get_ident() == self._thread and trio.lowlevel.in_trio_task()

    # What runs save

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send `save`. From any thread; never waits.

        Returns:
            A future that is done when the server has replied. Its error is ClaimLost, UsageError, Failure or RefusedByServer;
            Unavailable if the peer has left.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a task that stops waiting does not cancel it
        try:
            save = self._as_stored(save)
        except UsageError as error:
            done.set_exception(error)
            return done
        self._do(partial(self._send_save, run, save, done), done)
        return done

    def _do(self, send: Callable[[], None], done: Future[Any]) -> None:
        """Call `send` in the loop, or note in `done` why that cannot be: a fork of this process has no loop, for instance."""
        if child_processes.forks != self._forks:
            done.set_exception(
                UsageError("a fork of the worker cannot save: save in the process of the handler itself")
            )
        elif self._in_loop:
            send()
        else:
            try:
                self._token.run_sync_soon(send)
            except trio.RunFinishedError:
                done.set_exception(ClaimLost(LOST))

    def _as_stored(self, save: Save) -> Save:
        """Return what a run saves as the mesh stores it. Raises UsageError if its codec cannot encode it."""
        if self._redacts:
            save = redacted_save(save)
        return save if self._values is None else sealed_save(save, self._values)

    def _send_save(self, run: Run[Any], save: Save, done: Future[None]) -> None:
        def replied(word: str | None, error: Exception | None) -> None:
            if word == "lost" or isinstance(error, ClaimLost):
                run.note_lost()
            outcome = _error_of(save, word, error)
            if outcome is None:
                if save.progress:
                    run.note_progress()
                done.set_result(None)
            else:
                done.set_exception(outcome)

        if run.settled or run.registration.dead:
            replied("lost", None)
            return
        claim = run.host.keys, run.registration.worker, run.fence
        if save.refused:
            call = ops.refuse_event(*claim, save.step)
        else:
            call = ops.save_state(*claim, save.number, save.step, save.value, progress=save.progress, took=save.took)
        self._link.post(call, replied, owner=run.registration)

    def note_children(self, run: Run[Any], children: Sequence[Child]) -> Future[NotedChildren]:
        """Note that the run of a workflow starts jobs. From any thread; never waits."""
        done: Future[NotedChildren] = Future()
        done.set_running_or_notify_cancel()

        def replied(noted: NotedChildren | None, error: Exception | None) -> None:
            try:
                found = None if noted is None else self._opened(noted, children)
            except (WrongKey, Undecodable) as raised:
                found, error = None, raised
            if found is None:
                done.set_exception(error or ClaimLost(LOST))
            else:
                done.set_result(found)

        def send() -> None:
            if run.settled or run.registration.dead:
                replied(None, None)
                return
            call = ops.note_children(run.host.keys, run.registration.worker, run.fence, children)
            self._link.post(call, replied, owner=run.registration)

        self._do(send, done)
        return done

    def _opened(self, noted: NotedChildren, children: Sequence[Child]) -> NotedChildren:
        """Return what the server knows of jobs that a run starts, with their results decoded."""
        if (values := self._values) is None:
            return noted
        opened = [
            child if child.end is None else child._replace(end=opened_end(each.key.encode(), child.end, values))
            for child, each in zip(noted.children, children, strict=False)
        ]
        return replace(noted, children=opened)

    # Progress

    def report(self, run: Run[QueueConsumer], done: float | None, message: str, value: bytes = b"") -> None:
        """Keep the progress of `run`, to be sent, with the value that was not sent yet. From any thread.

        The thread may run another loop, in which the event of the peer's loop must not be set. The thread may also outlive the
        peer's loop.
        """
        claim = (run.host.keys.base, run.fence)
        with self._adding:  # two threads of a run may report at the same time
            before = self.unsent.get(claim)
            is_listed = before is not None
            value = value or (before[1].value if before else b"")
            self.unsent[claim] = (run, Progress(run.fence, done, message, value))
        if not is_listed:
            if self._in_loop:
                self._reported.set()
            else:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._reported.set)

    async def send_forever(self) -> None:
        """Send the reports, wait, and send those that arrived while it waited."""
        while True:
            if not self.unsent:
                await self._reported.wait()
            self.send_once()
            await trio.sleep(SEND_EVERY)

    def send_once(self) -> None:
        """Send the latest report of each run. The server ignores reports of claims that have ended."""
        reports: dict[QueueConsumer, list[Progress]] = {}
        for claim in list(self.unsent):
            run, report = self.unsent.pop(claim)
            if not run.registration.dead:
                reports.setdefault(run.host, []).append(report)
        for consumer, batch in reports.items():
            registration = consumer.registration
            if registration is not None and not registration.dead:
                for start in range(0, len(batch), MAX_ITEMS):
                    self._send(consumer.keys, registration, batch[start : start + MAX_ITEMS])

    def send_before_end(self, keys: QueueKeys, registration: Registration, claims: Sequence[int]) -> None:
        """Send the unsent reports of claims which the next request ends. Costs nothing if there are none."""
        if self.unsent:
            ending = [self.unsent.pop((keys.base, claim), None) for claim in claims]
            reports = [found[1] for found in ending if found is not None]
            if reports:
                self._send(keys, registration, reports)

    def _send(self, keys: QueueKeys, registration: Registration, reports: Sequence[Progress]) -> None:
        stored = [self._sealed(report) if report.value else report for report in reports]
        self._link.post(ops.note_progress(keys, registration.worker, stored), self._answered, owner=registration)

    def _sealed(self, report: Progress) -> Progress:
        """Return a report with its value as the mesh stores it; without it, if the codec cannot encode it."""
        if self._values is None:
            return report
        try:
            return report._replace(value=self._values.encode_tagged(report.value))
        except UsageError as error:
            self._answered(None, error)
            return report._replace(value=b"")

    @staticmethod
    def _answered(_noted: int | None, failure: Exception | None) -> None:
        if failure is not None:
            emit(logger, "note_progress", "the progress of tasks was not stored: %(error)s", error=str(failure))


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
