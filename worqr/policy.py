"""Decide what happens to a task whose run raised: a retry, and when, or the dead-letter queue. Pure.

A handler raises `Retry`, `Snooze`, `RateLimited`, `Failure` and `Undecodable` on purpose. A run in a process ends with
`ChildError` or `Stalled`. A `RetryPolicy` is what a handler or a dispatch gives; a `Policy` is resolved for one run;
`decide_retry` makes the decision.

The policy of a dispatch travels in the job's record, field by field. Exception types travel as names, and are compared with the
names of the raised error's classes. So a record cannot make a worker import a module.
"""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, cast
from urllib.parse import quote, unquote

from worqr.errors import JobCancelled, JobFailed, UsageError, WorqrError
from worqr.foreign import RATE_LIMITED, RETRY, RETRY_POLICY, explained_class
from worqr.records import RemoteError
from worqr.tracebacks import bases_of, is_a, leaves_of, one_line
from worqr.validation import (
    KEEP_FAILED,
    MAX_FAILURES,
    MAX_STALLS,
    Seconds,
    check_count,
    is_coroutine_function,
    name_of,
    qualname_of,
    seconds,
    to_ms,
)

MAX_TIMEOUTS: Final = 3
UNLIMITED: Final = 999_999_999_999_999
"""A count that stands for no limit in records, in scripts and in a `Policy`: the largest one that a record can have."""
NO_TRIES: Final = 0
"""The `max_failures` of a step without a retry policy: the error of its try is that of the run."""
MIN_BACKOFF: Final = 2.0
MAX_BACKOFF: Final = 300.0
MOST_POLICY_DIGITS: Final = 15
"""Digits of a number in a job's record, as `dispatch_jobs` accepts it."""

_IN_NAMES: Final = re.compile(r"[%\s]+")
"""What a name must not have in a list of names with spaces between them."""
_OLD_NAMES: Final = re.compile(r"worqr\.(?:errors|policy)\.(?=\w+$)")
"""The beginning of names of worqr's public errors in records of earlier versions."""


def _check_message(error: BaseException, message: object, remedy: str) -> None:
    if not is_a(message, str):
        kind, given = qualname_of(type(error)), qualname_of(type(message))
        raise UsageError(f"the message of {kind} is a text, not {given}: write {remedy}")


@explained_class(RETRY)
class Retry(Exception):
    """Raise it in a handler to run the task again, later. It is not a `WorqrError`, so ``except WorqrError`` does not catch it.

    A given time is used exactly; the backoff does not change it. After ``raise Retry(...) from error``, records have the type,
    the message and the traceback of `error`.

    Args:
        message: Why, for the log and for the record of the failure.
        delay: Seconds until the next run, or a timedelta. None: the backoff of the retry policy; 0: now, at the end of the
            queue.
        run_at: A timezone-aware datetime, instead of `delay`.
        counted: False: do not count a failure, because the task is not ready yet. It may then run again any number of times.

    Attributes:
        delay: The delay in seconds; None if none was given.
        run_at_ms: The time in milliseconds since 1970; None if none was given.
        counted: True if it counts as a failure.

    Raises:
        UsageError: Both times are given, the delay is negative, the datetime has no timezone, or the message is not a str.
    """

    __module__ = "worqr"

    def __init__(
        self, message: str = "", *, delay: Seconds | None = None, run_at: datetime | None = None, counted: bool = True
    ) -> None:
        if is_a(message, int) or is_a(message, float) or is_a(message, timedelta):
            _check_message(self, message, f"{qualname_of(type(self))}(delay={message!r})")
        _check_message(self, message, f"{qualname_of(type(self))}(str(...))")
        super().__init__(message)
        self.delay: float | None = None if delay is None else seconds(delay, "delay of Retry")
        self.run_at_ms: int | None = None if run_at is None else to_ms(run_at, "run_at of Retry")
        if delay is not None and run_at is not None:
            raise UsageError("Retry takes a delay or a run_at, not both")
        self.counted: bool = counted


class Failure(Exception):
    """Raise it in a handler if the task can never succeed. The task moves to the dead-letter queue (``queue.failed``) at once.

    Args:
        message: Why, for people.

    Raises:
        UsageError: The message is not a str. In a handler, it is final too.
    """

    __module__ = "worqr"

    def __init__(self, message: str = "") -> None:
        try:
            _check_message(self, message, f"{qualname_of(type(self))}(str(...))")
        except UsageError as error:
            raise _FinalUsageError(str(error)) from None
        super().__init__(message)


