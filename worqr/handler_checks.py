"""What a handler is, and where it can run: async or plain, a generator, importable by another process.

Pure. The options of a handler are in `worqr.handler_options`. How another process imports a function is in
`worqr.peer.executors.processes.importable`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from worqr.errors import UsageError
from worqr.handler_options import RunsIn

REMEDY: Final = "define it at the top level of a module that can be imported"


def check_runs_in(handler: Callable[..., object], runs_in: RunsIn | None) -> None:
    """Check that `handler` can run where `runs_in` says.

    Raises:
        UsageError: it is a generator, which would never run; it is async or plain where the other kind is required; or a process
            cannot import it.
    """
    inner: Any = handler
    while isinstance(inner, partial):
        inner = cast("Any", inner.func)  # pyright: ignore[reportUnknownMemberType]
    for kind in (inner, getattr(inner, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind):
            raise UsageError(f"{handler!r} is a generator: calling it runs nothing; take the `yield` out of it")
    if runs_in in {"loop", "asyncio"} and not is_async(handler):
        raise UsageError(f"{handler!r} is a plain function and would block the loop: its place is runs_in='thread'")
    if runs_in == "thread" and is_async(handler):
        raise UsageError(f"{handler!r} is an async function, whose places are runs_in='loop' and 'asyncio'")
    if runs_in == "process":
        check_runs_in_process(handler)


def is_async(handler: object) -> bool:
    """Return True for an async function, or an object with an async ``__call__``."""
    while isinstance(handler, partial):
        handler = handler.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def check_runs_in_process(function: object, what: str = "the function") -> None:
    """Check `function` at its declaration, when its module does not have its name yet.

    Raises:
        UsageError: it is async or a generator, or another process could never import it.
    """
    inner: Any = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, partial):
        inner = inner.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    kinds: list[Any] = [inner, getattr(inner, "__call__", None)]  # noqa: B004
    if any(inspect.iscoroutinefunction(kind) for kind in kinds):
        raise UsageError(
            f"{what} {function!r} is async, and runs_in='process' calls plain functions: take the async off it, with "
            "trio.run(...) or asyncio.run(...) inside if it must, or let it run in the loop"
        )
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise UsageError(f"{what} {function!r} is a generator: calling it runs nothing; take the `yield` out of it")
    check_importable(function, what)


def check_importable(thing: object, what: str) -> None:
    """Raise UsageError for a function that is never an attribute of its module, so that no other process can import it."""
    if not callable(thing):
        raise UsageError(f"{what} must be callable, not {thing!r}")
    qualname = str(getattr(thing, "__qualname__", ""))
    if "<lambda>" in qualname:
        raise UsageError(
            f"{what} {thing!r} is a lambda, which another process cannot import: make it a def, and {REMEDY}"
        )
    if "<locals>" in qualname:
        raise UsageError(f"{what} {thing!r} is made inside a function, so another process cannot import it: {REMEDY}")
