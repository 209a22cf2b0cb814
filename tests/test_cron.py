"""When schedules fire: cron expressions against a slow matcher of every minute, what clocks do twice a year, what was missed."""

from __future__ import annotations

import builtins
import random
import sys
import zoneinfo
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr import cron as cron_module
from worqr.cron import AHEAD_MS, ON_TIME_MS, Definition, Trigger, at, due_firings, jitter_ms, ms_of
from worqr.errors import UsageError

HOUR = 3_600_000
DAY = 24 * HOUR


def cron(expression: str, timezone: str = "UTC", **more: Any) -> Trigger:
    return Trigger(Definition(name="s", queue="q", task=b"", cron=expression, timezone=timezone, **more))


def every(seconds: float, **more: Any) -> Trigger:
    return Trigger(Definition(name="s", queue="q", task=b"", every_ms=round(seconds * 1000), **more))


def utc(text: str) -> int:
    return ms_of(datetime.fromisoformat(text).replace(tzinfo=UTC))


def local_times(trigger: Trigger, start: str, n: int) -> list[str]:
    """The next `n` firings after a UTC time, as the clock of the trigger's zone shows them, with its offset."""
    zone, now, found = zoneinfo.ZoneInfo(trigger.definition.timezone), utc(start), []
    for _ in range(n):
        now = trigger.next_after(now)
        found.append(at(now).astimezone(zone).strftime("%m-%d %H:%M %z"))
    return found


# Time


@pytest.mark.parametrize("ms", [0, 1, 999, 1_700_000_000_123, 253_370_764_799_999])
def test_milliseconds_survive_the_way_there_and_back(ms: int) -> None:
    assert ms_of(at(ms)) == ms


@pytest.mark.parametrize(("ms", "year"), [(-1, 1970), (-(10**400), 1970), (10**15, 9999), (10**400, 9999)])
def test_a_stored_time_that_cannot_be_becomes_the_nearest_one(ms: int, year: int) -> None:
    assert at(ms) == datetime(year, 1, 1, tzinfo=UTC)
    assert at(ms).tzinfo is UTC


# Every


def test_a_period_fires_at_its_multiples_whoever_asks_when() -> None:
    trigger = every(0.2)
    assert trigger.next_after(0) == 200
    assert trigger.next_after(199) == 200
    assert trigger.next_after(200) == 400
    assert trigger.next_after(1_700_000_000_001) == 1_700_000_000_200


def test_a_period_that_divides_no_day_goes_on_over_midnight() -> None:
    trigger = every(7 * 60)
    first = trigger.next_after(utc("2026-01-01"))
    assert first % (7 * 60_000) == 0
    assert trigger.next_after(first) - first == 7 * 60_000


@pytest.mark.parametrize("n", [0, 1, 3, 8, 9, 10, 100])
def test_the_last_of_a_period(n: int) -> None:
    trigger, firings = every(1), list(range(2000, 10_001, 1000))
    assert trigger.last_between(1000, 10_000, n) == firings[max(0, 9 - n) :]
    assert trigger.last_between(999, 10_000, n) == [1000, *firings][max(0, 10 - n) :]
    assert trigger.last_between(1001, 9_999, n) == firings[:-1][max(0, 8 - n) :]
    assert trigger.last_between(10_000, 10_000, n) == []
    assert trigger.last_between(11_000, 10_000, n) == []


def test_a_second_left_alone_for_a_century_costs_nothing() -> None:
    assert every(1).last_between(0, 100 * 365 * DAY, 2) == [100 * 365 * DAY - 1000, 100 * 365 * DAY]


# Cron, in general


def fields_match(expression: str, when: datetime) -> bool:
    """A slow and simple reading of plain numbers, lists, ranges, steps and stars."""
    minute, hour, day, month, weekday = expression.split()

    def match(field: str, value: int, low: int, high: int) -> bool:
        for part in field.split(","):
            span, _, step = part.partition("/")
            first, _, last = span.partition("-")
            if span == "*":
                start, end = low, high
            else:
                start = int(first)
                end = int(last) if last else high if step else start
            if value in range(start, end + 1, int(step or 1)):
                return True
        return False

    day_ok, weekday_ok = (
        match(day, when.day, 1, 31),
        any(match(weekday, n, 0, 7) for n in {when.isoweekday(), when.isoweekday() % 7}),
    )
    both = day_ok and weekday_ok if day.startswith("*") or weekday.startswith("*") else day_ok or weekday_ok
    return (
        match(minute, when.minute, 0, 59) and match(hour, when.hour, 0, 23) and match(month, when.month, 1, 12) and both
    )


