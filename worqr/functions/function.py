"""Typed functions: `Function` is a declared function as a producer sees it, and `Bound` one with options.

Each function has one queue. A payload is the JSON object of the arguments by name, which programs in other languages can write,
too. `worqr.functions.definition` has what the handles of one function share, `worqr.functions.registry` declares functions, and
`worqr.argument_codec` encodes arguments. A workflow starts a `ChildJob` by ``function.run(...)``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, ParamSpec, TypeVar, cast, overload

from worqr.client.job import Job
from worqr.client.producer import Call
from worqr.client.queue import Queue
from worqr.client.sync import sent_by, sync
from worqr.errors import UsageError
from worqr.foreign import CALLS, no_such_method
from worqr.functions.definition import FunctionDefinition
from worqr.inside import current_run
from worqr.job_options import RAW_OPTIONS, FollowUp, Keep, NoSuchOption, Update, check_id, encode_options
from worqr.policy import ChildCancelled, ChildFailed, RetryPolicy
from worqr.records import Failed, RemoteError
from worqr.remote_error import packed_error
from worqr.validation import Seconds, check_text, mark_coroutine_functions, returns_coroutine, seconds

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

    @returns_coroutine
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

    @returns_coroutine
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
        handling = definition.options
        if handling.policy.workflow:
            raise UsageError(f"a workflow is a job: use `await {self._short}.dispatch(...)`")
        producer = (definition.client or definition.require_client()).producer
        if self._options or handling.lanes is not None or handling.tags or producer.looks_at_calls:
            sending = producer.enqueue(definition.call(self._options, args, kwargs))
        else:  # as most calls are: they take the shortest way
            sending = producer.enqueue_task(definition.name, definition.encode(args, kwargs)[1])
        return sent_by(f"{self._short}.enqueue", sending)


class Function(PlainBound[P, R]):
    """A function whose calls can be enqueued; ``@mesh.task`` makes it. Calling it runs the function here and now, without the
    mesh.
    """

    def __init__(self, definition: FunctionDefinition) -> None:
        mark_coroutine_functions()
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

    def __reduce__(self) -> str:
        """Return the name under which its module has it: it is copied and pickled as a plain function is."""
        return str(getattr(self, "__qualname__", self._short))

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


# `ChildJob`: a job that a workflow has started, and whose result it awaits. `gather` awaits several at once.


_AGAIN: Final = re.compile(r" ~\d+$")
MAX_NAME: Final = 150
"""The most bytes of the name of a job in its workflow."""


class ChildJob(Generic[R]):
    """A job that a workflow has started with ``function.run(...)``. Await it for its result; it needs no slot meanwhile.

    Raises:
        UsageError: Outside a workflow; or another task of the run makes the same call.
    """

    def __init__(self, definition: FunctionDefinition, call: Call[R], name: str = "") -> None:
        run = current_run.get(None)
        if run is None or run.flow is None:
            raise UsageError(
                f"{definition.name}.run() is for workflows: declare the caller with @mesh.workflow, or use "
                "`await fn.dispatch(...)` and `await job.result()`"
            )
        self._flow: Any = run.flow
        self._definition = definition
        lanes = definition.options.lanes
        self._flow.children.check_place(call, is_strict=lanes is not None and lanes.strict)
        arguments = definition.codec.named(definition.codec.bind(call.args, call.kwargs))
        key = _short(name or f"{definition.name} {arguments.decode('utf-8', 'replace')}")
        if not name and self._flow.must_hide(key):
            key = f"{definition.name[:120]} {sha256(arguments).hexdigest()[:32]}"
        key = self._flow.key(key, "give one of them a name, as in fn.named('...').run(...)")
        self.key: str = self._flow.children.name_of(key)
        self._flow.children.add(self.key, call, definition.require_client())

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        (end,) = await self._flow.children.wait([self.key])
        return self._value(end)

    def _value(self, end: Any) -> R:
        """Return the result of the job, or raise why it has none."""
        match end.outcome:
            case "finished":
                kind, _, value = end.value.partition(b" ")
                return cast("R", self._definition.codec.decode_result(kind.decode("ascii", "replace"), value))
            case "cancelled":
                reason = end.value.decode("utf-8", "replace")
                raise ChildCancelled(f"the job {self.key!r} was cancelled{': ' * bool(reason)}{reason}", reason)
            case "failed":
                error = packed_error(end.value)
                raise ChildFailed(f"the job {self.key!r} failed: {error.type}: {error.message}", error)
            case "large":
                size = end.value.decode("ascii", "replace")
                raise ChildFailed(
                    f"the job {self.key!r} has finished, and its result of {size} bytes is too large to come back to a workflow, "
                    "at most 64 KiB: store it elsewhere, and return its name",
                    RemoteError("ResultTooLarge", "", ""),
                )
            case _:
                raise ChildFailed(
                    f"the job {self.key!r} is lost: its queue knows nothing of it", RemoteError("Lost", "", "")
                )

    def __repr__(self) -> str:
        return f"<ChildJob {self.key!r}>"


@returns_coroutine
def gather(*jobs: ChildJob[R]) -> Coroutine[Any, Any, list[R]]:
    """Wait in a workflow until jobs that it has started have all ended, and return their results, in the order of the arguments.

    The workflow holds no slot meanwhile, and runs again once, after the last of them.

    Args:
        *jobs: What ``function.run(...)`` has returned, each once.

    Raises:
        JobFailed: A job failed for good. Of several, the error is that of the first one in the order of the arguments.
        JobCancelled: A job was cancelled.
        UsageError: An argument is no such job; outside a workflow, or in a thread or process where no event loop runs.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    if (flow := _flow_of(jobs)) is not None:
        flow.run.check_awaitable("worqr.gather()", "worqr.gather_now(...)")
    return _gathered(flow, jobs)


