"""The texts of numbers and times on the pages."""

from __future__ import annotations

import math

import pytest

from worqr.dashboard import figures


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
    ],
)
def test_a_duration_has_one_unit_or_two(seconds: float | None, whole: str, brief: str) -> None:
    assert figures.duration(seconds) == whole
    assert figures.brief(seconds) == brief
