"""The seam between the link's threads and whoever waits for them.

Here: `Waiter` (something that will be settled), the `Mailbox` protocol, `TrioMailbox`, and `Signal`, an event of whichever
kind. asyncio has its own in `aio`, plain threads have theirs in `threads`; `loops` chooses. What waits by a mailbox and by
nothing else is the same code everywhere. Not here: requests and sockets.

Two rules make a double wake-up and a crashed loop impossible:

* `Waiter.wake` is set, taken and called in the loop's thread only, and is taken (set to None) before it is called.
  Giving up sets it to None too, so a reply that comes later finds nobody to wake.
* Whatever a mailbox runs in the loop is guarded: an error in it is logged, and neither ends the loop nor reaches its
  neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

import trio

from worqr.log_events import emit

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

BUG = "a callback failed, the others go on; this is a bug of worqr, please report it"


class Waiter:
    """Somebody waits, or will wait, until this is settled.

    Attributes:
        settled: there is an outcome. Changed only by the thread that finds it.
        abandoned: nobody wants the outcome any more. Changed only by whoever waits.
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


class TimeLimit(Protocol):
    """What a block with a time limit says when it is over."""

    @property
    def cancelled_caught(self) -> bool:
        """True if the limit ended it."""
        ...


class Mailbox(Protocol):
    """How results get from the link's threads to those who wait: one kind per event loop, and one for plain threads."""

    def post(self, deliver: Callable[[], object]) -> None:
        """Run `deliver` in the loop soon. From any thread; never raises, also when the loop has ended."""
        ...

    async def checkpoint(self) -> None:
        """Let others run; raise the caller's cancellation, if there is one."""
        ...

    async def prepare(self, request: Waiter) -> None:
        """Comes before `request` is submitted. Raises the caller's cancellation, if there is one: nothing should be sent then."""
        ...

    async def wait(self, request: Waiter) -> None:
        """Park until `request` is settled. When cancelled, abandon it: it is withdrawn, or its reply is dropped."""
        ...

    def move_on_after(self, seconds: float) -> AbstractContextManager[TimeLimit]:
        """A block that waits no longer than this, as ``trio.move_on_after`` makes it."""
        ...

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what blocks in a thread, to its end, also for a caller who is cancelled: he learns that then, here or at his next
        wait.
        """
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
        await trio.lowlevel.checkpoint()

    async def prepare(self, request: Waiter) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    async def wait(self, request: Waiter) -> None:
        # What settles a request wakes it by `post`, so in this thread, and cannot come between these lines.
        request.wake = partial(trio.lowlevel.reschedule, trio.lowlevel.current_task())

        def abandon(_: object) -> trio.lowlevel.Abort:
            request.wake = None
            request.abandoned = True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abandon)

    def move_on_after(self, seconds: float) -> AbstractContextManager[TimeLimit]:
        return trio.move_on_after(seconds)

    async def in_thread(self, work: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(work)
        raise AssertionError("nobody cancels this scope")


class Signal:
    """An event that one can wait for at a time. `set` is called in the loop; where there is none, anywhere."""

    __slots__ = ("_is_set", "_mailbox", "_waiter")

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._is_set = False
        self._waiter: Waiter | None = None

    def set(self) -> None:
        """It has happened."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None:
            wake_all((waiter,))

    async def wait(self) -> None:
        """Until it has happened."""
        waiter = Waiter()
        await self._mailbox.prepare(waiter)
        self._waiter = waiter  # and then look, as `set` sets and then looks: one of the two sees the other
        if not self._is_set:
            await self._mailbox.wait(waiter)


def guarded(deliver: Callable[[], object]) -> None:
    """Run `deliver`; log what it raises, also a BaseException: it would end the whole run, from a callback of ours."""
    try:
        deliver()
    except BaseException as error:
        emit(logger, "link.deliver", BUG, exc_info=error)


def wake_all(waiters: Iterable[Waiter]) -> None:
    """In the loop: wake each of them once; one that fails does not keep the others asleep."""
    for waiter in waiters:
        wake = waiter.wake
        if wake is not None:
            waiter.wake = None
            try:
                wake()
            except BaseException as error:
                emit(logger, "link.deliver", BUG, exc_info=error)
