from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from tests.ops.driver import FUTURE, Desk, Expires
from worqr import ops
from worqr.history_records import (
    COUNTERS,
    FIRST,
    FROM_ZERO,
    MINUTE_RECORDS,
    RECORD_BYTES,
    TEN_MINUTE_RECORDS,
    Record,
    decode_records,
    encode_record,
)
from worqr.keys import MARKER

RINGS = {":history": (1, MINUTE_RECORDS), ":history10": (10, TEN_MINUTE_RECORDS)}


def sample(desk: Desk, *, create: bool = True, since: int = 0, age_ms: int | None = None) -> Record:
    record = desk.call(ops.sample_queue(desk.q, create=create, since=since, age_ms=age_ms))
    assert record is not None
    return record


def stored(desk: Desk, ring: str) -> list[Record]:
    """The records of a ring, the newest last, each in its place."""
    step, length = RINGS[ring]
    whole = desk.client.get(desk.q.base + ring)
    assert isinstance(whole, bytes)
    assert len(whole) == length * RECORD_BYTES
    records = sorted(decode_records(whole), key=lambda record: record.at_ms)
    for record in records:
        at = record.minute // step % length * RECORD_BYTES
        assert whole[at : at + RECORD_BYTES] == encode_record(record)
    return records


def totals(record: Record) -> dict[str, int]:
    return {name: n for name, n in zip(COUNTERS, record.totals, strict=False) if n}


def busy(desk: Desk) -> None:
    """Two tasks run, one waits, one is scheduled, one has failed."""
    failed, _, _ = desk.hold("A", b"a", b"b", b"c")
    desk.fail("A", failed)
    desk.put(b"d")
    desk.dispatch("later", run_at=FUTURE)


def test_a_record_has_the_state_and_the_totals_of_this_moment(desk: Desk) -> None:
    busy(desk)
    before = desk.now()
    record = sample(desk, age_ms=1234)
    assert before <= record.at_ms <= desk.now()
    assert totals(record) == {"enqueued": 5, "claimed": 3, "failed": 1}
    assert record.gauges == (1, 1, 2, 1)
    assert (record.workers, record.age_ms, record.since) == (1, 1234, 0)
    assert stored(desk, ":history") == stored(desk, ":history10") == [replace(record, since=FIRST)]


def test_it_writes_nothing_but_the_two_rings_which_expire(desk: Desk) -> None:
    busy(desk)
    before = desk.state()
    sample(desk)
    after = desk.state()
    for ring in RINGS:
        assert isinstance(after.pop(ring), Expires)
        assert ops.HISTORY_EXPIRE_S - 60 <= desk.client.ttl(desk.q.base + ring) <= ops.HISTORY_EXPIRE_S
    assert after == before


def test_run_times_and_waiting_times_are_read_too(desk: Desk) -> None:
    desk.client.hset(desk.q.runs, mapping={"r0": 1, "r19": 20, "w0": 5, "w15": 2**32 + 6, "rs": 700, "ws": 2**40 + 8})
    record = sample(desk)
    assert record.runs == (1, *[0] * 18, 20)
    assert record.waits == (5, *[0] * 14, 6)
    assert record.totals[-2:] == (700, 8)


def test_a_copy_replaces_the_record_of_its_minute(desk: Desk) -> None:
    busy(desk)
    first = sample(desk, since=77)
    desk.put(b"more")
    second = replace(sample(desk, create=False), since=77)
    assert totals(second)["enqueued"] == 6
    assert stored(desk, ":history")[-1].at_ms == second.at_ms
    if second.minute == first.minute:  # or the test has met the end of a minute
        assert stored(desk, ":history") == [second]


