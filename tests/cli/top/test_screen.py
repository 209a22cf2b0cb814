"""What is drawn: every line fits, one line for each row, the selected row in sight."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.cli.top.test_browser import NOW, info, lane_row, mesh_of, queues
from worqr.cli.top import Browser, Header, Rates, Reading, View, draw, sparkline
from worqr.mesh_records import LaneInfo


def lines_of(browser: Browser, width: int, height: int, **header: str) -> list[str]:
    shown = Header(**{"prefix": "worqr", "mesh": None, "rates": Rates(), "problem": "", "more": "", **header})
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    lines = console.render_lines(draw(browser, shown, width, height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


@given(
    names=st.lists(st.text(min_size=1, max_size=60), max_size=30, unique=True),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    moves=st.integers(0, 40),
    view=st.sampled_from(View),
    question=st.sampled_from(["", "p", "d", "/", "?"]),
)
def test_the_screen_is_as_wide_and_as_high_as_the_terminal(
    names: list[str], width: int, height: int, moves: int, view: View, question: str
) -> None:
    browser = Browser(view)
    if view is View.QUEUES:
        browser.show(queues(*(info(name, waiting=10**9, failed=5, paused=name) for name in names)))
    lines_of(browser, width, height)
    for _ in range(moves):
        browser.press("down")
    if question:
        browser.press(question)
    lines = lines_of(browser, width, height)
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_selected_row_is_in_sight() -> None:
    browser = Browser()
    browser.show(queues(*(info(f"queue-{n:03}") for n in range(100))))
    lines_of(browser, 80, 24)
    for key, seen in (("end", "queue-099"), ("home", "queue-000"), ("page down", "queue-019")):
        browser.press(key)
        assert any(line.startswith(seen) for line in lines_of(browser, 80, 24))


def test_columns_that_hold_nothing_are_left_out() -> None:
    browser = Browser()
    browser.show(queues(info("a", waiting=1)))
    assert lines_of(browser, 80, 24)[3].split() == ["queue", "waiting", "state"]


def test_a_problem_takes_the_place_of_the_totals() -> None:
    lines = lines_of(Browser(), 80, 24, problem="no connection\x1b[2J")
    assert lines[1] == "no connection\\x1b[2J"


def test_the_footer_says_what_was_left_out_and_what_is_filtered() -> None:
    browser = Browser()
    for key in ("/", "m", "enter"):
        browser.press(key)
    assert lines_of(browser, 120, 24, more="3 more queues").pop().startswith("filter: m   3 more queues   ? help")


def test_what_is_typed_stays_in_sight_beside_a_long_question() -> None:
    browser = Browser(View.LANES)
    lane = LaneInfo("lane-" + 60 * "x", 1, 0, 1)
    browser.show(Reading(None, [replace(lane_row(), target=("mails", lane))]))
    for key in "m100/1m":
        browser.press(key)
    footer = lines_of(browser, 80, 24).pop()
    assert footer.startswith("limits of lane lane-xxx")
    assert footer.endswith("type one and Enter: 100/1m_")


def test_rates_come_from_the_totals_of_two_readings() -> None:
    rates = Rates()
    for second, finished in ((0, 100), (2, 150), (2, 150), (3, 150), (4, 20)):
        rates.add(mesh_of(info("a", counts={"finished": finished}), at=NOW + timedelta(seconds=second)))
    assert list(rates.finished) == [25.0, 0.0, 0.0], "a snapshot counts once; totals that expired are no negative rate"


def test_a_sparkline_has_its_highest_value_as_a_full_bar() -> None:
    assert sparkline([0, 1, 2], 10) == " ▄█"
    assert sparkline([5] * 20, 3) == "███"
    assert sparkline([], 3) == ""
    assert sparkline([0, 2], 3, unicode=False) == " @"
