"""Settling: how a claim ends, in batches, without holding a slot and without anybody waiting for it.

Finishes, and stops, of one turn of the loop are sent as one request per queue. Every settle carries its registration, so
the link sends it again until it is answered or the worker id is dead; a settle of a dead registration is not sent at all,
for the task is no longer ours.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.call import Call
from worqr.link import Link
from worqr.ops import MAX_ITEMS
from worqr.peer.context import Context
from worqr.task import RemoteError

if TYPE_CHECKING:
    from worqr.keys import QueueKeys
    from worqr.peer.claiming import Station

    Settle = Callable[[QueueKeys, str, list[int]], Call[dict[int, str]]]

logger: logging.Logger = logging.getLogger(__name__)


class Settler:
    """Ends claims. `flushed` is called after each flush: room may have become free."""

    def __init__(self, link: Link, flushed: Callable[[], None]) -> None:
        self._link = link
        self._flushed = flushed
        self._flusher: trio.lowlevel.Task | None = None
        self._dirty: dict[Station, list[int]] = {}
        self._stopped: dict[Station, list[int]] = {}
        self._flush_soon = False

    def ended(self, context: Context, returned: bool, error: BaseException | None) -> None:
        """A handler's run ended: settle its claim as what happened says."""
        if context._settled:
            return
        reason = context.cancel_reason
        if reason == "lost" or context._registration.dead:
            context._settled = True
        elif returned:
            self.finish(context)
        elif reason is not None or error is None:
            self.stop(context)  # one that is marked as to be cancelled ends there, and does not come back
        else:
            self.fail_run(context, error)

    def finish(self, context: Context) -> None:
        """End a claim as finished, with the next flush; one whose cancel mark stands ends as cancelled there."""
        context._settled = True
        self._dirty.setdefault(context._station, []).append(context.fence)
        self.touch()

    def touch(self) -> None:
        """Flush when all that can run in this turn of the loop has run."""
        if not self._flush_soon:
            self._flush_soon = True
            if self._flusher is not None:
                task, self._flusher = self._flusher, None
                trio.lowlevel.reschedule(task)

    async def flush_forever(self) -> None:
        """Flush after each turn that asks for it. A parked task costs less than a callback, which takes a system call."""
        while True:
            if not self._flush_soon:
                self._flusher = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._unpark)
            with self._link.together():
                self.flush()

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._flusher = None
        return trio.lowlevel.Abort.SUCCEEDED

    def flush(self) -> None:
        """Send the finishes of this turn, and the stops of it, but for those of a queue that is just being left."""
        self._flush_soon = False
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for station, claims in dirty.items():
                self._send(ops.finish_tasks, "finish_tasks", station, claims)
        if self._stopped:
            for station in [station for station in self._stopped if not station.unwinding]:
                claims = sorted(self._stopped.pop(station), reverse=True)  # the newest first: the old order stands
                self._send(ops.stop_tasks, "stop_tasks", station, claims)
        self._flushed()

    def _send(self, settle: Settle, verb: str, station: Station, claims: list[int]) -> None:
        registration = station.registration
        if registration is None or registration.dead:
            return
        for start in range(0, len(claims), MAX_ITEMS):
            call = settle(station.keys, registration.worker, claims[start : start + MAX_ITEMS])
            self._link.post(call, partial(self._answered, station, verb), owner=registration)

    def forget(self) -> None:
        """A registration died: what is not sent yet is not ours to send any more."""
        self._dirty.clear()
        self._stopped.clear()

    def left(self, station: Station) -> None:
        """The queue was left: what was stopped there went back with everything else that the worker held."""
        self._stopped.pop(station, None)

    def stop(self, context: Context) -> None:
        """Give a claim back to the front, uncounted, with the next flush."""
        context._settled = True
        self._stopped.setdefault(context._station, []).append(context.fence)
        self.touch()

    def fail_run(self, context: Context, error: BaseException) -> None:
        """Count a failure: the task goes to the back, or is set aside at the limit."""
        context._settled = True
        logger.warning(
            "handler.failed: queue %r, claim %d, attempt %d: %s",
            *(context.queue, context.fence, context.attempt, type(error).__qualname__),
            exc_info=error,
        )
        self._post_one(context, retry_call(context, RemoteError.of(error)), "retry_task")
        self.touch()

    def _post_one(self, context: Context, call: Call[str], verb: str) -> None:
        def answered(word: str | None, failure: Exception | None) -> None:
            self._answered(context._station, verb, None if word is None else {context.fence: word}, failure)

        self._link.post(call, answered, owner=context._registration)

    def _answered(self, station: Station, verb: str, ended: dict[int, str] | None, failure: Exception | None) -> None:
        if failure is not None:
            registration = station.registration
            if registration is not None and not registration.dead:
                logger.error(
                    "%s: queue %r: refused, the claims stay until this worker leaves: %s", verb, station.name, failure
                )
            return
        for claim, word in (ended or {}).items():
            if word == "lost":
                logger.warning(
                    "claim.lost: queue %r, claim %d: %s came too late, it runs elsewhere", station.name, claim, verb
                )
            elif word in {"cancelled", "dropped", "aside"}:
                logger.info("claim.%s: queue %r, claim %d", word, station.name, claim)


def retry_call(context: Context, error: RemoteError, *, counted: bool = True) -> Call[str]:
    """The call that ends a claim whose run failed."""
    station, policy = context._station, context._station.policy
    return ops.retry_task(
        *(station.keys, context._registration.worker, context.fence, error),
        max_failures=policy.max_failures,
        keep_failed=policy.keep_failed,
        counted=counted,
    )
