"""The words of the mesh: durations, payloads, errors as they travel."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import traceback
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import worqr
from tests.support.children import ROOT
from worqr.job_options import encode_options
from worqr.records import RemoteError
from worqr.remote_error import error_from_text, failed_record, fields_as_json, remote_error
from worqr.validation import check_count, check_task, encode_json, end_moment, from_ms, seconds, to_ms


@pytest.mark.parametrize(
    ("value", "wanted"), [(0, 0.0), (3, 3.0), (0.25, 0.25), (timedelta(minutes=2), 120.0), (timedelta(0), 0.0)]
)
def test_durations_are_seconds_or_timedeltas(value: Any, wanted: float) -> None:
    assert seconds(value, "wait") == wanted
    assert isinstance(seconds(value, "wait"), float)


@pytest.mark.parametrize(
    "value",
    [-1, -0.001, float("nan"), float("inf"), float("-inf"), True, "3", None, b"3", Fraction(1, 2), timedelta(-1)],
)
def test_what_is_no_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(worqr.UsageError, match="^wait must be"):
        seconds(value, "wait")


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0)])
def test_a_duration_that_must_be_positive_may_not_be_zero(value: Any) -> None:
    with pytest.raises(worqr.UsageError, match="patience must be above 0"):
        seconds(value, "patience", positive=True)


def test_a_duration_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(worqr.UsageError, match="wait must be at least 0 and at most a century, not 1000"):
        seconds(10**400, "wait")


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [((), 5000), ((5_000_999,), 5000.999), ((4_999_999, None, 5_000_001), 5000.001), ((5_001_000, 10**20, 0), 5000)],
)
def test_an_end_is_not_before_what_came_before_it_in_the_same_ms(tokens: tuple[int | None, ...], wanted: float) -> None:
    assert end_moment(5000, *tokens) == from_ms(wanted)
    assert end_moment(None, *tokens) is None


def test_a_task_that_is_bytes_is_not_copied() -> None:
    task = b"x" * 100
    assert check_task(task, 100) is task
    assert check_task(bytearray(task), 100) == task
    assert check_task(memoryview(task)[10:20], 100) == task[:10]


def test_a_task_is_measured_in_bytes() -> None:
    words = memoryview(bytearray(16)).cast("I")
    assert len(words) == 4
    with pytest.raises(worqr.PayloadTooLarge, match=r"16 bytes.*limit of 15"):
        check_task(words, 15)


@pytest.mark.parametrize("task", ["text", 3, None, [1]])
def test_a_task_that_is_not_bytes_is_refused_without_showing_it(task: Any) -> None:
    with pytest.raises(worqr.UsageError, match=f"not {type(task).__name__}: "):
        check_task(task, 100)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


class Nasty(Exception):
    def __str__(self) -> str:
        raise SystemExit


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_an_error_travels_as_text() -> None:
    error = remote_error(caught(ValueError("no such address")))
    assert (error.type, error.message) == ("ValueError", "no such address")
    assert "in caught" in error.traceback
    assert error.traceback.rstrip().endswith("ValueError: no such address")
    assert remote_error(caught(worqr.ClaimLost("x"))).type == "worqr.ClaimLost"


def test_the_attributes_of_an_error_that_are_json_travel_as_far_as_they_fit() -> None:
    error = LookupError("no such customer")
    known = {"id": "x" * 100, "code": 42, "ratio": 0.5, "final": True, "cause": None, "at": [1, {"page": "ä"}]}
    odd = {"when": datetime(2030, 1, 1, tzinfo=UTC), "nan": math.nan, "raw": b"x", "type": LookupError, "_own": 1}
    vars(error).update(known | odd | {"long": "y" * 4000, "pair": (1, 2), "torn": "\udcff", "last": "z"})
    found = remote_error(caught(error))
    assert found.fields == {**known, "pair": [1, 2], "last": "z"}
    assert json.loads(fields_as_json(found)) == found.fields
    vars(error).update({f"{n}": "x" * 30 for n in range(5000)})
    assert len(fields_as_json(remote_error(error))) <= 4096 + 100
    assert fields_as_json(remote_error(caught(ValueError("plain")))) == b""
    assert hash(found) == hash(found)


def test_any_error_travels() -> None:
    assert "<its text cannot be read: ValueError>" in remote_error(caught(Unprintable())).message
    assert remote_error(caught(ValueError("\udcff"))).message.encode() == b"\\udcff"
    assert len(remote_error(caught(ValueError("x" * 1_000_000))).message) == 4096
    assert len(remote_error(caught(ValueError("x" * 1_000_000))).traceback) == 16384
    group = remote_error(caught(BaseExceptionGroup("two", [KeyError("a"), SystemExit(2)])))
    assert group.type == "BaseExceptionGroup"
    assert "KeyError" in group.traceback and "SystemExit" in group.traceback
    assert remote_error(ValueError()).message == ""


@pytest.mark.parametrize(
    ("command", "name"), [("app.py", "app.Mine"), ("-m pkg.app", "pkg.app.Mine"), ("-m pkg", "pkg.Mine")]
)
def test_a_class_of_a_script_has_the_name_with_which_others_import_it(tmp_path: Path, command: str, name: str) -> None:
    code = (
        "import worqr\nfrom worqr.policy import retry_fields\nfrom worqr.remote_error import error_type\n"
        "class Mine(Exception): ...\n"
        "print(error_type(Mine()), retry_fields(worqr.RetryPolicy(fail_on=(Mine, worqr.Unavailable)))['fail_on'])\n"
    )
    (tmp_path / "pkg").mkdir()
    for path in ("app.py", "pkg/app.py", "pkg/__main__.py", "pkg/__init__.py"):
        (tmp_path / path).write_text("" if path.endswith("__init__.py") else code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert found.stdout == f"{name} {name} worqr.Unavailable\n", found.stderr


def test_an_error_whose_text_ends_the_process_travels_too() -> None:
    assert remote_error(caught(Nasty())).message == "<its text cannot be read: SystemExit>"


def raised(way: str) -> BaseException:
    """Errors of every shape, from one function: their places in it differ, or only their words."""
    error = ValueError(f"way {way}")
    try:
        if way.startswith("plain"):
            raise error
        if way == "elsewhere":
            raise error
        if way == "noted":
            error.add_note("while it rained")
            raise error
        if way == "syntax":
            raise SyntaxError("bad", ("a.py", 1, 2, "x y", 1, 3))
        if way == "from None":
            try:
                raise KeyError(way)
            except KeyError:
                raise error from None
        if way == "cause":
            raise error from caught(KeyError(way))
        if way == "context":
            try:
                raise KeyError(way)
            except KeyError:
                raise error  # noqa: B904
        if way == "group":
            raise ExceptionGroup("two", [KeyError(way), error])
    except Exception as found:
        return found
    return error


@pytest.mark.parametrize(
    "way",
    ["plain 1", "plain 2", "elsewhere", "noted", "syntax", "from None", "cause", "context", "group", "never raised"],
)
def test_a_traceback_reads_as_python_prints_it(way: str) -> None:
    for _ in range(2):  # what was formatted once is remembered
        error = raised(way)
        assert remote_error(error).traceback == "".join(traceback.format_exception(error))


def test_code_made_anew_for_each_task_is_not_taken_for_another() -> None:
    for n in range(300):
        names: dict[str, Any] = {}
        exec(f"def made_{n}():\n    raise ValueError('made anew')", names)
        with pytest.raises(ValueError, match="made anew") as caught_here:
            names[f"made_{n}"]()
        assert f"in made_{n}\n" in remote_error(caught_here.value).traceback


def test_an_endless_traceback_is_cut() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("deep")

    try:
        deep(500)
    except ValueError as error:
        assert len(remote_error(error).traceback) <= 16384


def test_a_message_that_was_told_is_clean_and_short() -> None:
    assert error_from_text("Failure", "\udcff" + "x" * 5000) == RemoteError(
        "Failure", ("\\udcff" + "x" * 5000)[:4096], ""
    )


@pytest.mark.parametrize(
    "value",
    [
        worqr.CancelCount(1, 2, 3),
        worqr.Event("Q1", "finished", 2),
        worqr.Status("scheduled", run_at=datetime(2030, 1, 1, tzinfo=UTC)),
        RemoteError("a", "b", "c"),
        failed_record("Q1", b"a", {}),
    ],
)
def test_values_are_plain_and_cannot_be_changed(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(AttributeError):
        setattr(value, value.__slots__[0], 9)
    with pytest.raises((AttributeError, TypeError)):
        value.new = 1


# Moments


@pytest.mark.parametrize(
    ("moment", "ms"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC), 10**12),
        (datetime(2001, 9, 9, 1, 46, 40, 1, tzinfo=UTC), 10**12 + 1),
        (datetime(2001, 9, 9, 1, 46, 40, 1000, tzinfo=UTC), 10**12 + 1),
        (datetime(2001, 9, 9, 3, 46, 40, tzinfo=timezone(timedelta(hours=2))), 10**12),
    ],
)
def test_a_moment_travels_in_milliseconds_and_never_comes_too_early(moment: datetime, ms: int) -> None:
    assert to_ms(moment, "run_at") == ms
    assert timedelta(0) <= from_ms(ms) - moment < timedelta(milliseconds=1)
    assert from_ms(ms).tzinfo is UTC


@pytest.mark.parametrize(
    ("moment", "why"),
    [
        (datetime(2030, 1, 1), "must know its timezone"),
        (datetime(1969, 12, 31, tzinfo=UTC), "must be after 1970"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), "must be after 1970"),
        (datetime(9999, 1, 1, tzinfo=UTC), r"must be before the year 9999, such as datetime\(2999, 1, 1, tzinfo=UTC\)"),
        (datetime.max.replace(tzinfo=UTC), "must be before the year 9999"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=14))), "must be before the year 9999"),
        (10**12, "must be a datetime, not int"),
        ("tomorrow", "must be a datetime, not str"),
        (None, "must be a datetime, not NoneType"),
    ],
)
def test_what_is_no_moment_is_refused_by_name(moment: Any, why: str) -> None:
    with pytest.raises(worqr.UsageError, match=f"^run_at {why}"):
        to_ms(moment, "run_at")


HUGE = 10**5000
"""Python refuses to print it."""


@pytest.mark.parametrize("ms", [253370764800000, 10**15, 10**400, 1e300, math.inf])
def test_a_stored_time_that_is_too_late_becomes_the_latest(ms: float) -> None:
    assert from_ms(ms) == datetime(9999, 1, 1, tzinfo=UTC)
    assert (from_ms(ms) + timedelta(days=1)).astimezone(timezone(timedelta(hours=14)))


@pytest.mark.parametrize("ms", [-1, -(10**400), -math.inf, math.nan])
def test_a_stored_time_that_is_none_becomes_the_earliest(ms: float) -> None:
    assert from_ms(ms) == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "option",
    ["delay", "expires", "unique_for", "result_ttl", "timeout", "wait", "at_most", "min_backoff", "per", "retry_after"],
)
@pytest.mark.parametrize(
    "value",
    [timedelta.max, 10**12, HUGE, -HUGE, 1e300, math.nan, -math.inf, -1],
    ids=lambda value: type(value).__name__,
)
def test_a_duration_that_cannot_be_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(worqr.UsageError, match=rf"{option}\b.* must be .*(at most a century|31 days)"):
        match option:
            case "at_most":
                worqr.Update(at_most=value)
            case "min_backoff":
                worqr.RetryPolicy(min_backoff=value)
            case "per":
                worqr.Limit(rate=1, per=value)
            case "retry_after":
                raise worqr.RateLimited(value)
            case _:
                encode_options({option: value, "id": "x"})


@pytest.mark.parametrize("option", ["run_at", "expires"])
def test_a_time_that_cannot_be_is_refused_by_name(option: str) -> None:
    with pytest.raises(worqr.UsageError, match=f"^{option} must be before the year 9999"):
        encode_options({option: datetime.max.replace(tzinfo=UTC)})
    with pytest.raises(worqr.UsageError, match="^run_at of Retry must be before the year 9999"):
        worqr.Retry(run_at=datetime.max.replace(tzinfo=UTC))


# What was set aside


def test_a_failure_is_read_from_its_record() -> None:
    facts: dict[str, bytes | str] = {
        "id": b"x",
        "reason": b"timeout",
        "error_type": b"Boom",
        "error_message": b"it \xffbroke",
        "error_traceback": b"line 1",
        "failures": b"1",
        "stalls": b"2",
        "timeouts": b"3",
        "worker": b"A",
        "at": b"1000000000000",
        "meta": b'{"tenant":"t"}',
        "twin": b"which nobody wants",
    }
    failed = failed_record("Q1", b"\x00task", facts)
    assert (failed.id, failed.queue, failed.task, failed.reason) == ("x", "Q1", b"\x00task", "timeout")
    assert failed.error == RemoteError("Boom", "it \ufffdbroke", "line 1")
    assert (failed.failures, failed.stalls, failed.timeouts, failed.worker) == (1, 2, 3, "A")
    assert failed.at == datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
    assert failed.meta == {"tenant": "t"}
    told = {name: value.decode("utf-8", "replace") for name, value in facts.items() if isinstance(value, bytes)}
    assert failed_record("Q1", b"\x00task", told) == failed


def test_a_failure_of_which_little_is_known_can_be_read_too() -> None:
    failed = failed_record("Q1", b"a", {})
    assert (failed.failures, failed.error, failed.meta) == (0, RemoteError("", "", ""), {})


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", None])
def test_what_is_no_count_is_refused_by_name(value: Any) -> None:
    with pytest.raises(worqr.UsageError, match="^max_stalls must be a whole number of at least 1"):
        check_count(value, "max_stalls")
    assert check_count(1, "max_stalls") == 1


def test_every_public_error_is_a_worqr_error_and_says_whose_fault_it_is() -> None:
    errors = [getattr(worqr, name) for name in worqr.__all__ if isinstance(getattr(worqr, name), type)]
    errors = [error for error in errors if issubclass(error, BaseException)]
    assert len(errors) >= 10
    on_purpose = {worqr.Retry, worqr.RateLimited, worqr.Failure, worqr.Snooze, worqr.Undecodable}
    # ChildError stands for what one raised in a process of its own; the others end a workflow
    of_handlers = {worqr.ChildError, worqr.LifetimeOver, worqr.Suspended}
    for error in errors:
        assert issubclass(error, worqr.WorqrError) == (error not in on_purpose | of_handlers)
        assert error.__doc__
    assert on_purpose <= set(errors)
    assert not any(issubclass(error, UserError) for error in on_purpose for UserError in (ValueError, OSError))
    assert issubclass(worqr.UsageError, ValueError)
    for error in (worqr.Unavailable, worqr.QueueFull, worqr.ClaimLost, worqr.RefusedByServer):
        assert not issubclass(error, worqr.UsageError)
    assert worqr.Unavailable("x").sent is False


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_has_not_does_not_become_null(number: float) -> None:
    for value in (number, [None, number], {"a": {"b": (1, number)}}):
        with pytest.raises(ValueError, match="neither NaN nor infinity"):
            encode_json(value)
    assert encode_json([None, "null", 1.5]) == b'[null,"null",1.5]'
