"""`Context`: the view that a handler has of its run; `current()` returns it.

A context is made when a handler asks for it. Its calls never wait, but for those that save, so a coroutine, a thread and an
asyncio task can use it alike. Not here: `Claim`, the class for tasks that an application claims itself (`manual_consumer`).
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast, get_type_hints, overload
from weakref import WeakKeyDictionary

import msgspec

from worqr.argument_codec import annotated, check_known, decoder_of
from worqr.arrival import Changed, Check, arrival_of
from worqr.batches import BatchInfo, BatchRef, ended_of, ref_of
from worqr.client.job import own_options
from worqr.errors import UsageError
from worqr.foreign import CONTEXT, no_such_attribute
from worqr.peer.error_throttle import wait_done
from worqr.peer.run import Run, RunHost, Save, check_saved, check_step, current_run, encode_step, failed_of
from worqr.records import CancelReason
from worqr.remote_error import meta_of
from worqr.stored_values import whole
from worqr.validation import Seconds, clean_text, from_ms
from worqr.validation import seconds as seconds_of

# `step` and `step_now`: call a function once per job, however often the job runs.
#
# The result is stored under the name of the step, and decoded by the function's return annotation: in the run that calls the
# function as well, so that all runs get an equal value. What is stored is in `run`.


P = ParamSpec("P")
R = TypeVar("R")


@overload
async def step(name: str, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def step(name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
async def step(name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
        UsageError: Called outside a handler; this run has taken a step of this name before; JSON does not know the return
            annotation; the stored result is not of that type; or it would arrive as another type or value than was returned.
        Failure: The function was called, and its result cannot be stored: it is no JSON, or the job would keep more than 1 MiB.
            The job moves to the dead-letter queue, because another run would call the function again.
        ClaimLost: The task was reassigned to another worker, or has ended.
        RefusedByServer: The server does not permit it.
        Unavailable: The peer has left.
    """
    with _Step[Any](name, fn) as begun:
        if begun.result is None:
            value = fn(*args, **kwargs)
            begun.note(await value if inspect.isawaitable(value) else value)
        if begun.unsaved:
            await wait_done(done := begun.send())
            begun.saved(done)
        return begun.value()


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
    with _Step[R](name, fn) as begun:
        begun.run.check_may_wait(f"await worqr.step({name!r}, ...)")
        if begun.result is None:
            begun.note(_not_awaitable(name, fn(*args, **kwargs)))
        if begun.unsaved:
            begun.saved(begun.send())
        return begun.value()


def _not_awaitable(name: str, value: R) -> R:
    if not inspect.isawaitable(value):
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise UsageError(f"step {name!r} is an async function: write `await worqr.step({name!r}, ...)` in an async handler")


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
        self._state = self.run.saved_state()
        self.result, self.unsaved = self._state.begin_step(name)

    def __enter__(self) -> _Step[R]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._state.give_up_step(self._name)

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

    def send(self) -> Future[None]:
        """Send the result to the server."""
        assert self.result is not None
        return self.run.save(Save(0, self._name, self.result))

    def saved(self, done: Future[None]) -> None:
        """Note that the server has the result, or raise the error."""
        done.result()
        self._state.note_step_saved(self._name)

    def value(self) -> R:
        """Return the decoded result."""
        assert self.result is not None
        kind, _, value = self.result.partition(b" ")
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


