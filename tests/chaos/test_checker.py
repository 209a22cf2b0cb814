"""The checker of the chaos run: a correct ledger passes, and one that is changed as a bug would change it does not."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks.chaos.case import Case
from benchmarks.chaos.checker import RULES
from benchmarks.chaos.excuses import Excuses
from benchmarks.chaos.history import History
from benchmarks.chaos.workload import OVER, STARTS, result_of, script_of
from tests.chaos.ledgers import (
    CALM,
    CANCELLED_FLOW,
    EPOCH,
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
    rules_broken,
    swap_mail,
    verdict_of,
)


def test_a_correct_run_has_no_violation() -> None:
    verdict = verdict_of(correct())
    assert verdict.violations == []
    assert set(verdict.explained) == {"a worker was declared dead: frozen, or the server away"}


def _overlap(story: Story) -> None:
    story.run(13.3, "single", "s1", id="s", peer="peer-3", lasts=0.1)


def _rename_firing(story: Story) -> None:
    """The schedule `brisk` misses one moment."""
    nominal = round((EPOCH + 30) * 1000)
    [began] = [
        e for e in story.entries if e.what == "began" and e.facts["nominal"] == nominal and e.facts["task"] == "brisk"
    ]
    story.entries = [
        e for e in story.entries if not (e.facts.get("fence") == began.facts["fence"] and e.what in {"began", "ended"})
    ]


def _fire_twice(story: Story) -> None:
    story.run(31, "ticks", "brisk", id="cron:brisk", nominal=round((EPOCH + 30) * 1000), lasts=0.001)


def _fire_between(story: Story) -> None:
    story.run(31, "ticks", "brisk", id="cron:brisk", nominal=round((EPOCH + 30.5) * 1000), lasts=0.001)


def _end_missing(story: Story) -> None:
    [began] = [e for e in story.entries if e.what == "began" and e.facts["task"] == "a"]
    drop(story, "ended", fence=began.facts["fence"], queue="raw")


def _lose_healthy_claim(story: Story) -> None:
    story.run(1.5, "raw", "a", peer="peer-2")


def _lose_long_settled(story: Story) -> None:
    """Its worker was killed long after it had ended: the server should have known."""
    story.send(40, "raw", "long ago")
    story.run(40.1, "raw", "long ago", peer="peer-3")
    story.world(50, "killed", who="peer-3")
    story.run(54, "raw", "long ago")


def _lose_acknowledged_finish(story: Story) -> None:
    """The server had acknowledged the finish; that the worker was killed is no excuse."""
    story.send(40, "hand", "settled")
    story.run(40.1, "hand", "settled", peer="peer-3", answer="ok")
    story.world(40.2, "killed", who="peer-3")
    story.run(44, "hand", "settled")


def _drop_task(story: Story) -> None:
    story.entries = [e for e in story.entries if not (e.what in {"began", "ended"} and e.facts["fence"] == 20)]


def _never_run_again(story: Story) -> None:
    """The task of the killed worker is never given back."""
    [began] = [e for e in story.entries if e.what == "began" and e.facts["task"] == "killed" and e.source == "peer-1"]
    fence = began.facts["fence"]
    story.entries = [e for e in story.entries if e.facts.get("fence") != fence]


def _store_half(story: Story) -> None:
    """Of an enqueue of two tasks, of which nobody knows, one was stored."""
    story.send(30, "raw", "half", "other half", answer="unknown")
    story.run(30.5, "raw", "half")


def _die_with_worker(story: Story) -> None:
    """A cancelled task comes back because its worker was killed before it had unwound."""
    story.send(40, "raw", "undead")
    story.run(40.1, "raw", "undead", None, peer="peer-3")
    story.cancel(40.2, "raw", "undead", running=1)
    story.world(40.5, "killed", who="peer-3")
    story.run(45, "raw", "undead")


def _start_too_many(story: Story) -> None:
    story.send(21, "limited", "l5")
    story.run(21.3, "limited", "l5")


def _start_too_many_of_a_lane(story: Story) -> None:
    story.send(22, "lanes", "n5", id="n5", outcome="created")
    story.run(22.3, "lanes", "n5", lane="a")


def _start_too_fast(story: Story) -> None:
    for number in range(STARTS + 1):
        story.send(30, "limited", f"fast{number}")
        story.run(30.1 + number / 50, "limited", f"fast{number}", lasts=0.01, fence=10_000_000 + number * 20_000)


def _lose_second_follow_up(story: Story) -> None:
    [began] = [e for e in story.entries if e.what == "began" and e.facts["id"] == "@inner.then.2"]
    story.entries = [e for e in story.entries if e.facts.get("fence") != began.facts["fence"]]


def _run_after_follow_up(story: Story) -> None:
    """A job of `b` runs when its follow-up has begun."""
    story.send(24, "raw", "m3", answer="unknown", batch="b")
    story.run(24.6, "raw", "m3")


def _end_outer_early(story: Story) -> None:
    """The last follow-up of `outer` begins while the job of `inner` that was put back runs."""
    [at] = [i for i, e in enumerate(story.entries) if e.what == "began" and e.facts["id"] == "@outer.then.2"]
    story.entries[at] = story.entries[at]._replace(t=26.05)


def _make_room(story: Story) -> None:
    """The queue has room all the time."""
    for entry in story.entries:
        if entry.what == "length":
            entry.facts["waiting"] = 8


def _last_claim(story: Story) -> int:
    """The claim of the second run of `v`."""
    return max(int(e.facts["fence"]) for e in story.entries if e.what == "saved")


def _step_again(story: Story) -> None:
    """The second run of `v` calls the function of the step whose result the server has."""
    story.step(34.69, _last_claim(story), "one", _last_claim(story))


def _drop_flow(story: Story, *, keep: int) -> None:
    """The runs of the workflow that follow its `keep` first ones are lost."""
    lost = flow_claims(story)[keep:]
    story.entries = [e for e in story.entries if e.facts.get("fence") not in lost]


def _lose_job(story: Story) -> None:
    [began] = [e for e in story.entries if e.what == "began" and e.facts["task"] == f"{FLOW_NAME}/0"]
    story.entries = [e for e in story.entries if e.facts.get("fence") != began.facts["fence"]]


def _last_flow(story: Story) -> int:
    return flow_claims(story)[-1]


def _drop_claim(story: Story, task: str) -> None:
    """The last run of a workflow is lost."""
    last = flow_claims(story, task)[-1]
    story.entries = [e for e in story.entries if e.facts.get("fence") != last]


FLOW_BUGS: dict[str, tuple[Change, str]] = {
    "a workflow takes a step again": (
        lambda s: s.step(45.5, _last_flow(s), "step 0", _last_flow(s), queue="flow"),
        "a step ran again",
    ),
    "a workflow takes a step again under the same claim": (
        lambda s: s.add("peer-1", 44.615, "step", queue="flow", fence=flow_claims(s)[0], name="step 0"),
        "a step ran again",
    ),
    "a wait has another end in the next run": (
        lambda s: alter(s, "waited", {"value": "timeout"}, name="event 0", fence=_last_flow(s)),
        "a step had another result",
    ),
    "a workflow begins twice under one claim": (
        lambda s: s.run(45.45, "flow", FLOW_NAME, fence=_last_flow(s)),
        "a claim was run twice",
    ),
    "a workflow is forgotten": (lambda s: _drop_flow(s, keep=1), "an acknowledged task did not end"),
    "a workflow runs on after its cancellation": (
        lambda s: s.run(48, "flow", CANCELLED_FLOW),
        "a cancelled task came back",
    ),
    "a workflow stays suspended": (
        lambda s: s.world(61, "undrained", queue="flow", left="{'ZCARD :suspended': 1}"),
        "a queue did not become empty",
    ),
    "an event is invented": (
        lambda s: alter(s, "signal", {"value": "v7"}, value="v1"),
        "a wait returned what was not sent",
    ),
    "an event that was refused is taken": (
        lambda s: alter(s, "waited", {"value": "v2"}, name="event 1"),
        "a wait returned what was not sent",
    ),
    "an event is taken twice": (
        lambda s: alter(s, "waited", {"value": "v1"}, name="event 1"),
        "a value ended two waits",
    ),
    "an event is lost": (lambda s: s.signal(44.06, FLOW_NAME, "v3"), "a wait missed its value"),
    "a sleep is cut short": (
        lambda s: s.wait(44.2, flow_claims(s)[0], sleep="slept"),
        "a wait was over before its time",
    ),
    "a timeout is cut short": (
        lambda s: s.wait(44.7, flow_claims(s)[0], event_1="timeout"),
        "a wait was over before its time",
    ),
    "a job is started twice": (
        lambda s: s.run(44.9, "flow_jobs", f"{FLOW_NAME}/1fails", "failure", id="another"),
        "a job of a workflow ran under two ids",
    ),
    "a job comes from nowhere": (
        lambda s: s.run(45, "flow_jobs", f"{FLOW_NAME}/7"),
        "a job ran that no workflow started",
    ),
    "a job is said to have failed that has finished": (
        lambda s: alter(s, "waited", {"value": "failed"}, name=f"job {FLOW_NAME}/0"),
        "a workflow saw a false end of its job",
    ),
    "a job is said to have been cancelled": (
        lambda s: alter(s, "waited", {"value": "cancelled"}, name=f"job {FLOW_NAME}/1fails"),
        "a workflow saw a false end of its job",
    ),
    "a job's result is that of another claim": (
        lambda s: alter(s, "waited", {"value": "finished 1"}, name="first"),
        "a workflow saw a false end of its job",
    ),
    "a job is lost": (_lose_job, "a job of a workflow did not end"),
    "a job outlives its cancelled workflow": (
        lambda s: s.run(59, "flow_jobs", f"{CANCELLED_FLOW}/0late"),
        "a job began long after its workflow was cancelled",
    ),
    "a job of a job outlives the cancelled workflow": (
        lambda s: s.run(59.9, "flow_jobs", f"{CANCELLED_FLOW}/1nests/0"),
        "a job began long after its workflow was cancelled",
    ),
    "a workflow is said to have begun with the version that replaced its own": (
        begin_with_another,
        "a step had another result",
    ),
    "a workflow that was put back is forgotten": (
        lambda s: _drop_claim(s, FAILED_FLOW),
        "a job that was put back did not run",
    ),
    "a workflow that was put back does not end": (
        lambda s: alter(s, "ended", {"how": "error"}, fence=flow_claims(s, FAILED_FLOW)[-1]),
        "a workflow that was put back did not end",
    ),
    "a workflow that was put back takes its step again": (
        lambda s: s.step(54.65, flow_claims(s, FAILED_FLOW)[-1], "step 0", 1, queue="flow"),
        "a step ran again",
    ),
    "a failed step that a step followed is tried again after the put-back": (
        retry_compensated,
        "a step had another result",
    ),
    "a job runs again though its workflow was not put back": (
        lambda s: drop(s, "retry", batch=FAILED_FLOW) or drop(s, "retried", call=put_back_call(FAILED_FLOW)),
        "a task ran again after its end",
    ),
    "a job of a job comes from nowhere": (
        lambda s: s.run(55, "flow_jobs", f"{FAILED_FLOW}/1nests/7"),
        "a job ran that no workflow started",
    ),
    "a workflow that a workflow started runs under two ids": (
        lambda s: s.run(48.35, "flow_nested", f"{FAILED_FLOW}/1nests", "error", id="another"),
        "a job of a workflow ran under two ids",
    ),
    "a mailbox gives the second value first": (
        swap_mail,
        "a wait returned a value out of turn",
    ),
    "a mailbox gives a value twice": (
        lambda s: alter(
            s, "waited", {"value": f"{FAILED_FLOW} mail 0"}, name="mail 2", fence=flow_claims(s, FAILED_FLOW)[-1]
        ),
        "a value ended two waits",
    ),
    "a mailbox is closed on a value": (
        lambda s: s.signal(48.6, FAILED_FLOW, f"{FAILED_FLOW} mail 2"),
        "a wait missed its value",
    ),
    "a wait is over that was not ended": (
        lambda s: alter(s, "wait_ended", {"answer": "closed"}, answer="ended"),
        "a wait was over before its time",
    ),
    "a wait goes on that was ended": (
        lambda s: [move(s, what, 20) for what in ("end_wait", "wait_ended")],
        "a wait went on that was ended",
    ),
    "a lifetime is over too early": (
        lambda s: alter(s, "waited", {"value": "over"}, name="event 0", fence=_last_flow(s)),
        "a lifetime was over before its time",
    ),
    "a wait is not ended by the lifetime": (
        lambda s: alter(s, "waited", {"value": "timeout"}, value="over"),
        "a wait outlived its workflow",
    ),
    "a workflow has the wrong follow-up, too": (
        lambda s: s.follow_up(45.8, FLOW_NAME, "otherwise"),
        "a workflow did not have its one follow-up",
    ),
    "a workflow has its follow-up twice": (
        lambda s: s.follow_up(45.8, FLOW_NAME, "then", 2),
        "a workflow did not have its one follow-up",
    ),
    "a cancelled workflow has no follow-up": (
        lambda s: drop(s, "began", task=f"follow_ups/{CANCELLED_FLOW}/otherwise"),
        "a workflow did not have its one follow-up",
    ),
}
BUGS: dict[str, tuple[Change, str]] = {
    "a finish is forgotten": (_lose_healthy_claim, "a task ran again after its end"),
    "a finish is lost long before the worker dies": (_lose_long_settled, "a task ran again after its end"),
    "an acknowledged finish is lost": (_lose_acknowledged_finish, "a task ran again after its end"),
    "a dead letter runs again": (lambda s: s.run(17, "raw", "bad"), "a task ran again after its end"),
    "a finished job comes back": (
        lambda s: s.run(8, "jobs", "j", peer="peer-3"),
        "a task ran again after its result was read",
    ),
    "a claim is given out twice": (
        lambda s: s.run(1.1, "raw", "a", peer="peer-3", fence=10, how="error"),
        "a claim was held twice",
    ),
    "a start is done twice": (lambda s: s.run(1.3, "raw", "a", fence=10), "a claim was run twice"),
    "an id runs twice at once": (_overlap, "an id ran twice at once"),
    "a limit is exceeded": (_start_too_many, "a limit was exceeded"),
    "a lane's limit is exceeded": (_start_too_many_of_a_lane, "a limit was exceeded"),
    "a rate is exceeded": (_start_too_fast, "a rate was exceeded"),
    "a handler hangs": (_end_missing, "a run did not end"),
    "a healthy worker is swept": (
        lambda s: s.add("peer-1", 40, "registered", worker="peer-1:b"),
        "a worker was declared dead",
    ),
    "a task is lost": (_drop_task, "an acknowledged task did not end"),
    "a dead worker's task is never given back": (_never_run_again, "an acknowledged task did not end"),
    "the last dispatch of an id is lost": (
        lambda s: s.send(30, "single", "s3", id="s", outcome="created"),
        "an acknowledged task did not end",
    ),
    "an enqueue is stored by half": (_store_half, "a task began, or its neighbour, and did not end"),
    "a firing is lost with its worker": (
        lambda s: s.run(
            61, "ticks", "plain", None, id="cron:plain", nominal=round(EPOCH * 1000) + 100_100, peer="peer-2"
        ),
        "a firing did not end",
    ),
    "a refused task runs": (lambda s: s.run(4.1, "raw", "full"), "a refused task ran"),
    "a skipped dispatch runs": (lambda s: s.run(14.25, "updates", "u3", id="u"), "a refused task ran"),
    "a task comes from nowhere": (lambda s: s.run(4.1, "raw", "who?"), "a task ran that no producer sent"),
    "a cancelled task runs": (lambda s: s.run(11.5, "raw", "gone"), "a cancelled task came back"),
    "a cancelled run comes back": (lambda s: s.run(13, "raw", "stopped"), "a cancelled task came back"),
    "a cancelled run comes back with its worker's death": (_die_with_worker, "a cancelled task came back"),
    "a replaced payload runs": (lambda s: s.run(14.6, "updates", "u1", id="u"), "a replaced payload ran"),
    "a job runs before it is due": (
        lambda s: s.send(30, "jobs", "k", id="k", delay=1.0, outcome="created") or s.run(30.5, "jobs", "k"),
        "a job began before it was due",
    ),
    "a result is another's": (
        lambda s: alter(s, "result", {"value": result_of("other")}, task="j"),
        "a result was not true",
    ),
    "a result is lost": (
        lambda s: alter(s, "result", {"outcome": "none", "value": None}, task="j"),
        "a result was not true",
    ),
    "a job is said to have failed": (
        lambda s: alter(s, "result", {"outcome": "failed"}, task="j"),
        "a result was not true",
    ),
    "a job is said to have been cancelled": (
        lambda s: alter(s, "result", {"outcome": "cancelled"}, task="j"),
        "a result was not true",
    ),
    "a task is given up too early": (
        lambda s: alter(s, "dead", {"reason": "timeout"}, task="bad"),
        "a task was dead-lettered without its reason",
    ),
    "a dead letter is forgotten": (
        lambda s: drop(s, "dead", task="bad"),
        "a failure handler was called for a task that did not fail",
    ),
    "a failure handler is forgotten": (lambda s: drop(s, "buried", task="bad"), "a failure handler was not called"),
    "a failure handler fails": (
        lambda s: s.world(61, "dead", queue="raw-fail", task="bad", id="@2", reason="failed"),
        "a failure handler failed",
    ),
    "a batch stays open": (lambda s: alter(s, "batch", {"state": "sealed"}, name="b"), "a batch did not end"),
    "a follow-up is lost": (
        lambda s: drop(s, "began", task="follow_ups/b/then"),
        "a batch did not have its one follow-up",
    ),
    "the wrong follow-up runs, too": (
        lambda s: s.run(25, "follow_ups", "follow_ups/b/otherwise"),
        "a batch did not have its one follow-up",
    ),
    "a job of a batch is not counted": (
        lambda s: alter(s, "batch", {"jobs": 1, "finished": 1}, name="b"),
        "the counts of a batch do not add up",
    ),
    "a job of a batch is counted twice": (
        lambda s: alter(s, "batch", {"finished": 3}, name="b"),
        "the counts of a batch do not add up",
    ),
    "a batch is forgotten": (lambda s: drop(s, "batch", name="inner"), "a batch did not end"),
    "a batch leaves its parent": (lambda s: alter(s, "batch", {"parent": ""}, name="inner"), "a batch did not end"),
    "a second ending has no follow-up": (_lose_second_follow_up, "a batch did not have its one follow-up"),
    "an ending has two follow-ups": (
        lambda s: s.follow_up(25.25, "inner", "then"),
        "a batch did not have its one follow-up",
    ),
    "a batch ends before its jobs": (
        _run_after_follow_up,
        "a follow-up began before its batch had ended",
    ),
    "a batch ends before the jobs of one in it": (_end_outer_early, "a follow-up began before its batch had ended"),
    "a batch ends before one in it": (
        lambda s: alter(s, "batch", {"ended_ms": 26_200}, name="outer"),
        "a batch ended before one in it",
    ),
    "a batch ends again without a job that was put back": (
        lambda s: alter(s, "batch", {"endings": 2}, name="b"),
        "a batch ended too often",
    ),
    "a job that was put back counts as failed and as finished": (
        lambda s: alter(s, "batch", {"finished": 1, "failed": 1}, name="inner"),
        "the counts of a batch do not add up",
    ),
    "a job is not put back": (
        lambda s: alter(s, "retried", {"count": 2}, call=put_back_call("inner")),
        "a job that was put back did not run",
    ),
    "a call is not told that there is room": (_make_room, "a producer waited although there was room"),
    "tasks that waited for room are added twice": (
        lambda s: s.run(33, "room", "r1"),
        "a task ran again after its end",
    ),
    "a call that gave up waiting adds its tasks": (lambda s: s.run(33, "room", "r2"), "a refused task ran"),
    "a save is lost": (
        lambda s: alter(s, "began", {"saved": 0}, task="v", saved=1),
        "a run found an older save than was acknowledged",
    ),
    "a step that was done is done again": (_step_again, "a step ran again"),
    "a step has the result of another one": (
        lambda s: s.step(34.85, _last_claim(s), "one", 7, called=False),
        "a step had another result",
    ),
    **FLOW_BUGS,
    "a row of a producer that was killed is lost": (
        lambda s: s.world(61, "committed", queue="rows", task="w4"),
        "a row that was committed is no job that ended",
    ),
    "a row is sent twice": (lambda s: s.run(36.6, "rows", "w1", id="another"), "a row became several jobs"),
    "a row is sent that was rolled back": (
        lambda s: s.run(36.6, "rows", "w3"),
        "a job ran whose row was not committed",
    ),
    "a moment is skipped": (_rename_firing, "a moment of a schedule did not fire"),
    "a moment fires twice": (_fire_twice, "a task ran again after its end"),
    "a moment is invented": (_fire_between, "a schedule fired at a moment that it does not have"),
    "a schedule stops": (lambda s: s.world(CALM, "silent", schedule="brisk"), "a schedule stopped firing"),
    "a key is left": (
        lambda s: s.world(61, "key", name="chaos:{raw}:claim:7", type="list", expires=None),
        "a key was left",
    ),
    "a key expires in a year": (
        lambda s: s.world(61, "key", name="chaos:{raw}:result:7", type="hash", expires=3e7),
        "a key was left",
    ),
    "a claim is held by nobody": (
        lambda s: s.world(61, "undrained", queue="chaos:{raw}:claims:W", left="1 claims"),
        "a queue did not become empty",
    ),
    "a peer dies": (lambda s: s.world(30, "died", who="peer-1", code=1), "a process died by itself"),
    "a peer hangs": (lambda s: s.world(70, "hung", who="peer-1"), "a process did not end"),
    "the run is cut short": (lambda s: drop(s, "calm"), "the run did not come to its end"),
}
"""What a bug would do to the ledger, and the rule that must notice."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed_by_its_rule(bug: str) -> None:
    change, rule = BUGS[bug]
    story = correct()
    change(story)
    assert rule in rules_broken(story)


