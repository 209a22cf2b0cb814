"""The options of a handler, and their checks, for ``@mesh.task`` and ``peer.serve``.

Pure. `worqr.peer.options` has the options of a peer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Required, TypedDict, cast

from worqr.call_list import check_batch
from worqr.errors import UsageError
from worqr.foreign import hint_at_option
from worqr.job_options import Keep, check_choice, encode_tags
from worqr.keys import check_shards
from worqr.limits import MOST, Lanes, Limit, check_limits
from worqr.policy import Policy, RetryPolicy
from worqr.records import MOST_RECENT, Failed
from worqr.validation import KEEP_FAILED, Seconds, check_between, check_count, is_coroutine_function, seconds

RunsIn = Literal["loop", "thread", "process", "asyncio"]
"""Where a handler runs."""
RUNS_IN: Final = ("loop", "thread", "process", "asyncio")
AsyncRunsIn = Literal["loop", "asyncio"]
"""Where async handlers run."""


class HandlerOptions(TypedDict, total=False):
    """The options of a handler, for ``@mesh.task`` and ``peer.serve``."""

    timeout: Seconds | None
    """Seconds, more than 0, that a run may take; then it is cancelled. Timeouts are counted apart from failures. Default: None,
    no limit.
    """
    retry: RetryPolicy
    """How often and when to retry; what is not set keeps its default. A job's own `retry` overrides it. Default: 10 failed runs,
    then the task moves to the dead-letter queue.
    """
    keep_failed: int
    """The number of records that the queue's dead-letter queue keeps, at least 0. Default: 1000."""
    concurrency: int | None
    """The number of tasks of the queue that run at once in one peer, at least 1. Default: None, up to the concurrency of the
    peer.
    """
    limit: Limit | Collection[Limit]
    """How many tasks of the queue may run at once, or start in a period, in the whole mesh; at most four limits, and all of them
    hold. The worker that joined last decides. A limit with a name holds for all functions that have it. Default: none.
    """
    cost: int
    """How much of a limit with a name and a `unit` a run takes when it starts: an estimate, which ``worqr.current().cost(n)``
    replaces by what was used. 0 to 1,000,000. Default: 1.
    """
    lanes: Lanes
    """Lines of jobs within the queue that take turns, for instance one for each customer. The worker that joined last decides
    about their limits and weights. Default: none.
    """
    size: int
    """The number of units of the peer's concurrency that a run takes, at least 1. Default: 1."""
    priority: int
    """The weight of the queue while several queues want more than the free concurrency, at least 1. Each gets a proportional
    share. Ties go to the higher number. Default: 100.
    """
    on_failure: Callable[[Failed], object] | None
    """Called with one `Failed` for each task that moves to the dead-letter queue, at least once, as a job in the queue's failure
    queue. Default: None.
    """
    on_failure_retry: RetryPolicy
    """How often and when to retry the failure handler. After its last try, its job moves to the dead-letter queue of the failure
    queue. Default: up to 100 runs, 10 s to 15 minutes apart.
    """
    on_failure_timeout: Seconds | None
    """Seconds, more than 0, that a run of the failure handler may take. Default: None, no limit."""
    runs_in: RunsIn
    """Where the handler runs. "loop": on the peer's Trio loop. "asyncio": on the loop of the asyncio program that has called
    `join`, else on an asyncio loop in a thread of the peer. "thread": in a thread, for plain functions. "process": in a process,
    for plain functions that use the CPU; it is killed if the run is cancelled. Default: a thread for plain functions,
    ``Mesh(runs_in=...)`` for async functions.
    """
    result_ttl: Seconds | None
    """Seconds, at least 0, to keep the result of a job. Default: None, it is not kept."""
    recent: int
    """How many of the runs that ended last the queue keeps for a day, 0 to 1000, for ``queue.recent()``. Default: 0."""
    schedulable: bool
    """True: people may make schedules of it on the dashboard, with the right ``schedules``. Default: False."""
    max_length: int | None
    """An enqueue or dispatch raises `QueueFull` if this many tasks wait, at least 1. Only for ``@mesh.task``. Default: None, no
    limit.
    """
    keep: Keep | None
    """What stays of dispatched jobs after their end. Only for ``@mesh.task``. Default: None, nothing but a result."""
    tags: Callable[..., Collection[str]] | Collection[str]
    """The tags of each dispatched call: names, or a function that gets the arguments of a call and returns them. At most 8, with
    those of the dispatch. Only for ``@mesh.task``. Default: none.
    """
    shards: int
    """The number of lists that the queue consists of, as in ``mesh.queue(name, shards=...)``. Only for ``@mesh.task``. Default:
    1.
    """