class Context:
    """One run of one task. In a handler, ``worqr.current()`` returns it."""

    __slots__ = ("_run",)

    def __init__(self, run: Run[RunHost]) -> None:
        self._run = run

    @property
    def task(self) -> bytes:
        """The payload."""
        return self._run.task

    @property
    def fence(self) -> int:
        """The fencing token: a number that grows with every claim of the queue.

        A resource that stores the highest number it saw can reject a worker that was frozen and whose task was reassigned.
        """
        return self._run.fence

    @property
    def failures(self) -> int:
        """The number of earlier runs that failed."""
        return self._run.failures

    @property
    def stalls(self) -> int:
        """The number of workers that died while running this task."""
        return self._run.stalls

    @property
    def timeouts(self) -> int:
        """The number of earlier runs that took too long."""
        return self._run.timeouts

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why this run is being cancelled; None if it is not. A thread can read it at any time.

        ``cancel``: a caller requested it. ``lost``: the task was reassigned to another worker. ``leaving``: the peer leaves, and
        the task returns to its queue. ``timeout``: the run took too long.
        """
        return self._run.cancel_reason

    @property
    def deadline(self) -> float | None:
        """The time at which the run will be cancelled; None: the run has no timeout.

        On the clock of ``time.monotonic()``, which is also the clock of an asyncio loop.
        """
        return self._run.deadline

    @property
    def id(self) -> str:
        """The job's id. A plain task has none; this is the id that it would get."""
        return self._run.id

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._run.queue

    @property
    def lane(self) -> str:
        """The lane of its queue that it came from; empty if it has none."""
        record = self._run.record
        return "" if record is None else record.get(b"lane", b"").decode("utf-8", "replace")

    @property
    def batch(self) -> BatchRef | None:
        """The batch that its job belongs to, or None. ``mesh.current_batch()`` returns a handle, to add jobs to it."""
        return ref_of(self._run.record)

    @property
    def ended_batch(self) -> BatchInfo | None:
        """In a follow-up: the batch that has ended. In any other run: None. A function that is always a follow-up calls
        `batch_end()`.
        """
        return ended_of(self._run.record)

    def batch_end(self) -> BatchInfo:
        """Return the batch that has ended, in a follow-up.

        Returns:
            Its counts, its id, and the `meta` that was passed to ``mesh.batch``.

        Raises:
            UsageError: This run is not the follow-up of a batch. It was enqueued in another way.
        """
        ended = self.ended_batch
        if ended is None:
            raise UsageError(
                f"batch_end() is for the follow-up of a batch, and this task of {self.queue!r} was enqueued in another way: pass "
                "the call to mesh.batch(then=...) or otherwise=..., or read ended_batch, which is None then"
            )
        return ended

    @property
    def items(self) -> Sequence[Context]:
        """The calls of this run. A list handler has one for each value of its list, in the same order, with its own `id`,
        `attempt`, `meta` and `cancel_reason`. For other handlers, this run is the only one.
        """
        return _Items(self._run.items)

    @property
    def run_at(self) -> datetime:
        """The time before which it was not to run, by the server's clock. For a task that was never scheduled: the time of the
        claim.
        """
        record = self._run.record
        due = 0 if record is None else whole(record.get(b"run_at"), 0)
        return from_ms(due or self.fence / 1000)

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time of the firing, for a job of a schedule; else None."""
        record = self._run.record
        nominal = 0 if record is None else whole(record.get(b"scheduled_for"), 0)
        return from_ms(nominal) if nominal else None

    @property
    def meta(self) -> Mapping[str, str]:
        """The `meta` of its dispatch; empty if there is none. In a failure handler: the `meta` of the job that failed."""
        record = self._run.record
        if record is None:
            return {}
        if b"failed" in record:
            return failed_of(self._run, self.queue).meta
        return meta_of(record.get(b"meta", b"").decode())

    @property
    def options(self) -> Mapping[str, int | float | bool | str]:
        """The options of its own that the dispatch set, such as ``timeout`` and ``max_failures``; times in seconds. Others are
        those of the handler. As in `JobRecord.options`.
        """
        record = self._run.record
        return {} if record is None else own_options({name.decode("utf-8", "replace"): record[name] for name in record})

    @property
    def attempt(self) -> int:
        """The number of this run: 1 at the first. Runs that were not counted are left out."""
        return self._run.attempt

    @property
    def last_attempt(self) -> bool:
        """True if the task moves to the dead-letter queue when this run fails."""
        return self.failures + 1 >= self._run.policy.max_failures

    def progress(self, done: float | None = None, message: str = "") -> None:
        """Report the progress of this run, from any thread. This never waits.

        ``job.status()``, ``job.watch()`` and ``queue.running()`` show it. Updates are limited to 10 per second; only the latest
        is kept. The last one is sent before the end of the run, and stays in the status as long as the result is kept.

        Args:
            done: A number from 0 to 1. A larger one is kept, with a Python warning at its line.
            message: A text for people. Only the first 1,000 characters are kept.

        Raises:
            UsageError: `done` is not a finite number, or `message` is not a str.
        """
        number = _finite(done)
        if number is not None and number > 1:
            warnings.warn(
                f"progress({done!r}): worqr shows a fraction from 0 to 1; for 50 %, write progress(0.5), or progress(50 / 100)",
                stacklevel=2,
            )
        self._run.report_progress(number, _message(message))

    @property
    def saved(self) -> bytes | None:
        """The bytes that this job saved last, in an earlier run or in this one; None if it saved none."""
        record = self._run.record
        return None if record is None else record.saved_state().saved

    async def save(self, state: bytes) -> None:
        """Save bytes for later runs of this job, and return when the server has them. Later runs find them in `saved`.

        They replace the bytes that were saved before. They are deleted when the job ends, or when a dispatch of its id brings
        another payload. During an outage this waits until the server is back, or until the claim is lost.

        Args:
            state: At most 256 KiB.

        Raises:
            UsageError: `state` is not bytes, or too large; or all that the job keeps, with the results of its steps, would be
                over 1 MiB.
            ClaimLost: The task was reassigned to another worker, or has ended. Nothing was saved.
            RefusedByServer: The server does not permit it. Nothing was saved.
            Unavailable: The peer has left.
        """
        save, done = self._begin_save(state)
        await wait_done(done)
        done.result()
        self._run.saved_state().note_saved(save.number, save.value)

    def save_now(self, state: bytes) -> None:
        """Save bytes as `save` does, in a thread or a process: wait here until the server has them.

        Args:
            state: At most 256 KiB.

        Raises:
            UsageError: An event loop runs in this thread; or as `save`.
            ClaimLost: The task was reassigned to another worker, or has ended. Nothing was saved.
            RefusedByServer: The server does not permit it. Nothing was saved.
            Unavailable: The peer has left.
        """
        self._run.check_may_wait("await worqr.current().save(...)")
        save, done = self._begin_save(state)
        done.result()
        self._run.saved_state().note_saved(save.number, save.value)

    def _begin_save(self, state: bytes) -> tuple[Save, Future[None]]:
        saved = check_saved(state)
        save = Save(self._run.saved_state().next_number(), "", saved)
        return save, self._run.save(save)

    def extend(self, seconds: Seconds) -> None:
        """Move the deadline of this run, from any thread. This never waits.

        A run without a timeout stays without one. A run that is being cancelled already stays cancelled.

        Args:
            seconds: The deadline in seconds from now, or a timedelta; more than 0. It may be earlier than before.

        Raises:
            UsageError: `seconds` is not valid.
        """
        self._run.host.extend(self._run, seconds_of(seconds, "seconds of extend", positive=True))

    def check_cancelled(self) -> None:
        """Raise an exception if this run is being cancelled. A plain function in a thread has to call it to be cancelled.

        In a thread it raises ``trio.Cancelled``; in an asyncio handler and its threads, ``asyncio.CancelledError``. Do not
        catch it. In an async handler on the Trio loop it does nothing, because the next ``await`` is cancelled.

        Raises:
            UsageError: Called in a thread that the handler started by itself. Read `cancel_reason` there.
        """
        self._run.check_cancelled()

    @property
    def state(self) -> Any:
        """The value that the mesh's lifespan yielded, as in ``mesh.state``; None without a lifespan."""
        return self._run.host.state

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("Context", name, CONTEXT))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fence} of {self.queue!r}, attempt {self.attempt}>"


