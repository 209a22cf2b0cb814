"""Keys and what they do to the state of the screen. No terminal, no server."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

import worqr
from worqr.cli.top import QUIT, READ, Act, ActKind, Browser, Mode, Reading, Row, View, acts_of, split_keys
from worqr.mesh_records import LaneInfo, MeshInfo, QueueInfo

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def info(name: str, **values: Any) -> QueueInfo:
    numbers = dict.fromkeys(("waiting", "scheduled", "blocked", "running", "failed", "undecodable", "workers"), 0)
    return QueueInfo(**{**numbers, "name": name, "paused": None, "oldest_job": None, "counts": {}, **values})


def mesh_of(*infos: QueueInfo, at: datetime = NOW) -> MeshInfo:
    return MeshInfo(at=at, source="direct", age=0.0, leader=None, queues=infos, queues_left_out=0, others=None, apps={})


def queues(*infos: QueueInfo) -> Reading:
    return Reading(mesh_of(*infos), [Row(each.name, each, each.name) for each in infos])


def names(browser: Browser) -> list[str]:
    return [row.key for row in browser.picture().rows]


def press(browser: Browser, *keys: str) -> Any:
    return [browser.press(key) for key in keys][-1]


@pytest.fixture
def browser() -> Browser:
    browser = Browser()
    browser.show(queues(info("a", waiting=1), info("b", waiting=3, failed=2), info("c", waiting=2)))
    return browser


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("ab\r", ["a", "b", "enter"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b[5~\x1b[6~", ["page up", "page down"]),
        ("\x1b[H\x1b[F", ["home", "end"]),
        ("\x1b", ["escape"]),
        ("\x7f", ["backspace"]),
        ("é", ["é"]),
        ("\x00\x02", []),
        ("\x1b[24~", []),
    ],
)
def test_a_terminal_sends_keys(sent: str, keys: list[str]) -> None:
    assert split_keys(sent) == keys


def test_the_selection_moves_and_stays_with_its_row(browser: Browser) -> None:
    assert browser.picture().selected == 0
    press(browser, "down", "down", "down")
    assert browser.picture().selected == 2
    press(browser, "up")
    assert browser.picture().selected == 1
    browser.show(queues(info("0"), info("a"), info("b")))
    assert browser.picture().selected == 2, "row b has moved down"
    browser.show(queues(info("x")))
    assert browser.picture().selected == 0, "row b is gone"
    press(browser, "end", "page down", "page up", "home", "k", "j")


def test_keys_in_an_empty_table_do_nothing(browser: Browser) -> None:
    browser.show(Reading(None, ()))
    for key in ("up", "down", "page down", "home", "end", "enter", "escape", "p", "c", "r", "d"):
        assert browser.press(key) is None
    assert browser.picture().rows == []


def test_a_filter_hides_rows_and_escape_shows_them(browser: Browser) -> None:
    press(browser, "/", "B")
    assert names(browser) == ["b"]
    press(browser, "backspace", "c", "enter")
    assert (names(browser), browser.mode) == (["c"], Mode.BROWSE)
    press(browser, "escape")
    assert names(browser) == ["a", "b", "c"]
    press(browser, "/", "q")
    assert browser.mode is Mode.FILTER, "q is a letter of the filter"
    press(browser, "escape")
    assert (browser.filter, browser.mode) == ("", Mode.BROWSE)


def test_sorting_goes_through_the_columns_numbers_first_the_largest(browser: Browser) -> None:
    press(browser, "s")
    assert names(browser) == ["a", "b", "c"]
    press(browser, "s")
    assert names(browser) == ["b", "c", "a"]
    browser.show(queues(info("a", oldest_job=3.0), info("b"), info("c", oldest_job=9.0)))
    press(browser, *"ssssssss")
    assert names(browser) == ["c", "a", "b"], "a missing value comes last"


def test_enter_opens_the_running_tasks_of_a_queue_and_escape_leaves_it(browser: Browser) -> None:
    assert press(browser, "down", "enter") is READ
    assert (browser.view, browser.queue) == (View.RUNNING, "b")
    assert browser.picture().rows == [], "the rows of the other view are not shown under the new headings"
    assert press(browser, "4") is READ
    assert (browser.view, browser.queue) == (View.FAILED, "b")
    assert press(browser, "escape") is READ
    assert (browser.view, browser.queue) == (View.QUEUES, "")
    assert press(browser, "escape") is None


def test_help_closes_by_any_key_and_q_quits(browser: Browser) -> None:
    assert press(browser, "?") is None
    assert browser.mode is Mode.HELP
    assert press(browser, "q") is None
    assert browser.mode is Mode.BROWSE
    assert press(browser, "q") is QUIT


def test_an_act_is_asked_about_before_it_is_done(browser: Browser) -> None:
    assert press(browser, "p") is None
    assert browser.pending is not None
    assert browser.pending.question == "pause queue a"
    assert press(browser, "n") is None
    assert browser.notice == "nothing was done"
    act = press(browser, "p", "y")
    assert isinstance(act, Act)
    assert browser.mode is Mode.BROWSE


def test_an_act_on_many_tasks_wants_the_name_to_be_typed(browser: Browser) -> None:
    press(browser, "down", "d")
    assert browser.pending is not None
    assert browser.pending.question == "delete all 2 failed tasks of queue b"
    assert press(browser, "y", "enter") is None
    assert browser.notice == "nothing was done"
    assert isinstance(press(browser, "d", "x", "backspace", "b", "enter"), Act)
    assert press(browser, "r", "b", "escape") is None


@pytest.mark.parametrize("word", ["quiet", "resume", "drain", "auto", "12", " 3 "])
def test_a_worker_is_asked_by_a_word_or_a_number(word: str) -> None:
    act = acts_of(View.WORKERS, worker_row())[ActKind.SET]
    confirmed = act.confirmed(word)
    assert confirmed is not None
    assert confirmed.question == f"ask worker shop:w1: {word.strip()}"


@pytest.mark.parametrize("word", ["", "y", "0", "-1", "1.5", "²", "1" * 10, "quiet!"])
def test_other_words_ask_a_worker_nothing(word: str) -> None:
    assert acts_of(View.WORKERS, worker_row())[ActKind.SET].confirmed(word) is None


@pytest.mark.parametrize("word", ["1", "1000", "0", " 7 "])
def test_a_lane_is_given_a_weight_by_a_number(word: str) -> None:
    confirmed = acts_of(View.LANES, lane_row())[ActKind.SET].confirmed(word)
    assert confirmed is not None
    assert confirmed.question == f"set the weight of lane acme: {word.strip()}"


@pytest.mark.parametrize("word", ["", "y", "-1", "1001", "1.5", "²", "1" * 10])
def test_other_words_are_no_weight(word: str) -> None:
    assert acts_of(View.LANES, lane_row())[ActKind.SET].confirmed(word) is None


@pytest.mark.parametrize("words", ["5", "100/1m", "5 100/1m 7/2s", "none", "clear", " 5 "])
def test_a_lane_is_limited_by_numbers_and_rates(words: str) -> None:
    confirmed = acts_of(View.LANES, lane_row())[ActKind.LIMIT].confirmed(words)
    assert confirmed is not None
    assert confirmed.question == f"limit lane acme: {words.strip()}"


@pytest.mark.parametrize("words", ["", "y", "0", "-1", "5/soon", "²", "1/1s 2/2s 3/3s 4/4s 5/5s", "none clear"])
def test_other_words_limit_nothing(words: str) -> None:
    assert acts_of(View.LANES, lane_row())[ActKind.LIMIT].confirmed(words) is None


def test_all_jobs_of_a_lane_are_cancelled_when_its_name_is_typed() -> None:
    act = acts_of(View.LANES, lane_row())[ActKind.CANCEL]
    assert act.question == "cancel all jobs of lane acme of queue mails"
    assert act.confirmed("y") is None
    assert act.confirmed("mails") is None
    assert act.confirmed("acme") is act


def test_l_opens_the_lanes_of_the_selected_queue_and_enter_stays_with_them(browser: Browser) -> None:
    assert press(browser, "down", "l") is READ
    assert (browser.view, browser.queue) == (View.LANES, "b")
    browser.show(Reading(None, [lane_row()]))
    assert press(browser, "enter") is READ
    assert (browser.view, browser.queue) == (View.LANES, "mails")
    browser.show(Reading(None, [worker_row()]))
    assert press(browser, "l") is None, "a worker has no queue"


def lane_row() -> Row:
    return Row("mails acme", ("mails", LaneInfo("acme", 3, 1, 2, (worqr.Limit(2),))), "mails")


def worker_row() -> Row:
    return Row("shop:w1", SimpleNamespace(id="shop:w1"))


def test_what_cannot_be_done_is_said(browser: Browser) -> None:
    press(browser, "c")
    assert browser.notice == "there is nothing to cancel here"
    press(browser, "d")
    assert browser.notice == "there is nothing to drop here"
    press(browser, "up")
    assert browser.notice == ""


def test_read_only_refuses_every_act() -> None:
    browser = Browser(read_only=True)
    browser.show(queues(info("a", failed=1)))
    for key in "pcrd":
        assert press(browser, key) is None
        assert browser.notice == "nothing can be changed: worqr top runs with --read-only"
        assert browser.mode is Mode.BROWSE
