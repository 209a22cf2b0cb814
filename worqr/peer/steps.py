"""Steps: calls of functions that are made once per job, however often the job runs.

The result is stored under the name of the step, and decoded by the function's return annotation: in the run that calls the
function as well, so that all runs get an equal value. What is stored is in `run`. A step with a retry policy has tries of its
own, which the job keeps, too. A step that has failed for good raises the same `StepFailed` in each run.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast, get_type_hints, overload
from weakref import WeakKeyDictionary

import msgspec
import trio

from worqr.argument_codec import Changed, Check, annotated, arrival_of, check_known, decoder_of
from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.ops import Wait
from worqr.peer.children import check_lifetime
from worqr.peer.error_throttle import sleep_here, wait_done
from worqr.peer.run import IN_MEMORY, RETRY_OF, Run, Save, Tries, check_step, current_run, encode_step
from worqr.policy import NO_TRIES, Policy, StepFailed, decide_retry
from worqr.records import RemoteError
from worqr.remote_error import remote_error
from worqr.validation import encode_json, returns_coroutine

logger: logging.Logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@overload
async def step(name: str, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def step(name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@returns_coroutine
def step(name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a handler, unless an earlier run of this job has called it: then return what it returned.

    A step is called again if its worker dies between its effect and the save. If that must not happen, pass the other system
    an idempotency key, such as ``worqr.current().id``. If the function raises, nothing is stored. Steps of other names may
    run at the same time.

    Args:
        name: The name of the step in this job, 1 to 200 bytes. Each step of a job needs its own.
        fn: An async function, or a plain one that does not block. Its result is stored as JSON and decoded by its return
            annotation, in every run. Bytes and None are stored unchanged.
        *args: Passed to the function. They are not stored and not compared.
        **kwargs: Passed to the function.

    Returns:
        What the function returned, in this run or in an earlier one.

    Raises:
        UsageError: Called outside a handler, or in a thread or process where no event loop runs; this run has taken a step of
            this name before; JSON does not know the return annotation; the stored result is not of that type; or it would
            arrive as another type or value than was returned.
        Failure: The function was called, and its result cannot be stored: it is no JSON, or the job would keep more than 1 MiB.
            The job moves to the dead-letter queue, because another run would call the function again.
        ClaimLost: The task was reassigned to another worker, or has ended.
        RefusedByServer: The server does not permit it.
        Unavailable: The peer has left.
    """
    if (run := current_run.get(None)) is not None:
        run.check_awaitable("worqr.step()", "worqr.step_now(...)")
    return take_step(name, fn, args, kwargs)


async def take_step(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None = None
) -> Any:
    """Take a step, as `step` does. With a policy, a failed try is followed by others.

    Raises:
        StepFailed: the policy allows no further try, in this run or in an earlier one.
    """
    with _Step[Any](name, fn) as begun:
        while begun.result is None:
            await begun.pause()
            try:
                value = await _limited(fn(*args, **kwargs), policy)
            except Exception as error:
                if policy is None or policy.max_failures == NO_TRIES:
                    raise
                await wait_done(done := begun.send(begun.failed(error, policy)))
                begun.note_failed(done)
            else:
                begun.note(value)
        if begun.unsaved:
            await wait_done(done := begun.send())
            begun.saved(done)
        return begun.value()


async def _limited(value: Any, policy: Policy | None) -> Any:
    """Return what a function has returned, awaited within the time that the policy allows."""
    if not inspect.isawaitable(value):
        return value
    limit = None if policy is None else policy.timeout
    if limit is None:
        return await value
    late = TimeoutError(f"the step took longer than {limit:g} s")
    if trio.lowlevel.in_trio_task():
        with trio.move_on_after(limit) as scope:
            return await value
        if scope.cancelled_caught:
            raise late
        return None  # the function swallowed something
    import asyncio

    timer = asyncio.timeout(limit)
    try:
        async with timer:
            return await value
    except TimeoutError:
        if timer.expired():
            raise late from None
        raise


