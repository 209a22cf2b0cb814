"""Typed functions: `Function` is a declared function as a producer sees it, and `Bound` one with options.

Each function has one queue. A payload is the JSON object of the arguments by name, which programs in other languages can write,
too. `worqr.functions.definition` has what the handles of one function share, `worqr.functions.registry` declares functions, and
`worqr.argument_codec` encodes arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from worqr.client.job import Job
from worqr.client.producer import Call
from worqr.client.queue import Queue
from worqr.client.sync import mark_sending, sending, sent_by, sync
from worqr.errors import UsageError
from worqr.foreign import CALLS, no_such_method
from worqr.functions.child_job import ChildJob, check_child_name
from worqr.functions.definition import FunctionDefinition
from worqr.job_options import RAW_OPTIONS, FollowUp, Keep, NoSuchOption, Update, check_id, encode_options
from worqr.policy import RetryPolicy
from worqr.records import Failed
from worqr.validation import Seconds

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[[Failed], object])


class Bound(Generic[P, R]):
    """A function with options for its jobs; ``function.options(...)`` makes it. It has no `enqueue`: its options make a job. With
    `max_length`, `wait` and `replicas` only, it is a `PlainBound`, which has one.
    """

    def __init__(self, definition: FunctionDefinition, options: Mapping[str, object]) -> None:
        self._definition = definition
        self._options = options
        self._short = f"{definition.name.rpartition('.')[2]}.options(...)"  # for messages
        self._child_name = ""

    @sending
    def dispatch(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Job[R]]:
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
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it within 2 s. The error has the
                handle.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        definition = self._definition
        producer = definition.require_client().producer
        return sent_by(f"{self._short}.dispatch", producer.dispatch(definition.call(self._options, args, kwargs)))

    def run(self, /, *args: P.args, **kwargs: P.kwargs) -> ChildJob[R]:
        """Start a call as a job of the workflow that calls this. Await what is returned for its result.

        The job is started once, however often the workflow runs: its id is made of that of the workflow, the name of the function
        and the arguments. It is sent when the workflow waits for something, or ends; without an await, it runs all the same.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: Outside a workflow; another task of the run makes the same call; an argument has the wrong type; an
                option is one of `id`, `unique_for`, `if_exists` and `batch`; or the job would wait in the strict lane of the
                workflow, behind it.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
        """
        definition = self._definition
        return ChildJob(definition, definition.call(self._options, args, kwargs), self._child_name)

    def named(self, name: str) -> Bound[P, R]:
        """Return this function under a name for `run`, which its arguments do not add to: ``pack.named("again").run(7)``.

        Args:
            name: The name of the call in its workflow, 1 to 150 bytes.

        Raises:
            UsageError: The name is not valid.
        """
        found: Bound[P, R] = Bound(self._definition, self._options)
        found._child_name = check_child_name(name)
        return found

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
        return self._definition.call(self._options, args, kwargs)

    def on_commit(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a call after the commit of Django's transaction: ``confirm.on_commit(order.pk)`` in synchronous code.

        It is sent now if no ``atomic`` block is open, and never after a rollback. With blocks on several databases, the last
        commit sends it. If the process dies between the commit and the send, the call is lost. Options make it a job.

        Args:
            *args: The function's arguments. They are checked and encoded now.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            Unavailable: No block is open, and the server did not reply in time. After a commit, the error is logged.
        """
        call = self._definition.call(self._options, args, kwargs)
        producer = self._definition.require_client().producer
        send: Callable[[Call[Any]], Coroutine[Any, Any, object]] = producer.dispatch
        if isinstance(self, PlainBound):
            send = producer.enqueue
        after_commit = import_module("worqr.django.backend").after_commit  # the core does without Django
        after_commit(lambda: sync(send, call), call.queue)

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_method("Bound", _name_in(self), name, _OPTIONS_MAKE_A_JOB))


_OPTIONS_MAKE_A_JOB = {
    "enqueue": "options make a job: use `await {fn}.options(...).dispatch(...)`",
    "options": "give all options at once, as in {fn}.options(id='report-7', delay=60)",
    **dict.fromkeys(CALLS, "use `await {fn}.options(...).dispatch(...)`"),
}


def _name_in(bound: Bound[Any, Any]) -> str:
    definition = vars(bound).get("_definition")
    return "fn" if definition is None else definition.name


class PlainBound(Bound[P, R]):
    """A function with options that a plain task can have, too; ``function.options(max_length=1000, wait=30)`` makes it."""

    @sending
    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, None]:
        """Enqueue a call as a plain task, which costs least and has no handle. For ids, times and results, see `dispatch`.

        Of the options, a plain task can have `max_length`, `wait` and `replicas`:
        ``await fn.options(max_length=1000, wait=30).enqueue(...)``.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type; or outside `connect` and `join`.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The task was stored, but fewer `replicas` than requested had it within 2 s.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the task may have been stored.
        """
        definition = self._definition
        if definition.options.policy.workflow:
            raise UsageError(f"a workflow is a job: use `await {self._short}.dispatch(...)`")
        producer = (definition.client or definition.require_client()).producer
        return sent_by(f"{self._short}.enqueue", producer.enqueue(definition.call(self._options, args, kwargs)))


