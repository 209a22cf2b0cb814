"""Replies out of the bytes of a connection, split anywhere. hiredis parses; an error reply is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.link.server_errors import error_reply

NOT_YET: Final = object()
"""The result of `ReplyReader.gets` when no whole reply has arrived."""


class NotRedis(Exception):
    """Bytes that are no reply of a Redis server."""


class ReplyReader(Protocol):
    """The parser of one connection."""

    def feed(self, data: bytes) -> None:
        """Take bytes from the server."""
        ...

    def gets(self) -> object:
        """Return the next reply, or `NOT_YET`. An error reply is a `ErrorReply`. Raises `NotRedis`."""
        ...


def new_reader() -> ReplyReader:
    """Return a parser for a connection that has just been made."""
    make = cast("Callable[..., Any]", hiredis.Reader)
    return cast("ReplyReader", make(replyError=error_reply, protocolError=NotRedis, notEnoughData=NOT_YET))
