"""Typed functions: `Function` is a function as a producer sees it, `Call` one call of it as a value.

One function is one queue, and its payload is what any producer in any language would push: the JSON object of the arguments by
name. How functions are declared is in `worqr.functions.registry`, how arguments are encoded in
`worqr.argument_codec`. Not to be confused with `worqr.script_call.Call`, which is a request to the server.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

import msgspec

from worqr.argument_codec import Signature
from worqr.client.blocking import BlockingFunction
from worqr.client.job import Job, Results
from worqr.client.queue import Queue
from worqr.errors import UsageError
from worqr.foreign import CALLS, no_such_method
from worqr.job_options import JobOptions, check_id, encode_options
from worqr.keys import QueueKeys, check_name
from worqr.peer.options import Handling, check_failure_handler
from worqr.records import Failed
from worqr.validation import check_task, encode_json

if TYPE_CHECKING:
    from worqr.client.client import Client

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[[Failed], object])

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """A call of a function, with its arguments checked and encoded. Nothing was sent. Calls of one function and payload are
    equal.

    Make it with ``function.call(...)`` or ``mesh.call(name, ...)``; send it with ``mesh.enqueue_many`` or
    ``mesh.dispatch_many``.
    """

    name: str
    """The function's name."""
    args: tuple[Any, ...] = field(compare=False)
    """The positional arguments, defaults included."""
    kwargs: dict[str, Any] = field(compare=False)
    """The keyword-only arguments."""
    task: bytes
    """The payload."""
    _options: Mapping[str, object] = field(default_factory=dict[str, object], compare=False, repr=False)
    _declared: Declared | None = field(default=None, compare=False, repr=False)

    @property
    def queue(self) -> str:
        """The name of the queue that the call goes to. It is the function's name, with the prefix of `include`."""
        return self.name if self._declared is None else self._declared.name

    @property
    def _results(self) -> Results | None:
        """The codec of its result; None for a function that is declared in another program."""
        return None if self._declared is None else self._declared.results


def named_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], max_payload: int) -> Call[Any]:
    """A call of a function that is declared in another program: only its name is known.

    Raises:
        UsageError: a bad name, arguments that JSON cannot carry, or positional ones, which only the function can name.
        PayloadTooLarge: over `max_payload` bytes.
    """
    check_name(name, "function name")
    if args and (kwargs or len(args) > 1):
        raise UsageError(
            f"call({name!r}, ...): positional arguments need the function itself, which knows their names; "
            "by name alone give keyword arguments, or the whole payload as the only one"
        )
    if args and isinstance(args[0], bytes | bytearray | memoryview):
        task = bytes(cast("bytes", args[0]))
    else:
        try:
            task = encode_json(args[0] if args else kwargs)
        except _UNENCODABLE as error:
            raise UsageError(f"call({name!r}, ...): JSON cannot carry these arguments: {error}") from error
    return Call(name, args, kwargs, check_task(task, max_payload))


class Declared:
    """The data that all handles of one function share. Changed only while an application is imported.

    Attributes:
        name: the function's, and its queue's; with the prefixes under which its registry was included.
        aliases: older names, whose queues are served and never enqueued to.
        client: that of the function's mesh; None until a mesh includes its registry.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, aliases: tuple[str, ...], how: Handling, *, is_async: bool
    ) -> None:
        self.fn = fn
        self.name: str = name
        self.aliases: tuple[str, ...] = aliases
        self.how: Handling = how
        self.is_async = is_async
        self.client: Client | None = None
        self.signature: Signature = Signature(fn, name, keeps=how.policy.result_ttl > 0)
        self.results: Results = Results(self.signature.decode_result, how.policy.result_ttl > 0)
        bound = {} if how.max_length is None else {"max_length": how.max_length}
        self.defaults: Mapping[str, object] = bound
        self.handler: Callable[[bytes], Any] = self._make_handler()

    def bind(self, client: Client | None) -> None:
        """Make the function one of a mesh."""
        self.client = client

    def rename(self, name: str, aliases: tuple[str, ...]) -> None:
        """Its registry was included somewhere, with a prefix."""
        self.name = self.signature.name = name
        self.aliases = aliases

    def home(self) -> Client:
        """Return the client of the function's mesh.

        Raises:
            UsageError: the function's registry was not included in one.
        """
        if self.client is None:
            raise UsageError(
                f"{self.name!r} belongs to a Registry that no mesh has included yet: call mesh.include(registry) first"
            )
        return self.client

    def call(self, options: Mapping[str, object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        """A call, checked and encoded."""
        signature = self.signature
        values = signature.bind(args, kwargs)
        task = signature.encode(values)
        if self.client is not None:
            check_task(task, self.client.settings.max_payload)
        return Call(self.name, *signature.split(values), task, options, self)

    def add_on_failure(self, handler: Callable[[Failed], object]) -> None:
        """Set the failure handler; there is one."""
        if self.how.on_failure is not None:
            raise UsageError(f"{self.name!r} has a failure handler already: {self.how.on_failure!r}")
        check_failure_handler(handler)
        self.how = replace(self.how, on_failure=handler, policy=replace(self.how.policy, on_failure=True))

    def keys(self) -> QueueKeys:
        """Return the keys of the function's queue.

        Raises:
            UsageError: No mesh has included the function's registry.
        """
        return QueueKeys(self.home().settings.prefix, self.name)

    def served(self) -> list[tuple[str, Callable[[Any], object], Handling]]:
        """Return the queues that a peer serves the function from, those of its aliases too, each with its handler.

        Raises:
            UsageError: An annotation names something that does not exist; or there are options of a failure handler, and no
                failure handler.
        """
        self.signature.ready()
        self.how.check_failing(self.name)
        return [(name, self.handler, self.how) for name in (self.name, *self.aliases)]

    def _make_handler(self) -> Callable[[bytes], Any]:
        """The function as a handler of its queue: decodes the payload, then calls it; of its kind, async or plain."""
        fn, decode = self.fn, self.signature.decode

        async def awaited(task: bytes) -> Any:
            args, kwargs = decode(task)
            return await fn(*args, **kwargs)

        def called(task: bytes) -> Any:
            args, kwargs = decode(task)
            return fn(*args, **kwargs)

        handler = functools.wraps(fn)(awaited if self.is_async else called)
        del handler.__wrapped__  # its signature is a handler's
        return handler


class Bound(Generic[P, R]):
    """A function with options for its jobs; ``function.options(...)`` makes it. It has no `enqueue`: options make a job."""

    def __init__(self, declared: Declared, options: Mapping[str, object]) -> None:
        self._declared = declared
        self._options = options

    async def dispatch(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Put a call into the function's queue as a job, with an id, and with a result if the function keeps results.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Returns:
            A handle of this dispatch, with its `outcome`.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type; or outside `connect` and `join`.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            Duplicate: The id is taken, and ``if_exists="raise"``. Nothing was stored.
            QueueFull: The queue is at `max_length`, or the server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it within 2 s. The error has the
                handle.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        declared = self._declared
        return await declared.home().sender.dispatch(declared.call(self._options, args, kwargs))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call as a value, for ``enqueue_many``, ``dispatch_many``, schedules and tests. Nothing is sent.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
        """
        return self._declared.call(self._options, args, kwargs)

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> Any:
            """Called only for a missing attribute."""
            raise AttributeError(no_such_method("Bound", _name_in(self), name, _OPTIONS_MAKE_A_JOB))