class Function(PlainBound[P, R]):
    """A function whose calls can be enqueued; ``@mesh.task`` makes it. Calling it runs the function here and now, without the
    mesh.
    """

    def __init__(self, definition: FunctionDefinition) -> None:
        mark_sending()
        functools.update_wrapper(cast("Any", self), definition.fn)
        for name in [name for name in vars(self) if not name.startswith("__") and hasattr(type(self), name)]:
            del vars(self)[name]  # such an attribute (`dispatch` of a singledispatch) would hide the method
        super().__init__(definition, definition.defaults)
        self._short = definition.name.rpartition(".")[2]
        self.__worqr_handler__: Callable[[bytes], Any] = definition.handler
        if sys.version_info >= (3, 12) and definition.is_async:
            inspect.markcoroutinefunction(self)

    def __repr__(self) -> str:
        return f"<Function {self.name!r}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_method(type(self).__name__, _name_in(self), name))

    @property
    def name(self) -> str:
        """The function's name, which is the name of its queue."""
        return self._definition.name

    @property
    def queue(self) -> Queue:
        """The function's queue, to inspect, pause or cancel it.

        Raises:
            UsageError: No mesh has included the function's registry.
        """
        return Queue(self._definition.require_client(), self._definition.keys())

    @overload
    def options(self, *, max_length: int = ..., wait: Seconds = ..., replicas: int = ...) -> PlainBound[P, R]: ...
    @overload
    def options(
        self,
        *,
        id: str = ...,
        delay: Seconds = ...,
        run_at: datetime = ...,
        result_ttl: Seconds = ...,
        timeout: Seconds = ...,
        retry: RetryPolicy = ...,
        update: Update = ...,
        replicas: int = ...,
        expires: Seconds | datetime = ...,
        if_exists: Literal["update", "skip", "raise", "cancel"] = ...,
        unique_for: Seconds = ...,
        meta: Mapping[str, str] = ...,
        max_length: int = ...,
        wait: Seconds = ...,
        front: bool = ...,
        lane: str = ...,
        then: FollowUp = ...,
        otherwise: FollowUp = ...,
        keep: Keep = ...,
        tags: Collection[str] = ...,
        keep_task: bool = ...,
        **unknown: NoSuchOption,
    ) -> Bound[P, R]: ...
    def options(self, **options: Any) -> Bound[P, R]:
        """Return this function with options for its calls: ``await fn.options(delay=5).dispatch(...)``.

        Args:
            **options: See `JobOptions`. With `max_length`, `wait` and `replicas` only, you can `enqueue` plain tasks, too.

        Raises:
            UsageError: An option does not exist or is not valid.
        """
        definition = self._definition
        given = encode_options(options)
        merged = definition.with_options(definition.defaults, given)
        return Bound(definition, merged) if given.keys() - RAW_OPTIONS else PlainBound(definition, merged)

    def job(self, id: str) -> Job[R]:
        """Return a handle of the job with this id. This does no I/O; the job does not have to exist.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        definition = self._definition
        return Job(
            definition.require_client(), definition.keys(), check_id(id, generated=True), results=definition.results
        )

    def decode(self, task: bytes) -> Call[R]:
        """Return the call that a payload contains, for instance that of a `Failed` record.

        Args:
            task: The payload.

        Raises:
            Undecodable: The payload is not a call of this function.
        """
        definition = self._definition
        return Call(definition.name, *definition.codec.decode(task), task, self._options, definition)

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
        self._definition.add_on_failure(handler)
        return handler


class AsyncFunction(Function[P, R]):
    """A `Function` made of an async function."""

    # `async def`, because frameworks check that before they choose between await and a thread.
    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without the mesh."""
        return cast("R", await self._definition.runs(*args, **kwargs))


class SyncFunction(Function[P, R]):
    """A `Function` made of a plain function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without the mesh."""
        return cast("R", self._definition.runs(*args, **kwargs))


class AsyncListFunction(Function[[T], R]):
    """A `Function` made of an async function that takes a list. A call of it is one element: ``await fn.enqueue(element)``."""

    async def __call__(self, calls: list[T], /) -> Sequence[R | Exception] | None:
        """Run the function here and now with a list of calls, without the mesh. Return what it returns."""
        return cast("Sequence[R | Exception] | None", await self._definition.runs(calls))


class SyncListFunction(Function[[T], R]):
    """A `Function` made of a plain function that takes a list. A call of it is one element: ``await fn.enqueue(element)``."""

    def __call__(self, calls: list[T], /) -> Sequence[R | Exception] | None:
        """Run the function here and now with a list of calls, without the mesh. Return what it returns."""
        return cast("Sequence[R | Exception] | None", self._definition.runs(calls))
