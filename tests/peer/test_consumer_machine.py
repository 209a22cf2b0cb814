"""A consumer and its scheduler on random events, without a server: every request, reservation and end is as the model says.

The model is the tables of `ClaimRequest` and `Lifecycle` in the fewest words. Session, settles and link answer as the machine
chooses. A run is the same each time; ``WORQR_MACHINE_EXAMPLES=5000`` makes it a long one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.peer.tools import services_of
from worqr.errors import RefusedByServer
from worqr.keys import QueueKeys
from worqr.ops import StartReply
from worqr.peer.consumer import HandlerConsumer, Lifecycle, Phase
from worqr.peer.scheduler import Pool, Scheduler, Share
from worqr.peer.session import Registration
from worqr.policy import Policy

EXAMPLES = int(os.environ.get("WORQR_MACHINE_EXAMPLES", "150"))
SELDOM = st.integers(0, 3).map(lambda n: n == 3)
SHUTDOWN: dict[Phase, Callable[[Lifecycle], object]] = {
    Phase.DRAINING: Lifecycle.drain,
    Phase.STOPPING: Lifecycle.skip_grace,
    Phase.CANCELLING: Lifecycle.cancel,
    Phase.RETURNING: Lifecycle.return_claims,
    Phase.LEFT: Lifecycle.leave,
}


class Model:
    """What a consumer that has the scheduler to itself should do. `sent`: how many tasks each of its requests was for."""

    def __init__(self, size: int, concurrency: int, pool: int, limit: int) -> None:
        self.size, self.concurrency, self.pool, self.limit = size, concurrency, pool, limit
        self.wants = self.again = self.wakeup = self.live = self.resting = self.rejoins = False
        self.ending = 0
        """The number of the end of a hand-off whose reply says whether to request tasks; 0: something else does."""
        self.endings = 0
        self.in_flight: int | None = None
        self.phase = Phase.NEW
        self.running: list[int] = []
        self.freed: dict[int, bool] = {}
        """Stuck runs whose units were freed, and whether their place in the pool was freed too."""
        self.rejected: list[int] = []
        self.accepted: list[int] = []
        self.given_back: list[int] = []
        self.kept: list[int] = []
        """Hand-offs that wait for the reply to a request, which has reserved the units."""
        self.lost: set[int] = set()
        """Those of them whose registration has died."""
        self.sent: list[int] = []

    @property
    def held(self) -> int:
        return len(self.running) - len(self.freed) + (self.in_flight or 0)

    @property
    def places(self) -> int:
        return len(self.running) - sum(self.freed.values()) + (self.in_flight or 0)

    def send(self, wanted: int) -> None:
        self.in_flight, self.again, self.wakeup, self.rejoins, self.ending = wanted, False, False, False, 0
        self.sent.append(wanted)

    @property
    def fits(self) -> int:
        units = (self.concurrency - self.held * self.size) // self.size
        return min(units, self.pool - self.places, self.limit - self.held)

    def dispatch(self) -> None:
        """Request what fits; forward a wake-up for which nothing fits."""
        fits = self.fits
        may = self.wants and not self.resting and self.live and self.phase < Phase.DRAINING
        if may and self.in_flight is None and fits > 0:
            self.send(fits)
        if self.wakeup and self.live and self.in_flight is None:
            self.send(0)

    def request_soon(self) -> None:
        if self.phase < Phase.DRAINING:
            self.wants = self.again = True
            self.resting = self.rejoins = False
            self.ending = 0
            if self.in_flight is None:
                self.dispatch()

    def wake(self) -> None:
        self.wakeup = True
        self.request_soon()
        if self.wakeup and self.live and self.in_flight is None:
            self.send(0)

    def answered(self, claims: list[int] | None, *, more: bool = False, dead: bool = False) -> None:
        """A reply; None: the server refused the request."""
        wanted, self.in_flight = self.in_flight, None
        if dead or self.phase >= Phase.STOPPING:
            back = self.given_back if self.phase >= Phase.DETACHED else self.rejected
            back += [] if dead or claims is None else claims
        elif claims is None:
            self.wants = False
        else:
            self.wants = self.again or more if wanted else self.wants
            self.running += claims
            self.accepted += claims
        kept, self.kept = self.kept, []
        for claim in kept:
            self.handed(claim, dead=claim in self.lost)
        self.dispatch()

    def handed(self, claim: int, *, dead: bool) -> None:
        """A task that came with its wake-up."""
        takes = self.phase is Phase.SERVING
        if dead:
            return
        if takes and self.fits < 1 and self.in_flight:
            self.kept.append(claim)
            return
        if self.phase < Phase.DRAINING:
            self.wants = self.again = True
            self.resting = self.rejoins = False
            self.ending = 0
        if takes and self.fits > 0:
            self.resting = self.rejoins = True
            self.running.append(claim)
            self.accepted.append(claim)
        else:
            self.given_back.append(claim)

    def rejoin(self) -> int:
        """Whether the end of a run that is sent now does what the next request would: its number, or 0."""
        may = self.wants and not self.resting and self.live and self.phase < Phase.DRAINING
        if not (may and self.rejoins and self.in_flight is None and self.fits > 0):
            return 0
        self.endings += 1
        self.wants, self.rejoins, self.ending = False, False, self.endings
        return self.ending

    def rejoined(self, ending: int, workers_waiting: int) -> None:
        if ending == self.ending:
            self.ending, self.wants = 0, not workers_waiting
        self.dispatch()

    def ended(self, claim: int) -> None:
        self.running.remove(claim)
        self.resting = False
        self.freed.pop(claim, None)


class Machine(RuleBasedStateMachine):
    """Both, on the same events."""

    @initialize(size=st.integers(1, 3), concurrency=st.integers(3, 9), pool=st.integers(1, 6), limit=st.integers(1, 6))
    def begin(self, size: int, concurrency: int, pool: int, limit: int) -> None:
        self.model = Model(size, concurrency, pool, limit)
        self.scheduler, self.share = Scheduler(concurrency), Share(size, 100, Pool(pool), Pool(limit))
        self.scheduler.dispatch_with(lambda: None)
        self.sent: list[int] = []
        self.given_back: list[int] = []
        self.accepted: list[int] = []
        self.unread: list[int] = []
        """Ends of hand-offs whose replies are under way."""
        self.rechecks = self.first = self.number = 0
        self.deliver: Callable[[StartReply | None, Exception | None], None] | None = None
        self.registration = self.owner = Registration("w")
        settles: Any = SimpleNamespace(crowded=set(), give_back=lambda _k, _r, claims: self.given_back.extend(claims))
        nothing: Any = None
        services = services_of(
            *(self.scheduler, self),
            session=SimpleNamespace(beat_is_fresh=lambda: True, is_missed_soon=True, lost=self._lost),
            settler=SimpleNamespace(settles=settles, ended=None, rest=lambda _run: None),
            slots=SimpleNamespace(run=lambda run: self.accepted.append(run.fence)),
            reconciler=SimpleNamespace(recheck=self._recheck),
        )
        self.consumer = HandlerConsumer(QueueKeys("t", "Q1"), services, Policy(), self.share, nothing)
        self.scheduler.add(self.consumer)

    def post(self, call: Any, deliver: Any, *, owner: Registration) -> None:
        """What the consumer sends: never a second request while one is under way, and none after the death of the worker."""
        assert self.deliver is None
        assert owner is self.registration
        assert not owner.dead
        self.deliver, self.owner = deliver, owner
        self.number = int(call.args[1])
        self.sent.append(int(call.args[2]))

    def _recheck(self, _consumer: object) -> None:
        self.rechecks += 1

    def _lost(self, registration: Registration, _why: str) -> None:
        registration.end()

    @property
    def is_leaving(self) -> bool:
        return self.model.phase >= Phase.DRAINING

    # Under which worker id

    @precondition(lambda self: not self.model.live and not self.is_leaving)
    @rule()
    def admit(self) -> None:
        if self.registration.dead:
            self.registration = Registration("w")
        self.consumer.admission.enter(self.registration, 1)
        assert not self.consumer.admission.is_live
        self.consumer.admission.admit()
        self.consumer.lifecycle.admitted()
        self.model.live, self.model.phase = True, max(self.model.phase, Phase.SERVING)

    @precondition(lambda self: self.model.live)
    @rule(now=SELDOM)
    def die(self, now: bool) -> None:
        if now:
            self.registration.end()
            self.model.live = False
            self.model.lost |= set(self.model.kept)

    # Reasons to request

    @rule()
    def request_soon(self) -> None:
        self.consumer.request_soon()
        self.model.request_soon()

    @rule()
    def wake(self) -> None:
        self.consumer.on_wakeup()
        self.model.wake()

    @rule()
    def dispatch(self) -> None:
        self.scheduler.dispatch()
        self.model.dispatch()

    @precondition(lambda self: self.consumer.admission.registration is not None)
    @rule(again=st.booleans())
    def hand_off(self, again: bool) -> None:
        self.first += 100
        self.model.handed(self.first, dead=self.registration.dead)
        self.consumer.on_handoff(self.registration, self.first, b"task")
        if again:
            self.consumer.admission.checked(1, self.consumer.admission.doubts)
            self.consumer.on_handoff(self.registration, self.first, b"task")
            assert self.consumer.admission.checked_on == 0
            self.model.wake()

    @rule()
    def rest_in_vain(self) -> None:
        """The run of a hand-off goes on."""
        assert self.consumer.request.resting == self.model.resting
        self.consumer.request.end_long_rest()
        self.model.resting = self.model.rejoins = False
        self.dispatch()

    # Replies

    def _answer(self, started: StartReply | None, failure: Exception | None) -> None:
        deliver, self.deliver = self.deliver, None
        assert deliver is not None
        deliver(started, failure)

    @rule()
    def rejoin(self) -> None:
        """A flush sends the end of a run."""
        found, expected = self.consumer.rejoin(), self.model.rejoin()
        assert (found or (0, 0))[0] == expected
        if found:
            self.unread.append(expected)
            assert found[1] == self.number
        self.dispatch()

    @precondition(lambda self: self.unread)
    @rule(workers_waiting=st.integers(0, 2))
    def rejoined(self, workers_waiting: int) -> None:
        """Replies come in order. 0 also stands for a refusal, and for the death of the worker."""
        ending = self.unread.pop(0)
        self.model.rejoined(ending, workers_waiting)
        self.consumer.rejoined(ending, workers_waiting)

    @precondition(lambda self: self.deliver is not None)
    @rule(n=st.integers(0, 6), word=st.sampled_from(["ok", "late", "short", "paused"]), recheck=st.booleans())
    def reply(self, n: int, word: str, recheck: bool) -> None:
        n = 0 if word == "paused" else min(n, self.sent[-1])
        self.first += 100
        if recheck:
            self.consumer.request.recheck()
        rechecks, dead = self.rechecks, self.owner.dead
        used = not dead and self.model.phase < Phase.STOPPING
        pending = self.consumer.request.recheck_on_reply
        claims = list(range(self.first, self.first + n))
        self.model.answered(claims, more=word in {"ok", "late"}, dead=dead)
        self._answer(StartReply(word, self.first, [b"task"] * n, 2), None)
        assert self.rechecks == rechecks + (used and pending)

    @precondition(lambda self: self.deliver is not None)
    @rule()
    def refuse(self) -> None:
        self.model.answered(None, dead=self.owner.dead)
        self._answer(None, RefusedByServer("a key of a wrong type"))

    @precondition(lambda self: self.deliver is not None)
    @rule(now=SELDOM)
    def not_serving(self, now: bool) -> None:
        model = self.model
        if not now:
            return
        if self.owner.dead or model.phase >= Phase.STOPPING:
            model.answered([], dead=self.owner.dead)
        else:
            model.live, model.in_flight, model.kept = False, None, []
        self._answer(StartReply("not_serving", 0, []), None)

    # Runs

    @precondition(lambda self: self.model.running)
    @rule(k=st.integers(0, 5))
    def end(self, k: int) -> None:
        claim = self.model.running[k % len(self.model.running)]
        run = self.consumer.running[claim]
        for _ in range(2):  # a second time is ignored
            self.consumer.ended(run)
        self.model.ended(claim)

    @precondition(lambda self: self.model.running)
    @rule(k=st.integers(0, 5), place=st.booleans())
    def stuck(self, k: int, place: bool) -> None:
        claim = self.model.running[k % len(self.model.running)]
        self.consumer.release_slot_of_stuck_run(self.consumer.running[claim], place=place)
        self.model.freed[claim] = place or self.model.freed.get(claim, False)

    # Leaving

    @precondition(lambda self: self.model.phase < Phase.LEFT)
    @rule(now=SELDOM, steps=st.integers(1, 2))
    def shut_down(self, now: bool, steps: int) -> None:
        for _ in range(steps if now else 0):
            left = [phase for phase in SHUTDOWN if phase > self.model.phase]
            if left:
                SHUTDOWN[left[0]](self.consumer.lifecycle)
                self.model.phase = left[0]

    # What must be equal

    @invariant()
    def the_consumer_is_as_the_model_says(self) -> None:
        model, consumer = self.model, self.consumer
        request = consumer.request
        assert self.sent == model.sent
        assert (request.in_flight, request.reserved) == (model.in_flight is not None, model.in_flight or 0)
        assert request.wakeup_pending == model.wakeup
        assert request.is_wanted == model.wants
        assert consumer.lifecycle.phase is model.phase
        assert sorted(consumer.running) == sorted(model.running)
        assert consumer.lifecycle.rejected_claims == model.rejected
        assert list(request.handed) == model.kept
        assert (self.accepted, self.given_back) == (model.accepted, model.given_back)

    @invariant()
    def the_books_are_right(self) -> None:
        model, scheduler, share = self.model, self.scheduler, self.share
        assert share.held == model.held
        assert scheduler.room == scheduler.concurrency - model.held * model.size
        assert scheduler.used == (model.held - (model.in_flight or 0)) * model.size
        assert share.pool is not None
        assert share.limit is not None
        assert (share.pool.taken, share.limit.taken) == (model.places, model.held)

    @invariant()
    def no_claim_is_forgotten(self) -> None:
        """Each claim that arrived in a reply runs, has ended, or goes back."""
        assert not {*self.consumer.running} & {*self.consumer.lifecycle.rejected_claims, *self.given_back}


def test_a_consumer_does_what_its_tables_say() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None, derandomize=True)
    )
