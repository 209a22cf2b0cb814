"""`async_block`: a context manager for ``async with`` that raises a helpful error when it is used in another way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from worqr.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class _AsyncBlock(AbstractAsyncContextManager[T]):
    __slots__ = ("_block", "_hint")

    def __init__(self, block: AbstractAsyncContextManager[T, bool | None], hint: str) -> None:
        self._block = block
        self._hint = hint

    async def __aenter__(self) -> T:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker reports `with` and `await`, because the methods are missing

        def __enter__(self) -> NoReturn:
            raise UsageError(self._hint)

        def __exit__(self, *error: object) -> None:
            """Never called. Without it, Python would raise an error of its own before it calls `__enter__`."""

        def __await__(self) -> NoReturn:
            raise UsageError(self._hint)


def async_block(
    hint: str,
) -> Callable[[Callable[P, AsyncGenerator[T]]], Callable[P, AbstractAsyncContextManager[T, bool | None]]]:
    """Return ``asynccontextmanager`` for a method that raises UsageError with `hint` if it is used with ``with`` or ``await``."""

    def decorate(generator: Callable[P, AsyncGenerator[T]]) -> Callable[P, AbstractAsyncContextManager[T, bool | None]]:
        make = asynccontextmanager(generator)

        @wraps(generator)
        def block(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T, bool | None]:
            return _AsyncBlock(make(*args, **kwargs), hint)

        return block

    return decorate
