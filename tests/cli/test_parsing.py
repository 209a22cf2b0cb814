"""What people write: durations, moments, pairs, arguments; and the sentence when it makes no sense."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from worqr.cli import options
from worqr.cli.errors import InvalidArguments


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("10m", 600),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2d", 172800),
        ("1w", 604800),
        ("0", 0),
    ],
)
def test_a_duration_is_seconds_or_has_units(text: str, seconds: float) -> None:
    assert options.parse_duration(text, "--delay") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "10 m", "1h30", "m", "1e3", "nan"])
def test_no_duration_is_said_with_the_option(text: str) -> None:
    with pytest.raises(InvalidArguments, match=r"--delay must be a duration such as 90 \(seconds\), 10m or 1h30m"):
        options.parse_duration(text, "--delay")


def test_what_is_not_given_is_none() -> None:
    assert options.parse_duration(None, "--delay") is options.parse_time(None, "--run-at") is None


def test_a_moment_with_a_zone_is_that_moment() -> None:
    assert options.parse_time("2031-05-01T12:00Z", "--run-at") == datetime(2031, 5, 1, 12, tzinfo=UTC)
    assert options.parse_time("2031-05-01 12:00+02:00", "--run-at") == datetime(2031, 5, 1, 10, tzinfo=UTC)


def test_a_moment_without_one_is_local() -> None:
    assert options.parse_time("2031-05-01T12:00", "--run-at") == datetime(2031, 5, 1, 12).astimezone()


def test_a_moment_may_be_so_long_ago_where_that_makes_sense() -> None:
    ago = options.parse_time("2h", "--before", ago=True)
    assert ago is not None
    assert timedelta(0) <= datetime.now(UTC) - timedelta(hours=2) - ago < timedelta(minutes=1)
    with pytest.raises(InvalidArguments, match="--run-at must be a time such as 2031-05-01T12:00"):
        options.parse_time("2h", "--run-at")


@pytest.mark.parametrize("text", ["tomorrow", "12:00", "", "99999-01-01", "90"])
def test_no_moment_is_said_with_the_option(text: str) -> None:
    with pytest.raises(InvalidArguments, match="--before must be a time"):
        options.parse_time(text, "--before", ago=True)


def test_pairs() -> None:
    assert options.parse_pairs(["a=1", "b=x=y", "c="], "--meta") == {"a": "1", "b": "x=y", "c": ""}
    for wrong, why in (
        (["a"], "must be name=text"),
        (["=1"], "must be name=text"),
        (["a=1", "a=2"], "'a' is given twice"),
    ):
        with pytest.raises(InvalidArguments, match=why):
            options.parse_pairs(wrong, "--meta")


def test_arguments_are_texts_or_json() -> None:
    assert options.parse_arguments(["to=ada", "n:=3", 'deep:={"a":[1]}', "text=5", "eq=a=b", "yes:=true"]) == {
        "to": "ada",
        "n": 3,
        "deep": {"a": [1]},
        "text": "5",
        "eq": "a=b",
        "yes": True,
    }


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["to"], "must be name=text or name:=JSON, got 'to'"),
        (["a-b=1"], "must be name=text"),
        (["n:=three"], "the value after n:= must be JSON"),
        (["a=1", "a:=2"], "'a' is given twice"),
    ],
)
def test_no_argument_is_said(texts: list[str], why: str) -> None:
    with pytest.raises(InvalidArguments, match=why):
        options.parse_arguments(texts)