def test_every_rule_has_a_bug_that_breaks_it() -> None:
    """A rule that cannot fail is worse than none."""
    broken: set[str] = set()
    for change, _ in BUGS.values():
        story = correct()
        change(story)
        broken |= _rules_that_fail(story)
    assert broken == {rule.__name__ for rule in RULES}


def _rules_that_fail(story: Story) -> set[str]:
    history = History.of(story.entries)
    return {rule.__name__ for rule in RULES if list(rule(Case(history, Excuses(history))))}


@pytest.mark.parametrize(
    ("outer", "home", "broken"),
    [("cancelled", "follow_ups", False), ("", "follow_ups", True), ("cancelled", "raw", True)],
)
def test_a_follow_up_that_is_a_job_of_a_cancelled_batch_may_be_cancelled(outer: str, home: str, broken: bool) -> None:
    story = correct()
    story.send(24, "raw", "n1", batch="n")
    story.run(24.1, "raw", "n1")
    story.batch("n", 1, parent="p", home=home)
    story.follow_up(24.6, "p", "otherwise")
    if outer or home == "raw":
        count, cancelled = (2, 1) if home == "follow_ups" else (1, 0)
        story.batch("p", 1, jobs=count, cancelled=cancelled, reason="at random")
    else:
        story.send(24, "raw", "p1", batch="p")
        story.run(24.1, "raw", "p1", "failure")
        story.world(CALM + 1, "dead", queue="raw", task="p1", id="@1", reason="failed")
        story.add("peer-1", 24.2, "buried", queue="raw", task="p1", reason="failed")
        story.batch("p", 2, 1)
    assert rules_broken(story) == ({"a batch did not have its one follow-up"} if broken else set())


