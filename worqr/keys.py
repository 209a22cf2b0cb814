"""Every key and channel of a mesh: name, type, lifetime, also of shards. Nothing else in Python spells a key.

All keys of a queue share the hash tag ``{queue}``, all registry keys the tag ``{prefix}``. So on a Redis Cluster each script
touches one slot. Names are never parsed back out of keys. The Lua scripts build the same names from the queue's base;
``tests/test_keys.py`` checks that both sides agree.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final

import msgspec

from worqr.errors import UsageError
from worqr.stored_values import as_bytes
from worqr.validation import check_between

# The keys of the lanes of a queue: name, type, lifetime.
#
# `worqr/lua/lanes.lua` says what is in them. All but the rules are deleted when no lane has a task or a
# claim.


class LaneKeys(msgspec.Struct, frozen=True):
    """The keys of the lanes of `queue`."""

    queue: QueueKeys

    @property
    def base(self) -> str:
        """HASH: the epoch, the number of references in lanes, and the state of the turns."""
        return f"{self.queue.base}:lanes"

    @property
    def ring(self) -> str:
        """ZSET of the lanes of which a task may start, by turn."""
        return f"{self.base}:ring"

    @property
    def held(self) -> str:
        """ZSET of the lanes with tasks of which none may start, by turn."""
        return f"{self.base}:held"

    @property
    def idle(self) -> str:
        """ZSET of lanes without tasks, by the turn that is remembered of them."""
        return f"{self.base}:idle"

    @property
    def names(self) -> str:
        """ZSET of the lanes with tasks, all with the score 0, so by name."""
        return f"{self.base}:names"

    @property
    def opens(self) -> str:
        """ZSET of lanes by the time in ms at which they may start tasks again, if time alone decides it."""
        return f"{self.base}:opens"

    @property
    def claims(self) -> str:
        """HASH: claim -> its lane; also a colon and the id of each suspect that waits: it has its place in the lane already."""
        return f"{self.base}:claims"

    @property
    def running(self) -> str:
        """HASH: lane -> how many of `claims` are of it."""
        return f"{self.base}:running"

    @property
    def rules(self) -> str:
        """HASH: what workers declare, and what an operator has set; the latter stays until it is cleared."""
        return f"{self.base}:rules"

    @property
    def trash(self) -> str:
        """ZSET of the lanes of a deleted queue that are still to be purged."""
        return f"{self.queue.trash}:lanes"

    def tasks(self, lane: str, epoch: int = 0) -> str:
        """LIST: the references of a lane. Each clearing of the queue begins a new epoch."""
        return f"{self.queue.base}:lane:{epoch}:{lane}"

    def starts(self, period: str, lane: str) -> str:
        """LIST: the starts of a lane in the last `period` ms, as `QueueKeys.starts`."""
        return f"{self.queue.starts(period)}:{lane}"


# The keys of batches: name, type, lifetime.
#
# `worqr/lua/batches.lua` says what is in them.


class BatchKeys(msgspec.Struct, frozen=True):
    """The keys of the batches whose home is `queue`, of its parts of batches, and its outbox."""

    queue: QueueKeys

    @property
    def batches(self) -> str:
        """ZSET of the ids of batches by the time in ms at which the leader looks at them next, and of ended ones by that at which
        they are forgotten.
        """
        return f"{self.queue.base}:batches"

    @property
    def outbox(self) -> str:
        """HASH: topic -> a message for another queue, as msgpack, until it is delivered."""
        return f"{self.queue.base}:outbox"

    def batch(self, id: str) -> str:
        """HASH: the record of a batch, until its `keep` after its end. Also the channel for its changes."""
        return f"{self.queue.base}:batch:{id}"

    def parts(self, id: str) -> str:
        """HASH: the base of a queue -> version, state and counters of its part of a batch, as the home knows them."""
        return f"{self.batch(id)}:parts"

    def part(self, token: str) -> str:
        """HASH: what this queue knows of a batch; expires a day after the `keep` of the batch, counted from its last member."""
        return f"{self.queue.base}:part:{token}"

    def members(self, token: str) -> str:
        """SET of the ids of the members in this queue that have not ended for good."""
        return f"{self.part(token)}:members"

    def follow_ups(self, token: str) -> str:
        """HASH: the follow-ups that this queue holds for a batch of another home. Expires after a week if that is not opened,
        and a day after the home has forgotten it.
        """
        return f"{self.part(token)}:follow_ups"


def keys_at(prefix: str, base: str) -> QueueKeys:
    """Return the keys of the queue or shard whose base this is."""
    name = base[len(prefix) + 1 :]
    return QueueKeys.of(prefix, name[1:-1] if name.endswith("}") else name)


# The key and the channel of producers that wait for room in a queue.
#
# `worqr/lua/queue.lua` says what is in them.


class RoomKeys(msgspec.Struct, frozen=True):
    """The key and the channel of the producers that wait for room in `queue`."""

    queue: QueueKeys

    @property
    def waiters(self) -> str:
        """HASH: the name of a call that waits -> what it waits for; expires 10 s after the last of them."""
        return f"{self.queue.base}:waiters"

    def channel(self, name: str) -> str:
        """Channel: the number of a call of one program that has room now."""
        return f"{self.queue.base}:room:{name}"


# The keys of a named limit.
#
# `worqr/lua/limits.lua` says what is in them.


class LimitKeys(msgspec.Struct, frozen=True):
    """The keys and the channel of the limit `name`, in the slot of the queue of that name. All but the base expire in a minute,
    or after the period.
    """

    prefix: str
    name: str

    @property
    def base(self) -> str:
        """HASH: its limits as text, until 30 days after the last permit."""
        return f"{self.prefix}:{{{self.name}}}-limit"

    @property
    def held(self) -> str:
        """ZSET of the permits that are held, by the end of their lease in ms."""
        return f"{self.base}:held"

    @property
    def permits(self) -> str:
        """HASH: permit -> its cost, then the period and the moment of its start for each rate; or ~ and how many callers wait."""
        return f"{self.base}:permits"

    @property
    def waiting(self) -> str:
        """ZSET of the permits that callers wait for, by the time in ms until which that is known."""
        return f"{self.base}:waiting"

    @property
    def turn(self) -> str:
        """STRING: the permit that is granted next."""
        return f"{self.base}:turn"

    @property
    def free(self) -> str:
        """Channel: a permit was given back."""
        return f"{self.base}:free"

    def moments(self, period: str) -> str:
        """LIST: the moments in ms at which permits were started in the last `period` ms, the newest first."""
        return f"{self.base}:moments:{period}"

    def costs(self, period: str) -> str:
        """HASH: moment -> the cost of what was started at it, and their `total`."""
        return f"{self.base}:costs:{period}"


MAX_NAME: Final = 200

"""Bytes of UTF-8 in a queue name, a prefix or a worker label."""

_FAILURES: Final = "-fail"

NONEXISTENT: Final = ":never"

"""Appended to a base: a key that is never written. `link.wire_form` documents its purpose."""

PUBLISH: Final = "worqr.publish"

"""The function that sends an event to queues that have not taken it yet."""

MARKER: Final = b"\x00worqr\x00"

"""A task item that begins so is a reference to a job; the id follows."""


def check_name(name: object, what: str = "queue name") -> str:
    """Return `name` if it is valid in a key.

    Raises:
        UsageError: not a string, empty, over 200 bytes of UTF-8, or with a brace, a control character or a lone surrogate.
    """
    if not isinstance(name, str):
        raise UsageError(f"{what} must be a str, not {type(name).__name__}: {name!r}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} {name!r} is not valid Unicode: {error.reason} at position {error.start}") from None
    if not 1 <= size <= MAX_NAME:
        raise UsageError(f"{what} must have 1 to {MAX_NAME} bytes of UTF-8, this one has {size}: {name[:60]!r}")
    for character in name:
        if character in "{}" or ord(character) < 32 or 127 <= ord(character) < 160:
            raise UsageError(f"{what} {name!r} contains {character!r}: braces and control characters are not allowed")
    return name


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys and channels of one queue.

    `failures`: the keys of the failure queue of `queue`, which is in the same slot. `tag`: the keys of one of its further shards,
    each a list in a slot of its own. `shards_of` makes the shards, and `shard_of` finds that of an id.

    Attributes:
        name: in the registry: the queue's name, or ``{Q1}-fail``, ``{Q1~tag}-shard``, ``{Q1~tag}-shard-fail``, which are
            invalid as names of queues.
        base: LIST: the waiting task items, and the prefix of all other keys. Also the channel for foreign producers, resume and
            delete.
    """

    prefix: str
    queue: str
    failures: bool = False
    tag: str = ""
    name: str = field(init=False, repr=False, compare=False)
    base: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        braced = f"{{{self.queue}~{self.tag}}}-shard" if self.tag else f"{{{self.queue}}}"
        name = f"{braced}{_FAILURES}" if self.failures else braced
        object.__setattr__(self, "name", name if self.failures or self.tag else self.queue)
        object.__setattr__(self, "base", f"{self.prefix}:{name}")

    @classmethod
    def of(cls, prefix: str, name: str) -> QueueKeys:
        """Return the keys of the queue, or of the shard, that has this `name` in the registry."""
        inner, brace, kind = name[1:].rpartition("}")
        if name.startswith("{") and brace:
            failures = kind.endswith(_FAILURES)
            queue, tilde, tag = inner.rpartition("~")
            match kind.removesuffix(_FAILURES):
                case "" if failures:
                    return cls(prefix, inner, failures)
                case "-shard" if tilde:
                    return cls(prefix, queue, failures, tag)
                case _:
                    pass
        return cls(prefix, name)

    @classmethod
    def of_base(cls, prefix: str, base: str) -> QueueKeys | None:
        """Return the keys of the queue, or of the shard, that has this `base`; None if it is no base under this prefix."""
        name = base.removeprefix(f"{prefix}:")
        keys = cls.of(prefix, name[1:-1] if name.endswith("}") else name)
        return keys if keys.base == base else None

    @property
    def display_name(self) -> str:
        """The queue's name for people: without the shard."""
        return f"{{{self.queue}}}{_FAILURES}" if self.failures else self.queue

    @property
    def id_suffix(self) -> str:
        """The suffix of ids that are generated in this shard, which names it: ``~tag``; empty in the first shard."""
        return f"~{self.tag}" if self.tag else ""

    @property
    def workers(self) -> str:
        """HASH, the admitted workers: worker id -> number, first claim, count and suspect of its last start request, or
        ``leaving``.
        """
        return f"{self.base}:workers"

    @property
    def hungry(self) -> str:
        """SET of worker ids to wake."""
        return f"{self.base}:hungry"

    @property
    def suspects(self) -> str:
        """LIST of suspects: tasks one stall away from the dead-letter queue."""
        return f"{self.base}:suspects"

    @property
    def cancelling(self) -> str:
        """SET of claims whose cancellation was requested."""
        return f"{self.base}:cancelling"

    @property
    def counts(self) -> str:
        """HASH of counters, expires 15 to 30 days after the last claim or dispatch."""
        return f"{self.base}:counts"

    @property
    def runs(self) -> str:
        """HASH of counters of runs (`worqr.history_records`), expires 15 to 30 days after the last run."""
        return f"{self.base}:runs"

    @property
    def recent(self) -> str:
        """LIST of the runs that ended last (`worqr.records`), the last one first, expires a day after it; only with
        ``serve(recent=...)``.
        """
        return f"{self.base}:recent"

    @property
    def history(self) -> str:
        """STRING: a ring of records, one for each of the last 480 minutes (`worqr.history_records`); expires 7 to 8 days after
        the last one.
        """
        return f"{self.base}:history"

    @property
    def history10(self) -> str:
        """STRING: the same, with one record for each ten minutes of the last three days."""
        return f"{self.base}:history10"

    @property
    def paused(self) -> str:
        """STRING: why the queue is paused; expires when a pause ends by itself."""
        return f"{self.base}:paused"

    @property
    def limits(self) -> str:
        """HASH: what may start (`worqr.limits`): `declared` by the workers, and the `override` of an operator."""
        return f"{self.base}:limits"

    @property
    def limited(self) -> str:
        """SET of the claims that count against the concurrency limit, if there is one."""
        return f"{self.base}:limited"

    def starts(self, period: str) -> str:
        """LIST: the starts of the last `period` ms: a moment and a total in each entry, the newest first; expires after it."""
        return f"{self.base}:starts:{period}"

    @property
    def failed(self) -> str:
        """ZSET of the claims of failed tasks, by time in ms; capped."""
        return f"{self.base}:failed"

    @property
    def undecodable(self) -> str:
        """ZSET of the claims of undecodable tasks, by time in ms."""
        return f"{self.base}:broken"

    @property
    def result_ttls(self) -> str:
        """ZSET of the ids of workers that keep results, by the ms for which they keep them."""
        return f"{self.base}:result_ttls"

    @property
    def trash(self) -> str:
        """LIST: items of a deleted queue that are still to be purged."""
        return f"{self.base}:trash"

    @property
    def trash_suspects(self) -> str:
        """LIST: suspects of a deleted queue that are still to be purged."""
        return f"{self.base}:trash:suspects"

    @property
    def trash_due(self) -> str:
        """ZSET: due jobs of a deleted queue that are still to be purged."""
        return f"{self.base}:trash:due"

    @property
    def trash_suspended(self) -> str:
        """ZSET: suspended jobs of a deleted queue that are still to be purged."""
        return f"{self.base}:trash:suspended"

    @property
    def trash_blocked(self) -> str:
        """SET: blocked jobs of a deleted queue that are still to be purged."""
        return f"{self.base}:trash:blocked"

    @property
    def blocked(self) -> str:
        """SET of the ids of jobs that wait because the same id runs."""
        return f"{self.base}:blocked"

    @property
    def dead_letter_index(self) -> str:
        """HASH: job id -> the claim under which it last failed."""
        return f"{self.base}:aside"

    @property
    def due(self) -> str:
        """ZSET of job ids by due time in ms."""
        return f"{self.base}:due"

    @property
    def suspended(self) -> str:
        """ZSET of the ids of suspended jobs by the first deadline of their waits in ms; without one, the last moment of 9999."""
        return f"{self.base}:suspended"

    @property
    def fired(self) -> str:
        """HASH: schedule -> its last firing on this queue, and its outcome; expires a week after the last of them."""
        return f"{self.base}:fired"

    @property
    def outcomes(self) -> str:
        """HASH: schedule -> how its last run ended; until the schedule is deleted, or 400 days after the last end."""
        return f"{self.base}:outcomes"

    @property
    def schedules(self) -> str:
        """HASH: schedule -> the number and the call of each that a program has stored; until it is deleted or ends."""
        return f"{self.base}:schedules"

    @property
    def cancel_channel(self) -> str:
        """Channel: a claim whose cancellation was requested."""
        return f"{self.base}_cancel"

    @property
    def cancelled_channel(self) -> str:
        """Channel: a claim that was settled as cancelled (the acknowledgement)."""
        return f"{self.base}_cancelled"

    @property
    def events_channel(self) -> str:
        """Channel: ``counter n``, published only while a client listens."""
        return f"{self.base}:events"

    @property
    def event_ids_channel(self) -> str:
        """Channel: ``counter n`` and then one id a line, right before that event, if some of its tasks have an id."""
        return f"{self.base}:event_ids"

    @property
    def event_ends_channel(self) -> str:
        """Channel: ``counter n`` and then how the first 100 of its runs ended, right before that event, if a client listens."""
        return f"{self.base}:event_ends"

    def claims(self, worker: str) -> str:
        """SET of the claims that `worker` holds."""
        return f"{self.base}:claims:{worker}"

    def leaving(self, worker: str) -> str:
        """LIST: the claims of `worker` in their old order, while they are given back in several steps."""
        return f"{self.base}:leaving:{worker}"

    def policy(self, worker: str) -> str:
        """HASH: the options of `worker`'s handler, for the recovery of its claims."""
        return f"{self.base}:policy:{worker}"

    def claim(self, claim: int) -> str:
        """LIST of one: the item under `claim`."""
        return f"{self.base}:claim:{claim}"

    def job(self, id: str) -> str:
        """HASH: the record of a job that does not run. Also the channel for its changes."""
        return f"{self.base}:job:{id}"

    def result(self, id: str) -> str:
        """HASH: how a job ended, and its dispatches; expires after its `result_ttl`."""
        return f"{self.base}:result:{id}"

    def older_result(self, id: str) -> str:
        """HASH: the previous result, for a caller that is about to read it; its expiry is unchanged."""
        return f"{self.base}:older_result:{id}"

    def taken(self, id: str) -> str:
        """STRING: the id is reserved (`unique_for`); expires."""
        return f"{self.base}:taken:{id}"

    def sent(self, row: str) -> str:
        """STRING: the job of a row of an outbox; expires a week after it was sent, ten minutes after the row was deleted."""
        return f"{self.base}:sent:{row}"

    def active(self, id: str) -> str:
        """HASH: the record of a claimed job."""
        return f"{self.base}:active:{id}"

    def twins(self, digest: str) -> str:
        """SET: ids of raw tasks with this payload (SHA-1, hex) that became jobs."""
        return f"{self.base}:twins:{digest}"

    def ended(self, id: str) -> str:
        """STRING: how a child of a workflow ended, as the message that tells its parent (msgpack); expires after an hour, or 30
        days if the child was put back.
        """
        return f"{self.base}:ended:{id}"

    def dead_letter(self, claim: int) -> str:
        """HASH: the dead-letter record of a task, by its last claim."""
        return f"{self.base}:aside:{claim}"

    @property
    def kept(self) -> str:
        """ZSET: the number and the size of each kept job, by the time of its end in ms; expires with the longest `keep`."""
        return f"{self.base}:done"

    @property
    def kept_firings(self) -> str:
        """ZSET: likewise, of the last 20 runs of schedules that are kept without `keep`; expires 400 days after the last end."""
        return f"{self.base}:done_fired"

    @property
    def kept_total(self) -> str:
        """HASH: the `bytes` that kept jobs take; expires likewise."""
        return f"{self.base}:done_total"

    def kept_job(self, number: int) -> str:
        """STRING: a job that has ended and is kept, by the number of the dispatch that created it; expires."""
        return f"{self.base}:done:{number}"

    def kept_id(self, id: str) -> str:
        """STRING: the number of the newest kept job with this id; expires with it."""
        return f"{self.base}:done_id:{id}"

    def tagged(self, name: str) -> str:
        """ZSET: the number and the id of each job with this tag, by number; expires 30 days after the last dispatch with it, or
        with the longest `keep`.
        """
        return f"{self.base}:tag:{name}"

    @property
    def tag_marks(self) -> str:
        """HASH: the tags that are being cancelled; expires 30 days after the last of them."""
        return f"{self.base}:tag_marks"

    def wake_channel(self, worker: str) -> str:
        """Channel: a wake-up for one worker."""
        return f"{self.base}:wake:{worker}"


