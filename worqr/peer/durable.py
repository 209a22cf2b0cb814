"""Durable waits: a workflow waits for a time, an event or its jobs, and is suspended while it does nothing else.

A wait that has ended is in the job's record, so each later run of the workflow returns from it at once. A wait that has not ended
parks the task that calls it. When each task of the run is parked, the run is suspended: its handler is cancelled as by any other
cancellation, its waits are stored, its claim ends, and it holds no slot. When one of its waits has ended, it runs again from the
top. `Flow` is what one run knows of its durable calls; steps are in `steps`, jobs that a workflow starts in `children`.

Keys are names, never positions: Trio runs the tasks of a nursery in random order. The same key twice in one task is numbered; in
two tasks it is an error, because a later run could exchange them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import wraps
from typing import Any, Final, Literal, TypeVar, cast, overload

import msgspec
import trio

from worqr.argument_codec import check_known, decoder_of
from worqr.client.job import check_event
from worqr.errors import UsageError
from worqr.handler_options import is_async
from worqr.log_events import emit
from worqr.ops import Wait
from worqr.peer.children import Children, check_lifetime
from worqr.peer.error_throttle import sleep_here, wait_done
from worqr.peer.run import IN_MEMORY, End, Run, Save, current_run
from worqr.peer.steps import check_not_inside_step, take_step, take_step_now
from worqr.policy import Failure, Policy, Snooze, Suspended
from worqr.validation import Seconds, check_text, seconds, to_ms

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIET: Final = 1.0
"""Seconds without a durable call after which the other tasks of a run on asyncio count as parked, because they cannot be seen."""
FIRST_LOOK: Final = 0.01
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks at the other tasks of a run in which one waits: each pause is twice the one before it."""
UNWINDING: Final = 1.0
"""Seconds for which a task of the handler waits for the cancellation of the handler, which comes from another loop."""
BUSY_AFTER: Final = 30.0
"""Seconds after which a wait is logged that cannot suspend the run, because another task of it goes on."""
MAX_NAME: Final = 200
"""The most bytes of the name of an event, and of a wait."""

SWALLOWED: Final = (
    "the handler returned although it was suspended: it swallowed the cancellation of a durable wait. Let BaseException pass, "
    "and keep `finally` blocks free of returns"
)


class Swallowed(Failure):
    """The handler has returned, or gone on, although its run was suspended. People see it as a `Failure`."""

    __module__ = "worqr"
    __qualname__ = "Failure"


