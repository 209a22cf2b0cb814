"""Access to the internals of the public objects, for other modules of worqr.

An editor shows users only the documented names of a `Mesh`, a `Peer` or a `Function`, because each keeps the rest in one private
object. These functions return that object. No other code reads it from outside.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


class _HasClient(Protocol[T_co]):
    @property
    def _client(self) -> T_co: ...


class _HasPeers(Protocol[T_co]):
    @property
    def _peers(self) -> T_co: ...


class _HasServer(Protocol[C_contra]):
    def _set_server(self, url: str | None, prefix: str, credentials: C_contra) -> None: ...


class _HasDeclarations(Protocol[T_co]):
    @property
    def _declarations(self) -> T_co: ...


class _HasDefinition(Protocol[T_co]):
    @property
    def _definition(self) -> T_co: ...


class _HasEngine(Protocol[T_co]):
    @property
    def _engine(self) -> T_co: ...


class _HasRun(Protocol[T_co]):
    @property
    def _run(self) -> T_co: ...


class _HasOptions(Protocol[T_co]):
    @property
    def _options(self) -> T_co: ...


class _HasReadings(Protocol[T_co]):
    def _readings(self) -> T_co: ...


def client_of(mesh: _HasClient[T_co]) -> T_co:
    """Return the client of a mesh, which sends its requests."""
    return mesh._client


def peers_of(mesh: _HasPeers[T_co]) -> T_co:
    """Return the factory that makes the peers of a mesh."""
    return mesh._peers


def set_server(mesh: _HasServer[C_contra], *, url: str | None, prefix: str, credentials: C_contra) -> None:
    """Let a mesh that is not connected use another server or prefix, for the options of ``worqr run`` or for a test."""
    mesh._set_server(url, prefix, credentials)


def declarations_of(registry: _HasDeclarations[T_co]) -> T_co:
    """Return the functions and schedules of a registry, or of a mesh, which is one."""
    return registry._declarations


def definition_of(function: _HasDefinition[T_co]) -> T_co:
    """Return the definition that all handles of a function share."""
    return function._definition


def engine_of(peer: _HasEngine[T_co]) -> T_co:
    """Return the engine that runs a peer."""
    return peer._engine


def run_of(context: _HasRun[T_co]) -> T_co:
    """Return the run that a context shows to its handler."""
    return context._run


def options_of(call: _HasOptions[T_co]) -> T_co:
    """Return the encoded options of a call."""
    return call._options


def readings_of(peer: _HasReadings[T_co]) -> T_co:
    """Return the state of a peer as numbers; None before it has joined."""
    return peer._readings()


current_run: Final[ContextVar[Any]] = ContextVar("worqr.run")
"""The run that this code belongs to. It is set in the slot before the handler begins."""
