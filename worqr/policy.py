"""Decide what happens to a task whose run raised: a retry, and when, or the dead-letter queue. Pure.

A handler raises `Retry`, `RateLimited`, `Failure` and `Broken` on purpose. A run in a process ends with `ChildError` or
`Stalled`. A `RetryPolicy` is what a handler or a dispatch gives; a `Policy` is resolved for one run; `decide_retry` makes the
decision.

The policy of a dispatch travels in the job's record, field by field. Exception types travel as names, and are compared with the
names of the raised error's classes. So a record cannot make a worker import a module.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final, Literal, cast

from worqr.errors import UsageError
from worqr.records import RemoteError
from worqr.validation import KEEP_FAILED, MAX_FAILURES, MAX_STALLS, Seconds, check_count, name_of, seconds, to_ms

MAX_TIMEOUTS: Final = 3
MIN_BACKOFF: Final = 2.0
MAX_BACKOFF: Final = 300.0
MOST_POLICY_DIGITS: Final = 15
"""Digits of a number in a job's record, as `dispatch_jobs` accepts it."""


class Retry(Exception):
    """Raise it in a handler to run the task again, later. It is not a `WorqrError`, so ``except WorqrError`` does not catch it.

    A given time is used exactly; the backoff does not change it.

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
        UsageError: Both times are given, the delay is negative, or the datetime has no timezone.
    """

    def __init__(
        self, message: str = "", *, delay: Seconds | None = None, run_at: datetime | None = None, counted: bool = True
    ) -> None:
        super().__init__(message)
        self.delay: float | None = None if delay is None else seconds(delay, "delay of Retry")
        self.run_at_ms: int | None = None if run_at is None else to_ms(run_at, "run_at of Retry")
        if delay is not None and run_at is not None:
            raise UsageError("Retry takes a delay or a run_at, not both")
        self.counted: bool = counted


class Failure(Exception):
    """Raise it in a handler if the task can never succeed. The task moves to the dead-letter queue (``queue.failed``) at once."""


class RateLimited(Retry):
    """Raise it in a handler if a service refuses calls for some time, as with HTTP 429 and ``Retry-After: 30``.

    The queue is paused for that time in the whole mesh, unless it is paused for longer; of several shards, only the shard of the
    task is paused. The task goes back to the front, and no failure is counted. In an `ExceptionGroup` of only `Retry`, `Failure`
    and `RateLimited`, a `RateLimited` decides unless there is a `Failure`.

    Args:
        retry_after: Seconds, more than 0, or a timedelta.
        message: Why, for people; the reason of the pause.

    Attributes:
        retry_after: The time in seconds.

    Raises:
        UsageError: `retry_after` is not valid.
    """

    def __init__(self, retry_after: Seconds, message: str = "") -> None:
        self.retry_after: float = seconds(retry_after, "retry_after of RateLimited", positive=True)
        super().__init__(message or f"rate limited for {self.retry_after:g} s", counted=False)


class Broken(Exception):
    """Raise it in a handler of a raw queue if the payload cannot be decoded. The task moves to ``queue.broken``, unchanged."""


class ChildError(Exception):
    """The error that a function raised in another process, as text.

    Attributes:
        remote: The error, with its traceback in that process.
        names: The names of all its classes, which `retry_on` and `fail_on` are compared with.
    """

    def __init__(self, remote: RemoteError, names: Iterable[str] = ()) -> None:
        super().__init__(f"{remote.type}: {remote.message}")
        self.remote: RemoteError = remote
        self.names: frozenset[str] = frozenset(names) or frozenset((remote.type,))
        self.__worqr_remote__: RemoteError = remote


class Stalled(ChildError):
    """The process that ran a task died: killed from outside, crashed, out of memory. It counts as a stall, like the death of a
    worker.
    """


def _limit(value: object, what: str) -> int | None:
    return None if value is None else check_count(value, what)