@cache
def shown_in(zone: zoneinfo.ZoneInfo, start: datetime, days: int) -> dict[datetime, list[datetime]]:
    """Every minute that a clock of the zone shows, and when."""
    shown: dict[datetime, list[datetime]] = {}
    moment, end = start, start + timedelta(days=days)
    while moment <= end:
        shown.setdefault(moment.astimezone(zone).replace(tzinfo=None), []).append(moment)
        moment += timedelta(minutes=1)
    return shown


def expected_firings(expression: str, zone: zoneinfo.ZoneInfo, start: datetime, days: int) -> list[int]:
    """By the promise itself: each minute that exists, at its first time; the ones that do not exist, at the next that does;
    for expressions of every hour also at the second time."""
    shown = shown_in(zone, start, days)
    both_times = expression.split()[1] in ("*", "0-23", "*/1")
    found: set[datetime] = set()
    naive, last = min(shown), max(shown)
    while naive <= last:
        if fields_match(expression, naive):
            existing = naive
            while existing not in shown:
                existing += timedelta(minutes=1)
            found.update(shown[existing] if both_times and existing == naive else shown[existing][:1])
        naive += timedelta(minutes=1)
    return sorted(ms_of(moment) for moment in found)


def all_firings(trigger: Trigger, start: datetime, days: int) -> list[int]:
    now, end, found = ms_of(start) - 1, ms_of(start + timedelta(days=days)), []
    while (now := trigger.next_after(now)) <= end:
        found.append(now)
    return found


EXPRESSIONS = [
    "*/15 * * * *",
    "* * * * *",
    "7 * * * *",
    "0 0-23 * * *",
    "0 */1 * * *",
    "30 2 * * *",
    "0 3 * * *",
    "0,15,30,45 1-3 * * *",
    "*/10 2 * * *",
    "15 */2 * * *",
    "0 0 * * *",
    "30 0,23 * * *",
    "59 23 28-31 * *",
    "5 4 * * 0",
    "5 4 1 * 7",
    "0 12 29 2 *",
    "10 * * * 0",
    "0 * 29 10 *",
]
ZONES = {
    "UTC": ["2026-03-28", "2028-02-28"],
    "Europe/Berlin": ["2026-03-28", "2026-10-24"],
    "America/New_York": ["2026-03-07", "2026-10-31"],
    "Australia/Lord_Howe": ["2026-04-04", "2026-10-03"],  # by half an hour
    "Africa/Cairo": ["2026-04-23", "2026-10-29"],  # at midnight: an hour of yesterday comes twice
    "America/Havana": ["2026-03-07", "2026-10-31"],  # at midnight: there is no 00:00
    "Asia/Kathmandu": ["2026-03-28"],
    "Pacific/Apia": ["2011-12-29"],  # a day that does not exist
    "America/St_Johns": ["2006-04-01", "2006-10-28"],  # at 00:01: the second 23:01 is that of yesterday
}


@pytest.mark.sweep(keep=40)
@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("zone", ZONES)
def test_firings_are_those_of_the_promise(zone: str, expression: str) -> None:
    for start in ZONES[zone]:
        begin = datetime.fromisoformat(start).replace(tzinfo=UTC)
        expected = expected_firings(expression, zoneinfo.ZoneInfo(zone), begin, 3)
        assert all_firings(cron(expression, zone), begin, 3) == expected, start


@pytest.mark.parametrize("zone", ["America/St_Johns", "America/Goose_Bay"])
def test_an_hourly_expression_of_a_day_whose_beginning_comes_twice_has_an_end(zone: str) -> None:
    """The default jitter of a stored schedule is that of its times in 2001."""
    times = local_times(cron("10 * * 10 7L", zone), "2001-01-01T00:00", 2)
    assert [each[:11] for each in times] == ["10-28 00:10", "10-28 01:10"]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe"])
def test_the_next_firing_does_not_depend_on_when_one_asks(zone: str) -> None:
    rng = random.Random(7)
    for expression in ("30 2 * * *", "*/15 * * * *", "0,30 1-3 * * *"):
        trigger = cron(expression, zone)
        for start in ZONES[zone]:
            begin = datetime.fromisoformat(start).replace(tzinfo=UTC)
            firings = all_firings(trigger, begin, 3)
            for _ in range(200):
                now = rng.randrange(firings[0] - 1, firings[-1])
                assert trigger.next_after(now) == next(each for each in firings if each > now)
            for before, after in pairwise(firings):
                assert trigger.next_after(before) == after
                assert trigger.next_after(after - 1) == after


