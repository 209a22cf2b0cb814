"""`Slots`: runs handlers. A slot is a Trio task that runs one handler after another.

A slot parks between two runs and is woken with the next claim, which costs half as much as spawning a task. Every run has its own
cancel scope and its own copy of the context variables, so a handler leaves nothing behind. A slot whose task was left with an
open nursery or a broken stack of scopes is discarded. The nursery around each slot receives the resulting errors. When a run has
ended, its consumer ends its claim (`run_ended`).
"""

from __future__ import annotations

import heapq
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context as Variables
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import trio

from worqr.log_events import emit
from worqr.peer import forks
from worqr.peer.executors.offloaded import Frames
from worqr.peer.run import Run, RunHost, Timer, current_run
from worqr.tracebacks import is_a, leaves_of, one_line, text_of

if TYPE_CHECKING:
    from worqr.peer.consumer import HandlerConsumer

# `Deadlines`: the timeouts of runs, in one heap with one task. This costs less than a deadline in each run's cancel scope.
#
# A run that was settled leaves a stopped `Timer` in the heap. The timer is skipped when its time comes, or removed when most
# entries are stopped. A run that is extended gets a new timer; the old one stays in the heap, stopped.
#
# The heap uses Trio's clock. Handlers use ``time.monotonic()``, which threads, an asyncio loop and child processes can read
# too.


BLOCKED = 0.1
GRACE = 1.0
"""Seconds. If a blocked loop could not check deadlines for longer than the first value, runs get the lost time back, up to the
second value. So a run that ended in time keeps its own outcome.
"""
COMPACT_OVER = 1000
"""Number of entries above which stopped timers are removed."""