@pytest.mark.parametrize(("jump", "broken"), [(26.2, False), (40.0, True)])
def test_a_clock_jump_is_an_excuse_for_ends_in_the_wrong_order_only_during_the_batch(jump: float, broken: bool) -> None:
    story = correct()
    story.world(jump, "clock", offset=-3)
    alter(story, "batch", {"ended_ms": 26_200}, name="outer")
    assert ("a batch ended before one in it" in rules_broken(story)) == broken


# What faults excuse, and what they do not


def twice(peer: str = "peer-2", lasts: float = 0.1, again: float = 44) -> Story:
    """A task that `peer` ran at 40 s, and that ran again."""
    story = correct()
    story.entries = [e for e in story.entries if e.what != "killed"]
    drop_run_of_killed(story)
    story.send(39, "raw", "twice")
    story.run(40, "raw", "twice", peer=peer, lasts=lasts)
    story.run(again, "raw", "twice")
    return story


def drop_run_of_killed(story: Story) -> None:
    story.entries = [e for e in story.entries if e.facts.get("fence") != 50]


def test_a_workflow_whose_lifetime_is_over_before_it_comes_to_its_jobs_starts_none() -> None:
    story = correct()
    _lose_job(story)
    assert "a job of a workflow did not end" in rules_broken(story)
    story.wait(44.05, flow_claims(story)[0], next_try_of_step_0=OVER)
    assert "a job of a workflow did not end" not in rules_broken(story)


