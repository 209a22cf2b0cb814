"""Explain why the server cannot be reached, in terms that people search for, and suggest a remedy.

Here: the cause of a failed attempt to connect, its remedy, and the check for another program at the port: HTTP, TLS, or a server
without TLS. That check is only for the first connection of a link: at a port that worked before, the same signs come from a
proxy whose server is away. Not here: error replies of a server (`server_errors`), certificates (`tls`).
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.tls import chain_of

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


# Another program at the port


def first_line(heard: bytes) -> str:
    """Return the first line of a program's output as printable text; empty if there is none."""
    line = heard.strip().splitlines()[0] if heard.strip() else b""
    text = "".join(c if c.isprintable() else "?" for c in line.decode("utf-8", "replace"))
    return text if len(text) <= _MOST else text[:_MOST] + "..."


def no_server(name: str, heard: bytes, error: str) -> str:
    """Return the message for a program that does not speak the Redis protocol.

    Args:
        name: its address.
        heard: its output.
        error: the parser's error.
    """
    line = first_line(heard)
    said = f"the program there replied {line!r}" if line else f"the reply there cannot be read ({error})"
    http = ", which is HTTP" if line.startswith(_HTTP) else ""
    return f"no Redis or Valkey server at {name}: {said}{http}; check host and port in its URL"


def plain_reply(endpoint: Endpoint) -> str:
    """Return the first line that a server without TLS replies to PING; empty if it is none. Sends nothing that is secret."""
    with suppress(OSError), _reach(endpoint) as plain:
        plain.sendall(b"PING\r\n")
        line = first_line(plain.recv(_MOST))
        return line if line.startswith(("+", "-")) else ""
    return ""


def speaks_tls(endpoint: Endpoint) -> bool:
    """Return True if the program accepts a TLS handshake. Sends only the handshake, and checks no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent after the handshake, which only detects TLS
    try:
        with _reach(endpoint) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it has its own demands, and states them in TLS
    except OSError:
        return False


def _reach(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), _PATIENCE)