class RegistryKeys(msgspec.Struct, frozen=True):
    """The keys of the mesh as a whole, all in the slot of ``{prefix}``."""

    prefix: str

    @property
    def base(self) -> str:
        """The stem of all registry keys."""
        return f"{{{self.prefix}}}"

    @property
    def registered(self) -> str:
        """SET of registered worker ids."""
        return f"{self.base}:Workers"

    @property
    def dying(self) -> str:
        """SET of worker ids declared dead whose tasks are being given back."""
        return f"{self.base}:Dying"

    @property
    def queues(self) -> str:
        """ZSET of queue names by the time in ms at which they were last noted, expires 30 days after the last note."""
        return f"{self.base}:queues"

    @property
    def waiting(self) -> str:
        """SET of queues with waiting tasks as the last scan saw them, expires in 10 s."""
        return f"{self.base}:waiting"

    @property
    def snapshot(self) -> str:
        """STRING: the snapshot of the mesh as the leader saw it last, as msgpack; expires in 15 s."""
        return f"{self.base}:snapshot"

    @property
    def watched(self) -> str:
        """STRING: a program reads snapshots, so the leader writes them; expires in 30 s."""
        return f"{self.base}:watched"

    @property
    def histories(self) -> str:
        """ZSET of the queues that have a history, by the minute in which it was written last; expires 8 days after that."""
        return f"{self.base}:histories"

    @property
    def log(self) -> str:
        """STREAM: what has happened in the mesh, at most about 2,000 entries; expires 30 days after the last one."""
        return f"{self.base}:log"

    @property
    def moved(self) -> str:
        """HASH: the URL of each server that the mesh has moved to, by its ``host:port``. Written by `worqr move` alone."""
        return f"{self.base}:moved"

    @property
    def snapshots_channel(self) -> str:
        """Channel: a new snapshot was stored."""
        return f"{self.base}:snapshots"

    @property
    def due_channel(self) -> str:
        """Channel: ``ms base``: a job became the earliest of its queue, due in `ms` milliseconds. A hint for the leader."""
        return f"{self.base}:due"

    @property
    def schedules(self) -> str:
        """HASH: ``def NAME``, ``last NAME``, ``over NAME`` ... of every schedule; expires 30 days after the last peer that
        declared one, unless one is stored.
        """
        return f"{self.base}:schedules"

    @property
    def schedules_due(self) -> str:
        """ZSET of the schedules that are not paused, by the time in ms at which a leader checks them next; expires likewise."""
        return f"{self.base}:schedules_due"

    @property
    def schedules_seen(self) -> str:
        """ZSET of all schedules, by the time at which a peer last declared them, in ms for which the mesh had a leader; expires
        likewise.
        """
        return f"{self.base}:schedules_seen"

    @property
    def outboxes(self) -> str:
        """HASH: the id of an outbox -> who sweeps its table, until when, and JSON about it; expires 30 days after the last
        sweep.
        """
        return f"{self.base}:outboxes"

    @property
    def limits(self) -> str:
        """HASH: the name of a limit -> when a program noted that it uses it, in ms, a space and its unit; expires 30 days after
        the last note.
        """
        return f"{self.base}:limits"

    @property
    def topics(self) -> str:
        """HASH: queue -> the patterns of the topics to which it is subscribed; until it is dropped."""
        return f"{self.base}:topics"

    @property
    def schedules_stored(self) -> str:
        """ZSET of the names of stored schedules, all with the score 0; until the last is deleted or ends."""
        return f"{self.base}:schedules_stored"

    @property
    def shards(self) -> str:
        """HASH: queue -> its number of shards, for queues with several; until `delete` of the queue."""
        return f"{self.base}:shards"

    @property
    def leader(self) -> str:
        """STRING ``W1 n``: the lease, expires in 2 s."""
        return f"{self.base}:leader"

    @property
    def version(self) -> str:
        """STRING: the wire version of the mesh."""
        return f"{self.base}:version"

    def worker(self, worker: str) -> str:
        """STRING ``RUN n``: the keepalive key."""
        return f"{self.base}:worker:{worker}"

    def work_map(self, worker: str) -> str:
        """SET of the queues that `worker` serves."""
        return f"{self.base}:WorkMap:{worker}"

    def info(self, worker: str) -> str:
        """HASH: facts about `worker`, for people; expires."""
        return f"{self.base}:info:{worker}"


