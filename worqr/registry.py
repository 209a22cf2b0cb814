"""`Registry`: where functions are declared, and how they come into a mesh.

A registry is an application's, a plug-in's or a blueprint's; a `Mesh` is one. Nothing here is global, and nothing is sent: what
was declared is served when a peer joins, and peers that have joined already are told of each declaration.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from worqr.cron import Definition
from worqr.errors import UsageError
from worqr.function import AsyncFunction, Declared, Function, SyncFunction
from worqr.keys import check_name
from worqr.peer.options import HandlerOptions, handling
from worqr.peer.runners import check_place, is_async
from worqr.timetable import Timetable

if TYPE_CHECKING:
    from worqr.mesh import Mesh

P = ParamSpec("P")
R = TypeVar("R")


class UseRetryPolicy:
    """The type of options that ``@mesh.task`` does not have: write ``retry=worqr.RetryPolicy(max_failures=3)`` instead."""


class TaskDecorator(Protocol):
    """What ``@mesh.task(...)`` with options is: takes a function, answers it as a `Function`."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncFunction[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, fn: Callable[P, R], /) -> SyncFunction[P, R]: ...


class Registry(Timetable):
    """Functions and schedules without a mesh; ``mesh.include(registry)`` brings them into one."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: dict[str, Function[..., Any]] = {}
        self._names: dict[str, str] = {}
        self._home: tuple[Registry, str] | None = None
        self._mesh: Mesh[Any] | None = None
        self._listeners: list[Callable[[], None]] = []
        self.declared_shards: dict[str, int] = {}

    @property
    def functions(self) -> Mapping[str, Function[..., Any]]:
        """What is declared and included here, by name."""
        return MappingProxyType(self._functions)

    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncFunction[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def task(self, fn: Callable[P, R], /) -> SyncFunction[P, R]: ...
    @overload
    def task(
        self, /, *, name: str = ..., aliases: Collection[str] = ..., **options: Unpack[HandlerOptions]
    ) -> TaskDecorator: ...
    @overload  # without these two, a type checker says no more than that no overload fits
    def task(self, /, *, retries: UseRetryPolicy, **options: Unpack[HandlerOptions]) -> TaskDecorator: ...
    @overload
    def task(self, /, *, max_retries: UseRetryPolicy, **options: Unpack[HandlerOptions]) -> TaskDecorator: ...
    def task(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        aliases: Collection[str] = (),
        **options: Any,
    ) -> Any:
        """Declare a function whose calls can be enqueued, and which peers of this mesh serve: ``@mesh.task``, with or without
        options. One function is one queue.

        Args:
            name: the function's and its queue's; default: module and qualified name, the script's file name for ``__main__``.
            aliases: older names; their queues are served, and never enqueued to.
            options: see `HandlerOptions`.

        Raises:
            UsageError: a name that is taken, parameters that cannot travel, an option that does not exist or cannot be.

        A notebook cell that is run again, and a module that is loaded again, replace their functions and the schedules of these.
        """
        how = handling("task", options)
        if name is not None:
            check_name(name, "function name")
        if isinstance(aliases, str):
            raise UsageError(f"aliases must be a collection of names, as in aliases=[{aliases!r}], not a str")
        others = tuple(check_name(alias, "alias") for alias in aliases)

        def declare(fn: Callable[..., Any]) -> Function[..., Any]:
            fn = _plain(fn)
            check_place(fn, how.runs_in)
            found = name or _name_of(fn)
            kind: Any = AsyncFunction if is_async(fn) else SyncFunction
            function: Function[..., Any] = kind(Declared(fn, found, others, how, is_async=is_async(fn)))
            self._forget_older(found, fn)
            self._check_all_free((found, *others))
            self._adopt(function)
            return function

        return declare if fn is None else declare(fn)

    def include(self, other: Registry, *, prefix: str = "") -> None:
        """Bring all functions and schedules of `other` in here, also those that it declares later.

        Args:
            other: a registry that is included nowhere else; its functions belong to this mesh from now on.
            prefix: put in front of the names (and aliases) of its functions and schedules, for instance ``"shop."``.

        Raises:
            UsageError: `other` is a mesh or is included already, or two names are the same then; nothing is changed.
        """
        if not isinstance(other, Registry):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"include() takes a worqr.Registry, not {other!r}")
        if other._mesh is not None and other._home is None:
            raise UsageError("a Mesh cannot be included: declare the functions in a worqr.Registry")
        if other._home is not None:
            raise UsageError("this registry is included already: a function has one queue, so it belongs to one mesh")
        at: Registry | None = self
        while at is not None:
            if at is other:
                raise UsageError("a registry cannot include itself")
            at = at._home[0] if at._home is not None else None
        if prefix:
            check_name(prefix, "prefix of include")
        self._check_all_free([prefix + each for each in other._names])
        schedules = list(self._coming(other, prefix))
        for definition in schedules:
            for registry, there in self._upwards(definition):
                registry.check_schedule(there)
        for definition in schedules:
            self.add_schedule(definition)
        other._home = self, prefix
        for function in list(other._functions.values()):
            other._pass_on(function)

    @contextmanager
    def when_declared(self, tell: Callable[[], None]) -> Generator[None]:
        """Call `tell` after each declaration in the length of the block, in the thread that declares; for worqr itself."""
        self._listeners.append(tell)
        try:
            yield
        finally:
            self._listeners.remove(tell)

    def declare_shards(self, queue: str, shards: int) -> None:
        """Say how many shards a queue has; the mesh is asked whether that is so when the queue is used.

        Raises:
            UsageError: this program has said otherwise before.
        """
        if self.declared_shards.setdefault(queue, shards) != shards:
            raise UsageError(
                f"queue {queue!r} was declared with {self.declared_shards[queue]} shards, and then with {shards}: say it once"
            )

    def add_schedule(self, definition: Definition) -> None:
        """Take a schedule in, here and in whoever includes us.

        Raises:
            UsageError: there is one of this name, here or there; nothing is changed.
        """
        places = list(self._upwards(definition))
        for registry, there in places:
            registry.check_schedule(there)
        for registry, there in places:
            super(Registry, registry).add_schedule(there)

    def _upwards(self, definition: Definition) -> Iterator[tuple[Registry, Definition]]:
        """A schedule as it is called here, and wherever we are included."""
        yield self, definition
        if self._home is not None:
            home, prefix = self._home
            named = definition.name != definition.queue  # else it has its function's name, prefix and all
            yield from home._upwards(replace(definition, name=prefix + definition.name) if named else definition)

    def _coming(self, other: Registry, prefix: str) -> Iterator[Definition]:
        """The schedules of `other` as they will be called here; the queues have all the prefixes that functions get."""
        full, at = prefix, self
        while at._home is not None:
            at, more = at._home
            full = more + full
        for each in other.declared_schedules.values():
            queue = full + each.queue if each.queue in other._names else each.queue
            yield replace(each, name=prefix + each.name, queue=queue)

    def _forget_older(self, name: str, fn: Callable[..., Any]) -> None:
        """Make room for a function that is defined anew, here and wherever the older one was included."""
        older = self._functions.get(name)
        if older is None or not _is_defined_anew(older.declared.fn, fn):
            return
        registry: Registry | None = self
        while registry is not None:
            held = next(each for each, function in registry._functions.items() if function is older)
            del registry._functions[held]
            registry._names = {each: of for each, of in registry._names.items() if of != held}
            registry.forget_schedules({held, older.name})
            registry = registry._home[0] if registry._home is not None else None

    def _check_all_free(self, names: Collection[str]) -> None:
        """Refuse names that are taken, here or wherever the functions will be."""
        registry: Registry = self
        registry._check_free(names)
        while registry._home is not None:
            registry, prefix = registry._home
            names = [prefix + each for each in names]
            registry._check_free(names)

    def _check_free(self, names: Collection[str]) -> None:
        seen: set[str] = set()
        for name in names:
            check_name(name, "function name")
            if name in self._names or name in seen:
                there = self._names.get(name, name)
                raise UsageError(
                    f"there is a function {there!r} already that has the name {name!r}: give one of them name="
                )
            seen.add(name)

    def _adopt(self, function: Function[..., Any]) -> None:
        """The function is ours, and so of whoever includes us."""
        declared = function.declared
        self._functions[declared.name] = function
        for each in (declared.name, *declared.aliases):
            self._names[each] = declared.name
        declared.mesh = self._mesh
        if self._mesh is not None and declared.how.shards > 1:
            self.declare_shards(declared.name, declared.how.shards)
        if self._home is not None:
            self._pass_on(function)
        for tell in tuple(self._listeners):
            tell()

    def _pass_on(self, function: Function[..., Any]) -> None:
        assert self._home is not None
        home, prefix = self._home
        declared = function.declared
        declared.rename(prefix + declared.name, tuple(prefix + alias for alias in declared.aliases))
        home._adopt(function)


def _plain(fn: object) -> Callable[..., Any]:
    """The function to be declared.

    Raises:
        UsageError: it is none, or one that nobody could call by its arguments alone.
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


def _is_defined_anew(older: Callable[..., Any], newer: Callable[..., Any]) -> bool:
    """True if `newer` takes the place of `older` in its module: typed again where people type, or loaded again from its file."""
    if older is newer or not (inspect.isfunction(older) and inspect.isfunction(newer)) or "<" in newer.__qualname__:
        return False
    if (older.__module__, older.__qualname__) != (newer.__module__, newer.__qualname__):
        return False
    if newer.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return True  # a notebook, or a console
    before, now = older.__code__, newer.__code__
    return (before.co_filename, before.co_firstlineno) == (now.co_filename, now.co_firstlineno)


def _name_of(fn: Callable[..., Any]) -> str:
    """Module and qualified name."""
    qualname = getattr(fn, "__qualname__", None)
    if qualname is None or "<lambda>" in qualname:
        raise UsageError(f"{fn!r} has no name to be known by: give it one, as in mesh.task(name=...)")
    module = fn.__module__
    if module in {"__main__", "__mp_main__"}:
        main = sys.modules[module]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name.removesuffix(".__main__") if spec else Path(path).stem if path else "__main__"
    return check_name(f"{module}.{qualname}", "function name")