class Deadlines:
    """The deadlines of one peer's runs. Changed only in the loop; `request_extension` is called from any thread."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count(1)
        self._compact_at = COMPACT_OVER
        self._earlier = trio.Event()

    def begin(self, run: Run[Any], timeout: float) -> None:
        """Start the timeout of a run, `timeout` seconds from now."""
        self._add(Timer(run, time.monotonic() + timeout), trio.current_time() + timeout)

    def _add(self, timer: Timer, when: float) -> None:
        heap = self._heap
        if not heap or when < heap[0][0]:
            self._earlier.set()
        heapq.heappush(heap, (when, next(self._numbers), timer))
        if len(heap) > self._compact_at:
            heap[:] = [entry for entry in heap if entry[2].run is not None]
            heapq.heapify(heap)
            self._compact_at = max(COMPACT_OVER, 2 * len(heap))

    def request_extension(self, run: Run[Any], seconds: float) -> None:
        """Move a run's deadline to `seconds` from now, without waiting. From any thread.

        A run without a deadline stays without one.
        """
        if run.timer is None or run.cancel_reason is not None:
            return
        run.timer.move_to(time.monotonic() + seconds)
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_run():
            self._apply_extension(run)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_extension, run)

    def _apply_extension(self, run: Run[Any]) -> None:
        """Set the changed deadline of a run, unless the run has ended or its old deadline has passed."""
        old = run.timer
        if old is not None and old.stop() is not None:
            self._add(Timer(run, old.deadline), trio.current_time() + old.deadline - time.monotonic())

    async def watch_forever(self) -> None:
        """Cancel runs that pass their deadline."""
        while True:
            self._earlier = trio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            expected = time.monotonic() + due - trio.current_time()
            with trio.move_on_at(due) as waiting:
                await self._earlier.wait()
            late = time.monotonic() - expected
            if waiting.cancelled_caught and late > BLOCKED:
                await trio.sleep(min(late, GRACE))
            self.cancel_late()

    def cancel_late(self) -> None:
        """Cancel the runs whose deadline has passed."""
        now = trio.current_time()
        while self._heap and self._heap[0][0] <= now:
            run = heapq.heappop(self._heap)[2].stop()
            if run is not None:
                run.cancel("timeout")


logger: logging.Logger = logging.getLogger(__name__)

NOT_BLOCKING: Final = 'declare what blocks as a plain def, which runs in a thread, or with runs_in="process"'
"""A remedy for a handler that blocks the loop."""


class _Slot:
    """One slot. `last`: the run by which it ends, if it does. `left_open`: its handler has left a nursery or a scope open."""

    __slots__ = ("_variables", "last", "left_open", "run", "task")

    def __init__(self, run: Run[HandlerConsumer], variables: Variables) -> None:
        self.run: Run[HandlerConsumer] | None = run
        self.task: trio.lowlevel.Task | None = None
        self.last: Run[HandlerConsumer] | None = None
        self.left_open: bool = False
        self._variables: Variables = variables

    def take_variables(self) -> Variables:
        """Return the context variables of its first run, once: it must not keep them."""
        variables = self._variables
        del self._variables
        return variables


class Slots:
    """The slots of one peer. Changed only in the loop.

    `interrupted` is called when Ctrl-C arrives in a handler.

    Attributes:
        deadlines: those of the runs in its slots.
    """

    def __init__(self, interrupted: Callable[[KeyboardInterrupt], None]) -> None:
        self.deadlines: Deadlines = Deadlines()
        self._interrupted = interrupted
        self._idle: list[_Slot] = []
        self._slots: set[_Slot] = set()
        self._nursery: trio.Nursery | None = None
        self._thread = threading.get_ident()
        self._forks = forks.count

    async def run_forever(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the nursery of the slots."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def run(self, run: Run[HandlerConsumer]) -> None:
        """Run its handler in a slot, with new context variables. Called in the loop; never waits."""
        variables = run.host.variables.copy()
        variables.run(current_run.set, run)
        if self._idle:
            slot = self._idle.pop()
            task = slot.task
            assert task is not None
            slot.run = run
            task.context = variables  # from its next step on
            trio.lowlevel.reschedule(task)
        else:
            assert self._nursery is not None
            slot = _Slot(run, variables)
            try:
                self._nursery.start_soon(self._guard, slot, name=f"worqr slot for {run.queue}")
                self._slots.add(slot)
            except RuntimeError:  # the peer has failed, and its slots have ended: the claim goes back
                run.cancel("leaving")
                run.host.run_ended(run, False, None, None)

    def describe_blocking(self) -> str:
        """Describe the run that holds the loop's thread now, found on its stack. From any thread."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage] - public in all but name
        where = ""
        while frame is not None:
            if not where:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
            if frame.f_code is Slots._run_reusing_scope.__code__:
                run = frame.f_locals["slot"].run
                if run is None:
                    return where
                return f"handler of queue {run.queue!r}, claim {run.fence}, at {where} ({NOT_BLOCKING})"
            frame = frame.f_back
        return f"code outside the handlers, at {where}" if where else "unknown code"

    def held(self) -> set[Run[Any]]:
        """Return the runs that slots hold."""
        return {slot.run for slot in self._slots if slot.run is not None}

    def frames_of(self, run: Run[RunHost]) -> Frames:
        """Return the stacks of the handler of `run` and of its tasks on the loop; empty if it is in no slot."""
        assert self._nursery is not None
        for holder in self._nursery.child_tasks:
            for nursery in holder.child_nurseries:
                for task in nursery.child_tasks:
                    if task.context.get(current_run) is run:
                        return [frame for each in _with_children(task) for frame in each.iter_await_frames()]
        return []

    async def _guard(self, slot: _Slot) -> None:
        """Run the task of a slot, and handle what it raises when a handler corrupted it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_forever, slot)
        except BaseExceptionGroup as group:
            other = next((leaf for leaf, _ in leaves_of(group) if not is_a(leaf, trio.Cancelled)), None)
            if self._report_interrupt(group):
                return
            if other is None:
                raise
            if trio.current_effective_deadline() != float("-inf"):
                _report_corrupted(slot, other)

    def _report_interrupt(self, error: BaseException) -> bool:
        """Call `_interrupted` if `error` contains Ctrl-C, so that the peer ends. Return True if it does."""
        for leaf, _ in leaves_of(error):
            if is_a(leaf, KeyboardInterrupt):
                self._interrupted(leaf)
                return True
        return False

    async def _run_forever(self, slot: _Slot) -> None:
        task = slot.task = trio.lowlevel.current_task()
        task.context = slot.take_variables()
        try:
            await trio.lowlevel.cancel_shielded_checkpoint()
            while await self._run_reusing_scope(slot, task):
                self._idle.append(slot)
                await trio.lowlevel.wait_task_rescheduled(partial(self._remove_idle, slot))
        finally:
            self._slots.discard(slot)

    def _remove_idle(self, slot: _Slot, _: object) -> trio.lowlevel.Abort:
        if slot in self._idle:
            self._idle.remove(slot)
        return trio.lowlevel.Abort.SUCCEEDED

    async def _run_reusing_scope(self, slot: _Slot, task: trio.lowlevel.Task) -> bool:
        """Run handlers one after the other in one cancel scope, until one does not simply return.

        A scope that was not cancelled can be used again. Making one for each run would be a quarter of the cost of a run.

        Returns:
            False if the last handler corrupted the task.
        """
        scope = trio.CancelScope()
        returned, value, error = False, None, None
        try:
            with scope:
                while True:
                    run = slot.run
                    assert run is not None
                    run.begin(scope)
                    if run.policy.timeout is not None:
                        self.deadlines.begin(run, run.policy.timeout)
                    value = await run.host.handler(run.task)
                    if forks.count != self._forks:
                        forks.leave_fork(None)
                    if run.cancel_reason is not None or task.child_nurseries or not _is_innermost(scope, task):
                        returned = True
                        break
                    slot.run = None
                    try:
                        run.host.run_ended(run, True, value, None)
                    except BaseException:
                        slot.last = run
                        raise
                    del run
                    value = None  # a parked slot must not hold the result
                    self._idle.append(slot)
                    await trio.lowlevel.wait_task_rescheduled(partial(self._remove_idle, slot))
        except BaseException as raised:
            if forks.count != self._forks:
                forks.leave_fork(raised)
            if slot.run is None or trio.current_effective_deadline() == float("-inf"):
                raise  # the slot is being cancelled, not the handler
            error = raised
            offloaded = slot.run.offloaded
            if (offloaded is None or not offloaded.raised) and self._report_interrupt(raised):
                slot.run.cancel("leaving")  # Python raised Ctrl-C in this handler by chance
        return self._end_run(slot, task, returned, value, error)

    def _end_run(
        self, slot: _Slot, task: trio.lowlevel.Task, returned: bool, value: object, error: BaseException | None
    ) -> bool:
        """End the run of a slot. Return False if its handler corrupted the task."""
        run, slot.run = slot.run, None
        assert run is not None
        slot.last, slot.left_open = run, bool(task.child_nurseries) or _left_scope_open(error)
        run.host.run_ended(run, returned, value, error)
        for nursery in task.child_nurseries:
            nursery.cancel_scope.cancel()
        if not slot.left_open:
            slot.last = None
        return not slot.left_open


def _with_children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _with_children(child)


def _is_innermost(scope: trio.CancelScope, task: trio.lowlevel.Task) -> bool:
    """Return False if the task has entered a scope inside `scope` and not left it.

    Trio has no public API for this. Without the private one the result is False, which costs a new scope per run.
    """
    status = getattr(scope, "_cancel_status", None)
    return status is not None and getattr(task, "_cancel_status", None) is status


def _left_scope_open(error: BaseException | None) -> bool:
    """Return True for Trio's error about a scope that a handler opened and did not close."""
    return type(error) is RuntimeError and "stack corrupted" in text_of(error, 1000)


def _report_corrupted(slot: _Slot, error: BaseException) -> None:
    """Log why a slot has ended: because of its last handler, or because of an error outside of the handlers."""
    why = (
        "its handler left a nursery or a cancel scope open, close it before it returns"
        if slot.left_open
        else "its slot failed after the handler had ended, please report it"
    )
    run = slot.last
    named = ("", "") if run is None else (run.queue, run.id)
    text = f"queue %(queue)r, job %(job)s: {why}: %(error)s"
    emit(logger, "slot.corrupted", text, queue=named[0], job=named[1], error=one_line(error))