# Where the tasks of a queue of several shards are stored: names, slots, and which id belongs to which shard.
#
# A queue of n shards is n lists, each with its other keys, in slots of their own. Shard 0 is the plain queue: tasks that waited
# there before the queue had shards are found, and the two commands of foreign producers still work. The others are named
# ``worqr:{Q1~TAG}-shard``. Shard i is in the slot ``(slot of Q1 + round(16384 * i / n)) mod 16384``, and its tag is the first of
# ``0 1 ... 9 A ... Z a ... z 00 01 ...`` that hashes to that slot. So if the slots are divided evenly over k nodes, a queue of k
# shards has one list on each node. The lists of n shards are also among those of 2n shards.
#
# A job with a given id is in shard CRC16(id) mod n (the CRC16 of Redis Cluster, XMODEM, of the id's UTF-8). So all dispatches of
# one id reach the same shard, which runs an id only once at a time. A generated id contains the tag of its shard:
# ``@1712345678901234~TAG``, without a tag in shard 0. A raw task may be in any shard.

MAX_SHARDS: Final = 64

SLOTS: Final = 16384

_ALPHABET: Final = (digits + ascii_uppercase + ascii_lowercase).encode()


def check_shards(value: object) -> int:
    """Return `value` if it is a valid number of shards, else raise UsageError."""
    return check_between(value, "shards", 1, MAX_SHARDS)


