"""`OffloadedRun`: a run in a thread or on an asyncio loop, for which a slot on the Trio loop waits.

The Trio loop cannot stop such a run, only request that it stops. So its slot waits until the run has really ended, even if the
slot is cancelled. The claim is then settled by the return value or the error of the handler. Only a peer that leaves limits the
wait: it leaves a run behind that does not end. A handler on the wrong event loop is recognised by its error.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

import trio

from worqr.errors import UsageError
from worqr.peer.run import current_run, describe_end, encoded_outcome
from worqr.policy import Failure, Retry, Undecodable
from worqr.tracebacks import add_note, is_a, related_errors, text_of
from worqr.validation import is_coroutine_function, qualname_of

if TYPE_CHECKING:
    from worqr.peer.run import Run, RunHost


START_AGAIN: Final = 5.0
"""Seconds until a task runs again for which the system had no thread or process."""


def not_started(what: str, error: Exception, option: str) -> Retry:
    """Return what ends a run that did not begin, because the system had no room. It is no failure of the task."""
    text = f"the system can start no other {what} now ({error}): raise its limit, or lower {option}="
    return Retry(text, delay=START_AGAIN, counted=False)


# The present stack of a handler, for log lines about handlers that do not end.


# pyright: reportPrivateUsage=false


Frames = list[tuple[FrameType, int]]
"""Frames and their line numbers, the innermost last."""

MAX_FRAMES = 40
PACKAGE = str(Path(__file__).parents[2])


def thread_frames(ident: int, below: CodeType | None = None) -> Frames:
    """Return the stack of a thread, the innermost frame last. With `below`, return only the frames that this function has
    called.
    """
    frame = sys._current_frames().get(ident)  # public in all but name
    found: Frames = []
    while frame is not None and frame.f_code is not below:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def awaited_frames(coroutine: Any) -> Frames:
    """Return the stack of a suspended coroutine: its own frame, then the frame that it awaits, and so on."""
    found: Frames = []
    while coroutine is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame: FrameType | None = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                found.append((frame, frame.f_lineno))
                coroutine = getattr(coroutine, inner)
                break
        else:
            break
    return found


def describe(frames: Frames) -> str:
    """Format frames as in a traceback, without worqr's own, and at most the innermost 40."""
    shown = [place for place in frames if not place[0].f_code.co_filename.startswith(PACKAGE)][-MAX_FRAMES:]
    lines = traceback.StackSummary.extract(iter(shown)).format()
    return "".join(lines).rstrip() if lines else "  (nothing is known of where it is)"


# Names of handlers in reports, and checks of what an application declares as a handler.
#
# Not here: where a handler runs (`executors`), and running it (`slots`).


Handler = Callable[[bytes], Awaitable[object]]


def name_of(handler: object) -> str:
    """Return the name of a handler in reports: ``module.qualname``."""
    inner = _inner(handler)
    while hasattr(inner, "__wrapped__"):
        inner = _inner(inner.__wrapped__)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = getattr(inner, "__module__", None)
    return f"{module}.{name}" if module else name


def named_after(handler: object, run: Handler) -> Handler:
    """Return `run`, registered with `name_of` under the name of `handler`."""
    return functools.update_wrapper(run, cast("Any", handler), assigned=(), updated=())


def _inner(handler: Any) -> Any:
    while isinstance(handler, partial):
        handler = handler.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return handler


def is_unrun(result: object) -> bool:
    """Return True for a coroutine or generator that a plain function returned, and that was never run. Close a coroutine."""
    try:
        if inspect.iscoroutine(result):
            result.close()
        return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    except BaseException:  # a value of the user's, whose `__class__` raises
        return False


