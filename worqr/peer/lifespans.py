"""Lifespans: blocks that an application opens before its peer takes tasks, and closes when the peer has left.

This module checks lifespans, and enters them with errors that name the remedy. Not here: the lifespan on the asyncio loop
(`executors.asyncio_loop`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from worqr.errors import UsageError
from worqr.handler_options import RunsIn, is_async
from worqr.log_events import emit
from worqr.peer.context import Context, current
from worqr.peer.executors.offloaded import (
    HANDLER_REMEDY,
    MIDDLEWARE_REMEDY,
    Handler,
    LoopName,
    detecting_wrong_loop,
    find_wrong_loop_error,
    named_after,
)
from worqr.tracebacks import add_note

if TYPE_CHECKING:
    from worqr.handler_options import AsyncRunsIn


# Middleware: functions of the application that wrap every run, on the loop of the peer.


Middleware = Callable[[Context, Callable[[], Awaitable[object]]], Awaitable[object]]
"""``async def middleware(context, call_next)``: wraps every run of a peer, on its loop. Its return value is the result."""


def checked_middleware(middleware: object) -> tuple[Middleware, ...]:
    """Raise UsageError unless it is a collection of async functions."""
    if not isinstance(middleware, Collection):
        raise UsageError(f"middleware must be a collection of async functions, not {middleware!r}")
    for each in cast("Collection[object]", middleware):
        if not is_async(each):
            raise UsageError(f"middleware must be async functions (context, call_next), not {each!r}")
    return tuple(cast("Collection[Middleware]", middleware))


def with_middleware(run: Handler, middleware: Sequence[Middleware], place: RunsIn) -> Handler:
    """Return `run` inside all of `middleware`, the first one outermost.

    Middleware receives the failure of a handler that ran on the wrong loop.
    """
    if not middleware:
        return run
    if place == "loop":
        run = detecting_wrong_loop(run, HANDLER_REMEDY["asyncio"])
    for each in reversed(middleware):
        run = _inside(each, run)
    return detecting_wrong_loop(run, MIDDLEWARE_REMEDY)


def _inside(middleware: Middleware, run: Handler) -> Handler:
    async def handler(task: bytes) -> object:
        return await middleware(current(), partial(run, task))

    return named_after(run, handler)


S = TypeVar("S")

logger: logging.Logger = logging.getLogger(__name__)

LIFESPAN: Final = "lifespan"
ASYNCIO_LIFESPAN: Final = "asyncio_lifespan"
_ASYNC: Final = (LIFESPAN, ASYNCIO_LIFESPAN)
_REMEDIES: Final[dict[LoopName, str]] = {
    "asyncio": "lifespan runs on a Trio event loop: put what needs asyncio into Mesh(asyncio_lifespan=...)",
    "Trio": "asyncio_lifespan runs on an asyncio event loop: put what needs Trio into Mesh(lifespan=...)",
}


def check_lifespan(name: str, manager: object) -> None:
    """Raise UsageError for an object that does not make a context manager. `name` is the option of the mesh."""
    if manager is None:
        return
    if not callable(manager):
        raise UsageError(f"{name} must be a function that gives a context manager, not {manager!r}")
    decorator = "asynccontextmanager" if name in _ASYNC else "contextmanager"
    if inspect.isasyncgenfunction(manager) or inspect.isgeneratorfunction(manager):
        raise UsageError(f"{name} must give a context manager: put @contextlib.{decorator} above {manager!r}")
    if inspect.iscoroutinefunction(manager):
        raise UsageError(
            f"{name} must give a context manager, and {manager!r} is a coroutine function: let it `yield` where it returns, "
            f"and put @contextlib.{decorator} above it"
        )
    if name in _ASYNC:
        _check_arguments(name, manager)


def _check_arguments(name: str, manager: Callable[..., object]) -> None:
    """Raise UsageError for a lifespan that needs arguments, like those of web frameworks."""
    try:
        signature = inspect.signature(manager)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"{name} is called without arguments, and {manager!r} does not take that: {error} (a lifespan of a web "
            "framework takes the application; write one without parameters for the mesh)"
        ) from None


@asynccontextmanager
async def enter_lifespan(name: str, lifespan: Callable[[], AbstractAsyncContextManager[S]]) -> AsyncGenerator[S]:
    """Enter a lifespan, and yield its state. If entering fails because of the event loop, the error names the loop it ran on."""
    manager = lifespan()
    kind: type[Any] = type(manager)
    if not hasattr(kind, "__aenter__"):
        raise UsageError(
            f"{name} must give an async context manager, not {kind.__qualname__}: put @contextlib.asynccontextmanager above it"
        )
    ready = False
    try:
        async with manager as state:
            ready = True
            yield state
    except Exception as error:
        if not ready:
            _note_wrong_loop(error, "asyncio" if name == LIFESPAN else "Trio")
        raise


class LifespanStates(Generic[S]):
    """The values that the lifespans of a mesh's peers have yielded. The peers may run in several threads."""

    def __init__(self) -> None:
        self._open: list[S] = []

    @property
    def newest(self) -> S:
        """The state of the peer that joined last.

        Raises:
            IndexError: No peer has joined.
        """
        return self._open[-1]

    @asynccontextmanager
    async def enter(self, lifespan: Callable[[], AbstractAsyncContextManager[S]] | None) -> AsyncGenerator[S | None]:
        """Enter the lifespan of one peer; without one, the state is None."""
        if lifespan is None:
            yield None
            return
        async with enter_lifespan(LIFESPAN, lifespan) as state:
            self._open.append(state)
            try:
                yield state
            finally:
                # by identity: the states of two peers may be equal
                last = max(i for i, each in enumerate(self._open) if each is state)
                del self._open[last]


def _note_wrong_loop(error: BaseException, wanted: LoopName) -> None:
    """Add a note with the remedy, if a lifespan failed because it needs the `wanted` loop."""
    if find_wrong_loop_error(error, wanted) is not None:
        add_note(error, _REMEDIES[wanted])


def warn_if_unused(functions: Iterable[RunsIn | None], default: AsyncRunsIn) -> None:
    """Warn if no handler uses the state of ``asyncio_lifespan``. `functions`: for each function, where it runs."""
    places = list(functions)
    if default == "loop" and places and "asyncio" not in places:
        text = (
            "no function of this mesh runs on asyncio: use Mesh(runs_in='asyncio'), or declare functions with "
            "runs_in='asyncio'"
        )
        emit(logger, "asyncio_lifespan.unused", text)
