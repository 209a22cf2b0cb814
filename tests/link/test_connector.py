"""The attempts to connect, one after another: which result counts, and when the next one begins."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

from tests.support.patience import PATIENCE
from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.connector import Connector, State, StaticEndpoint, pause_after
from worqr.link.settings import Endpoint


class FakeTimer:
    def cancel(self) -> None: ...


class FakeDriver:
    """Has callbacks wait until the test runs them; timers never run."""

    def __init__(self) -> None:
        self.posted: queue.Queue[Callable[[], object]] = queue.Queue()

    def post(self, deliver: Callable[[], object]) -> None:
        self.posted.put(deliver)

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        return FakeTimer()

    def run_one(self) -> None:
        self.posted.get(timeout=PATIENCE)()


class FakeWire:
    def __init__(self) -> None:
        self.closing = threading.Event()

    def close(self) -> None:
        self.closing.set()


class Attempts:
    """A connector whose attempts end when the test says so."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.begun: queue.Queue[queue.Queue[FakeWire | WorqrError]] = queue.Queue()
        self.connected: list[FakeWire] = []
        self.failed: list[WorqrError] = []
        self.connector = Connector(
            cast("Any", self.driver),
            StaticEndpoint("h:1", Endpoint("h", 1)),
            self.connect,
            cast("Any", self.connected.append),
            failed=self.failed.append,
        )

    def connect(self, on_silence: Callable[[], None]) -> FakeWire:
        mine: queue.Queue[FakeWire | WorqrError] = queue.Queue()
        self.begun.put(mine)
        result = mine.get(timeout=PATIENCE)
        if isinstance(result, WorqrError):
            raise result
        return result

    def next(self) -> queue.Queue[FakeWire | WorqrError]:
        return self.begun.get(timeout=PATIENCE)


def test_an_attempt_at_an_old_address_is_discarded_and_another_one_begins_at_once() -> None:
    attempts, old_wire, new_wire = Attempts(), FakeWire(), FakeWire()
    attempts.connector.dial()
    old = attempts.next()
    attempts.connector.dial()
    attempts.next().put(new_wire)
    attempts.driver.run_one()
    old.put(old_wire)
    attempts.driver.run_one()
    assert attempts.connected == [new_wire]
    assert old_wire.closing.is_set()
    assert attempts.connector.state is State.READY


def test_an_attempt_that_is_being_made_is_not_made_twice() -> None:
    attempts = Attempts()
    attempts.connector.dial()
    attempts.connector.redial()
    attempts.next().put(FakeWire())
    attempts.driver.run_one()
    assert attempts.begun.empty()


def test_the_second_attempt_is_made_at_once_and_the_third_after_a_pause() -> None:
    attempts = Attempts()
    attempts.connector.dial()
    for _ in range(2):
        attempts.next().put(Unavailable("connection refused"))
        attempts.driver.run_one()
    assert len(attempts.failed) == attempts.connector.attempts == 2
    assert attempts.connector.state is State.WAITING
    assert attempts.begun.empty()


def test_a_connection_that_worked_begins_a_new_row_of_attempts() -> None:
    attempts = Attempts()
    attempts.connector.dial()
    for _ in range(3):
        attempts.next().put(FakeWire())
        attempts.driver.run_one()
        attempts.connector.works()
        attempts.connector.lost()
        attempts.connector.retry()
        assert attempts.connector.state is State.DIALLING
    attempts.next().put(FakeWire())


def test_a_refusal_is_not_tried_again_at_once() -> None:
    attempts = Attempts()
    attempts.connector.dial()
    attempts.next().put(RefusedByServer("WRONGPASS"))
    attempts.driver.run_one()
    assert attempts.connector.state is State.WAITING
    assert pause_after(1, refused=True) >= 1
    assert pause_after(1) == 0


def test_what_connects_after_the_end_is_closed() -> None:
    attempts, wire = Attempts(), FakeWire()
    attempts.connector.dial()
    begun = attempts.next()
    attempts.connector.close()
    begun.put(wire)
    assert wire.closing.wait(PATIENCE)
    assert attempts.connected == []
    assert attempts.connector.state is State.ENDED
