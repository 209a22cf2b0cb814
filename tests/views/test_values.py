"""The texts of numbers and times on the pages."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest

from worqr.views import values


@pytest.mark.parametrize(
    ("seconds", "whole", "brief"),
    [
        (None, "–", "–"),
        (0.0, "0 ms", "0 ms"),
        (0.34, "340 ms", "340 ms"),
        (12.9, "12 s", "12 s"),
        (63.0, "1 min 3 s", "1 min"),
        (3600.0, "1 h", "1 h"),
        (187_200.0, "2 d 4 h", "2 d"),
        (math.inf, "never", "never"),
        (math.nan, "–", "–"),
    ],
)
def test_a_duration_has_one_unit_or_two(seconds: float | None, whole: str, brief: str) -> None:
    assert values.duration(seconds) == whole
    assert values.brief(seconds) == brief


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (values.worker("shop:5192469913ffdb87b2c0a57664731699"), "shop:51924699"),
        (values.worker("a:b:5192469913ffdb87b2c0a57664731699"), "a:b:51924699"),
        (values.worker("shop:ab12"), "shop:ab12"),
        (values.worker(None), "–"),
        (values.span(3.44), "3.4 s"),
        (values.span(720), "12 min"),
        (values.span(200_000), "2 d"),
        (values.span(float("inf")), "never"),
        (values.percent(0.5), "50%"),
        (values.percent(17), "17"),
        (values.exact_seconds(7300), "7300.0 s"),
        (values.rate(0.004), "0"),
        (values.rate(0.4), "0.40"),
        (values.rate(12.34), "12.3"),
        (values.rate(1234), "1,234"),
    ],
)
def test_values_are_short(value: str, text: str) -> None:
    assert value == text


def test_a_time_of_today_has_no_date() -> None:
    now = datetime.now(UTC)
    assert values.short_time(now) == now.astimezone().strftime("%H:%M:%S")
    other = now + timedelta(days=30)
    assert values.short_time(other) == other.astimezone().strftime("%Y-%m-%d %H:%M")
    assert values.short_time(None) == "-"
