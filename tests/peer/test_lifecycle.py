"""The phases of a consumer, as the table in the docstring of `Lifecycle` has them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from worqr.peer.consumer import Lifecycle, Phase

STEPS: dict[Phase, Callable[[Lifecycle], object]] = {
    Phase.SERVING: Lifecycle.admitted,
    Phase.DRAINING: Lifecycle.drain,
    Phase.STOPPING: Lifecycle.skip_grace,
    Phase.CANCELLING: Lifecycle.cancel,
    Phase.RETURNING: Lifecycle.return_claims,
    Phase.DETACHED: Lifecycle.detach,
    Phase.LEFT: Lifecycle.leave,
}


def lifecycle_in(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    for each, step in STEPS.items():
        if each <= phase:
            step(lifecycle)
    assert lifecycle.phase is phase
    return lifecycle


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("to", STEPS)
def test_a_phase_is_never_followed_by_an_earlier_one(before: Phase, to: Phase) -> None:
    lifecycle = lifecycle_in(before)
    STEPS[to](lifecycle)
    assert lifecycle.phase is max(before, to)


@pytest.mark.parametrize("phase", Phase)
async def test_each_phase_allows_what_the_table_says(phase: Phase) -> None:
    lifecycle = lifecycle_in(phase)
    assert lifecycle.is_leaving == (phase >= Phase.DRAINING)
    assert lifecycle.entering.cancel_called == (phase >= Phase.DRAINING)
    assert lifecycle.grace_over.is_set() == (phase >= Phase.STOPPING)
    assert lifecycle.left.is_set() == (phase >= Phase.DETACHED)
    assert lifecycle.holds_stops == (phase in {Phase.CANCELLING, Phase.LEFT})


def test_a_second_drain_changes_nothing() -> None:
    lifecycle = Lifecycle()
    assert [lifecycle.drain(), lifecycle.drain()] == [True, False]


def test_claims_that_were_rejected_are_taken_once() -> None:
    lifecycle = Lifecycle()
    lifecycle.reject(range(3, 5))
    lifecycle.reject([7])
    assert [lifecycle.take_rejected(), lifecycle.take_rejected()] == [[3, 4, 7], []]


def test_every_phase_has_a_step() -> None:
    assert [Phase.NEW, *STEPS] == list(Phase)
    assert all(earlier < later for earlier, later in pairwise(Phase))
