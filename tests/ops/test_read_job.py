from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import FUTURE, PAST, Desk
from worqr import ops
from worqr.ops import Everything, Stored
from worqr.remote_error import TRACEBACKS_STEP

KEPT = {"result_ttl": "60000"}


def read(desk: Desk, id: str = "x") -> Everything:
    with desk.nothing_changes():
        return desk.call(ops.read_job(desk.q, id))


def texts(stored: Stored | None) -> dict[str, str]:
    assert stored is not None
    return {name: value.decode() for name, value in stored.fields.items() if name != "tries"}


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert read(desk) == Everything(False, -1, None, None, [None, None], [], [])
    assert desk.state() == {}


def test_of_one_that_waits_its_whole_record(desk: Desk) -> None:
    number = desk.dispatch("x", b"payload", run_at=FUTURE, meta='{"a":"b"}', fields={"timeout": "5000"}).number
    found = read(desk)
    assert (found.run, found.cancelling, found.results, found.records) == (None, False, [None, None], [])
    record = {"task": "payload", "state": "due", "run_at": str(FUTURE), "meta": '{"a":"b"}', "timeout": "5000"}
    assert texts(found.job) == {**record, **dict.fromkeys(("first", "last", "queued"), str(number))}
    assert found.job is not None
    assert found.job.size == 7


def test_of_one_that_runs_and_the_one_that_waits_behind_it(desk: Desk) -> None:
    held = desk.run("A", "x", b"first")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.dispatch("x", b"second")
    found = read(desk)
    run, job = texts(found.run), texts(found.job)
    assert (run["task"], run["claim"], run["worker"], run["failures"]) == ("first", str(held), "A", "1")
    assert (job["task"], job["state"], job["run_at"]) == ("second", "blocked", str(PAST))
    assert found.run is not None
    assert len(found.run.fields["tries"]) > 0
    desk.call(ops.cancel_claims(desk.q, [held]))
    assert read(desk).cancelling


def test_its_last_two_results_without_their_values(desk: Desk) -> None:
    held = desk.run("A", "x", fields=KEPT)
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"[1]")}))
    newest, older = read(desk).results
    assert older is None
    assert newest is not None
    assert newest.fields["outcome"] == b"finished"
    assert "value" not in newest.fields
    assert 0 < newest.left_ms <= 60_000
    held = desk.run("A", "x", fields=KEPT)
    desk.fail("A", held)
    newest, older = read(desk).results
    assert newest is not None
    assert older is not None
    assert (newest.fields["outcome"], older.fields["outcome"]) == (b"failed", b"finished")
    assert newest.fields["error_type"] == b"Boom"
    desk.client.delete(desk.q.result("x"))
    newest, older = read(desk).results
    assert newest is None
    assert older is not None


def test_a_result_that_keeps_the_record(desk: Desk) -> None:
    """However the job ends: finished, failed for good, cancelled while it runs, and cancelled while it waits."""
    options: dict[str, Any] = {"keep": True, "meta": '{"a":"b"}', "fields": KEPT | {"max_failures": "1"}}
    finished, failed, cancelled = (desk.run("A", each, b"payload", **options) for each in ("x", "y", "z"))
    desk.call(ops.save_state(desk.q, "A", finished, 1, TRACEBACKS_STEP, b"json []"))
    desk.dispatch("w", b"payload", run_at=FUTURE, **options)
    desk.call(ops.finish_tasks(desk.q, "A", [finished], {finished: ("json", b"[1]")}))
    desk.fail("A", failed)
    desk.client.delete(f"{desk.q.base}:aside:{failed}")
    desk.call(ops.cancel_claims(desk.q, [cancelled]))
    desk.retry("A", cancelled)
    desk.call(ops.cancel_job(desk.q, "w", ""))
    for each, claim in (("x", finished), ("y", failed), ("z", cancelled), ("w", None)):
        result = desk.call(ops.read_job(desk.q, each)).results[0]
        assert result is not None
        found = {name: value.decode("latin-1") for name, value in result.fields.items()}
        assert (found["task"], found["meta"]) == ("payload", '{"a":"b"}')
        assert int(found["ended"]) > 0
        assert found.get("claim") == (None if claim is None else str(claim))
        assert found.get("worker") == (None if claim is None else "A")
        assert ("tries" in found, "step:@errors" in found) == (each == "y", each == "x")
        assert desk.call(ops.read_payload(desk.q, each)) == b"payload"


def test_a_result_without_the_record(desk: Desk) -> None:
    desk.call(ops.finish_tasks(desk.q, "A", [held := desk.run("A", "x", fields=KEPT)], {held: ("json", b"1")}))
    [result, _] = read(desk).results
    assert result is not None
    assert not {"ended", "task", "claim"} & result.fields.keys()
    assert desk.call(ops.read_payload(desk.q, "x")) is None


