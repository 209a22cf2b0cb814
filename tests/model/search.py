"""Breadth-first search over the states of a small model, with the shortest way to any violation.

A model is a set of immutable states and the steps between them. Each step has an actor:

- `By.MESH`: the mesh takes it by itself, sooner or later (a script runs, a reply is read, a beat is due);
- `By.USER`: an application may take it or never take it (enqueue, a handler returns);
- `By.FAULT`: the environment's doing, bounded by budgets in the state (a crash, a lost reply, a late copy).

Three things are checked. *Invariants* hold in every state. *Rest*: a state in which the mesh has nothing left to do
must be a good one, for all behaviour of users and faults. *Coming to rest*: from every state the mesh's own steps can lead to
rest (no livelock). A task that waits for ever, a key that leaks and a claim that is never recovered are all bad states at rest.

No trio, no redis, no clock: time is the order of steps. What needs a duration (two looks, an expiry) is a rule in the
model that says which step cannot come before which.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Generic, TypeVar

State = TypeVar("State", bound=Hashable)

MOST_STATES = 500_000
"""A model that grows past this has lost a bound: an error, instead of an hour and a full memory."""


class By(Enum):
    """The actor of a step."""

    MESH = "mesh"
    USER = "user"
    FAULT = "fault"


class Model(ABC, Generic[State]):
    """One part of the protocol, correct or with one named mistake put in.

    Group attributes, set once: `moves` names every transition and its actor; `mistakes` names what can be put in,
    and how many steps at most show it; `least` is the number of states below which a search was vacuous.
    """

    moves: ClassVar[Mapping[str, By]]
    mistakes: ClassVar[Mapping[str, int]]
    least: ClassVar[int]

    def __init__(self, mistake: str | None = None) -> None:
        if mistake is not None and mistake not in self.mistakes:
            raise ValueError(f"no mistake {mistake!r} in {type(self).__name__}; there are {sorted(self.mistakes)}")
        self.mistake = mistake

    @abstractmethod
    def starts(self) -> Iterator[State]:
        """The first states, one per mixture of users and faults that is worth a search of its own."""

    @abstractmethod
    def steps(self, state: State) -> Iterator[tuple[str, str, State]]:
        """Every step from `state`: its name (a key of `moves`), what it did in words, the next state."""

    @abstractmethod
    def broken(self, state: State) -> str | None:
        """The violation in `state`, or None."""

    @abstractmethod
    def restless(self, state: State) -> str | None:
        """The reason why `state` is bad to rest in, or None."""


@dataclass(slots=True)
class Found:
    """The outcome of a search: `wrong` is None, or names the violation at the end of `trace`, the shortest way to it."""

    states: int = 0
    fired: Counter[str] = field(default_factory=Counter[str])
    wrong: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = [f"{number:3}. {words}" for number, words in enumerate(self.trace, 1)]
        return "\n".join([f"{self.states} states", *steps, f"  => {self.wrong or 'all is well'}"])


class _Graph(Generic[State]):
    """The states seen so far, numbered as they were found, each with the step that found it."""

    def __init__(self, starts: Iterator[State]) -> None:
        self.numbers: dict[State, int] = {}
        self.states: list[State] = []
        self.parents: list[tuple[int, str, str]] = []
        self.mesh_steps: list[tuple[int, int]] = []
        self.at_rest: list[int] = []
        for start in starts:
            self.add(start, -1, "", "")

    def add(self, state: State, parent: int, name: str, detail: str) -> int:
        """The number of `state`, which is new or known."""
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            if number >= MOST_STATES:
                raise RuntimeError(f"more than {MOST_STATES} states: which bound is missing?")
            self.states.append(state)
            self.parents.append((parent, name, detail))
        return number

    def trace(self, number: int) -> tuple[str, ...]:
        """The steps from the first state to this one, in words."""
        words: list[str] = []
        while number >= 0:
            number, name, detail = self.parents[number]
            if name:
                words.append(f"{name}: {detail}" if detail else name)
        return tuple(reversed(words))

    def never_rests(self) -> int | None:
        """The first state from which no steps of the mesh lead to rest, or None."""
        before: dict[int, list[int]] = {}
        for source, target in self.mesh_steps:
            before.setdefault(target, []).append(source)
        rests = bytearray(len(self.states))
        todo = deque(self.at_rest)
        for number in self.at_rest:
            rests[number] = 1
        while todo:
            for source in before.get(todo.popleft(), ()):
                if not rests[source]:
                    rests[source] = 1
                    todo.append(source)
        first = rests.find(0)
        return None if first < 0 else first


def search(model: Model[State]) -> Found:
    """Walks every state that `model` can reach, nearest first, up to the first that is wrong.

    Returns: the number of states, how often each transition fired, and the violation with its shortest trace, if any.
    Raises: KeyError for a step that `moves` does not name; RuntimeError past `MOST_STATES`.
    """
    found, graph = Found(), _Graph(model.starts())
    with _no_garbage():
        end = _walk(model, graph, found)
        if end is None:
            end = graph.never_rests()
            found.wrong = None if end is None else "the mesh never comes to rest from here"
    found.states = len(graph.states)
    found.trace = () if end is None else graph.trace(end)
    return found


@contextmanager
def _no_garbage() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: a search makes none, and looking for it costs a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _walk(model: Model[State], graph: _Graph[State], found: Found) -> int | None:
    """Expands states in the order they were found; the number of the first wrong one, or None."""
    number = 0
    while number < len(graph.states):
        state = graph.states[number]
        found.wrong = model.broken(state)
        if found.wrong is None and not _expand(model, graph, number, found):
            graph.at_rest.append(number)
            found.wrong = model.restless(state)
        if found.wrong is not None:
            return number
        number += 1
    return None


def _expand(model: Model[State], graph: _Graph[State], number: int, found: Found) -> bool:
    """Takes every step from one state; whether the mesh had one to take."""
    state, busy = graph.states[number], False
    for name, detail, target in model.steps(state):
        by = model.moves[name]
        if target == state:
            continue
        found.fired[name] += 1
        next_number = graph.add(target, number, name, detail)
        if by is By.MESH:
            busy = True
            graph.mesh_steps.append((number, next_number))
    return busy
