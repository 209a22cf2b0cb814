"""The second judge: a correct story passes, and each kind of bug that is put into it is found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.chaos.command import both_verdicts
from benchmarks.chaos.history import History
from benchmarks.chaos.judge import Judge, lines_of, main
from tests.chaos.ledgers import (
    CALM,
    FAILED_FLOW,
    FLOW_NAME,
    Change,
    Story,
    alter,
    begin_with_another,
    correct,
    drop,
    flow_claims,
    move,
    put_back_call,
    retry_compensated,
    swap_mail,
)


def judged(story: Story, folder: Path) -> set[str]:
    """The kinds of what the judge says cannot be."""
    for entry in story.entries:
        with (folder / f"{entry.source}.ledger").open("ab") as file:
            file.write(msgspec.json.encode({"t": entry.t, "what": entry.what, **entry.facts}) + b"\n")
    return {each.partition(":")[0] for each in Judge(lines_of(folder)).judge()}


def test_a_correct_story_is_one_that_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(correct(), tmp_path) == set()
    assert main(str(tmp_path)) == 0
    assert capsys.readouterr().out.endswith("lines: 0 that cannot be\n")


def test_what_it_finds_fails_a_run_in_which_the_checker_finds_nothing(tmp_path: Path) -> None:
    story = correct()
    _lose(story)
    assert judged(story, tmp_path) == {"was put in and did not come out"}
    verdict = both_verdicts(History.of(correct().entries), tmp_path)
    assert {violation.rule for violation in verdict.violations} == {"the second judge"}


def test_the_reply_to_a_run_that_was_given_back_may_come_after_the_next_run(tmp_path: Path) -> None:
    story = correct()
    fence = story.run(40, "hand", "late", "stopped", peer="peer-3", lasts=9, answer="ok")
    story.send(39.9, "hand", "late")
    story.run(44, "hand", "late", fence=fence + 1)
    assert "an old token was accepted" not in judged(story, tmp_path)


def _lose(story: Story) -> None:
    [began] = [e for e in story.entries if e.what == "began" and e.facts["task"] == "b"]
    story.entries = [e for e in story.entries if e.facts.get("fence") != began.facts["fence"]]


def _settle_after_another_has_it(story: Story) -> None:
    fence = story.run(40, "hand", "late", peer="peer-3", lasts=9, answer="ok")
    story.send(39.9, "hand", "late")
    story.run(44, "hand", "late", fence=fence + 1)


def _hold_together(story: Story) -> None:
    story.send(40, "raw", "both")
    story.run(40.1, "raw", "both", lasts=2)
    story.run(40.5, "raw", "both", peer="peer-2x", lasts=1)


def _run_again_after_the_result(story: Story) -> None:
    story.run(8, "jobs", "j")


def _step_again(story: Story) -> None:
    story.step(34.9, _newest_save(story), "one", 1)


def _step_otherwise(story: Story) -> None:
    story.step(34.9, _newest_save(story), "two", 1, called=False)


def _newest_save(story: Story) -> int:
    return max(e.facts["fence"] for e in story.entries if e.what == "began" and e.facts["queue"] == "saves")


BUGS: dict[str, tuple[Change, str]] = {
    "a task is lost": (_lose, "was put in and did not come out"),
    "a task appears": (
        lambda s: drop(s, "send", tasks=["bad"]) or drop(s, "acked", call=_call_of("bad")),
        "came out and was not put in",
    ),
    "a settled task runs again": (lambda s: s.run(18.5, "hand", "h"), "was settled and came out again"),
    "a task runs again after its result was read": (_run_again_after_the_result, "was settled and came out again"),
    "a claim is given out twice": (
        lambda s: s.run(1.5, "raw", "a", fence=10, peer="peer-2x"),
        "one token was given out twice",
    ),
    "an old claim is accepted": (_settle_after_another_has_it, "an old token was accepted"),
    "two workers have a task": (_hold_together, "two held it at once"),
    "a save is forgotten": (lambda s: alter(s, "began", {"saved": 0}, queue="saves", saved=1), "a save was forgotten"),
    "a step runs again": (_step_again, "a step ran after its result was stored"),
    "a step has another result": (_step_otherwise, "a step has two results"),
    "a workflow takes a step again under its claim": (
        lambda s: s.add("peer-1", 44.615, "step", queue="flow", fence=flow_claims(s)[0], name="step 0"),
        "a step ran after its result was stored",
    ),
    "a wait ends otherwise in the next run": (
        lambda s: alter(s, "waited", {"value": "v2"}, name="event 0", fence=flow_claims(s)[-1]),
        "a step has two results",
    ),
    "an event is invented": (
        lambda s: alter(s, "waited", {"value": "v7"}, name="event 1"),
        "a wait took out what was not there",
    ),
    "an event is taken twice": (
        lambda s: alter(s, "waited", {"value": "v1"}, name="event 1"),
        "a wait took out what was not there",
    ),
    "a job is started twice": (
        lambda s: s.run(44.9, "flow_jobs", f"{FLOW_NAME}/1fails", "failure", id="another"),
        "a job of a workflow has two ids",
    ),
    "a workflow sees a false end": (
        lambda s: alter(s, "waited", {"value": "failed"}, name=f"job {FLOW_NAME}/0"),
        "a workflow took out a false end",
    ),
    "a workflow is said to have begun with the version that replaced its own": (
        begin_with_another,
        "a step has two results",
    ),
    "a wait goes on that was ended": (
        lambda s: [move(s, what, 30) for what in ("end_wait", "wait_ended")],
        "a wait went on that was ended",
    ),
    "a workflow that was put back takes its step again": (
        lambda s: s.step(54.65, flow_claims(s, FAILED_FLOW)[-1], "step 0", 1, queue="flow"),
        "a step ran after its result was stored",
    ),
    "a failed step that a step followed is tried again after the put-back": (
        retry_compensated,
        "a step has two results",
    ),
    "a job runs again though its workflow was not put back": (
        lambda s: (
            drop(s, "retry", batch=FAILED_FLOW)
            or drop(s, "retried", call=put_back_call(FAILED_FLOW))
            or s.add("peer-1", 48.34, "settled", queue="flow_jobs", fence=_doomed(s), answer="ok")
        ),
        "was settled and came out again",
    ),
    "a workflow that a workflow started runs under two ids": (
        lambda s: s.run(48.35, "flow_nested", f"{FAILED_FLOW}/1nests", "error", id="another"),
        "a job of a workflow has two ids",
    ),
    "a workflow sees a false end of one that it has started": (
        lambda s: alter(
            s,
            "waited",
            {"value": "finished 1"},
            name=f"job {FAILED_FLOW}/1nests",
            fence=flow_claims(s, FAILED_FLOW)[-1],
        ),
        "a workflow took out a false end",
    ),
    "a mailbox gives the second value first": (swap_mail, "a mailbox is out of order"),
    "a mailbox gives a value twice": (
        lambda s: alter(
            s, "waited", {"value": f"{FAILED_FLOW} mail 0"}, name="mail 2", fence=flow_claims(s, FAILED_FLOW)[-1]
        ),
        "a wait took out what was not there",
    ),
    "a wait is over that was not ended": (
        lambda s: [drop(s, "end_wait", call=e.facts["call"]) for e in list(s.entries) if e.what == "end_wait"],
        "a wait is over that no one ended",
    ),
    "a lifetime is over too early": (
        lambda s: alter(s, "waited", {"value": "over"}, name="event 0", fence=flow_claims(s)[-1]),
        "a lifetime is not that of its workflow",
    ),
    "a wait is not ended by the lifetime": (
        lambda s: alter(s, "waited", {"value": "timeout"}, value="over"),
        "a wait is over that no one ended",
    ),
    "a workflow begins again without a suspension": (
        lambda s: s.run(45.45, "flow", FLOW_NAME, fence=flow_claims(s)[-1]),
        "one token was given out twice",
    ),
}


def _doomed(story: Story) -> int:
    """The first claim of the job that fails."""
    return flow_claims(story, f"{FAILED_FLOW}/0doomed")[0]


def _call_of(task: str) -> int:
    [sent] = [e for e in correct().entries if e.what == "send" and task in e.facts["tasks"]]
    call: int = sent.facts["call"]
    return call


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    story, (change, found) = correct(), BUGS[bug]
    change(story)
    assert found in judged(story, tmp_path)
    assert main(str(tmp_path)) == 1


@pytest.mark.parametrize("fault", ["killed", "froze"])
def test_a_worker_that_was_away_may_have_lost_what_it_holds(fault: str, tmp_path: Path) -> None:
    story = correct()
    story.send(40, "raw", "both")
    story.run(40.1, "raw", "both", None, peer="peer-3")
    story.world(41, fault, who="peer-3")
    story.run(45, "raw", "both")
    if fault == "froze":
        story.world(CALM, "thawed", who="peer-3")
    assert judged(story, tmp_path) == set()