def test_a_leap_day_is_waited_for() -> None:
    trigger = cron("0 12 29 2 *")
    assert at(trigger.next_after(utc("2026-01-01"))) == datetime(2028, 2, 29, 12, tzinfo=UTC)
    assert at(trigger.next_after(utc("2096-03-01"))) == datetime(2104, 2, 29, 12, tzinfo=UTC)


def test_words_last_days_and_nth_weekdays_are_understood() -> None:
    assert at(cron("0 9 * * MON#1").next_after(utc("2026-01-10"))) == datetime(2026, 2, 2, 9, tzinfo=UTC)
    assert at(cron("0 9 L * *").next_after(utc("2026-02-01"))) == datetime(2026, 2, 28, 9, tzinfo=UTC)
    assert at(cron("0 9 1 jan *").next_after(utc("2026-02-01"))) == datetime(2027, 1, 1, 9, tzinfo=UTC)


# Cron, twice a year, told as a person would


def test_a_local_time_that_does_not_exist_fires_at_the_next_that_does() -> None:
    assert local_times(cron("30 2 * * *", "Europe/Berlin"), "2026-03-27T12:00", 3) == [
        *("03-28 02:30 +0100", "03-29 03:00 +0200", "03-30 02:30 +0200"),
    ]
    assert local_times(cron("15 2 * * *", "Australia/Lord_Howe"), "2026-10-02T12:00", 3) == [
        *("10-03 02:15 +1030", "10-04 02:30 +1100", "10-05 02:15 +1100"),
    ]


def test_several_that_do_not_exist_fire_once() -> None:
    assert local_times(cron("0,10,20 2,3 * * *", "America/New_York"), "2026-03-08T06:59", 4) == [
        *("03-08 03:00 -0400", "03-08 03:10 -0400", "03-08 03:20 -0400", "03-09 02:00 -0400"),
    ]


def test_a_local_time_that_exists_twice_fires_once_at_the_first() -> None:
    assert local_times(cron("30 2 * * *", "Europe/Berlin"), "2026-10-24T12:00", 2) == [
        *("10-25 02:30 +0200", "10-26 02:30 +0100"),
    ]
    # asked between the two
    assert local_times(cron("30 2 * * *", "Europe/Berlin"), "2026-10-25T01:10", 1) == ["10-26 02:30 +0100"]


def test_a_quarter_of_every_hour_goes_on_in_real_time() -> None:
    assert local_times(cron("*/30 * * * *", "Europe/Berlin"), "2026-10-24T23:45", 6) == [
        *("10-25 02:00 +0200", "10-25 02:30 +0200", "10-25 02:00 +0100", "10-25 02:30 +0100"),
        *("10-25 03:00 +0100", "10-25 03:30 +0100"),
    ]
    assert local_times(cron("*/30 * * * *", "Europe/Berlin"), "2026-03-29T00:15", 3) == [
        *("03-29 01:30 +0100", "03-29 03:00 +0200", "03-29 03:30 +0200"),
    ]


def test_spaces_in_an_expression_change_nothing() -> None:
    """As in a line of an export that people have edited."""
    now = ms_of(datetime(2026, 3, 1, 12, 5, tzinfo=UTC))
    made = [
        Trigger(Definition(name="s", queue="q", task=b"", cron=cron, timezone="Europe/Berlin")).next_after(now)
        for cron in ("0 * * * *", "0  * * * *", " 0 * * * *")
    ]
    assert {*made} == {ms_of(datetime(2026, 3, 1, 13, tzinfo=UTC))}


def test_named_hours_mean_local_time_whatever_their_minutes() -> None:
    """Where Debian's cron would fire eight times, or not at all."""
    trigger = cron("*/15 2 * * *", "Europe/Berlin")
    assert local_times(trigger, "2026-10-24T22:00", 5)[3:] == ["10-25 02:45 +0200", "10-26 02:00 +0100"]
    assert local_times(trigger, "2026-03-28T22:00", 2) == ["03-29 03:00 +0200", "03-30 02:00 +0200"]


# The last ones


def test_the_last_firings_of_a_cron_expression() -> None:
    trigger = cron("0 3 * * *")
    until = utc("2026-03-10T12:00")
    assert trigger.last_between(utc("2026-03-01"), until, 3) == [
        utc(f"2026-03-{day}T03:00") for day in ("08", "09", "10")
    ]
    assert trigger.last_between(utc("2026-03-09T03:00"), until, 3) == [utc("2026-03-10T03:00")]
    assert trigger.last_between(utc("2026-03-09T02:59:59"), utc("2026-03-09T03:00"), 3) == [utc("2026-03-09T03:00")]
    assert trigger.last_between(utc("2026-03-10T03:00"), until, 3) == []
    assert trigger.last_between(until, until, 3) == []


