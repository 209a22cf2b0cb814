"""Put a mesh on the server of a test, or on none, for the length of a block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from worqr.client.batch import BatchMaker
from worqr.client.connections import ConnectionRegistry
from worqr.client.producer import Producer
from worqr.embedded import Relocation
from worqr.errors import UsageError
from worqr.inside import client_of, set_server
from worqr.mesh import Mesh
from worqr.peer.options import RunObserver


@contextmanager
def patched(
    mesh: Mesh[Any],
    *,
    producer: Producer,
    connections: ConnectionRegistry,
    url: str | None = None,
    prefix: str | None = None,
    observer: RunObserver | None = None,
    batch_maker: BatchMaker | None = None,
) -> Generator[None]:
    """Use these connections, this producer and this server inside the block, instead of the mesh's own.

    Raises:
        UsageError: the mesh is connected, on a bench, or recording already.
    """
    client = client_of(mesh)
    if type(client.connections) is not ConnectionRegistry:
        raise UsageError(f"{mesh!r} is on a bench, or in a recording, already")
    if client.connections.any:
        raise UsageError(f"{mesh!r} is connected: a test takes a mesh before anything connects it")
    own_url, own_prefix, own_credentials = mesh.url, mesh.prefix, mesh.credentials
    credentials = own_credentials if url is None else None  # another server does not have the users of the mesh's own
    set_server(mesh, url=url or own_url, prefix=prefix or own_prefix, credentials=credentials)
    relocation = None if url is None else Relocation(own_url, own_prefix, url, mesh.prefix)
    try:
        with client.replaced(
            producer=producer,
            connections=connections,
            observer=observer,
            relocation=relocation,
            batch_maker=batch_maker,
        ):
            yield
    finally:
        set_server(mesh, url=own_url, prefix=own_prefix, credentials=own_credentials)
