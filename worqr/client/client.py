"""`Client`: how the objects of one mesh reach its server.

A `Mesh` has one, and passes it to its queues, jobs, functions and peers. It is internal: `Mesh` has the public methods. The
client owns the connections, the sender, and the numbers of shards that this program declared. The mesh has the settings.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from worqr.client.connections import Connections
from worqr.client.producer import Sender
from worqr.client.shard_directory import Sharding
from worqr.errors import UsageError
from worqr.link import Credentials, Link
from worqr.relocation import Relocation
from worqr.script_call import Call

if TYPE_CHECKING:
    from worqr.peer.settings import Onlooker

T = TypeVar("T")


class Settings(Protocol):
    """The settings of a mesh that a client needs; see `Mesh`. They may change while the mesh is not connected."""

    @property
    def url(self) -> str | None: ...
    @property
    def credentials(self) -> Credentials | None: ...
    @property
    def prefix(self) -> str: ...
    @property
    def app(self) -> str: ...
    @property
    def patience(self) -> float: ...
    @property
    def keepalive(self) -> float | None: ...
    @property
    def max_payload(self) -> int: ...
    @property
    def replicas(self) -> int: ...


class Client:
    """The client of one mesh.

    Attributes:
        settings: the settings of the mesh.
        connections: the connection of each running loop, and that of plain threads.
        sender: sends the calls of functions.
        onlooker: a test's callback for each run that did not return normally; else None.
        relocation: where a test has moved the mesh to; else None.
        declared_shards: how many shards this program declared for a queue, by the queue's name.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.connections: Connections = Connections()
        self.sender: Sender = Sender(self)
        self.onlooker: Onlooker | None = None
        self.relocation: Relocation | None = None
        self.declared_shards: dict[str, int] = {}

    @property
    def link(self) -> Link:
        """The link of the running loop; UsageError outside `connect`."""
        return self.connections.here().link

    @property
    def sharding(self) -> Sharding:
        """The shards that the running loop's connection knows; UsageError outside `connect`."""
        return self.connections.here().sharding

    def link_to(self, queue: str) -> Link:
        """Return the link for tasks that go into `queue`, or into this shard of it; note the name for lists of queues."""
        connection = self.connections.here()
        connection.note(self.settings, queue)
        return connection.link

    async def ask(self, call: Call[T]) -> T:
        """Send one request and wait for its reply."""
        return await self.connections.here().link.call(call)

    def check_connected(self) -> None:
        """Raise UsageError outside `connect`."""
        self.connections.here()

    def declare_shards(self, queue: str, shards: int) -> None:
        """Set how many shards a queue has. The server compares it when the queue is used.

        Raises:
            UsageError: this program declared another number before.
        """
        if self.declared_shards.setdefault(queue, shards) != shards:
            raise UsageError(
                f"queue {queue!r} was declared with {self.declared_shards[queue]} shards, and then with {shards}: say it once"
            )

    @contextmanager
    def replaced(
        self,
        *,
        sender: Sender,
        connections: Connections,
        onlooker: Onlooker | None = None,
        relocation: Relocation | None = None,
    ) -> Generator[None]:
        """Use another sender and other connections for the length of a block. For tests, while the mesh is not connected."""
        own = self.sender, self.connections, self.onlooker, self.relocation
        self.sender, self.connections, self.onlooker, self.relocation = sender, connections, onlooker, relocation
        try:
            yield
        finally:
            self.sender, self.connections, self.onlooker, self.relocation = own
