"""Log lines by another thread: in order, and never in the way."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tests.support.patience import PATIENCE
from worqr.link.log_thread import LogThread

logger = logging.getLogger("worqr.test.log_thread")


def test_lines_come_in_order_and_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log_thread = LogThread()
    caplog.set_level(logging.INFO)
    for i in range(100):
        log_thread.emit(logger, "link.back", "line %(duration)d", duration=i)
    log_thread.stop()
    assert [record.getMessage() for record in caplog.records] == [f"link.back: line {i}" for i in range(100)]
    assert caplog.records[7].__dict__["duration"] == 7


def test_a_handler_that_blocks_blocks_neither_the_line_nor_the_end() -> None:
    gate, log_thread = threading.Event(), LogThread()

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            gate.wait(2 * PATIENCE)

    handler = Blocked()
    logger.addHandler(handler)
    try:
        began = time.monotonic()
        for _ in range(10):
            log_thread.emit(logger, "link.lost", "line")
        log_thread.stop()
        assert time.monotonic() - began < PATIENCE
    finally:
        gate.set()
        logger.removeHandler(handler)
        if log_thread._thread is not None:
            log_thread._thread.join(PATIENCE)


def test_a_filter_that_raises_costs_no_line_of_other_handlers(caplog: pytest.LogCaptureFixture) -> None:
    log_thread = LogThread()

    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if "bad" in record.getMessage():
                raise ZeroDivisionError
            return True

    broken = Broken()
    logger.addFilter(broken)
    try:
        log_thread.emit(logger, "link.lost", "bad")
        log_thread.emit(logger, "link.lost", "good")
        log_thread.stop()
    finally:
        logger.removeFilter(broken)
    assert [record.getMessage() for record in caplog.records] == ["link.lost: bad", "link.lost: good"]
