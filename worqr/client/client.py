"""`Client`: sends the requests of one mesh.

Its queues, jobs and functions hold it instead of the mesh. It owns the connections, the producer, and the numbers of shards that
this program declared. A test replaces the producer and the connections here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

from worqr import ops
from worqr.client.batch import BatchMaker
from worqr.client.connections import ClientSettings, ConnectionRegistry
from worqr.client.inspection import MeshInfoReader
from worqr.client.producer import Producer
from worqr.client.room import RoomChannels
from worqr.client.shard_directory import ShardDirectory
from worqr.client.topics import TopicDirectory
from worqr.codecs import StoredValues
from worqr.command import Command
from worqr.embedded import Relocation
from worqr.errors import UsageError, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link

T = TypeVar("T")

NOTE_PATIENCE: Final = 2.0
"""Seconds that an action waits at most until its entry in the log is written."""

_actor: ContextVar[str] = ContextVar("worqr.actor", default="")


@contextmanager
def acting_for(who: str) -> Generator[None]:
    """Name the person who acts in the block, for the log of the mesh, in place of the client's `who`."""
    token = _actor.set(who)
    try:
        yield
    finally:
        _actor.reset(token)


class SlotWatch(Protocol):
    """Detects a handler that waits for a job for which its own worker has no free slot. See `worqr.peer.scheduler`."""

    def should_check(self) -> bool:
        """Return True if it is time to check the state of the job."""
        ...

    def warn(self, id: str) -> None:
        """Log that the job of this id still waits."""
        ...


class Client:
    """The client of one mesh.

    Attributes:
        settings: the settings of the mesh.
        values: encodes and decodes what the mesh stores; None: it has no codec.
        declared_shards: the number of shards that this program declared for a queue, by the queue's name.
        connections: the connection of each running loop, and that of plain threads.
        slot_watch: makes the `SlotWatch` of a call that waits for a job of this queue.
        producer: sends tasks, jobs and calls.
        batch_maker: makes the batches.
        mesh_info: reads the whole mesh.
        topics: what queues are subscribed to.
        observer: a test's callback for each run that did not return normally, with its context and error; else None.
        relocation: where a test has moved the mesh to; else None.
    """

    def __init__(self, settings: ClientSettings, slot_watch: Callable[[str], SlotWatch]) -> None:
        self.settings = settings
        codec = settings.codec
        self.values = None if codec is None else StoredValues(codec, accept_plain=settings.accept_plain)
        self.declared_shards: dict[str, int] = {}
        self.connections: ConnectionRegistry = ConnectionRegistry(settings, self.declared_shards)
        self.slot_watch = slot_watch
        self.producer: Producer = Producer(self, settings.tracing)
        self.batch_maker: BatchMaker = BatchMaker()
        self.mesh_info: MeshInfoReader = MeshInfoReader(self)
        self.topics: TopicDirectory = TopicDirectory(self)
        self.observer: Callable[[Any, BaseException], None] | None = None
        self.relocation: Relocation | None = None
        self._who = settings.app

    @contextmanager
    def replaced(
        self,
        *,
        producer: Producer,
        connections: ConnectionRegistry,
        observer: Callable[[Any, BaseException], None] | None = None,
        relocation: Relocation | None = None,
        batch_maker: BatchMaker | None = None,
    ) -> Generator[None]:
        """Use another producer and other connections in the block. For tests, while the mesh is not connected."""
        own = dict(vars(self))
        self.producer, self.connections, self.mesh_info = producer, connections, MeshInfoReader(self)
        self.observer, self.relocation, self.batch_maker = observer, relocation, batch_maker or self.batch_maker
        self.topics.reset()
        try:
            yield
        finally:
            vars(self).update(own)
            self.topics.reset()

    def act_as(self, who: str) -> None:
        """Name the person or program that acts, for the log of the mesh."""
        self._who = who

    @property
    def who(self) -> str:
        """The program or person that acts, for the log of the mesh."""
        return _actor.get() or self._who

    async def note(
        self,
        kind: str,
        *,
        queue: str = "",
        worker: str = "",
        job: str = "",
        count: int | None = None,
        text: str = "",
    ) -> None:
        """Append an entry to the log of the mesh. The action itself is done: an error here is no error of it."""
        keys, who = RegistryKeys(self.settings.prefix), self.who
        call = ops.note_event(keys, kind, who=who, queue=queue, worker=worker, job=job, count=count, text=text)
        with suppress(WorqrError):
            await self.link.call(call, patience=NOTE_PATIENCE)

    @property
    def link(self) -> Link:
        """The link of the running loop. Raises UsageError outside `connect`."""
        return self.connections.for_current_loop().link

    @property
    def sharding(self) -> ShardDirectory:
        """The shards that the running loop's connection knows. Raises UsageError outside `connect`."""
        return self.connections.for_current_loop().sharding

    @property
    def rooms(self) -> RoomChannels:
        """The channels of the running loop's connection, by which it waits for room. Raises UsageError outside `connect`."""
        return self.connections.for_current_loop().rooms

    def link_to(self, queue: str) -> Link:
        """Return the link for tasks of this queue or shard, and store the name, so that `mesh.queues()` lists the queue."""
        connection = self.connections.for_current_loop()
        connection.note_queue(self.settings, queue)
        return connection.link

    async def ask(self, call: Command[T]) -> T:
        """Send one request and wait for its reply."""
        return await self.connections.for_current_loop().link.call(call)

    def check_connected(self) -> None:
        """Raise UsageError outside `connect`."""
        self.connections.for_current_loop()

    def declare_shards(self, queue: str, shards: int) -> None:
        """Set the number of shards of a queue. It is compared with the server's when the queue is used.

        Raises:
            UsageError: this program declared another number before.
        """
        if self.declared_shards.setdefault(queue, shards) != shards:
            raise UsageError(
                f"queue {queue!r} was declared with {self.declared_shards[queue]} shards, and then with {shards}: say it once"
            )