def step_now(name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a plain function as a step, in a handler that runs in a thread or a process. See `step`.

    A step is called again if its worker dies between its effect and the save.

    Args:
        name: The name of the step in this job, 1 to 200 bytes. Each step of a job needs its own.
        fn: A plain function. Its result is stored as JSON and decoded by its return annotation, in every run.
        *args: Passed to the function. They are not stored and not compared.
        **kwargs: Passed to the function.

    Returns:
        What the function returned, in this run or in an earlier one.

    Raises:
        UsageError: An event loop runs in this thread; the function is async; or as `step`.
        Failure: The function was called, and its result cannot be stored.
        ClaimLost: The task was reassigned to another worker, or has ended.
        RefusedByServer: The server does not permit it.
        Unavailable: The peer has left.
    """
    return cast("R", take_step_now(name, fn, args, kwargs))


def take_step_now(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy | None = None,
    *,
    instead: str = "",
) -> Any:
    """Take a step, as `step_now` does. With a policy, a failed try is followed by others. `instead`: the code to write where an
    event loop runs.

    Raises:
        StepFailed: the policy allows no further try, in this run or in an earlier one.
    """
    with _Step[Any](name, fn) as begun:
        begun.run.check_may_wait(instead or f"await worqr.step({name!r}, ...)")
        while begun.result is None:
            begun.pause_now()
            try:
                value = _not_awaitable(name, fn(*args, **kwargs))
            except Exception as error:
                if policy is None:
                    raise
                begun.note_failed(begun.send(begun.failed(error, policy)))
            else:
                begun.note(value)
        if begun.unsaved:
            begun.saved(begun.send())
        return begun.value()


def _not_awaitable(name: str, value: R) -> R:
    if not inspect.isawaitable(value):
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise UsageError(f"step {name!r} is an async function: write `await worqr.step({name!r}, ...)` in an async handler")


_around: Final = ContextVar[tuple[object, str]]("_around", default=(None, ""))
"""The run, and the name of its step, inside which this code is called."""


def check_not_inside_step(run: object, call: str) -> None:
    """Raise UsageError in a step of `run`. Later runs skip it, and would give the name of this call to the next equal one."""
    within, step = _around.get()
    if within is run:
        raise UsageError(
            f"{call!r} is called inside the step {step!r}, which later runs skip with all that is in it: call it in the workflow "
            "itself, beside the step"
        )


class _Step(Generic[R]):
    """One step of the current run, as a block. If the block raises, the handler may begin the step again.

    Raises:
        UsageError: as `step`. The function was not called.
    """

    def __init__(self, name: str, fn: Callable[..., object]) -> None:
        try:
            self.run: Run[Any] = current_run.get()
        except LookupError:
            raise UsageError(
                "worqr.step() is for code inside a handler, which a worker runs: elsewhere, call the function itself; in a "
                "test, use `with worqr.testing.context():`"
            ) from None
        self._name = check_step(name)
        self._hint, self._arrival = _return_type(name, fn)
        self._changed = ""
        self._pause: float | None = None
        self._began = time.monotonic()
        self._flow = self.run.flow
        self._outer = _around.get()
        self._state = self.run.saved_state()
        if self._flow is not None:
            self._flow.check()
            check_not_inside_step(self.run, self._name)
        self._tried = self._state.tries_of(name)
        self._since = self._tried.since or round(time.time() * 1000)
        self.result, self.unsaved = self._state.begin_step(name)

    def __enter__(self) -> _Step[R]:
        if self._flow is not None:
            self._flow.step_began()
            _around.set((self.run, self._name))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._flow is not None:
            self._flow.step_ended()
            _around.set(self._outer)  # not reset(): a generator may end its block in another context
        if kind is not None:
            self._state.give_up_step(self._name)

    # Tries

    def failed(self, error: Exception, policy: Policy) -> Save:
        """Return what is to be saved of a try that has failed: its number, or that the step has failed for good."""
        number, failures, _ = self._state.tries_of(self._name)
        decision, described = decide_retry(error, policy, failures), remote_error(error)
        counts = decision.kind != "retry" or decision.counted
        self._tried = tried = Tries(number + 1, failures + counts, self._since)
        if decision.kind == "retry" and tried.failures < policy.max_failures:
            delay = decision.delay if decision.pause is None else decision.pause
            if decision.run_at_ms is not None:
                delay = _until(decision.run_at_ms)
            elif decision.backs_off:
                delay = policy.delay_after(failures, described.type, self._report)
            if not counts or self._has_time_for(delay, policy):
                self._pause = delay
                told = [described.type, described.message, tried.since, tried.failures]
                kept = 4 if tried.failures < tried.number else 2 if policy.retry_for is None else 3
                return Save(tried.number, self._name, encode_json(told[:kept]))
        self.result = b"failed " + encode_json([described.type, described.message, described.traceback])
        return Save(0, self._name, self.result, self._has_progressed, took=self._took)

    def _has_time_for(self, delay: float, policy: Policy) -> bool:
        """Return True if the next try may begin after `delay` seconds. The clocks are those of the workers."""
        return policy.retry_for is None or time.time() + delay <= self._since / 1000 + policy.retry_for

    def _report(self, why: str) -> None:
        text = "queue %(queue)r, job %(job)s: the backoff of step %(step)r failed, and the default decides: %(error)s"
        emit(logger, "retry.backoff", text, queue=self.run.queue, job=self.run.id, step=self._name, error=why)

    def note_failed(self, done: Future[None]) -> None:
        """Note that the server knows of the failed try, or raise the error."""
        done.result()
        if self.result is None:
            self._state.note_try(self._name, self._tried)
        else:
            self._state.note_step(self._name, self.result)
            self._state.note_step_saved(self._name)

    async def pause(self) -> None:
        """Wait until the next try is due. A workflow is suspended meanwhile, unless that is soon."""
        if (wait := self._wait()) is not None and self._flow is not None:
            with self._flow.outside_steps():
                await self._flow.park(wait)
        elif self._pause:
            await sleep_here(self._pause)

    def pause_now(self) -> None:
        """As `pause`, in a thread or a process."""
        if (wait := self._wait()) is not None and self._flow is not None:
            self._flow.park_now(wait)
        elif self._pause:
            time.sleep(self._pause)
            self.run.check_wait()

    def _wait(self) -> Wait | None:
        """Return the wait for the next try; None if it is over, if it is soon, or if the run is not of a workflow.

        Raises:
            LifetimeOver: the lifetime of the workflow has ended it.
        """
        if self._flow is None:
            return None
        key = f"{RETRY_OF}{self._name} #{self._state.tries_of(self._name).number}"
        if (end := self._flow.ended(key)) is not None:
            check_lifetime(end)
            return None
        if self._pause is None:  # the run was woken by another wait
            return Wait(key, "sleep", in_ms=0) if self._flow.is_open(key) else None
        if self._pause < IN_MEMORY:
            return None
        return Wait(key, "sleep", in_ms=round(self._pause * 1000))

    @property
    def _took(self) -> int | None:
        """The ms since the step of a workflow began in this run; None of another job."""
        return None if self._flow is None else round((time.monotonic() - self._began) * 1000)

    @property
    def _has_progressed(self) -> bool:
        return self.run.policy.counts_anew() and self._state.asked_for_all

    def note(self, value: object) -> None:
        """Note what the function returned. A result that would arrive as something else is marked, and kept all the same."""
        result = encode_step(self._name, value)
        if result.startswith(b"json "):
            with suppress(Exception):  # `value` reports what cannot be decoded
                try:
                    self._arrival.check(value, decoder_of(self._hint)(result[5:]))
                except Changed as changed:
                    self._changed = f"{changed}{changed.remedy}"
                    result = _mark(self._hint) + result[4:]
        self.result, self.unsaved = result, True
        self._state.note_step(self._name, result)

    def send(self, save: Save | None = None) -> Future[None]:
        """Send the result to the server, or what is given."""
        if save is None:
            assert self.result is not None
            save = Save(0, self._name, self.result, self._has_progressed, took=self._took)
        return self.run.save(save)

    def saved(self, done: Future[None]) -> None:
        """Note that the server has the result, or raise the error."""
        done.result()
        self._state.note_step_saved(self._name)

    def value(self) -> R:
        """Return the decoded result."""
        assert self.result is not None
        kind, _, value = self.result.partition(b" ")
        if kind == b"failed":
            raise _step_failed(self._name, value)
        if kind == _mark(self._hint):
            why = (
                self._changed
                or "part of it would arrive as something else: change the return annotation of the function"
            )
            raise UsageError(
                f"the result of step {self._name!r} is not what its function returned: {why}. It is saved: the next run does not "
                "call the function again"
            )
        try:
            if kind == b"bytes":
                found: object = msgspec.convert(value, self._hint)
            else:
                found = decoder_of(self._hint)(b"null" if kind == b"none" else value)
        except Exception as error:
            raise UsageError(
                f"the saved result of step {self._name!r} does not have the type that its function declares ({error}): "
                "it returned something else, or another version of it ran. Correct its annotation; the next run gets the "
                "same result"
            ) from error
        return cast("R", found)


def _step_failed(name: str, stored: bytes) -> StepFailed:
    try:
        error = RemoteError(*msgspec.json.decode(stored, type=tuple[str, str, str]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = RemoteError("unknown", "", "")  # another program has written it
    return StepFailed(f"the step {name!r} has failed for good: {error.type}: {error.message}", name, error)


def _until(ms: int) -> float:
    return max(0.0, ms / 1000 - time.time())


_hints: WeakKeyDictionary[Any, tuple[Any, Check]] = WeakKeyDictionary()
"""The return annotations of functions that were checked."""
_MODULES: Final = re.compile(r"[\w.]+\.")


def _mark(hint: object) -> bytes:
    """Return the kind of a saved result that this annotation does not restore; another annotation may. A script has two names."""
    return b"json-%08x" % zlib.crc32(_MODULES.sub("", repr(hint)).encode())


def _return_type(name: str, fn: object) -> tuple[Any, Check]:
    """Return the type of what `fn` returns, and its check.

    Raises:
        UsageError: JSON does not know it, or it names what is not there when the program runs.
    """
    if not callable(fn):
        raise UsageError(
            f"step {name!r} needs a function and its arguments, as in step({name!r}, charge, order), not {fn!r}"
        )
    key = getattr(fn, "__func__", fn)
    with suppress(KeyError, TypeError):
        return _hints[key]
    hint: Any = fn
    if not isinstance(fn, type):
        try:
            hint = get_type_hints(annotated(fn), include_extras=True).get("return", Any)
        except Exception as error:  # an annotation is code of the user, which may raise anything
            raise UsageError(
                f"step {name!r}: the annotations of its function cannot be read ({type(error).__name__}: {error}): import "
                "what they name outside of `if TYPE_CHECKING:`"
            ) from None
    check_known(f"step {name!r}", "return", hint)
    found = hint, arrival_of(hint)
    if hint is not fn:
        with suppress(TypeError):  # no weak references to it
            _hints[key] = found
    return found
