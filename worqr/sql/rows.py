"""A row of an outbox: its id, its options as bytes, and what is left of its times when it is sent. Pure.

The table has the times of the database's clock. The server has its own, so a delay travels as a delay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

FORMAT: Final = 1
"""Of a row. A sweep leaves rows of a higher format alone: a newer version has stored them."""
WAITING, FAILED, HELD, IDENTITY = "waiting", "failed", "held", "outbox"
"""The states of a row; the last one is that of the row with the id of the outbox itself."""
MAX_TRIES: Final = 10
"""Refusals of a row after which it is given up."""
LONGEST_BACKOFF: Final = 300_000
"""Milliseconds until a refused row is tried again, at most."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, object]).decode


class Row(NamedTuple):
    """One row, as a sender reads it. `age_ms`: since it was inserted, by the database's clock."""

    id: str
    queue: str
    payload: bytes
    options: bytes
    age_ms: int
    tries: int


def new_row_id() -> str:
    """Return the id of a new row: a UUID of version 7 as 32 hexadecimal digits, so that ids are about in the order of time."""
    drawn = int.from_bytes(os.urandom(10), "big")
    high = (time.time_ns() // 1_000_000) << 16 | 0x7000 | drawn >> 68
    return f"{high << 64 | 0b10 << 62 | drawn & (1 << 62) - 1:032x}"


def encode_row_options(row: str, options: Mapping[str, object]) -> bytes:
    """Return the options of a row as bytes. A job without an id and a lane has the id of its row."""
    named = {} if "id" in options or "lane" in options else {"id": row}
    random = {"random": row} if "lane" in options and "id" not in options else {}
    return _encode({**options, **named, **random, "row": row})


def options_to_send(row: Row) -> dict[str, object] | None:
    """Return the options of a row for the server, with what is left of its delay and of its time to begin. None: it has expired.

    Raises:
        ValueError: another program wrote them, and they cannot be read.
    """
    try:
        options = _decode(row.options)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the options of the row cannot be read: {error}") from error
    options["row"] = row.id
    delay, expires = options.get("delay", 0), options.get("expires")
    if "run_at" in options or not isinstance(delay, int):
        return options
    left = delay - row.age_ms
    if "delay" in options:
        options["delay"] = max(0, left)
    if isinstance(expires, str) and expires.isdecimal():
        expires_in = int(expires) + min(0, left)
        if expires_in < 0:
            return None
        options["expires"] = str(expires_in)
    return options


def queues_of(queue: str, options: Mapping[str, Any]) -> set[str]:
    """Return the queues that a row starts jobs in: its own, and those of its follow-ups.

    Raises:
        ValueError, TypeError, AttributeError: another program wrote them, and they cannot be read.
    """
    found = {queue}
    for name, given, _ in options.get("follow_ups", {}).values():
        found |= queues_of(name, given)
    return found


def replicas_of(options: Mapping[str, object]) -> int:
    """Return the number of replicas that the options of a row ask for."""
    found: object = options.get("replicas", 0)
    return int(found) if isinstance(found, int) else 0


def backoff_ms(tries: int) -> int:
    """Return the milliseconds until a row is tried again that was refused so many times."""
    return min(LONGEST_BACKOFF, 1000 << tries)
