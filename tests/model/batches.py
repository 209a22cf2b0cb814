"""A batch: its home, two parts in slots of their own, members that add members, and the messages between the queues.

A producer opens parts, adds members and seals; it may crash at any step. A member adds another one, and its worker may be
declared dead at any step while its handler goes on as a zombie. Messages between the slots come late, twice and in any order.
The leader closes what nobody else closes, and cancels a batch that was left open. (`batch_scripts` has the scripts.)

Promised: a batch never ends while a member is pending, except one that was put back from the dead-letter queue and of which
the home has not heard yet. A living member is never told that its batch has ended. Counts are what happened, and each ending has
one follow-up. A cancelled batch ends whatever its handlers do, but a cancel does not outlive the ending: a member that is put
back afterwards runs. When the mesh rests, the batch has ended, or a handler or the producer has something left to do.

`Batches` has the endings, `CancelledBatches` the cancels and failures that cancel, `ReopenedBatches` the members put back,
`ClearedBatches` the members whose queue is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import ClassVar

from tests.model.batch_scripts import Scripts
from tests.model.batch_state import Batch, Counts, Member, Message, Producer, Run
from tests.model.search import By, Model

Steps = Iterator[tuple[str, str, Batch]]

NEAR, FAR = Member(0), Member(1)
SAME = Member(0, id=1)
NEAR_ADDER, FAR_ADDER = Member(0, adds=True), Member(1, adds=True)

ALWAYS: Mapping[str, By] = {
    "the producer opens": By.USER,
    "the producer adds": By.USER,
    "the producer seals": By.USER,
    "a handler opens": By.USER,
    "a handler adds": By.USER,
    "a member finishes": By.USER,
    "the leader checks": By.MESH,
    "the relay delivers": By.MESH,
    "a slow relay delivers": By.MESH,
    "close_part": By.MESH,
    "a relay is slow": By.FAULT,
    "a worker is declared dead": By.FAULT,
}
CRASHES: Mapping[str, By] = {"the producer crashes": By.FAULT, "the leader cancels": By.MESH}
CANCELS: Mapping[str, By] = {"the batch is cancelled": By.USER}
ENDED_BY_CANCEL: Mapping[str, By] = {"a cancelled member ends": By.MESH}
FAILURES: Mapping[str, By] = {"a member fails": By.USER}


def producer(*plan: Member) -> Producer:
    """A producer that adds these members, one after the other."""
    return Producer(plan)


class Batches(Model[Batch]):
    """The parts close, the batch ends, its follow-up is put in its queue; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        **ALWAYS,
        **CRASHES,
        **ENDED_BY_CANCEL,
        "a check is slow": By.FAULT,
        "a record is lost": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a part takes members after it closed": 9,
        "a refused caller does not bring the report of the part": 7,
        "the home believes an older report": 11,
        "the end of the last member does not close": 5,
        "an end is counted twice": 6,
        "close_part does not seal": 5,
        "close_part does not fence an opening that never came": 5,
        "close_part does not repeat the report": 10,
        "close_part does not look for records": 9,
        "a batch that was left open is not cancelled": 1,
        "the follow-up is put once per delivery": 8,
    }
    least: ClassVar[int] = 5_000

    def __init__(self, mistake: str | None = None) -> None:
        super().__init__(mistake)
        self.scripts = Scripts(mistake)

    def starts(self) -> Iterator[Batch]:
        yield Batch(producer(NEAR_ADDER), zombies=1, crashes=1)
        yield Batch(producer(FAR_ADDER), target=0, zombies=1, crashes=1)
        yield Batch(producer(NEAR_ADDER), near=False, zombies=1)
        yield Batch(producer(FAR_ADDER), zombies=1, slow_relays=1, slow_checks=1)
        yield Batch(producer(NEAR_ADDER), away=True, slow_relays=1, slow_checks=1)
        yield Batch(producer(NEAR, FAR), crashes=1, slow_relays=1, slow_checks=1)
        yield Batch(producer(NEAR_ADDER, FAR), losses=1)

    def steps(self, state: Batch) -> Steps:
        yield from self._producer_steps(state)
        for run in set(state.runs):
            yield from self._run_steps(state, run)
        for member in set(state.members):
            yield from self._member_steps(state, member)
        yield from self._message_steps(state)
        yield from self._check_steps(state)
        if state.cancels and state.home.state != "ended":
            after = state._replace(cancels=state.cancels - 1, spared=False)
            yield "the batch is cancelled", "", self.scripts.cancel(after)
        if state.clears:
            yield "the queue is deleted", "of P0", self.scripts.clear(state._replace(clears=state.clears - 1))

    def _producer_steps(self, state: Batch) -> Steps:
        made = state.producer
        if state.crashes and (
            made.phase in ("opens", "opened", "refused") or (made.phase == "sealed" and state.checks)
        ):
            gone = made if made.phase == "sealed" else Producer((), "crashed")
            after = state._replace(producer=gone, crashes=state.crashes - 1, checks=frozenset())
            yield "the producer crashes", f"it has {made.phase}" if made.phase != "opens" else "", after
        if made.phase == "opens" and not made.plan:
            yield "the producer seals", "", self.scripts.seal(state._replace(producer=Producer((), "sealed")))
        elif made.phase in ("opens", "refused") and may_open(state, made.plan[0].part):
            index = made.plan[0].part
            word, after = self.scripts.open_part(state, index, made.brings)
            told = Producer((), "stopped")
            if word == "opened":
                told = Producer(made.plan, "opened", after.home.parts[index].v, after.home.state == "sealed")
                after = after._replace(wrong=again(made, told.v))
            yield "the producer opens", said(after, index, word), after._replace(producer=told)
        elif made.phase == "opened":
            index = made.plan[0].part
            taken, after = self.scripts.dispatch(state, made.plan[0], made.v, sealed=made.sealed)
            told = (
                Producer(made.plan[1:]) if taken else Producer(made.plan, "refused", brings=self._report(state, index))
            )
            yield (
                "the producer adds",
                said(after, index, "taken" if taken else "refused"),
                after._replace(producer=told),
            )

    def _report(self, state: Batch, index: int) -> Message:
        """What a part returns with its refusal."""
        silent = self.mistake == "a refused caller does not bring the report of the part"
        return self.scripts.report(state, index)._replace(kind="nothing" if silent else "report")

    def _run_steps(self, state: Batch, run: Run) -> Steps:
        """A run of the member that adds another one. All of it is the handler's: it may stop at any step."""
        name, index = "the member" if run.has_claim else "the zombie", state.target
        (adder,) = [member for member in state.members if member.adds]
        yield from self._end_steps(state, run, adder)
        if run.has_claim and state.zombies and adder.state == "pending" and run.phase in ("begun", "opened"):
            after = state.with_run(run, run._replace(has_claim=False), Run())
            yield "a worker is declared dead", "its handler goes on", after._replace(zombies=state.zombies - 1)
        if run.phase in ("begun", "refused", "sure") and may_open(state, index):
            word, after = self.scripts.open_part(state, index, run.brings)
            yield "a handler opens", f"{name}, {said(after, index, word)}", self._told(after, run, word)
        elif run.phase == "opened":
            taken, after = self.scripts.dispatch(state, Member(index, id=state.target_id), run.v, sealed=run.sealed)
            told = Run("added", has_claim=run.has_claim)
            if not taken:
                told = told._replace(phase="refused", brings=self._report(state, index))
            detail = f"{name}, {said(after, index, 'taken' if taken else 'refused')}"
            yield "a handler adds", detail, after.with_run(run, told)
        elif run.phase == "doubts":
            brings = self.scripts.report(state, adder.part)
            yield "a worker reads its part", in_words(brings), state.with_run(run, Run("sure", brings=brings))

    def _told(self, state: Batch, run: Run, word: str) -> Batch:
        """The handler reads what `open_part` returned."""
        told = Run("added", has_claim=run.has_claim)
        if word == "opened":
            v, sealed = state.home.parts[state.target].v, state.home.state == "sealed"
            told = told._replace(phase="opened", v=v, sealed=sealed)
            return state.with_run(run, told)._replace(wrong=again(run, v))
        if word == "cancelled":
            return state.with_run(run, told)
        if not run.has_claim:
            return state.with_run(run)
        # The report that its own part reopened may still be in the outbox: the worker brings it, and asks again.
        if run.phase == "sure" or self.mistake == "a member believes at once that its batch has ended":
            return state._replace(wrong="a living member is told that its batch has ended")
        return state.with_run(run, Run("doubts"))

    def _end_steps(self, state: Batch, run: Run, adder: Member) -> Steps:
        if not run.has_claim:
            if run.phase == "added":
                twice = self.mistake == "an end is counted twice"
                after = state.with_run(run)
                yield (
                    "a member finishes",
                    "too late",
                    self.scripts.count(after, adder.part, "finished") if twice else after,
                )
        elif run.phase != "doubts":
            yield "a member finishes", f"P{adder.part}", self.scripts.end_member(state, adder, "finished")
            if state.failures:
                after = state._replace(failures=state.failures - 1)
                yield "a member fails", f"P{adder.part}", self.scripts.end_member(after, adder, "failed")

    def _member_steps(self, state: Batch, member: Member) -> Steps:
        detail = f"P{member.part}"
        if member.state in ("pending", "cancelling") and not member.adds:
            yield "a member finishes", detail, self.scripts.end_member(state, member, "finished")
            if state.failures:
                after = state._replace(failures=state.failures - 1)
                yield "a member fails", detail, self.scripts.end_member(after, member, "failed")
        if member.state == "pending" and not member.adds and state.losses:
            after = state._replace(losses=state.losses - 1, repairs=True)
            yield (
                "a record is lost",
                f"of a member of {detail}",
                after.with_member(member, member._replace(state="gone")),
            )
        if member.state == "trashed":
            yield "purge_queue", detail, self.scripts.end_member(state, member, "cancelled")
        if member.state == "cancelling":
            yield "a cancelled member ends", detail, self.scripts.end_member(state, member, "cancelled")
        if member.state == "failed" and state.put_backs:
            yield "a failed member is put back", detail, self.scripts.put_back(state, member)

    def _message_steps(self, state: Batch) -> Steps:
        for message in state.outbox:
            detail = in_words(message)
            yield "the relay delivers", detail, self.scripts.deliver(state, message)
            if state.slow_relays:
                copies = state.copies | {message}
                yield "a relay is slow", detail, state._replace(copies=copies, slow_relays=state.slow_relays - 1)
            if state.losses and message.kind in ("report", "cancel"):
                after = state._replace(outbox=state.outbox - {message}, losses=state.losses - 1, repairs=True)
                yield "a record is lost", detail, after
        for message in state.copies:
            after = self.scripts.deliver(state._replace(copies=state.copies - {message}), message)
            yield "a slow relay delivers", in_words(message), after

    def _check_steps(self, state: Batch) -> Steps:
        home = state.home
        for index, v in state.checks:
            after = self.scripts.close_part(state._replace(checks=state.checks - {(index, v)}), index, v)
            yield "close_part", f"P{index} at {v}", after
        left_open = home.state == "open" and state.producer.phase == "crashed"
        if left_open and self.mistake != "a batch that was left open is not cancelled":
            yield "the leader cancels", "its producer left it open", self.scripts.cancel(state)
        for index, known in enumerate(home.parts):
            if home.state == "sealed" and known.is_open and home.cancelled:
                if state.repairs and self.mistake != "the leader does not repeat a cancel":
                    after = self.scripts.cancel_part(state, index, known.v)[1]
                    yield "the leader cancels", f"P{index} at {known.v}", after
            elif home.state == "sealed" and known.is_open:
                detail = f"P{index} at {known.v}"
                yield "the leader checks", detail, self.scripts.close_part(state, index, known.v)
                if state.slow_checks:
                    after = state._replace(checks=state.checks | {(index, known.v)})
                    yield "a check is slow", detail, after._replace(slow_checks=state.slow_checks - 1)

    def broken(self, state: Batch) -> str | None:
        if state.wrong:
            return state.wrong
        if len(set(state.follow_ups)) < len(state.follow_ups):
            return "two follow-ups of one ending"
        for index, part in enumerate(state.parts):
            ended = Counter(member.state for member in state.members if member.part == index)
            if part.counts != Counts(**{name: ended[name] for name in Counts._fields}):
                return f"P{index} counts what did not happen"
            if part.sealed and not part.closed and not state.has_pending(index):
                return f"P{index} is sealed, has no member, and has not closed"
            if state.home.state == "ended" and part.v <= state.home.parts[index].v:
                if state.has_pending(index):
                    return f"the batch has ended while a member of P{index} is pending"
                if state.home.parts[index].counts != part.counts:
                    return f"the batch has ended with wrong counts of P{index}"
        return None

    def restless(self, state: Batch) -> str | None:
        home, states = state.home, {member.state for member in state.members}
        if home.state == "ended":
            if any(part.v > known.v for part, known in zip(state.parts, home.parts, strict=True)):
                return "the home has not heard of the newest opening of a part"
            return "an ending has no follow-up" if len(state.follow_ups) != home.endings else None
        if state.must_end:
            return "a cancelled batch waits for its handlers"
        if "pending" not in states and (home.state == "sealed" or state.producer.phase == "crashed"):
            return "the batch waits for ever"
        return None


