"""Workflows: suspend a run until something happens, and send the event for which it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops.replies import Reply, expect, new_call, pairs, status_word, text
from worqr.stored_values import exact


class Wait(NamedTuple):
    """One thing for which a run waits.

    Attributes:
        key: the name of the wait in its job: 1 to 1,000 bytes of one line.
        kind: ``event``, ``sleep``, or ``children``: the ends of other jobs.
        name: of an event, 1 to 1,000 bytes of one line.
        about: for people: the JSON schema of the event. Of children: their keys, one a line.
        in_ms: the deadline, from the time on at which the server stores the wait.
        at_ms: the deadline in ms since 1970, in place of `in_ms`. Without any, the wait has none; a sleep needs one.
    """

    key: str
    kind: Literal["event", "sleep", "children"]
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
    """Reply of send_event: woke, stored, already, full, or none and the state of the job."""

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
    args = (worker, claim, int(progress), *packed)
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


def refuse_event(keys: QueueKeys, worker: str, claim: int, key: str) -> Command[str]:
    """Set the event aside that the wait `key` of a run has taken, so that the wait is open again: ok or lost."""
    return new_call("refuse_event", keys.base, (worker, claim, key), expect("ok", "lost"))


class NotedChild(NamedTuple):
    """Reply of note_child."""

    status: str
    after: int
    end: bytes


def note_child(keys: QueueKeys, worker: str, claim: int, key: str, base: str, id: str) -> Command[NotedChild]:
    raise NotImplementedError