def test_without_a_fault_nothing_is_excused() -> None:
    assert rules_broken(twice()) == {"a task ran again after its end"}


@pytest.mark.parametrize("at", [40.05, 40.15])
def test_a_kill_before_the_end_reached_the_server_is_an_excuse(at: float) -> None:
    story = twice()
    story.world(at, "killed", who="peer-2")
    assert rules_broken(story) == set()


def test_a_kill_of_another_process_is_none() -> None:
    story = twice()
    story.world(40.1, "killed", who="peer-3")
    assert rules_broken(story) == {"a task ran again after its end"}


def test_a_freeze_longer_than_the_keepalive_is_an_excuse_and_a_short_one_is_not() -> None:
    for thawed, broken in ((44.5, set[str]()), (40.6, {"a task ran again after its end"})):
        story = twice()
        story.world(40.05, "froze", who="peer-2")
        story.world(thawed, "thawed", who="peer-2")
        assert rules_broken(story) == broken


def test_a_process_that_did_not_get_the_cpu_counts_as_frozen() -> None:
    story = twice()
    story.add("peer-2", 44.5, "gap", begin=40.05, end=44.4)
    assert rules_broken(story) == set()


def test_a_server_that_was_away_explains_that_the_end_came_late() -> None:
    for begin, broken in ((40.05, set[str]()), (30.0, {"a task ran again after its end"})):
        story = twice(again=55)
        story.world(50, "trouble", begin=begin, end=begin + 9, who=None, why="server down")
        story.world(49.5, "killed", who="peer-2")
        assert rules_broken(story) == broken


