from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ops.driver import Desk
from tests.ops.test_sample_queue import RINGS, busy, sample
from worqr import ops
from worqr.history_records import RECORD_BYTES, Record, encode_record
from worqr.ops import Step, StoredHistory


def put(desk: Desk, record: Record, step: Step) -> None:
    """Store a record where the script would have stored it."""
    ring = ":history" if step == 1 else ":history10"
    slot = record.minute // step % RINGS[ring][1]
    desk.client.setrange(desk.q.base + ring, slot * RECORD_BYTES, encode_record(record))


def read(desk: Desk, step: Step, number: int) -> StoredHistory:
    with desk.nothing_changes():
        return desk.call(ops.read_history(desk.q, step, number))


def ago(now: Record, steps: int, step: Step) -> Record:
    return replace(now, at_ms=now.at_ms - steps * step * 60_000, since=abs(steps))


def test_without_a_history_there_is_only_this_moment(desk: Desk) -> None:
    busy(desk)
    found = read(desk, 1, 60)
    assert found.records == []
    assert found.now.gauges == (1, 1, 2, 1)
    assert found.now.since == 0
    desk.wipe()
    assert read(desk, 10, 432).now.gauges == (0, 0, 0, 0)


@pytest.mark.parametrize("step", [1, 10])
@pytest.mark.parametrize("number", [1, 7, 60, 431])
def test_the_last_records_are_returned_and_the_newest_one_before_them(desk: Desk, step: Step, number: int) -> None:
    now = sample(desk)
    length = RINGS[":history" if step == 1 else ":history10"][1]
    backs = {1, 3, number - 2, number, number + 3, length - 2} & set(range(length - 1))
    for back in backs:
        put(desk, ago(now, back, step), step)
    found = read(desk, step, number)
    shift = found.now.minute // step - now.minute // step  # the test may meet the end of a minute
    inside = {back for back in backs if back + shift < number and back} | ({0} if shift < number else set())
    before = {min(rest)} if (rest := {0, *backs} - inside) and number < length else set()
    assert {(now.minute - record.minute) // step for record in found.records} >= inside | before
    assert len(found.records) <= len(inside | before) + 1


def test_a_record_of_an_earlier_turn_of_the_ring_may_be_the_one_before(desk: Desk) -> None:
    now = sample(desk)
    put(desk, ago(now, 480 + 100, 1), 1)
    assert [record.since for record in read(desk, 1, 60).records] == [580, 1]


def test_a_record_of_the_future_is_not_the_one_before(desk: Desk) -> None:
    """The server's clock was set back."""
    now = sample(desk)
    put(desk, ago(now, -(480 - 100), 1), 1)
    assert [record.since for record in read(desk, 1, 60).records] == [1]


def test_the_whole_ring_is_in_the_order_of_the_ring(desk: Desk) -> None:
    now = sample(desk)
    for back in range(1, 432):
        put(desk, ago(now, back, 10), 10)
    found = read(desk, 10, 432)
    minutes = [record.minute for record in found.records]
    assert len(minutes) == 432
    assert minutes[-432:] == sorted(minutes)[-432:] or found.now.minute // 10 != now.minute // 10


def test_a_string_of_another_application_is_no_history(desk: Desk) -> None:
    desk.client.set(desk.q.history, "foreign")
    assert read(desk, 1, 480).records == []