def test_its_dead_letter_records_the_newest_ten(desk: Desk) -> None:
    for n in range(12):
        desk.fail("A", desk.run("A", "x", b"%d" % n), undecodable=n == 11)
    found = read(desk)
    assert [record.fields["task"] for record in found.records] == [b"%d" % n for n in range(11, 1, -1)]
    assert found.records[0].fields["reason"] == b"broken"
    assert found.records[0].fields["error_traceback"] == b"line 1\nline 2"


def test_for_how_long_the_id_is_reserved(desk: Desk) -> None:
    desk.dispatch("x", unique_for=60_000)
    assert 0 < read(desk).reserved_ms <= 60_000


def test_a_deleted_job_is_none(desk: Desk) -> None:
    desk.dispatch("x")
    desk.call(ops.delete_queue(desk.q))
    assert read(desk).job is None


def test_of_a_long_payload_the_beginning(desk: Desk) -> None:
    payload = bytes(range(256)) * 100
    desk.run("A", "x", payload)
    found = read(desk)
    assert found.run is not None
    assert (found.run.fields["task"], found.run.size) == (payload[:4096], 25_600)


def test_no_more_than_a_mebibyte_of_payload_is_read(desk: Desk) -> None:
    desk.fail("A", desk.run("A", "x", b"0" * 400_000))
    desk.fail("A", desk.run("A", "x", b"1" * 400_000))
    desk.run("A", "x", b"2" * 400_000)
    found = read(desk)
    assert found.run is not None
    assert found.run.fields["task"] == b"2" * 4096
    assert [record.fields["task"] for record in found.records] == [b"1" * 4096, b""]
    assert [record.size for record in found.records] == [400_000, 400_000]
    assert found.records[1].fields["id"] == b"x"


@pytest.mark.parametrize("kind", ["dead_letter", "older"])
def test_a_record_that_is_gone_or_foreign_ends_the_list(desk: Desk, kind: str) -> None:
    first = desk.run("A", "x")
    desk.fail("A", first)
    desk.fail("A", desk.run("A", "x"))
    if kind == "older":
        desk.client.delete(desk.q.dead_letter(first))
    else:
        desk.client.set(desk.q.dead_letter(first), "foreign")
    assert len(read(desk).records) == 1


def test_a_plain_task_that_became_a_job_has_twins(desk: Desk) -> None:
    first, second, third = desk.hold("A", b"x", b"x", b"other")
    desk.call(ops.note_progress(desk.q, "A", [(claim, 0.5, "half") for claim in (first, second, third)]))
    with desk.nothing_changes():
        assert desk.call(ops.read_job(desk.q, f"@{first}")).twins == [f"@{second}"]
        assert desk.call(ops.read_job(desk.q, f"@{third}")).twins == []
    desk.retry("A", second)
    assert desk.call(ops.read_job(desk.q, f"@{second}")).twins == [f"@{first}"]
    desk.client.delete(f"{desk.q.base}:twins:11f6ad8ec52a2984abaafd7c3b516503785c2072")
    desk.client.set(f"{desk.q.base}:twins:11f6ad8ec52a2984abaafd7c3b516503785c2072", "mine")
    assert desk.call(ops.read_job(desk.q, f"@{first}")).twins == []


WAIT = ops.Wait("approved #1", "event", "approved", '{"type":"string"}')


def test_of_what_was_saved_and_sent_the_size_and_what_it_is(desk: Desk) -> None:
    """Values stay in the server: they may be large, and secret."""
    held = desk.run("A", "x")
    secret = b'"' + b"s" * 100 + b'"'
    desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"json " + secret))
    desk.call(ops.save_state(desk.q, "A", held, 0, "ship", b'failed ["Gone","no"]'))
    desk.call(ops.save_state(desk.q, "A", held, 2, "pack", b'["Jam","paper"]'))
    desk.call(ops.suspend_task(desk.q, "A", held, [WAIT]))
    for _ in range(2):
        desk.call(ops.send_event(desk.q, "x", "approved", b"json " + secret, again=True))
    [held] = desk.take("A", 1)
    found = read(desk).run
    assert found is not None
    assert secret not in repr(found).encode()
    fields = found.fields
    assert fields["step:charge"] == b"107 json "
    assert fields["step:ship"] == b'20 failed ["Gone","no"]'
    assert fields["try:pack"] == b'17 2 ["Jam","paper"]'
    assert fields["event:2:approved"] == b"107 json "
    size, outcome, at, entries, rest = fields["end:approved #1"].split(b" ")
    assert (outcome, rest) == (b"value", b"")
    assert int(size) == len(b" ".join((outcome, at, entries, b"json " + secret)))
    desk.fail("A", held)
    [record] = read(desk).records
    assert record.fields["step:charge"] == b"107 json "


def test_fields_of_another_type_and_too_many_of_them_are_read_anyhow(desk: Desk) -> None:
    desk.dispatch("x")
    job = desk.q.job("x")
    desk.client.hset(job, mapping={f"step:{n}": "json 1" for n in range(3_100)})
    desk.client.hset(job, mapping={"end:": b"\xff\x00", "try:": ""})
    found = read(desk).job
    assert found is not None
    assert sum(name.startswith(("step:", "end:", "try:")) for name in found.fields) == 3_000
