"""One command of the mesh to the server, as data: a script and its arguments. Pure; `ops` makes them, the link sends them.

Also here: what all operations share to build a call, and to decode a reply, whose first item is a status word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from worqr.errors import WorqrBug
from worqr.lua import Script, script
from worqr.records import RemoteError
from worqr.stored_values import exact, whole

T_co = TypeVar("T_co", covariant=True)

Argument = bytes | str | int


class Merge(msgspec.Struct, Generic[T_co], frozen=True, eq=False):
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


class Command(msgspec.Struct, Generic[T_co], eq=False):
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


# What all operations share to build a call, and to decode a reply, whose first item is a status word.

T = TypeVar("T")
Reply = list[Any]

MAX_ITEMS: Final = 1000
"""Tasks or claims in one request."""
MAX_BYTES: Final = 8 * 1024 * 1024
"""Bytes of payload in one request or reply; a larger single task travels alone."""
MAX_SKIPPED: Final = 1000
"""References without a record that one script skips."""


def new_call(
    name: str,
    base: str,
    args: tuple[Argument, ...],
    read: Callable[[Reply], T],
    *,
    numbered: bool = False,
    size: int = 0,
) -> Command[T]:
    """Return a call of the script `name`; the other arguments are those of `Command`."""
    return Command(script(name), base, args, read, numbered, size)


def status_word(reply: Reply) -> str:
    """Return the status word of a reply.

    Raises:
        WorqrBug: the word is ``late``. Only a copy of a request receives it, and no caller waits for the reply to a copy. The
            ``late`` of start_tasks has another meaning, so that operation reads the word itself.
    """
    word = text(reply[0])
    if word == "late":
        raise WorqrBug("the server took a request for one that was given up or answered before; it did nothing")
    return word


def expect(*words: str) -> Callable[[Reply], str]:
    """Return a reader that returns the reply's status word, which must be one of `words`."""

    def read(reply: Reply) -> str:
        word = status_word(reply)
        if word not in words:
            raise WorqrBug(f"the server answered {word!r} where one of {', '.join(words)} was expected")
        return word

    return read


expect_ok: Callable[[Reply], str] = expect("ok")
"""Read the reply of a script that returns nothing but ok."""


def read_changed(reply: Reply) -> bool:
    """Read the reply of a script that says whether it has changed something."""
    return status_word(reply) == "ok" and int(reply[1]) == 1


def text(value: bytes | str) -> str:
    """Decode a text from the server for people. Invalid UTF-8 is replaced, so that the rest of the reply can be read.

    A name that is sent back to the server is decoded by `exact`.
    """
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def error_of(type: bytes | None, message: bytes | None) -> RemoteError | None:
    """Return the error of the last attempt from the fields of a record, or None."""
    return RemoteError(text(type), text(message or ""), "") if type else None


def waits_for_of(type: bytes | None, message: bytes | None) -> str:
    """Return what a task waits for after an attempt that was not counted: its message is stored without a type."""
    return text(message or "") if not type else ""


def texts(values: Iterable[bytes]) -> list[str]:
    """Decode names from the server; see `text`."""
    return [text(value) for value in values]


def names_of(values: Iterable[bytes]) -> list[str]:
    """Decode names that are sent back to the server; see `exact`."""
    return [exact(value) for value in values]


def wholes(values: Iterable[bytes | int]) -> list[int]:
    """Return the whole numbers among values of the server, such as claims; the others are left out."""
    return [found for value in values if (found := whole(value)) is not None]


def pairs(values: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Return the (name, value) pairs of a flat list."""
    return zip(values[::2], values[1::2], strict=True)


def in_chunks(
    items: Sequence[T], size_of: Callable[[T], int], *, most: int = MAX_ITEMS, most_bytes: int = MAX_BYTES
) -> Iterator[list[T]]:
    """Yield `items` in chunks that fit one request each, by their number and their bytes."""
    chunk: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if chunk and (len(chunk) == most or size + more > most_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += more
    if chunk:
        yield chunk
