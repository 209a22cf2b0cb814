"""`sync` runs a coroutine of worqr to its end where no event loop runs: in Django, Flask, scripts, and in handlers in threads.

The calling thread drives the connection itself (`worqr.link.thread_driver`). All plain threads of the process share one link for
each mesh (`worqr.client.client`). `sync_block` is the counterpart for ``async with``.

Each method that sends is a plain ``def``, which raises where its coroutine could only be forgotten (`sent_by`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from types import CoroutineType, MethodType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar, cast, overload

from worqr.errors import UsageError
from worqr.link import as_sync, can_wait_here, loop_here, loop_name_here, run_blocking

P = ParamSpec("P")
T = TypeVar("T")

ONLY_WORQR: Final = (
    "worqr.sync runs a coroutine without an event loop: it may wait only by calls of worqr, not by those of asyncio "
    "or Trio"
)
_NEEDS_A_LOOP: Final = ("no running event loop", "must be called from async context", "no current event loop")
"""What asyncio and Trio say where no loop runs."""


def sync(function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call an async function of worqr where no event loop runs, and wait for its result: ``worqr.sync(greet.enqueue, "Ada")``.

    It works with every method that you would ``await``, also of jobs, queues, batches and the mesh, and with coroutines of your
    own that wait only by such methods. Any number of threads may use it at once. The mesh connects at first use, and stays
    connected until ``mesh.close()``, until it is garbage-collected, or until the interpreter exits, which may take up to a second
    longer. A forked process connects again. In a handler, a wait also ends when the run is cancelled, with the exception of
    ``check_cancelled()``.

    Args:
        function: The function itself, not its call.
        *args: Its arguments.
        **kwargs: Its arguments.

    Returns:
        What the function returns.

    Raises:
        UsageError: An event loop runs in this thread, which the call would stop: use ``await`` there. Or `function` is a function
            of the mesh, a coroutine, or nothing that can be awaited; the message has the line to write.
        RefusedByServer: As ``mesh.connect``, at the first use.
        WrongVersion: As ``mesh.connect``, at the first use.
        Unavailable: The server did not reply within `patience`.
    """
    if type(function) is not MethodType or loop_here() is not None:
        _check(function, "sync", "await {call}")
    return as_sync(_run, function, args, kwargs)


