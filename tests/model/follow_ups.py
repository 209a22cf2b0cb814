"""The follow-up of a batch in another queue than its home: how long it is held there, and that each ending enqueues it once.

The producer stores it in the other queue, and opens the batch then. The home only sends messages: `keep` when the batch is
opened, `release` at each ending, `forget` when the record is deleted. Messages come late, twice and in any order. A message may
wait in the outbox for any time, but a `keep` for less than a week, and no request is on its way for a day.

Promised: an open batch has its follow-up; each ending enqueues it once; and nothing is left when the batch is forgotten, or was
never opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

Message = tuple[str, int]
"""``keep``, ``forget``, or ``release`` and the number of the ending."""
KEEP, FORGET = ("keep", 0), ("forget", 0)


class Held(NamedTuple):
    """What the other queue holds."""

    state: str = "nothing"
    """nothing; unopened: it expires in a week; kept; or expiring: in a day."""
    put: frozenset[int] = frozenset()
    """The endings that were put in line."""


class FollowUp(NamedTuple):
    """All of it."""

    producer: str = "begins"
    """begins, held, opened or crashed."""
    home: str = "nothing"
    """nothing, open, ended or forgotten."""
    endings: int = 0
    held: Held = Held()
    outbox: frozenset[Message] = frozenset()
    copies: frozenset[Message] = frozenset()
    """Messages that a slow relay has read and not yet delivered."""
    enqueued: tuple[int, ...] = ()
    crashes: int = 1
    slow_relays: int = 1
    late_holds: int = 1
    reopens: int = 1


Steps = Iterator[tuple[str, str, FollowUp]]


class FollowUps(Model[FollowUp]):
    """See the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "the producer holds": By.USER,
        "the producer opens": By.USER,
        "the producer crashes": By.FAULT,
        "a copy of the hold arrives": By.FAULT,
        "the batch ends": By.USER,
        "the batch opens again": By.USER,
        "the home forgets": By.MESH,
        "the relay delivers": By.MESH,
        "a relay is slow": By.FAULT,
        "a slow relay delivers": By.MESH,
        "a week passes": By.MESH,
        "a day passes": By.MESH,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "the batch is opened first": 2,
        "what is held never expires": 2,
        "the home does not say that it was opened": 3,
        "the home does not say that it has forgotten": 6,
        "a copy of the hold starts the expiry again": 5,
        "a late keep undoes the forgetting": 9,
        "the home forgets before a release is delivered": 7,
        "only the last release is looked for": 10,
        "it is put once per delivery": 6,
        "the first ending deletes it": 9,
    }
    least: ClassVar[int] = 300

    def starts(self) -> Iterator[FollowUp]:
        yield FollowUp()

    def steps(self, state: FollowUp) -> Steps:
        yield from self._producer_steps(state)
        yield from self._home_steps(state)
        yield from self._message_steps(state)
        held, on_its_way = state.held, state.producer == "held" or bool(state.copies)
        unsaid = KEEP in state.outbox or (state.home == "nothing" and state.producer != "crashed")
        if held.state == "unopened" and not unsaid and not on_its_way and self.mistake != "what is held never expires":
            yield "a week passes", "", state._replace(held=Held(), late_holds=0)
        if held.state == "expiring" and not on_its_way:
            yield "a day passes", "", state._replace(held=Held(), late_holds=0)

    def _producer_steps(self, state: FollowUp) -> Steps:
        first = self.mistake == "the batch is opened first"
        if state.crashes and state.producer in ("begins", "held"):
            yield "the producer crashes", "", state._replace(producer="crashed", crashes=0)
        if state.producer == "begins":
            after = self._open(state) if first else self._hold(state)
            yield "the producer opens" if first else "the producer holds", "", after._replace(producer="held")
        if state.producer == "held":
            after = self._hold(state) if first else self._open(state)
            yield "the producer holds" if first else "the producer opens", "", after._replace(producer="opened")
        if state.late_holds and state.producer != "begins":
            yield "a copy of the hold arrives", "", self._hold(state._replace(late_holds=0))

    def _hold(self, state: FollowUp) -> FollowUp:
        """`hold_follow_ups`: changes nothing if something is held."""
        again = self.mistake == "a copy of the hold starts the expiry again"
        if state.held.state != "nothing" and not again:
            return state
        return state._replace(held=state.held._replace(state="unopened"))

    def _open(self, state: FollowUp) -> FollowUp:
        """`open_batch`."""
        said = state.outbox if self.mistake == "the home does not say that it was opened" else state.outbox | {KEEP}
        return state._replace(home="open", outbox=said)

    def _home_steps(self, state: FollowUp) -> Steps:
        if state.home == "open":
            endings = state.endings + 1
            after = state._replace(home="ended", endings=endings, outbox=state.outbox | {("release", endings)})
            yield "the batch ends", "", after
        if state.home != "ended":
            return
        if state.reopens:
            yield "the batch opens again", "", state._replace(home="open", reopens=state.reopens - 1)
        first = state.endings if self.mistake == "only the last release is looked for" else 1
        waits = any(("release", ending) in state.outbox for ending in range(first, state.endings + 1))
        if not waits or self.mistake == "the home forgets before a release is delivered":
            silent = self.mistake == "the home does not say that it has forgotten"
            said = state.outbox - {KEEP} | (set() if silent else {FORGET})  # of one topic
            yield "the home forgets", "", state._replace(home="forgotten", reopens=0, outbox=said)

    def _message_steps(self, state: FollowUp) -> Steps:
        for message in state.outbox:
            words = " ".join(map(str, message))
            after = self._deliver(state, message)
            yield "the relay delivers", words, after._replace(outbox=after.outbox - {message})
            if state.slow_relays:
                yield "a relay is slow", words, state._replace(copies=state.copies | {message}, slow_relays=0)
        for message in state.copies:
            words = " ".join(map(str, message))
            yield "a slow relay delivers", words, self._deliver(state._replace(copies=frozenset()), message)

    def _deliver(self, state: FollowUp, message: Message) -> FollowUp:
        """`keep_follow_ups` and `put_follow_up`."""
        held, (kind, ending) = state.held, message
        if held.state == "nothing":
            return state
        if kind == "release":
            if ending in held.put and self.mistake != "it is put once per delivery":
                return state
            after = Held() if self.mistake == "the first ending deletes it" else held._replace(put=held.put | {ending})
            return state._replace(held=after, enqueued=(*state.enqueued, ending))
        if kind == "keep" and held.state == "expiring" and self.mistake != "a late keep undoes the forgetting":
            return state
        return state._replace(held=held._replace(state="kept" if kind == "keep" else "expiring"))

    def broken(self, state: FollowUp) -> str | None:
        if len(set(state.enqueued)) < len(state.enqueued):
            return "two follow-ups of one ending"
        if state.home == "open" and state.held.state == "nothing":
            return "an open batch has lost its follow-up" if state.producer != "held" else None
        return None

    def restless(self, state: FollowUp) -> str | None:
        if state.home in ("ended", "forgotten") and len(state.enqueued) != state.endings:
            return "an ending has no follow-up"
        if state.held.state != "nothing" and (state.home == "forgotten" or state.producer == "crashed"):
            return "a follow-up is held for ever"
        return None