async def _gathered(flow: Any, jobs: Sequence[ChildJob[R]]) -> list[R]:
    if flow is None:
        return []
    ends: Sequence[Any] = await flow.children.wait([job.key for job in jobs])
    return [job._value(end) for job, end in zip(jobs, ends, strict=True)]  # pyright: ignore[reportPrivateUsage]


def gather_now(*jobs: ChildJob[R]) -> list[R]:
    """Wait for jobs in a workflow that is a plain function, in a thread or a process. See `gather`.

    Args:
        *jobs: What ``function.run(...)`` has returned, each once.

    Raises:
        JobFailed: A job failed for good.
        JobCancelled: A job was cancelled.
        UsageError: An event loop runs in this thread; or as `gather`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow = _flow_of(jobs)
    if flow is None:
        return []
    flow.run.check_may_wait("await worqr.gather(...)")
    ends: Sequence[Any] = flow.children.wait_now([job.key for job in jobs])
    return [job._value(end) for job, end in zip(jobs, ends, strict=True)]  # pyright: ignore[reportPrivateUsage]


@returns_coroutine
def first(*jobs: ChildJob[R], timeout: Seconds | None = None) -> Coroutine[Any, Any, tuple[int, R] | None]:
    """Wait in a workflow until one of the jobs that it has started has ended; later runs get the same one.

    The others go on, and their ends are kept: await them later, or let them be. The workflow holds no slot meanwhile.

    Args:
        *jobs: What ``function.run(...)`` has returned, at least one, each once.
        timeout: Seconds, or a timedelta, from the first run that comes here. None: no limit.

    Returns:
        The place of the job among the arguments, and its result; None if the time is over.

    Raises:
        JobFailed: The job that ended first failed for good.
        JobCancelled: It was cancelled.
        UsageError: An argument is no such job, or there is none; outside a workflow, or in a thread or process where no event
            loop runs.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, ms = _first_of(jobs, timeout)
    flow.run.check_awaitable("worqr.first()", "worqr.first_now(...)")
    return _first(flow, jobs, ms)


async def _first(flow: Any, jobs: Sequence[ChildJob[R]], ms: int | None) -> tuple[int, R] | None:
    return _won(jobs, await flow.children.first([job.key for job in jobs], ms))


def first_now(*jobs: ChildJob[R], timeout: Seconds | None = None) -> tuple[int, R] | None:
    """Wait for the first of several jobs in a workflow that is a plain function, in a thread or a process. See `first`.

    Args:
        *jobs: What ``function.run(...)`` has returned, at least one, each once.
        timeout: Seconds, or a timedelta. None: no limit.

    Returns:
        The place of the job among the arguments, and its result; None if the time is over.

    Raises:
        JobFailed: The job that ended first failed for good.
        JobCancelled: It was cancelled.
        UsageError: An event loop runs in this thread; or as `first`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, ms = _first_of(jobs, timeout)
    flow.run.check_may_wait("await worqr.first(...)")
    return _won(jobs, flow.children.first_now([job.key for job in jobs], ms))


def _first_of(jobs: Sequence[object], timeout: Seconds | None) -> tuple[Any, int | None]:
    flow = _flow_of(jobs, "first")
    if flow is None:
        raise UsageError("first() takes at least one job, as in first(pack.run(7), timeout=60)")
    return flow, None if timeout is None else round(seconds(timeout, "timeout of first") * 1000)


def _won(jobs: Sequence[ChildJob[R]], found: tuple[int, Any] | None) -> tuple[int, R] | None:
    return None if found is None else (found[0], jobs[found[0]]._value(found[1]))  # pyright: ignore[reportPrivateUsage]


def _flow_of(jobs: Sequence[object], what: str = "gather") -> Any:
    for job in jobs:
        if not isinstance(job, ChildJob):
            raise UsageError(
                f"{what}() takes jobs that this workflow has started, as in {what}(pack.run(7)), not {job!r}"
            )
    return cast("ChildJob[Any]", jobs[0])._flow if jobs else None  # pyright: ignore[reportPrivateUsage]


def check_child_name(name: object) -> str:
    """Return the name of a job in its workflow. Raises UsageError if it is not valid."""
    text = check_text(name, "the name of a job of a workflow")
    if not 0 < len(text.encode()) <= MAX_NAME:
        raise UsageError(f"the name of a job of a workflow must have 1 to {MAX_NAME} bytes, not {len(text.encode()):,}")
    if _AGAIN.search(text):
        raise UsageError(
            f"the name of a job of a workflow must not end in ' ~' and a number, which marks what runs again: {text!r}"
        )
    if text.startswith("job "):  # the wait for the job "7" is "job 7"
        raise UsageError(
            f"the name of a job of a workflow must not begin with 'job ', as that of the wait for a job does: {text!r}"
        )
    return text


def _short(key: str) -> str:
    if len(key.encode()) <= 190 and not any(ord(char) < 32 or ord(char) == 127 for char in key):
        return key
    return f"{key.partition(' ')[0][:120]} {sha256(key.encode()).hexdigest()[:32]}"
