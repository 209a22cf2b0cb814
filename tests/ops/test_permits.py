"""Permits of a named limit: never more in any period or at once, whatever is given back, corrected, renewed or lost."""

from __future__ import annotations

import re
from unittest.mock import ANY

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.driver import Desk
from tests.support.patience import PATIENCE
from worqr import ops
from worqr.keys import LimitKeys, RegistryKeys
from worqr.ops import PermitReply

PERIOD = 60_000


def limit_of(desk: Desk) -> LimitKeys:
    return LimitKeys(desk.prefix, "Q1")


def take(desk: Desk, permit: str, cost: int = 1, limits: str = "2 10/60000", lease_ms: int = 10_000) -> PermitReply:
    return desk.call(ops.take_permits(limit_of(desk), limits, [permit], cost, lease_ms))


def give_back(desk: Desk, permit: str, used: int | None = None) -> bool:
    return desk.call(ops.return_permit(limit_of(desk), permit, used))


def spent(desk: Desk) -> int:
    return int(desk.client.hget(limit_of(desk).costs(str(PERIOD)), "total") or 0)


def age(desk: Desk, ms: int) -> None:
    """Let everything in the window have been started earlier."""
    keys = limit_of(desk)
    moments, costs = keys.moments(str(PERIOD)), keys.costs(str(PERIOD))
    old = desk.client.lrange(moments, 0, -1)
    table = desk.client.hgetall(costs)
    desk.client.delete(moments, costs)
    for moment in old:
        desk.client.rpush(moments, int(moment) - ms)
    desk.client.hset(costs, mapping={k if k == b"total" else str(int(k) - ms).encode(): v for k, v in table.items()})
    for permit, record in desk.client.hgetall(keys.permits).items():
        if record[:1] == b"~":
            continue
        cost, period, moment = record.split()
        desk.client.hset(keys.permits, permit, b"%b %b %d" % (cost, period, int(moment) - ms))


def test_a_permit_is_granted_while_both_limits_allow_it(desk: Desk) -> None:
    assert take(desk, "a") == take(desk, "b") == PermitReply("ok", 1)
    assert (refused := take(desk, "c")).word == "wait"
    assert 0 < refused.number <= 10_000  # until the first lease ends
    assert give_back(desk, "a")
    assert take(desk, "c") == PermitReply("ok", 1)
    assert spent(desk) == 3


STEPS = st.lists(
    st.tuples(st.sampled_from((0, 0, 0, 25_000, 45_000)), st.integers(1, 6), st.integers(0, 6)), max_size=25
)


