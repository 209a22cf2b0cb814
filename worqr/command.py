"""One command of the mesh to the server, as data: a script and its arguments. Pure; `ops` makes them, the link sends them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from worqr.lua import Script

T_co = TypeVar("T_co", covariant=True)

Argument = bytes | str | int


@dataclass(frozen=True, slots=True, eq=False)
class Merge(Generic[T_co]):
    """How the link joins a call with other calls of its kind on the same base that wait at the same time.

    Attributes:
        items: how many items of the limit of a request it takes.
        join: makes one call of many. Only calls with the same `join` are joined.
        shared_result: the value for this call's caller if the joined call succeeds. If it fails, all callers get its error.
        pick: used if the value is not fixed: takes it from the joined call's value, after the given number of items.
    """

    items: int
    join: Callable[[Sequence[Command[Any]]], Command[Any]]
    shared_result: T_co | None = None
    pick: Callable[[Any, int], T_co] | None = None


@dataclass(slots=True, eq=False)
class Command(Generic[T_co]):
    """One call of one script, checked and ready to be packed. Set once; not frozen, because that would double its cost.

    Attributes:
        script: the script to run.
        base: the script's ``KEYS[1]``, with which all its keys begin, with their hash tag (``worqr:{Q1}`` or ``{worqr}``).
            Numbers count per base. In a cluster the link adds ``KEYS[2]``, a key that never exists (`worqr.link.session`).
        args: the script's ARGV. For a numbered call the link puts the producer's id, the call's number and the lowest unanswered
            number in front.
        read: turns the reply (an array whose first item is a status word) into the value; raises a WorqrError for a refusal.
        numbered: carries (producer, number), so that a resend gets the stored reply instead of a second effect.
        size: approximate bytes of payload among the arguments; for the link's limit on a batch.
        merge: set if the call may be joined with others of the same `replicas` before it is first written.
        replicas: how many replicas must have its writes before it counts as answered. Such a call must write, also when it is
            resent.
        not_after: the moment, on the clock of `worqr.link.boottime`, after which it is neither sent nor sent again.
    """

    script: Script
    base: str
    args: tuple[Argument, ...]
    read: Callable[[list[Any]], T_co]
    numbered: bool = False
    size: int = 0
    merge: Merge[T_co] | None = None
    replicas: int = 0
    not_after: float = math.inf

    def with_script(self, script: Script) -> Command[T_co]:
        """Return this call with another script, which takes the same arguments.

        It is not joined with other calls: the joined call would have the original script.
        """
        return replace(self, script=script, merge=None)

    def without_replicas(self) -> Command[T_co]:
        """Return this call as one that does not wait for replicas."""
        return replace(self, replicas=0)