class _Items(Sequence[Context]):
    """The calls of a run. The context of each is made when it is asked for."""

    def __init__(self, runs: Sequence[Run[Any]]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Context]: ...
    def __getitem__(self, index: int | slice) -> Context | Sequence[Context]:
        found = self._runs[index]
        return Context(found) if isinstance(found, Run) else _Items(found)


class ListContext(Context):
    """One run of a list handler. What belongs to one call is in `items`."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ONE_CALL:
            raise UsageError(
                f"this run takes a list of calls, and {name!r} belongs to one of them: use worqr.current().items[0].{name}, or "
                f"{name!r} of each of the items"
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.queue!r}, {len(self.items)} calls>"


_OF_ONE_CALL: Final = frozenset(
    (
        "task",
        "fence",
        "failures",
        "stalls",
        "timeouts",
        "id",
        "lane",
        "run_at",
        "scheduled_for",
        "meta",
        "options",
        "attempt",
    )
) | {"last_attempt", "saved", "save", "save_now"}
"""The properties of a `Context` that a run of several calls does not have."""


def _message(message: object) -> str:
    """Return at most 1,000 characters that UTF-8 can encode, because a progress message must not fail the run."""
    if not isinstance(message, str):
        raise UsageError(f"the message of progress must be a str, not {type(message).__name__}")
    return clean_text(message[:1000])


def _finite(done: object) -> float | None:
    if done is None:
        return None
    if isinstance(done, bool) or not isinstance(done, int | float) or not math.isfinite(done):
        raise UsageError(f"progress must be a finite number or None, not {done!r}")
    return float(done)


current_context: ContextVar[Context] = ContextVar("worqr.current")
"""The context that this code last asked for; it may belong to another run."""


def current() -> Context:
    """Return the run that this code belongs to, in a handler or in a thread of it.

    Raises:
        LookupError: Called outside a handler.
    """
    try:
        run = current_run.get()
    except LookupError:
        raise LookupError("worqr.current() is only known inside a handler") from None
    known = current_context.get(None)
    if known is None or known._run is not run:  # pyright: ignore[reportPrivateUsage]
        known = ListContext(run) if run.is_list else Context(run)
        current_context.set(known)
    return known