class CancelledBatches(Batches):
    """A cancel at any moment, by a user, by the leader or by a member that failed; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        **ALWAYS,
        **CRASHES,
        **CANCELS,
        **ENDED_BY_CANCEL,
        **FAILURES,
        "a record is lost": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a cancel does not seal": 1,
        "open_part ignores a cancel": 6,
        "a cancel does not fence an opening that never came": 5,
        "a cancel is dropped after its first step": 7,
        "a part does not keep its cancel": 7,
        "a cancelled part takes members": 7,
        "a failure is not reported at once": 3,
        "a failure in a closing report does not cancel": 9,
        "a cancel does not look for records": 5,
        "a cancel does not repeat the report": 4,
        "the leader does not repeat a cancel": 3,
    }

    def starts(self) -> Iterator[Batch]:
        yield Batch(producer(NEAR_ADDER), zombies=1, cancels=1, openings=2)
        yield Batch(producer(FAR_ADDER), target=0, cancels=1, slow_relays=1)
        yield Batch(producer(FAR, FAR), cancels=1, slow_relays=1, crashes=1)
        yield Batch(producer(NEAR_ADDER, FAR), cancels=1, away=True)
        yield Batch(producer(NEAR_ADDER, FAR), strict=True, failures=1)
        yield Batch(producer(FAR, FAR), strict=True, failures=2, slow_relays=1)
        yield Batch(producer(NEAR, FAR), cancels=1, losses=1)
        yield Batch(producer(FAR), near=False, cancels=1, losses=2)


class ReopenedBatches(Batches):
    """Failed members that are put back while the batch runs, is cancelled or has ended; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        **ALWAYS,
        **CANCELS,
        **ENDED_BY_CANCEL,
        **FAILURES,
        "a failed member is put back": By.USER,
        "a worker reads its part": By.USER,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a member put back still counts as failed": 4,
        "a part that reopens keeps its number": 6,
        "a part that reopens keeps its cancel": 10,
        "a part that reopens does not report": 6,
        "a report does not reopen the batch": 6,
        "a batch that reopens stays cancelled": 7,
        "a member believes at once that its batch has ended": 8,
        "a member is put back into a cancelled part": 9,
        "a cancel of an older opening is obeyed": 8,
        "a cancel is not sent to a part that reopens": 7,
        "a report of a reopened part ends the cancel": 7,
        "an older failure cancels a batch that reopens": 10,
        "a failure that was put back does not cancel": 10,
        "close_part repeats the report about the opening that it was asked": 9,
        "a newer message does not replace the older one": 7,
        "drop_outbox deletes a newer message": 8,
        "a later ending has no follow-up": 7,
        "all follow-ups have one topic": 8,
        "a follow-up below the newest is refused": 9,
        "the follow-up is put once per delivery": 9,
    }

    def starts(self) -> Iterator[Batch]:
        yield Batch(producer(NEAR_ADDER), failures=1, put_backs=1, away=True)
        yield Batch(producer(FAR_ADDER), target=0, failures=1, put_backs=1)
        yield Batch(producer(FAR_ADDER), failures=1, put_backs=1, zombies=1)
        yield Batch(producer(FAR), failures=2, put_backs=2, away=True, slow_relays=1)
        yield Batch(producer(FAR, NEAR), failures=1, put_backs=1, cancels=1)
        yield Batch(producer(FAR), failures=1, put_backs=1, cancels=2, slow_relays=1)
        yield Batch(producer(NEAR_ADDER), failures=1, put_backs=1, cancels=1, openings=2)
        yield Batch(producer(FAR, FAR), strict=True, failures=2, put_backs=1, slow_relays=1)
        yield Batch(producer(FAR, NEAR), strict=True, failures=2, put_backs=1)


