"""The connections of a mesh on a bench, which use the clock of the bench."""

from __future__ import annotations

from collections.abc import Mapping

from worqr.client.connections import Connection, ConnectionRegistry
from worqr.client.settings import ClientSettings
from worqr.link import Link, LinkSettings, driver_here, loop_here
from worqr.testing.clock import BenchLink


class BenchConnections(ConnectionRegistry):
    """The connections of a mesh on a bench."""

    def __init__(self, settings: ClientSettings, declared_shards: Mapping[str, int]) -> None:
        super().__init__(settings, declared_shards)
        self._kept: list[Connection] = []

    async def keep(self) -> None:
        """Connect the running loop until `end_kept` is called."""
        loop = loop_here()
        connection = self._by_loop.get(loop) or await self._make(loop)
        connection.add_user()
        self._kept.append(connection)
        await connection.link.wait_ready()
        await connection.sharding.initialize()

    def end_kept(self) -> None:
        """Disconnect the loops that `keep` has connected. Any thread may call this."""
        for loop, connection in list(self._by_loop.items()):
            if connection in self._kept:
                del self._by_loop[loop]
                connection.link.close()

    def new_link(self, settings: LinkSettings) -> Link:
        """Return a link that uses the clock of the bench."""
        return BenchLink(settings, driver_here())
