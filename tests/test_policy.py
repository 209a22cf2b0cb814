"""What becomes of a run that raised: the policy of a job over that of its handler over the defaults, and the judgement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worqr
from worqr import Failure, RateLimited, Retry, RetryPolicy, Undecodable, UsageError
from worqr.policy import (
    POLICY_FIELDS,
    UNLIMITED,
    ChildError,
    Policy,
    RetryDecision,
    Stalled,
    class_names,
    decide_retry,
    retry_fields,
)
from worqr.records import RemoteError
from worqr.remote_error import error_from_text, remote_error, with_stderr
from worqr.validation import name_of

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)
NOON_MS = 1_906_545_600_000


class Mine(Exception):
    """An error of an application."""


class MineToo(Mine):
    """One below it."""


class Outer:
    class Inner(Exception):
        """One whose name has a dot in it."""


# What a handler raises on purpose


def test_a_retry_is_no_worqr_error() -> None:
    for kind in (Retry, Failure, Undecodable):
        assert not issubclass(kind, worqr.WorqrError)


def test_a_retry_says_when() -> None:
    assert (Retry().delay, Retry().run_at_ms, Retry().counted) == (None, None, True)
    assert Retry(delay=0).delay == 0.0
    assert Retry(delay=timedelta(minutes=2)).delay == 120.0
    assert Retry(run_at=NOON).run_at_ms == NOON_MS
    assert Retry(run_at=NOON + timedelta(microseconds=1)).run_at_ms == NOON_MS + 1  # never early
    assert str(Retry("not yet", counted=False)) == "not yet"


@pytest.mark.parametrize(
    "how",
    [
        {"delay": -1},
        {"delay": -0.001},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"delay": 1e300},
        {"delay": "5"},
        {"delay": True},
        {"delay": NOON},
        {"run_at": datetime(2030, 6, 1)},
        {"run_at": 17},
        {"run_at": "2030-06-01"},
        {"run_at": datetime(1969, 1, 1, tzinfo=UTC)},
        {"delay": 1, "run_at": NOON},
        {"delay": 0, "run_at": NOON},
    ],
)
def test_a_retry_refuses_times_that_cannot_be(how: Any) -> None:
    with pytest.raises(UsageError, match="Retry"):
        Retry(**how)


# The policy


def test_a_policy_says_nothing_that_was_not_given() -> None:
    assert retry_fields(RetryPolicy()) == {}
    assert Policy().with_overrides({}) == Policy() == Policy().with_overrides({"id": "x", "task": "y", "failures": "7"})


def test_the_defaults() -> None:
    policy = Policy()
    assert (policy.max_failures, policy.max_stalls, policy.max_timeouts) == (10, 3, 3)
    assert (policy.min_backoff, policy.max_backoff, policy.jitter) == (2.0, 300.0, True)
    assert (policy.timeout, policy.result_ttl, policy.keep_failed, policy.on_failure) == (None, 0.0, 1000, False)


def test_a_policy_travels_field_by_field() -> None:
    given = RetryPolicy(
        max_failures=5,
        max_stalls=1,
        max_timeouts=math.inf,
        retry_for=timedelta(hours=1),
        min_backoff=0.25,
        max_backoff=timedelta(minutes=1),
        jitter=False,
        retry_on=(Mine, OSError),
        fail_on=(MineToo,),
        reset_on_progress=True,
    )
    fields = retry_fields(given)
    assert fields.keys() == POLICY_FIELDS - {"timeout", "result_ttl"}
    assert all(isinstance(value, str) for value in fields.values())
    policy = Policy(keep_failed=7).with_overrides(fields)
    assert policy == Policy(
        max_failures=5,
        max_stalls=1,
        max_timeouts=UNLIMITED,
        retry_for=3600.0,
        reset_on_progress=True,
        min_backoff=0.25,
        max_backoff=60.0,
        jitter=False,
        retry_on=frozenset({name_of(Mine), "OSError"}),
        fail_on=frozenset({name_of(MineToo)}),
        keep_failed=7,
    )
    with pytest.raises(UsageError, match=r"does not travel with a job: .*min_backoff="):
        retry_fields(replace(given, backoff=lambda failures, _: failures))
    assert policy.with_overrides({"timeout": "1500", "result_ttl": "0"}) != policy
    assert policy.with_overrides({"timeout": "1500"}).timeout == 1.5


def test_of_two_policies_the_jobs_own_fields_win_and_the_others_stay() -> None:
    handler = Policy().with_overrides(retry_fields(RetryPolicy(max_failures=3, min_backoff=9, retry_on=())))
    job = handler.with_overrides(retry_fields(RetryPolicy(max_failures=7, jitter=False)))
    assert (job.max_failures, job.min_backoff, job.jitter, job.retry_on) == (7, 9.0, False, frozenset())
    assert handler.with_overrides(retry_fields(RetryPolicy(retry_on=(Exception,)))).is_retryable(ValueError())


def test_no_types_at_all_can_be_said_and_travels() -> None:
    fields = retry_fields(RetryPolicy(retry_on=(), fail_on=()))
    assert fields == {"retry_on": "", "fail_on": ""}
    assert not Policy().with_overrides(fields).is_retryable(ValueError())


@pytest.mark.parametrize(
    "how",
    [
        *(
            {name: value}
            for name in ("max_failures", "max_stalls", "max_timeouts")
            for value in (0, -1, 1.5, True, "3")
        ),
        *(
            {name: value}
            for name in ("min_backoff", "max_backoff")
            for value in (-1, float("nan"), float("inf"), "2", True, NOON)
        ),
        {"jitter": "yes"},
        {"jitter": 1},
        {"jitter": []},
        {"retry_on": (ValueError(),)},
        {"retry_on": ("ValueError",)},
        {"retry_on": (int,)},
        {"fail_on": [ValueError]},
        {"fail_on": "ValueError"},
        {"min_backoff": 10, "max_backoff": 9},
    ],
    ids=repr,
)
def test_a_policy_refuses_what_cannot_be(how: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(how))):
        RetryPolicy(**how)


def test_a_misspelt_setting_of_a_policy_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_failure"):
        RetryPolicy(max_failure=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# The backoff


def test_the_backoff_without_jitter_is_doubled_up_to_its_maximum() -> None:
    policy = Policy(jitter=False)
    assert [policy.delay(n) for n in range(10)] == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert policy.delay(100_000) == 300
    assert Policy(jitter=False, min_backoff=0.0).delay(5) == 0.0
    assert Policy(jitter=False, min_backoff=7.0, max_backoff=7.0).delay(0) == 7.0


@given(st.integers(0, 200), st.floats(0, 1000), st.floats(0, 100_000))
def test_jitter_takes_away_at_most_half(times: int, least: float, more: float) -> None:
    policy = Policy(min_backoff=least, max_backoff=least + more)
    whole = policy.backoff(times)
    assert least <= whole <= least + more
    assert whole / 2 <= policy.delay(times) <= whole


def test_jitter_spreads_over_all_of_it() -> None:
    delays = [Policy(min_backoff=100.0).delay(0) for _ in range(2000)]
    assert 50 <= min(delays) < 55 and 95 < max(delays) <= 100
    assert 70 < sum(delays) / len(delays) < 80


# The judgement

PLAIN = Policy(jitter=False)


@pytest.mark.parametrize(
    ("retry", "first", "longest"),
    [
        (RetryPolicy(min_backoff=3600), 3600, 3600),
        (RetryPolicy(min_backoff=60), 60, 300),
        (RetryPolicy(max_backoff=1), 1, 1),
        (RetryPolicy(min_backoff=5, max_backoff=7), 5, 7),
    ],
)
def test_a_backoff_that_is_given_alone_counts(retry: RetryPolicy, first: float, longest: float) -> None:
    policy = Policy().with_retry(retry)
    assert (policy.backoff(0), policy.backoff(20)) == (first, longest)


def test_an_error_is_tried_again_after_the_backoff() -> None:
    error = ValueError()
    assert decide_retry(error, PLAIN, 0) == RetryDecision("retry", error, 2.0)
    assert decide_retry(error, PLAIN, 3) == RetryDecision("retry", error, 16.0)


def test_a_failure_is_final_and_what_is_undecodable_is_undecodable() -> None:
    for error in (Failure("no"), type("Worse", (Failure,), {})()):
        assert decide_retry(error, PLAIN, 0) == RetryDecision("fail", error)
    broken = Undecodable("what?")
    assert decide_retry(broken, PLAIN, 0) == RetryDecision("undecodable", broken)


def test_a_retry_without_a_time_backs_off_and_an_explicit_one_is_honoured_exactly() -> None:
    for delay in (0, 0.5, 7, 400):
        error = Retry(delay=delay)
        assert decide_retry(error, PLAIN, 5) == RetryDecision("retry", error, float(delay))
    error = Retry()
    assert decide_retry(error, PLAIN, 5) == RetryDecision("retry", error, 64.0)
    error = Retry(run_at=NOON, counted=False)
    decision = decide_retry(error, PLAIN, 5)
    assert (decision.kind, decision.run_at_ms, decision.counted) == ("retry", NOON_MS, False)


def test_a_retry_is_a_retry_whatever_the_types_say() -> None:
    strict = Policy(retry_on=frozenset(), fail_on=frozenset({"Exception"}))
    assert decide_retry(Retry(), strict, 0).kind == "retry"


@pytest.mark.parametrize(
    ("policy", "error", "repeats"),
    [
        (RetryPolicy(), ValueError(), True),
        (RetryPolicy(retry_on=()), ValueError(), False),  # hworker's FailOnException
        (RetryPolicy(retry_on=(OSError,)), ConnectionResetError(), True),  # subclasses count
        (RetryPolicy(retry_on=(OSError,)), ValueError(), False),
        (RetryPolicy(retry_on=(Mine,)), MineToo(), True),
        (RetryPolicy(retry_on=(MineToo,)), Mine(), False),
        (RetryPolicy(retry_on=(Outer.Inner,)), Outer.Inner(), True),
        (RetryPolicy(fail_on=(Mine,)), MineToo(), False),
        (RetryPolicy(fail_on=(Mine,)), ValueError(), True),
        (RetryPolicy(retry_on=(Mine,), fail_on=(MineToo,)), Mine(), True),
        (RetryPolicy(retry_on=(Mine,), fail_on=(MineToo,)), MineToo(), False),  # fail_on wins
        (RetryPolicy(retry_on=(Exception,)), KeyboardInterrupt(), False),
        (RetryPolicy(retry_on=(BaseException,)), SystemExit(), True),
        (RetryPolicy(retry_on=(BaseException,)), GeneratorExit(), True),
        (RetryPolicy(fail_on=(ExceptionGroup,)), ExceptionGroup("x", [ValueError()]), False),
    ],
)
def test_types_decide_whether_an_error_is_tried_again(policy: RetryPolicy, error: BaseException, repeats: bool) -> None:
    resolved = Policy().with_overrides(retry_fields(policy))
    assert decide_retry(error, resolved, 0).kind == ("retry" if repeats else "fail")


def test_an_error_is_matched_by_the_names_of_its_classes() -> None:
    """The worker may know another class of that name, or have loaded the module anew: what was meant is the name."""
    namesake = type("Mine", (Exception,), {"__module__": Mine.__module__, "__qualname__": Mine.__qualname__})
    policy = Policy().with_overrides(retry_fields(RetryPolicy(fail_on=(Mine,))))
    assert not policy.is_retryable(namesake())
    assert policy.is_retryable(type("Mine", (Exception,), {"__module__": "elsewhere"})())


LATER = Retry(run_at=NOON)
LATEST = Retry(run_at=NOON + timedelta(seconds=1))
SOON, LONG, SOMETIME = Retry(delay=1), Retry(delay=3), Retry()
NO, NEVER = Failure("no"), Failure("never")
WHAT = Undecodable("what?")


@pytest.mark.parametrize(
    ("errors", "counts_as"),
    [
        ([SOON, LONG], LONG),
        ([LONG, SOON], LONG),
        ([SOON, SOMETIME, LONG], LONG),  # the backoff is 2 s
        ([SOON, SOMETIME], SOMETIME),
        ([LONG, LATER], LATER),
        ([LATEST, LATER], LATEST),
        ([SOON, NO, LATER, NEVER], NO),
        ([ExceptionGroup("inner", [SOON, ExceptionGroup("deeper", [NEVER])]), NO], NEVER),
        ([ExceptionGroup("inner", [SOON]), LONG], LONG),
    ],
)
def test_a_group_of_retries_and_failures_counts_as_one_of_them(errors: list[Exception], counts_as: Exception) -> None:
    decision = decide_retry(ExceptionGroup("several", errors), PLAIN, 0)
    assert decision.error is counts_as
    assert decision.kind == ("fail" if isinstance(counts_as, Failure) else "retry")


@pytest.mark.parametrize("errors", [[SOON, ValueError()], [WHAT, ValueError()], [SOON, WHAT]])
def test_every_other_group_is_one_error(errors: list[Exception]) -> None:
    group = ExceptionGroup("several", errors)
    assert decide_retry(group, PLAIN, 0) == RetryDecision("retry", group, 2.0)
    assert decide_retry(group, Policy(retry_on=frozenset()), 0) == RetryDecision("fail", group)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [([NO, ValueError()], "fail"), ([WHAT, NO], "fail"), ([ExceptionGroup("x", [WHAT])], "undecodable")],
)
def test_a_failure_is_final_beside_other_errors_and_what_is_undecodable_is_undecodable_alone(
    errors: list[Exception], kind: str
) -> None:
    assert decide_retry(ExceptionGroup("several", errors), PLAIN, 0).kind == kind


class Refused(ConnectionError): ...


REFUSED = Refused("refused")


@pytest.mark.parametrize(
    ("policy", "errors", "repeats"),
    [
        ({"retry_on": (ConnectionError,)}, [REFUSED], True),
        ({"retry_on": (ConnectionError,)}, [REFUSED, ExceptionGroup("", [ConnectionError()])], True),
        ({"retry_on": (ConnectionError,)}, [REFUSED, ValueError()], False),  # each must be one to retry after
        ({"retry_on": (ConnectionError, ValueError)}, [REFUSED, ValueError()], True),
        ({"retry_on": (ConnectionError,)}, [REFUSED, SOON], True),  # a Retry is one, whatever the types say
        ({"retry_on": (ExceptionGroup,)}, [ValueError()], True),
        ({"retry_on": ()}, [REFUSED], False),
        ({"fail_on": (ConnectionError,)}, [ValueError(), ExceptionGroup("", [REFUSED])], False),  # one is enough
        ({"fail_on": (ConnectionError,)}, [ValueError(), SOON], True),
        ({"fail_on": (ConnectionError,)}, [REFUSED, SOON], False),
        ({"fail_on": (ExceptionGroup,)}, [ValueError()], False),
        ({"retry_on": (Exception,), "fail_on": (Refused,)}, [REFUSED, ValueError()], False),
    ],
)
def test_the_types_of_a_policy_are_looked_for_in_groups(
    policy: dict[str, Any], errors: list[Exception], repeats: bool
) -> None:
    resolved = Policy(jitter=False).with_overrides(retry_fields(RetryPolicy(**policy)))
    group = ExceptionGroup("", errors)
    assert decide_retry(group, resolved, 0).kind == ("retry" if repeats else "fail")
    child = ChildError(RemoteError("ExceptionGroup", "", ""), leaves=class_names(group))
    assert decide_retry(child, resolved, 0).kind == ("retry" if repeats else "fail")


def test_names_of_types_with_spaces_travel() -> None:
    kinds = [type(name, (Exception,), {"__module__": "app"}) for name in ("My Error", "100%", "a\u2028b", "Plain")]
    fields = retry_fields(RetryPolicy(fail_on=tuple(kinds)))
    assert fields["fail_on"].split()[-1] == "app.Plain"
    policy = Policy().with_overrides(fields)
    assert not any(policy.is_retryable(kind()) for kind in kinds)
    assert policy.is_retryable(type("My", (Exception,), {"__module__": "app"})())
    assert Policy().with_overrides({"fail_on": "app.100%"}).is_retryable(kinds[1]()) is False  # as others write it
    assert not Policy().with_overrides({"fail_on": "worqr.errors.Unavailable"}).is_retryable(worqr.Unavailable(""))


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Retry(30), r"Retry\(delay=30\)"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: Retry(timedelta(seconds=1)), r"Retry\(delay=datetime"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: Retry(ValueError("x")), r"Retry\(str\(\.\.\.\)\)"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: RateLimited(3, 30), r"RateLimited\(retry_after, str\("),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: Failure(404), r"Failure\(str\("),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_message_is_a_text(make: Callable[[], object], remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy) as caught:
        make()
    assert remote_error(caught.value).type == "worqr.UsageError"
    kind = decide_retry(caught.value, PLAIN, 0).kind
    assert kind == ("fail" if "Failure" in remedy else "retry")  # what was meant to be final is


def test_a_retry_of_ones_own_without_valid_times_backs_off() -> None:
    class Later(Retry):
        def __init__(self) -> None: ...

    class Odd(Retry):
        delay = property(lambda self: 1 / 0)

        def __init__(self) -> None: ...

    class Limited(RateLimited):
        def __init__(self) -> None:
            self.retry_after = -1

    for error in (Later(), Odd(), ExceptionGroup("", [Later(), Odd()])):
        decision = decide_retry(error, PLAIN, 0)
        assert (decision.kind, decision.delay, decision.counted) == ("retry", 2.0, True)
    assert decide_retry(Limited(), PLAIN, 0).pause == 2.0


# What happened in another process


def child_error(*names: str) -> ChildError:
    return ChildError(RemoteError("app.Down", "refused", "Traceback ..."), names)


def test_an_error_from_another_process_is_matched_by_the_names_of_its_classes() -> None:
    error = child_error("app.Down", "ConnectionError", "OSError", "Exception")
    assert decide_retry(error, PLAIN, 3) == RetryDecision("retry", error, 16.0)
    final = retry_fields(RetryPolicy(fail_on=(OSError,)))
    assert decide_retry(error, Policy().with_overrides(final), 0) == RetryDecision("fail", error)
    only = retry_fields(RetryPolicy(retry_on=(KeyError,)))
    assert decide_retry(error, Policy().with_overrides(only), 0) == RetryDecision("fail", error)
    assert decide_retry(error, Policy(retry_on=frozenset({"app.Down"}), jitter=False), 0).kind == "retry"


def test_an_error_from_another_process_is_told_as_it_was_told_there() -> None:
    remote = RemoteError("app.Down", "refused", "Traceback ...")
    assert str(ChildError(remote)) == "app.Down: refused"
    assert remote_error(ChildError(remote)) is remote
    failure = Failure("never")
    failure.__worqr_remote__ = remote  # type: ignore[attr-defined]
    assert remote_error(failure) is remote


def test_what_a_run_wrote_to_stderr_follows_its_traceback() -> None:
    remote = RemoteError("app.Down", "refused", "Traceback ...\n")
    assert with_stderr(remote, "\nfirst\nlast\n").traceback == "Traceback ...\nstderr:\nfirst\nlast\n"
    assert with_stderr(error_from_text("Timeout", ""), "last").traceback == "stderr:\nlast\n"
    assert with_stderr(remote, "\n") is remote


def test_a_death_is_counted_as_a_stall_whatever_the_policy_says_of_errors() -> None:
    error = Stalled(error_from_text("Stalled", "its process was killed"))
    none = Policy(retry_on=frozenset(), jitter=False)
    assert decide_retry(error, none, 5, 2) == RetryDecision("retry", error, 8.0, stalled=True)


def test_a_death_in_a_group_is_a_death() -> None:
    error = Stalled(error_from_text("Stalled", "its process was killed"))
    group = ExceptionGroup("made by what was around it", [KeyError(), ExceptionGroup("", [error])])
    assert decide_retry(group, PLAIN, 0, 0) == RetryDecision("retry", error, 2.0, stalled=True)


@pytest.mark.parametrize("name", sorted(POLICY_FIELDS - {"retry_on", "fail_on"}))
@pytest.mark.parametrize("odd", ["", "abc", "-1", "1.5", "1e308", "nan", "9" * 16, "\u00b2"])
def test_a_number_that_no_dispatch_could_have_stored_is_an_error(name: str, odd: str) -> None:
    with pytest.raises(ValueError, match=name):
        Policy().with_overrides({name: odd})


# A function of the application


async def later(failures: int, error: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("backoff", "why"),
    [
        (60, "a function of the number of failures"),
        (later, "is async"),
        (lambda failures: 1, "with the number of failures and"),
    ],
)
def test_a_backoff_that_could_not_be_called_is_refused(backoff: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        RetryPolicy(backoff=backoff)


def test_a_function_decides_about_the_delay_and_a_dispatch_with_times_of_its_own_does_not_ask_it() -> None:
    policy = Policy(jitter=False).with_retry(RetryPolicy(backoff=lambda n, error: timedelta(minutes=n * len(error))))
    assert policy.delay_after(1, "abc", pytest.fail) == 360.0
    assert policy.with_overrides({"max_backoff": "1000"}).delay_after(5, "abc", pytest.fail) == 1.0


@pytest.mark.parametrize("answer", [-1, math.nan, math.inf, None, "5", True, 10**400, SystemExit("no")])
def test_a_backoff_that_raises_or_answers_nonsense_is_reported_and_the_default_decides(answer: Any) -> None:
    def backoff(failures: int, error: str) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    told: list[str] = []
    assert Policy(jitter=False).with_retry(RetryPolicy(backoff=backoff)).delay_after(2, "E", told.append) == 8.0
    assert len(told) == 1