@given(STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_period_has_never_more_than_the_rate_and_what_fits_is_granted(
    desk: Desk, steps: list[tuple[int, int, int]]
) -> None:
    """Each step lets time pass and takes a permit of a cost, which uses that much or less. No sum of the times is the period."""
    desk.client.delete(*desk.client.keys(f"{limit_of(desk).base}*"), "nothing")
    clock, started = 0, list[tuple[int, int]]()
    for n, (passed, cost, used) in enumerate(steps):
        clock += passed
        if passed and started:
            age(desk, passed)
        fits = sum(each for moment, each in started if moment > clock - PERIOD) + cost <= 10
        assert (take(desk, str(n), cost, "- 10/60000").word == "ok") == fits
        give_back(desk, str(n), min(used, cost))
        if fits:
            started.append((clock, min(used, cost)))


def test_a_permit_that_is_taken_twice_counts_once(desk: Desk) -> None:
    take(desk, "a", 5)
    with desk.nothing_changes():
        assert take(desk, "a", 5) == PermitReply("ok", 1)
    assert give_back(desk, "a", 2)
    with desk.nothing_changes():
        assert not give_back(desk, "a", 2)
    assert spent(desk) == 2


def test_the_use_replaces_the_estimate_at_the_time_of_the_start(desk: Desk) -> None:
    take(desk, "a", 8)
    age(desk, PERIOD // 2)
    give_back(desk, "a", 10)
    reply = take(desk, "b")
    assert reply.word == "wait"
    assert 20_000 < reply.number <= PERIOD // 2 + 100
    age(desk, PERIOD // 2 + 100)
    assert take(desk, "b").word == "ok"
    assert spent(desk) == 1


def test_the_caller_that_has_waited_longest_is_the_next_one(desk: Desk) -> None:
    """Also at a rate, and though another one asks first when there is room."""
    assert take(desk, "a", limits="1/60000").word == "ok"
    assert take(desk, "far", limits="1/60000").word == "wait"
    assert take(desk, "near", limits="1/60000").word == "wait"
    age(desk, PERIOD + 100)
    assert take(desk, "near", limits="1/60000").word == "wait"
    assert take(desk, "far", limits="1/60000").word == "ok"


def test_a_caller_that_has_only_waited_wakes_none(desk: Desk) -> None:
    take(desk, "a", limits="1")
    take(desk, "b", limits="1")
    heard = desk.client.pubsub()
    heard.subscribe(limit_of(desk).free)
    while heard.get_message(timeout=1):
        pass
    give_back(desk, "b")
    assert heard.get_message(timeout=0.2) is None
    give_back(desk, "a")
    assert heard.get_message(timeout=PATIENCE)
    heard.close()


def test_the_dead_hold_a_permit_until_their_lease_ends_and_a_renewal_prolongs_it(desk: Desk) -> None:
    take(desk, "dead")
    take(desk, "alive")
    keys = limit_of(desk)
    desk.client.zadd(keys.held, {"dead": desk.now() - 1, "alive": desk.now() + 1000})
    desk.call(ops.renew_permits(keys, ["alive"], 60_000))
    assert take(desk, "c").word == "ok"
    assert take(desk, "d").word == "wait"
    assert desk.client.zrange(keys.held, 0, -1) == [b"c", b"alive"]
    permits = desk.client.hgetall(keys.permits)
    assert permits == {b"alive": ANY, b"c": ANY, b"d": ANY}
    assert re.fullmatch(rb"~1 \d+", permits[b"d"])


def test_a_lease_of_the_far_future_was_taken_before_the_clock_was_set_back(desk: Desk) -> None:
    take(desk, "a", limits="1")
    desk.client.zadd(limit_of(desk).held, {"a": desk.now() + 3_600_000})
    assert take(desk, "b", limits="1").word == "ok"


def test_a_large_cost_is_not_overtaken_for_ever(desk: Desk) -> None:
    take(desk, "a", 4, "- 10/60000")
    assert take(desk, "large", 9, "- 10/60000").word == "wait"
    assert take(desk, "small", 1, "- 10/60000").word == "wait"
    give_back(desk, "large")  # it waits no longer
    assert take(desk, "small", 1, "- 10/60000").word == "ok"


def test_a_cost_above_the_rate_and_a_limit_without_numbers_are_refused(desk: Desk) -> None:
    with desk.nothing_changes():
        assert take(desk, "a", 11) == PermitReply("never", 10)
        assert take(desk, "a", limits="") == PermitReply("unknown")
    take(desk, "a")
    assert take(desk, "b", limits="").word == "ok"
    assert take(desk, "c", limits="").word == "wait"


def test_other_numbers_replace_those_before_and_what_is_held_counts(desk: Desk) -> None:
    take(desk, "a")
    assert take(desk, "b", limits="1 10/60000").other == "2 10/60000"
    assert (again := take(desk, "b", limits="1 10/60000")).word == "wait"
    assert not again.other


def test_the_keys_expire(desk: Desk) -> None:
    take(desk, "a")
    keys = limit_of(desk)
    for key in (keys.held, keys.permits, keys.moments("60000"), keys.costs("60000")):
        assert 0 < desk.client.pttl(key) <= PERIOD + 100, key
    assert desk.client.ttl(keys.base) > 2_500_000


@pytest.mark.parametrize("value", [b"", b"odd", b"1e999", b"-5", b"\xff"])
def test_what_another_program_wrote_there_is_no_error(desk: Desk, value: bytes) -> None:
    take(desk, "a")
    keys = limit_of(desk)
    [moment] = desk.client.lrange(keys.moments("60000"), 0, -1)
    desk.client.hset(keys.costs("60000"), mapping={"total": value, moment: value})
    desk.client.hset(keys.permits, "a", value)
    desk.client.set(keys.turn, value, px=1000)
    take(desk, "b")
    give_back(desk, "a", 5)
    desk.client.lpush(keys.moments("60000"), value)
    desk.client.hset(keys.base, "limits", value)
    take(desk, "c", limits="")
    assert take(desk, "d").word in {"ok", "wait"}


@pytest.mark.parametrize("key", ["base", "held", "permits", "turn"])
def test_a_key_of_another_type_is_an_error_before_the_first_write(desk: Desk, key: str) -> None:
    take(desk, "a")
    keys = limit_of(desk)
    desk.client.delete(getattr(keys, key))
    desk.client.rpush(getattr(keys, key), "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        take(desk, "b")


def look(desk: Desk) -> ops.LimitUse:
    use = desk.call(ops.look_at_limit(limit_of(desk)))
    assert use is not None
    return use


def test_a_look_has_what_is_held_spent_and_waited_for_and_changes_nothing(desk: Desk) -> None:
    assert desk.call(ops.look_at_limit(limit_of(desk))) is None
    take(desk, "old", 4)
    age(desk, PERIOD + 100)
    give_back(desk, "old")
    take(desk, "a", 3)
    take(desk, "dead", 2)
    desk.call(ops.take_permits(limit_of(desk), "2 10/60000", ["c"], 1, 10_000, 7))
    with desk.nothing_changes():
        assert look(desk) == ops.LimitUse("2 10/60000", 2, 0, 7, [5])
    desk.client.zadd(limit_of(desk).held, {"dead": desk.now() - 1})
    assert look(desk) == ops.LimitUse("2 10/60000", 2, 1, 7, [5])
    assert take(desk, "c").word == "ok"  # frees that of the dead
    assert look(desk) == ops.LimitUse("2 10/60000", 2, 0, 0, [6])


def test_those_who_wait_are_forgotten_when_they_give_up_or_ask_no_more(desk: Desk) -> None:
    take(desk, "a", limits="1")
    take(desk, "b", limits="1")
    assert look(desk).waiting == 1
    give_back(desk, "b")
    assert look(desk).waiting == 0
    take(desk, "c", limits="1")
    desk.client.zadd(limit_of(desk).waiting, {"c": desk.now() - 1})
    assert look(desk).waiting == 0
    take(desk, "d", limits="1")
    assert desk.client.zrange(limit_of(desk).waiting, 0, -1) == [b"d"]


def test_as_many_of_the_permits_are_granted_as_there_is_room_for(desk: Desk) -> None:
    def take_all(*permits: str) -> PermitReply:
        return desk.call(ops.take_permits(limit_of(desk), "3 10/60000", permits, 4, 10_000))

    assert take_all("a", "b", "c") == PermitReply("ok", 2)  # three would cost 12
    with desk.nothing_changes():
        assert take_all("a", "b") == PermitReply("ok", 2)
    assert take_all("d").word == "wait"
    assert spent(desk) == 8


def test_who_waits_for_a_permit_gets_it_before_those_who_take_one_again_and_again(desk: Desk) -> None:
    take(desk, "a", limits="1")
    assert take(desk, "waits", limits="1").word == "wait"
    give_back(desk, "a")
    assert take(desk, "a again", limits="1").word == "wait"
    assert take(desk, "waits", limits="1").word == "ok"


def test_limits_are_listed_for_30_days_after_the_last_note(desk: Desk) -> None:
    day = 86_400_000
    desk.client.hset(desk.g.limits, mapping={"old": f"{desk.now() - 31 * day} ", "new": f"{desk.now() - 29 * day} a b"})
    assert desk.call(ops.list_limits(desk.g)) == {"new": "a b"}
    desk.call(ops.note_limit(desk.g, "api", "tokens"))
    assert desk.call(ops.list_limits(desk.g)) == {"new": "a b", "api": "tokens"}
    assert desk.client.hkeys(desk.g.limits) == [b"new", b"api"]
    desk.client.hset(desk.g.limits, "odd", "1e999")
    assert "odd" not in desk.call(ops.list_limits(desk.g))


@pytest.mark.parametrize("left", [None, 10**9])
def test_a_turn_that_another_program_has_written_keeps_nothing(desk: Desk, left: int | None) -> None:
    desk.client.set(f"{limit_of(desk).base}:turn", "foreign", px=left)
    assert take(desk, "a") == PermitReply("ok", 1)


def test_a_note_of_a_limit_looks_at_some_of_many(desk: Desk) -> None:
    registry = RegistryKeys(desk.prefix)
    desk.client.hset(f"{registry.base}:limits", mapping={f"customer-{n}": "1 " for n in range(100)})
    desk.call(ops.note_limit(registry, "api", "calls"))
    assert desk.client.hlen(f"{registry.base}:limits") >= 91
    for _ in range(40):
        desk.call(ops.note_limit(registry, "api", "calls"))
    assert 1 <= desk.client.hlen(f"{registry.base}:limits") < 100
    assert desk.call(ops.list_limits(registry)) == {"api": "calls"}