def slot_of(name: str) -> int:
    """Return the slot of Redis Cluster for keys with the hash tag `name`."""
    return crc_hqx(as_bytes(name), 0) % SLOTS


@lru_cache(maxsize=1024)
def tags_of(queue: str, shards: int) -> tuple[str, ...]:
    """Return the tags of all shards in order; that of the first is empty. Takes about ten milliseconds, once for each queue."""
    first = slot_of(queue)
    slots = [(first + round(SLOTS * i / shards)) % SLOTS for i in range(shards)]
    found: dict[int, str] = {first: ""}
    missing = set(slots) - {first}
    stem = crc_hqx(as_bytes(f"{queue}~"), 0)
    for tag in _tags() if missing else ():
        slot = crc_hqx(tag, stem) % SLOTS
        if slot in missing:
            missing.remove(slot)
            found[slot] = tag.decode()
            if not missing:
                break
    return tuple(found[slot] for slot in slots)


def _tags() -> Iterator[bytes]:
    for length in count(1):
        for letters in product(_ALPHABET, repeat=length):
            yield bytes(letters)


@lru_cache(maxsize=1024)
def shards_of(keys: QueueKeys, shards: int) -> tuple[QueueKeys, ...]:
    """Return the keys of all shards of a queue, or of its failure queue."""
    return tuple(replace(keys, tag=tag) for tag in tags_of(keys.queue, shards))


def shard_of(shards: tuple[QueueKeys, ...], id: str) -> QueueKeys:
    """Return the shard of the job with this id. A generated id names its shard, even if the number of shards has changed."""
    if id.startswith("@"):
        tag = id.rpartition("~")[2] if "~" in id else ""
        return replace(shards[0], tag=tag) if tag.isascii() and tag.isalnum() else shards[0]
    return shards[crc_hqx(as_bytes(id), 0) % len(shards)]