def test_a_minute_left_alone_for_years_is_looked_at_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trigger, calls, ask = cron("* * * * *"), 0, Trigger.next_after

    def counted(self: Trigger, ms: int) -> int:
        nonlocal calls
        calls += 1
        return ask(self, ms)

    monkeypatch.setattr(Trigger, "next_after", counted)
    until = utc("2026-01-01")
    assert trigger.last_between(utc("2016-01-01"), until, 2) == [until - 60_000, until]
    assert calls < 100


# Judging


NOW = utc("2026-03-10T12:00")


def test_nothing_is_due_before_the_next_nominal_time() -> None:
    decision = due_firings(every(60), NOW, NOW + 59_999)
    assert (decision.fire, decision.cursor, decision.missed, decision.next) == ([], NOW, 0, NOW + 60_000)


def test_what_is_on_time_is_fired_whatever_the_misfire_rule() -> None:
    for misfire in (0, 1, 5):
        decision = due_firings(every(1, misfire=misfire), NOW, NOW + 3_500)
        assert decision.fire == [NOW + 1000, NOW + 2000, NOW + 3000]
        assert (decision.cursor, decision.missed, decision.caught_up, decision.next) == (NOW + 3000, 0, 0, NOW + 4000)


def test_on_time_ends_after_ten_seconds() -> None:
    assert ON_TIME_MS == 10_000
    assert due_firings(every(60, misfire=0), NOW, NOW + 60_000 + 9_999).fire == [NOW + 60_000]
    assert due_firings(every(60, misfire=0), NOW, NOW + 60_000 + 10_000).fire == []
    assert due_firings(every(60, misfire=0), NOW, NOW + 60_000 + 10_000, waited_ms=1).fire == [NOW + 60_000]
    assert due_firings(every(60, misfire=1), NOW, NOW + 60_000 + 10_000).fire == [NOW + 60_000]


@pytest.mark.parametrize(("misfire", "caught_up"), [(0, 0), (1, 1), (3, 3), (100, 5)])
def test_of_what_was_missed_as_many_are_caught_up_as_the_rule_says(misfire: int, caught_up: int) -> None:
    missed = [NOW + n * HOUR for n in range(1, 6)]
    now = NOW + 6 * HOUR + 5_000
    decision = due_firings(every(3600, misfire=misfire), NOW, now)
    assert decision.fire == [*(missed[-caught_up:] if caught_up else []), NOW + 6 * HOUR]
    assert decision.caught_up == caught_up
    assert decision.missed >= 1
    assert decision.cursor == NOW + 6 * HOUR
    assert decision.next == NOW + 7 * HOUR


def test_all_that_was_missed_is_judged_also_when_nothing_of_it_is_fired() -> None:
    decision = due_firings(cron("0 3 * * *", misfire=0), utc("2026-03-01"), NOW)
    assert (decision.fire, decision.cursor) == ([], utc("2026-03-10T03:00"))


def test_a_clock_that_was_set_back_by_up_to_a_minute_fires_nothing_twice() -> None:
    assert AHEAD_MS == 60_000
    decision = due_firings(every(10), NOW, NOW - 60_000)
    assert (decision.fire, decision.cursor, decision.next) == ([], NOW, NOW + 10_000)


def test_a_cursor_further_ahead_counts_as_now() -> None:
    decision = due_firings(every(60), NOW, NOW - HOUR + 1)
    assert (decision.fire, decision.cursor, decision.next) == ([], NOW - HOUR + 1, NOW - HOUR + 60_000)