class WorkflowOptions(HandlerOptions, total=False):
    """The options of ``@mesh.workflow``."""

    lifetime: Seconds | None
    """Seconds, more than 0, after the dispatch at which the waits of the workflow end: each raises `LifetimeOver`. Default: None,
    no limit.
    """


class ListHandlerOptions(HandlerOptions, total=False):
    """The options of a handler that takes a list, for ``@mesh.task`` and ``peer.serve_list``."""

    batch_size: Required[int]
    """The number of tasks that one run takes at most, 1 to 1000. Default: none; without it, a handler takes one task."""
    batch_wait: Seconds
    """Seconds, at least 0, to wait after the first task of a list until it has `batch_size`. Default: 0, a run takes what is
    there.
    """


PATIENT = Policy(max_failures=100, max_timeouts=100, min_backoff=10.0, max_backoff=900.0)
"""The policy of failure handlers, unless they have their own: a failure must not get lost because a mail server is down for a
day.
"""


@dataclass(frozen=True, slots=True)
class Handling:
    """`HandlerOptions`, checked.

    Attributes:
        failing: the policy of the failure handler's runs, if one was given.
        lane_of: returns the lane that a payload belongs into; None if it belongs into none.
    """

    policy: Policy
    failing: Policy | None = None
    concurrency: int | None = None
    batch_size: int | None = None
    batch_wait: float = 0.0
    limits: tuple[Limit, ...] = ()
    cost: int = 1
    lanes: Lanes | None = None
    size: int = 1
    priority: int = 100
    on_failure: Callable[[Failed], object] | None = None
    runs_in: RunsIn | None = None
    recent: int = 0
    schedulable: bool = False
    max_length: int | None = None
    shards: int = 1
    keep: Keep | None = None
    tags: Callable[..., Collection[str]] | Collection[str] = ()
    lane_of: Callable[[bytes], str | None] | None = None
    lifetime: float | None = None

    @property
    def shared(self) -> list[Limit]:
        """The limits with a name."""
        return [each for each in self.limits if each.name is not None]

    @property
    def own(self) -> list[Limit]:
        """The limits of the queue alone."""
        return [each for each in self.limits if each.name is None]

    def cost_of(self, limit: Limit) -> int:
        """Return how much of a limit with a name a run takes when it starts."""
        return self.cost if limit.unit else 1

    def check_shared(self, *, costs: bool) -> None:
        """Raise UsageError if the limits with a name are not possible. `costs`: a cost was given."""
        if self.shared and self.batch_size is not None:
            raise UsageError(
                f"the limit {self.shared[0].name!r} has a name, and a handler of lists takes several tasks at once: write "
                f"`async with mesh.limit(...)` in the handler"
            )
        if costs and not any(each.unit for each in self.shared):
            raise UsageError(
                "cost is for a limit with a name and a unit: write limit=worqr.Limit(rate=100_000, per=60, unit='tokens', "
                "name='openai')"
            )
        for each in self.shared:
            if each.rate is not None and self.cost_of(each) > each.rate:
                raise UsageError(
                    f"cost {self.cost:,} is above limit {each.name!r}, which allows {each}: no task could start"
                )

    def check_failing(self, name: str) -> None:
        """Raise UsageError if options of a failure handler were given, and `name` has none."""
        if self.failing is not None and self.on_failure is None:
            raise UsageError(
                f"on_failure_retry and on_failure_timeout are options of a failure handler, and {name!r} has none: give it "
                "one with on_failure=, or leave them out"
            )