def unrun_remedy(result: object) -> str:
    """Return what to do about a coroutine or generator that was never run, as the end of an error."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        return "return what it yields, as in `return list(...)`"
    return "use async def, also for what a decorator puts around an async function"


def check_handler(handler: Callable[..., object]) -> bool:
    """Return True if `handler` is an async function, False if it is a plain function.

    Raises:
        UsageError: it cannot be called with a task, or a call would run nothing (a generator).
    """
    inner = _inner(handler)
    if not callable(inner):
        raise UsageError(f"the handler must be callable, not {handler!r}")
    kinds: list[Any] = [inner, getattr(inner, "__call__", None)]  # noqa: B004
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise UsageError(f"the handler {handler!r} is a generator: calling it runs nothing; take the `yield` out of it")
    _check_signature(handler)
    return any(is_coroutine_function(kind) for kind in kinds)


def _check_signature(handler: Callable[[bytes], object]) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(b"")
    except TypeError as error:
        raise UsageError(
            f"the handler {handler!r} is called with the task alone, and does not take that: {error}"
        ) from None


Abort = Callable[[Callable[[], Any]], trio.lowlevel.Abort]


class OffloadedRun:
    """One such run. The slot that waits for it makes it.

    Only the code that runs the handler changes `raised`, `_value`, `_error` and `_ended`. `raised`: the error that left the slot
    is the handler's own. The rest is changed only in the loop.
    """

    __slots__ = ("_claim", "_ended", "_error", "_token", "_value", "_waiting", "raised")

    overdue_remedy: ClassVar[str] = ""
    """A remedy for the author of a handler that still runs after its timeout."""
    stoppable: ClassVar[bool] = True
    """The run can be stopped from outside, if its handler cooperates."""

    def __init__(self) -> None:
        self._claim = run = current_run.get(None)
        if run is not None:
            run.offload(self)
        self.raised: bool = False
        self._token = trio.lowlevel.current_trio_token()
        self._value: object = None
        self._error: BaseException | None = None
        self._ended = False
        self._waiting: trio.lowlevel.Task | None = None

    # Called by its peer, in the Trio loop

    @property
    def killed_output(self) -> str:
        """The standard error of a process that was killed; empty if none was killed."""
        return ""

    @property
    def detachable(self) -> bool:
        """A slot waits for this run and nothing else."""
        return self._waiting is not None

    def current_stack(self) -> str:
        """Return the present stack of the handler, formatted as in a traceback; empty if it does not run."""
        raise NotImplementedError

    def allow_replacement(self) -> bool:
        """Let another run take the place of a handler that is stuck. Return False if there is no such place.

        May be called twice.
        """
        return False

    def detach(self) -> None:
        """Stop waiting for a run that was cancelled. The slot continues as if the handler had ended."""
        self._wake()

    def call_in_peer(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the peer's loop, unless that has ended. From any thread."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(callback)

    # Called by its handler, in the handler's thread or loop

    def check_cancelled(self) -> None:
        """Raise the cancellation error of that thread or loop, if the run is being cancelled."""
        raise NotImplementedError

    def _note_value(self, value: object, max_result: int | None) -> None:
        """Note what the handler returned; with `max_result`, encode it here, and not on the Trio loop."""
        self._value = value
        if max_result is not None:
            try:
                self._value = encoded_outcome(self._claim, value, max_result)
            except BaseException:  # noqa: S110 - its settler encodes it, and handles what that raises
                pass

    def _note_error(self, error: BaseException) -> None:
        """Note what the handler raised, and describe it here, and not on the Trio loop."""
        self._error = error
        try:
            describe_end(self._claim, error)
        except BaseException:  # noqa: S110 - its settler describes it, and handles what that raises
            pass

    def _has_ended(self) -> None:
        """Note that the handler has ended. Called as the last step, in the thread or loop in which it ran."""
        self._ended = True
        if self._waiting is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    # Called by its slot

    async def _wait_ended(self, abort: Abort) -> None:
        """Wait until the run has ended, or until the slot has to stop waiting.

        The run sets `_ended` before it reads `_waiting`, and this task sets `_waiting` before it reads `_ended`. So at least one
        of them notices the other. If both do, the task does not wait, and the wake-up finds no task.
        """
        self._waiting = trio.lowlevel.current_task()
        if self._ended:
            self._waiting = None
        else:
            await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _outcome(self) -> object:
        """Return what the handler returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        self.raised = True
        try:
            raise error
        finally:
            del error


def no_abort(_: object) -> trio.lowlevel.Abort:
    """Continue to wait after a cancellation."""
    return trio.lowlevel.Abort.FAILED


# Recognise handlers that run on one event loop and call libraries that need the other one, by the errors of those libraries.
#
# Another try of such a run would end in the same way. So the run fails without a retry, and its error names the remedy. The
# errors recognised here were collected from asyncio, aiohttp, asyncpg, aiosqlite, SQLAlchemy, redis, anyio, sniffio and Trio.


