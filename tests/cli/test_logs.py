"""The log of ``worqr run``: lines for people, objects for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest

from worqr.hosting.logs import LINE, JsonFormatter, PlainFormatter, set_up_logging


def nothing_is_set_up() -> None:
    """As in a new process; pytest's own handler is put away."""
    logging.getLogger().handlers[:] = []
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("worqr").setLevel(logging.NOTSET)


def record(message: str = "hello", *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("worqr.test").makeRecord(
        "worqr.test", logging.WARNING, "file.py", 1, message, arguments, None, extra=extra
    )


def as_json(found: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(found)
    assert "\n" not in line
    return json.loads(line)


def test_a_record_is_an_object() -> None:
    found = as_json(record("hello, %s", "Ada \x1b\u202e"))
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {"level": "warning", "logger": "worqr.test", "message": "hello, Ada \x1b\u202e"}
    assert "\x1b" not in JsonFormatter().format(record("\x1b"))


def test_an_exception_is_in_it_as_text() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        failed = record()
        failed.exc_info = sys.exc_info()
    found = as_json(failed)
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: no\nway")


def test_what_a_record_was_given_is_in_it() -> None:
    found = as_json(record(tenant="a", n=3, deep={"x": [1]}, level_="x"))
    assert (found["tenant"], found["n"], found["deep"]) == ("a", 3, {"x": [1]})
    assert as_json(record(time="noon", level=5, logger=None))["extra_time"] == "noon"


@pytest.mark.parametrize("odd", [float("nan"), {(1, 2): 3}, object(), "\ud800", b"bytes", {"x": float("inf")}])
def test_odd_things_are_no_reason_to_lose_a_line(odd: object) -> None:
    found = as_json(record(odd=odd, plain="x"))
    assert found["message"] == "hello"
    assert found["plain"] == "x"
    assert isinstance(found["odd"], str)


def test_a_circle_is_no_reason_to_lose_a_line() -> None:
    circle: list[object] = []
    circle.append(circle)
    assert as_json(record(circle=circle))["circle"] == "[[...]]"


def test_people_see_no_escape_sequences_but_lines() -> None:
    text = PlainFormatter("%(levelname)s %(message)s").format(record("a\nb \x1b[2J\tc"))
    assert text == "WARNING a\n  b \\x1b[2J\tc"


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    logging.getLogger("worqr.test").info("ours")
    logging.getLogger("other").info("theirs")
    logging.getLogger("worqr.test").debug("ours in detail")
    return [line.split(": ")[-1] for line in capsys.readouterr().err.splitlines()]


def test_where_nothing_is_set_up_all_is_logged_from_info_on(capsys: pytest.CaptureFixture[str]) -> None:
    nothing_is_set_up()
    set_up_logging(None, as_json=False)
    assert logged(capsys) == ["ours", "theirs"]


def test_the_level_is_that_of_worqr_and_of_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    nothing_is_set_up()
    set_up_logging("debug", as_json=False)
    assert logged(capsys) == ["ours", "theirs", "ours in detail"]
    set_up_logging("error", as_json=True)
    assert logged(capsys) == []


def test_what_is_set_up_stays_but_worqr_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    nothing_is_set_up()
    logging.basicConfig(format="x: %(message)s")  # from WARNING on
    set_up_logging(None, as_json=False)
    assert logged(capsys) == ["ours"]
    logging.getLogger("worqr").setLevel(logging.ERROR)
    set_up_logging(None, as_json=False)
    assert logged(capsys) == []
    set_up_logging("debug", as_json=False)
    assert logged(capsys) == ["ours", "ours in detail"]


def test_json_takes_the_place_of_what_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    nothing_is_set_up()
    logging.basicConfig(format="x: %(message)s")
    set_up_logging(None, as_json=True)
    logging.getLogger("other").info("theirs")
    assert json.loads(capsys.readouterr().err)["message"] == "theirs"


def test_an_error_text_with_line_feeds_makes_no_line_that_looks_like_one_of_the_log() -> None:
    forged = "2030-01-01 00:00:00,000 INFO worqr.service: stop: all is well"
    try:
        raise ValueError(f"no\n{forged}\r\n{forged}\x0b{forged}\u2028{forged}")
    except ValueError:
        failed = record("queue %s\n%s", "q", forged)
        failed.exc_info = sys.exc_info()
    text = PlainFormatter(LINE).format(failed)
    assert text.count(forged) == 5
    assert not any(line.startswith("2030") for line in text.splitlines())
    assert all(line.startswith(" ") for line in text.split("\n")[1:])


def test_lines_that_are_indented_stay_as_they_are() -> None:
    assert PlainFormatter("%(message)s").format(record("start:\n  server x\n    y")) == "start:\n  server x\n    y"
