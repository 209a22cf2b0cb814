"""Why the server cannot be reached, in the words that people search for, and what they can do about it.

Here: the cause of a failed attempt to connect, and its remedy. Not here: errors that a server replies with (`faults`),
programs at the port that are no Redis or Valkey server (`strangers`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from worqr.link.settings import Endpoint, LinkSettings

_PORT = 6379  # that of `worqr server`
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or inner.__context__


def is_unknown_host(error: BaseException) -> bool:
    """Return True if the name service says that there is no such host, or no name can look like this.

    False if it could not be asked (EAI_AGAIN): a network that is just starting heals by itself.
    """
    for each in _chain(error):
        if isinstance(each, UnicodeError) or (isinstance(each, socket.gaierror) and each.errno in _NO_SUCH_HOST):
            return True
    return False


def cause_of(error: BaseException, endpoint: Endpoint) -> str:
    """Return why a connection to `endpoint` could not be made, or an empty string if only the error itself can tell."""
    if is_unknown_host(error):
        return f"the host name {endpoint.host!r} does not resolve ({_words(error, socket.gaierror, UnicodeError)})"
    for each in _chain(error):
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
    first = next(each for each in _chain(error) if isinstance(each, kinds))
    return first.strerror if isinstance(first, OSError) and first.strerror else str(first)


def remedy_for(error: BaseException, settings: LinkSettings, *, stood: bool = False) -> str:
    """Return what somebody can do about an attempt to connect that failed; an empty string if waiting is all there is.

    Args:
        stood: there was a connection before, so the address is right.
    """
    address, source = settings.address, settings.source
    if is_unknown_host(error):
        return f"Check the host name in {source}."
    if any(isinstance(each, TimeoutError) for each in _chain(error)):
        return "" if stood else f"Check host and port in {source}, and the firewall."
    if not any(isinstance(each, ConnectionRefusedError | FileNotFoundError) for each in _chain(error)):
        return ""
    running = "Is the server running?" if address.topology == "single" else "Are the servers running?"
    if stood:
        return running
    if not settings.can_be_started_here:
        return f"{running} Check {'the path' if address.kind == 'unix' else 'host and port'} in {source}."
    port = "" if address.port == _PORT else f" --port {address.port}"
    other = "set WORQR_URL" if settings.is_default else f"correct {source}"
    return f"{running} Start one with 'worqr server{port}', or {other}."