class Flow:
    """What one run knows of its durable calls: which keys it has asked for, which of its tasks are parked, and for what.

    From any thread: the tasks of a run may be on the loop, on an asyncio loop, or in threads.

    Attributes:
        run: the run.
        children: the jobs that it starts.
        suspending: True from the moment at which the run is suspended. Each durable call raises `Suspended` then, and stores
            nothing.
    """

    def __init__(self, run: Run[Any]) -> None:
        self.run: Run[Any] = run
        self.suspending: bool = False
        self.children: Children = Children(self)
        self._state = run.saved_state()
        self._lock = threading.Lock()
        self._callers: dict[str, object] = {}
        self._numbers: dict[str, int] = {}
        self._given: dict[str, str] = {}
        self._waits: dict[object, tuple[Wait, float]] = {}
        self._parked: dict[object, Callable[[], object]] = {}
        self._home = _caller()
        self._thread = threading.get_ident()
        self._steps = 0
        self._root: trio.lowlevel.Task | None = None
        self._outer: Collection[trio.Nursery] = ()
        self._deadline = float("inf")
        self._last_call = time.monotonic()
        if trio.lowlevel.in_trio_task():
            self._root = trio.lowlevel.current_task()
            self._outer = tuple(self._root.child_nurseries)  # of middleware
            self._deadline = trio.current_effective_deadline()

    @property
    def life(self) -> str:
        """The number of the dispatch that has created the job, or replaced its payload. A job of a schedule has none before it is
        suspended, and gets this one then.
        """
        record = self.run.record
        found = b"" if record is None else record.get(b"life") or record.get(b"first") or b""
        return found.decode("ascii", "replace") or str(self.run.fence)

    # Keys

    def key(self, key: str, remedy: str) -> str:
        """Return the key of a call that is being made: `key`, with a number if this task has made the call before.

        Args:
            key: the name of the call, and what it is called with.
            remedy: how to name the call, for the error.

        Raises:
            Suspended: the run is being suspended.
            UsageError: another task of the run has made the same call; or it is made inside a step.
        """
        self.check()
        check_not_inside_step(self.run, key)
        caller = _caller()
        with self._lock:
            self._last_call = time.monotonic()
            if self._callers.setdefault(key, caller) is not caller:
                raise UsageError(
                    f"two tasks of this run call {key!r}, and a later run could not tell which is which: {remedy}"
                )
            number = self._numbers.get(key, 0) + 1
            found = _numbered(key, number)
            if self._given.setdefault(found, key) != key:
                raise UsageError(
                    f"the call {key!r} would have the name {found!r}, which {self._given[found]!r} has: {remedy}, without a "
                    "number at its end"
                )
            self._numbers[key] = number
        return found

    def must_hide(self, key: str) -> bool:
        """Return True if arguments in the name of a call must not be stored, because the mesh has a codec. A job that began
        without one goes on with the names that it has.
        """
        return self.run.host.hides_arguments and not self.stores(key)

    def stores(self, key: str) -> bool:
        """Return True if an earlier run has stored something under this name."""
        return any(map(self._state.has, (key, self.children.name_of(key))))

    def give_back(self, key: str) -> None:
        """Note that a call has stored nothing, so the next equal call of the task gets its key."""
        with self._lock:
            plain = self._given.get(key, key)
            if key == _numbered(plain, self._numbers.get(plain, 0)):
                self._numbers[plain] -= 1

    def check(self) -> None:
        """Raise `Suspended` if the run is being suspended."""
        if self.suspending:
            raise Suspended("this run is being suspended: nothing more is stored for it")

    def step_began(self) -> None:
        """Note that a step is under way: the run is not suspended until it has ended."""
        with self._lock:
            self._steps += 1

    def step_ended(self) -> None:
        """Note that a step has ended."""
        with self._lock:
            self._steps -= 1
            self._last_call = time.monotonic()

    @contextmanager
    def busy(self) -> Generator[None]:
        """Keep the run from being suspended while a task of it does what no other one can see, as on asyncio."""
        self.step_began()
        try:
            yield
        finally:
            self.step_ended()

    @contextmanager
    def outside_steps(self) -> Generator[None]:
        """Let the run be suspended while a step only waits for its next try."""
        self.step_ended()
        try:
            yield
        finally:
            self.step_began()

    def take_step(
        self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None
    ) -> Any:
        """Take a step: return its result, or for an async function the coroutine that returns it."""
        name = getattr(fn, "__name__", "...")
        if is_async(fn):
            self.run.check_awaitable(f"{name}()", f"def {name}(...) for the step")
            return self._step(key, fn, args, kwargs, policy)
        with self._giving_back(key):
            instead = f"async def {name}(...)"
            return take_step_now(key, fn, args, kwargs, policy, instead=instead)

    async def _step(self, key: str, fn: Callable[..., Any], *given: Any) -> Any:
        with self._giving_back(key):
            return await take_step(key, fn, *given)

    @contextmanager
    def _giving_back(self, key: str) -> Generator[None]:
        """Give the key of a step back that raises and has stored nothing: the handler may call it again."""
        try:
            yield
        except BaseException:
            if not self._state.has_step(key):
                self.give_back(key)
            raise

    # Waiting

    async def park(self, wait: Wait) -> None:
        """Wait until the run is suspended; never returns.

        Raises:
            UsageError: the wait is inside a time limit of the application.
        """
        here = self._park_in_trio if trio.lowlevel.in_trio_task() else self._park_in_asyncio
        while True:
            await self.children.send()
            await here(wait)  # returns if another task of the run could not send its jobs

    def park_now(self, wait: Wait) -> None:
        """Suspend a run in a thread or a process; never returns.

        Raises:
            UsageError: this is another thread than that of the handler, which would go on.
        """
        if threading.get_ident() != self._thread or self._root is not None:
            raise UsageError(
                "only the thread in which the handler was called can suspend the run: wait there, or in its loop"
            )
        self.children.send_now()
        self._waits[self._home] = wait, time.monotonic()
        self._suspend()
        self.check()

    async def _park_in_trio(self, wait: Wait) -> None:
        if trio.current_effective_deadline() < self._deadline and trio.current_effective_deadline() != float("-inf"):
            raise UsageError(_LIMITED.format(repr(wait.key)))
        woken = trio.Event()
        with self._parking(wait, trio.lowlevel.current_task(), woken.set):
            pause, busy_at = FIRST_LOOK, time.monotonic() + BUSY_AFTER
            while not self.suspending:
                if self._root is None or _all_parked(self._root, self._parked, self._outer):
                    self._suspend_if_sent()
                    break
                with trio.move_on_after(pause):
                    await woken.wait()
                pause, busy_at = self._looked(wait, pause, busy_at)
            await trio.lowlevel.checkpoint_if_cancelled()
            self.check()

    async def _park_in_asyncio(self, wait: Wait) -> None:
        import asyncio  # imported here, because most programs on Trio do not need it

        task, loop, woken = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
        if _is_limited(task, loop):
            raise UsageError(_LIMITED.format(repr(wait.key)))
        with self._parking(wait, task, lambda: loop.call_soon_threadsafe(woken.set)):
            pause, busy_at = FIRST_LOOK, time.monotonic() + BUSY_AFTER
            while not self.suspending:
                if self._is_quiet():
                    self._suspend_if_sent()
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await woken.wait()
                pause, busy_at = self._looked(wait, pause, busy_at)
            is_inner = task is not self._home and not isinstance(self._home, threading.Thread)
            await asyncio.sleep(UNWINDING if is_inner else 0)  # its error would be a result, as in gather
            self.check()

    def _is_quiet(self) -> bool:
        """Return True if no other asyncio task of the run does anything, as far as it can be seen."""
        if self._steps:
            return False
        return _is_alone(self.run) or time.monotonic() - self._last_call >= QUIET

    def _looked(self, wait: Wait, pause: float, busy_at: float) -> tuple[float, float]:
        """Return the next pause, and when to log next that the run is still busy."""
        if time.monotonic() >= busy_at and not self.suspending:
            busy_at = float("inf")
            text = (
                "queue %(queue)r, job %(job)s: the run waits for %(wait)r, and is not suspended, because another task of it does "
                "something else: what comes meanwhile is seen when that ends"
            )
            emit(logger, "workflow.busy", text, queue=self.run.queue, job=self.run.id, wait=wait.key)
        return min(2 * pause, LONGEST_LOOK), busy_at

    @contextmanager
    def _parking(self, wait: Wait, task: object, wake: Callable[[], object]) -> Generator[None]:
        self.check()
        with self._lock:
            self._waits[task], self._parked[task] = (wait, time.monotonic()), wake
            self._last_call = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._parked.pop(task, None)
                if not self.suspending:
                    self._waits.pop(task, None)

    def _suspend_if_sent(self) -> None:
        if not self.children.unsent:
            self._suspend()

    def _suspend(self) -> None:
        """Suspend the run: cancel its handler, and wake the parked tasks that a cancellation does not reach."""
        with self._lock:
            if self.suspending:
                return
            self.suspending, parked = True, list(self._parked.values())
            waits = dict[str, Wait]()
            for wait, began in self._waits.values():
                waits.setdefault(wait.key, _left_of(wait, began))
        self.run.suspend([*waits.values()], progress=self._state.asked_for_all)
        for wake in parked:
            wake()

    # What earlier runs have stored

    def is_open(self, key: str) -> bool:
        """Return True if an earlier run was suspended with this wait, and it has not ended."""
        record = self.run.record
        return record is not None and b"wait:" + key.encode() in record and self._state.end_of(key) is None

    def ended(self, key: str) -> End | None:
        """Return how the wait of this key has ended; None if it has not."""
        return self._state.end_of(key)

    def note_end(self, key: str, end: End) -> None:
        """Note how a job of the run has ended, which the server has told meanwhile."""
        self._state.note_end(key, end)

    async def refuse(self, key: str) -> None:
        """Set the value aside that this wait has got, because it cannot be decoded. Then the wait is open again."""
        with self.busy():
            await wait_done(done := self.run.save(Save(0, key, b"", refused=True)))
            self._refused(done, key)

    def refuse_now(self, key: str) -> None:
        """As `refuse`, in a thread or a process."""
        self._refused(self.run.save(Save(0, key, b"", refused=True)), key)

    def _refused(self, done: Future[None], key: str) -> None:
        done.result()
        self._state.forget_end(key)
        text = "queue %(queue)r, job %(job)s: the value that was sent for %(wait)r is not of the type that the workflow waits for"
        emit(
            logger,
            "workflow.refused",
            f"{text}; it was set aside, and the wait goes on",
            queue=self.run.queue,
            job=self.run.id,
            wait=key,
        )

    # The end of the handler

    def returned(self, value: T) -> T:
        """Return what the handler returned.

        Raises:
            Swallowed: the run was suspended.
        """
        if self.suspending:
            raise Swallowed(SWALLOWED)
        if drifted := self._state.unasked():
            text = "queue %(queue)r, job %(job)s: the workflow has returned without asking for what is stored of it: %(keys)s"
            keys = ", ".join(map(repr, drifted[:10]))
            emit(logger, "workflow.drift", text, queue=self.run.queue, job=self.run.id, keys=keys)
        return value


