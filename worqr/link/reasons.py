"""Explain why the server cannot be reached, in terms that people search for, and suggest a remedy.

Here: the cause of a failed attempt to connect, and its remedy. Not here: error replies of a server (`server_errors`), programs at
the port that are no Redis or Valkey server (`strangers`).
"""

from __future__ import annotations

import socket

from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.tls import chain_of

_PORT = 6379  # that of `worqr server`
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


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
