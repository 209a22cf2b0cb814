"""The settings with which a mesh reaches its server, and their checks.

`worqr.Mesh` is a `ClientSettings`: its public attributes are these settings. Those of its workers
are in `worqr.hosting.peer_factory`.
"""

from __future__ import annotations

from typing import Any, Final

from worqr.embedded import relocated
from worqr.errors import UsageError
from worqr.job_options import check_replicas
from worqr.keys import check_name
from worqr.link import Credentials, GivenCredentials, checked_credentials
from worqr.tracing import FencedTracing, Tracing
from worqr.validation import Seconds, check_count, check_text, seconds

MAX_PATIENCE: Final = 1800.0
"""Seconds. The server stores replies for an hour, and a request that is sent again must find its reply there."""


class ClientSettings:
    """Which server a mesh uses, and how. A test or the command line may change the server while the mesh is not connected."""

    url: str | None
    """The URL of the server, as it was given."""
    credentials: Credentials | None
    """The credentials for the server; None: those of the URL."""
    prefix: str
    """The first part of all keys."""
    app: str
    """The application's name."""
    patience: float
    """Seconds that a call waits for an unavailable server."""
    keepalive: float | None
    """Seconds without a heartbeat after which a worker counts as dead; None: never."""
    max_payload: int
    """The size limit of a task, in bytes."""
    replicas: int
    """The number of replicas that must have a task before an enqueue or dispatch returns."""
    tracing: Tracing | None
    """Makes the spans of sends and runs; None: the mesh is not traced."""

    def __init__(
        self,
        url: str | None,
        credentials: GivenCredentials | None,
        prefix: str,
        app: str,
        patience: Seconds,
        keepalive: Seconds | None,
        max_payload: int,
        replicas: int,
        tracing: Tracing | None,
    ) -> None:
        self.url = _checked_url(url)
        self.credentials = checked_credentials(credentials, self.url)
        self.prefix = check_name(prefix, "prefix")
        if (moved := relocated(self.url, self.prefix)) is not None:
            (self.url, self.prefix), self.credentials = moved, None
        self.app = check_text(app, "app")
        self.patience = _checked_patience(patience)
        self.keepalive = None if keepalive is None else _checked_keepalive(keepalive)
        self.max_payload = check_count(max_payload, "max_payload")
        self.replicas = check_replicas(replicas)
        self.tracing = _checked_tracing(tracing)

    def _set_server(self, url: str | None, prefix: str, credentials: Credentials | None) -> None:
        """Use another server or prefix, while the mesh is not connected. `worqr.inside` calls it."""
        self.url, self.prefix, self.credentials = url, prefix, credentials


def _checked_url(url: object) -> str | None:
    """Return `url` if it is a valid URL of a mesh, else raise UsageError."""
    if url is not None and not isinstance(url, str):
        raise UsageError(f"url must be a str, not {type(url).__name__}")
    return url


def _checked_tracing(tracing: Any) -> Tracing | None:
    """Return `tracing` with a fence around it if it has the methods of `Tracing`, else raise UsageError."""
    if tracing is not None and (isinstance(tracing, type) or not hasattr(tracing, "sending")):
        raise UsageError(f"tracing must be worqr.otel.Tracing(...) or None, not {tracing!r}")
    return None if tracing is None else FencedTracing(tracing)


def _checked_patience(patience: object) -> float:
    """Return the seconds that a call of a mesh waits for its server; or raise UsageError."""
    checked = seconds(patience, "patience", positive=True)
    if checked > MAX_PATIENCE:
        raise UsageError(f"patience must be at most {MAX_PATIENCE:g} s, not {patience!r}")
    return checked


def _checked_keepalive(keepalive: object) -> float:
    """Return the seconds without a heartbeat after which a worker counts as dead; or raise UsageError."""
    checked = seconds(keepalive, "keepalive", positive=True)
    if checked < 1:
        raise UsageError(f"keepalive must be at least 1 s (ordinary stalls last that long), not {keepalive!r}")
    return checked
