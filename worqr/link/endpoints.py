"""The address for the next connection: fixed for a standalone server, looked up for the others.

Here: the `EndpointResolver` protocol, and `StaticEndpoint`. Not here: the resolvers that ask servers: Sentinels (`sentinel`), a
cluster (`topology`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worqr.link.settings import Endpoint, LinkSettings

OnSilence = Callable[[], None]
"""Called every 0.1 s while a caller waits for a server; may raise `ConnectionLost` to give up."""


class EndpointResolver(Protocol):
    """Finds the address of one server. Several threads may use it."""

    @property
    def name(self) -> str:
        """The server's name for messages: its URL without secrets, or its address."""
        ...

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        """Return the current address. May ask servers for a second or two.

        Raises:
            Unavailable: no server could report the address.
            RefusedByServer: waiting does not help.
        """
        ...

    def is_current(self, endpoint: Endpoint) -> bool:
        """Return True if the server is still there, by the latest known address. Does not block."""
        ...

    def invalidate(self) -> None:
        """A connection was lost, refused or redirected: the server may have moved. Returns at once."""
        ...


class StaticEndpoint:
    """The address of a server that stays where it is."""

    __slots__ = ("_endpoint", "name")

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name: str = name
        self._endpoint = endpoint

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        return self._endpoint

    def is_current(self, endpoint: Endpoint) -> bool:
        return True

    def invalidate(self) -> None:
        pass


def resolver_for(settings: LinkSettings) -> EndpointResolver:
    """Return the resolver for the server of the settings."""
    return StaticEndpoint(settings.address.redacted, settings.address.seeds[0])
