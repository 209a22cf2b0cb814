"""The connections and the producer of a mesh on a bench: they use the clock of the bench, and record the calls that are sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.connections import Connection, ConnectionRegistry
from worqr.client.job import Job
from worqr.client.producer import Producer
from worqr.client.settings import ClientSettings
from worqr.errors import NotReplicated
from worqr.keys import QueueKeys
from worqr.link import Link, LinkSettings, driver_here, loop_here
from worqr.ops import Dispatched
from worqr.testing.clock import BenchLink

R = TypeVar("R")


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


class BenchProducer(Producer):
    """Sends calls, and records those that the server has accepted."""

    def __init__(self, client: Client, sent: list[Call[Any]]) -> None:
        super().__init__(client)
        self._sent = sent

    async def enqueue(self, call: Call[Any]) -> None:
        """As `Producer.enqueue`."""
        await super().enqueue(call)
        self._sent.append(call)

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """As `Producer.dispatch`."""
        job = await super().dispatch(call)
        self._sent.append(call)
        return job

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """As `Producer.enqueue_many`."""
        sent = list(calls)
        stored = await super().enqueue_many(sent)
        self._sent.extend(sent)
        return stored

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As `Producer.dispatch_many`."""
        sent = list(calls)
        jobs = await super().dispatch_many(sent)
        self._sent.extend(sent)
        return jobs

    async def dispatch_members(
        self,
        calls: Sequence[Call[R]],
        options_at: Callable[[QueueKeys], Awaitable[Mapping[str, object]]],
        late: NotReplicated | None = None,
    ) -> tuple[list[tuple[Dispatched, QueueKeys]], NotReplicated | None]:
        """As `Producer.dispatch_members`."""
        outcomes, late = await super().dispatch_members(calls, options_at, late)
        stored = [
            call for call, (done, _) in zip(calls, outcomes, strict=True) if done.outcome in {"created", "blocked"}
        ]
        self._sent.extend(stored)
        return outcomes, late
