"""What may start: the scripts that claim and end tasks of a queue with limits, and the window of a rate.

`tests/model/limits.py` searches the wake-ups; here is what is stored, published and replied.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis

import worqr.lua
from tests.ops.driver import BOOM, Desk, claim, job, payloads, reference
from tests.support.patience import PATIENCE
from worqr import ops
from worqr.command import Command
from worqr.limits import DECLARES_NOTHING
from worqr.lua.assembler import Assembler, library

MINUTE = "60000"


def limit(desk: Desk, text: str) -> bool:
    return desk.call(ops.set_limits(desk.q, text))


def soon(what: Callable[[], bool]) -> None:
    """Wait for something that only time brings."""
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def limited(desk: Desk) -> set[int]:
    """The claims that count."""
    return {int(member) for member in desk.client.smembers(desk.q.limited)}


@pytest.fixture
def two(desk: Desk) -> Desk:
    """A queue where two tasks may run at once; A has both claims, B waits for a task, two tasks wait."""
    desk.enter("A", "B")
    limit(desk, "2")
    desk.put(b"a", b"b", b"c", b"d")
    assert desk.start("A", 5).entries == [b"a", b"b"]
    desk.start("B", 1)
    return desk


# Concurrency


def test_no_more_start_than_may_run_at_once(desk: Desk) -> None:
    desk.enter("A", "B")
    limit(desk, "2")
    desk.put(b"a", b"b", b"c")
    started = desk.start("A", 5)
    assert (started.status, started.entries, started.waiting_workers) == ("limited", [b"a", b"b"], 1)
    assert (limited(desk), desk.waiting()) == ({claim(1), claim(2)}, [b"c"])
    started = desk.start("B", 1)
    assert (started.status, started.entries, started.waiting_workers) == ("limited", [], 2)
    assert desk.state()[":hungry"] == {"A", "B"}


def test_a_worker_that_gets_all_it_wants_does_not_wait(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, "2")
    desk.put(b"a", b"b", b"c")
    assert desk.start("A", 2).status == "ok"
    assert ":hungry" not in desk.state()


def test_a_resent_start_counts_nothing_again(two: Desk) -> None:
    call = ops.start_tasks(two.q, "A", two.starts["A"], 5)
    with two.nothing_changes():
        assert two.send(call)[2:] == [b"a", b"b"]


ENDS: dict[str, Callable[[Desk, int], object]] = {
    "finish_tasks": lambda desk, held: desk.call(ops.finish_tasks(desk.q, "A", [held])),
    "retry_task": lambda desk, held: desk.retry("A", held),
    "retry_task, later": lambda desk, held: desk.retry("A", held, delay_ms=1_000_000),
    "fail_task": lambda desk, held: desk.fail("A", held),
    "stop_tasks": lambda desk, held: desk.call(ops.stop_tasks(desk.q, "A", [held])),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_makes_room_once_and_wakes_one_worker(two: Desk, end: str) -> None:
    two.client.srem(two.q.hungry, "A")
    with two.listening(two.q.wake_channel("A"), two.q.wake_channel("B")) as heard:
        ENDS[end](two, claim(1))
    assert heard == [(":wake:B", b"1")]
    assert limited(two) == {claim(2)}
    with two.listening(two.q.wake_channel("A"), two.q.wake_channel("B")) as heard:
        ENDS[end](two, claim(1))  # a copy
    assert (heard, limited(two)) == ([], {claim(2)})
    assert len(two.start("B", 5).entries) == 1


def test_a_cancelled_run_makes_room(two: Desk) -> None:
    two.client.srem(two.q.hungry, "A")
    two.call(ops.cancel_task(two.q, b"a"))
    with two.listening(two.q.wake_channel("B")) as heard:
        assert two.call(ops.finish_tasks(two.q, "A", [claim(1)])) == {claim(1): "cancelled"}
    assert (heard, limited(two)) == ([(":wake:B", b"1")], {claim(2)})


@pytest.mark.parametrize("how", [ops.fail_worker, ops.stop_work])
def test_the_claims_of_a_worker_that_is_gone_make_room(two: Desk, how: Callable[..., Command[Any]]) -> None:
    with two.listening(two.q.wake_channel("B")) as heard:
        assert two.call(how(two.q, "A", 1)).more
        assert limited(two) == {claim(1)}
        assert not two.call(how(two.q, "A", 1)).more
    assert (set(heard), limited(two)) == ({(":wake:B", b"1")}, set())
    assert payloads(two.start("B", 5).entries) == [b"a", b"b"]


def test_nobody_ends_the_claim_of_another_worker(two: Desk) -> None:
    with two.listening(two.q.wake_channel("B")) as heard:
        assert two.call(ops.finish_tasks(two.q, "B", [claim(1)])) == {claim(1): "mine"}
        assert two.call(ops.stop_tasks(two.q, "B", [claim(1)])) == {claim(1): "mine"}
        assert two.call(ops.finish_tasks(two.q, "gone", [claim(1)])) == {claim(1): "lost"}
    assert (heard, limited(two)) == ([], {claim(1), claim(2)})


def test_an_expired_job_does_not_count(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, "1")
    desk.call(ops.dispatch_jobs(desk.q, [job("old", b"x", expires="0")]))
    desk.put(b"a", b"b")
    started = desk.start("A", 5)
    assert (started.status, started.entries) == ("limited", [None, b"a"])
    assert limited(desk) == {claim(3)}


def test_a_suspect_counts_too(desk: Desk) -> None:
    desk.stall(b"a")
    desk.enter("A")
    limit(desk, "1")
    desk.put(b"b")
    assert len(desk.start("A", 5).entries) == 1
    assert desk.start("A", 5).entries == []


# Wake-ups


def test_what_may_not_start_wakes_nobody(two: Desk) -> None:
    two.call(ops.dispatch_jobs(two.q, [job("due", b"x")]))
    two.client.zadd(two.q.due, {"due": 1})
    with two.listening(two.q.wake_channel("A"), two.q.wake_channel("B"), two.g.due_channel) as heard:
        two.put(b"e")
        two.call(ops.dispatch_jobs(two.q, [job("one", b"x")]))
        two.call(ops.promote_due(two.q, 10))
        two.start("A", 0)  # a wake-up that is passed on
    assert heard == []


def test_as_many_are_woken_as_may_start(desk: Desk) -> None:
    workers = [f"W{n}" for n in range(5)]
    desk.enter(*workers)
    limit(desk, "2")
    for worker in workers:
        desk.start(worker, 1)
    with desk.listening(*(desk.q.wake_channel(worker) for worker in workers)) as heard:
        desk.put(*(b"%d" % n for n in range(5)))
    assert len(heard) == 2


def test_a_start_that_leaves_room_and_tasks_wakes_the_next(desk: Desk) -> None:
    desk.enter("A", "B")
    limit(desk, "3")
    desk.start("B", 1)
    desk.put(b"a", b"b")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        assert desk.start("A", 1).status == "ok"
    assert heard == [(":wake:B", b"1")]


# Rates


def test_no_more_start_than_the_rate_allows(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, f"- 2/{MINUTE}")
    desk.put(b"a", b"b", b"c")
    with desk.listening(desk.g.due_channel) as heard:
        started = desk.start("A", 5)
    assert (started.status, started.entries) == ("limited", [b"a", b"b"])
    [(_, hint)] = heard
    opens_in, base = hint.split()
    assert (0 < int(opens_in) <= 60_060, base.decode()) == (True, desk.q.base)
    assert desk.state().keys() >= {f":starts:{MINUTE}", ":limits"}
    assert ":limited" not in desk.state()
    desk.call(ops.finish_tasks(desk.q, "A", [claim(1), claim(2)]))
    assert desk.start("A", 5).entries == []  # an end makes no room


def test_each_moment_is_announced_once(desk: Desk) -> None:
    desk.enter("A", "B")
    limit(desk, f"- 1/{MINUTE}")
    desk.put(b"a", b"b")
    desk.start("A", 1)
    with desk.listening(desk.g.due_channel) as heard:
        desk.start("A", 1)
        desk.start("B", 1)
        desk.put(b"c")
    assert heard == []


def test_a_task_that_comes_while_the_window_is_full_is_announced(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, f"- 1/{MINUTE}")
    desk.put(b"a")
    assert desk.start("A", 1).status == "ok"
    desk.client.sadd(desk.q.hungry, "A")
    desk.client.hdel(desk.q.counts, "announced")
    with desk.listening(desk.g.due_channel, desk.q.wake_channel("A")) as heard:
        desk.put(b"b")
    assert [channel for channel, _ in heard] == [":due"]


def test_all_limits_hold(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, f"3 5/{MINUTE} 4/30000")
    desk.put(*(b"%d" % n for n in range(9)))
    held = desk.start("A", 9)
    assert (len(held.entries), held.status) == (3, "limited")
    desk.call(ops.finish_tasks(desk.q, "A", range(held.first, held.first + 3)))
    assert len(desk.start("A", 9).entries) == 1
    assert desk.start("A", 9).entries == []


def test_tasks_start_when_the_window_opens(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, "- 2/200")
    desk.put(b"a", b"b", b"c")
    desk.start("A", 5)
    found = desk.call(ops.inspect(desk.q))
    assert (found.room, found.next_in_ms) == (0, found.opens_in_ms)
    soon(lambda: desk.call(ops.inspect(desk.q)).room == 2)
    with desk.listening(desk.q.wake_channel("A")) as heard:
        assert desk.call(ops.promote_due(desk.q, 10)) == (0, None, False)
    assert heard == [(":wake:A", b"1")]
    assert desk.start("A", 5).entries == [b"c"]
    desk.client.delete(desk.q.base)
    soon(lambda: not desk.client.exists(desk.q.starts("200")))


WINDOW = Assembler(
    library(path.read_text("utf-8") for path in sorted(Path(worqr.lua.__file__).parent.glob("*.lua")))
).sent(
    {
        "window": """
