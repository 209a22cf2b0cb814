"""Failures between worqr and the server, classified by their remedy. redis-py's exceptions end here.

Here: `ConnectionLost` and `ErrorReply`, which the rest of the link uses, and the classification of redis-py's exceptions. Not
here: the reaction to a failure (`pipeline`, `session`, `subscriptions`, `heartbeat`).

An error reply begins with a code. redis-py keeps the codes of some classes in ``status_code`` and leaves those of others in
the text. A script's error may have the code of an inner error in its text ("ERR Error running script: -OOM ..."). All three
places are checked. Possible arguments are removed from error texts before they are logged or raised.
"""

from __future__ import annotations

import enum
import re

from worqr.errors import RefusedByServer, WorqrError
from worqr.link.redis_py import redis_py
from worqr.link.tls import is_silent_handshake, tls_hint


class ErrorAction(enum.Enum):
    """The reaction that an error reply needs."""

    NOSCRIPT = "load the script and send this request again"
    MOVED = "another node of the cluster has these keys: send it there"
    MOVING = "these keys are just being moved: send it again soon, and the others meanwhile"
    FULL = "out of memory: nothing was stored"
    DROP = "this connection leads to a server that cannot work: connect again, then resend"
    HOLD = "the server cannot work for the moment: wait on this connection, then resend"
    REFUSED = "this request will never work"


_ACTIONS = {
    "NOSCRIPT": ErrorAction.NOSCRIPT,
    "OOM": ErrorAction.FULL,
    "READONLY": ErrorAction.DROP,
    "LOADING": ErrorAction.DROP,
    "MASTERDOWN": ErrorAction.DROP,
    "CLUSTERDOWN": ErrorAction.DROP,
    "MOVED": ErrorAction.MOVED,
    "ASK": ErrorAction.MOVING,
    "TRYAGAIN": ErrorAction.MOVING,
    "NOAUTH": ErrorAction.DROP,
    "WRONGPASS": ErrorAction.DROP,
    "MISCONF": ErrorAction.HOLD,
    "NOREPLICAS": ErrorAction.HOLD,
    "BUSY": ErrorAction.HOLD,
}
_WRAPPED = re.compile(rf"(?:^|[\s:])-({'|'.join(_ACTIONS)})\b")
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
_SCRIPT_PLACE = re.compile(r"\s*script:[ 0-9a-f,]*on @user_script:\d+\.?")
_DENIED = re.compile(r"ACL failure in script|The user executing the script can't ")
_PASSWORD = "check user and password in its URL"  # noqa: S105 - not one
_PROTECTED = "give the server a password (requirepass) and put it into the URL, as redis://:PASSWORD@HOST:PORT/0"
_LONGEST_TEXT = 300  # more than any of the server's own messages; a payload that got in is cut


class ConnectionLost(Exception):
    """The connection is lost or useless; the outcome of requests in flight is unknown.

    `innocent`: no request can have caused it.
    """

    def __init__(self, cause: str, *, innocent: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.innocent = innocent


class ErrorReply(Exception):
    """The server replied to one request with an error; the connection still works.

    Attributes:
        action: the reaction that the error needs.
        word: the error's code.
        text: the rest of the message.
    """

    def __init__(self, action: ErrorAction, word: str, text: str) -> None:
        super().__init__(f"{word} {text}".strip())
        self.action = action
        self.word = word
        self.text = text


def as_error_reply(error: BaseException) -> ErrorReply:
    """Classify an error reply that redis-py has read."""
    text = _clean(str(error))
    word: str | None = getattr(error, "status_code", None)
    return _sorted(word, text)


def error_reply(text: str) -> ErrorReply:
    """Classify an error reply in the server's own text."""
    return _sorted(None, _clean(text))


def _sorted(word: str | None, text: str) -> ErrorReply:
    if word is None:
        first, _, rest = text.partition(" ")
        word, text = (first, rest) if first.isupper() else ("ERR", text)
    denied = word == "NOPERM" or _DENIED.search(text)
    # except for start_work, some servers name neither the command nor the key
    if denied and not text.startswith("the user may not: "):
        text += "; ACL LOG on the server names what is missing, and the page Permissions of the docs has complete rules"
    action = _ACTIONS.get(word)
    if action is None:
        wrapped = _WRAPPED.search(text)
        action = _ACTIONS[wrapped[1]] if wrapped else ErrorAction.REFUSED
    return ErrorReply(action, word, text)


def is_no_longer_primary(refused: ErrorReply) -> bool:
    """Return True if WAIT failed because the server is no primary any more."""
    return refused.word == "UNBLOCKED" or "replica instances" in refused.text


def as_connection_lost(error: BaseException) -> ConnectionLost:
    """Convert an exception that ended a connection."""
    word = getattr(error, "status_code", None)
    text = _clean(str(error)) or type(error).__name__
    redis_errors = redis_py().exceptions
    innocent = isinstance(error, redis_errors.BusyLoadingError | redis_errors.AuthenticationError)
    if "Too many open files" in text:
        text += " (raise the limit of this process: ulimit -n)"
    if is_silent_handshake(error):
        text += " (is TLS spoken at this port?)"
    return ConnectionLost(f"{word} {text}" if word else text, innocent=innocent)


def as_connect_error(error: BaseException, address: str, *, ours: bool = False) -> WorqrError | None:
    """Return RefusedByServer if an attempt to connect failed for a reason that waiting does not remove; else None.

    `ours`: user and password come from the application's ``credentials=``, not from the URL.
    """
    redis_errors = redis_py().exceptions
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        hint: str | None = "check what credentials= returns" if ours else _PASSWORD
    elif isinstance(error, redis_errors.ResponseError):
        if as_error_reply(error).action in (ErrorAction.DROP, ErrorAction.HOLD):
            return None
        hint = (
            _PROTECTED
            if as_error_reply(error).word == "DENIED"
            else "check the rights of the user and the database number"
        )
    elif (hint := tls_hint(error)) is None:
        return None
    return RefusedByServer(f"the server at {address} refused the connection: {as_connection_lost(error).cause}; {hint}")


def _clean(text: str) -> str:
    """Return one line of printable text, without the parts of a request that the server quotes."""
    text = _SCRIPT_PLACE.sub("", _ARGUMENTS.sub("", text))
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