_KNOWN: Final[Mapping[str, type]] = {
    "serve": HandlerOptions,
    "HandlerOptions": HandlerOptions,
    "workflow": WorkflowOptions,
}
"""The options of a handler that takes no list, by the name of the caller."""


def handling(where: str, options: Mapping[str, Any]) -> Handling:
    """Return `options`, checked.

    Args:
        where: the name of the caller, for errors.
        options: as `HandlerOptions`.

    Raises:
        UsageError: an option does not exist, or has an invalid value.
    """
    known = _KNOWN.get(where, ListHandlerOptions)
    refuse_unknown(where, options, tuple(known.__annotations__))
    found: dict[str, Any] = {
        _FIELDS.get(name, name): check(options[name], f"{name} of {where}")
        for name, check in _CHECKS.items()
        if name in options
    }
    found["batch_size"], found["batch_wait"] = check_batch(where, options)
    if (lanes := found.get("lanes")) is not None and lanes.by is not None and where not in {"task", "workflow"}:
        raise UsageError(
            f"{where}() takes lanes without `by`, because its tasks are bytes without parameters: dispatch each with its lane, "
            "as in queue.dispatch(task, lane='customer-7')"
        )
    policy = policy_for(
        options.get("retry"),
        timeout=options.get("timeout"),
        keep_failed=options.get("keep_failed", KEEP_FAILED),
        result_ttl=options.get("result_ttl"),
        on_failure=found.get("on_failure") is not None,
    )
    policy = replace(policy, workflow=where == "workflow", schedulable=bool(found.get("schedulable")))
    how = Handling(policy, _failing(options), **found)
    how.check_shared(costs="cost" in options)
    return how


OF_ONE_FUNCTION: Final = ("limit", "cost", "lanes", "runs_in", "shards")
"""The options that no default can give: each function has a limit, lanes and shards of its own."""


def check_defaults(defaults: HandlerOptions | None) -> HandlerOptions:
    """Return the default options of a mesh. Raises UsageError if one does not exist, or is not valid."""
    if defaults is None:
        return {}
    if not isinstance(defaults, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"defaults must be worqr.HandlerOptions(...), not {defaults!r}")
    for option in OF_ONE_FUNCTION:
        if option in defaults:
            instead = "write Mesh(runs_in=...)" if option == "runs_in" else f"write @mesh.task({option}=...)"
            raise UsageError(f"{option} is an option of one function, and no default: {instead}")
    handling("HandlerOptions", defaults).check_failing("defaults")
    return cast("HandlerOptions", dict(defaults))


def _count_or_none(value: object, what: str) -> int | None:
    return None if value is None else check_count(value, what)


def _check_flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} must be True or False, not {value!r}")
    return value


def _check_lanes(lanes: object, what: str) -> Lanes | None:
    if lanes is None or isinstance(lanes, Lanes):
        return lanes
    raise UsageError(f"{what} must be a worqr.Lanes, not {lanes!r}: write lanes=worqr.Lanes('customer')")


def _check_keep(value: object, what: str) -> Keep | None:
    if value is None or isinstance(value, Keep):
        return value
    raise UsageError(f"{what} must be a worqr.Keep, not {value!r}: write keep=worqr.Keep(jobs=10_000, days=7)")


def _check_tags(value: Any, what: str) -> Callable[..., Collection[str]] | Collection[str]:
    return (
        cast("Callable[..., Collection[str]]", value)
        if callable(value)
        else [*filter(None, encode_tags(value, what).split("\n"))]
    )


def _check_runs_in(value: object, _what: str) -> RunsIn | None:
    return None if value is None else cast("RunsIn", check_choice(value, "runs_in", RUNS_IN))


def _check_on_failure(handler: Any, _what: str) -> Callable[[Failed], object] | None:
    if handler is not None:
        check_failure_handler(handler)
    return cast("Callable[[Failed], object] | None", handler)


