"""Where the tasks of a queue of several shards are stored: names, slots, and which id belongs to which shard. Pure.

A queue of n shards is n lists, each with its other keys, in slots of their own. Shard 0 is the plain queue: tasks that waited
there before the queue had shards are found, and the two commands of foreign producers still work. The others are named
``worqr:{Q1~TAG}-shard``. Shard i is in the slot ``(slot of Q1 + round(16384 * i / n)) mod 16384``, and its tag is the first of
``0 1 ... 9 A ... Z a ... z 00 01 ...`` that hashes to that slot. So if the slots are divided evenly over k nodes, a queue of k
shards has one list on each node. The lists of n shards are also among those of 2n shards.

A job with a given id is in shard CRC16(id) mod n (the CRC16 of Redis Cluster, XMODEM, of the id's UTF-8). So all dispatches of
one id reach the same shard, which runs an id only once at a time. A generated id contains the tag of its shard:
``@1712345678901234~TAG``, without a tag in shard 0. A raw task may be in any shard.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final

from worqr.keys import QueueKeys
from worqr.stored_values import as_bytes
from worqr.validation import check_between

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
