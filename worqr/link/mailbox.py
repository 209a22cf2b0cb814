"""The seam between the link's threads and whoever waits for them.

Here: `Waiter` (something that will be settled), the `Mailbox` protocol, and `TrioMailbox`. One for asyncio and one
for plain threads would differ in nothing but these three methods. Not here: requests and sockets.

Two rules make a double wake-up and a crashed loop impossible:

* `Waiter.wake` is set, taken and called in the loop's thread only, and is taken (set to None) before it is called.
  Giving up sets it to None too, so a reply that comes later finds nobody to wake.
* Whatever a mailbox runs in the loop is guarded: an error in it is logged, and neither ends the loop nor reaches its
  neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import trio

logger: logging.Logger = logging.getLogger(__name__)


class Waiter:
    """Somebody waits, or will wait, until this is settled.

    Attributes:
        settled: there is an outcome. Changed only by the thread that finds it.
        abandoned: nobody wants the outcome any more. Changed only in the loop.
        wake: what to run in the loop when it is settled. Changed only in the loop, once it is submitted.
        error: the outcome, if it is a bad one.
    """

    __slots__ = ("abandoned", "error", "settled", "wake")

    def __init__(self) -> None:
        self.settled: bool = False
        self.abandoned: bool = False
        self.wake: Callable[[], object] | None = None
        self.error: Exception | None = None

    def raise_error(self) -> None:
        """Raise the error, if there is one; it is taken out, so that its traceback keeps nothing alive."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class Mailbox(Protocol):
    """How results get from the link's threads to those who wait: one kind per event loop."""

    def post(self, deliver: Callable[[], object]) -> None:
        """Run `deliver` in the loop soon. From any thread; never raises, also when the loop has ended."""
        ...

    async def checkpoint(self) -> None:
        """Raise the loop's cancellation if the caller was cancelled already: nothing should be sent for it then."""
        ...

    async def wait(self, request: Waiter) -> None:
        """Park until `request` is settled. When cancelled, abandon it: it is withdrawn, or its reply is dropped."""
        ...


class TrioMailbox:
    """The mailbox of the Trio run it is made in."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def post(self, deliver: Callable[[], object]) -> None:
        try:
            self._token.run_sync_soon(guarded, deliver)
        except trio.RunFinishedError:
            pass  # nobody is left to be told

    async def checkpoint(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    async def wait(self, request: Waiter) -> None:
        # What settles a request wakes it by `post`, so in this thread, and cannot come between these lines.
        request.wake = partial(trio.lowlevel.reschedule, trio.lowlevel.current_task())

        def abandon(_: object) -> trio.lowlevel.Abort:
            request.wake = None
            request.abandoned = True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abandon)


def guarded(deliver: Callable[[], object]) -> None:
    """Run `deliver`; log what it raises, also a BaseException: it would end the whole run, from a callback of ours."""
    try:
        deliver()
    except BaseException:
        logger.exception("link.deliver: a callback failed; this is a bug, the loop goes on")


def wake_all(waiters: Iterable[Waiter]) -> None:
    """In the loop: wake each of them once; one that fails does not keep the others asleep."""
    for waiter in waiters:
        wake = waiter.wake
        if wake is not None:
            waiter.wake = None
            try:
                wake()
            except BaseException:
                logger.exception("link.deliver: a callback failed; this is a bug, the loop goes on")
