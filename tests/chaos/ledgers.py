"""Small ledgers for the tests of the checker: a correct story, and the means to change it as a bug would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.chaos.checker import Verdict, check
from benchmarks.chaos.history import History
from benchmarks.chaos.ledger import ENTRIES, Entry
from benchmarks.chaos.workload import (
    FLOW,
    FLOW_BRIEF,
    FLOW_JOBS,
    FLOW_NESTED,
    NESTS,
    OVER,
    SLEPT,
    SUSPENDED,
    TIMED_OUT,
    queue_of_job,
    result_of,
    script_of,
)

Entries = list[Entry]
EPOCH = 1_900_000_000.0
"""The server's time at boot time 0, here."""
CALM = 60.0


class Story:
    """Entries, told one after the other."""

    def __init__(self) -> None:
        self.entries: Entries = []
        self._calls = 0
        self._fences = 0

    def add(self, source: str, t: float, what: str, **facts: Any) -> None:
        assert what in ENTRIES
        self.entries.append(Entry(source, t, what, facts))

    def world(self, t: float, what: str, **facts: Any) -> None:
        self.add("world", t, what, **facts)

    def send(
        self, t: float, queue: str, *tasks: str, answer: str | None = "acked", after: float = 0.01, **facts: Any
    ) -> None:
        """One request; `outcome` goes to its answer."""
        self._calls += 1
        outcome = facts.pop("outcome", None)
        self.add("producer-1", t, "send", call=self._calls, queue=queue, tasks=list(tasks), **facts)
        if answer is not None:
            self.add("producer-1", t + after, answer, call=self._calls, outcome=outcome)

    def cancel(
        self, t: float, queue: str, task: str, waiting: int = 0, running: int = 0, *, known: bool = True
    ) -> None:
        self._calls += 1
        self.add("producer-1", t, "cancel", call=self._calls, queue=queue, task=task)
        if known:
            self.add("producer-1", t + 0.01, "cancelled", call=self._calls, waiting=waiting, running=running)

    def run(
        self,
        t: float,
        queue: str,
        task: str,
        how: str | None = "returned",
        *,
        peer: str = "peer-1",
        lasts: float = 0.02,
        id: str = "",
        nominal: int | None = None,
        fence: int = 0,
        lane: str = "",
        answer: str | None = None,
        saved: int = 0,
    ) -> int:
        """One run; `how` None: it does not end. Return its claim."""
        self._fences += 1
        fence = fence or self._fences * 10
        facts = {"id": id or task, "fence": fence, "nominal": nominal, "lane": lane, "saved": saved}
        self.add(peer, t, "began", queue=queue, task=task, **facts)
        if how is not None:
            self.add(peer, t + lasts, "ended", queue=queue, fence=fence, how=how, counted=how == "error")
        if answer is not None:
            self.add(peer, t + lasts + 0.01, "settled", queue=queue, fence=fence, answer=answer)
        return fence

    def save(self, t: float, fence: int, value: int) -> None:
        """The server has acknowledged a save."""
        self.add("peer-1", t, "saved", queue="saves", fence=fence, value=value)

    def step(self, t: float, fence: int, name: str, value: int, *, called: bool = True, queue: str = "saves") -> None:
        """A step has returned, whose function was called or not."""
        if called:
            self.add("peer-1", t, "step", queue=queue, fence=fence, name=name)
        self.add("peer-1", t + 0.001, "stepped", queue=queue, fence=fence, name=name, value=value)

    def signal(self, t: float, task: str, value: str, answer: str | None = "stored") -> None:
        """An event is sent to a workflow."""
        self._calls += 1
        self.add("producer-1", t, "signal", call=self._calls, queue=FLOW, task=task, value=value)
        if answer is not None:
            self.add("producer-1", t + 0.01, "signalled", call=self._calls, answer=answer)

    def end_wait(self, t: float, task: str, name: str, answer: str) -> None:
        """A wait of a workflow is ended."""
        self._calls += 1
        self.add("producer-1", t, "end_wait", call=self._calls, queue=FLOW, task=task, name=name)
        self.add("producer-1", t + 0.01, "wait_ended", call=self._calls, answer=answer)

    def wait(self, t: float, fence: int, *, queue: str = FLOW, **ends: str) -> None:
        """Waits of a workflow have returned. The name of an end has _ for a space."""
        for name, value in ends.items():
            self.add("peer-1", t, "waited", queue=queue, fence=fence, name=name.replace("_", " "), value=value)

    def see(self, t: float, fence: int, job: str, end: str) -> None:
        """A workflow has seen how one of its jobs ended."""
        self.add("peer-1", t, "waited", queue=FLOW, fence=fence, name=f"job {job}", value=end)

    def put_back(self, t: float, batch: str, count: int) -> None:
        """The failed jobs of a batch were put back, or a workflow."""
        self._calls += 1
        self.add("producer-1", t, "retry", call=self._calls, batch=batch)
        self.add("producer-1", t + 0.01, "retried", call=self._calls, count=count)

    def batch(self, name: str, finished: int, failed: int = 0, **facts: Any) -> None:
        """A batch that was opened, and has ended."""
        usual = {"state": "ended", "jobs": finished + failed, "cancelled": 0, "reason": None, "parent": ""}
        usual |= {"home": "follow_ups", "endings": 1, "ended_ms": 1}
        facts = {**usual, "name": name, "finished": finished, "failed": failed, **facts}
        self.add("producer-1", 23.9, "opened", batch=name, parent=facts["parent"])
        self.world(CALM + 1, "batch", **facts)

    def follow_up(self, t: float, batch: str, kind: str, number: int = 1) -> None:
        """The follow-up of the ending with this number runs."""
        suffix = f".{number}" if number > 1 else ""
        self.run(t, "follow_ups", f"follow_ups/{batch}/{kind}", id=f"@{batch}.{kind}{suffix}")

    def fire(self, name: str, period: float, begin: float = 1.0, end: float = CALM) -> None:
        """All moments of a schedule; a moment is a multiple of its period in the server's time."""
        first = -int(-(EPOCH + begin) // period)
        number = first
        while (t := number * period - EPOCH) <= end:
            nominal = round(number * period * 1000)
            self.run(t + 0.005, "ticks", name, id=f"cron:{name}", nominal=nominal, lasts=0.005)
            number += 1

    def end(self) -> None:
        self.world(CALM, "calm", server_ms=round((EPOCH + CALM) * 1000), epoch=EPOCH)
        self.world(CALM + 1, "key", name="{chaos}:version", type="string", expires=None)
        self.world(CALM + 1, "key", name="chaos:{raw}:counts", type="hash", expires=2_592_000.0)


def correct() -> Story:
    """A run of a minute in which much happens and nothing goes wrong."""
    story = Story()
    for peer in ("peer-1", "peer-2", "peer-3"):
        story.add(peer, 0.5, "registered", worker=f"{peer}:a")
    story.send(1, "raw", "a", "b")
    story.run(1.1, "raw", "a")
    story.run(1.1, "raw", "b")
    story.send(2, "jobs", "j", id="j", delay=0.5, outcome="created")
    story.run(2.6, "jobs", "j", "error")
    story.run(3.0, "jobs", "j")
    story.add("producer-1", 3.1, "result", queue="jobs", task="j", outcome="finished", value=result_of("j"))
    story.send(4, "raw", "full", answer="refused")
    story.send(5, "raw", "killed")
    story.run(5.1, "raw", "killed", None, peer="peer-2")
    story.world(5.5, "killed", who="peer-2")
    story.run(9.5, "raw", "killed")
    story.send(11, "raw", "gone")
    story.cancel(11.1, "raw", "gone", waiting=1)
    story.send(12, "raw", "stopped")
    story.run(12.1, "raw", "stopped", "cancelled: cancel", lasts=0.5)
    story.cancel(12.3, "raw", "stopped", running=1)
    story.send(13, "single", "s1", id="s", outcome="created")
    story.run(13.1, "single", "s1", id="s", lasts=0.5)
    story.send(13.2, "single", "s2", id="s", outcome="blocked")
    story.run(13.7, "single", "s2", id="s")
    story.send(14, "updates", "u1", id="u", outcome="created")
    story.send(14.1, "updates", "u2", id="u", outcome="updated")
    story.send(14.2, "updates", "u3", id="u", outcome="unchanged")
    story.send(14.3, "updates", "u4", id="u", outcome="updated", keeps_data=True)
    story.run(15, "updates", "u2", id="u")
    story.send(16, "raw", "bad")
    story.run(16.1, "raw", "bad", "failure")
    story.add("peer-1", 16.2, "buried", queue="raw", task="bad", reason="failed")
    story.world(CALM + 1, "dead", queue="raw", task="bad", id="@1", reason="failed")
    story.send(17, "hand", "h")
    story.run(17.1, "hand", "h", answer="ok")
    story.send(18, "raw", "nobody knows", answer="unknown")
    story.world(20, "froze", who="peer-3")
    story.world(26, "thawed", who="peer-3")
    story.add("peer-3", 26.1, "registered", worker="peer-3:b")
    story.send(21, "limited", "l1", "l2", "l3", "l4")
    for name in ("l1", "l2", "l3"):
        story.run(21.1, "limited", name, lasts=0.5)
    story.run(21.6, "limited", "l4")
    for number, lane in enumerate(("a", "a", "b", "a")):
        story.send(22, "lanes", f"n{number}", id=f"n{number}", outcome="created")
        story.run(22.1 + (number == 3), "lanes", f"n{number}", lasts=0.5, lane=lane)
    for name in ("m1", "m2"):
        story.send(24, "raw", name, batch="b")
        story.run(24.1, "raw", name)
    story.follow_up(24.5, "b", "then")
    story.batch("b", 2)
    _tell_nested_batch(story)
    _tell_room(story)
    _tell_saves(story)
    _tell_rows(story)
    _tell_flow(story)
    _tell_cancelled_flow(story)
    _tell_failed_flow(story)
    _tell_brief_flow(story)
    for name, period in (("steady", 2.0), ("brisk", 1.0), ("plain", 0.7)):
        story.fire(name, period)
    story.end()
    return story


def _tell_nested_batch(story: Story) -> None:
    """The batch `inner` is a job of `outer`. A job of it fails, and is put back."""
    for name, batch in (("o1", "outer"), ("i1", "inner"), ("i2", "inner")):
        story.send(25, "raw", name, batch=batch)
    story.run(25.1, "raw", "o1")
    story.run(25.1, "raw", "i1")
    story.run(25.1, "raw", "i2", "failure")
    story.add("peer-1", 25.15, "buried", queue="raw", task="i2", reason="failed")
    story.follow_up(25.2, "inner", "otherwise")
    story.follow_up(25.3, "outer", "otherwise")
    story.put_back(26, "inner", 1)
    story.run(26.1, "raw", "i2", lasts=0.1)
    story.follow_up(26.3, "inner", "then", 2)
    story.follow_up(26.4, "outer", "then", 2)
    story.batch("inner", 2, endings=2, parent="outer", ended_ms=26_250)
    story.batch("outer", 4, endings=2, ended_ms=26_350)


def _tell_room(story: Story) -> None:
    """A call waits while the queue is full, and another one gives up."""
    for tenth in range(270, 330):
        story.world(tenth / 10, "length", waiting=10 if tenth < 320 else 9)
    story.send(27, "room", "r1", after=5.2, wait=60.0)
    story.run(32.3, "room", "r1", lasts=0.1)
    story.send(27.5, "room", "r2", answer="refused", after=3.0, wait=3.0)


def _tell_saves(story: Story) -> None:
    """A task saves and takes steps, and is tried again."""
    story.send(34, "saves", "v", id="v", outcome="created")
    first = story.run(34.1, "saves", "v", "retry", lasts=0.3)
    story.save(34.15, first, 1)
    story.step(34.2, first, "one", first)
    second = story.run(34.6, "saves", "v", lasts=0.3, saved=1)
    story.save(34.65, second, 2)
    story.step(34.7, second, "one", first, called=False)
    story.step(34.75, second, "two", second)


def _tell_rows(story: Story) -> None:
    """Two rows of an outbox are committed, the second by a producer that is killed then; a third one is rolled back."""
    story.send(36, "rows", "w1")
    story.send(36.1, "rows", "w2", answer=None)
    story.send(36.2, "rows", "w3", answer="refused")
    for name in ("w1", "w2"):
        story.run(36.5, "rows", name)
        story.world(CALM + 1, "committed", queue="rows", task=name)


FLOW_NAME, CANCELLED_FLOW = "flow/p/1204371", "flow/c/2865"
FAILED_FLOW, BRIEF_FLOW = "flow/r/387623", "flow_brief/b/3285"
"""Workflows, whose names decide what they do."""


def _tell_flow(story: Story) -> None:
    """A workflow takes a step, sleeps, gets an event, for another one it waits in vain, and sees how its two jobs have ended."""
    task, script = FLOW_NAME, script_of(FLOW_NAME)
    done, failed = script.jobs
    assert (script.steps, script.seconds, script.timeouts[1], script.awaits) == (1, 0.3, 0.5, "first")
    assert failed == f"{task}/1fails"
    story.send(44, FLOW, task, id=task, outcome="created", follows=True)
    story.signal(44.02, task, "v1")
    story.signal(44.04, task, "v2", "already")
    first = story.run(44.1, FLOW, task, SUSPENDED, lasts=0.5)
    story.step(44.2, first, "step 0", first, queue=FLOW)
    story.wait(44.5, first, sleep=SLEPT)
    story.run(44.61, FLOW, task, SUSPENDED, lasts=0.2, fence=first)  # its event was there
    story.step(44.62, first, "step 0", first, called=False, queue=FLOW)
    story.wait(44.63, first, sleep=SLEPT, event_0="v1")
    fence = story.run(44.7, FLOW_JOBS, done)
    story.run(44.7, FLOW_JOBS, failed, "failure")
    story.add("peer-1", 44.75, "buried", queue=FLOW_JOBS, task=failed, reason="failed")
    story.world(CALM + 1, "dead", queue=FLOW_JOBS, task=failed, id=failed, reason="failed")
    second = story.run(45.4, FLOW, task, lasts=0.2)
    story.step(45.41, second, "step 0", first, called=False, queue=FLOW)
    story.wait(45.42, second, sleep=SLEPT, event_0="v1", event_1=TIMED_OUT, first=f"finished {fence}")
    story.see(45.43, second, done, f"finished {fence}")
    story.see(45.44, second, failed, "failed")
    story.follow_up(45.7, task, "then")


def _tell_cancelled_flow(story: Story) -> None:
    """A workflow is cancelled while it is suspended, and its job with it."""
    late, nests = script_of(CANCELLED_FLOW).jobs
    assert (late, nests) == (f"{CANCELLED_FLOW}/0late", f"{CANCELLED_FLOW}/1nests")
    assert f"{nests}/0" in script_of(nests).jobs
    story.send(33, FLOW, CANCELLED_FLOW, id=CANCELLED_FLOW, outcome="created", follows=True)
    story.run(33.1, FLOW, CANCELLED_FLOW, SUSPENDED)
    story.run(33.2, FLOW_NESTED, nests, SUSPENDED)
    story.cancel(33.5, FLOW, CANCELLED_FLOW, waiting=1)
    story.follow_up(33.6, CANCELLED_FLOW, "otherwise")


def _tell_failed_flow(story: Story) -> None:
    """A workflow takes a step, reads its mailbox, waits until that is ended, and fails with its first job. It is put back: this
    job runs again, and is the only thing that does.
    """
    task, (doomed, nests) = FAILED_FLOW, script_of(FAILED_FLOW).jobs
    story.send(48, FLOW, task, id=task, outcome="created", follows=True)
    first = story.run(48.1, FLOW, task, SUSPENDED, lasts=0.1)
    story.step(48.15, first, "step 0", first, queue=FLOW)
    story.run(48.3, FLOW_JOBS, doomed, "failure")
    story.add("peer-1", 48.33, "buried", queue=FLOW_JOBS, task=doomed, reason="failed")
    nested = story.run(48.3, FLOW_NESTED, nests)
    _tell_jobs(story, 48.4, nests)
    story.signal(48.4, task, f"{task} mail 0", "woke")
    story.signal(48.5, task, f"{task} mail 1")
    story.end_wait(51.9, task, "held", "closed")
    story.end_wait(52.9, task, "held", "ended")
    last: dict[str, Any] = {"mail_0": f"{task} mail 0", "mail_1": f"{task} mail 1", "mail_2": TIMED_OUT}
    failed = story.run(53.0, FLOW, task, "failure", lasts=0.2)
    story.step(53.05, failed, "step 0", first, called=False, queue=FLOW)
    story.wait(53.06, failed, sleep=SLEPT, **last, held=TIMED_OUT)
    story.see(53.07, failed, doomed, "failed")
    story.see(53.08, failed, nests, f"finished {nested}")
    story.add("peer-1", 53.25, "buried", queue=FLOW, task=task, reason="failed")
    story.follow_up(53.3, task, "otherwise")
    story.put_back(54, task, 1)
    again = story.run(54.2, FLOW_JOBS, doomed)
    last_run = story.run(54.5, FLOW, task, lasts=0.2)
    story.step(54.55, last_run, "step 0", first, called=False, queue=FLOW)
    story.wait(54.56, last_run, sleep=SLEPT, **last, held=TIMED_OUT)
    story.see(54.57, last_run, doomed, f"finished {again}")
    story.see(54.58, last_run, nests, f"finished {nested}")
    story.follow_up(54.8, task, "then", 2)


def _tell_jobs(story: Story, t: float, flow: str) -> None:
    """The jobs of a workflow run, and the jobs of these."""
    for job in script_of(flow).jobs:
        story.run(t, queue_of_job(job), job)
        if job.endswith(NESTS):
            _tell_jobs(story, t, job)


def _tell_brief_flow(story: Story) -> None:
    """The lifetime of a workflow ends its wait."""
    story.send(40, FLOW_BRIEF, BRIEF_FLOW, id=BRIEF_FLOW, outcome="created", follows=True)
    story.run(40.1, FLOW_BRIEF, BRIEF_FLOW, SUSPENDED)
    fence = story.run(48.2, FLOW_BRIEF, BRIEF_FLOW, "failure", lasts=0.1)
    story.wait(48.25, fence, queue=FLOW_BRIEF, sleep=SLEPT, held=OVER)
    story.add("peer-1", 48.35, "buried", queue=FLOW_BRIEF, task=BRIEF_FLOW, reason="failed")
    story.world(CALM + 1, "dead", queue=FLOW_BRIEF, task=BRIEF_FLOW, id=BRIEF_FLOW, reason="failed")
    story.follow_up(48.4, BRIEF_FLOW, "otherwise")


Change = Callable[[Story], object]


def verdict_of(story: Story) -> Verdict:
    return check(History.of(story.entries))


def rules_broken(story: Story) -> set[str]:
    """The rules that the checker says are broken."""
    return {violation.rule for violation in verdict_of(story).violations}


def drop(story: Story, what: str, **facts: Any) -> None:
    """Take out the one entry with these facts."""
    [found] = [entry for entry in story.entries if entry.what == what and facts.items() <= entry.facts.items()]
    story.entries.remove(found)


def alter(story: Story, what: str, change: dict[str, Any], **facts: Any) -> None:
    """Change the one entry with these facts."""
    [found] = [entry for entry in story.entries if entry.what == what and facts.items() <= entry.facts.items()]
    found.facts.update(change)


def flow_claims(story: Story, task: str = FLOW_NAME) -> list[int]:
    """The claims of a workflow, in their order."""
    return sorted({e.facts["fence"] for e in story.entries if e.what == "began" and e.facts["task"] == task})


def put_back_call(name: str) -> int:
    """The number of the request that put a workflow back, or the failed jobs of a batch."""
    [put_back] = [e for e in correct().entries if e.what == "retry" and e.facts["batch"] == name]
    return int(put_back.facts["call"])


def retry_compensated(story: Story) -> None:
    """The step had failed for good, and another step has undone it."""
    *_, failed, last = flow_claims(story, FAILED_FLOW)
    for name, value in (("step 1", -1), ("undo 1", 7)):
        story.step(53.055, failed, name, value, queue="flow")
    story.step(54.555, last, "step 1", 8, queue="flow")


def swap_mail(story: Story) -> None:
    """The mailbox of `FAILED_FLOW` gives its two values in the wrong order."""
    for fence in flow_claims(story, FAILED_FLOW)[1:]:
        for n in (0, 1):
            alter(story, "waited", {"value": f"{FAILED_FLOW} mail {1 - n}"}, name=f"mail {n}", fence=fence)


def move(story: Story, what: str, seconds: float) -> None:
    """The requests that end the wait of the workflow, and their answers, are earlier, and the first one hit."""
    for at, entry in enumerate(story.entries):
        if entry.what == what:
            story.entries[at] = entry._replace(t=entry.t - seconds)


def begin_with_another(story: Story) -> None:
    """The last run of `FLOW_NAME` is told another version than the first one."""
    for t, fence, version in zip((44.21, 45.411), (flow_claims(story)[0], flow_claims(story)[-1]), (1, 2), strict=True):
        story.add("peer-1", t, "stepped", queue=FLOW, fence=fence, name="began with", value=version)
