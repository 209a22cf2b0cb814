"""`ListConsumer`: consumes a queue whose handler takes a list of tasks.

It requests up to `batch_size` tasks for each run that the scheduler grants. A reply with fewer opens a run that waits for more,
`batch_wait` seconds. In this time, wake-ups lead to requests for the rest, which take no further units. When the time is over,
one last request asks for the rest. Its reply also shows whether the queue was paused meanwhile.

A run takes the units of its handler, however many claims it has. So units are counted in list runs: one run for up to
`batch_size` claims, and none for claims that are added to a run that waits for more.

Claims whose run has not begun belong to no handler. They go back to the queue when the queue is drained or paused, and a
cancellation ends each of them at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import ceil
from time import monotonic
from typing import Any, ClassVar, cast

import trio

from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, StartReply
from worqr.peer.consumer import ConsumerServices, HandlerConsumer, Phase, QueueOptions
from worqr.peer.executors.offloaded import Handler, named_after
from worqr.peer.list_run import ListGatherer, ListItem, ListRun
from worqr.peer.run import CLAIMED, Run, current_run
from worqr.peer.scheduler import Share
from worqr.peer.session import Registration
from worqr.peer.task_log import logger as task_log
from worqr.peer.task_log import note_started
from worqr.policy import Policy
from worqr.tracebacks import is_a


def taking_calls(handler: Handler) -> Handler:
    """Return a handler of a slot that calls `handler` with the calls of the list run."""

    async def run_calls(_task: bytes) -> object:
        run = cast("ListRun", current_run.get())
        return await cast("Callable[[list[bytes]], Awaitable[object]]", handler)(run.calls)

    return named_after(handler, run_calls)


class ListConsumer(HandlerConsumer):
    """Consumes a queue, or one shard of it, with a list handler. Changed only in the loop."""

    run_class: ClassVar[type[Run[Any]]] = ListItem
    wants_while_idle: ClassVar[bool] = True  # for runs that wait for them

    def __init__(
        self,
        keys: QueueKeys,
        services: ConsumerServices,
        policy: Policy,
        share: Share,
        handler: Handler,
        state: object = None,
        options: QueueOptions | None = None,
        *,
        size: int,
        wait: float,
    ) -> None:
        super().__init__(keys, services, policy, share, handler, state, options)
        self.run_ended: Callable[[Run[Any], bool, object, BaseException | None], None] = self.list_ended
        self._gatherer = ListGatherer(size)
        self._wait = wait
        self._opened = trio.Event()
        self._begun: dict[int, ListRun] = {}
        self._reserved = 0
        self._granted = 0

    @property
    def executing(self) -> Mapping[int, Run[Any]]:
        return self._begun

    # Requesting tasks

    def capacity_wanted(self) -> int:
        return MAX_ITEMS

    def wanted(self) -> int:
        """Return how many more list runs it would begin if units were free."""
        if waiting := len(self._gatherer.without_units()):
            return waiting
        runs, limit = ceil(super().wanted() / self._gatherer.size), self.share.limit
        return runs if limit is None else min(runs, limit.room)

    def request_soon(self) -> None:
        super().request_soon()
        self._request_rest()

    def send_request(self, wanted: int) -> None:
        """Begin runs that wait for units, then request tasks for the other ones of `wanted` runs, and for the open run."""
        waiting = self._gatherer.without_units()
        for run in waiting[:wanted]:
            self._take_for(run)
        self._begin_ready()
        runs = max(0, wanted - len(waiting))
        if runs or not wanted:
            super().send_request(min(self._gatherer.room + runs * self._gatherer.size, MAX_ITEMS))

    def reserve(self, n: int) -> None:
        """Reserve the units of as many list runs as `n` claims will begin. Claims for the run that waits take none."""
        if n > 0:
            self._reserved = ceil(max(0, n - self._gatherer.room) / self._gatherer.size)
            self.scheduler.reserve(self.share, self._reserved)
        else:
            self._granted, self._reserved = self._reserved, 0
            self.scheduler.reserve(self.share, -self._granted)

    def take(self, n: int) -> None:
        """Do nothing: `accept` takes the units of list runs."""

    def _take_granted(self) -> None:
        """Take the units that the reply was for, for as many runs. Other runs wait for a turn of their consumer."""
        for run in self._gatherer.without_units()[: self._granted]:
            self._take_for(run)
        self._granted = 0

    def _take_for(self, run: ListRun) -> None:
        self.scheduler.take(self.share, 1, first=self.share.held == 0)
        run.reserve_units()

    def _request_rest(self) -> None:
        """Request the rest of the open run, if there may be tasks. It has its units already."""
        if self.request.is_wanted and self._may_request() and self._gatherer.room:
            self.send_request(0)

    def _may_request(self) -> bool:
        return not self.request.in_flight and self.admission.is_live and self.lifecycle.phase < Phase.DRAINING

    # Gathering

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        if self.lifecycle.is_leaving:
            for run in runs:
                run.cancel("leaving")
                self._services.settler.ended(run, False, None, None)
            return
        gatherer = self._gatherer
        before = gatherer.open
        gatherer.add(cast("Sequence[ListItem]", runs))
        if not self._wait:
            gatherer.close()
        elif gatherer.open is not None and gatherer.open is not before:
            gatherer.open.wait_until(trio.current_time() + self._wait)
            self._opened.set()
        self._take_granted()
        self._begin_ready()

    def _started(self, registration: Registration, started: StartReply | None, failure: Exception | None) -> None:
        super()._started(registration, started, failure)
        self._close_due()
        self._request_rest()

    def _use(self, registration: Registration, started: StartReply) -> None:
        super()._use(registration, started)
        if started.status in {"paused", "resting"}:
            self.give_back_unstarted()  # the queue is paused: what has not begun must not begin
        self._close_due()

    def _close_due(self) -> None:
        """Let the open run begin if it has waited long enough, and no reply with more claims is on its way."""
        run = self._gatherer.open
        if run is not None and run.is_due and not self.request.reserved:
            self._gatherer.close()
            self._begin_ready()

    async def close_forever(self) -> None:
        """End the wait of each open run when its time is over."""
        while True:
            run = self._gatherer.open
            if run is None or run.is_due:
                self._opened = trio.Event()
                await self._opened.wait()
                continue
            await trio.sleep_until(run.closes_at)
            if run is self._gatherer.open:
                run.note_due()
                if self._may_request():
                    self.send_request(0)
                self._close_due()

    def _begin_ready(self) -> None:
        """Give the ready runs that have units to slots."""
        for run in self._gatherer.take_ready():
            run.begin_calls(monotonic())
            self._begun[run.fence] = run
            if task_log.isEnabledFor(logging.DEBUG):
                note_started(run.claimed)
            self._services.slots.run(run)

    def give_back_unstarted(self) -> None:
        for item in reversed(self._gatherer.items()):
            item.cancel("leaving")

    def withdraw(self, item: ListItem) -> None:
        """Settle an item that was cancelled before its run began."""
        self._gatherer.remove(item)
        self._services.settler.ended(item, False, None, None)

    # Running, and ending

    def extend(self, run: Run[Any], seconds: float) -> None:
        super().extend(run.run if isinstance(run, ListItem) and run.run is not None else run, seconds)

    def list_ended(self, run: Run[Any], returned: bool, value: object, error: BaseException | None) -> None:
        """Settle each item of a list run whose handler has ended."""
        assert isinstance(run, ListRun)
        run.settle()
        try:
            outcomes = run.outcomes(returned, value, error)
        except BaseException as raised:  # what the handler returned is the user's
            returned, outcomes = False, [raised] * len(run.claimed)
        plain: list[ListItem] = []
        for item, outcome in zip(run.claimed, outcomes, strict=True):
            if is_a(outcome, BaseException):
                self._services.settler.ended(item, False, None, outcome)
            elif not returned or item.state is not CLAIMED or item.keeps_result() or item.registration.dead:
                self._services.settler.ended(item, returned, outcome, None)
            else:
                plain.append(item)
        if plain:
            self._services.settler.finish_plain(self, plain)
            self._ended_together(run, plain)
        run.forget_errors()

    def ended(self, run: Run[Any]) -> None:
        item = cast("ListItem", run)
        self._ended_together(item.run, (item,))

    def _ended_together(self, run: ListRun | None, items: Sequence[ListItem]) -> None:
        """Free the claims of these items, and the units of their list run with its last item."""
        before = len(self.running)
        for item in items:
            self.running.pop(item.fence, None)
        ended = before - len(self.running)
        if run is not None and ended and run.items_ended(ended):
            self._begun.pop(run.fence, None)
            if run.has_units:
                self.scheduler.release(self.share, run.fence, not self._begun)
        if not self.running and self.lifecycle.idle is not None:
            self.lifecycle.idle.set()

    def release_slot_of_stuck_run(self, run: Run[Any], *, place: bool = False) -> None:
        if run.fence in self._begun:
            self.scheduler.release_early(self.share, run.fence, place=place)
