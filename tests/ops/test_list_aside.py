from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.ops.driver import PAST, Desk, aside
from worqr import ops
from worqr.ops import MAX_BYTES, MAX_HEADS, DeadLetterPage
from worqr.records import RemoteError


def set_aside(desk: Desk, *tasks: bytes, errors: tuple[str, ...] = ("Boom",), undecodable: bool = False) -> list[int]:
    """The claims of raw tasks that were set aside, one millisecond after another, with each of the errors in turn."""
    held = desk.hold("A", *tasks)
    for n, one in enumerate(held):
        error = RemoteError(errors[n % len(errors)], "", "")
        desk.call(ops.fail_task(desk.q, "A", one, error, undecodable=undecodable))
        desk.client.zadd(desk.q.undecodable if undecodable else desk.q.failed, {str(one): PAST + n})
    return held


def claims(page: DeadLetterPage) -> list[int]:
    return [each for each, _ in page.records]


def test_the_newest_first_with_their_whole_records(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"\x00\xff")
    desk.fail("A", one)
    desk.fail("A", two)
    with desk.nothing_changes():
        page = desk.call(ops.list_aside(desk.q, "failed", 9))
    at = desk.client.zscore(desk.q.failed, str(one))
    assert claims(page) == [two, one]
    assert (page.more, page.after, int(page.after_ms)) == (False, str(one), at)
    records = [{name: value.decode("latin-1") for name, value in each.items()} for _, each in page.records]
    assert all(each.pop("tries") for each in records)
    assert [each.pop("size") for each in records] == ["2", "1"]
    assert [int(each.pop("at")) - (at or 0) < 60_000 for each in records] == [True, True]
    assert records == [
        aside("\x00\xff", f"@{two}", reason="failed", failures=1),
        aside("a", f"@{one}", reason="failed", failures=1),
    ]


def test_each_list_is_its_own(desk: Desk) -> None:
    [failed] = set_aside(desk, b"a")
    [undecodable] = set_aside(desk, b"b", undecodable=True)
    assert claims(desk.call(ops.list_aside(desk.q, "failed", 9))) == [failed]
    assert claims(desk.call(ops.list_aside(desk.q, "undecodable", 9))) == [undecodable]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("bare", [False, True])
def test_page_by_page_each_is_listed_once(desk: Desk, limit: int, bare: bool) -> None:
    held = set_aside(desk, *[b"a"] * 7)
    found: list[int] = []
    page = desk.call(ops.list_aside(desk.q, "failed", limit, bare=bare))
    found += claims(page)
    while page.more:
        page = desk.call(ops.list_aside(desk.q, "failed", limit, bare=bare, after=page.after, after_ms=page.after_ms))
        found += claims(page)
    assert found == held[::-1]
    assert all(bool(record) != bare for _, record in page.records)


def test_a_page_goes_on_where_the_last_one_ended_whatever_came_and_went(desk: Desk) -> None:
    held = set_aside(desk, *[b"a"] * 6)
    page = desk.call(ops.list_aside(desk.q, "failed", 2))
    assert claims(page) == [held[5], held[4]]
    desk.call(ops.drop_aside(desk.q, "failed", [held[5], held[4], held[2]]))
    [newer] = desk.hold("A", b"newer")
    desk.fail("A", newer)
    page = desk.call(ops.list_aside(desk.q, "failed", 2, after=page.after, after_ms=page.after_ms))
    assert claims(page) == [held[3], held[1]]


def test_of_the_same_moment_each_is_listed_once(desk: Desk) -> None:
    held = set_aside(desk, b"a", b"b", b"c")
    desk.client.zadd(desk.q.failed, {str(one): PAST for one in held})
    page = desk.call(ops.list_aside(desk.q, "failed", 1))
    found = claims(page)
    while page.more:
        page = desk.call(ops.list_aside(desk.q, "failed", 1, after=page.after, after_ms=page.after_ms))
        found += claims(page)
    assert found == held[::-1]


def test_only_those_from_before_a_moment(desk: Desk) -> None:
    held = set_aside(desk, *[b"a"] * 5)
    for before, wanted in ((PAST, []), (PAST + 1, held[:1]), (PAST + 3, held[:3]), (PAST + 99, held)):
        page = desk.call(ops.list_aside(desk.q, "failed", 9, before_ms=before))
        assert (claims(page), page.more) == (wanted[::-1], False)
    page = desk.call(ops.list_aside(desk.q, "failed", 2, before_ms=PAST + 4))
    page = desk.call(ops.list_aside(desk.q, "failed", 2, before_ms=PAST + 4, after=page.after, after_ms=page.after_ms))
    assert claims(page) == [held[1], held[0]]


def test_only_those_with_an_error_of_a_type(desk: Desk) -> None:
    held = set_aside(desk, *[b"a"] * 4, errors=("Timeout", "app.Timeout", "app.MyTimeout", "Timeout.app"))
    for error, wanted in (
        *(("Timeout", held[:2]), ("app.Timeout", held[1:2]), ("MyTimeout", held[2:3]), ("Timeout.app", held[3:])),
        *(("app", held[3:]), ("imeout", []), (".Timeout", []), ("", held), ("%a+", []), ("app.Time", [])),
    ):
        page = desk.call(ops.list_aside(desk.q, "failed", 9, error=error))
        assert claims(page) == wanted[::-1], error


