"""How a call is written on the wire: to one server, and to a node of a cluster. Pure, but for redis-py's hash.

On a cluster the channels of a queue are sharded, so the scripts that publish there have a variant (`Script.sharded`). And
every call names one key more, which never exists. While a slot is being moved key by key from one node to another, a node
executes what touches only keys that it still has; a script would find half of a queue. That key makes the node answer TRYAGAIN or
ASK instead, and the call waits until the slot has moved.
"""

from __future__ import annotations

from typing import Any

from worqr.call import Call
from worqr.keys import NEVER
from worqr.link.redis_py import redis_py
from worqr.lua import Script

SLOTS = 16384


def as_sent(call: Call[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """The script of `call` and its KEYS, without what the link puts in front of them."""
    if clustered:
        return call.script.sharded, (*call.keys, call.base + NEVER)
    return call.script, call.keys


def slot_of(name: str) -> int:
    """The hash slot of a key, a channel, or the base of some: 0 to 16383."""
    return redis_py().key_slot(name.encode())
