"""Where the next connection goes. One server stays where it is; the others have to be asked for.

Here: the `Route` protocol, and `Fixed`. Not here: those who know better: Sentinels (`sentinel`), a cluster (`topology`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worqr.link.settings import Endpoint, LinkSettings

Silence = Callable[[], None]
"""Called every 0.1 s while somebody waits for a server; may raise `Lost` to give up."""


class Route(Protocol):
    """Knows where the server is that some connections lead to. Used by several threads."""

    @property
    def name(self) -> str:
        """The server's name for messages: its URL without secrets, or its place."""
        ...

    def find(self, on_silence: Silence | None = None) -> Endpoint:
        """Where it is now. May ask around for a second or two.

        Raises:
            Unavailable: nobody knows. RefusedByServer: waiting does not help.
        """
        ...

    def leads_to(self, endpoint: Endpoint) -> bool:
        """Is it (still) there, as far as we know? Returns at once."""
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
