"""Failures between worqr and the server, sorted by their remedy, and explained. redis-py's exceptions end here.

Here: `ConnectionLost` and `ErrorReply`, which the rest of the link uses, the cause of a failed attempt to connect in terms that
people search for, and its remedy. Not here: the reaction to a failure (`node`, `session`, `messages`, `heartbeat`).

An error reply begins with a code. redis-py keeps the codes of some classes in ``status_code`` and leaves those of others in
the text. A script's error may have the code of an inner error in its text ("ERR Error running script: -OOM ..."). All three
places are checked. Possible arguments are removed from error texts before they are logged or raised.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport] - it has hooks for forks, as below
import enum
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from worqr.errors import RefusedByServer, WorqrError
from worqr.link.settings import Endpoint, LinkSettings, one_line

# redis-py, imported when the first connection is made. That takes as long as importing the rest of worqr, Trio included. A
# program that only declares functions, or prints its help, should not wait for it.


_importing = threading.RLock()
"""Held while redis-py is imported, and during each fork. Otherwise a child could have half of a module for ever.

What is imported must not register hooks for forks that belong together, because a fork may have begun that waits for the import.
So the module that does so is imported above.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire,
        after_in_parent=_importing.release,
        after_in_child=_importing.release,
    )


@cache
def redis_py() -> ModuleType:
    """Return the package ``redis``, imported at the first call."""
    with _importing:
        import encodings.idna  # noqa: F401  # pyright: ignore[reportUnusedImport] - for the first look-up of a host

        import redis

        return redis


def redis_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a broken connection (OSError: before redis-py has wrapped it)."""
    return (redis_py().RedisError, OSError)


# TLS: OpenSSL's errors do not name the remedy.


_AUTHORITY = "name the certificate authority: rediss://...?ssl_ca_certs=/path/to/ca.pem"
_VERIFICATION = {  # by OpenSSL's code
    9: "the server's certificate is not valid yet; are the clocks right?",
    10: "the server's certificate has expired",
    62: "the server's certificate is for another name than the URL's",
    64: "the server's certificate is for another address than the URL's",
}
_OWN = "the server asks for a client certificate that it trusts: rediss://...?ssl_certfile=...&ssl_keyfile=..."
_NO_TLS = "no TLS is spoken at this port; is it redis://?"
_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "SSLV3_ALERT_BAD_CERTIFICATE": _OWN,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OWN,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _OWN,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _OWN,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _OWN,
    "TLSV1_ALERT_ACCESS_DENIED": _OWN,
    "TLSV1_ALERT_UNKNOWN_CA": _OWN,
}


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or inner.__context__


def tls_hint(error: BaseException) -> str | None:
    """Return the remedy for a failed handshake that waiting does not help; None for every other error."""
    inner = next((each for each in chain_of(error) if isinstance(each, ssl.SSLError)), None)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return _VERIFICATION.get(inner.verify_code, _AUTHORITY)
    return None if inner is None else _REASONS.get(inner.reason)


def is_silent_handshake(error: BaseException) -> bool:
    """Return True if the other side accepted the first bytes and sent nothing, as a server without TLS does: it waits for
    more.
    """
    return any("handshake operation timed out" in str(each) for each in chain_of(error))


# Other causes of a failed attempt to connect.


_PORT = 6379  # that of `worqr server`
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_PATIENCE = 1.0  # seconds for connecting and for each reply
_MOST = 100  # characters of the program's output in a message
_HTTP = ("HTTP/", "<!DOCTYPE", "<html")


def is_unknown_host(error: BaseException) -> bool:
    """Return True if the name service reports that the host does not exist, or if the name is invalid.

    Return False if the name service could not be reached (EAI_AGAIN): a network that is just starting recovers without help.
    """
    for each in chain_of(error):
        if isinstance(each, UnicodeError) or (isinstance(each, socket.gaierror) and each.errno in _NO_SUCH_HOST):
            return True
    return False


def cause_of(error: BaseException, endpoint: Endpoint) -> str:
    """Return why a connection to `endpoint` failed, or an empty string if the error's own text is the best explanation."""
    if is_unknown_host(error):
        return f"the host name {endpoint.host!r} does not resolve ({_words(error, socket.gaierror, UnicodeError)})"
    for each in chain_of(error):
        match each:
            case socket.gaierror():
                return f"the host name {endpoint.host!r} cannot be resolved at the moment ({each.strerror})"
            case ConnectionRefusedError():
                return "connection refused"
            case FileNotFoundError():
                return f"there is no socket {endpoint.path}"
            case _:
                pass
    return ""


def _words(error: BaseException, *kinds: type[BaseException]) -> str:
    """The text of the first error of these kinds in the chain."""
    first = next(each for each in chain_of(error) if isinstance(each, kinds))
    return first.strerror if isinstance(first, OSError) and first.strerror else str(first)


def remedy_for(error: BaseException, settings: LinkSettings, *, stood: bool = False) -> str:
    """Return the remedy for a failed attempt to connect; an empty string if waiting is the only one.

    Args:
        error: the error of the attempt.
        settings: the settings of the link.
        stood: there was a connection before, so the address is right.
    """
    address, source = settings.address, settings.source
    if is_unknown_host(error):
        return f"Check the host name in {source}."
    if any(isinstance(each, TimeoutError) for each in chain_of(error)):
        return "" if stood else f"Check host and port in {source}, and the firewall."
    if not any(isinstance(each, ConnectionRefusedError | FileNotFoundError) for each in chain_of(error)):
        return ""
    running = "Is the server running?" if address.topology == "single" else "Are the servers running?"
    if stood:
        return running
    if not settings.can_be_started_here:
        return f"{running} Check {'the path' if address.kind == 'unix' else 'host and port'} in {source}."
    port = "" if address.port == _PORT else f" --port {address.port}"
    other = "set WORQR_URL" if settings.is_default else f"correct {source}"
    return f"{running} Start one with 'worqr server{port}', or {other}."


# Lost connections and error replies.


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
_UNDECLARED = re.compile(r"undeclared key|should be passed using the KEYS array", re.IGNORECASE)
_ALLOW_UNDECLARED = (
    "; worqr's scripts make the names of their keys from KEYS[1], so the server must allow keys that are not declared: the page "
    "Set up the server of the docs has the setting"
)
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
    if _UNDECLARED.search(text):
        text += _ALLOW_UNDECLARED
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
    errors = redis_py().exceptions
    innocent = isinstance(error, errors.BusyLoadingError | errors.AuthenticationError)
    if "Too many open files" in text:
        text += " (raise the limit of this process: ulimit -n)"
    if is_silent_handshake(error):
        text += " (is TLS spoken at this port?)"
    return ConnectionLost(f"{word} {text}" if word else text, innocent=innocent)


def as_connect_error(error: BaseException, address: str, *, ours: bool = False) -> WorqrError | None:
    """Return RefusedByServer if an attempt to connect failed for a reason that waiting does not remove; else None.

    `ours`: user and password come from the application's ``credentials=``, not from the URL.
    """
    errors = redis_py().exceptions
    if isinstance(error, errors.AuthenticationError | errors.AuthorizationError):
        hint: str | None = "check what credentials= returns" if ours else _PASSWORD
    elif isinstance(error, errors.ResponseError):
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
    return one_line(_SCRIPT_PLACE.sub("", _ARGUMENTS.sub("", text)), _LONGEST_TEXT)
