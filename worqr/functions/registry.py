"""`Registry`: declares functions, and includes those of other registries.

An application, a plug-in or a blueprint has a registry; a `Mesh` is one. Nothing is global, and nothing is sent. A peer that
joins serves all declared functions, and peers that have joined already are notified of each declaration.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import tzinfo
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, cast, overload

from msgspec.structs import replace

from worqr.argument_codec import ArgumentCodec
from worqr.client.producer import Call
from worqr.client.topics import check_patterns, redelivery
from worqr.cron import MAX_TASK, Definition, Overlap, Trigger, check_overlap, misfire_count, period_ms, zone_name
from worqr.errors import UsageError
from worqr.foreign import EVERY, explain_arguments, hint_at_option
from worqr.functions.definition import FunctionDefinition
from worqr.functions.depends import refuse_dependencies
from worqr.functions.function import AsyncFunction, AsyncListFunction, Function, SyncFunction, SyncListFunction
from worqr.handler_options import (
    HandlerOptions,
    ListHandlerOptions,
    RunsIn,
    WorkflowOptions,
    check_runs_in,
    handling,
    is_async,
    policy_for,
)
from worqr.inside import current_run, definition_of, options_of
from worqr.job_options import Keep, NoSuchOption, schedule_options
from worqr.keys import PUBLISH, check_name
from worqr.limits import Lanes, Limit
from worqr.policy import NO_TRIES, Policy, RetryPolicy
from worqr.records import Failed
from worqr.validation import Seconds, check_text, has_controls, importable_name, seconds

if TYPE_CHECKING:
    from worqr.client.client import Client

P = ParamSpec("P")
R = TypeVar("R")


# `Declarations`: the functions and schedules of one registry.
#
# A `Registry` has one, which users do not see. It checks that names are unique, passes the declarations on to the mesh that
# includes the registry, and notifies the peers that have joined already. It sends nothing.


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
        self._steps: dict[str, Callable[..., Any]] = {}
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
            UsageError: A name is taken, here or in a registry that includes this one; or the function cannot have the default
                options of the mesh. Nothing is changed.
        """
        declared = definition_of(function)
        self._check_fit([function])
        self._forget_older(declared.name, declared.fn)
        self._check_all_free((declared.name, *declared.aliases))
        self._register(function)

    def add_step(self, step: Step[P, R], fn: Callable[P, R]) -> Step[P, R]:
        """Add a step. Raises UsageError if its name is taken here."""
        older = self._steps.get(step.name)
        if older is not None and not _is_defined_anew(older, fn):
            raise UsageError(f"there is a step {step.name!r} already: give one of them name=")
        self._steps[step.name] = fn
        return step

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
        if self.client is not None:
            self.client.topics.declared.pop(name, None)
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

    def _check_fit(self, functions: Collection[Function[..., Any]]) -> None:
        """Raise UsageError if a function cannot have the default options of the mesh that includes this registry."""
        at = self
        while at._parent is not None:
            at, _ = at._parent
        if at.client is not None:
            for function in functions:
                definition_of(function).check_fits(at.client)

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
        if self.client is not None and declared.patterns:
            self._subscribe(declared, self.client)
        if self._parent is not None:
            self._propagate(function)
        for listener in tuple(self._listeners):
            listener()

    def _subscribe(self, declared: FunctionDefinition, client: Client) -> None:
        """Note a subscription, and let the workers of this mesh send events that wait for a full queue."""
        client.topics.declared[declared.name] = declared.subscribed()
        if PUBLISH not in self.functions:
            options = {"runs_in": "loop", "timeout": None, "result_ttl": None}
            self._register(AsyncFunction(FunctionDefinition(redelivery(client), PUBLISH, (), "task", options)))

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
            UsageError: `other` is a mesh's or is included already; a name is taken; or a function cannot have the default
                options of the mesh. Nothing is changed.
        """
        self._check_includable(other)
        if prefix:
            check_name(prefix, "prefix of include")
        self._check_fit(other.functions.values())
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
            registry.schedules[renamed.name] = registry.sealed_schedule(renamed)

    def sealed_schedule(self, definition: Definition) -> Definition:
        """Return a schedule as the registry of the mesh stores it: the codec of the mesh encodes equal payloads alike.

        Raises:
            UsageError: The encoded payload is too large.
        """
        values = None if self.client is None else self.client.values
        if values is None:
            return definition
        found = replace(definition, task=values.encode_equal(definition.task))
        return check_schedule_task(found)

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


def check_schedule_task(definition: Definition) -> Definition:
    """Return a schedule. Raises UsageError if its payload is too large."""
    if len(definition.task) > MAX_TASK:
        raise UsageError(
            f"schedule {definition.name!r}: its payload has {len(definition.task):,} bytes, at most {MAX_TASK:,} fit"
        )
    return definition


def _is_defined_anew(older: Callable[..., Any], newer: Callable[..., Any]) -> bool:
    """Return True if `newer` replaces `older` in its module, because a notebook cell ran again or a module was loaded again."""
    if older is newer or not (inspect.isfunction(older) and inspect.isfunction(newer)) or "<" in newer.__qualname__:
        return False
    if (older.__module__, older.__qualname__) != (newer.__module__, newer.__qualname__):
        return False
    if newer.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return True  # a notebook, or a console
    before, now = _place(older), _place(newer)
    return before is not None and before == now


def _place(fn: Callable[..., Any]) -> tuple[str, int] | None:
    """Return the file and the line of a function; of a decorated one, those of the function inside."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