class _FinalUsageError(UsageError, Failure):
    """A `UsageError` of which worqr knows that another run would raise it again. People see it as a `UsageError`."""

    __module__ = "worqr"
    __qualname__ = "UsageError"


class Suspended(BaseException):
    """Ends a run that waits. It is no `Exception`, so ``except Exception`` does not catch it. Do not catch it.

    A durable call raises it in a handler in a thread or a process, and in each part of a run that is being suspended.
    """

    __module__ = "worqr"


class Snooze(BaseException):
    """Raise it in a handler to run the task again later, because it is not ready: ``raise worqr.Snooze(3600)``.

    It is no failure: it is not counted, and no record, log or hook shows an error. It is no `Exception`, so the
    ``except Exception`` of an application does not catch it. A workflow has `worqr.sleep`, which goes on where it was.

    Args:
        until: Seconds until the next run, a timedelta, or a timezone-aware datetime.
        message: What the task waits for, for people.

    Attributes:
        delay: The delay in seconds; None if a time was given.
        run_at_ms: The time in milliseconds since 1970; None if a delay was given.

    Raises:
        UsageError: `until` is not valid, or the message is not a str.
    """

    __module__ = "worqr"

    def __init__(self, until: Seconds | datetime, message: str = "") -> None:
        _check_message(self, message, f"{qualname_of(type(self))}(until, str(...))")
        super().__init__(message)
        is_time = isinstance(until, datetime)
        self.delay: float | None = None if is_time else seconds(until, "until of Snooze")
        self.run_at_ms: int | None = to_ms(until, "until of Snooze") if is_time else None


class StepFailed(WorqrError, Failure):
    """A step with a retry policy has failed for good. Each run of the job raises it at the same place, so a handler can catch it
    and compensate. Uncaught, it moves the job to the dead-letter queue.

    Attributes:
        step: The name of the step.
        error: The error of its last try.
    """

    __module__ = "worqr"

    def __init__(self, message: str, step: str, error: RemoteError) -> None:
        WorqrError.__init__(self, message)
        self.step: str = step
        self.error: RemoteError = error


class LifetimeOver(Failure):
    """The `lifetime` of a workflow is over. Each wait raises it from then on. Uncaught, it moves the job to the dead-letter
    queue.
    """

    __module__ = "worqr"


class ChildFailed(JobFailed, Failure):
    """A job that a workflow has started has failed for good. People see it as a `JobFailed`. Uncaught, it is final, because each
    run of the workflow raises it.
    """

    __module__ = "worqr"
    __qualname__ = "JobFailed"

    def __init__(self, message: str, error: RemoteError) -> None:
        JobFailed.__init__(self, message, error)


class ChildCancelled(JobCancelled, Failure):
    """A job that a workflow has started was cancelled. People see it as a `JobCancelled`."""

    __module__ = "worqr"
    __qualname__ = "JobCancelled"

    def __init__(self, message: str, reason: str = "") -> None:
        JobCancelled.__init__(self, message, reason)


@explained_class(RATE_LIMITED)
class RateLimited(Retry):
    """Raise it in a handler if a service refuses calls for some time, as with HTTP 429 and ``Retry-After: 30``.

    The queue is paused for that time in the whole mesh, unless it is paused for longer; of several shards, only the shard of the
    task is paused, and of a queue with lanes, only the lane of the task. The task goes back to the front, and no failure is
    counted. In an `ExceptionGroup` of only `Retry`, `Failure` and `RateLimited`, a `RateLimited` decides unless there is a
    `Failure`.

    Args:
        retry_after: Seconds, more than 0, or a timedelta.
        message: Why, for people; the reason of the pause.

    Attributes:
        retry_after: The time in seconds.

    Raises:
        UsageError: `retry_after` is not valid, or the message is not a str.
    """

    __module__ = "worqr"

    def __init__(self, retry_after: Seconds, message: str = "") -> None:
        self.retry_after: float = seconds(retry_after, "retry_after of RateLimited", positive=True)
        _check_message(self, message, f"{qualname_of(type(self))}(retry_after, str(...))")
        super().__init__(message or f"rate limited for {self.retry_after:g} s", counted=False)


