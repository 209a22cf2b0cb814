"""Replace a mesh's connections and sender for the length of a test's block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from worqr.client.connections import Connections
from worqr.client.producer import Sender
from worqr.errors import UsageError
from worqr.functions.function import Call, Function
from worqr.inside import client_of
from worqr.mesh import Mesh
from worqr.peer.settings import Onlooker
from worqr.relocation import Relocation

R = TypeVar("R")


class Sent:
    """The calls that were sent through the functions of a mesh, in order. `recording` makes it."""

    def __init__(self, calls: list[Call[Any]]) -> None:
        self._calls = calls

    @overload
    def calls(self, fn: Function[..., R]) -> list[Call[R]]: ...
    @overload
    def calls(self, fn: str) -> list[Call[Any]]: ...
    def calls(self, fn: Function[..., Any] | str) -> list[Call[Any]]:
        """Return the calls of a function so far.

        They are equal to what ``fn.call(...)`` or ``mesh.call(name, ...)`` returns for the same arguments, whatever the
        options.

        Args:
            fn: The function, or its name.
        """
        name = fn if isinstance(fn, str) else fn.name
        return [call for call in self._calls if call.queue == name]


@contextmanager
def staged(
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