def test_the_first_record_is_kept_if_the_time_before_it_is_unknown(desk: Desk) -> None:
    """All later differences begin with it: two leaders in one minute lose nothing."""
    busy(desk)
    first = replace(sample(desk), since=FIRST)
    desk.put(b"more")
    second = sample(desk, since=99)
    for ring, (step, _) in RINGS.items():
        assert stored(desk, ring)[0] == first
        assert (len(stored(desk, ring)) == 1) == (first.minute // step == second.minute // step)


def test_an_empty_database_has_a_record_of_zeros(desk: Desk) -> None:
    desk.wipe()
    record = sample(desk)
    assert totals(record) == {}
    assert record.gauges == (0, 0, 0, 0)
    assert record.age_ms is None
    assert desk.state().keys() == {":history", ":history10"}


def test_without_rings_only_the_leader_that_gave_them_makes_them(desk: Desk) -> None:
    """So the late request of an older leader does not bring back what a newer one has deleted."""
    busy(desk)
    with desk.nothing_changes():
        assert desk.send(ops.sample_queue(desk.q)) == [b"missing"]
    assert desk.call(ops.sample_queue(desk.q)) is None


def test_in_one_minute_the_first_record_says_since_when(desk: Desk) -> None:
    """Both follow the same record, and another leader that did not see the change does not know."""
    for since in (77, FROM_ZERO | 77):
        desk.wipe()
        first = sample(desk, since=since)
        second = sample(desk, since=99)
        assert first.since == since
        for ring, (step, _) in RINGS.items():
            same = first.minute // step == second.minute // step
            assert stored(desk, ring)[-1].since == (since if same else 99)


def test_a_job_in_front_has_its_exact_age(desk: Desk) -> None:
    desk.dispatch("J", run_at=desk.now() - 5000)
    age = sample(desk, age_ms=1).age_ms
    assert age is not None
    assert 5000 <= age < 60_000
    desk.client.hdel(desk.q.job("J"), "run_at")
    assert sample(desk, age_ms=1).age_ms == 1
    assert sample(desk).age_ms is None


def test_references_without_a_record_do_not_count_as_waiting(desk: Desk) -> None:
    desk.put(MARKER)
    desk.client.hset(desk.q.counts, "stale", 1)
    assert sample(desk).gauges[0] == 0


def test_older_records_stay_until_their_place_is_needed(desk: Desk) -> None:
    now = sample(desk)
    for ring, (step, length) in RINGS.items():
        for back in (1, length - 1):
            old = Record(now.at_ms - back * step * 60_000, 5, *(1, None, (0,) * 4, (0,) * 14, (0,) * 20, (0,) * 16))
            at = old.minute // step % length * RECORD_BYTES
            desk.client.setrange(desk.q.base + ring, at, encode_record(old))
        sample(desk)
        assert [record.since for record in stored(desk, ring)][:2] == [5, 5]
        expired = now.at_ms - length * step * 60_000
        old = Record(expired, 6, *(1, None, (0,) * 4, (0,) * 14, (0,) * 20, (0,) * 16))
        desk.client.setrange(desk.q.base + ring, old.minute // step % length * RECORD_BYTES, encode_record(old))
        sample(desk, since=3)
        assert 6 not in {record.since for record in stored(desk, ring)} or sample(desk).minute != now.minute


def test_the_expiry_is_renewed_after_a_day(desk: Desk) -> None:
    sample(desk)
    desk.client.expire(desk.q.history, ops.HISTORY_EXPIRE_S - 3600)
    sample(desk)
    assert desk.client.ttl(desk.q.history) <= ops.HISTORY_EXPIRE_S - 3600
    desk.client.expire(desk.q.history, ops.HISTORY_EXPIRE_S - 86_400 - 60)
    sample(desk)
    assert desk.client.ttl(desk.q.history) > ops.HISTORY_EXPIRE_S - 60


def test_full_memory_refuses_it(own_desk: Desk) -> None:
    own_desk.client.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        own_desk.call(ops.sample_queue(own_desk.q, create=True))
    own_desk.client.config_set("maxmemory", 0)
    assert own_desk.state(":counts") == {}


def test_both_rings_take_their_whole_memory_at_once(desk: Desk) -> None:
    """A string that grows is given room to grow, up to twice its size."""
    sample(desk)
    at_first = sum(desk.client.memory_usage(desk.q.base + ring) or 0 for ring in RINGS)
    for ring, (_, length) in RINGS.items():
        for n in range(length):
            desk.client.setrange(desk.q.base + ring, n * RECORD_BYTES, bytes([1]) * RECORD_BYTES)
    assert sum(desk.client.memory_usage(desk.q.base + ring) or 0 for ring in RINGS) == at_first
    assert at_first < 230_000
