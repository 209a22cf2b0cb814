"""The scripts of a batch, each one step on the state of `batch_state`, correct or with one mistake put in.

The first half runs in the slot of the home, the second in the slot of a part. A script of one slot reaches the other only by
the outbox; the report of a part that shares the home's slot is taken in the same step.
"""

from __future__ import annotations

from tests.model.batch_state import NOTHING, Batch, Known, Member, Message, Run, replaced


class HomeScripts:
    """The scripts of the home, and the outbox; `mistake` is the one that is put in."""

    def __init__(self, mistake: str | None) -> None:
        self.mistake = mistake

    def open_part(self, state: Batch, index: int, report: Message = NOTHING) -> tuple[str, Batch]:
        """`open_part`: the next number if the home holds the part closed, else the same.

        The caller may bring a report that may still be in the outbox: that of the part that refused it, or of its own.
        """
        if report.kind == "report":
            state = self.take_report(state, report)
        home, known = state.home, state.home.parts[index]
        if home.state == "ended":
            return "ended", state
        if home.cancelled and self.mistake != "open_part ignores a cancel":
            return "cancelled", state
        v = known.v if known.is_open else known.v + 1
        known = known._replace(v=v, is_open=True)
        return "opened", state._replace(home=home._replace(parts=replaced(home.parts, index, known)))

    def seal(self, state: Batch) -> Batch:
        """`seal_batch`, and the requests to close the open parts that its producer sends then."""
        if state.home.state != "open":
            return state
        checks = {(index, known.v) for index, known in enumerate(state.home.parts) if known.is_open}
        sealed = state._replace(home=state.home._replace(state="sealed"), checks=state.checks | checks)
        return self._end_if_complete(sealed)

    def cancel(self, state: Batch) -> Batch:
        """`cancel_batch`: also the leader for a batch that was left open, and the home at a member's failure."""
        home = state.home
        if home.state == "ended" or home.cancelled:
            return state
        word = home.state if self.mistake == "a cancel does not seal" else "sealed"
        state = state._replace(home=home._replace(cancelled=True, state=word), must_end=True)
        for index, known in enumerate(home.parts):
            if known.is_open:
                state = self.post(state, Message("cancel", index, known.v))
        return self._end_if_complete(state)

    def take_report(self, state: Batch, report: Message) -> Batch:
        """`report_part`: the home believes the newest."""
        home, index = state.home, report.about
        known = home.parts[index]
        newer = report.v > known.v
        stale = self.mistake == "the home believes an older report" and known.is_open
        if not newer and not (report.v == known.v and known.is_open) and not stale:
            return state
        told = Known(max(report.v, known.v), not report.closed, report.counts, report.failures)
        home = home._replace(parts=replaced(home.parts, index, told))
        if home.state == "ended":
            if self.mistake == "a report does not reopen the batch":
                return state
            cancelled = home.cancelled and self.mistake == "a batch that reopens stays cancelled"
            home = home._replace(state="sealed", cancelled=cancelled)
        elif newer and self.mistake == "a report of a reopened part ends the cancel":
            home = home._replace(cancelled=False)
        state = state._replace(home=home)
        again = newer and not report.closed and self.mistake != "a cancel is not sent to a part that reopens"
        if home.cancelled and again:
            state = self.post(state, Message("cancel", index, report.v))
        failed = report.failures > known.failures
        if self.mistake == "an older failure cancels a batch that reopens":
            failed = state.strict and report.counts.failed > 0
        if self.mistake == "a failure that was put back does not cancel":
            failed = report.counts.failed > known.counts.failed and state.strict
        if failed and not (report.closed and self.mistake == "a failure in a closing report does not cancel"):
            state = self.cancel(state)
        return self._end_if_complete(state)

    def _end_if_complete(self, state: Batch) -> Batch:
        home = state.home
        if home.state != "sealed" or any(known.is_open for known in home.parts):
            return state
        number = home.endings + 1
        state = state._replace(home=home._replace(state="ended", endings=number), must_end=False)
        if self.mistake == "a later ending has no follow-up" and number > 1:
            return state
        if state.away:
            topic = 0 if self.mistake == "all follow-ups have one topic" else number
            return self.post(state, Message("follow_up", topic, number))
        return state._replace(follow_ups=(*state.follow_ups, number))

    def post(self, state: Batch, message: Message) -> Batch:
        """Puts a message into the outbox, in the transaction that causes it."""
        same = {other for other in state.outbox if other.topic == message.topic}
        if same and self.mistake == "a newer message does not replace the older one":
            return state
        return state._replace(outbox=(state.outbox - same) | {message})