local key, period, now, wanted, rate = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local number, leaves_at = starts_within(key, period, now)
local n = math.min(wanted, rate - number)
if n > 0 then
  add_starts(key, period, n, now)
  redis.call('PERSIST', key) -- the moments are the test's, and the key would expire by the server's clock
end
return {n, leaves_at and leaves_at - now or -1, redis.call('LLEN', key)}
"""
    }
)


def moments(random: Random, period: int, *, busy: bool) -> Iterator[int]:
    """The steps between two requests."""
    while True:
        yield random.choice((0, 1, max(1, period // 50)) if busy else (0, 1, 7, period // 3 + 1, period + 5))


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(("rate", "period"), [(1, 1000), (5, 1000), (100, 60), (100, 1000), (1000, 3600), (60, 60_000)])
def test_no_period_has_more_starts_than_the_rate(desk: Desk, rate: int, period: int, busy: bool) -> None:
    """Against all starts, at times that the test says; under load, nearly all that is allowed starts."""
    random, key, now, times = Random(rate + period), f"{desk.q.base}:starts:x", 10**12, list[int]()
    steps, window = moments(random, period, busy=busy), desk.client.register_script(WINDOW)
    for _ in range(1500):
        started, leaves_in, length = window([key], [period, now, random.randint(1, max(1, rate // 3)), rate])
        assert (0 <= started <= rate, length <= 1003) == (True, True)
        times += [now] * started
        now += max(leaves_in, 1) if not started and busy else next(steps)
    assert max(n + 1 - bisect.bisect_right(times, at - period) for n, at in enumerate(times)) <= rate
    if busy:
        assert len(times) >= 0.95 * rate * (times[-1] - times[0]) / period


# Pauses that end by themselves


def test_a_pause_may_end_by_itself(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    with desk.listening(desk.g.due_channel) as heard:
        desk.call(ops.pause(desk.q, "why", 250))
    assert heard == [(":due", b"250 " + desk.q.base.encode())]
    started = desk.start("A", 5)
    assert (started.status, started.entries, desk.state()[":hungry"]) == ("resting", [], {"A"})
    found = desk.call(ops.inspect(desk.q))
    assert (found.room, found.paused) == (0, "why")
    assert found.next_in_ms is not None
    assert 0 <= found.next_in_ms <= 250
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.put(b"b")
    assert heard == []
    soon(lambda: not desk.client.exists(desk.q.paused))
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.call(ops.promote_due(desk.q, 10))
    assert heard == [(":wake:A", b"1")]
    assert desk.start("A", 5).entries == [b"a", b"b"]


def test_a_rate_limited_task_goes_to_the_front_uncounted(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a", b"b", b"c")
    [held] = desk.take("A", 1)
    with desk.listening(desk.g.due_channel) as heard:
        assert desk.retry("A", held, counter="", pause_ms=30_000) == "given"
    assert heard == [(":due", b"30000 " + desk.q.base.encode())]
    assert desk.waiting() == [b"a", b"b", b"c"]
    assert desk.client.lrange(desk.q.base, -1, -1) == [b"a"]  # still a plain task
    assert desk.client.get(desk.q.paused) == BOOM.message.encode()
    assert 0 < desk.client.pttl(desk.q.paused) <= 30_000
    assert desk.counts()["paused"] == 1


def test_a_rate_limited_job_keeps_its_counters(desk: Desk) -> None:
    held = desk.run("A", "j", b"x")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.retry("A", held, counter="", pause_ms=30_000)
    assert desk.client.lrange(desk.q.base, -1, -1) == [reference("j")]
    assert desk.client.hget(desk.q.job("j"), "failures") == b"1"


def test_the_longer_pause_holds(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c", b"d")
    desk.retry("A", held[0], counter="", pause_ms=60_000)
    desk.retry("A", held[1], counter="", pause_ms=10)
    assert desk.client.pttl(desk.q.paused) > 50_000
    desk.retry("A", held[2], counter="", pause_ms=120_000)
    assert desk.client.pttl(desk.q.paused) > 110_000
    desk.call(ops.pause(desk.q, "by hand"))
    desk.retry("A", held[3], counter="", pause_ms=10)
    assert (desk.client.get(desk.q.paused), desk.client.pttl(desk.q.paused)) == (b"by hand", -1)


def test_a_copy_of_a_rate_limited_end_pauses_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held, counter="", pause_ms=60_000)
    desk.call(ops.resume(desk.q))
    with desk.nothing_changes():
        assert desk.retry("A", held, counter="", pause_ms=60_000) == "mine"


# Who says what holds


def declare(desk: Desk, worker: str, text: str = DECLARES_NOTHING) -> bool:
    changed = desk.call(ops.start_work(desk.q, worker, max_stalls=3, keep_failed=1000, last=0, limits=text))
    assert changed in {"", "limits"}
    return changed == "limits"


def test_the_last_worker_that_enters_decides(desk: Desk) -> None:
    assert declare(desk, "A", "2 5/1000")
    assert not declare(desk, "B", "2 5/1000")
    assert not declare(desk, "C")
    assert desk.client.hgetall(desk.q.limits) == {b"declared": b"2 5/1000"}
    assert declare(desk, "D", "")
    assert ":limits" not in desk.state()


def test_an_override_holds_until_it_is_cleared(desk: Desk) -> None:
    declare(desk, "A", "2")
    assert limit(desk, "7")
    assert not declare(desk, "B", "3")
    found = desk.call(ops.inspect(desk.q))
    assert ([str(each) for each in found.limits], found.overridden, found.room) == (["7 at once"], True, 7)
    assert limit(desk, "")
    assert desk.call(ops.inspect(desk.q)).room is None
    assert limit(desk, DECLARES_NOTHING)
    assert desk.call(ops.inspect(desk.q)).room == 3


def test_a_new_limit_counts_what_runs(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    desk.hold("B", b"c")
    desk.put(b"d", b"e")
    limit(desk, "4")
    assert limited(desk) == {claim(1), claim(2), claim(3)}
    assert desk.start("A", 5).entries == [b"d"]
    limit(desk, f"- 100/{MINUTE}")
    assert ":limited" not in desk.state()
    limit(desk, "2")  # lower than what runs: nothing is stopped
    assert (len(limited(desk)), desk.start("B", 5).entries) == (4, [])


def test_a_higher_limit_wakes_workers(two: Desk) -> None:
    with two.listening(two.q.wake_channel("A"), two.q.wake_channel("B")) as heard:
        limit(two, "3")
    assert len(heard) == 1


def test_an_equal_limit_changes_nothing(two: Desk) -> None:
    with two.nothing_happens():
        assert not limit(two, "2")


def test_a_resend_of_a_limit_does_not_undo_a_later_one(desk: Desk) -> None:
    call = ops.set_limits(desk.q, "2")
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 1]
    desk.client.hset(desk.q.limits, "override", "9")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 1]


def test_a_late_copy_of_a_limit_does_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.set_limits(desk.q, "2")) == [b"late"]


def test_the_last_worker_takes_what_it_declared_along(desk: Desk) -> None:
    declare(desk, "A", "2")
    declare(desk, "B", "2")
    desk.call(ops.stop_work(desk.q, "A"))
    assert desk.client.hget(desk.q.limits, "declared") == b"2"
    desk.call(ops.fail_worker(desk.q, "B"))
    assert ":limits" not in desk.state()
    declare(desk, "A", "2")
    limit(desk, "9")
    desk.call(ops.stop_work(desk.q, "A"))
    assert desk.client.hgetall(desk.q.limits) == {b"override": b"9"}


@pytest.mark.parametrize(
    "text", ["0", "10 -", "x", "10 5", "- 0/5", "1 1/1 1/2 1/3 1/4 1/5", "12345678", "- 1/99999999999", "5/1000 10"]
)
def test_a_text_that_is_no_limit_is_refused(desk: Desk, text: str) -> None:
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="limits must be like 10 100/60000"):
        limit(desk, text)
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="limits must be like 10 100/60000"):
        declare(desk, "A", text)


# Keys of another type


@pytest.mark.parametrize("key", ["limits", "limited"])
def test_a_key_of_a_foreign_type_stops_a_start_before_it_writes(desk: Desk, key: str) -> None:
    desk.enter("A")
    limit(desk, "2")
    desk.put(b"a")
    desk.client.delete(getattr(desk.q, key))
    desk.client.set(getattr(desk.q, key), "of another application")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.start("A", 1)


def test_a_window_of_a_foreign_type_has_counted_no_start_and_is_replaced(desk: Desk) -> None:
    desk.enter("A")
    limit(desk, f"- 2/{MINUTE}")
    desk.put(b"a", b"b", b"c")
    desk.client.set(desk.q.starts(MINUTE), "of another application")
    assert len(desk.start("A", 3).entries) == 2
    assert desk.waiting() == [b"c"]
    assert desk.client.ttl(desk.q.starts(MINUTE)) > 0
