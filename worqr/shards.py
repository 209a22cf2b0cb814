"""Where the tasks of a queue of several shards lie: names, slots, and which id belongs to which. Pure.

A queue of n shards is n lists, each with all that belongs to a queue, in slots of their own. Shard 0 is the plain queue, so that
what waited there before there were shards is found, and foreign producers' two commands go on to work. The others are
``worqr:{Q1~TAG}-shard``: shard i lies in the slot ``(slot of Q1 + round(16384 * i / n)) mod 16384``, and its tag is the first of
``0 1 ... 9 A ... Z a ... z 00 01 ...`` that makes it lie there. So where the slots are divided evenly over k nodes, a queue of k
shards has one list on each; and a list that n shards have is one that 2n shards have, too.

A job whose id was given lies in shard CRC16(id) mod n (the CRC16 of Redis Cluster, XMODEM, of the id's UTF-8): all dispatches of
one id meet, and an id runs once at a time. A generated id tells its shard itself, by the tag: ``@1712345678901234~TAG``, without
one in shard 0. A raw task lies in any.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final

from worqr.errors import UsageError
from worqr.keys import QueueKeys

MAX_SHARDS: Final = 64
SLOTS: Final = 16384
_ALPHABET: Final = (digits + ascii_uppercase + ascii_lowercase).encode()


def check_shards(value: object) -> int:
    """`value` if a queue may have so many shards, else UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SHARDS:
        raise UsageError(f"shards must be a whole number from 1 to {MAX_SHARDS}, not {value!r}")
    return value


def slot_of(name: str) -> int:
    """The slot of Redis Cluster of all that stands under the hash tag `name`."""
    return crc_hqx(name.encode(), 0) % SLOTS


@lru_cache(maxsize=1024)
def tags_of(queue: str, shards: int) -> tuple[str, ...]:
    """The tags of all shards, in their order; the first has none. Takes some ten milliseconds, once for each queue."""
    first = slot_of(queue)
    slots = [(first + round(SLOTS * i / shards)) % SLOTS for i in range(shards)]
    found: dict[int, str] = {first: ""}
    missing = set(slots) - {first}
    stem = crc_hqx(f"{queue}~".encode(), 0)
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
    """The keys of all shards of a queue, or of its failure queue."""
    return tuple(replace(keys, tag=tag) for tag in tags_of(keys.queue, shards))


def shard_of(shards: tuple[QueueKeys, ...], id: str) -> QueueKeys:
    """The shard of a queue in which the job of this id lies. A generated id says it itself, whatever `shards` there are now."""
    if id.startswith("@"):
        tag = id.rpartition("~")[2] if "~" in id else ""
        return replace(shards[0], tag=tag) if tag.isascii() and tag.isalnum() else shards[0]
    return shards[crc_hqx(id.encode(), 0) % len(shards)]
