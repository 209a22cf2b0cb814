"""What travels to the server: one script call as data. Pure; `ops` builds these, the link sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from worqr.lua import Script

T_co = TypeVar("T_co", covariant=True)

Argument = bytes | str | int


@dataclass(frozen=True, slots=True, eq=False)
class Merge(Generic[T_co]):
    """How a call becomes one with others of its kind on the same base, which wait at the same time.

    Attributes:
        items: how much of one request's limit it takes.
        join: makes one call of many; calls with the same function may be joined.
        share: what this call's caller is answered when the joined call succeeded. Its error is everybody's.
        pick: where there is no fixed answer: takes it out of the joined call's value, from the place behind so many items.
    """

    items: int
    join: Callable[[Sequence[Call[Any]]], Call[Any]]
    share: T_co | None = None
    pick: Callable[[Any, int], T_co] | None = None


@dataclass(slots=True, eq=False)
class Call(Generic[T_co]):
    """One call of one script, checked and ready to be packed. Set once; not frozen, because that makes it twice as dear.

    Attributes:
        script: what runs.
        base: the stem all its keys share with their hash tag (``worqr:{Q1}`` or ``{worqr}``); numbers are counted per base.
        keys: the script's KEYS. A numbered call gets ``{base}:producer:{producer id}`` put in front by the link.
        args: the script's ARGV. A numbered call gets its number and the lowest unanswered number put in front by the link.
        read: turns the reply (an array whose first item is a word) into the value; raises a WorqrError for a refusal.
        numbered: carries (producer, number), so that a resend gets the stored reply instead of a second effect.
        size: bytes of payload among the arguments, about; for the link's limit on a batch.
        merge: set if it may be joined with others of as many `replicas` before it is first written.
        replicas: how many replicas must have what it wrote before it counts as answered. It must write, also when it is resent.
    """

    script: Script
    base: str
    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    read: Callable[[list[Any]], T_co]
    numbered: bool = False
    size: int = 0
    merge: Merge[T_co] | None = None
    replicas: int = 0
