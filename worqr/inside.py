"""The internals of the public objects, for the other modules of worqr.

A user's editor shows the documented names of a `Mesh`, a `Peer` or a `Function` only: each keeps the rest in one private object.
These functions return that object. Nothing else reads it from outside.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worqr.client.client import Client
    from worqr.functions.declarations import Declarations
    from worqr.functions.function import Declared, Function
    from worqr.functions.registry import Registry
    from worqr.link import Credentials
    from worqr.mesh import Mesh
    from worqr.peer.engine import Engine
    from worqr.peer.peer import Peer


def client_of(mesh: Mesh[Any]) -> Client:
    """Return what a mesh sends its requests with."""
    return mesh._client


def set_server(mesh: Mesh[Any], *, url: str | None, prefix: str, credentials: Credentials | None) -> None:
    """Have a mesh that is not connected use another server or prefix: the options of ``worqr run``, or the server of a test."""
    mesh._set_server(url, prefix, credentials)


def declarations_of(registry: Registry) -> Declarations:
    """Return the functions and schedules of a registry, or of a mesh, which is one."""
    return registry._declarations


def declared_of(function: Function[..., Any]) -> Declared:
    """Return the declaration that all handles of a function share."""
    return function._declared


def engine_of(peer: Peer) -> Engine:
    """Return the engine that runs a peer."""
    return peer._engine
