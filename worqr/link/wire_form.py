"""The wire form of a call: for one server, and for a node of a cluster. No I/O; uses redis-py's hash.

On a cluster the channels of a queue are sharded, so the scripts that publish there have a variant (`Script.sharded`).

Every call on a cluster names one more key (`keys.NONEXISTENT`), which is never written. While a slot is moved key by key, a node
executes commands whose keys it still has all. A script would then find half of a queue. The missing key makes the node reply
TRYAGAIN or ASK instead, and the call waits until the slot has moved.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from worqr.keys import NONEXISTENT
from worqr.link.redis_py import redis_py
from worqr.lua import Script
from worqr.script_call import Call

SLOTS = 16384


def as_sent(call: Call[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """Return the script of `call` and its KEYS, without the key that the link puts in front of them."""
    if clustered:
        return call.script.sharded, (*call.keys, call.base + NONEXISTENT)
    return call.script, call.keys


@lru_cache(maxsize=10_000)
def slot_of(name: str) -> int:
    """Return the hash slot of a key, a channel, or a base: 0 to 16383."""
    return redis_py().key_slot(name.encode())
