"""The wire form of calls and replies. No I/O.

Here: the script and keys of a call, for one server and for a node of a cluster, and the parser of replies, whose bytes may arrive
split anywhere. hiredis parses; an error reply is returned.

On a cluster the channels of a queue are sharded, so the scripts that publish there have a variant (`Script.sharded`).

Every call on a cluster names one more key (`keys.NONEXISTENT`), which is never written. While a slot is moved key by key, a node
executes commands whose keys it still has all. A script would then find half of a queue. The missing key makes the node reply
TRYAGAIN or ASK instead, and the call waits until the slot has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.keys import NONEXISTENT
from worqr.link.redis_py import redis_py
from worqr.link.server_errors import error_reply
from worqr.lua import Script
from worqr.script_call import Call
from worqr.stored_values import as_bytes

SLOTS = 16384

NOT_YET: Final = object()
"""The result of `ReplyReader.gets` when no whole reply has arrived."""


def as_sent(call: Call[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """Return the script of `call` and its KEYS, without the key that the link puts in front of them."""
    if clustered:
        return call.script.sharded, (*call.keys, call.base + NONEXISTENT)
    return call.script, call.keys


@lru_cache(maxsize=10_000)
def slot_of(name: str) -> int:
    """Return the hash slot of a key, a channel, or a base: 0 to 16383."""
    return redis_py().key_slot(as_bytes(name))


class NotRedis(Exception):
    """Bytes that are no reply of a Redis server."""


class ReplyReader(Protocol):
    """The parser of one connection."""

    def feed(self, data: bytes) -> None:
        """Take bytes from the server."""
        ...

    def gets(self) -> object:
        """Return the next reply, or `NOT_YET`. An error reply is an `ErrorReply`. Raises `NotRedis`."""
        ...


def new_reader() -> ReplyReader:
    """Return a parser for a connection that has just been made."""
    make = cast("Callable[..., Any]", hiredis.Reader)
    return cast("ReplyReader", make(replyError=error_reply, protocolError=NotRedis, notEnoughData=NOT_YET))
