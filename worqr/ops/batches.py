"""Batches: the record at the home queue, the parts in the queues of the members, and the messages between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

import msgspec

from worqr.command import Argument, Command, Reply, expect, expect_ok, new_call, pairs, status_word, text
from worqr.keys import QueueKeys
from worqr.stored_values import exact, whole

MAX_PARTS: Final = 1000
"""Queues, or shards of queues, that a batch may have members in."""
_COUNTERS: Final = 6
"""Counters of a part: see `PartRow`."""
_CHECKS_AT_ONCE: Final = 20
"""Batches that one request of the leader looks at."""
MESSAGES_AT_ONCE: Final = 100
_CANCEL_MEMBERS: Final = 100
"""Members that one script cancels, about: each takes the server some 20 us."""
_UNOPENED_MS: Final = 7 * 86_400_000
"""ms for which a queue holds the follow-ups of a batch whose home has not said yet that it was opened."""


class OpenedPart(msgspec.Struct, frozen=True):
    """Reply of open_part. `status` is ok, cancelled, ended, unknown or full. `options` is the option `batch` of a dispatch."""

    status: str
    reason: str = ""
    options: Mapping[str, object] | None = None


class PartRow(msgspec.Struct, frozen=True):
    """What the home knows of a part. `counts`: members added, finished, failed, cancelled, lost, failures."""

    base: str
    version: int
    open: bool
    counts: tuple[int, ...]


class BatchRow(msgspec.Struct, frozen=True):
    """What is stored about a batch: its id, the fields of its record, and its parts."""

    id: str
    facts: Mapping[str, str]
    parts: tuple[PartRow, ...]


class BatchCheck(msgspec.Struct, frozen=True):
    """A batch whose open parts are to be told that it is sealed or, with a `reason`, that it was cancelled."""

    id: str
    token: str
    reason: str | None
    keep: str
    parts: tuple[tuple[str, int], ...]


class Sealed(msgspec.Struct, frozen=True):
    """Reply of seal_batch: the state then, the `keep` of the batch, and the parts that are to be told, with their versions."""

    state: str
    keep: str
    parts: tuple[tuple[str, int], ...]


class OutboxMessage(msgspec.Struct, frozen=True):
    """A message of an outbox: its topic, the bytes that are stored, and what it says: report, cancel, release, keep, ended,
    cancel_child or look, with the parts that take_outbox documents.
    """

    topic: bytes
    message: bytes
    kind: str
    parts: Sequence[Any]


def _counts(value: bytes) -> tuple[int, ...]:
    """Return the counters of a part. One that is missing or cannot be read is zero."""
    found = [whole(number, 0) for number in value.split()[:_COUNTERS]]
    return tuple(found + [0] * (_COUNTERS - len(found)))


def _row(entry: Sequence[Any]) -> BatchRow:
    name, facts, flat = entry
    parts = tuple(
        PartRow(exact(flat[i]), whole(flat[i + 1], 0), bool(flat[i + 2]), _counts(flat[i + 3]))
        for i in range(0, len(flat), 4)
    )
    return BatchRow(exact(name), {text(field): exact(value) for field, value in pairs(facts)}, parts)


def _outbox_message(topic: bytes, message: bytes, stored: object = None) -> OutboxMessage:
    """Return a message. One that another program wrote may have anything in it, and has no kind then."""
    found = cast("list[object]", stored) if isinstance(stored, list) else []
    if not found or not all(isinstance(part, bytes | int) for part in found):
        return OutboxMessage(topic, message, "", ())
    kind, *parts = (part if isinstance(part, bytes) else b"%d" % part for part in cast("list[bytes | int]", found))
    return OutboxMessage(topic, message, text(kind), parts)


def _versions(flat: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((exact(base), whole(version, 0)) for base, version in pairs(flat))


def open_batch(
    keys: QueueKeys,
    id: str,
    token: str,
    *,
    open_for_ms: int,
    keep_ms: int,
    parent: Mapping[str, object] | None = None,
    facts: Mapping[str, bytes | str],
) -> Command[Literal["ok", "exists", "closed"]]:
    """Store the record of a batch. `parent`: the option `batch` of the batch that it is a member of. `facts` only has the base of
    another queue for a follow-up there, see `hold_follow_ups`.
    """

    def read(reply: Reply) -> Any:
        return expect("ok", "exists", "closed")(reply)

    flat = tuple(part for fact in facts.items() for part in fact)
    outer = b"" if parent is None else msgspec.msgpack.encode(parent)
    args: tuple[Argument, ...] = (id, token, open_for_ms, keep_ms, outer, *flat)
    return new_call("open_batch", keys.base, args, read, numbered=True, size=sum(len(value) for value in flat))


def open_part(keys: QueueKeys, id: str, token: str, part: str, *, inside: bool = False) -> Command[OpenedPart]:
    """Open the part of the queue with the base `part`, so that jobs can be added there. An empty `token` is that of any batch.

    `inside`: a running job of the batch adds the jobs, which it may do after the seal.
    """

    def read(reply: Reply) -> OpenedPart:
        word = status_word(reply)
        if word != "ok":
            return OpenedPart(word, text(reply[1]) if len(reply) > 1 else "")
        _, version, sealed, found, keep, on_failed = reply
        options: dict[str, object] = {
            "token": text(found),
            "home": keys.base,
            "id": id,
            "number": whole(version, 0),
            "keep": text(keep),
            **({"sealed": True} if sealed else {}),
            **({"on_failed": text(on_failed)} if on_failed else {}),
        }
        return OpenedPart(word, options=options)

    return new_call("open_part", keys.base, (id, token, part, MAX_PARTS, int(inside)), read)


def seal_batch(keys: QueueKeys, id: str, token: str) -> Command[Sealed | None]:
    """Note that nothing more is added to a batch from outside. None: it is unknown."""

    def read(reply: Reply) -> Sealed | None:
        if status_word(reply) == "unknown":
            return None
        return Sealed(text(reply[1]), text(reply[2]), _versions(reply[3:]))

    return new_call("seal_batch", keys.base, (id, token), read)


def report_part(
    keys: QueueKeys, id: str, token: str, part: str, version: int, *, closed: bool, counts: str
) -> Command[str]:
    """Report the state of a part to the home of its batch. `counts`: as in `PartRow`, with spaces."""
    args = (id, token, part, version, int(closed), counts)
    return new_call("report_part", keys.base, args, expect_ok)


def cancel_batch(keys: QueueKeys, id: str, token: str, reason: str) -> Command[str]:
    """Cancel a batch: ok, ended or unknown. An empty `token` is that of any batch."""
    return new_call("cancel_batch", keys.base, (id, token, reason), expect("ok", "ended", "unknown"))


def check_batches(keys: QueueKeys) -> Command[tuple[bool, list[BatchCheck]]]:
    """Do what the leader does for batches whose check is due; return whether more are due, and which parts are to be told."""

    def read(reply: Reply) -> tuple[bool, list[BatchCheck]]:
        found = [
            BatchCheck(
                exact(batch), exact(token), None if reason is None else exact(reason), text(keep), _versions(parts)
            )
            for batch, token, reason, keep, *parts in reply[1:]
        ]
        return status_word(reply) == "more", found

    return new_call("check_batches", keys.base, (_CHECKS_AT_ONCE,), read)


def read_batch(keys: QueueKeys, id: str) -> Command[BatchRow | None]:
    """Return what is stored about a batch; None: it is unknown."""

    def read(reply: Reply) -> BatchRow | None:
        return None if status_word(reply) == "unknown" else _row(reply[1:])

    return new_call("read_batch", keys.base, (id,), read)


def list_batches(keys: QueueKeys, first: int = 0, limit: int = 100) -> Command[tuple[int, list[BatchRow]]]:
    """Return the number of batches at home in a queue, and `limit` of them from the rank `first` on."""

    def read(reply: Reply) -> tuple[int, list[BatchRow]]:
        status_word(reply)
        return int(reply[1]), [_row(entry) for entry in reply[2:]]

    return new_call("list_batches", keys.base, (first, limit), read)


def close_part(keys: QueueKeys, token: str, version: int, home: str, id: str, keep: str) -> Command[str]:
    """Tell a part that nothing more is added to its batch from outside."""
    return new_call("close_part", keys.base, (token, version, home, id, keep), expect_ok)


def cancel_part(
    keys: QueueKeys, token: str, version: int, home: str, id: str, keep: str, reason: str, cursor: str = "0"
) -> Command[str | None]:
    """Cancel members of a part; return the cursor for the next call, None if all were cancelled."""

    def read(reply: Reply) -> str | None:
        return text(reply[1]) if status_word(reply) == "more" else None

    args = (token, version, home, id, keep, reason, cursor, _CANCEL_MEMBERS)
    return new_call("cancel_part", keys.base, args, read)


def read_part(keys: QueueKeys, token: str) -> Command[tuple[int, Mapping[str, str]]]:
    """Return how many members of a batch have not ended in a queue, and the fields of the part."""

    def read(reply: Reply) -> tuple[int, Mapping[str, str]]:
        status_word(reply)
        return int(reply[1]), {text(name): text(value) for name, value in pairs(reply[2:])}

    return new_call("read_part", keys.base, (token,), read)


def hold_follow_ups(keys: QueueKeys, token: str, home: str, id: str, facts: Mapping[str, bytes | str]) -> Command[str]:
    """Store follow-ups of a batch in their queue, which is not the `home` of the batch, before the batch is opened."""
    flat = tuple(part for fact in facts.items() for part in fact)
    size = sum(len(value) for value in flat)
    return new_call("hold_follow_ups", keys.base, (token, home, id, _UNOPENED_MS, *flat), expect_ok, size=size)


def keep_follow_ups(keys: QueueKeys, token: str, kept_for_ms: int) -> Command[str]:
    """Tell a queue for how many ms it is to hold the follow-ups of a batch. 0: until the next such request."""
    return new_call("keep_follow_ups", keys.base, (token, kept_for_ms), expect_ok)


def put_follow_up(keys: QueueKeys, token: str, kind: str, ending: int, facts: bytes) -> Command[str]:
    """Enqueue the follow-up that this queue holds for the ending with this number, if it is not enqueued yet: ok, stored, or
    unknown.
    """
    args = (token, kind, ending, facts)
    return new_call("put_follow_up", keys.base, args, expect("ok", "stored", "unknown"))


def take_outbox(keys: QueueKeys, limit: int = MESSAGES_AT_ONCE) -> Command[list[OutboxMessage]]:
    """Return messages of a queue for other queues, about `limit`."""

    def read(reply: Reply) -> list[OutboxMessage]:
        status_word(reply)
        return [_outbox_message(*entry) for entry in reply[1:]]

    return new_call("take_outbox", keys.base, (limit,), read)


def drop_outbox(keys: QueueKeys, delivered: Sequence[OutboxMessage]) -> Command[str]:
    """Delete delivered messages, unless their topics have newer ones."""
    flat = tuple(part for each in delivered for part in (each.topic, each.message))
    return new_call("drop_outbox", keys.base, flat, expect_ok)
