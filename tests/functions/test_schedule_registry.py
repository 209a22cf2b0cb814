"""Declaring schedules: what `mesh.cron` and `mesh.every` take, and what is an error before anything is sent."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, timedelta, timezone
from typing import Any

import pytest

import worqr
from worqr.client.producer import Call, named_call
from worqr.cron import Definition
from worqr.errors import UsageError
from worqr.functions.registry import MAX_TASK

REPORT: Call[Any] = Call("report", (), {"region": "eu"}, b'{"region":"eu"}')


@pytest.fixture
def table() -> worqr.Registry:
    return worqr.Registry()


class Function:
    """What a typed function will be to a schedule."""

    def call(self) -> Call[None]:
        return Call("tick", (), {}, b"{}")


# Declaring


def test_a_cron_schedule_with_nothing_said(table: worqr.Registry) -> None:
    table.cron("0  3 * * * ", REPORT)
    assert table._declarations.schedules == {
        "report": Definition(
            name="report",
            queue="report",
            task=b'{"region":"eu"}',
            cron="0 3 * * *",
            timezone="UTC",
            misfire=1,
            overlap="skip",
            jitter_ms=0,
        )
    }


def test_a_period_with_everything_said(table: worqr.Registry) -> None:
    table.every(timedelta(minutes=5), REPORT, name="eu", misfire=3, overlap="cancel", jitter=1.5)
    assert table._declarations.schedules == {
        "eu": Definition(
            name="eu",
            queue="report",
            task=REPORT.task,
            every_ms=300_000,
            misfire=3,
            overlap="cancel",
            jitter_ms=1500,
        )
    }


def test_as_a_decorator_the_function_stays_what_it_is(table: worqr.Registry) -> None:
    function = Function()
    assert table.cron("0 3 * * *", timezone="Europe/Berlin")(function) is function
    assert table.every(60, name="minutely")(function) is function
    assert {name: (d.queue, d.task) for name, d in table._declarations.schedules.items()} == {
        "tick": ("tick", b"{}"),
        "minutely": ("tick", b"{}"),
    }


@pytest.mark.parametrize(
    ("zone", "name"),
    [("Europe/Berlin", "Europe/Berlin"), (zoneinfo.ZoneInfo("Asia/Tokyo"), "Asia/Tokyo"), (UTC, "UTC"), ("UTC", "UTC")],
)  # fmt: skip
def test_a_zone_is_kept_by_its_name(table: worqr.Registry, zone: Any, name: str) -> None:
    table.cron("0 3 * * *", REPORT, timezone=zone)
    assert table._declarations.schedules["report"].timezone == name


@pytest.mark.parametrize(("misfire", "kept"), [("skip", 0), ("once", 1), (1, 1), (100, 100)])
def test_a_misfire_rule_is_a_number(table: worqr.Registry, misfire: Any, kept: int) -> None:
    table.every(60, REPORT, misfire=misfire)
    assert table._declarations.schedules["report"].misfire == kept


# Errors


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"misfire": 0}, "misfire must be 'skip', 'once' or a number from 1 to 100, not 0"),
        ({"misfire": -1}, "misfire must be"),
        ({"misfire": 101}, "misfire must be"),
        ({"misfire": True}, "misfire must be"),
        ({"misfire": 1.0}, "misfire must be"),
        ({"misfire": "twice"}, "not 'twice'"),
        ({"overlap": "queues"}, "overlap must be one of 'skip', 'queue', 'cancel', not 'queues'"),
        ({"overlap": None}, "overlap must be"),
        ({"overlap": ["skip"]}, "overlap must be"),
        ({"jitter": -1}, "jitter must be at least 0"),
        ({"jitter": "1"}, "jitter must be seconds"),
        ({"name": ""}, "schedule name must have 1 to 200 bytes"),
        ({"name": "a" * 201}, "schedule name must have 1 to 200 bytes"),
        ({"name": "a\0b"}, "schedule name .* control characters"),
        ({"name": None}, "schedule name must be a str"),
        ({"nmae": "x"}, "a schedule has no option 'nmae'; did you mean 'name'"),
        ({"max_length": 3}, "it takes name, timezone, misfire, overlap, jitter"),
    ],
)
def test_a_bad_option_is_an_error_where_it_is_declared(table: worqr.Registry, how: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        table.every(60, REPORT, **how)
    with pytest.raises(UsageError, match=why):
        table.cron("0 3 * * *", **how)
    assert table._declarations.schedules == {}


@pytest.mark.parametrize("zone", ["Europe/Berlni", 3, None, timezone(timedelta(hours=1))])
def test_a_zone_that_others_cannot_find_is_an_error(table: worqr.Registry, zone: Any) -> None:
    with pytest.raises(UsageError, match="timezone"):
        table.cron("0 3 * * *", REPORT, timezone=zone)


def test_a_period_has_no_zone(table: worqr.Registry) -> None:
    with pytest.raises(UsageError, match=r"takes no timezone; for local times use cron\(\)"):
        table.every(60, REPORT, timezone="UTC")


@pytest.mark.parametrize("period", [0, -1, 0.05, float("inf"), float("nan"), "60", True, None, timedelta(0)])
def test_a_bad_period_is_an_error(table: worqr.Registry, period: Any) -> None:
    with pytest.raises(UsageError, match="period must be"):
        table.every(period, REPORT)


@pytest.mark.parametrize("expression", ["* * * *", "61 * * * *", "0 0 30 2 *", 3, None, REPORT])
def test_a_bad_expression_is_an_error_also_as_a_decorator(table: worqr.Registry, expression: Any) -> None:
    with pytest.raises(UsageError, match="cron expression"):
        table.cron(expression, REPORT)
    with pytest.raises(UsageError, match="cron expression"):
        table.cron(expression)


def test_two_schedules_of_one_name_are_an_error(table: worqr.Registry) -> None:
    table.every(60, REPORT)
    with pytest.raises(UsageError, match="there is a schedule 'report' already: give one of them another name="):
        table.cron("0 3 * * *", REPORT)
    table.cron("0 3 * * *", REPORT, name="nightly")
    assert set(table._declarations.schedules) == {"report", "nightly"}


@pytest.mark.parametrize("call", [b"report", "report", Function()])
def test_what_is_no_call_is_an_error_that_says_how_to_make_one(table: worqr.Registry, call: Any) -> None:
    with pytest.raises(UsageError, match=r"a schedule takes a call, as in mesh.call\('name'\)"):
        table.every(60, call)


@pytest.mark.parametrize("decorator", ["cron", "every"])
def test_a_function_that_is_not_declared_is_an_error_that_says_what_is_missing(
    table: worqr.Registry, decorator: str
) -> None:
    def nightly() -> None: ...

    with pytest.raises(UsageError, match="put @mesh.task between this line and `def nightly`"):
        getattr(table, decorator)("0 3 * * *" if decorator == "cron" else 60)(nightly)


def test_a_large_payload_is_an_error(table: worqr.Registry) -> None:
    table.every(60, Call("fits", (), {}, bytes(MAX_TASK)))
    with pytest.raises(UsageError, match="its payload has 65,537 bytes, at most 65,536 fit"):
        table.every(60, Call("large", (), {}, bytes(MAX_TASK + 1)))


# Calls by name


def test_keywords_are_the_payload_as_an_object() -> None:
    call = named_call("q", (), {"to": "ä", "n": 1}, 1000)
    assert (call.name, call.args, call.kwargs) == ("q", (), {"to": "ä", "n": 1})
    assert call.task == '{"to":"ä","n":1}'.encode()


def test_without_arguments_the_object_is_empty() -> None:
    assert named_call("q", (), {}, 1000).task == b"{}"


@pytest.mark.parametrize(
    ("payload", "task"),
    [(b"\x00raw", b"\x00raw"), (bytearray(b"x"), b"x"), (memoryview(b"x"), b"x"), ("text", b'"text"'), ([1, 2], b"[1,2]"),
     (None, b"null")],
)  # fmt: skip
def test_one_positional_argument_is_the_payload_whole(payload: Any, task: bytes) -> None:
    assert named_call("q", (payload,), {}, 1000).task == task


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"a": 1})])
def test_more_positional_arguments_need_the_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="positional arguments need the function itself"):
        named_call("q", args, kwargs, 1000)


@pytest.mark.parametrize("argument", [object(), "\ud800", {1, object()}])
def test_what_json_cannot_carry_is_an_error(argument: Any) -> None:
    with pytest.raises(UsageError, match="JSON cannot carry these arguments"):
        named_call("q", (), {"a": argument}, 1000)


def test_a_bad_name_or_a_large_payload_is_an_error() -> None:
    with pytest.raises(UsageError, match="function name"):
        named_call("a{b", (), {}, 1000)
    with pytest.raises(UsageError, match="over the limit of 10"):
        named_call("q", (b"x" * 11,), {}, 10)


def test_the_words_of_other_schedulers_are_answered_with_the_one_that_works() -> None:
    options: Any = {"tz": "UTC"}
    with pytest.raises(UsageError, match=r"a schedule has no option 'tz'; use timezone, as in mesh\.cron\("):
        worqr.Registry().cron("0 3 * * *", REPORT, **options)
