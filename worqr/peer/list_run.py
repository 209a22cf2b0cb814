"""`ListRun`: one run of a list handler, and the claims that it takes together, each of which is a `ListItem`.

A list run exists from its first claim on: calls are added to it while it waits for more. Each item is settled by itself, by its
own outcome. The run itself has no claim. It has the scope, the deadline and the place in which the handler runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from worqr.call_list import CallList, Outcomes
from worqr.errors import UsageError
from worqr.peer.run import Offloaded, Run, RunHost, SavedState
from worqr.policy import Policy, Undecodable
from worqr.records import CancelReason
from worqr.remote_error import Description

if TYPE_CHECKING:
    from worqr.peer.list_consumer import ListConsumer

# `ListGatherer`: puts the claims of one list handler together into runs. Pure: no I/O and no clock.
#
# One run at most is *open*: it waits for more claims. The others are *ready*, in the order in which they became so, until units
# of the peer are free for them. A task whose earlier run failed, took too long, or ended with its worker is alone in its run.
# So it takes no others along more than once.


class ListGatherer:
    """The list runs of one consumer that have not begun. Changed only in the loop.

    Attributes:
        size: how many claims a run takes at most.
        open: the run that waits for more claims; None: there is none.
    """

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.open: ListRun | None = None
        self._ready: deque[ListRun] = deque()

    @property
    def room(self) -> int:
        """How many more claims the open run takes."""
        return 0 if self.open is None else self.size - len(self.open.claimed)

    def add(self, items: Iterable[ListItem]) -> None:
        """Add new claims, in their order: to the open run, or to new ones."""
        run, size = self.open, self.size
        for item in items:
            if item.is_alone:
                self._ready.append(ListRun(item))
                continue
            if run is None:
                run = self.open = ListRun(item)
            else:
                run.add(item)
            if run.unsettled == size:
                self.close()
                run = None

    def close(self) -> None:
        """Add no more claims to the open run: it is ready."""
        if self.open is not None:
            self._ready.append(self.open)
            self.open = None

    def remove(self, item: ListItem) -> None:
        """Remove a claim that was cancelled, and its run if that was its only claim."""
        run = item.run
        assert run is not None
        run.remove(item)
        if not run.claimed:
            if run is self.open:
                self.open = None
            else:
                self._ready.remove(run)

    def without_units(self) -> list[ListRun]:
        """Return the runs for which no units are reserved, the ready ones first."""
        waiting = [run for run in self._ready if not run.has_units]
        return waiting if self.open is None or self.open.has_units else [*waiting, self.open]

    def take_ready(self) -> list[ListRun]:
        """Return the ready runs that have units, once."""
        ready = [run for run in self._ready if run.has_units]
        if ready:
            self._ready = deque(run for run in self._ready if not run.has_units)
        return ready

    def items(self) -> list[ListItem]:
        """Return all claims whose run has not begun."""
        runs = [*self._ready] if self.open is None else [*self._ready, self.open]
        return [item for run in runs for item in run.claimed]


class ListItem(Run[Any]):
    """One claim of a list run.

    Attributes:
        run: the list run that it belongs to; None: it has arrived in this turn of the loop.
    """

    __slots__ = ("run",)

    def __init__(self, host: RunHost, registration: Any, fence: int, entry: Any, began: float = 0.0) -> None:
        super().__init__(host, registration, fence, entry, began)
        self.run: ListRun | None = None

    @property
    def deadline(self) -> float | None:
        return None if self.run is None else self.run.deadline

    @property
    def is_alone(self) -> bool:
        """It is the only one of its run, because an earlier run of it failed, took too long, or ended with its worker."""
        return self.record is not None and self.attempt > 1

    def describe(self, error: BaseException) -> Description:
        return super().describe(error) if self.run is None else self.run.describe(error)  # all calls may have the same

    def join(self, run: ListRun) -> None:
        """Note that it belongs to `run`."""
        self.run = run

    def begin_in_list(self, now: float, timeout: float | None) -> None:
        """Note that its run begins at `now`, with this timeout."""
        self.began = now
        if timeout != self.policy.timeout:
            self.policy: Policy = replace(self.policy, timeout=timeout)

    def cancel(self, reason: CancelReason) -> None:
        """Cancel this call. The run goes on while it has other calls; if the worker leaves, all of them are cancelled."""
        super().cancel(reason)
        run = self.run
        if self.settled or run is None:
            return
        if not run.begun:
            cast("ListConsumer", self.host).withdraw(self)
        elif reason == "leaving" or all(item.cancel_reason is not None for item in run.claimed):
            run.cancel(reason)

    def cancel_with_list(self, reason: CancelReason) -> None:
        """Note that the whole run is cancelled."""
        super().cancel(reason)


class ListRun(Run[Any]):
    """One run of a list handler. Changed only in the loop.

    | phase | meaning                                         | its claims, if the queue is left     | leads to        |
    |-------|-------------------------------------------------|--------------------------------------|-----------------|
    | OPEN  | it waits for more claims                        | go back, also if the queue is paused | READY, or ENDED |
    | READY | it takes no more claims, and may wait for units | go back, also if the queue is paused | BEGUN, or ENDED |
    | BEGUN | it was given to a slot, which runs its handler  | go back after the grace              | ENDED           |
    | ENDED | all its claims were settled                     | -                                    | never           |

    Attributes:
        claimed: all its items, in the order of their claims.
        calls: their payloads, for the handler; empty before the run has begun.
        closes_at: when it stops waiting for more calls, by Trio's clock.
        is_due: it has waited long enough.
        has_units: units of the peer are reserved for it.
        begun: its handler was given to a slot.
        unsettled: how many of its items the consumer holds.
    """

    __slots__ = ("begun", "calls", "claimed", "closes_at", "has_units", "is_due", "unsettled")

    def __init__(self, first: ListItem) -> None:
        super().__init__(first.host, first.registration, first.fence, b"", first.began)
        self.claimed: list[ListItem] = []
        self.calls: CallList = CallList(())
        self.closes_at: float = 0.0
        self.is_due: bool = False
        self.has_units: bool = False
        self.begun: bool = False
        self.unsettled: int = 0
        self.add(first)

    @property
    def id(self) -> str:
        """The id of its first item, for the log, and how many others there are."""
        others = len(self.claimed) - 1
        first = self.claimed[0].id if self.claimed else ""
        return f"{first} and {others} more" if others > 0 else first

    @property
    def is_list(self) -> bool:
        return True

    @property
    def items(self) -> Sequence[ListItem]:
        """The items whose payloads the handler got, in the order of its list."""
        undecodable = self.calls.undecodable
        if not undecodable:
            return self.claimed
        return [item for place, item in enumerate(self.claimed) if place not in undecodable]

    # Before it begins

    def add(self, item: ListItem) -> None:
        """Add a call."""
        self.claimed.append(item)
        self.unsettled += 1
        item.join(self)

    def remove(self, item: ListItem) -> None:
        """Remove a call that was cancelled before the run began, or that the codec of the mesh cannot decode."""
        self.claimed.remove(item)

    def wait_until(self, closes_at: float) -> None:
        """Wait for more calls until then, by Trio's clock."""
        self.closes_at = closes_at

    def note_due(self) -> None:
        """Note that it has waited long enough."""
        self.is_due = True

    def reserve_units(self) -> None:
        """Note that units are reserved for it."""
        self.has_units = True

    def begin_calls(self, now: float) -> None:
        """Note that it is given to a slot at `now`, by ``time.monotonic()``. Its timeout is the shortest one of its calls."""
        self.begun = True
        self.began = now
        self.use_tasks()
        timeouts = [item.policy.timeout for item in self.claimed if item.policy.timeout is not None]
        timeout = min(timeouts, default=None)
        self.policy: Policy = replace(self.policy, timeout=timeout)
        for item in self.claimed:
            item.begin_in_list(now, timeout)

    def use_tasks(self) -> None:
        """Let the handler get the payloads of its items, as they are now."""
        self.calls = CallList([item.task for item in self.claimed])

    # Its end

    def items_ended(self, number: int) -> bool:
        """Note that the consumer does not hold so many of its items any more. Return True if these were the last."""
        self.unsettled -= number
        return self.unsettled == 0

    def outcomes(self, returned: bool, value: object, error: BaseException | None) -> Sequence[object]:
        """Return what became of each item: its value, or the exception with which it has failed.

        Args:
            returned: the handler has returned `value`.
            value: what it returned, or its `Outcomes`.
            error: what it raised; None: it did not run.
        """
        if type(value) is Outcomes:
            return value
        return self.calls.outcomes(value) if returned else self.calls.failed(error)

    def note_undecodable(self, fence: int, error: Undecodable) -> None:
        """Note that the payload of a claim could not be decoded, in another process."""
        for place, item in enumerate(self.claimed):
            if item.fence == fence:
                self.calls.undecodable[place] = error

    def undecodable_items(self) -> list[tuple[ListItem, Undecodable]]:
        """Return the items whose payloads could not be decoded, with the error of each."""
        return [(self.claimed[place], error) for place, error in self.calls.undecodable.items()]

    # As a run

    def cancel(self, reason: CancelReason) -> None:
        super().cancel(reason)
        for item in self.claimed:
            item.cancel_with_list(reason)

    def offload(self, offloaded: Offloaded) -> None:
        super().offload(offloaded)
        for item in self.claimed:
            item.offload(offloaded)

    def saved_state(self) -> SavedState:
        raise UsageError(
            "a run of a list handler takes no steps, because it has the calls of many jobs: save for one of them, as in "
            "`await worqr.current().items[0].save(...)`, or use a handler of one task"
        )

    def report_progress(self, done: float | None, message: str, value: bytes = b"") -> None:
        """Report the same progress for each of its calls; from any thread."""
        for item in self.items:
            item.report_progress(done, message, value)

    def report_value(self, value: bytes) -> None:
        """Report the same value for each of its calls; from any thread."""
        for item in self.items:
            item.report_value(value)