def test_a_peer_that_left_while_the_server_was_away_is_an_excuse_but_not_while_a_slot_moved() -> None:
    for why, broken in (("server frozen", set[str]()), ("slot moved", {"a task ran again after its end"})):
        story = twice(lasts=0.1, again=47)
        story.world(45, "trouble", begin=40.05, end=45, who=None, why=why)
        story.add("peer-2", 43, "left")
        assert rules_broken(story) == broken


@pytest.mark.parametrize("how", ["left", "killed"])
def test_a_worker_that_was_cut_off_and_ended_before_it_knew_is_an_excuse(how: str) -> None:
    for end, at, broken in ((44, 46.0, False), (40.9, 46.0, True), (44, 70.0, True)):
        story = twice(again=44)
        story.world(end, "trouble", begin=40.05, end=end, who="peer-2", why="half-open connections")
        if how == "left":
            story.add("peer-2", at, "left")
        else:
            story.world(at, "killed", who="peer-2")
        assert rules_broken(story) == ({"a task ran again after its end"} if broken else set())


@pytest.mark.parametrize(
    ("queue", "ended", "broken"), [("thread", 41.1, False), ("thread", 38.0, True), ("raw", 41.1, True)]
)
def test_what_a_thread_ends_after_the_grace_of_its_peer_is_given_back(queue: str, ended: float, broken: bool) -> None:
    story = correct()
    story.send(35, queue, "twice")
    story.run(37, queue, "twice", peer="peer-3", lasts=ended - 37)
    story.add("peer-3", 40, "leaving", grace=1)
    story.run(41.3, queue, "twice")
    assert rules_broken(story) == ({"a task ran again after its end"} if broken else set())