# The options of schedules. `worqr.cron` computes the firings.


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule, for `cron` and `every`."""

    name: str
    """The name of the schedule, unique in the mesh. Default: the name of the function."""
    timezone: str | tzinfo
    """Only for `cron`: an IANA name, or a ``zoneinfo.ZoneInfo``. Default: "UTC"."""
    misfire: Literal["skip", "once"] | int
    """What to do about firings that were missed while no worker ran. "skip": nothing. "once": run once. A number from 1 to 100:
    run the last n. Default: "once".
    """
    overlap: Overlap
    """What to do if the job of the last firing still waits or runs. "skip": leave out this firing. "queue": run it afterwards.
    "cancel": cancel the older job. Default: "skip".
    """
    jitter: Seconds
    """Seconds, or a timedelta: delay the job by a random time up to this long. Default: 0."""


class NoArgFunction(Protocol):
    """A function without arguments that can make a `Call` of itself."""

    def call(self) -> Call[Any]: ...


F = TypeVar("F", bound=NoArgFunction)


def _call_of(function: NoArgFunction) -> Call[Any]:
    """Return a call of a function without arguments. Raises UsageError if it needs some."""
    try:
        return function.call()
    except TypeError as error:
        name = getattr(function, "__name__", "fn")
        raise UsageError(
            f"a schedule calls its function without arguments ({error}): give the parameters defaults, or declare a schedule for "
            f"a call, as in mesh.cron('0 3 * * *', {name}.call(...)) below the function"
        ) from None


def _checked(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule as fields of its definition."""
    for option in how:
        if option not in ScheduleOptions.__annotations__:
            known = ScheduleOptions.__annotations__
            hint = hint_at_option(option, known, f"it takes {', '.join(known)}")
            raise UsageError(f"a schedule has no option {option!r}; {hint}")
    found: dict[str, Any] = {}
    if "name" in how:
        found["name"] = check_name(how["name"], "schedule name")
    if "timezone" in how:
        found["timezone"] = zone_name(how["timezone"])
    if "misfire" in how:
        found["misfire"] = misfire_count(how["misfire"])
    if "overlap" in how:
        found["overlap"] = check_overlap(how["overlap"])
    if "jitter" in how:
        found["jitter_ms"] = round(seconds(how["jitter"], "jitter") * 1000)
    return found


T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault
    from typing_extensions import Unpack

    BatchSize = TypeVarWithDefault("BatchSize", bound=int | None, default=None)
    BatchSize_co = TypeVarWithDefault("BatchSize_co", bound=int | None, default=None, covariant=True)
else:
    BatchSize = TypeVar("BatchSize")
    BatchSize_co = TypeVar("BatchSize_co", covariant=True)


SUBSCRIBER_LENGTH: Final = 1_000_000
"""Tasks that may wait in the queue of a subscriber. Beyond that, events wait with their publisher's job."""


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