class ClearedBatches(Batches):
    """A queue that is deleted: its members end when the trash is purged, or when another job gets their id; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        **{name: by for name, by in ALWAYS.items() if "slow" not in name and "dead" not in name},
        **CANCELS,
        **ENDED_BY_CANCEL,
        **FAILURES,
        "a failed member is put back": By.USER,
        "the queue is deleted": By.USER,
        "purge_queue": By.MESH,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "an addition is counted before the end in the trash": 6,
        "the end in the trash is settled before the addition": 10,
    }
    least: ClassVar[int] = 3_000

    def starts(self) -> Iterator[Batch]:
        yield Batch(producer(SAME, SAME), clears=1)
        yield Batch(producer(SAME, SAME), clears=2, near=False, cancels=1)
        yield Batch(producer(SAME, FAR_ADDER), target=0, target_id=1, clears=1)
        yield Batch(producer(SAME, SAME), clears=1, failures=1, put_backs=1)
        yield Batch(producer(SAME, SAME), clears=1, failures=1, put_backs=1, cancels=1, near=False)


def may_open(state: Batch, index: int) -> bool:
    """True if the part may be opened once more; bounds the search."""
    known = state.home.parts[index]
    return known.v < state.openings


def again(caller: Producer | Run, v: int) -> str:
    """The violation if the home opens a part at a number at which it has refused this caller."""
    refused = caller.phase == "refused" and v <= caller.brings.v
    return "a part is opened again at a number at which it has closed" if refused else ""


def said(state: Batch, index: int, word: str) -> str:
    """What was asked about a part, and the reply."""
    return f"P{index} at {state.home.parts[index].v}: {word}"


def in_words(message: Message) -> str:
    """A message, for a trace."""
    if message.kind == "follow_up":
        return f"follow-up {message.v}"
    closed = {"cancel": "", "report": " closed" if message.closed else " open"}[message.kind]
    return f"{message.kind} P{message.about} at {message.v}{closed}"
