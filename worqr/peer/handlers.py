"""Names of handlers in reports, and checks of what an application declares as a handler.

Not here: where a handler runs (`executors`), and running it (`slots`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from worqr.errors import UsageError

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
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)


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
