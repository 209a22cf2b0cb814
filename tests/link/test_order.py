"""Requests of one base are answered in the order in which they were made, whatever happens to them on the way."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.link.test_request_queue import request
from worqr.link.session import GUILTY_AFTER, Request, RequestQueue

BASES = ("a", "b", "c")


class Order(RuleBasedStateMachine):
    """A request queue, a server that answers or does not, and the bases that it is moving. Nothing here is held alone."""

    def __init__(self) -> None:
        super().__init__()
        self.request_queue = RequestQueue()
        self.now = 0.0
        self.made: dict[str, list[Request]] = {base: [] for base in BASES}
        self.ended: dict[str, list[Request]] = {base: [] for base in BASES}

    @rule(base=st.sampled_from(BASES), many=st.integers(1, 3))
    def make(self, base: str, many: int) -> None:
        for _ in range(many):
            made = request(math.inf, base=base)
            self.made[base].append(made)
            self.request_queue.add(made)

    @rule(moving=st.sets(st.sampled_from(BASES)), failing=st.sets(st.sampled_from(BASES)), answers=st.integers(0, 9))
    def send(self, moving: set[str], failing: set[str], answers: int) -> None:
        """The server answers some; those of a base that it is moving, or refuses for now, are sent again."""
        batch = self.request_queue.take()
        read, unread = batch[:answers], batch[answers:]
        if any(each.losses >= GUILTY_AFTER - 1 for each in unread):
            read, unread = batch, []
        again = [each for each in read if each.call.base in moving | failing]
        for each in read:
            if each not in again:
                self.end(each)
        self.request_queue.blame(unread, self.now)
        self.request_queue.put_back(again)
        self.request_queue.set_aside({each.call.base for each in again} & moving, self.now + 1)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.request_queue.release_due(self.now)

    @rule(gone=st.sets(st.sampled_from(BASES)))
    def hand_over(self, gone: set[str]) -> None:
        """To another node, and from there back to this one."""
        for each in self.request_queue.remove(lambda request: request.call.base not in gone):
            self.request_queue.add(each)

    @rule(base=st.sampled_from(BASES), at=st.integers(0, 5))
    def abandon(self, base: str, at: int) -> None:
        waiting = self.made[base][len(self.ended[base]) :]
        if at < len(waiting):
            waiting[at].abandoned = True
            self.made[base].remove(waiting[at])
            self.request_queue.overdue(self.now, owners=True)

    def end(self, each: Request) -> None:
        base = each.call.base
        self.ended[base].append(each)
        assert self.ended[base] == self.made[base][: len(self.ended[base])]

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = {id(each) for each in self.request_queue._waiting() if not each.settled}
        open_ones = {id(each) for base in BASES for each in self.made[base][len(self.ended[base]) :]}
        assert waiting == open_ones
        assert self.request_queue.is_empty() or open_ones

    def teardown(self) -> None:
        self.request_queue.release_due(math.inf)
        while batch := self.request_queue.take():
            for each in batch:
                self.end(each)
        assert self.ended == self.made


TestOrder = Order.TestCase
