"""Where a payload is: what waits is compared at both ends of the queue, and nothing is changed."""

from __future__ import annotations

import pytest

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import inspection


def found(desk: Desk, task: bytes = b"x", most: int = 9) -> ops.FoundTask:
    with desk.nothing_changes():
        return desk.call(ops.find_task(desk.q, task, most))


def test_a_place_is_the_number_of_tasks_that_are_taken_before(desk: Desk) -> None:
    desk.put(b"x", b"y", b"x", b"z", b"x")
    assert found(desk) == ops.FoundTask(complete=True, places=[0, 2, 4], ids=[], claims=[])
    assert found(desk, b"nothing") == ops.FoundTask(complete=True, places=[], ids=[], claims=[])
    assert found(desk, most=2) == ops.FoundTask(complete=False, places=[0, 2], ids=[], claims=[])


def test_a_long_queue_is_compared_at_both_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "FIND_DEPTH", 2)
    desk.put(b"x", b"y", b"x", b"y", b"x")
    assert found(desk) == ops.FoundTask(complete=False, places=[0, 4], ids=[], claims=[])
    desk.client.rpop(desk.q.base)
    assert found(desk) == ops.FoundTask(complete=True, places=[1, 3], ids=[], claims=[])


def test_what_runs_is_found_by_its_claims_up_to_a_budget(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = desk.hold("A", b"x", b"y", b"x")
    assert found(desk).claims == [claims[0], claims[2]]
    assert found(desk).complete
    monkeypatch.setattr(inspection, "MAX_ITEMS", 2)
    assert found(desk) == ops.FoundTask(complete=False, places=[], ids=[], claims=[claims[0]])


def test_a_plain_task_that_became_a_job_is_found_by_its_payload(desk: Desk) -> None:
    [claim] = desk.hold("A", b"x")
    desk.call(ops.note_progress(desk.q, "A", [(claim, 0.5, "half")]))
    assert found(desk) == ops.FoundTask(complete=True, places=[], ids=[f"@{claim}"], claims=[])


def test_a_reference_to_a_job_is_no_payload(desk: Desk) -> None:
    desk.put(b"x")
    desk.client.lpush(desk.q.base, b"\0worqr\0one")
    assert found(desk, b"\0worqr\0one") == ops.FoundTask(complete=True, places=[], ids=[], claims=[])


def test_on_an_empty_database_nothing_is_found(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert found(desk) == ops.FoundTask(complete=True, places=[], ids=[], claims=[])
    assert desk.state() == {}


def test_foreign_values_over_a_claim_and_the_twins_count_as_none(desk: Desk) -> None:
    [claim] = desk.hold("A", b"x")
    desk.client.set(f"{desk.q.base}:claim:{claim}", "mine")
    desk.client.set(f"{desk.q.base}:twins:11f6ad8ec52a2984abaafd7c3b516503785c2072", "mine")  # the SHA-1 of x
    assert found(desk) == ops.FoundTask(complete=True, places=[], ids=[], claims=[])