class Undecodable(Exception):
    """Raise it in a handler of a raw queue if the payload cannot be decoded.

    The task moves to ``queue.undecodable``, unchanged.
    """

    __module__ = "worqr"


class ChildError(Exception):
    """The error that a function raised in another process, as text.

    Attributes:
        remote: The error, with its traceback in that process.
        names: The names of all its classes, which `retry_on` and `fail_on` are compared with.
        leaves: The same for each error of a group; of another error, `names` alone.
    """

    __module__ = "worqr"

    def __init__(self, remote: RemoteError, names: Iterable[str] = (), leaves: Iterable[Collection[str]] = ()) -> None:
        super().__init__(f"{remote.type}: {remote.message}")
        self.remote: RemoteError = remote
        self.leaves: tuple[frozenset[str], ...] = tuple(frozenset(each) for each in leaves)
        self.names: frozenset[str] = frozenset(names).union(*self.leaves) or frozenset((remote.type,))
        self.leaves = self.leaves or (self.names,)


class Stalled(ChildError):
    """The process that ran a task died: killed from outside, crashed, out of memory. It counts as a stall, like the death of a
    worker.
    """


Backoff = Callable[[int, str], Seconds]
"""Returns the seconds until the next run, from the number of runs that failed, and the type of the last error."""


def _check_limit(value: object, what: str) -> None:
    if value is not None and value != math.inf:
        check_count(value, what)


def _types(value: object, what: str) -> tuple[type[BaseException], ...] | None:
    if value is None:
        return None
    kinds = cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(f"{what} must be a tuple of exception types, not {value!r}")
    return cast("tuple[type[BaseException], ...]", kinds)


