"""A run by itself: its phases, its deadline, and the contexts that handlers get of it."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import worqr
from worqr.peer.context import current
from worqr.peer.run import Run, RunState, Timer, current_run
from worqr.policy import Policy


def new_run(entry: Any = b"task") -> Run[Any]:
    host: Any = SimpleNamespace(queue="Q1", id_suffix="", policy=Policy(), state=None, policy_with=lambda own: Policy())
    return Run(host, None, 7, entry)


def test_its_phases() -> None:
    run, scope = new_run(), trio.CancelScope()
    assert run.state is RunState.CLAIMED
    run.begin(scope)
    assert run.state is RunState.RUNNING
    run.cancel("cancel")
    assert (run.state, run.cancel_reason, scope.cancel_called) == (RunState.CANCELLING, "cancel", True)
    run.settle()
    assert run.settled


def test_a_run_that_was_cancelled_before_begins_with_a_cancelled_scope() -> None:
    run, scope = new_run(), trio.CancelScope()
    run.cancel("leaving")
    run.begin(scope)
    assert (run.state, scope.cancel_called) == (RunState.CANCELLING, True)


async def test_cancelling_a_settled_run_leaves_the_scope_of_its_slot_alone() -> None:
    run, scope = new_run(), trio.CancelScope()
    run.begin(scope)
    run.settle()
    run.cancel("lost")
    assert (run.settled, run.cancel_reason, scope.cancel_called) == (True, "lost", False)


@pytest.mark.parametrize(("first", "then", "stands"), [("cancel", "leaving", "cancel"), ("cancel", "lost", "lost")])
def test_the_first_reason_stands_but_a_lost_claim_is_lost(first: Any, then: Any, stands: str) -> None:
    run = new_run()
    run.cancel(first)
    run.cancel(then)
    assert run.cancel_reason == stands


def test_a_settled_run_has_no_timer_to_meet() -> None:
    run = new_run()
    timer = Timer(run, 5.0)
    run.settle()
    assert (timer.stop(), run.deadline) == (None, 5.0)


def test_the_record_of_a_job_is_read_when_it_is_asked_for() -> None:
    run = new_run([b"id", b"j", b"task", b"t", b"failures", b"2", b"stalls", b"1"])
    assert (run.id, run.task, run.failures, run.stalls, run.timeouts, run.attempt) == ("j", b"t", 2, 1, 0, 4)


def test_its_context_is_made_once_where_it_is_asked_for() -> None:
    first, second = new_run(), new_run()

    def ask(run: Run[Any]) -> worqr.Context:
        current_run.set(run)
        context = current()
        assert current() is context
        assert copy_context().run(current) is context
        return context

    outer = copy_context()
    one = outer.run(ask, first)
    assert outer.run(ask, second) is not one, "a context that was inherited is that of another run"
