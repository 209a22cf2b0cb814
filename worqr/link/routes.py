"""The address for the next connection: fixed for a standalone server, looked up for the others.

Here: the `Route` protocol, and `Fixed`. Not here: the routes that ask servers: Sentinels (`sentinel`), a cluster (`topology`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worqr.link.settings import Endpoint, LinkSettings

Silence = Callable[[], None]
"""Called every 0.1 s while a caller waits for a server; may raise `Lost` to give up."""


class Route(Protocol):
    """Finds the address of one server. Several threads may use it."""

    @property
    def name(self) -> str:
        """The server's name for messages: its URL without secrets, or its place."""
        ...

    def find(self, on_silence: Silence | None = None) -> Endpoint:
        """Return the current address. May ask servers for a second or two.

        Raises:
            Unavailable: no server could report the address.
            RefusedByServer: waiting does not help.
        """
        ...

    def leads_to(self, endpoint: Endpoint) -> bool:
        """Return True if the server is still there, by the latest known address. Does not block."""
        ...

    def doubt(self) -> None:
        """A connection was lost, refused or sent elsewhere: the server may have moved. Returns at once."""
        ...


class Fixed:
    """The route to a server that stays where it is."""

    __slots__ = ("_endpoint", "name")

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name: str = name
        self._endpoint = endpoint

    def find(self, on_silence: Silence | None = None) -> Endpoint:
        return self._endpoint

    def leads_to(self, endpoint: Endpoint) -> bool:
        return True

    def doubt(self) -> None:
        pass


def route_to(settings: LinkSettings) -> Route:
    """The route to the one server that the settings name."""
    return Fixed(settings.address.redacted, settings.address.seeds[0])
