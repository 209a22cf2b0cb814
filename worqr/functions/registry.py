"""`Registry`: declares functions, and includes those of other registries.

An application, a plug-in or a blueprint has a registry; a `Mesh` is one. Nothing is global, and nothing is sent. A peer that
joins serves all declared functions, and peers that have joined already are notified of each declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from worqr.errors import UsageError
from worqr.functions.declarations import Declarations
from worqr.functions.definition import FunctionDefinition
from worqr.functions.function import AsyncFunction, AsyncListFunction, Function, SyncFunction, SyncListFunction
from worqr.functions.no_such_option import NoSuchOption
from worqr.functions.schedule_registry import ScheduleRegistry
from worqr.handler_checks import check_runs_in, is_async
from worqr.handler_options import RunsIn, handling
from worqr.keys import check_name
from worqr.lanes import Lanes
from worqr.limits import Limit
from worqr.policy import RetryPolicy
from worqr.records import Failed
from worqr.validation import Seconds, importable_name

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    BatchSize = TypeVarWithDefault("BatchSize", bound=int | None, default=None)
    BatchSize_co = TypeVarWithDefault("BatchSize_co", bound=int | None, default=None, covariant=True)
else:
    BatchSize = TypeVar("BatchSize")
    BatchSize_co = TypeVar("BatchSize_co", covariant=True)


class TaskDecorator(Protocol[BatchSize_co]):
    """The decorator that ``@mesh.task(...)`` with options returns: it makes a `Function` of a function. With `batch_size`, the
    function takes a list, and a call of it is one element.
    """

    @overload
    def __call__(
        self: TaskDecorator[int], fn: Callable[[list[T]], Coroutine[Any, Any, None]], /
    ) -> AsyncListFunction[T, None]: ...
    @overload
    def __call__(
        self: TaskDecorator[int], fn: Callable[[list[T]], Coroutine[Any, Any, Sequence[R | Exception] | None]], /
    ) -> AsyncListFunction[T, R]: ...
    @overload
    def __call__(self: TaskDecorator[int], fn: Callable[[list[T]], None], /) -> SyncListFunction[T, None]: ...
    @overload
    def __call__(
        self: TaskDecorator[int], fn: Callable[[list[T]], Sequence[R | Exception] | None], /
    ) -> SyncListFunction[T, R]: ...
    @overload
    def __call__(self: TaskDecorator[None], fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncFunction[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self: TaskDecorator[None], fn: Callable[P, R], /) -> SyncFunction[P, R]: ...


class Registry(ScheduleRegistry):
    """Functions and schedules without a mesh. ``mesh.include(registry)`` adds them to a mesh."""

    def __init__(self) -> None:
        self._declarations = Declarations()

    @property
    def functions(self) -> Mapping[str, Function[..., Any]]:
        """The functions that are declared or included here, by name."""
        return MappingProxyType(self._declarations.functions)

    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncFunction[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def task(self, fn: Callable[P, R], /) -> SyncFunction[P, R]: ...
    @overload  # `unknown` takes other options, so that a type checker names them; with Unpack it would name none
    def task(
        self,
        /,
        *,
        name: str = ...,
        aliases: Collection[str] = ...,
        timeout: Seconds | None = ...,
        retry: RetryPolicy = ...,
        keep_failed: int = ...,
        concurrency: int | None = ...,
        size: int = ...,
        priority: int = ...,
        on_failure: Callable[[Failed], object] | None = ...,
        on_failure_retry: RetryPolicy = ...,
        on_failure_timeout: Seconds | None = ...,
        batch_size: BatchSize = ...,  # pyright: ignore[reportInvalidTypeVarUse] - it has a default
        batch_wait: Seconds = ...,
        runs_in: RunsIn = ...,
        result_ttl: Seconds | None = ...,
        recent: int = ...,
        limit: Limit | Collection[Limit] = ...,
        lanes: Lanes = ...,
        max_length: int | None = ...,
        shards: int = ...,
        **unknown: NoSuchOption,
    ) -> TaskDecorator[BatchSize]: ...
    def task(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        aliases: Collection[str] = (),
        **options: Any,
    ) -> Any:
        """Declare a function whose calls can be enqueued, and which workers of this mesh run. Each function has a queue of its
        own.

        Use it as a decorator, ``@mesh.task`` or ``@mesh.task(timeout=60)``. If a notebook cell runs again or a module is
        loaded again, its functions and their schedules are replaced.

        Args:
            fn: The function.
            name: The name of the function and of its queue. Default: its module and qualified name; for ``__main__``, the
                file name of the script takes the place of the module.
            aliases: Older names of the function. Workers run the tasks of their queues, and nothing is enqueued there.
            **options: See `HandlerOptions`. With `batch_size` and `batch_wait` of `ListHandlerOptions`, the function takes a
                list, and each call is one element of it.

        Returns:
            The function as a `Function`; with options, a decorator.

        Raises:
            UsageError: The name is taken, a parameter has a type that cannot be serialized, or an option does not exist or is
                not valid.
        """
        handler_options = handling("task", options)
        if name is not None:
            check_name(name, "function name")
        if isinstance(aliases, str):
            raise UsageError(f"aliases must be a collection of names, as in aliases=[{aliases!r}], not a str")
        others = tuple(check_name(alias, "alias") for alias in aliases)

        def declare(fn: Callable[..., Any]) -> Function[..., Any]:
            fn = _plain(fn)
            check_runs_in(fn, handler_options.runs_in)
            found = name or _name_of(fn)
            kind: Any = AsyncFunction if is_async(fn) else SyncFunction
            if handler_options.batch_size is not None:
                kind = AsyncListFunction if is_async(fn) else SyncListFunction
            function: Function[..., Any] = kind(
                FunctionDefinition(fn, found, others, handler_options, is_async=is_async(fn))
            )
            self._declarations.add(function)
            return function

        return declare if fn is None else declare(fn)

    def include(self, other: Registry, *, prefix: str = "") -> None:
        """Add all functions and schedules of another registry, also those that it declares later.

        Args:
            other: A registry that is not included elsewhere. Its functions belong to this mesh from now on.
            prefix: Put in front of the names and aliases of its functions and schedules, for instance ``"shop."``.

        Raises:
            UsageError: `other` is a mesh or is included already, or a name is taken. Nothing is changed.
        """
        if not isinstance(other, Registry):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"include() takes a worqr.Registry, not {other!r}")
        self._declarations.include(other._declarations, prefix)


def _plain(fn: object) -> Callable[..., Any]:
    """Return the function to declare.

    Raises:
        UsageError: It is not a function, or it cannot be called by its arguments alone.
    """
    if isinstance(fn, Function):
        raise UsageError(f"{fn!r} is declared already; declare the plain function, or include() its registry")
    if isinstance(fn, staticmethod):
        fn = cast("staticmethod[..., Any]", fn).__func__
    if inspect.isclass(fn) or not callable(fn):
        raise UsageError(f"@mesh.task takes a function, not {fn!r}")
    if inspect.isfunction(fn) and "." in fn.__qualname__.rpartition("<locals>.")[2]:
        first = next(iter(inspect.signature(fn).parameters), "")
        if first in {"self", "cls"}:
            raise UsageError(
                f"{fn.__qualname__} is a method: no {first} travels with its arguments; declare a function, a @staticmethod, "
                "or the method of an object, as in mesh.task(service.send)"
            )
    return fn


def _name_of(fn: Callable[..., Any]) -> str:
    """Return the default name of a function: its module and qualified name."""
    qualname = getattr(fn, "__qualname__", None)
    if qualname is None or "<lambda>" in qualname:
        raise UsageError(f"{fn!r} has no name to be known by: give it one, as in mesh.task(name=...)")
    return check_name(f"{importable_name(fn.__module__)}.{qualname}", "function name")