def _types(value: object, what: str) -> tuple[type[BaseException], ...] | None:
    if value is None:
        return None
    kinds = cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(f"{what} must be a tuple of exception types, not {value!r}")
    return cast("tuple[type[BaseException], ...]", kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a task may fail, and how long to wait in between. None: the handler's setting for a job, else the default.

    Raises:
        UsageError: A count is less than 1, a time is negative, or `min_backoff` is more than `max_backoff`.
    """

    max_failures: int | None = None
    """The number of runs that may fail, at least 1; after the last, the task moves to the dead-letter queue. Default: 10."""
    max_stalls: int | None = None
    """The number of workers that may die while they run the task, at least 1. Default: 3."""
    max_timeouts: int | None = None
    """The number of runs that may take too long, at least 1. Default: 3."""
    min_backoff: Seconds | None = None
    """Seconds, at least 0, before the second run; doubled with each failure. Default: 2."""
    max_backoff: Seconds | None = None
    """The longest backoff in seconds. Default: 300."""
    jitter: bool | None = None
    """True: wait a random time between half the backoff and all of it, so that tasks that failed together are not retried
    together. Default: True.
    """
    retry_on: tuple[type[BaseException], ...] | None = None
    """The exception types, with their subclasses, to retry after. ``()``: none, each error is final. Default: all."""
    fail_on: tuple[type[BaseException], ...] | None = None
    """The exception types, with their subclasses, that are final. They take precedence over `retry_on`. Default: none."""

    def __post_init__(self) -> None:
        for name in ("max_failures", "max_stalls", "max_timeouts"):
            _limit(getattr(self, name), name)
        for name in ("min_backoff", "max_backoff"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else seconds(value, name))
        if self.jitter is not None and not isinstance(self.jitter, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"jitter must be True, False or None, not {self.jitter!r}")
        for name in ("retry_on", "fail_on"):
            object.__setattr__(self, name, _types(getattr(self, name), name))
        if self.min_backoff is not None and self.max_backoff is not None and self.min_backoff > self.max_backoff:  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
            raise UsageError(f"min_backoff {self.min_backoff!r} is over max_backoff {self.max_backoff!r}")


def retry_fields(retry: RetryPolicy) -> dict[str, str]:
    """Return the settings that are not None as a job's record has them: milliseconds, and exception types by name."""
    found: dict[str, str] = {}
    for each in fields(retry):
        value: Any = getattr(retry, each.name)
        if value is None:
            continue
        if each.name.endswith("backoff"):
            value = round(value * 1000)
        elif each.name == "jitter":
            value = int(value)
        elif each.name.endswith("_on"):
            value = " ".join(name_of(kind) for kind in value)
        found[each.name] = str(value)
    return found


POLICY_FIELDS: Final = frozenset({*(each.name for each in fields(RetryPolicy)), "timeout", "result_ttl"})
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

    def with_overrides(self, record: Mapping[str, str]) -> Policy:
        """Return this policy, with the fields of a job's record in place of its own.

        Raises:
            ValueError: a number is none that a dispatch could have stored.
        """
        own: dict[str, Any] = {}
        for name in POLICY_FIELDS & record.keys():
            value = record[name]
            if name.endswith("_on"):
                own[name] = frozenset(value.split())
            elif not value.isdecimal() or len(value) > MOST_POLICY_DIGITS:
                raise ValueError(f"its {name} is no whole number, but {value[:40]!r}")
            elif name in {"min_backoff", "max_backoff", "timeout", "result_ttl"}:
                own[name] = int(value) / 1000
            else:
                own[name] = int(value)
        if "jitter" in own:
            own["jitter"] = own["jitter"] == 1
        return replace(self, **own) if own else self

    def backoff(self, times: int) -> float:
        """Return the seconds to wait, without jitter, after a failed run that `times` failed runs preceded."""
        return min(self.max_backoff, self.min_backoff * 2.0 ** min(times, 60))

    def delay(self, times: int) -> float:
        """Return the `backoff`, with jitter if the policy has it."""
        longest = self.backoff(times)
        return random.uniform(longest / 2, longest) if self.jitter else longest

    def is_retryable(self, error: BaseException) -> bool:
        """Return True if the policy allows another try after this error."""
        names = error.names if isinstance(error, ChildError) else {name_of(kind) for kind in type(error).__mro__}
        return not names & self.fail_on and (self.retry_on is None or bool(names & self.retry_on))


def shown_fields(policy: Policy) -> dict[str, str]:
    """Return the settings that only the worker itself needs, named and written as in a job's record. People see them."""
    found = {name: str(getattr(policy, name)) for name in ("max_failures", "max_timeouts")}
    for name in ("min_backoff", "max_backoff", "timeout"):
        if (value := getattr(policy, name)) is not None:
            found[name] = str(round(value * 1000))
    found["jitter"] = str(int(policy.jitter))
    for name in ("retry_on", "fail_on"):
        if names := getattr(policy, name):
            found[name] = " ".join(sorted(names))
    return found


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The decision about a run that raised `error`.

    Attributes:
        kind: ``fail`` and ``broken`` move the task to the dead-letter queue.
        delay: of a retry, seconds; `run_at_ms` takes precedence.
        counted: False: the retry counts as no failure.
        stalled: True: the retry counts as a stall instead of a failure.
        pause: seconds for which the queue is paused; the task goes back to the front. None: it is not paused.
    """

    kind: Literal["retry", "fail", "broken"]
    error: BaseException
    delay: float = 0.0
    run_at_ms: int | None = None
    counted: bool = True
    stalled: bool = False
    pause: float | None = None


def decide_retry(error: BaseException, policy: Policy, failures: int, stalls: int = 0) -> RetryDecision:
    """Decide the next step for a task whose run raised `error`.

    A group that contains a `Stalled` counts as that. A group of only `Retry`, `Failure` and `RateLimited` counts as its first
    `Failure`; without one, as the longest `RateLimited`; without that, as the `Retry` that is due last. Any other group counts as
    one error.

    Args:
        error: what the run raised.
        policy: the policy of the run.
        failures: the number of earlier runs that failed.
        stalls: the number of earlier runs whose worker or process died.
    """
    error = _deciding_error(error, policy, failures)
    if isinstance(error, Failure):
        return RetryDecision("fail", error)
    if isinstance(error, Broken):
        return RetryDecision("broken", error)
    if isinstance(error, RateLimited):
        return RetryDecision("retry", error, counted=False, pause=error.retry_after)
    if isinstance(error, Retry):
        delay = policy.delay(failures) if error.delay is None else error.delay
        return RetryDecision("retry", error, delay, error.run_at_ms, error.counted)
    if isinstance(error, Stalled):
        return RetryDecision("retry", error, policy.delay(stalls), stalled=True)
    if policy.is_retryable(error):
        return RetryDecision("retry", error, policy.delay(failures))
    return RetryDecision("fail", error)


def _deciding_error(error: BaseException, policy: Policy, failures: int) -> BaseException:
    """Return the error that decides: the one that a group counts as, else `error` itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    inner = list(_flat(group))
    stalled = next((each for each in inner if isinstance(each, Stalled)), None)
    if stalled is not None:
        return stalled  # middleware may have wrapped it in a group with errors of its own
    if not all(isinstance(each, Retry | Failure) for each in inner):
        return group
    failed = next((each for each in inner if isinstance(each, Failure)), None)
    limited = max((each for each in inner if isinstance(each, RateLimited)), key=_retry_after, default=None)
    retries = [each for each in inner if isinstance(each, Retry)]
    return failed or limited or max(retries, key=lambda retry: _due(retry, policy, failures))


def _retry_after(error: RateLimited) -> float:
    return error.retry_after


def _flat(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _flat(cast("BaseExceptionGroup[BaseException]", each))
        else:
            yield each


def _due(retry: Retry, policy: Policy, failures: int) -> tuple[int, float]:
    """Return a sort key: larger is later. A `run_at` sorts after each delay, because comparing them takes the server's clock."""
    if retry.run_at_ms is not None:
        return 1, retry.run_at_ms
    return 0, policy.backoff(failures) if retry.delay is None else retry.delay