@pytest.mark.parametrize(
    ("queue", "how", "ended", "broken"),
    [
        *(("asyncio", "failure", 40.1, False), ("asyncio", "failure", 39.9, False), ("asyncio", "failure", 39.5, True)),
        *(("asyncio", "returned", 40.1, True), ("raw", "failure", 40.2, True)),
        *(("raw", "failure", 40.01, False), ("raw", "failure", 39.99, True), ("raw", "returned", 40.01, True)),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_fails_as_its_queue_is_left_is_given_back(
    queue: str, how: str, ended: float, broken: bool, whole: bool
) -> None:
    story = correct()
    story.send(35, queue, "twice")
    story.run(37, queue, "twice", how, peer="peer-3", lasts=ended - 37)
    if whole:
        story.add("peer-3", 38, "leaving", grace=2)
    else:
        story.add("peer-3", 40.2, "left_queue", queue=queue, at=40.0)
    story.run(41.3, queue, "twice")
    assert ("a task ran again after its end" in rules_broken(story)) is broken


@pytest.mark.parametrize("begin", [37.5, 40.5])
def test_a_peer_without_cpu_cancels_its_runs_afterwards(begin: float) -> None:
    story = correct()
    story.send(35, "raw", "twice")
    story.run(37, "raw", "twice", "failure", peer="peer-3", lasts=4.05)
    story.add("peer-3", 38, "leaving", grace=1)
    story.add("peer-3", 41, "gap", begin=begin, end=41.0)
    story.run(41.3, "raw", "twice")
    assert ("a task ran again after its end" in rules_broken(story)) is (begin > 39)


@pytest.mark.parametrize(
    ("queue", "has_jobs", "leaves", "broken"),
    [
        *(("flow", True, 37.2, False), ("flow_process", True, 37.2, False), ("flow", False, 37.2, True)),
        *(
            ("flow", True, 36.9, True),
            ("flow", True, 37.05, False),  # a loop that is late: it ended at 37.1
            ("flow", True, 40.5, False),
            ("flow", True, 41.2, True),
            ("raw", True, 37.2, True),
        ),
    ],
)
def test_a_workflow_whose_peer_leaves_while_it_sends_its_jobs_is_given_back(
    queue: str, has_jobs: bool, leaves: float, broken: bool
) -> None:
    task = next(name for n in count() if bool(script_of(name := f"twice {n}").jobs) is has_jobs)
    story = correct()
    story.send(35, queue, task)
    story.run(37, queue, task, "failure", peer="peer-3", lasts=0.1)
    story.add("peer-3", leaves, "leaving", grace=0)
    story.run(41.3, queue, task)
    assert ("a task ran again after its end" in rules_broken(story)) is broken


def test_a_failover_that_may_lose_writes_is_an_excuse() -> None:
    story = twice()
    story.world(47, "failover", begin=39.5, end=46)
    assert rules_broken(story) == set()


def test_of_two_runs_at_once_the_earlier_claim_needs_the_excuse() -> None:
    story = correct()
    story.send(39, "single", "late", id="z", outcome="created")
    story.run(40.2, "single", "late", id="z", peer="peer-1", fence=100_000, lasts=1)
    story.run(40.5, "single", "late", "cancelled: lost", id="z", peer="peer-3", fence=99_999, lasts=0.2)
    assert rules_broken(story) == {"an id ran twice at once"}
    story.world(36, "froze", who="peer-3")
    story.world(40.45, "thawed", who="peer-3")
    assert rules_broken(story) == set()


def test_a_claim_that_was_being_started_may_begin_after_the_cancellation_and_only_that() -> None:
    story = correct()
    story.send(40, "raw", "starting")
    story.cancel(40.1, "raw", "starting", running=1)
    story.run(40.5, "raw", "starting", "cancelled: cancel")
    assert rules_broken(story) == set()
    story.run(41, "raw", "starting")
    assert rules_broken(story) == {"a cancelled task came back"}


def test_a_cancellation_of_which_nobody_knows_excuses_a_task_that_did_not_run() -> None:
    story = correct()
    story.send(40, "raw", "perhaps")
    assert rules_broken(story) == {"an acknowledged task did not end"}
    story.cancel(40.1, "raw", "perhaps", known=False)
    assert rules_broken(story) == set()


def test_a_cancellation_that_found_nothing_excuses_nothing() -> None:
    story = correct()
    story.send(40, "raw", "perhaps")
    story.cancel(40.1, "raw", "perhaps")
    assert rules_broken(story) == {"an acknowledged task did not end"}


def test_a_later_dispatch_of_the_same_id_ends_in_place_of_an_earlier_one() -> None:
    story = correct()
    story.send(40, "single", "first", id="y", outcome="created", after=0.3)
    story.send(40.1, "single", "second", id="y", outcome="updated")
    story.run(41, "single", "second", id="y")
    assert rules_broken(story) == set()


def test_a_clock_that_jumped_excuses_a_job_that_began_early() -> None:
    story = correct()
    story.send(40, "jobs", "early", id="early", delay=5.0, outcome="created")
    story.run(41, "jobs", "early")
    assert rules_broken(story) == {"a job began before it was due"}
    story.world(40.5, "clock", offset=20)
    assert rules_broken(story) == set()


@pytest.mark.parametrize(("at", "broken"), [(40.05, False), (39.0, True)])
def test_a_clock_that_jumped_after_the_dispatch_excuses_a_lifetime_that_is_over(at: float, broken: bool) -> None:
    story = correct()
    for n, entry in enumerate(story.entries):
        if entry.facts.get("value") == "over":
            story.entries[n] = entry._replace(t=41.0)
    story.world(at, "clock", offset=20)
    assert ("a lifetime was over before its time" in rules_broken(story)) is broken


@pytest.mark.parametrize(
    ("at", "offset", "broken"), [(45.0, 60, False), (45.0, 20, True), (49.0, -3, False), (43.0, -3, False)]
)
def test_only_a_clock_that_ends_the_wait_as_well_excuses_one_that_outlives_its_workflow(
    at: float, offset: int, broken: bool
) -> None:
    """The lifetime is over at 48 s, and the time of the wait at 85 s."""
    story = correct()
    alter(story, "waited", {"value": "timeout"}, value="over")
    story.world(at, "clock", offset=offset)
    assert ("a wait outlived its workflow" in rules_broken(story)) is broken


@pytest.mark.parametrize(
    ("queue", "why"), [("thread", "server down"), ("thread", "connection killed"), ("raw", "server down")]
)
def test_only_a_thread_may_have_no_end_whose_peer_left_while_the_server_was_away(queue: str, why: str) -> None:
    story = correct()
    story.send(40, queue, "hangs")
    story.run(41, queue, "hangs", None)
    story.world(55, "trouble", begin=42, end=52, who=None, why=why)
    story.add("peer-1", 43, "leaving", grace=0.2)
    story.add("peer-1", 49, "left")
    story.run(53, queue, "hangs", peer="peer-3")
    assert ("a run did not end" in rules_broken(story)) is ((queue, why) != ("thread", "server down"))


def test_a_cut_connection_does_not_excuse_a_dead_worker() -> None:
    story = correct()
    story.world(39, "trouble", begin=39, end=39.0, who="peer-1", why="connection killed")
    story.add("peer-1", 40, "registered", worker="peer-1:b")
    assert rules_broken(story) == {"a worker was declared dead"}


def test_only_a_clock_set_back_by_more_than_a_minute_explains_that_a_moment_comes_again() -> None:
    for offset, broken in ((-61, False), (-60, True), (61, True)):
        story = correct()
        _fire_twice(story)
        story.world(30.5, "clock", offset=offset)
        story.world(59, "clock", offset=0)
        assert ("a task ran again after its end" in rules_broken(story)) is broken, offset
    story = correct()
    _fire_twice(story)
    story.world(31.5, "clock", offset=-61)
    story.world(59, "clock", offset=0)
    assert rules_broken(story) == {"a task ran again after its end"}, "the clock was right until then"


@pytest.mark.parametrize(("set_back", "broken"), [(29.9, False), (15, True)])
def test_the_run_of_a_moment_may_begin_when_the_clock_has_been_set_back_since_its_firing(
    set_back: float, broken: bool
) -> None:
    story = correct()
    _fire_twice(story)
    story.world(set_back - 1, "clock", offset=61)
    story.world(set_back, "clock", offset=0)
    assert ("a task ran again after its end" in rules_broken(story)) is broken


@pytest.mark.parametrize(("before", "after", "broken"), [(20, 0, False), (4, 0, True), (0, -3, True), (0, -9, False)])
def test_claims_are_no_times_while_the_clock_is_behind_what_it_has_shown(before: int, after: int, broken: bool) -> None:
    """It is set back at 15 s, and the starts are from 30.1 s on."""
    story = correct()
    _start_too_fast(story)
    story.world(2, "clock", offset=before)
    story.world(15, "clock", offset=after)
    story.world(59, "clock", offset=0)
    assert ("a rate was exceeded" in rules_broken(story)) is broken


def test_a_clock_set_back_does_not_bring_moments_from_before_its_new_time() -> None:
    story = correct()
    _fire_twice(story)
    story.world(2, "clock", offset=200)
    story.world(30.5, "clock", offset=100)
    story.world(59, "clock", offset=0)
    assert "a task ran again after its end" in rules_broken(story)


@pytest.mark.parametrize(("waited", "broken"), [(99.2, False), (97.0, True)])
def test_moments_may_be_dropped_when_a_hundred_wait_and_not_before(waited: float, broken: bool) -> None:
    """The clock jumps ahead; then five moments are left out, and the next fires this late."""
    story, period, missing, drop_at = correct(), 1.0, 5, 30
    began = [e for e in story.entries if e.what == "began" and e.facts["task"] == "brisk" and e.t >= drop_at]
    gone = {e.facts["fence"] for e in began[:missing]}
    late = [*began[missing:]]
    story.entries = [e for e in story.entries if e.facts.get("fence") not in gone or e.what not in {"began", "ended"}]
    after = late[0].facts["nominal"] / 1000 - EPOCH
    story.world(drop_at + missing - 0.5, "clock", offset=after + waited * period - late[0].t)
    story.world(late[0].t + 0.1, "clock", offset=0)
    assert rules_broken(story) == ({"a moment of a schedule did not fire"} if broken else set())