class Scripts(HomeScripts):
    """The scripts of a part, and the delivery of messages."""

    def dispatch(self, state: Batch, member: Member, v: int, *, sealed: bool) -> tuple[bool, Batch]:
        """`dispatch_jobs` with a batch: whether the part took the member. If not, nothing is stored."""
        index = member.part
        part = state.parts[index].at(v)
        if self.mistake == "a part that reopens keeps its cancel":
            part = part._replace(cancelled=state.parts[index].cancelled)
        closed = part.closed and self.mistake != "a part takes members after it closed"
        if closed or (part.cancelled and self.mistake != "a cancelled part takes members"):
            over = part.cancelled and not closed and not state.home.cancelled
            return False, state._replace(wrong="a member is refused for a cancel that is over" if over else "")
        if state.of_id(member, "pending", "cancelling"):
            return True, state  # it is a duplicate
        part = part._replace(sealed=part.sealed or sealed)
        state, member = self._take_id(state.with_part(index, part), member)
        state = state._replace(members=tuple(sorted((*state.members, member))))
        return True, state._replace(runs=tuple(sorted((*state.runs, Run())))) if member.adds else state

    def _take_id(self, state: Batch, member: Member) -> tuple[Batch, Member]:
        """A job gets the id of one in the trash, which ends. Both are counted at the end of the script: the end first."""
        for old in state.of_id(member, "trashed"):
            if self.mistake == "the end in the trash is settled before the addition":
                return self.end_member(state, old, "cancelled"), member
            ended = old._replace(state="cancelled")
            state = self.count(state.with_member(old, ended), old.part, "cancelled")
            if self.mistake == "an addition is counted before the end in the trash":
                member = member._replace(known=False)
        return state, member

    def clear(self, state: Batch) -> Batch:
        """`delete_queue`: what waits goes to the trash of the queue of part 0."""
        for member in state.members:
            if member.part == 0 and member.state == "pending" and not member.adds:
                state = state.with_member(member, member._replace(state="trashed"))
        return state

    def end_member(self, state: Batch, member: Member, outcome: str) -> Batch:
        """Any script that ends a job for good."""
        index = member.part
        state = state.with_member(member, member._replace(state=outcome))
        if member.known:
            state = self.count(state, index, outcome)
        if outcome == "failed":
            part = state.parts[index]
            state = state.with_part(index, part._replace(failures=part.failures + state.strict))
            state = state._replace(spared=False, must_end=state.must_end or state.strict)
            if state.strict and self.mistake != "a failure is not reported at once":
                state = self._report(state, index)
        if member.adds:
            state = state._replace(runs=tuple(run for run in state.runs if not run.has_claim))
        if self.mistake == "the end of the last member does not close":
            return state
        return self._close_if_even(state, index)

    def count(self, state: Batch, index: int, outcome: str) -> Batch:
        """One more of this outcome, if the id was in the set of members."""
        part = state.parts[index]
        return state.with_part(index, part._replace(counts=part.counts.plus(outcome)))

    def close_part(self, state: Batch, index: int, v: int) -> Batch:
        """`close_part`, about the opening v."""
        older = state.parts[index].v < v
        part = state.parts[index].at(v)
        if older and self.mistake == "close_part does not fence an opening that never came":
            part = state.parts[index]
        if self.mistake != "close_part does not seal":
            part = part._replace(sealed=True)
        state = state.with_part(index, part)
        if self.mistake != "close_part does not look for records":
            state = self._drop_lost(state, index)
            part = state.parts[index]
        if part.v == 0:
            return state
        if part.closed:
            if self.mistake == "close_part does not repeat the report":
                return state
            said = v if self.mistake == "close_part repeats the report about the opening that it was asked" else part.v
            return self._report(state, index, said)
        return self._close_if_even(state, index)

    def _drop_lost(self, state: Batch, index: int) -> Batch:
        """Counts members without a record."""
        for member in state.members:
            if member.part == index and member.state == "gone":
                state = self.count(state.with_member(member, member._replace(state="lost")), index, "lost")
        return state

    def cancel_part(self, state: Batch, index: int, v: int) -> tuple[bool, Batch]:
        """`cancel_part`, about the opening v: cancels one member; whether there are more."""
        if state.parts[index].v > v and self.mistake != "a cancel of an older opening is obeyed":
            return False, state
        part = state.parts[index]
        if self.mistake != "a cancel does not fence an opening that never came":
            part = part.at(v)
        if part.closed and self.mistake != "a cancel does not repeat the report":
            return False, self._report(state, index)
        if part.closed or part.v == 0:
            return False, state
        if self.mistake != "a part does not keep its cancel":
            part = part._replace(cancelled=True)
        state = state.with_part(index, part._replace(sealed=True))
        if self.mistake != "a cancel does not look for records":
            state = self._drop_lost(state, index)
        pending = [member for member in state.members if member.part == index and member.state == "pending"]
        if pending:
            wrong = "a member that was put back after the end was cancelled by an older cancel" if state.spared else ""
            state = state.with_member(pending[0], pending[0]._replace(state="cancelling"))._replace(wrong=wrong)
        more = len(pending) > 1 and self.mistake != "a cancel is dropped after its first step"
        return more, self._close_if_even(state, index)

    def put_back(self, state: Batch, member: Member) -> Batch:
        """`retry_aside`: a member of a cancelled part that is open stays where it is."""
        index, part = member.part, state.parts[member.part]
        if not part.closed and part.cancelled and self.mistake != "a member is put back into a cancelled part":
            return state
        if state.of_id(member, "pending", "cancelling"):
            return state
        state, back = self._take_id(state, member._replace(state="pending"))
        part = state.parts[index]
        fewer = 0 if self.mistake == "a member put back still counts as failed" else -1
        state = state.with_member(member, back)
        if member.adds:
            state = state._replace(runs=tuple(sorted((*state.runs, Run()))))
        counts = part.counts.plus("failed", fewer)
        known = state.home.parts[index]
        spared = state.spared or (state.home.state == "ended" and known.v == part.v)
        state = state._replace(put_backs=state.put_backs - 1, spared=spared)
        if not part.closed:
            return state.with_part(index, part._replace(counts=counts))
        v = part.v if self.mistake == "a part that reopens keeps its number" else part.v + 1
        part = part._replace(v=v, closed=False, counts=counts)
        if self.mistake != "a part that reopens keeps its cancel":
            part = part._replace(cancelled=False)
        state = state.with_part(index, part)
        return state if self.mistake == "a part that reopens does not report" else self._report(state, index)

    def put_follow_up(self, state: Batch, number: int) -> Batch:
        """`put_follow_up`: the part record there has a field for each ending."""
        there = number in state.follow_ups
        if self.mistake == "a follow-up below the newest is refused":
            there = number <= max(state.follow_ups, default=0)
        if there and self.mistake != "the follow-up is put once per delivery":
            return state
        return state._replace(follow_ups=(*state.follow_ups, number))

    def _close_if_even(self, state: Batch, index: int) -> Batch:
        part = state.parts[index]
        if part.closed or not part.sealed or state.has_known(index):
            return state
        return self._report(state.with_part(index, part._replace(closed=True)), index)

    def _report(self, state: Batch, index: int, v: int | None = None) -> Batch:
        report = self.report(state, index)
        if v is not None:
            report = report._replace(v=v)
        return self.take_report(state, report) if state.near and index == 0 else self.post(state, report)

    def report(self, state: Batch, index: int) -> Message:
        """What the part knows now."""
        part = state.parts[index]
        return Message("report", index, part.v, part.closed, part.counts, part.failures)

    def deliver(self, state: Batch, message: Message) -> Batch:
        """The script of the other queue, then `drop_outbox`."""
        more = False
        if message.kind == "report":
            state = self.take_report(state, message)
        elif message.kind == "cancel":
            more, state = self.cancel_part(state, message.about, message.v)
        else:
            state = self.put_follow_up(state, message.v)
        if more:
            return state
        if self.mistake == "drop_outbox deletes a newer message":
            return state._replace(outbox=frozenset(other for other in state.outbox if other.topic != message.topic))
        return state._replace(outbox=state.outbox - {message})