LoopName = Literal["asyncio", "Trio"]

_MESSAGES: Final[dict[LoopName, re.Pattern[str]]] = {
    "asyncio": re.compile(
        r"no running event loop"  # asyncio.get_running_loop()
        r"|There is no current event loop"  # asyncio.get_event_loop()
        r"|should be used inside a task"  # asyncio.timeout(), aiohttp
        r"|library written for some other framework like asyncio"  # Trio, of an awaited asyncio future
        r"|'NoneType' object has no attribute 'create_future'"  # asyncio.Event, asyncio.Queue
    ),
    "Trio": re.compile(
        r"must be called from async context"  # trio.sleep(), trio.move_on_after()
        r"|Task got bad yield"  # asyncio, of a checkpoint of Trio
        r"|'RunContext' object has no attribute"  # trio.open_nursery()
    ),
}
_ERROR_TYPES: Final = (RuntimeError, TypeError, AttributeError)
_ERROR_NAMES: Final = frozenset({"AsyncLibraryNotFoundError", "NoEventLoopError"})
"""Errors of sniffio and anyio, which these libraries raise if they find neither loop."""
_LONGEST: Final = 1000
"""Characters of an error's text that are searched."""

HANDLER_REMEDY: Final[dict[LoopName, str]] = {
    "asyncio": (
        'this handler runs on a Trio event loop, and needs asyncio: declare it with runs_in="asyncio", '
        'or make that the default of all async handlers with Mesh(runs_in="asyncio")'
    ),
    "Trio": 'this handler runs on an asyncio event loop, and needs Trio: declare it with runs_in="loop"',
}
MIDDLEWARE_REMEDY: Final = (
    "middleware runs on a Trio event loop: use Trio there, or move what needs asyncio into a handler with "
    'runs_in="asyncio"'
)


def find_wrong_loop_error(error: BaseException, wanted: LoopName) -> BaseException | None:
    """Return the error that shows that code needs the `wanted` loop: `error`, a member of its group, or one of its causes."""
    return next((each for each in related_errors(error) if _is_wrong_loop_error(each, wanted)), None)


def wrong_loop_failure(error: Exception, wanted: LoopName, remedy: str) -> Failure | None:
    """Return the error to raise instead of `error`, or None if the loop is not the problem.

    `error` gets the remedy as a note.
    """
    if any(is_a(error, kind) for kind in (Retry, Failure, Undecodable)):
        return None
    sign = find_wrong_loop_error(error, wanted)
    if sign is None:
        return None
    add_note(error, remedy)
    return Failure(f"{qualname_of(type(sign))}: {text_of(sign, _LONGEST)} ({remedy})")


def with_wrong_loop_remedy(run: Run[RunHost], error: BaseException) -> BaseException:
    """Return the error of a failed run.

    If a handler on Trio needs asyncio, this is a failure with the remedy, else `error` itself.
    """
    return error if run.offloaded is not None else _with_remedy(error, "asyncio")


def with_trio_remedy(error: BaseException) -> BaseException:
    """Return the error of a run on an asyncio loop. If its handler needs Trio, this is a failure with the remedy."""
    return _with_remedy(error, "Trio")


def _with_remedy(error: BaseException, wanted: LoopName) -> BaseException:
    failure = wrong_loop_failure(error, wanted, HANDLER_REMEDY[wanted]) if is_a(error, Exception) else None
    if failure is None:
        return error
    failure.__cause__ = error
    return failure


def detecting_wrong_loop(run: Handler, remedy: str) -> Handler:
    """Return `run` for the Trio loop. If it needs asyncio, it fails without a retry, and the error has the remedy.

    This costs each run some time. Without middleware, `with_wrong_loop_remedy` does the same for runs that have failed.
    """

    async def on_the_loop(task: bytes) -> object:
        try:
            return await run(task)
        except Exception as error:
            failure = wrong_loop_failure(error, "asyncio", remedy)
            if failure is None:
                raise
            raise failure from error

    return named_after(run, on_the_loop)


def _is_wrong_loop_error(error: BaseException, wanted: LoopName) -> bool:
    if qualname_of(type(error)) in _ERROR_NAMES:
        return wanted == "asyncio"
    return issubclass(type(error), _ERROR_TYPES) and _MESSAGES[wanted].search(text_of(error, _LONGEST)) is not None
