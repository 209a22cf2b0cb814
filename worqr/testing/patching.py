"""Replace a mesh's connections and sender for the length of a test's block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from worqr.client.connections import Connections
from worqr.client.producer import Sender
from worqr.errors import UsageError
from worqr.inside import client_of
from worqr.mesh import Mesh
from worqr.peer.settings import Onlooker
from worqr.relocation import Relocation


@contextmanager
def patched(
    mesh: Mesh[Any],
    *,
    sender: Sender,
    connections: Connections,
    url: str | None = None,
    prefix: str | None = None,
    onlooker: Onlooker | None = None,
) -> Generator[None]:
    """Put these in place of the mesh's own.

    Raises:
        UsageError: the mesh is connected, or taken already.
    """
    client = client_of(mesh)
    if type(client.connections) is not Connections:
        raise UsageError(f"{mesh!r} is on a bench, or in a recording, already")
    if client.connections.any:
        raise UsageError(f"{mesh!r} is connected: a test takes a mesh before anything connects it")
    own = mesh.url, mesh.prefix, mesh.credentials
    mesh.url, mesh.prefix = url or mesh.url, prefix or mesh.prefix
    if url is not None:  # another server, which does not have the users of the mesh's own
        mesh.credentials = None
    relocation = None if url is None else Relocation(own[0], own[1], url, mesh.prefix)
    try:
        with client.replaced(sender=sender, connections=connections, onlooker=onlooker, relocation=relocation):
            yield
    finally:
        mesh.url, mesh.prefix, mesh.credentials = own
