"""A durable function: its waits, an event, a sleep, a child and its end, and the next job of its id.

The workflow starts a child; waits for its end and for an event with a timeout, in parallel; sleeps; returns. A child that failed
makes it fail for good. One fault may come at any point: a crash before a request, after it, or while it is under way (it arrives
any time later); a live worker that is declared dead, and goes on; a reply that is lost, so that the request is sent again; a
message that is delivered twice. Deadlines pass at any time after they were stored. The memory of an end in the child's slot
expires when no dispatch and no message of it is under way.

A workflow that does not run may be let run again from an entry: the child, the wait for the event, or the sleep. The entry and
all later ones are dropped. A child that was dropped and has not ended is cancelled, and one that is started again has a new name.

Promised: what a run was told of a wait, each later run is told, unless that wait was dropped; no event, end or cancel of one job
reaches another job of its id; a child is started once per try; a failure is counted once; a cancel is acknowledged once, and no
child runs on after it; no wake-up is lost; the mesh comes to rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from tests.model.search import By, Model

Message = tuple[str, int, int, str]
"""``end``, the life of the parent, the number of the end and its outcome; or ``cancel``, the life of the parent, 0, nothing."""
End = tuple[int, int, str]
"""The life of the parent, the number of the end, and the outcome."""
Request = tuple[Any, ...]
"""The word of a request, and what it brings."""
OPEN: frozenset[str] = frozenset()
AFTER_ALONE = "a child that is started again keeps its name, and has `after`"


class Record(NamedTuple):
    """The record of the workflow, wherever it is: in line, active, suspended, in its backoff (back) or dead."""

    place: str = "line"
    life: int = 1
    claim: int = 0
    waits: frozenset[str] = OPEN
    """The open waits of the last suspension: c (the child), e (the event), s (the sleep)."""
    noted: bool = False
    end: End | None = None
    after: int = 0
    """Only an end with a higher number counts."""
    round: int = 0
    """How many ends of the child were dropped."""
    again: int = 0
    """How often it was let run again from an earlier entry."""
    child: int = 0
    """The name of the child that was noted. A life has one child, and one more each time it runs again from there."""
    event: str = ""
    bound: str = ""
    """How the wait for the event ended: the event, or ``timeout``."""
    wait: str = ""
    """The deadline of the wait for the event: nothing, stored or passed; likewise that of the sleep."""
    sleep: str = ""
    failures: int = 0
    marked: bool = False


class Run(NamedTuple):
    """A run: its claim, what the function does next (its name in `_think`, or a request), and its copy of the record."""

    claim: int
    doing: str | Request
    copy: Record


class Child(NamedTuple):
    """The slot of a child: whether the child runs, for which life, and the end that is remembered."""

    runs: bool = False
    life: int = 0
    memory: End | None = None


class Durable(NamedTuple):
    """All of it."""

    record: Record | None = Record()
    blocked: Record | None = None
    dead: Record | None = None
    runs: tuple[Run, ...] = ()
    late: tuple[Run, ...] = ()
    """Requests of dead workers that are under way."""
    children: tuple[Child, Child] = (Child(), Child())
    last_end: int = 0
    outbox: frozenset[Message] = frozenset()
    copies: frozenset[Message] = frozenset()
    started: frozenset[tuple[int, int]] = frozenset()
    """Life and round of each child that was started."""
    seen: frozenset[tuple[str, int, int, Any]] = frozenset()
    """What runs were told."""
    acknowledged: int = 0
    cancelled: int = 0
    raised: int = 0
    wrong: str = ""
    faults: int = 1
    events: tuple[int, int] = (1, 0)
    """How many events may still be sent to each of the two lives."""
    cancels: int = 0
    dispatches: int = 0
    errors: int = 0
    put_backs: int = 0
    rewinds: int = 0
    endings: int = 0
    """How many times a person may still end the wait for the event."""
    has_deadline: bool = True
    """The wait for the event has one."""
    dropped: int = 0
    """The name of a child that was dropped before it had ended."""


Steps = Iterator[tuple[str, str, Durable]]


class Workflows(Model[Durable]):
    """`suspend_task`, `send_event`, `note_child`, the dispatch of a child, and the messages between the slots. See the module."""

    common: ClassVar[Mapping[str, By]] = {
        "start_tasks": By.MESH,
        "the wait's time is over": By.USER,
        "the sleep is over": By.MESH,
        "the run goes on": By.MESH,
        "a request runs": By.MESH,
        "the child ends": By.MESH,
        "a message arrives": By.MESH,
        "an hour passes": By.MESH,
        "send_event": By.USER,
    }
    failing: ClassVar[Mapping[str, By]] = {
        "the function raises": By.USER,
        "the function fails for good": By.USER,
        "the backoff is over": By.MESH,
    }
    faulty: ClassVar[Mapping[str, By]] = {
        "a claim is recovered": By.MESH,
        "a reply is lost": By.FAULT,
        "a worker crashes": By.FAULT,
        "a live worker is declared dead": By.FAULT,
        "a late request runs": By.MESH,
        "a message is under way twice": By.FAULT,
        "a late copy arrives": By.MESH,
    }
    orphaned: ClassVar[Mapping[str, By]] = {"an orphan ends": By.USER}
    moves: ClassVar[Mapping[str, By]] = {**common, **faulty}
    mistakes: ClassVar[Mapping[str, int]] = {
        "each run decides about a timeout by itself": 17,
        "ready brings no values": 9,
        "the child's slot forgets an end": 10,
    }
    least: ClassVar[int] = 9_000
    first: ClassVar[Durable] = Durable()

    def starts(self) -> Iterator[Durable]:
        yield self.first

    def _keeps(self, mistake: str) -> bool:
        return self.mistake != mistake

    # What the server does

    def _child_of(self, life: int) -> int:
        """The slot of the child of a life. If lives had no numbers, both jobs of the id would have one child."""
        return life - 1 if self._keeps("jobs of one id are not told apart") else 0

    def _is_other(self, life: int, other: int) -> bool:
        return life != other and self._keeps("jobs of one id are not told apart")

    def _bound(self, record: Record) -> Record:
        """The record with the outcome of its wait for the event, if it is decided by now."""
        if record.bound or not self._keeps("each run decides about a timeout by itself"):
            return record
        return record._replace(bound=record.event or ("timeout" if record.wait == "passed" else ""))

    def _copied(self, record: Record) -> Record:
        """What a run gets of a record."""
        decides = not self._keeps("each run decides about a timeout by itself")
        bound = record.event if decides else record.bound
        return record._replace(place="", claim=0, waits=OPEN, event="", bound=bound, failures=0, marked=False)

    def _released(self, state: Durable, record: Record) -> Durable:
        """The record goes back. If a dispatch could change a workflow that has begun, a blocked job would be merged into it."""
        if state.blocked and not self._keeps("a dispatch changes a workflow that has begun"):
            event = record.event or state.blocked.event
            record, state = record._replace(life=2, place="line", event=event), state._replace(blocked=None)
        return state._replace(record=record)

    def _ended(self, state: Durable, *, dead: Record | None = None, is_cancelled: bool = False) -> Durable:
        """The job ends; the job that it blocked follows."""
        outbox = state.outbox
        if is_cancelled and state.record and state.record.noted:
            outbox |= {("cancel", state.record.child, 0, "")}
        acknowledged = state.acknowledged + is_cancelled
        following = state._replace(record=state.blocked, blocked=None, dead=dead or state.dead)
        return following._replace(acknowledged=acknowledged, outbox=outbox)

    def _wake(self, record: Record, wait: str) -> Record:
        places = ("suspended",) if self._keeps("waits outlive their suspension") else ("suspended", "back")
        return record._replace(place="line") if wait in record.waits and record.place in places else record

    def _put_child(self, state: Durable, slot: int, child: Child) -> Durable:
        one, two = state.children
        return state._replace(children=(child, two) if slot == 0 else (one, child))

    def _end_child(self, state: Durable, slot: int, outcome: str) -> Durable:
        life, number = state.children[slot].life, state.last_end + 1
        keeps = self._keeps("the child's slot forgets an end")
        child = Child(False, life, (life, number, outcome) if keeps else None)
        others = {each for each in state.outbox if each[0] != "end" or self._child_of(each[1]) != slot}
        message: Message = ("end", life, number, outcome)
        state = state._replace(last_end=number, outbox=frozenset({*others, message}))
        return self._put_child(state, slot, child)

    def _dispatch_child(self, state: Durable, life: int, round: int, after: int) -> Durable:
        slot = self._child_of(life)
        child = state.children[slot]
        if child.runs:
            return state
        if child.memory and child.memory[1] > after:
            return state._replace(outbox=state.outbox | {("end", *child.memory)})
        if (life, round) in state.started:
            return state._replace(wrong="a child was started twice")
        state = state._replace(started=state.started | {(life, round)})
        return self._put_child(state, slot, Child(True, life, child.memory))

    def _execute(self, state: Durable, run: Run, request: Request) -> tuple[Durable, str]:
        """A request at the server, and its reply: lost, gone (the claim has ended), ready or ok."""
        word, record = request[0], state.record
        if word == "dispatch":
            return self._dispatch_child(state, *request[1:]), "ok"
        if not record or record.place != "active" or record.claim != run.claim:
            return state, "lost"
        if word == "note":
            return state._replace(record=self._noted(record)), "ready"
        if record.marked:
            return self._ended(state, is_cancelled=True), "gone"
        if word == "finish":
            return self._ended(state), "gone"
        if word == "fail" or (word == "retry" and record.failures == 1):
            return self._ended(state, dead=record._replace(place="dead")), "gone"
        if word == "retry":
            waits = OPEN if self._keeps("waits outlive their suspension") else record.waits
            again = record._replace(place="back", failures=record.failures + 1, waits=waits)
            return self._released(state, again), "gone"
        return self._suspend(state, record, request[1])

    def _noted(self, record: Record) -> Record:
        """The record with its child: the one that it has, or a new one."""
        if record.noted:
            return record
        renames = self._keeps("a child that is started again keeps its name") and self._keeps(AFTER_ALONE)
        return record._replace(noted=True, child=record.life + (record.again if renames else 0))

    def _suspend(self, state: Durable, record: Record, waits: frozenset[str]) -> tuple[Durable, str]:
        keeps = self._keeps("waits outlive their suspension")
        record = self._noted(record)._replace(
            waits=waits if keeps else record.waits | waits,
            wait=record.wait or ("stored" if "e" in waits else ""),
            sleep=record.sleep or ("stored" if "s" in waits else ""),
        )
        is_ready = (
            ("c" in waits and record.end)
            or ("e" in waits and (record.event or record.wait == "passed"))
            or ("s" in waits and record.sleep == "passed")
        )
        if is_ready:
            return state._replace(record=self._bound(record)), (
                "ready" if self._keeps("ready brings no values") else "again"
            )
        return self._released(state, record._replace(place="suspended")), "gone"

    def _deliver(self, state: Durable, message: Message) -> Durable:
        word, life, number, outcome = message
        if word == "cancel":
            slot = self._child_of(life)
            child = state.children[slot]
            if child.runs and not self._is_other(child.life, life):
                return self._end_child(state, slot, "cancelled")
            if child.memory or not self._keeps("a cancel that finds no child leaves no memory"):
                return state
            number = state.last_end + 1
            return self._put_child(
                state._replace(last_end=number), slot, Child(False, life, (life, number, "cancelled"))
            )
        record, dead, end = state.record, state.dead, (life, number, outcome)
        is_old = self._keeps("ends have no numbers")
        looks_aside = self._keeps("an end is not stored in the dead-letter queue")
        if looks_aside and dead and dead.child == life and not (record and record.child == life):
            known = dead.end or (number <= dead.after and is_old)
            return state if known else state._replace(dead=dead._replace(end=end))
        if (
            not record
            or record.end
            or not record.noted
            or self._is_other(record.child, life)
            or (is_old and number <= record.after)
        ):
            return state
        return state._replace(record=self._wake(record._replace(end=end), "c"))

    # What happens

    def steps(self, state: Durable) -> Steps:
        if not state.wrong:
            for name, detail, after in self._all_steps(state):
                yield name, detail, self._normal(after)

    def _all_steps(self, state: Durable) -> Steps:
        yield from self._server_steps(state)
        for number, run in enumerate(state.runs):
            others = state.runs[:number] + state.runs[number + 1 :]
            yield from self._run_steps(state, number, run, others)
        for number, run in enumerate(state.late):
            left = state._replace(late=state.late[:number] + state.late[number + 1 :])
            yield "a late request runs", run.doing[0], self._execute(left, run, tuple(run.doing))[0]
        yield from self._child_steps(state)
        yield from self._message_steps(state)
        yield from self._user_steps(state)

    def _server_steps(self, state: Durable) -> Steps:
        record = state.record
        if not record:
            return
        if record.place == "line" and len(state.runs) < 2:
            waits = OPEN if self._keeps("waits outlive their suspension") else record.waits
            taken = self._bound(record._replace(place="active", claim=2, waits=waits))
            run = Run(taken.claim, "child", self._copied(taken))
            yield "start_tasks", f"life {taken.life}", state._replace(record=taken, runs=(*state.runs, run))
        if record.place == "active" and all(run.claim != record.claim for run in state.runs):
            yield "a claim is recovered", "", self._released(state, record._replace(place="line"))
        if record.place == "back":
            yield "the backoff is over", "", state._replace(record=record._replace(place="line"))
        if state.has_deadline and record.wait == "stored" and record.place in ("suspended", "active", "line"):
            after = state._replace(record=self._wake(record._replace(wait="passed"), "e"))
            yield "the wait's time is over", "", after
        if record.sleep == "stored":
            yield "the sleep is over", "", state._replace(record=self._wake(record._replace(sleep="passed"), "s"))

    def _think(self, run: Run) -> str | Request:
        """What the function does next with its copy: the request that it sends."""
        copy, notes_first = run.copy, self._keeps("a child is noted after its dispatch")
        if run.doing == "child" and not copy.end and (notes_first or not copy.noted):
            return ("note",) if notes_first else ("dispatch", copy.life + copy.again, copy.round, copy.after)
        waits = frozenset(wait for wait, is_over in (("c", copy.end), ("e", copy.bound)) if not is_over)
        if waits:
            return "suspend", waits
        if copy.end and copy.end[2] != "finished":
            return ("fail",)
        return ("finish",) if copy.sleep == "passed" else ("suspend", frozenset("s"))

    def _run_steps(self, state: Durable, number: int, run: Run, others: tuple[Run, ...]) -> Steps:
        def put(after: Durable, new: Run) -> Durable:
            return after._replace(runs=(*others[:number], new, *others[number:]))

        if isinstance(run.doing, str):
            yield from self._function_steps(state, run, others, put)
        else:
            yield from self._request_steps(state, run, others, put)
        record = state.record
        if state.faults and record and record.place == "active" and record.claim == run.claim:
            after = self._released(state, record._replace(place="line"))
            yield "a live worker is declared dead", "", after._replace(faults=state.faults - 1)

    def _function_steps(self, state: Durable, run: Run, others: tuple[Run, ...], put: Any) -> Steps:
        decides = not self._keeps("each run decides about a timeout by itself")
        if run.doing == "waits" and decides and not run.copy.bound and run.copy.wait == "passed":
            run = run._replace(copy=run.copy._replace(bound="timeout"))
        yield "the run goes on", f"claim {run.claim}", put(self._told(state, run), run._replace(doing=self._think(run)))
        if state.errors and run.claim:
            after = state._replace(errors=0, raised=state.raised + 1)
            yield "the function raises", "", put(after, run._replace(doing=("retry",)))
            yield "the function fails for good", "", put(after, run._replace(doing=("fail",)))
        if state.faults:
            yield "a worker crashes", "", state._replace(runs=others, faults=state.faults - 1)

    def _request_steps(self, state: Durable, run: Run, others: tuple[Run, ...], put: Any) -> Steps:
        request = tuple(run.doing)
        words = f"{request[0]} of claim {run.claim}"
        after, reply = self._execute(state, run, request)
        yield "a request runs", f"{words}: {reply}", self._answered(after, run, others, put, reply)
        if not state.faults:
            return
        if request[0] != "dispatch":  # a dispatch has a number: a second copy of it does nothing
            yield "a reply is lost", words, put(after, run)._replace(faults=state.faults - 1)
        yield "a worker crashes", f"after {words}", after._replace(runs=others, faults=state.faults - 1)
        late = state._replace(runs=others, late=(*state.late, run), faults=state.faults - 1)
        yield "a worker crashes", f"while {words} is under way", late

    def _answered(self, after: Durable, run: Run, others: tuple[Run, ...], put: Any, reply: str) -> Durable:
        """The run has read its reply."""
        request = tuple(run.doing)
        if reply in ("gone", "lost") or after.wrong:
            return after._replace(runs=others)
        if reply == "again":
            return put(after, run._replace(doing="child"))  # with its old copy
        if request[0] == "note":
            assert after.record
            record = self._bound(after.record)
            doing = "waits" if record.end else ("dispatch", record.child, record.round, record.after)
            return put(after, run._replace(doing=doing, copy=self._copied(after.record)))
        if reply == "ready":
            assert after.record
            return put(after, run._replace(doing="child", copy=self._copied(after.record)))
        return put(after, run._replace(doing="waits"))

    def _child_steps(self, state: Durable) -> Steps:
        for slot, child in enumerate(state.children):
            dispatching = any(run.doing[0] == "dispatch" for run in (*state.runs, *state.late))
            moving = any(self._child_of(message[1]) == slot for message in state.outbox | state.copies)
            if child.memory and not dispatching and not moving:
                yield "an hour passes", "", self._put_child(state, slot, child._replace(memory=None))
            if child.runs:
                is_wanted = state.record is not None and state.record.child == child.life
                for outcome in ("finished", "failed"):
                    after = self._end_child(state, slot, outcome)
                    yield "the child ends" if is_wanted else "an orphan ends", outcome, after

    def _message_steps(self, state: Durable) -> Steps:
        for message in state.outbox:
            after = self._deliver(state, message)
            yield "a message arrives", str(message), after._replace(outbox=after.outbox - {message})
            if state.faults:
                copies = state.copies | {message}
                yield (
                    "a message is under way twice",
                    str(message),
                    after._replace(copies=copies, faults=state.faults - 1),
                )
        for message in state.copies:
            yield (
                "a late copy arrives",
                str(message),
                self._deliver(state, message)._replace(copies=state.copies - {message}),
            )

    def _user_steps(self, state: Durable) -> Steps:
        for life in (1, 2):
            left = state.events[life - 1]
            if left and (life == 1 or state.dispatches == 0):
                yield "send_event", f"to life {life}", self._sent(state, life, left)
        record = state.record
        if state.cancels and record:
            after = state._replace(cancels=0, cancelled=state.cancelled + (not record.marked), blocked=None)
            if record.place == "active":
                yield "cancel", "it is marked", after._replace(record=record._replace(marked=True))
            else:
                yield "cancel", "it ends", self._ended(after, is_cancelled=True)
        if state.dispatches:
            yield from self._dispatch_steps(state._replace(dispatches=0))
        if state.endings and record and record.wait:
            yield "end_wait", record.place, self._wait_ended(state._replace(endings=state.endings - 1), record)
        if state.rewinds:
            yield from self._rewind_steps(state._replace(rewinds=state.rewinds - 1))
        if state.put_backs and state.dead and not record:
            yield "retry_aside", "", state._replace(record=self._back(state.dead), dead=None, put_backs=0)

    def _sent(self, state: Durable, life: int, left: int) -> Durable:
        events = (left - 1, state.events[1]) if life == 1 else (state.events[0], left - 1)
        event, after, record = f"v{life}.{left}", state._replace(events=events), state.record
        if record and not record.event and not self._is_other(record.life, life):
            return after._replace(record=self._wake(record._replace(event=event), "e"))
        keeps = self._keeps("jobs of one id are not told apart")
        if state.blocked and life == 2 and keeps and not state.blocked.event:
            return after._replace(blocked=state.blocked._replace(event=event))
        return after

    def _dispatch_steps(self, state: Durable) -> Steps:
        """The id is dispatched anew, once."""
        record, fresh = state.record, Record(life=2)
        if not record:
            yield "dispatch anew", "created", state._replace(record=fresh)
            return
        if not self._keeps("a dispatch changes a workflow that has begun"):
            if record.place == "active":
                yield "dispatch anew", "blocked", state._replace(blocked=fresh)
            else:
                yield "dispatch anew", "updated", state._replace(record=record._replace(life=2, place="line"))
            return
        yield "dispatch anew", "unchanged", state
        if not record.noted and record.place == "line":
            yield "dispatch anew", "updated before its first run", state._replace(record=fresh)
        state = state._replace(cancelled=state.cancelled + (not record.marked))
        if record.place == "active":
            marked = record._replace(marked=True)
            yield "dispatch anew", "cancel: blocked", state._replace(record=marked, blocked=fresh)
        else:
            yield "dispatch anew", "cancel: created", self._ended(state, is_cancelled=True)._replace(record=fresh)

    def _wait_ended(self, state: Durable, record: Record) -> Durable:
        """A person ends the wait for the event, as if its time were over. One that has ended stays as it is."""
        if not self._keeps("end_wait stores the outcome itself"):
            return state._replace(record=self._wake(record._replace(bound="timeout"), "e"))
        if record.bound:
            return state
        ended = record._replace(wait="passed")
        return state._replace(record=self._wake(ended, "e") if self._keeps("end_wait wakes nobody") else ended)

    def _rewind_steps(self, state: Durable) -> Steps:
        """It is let run again from an entry: not while it runs."""
        record = state.record or state.dead
        if not record or record.place == "active":
            return
        dead = None if state.record is None else state.dead
        again = record._replace(
            place="line", failures=0, marked=False, again=record.again + 1, sleep="", waits=record.waits - {"s"}
        )
        without = again._replace(
            bound="", wait="", event="" if record.bound else record.event, waits=again.waits - {"e"}
        )
        if record.sleep:
            yield "rewind_job", "from the sleep", state._replace(record=again, dead=dead)
        if record.wait or record.bound:
            yield "rewind_job", "from the event", state._replace(record=without, dead=dead)
        if record.noted:
            runs, number = record.end is None, record.end[1] if record.end else 0
            after = number if self._keeps("a child that is started again keeps its name") else 0
            anew = without._replace(noted=False, end=None, waits=OPEN, round=record.round + 1, child=0, after=after)
            cancels = runs and self._keeps("a dropped child is not cancelled")
            outbox = state.outbox | ({("cancel", record.child, 0, "")} if cancels else set())
            dropped = record.child if runs else state.dropped
            yield "rewind_job", "from the child", state._replace(record=anew, dead=dead, outbox=outbox, dropped=dropped)

    def _back(self, dead: Record) -> Record:
        """A record of the dead-letter queue, put back: a failed end of its child is dropped."""
        record = dead._replace(place="line", failures=0, waits=OPEN, marked=False)
        if record.end and record.end[2] != "finished":
            noted = record.noted and self._keeps("a child is noted after its dispatch")
            record = record._replace(after=record.end[1], round=record.round + 1, end=None, noted=noted)
        return record

    def _normal(self, state: Durable) -> Durable:
        """The same state, claims as 1 (the one that is held) or 0, without requests that the fence refuses and history that no
        later run can contradict.
        """
        record, dead = state.record, state.dead
        held = record.claim if record and record.place == "active" else -1

        def told_apart(runs: tuple[Run, ...]) -> tuple[Run, ...]:
            left = [
                run
                for run in runs
                if run.claim == held or run.doing in ("child", "waits") or run.doing[0] == "dispatch"
            ]
            return tuple(run._replace(claim=int(run.claim == held)) for run in left)

        lives = {run.copy.life for run in state.runs} | ({1} if state.put_backs else set())
        lives |= {record.life} if record else set()
        lives |= {2} if state.blocked or state.dispatches else set()
        if dead and not state.put_backs:
            dead = Record(place="dead")
        is_late = self._keeps("jobs of one id are not told apart") and 1 not in lives
        return state._replace(
            record=record._replace(claim=int(held > 0)) if record else None,
            dead=dead,
            events=(0 if is_late else state.events[0], state.events[1]),
            seen=frozenset(each for each in state.seen if each[1] in lives),
            runs=told_apart(state.runs),
            late=tuple(sorted(told_apart(state.late), key=str)),
        )

    # What is promised

    def _told(self, state: Durable, run: Run) -> Durable:
        """The state with what the function is told now. Each run must be told the same, and nothing of another job."""
        copy, seen = run.copy, set(state.seen)
        if copy.bound and (run.doing == "waits" or copy.end):
            if copy.bound != "timeout" and int(copy.bound[1]) != copy.life:
                return state._replace(wrong="an event of the old job reaches the new one")
            seen.add(("event", copy.life, copy.again, copy.bound))
        if copy.end:
            if copy.end[2] == "cancelled" and not state.cancelled:
                return state._replace(
                    wrong="the cancellation of a dropped child reaches the one that was started again"
                )
            if copy.end[0] != copy.child:
                return state._replace(wrong="the end of the old job's child reaches the new job")
            seen.add(("end", copy.life, copy.round, copy.end[1:]))
        known: dict[tuple[str, int, int], Any] = {}
        for kind, life, round_, what in seen:
            if known.setdefault((kind, life, round_), what) != what:
                words = "two outcomes of a wait are seen" if kind == "event" else "two ends of one child are seen"
                return state._replace(wrong=words)
            if kind == "end" and (kind, life, round_ - 1, what) in seen:
                return state._replace(wrong="an old end of a child is seen after the put-back")
        return state._replace(seen=frozenset(seen))

    def broken(self, state: Durable) -> str | None:
        if state.wrong:
            return state.wrong
        if state.acknowledged > state.cancelled:
            return "a cancel is acknowledged twice"
        if state.record and state.record.failures > state.raised:
            return "a failure is counted twice"
        return None

    def restless(self, state: Durable) -> str | None:
        record = state.record
        if state.cancelled != state.acknowledged:
            return "a cancel is never acknowledged"
        if (record and record.place != "suspended") or state.runs or state.outbox:
            return "something is left"
        if record and self._is_forgotten(record, state.children):
            return "it is suspended, though what it waits for has come, or can never come"
        if not record and state.blocked:
            return "a blocked job is left"
        if any(child.runs and child.life == state.dropped for child in state.children):
            return "a dropped child runs on"
        if state.cancelled and not record and not state.dead and any(child.runs for child in state.children):
            return "a child runs on after the cancel"
        return None

    def _is_forgotten(self, record: Record, children: tuple[Child, ...]) -> bool:
        return bool(
            ("e" in record.waits and (record.event or record.wait == "passed"))
            or ("s" in record.waits and record.sleep == "passed")
            or ("c" in record.waits and (record.end or not any(child.runs for child in children)))
        )


class CancelledWorkflows(Workflows):
    """One that is cancelled."""

    moves: ClassVar[Mapping[str, By]] = {**Workflows.moves, **Workflows.orphaned, "cancel": By.USER}
    mistakes: ClassVar[Mapping[str, int]] = {
        "a child is noted after its dispatch": 5,
        "a cancel that finds no child leaves no memory": 8,
    }
    least: ClassVar[int] = 10_000
    first: ClassVar[Durable] = Durable(cancels=1)


class FailingWorkflows(Workflows):
    """One that raises once, with two events."""

    moves: ClassVar[Mapping[str, By]] = {**Workflows.moves, **Workflows.failing, **Workflows.orphaned}
    mistakes: ClassVar[Mapping[str, int]] = {"waits outlive their suspension": 11}
    least: ClassVar[int] = 20_000
    first: ClassVar[Durable] = Durable(events=(2, 0), errors=1)


class RetriedWorkflows(FailingWorkflows):
    """One that fails for good, and is put back from the dead-letter queue."""

    moves: ClassVar[Mapping[str, By]] = {**FailingWorkflows.moves, "retry_aside": By.USER}
    mistakes: ClassVar[Mapping[str, int]] = {
        "ends have no numbers": 15,
        "an end is not stored in the dead-letter queue": 14,
    }
    least: ClassVar[int] = 50_000
    first: ClassVar[Durable] = Durable(errors=1, put_backs=1)


class ReplacedWorkflows(Workflows):
    """One whose id is dispatched anew, with events for both jobs, and no fault."""

    moves: ClassVar[Mapping[str, By]] = {
        **Workflows.common,
        **Workflows.failing,
        **Workflows.orphaned,
        "dispatch anew": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "jobs of one id are not told apart": 7,
        "a dispatch changes a workflow that has begun": 7,
    }
    least: ClassVar[int] = 50_000
    first: ClassVar[Durable] = Durable(faults=0, events=(1, 1), dispatches=1, errors=1)


class DoubtfulWorkflows(Workflows):
    """One whose id is dispatched anew, with a fault."""

    moves: ClassVar[Mapping[str, By]] = {
        **{name: by for name, by in Workflows.moves.items() if name != "send_event"},
        **Workflows.orphaned,
        "dispatch anew": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {}
    least: ClassVar[int] = 100_000
    first: ClassVar[Durable] = Durable(events=(0, 0), dispatches=1)


class RewoundWorkflows(Workflows):
    """One that is let run again from an entry, with a fault."""

    moves: ClassVar[Mapping[str, By]] = {
        **{name: by for name, by in Workflows.moves.items() if name != "send_event"},
        **Workflows.orphaned,
        "rewind_job": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a child that is started again keeps its name": 14,
        AFTER_ALONE: 14,
        "a dropped child is not cancelled": 17,
    }
    least: ClassVar[int] = 200_000
    first: ClassVar[Durable] = Durable(events=(0, 0), rewinds=1)


class FailedAndRewoundWorkflows(Workflows):
    """One that gets an event, or fails for good, and is let run again from an entry, without a fault."""

    moves: ClassVar[Mapping[str, By]] = {
        **Workflows.common,
        **Workflows.failing,
        **Workflows.orphaned,
        "rewind_job": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {}
    least: ClassVar[int] = 20_000
    first: ClassVar[Durable] = Durable(faults=0, rewinds=1)

    def starts(self) -> Iterator[Durable]:
        yield self.first
        yield self.first._replace(events=(0, 0), errors=1)


class EndedWaitWorkflows(Workflows):
    """One whose wait for the event has no deadline, and is ended by a person."""

    moves: ClassVar[Mapping[str, By]] = {
        **{name: by for name, by in Workflows.moves.items() if name != "the wait's time is over"},
        "end_wait": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "end_wait stores the outcome itself": 14,
        "end_wait wakes nobody": 12,
    }
    least: ClassVar[int] = 5_000
    first: ClassVar[Durable] = Durable(endings=1, has_deadline=False)