@given(
    period=st.sampled_from([0.1, 1, 7, 60, 3600]),
    misfire=st.sampled_from([0, 1, 3, 100]),
    cursor=st.integers(NOW - 4 * HOUR, NOW),
    late=st.one_of(st.integers(0, 30_000), st.integers(0, 4 * HOUR)),
)
def test_every_firing_is_judged_once_as_on_time_or_as_missed(
    period: float, misfire: int, cursor: int, late: int
) -> None:
    trigger, now = every(period, misfire=misfire), cursor + late
    decision = due_firings(trigger, cursor, now)
    step = trigger.definition.every_ms
    passed = range((cursor // step + 1) * step, now + 1, step)
    due = [nominal for nominal in passed if nominal > now - ON_TIME_MS]
    missed = list(passed[: len(passed) - len(due)])
    caught_up = missed[-misfire:] if misfire else []
    assert decision.fire == [*caught_up, *due]
    assert decision.cursor == (passed[-1] if passed else cursor)
    assert decision.next == (now // step + 1) * step
    assert bool(decision.missed) == bool(missed)
    assert decision.caught_up == len(caught_up)


# Jitter


def test_jitter_is_the_same_for_whoever_asks() -> None:
    trigger = every(60, jitter_ms=5_000)
    assert [jitter_ms(trigger.definition, NOW + n) for n in range(50)] == [
        jitter_ms(trigger.definition, NOW + n) for n in range(50)
    ]
    assert jitter_ms(Definition(name="s", queue="q", task=b"", every_ms=1, jitter_ms=5000), 1_700_000_000_000) == 4600


def test_jitter_is_spread_evenly_from_none_to_all_of_it() -> None:
    found = Counter(
        jitter_ms(Definition(name="s", queue="q", task=b"", every_ms=1, jitter_ms=9), n) for n in range(10_000)
    )
    assert set(found) == set(range(10))
    assert min(found.values()) > 850


def test_schedules_of_two_names_do_not_jitter_alike() -> None:
    one, two = (Definition(name=name, queue="q", task=b"", every_ms=1, jitter_ms=60_000) for name in "ab")
    assert sum(jitter_ms(one, n) == jitter_ms(two, n) for n in range(1000)) < 10


def test_without_jitter_there_is_none() -> None:
    assert jitter_ms(every(1).definition, NOW) == 0


# Definitions


def test_a_definition_survives_the_registry_byte_for_byte() -> None:
    definition = Definition(
        name="ä",
        queue="q",
        task=b"\x00\xff",
        cron="0 3 * * *",
        timezone="Europe/Berlin",
        misfire=3,
        overlap="queue",
        jitter_ms=5,
    )
    assert Definition.decode(definition.encode()) == definition
    assert Definition.decode(definition.encode()).encode() == definition.encode()


def test_defaults_are_left_out_so_that_a_new_field_changes_no_definition() -> None:
    assert (
        Definition(name="s", queue="q", task=b"", every_ms=5).encode()
        == b'{"name":"s","queue":"q","task":"","every_ms":5}'
    )


@pytest.mark.parametrize(
    "blob",
    [b"", b"nonsense", b"[]", b"{}", b'{"name":"s","queue":"q","task":"","every_ms":5,"moon":"full"}', b"\xff",
     b'{"name":"s","queue":"q","task":"","every_ms":-5}', b'{"name":"s","queue":"q","task":"","overlap":"x"}'],
)  # fmt: skip
def test_what_another_version_may_have_meant_is_refused(blob: bytes) -> None:
    with pytest.raises(UsageError, match="this version of worqr cannot read the definition"):
        Definition.decode(blob)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "must have five fields"),
        ("* * * *", "must have five fields"),
        ("0 * * * * *", r"must have five fields .* for every\(\)"),
        ("@daily", "must have five fields"),
        ("60 * * * *", "Bad minute"),
        ("0 24 * * *", "Bad hour"),
        ("0 0 32 * *", "Bad day-of-month"),
        ("0 0 * 13 *", "Bad month"),
        ("0 0 * * 8", "Bad day-of-week"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("a b c d e", "Bad minute"),
        ("*/0 * * * *", "Bad minute"),
    ],
)
def test_a_bad_expression_is_an_error_that_says_why(expression: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        cron(expression)


@pytest.mark.parametrize(
    ("zone", "why"),
    [
        ("Europe/Berlni", "did you mean 'Europe/Berlin'"),
        ("europe/berlin!", "is not known here"),
        ("", "is not known here"),
        ("../etc/passwd", "is not known here"),
        ("Europe", "is not known here"),
        ("xyzzy", "pip install tzdata"),
    ],
)
def test_a_bad_zone_is_an_error_that_says_why(zone: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        cron("0 3 * * *", zone)


def test_without_the_extra_a_cron_expression_is_one_sentence_and_a_period_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = builtins.__import__

    def without_cronsim(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cronsim":
            raise ImportError(name)
        return usual(name, *args, **kwargs)

    cron_module._cron_times.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.delitem(sys.modules, "cronsim", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_cronsim)
    with pytest.raises(UsageError, match=r"need cronsim: run `pip install 'worqr\[cron\]'`"):
        cron("0 3 * * *")
    assert every(1).next_after(0) == 1000
