"""One producer enqueues: numbers, stored replies, the lowest number still unanswered, and a connection that gets lost.

The link sends requests in order on its connection. When that is lost, requests which the server has not read yet may
still execute, late, and the link sends every unanswered request again. Single requests can be refused while their
neighbours run: NOSCRIPT (sent again under its number), no memory, and the bound on the queue's length.

Promised: a caller told `ok` has its task stored once; a caller told `full` or `no memory` has it stored not at all;
everyone else has it stored at most once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

BOUND = 1
"""Tasks that fit into the queue."""

TASKS = 2


class Copy(NamedTuple):
    """One sending of a request, as the server will read it."""

    task: int
    number: int
    lowest: int


class Asked(NamedTuple):
    """The producer's knowledge of one task's request."""

    number: int
    told: str = ""
    resent: bool = False


class Producing(NamedTuple):
    """The producer, its connections and the queue."""

    asked: tuple[Asked, ...] = ()
    wire: tuple[Copy, ...] = ()
    replies: tuple[tuple[int, str], ...] = ()
    old_wires: tuple[tuple[Copy, ...], ...] = ()
    waiting: int = 0
    stored: tuple[int, ...] = (0,) * TASKS
    kept: frozenset[tuple[int, str]] = frozenset()
    run: tuple[int, int] = (1, 0)
    """The first and the last of successive numbers that were answered `ok`, which are stored together."""
    low: int = 0
    losses: int = 2
    refusals: int = 1


class Producers(Model[Producing]):
    """`enqueue` by (producer, number) with stored replies; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "enqueue": By.USER,
        "the caller's patience ends": By.USER,
        "a worker takes a task": By.USER,
        "the server runs": By.MESH,
        "the link reads": By.MESH,
        "the server refuses": By.FAULT,
        "the connection is lost": By.FAULT,
        "a late copy runs": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a plain high-water mark": 7,
        "an enqueue without a number": 5,
        "a late copy lowers the lowest": 11,
        # `full` is the script's own answer and must be final: an old copy that runs later would store the task.
        "full is not stored": 9,
        # No memory (like NOSCRIPT) is refused before the script can look up what it answered to an earlier copy.
        "no memory is believed after a resend": 5,
        "a number is given away unanswered": 7,
        # NOSCRIPT was the answer to the number between: it is not done, and will come again.
        "a run spans a number that was not done": 11,
        "a run that is still needed is replaced": 12,
    }
    least: ClassVar[int] = 10_000

    def starts(self) -> Iterator[Producing]:
        yield Producing()
        yield Producing(asked=(Asked(1, "ok"),), stored=(1, *(0,) * TASKS), run=(1, 1), low=1, losses=1)

    def steps(self, state: Producing) -> Iterator[tuple[str, str, Producing]]:
        yield from self._user_steps(state)
        yield from self._connection_steps(state)
        if state.old_wires:
            yield from self._late_steps(state)

    def _user_steps(self, state: Producing) -> Iterator[tuple[str, str, Producing]]:
        if len(state.asked) < len(state.stored):
            task, number = len(state.asked), self._next_number(state)
            asked = (*state.asked, Asked(number))
            copy = Copy(task, number, lowest(asked))
            detail = f"T{task} under number {number}"
            yield "enqueue", detail, state._replace(asked=asked, wire=(*state.wire, copy))
        for task, request in enumerate(state.asked):
            if not request.told:
                detail = f"T{task} may or may not be stored"
                yield "the caller's patience ends", detail, tell(state, task, "maybe")
        if state.waiting:
            yield "a worker takes a task", "", state._replace(waiting=state.waiting - 1)

    def _next_number(self, state: Producing) -> int:
        if not state.asked:
            return 1
        last = state.asked[-1]
        given_away = self.mistake == "a number is given away unanswered" and last.told not in ("", "ok")
        return last.number if given_away else last.number + 1

    def _connection_steps(self, state: Producing) -> Iterator[tuple[str, str, Producing]]:
        if state.wire:
            copy, rest = state.wire[0], state.wire[1:]
            word, after = self._run(state._replace(wire=rest), copy)
            detail = f"number {copy.number}, lowest {copy.lowest}: {word}"
            yield "the server runs", detail, after._replace(replies=(*state.replies, (copy.task, word)))
            if state.refusals:
                for word in ("NOSCRIPT", "no memory"):
                    after = state._replace(wire=rest, refusals=state.refusals - 1)
                    after = after._replace(replies=(*state.replies, (copy.task, word)))
                    yield "the server refuses", f"number {copy.number}: {word}", after
        if state.replies:
            (task, word), unread = state.replies[0], state.replies[1:]
            yield "the link reads", f"T{task}: {word}", self._read(state._replace(replies=unread), task, word)
        if state.losses and (state.wire or state.replies):
            yield "the connection is lost", "what is unanswered is sent again", reconnect(state)

    def _run(self, state: Producing, copy: Copy) -> tuple[str, Producing]:
        """The script."""
        low = max(state.low, copy.lowest)
        if self.mistake == "a late copy lowers the lowest":
            low = copy.lowest
        kept = frozenset(reply for reply in state.kept if reply[0] >= low)
        after = state._replace(kept=kept, low=low)
        if self.mistake == "a plain high-water mark":
            after = state._replace(low=max(state.low, copy.number + 1))
            if copy.number < state.low:
                return "ok", state
        elif self.mistake != "an enqueue without a number":
            if copy.number < low:
                return "late", after
            for number, word in kept:
                if number == copy.number:
                    return word, after
            if state.run[0] <= copy.number <= state.run[1]:
                return "ok", after
        if state.waiting >= BOUND:
            if self.mistake in ("full is not stored", "a plain high-water mark"):
                return "full", state
            return "full", after._replace(kept=after.kept | {(copy.number, "full")})
        count = state.stored[copy.task] + 1
        stored = (*state.stored[: copy.task], count, *state.stored[copy.task + 1 :])
        after = after._replace(waiting=state.waiting + 1, stored=stored)
        return "ok", self._store_ok(after, copy.number)

    def _store_ok(self, state: Producing, number: int) -> Producing:
        first, last = state.run
        follows = number == last + 1 or (self.mistake == "a run spans a number that was not done" and number > last)
        if follows and first <= last:
            return state._replace(run=(first, number))
        if last < state.low or self.mistake == "a run that is still needed is replaced":
            return state._replace(run=(number, number))
        return state._replace(kept=state.kept | {(number, "ok")})

    def _read(self, state: Producing, task: int, word: str) -> Producing:
        request = state.asked[task]
        if request.told:
            return state
        if word == "NOSCRIPT":
            return state._replace(wire=(*state.wire, Copy(task, request.number, lowest(state.asked))))
        believed = self.mistake == "no memory is believed after a resend"
        if word == "no memory" and request.resent and not believed:
            word = "maybe"
        return tell(state, task, word)

    def _late_steps(self, state: Producing) -> Iterator[tuple[str, str, Producing]]:
        for index, wire in enumerate(state.old_wires):
            copy = wire[0]
            others = state.old_wires[:index] + state.old_wires[index + 1 :]
            left = (*others, wire[1:]) if wire[1:] else others
            word, after = self._run(state._replace(old_wires=tuple(sorted(left))), copy)
            detail = f"number {copy.number}, lowest {copy.lowest}: {word}, and nobody reads it"
            yield "a late copy runs", detail, after

    def broken(self, state: Producing) -> str | None:
        for task, request in enumerate(state.asked):
            count = state.stored[task]
            if count > 1:
                return f"T{task} was stored {count} times"
            if request.told == "ok" and not count:
                return f"told ok, but T{task} was never stored"
            if request.told in ("full", "no memory") and count:
                return f"told {request.told}, but T{task} was stored"
            if request.told == "late":
                return f"an unanswered request was told late: T{task}"
        if len(state.kept) > len(state.asked) + 1:
            return "stored replies pile up"
        return None

    def restless(self, state: Producing) -> str | None:
        if any(not request.told for request in state.asked):
            return "a caller waits for ever"
        return None


def lowest(asked: tuple[Asked, ...]) -> int:
    """The lowest number still unanswered; the next number when all are answered."""
    return min((request.number for request in asked if not request.told), default=asked[-1].number + 1)


def tell(state: Producing, task: int, word: str) -> Producing:
    """The caller of `task` gets its answer."""
    request = state.asked[task]._replace(told=word)
    return state._replace(asked=(*state.asked[:task], request, *state.asked[task + 1 :]))


def reconnect(state: Producing) -> Producing:
    """A new connection; what the server had not read of the old one may still run, late."""
    asked = tuple(request if request.told else request._replace(resent=True) for request in state.asked)
    wire = tuple(Copy(task, request.number, lowest(asked)) for task, request in enumerate(asked) if not request.told)
    old_wires = tuple(sorted((*state.old_wires, state.wire))) if state.wire else state.old_wires
    return state._replace(asked=asked, wire=wire, replies=(), old_wires=old_wires, losses=state.losses - 1)
