"""Tokens for programs, such as Prometheus, KEDA and scripts: `TokenFileDoor` stands in front of the dashboard's other doors.

A program sends ``Authorization: Bearer TOKEN``. The file has a hash of each token, and what its program may do. Tokens are made
here, from 256 random bits. So a fast hash without salt is enough, and guessing needs no brake.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from starlette.responses import JSONResponse

from worqr.dashboard.access import Scope, Viewer
from worqr.dashboard.doors import VIEWER, App, Send, with_headers
from worqr.dashboard.guard import BY_TOKEN, SECURITY_HEADERS, Receive, Refused, header
from worqr.errors import UsageError

_LINE: Final = re.compile(r"(?P<name>[^:]+):(?P<rights>[a-z]+):sha256\$(?P<hash>[0-9a-f]{64})")


class TokenFileDoor:
    """Lets in programs by their token, and sends all other requests on to the next door.

    Args:
        app: the dashboard.
        door: the next door.
        tokens: viewers by the hash of their token, as `read_tokens` returns them.
    """

    def __init__(self, app: App, door: App, tokens: Mapping[str, Viewer]) -> None:
        self._app = app
        self._door = door
        self._tokens = dict(tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        token = _bearer(scope) if scope["type"] == "http" else None
        if token is None:
            await self._door(scope, receive, send)
        elif (viewer := self._viewer(token)) is not None:
            scope[VIEWER], scope[BY_TOKEN] = viewer, True
            await self._app(scope, receive, send)
        else:
            why = "The token is not in the token file. Make one: worqr dashboard --new-token NAME --token-file FILE"
            refusal = JSONResponse({"error": why}, 401, {"www-authenticate": 'Bearer realm="worqr"'})
            await refusal(scope, receive, with_headers(send, SECURITY_HEADERS))

    def _viewer(self, token: str) -> Viewer | None:
        given, found = hash_token(token), None
        for known, viewer in self._tokens.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, given):
                found = viewer
        return found


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the hash of a token, in hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_line(name: str, rights: str, token: str) -> str:
    """Return the line of a token file for a token."""
    return f"{name}:{rights}:sha256${hash_token(token)}"


def read_tokens(text: str, viewers: Mapping[str, Callable[[str], Viewer]]) -> dict[str, Viewer]:
    """Return the viewers of a token file, by the hashes of their tokens.

    Args:
        text: the file.
        viewers: makes a viewer of a name, by the name of its rights.

    Raises:
        UsageError: a line is not ``NAME:RIGHTS:sha256$HASH``, a token is there twice, or there is no line.
    """
    found: dict[str, Viewer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match["rights"] not in viewers:
            raise UsageError(
                f"line {number} of the token file is not NAME:RIGHTS:sha256$HASH, with the rights {', '.join(viewers)}; "
                "make one with `worqr dashboard --new-token NAME --token-file FILE`"
            )
        if match["hash"] in found:
            raise UsageError(f"line {number} of the token file has the same token as a line before; remove one of them")
        found[match["hash"]] = viewers[match["rights"]](match["name"])
    if not found:
        raise UsageError(
            "the token file is empty; make a line for it with `worqr dashboard --new-token NAME --token-file FILE`"
        )
    return found


def _bearer(scope: Scope) -> str | None:
    """Return the token of a request; None if it has none."""
    try:
        kind, _, token = (header(scope, b"authorization") or "").partition(" ")
    except Refused:
        return None
    return token.strip() if kind.lower() == "bearer" else None
