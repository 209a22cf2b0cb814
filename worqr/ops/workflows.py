"""Workflows: suspend a run until something happens, send the event for which it waits, and start the jobs whose ends it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from worqr.command import Argument, Command, Reply, expect, expect_ok, new_call, pairs, status_word, text
from worqr.keys import QueueKeys
from worqr.stored_values import exact


class Wait(NamedTuple):
    """One thing for which a run waits.

    Attributes:
        key: the name of the wait in its job: 1 to 1,000 bytes of one line.
        kind: ``event``, ``sleep``, ``children``: the ends of other jobs, or ``first``: of one of them, whose key is the value.
        name: of an event, 1 to 1,000 bytes of one line.
        about: for people: the JSON schema of the event. Of children: their keys, one a line.
        in_ms: the deadline, from the time on at which the server stores the wait.
        at_ms: the deadline in ms since 1970, in place of `in_ms`. Without any, the wait has none; a sleep needs one.
    """

    key: str
    kind: Literal["event", "sleep", "children", "first"]
    name: str = ""
    about: str = ""
    in_ms: int | None = None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """Reply of suspend_task: its status word; with ``ready``, the fields of the record that say how waits have ended."""

    status: str
    ends: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class Sent(NamedTuple):
    """Reply of send_event, woke, stored, already, full, and of end_wait; or none and the state of the job."""

    status: str
    state: str = ""


_encode = msgspec.msgpack.Encoder().encode


def _deadline(wait: Wait) -> str:
    if wait.at_ms is not None:
        return str(wait.at_ms)
    return "-" if wait.in_ms is None else f"+{wait.in_ms}"


def suspend_task(
    keys: QueueKeys, worker: str, claim: int, waits: Sequence[Wait], *, progress: bool = False
) -> Command[Suspended]:
    """End a claim until one of these has happened. With the status ``ready``, one has, and the worker keeps the claim.

    Args:
        keys: those of the queue.
        worker: the id of the worker.
        claim: the claim of the run.
        waits: up to MAX_ITEMS; they replace those of the suspension before.
        progress: the run has asked for all entries that it found in its record. If one of the waits is new, the counters of the
            job begin anew.
    """

    def read(reply: Reply) -> Suspended:
        return Suspended(read_word(reply), {exact(name): bytes(value) for name, value in pairs(reply[1:])})

    read_word = expect("ready", "suspended", "full", "cancelled", "dropped", "gone", "mine", "lost")
    packed = [_encode((wait.key, wait.kind, wait.name, wait.about, _deadline(wait))) for wait in waits]
    args: tuple[Argument, ...] = (worker, claim, int(progress), *packed)
    return new_call("suspend_task", keys.base, args, read, size=sum(map(len, packed)))


def send_event(
    keys: QueueKeys, id: str, name: str, value: bytes, *, number: int = 0, life: int = 0, again: bool = False
) -> Command[Sent]:
    """Store an event for a workflow that has not ended, and wake the workflow if it waits for it.

    Args:
        keys: those of the queue.
        id: of the job.
        name: of the event, 1 to 1,000 bytes of one line.
        value: its encoding (json, bytes or none), a space and the encoded value, at most 64 KiB.
        number: of the dispatch that is meant; 0: whichever job has the id.
        life: the life that is meant; 0: any.
        again: also if there is an event of this name that no wait has taken.
    """

    def read(reply: Reply) -> Sent:
        return Sent(status_word(reply), text(reply[1]) if len(reply) > 1 else "")

    args = (id, number, life, name, value, int(again))
    return new_call("send_event", keys.base, args, read, numbered=True, size=len(value))


def end_wait(keys: QueueKeys, id: str, key: str, *, number: int = 0, life: int = 0) -> Command[Sent]:
    """End the open wait `key` of a workflow now, as if its time were over: woke, ended, closed, children, or none and the state
    of the job. `number`, `life`: as `send_event`.
    """

    def read(reply: Reply) -> Sent:
        return Sent(status_word(reply), text(reply[1]) if len(reply) > 1 else "")

    return new_call("end_wait", keys.base, (id, number, life, key), read, numbered=True)


class Rewound(msgspec.Struct, frozen=True):
    """Reply of rewind_job: ok, active, unknown, unordered, taken, closing or none.

    Attributes:
        status: its status word.
        dropped: how many entries were dropped.
        cancelled: how many jobs among them had not ended, and are cancelled.
        keys: of the entries that there are, with ``unknown``; of the one whose place is not known, with ``unordered``.
        state: of the job, with ``none``.
    """

    status: str
    dropped: int = 0
    cancelled: int = 0
    keys: Sequence[str] = ()
    state: str = ""


def rewind_job(keys: QueueKeys, id: str, key: str, *, number: int = 0, life: int = 0) -> Command[Rewound]:
    """Drop the entry `key` of a workflow that does not run, and all later ones, and put it into the queue. `number`, `life`: as
    `send_event`.
    """

    def read(reply: Reply) -> Rewound:
        match status_word(reply):
            case "ok":
                return Rewound("ok", int(reply[1]), int(reply[2]))
            case "none":
                return Rewound("none", state=text(reply[1]))
            case word:
                return Rewound(word, keys=tuple(map(text, reply[1:])))

    return new_call("rewind_job", keys.base, (id, number, life, key), read, numbered=True)


def refuse_event(keys: QueueKeys, worker: str, claim: int, key: str) -> Command[str]:
    """Set the event aside that the wait `key` of a run has taken, so that the wait is open again: ok or lost."""
    return new_call("refuse_event", keys.base, (worker, claim, key), expect("ok", "lost"))


class Child(NamedTuple):
    """A job that a run is about to start, as note_children takes it.

    Attributes:
        key: the name of the child in the job of the run: 1 to 1,000 bytes of one line.
        base: that of the child's queue.
        id: of the child, 1 to 200 bytes.
    """

    key: str
    base: str
    id: str


class NotedChild(NamedTuple):
    """`after` is for the option `parent` of its dispatch, `base` that of the queue, or the shard, in which it was noted first.
    `end`: the field ``end:KEY``, if it has ended.
    """

    after: int
    base: str
    end: bytes | None


@dataclass(frozen=True, slots=True)
class NotedChildren:
    """Reply of note_children: ok, full or lost; with ``ok``, what is known of each child."""

    status: str
    children: Sequence[NotedChild] = ()


def note_children(keys: QueueKeys, worker: str, claim: int, children: Sequence[Child]) -> Command[NotedChildren]:
    """Note up to MAX_ITEMS children in the record of a run, before they are dispatched. With ``full``, none is noted."""

    def read(reply: Reply) -> NotedChildren:
        word = read_word(reply)
        return NotedChildren(
            word, [NotedChild(int(after), base.decode("utf-8", "replace"), end) for after, base, end in reply[1:]]
        )

    read_word = expect("ok", "full", "lost")
    args: tuple[Argument, ...] = (worker, claim, *[part for child in children for part in child])
    return new_call("note_children", keys.base, args, read)


def store_end(
    keys: QueueKeys, source: str, id: str, life: str, key: str, number: int, outcome: str, value: bytes
) -> Command[str]:
    """Store in the record of a parent how its child has ended.

    Args:
        keys: those of the parent's queue.
        source: the base of the child's queue.
        id: of the parent.
        life: of the parent.
        key: of the child.
        number: of the end.
        outcome: finished, failed, cancelled, large or gone.
        value: what the outcome brings.
    """
    args = (source, id, life, key, number, outcome, value)
    return new_call("store_end", keys.base, args, expect_ok, size=len(value))


def cancel_child(keys: QueueKeys, source: str, parent: str, life: str, id: str, reason: str) -> Command[str]:
    """Cancel a child of a workflow that was cancelled; `source`: the base of the parent's queue, `parent`: its id."""
    return new_call("cancel_child", keys.base, (source, parent, life, id, reason), expect_ok)


def look_for_child(keys: QueueKeys, source: str, parent: str, life: str, key: str, after: int, id: str) -> Command[str]:
    """Tell a parent once more how its child has ended, or that the child was lost; `source`: the base of the parent's queue."""
    return new_call("look_for_child", keys.base, (source, parent, life, key, after, id), expect_ok)
