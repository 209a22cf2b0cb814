"""An error that repeats is logged once per minute."""

from __future__ import annotations

import logging

import pytest

from worqr.peer import error_throttle
from worqr.peer.error_throttle import ErrorThrottle, LineLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(error_throttle, "time", clock)
    return clock


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> ErrorThrottle:
    caplog.set_level(logging.INFO)
    return ErrorThrottle(logging.getLogger("worqr.test"))


def test_the_same_error_is_logged_once_per_minute(
    clock: Clock, lines: ErrorThrottle, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(120):
        lines.error("q", "map_work", "queue %(queue)r: %(error)s", queue="q", error="WRONGTYPE")
        clock.now += 0.5
    assert [record.message for record in caplog.records] == ["map_work: queue 'q': WRONGTYPE"]
    lines.error("q", "map_work", "queue %(queue)r: %(error)s", queue="q", error="WRONGTYPE")
    assert caplog.records[1].message == "map_work: queue 'q': WRONGTYPE (and 119 times since the last such line)"
    assert [record.__dict__.get("repeated") for record in caplog.records] == [None, 119]


def test_another_text_and_another_subject_are_logged_at_once(
    clock: Clock, lines: ErrorThrottle, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines.error("q", "map_work", "%(error)s", error="a")
    assert lines.error("q", "map_work", "%(error)s", error="b")
    assert lines.error("r", "map_work", "%(error)s", error="b")
    assert not lines.error("r", "map_work", "%(error)s", error="b")
    assert len(caplog.records) == 3


def test_a_resolved_error_is_logged_anew(clock: Clock, lines: ErrorThrottle, caplog: pytest.LogCaptureFixture) -> None:
    lines.error("q", "map_work", "%(error)s", error="a")
    assert lines.resolve("q")
    assert not lines.resolve("q")
    lines.error("q", "map_work", "%(error)s", error="a")
    assert len(caplog.records) == 2


def test_subjects_are_bounded(clock: Clock, lines: ErrorThrottle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_throttle, "MANY_SUBJECTS", 10)
    for n in range(100):
        lines.error(n, "map_work", "%(error)s", error="a")
    assert not lines.error(99, "map_work", "%(error)s", error="a")
    assert lines.error(0, "map_work", "%(error)s", error="a")


def test_of_many_lines_about_one_event_the_rest_are_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limit = LineLimit(logging.getLogger("worqr.test"), "condemn_worker", "%(count)d more workers are dead")
    for number in range(20_000):
        limit.emit("worker %(worker)s is dead", worker=f"forged-{number}")
    assert len(caplog.records) == error_throttle.LINES
    limit.sum_up()
    assert len(caplog.records) == error_throttle.LINES
    clock.now += error_throttle.PERIOD
    limit.sum_up()
    limit.emit("worker %(worker)s is dead", worker="the next")
    assert [record.message for record in caplog.records[error_throttle.LINES :]] == [
        f"condemn_worker: {20_000 - error_throttle.LINES} more workers are dead",
        "condemn_worker: worker the next is dead",
    ]
    assert caplog.records[0].funcName == "test_of_many_lines_about_one_event_the_rest_are_counted"
