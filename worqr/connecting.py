"""The links of one mesh: one per running loop, counted, so that nested and parallel connections share it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from worqr import ops
from worqr.embedded import EmbeddedServer, shared_server
from worqr.errors import UsageError
from worqr.keys import RegistryKeys
from worqr.link import Link, LinkSettings, TrioMailbox

if TYPE_CHECKING:
    from worqr.mesh import Mesh

NOTE_EVERY: Final = 3600.0
"""Seconds after which a queue's name is noted again for those who list queues."""


@dataclass(slots=True)
class Connection:
    """The link of one running loop. Changed only in that loop."""

    link: Link
    server: AbstractContextManager[EmbeddedServer] | None
    users: int = 0
    noted: dict[str, float] = field(default_factory=dict[str, float])

    def note(self, mesh: Mesh[Any], queue: str) -> None:
        """Remember the queue's name in the server, now and then."""
        now = time.monotonic()
        if self.noted.get(queue, -NOTE_EVERY) + NOTE_EVERY <= now:
            self.noted[queue] = now
            call = ops.note_queues(RegistryKeys(mesh.prefix), [queue])
            self.link.post(call, lambda _word, _failure: None, patience=mesh.patience)


class Connections:
    """The connections of one mesh, by the running loop."""

    def __init__(self) -> None:
        self._by_loop: dict[object, Connection] = {}

    @property
    def any(self) -> bool:
        """True while some loop is connected."""
        return bool(self._by_loop)

    def here(self) -> Connection:
        """The connection of the running loop.

        Raises:
            UsageError: there is none.
        """
        token = trio.lowlevel.current_trio_token() if trio.lowlevel.in_trio_run() else None
        connection = self._by_loop.get(token)
        if connection is None:
            raise UsageError(
                "this mesh is not connected here: use it inside `async with mesh.connect():` (or mesh.join())"
            )
        return connection

    @asynccontextmanager
    async def open(self, mesh: Mesh[Any]) -> AsyncGenerator[None]:
        """A connection for the length of a block; see ``Mesh.connect``."""
        if not trio.lowlevel.in_trio_run():
            raise UsageError("mesh.connect() needs a running Trio loop: use it inside trio.run(...)")
        token = trio.lowlevel.current_trio_token()
        connection = self._by_loop.get(token) or await self._make(mesh, token)
        connection.users += 1
        try:
            await connection.link.wait_ready()
            yield
        finally:
            connection.users -= 1
            if connection.users == 0:
                del self._by_loop[token]
                connection.link.close()
                await _release(connection.server)

    async def _make(self, mesh: Mesh[Any], token: object) -> Connection:
        """The connection of this loop, made now; the embedded server, if that is meant, runs as long as it."""
        url = mesh.url or os.environ.get("WORQR_URL") or os.environ.get("REDIS_URL") or "redis://localhost:6379/0"
        server: AbstractContextManager[EmbeddedServer] | None = None
        if url == "embedded:":
            server = shared_server()
            with trio.CancelScope(shield=True):
                url = (await trio.to_thread.run_sync(server.__enter__)).url
            if token in self._by_loop:  # somebody else was quicker
                await _release(server)
                return self._by_loop.get(token) or await self._make(mesh, token)
        link = self.new_link(LinkSettings(url, prefix=mesh.prefix, app=mesh.app, patience=mesh.patience))
        link.start()
        connection = self._by_loop[token] = Connection(link, server)
        return connection

    def new_link(self, settings: LinkSettings) -> Link:
        """A link of the running loop, not started. A test's may be another one."""
        return Link(settings, TrioMailbox())


async def _release(server: AbstractContextManager[EmbeddedServer] | None) -> None:
    """Let go of the embedded server; the last who does stops it."""
    if server is not None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.__exit__, None, None, None)
