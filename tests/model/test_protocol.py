"""The protocol, searched exhaustively: it keeps its promises, and each known mistake breaks one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.model.batches import Batches, CancelledBatches, ClearedBatches, ReopenedBatches
from tests.model.cancels import Cancels
from tests.model.claims import Claims
from tests.model.follow_ups import FollowUps
from tests.model.handoffs import Handoffs
from tests.model.lanes import Lanes
from tests.model.leases import Leases
from tests.model.limits import Limits
from tests.model.members import Members
from tests.model.producers import Producers
from tests.model.races import Races
from tests.model.search import Found, Model, search
from tests.model.wakeups import Tokens, Wakeups
from tests.model.workflows import (
    CancelledWorkflows,
    DoubtfulWorkflows,
    EndedWaitWorkflows,
    FailedAndRewoundWorkflows,
    FailingWorkflows,
    ReplacedWorkflows,
    RetriedWorkflows,
    RewoundWorkflows,
    Workflows,
)

MODELS: tuple[type[Model[Any]], ...] = (
    *(Producers, Claims, Wakeups, Tokens, Handoffs, Cancels, Members, Leases, Limits, Lanes),
    *(Batches, CancelledBatches, ReopenedBatches, ClearedBatches, FollowUps),
    *(Workflows, CancelledWorkflows, FailingWorkflows, ReplacedWorkflows, RetriedWorkflows, DoubtfulWorkflows),
    *(RewoundWorkflows, FailedAndRewoundWorkflows, EndedWaitWorkflows, Races),
)
LARGE = (
    FailingWorkflows,
    ReplacedWorkflows,
    RetriedWorkflows,
    RewoundWorkflows,
    FailedAndRewoundWorkflows,
    DoubtfulWorkflows,
)
"""Each takes seconds: one of them is searched, and all with ``--all``."""
SEARCHED = [pytest.param(each, marks=pytest.mark.sweep(keep=1) if each in LARGE else ()) for each in MODELS]
MISTAKES = [(model, mistake) for model in MODELS for mistake in model.mistakes]
SEVEN = {
    "a resent start that takes new tasks": (Claims, "a resent start takes new tasks"),
    "an unfenced finish": (Claims, "a finish is not fenced"),
    "a wake-up lost for ever": (Wakeups, "keepalive does not answer waiting"),
    "a plain high-water mark for producers": (Producers, "a plain high-water mark"),
    "a cancel mark that give-back ignores": (Cancels, "give_back ignores the cancel mark"),
    "a fence that outlives its registration": (Members, "a fence outlives its registration"),
    "a sweep in two steps": (Claims, "a sweep in two steps"),
}
"""The mistakes that the issue names, and where each is put in."""


@cache
def searched(model: type[Model[Any]]) -> Found:
    """The correct protocol, searched once for all tests."""
    return search(model())


@pytest.mark.parametrize("model", SEARCHED)
def test_the_protocol_keeps_its_promises(model: type[Model[Any]]) -> None:
    found = searched(model)
    assert found.wrong is None, f"\n{found}"


@pytest.mark.parametrize("model", SEARCHED)
def test_the_search_was_not_vacuous(model: type[Model[Any]]) -> None:
    found = searched(model)
    assert found.states >= model.least
    assert set(found.fired) == set(model.moves)


@pytest.mark.parametrize(("model", "mistake"), MISTAKES)
def test_a_mistake_is_found_in_few_steps(model: type[Model[Any]], mistake: str) -> None:
    found = search(model(mistake))
    assert found.wrong is not None, f"{mistake!r} goes unnoticed in {found.states} states"
    assert len(found.trace) <= model.mistakes[mistake], f"\n{found}"


@pytest.mark.parametrize("named", SEVEN)
def test_every_mistake_that_the_issue_names_is_among_them(named: str) -> None:
    assert SEVEN[named] in MISTAKES