_OPTIONS_MAKE_A_JOB = {
    "enqueue": "options make a job: use `await {fn}.options(...).dispatch(...)`",
    "options": "give all options at once, as in {fn}.options(id='report-7', delay=60)",
    **dict.fromkeys(CALLS, "use `await {fn}.options(...).dispatch(...)`"),
}


def _name_in(bound: Bound[Any, Any]) -> str:
    declared = vars(bound).get("_declared")
    return "fn" if declared is None else declared.name


class Function(Bound[P, R]):
    """A function whose calls can be enqueued; ``@mesh.task`` makes it. Calling it runs the function here and now, without the
    mesh.
    """

    def __init__(self, declared: Declared) -> None:
        functools.update_wrapper(cast("Any", self), declared.fn)
        for name in [name for name in vars(self) if not name.startswith("__") and hasattr(type(self), name)]:
            del vars(self)[name]  # its `dispatch` (of a singledispatch, for example) would hide ours
        super().__init__(declared, declared.defaults)
        self.__worqr_handler__: Callable[[bytes], Any] = declared.handler

    def __repr__(self) -> str:
        return f"<Function {self.name!r}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called only for a missing attribute."""
            raise AttributeError(no_such_method(type(self).__name__, _name_in(self), name))

    @property
    def name(self) -> str:
        """The function's name, which is the name of its queue."""
        return self._declared.name

    @property
    def queue(self) -> Queue:
        """The function's queue, to inspect, pause or cancel it.

        Raises:
            UsageError: No mesh has included the function's registry.
        """
        return Queue(self._declared.home(), self._declared.keys())

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a call as a plain task, which costs least and has no handle. For ids, times and results, see `dispatch`.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type; or outside `connect` and `join`.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            QueueFull: The queue is at `max_length`, or the server is out of memory. Nothing was stored.
            NotReplicated: The task was stored, but fewer `replicas` than requested had it within 2 s.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the task may have been stored.
        """
        declared = self._declared
        await declared.home().sender.enqueue(declared.call(self._options, args, kwargs))

    def options(self, **options: Unpack[JobOptions]) -> Bound[P, R]:
        """Return this function with options for its jobs: ``await fn.options(delay=5).dispatch(...)``.

        Args:
            **options: See `JobOptions`.

        Raises:
            UsageError: An option does not exist or is not valid.
        """
        return Bound(self._declared, {**self._declared.defaults, **encode_options(options)})

    def job(self, id: str) -> Job[R]:
        """Return a handle of the job with this id. This does no I/O; the job does not have to exist.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        declared = self._declared
        return Job(declared.home(), declared.keys(), check_id(id, generated=True), results=declared.results)

    @property
    def blocking(self) -> BlockingFunction[P, R]:
        """This function for synchronous code: ``fn.blocking.enqueue(...)``."""
        return BlockingFunction(self._declared, self._options)

    def decode(self, task: bytes) -> Call[R]:
        """Return the call that a payload contains, for instance that of a `Failed` record.

        Args:
            task: The payload.

        Raises:
            Broken: The payload is not a call of this function.
        """
        declared = self._declared
        return Call(declared.name, *declared.signature.decode(task), task, self._options, declared)

    def on_failure(self, handler: F) -> F:
        """Set the function's failure handler; use it as a decorator.

        The handler is called with one `Failed` for each call that moves to the dead-letter queue, at least once.

        Args:
            handler: A function with one parameter.

        Returns:
            The handler, unchanged.

        Raises:
            UsageError: The function has a failure handler already, or the handler does not take one argument.
        """
        self._declared.add_on_failure(handler)
        return handler


class AsyncFunction(Function[P, R]):
    """A `Function` made of an async function."""

    def __init__(self, declared: Declared) -> None:
        super().__init__(declared)
        if sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(self)

    # `async def`, because that is what others look at before they choose between await and a thread
    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without the mesh."""
        return cast("R", await self._declared.fn(*args, **kwargs))


class SyncFunction(Function[P, R]):
    """A `Function` made of a plain function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without the mesh."""
        return cast("R", self._declared.fn(*args, **kwargs))