@explained_class(RETRY_POLICY)
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a task may fail, and how long to wait in between. None: the handler's setting for a job, else the default.

    Raises:
        UsageError: A count is less than 1, a time is negative, `min_backoff` is more than `max_backoff`, or `backoff` is no
            function of two arguments.
    """

    max_failures: int | float | None = None
    """The number of runs that may fail, at least 1; after the last, the task moves to the dead-letter queue. ``math.inf``: no
    limit. Default: 10.
    """
    max_stalls: int | float | None = None
    """The number of workers that may die while they run the task, at least 1. ``math.inf``: no limit. Default: 3."""
    max_timeouts: int | float | None = None
    """The number of runs that may take too long, at least 1. ``math.inf``: no limit. Default: 3."""
    retry_for: Seconds | None = None
    """Seconds, more than 0, or a timedelta: no retry begins later than this after the beginning of the first run that failed or
    took too long. The task moves to the dead-letter queue instead. Default: no limit.
    """
    backoff: Backoff | None = None
    """A plain function that returns the seconds, or a timedelta, until the next run: ``backoff(failures, error)``. `failures` is
    1 after the first run that failed, and `error` is the type of its error as in records, such as ``"httpx.ConnectError"``. Of
    timeouts and crashes, it gets their number, and ``"Timeout"`` or ``"Stalled"``. It runs in the event loop of the worker, so it
    must not block. It is for handlers and steps, not for a dispatch. If it raises, or returns something else, that is logged and
    the other settings decide. Default: none.
    """
    min_backoff: Seconds | None = None
    """Seconds, at least 0, before the second run; doubled with each failure. Default: 2."""
    max_backoff: Seconds | None = None
    """The longest backoff in seconds. Default: 300, or `min_backoff` if that is longer."""
    jitter: bool | None = None
    """True: wait a random time between half the backoff and all of it, so that tasks that failed together are not retried
    together. Default: True.
    """
    retry_on: tuple[type[BaseException], ...] | None = None
    """The exception types, with their subclasses, to retry after. ``()``: none, each error is final. Default: all."""
    fail_on: tuple[type[BaseException], ...] | None = None
    """The exception types, with their subclasses, that are final. They take precedence over `retry_on`. Default: none."""
    reset_on_progress: bool | None = None
    """True: count failures, timeouts and crashes from zero when a run gets further than those before it: it stores a step, or
    saves other bytes, after it has asked for all that they had stored. A workflow does this always. Default: False.
    """

    def __post_init__(self) -> None:
        for name in ("max_failures", "max_stalls", "max_timeouts"):
            _check_limit(getattr(self, name), name)
        for name in ("min_backoff", "max_backoff"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else seconds(value, name))
        if self.retry_for is not None:
            object.__setattr__(self, "retry_for", seconds(self.retry_for, "retry_for", positive=True))
        for name in ("jitter", "reset_on_progress"):
            if (value := getattr(self, name)) is not None and not isinstance(value, bool):
                raise UsageError(f"{name} must be True, False or None, not {value!r}")
        _check_backoff(self.backoff)
        for name in ("retry_on", "fail_on"):
            object.__setattr__(self, name, _types(getattr(self, name), name))
        if self.min_backoff is not None and self.max_backoff is not None and self.min_backoff > self.max_backoff:  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
            raise UsageError(f"min_backoff {self.min_backoff!r} is over max_backoff {self.max_backoff!r}")


def _check_backoff(backoff: object) -> None:
    if backoff is None:
        return
    if not callable(backoff):
        raise UsageError(
            f"backoff must be a function of the number of failures and the type of the error, not {backoff!r}: write "
            "backoff=lambda failures, error: 60 * failures, or set min_backoff and max_backoff"
        )
    if is_coroutine_function(backoff):
        raise UsageError(f"backoff must be a plain function, and {backoff!r} is async: it must not wait for anything")
    try:
        inspect.signature(backoff).bind(1, "")
    except TypeError as error:
        raise UsageError(
            f"backoff is called with the number of failures and the type of the error ({error}): declare it as "
            "def backoff(failures: int, error: str) -> float"
        ) from None
    except ValueError:
        pass  # some builtins have no signature


_TIMES: Final = frozenset({"min_backoff", "max_backoff", "retry_for", "timeout", "result_ttl"})
"""Settings that are seconds here, and milliseconds in records."""
_FLAGS: Final = frozenset({"jitter", "reset_on_progress"})


def retry_fields(retry: RetryPolicy) -> dict[str, str]:
    """Return the settings that are not None as a job's record has them: milliseconds, and exception types by name.

    Raises:
        UsageError: one of them is a function, which no record can have.
    """
    if retry.backoff is not None:
        raise UsageError(
            "backoff= is a function, which runs in the worker and does not travel with a job: set it on the function, as in "
            "@mesh.task(retry=worqr.RetryPolicy(backoff=...)), or give this call min_backoff= and max_backoff="
        )
    found: dict[str, str] = {}
    for name in RECORDED:
        value: Any = getattr(retry, name)
        if value is None:
            continue
        if name in _TIMES:
            value = max(round(value * 1000), int(name == "retry_for"))
        elif name in _FLAGS:
            value = int(value)
        elif name.endswith("_on"):
            value = _joined(name_of(kind) for kind in value)
        elif value == math.inf:
            value = UNLIMITED
        found[name] = str(value)
    return found


def _joined(names: Iterable[str]) -> str:
    """Return names as a record has them: with spaces between them. Those inside of a name are percent-encoded, as is ``%``."""
    return " ".join(_IN_NAMES.sub(lambda found: quote(found[0], safe=""), name) for name in names)


def _split(names: str) -> frozenset[str]:
    """Return the names of a record. Another program may have written them."""
    return frozenset(_OLD_NAMES.sub("worqr.", unquote(name)) for name in names.split())


RECORDED: Final = tuple(each.name for each in fields(RetryPolicy) if each.name != "backoff")
"""The settings of a `RetryPolicy` that the record of a job can have."""
POLICY_FIELDS: Final = frozenset({*RECORDED, "timeout", "result_ttl"})
"""The record fields that a dispatch may set; the handler's options supply the others."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decide how one run ends. A job's own fields override the handler's, which override the defaults.

    Durations are in seconds.
    """

    max_failures: int = MAX_FAILURES
    max_stalls: int = MAX_STALLS
    max_timeouts: int = MAX_TIMEOUTS
    min_backoff: float = MIN_BACKOFF
    max_backoff: float = MAX_BACKOFF
    jitter: bool = True
    retry_on: frozenset[str] | None = None
    fail_on: frozenset[str] = frozenset()
    timeout: float | None = None
    result_ttl: float = 0.0
    keep_failed: int = KEEP_FAILED
    on_failure: bool = False
    workflow: bool = False
    """The handler may wait durably."""
    schedulable: bool = False
    """People may make schedules of the function."""
    retry_for: float | None = None
    reset_on_progress: bool = False
    own_backoff: Backoff | None = None
    """The function of the application."""

    def with_retry(self, retry: RetryPolicy) -> Policy:
        """Return this policy, with the settings of a handler or a step in place of its own."""
        found = self.with_overrides(retry_fields(replace(retry, backoff=None)))
        return found if retry.backoff is None else replace(found, own_backoff=retry.backoff)

    def counts_anew(self) -> bool:
        """Return True if the counters of a job begin anew when a run gets further than those before it."""
        return self.workflow or self.reset_on_progress

    def with_overrides(self, record: Mapping[str, str]) -> Policy:
        """Return this policy, with the fields of a job's record in place of its own.

        Raises:
            ValueError: a number is none that a dispatch could have stored.
        """
        own: dict[str, Any] = {}
        for name in POLICY_FIELDS & record.keys():
            value = record[name]
            if name.endswith("_on"):
                own[name] = _split(value)
            elif not value.isdecimal() or len(value) > MOST_POLICY_DIGITS:
                raise ValueError(f"its {name} is no whole number, but {value[:40]!r}")
            elif name in _TIMES:
                own[name] = int(value) / 1000
            else:
                own[name] = int(value) == 1 if name in _FLAGS else int(value)
        if "min_backoff" in own or "max_backoff" in own:
            own["own_backoff"] = None
        if "min_backoff" in own:
            own["max_backoff"] = max(own["min_backoff"], own.get("max_backoff", self.max_backoff))
        return replace(self, **own) if own else self

    def backoff(self, times: int) -> float:
        """Return the seconds to wait, without jitter, after a failed run that `times` failed runs preceded."""
        return min(self.max_backoff, self.min_backoff * 2.0 ** min(times, 60))

    def delay(self, times: int) -> float:
        """Return the `backoff`, with jitter if the policy has it."""
        longest = self.backoff(times)
        return random.uniform(longest / 2, longest) if self.jitter else longest

    def delay_after(self, times: int, error: str, report: Callable[[str], object]) -> float:
        """Return the seconds to wait after a run that failed with an error of this type, as `delay` does. If the application has
        a function for it, that decides; `report` is called with what is wrong with it.
        """
        if self.own_backoff is None:
            return self.delay(times)
        try:
            return seconds(self.own_backoff(times + 1, error), "its result")
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            report(one_line(raised))
        return self.delay(times)

    def is_retryable(self, error: BaseException) -> bool:
        """Return True if the policy allows another try after this error.

        A group is final if one of its errors is final. It can be retried if all of its errors can. A `Retry` always can.
        """
        if not self.fail_on and self.retry_on is None:
            return True
        leaves = class_names(error)
        if any(names & self.fail_on for names in leaves):
            return False
        return self.retry_on is None or all(names & self.retry_on for names in leaves)


def class_names(error: BaseException) -> list[frozenset[str]]:
    """Return the names of an error's classes. For a group, return those of each error in it except `Retry`, and of the groups
    around it.
    """
    found: dict[frozenset[str], None] = {}
    for leaf, around in leaves_of(error):
        groups = [name_of(kind) for group in around for kind in bases_of(group)]
        if is_a(leaf, ChildError):
            found |= dict.fromkeys(names.union(groups) for names in leaf.leaves)
        elif not (around and (is_a(leaf, Retry) or is_a(leaf, Snooze))):
            found[frozenset((*groups, *map(name_of, bases_of(type(leaf)))))] = None
    return list(found)


SCHEDULABLE: Final = "schedulable"
"""The name under which a worker shows that people may make schedules of the function."""


def shown_fields(policy: Policy) -> dict[str, str]:
    """Return the settings that only the worker itself needs, named and written as in a job's record. People see them."""
    found = {name: str(getattr(policy, name)) for name in ("max_failures", "max_timeouts")}
    for name in ("min_backoff", "max_backoff", "retry_for", "timeout"):
        if (value := getattr(policy, name)) is not None:
            found[name] = str(round(value * 1000))
    found["jitter"] = str(int(policy.jitter))
    if policy.schedulable:
        found[SCHEDULABLE] = "1"
    if policy.own_backoff is not None:
        found["backoff"] = str(getattr(policy.own_backoff, "__qualname__", "function"))
    for name in ("retry_on", "fail_on"):
        if names := getattr(policy, name):
            found[name] = _joined(sorted(names))
    return found


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The decision about a run that raised `error`.

    Attributes:
        kind: ``fail`` and ``undecodable`` move the task to the dead-letter queue.
        delay: of a retry, seconds; `run_at_ms` takes precedence.
        counted: False: the retry counts as no failure.
        stalled: True: the retry counts as a stall instead of a failure.
        pause: seconds for which the queue is paused; the task goes back to the front. None: it is not paused.
        backs_off: True: the policy has decided about the delay, not the error.
        last: True: there is no retry, because it would begin later than `retry_for` allows.
    """

    kind: Literal["retry", "fail", "undecodable"]
    error: BaseException
    delay: float = 0.0
    run_at_ms: int | None = None
    counted: bool = True
    stalled: bool = False
    pause: float | None = None
    backs_off: bool = field(default=False, compare=False)
    last: bool = False


def decide_retry(error: BaseException, policy: Policy, failures: int, stalls: int = 0) -> RetryDecision:
    """Decide the next step for a task whose run raised `error`.

    A group that contains a `Stalled` counts as that, else one with a `Failure` as the first `Failure`. A group of only `Retry`,
    `Snooze` and `RateLimited` counts as the longest `RateLimited`; without one, as the `Retry` or `Snooze` that is due last. A
    group of only `Undecodable` counts as the first one. Any other group counts as one error (see `Policy.is_retryable`).

    Args:
        error: what the run raised.
        policy: the policy of the run.
        failures: the number of earlier runs that failed.
        stalls: the number of earlier runs whose worker or process died.
    """
    error = _deciding_error(error, policy, failures)
    if is_a(error, Failure):
        return RetryDecision("fail", error)
    if is_a(error, Undecodable):
        return RetryDecision("undecodable", error)
    if is_a(error, RateLimited):
        return RetryDecision("retry", error, counted=False, pause=retry_after_of(error) or policy.delay(failures))
    if is_a(error, Retry) or is_a(error, Snooze):
        delay, run_at_ms, counted = times_of(error)
        backs_off, delay = delay is None and run_at_ms is None, policy.delay(failures) if delay is None else delay
        return RetryDecision("retry", error, delay, run_at_ms, counted, backs_off=backs_off)
    if is_a(error, Stalled):
        return RetryDecision("retry", error, policy.delay(stalls), stalled=True, backs_off=True)
    if policy.is_retryable(error):
        return RetryDecision("retry", error, policy.delay(failures), backs_off=True)
    return RetryDecision("fail", error)


def _deciding_error(error: BaseException, policy: Policy, failures: int) -> BaseException:
    """Return the error that decides: the one that a group counts as, else `error` itself."""
    if not is_a(error, BaseExceptionGroup):
        return error
    inner = [leaf for leaf, _ in leaves_of(error)]
    for kind in (Stalled, Failure):  # middleware may have wrapped a `Stalled` in a group with errors of its own
        if (first := next((each for each in inner if is_a(each, kind)), None)) is not None:
            return first
    if inner and all(is_a(each, Undecodable) for each in inner):
        return inner[0]
    retries = [each for each in inner if is_a(each, Retry) or is_a(each, Snooze)]
    if not inner or len(retries) < len(inner):
        return error
    limited = max((each for each in retries if is_a(each, RateLimited)), key=retry_after_of, default=None)
    return limited or max(retries, key=lambda retry: _due(retry, policy, failures))


def retry_after_of(error: RateLimited) -> float:
    """Return the time of a `RateLimited`; 0 if it cannot be read, because a subclass has no valid one."""
    try:
        return seconds(error.retry_after, "retry_after", positive=True)
    except BaseException:
        return 0.0


def times_of(error: Retry | Snooze) -> tuple[float | None, int | None, bool]:
    """Return the delay, the time and `counted` of a `Retry` or a `Snooze`; the defaults if a subclass has no valid ones."""
    try:
        delay = None if error.delay is None else seconds(error.delay, "delay")
        run_at_ms = None if error.run_at_ms is None else max(0, int(error.run_at_ms))
        counted = is_a(error, Retry) and error.counted is not False
    except BaseException:
        return None, None, is_a(error, Retry)
    return delay, run_at_ms, counted


def _due(retry: Retry | Snooze, policy: Policy, failures: int) -> tuple[int, float]:
    """Return a sort key: larger is later. A `run_at` sorts after each delay, because comparing them takes the server's clock."""
    delay, run_at_ms, _ = times_of(retry)
    if run_at_ms is not None:
        return 1, run_at_ms
    return 0, policy.backoff(failures) if delay is None else delay
