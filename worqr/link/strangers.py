"""Identify another program at the server's port: HTTP, TLS, or a server without TLS.

Here: the check of its output, and one attempt with TLS instead of plain text or the reverse. Only for the first connection of
a link: at a port that worked before, the same signs come from a proxy whose server is away. Not here: certificates (`tls`).
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from worqr.link.settings import Endpoint

_PATIENCE = 1.0  # seconds for connecting and for each reply
_MOST = 100  # characters of the program's output in a message
_HTTP = ("HTTP/", "<!DOCTYPE", "<html")


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
