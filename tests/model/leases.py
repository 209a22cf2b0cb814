"""The leader's lease: renewed by its holder's beats, expiring by the server's clock, taken over when that clock was set back.

A holds the lease, or will; B wants it. A can crash, with a beat that the server has not read, or freeze and wake up. The server's
clock can be set back: then the lease does not expire until it is renewed. B's replies get lost, and copies of B's beats run late.

The numbers of the beats are left out: what matters is whether the lease is still the one that B saw (`seen`), that B's beat names
(`named`), and that a late copy of it names (`late`).

Promised: B does not take a lease that A has renewed since B saw it; when everything rests, a living worker leads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model


class Lease(NamedTuple):
    """The registry and both peers."""

    holder: str = ""
    expires: bool = True
    process: str = "up"
    unread: bool = False
    """A beat of A that the server has not read when A crashes."""
    sightings: int = 0
    """Beats of B in a row that were answered with the same lease of A."""
    seen: bool = False
    beaten: bool = False
    """A has beaten since B's last sighting."""
    call: str = ""
    """B's beat that has no answer yet: it asks for the lease, or names the one that it takes over."""
    named: bool = False
    late: bool | None = None
    robbed: bool = False
    deaths: int = 1
    jumps: int = 1
    losses: int = 1


class Leases(Model[Lease]):
    """`keep_worker_alive`, as far as the lease goes."""

    moves: ClassVar[Mapping[str, By]] = {
        "A beats": By.MESH,
        "B beats": By.MESH,
        "B beats again": By.USER,
        "the server runs B's beat": By.MESH,
        "the lease expires": By.MESH,
        "A's last beat runs": By.MESH,
        "A crashes": By.FAULT,
        "A freezes": By.FAULT,
        "A wakes up": By.USER,
        "the server's clock is set back": By.FAULT,
        "B's answer is lost": By.FAULT,
        "a late copy runs": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a lease is taken over without comparing it": 12,
        "nobody takes over a lease that stands still": 5,
    }
    least: ClassVar[int] = 500

    def starts(self) -> Iterator[Lease]:
        yield Lease()
        yield Lease(holder="A")

    def steps(self, state: Lease) -> Iterator[tuple[str, str, Lease]]:
        yield from self._of_a(state)
        yield from self._of_b(state)
        if state.holder == "A" and state.process != "up" and state.expires:
            yield "the lease expires", "", change(state, "")
        if state.holder and state.jumps:
            yield "the server's clock is set back", "", state._replace(expires=False, jumps=0)

    def _of_a(self, state: Lease) -> Iterator[tuple[str, str, Lease]]:
        if state.process == "up":
            yield "A beats", "", beat_of_a(state)._replace(beaten=True)
            if state.deaths:
                yield "A crashes", "", state._replace(process="crashed", deaths=0, unread=True)
                yield "A freezes", "", state._replace(process="frozen", deaths=0)
        elif state.process == "frozen":
            yield "A wakes up", "", state._replace(process="up")
        elif state.unread:
            yield "A's last beat runs", "", beat_of_a(state)._replace(unread=False)

    def _of_b(self, state: Lease) -> Iterator[tuple[str, str, Lease]]:
        if not state.call and state.holder != "B" and (state.beaten or state.process != "up"):  # A beats as often as B
            takes = state.sightings == 2 and self.mistake != "nobody takes over a lease that stands still"
            call = "takes over" if takes else "asks"
            name = "B beats again" if state.process == "up" and state.holder == "A" else "B beats"  # or they never rest
            yield name, call, state._replace(call=call, named=takes and state.seen)
        if state.call:
            after = self._run(state, state.call, named=state.named)
            yield "the server runs B's beat", state.call, sighting(after._replace(call="", named=False))
            if state.losses:
                yield "B's answer is lost", "it beats again", after._replace(losses=0, call="", named=False)
                if state.call == "takes over":
                    yield (
                        "B's answer is lost",
                        "unread",
                        state._replace(losses=0, call="", named=False, late=state.named),
                    )
        if state.late is not None:
            yield "a late copy runs", "", self._run(state, "takes over", named=state.late)._replace(late=None)

    def _run(self, state: Lease, call: str, *, named: bool) -> Lease:
        compared = named or self.mistake == "a lease is taken over without comparing it"
        if state.holder == "A" and not (call == "takes over" and compared):
            return state
        robbed = state.robbed or (state.holder == "A" and not named)
        return change(state, "B")._replace(expires=True, robbed=robbed)

    def broken(self, state: Lease) -> str | None:
        return "B took a lease that A had renewed since B saw it" if state.robbed else None

    def restless(self, state: Lease) -> str | None:
        if state.holder == "B" or (state.holder == "A" and state.process == "up"):
            return None
        return f"A is {state.process}, and nobody who lives leads"


def change(state: Lease, holder: str) -> Lease:
    """The lease is another one than before."""
    late = None if state.late is None else False
    return state._replace(holder=holder, seen=False, named=False, late=late)


def beat_of_a(state: Lease) -> Lease:
    """A beat of A that asks for the lease."""
    return state if state.holder == "B" else change(state, "A")._replace(expires=True)


def sighting(state: Lease) -> Lease:
    """B reads the answer to its beat."""
    if state.holder != "A":
        return state._replace(sightings=0, seen=False, beaten=False)
    return state._replace(sightings=2 if state.seen else 1, seen=True, beaten=False)