_LIMITED: Final = "the wait {} is inside a time limit, which would begin anew in each run: pass timeout= to the wait"


def _numbered(key: str, number: int) -> str:
    return key if number == 1 else f"{key} #{number}"


def _is_limited(task: object, loop: object) -> bool:
    """Return True if a time limit of asyncio or anyio has set a timer for this asyncio task. No public API tells, so another loop
    than that of asyncio may tell nothing.
    """
    for timer in getattr(loop, "_scheduled", ()):
        limit = getattr(getattr(timer, "_callback", None), "__self__", None)
        if not timer.cancelled() and task in (getattr(limit, "_task", None), getattr(limit, "_host_task", None)):
            return True
    return False


def _left_of(wait: Wait, began: float) -> Wait:
    """Return a wait with the time that is left of it: the server counts from the suspension, which another task may delay."""
    if wait.in_ms is None:
        return wait
    return wait._replace(in_ms=max(0, wait.in_ms - round((time.monotonic() - began) * 1000)))


def _caller() -> object:
    """Return the task or thread that calls."""
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_task()
    with suppress(RuntimeError):
        import asyncio

        if (task := asyncio.current_task()) is not None:
            return task
    return threading.current_thread()


def _all_parked(root: trio.lowlevel.Task, parked: Collection[object], outer: Collection[trio.Nursery]) -> bool:
    """Return True if each task of a tree is parked, or only waits at the end of a nursery for those that are. Tasks of `outer`
    nurseries do not belong to it.
    """
    left = [root]
    while left:
        task = left.pop()
        inner = [nursery for nursery in task.child_nurseries if nursery not in outer]
        children = [child for nursery in inner for child in nursery.child_tasks]
        left += children
        is_parked = task in parked and not _is_cancelled(task)
        if not is_parked and not (children and _waits_for_children(task)):
            return False
    return True