def test_looks_at_no_more_than_its_budget_and_goes_on_behind_it(desk: Desk) -> None:
    held = set_aside(desk, *[b"a"] * 6, errors=("Rare", *["Common"] * 5))
    call = ops.list_aside(desk.q, "failed", 9, error="Rare")
    page = desk.call(replace(call, args=("failed", 9, 4, *call.args[3:])))
    assert (claims(page), page.more, page.after) == ([], True, str(held[2]))
    call = ops.list_aside(desk.q, "failed", 9, error="Rare", after=page.after, after_ms=page.after_ms)
    page = desk.call(replace(call, args=("failed", 9, 4, *call.args[3:])))
    assert (claims(page), page.more) == ([held[0]], False)


def test_stops_at_8_mib_but_lists_at_least_one(desk: Desk) -> None:
    big = b"x" * (MAX_BYTES + 1)
    one, two, three = [set_aside(desk, task)[0] for task in (big, b"y", b"z")]
    desk.client.zadd(desk.q.failed, {str(one): PAST + 1, str(two): PAST, str(three): PAST + 2})
    page = desk.call(ops.list_aside(desk.q, "failed", 9))
    assert (claims(page), page.more) == ([three, one], True)
    page = desk.call(ops.list_aside(desk.q, "failed", 9, after=page.after, after_ms=page.after_ms))
    assert (claims(page), page.more) == ([two], False)
    assert claims(desk.call(ops.list_aside(desk.q, "failed", 9, bare=True))) == [three, one, two]


def test_only_the_number_when_no_record_is_wanted(desk: Desk) -> None:
    set_aside(desk, b"a")
    assert desk.send(ops.list_aside(desk.q, "failed", 0)) == [b"more", b"-", b"0", 1]


@pytest.mark.parametrize("limit", [0, 2, 9])
@pytest.mark.parametrize(
    ("since", "before", "number"), [(None, None, 5), (1, 4, 3), (1, None, 4), (None, 0, 0), (4, 1, 0)]
)
def test_the_number_is_that_of_the_times(
    desk: Desk, limit: int, since: int | None, before: int | None, number: int
) -> None:
    set_aside(desk, *[b"a"] * 5)
    times = {name: None if at is None else PAST + at for name, at in (("since_ms", since), ("before_ms", before))}
    page = desk.call(ops.list_aside(desk.q, "failed", limit, error="" if limit else "Rare", **times))
    assert page.number == number
    if len(page.records) < number and page.records:
        rest = ops.list_aside(desk.q, "failed", limit, after=page.after, after_ms=page.after_ms, **times)
        assert desk.call(rest).number == number - len(page.records)


def test_a_record_that_is_gone_is_listed_by_its_claim(desk: Desk) -> None:
    [held] = set_aside(desk, b"a")
    desk.client.delete(desk.q.dead_letter(held))  # data that somebody deleted
    page = desk.call(ops.list_aside(desk.q, "failed", 9))
    assert page.records == [(held, {})]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_aside(desk.q, "failed", 9)) == [b"ok", b"-", b"0", 0]
    assert desk.state() == {}


def test_of_large_payloads_the_beginning_is_listed_if_that_is_asked_for(desk: Desk) -> None:
    set_aside(desk, b"small", b"x" * 5000)
    with desk.nothing_changes():
        page = desk.call(ops.list_aside(desk.q, "failed", 9, head=4096))
    whole = desk.call(ops.list_aside(desk.q, "failed", 9))
    assert [(each["task"], each["size"]) for _, each in page.records] == [(b"x" * 4096, b"5000"), (b"small", b"5")]
    assert [{**each, "task": b""} for _, each in page.records] == [{**each, "task": b""} for _, each in whole.records]


def test_payloads_that_are_too_large_for_a_list_are_not_read(desk: Desk) -> None:
    """And their records do not make the page shorter."""
    sizes = [MAX_HEADS - 100, 200, MAX_HEADS + 1]
    set_aside(desk, *[b"x" * size for size in sizes])
    page = desk.call(ops.list_aside(desk.q, "failed", 9, head=50))
    assert [(len(each["task"]), int(each["size"])) for _, each in page.records] == [
        (0, sizes[2]),
        (50, sizes[1]),
        (0, sizes[0]),
    ]
    assert not page.more


@pytest.mark.parametrize("limit", [1, 9])
def test_only_those_since_a_time(desk: Desk, limit: int) -> None:
    held = set_aside(desk, *[b"a"] * 5)
    found: list[int] = []
    page = desk.call(ops.list_aside(desk.q, "failed", limit, since_ms=PAST + 1, before_ms=PAST + 4))
    found += claims(page)
    while page.more:
        page = desk.call(
            ops.list_aside(
                *(desk.q, "failed", limit),
                since_ms=PAST + 1,
                before_ms=PAST + 4,
                after=page.after,
                after_ms=page.after_ms,
            )
        )
        found += claims(page)
    assert found == [held[3], held[2], held[1]]
    assert claims(desk.call(ops.list_aside(desk.q, "failed", 9, since_ms=PAST + 5))) == []
