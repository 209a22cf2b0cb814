"""What becomes of each call of a list handler, by what it returned or raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worqr
from worqr.call_list import MOST_CALLS, CallList, check_batch
from worqr.policy import Undecodable


def decode(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError as error:
        raise Undecodable(str(error)) from error


def test_none_finishes_all() -> None:
    assert CallList([b"1", b"2"]).outcomes(None) == [None, None]


def test_a_list_has_the_outcome_of_each() -> None:
    error = worqr.Failure("no")
    assert CallList([b"1", b"2"]).outcomes(["x", error]) == ["x", error]
    assert CallList([b"1", b"2"]).outcomes(("x", None)) == ["x", None]


@pytest.mark.parametrize("returned", [[], [1], [1, 2, 3]])
def test_a_list_of_another_length_fails_all_and_says_both_lengths(returned: list[int]) -> None:
    outcomes = CallList([b"1", b"2"]).outcomes(returned)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, ValueError)
        assert f"got a list of 2 and returned a list of {len(returned)}" in str(outcome)


@pytest.mark.parametrize("returned", [7, "ab", {"a": 1, "b": 2}, {1, 2}, b"ab"])
def test_anything_else_fails_all(returned: object) -> None:
    for outcome in CallList([b"1", b"2"]).outcomes(returned):
        assert isinstance(outcome, TypeError)
        assert type(returned).__name__ in str(outcome)


def test_payloads_that_cannot_be_decoded_are_left_out_and_keep_their_place() -> None:
    calls = CallList([b"1", b"{", b"3", b"}"])
    assert calls.decoded(decode) == [1, 3]
    one, two, three, four = calls.outcomes(["one", "three"])
    assert (one, three) == ("one", "three")
    assert isinstance(two, Undecodable)
    assert isinstance(four, Undecodable)
    raised = ValueError()
    assert calls.failed(raised) == [raised, two, raised, four]
    assert calls.failed(None) == [None, two, None, four]


def test_memory_that_runs_out_is_no_undecodable_payload() -> None:
    def fail(_payload: bytes) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        CallList([b"1"]).decoded(fail)


@given(st.lists(st.booleans(), min_size=1), st.data())
def test_each_call_gets_its_own_outcome_whichever_are_undecodable(broken: list[bool], data: st.DataObject) -> None:
    calls = CallList([b"{" if bad else b"%d" % n for n, bad in enumerate(broken)])
    good = calls.decoded(decode)
    assert good == [n for n, bad in enumerate(broken) if not bad]
    returned = [data.draw(st.sampled_from([n, ValueError(n)])) for n in good]
    outcomes = iter(returned)
    for n, outcome in enumerate(calls.outcomes(returned)):
        assert isinstance(outcome, Undecodable) if broken[n] else outcome is next(outcomes)


def test_the_options() -> None:
    assert check_batch("task", {}) == (None, 0.0)
    assert check_batch("task", {"batch_size": 5}) == (5, 0.0)
    assert check_batch("task", {"batch_size": MOST_CALLS, "batch_wait": 0.5}) == (MOST_CALLS, 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"batch_size": bad}, "batch_size of task") for bad in (0, -1, 1.5, "9", True)),
        ({"batch_size": MOST_CALLS + 1}, "batch_size of task must be at most 1,000, not 1001"),
        ({"batch_wait": 1}, "batch_wait of task is for a handler that takes a list: give batch_size too"),
        *(({"batch_size": 5, "batch_wait": bad}, "batch_wait of task") for bad in (-1, "1", float("nan"))),
    ],
)
def test_options_that_are_not_valid(options: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        check_batch("task", options)