class Registry:
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
        schedulable: bool = ...,
        limit: Limit | Collection[Limit] = ...,
        cost: int = ...,
        lanes: Lanes = ...,
        max_length: int | None = ...,
        shards: int = ...,
        keep: Keep | None = ...,
        tags: Callable[..., Collection[str]] | Collection[str] = ...,
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
        return self._task(fn, {"name": name, "aliases": aliases, **options})

    @overload
    def on(
        self,
        topic: str,
        /,
        *patterns: str,
        name: str = ...,
        aliases: Collection[str] = ...,
        **options: Unpack[ListHandlerOptions],
    ) -> TaskDecorator[int]: ...
    @overload
    def on(
        self,
        topic: str,
        /,
        *patterns: str,
        name: str = ...,
        aliases: Collection[str] = ...,
        **options: Unpack[HandlerOptions],
    ) -> TaskDecorator: ...
    def on(self, topic: str, /, *patterns: str, **options: Any) -> Any:
        """Declare a function that gets each event of these topics, from ``mesh.publish``: ``@mesh.on("order.paid")``.

        It is a task as `task` declares it, with a queue of its own, and its argument is the value of the event. Its queue is
        subscribed when the first worker joins, and stays so until ``mesh.unsubscribe``. It gets no event from before.

        Args:
            topic: A topic, or a pattern: ``*`` stands for one segment, and ``#`` at the end for all that follow, or none.
            *patterns: More of them. An event that several fit is one job.
            **options: As of `task`. `max_length` has the default 1,000,000; None: no limit.

        Returns:
            A decorator, which returns the function as a `Function`.

        Raises:
            UsageError: As `task`; a pattern is not valid, the function does not take one value, or its `tags` are a function.
        """
        checked = check_patterns((topic, *patterns))
        return self._task(None, {"max_length": SUBSCRIBER_LENGTH, **options}, patterns=checked)

    def _task(
        self, fn: Any, options: Mapping[str, Any], *, workflow: bool = False, patterns: tuple[str, ...] = ()
    ) -> Any:
        """Declare a function, or return the decorator that does."""
        name, aliases = options.get("name"), options.get("aliases", ())
        others_given = {each: value for each, value in options.items() if each not in {"name", "aliases"}}
        where = "workflow" if workflow else "task"
        handler_options = handling(where, others_given)
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
            definition = FunctionDefinition(fn, found, others, where, others_given)
            if patterns:
                definition.subscribe(patterns)
            function: Function[..., Any] = kind(definition)
            self._declarations.add(function)
            return function

        return declare if fn is None else declare(fn)

    @overload
    def workflow(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncFunction[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def workflow(self, fn: Callable[P, R], /) -> SyncFunction[P, R]: ...
    @overload
    def workflow(
        self, /, *, name: str = ..., aliases: Collection[str] = ..., **options: Unpack[WorkflowOptions]
    ) -> TaskDecorator: ...
    def workflow(self, fn: Any = None, /, **options: Any) -> Any:
        """Declare a function that may wait: for two weeks, for a person, for the results of other jobs. Its calls are jobs.

        It is a task as `task` declares it, and takes the same options. When it only waits, it is suspended; when a wait has
        ended, it runs again from the top, and each finished step and wait returns at once what it has returned before.

        Args:
            fn: The function.
            **options: As of `task`: `name`, `aliases`, and `WorkflowOptions`. A workflow takes no list.

        Returns:
            The function as a `Function`; with options, a decorator.

        Raises:
            UsageError: As `task`.
        """
        for each in ("batch_size", "batch_wait"):
            if each in options:
                raise UsageError(f"a workflow takes one call at a time: leave out {each}")
        return self._task(fn, options, workflow=True)

    @overload
    def step(self, fn: Callable[P, R], /) -> Step[P, R]: ...
    @overload
    def step(
        self, /, *, name: str = ..., retry: RetryPolicy = ..., timeout: Seconds = ...
    ) -> Callable[[Callable[P, R]], Step[P, R]]: ...
    def step(
        self, fn: Any = None, /, *, name: str = "", retry: RetryPolicy | None = None, timeout: Seconds | None = None
    ) -> Any:
        """Declare a function as a step of workflows: each job calls it once for the same arguments, however often the job runs.

        Args:
            fn: The function. In async workflows, an async one.
            name: The name of the step, unique in this registry. Default: the qualified name of the function.
            retry: How often and when to try again, in this job; then the step has failed for good, and raises `StepFailed` in
                each run. Default: its error is that of the run, and the next run calls it again.
            timeout: Seconds, or a timedelta, that a try of an async function may take. Default: no limit.

        Returns:
            The function as a `Step`; with options, a decorator.

        Raises:
            UsageError: The name is taken, a parameter has a type that cannot be serialized, or an option is not valid.
        """

        def declare(fn: Callable[..., Any]) -> Step[..., Any]:
            return self._declarations.add_step(Step(fn, name or getattr(fn, "__qualname__", ""), retry, timeout), fn)

        return declare if fn is None else declare(fn)

    def include(self, other: Registry, *, prefix: str = "") -> None:
        """Add all functions and schedules of another registry, also those that it declares later.

        Args:
            other: A registry that is not included elsewhere. Its functions belong to this mesh from now on.
            prefix: Put in front of the names and aliases of its functions and schedules, for instance ``"shop."``.

        Raises:
            UsageError: `other` is a mesh or is included already, a name is taken, or a function cannot have the `defaults` of the
                mesh. Nothing is changed.
        """
        if not isinstance(other, Registry):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"include() takes a worqr.Registry, not {other!r}")
        self._declarations.include(other._declarations, prefix)

    # Schedules

    @overload
    def cron(
        self,
        expression: str,
        call: Call[Any],
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> None: ...
    @overload
    def cron(
        self,
        expression: str,
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> Callable[[F], F]: ...
    def cron(self, expression: str, call: Call[Any] | None = None, /, **how: Any) -> Callable[[F], F] | None:
        """Enqueue a call at the times that a cron expression names.

        ``mesh.cron("0 3 * * *", report.call("eu"))``; or, without a call, a decorator of a function without arguments. Each
        firing is enqueued exactly once, however many workers there are, as a job with the id ``cron:NAME``.

        Args:
            expression: Minute, hour, day of month, month, day of week; as in Debian's cron, with ``L`` and ``#``.
            call: The call to enqueue. None: return a decorator.
            **how: See `ScheduleOptions`.

        Returns:
            None; without a call, a decorator that returns the function unchanged.

        Raises:
            UsageError: The expression or an option is not valid, the name is taken, or an extra is missing (``pip install
                'worqr[cron]'``).
        """
        if not isinstance(expression, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"a cron expression must be a str, not {type(expression).__name__}")
        return self._declare(call, how, cron=" ".join(expression.split()))

    @overload
    def every(
        self,
        period: Seconds,
        call: Call[Any],
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> None: ...
    @overload
    def every(
        self,
        period: Seconds,
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> Callable[[F], F]: ...
    def every(self, period: Seconds, call: Call[Any] | None = None, /, **how: Any) -> Callable[[F], F] | None:
        """Enqueue a call once in each period.

        A period fires at its multiples since the Unix epoch: ``every(3600)`` fires on the hour, no matter when the workers
        start. Otherwise it is like `cron`.

        Args:
            period: Seconds, or a timedelta; at least 0.1 s.
            call: The call to enqueue. None: return a decorator.
            **how: See `ScheduleOptions`; a period has no `timezone`.

        Returns:
            None; without a call, a decorator that returns the function unchanged.

        Raises:
            UsageError: The period or an option is not valid, or the name is taken.
        """
        if "timezone" in how:
            raise UsageError("every() goes by real time and takes no timezone; for local times use cron()")
        return self._declare(call, how, every_ms=period_ms(period))

    if not TYPE_CHECKING:  # a type checker knows the signature
        every = explain_arguments("every()", EVERY)(every)

    def _declare(self, call: Call[Any] | None, how: Mapping[str, Any], **when: Any) -> Callable[[F], F] | None:
        given = _checked(how)

        def declare(call: Call[Any]) -> None:
            if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"a schedule takes a call, as in mesh.call('name') or function.call(), not {call!r}")
            options = schedule_options(options_of(call))
            named: dict[str, Any] = {"name": call.queue, "queue": call.queue, "task": call.task}
            named |= {"workflow": options.pop("workflow", False), "lifetime_ms": int(options.pop("lifetime", 0))}
            named["options"] = options
            definition = Definition(**(named | given | when))
            self._declarations.add_schedule(check_schedule_task(definition))

        unnamed: dict[str, Any] = {"name": "", "queue": "", "task": b""}
        Trigger(Definition(**(unnamed | given | when)))  # raises if the expression or zone is not valid
        if call is not None:
            declare(call)
            return None

        def decorator(function: F) -> F:
            if not hasattr(function, "call"):
                name = getattr(function, "__name__", repr(function))
                raise UsageError(
                    f"a schedule needs a declared function: put @mesh.task between this line and `def {name}`"
                )
            declare(_call_of(function))
            return function

        return decorator


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


# `Step`: a function that each job of a workflow calls once for the same arguments, however often the job runs.


MAX_STEP_NAME: Final = 200
"""The most bytes of the key of a step."""


class Step(Generic[P, R]):
    """A function that is a step of workflows; ``@mesh.step`` makes it. Calling it in a workflow calls the function once per job,
    and returns what is stored of it in later runs. Calling it elsewhere calls the function.

    The stored name is the name of the step with its arguments, as JSON. If one task of a run makes the same call again, the call
    is another step, with a number; if two tasks of one run do, `named` distinguishes them.
    """

    def __init__(
        self, fn: Callable[P, R], name: str, retry: RetryPolicy | None = None, timeout: Seconds | None = None
    ) -> None:
        functools.update_wrapper(cast("Any", self), fn)
        refuse_dependencies(fn, f"step {name!r}", "make the value inside the step")
        if timeout is not None and not is_async(fn):
            raise UsageError(f"step {name!r}: a plain function cannot be stopped after a timeout: declare it async")
        if retry is not None:
            _check_retry(name, retry)
        self._fn = fn
        self._name = name
        self._key: str | None = None
        self._policy: Policy | None = None
        if retry is not None:
            self._policy = policy_for(retry, timeout=timeout)
        elif timeout is not None:
            self._policy = Policy(max_failures=NO_TRIES, timeout=seconds(timeout, "timeout", positive=True))
        _check_controls(name, self._policy)
        self._codec = ArgumentCodec(fn, name)

    @property
    def name(self) -> str:
        """The name of the step, unique in its registry."""
        return self._name

    def named(self, name: str) -> Step[P, R]:
        """Return this step under another name, which its arguments do not add to: ``charge.named("retry of 7")(7)``.

        Args:
            name: The name of the call in its job, 1 to 200 bytes.

        Raises:
            UsageError: The name is not valid.
        """
        if not 0 < len(check_text(name, "the name of a step").encode()) <= MAX_STEP_NAME:
            raise UsageError(f"the name of a step must have 1 to {MAX_STEP_NAME} bytes, not {len(name.encode()):,}")
        _check_controls(name, self._policy)
        found: Step[P, R] = object.__new__(type(self))
        vars(found).update(vars(self))
        found._key = name
        return found

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function: in a workflow once per job, elsewhere each time.

        Raises:
            StepFailed: The retry policy of the step allows no further try, in this run or in an earlier one.
            LifetimeOver: The `lifetime` of the workflow is over, and the step waited for its next try.
            UsageError: In a workflow: another task of the run makes the same call; an argument is not JSON; or as `worqr.step`.
        """
        run = current_run.get(None)
        if run is None or run.flow is None:
            return self._fn(*args, **kwargs)
        remedy = f"give one of them a name, as in {self._name}.named('...')(...)"
        key = run.flow.key(self._key or self._key_of(run.flow, args, kwargs), remedy)
        return cast("R", run.flow.take_step(key, self._fn, args, kwargs, self._policy))

    def _key_of(self, flow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name of a call with these arguments; a digest of them if they are long, or the mesh has a codec."""
        values = self._codec.bind(args, kwargs)
        self._codec.encode(values)  # checks them
        arguments = self._codec.named(values).decode("utf-8", "replace")
        key = f"{self._name} {arguments}"
        may_wait = self._policy is not None  # for its next try: the wait has the key in its name
        is_odd = may_wait and has_controls(key) and not flow.stores(key)
        if len(key.encode()) > MAX_STEP_NAME - len(" #100000") or is_odd or flow.must_hide(key):
            key = f"{self._name} {hashlib.sha256(arguments.encode()).hexdigest()[:32]}"
        return key

    def __repr__(self) -> str:
        return f"<Step {self._name!r}>"


def _check_controls(name: str, policy: Policy | None) -> None:
    """Raise UsageError if a step that may wait for its next try has a name that no wait may have."""
    if policy is not None and has_controls(name):
        raise UsageError(f"the name of a step with retry= or timeout= must have no control characters: {name!r}")


def _check_retry(name: str, retry: RetryPolicy) -> None:
    """Raise UsageError if the policy of a step has settings that count what only a job has."""
    if retry.reset_on_progress is not None:
        raise UsageError(f"step {name!r}: reset_on_progress is for functions, and a step makes no progress of its own")
    for setting in ("max_stalls", "max_timeouts"):
        if getattr(retry, setting) is not None:
            raise UsageError(
                f"step {name!r}: {setting} is for functions, and counts the runs of a job; a try that takes too long is a "
                "failure: write max_failures"
            )