def _run(function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        found: Any = function(*args, **kwargs)
        if type(found) is not CoroutineType:
            found = _coroutine_of(found, function)
        return run_blocking(cast("Coroutine[Any, Any, T]", found))
    except RuntimeError as error:
        if str(error).startswith(_NEEDS_A_LOOP):
            error.add_note(ONLY_WORQR)
        raise


@overload
def sync_block(
    function: Callable[P, AbstractAsyncContextManager[AsyncIterator[T], bool | None]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> AbstractContextManager[Iterator[T], bool | None]: ...
@overload
def sync_block(
    function: Callable[P, AbstractAsyncContextManager[T, bool | None]], /, *args: P.args, **kwargs: P.kwargs
) -> AbstractContextManager[T, bool | None]: ...
def sync_block(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return a ``with`` block for an ``async with`` one, where no event loop runs: ``with worqr.sync_block(mesh.batch):``.

    An async iterator that the block yields becomes a plain one: ``with worqr.sync_block(job.watch) as states: for state in
    states: ...``. In all else it is as `sync`.

    Args:
        function: The function that returns the block, not its call.
        *args: Its arguments.
        **kwargs: Its arguments.

    Raises:
        UsageError: As `sync`, or the function returns no async context manager.
    """
    _check(function, "sync_block", "async with {call}")
    found = as_sync(function, *args, **kwargs)
    if not isinstance(found, AbstractAsyncContextManager):
        words, waits = _words(function), inspect.isawaitable(found)
        instead = f"write worqr.sync({words}, ...)" if waits else f"call {words}(...) without sync_block"
        _close(found)
        raise UsageError(f"sync_block() is for what you would enter with `async with`: here, {instead}")
    return _SyncBlock(cast("AbstractAsyncContextManager[Any, bool | None]", found), function)


class _SyncBlock(AbstractContextManager[T, bool | None]):
    """An async context manager, entered and left in this thread."""

    __slots__ = ("_block", "_function")

    def __init__(self, block: AbstractAsyncContextManager[T, bool | None], function: Callable[..., Any]) -> None:
        self._block = block
        self._function = function

    def __enter__(self) -> T:
        _check(self._function, "sync_block", "async with {call}")
        found = sync(self._block.__aenter__)
        if isinstance(found, AsyncIterator):
            return cast("T", _SyncIterator(cast("AsyncIterator[Any]", found)))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return sync(self._block.__aexit__, kind, error, trace)


class _SyncIterator(Iterator[T]):
    """An async iterator, read in this thread."""

    __slots__ = ("_found",)

    def __init__(self, found: AsyncIterator[T]) -> None:
        self._found = found

    def __next__(self) -> T:
        try:
            return sync(self._found.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


# What is refused, and what to write instead


def _check(function: Any, word: str, instead: str) -> None:
    """Refuse what cannot be run, or not here, before anything runs."""
    if inspect.iscoroutine(function) or inspect.isawaitable(function):
        call = getattr(function, "__name__", "function")
        _close(function)
        raise UsageError(
            f"{word}() takes the function and its arguments, not a call: write worqr.{word}(....{call}, ...), without "
            f"`{call}(...)`"
        )
    if isinstance(function, AbstractAsyncContextManager):
        raise UsageError(
            f"{word}() takes the function, not a call: write `with worqr.sync_block(job.watch) as states:`, or "
            "`with worqr.sync_block(mesh.batch, ...) as batch:`"
        )
    inner: Any = function
    while isinstance(inner, partial):
        inner = cast("Any", inner.func)  # pyright: ignore[reportUnknownMemberType]
    if hasattr(inner, "__worqr_handler__"):
        name = inner.name.rpartition(".")[2]
        raise UsageError(
            f"{word}() would run the handler of {name!r} here and now: to enqueue a call, write "
            f"worqr.sync({name}.enqueue, ...); for a job, worqr.sync({name}.dispatch, ...); to run it here, call {name}(...) "
            "itself"
        )
    if not callable(function):
        raise UsageError(f"{word}() takes an async function and its arguments, not {type(function).__name__}")
    loop = loop_name_here()
    if loop:
        call = f"{_words(function)}(...)"
        raise UsageError(
            f"worqr.{word}() waits, and would stop the {loop} loop that runs in this thread: there, write "
            f"`{instead.format(call=call)}` inside `async with mesh.connect():`, or call sync in a thread of its own"
        )


def _coroutine_of(found: Any, function: Callable[..., Any]) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that waits for what a function has returned. Raises UsageError if it cannot be awaited."""
    if inspect.isawaitable(found):
        return _awaited(found)
    words = _words(function)
    if isinstance(found, AbstractAsyncContextManager):
        raise UsageError(f"{words}(...) is a block: write `with worqr.sync_block({words}, ...) as ...:`")
    raise UsageError(
        f"{words}() has returned {type(found).__name__}, which is nothing to wait for: call it without worqr.sync"
    )


async def _awaited(found: Awaitable[T]) -> T:
    return await found


def _words(function: Any) -> str:
    """Return how a program would name a function: ``greet.enqueue``, ``queue.info``."""
    own = str(getattr(function, "__name__", "function"))
    owner = getattr(function, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return own
    if hasattr(owner, "__worqr_handler__"):
        return f"{owner.name.rpartition('.')[2]}.{own}"
    kind = type(owner).__name__.lstrip("_").lower()
    return f"{'fn.options(...)' if kind.endswith('bound') else kind}.{own}"


def _close(found: object) -> None:
    if inspect.iscoroutine(found):
        found.close()


# Methods that send


def sent_by(call: str, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return the coroutine of a call that sends, under the name that Python's warning about a missing ``await`` will show.

    Raises:
        UsageError: nothing could await it here.
    """
    if can_wait_here():
        named: Any = coroutine
        named.__qualname__ = call
        return coroutine
    coroutine.close()
    raise UsageError(
        f"{call}() has sent nothing: no event loop runs in this thread that could await it. Write worqr.sync({call}, ...); in "
        f"a thread that Trio has started, trio.from_thread.run({call}, ...) as well; for an asyncio loop in another thread, "
        f"give asyncio.run_coroutine_threadsafe an `async def` that awaits it; in a script, call it inside an `async def` "
        "that asyncio.run or trio.run runs"
    )