_FIELDS: Final = {"limit": "limits"}
"""Fields of `Handling` that have another name than their option."""
_CHECKS: Final[Mapping[str, Callable[[Any, str], object]]] = {
    "concurrency": _count_or_none,
    "limit": lambda value, what: check_limits(value, what, named=True),
    "cost": lambda value, _what: check_between(value, "cost", 0, MOST),
    "lanes": _check_lanes,
    "size": check_count,
    "priority": check_count,
    "on_failure": _check_on_failure,
    "runs_in": _check_runs_in,
    "recent": lambda value, _what: check_between(value, "recent", 0, MOST_RECENT),
    "schedulable": _check_flag,
    "max_length": _count_or_none,
    "shards": lambda value, _what: check_shards(value),
    "lifetime": lambda value, what: None if value is None else seconds(value, what, positive=True),
    "keep": _check_keep,
    "tags": _check_tags,
}
"""The options that become fields of `Handling`, with their checks, which get the value and its name for errors. The others make
the policies.
"""


def _failing(options: Mapping[str, Any]) -> Policy | None:
    """Return the policy of the failure handler's runs; None if no option sets one."""
    retry, timeout = options.get("on_failure_retry"), options.get("on_failure_timeout")
    if retry is None and timeout is None:
        return None
    policy = PATIENT if retry is None else PATIENT.with_retry(_check_retry(retry, "on_failure_retry"))
    return policy if timeout is None else replace(policy, timeout=seconds(timeout, "on_failure_timeout", positive=True))


def _check_retry(retry: object, what: str) -> RetryPolicy:
    """Return `retry` if it is a policy. Raises UsageError, which names `what`."""
    if not isinstance(retry, RetryPolicy):
        raise UsageError(
            f"{what} must be a worqr.RetryPolicy, not {retry!r}: write {what}=worqr.RetryPolicy(max_failures=3)"
        )
    return retry


def check_failure_handler(handler: object) -> None:
    """Raise UsageError for an object that cannot be called with a `Failed`."""
    if not callable(handler):
        raise UsageError(f"on_failure must be a handler that can be called with a worqr.Failed, not {handler!r}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"the failure handler {handler!r} is called with one argument, a worqr.Failed ({error}): declare it as "
            "def on_failure(failed: worqr.Failed)"
        ) from None


def policy_for(
    retry: RetryPolicy | None = None,
    *,
    timeout: Seconds | None = None,
    keep_failed: int = KEEP_FAILED,
    result_ttl: Seconds | None = None,
    on_failure: bool = False,
) -> Policy:
    """Return the checked policy of a handler; missing options have their defaults."""
    policy = Policy() if retry is None else Policy().with_retry(_check_retry(retry, "retry"))
    return replace(
        policy,
        timeout=None if timeout is None else seconds(timeout, "timeout", positive=True),
        keep_failed=check_count(keep_failed, "keep_failed", least=0),
        result_ttl=0.0 if result_ttl is None else seconds(result_ttl, "result_ttl"),
        on_failure=on_failure,
    )


def refuse_unknown(where: str, options: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise UsageError for the first of `options` that does not exist."""
    for name in options:
        if name not in known:
            hint = hint_at_option(name, known, f"it takes {', '.join(known)}")
            raise UsageError(f"{where}() has no option {name!r}; {hint}")


# What a handler is, and where it can run: async or plain, a generator, importable by another process.
#
# How another process imports a function is in `worqr.peer.executors.processes.protocol`.


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
    return is_coroutine_function(handler) or is_coroutine_function(getattr(handler, "__call__", None))  # noqa: B004


def check_runs_in_process(function: object, what: str = "the function") -> None:
    """Check `function` at its declaration, when its module does not have its name yet.

    Raises:
        UsageError: it is async or a generator, or another process could never import it.
    """
    inner: Any = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, partial):
        inner = inner.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    kinds: list[Any] = [inner, getattr(inner, "__call__", None)]  # noqa: B004
    if any(is_coroutine_function(kind) for kind in kinds):
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
