"""`Declarations`: the functions and schedules of one registry.

A `Registry` has one, which users do not see. It checks that names are unique, passes the declarations on to the mesh that
includes the registry, and notifies the peers that have joined already. It sends nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from worqr.cron import Definition
from worqr.errors import UsageError
from worqr.functions.function import Function
from worqr.inside import definition_of
from worqr.keys import check_name

if TYPE_CHECKING:
    from worqr.client.client import Client


class Declarations:
    """What one registry declares, or includes. Changed while an application is imported, and by late declarations.

    Attributes:
        functions: the functions by name.
        schedules: the schedules by name.
        client: the client of the mesh that includes this registry; None until a mesh does.
    """

    def __init__(self, client: Client | None = None) -> None:
        self.functions: dict[str, Function[..., Any]] = {}
        self.schedules: dict[str, Definition] = {}
        self.client: Client | None = client
        self._names: dict[str, str] = {}
        self._parent: tuple[Declarations, str] | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_empty(self) -> bool:
        """True if a peer would have nothing to do: there is no function and no schedule."""
        return not (self.functions or self.schedules)

    # Functions

    def add(self, function: Function[..., Any]) -> None:
        """Add a function.

        Raises:
            UsageError: A name is taken, here or in a registry that includes this one.
        """
        declared = definition_of(function)
        self._forget_older(declared.name, declared.fn)
        self._check_all_free((declared.name, *declared.aliases))
        self._register(function)

    def _forget_older(self, name: str, fn: Callable[..., Any]) -> None:
        """Remove the older definition of a function that is defined again, here and in all registries that include this one."""
        older = self.functions.get(name)
        if older is None or not _is_defined_anew(definition_of(older).fn, fn):
            return
        registry: Declarations | None = self
        while registry is not None:
            name_there = next(each for each, function in registry.functions.items() if function is older)
            registry._forget(name_there, older.name)
            registry = registry._parent[0] if registry._parent is not None else None

    def _forget(self, name: str, queue: str) -> None:
        """Remove a function, and the schedules of its queue."""
        del self.functions[name]
        self._names = {each: of for each, of in self._names.items() if of != name}
        for each in [each for each, one in self.schedules.items() if one.queue in {name, queue}]:
            del self.schedules[each]

    def _check_all_free(self, names: Collection[str]) -> None:
        """Raise UsageError for names that are taken, here or in a registry that includes this one."""
        at = self
        at._check_free(names)
        while at._parent is not None:
            at, prefix = at._parent
            names = [prefix + each for each in names]
            at._check_free(names)

    def _check_free(self, names: Collection[str]) -> None:
        checked: set[str] = set()
        for name in names:
            check_name(name, "function name")
            if name in self._names or name in checked:
                taken_by = self._names.get(name, name)
                raise UsageError(
                    f"there is a function {taken_by!r} already that has the name {name!r}: give one of them name="
                )
            checked.add(name)

    def _register(self, function: Function[..., Any]) -> None:
        """Add a function here, and to all registries that include this one."""
        declared = definition_of(function)
        self.functions[declared.name] = function
        for each in (declared.name, *declared.aliases):
            self._names[each] = declared.name
        declared.bind(self.client)
        if self.client is not None and declared.options.shards > 1:
            self.client.declare_shards(declared.name, declared.options.shards)
        if self._parent is not None:
            self._propagate(function)
        for listener in tuple(self._listeners):
            listener()

    def _propagate(self, function: Function[..., Any]) -> None:
        assert self._parent is not None
        home, prefix = self._parent
        declared = definition_of(function)
        declared.rename(prefix + declared.name, tuple(prefix + alias for alias in declared.aliases))
        home._register(function)

    @contextmanager
    def when_declared(self, listener: Callable[[], None]) -> Generator[None]:
        """Call `listener` after each declaration during the block, in the thread that declares."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    # Including

    def include(self, other: Declarations, prefix: str) -> None:
        """Add all declarations of `other`, now and later, with `prefix` in front of the names.

        Raises:
            UsageError: `other` is a mesh's or is included already; or a name is taken. Nothing is changed.
        """
        self._check_includable(other)
        if prefix:
            check_name(prefix, "prefix of include")
        self._check_all_free([prefix + each for each in other._names])
        schedules = list(self._incoming_schedules(other, prefix))
        for definition in schedules:
            for registry, renamed in self._ancestors(definition):
                registry.check_schedule(renamed)
        for definition in schedules:
            self.add_schedule(definition)
        other._parent = self, prefix
        for function in list(other.functions.values()):
            other._propagate(function)

    def _check_includable(self, other: Declarations) -> None:
        if other.client is not None and other._parent is None:
            raise UsageError("a Mesh cannot be included: declare the functions in a worqr.Registry")
        if other._parent is not None:
            raise UsageError("this registry is included already: a function has one queue, so it belongs to one mesh")
        at: Declarations | None = self
        while at is not None:
            if at is other:
                raise UsageError("a registry cannot include itself")
            at = at._parent[0] if at._parent is not None else None

    # Schedules

    def add_schedule(self, definition: Definition) -> None:
        """Add a schedule here, and to all registries that include this one.

        Raises:
            UsageError: The name is taken, here or in a registry that includes this one. Nothing is changed.
        """
        targets = list(self._ancestors(definition))
        for registry, renamed in targets:
            registry.check_schedule(renamed)
        for registry, renamed in targets:
            registry.schedules[renamed.name] = renamed

    def check_schedule(self, definition: Definition) -> None:
        """Raise UsageError if the name of a schedule is taken, or too long."""
        if check_name(definition.name, "schedule name") in self.schedules:
            raise UsageError(f"there is a schedule {definition.name!r} already: give one of them another name=")

    def _ancestors(self, definition: Definition) -> Iterator[tuple[Declarations, Definition]]:
        """Yield the schedule with its name here, and with its name in each registry that includes this one."""
        yield self, definition
        if self._parent is not None:
            home, prefix = self._parent
            # A schedule without a name of its own has the name of its function, with all prefixes.
            named = definition.name != definition.queue
            yield from home._ancestors(replace(definition, name=prefix + definition.name) if named else definition)

    def _incoming_schedules(self, other: Declarations, prefix: str) -> Iterator[Definition]:
        """Yield the schedules of `other` with their names here. The queues get all prefixes that functions get."""
        full, at = prefix, self
        while at._parent is not None:
            at, more = at._parent
            full = more + full
        for each in other.schedules.values():
            queue = full + each.queue if each.queue in other._names else each.queue
            yield replace(each, name=prefix + each.name, queue=queue)


def _is_defined_anew(older: Callable[..., Any], newer: Callable[..., Any]) -> bool:
    """Return True if `newer` replaces `older` in its module, because a notebook cell ran again or a module was loaded again."""
    if older is newer or not (inspect.isfunction(older) and inspect.isfunction(newer)) or "<" in newer.__qualname__:
        return False
    if (older.__module__, older.__qualname__) != (newer.__module__, newer.__qualname__):
        return False
    if newer.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return True  # a notebook, or a console
    before, now = older.__code__, newer.__code__
    return (before.co_filename, before.co_firstlineno) == (now.co_filename, now.co_firstlineno)