def _is_cancelled(task: trio.lowlevel.Task) -> bool:
    """Return True if a task is cancelled, and goes on as soon as it has its turn. Trio has no public API for this."""
    return bool(getattr(getattr(task, "_cancel_status", None), "effectively_cancelled", False))


def _waits_for_children(task: trio.lowlevel.Task) -> bool:
    """Return True if a task is at the end of its innermost nursery. Trio has no public API for this."""
    return bool(getattr(task.child_nurseries[-1], "_parent_waiting_in_aexit", False))


def _is_alone(run: Run[Any]) -> bool:
    """Return True if a run on asyncio has no other task than the current one. Before Python 3.12, nothing tells."""
    import asyncio

    here = asyncio.current_task()
    if not hasattr(here, "get_context"):
        return False
    others = [task for task in asyncio.all_tasks() if task is not here]
    return not any(cast("Any", task).get_context().get(current_run) is run for task in others)


# The handler of a workflow


def as_workflow(handler: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a handler that may wait durably. It is async if `handler` is."""

    @wraps(handler)
    async def awaited(task: bytes) -> object:
        flow = _begin_flow()
        try:
            value = await handler(task)
        except (Exception, Snooze):
            if not flow.suspending:
                await flow.children.send()
            raise
        if not flow.suspending:
            await flow.children.send()
        return flow.returned(value)

    @wraps(handler)
    def called(task: bytes) -> object:
        flow = _begin_flow()
        try:
            value = handler(task)
        except BaseException as error:
            if flow.suspending:
                raise Suspended from error  # whatever the handler made of it
            flow.children.send_now()
            raise
        if not flow.suspending:
            flow.children.send_now()
        return flow.returned(value)

    found = awaited if is_async(handler) else called
    del found.__wrapped__  # `inspect` would report the signature of the function
    return found


def _begin_flow() -> Flow:
    """Note that the handler of a workflow begins here, in its task or thread."""
    run = current_run.get()
    flow = Flow(run)
    run.begin_flow(flow)
    return flow


def flow_here(what: str) -> Flow:
    """Return the `Flow` of the workflow that calls `what`.

    Raises:
        UsageError: this is not the handler of a workflow.
        Suspended: its run is being suspended.
    """
    run = current_run.get(None)
    flow: Flow | None = None if run is None else run.flow
    if flow is None:
        where = "outside a handler" if run is None else f"in {run.queue!r}, which is no workflow"
        raise UsageError(
            f"{what} was called {where}: declare the function with @mesh.workflow, which may wait for weeks"
        )
    flow.check()
    return flow


# Sleeping


def sleep(duration: Seconds, *, name: str = "") -> Coroutine[Any, Any, None]:
    """Sleep in a workflow, for milliseconds or for weeks. From 5 s on the run is suspended meanwhile: it holds no slot, and
    survives any crash and any deploy.

    The time counts from the first run that comes here, by the server's clock, however often the workflow runs.

    Args:
        duration: Seconds, or a timedelta.
        name: Distinguishes sleeps of several tasks of one run. Sleeps of one task are numbered.

    Raises:
        UsageError: Called outside a workflow, in a thread or process where no event loop runs, or inside a time limit of the
            application; another task of the run sleeps under the same name; or `duration` is not valid.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow_here("worqr.sleep()").run.check_awaitable("worqr.sleep()", "worqr.sleep_now(...)")
    flow, key, wait = _sleep_wait(duration, name)
    return _slept(flow, key, wait)


def sleep_now(duration: Seconds, *, name: str = "") -> None:
    """Sleep in a workflow that is a plain function, in a thread or a process. See `sleep`.

    Args:
        duration: Seconds, or a timedelta.
        name: Distinguishes sleeps, which are numbered otherwise.

    Raises:
        UsageError: An event loop runs in this thread; or as `sleep`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, key, wait = _sleep_wait(duration, name)
    flow.run.check_may_wait("await worqr.sleep(...)")
    _slept_now(flow, key, wait)


def sleep_until(moment: datetime, *, name: str = "") -> Coroutine[Any, Any, None]:
    """Sleep in a workflow until a time. See `sleep`.

    Args:
        moment: A datetime with a timezone. The first run that comes here decides; a later run with another time does not.
        name: Distinguishes sleeps of several tasks of one run.

    Raises:
        UsageError: As `sleep`, or the datetime has no timezone.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow_here("worqr.sleep_until()").run.check_awaitable("worqr.sleep_until()", "worqr.sleep_until_now(...)")
    flow, key, wait = _until_wait(moment, name)
    return _slept(flow, key, wait)


def sleep_until_now(moment: datetime, *, name: str = "") -> None:
    """Sleep until a time in a workflow that is a plain function, in a thread or a process. See `sleep_until`.

    Args:
        moment: A datetime with a timezone.
        name: Distinguishes sleeps, which are numbered otherwise.

    Raises:
        UsageError: An event loop runs in this thread; or as `sleep_until`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, key, wait = _until_wait(moment, name)
    flow.run.check_may_wait("await worqr.sleep_until(...)")
    _slept_now(flow, key, wait)


def _sleep_wait(duration: Seconds, name: str) -> tuple[Flow, str, Wait]:
    flow = flow_here("worqr.sleep()")
    ms = round(seconds(duration, "duration of sleep") * 1000)
    return flow, (key := _sleep_key(flow, name)), Wait(key, "sleep", in_ms=ms)


def _until_wait(moment: datetime, name: str) -> tuple[Flow, str, Wait]:
    flow = flow_here("worqr.sleep_until()")
    ms = to_ms(moment, "moment of sleep_until")
    return flow, (key := _sleep_key(flow, name)), Wait(key, "sleep", at_ms=ms)


def _sleep_key(flow: Flow, name: str) -> str:
    key = f"sleep {_checked_name(name, 'the name of a sleep')}" if name else "sleep"
    return flow.key(key, "give one of them a name, as in worqr.sleep(60, name='before the reminder')")


def _in_memory(wait: Wait) -> float | None:
    """Return for how many seconds a wait is to be slept in memory; None: it is too long."""
    left = wait.at_ms - time.time() * 1000 if wait.at_ms is not None else wait.in_ms or 0
    return max(0.0, left / 1000) if left < IN_MEMORY * 1000 else None


async def _slept(flow: Flow, key: str, wait: Wait) -> None:
    if (end := flow.ended(key)) is not None:
        check_lifetime(end)
    elif flow.is_open(key) or (short := _in_memory(wait)) is None:
        await flow.park(wait)
    else:
        with flow.busy():
            await sleep_here(short)


def _slept_now(flow: Flow, key: str, wait: Wait) -> None:
    if (end := flow.ended(key)) is not None:
        check_lifetime(end)
    elif flow.is_open(key) or (short := _in_memory(wait)) is None:
        flow.park_now(wait)
    else:
        time.sleep(short)
        flow.run.check_wait()


# Events


@overload
def wait_for(
    name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: Literal[False] = False
) -> Coroutine[Any, Any, T | None]: ...
@overload
def wait_for(
    name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: Literal[True]
) -> AsyncIterator[T]: ...
def wait_for(name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: bool = False) -> Any:
    """Wait in a workflow for a value that is sent: ``await job.send(name, value)``, a form, a web-hook, ``worqr send``.

    A value may come before the workflow waits for it. Each wait takes one value, in the order in which they were sent; the waits
    of one name are numbered, so a loop reads a mailbox. The run is suspended meanwhile, and holds no slot.

    Args:
        name: The name of the event, 1 to 200 bytes.
        kind: The type of the value, which it is decoded as. A value of another type does not count, and the wait goes on.
        timeout: Seconds, or a timedelta, from the first run that comes here. None: no limit. With `many`: for each value.
        many: True: return an async iterator over the values that are sent: ``async for order in worqr.wait_for("order", Order,
            many=True)``. It ends when no value has come within the timeout.

    Returns:
        The value; None if the time is over. Later runs get the same. With `many`, an iterator.

    Raises:
        UsageError: As `sleep`, or JSON does not know the type.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow_here("worqr.wait_for()").run.check_awaitable("worqr.wait_for()", "worqr.wait_for_now(...)")
    if many:
        return _mailbox(name, kind, timeout)
    flow, wait = _event_wait(name, kind, timeout)
    return _waited(flow, wait, kind)


async def _mailbox(name: str, kind: type[T], timeout: Seconds | None) -> AsyncIterator[T]:
    while True:
        flow, wait = _event_wait(name, kind, timeout)
        value = await _waited(flow, wait, kind)
        if _is_over(flow, wait):
            return
        yield cast("T", value)


def _mailbox_now(name: str, kind: type[T], timeout: Seconds | None) -> Iterator[T]:
    while True:
        flow, wait = _event_wait(name, kind, timeout)
        value = _waited_now(flow, wait, kind)
        if _is_over(flow, wait):
            return
        yield cast("T", value)


def _is_over(flow: Flow, wait: Wait) -> bool:
    """Return True if a wait has ended without a value."""
    end = flow.ended(wait.key)
    return end is None or end.outcome != "value"


@overload
def wait_for_now(
    name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: Literal[False] = False
) -> T | None: ...
@overload
def wait_for_now(
    name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: Literal[True]
) -> Iterator[T]: ...
def wait_for_now(name: str, kind: type[T], /, *, timeout: Seconds | None = None, many: bool = False) -> Any:
    """Wait for an event in a workflow that is a plain function, in a thread or a process. See `wait_for`.

    Args:
        name: The name of the event.
        kind: The type of the value.
        timeout: Seconds, or a timedelta. None: no limit.
        many: True: return an iterator over the values that are sent.

    Returns:
        The value; None if the time is over. With `many`, an iterator.

    Raises:
        UsageError: An event loop runs in this thread; or as `wait_for`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    if many:
        flow_here("worqr.wait_for_now()").run.check_may_wait("async for ... in worqr.wait_for(...)")
        return _mailbox_now(name, kind, timeout)
    flow, wait = _event_wait(name, kind, timeout)
    flow.run.check_may_wait("await worqr.wait_for(...)")
    return _waited_now(flow, wait, kind)


def _waited_now(flow: Flow, wait: Wait, kind: type[T]) -> T | None:
    while True:
        if (end := flow.ended(wait.key)) is None:
            flow.park_now(wait)
        else:
            with suppress(_Undecodable):
                return _event_value(end, kind)
            flow.refuse_now(wait.key)


def _event_wait(name: str, kind: Any, timeout: Seconds | None) -> tuple[Flow, Wait]:
    flow = flow_here("worqr.wait_for()")
    check_event(name)
    check_known(f"wait_for({name!r})", "return", kind)
    key = flow.key(f"wait for {name}", "wait in one of them, or give the events two names")
    ms = None if timeout is None else round(seconds(timeout, "timeout of wait_for") * 1000)
    return flow, Wait(key, "event", name, _schema_of(kind), in_ms=ms)


async def _waited(flow: Flow, wait: Wait, kind: type[T]) -> T | None:
    while True:
        if (end := flow.ended(wait.key)) is None:
            await flow.park(wait)
        else:
            with suppress(_Undecodable):
                return _event_value(end, kind)
            await flow.refuse(wait.key)


class _Undecodable(Exception):
    """A value that was sent is not of the type that the workflow waits for."""


def _event_value(end: End, kind: type[T]) -> T | None:
    """Return the value of a wait that has ended; None after its timeout."""
    check_lifetime(end)
    if end.outcome != "value":
        return None
    form, _, value = end.value.partition(b" ")
    try:
        if form == b"bytes":
            return msgspec.convert(value, kind)
        return cast("Callable[[bytes], T]", decoder_of(kind))(b"null" if form == b"none" else value)
    except Exception as error:
        raise _Undecodable from error


_LONGEST_SCHEMA: Final = 16 * 1024


def _schema_of(kind: Any) -> str:
    """Return the JSON schema of a type, for forms and commands that send a value; empty if it has none, or a very long one."""
    try:
        schema = msgspec.json.encode(msgspec.json.schema(kind)).decode()
    except Exception:  # a model of another library
        return ""
    return schema if len(schema) <= _LONGEST_SCHEMA else ""


def _checked_name(name: object, what: str) -> str:
    text = check_text(name, what)
    if not 0 < len(text.encode()) <= MAX_NAME or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise UsageError(f"{what} must have 1 to {MAX_NAME} bytes, without control characters, not {text[:200]!r}")
    return text
