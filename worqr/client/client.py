"""`Client`: sends the requests of one mesh.

Its queues, jobs and functions hold it instead of the mesh. It owns the connections, the producer, and the numbers of shards that
this program declared. A test replaces the producer and the connections here, and nowhere else.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count, islice
from math import ceil
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, ParamSpec, Protocol, TypeVar, cast

from worqr import ops
from worqr.child_processes import refuse_while_importing
from worqr.client.batch import BatchMaker
from worqr.client.inspection import MeshInfoReader
from worqr.client.permits import HeldPermits, PermitLines
from worqr.client.producer import Producer
from worqr.client.room import RoomChannels
from worqr.client.topics import TopicDirectory
from worqr.codecs import Codec, StoredValues, check_codec
from worqr.command import Command
from worqr.embedded import EmbeddedServer, Relocation, relocated, server_of_parent, shared_server
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.handler_options import HandlerOptions, check_defaults, is_async
from worqr.job_options import check_replicas
from worqr.keys import MAX_SHARDS, QueueKeys, RegistryKeys, check_name, shard_of, shards_of
from worqr.link import (
    DEFAULT,
    GIVEN,
    Credentials,
    GivenCredentials,
    Link,
    LinkSettings,
    answer_timeout,
    checked_credentials,
    driver_here,
    here,
    loop_here,
    loop_name_here,
    run_blocking,
)
from worqr.log_events import emit
from worqr.stored_values import readable
from worqr.tracing import FencedTracing, Tracing
from worqr.validation import Seconds, check_count, check_text, seconds

# The links of one mesh: one per running loop, Trio's or asyncio's, and one for plain threads.
#
# The users of a loop's link are counted, so that nested and parallel blocks share it.

# `ShardDirectory`: the number of shards of each queue, as one connection knows it. The first declaration in a mesh decides
# it.
#
# The registry stores the numbers. A connection reads them when it is made, at each join, and every hour. Before a queue is
# used for the first time, the number that this program declares is compared with the stored one. `worqr.keys` computes the
# shard of a task.

logger: logging.Logger = logging.getLogger(__name__)

REFRESH_EVERY: Final = 3600.0
"""Seconds after which a connection reads the declarations of other programs again."""


class ShardDirectory:
    """The numbers of shards that one connection knows.

    `declared` has the declarations of this program. The program may add more.
    """

    def __init__(self, link: Link, prefix: str, declared: Mapping[str, int]) -> None:
        self._link = link
        self._keys = RegistryKeys(prefix)
        self._declared = declared
        self._known: dict[str, int] = {}
        self._counters: dict[str, count[int]] = {}
        self._wrong: set[str] = set()
        self._refreshed_at = 0.0

    def copy_for(self, link: Link) -> ShardDirectory:
        """Return a `ShardDirectory` of another link to the same mesh, with the same initial numbers."""
        copy = ShardDirectory(link, self._keys.prefix, self._declared)
        copy._known, copy._wrong, copy._refreshed_at = self._known, self._wrong, self._refreshed_at
        return copy

    # Reading

    async def initialize(self) -> None:
        """Read the declarations of other programs, and send those of this program. A second call does nothing.

        It ignores a conflicting number. The first use of the queue raises the error, or the join of a peer.
        """
        if self._refreshed_at > 0:
            return
        await self.refresh()
        with suppress(UsageError):
            await self.declare()

    async def refresh(self) -> None:
        """Read the numbers of all queues.

        Raises:
            WrongVersion: the mesh has another wire version. This is the first request of a connection, so nothing was written.
            RefusedByServer, Unavailable: as any request.
        """
        self._store(await self._link.call(ops.list_shards(self._keys)))

    def refresh_if_stale(self) -> None:
        """Read the numbers again if they are older than `REFRESH_EVERY`, without waiting for the reply."""
        if self._refreshed_at + REFRESH_EVERY <= time.monotonic():
            self._refreshed_at = time.monotonic()

            def answered(known: dict[str, int | None] | None, _failure: Exception | None) -> None:
                if known is not None:
                    self._store(known)

            self._link.post(ops.list_shards(self._keys), answered, patience=REFRESH_EVERY)

    def _store(self, known: Mapping[str, int | None]) -> None:
        self._refreshed_at = time.monotonic()
        self._known = {name: number for name, number in known.items() if number and 1 < number <= MAX_SHARDS}
        wrong = {name for name, number in known.items() if not number or number > MAX_SHARDS}
        if wrong - self._wrong:
            self._wrong |= wrong
            text = "%(key)s has no valid number for queue %(queue)r (%(count)d such queues), which counts as 1; remove it: HDEL"
            emit(logger, "shards", text, key=self._keys.shards, queue=readable(min(wrong)), count=len(wrong))

    async def declare(self) -> None:
        """Send the declarations of this program that the server does not have yet.

        Raises:
            UsageError: another program declared another number first.
        """
        new = {queue: number for queue, number in self._declared.items() if self._known.get(queue) != number}
        if not new:
            return
        stored = await self._link.call(ops.declare_shards(self._keys, new))
        self._known = {**self._known, **stored}
        for queue in new:
            self._check(queue)

    def _check(self, queue: str) -> None:
        declared, known = self._declared[queue], self._known.get(queue, 1)
        if declared != known and queue in self._wrong:
            raise UsageError(
                f"the number of shards of queue {queue!r} in the hash {self._keys.shards} is not valid, and {declared} were "
                f"declared here: remove it with `HDEL {self._keys.shards} {queue}`, and connect again"
            )
        if declared != known:
            raise UsageError(
                f"queue {queue!r} has {known} shards in the mesh {self._keys.prefix!r}, and {declared} were declared here: "
                f"declare {known}; or let it run empty, stop its peers, and `await mesh.queue({queue!r}).delete()` where no "
                "number is declared, which forgets it"
            )

    async def forget(self, queue: str) -> bool:
        """Delete the number of a queue, so that the next declaration decides. Returns False if another program changed it
        meanwhile.
        """
        number = self._known.get(queue, 1)
        dropped = number == 1 or await self._link.call(ops.drop_shards(self._keys, queue, number)) == "ok"
        self._known = {name: each for name, each in self._known.items() if name != queue}
        return dropped

    # Choosing shards

    async def shards(self, keys: QueueKeys, *, declare: bool = True) -> tuple[QueueKeys, ...]:
        """Return all shards of a queue; for the keys of a shard, only that one.

        With `declare`, first declare the number of this program if it is not the stored one.

        Raises:
            UsageError: this program declares another number than the mesh knows.
        """
        number = self._known.get(keys.queue, 1)
        if declare and self._declared.get(keys.queue, number) != number:
            try:
                await self.declare()
            except UsageError:
                self._check(keys.queue)  # raises if this queue conflicts; a conflict of another queue is no reason
            number = self._known[keys.queue]
        return (keys,) if number == 1 or keys.tag else shards_of(keys, number)

    def only_shard(self, keys: QueueKeys) -> QueueKeys | None:
        """Return the shard of a queue that has no other, and about which nothing is to be declared; else None."""
        name, known, declared = keys.queue, self._known, self._declared
        alone = (name not in known or known[name] == 1) and (name not in declared or declared[name] == 1)
        return keys if alone else None

    async def shard_of_id(self, keys: QueueKeys, id: str) -> QueueKeys:
        """Return the shard of the job with this id."""
        return shard_of(await self.shards(keys), id)

    async def shard_for_job(self, keys: QueueKeys, options: Mapping[str, object]) -> QueueKeys:
        """Return the shard for a job with these options, as `worqr.job_options` encodes them: that of its lane, or of its id.

        Raises:
            UsageError: the queue has several shards, and the job has a lane and an id, each of which may lie in another one.
        """
        given, lane = options.get("id"), options.get("lane")
        if isinstance(lane, str):
            shards = await self.shards(keys)
            if given is not None and len(shards) > 1:
                raise UsageError(
                    f"queue {keys.display_name!r} has several shards: a job has an id or a lane there, not both, because each "
                    "decides about its shard"
                )
            return shard_of(shards, lane)
        return await self.shard_of_id(keys, given) if isinstance(given, str) else await self.next_shard(keys)

    async def max_length_per_shard(self, keys: QueueKeys, max_length: int) -> int:
        """Return the part of a queue's limit that applies to one shard."""
        return ceil(max_length / len(await self.shards(replace(keys, tag=""))))

    async def options_for(self, keys: QueueKeys, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the encoded options of a job, with the part of the queue's limit that applies to this shard."""
        bound = options.get("max_length")
        return (
            {**options, "max_length": await self.max_length_per_shard(keys, bound)}
            if isinstance(bound, int)
            else options
        )

    async def next_shard(self, keys: QueueKeys) -> QueueKeys:
        """Return the next shard for tasks without an id. The first is random, because many programs enqueue only once."""
        shards = await self.shards(keys)
        if len(shards) == 1:
            return shards[0]
        counter = self._counters.get(keys.name) or self._counters.setdefault(
            keys.name, count(random.randrange(len(shards)))
        )
        return shards[next(counter) % len(shards)]


# The links of one mesh: one per running loop, Trio's or asyncio's, and one for plain threads.

# The settings with which a mesh reaches its server, and their checks.
#
# `worqr.Mesh` is a `ClientSettings`: its public attributes are these settings. Those of its workers
# are in `worqr.hosting.peer_factory`.


MAX_PATIENCE: Final = 1800.0
"""Seconds. The server stores replies for an hour, and a request that is sent again must find its reply there."""


class ClientSettings:
    """Which server a mesh uses, and how. A test or the command line may change the server while the mesh is not connected."""

    url: str | None
    """The URL of the server, as it was given."""
    credentials: Credentials | None
    """The credentials for the server; None: those of the URL."""
    prefix: str
    """The first part of all keys."""
    app: str
    """The application's name."""
    patience: float
    """Seconds that a call waits for an unavailable server."""
    keepalive: float | None
    """Seconds without a heartbeat after which a worker counts as dead; None: never."""
    max_payload: int
    """The size limit of a task, in bytes."""
    replicas: int
    """The number of replicas that must have a task before an enqueue or dispatch returns."""
    tracing: Tracing | None
    """Makes the spans of sends and runs; None: the mesh is not traced."""
    defaults: HandlerOptions
    """The options of all declared functions that do not have their own."""
    send_middleware: tuple[Callable[[Any], object], ...]
    """The functions that see each call before it is sent, in their order."""
    codec: Codec | None
    """Encodes what is stored of values; None: they are stored as they are."""
    accept_plain: bool
    """Values of programs without the codec are taken."""
    redact_errors: bool
    """Errors are stored without their texts."""

    def __init__(
        self,
        url: str | None,
        credentials: GivenCredentials | None,
        prefix: str,
        app: str,
        patience: Seconds,
        keepalive: Seconds | None,
        max_payload: int,
        replicas: int,
        tracing: Tracing | None,
    ) -> None:
        self.url = _checked_url(url)
        self.credentials = checked_credentials(credentials, self.url)
        self.prefix = check_name(prefix, "prefix")
        if (moved := relocated(self.url, self.prefix)) is not None:
            self.url, self.prefix = moved.url, moved.prefix
            if not moved.keeps_credentials:  # the server of a test
                self.credentials, replicas = None, 0
        self.app = check_text(app, "app")
        self.patience = _checked_patience(patience)
        self.keepalive = None if keepalive is None else _checked_keepalive(keepalive)
        self.max_payload = check_count(max_payload, "max_payload")
        self.replicas = check_replicas(replicas)
        self.tracing = _checked_tracing(tracing)

    def _set_calls(
        self,
        defaults: HandlerOptions | None,
        middleware: Collection[Callable[[Any], object]],
        codec: Codec | None,
        accept_plain: object,
        redact_errors: object,
    ) -> None:
        """Set what all calls of the mesh have in common, and how values and errors are stored. Used once, before any call."""
        self.defaults = check_defaults(defaults)
        self.send_middleware = _checked_send_middleware(middleware)
        self.codec = None if codec is None else check_codec(codec, "codec")
        self.accept_plain = bool(accept_plain)
        self.redact_errors = bool(redact_errors)

    def _set_server(self, url: str | None, prefix: str, credentials: Credentials | None) -> None:
        """Use another server or prefix, while the mesh is not connected. `worqr.inside` calls it."""
        self.url, self.prefix, self.credentials = url, prefix, credentials


def _checked_url(url: object) -> str | None:
    """Return `url` if it is a valid URL of a mesh, else raise UsageError."""
    if url is not None and not isinstance(url, str):
        raise UsageError(f"url must be a str, not {type(url).__name__}")
    return url


def _checked_send_middleware(given: object) -> tuple[Callable[[Any], object], ...]:
    """Return plain functions as a tuple, else raise UsageError."""
    if not isinstance(given, Collection) or isinstance(given, str):
        raise UsageError(f"send_middleware must be a collection of functions, not {given!r}")
    for each in cast("Collection[object]", given):
        if not callable(each) or is_async(each):
            raise UsageError(f"send_middleware must be plain functions (sending), which return nothing, not {each!r}")
    return tuple(cast("Collection[Callable[[Any], object]]", given))


def _checked_tracing(tracing: Any) -> Tracing | None:
    """Return `tracing` with a fence around it if it has the methods of `Tracing`, else raise UsageError."""
    if tracing is not None and (isinstance(tracing, type) or not hasattr(tracing, "sending")):
        raise UsageError(f"tracing must be worqr.otel.Tracing(...) or None, not {tracing!r}")
    return None if tracing is None else FencedTracing(tracing)


def _checked_patience(patience: object) -> float:
    """Return the seconds that a call of a mesh waits for its server; or raise UsageError."""
    checked = seconds(patience, "patience", positive=True)
    if checked > MAX_PATIENCE:
        raise UsageError(f"patience must be at most {MAX_PATIENCE:g} s, not {patience!r}")
    return checked


def _checked_keepalive(keepalive: object) -> float:
    """Return the seconds without a heartbeat after which a worker counts as dead; or raise UsageError."""
    checked = seconds(keepalive, "keepalive", positive=True)
    if checked < 1:
        raise UsageError(f"keepalive must be at least 1 s (ordinary stalls last that long), not {keepalive!r}")
    return checked


# `NotedQueues`: when a producer stores the names of its queues, for `mesh.queues()`. Pure, except for the clock.


MANY_NAMES: Final = 10_000
"""Names that one connection remembers. A program that uses more queues stores their names more often."""


class NotedQueues:
    """Decides when the name of a queue is noted in the server: at its first use, then every NOTE_EVERY seconds while it is used.

    From any thread.

    Attributes:
        until: when each name must be stored again, on the monotonic clock, the earliest first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.until)

    def is_due(self, queue: str) -> bool:
        """Return True if the name is to be noted now; it counts as noted then."""
        now = time.monotonic()
        if now < self.until.get(queue, now):
            return False
        with self._lock:
            self.until.pop(queue, None)
            self.until[queue] = now + ops.NOTE_EVERY
            for oldest in list(islice(self.until, 2)):  # each new name removes up to two old ones
                if self.until[oldest] <= now or len(self.until) > MANY_NAMES:
                    del self.until[oldest]
        return True

    def forget(self, queue: str) -> None:
        """Let the next use store the name again, because the server did not store it."""
        with self._lock:
            self.until.pop(queue, None)


# `async_block`: a context manager for ``async with`` that raises a helpful error when it is used in another way.


P = ParamSpec("P")
T = TypeVar("T")


class _AsyncBlock(AbstractAsyncContextManager[T]):
    __slots__ = ("_block", "_hint")

    def __init__(self, block: AbstractAsyncContextManager[T, bool | None], hint: str) -> None:
        self._block = block
        self._hint = hint

    async def __aenter__(self) -> T:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker reports `with` and `await`, because the methods are missing

        def __enter__(self) -> NoReturn:
            raise UsageError(self._hint)

        def __exit__(self, *error: object) -> None:
            """Never called. Without it, Python would raise an error of its own before it calls `__enter__`."""

        def __await__(self) -> NoReturn:
            raise UsageError(self._hint)


def async_block(
    hint: str,
) -> Callable[[Callable[P, AsyncGenerator[T]]], Callable[P, AbstractAsyncContextManager[T, bool | None]]]:
    """Return ``asynccontextmanager`` for a method that raises UsageError with `hint` if it is used with ``with`` or ``await``."""

    def decorate(generator: Callable[P, AsyncGenerator[T]]) -> Callable[P, AbstractAsyncContextManager[T, bool | None]]:
        make = asynccontextmanager(generator)

        @wraps(generator)
        def block(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T, bool | None]:
            return _AsyncBlock(make(*args, **kwargs), hint)

        return block

    return decorate


CONNECT: Final = (
    "mesh.connect() needs `async with`: write `async with mesh.connect():` inside trio.run(...) or asyncio.run(...). "
    "Where no event loop runs, worqr.sync(fn.enqueue, ...) connects by itself"
)
JOIN: Final = (
    "mesh.join() needs `async with`: write `async with mesh.join():` inside trio.run(...) or asyncio.run(...). "
    "Where no event loop runs, use mesh.run() or `with mesh.join_in_thread():`"
)
EMBEDDED: Final = "embedded:"


@dataclass(slots=True)
class Connection:
    """The link of one running loop, which only code on that loop changes; or the link of all plain threads."""

    link: Link
    server: AbstractContextManager[EmbeddedServer] | None
    sharding: ShardDirectory
    users: int = 0
    was_ready: bool = False
    pid: int = field(default_factory=os.getpid)
    noted: NotedQueues = field(default_factory=NotedQueues)
    rooms: RoomChannels = field(init=False)
    permits: PermitLines = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = RoomChannels(self.link)
        self.permits = PermitLines(self.link)

    def add_user(self) -> None:
        """Count one more block that uses the connection."""
        self.users += 1

    def remove_user(self) -> None:
        """Count one block less."""
        self.users -= 1

    def wait_ready_in_thread(self) -> None:
        """Block until the connection is established. Raises as ``Mesh.connect``."""
        run_blocking(self.link.wait_ready())
        run_blocking(self.sharding.initialize())
        self.was_ready = True

    def note_queue(self, settings: ClientSettings, queue: str) -> None:
        """Store the queue's name on the server, at its first use and every `NOTE_EVERY` seconds."""
        until = self.noted.until
        if queue in until and time.monotonic() < until[queue]:  # checked here: each enqueue would pay for a call
            return
        if self.noted.is_due(queue):

            def answered(_word: str | None, failure: Exception | None) -> None:
                if isinstance(failure, Unavailable):
                    self.noted.forget(queue)

            call = ops.note_queues(RegistryKeys(settings.prefix), [queue])
            self.link.post(call, answered, patience=settings.patience)
            self.sharding.refresh_if_stale()


class ConnectionRegistry:
    """The connections of one mesh, by the running loop.

    Attributes:
        for_threads: the connection of plain threads.
        for_renewals: that of the thread which renews permits, and closes it.
    """

    def __init__(self, settings: ClientSettings, declared_shards: Mapping[str, int]) -> None:
        self.for_threads: ThreadConnection = ThreadConnection(self._make_for_threads)
        self.for_renewals: ThreadConnection = ThreadConnection(self._make_for_threads)
        self._settings = settings
        self._declared_shards = declared_shards
        self._by_loop: dict[object, Connection] = {}
        self._hosted: dict[object, Connection] = {}
        self._inherited: dict[object, Connection] = {}
        _all_connections.add(self)
        weakref.finalize(self, _end_left_behind, self._by_loop).atexit = False

    @property
    def any(self) -> bool:
        """True while a loop is connected."""
        return bool(self._by_loop)

    def for_current_loop(self) -> Connection:
        """Return the connection of the running loop; in a thread that `worqr.sync` blocks, the connection of all such threads.

        Raises:
            UsageError: there is none.
            RefusedByServer, WrongVersion, Unavailable: in a thread, as ``Mesh.connect``.
        """
        if here.in_sync:  # `worqr.sync` has made sure that no loop runs in this thread
            return self.for_threads.get()
        loop = loop_here()
        if loop is not None:
            if loop in self._by_loop:
                return self._by_loop[loop]
            if loop in self._hosted:
                return self._connect_hosted(loop)
        if loop in self._inherited:
            raise UsageError(
                "this mesh was connected before a fork, and the connection and this event loop belong to the parent: "
                "in the child, run a new event loop with `async with mesh.connect():`, or use worqr.sync(fn.enqueue, ...)"
            )
        raise UsageError(
            "this mesh is not connected here: use it inside `async with mesh.connect():` (or mesh.join()); "
            "where no event loop runs, write worqr.sync(fn.enqueue, ...)"
        )

    def open(self) -> AbstractAsyncContextManager[None]:
        """Connect for the length of a block; see ``Mesh.connect``.

        This is no generator: asyncio closes all generators of a loop that ends, in any order. The block of a program that forgot
        to leave it would then find this one closed, and log an error.
        """
        return _Block(self)

    async def enter(self) -> tuple[object, Connection]:
        """Begin a block. Return its loop, and the connection of that loop."""
        loop = loop_here()
        if loop is None:
            raise UsageError(
                "mesh.connect() needs a running loop: use it inside trio.run(...) or asyncio.run(...); "
                "where none runs, worqr.sync(fn.enqueue, ...) connects by itself"
            )
        connection = self._by_loop.get(loop)
        if connection is None:
            connection = self._connect_hosted(loop) if loop in self._hosted else await self._make(loop)
        connection.add_user()
        try:
            await connection.link.wait_ready()
            await connection.sharding.initialize()
        except BaseException:
            await self.leave(loop, connection)
            raise
        return loop, connection

    async def leave(self, loop: object, connection: Connection) -> None:
        """End a block. The last one disconnects."""
        connection.remove_user()
        if connection.users == 0 and self._by_loop.get(loop) is connection:  # else `_end_left_behind` has ended it
            del self._by_loop[loop]
            connection.link.close()
            await _release(connection.server)

    async def _make(self, loop: object) -> Connection:
        """Make the connection of this loop. If the URL requests an embedded server, the server runs as long as the connection."""
        _end_left_behind(self._by_loop)
        url = _url(self._settings)
        server: AbstractContextManager[EmbeddedServer] | None = None
        if url == EMBEDDED:
            server = shared_server()
            url = await _start(server)
            if loop in self._by_loop:  # another task has connected meanwhile
                await _release(server)
                return self._by_loop.get(loop) or await self._make(loop)
        try:
            link = self.new_link(_link_settings(self._settings, url))
            link.start()
        except BaseException:
            await _release(server)
            raise
        connection = self._by_loop[loop] = self._connection(link, server)
        return connection

    def _make_for_threads(self) -> Connection:
        """Make the connection of plain threads, which is not started; an embedded server is started here."""
        url = _url(self._settings)
        server: AbstractContextManager[EmbeddedServer] | None = None
        if url == EMBEDDED:
            server = shared_server()
            url = server.__enter__().url
        return self._connection(self.new_link(_link_settings(self._settings, url)), server)

    def _connection(self, link: Link, server: AbstractContextManager[EmbeddedServer] | None) -> Connection:
        return Connection(link, server, ShardDirectory(link, self._settings.prefix, self._declared_shards))

    @contextmanager
    def hosting(self, loop: object, peers: Connection) -> Generator[None]:
        """Let the asyncio loop of a peer connect by itself at its first use of the mesh; disconnect it when the block ends.

        Args:
            loop: the loop, which runs inside the block, in this thread.
            peers: the connection of the peer.
        """
        self._hosted[loop] = peers
        try:
            yield
        finally:
            del self._hosted[loop]
            connection = self._by_loop.pop(loop, None)
            if connection is not None:
                connection.link.close()

    def _connect_hosted(self, loop: object) -> Connection:
        """Connect the running loop until `hosting` ends. The connection starts with the shard numbers of the peer."""
        peers = self._hosted[loop]
        link = self.new_link(peers.link.settings)
        link.start()
        connection = self._by_loop[loop] = Connection(link, None, peers.sharding.copy_for(link), users=1)
        return connection

    def forget(self) -> None:
        """Drop all connections in a forked child, because they belong to the parent.

        Even a request that fails would wait for a lock of Trio, which a thread of the parent may have held at the fork.
        """
        self._inherited |= self._by_loop
        self._by_loop.clear()
        self.for_threads.forget()
        self.for_renewals.forget()

    def new_link(self, settings: LinkSettings) -> Link:
        """Return a link that is not started, for the running loop or else for plain threads. Tests may replace it."""
        return Link(settings, driver_here())


class _Block(AbstractAsyncContextManager[None]):
    """One block in which a loop is connected."""

    def __init__(self, connections: ConnectionRegistry) -> None:
        self._connections = connections
        self._entered: tuple[object, Connection] | None = None

    async def __aenter__(self) -> None:
        self._entered = await self._connections.enter()

    async def __aexit__(self, *_: object) -> None:
        if self._entered is not None:
            await self._connections.leave(*self._entered)


def check_loop(what: str) -> Literal["Trio", "asyncio"]:
    """Return the kind of the running loop. Raises UsageError if none runs."""
    loop = loop_name_here()
    if not loop:
        raise UsageError(
            f"{what} needs a running loop, as inside trio.run(...) or asyncio.run(...): where none runs, use "
            "mesh.join_in_thread(), a peer in a thread of its own"
        )
    return loop


EXITING: Final = (
    "the interpreter ends, and connects no more: what sends in a `__del__` or a finalizer may run too late; use a block, or "
    "atexit.register"
)


class ThreadConnection:
    """The connection of all plain threads, or of one.

    It is made at first use. It ends with `close`, with the mesh, or with the interpreter. A forked child begins without one.
    """

    def __init__(self, make: Callable[[], Connection]) -> None:
        """Prepare it. `make` returns a connection that is not started."""
        self._make = make
        self._greet: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._end: weakref.finalize[[Connection], ThreadConnection] | None = None

    def greet_with(self, greet: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Set what a thread sends first, when it has established the connection."""
        self._greet = greet

    def get(self) -> Connection:
        """Return the connection; block until it is first established.

        Raises: as ``Mesh.connect``.
        """
        connection = self._connection
        if connection is not None and connection.link.has_ended:  # a Ctrl-C has interrupted a change of it
            self.close(only=connection)
            connection = None
        if connection is None:
            with self._lock:
                connection = self._connection or self._start()
        if not connection.was_ready:
            connection.wait_ready_in_thread()
            if self._greet is not None:
                run_blocking(self._greet())
        return connection

    def _start(self) -> Connection:
        if sys.is_finalizing():
            raise UsageError(EXITING)
        connection = self._make()
        end = self._end = weakref.finalize(self, _end, connection)
        end.atexit = False  # `_at_exit` ends it
        try:
            connection.link.start()
        except BaseException:
            end()
            raise
        self._connection = connection
        return connection

    def close(self, *, only: Connection | None = None) -> None:
        """Disconnect within about a second. Calls that wait for a reply raise Unavailable; the next call connects again.

        Args:
            only: do nothing if this is no longer the connection.
        """
        with self._lock:
            if only is not None and self._connection is not only:
                return  # another thread has closed it, and may have connected again
            end, self._end, self._connection = self._end, None, None
        if end is not None and (found := end.detach()) is not None:
            _end(*found[2])  # not `end()`, which does nothing while the interpreter exits

    def forget(self) -> None:
        """Drop the connection in a forked child, without an effect on the parent, which owns it."""
        if self._end is not None:
            self._end.detach()
        if self._connection is not None:
            _inherited.append(self._connection.server)
        self._lock = threading.Lock()  # a thread of the parent may hold the old lock
        self._end = self._connection = None


_all_connections: weakref.WeakSet[ConnectionRegistry] = weakref.WeakSet()
_inherited: list[object] = []
"""Embedded servers of the parent that a forked child must keep alive: releasing one takes a lock that may never be released."""


def _after_fork_in_child() -> None:
    for connections in _all_connections:
        connections.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register  # at the import, so that exit handlers of an application run before, and may still enqueue
def _at_exit() -> None:
    for connections in list(_all_connections):
        connections.for_threads.close()
        connections.for_renewals.close()


def _end(connection: Connection) -> None:
    connection.link.close()
    if connection.server is not None:
        connection.server.__exit__(None, None, None)


def _end_left_behind(by_loop: dict[object, Connection]) -> None:
    """End the connections of asyncio loops that were closed inside their blocks, because the blocks did not end them."""
    for loop, connection in list(by_loop.items()):
        is_closed: Callable[[], bool] = getattr(loop, "is_closed", lambda: False)
        is_of_this_process = connection.pid == os.getpid()
        # Another thread may have ended it meanwhile.
        if is_of_this_process and is_closed() and by_loop.pop(loop, None) is not None:
            _end(connection)


def _url(settings: ClientSettings) -> str:
    refuse_while_importing("connection")
    url = url_or_default(settings.url)
    if url == EMBEDDED and settings.credentials is not None:
        raise UsageError("the embedded server has no users: remove credentials=, or name a server")
    return server_of_parent() or url if url == EMBEDDED else url


def url_or_default(url: str | None) -> str:
    """Return the URL that a mesh connects to."""
    return url or os.environ.get("WORQR_URL") or os.environ.get("REDIS_URL") or "redis://localhost:6379/0"


def _source(settings: ClientSettings) -> str:
    """Return the origin of the URL, for messages."""
    if settings.url:
        return GIVEN
    return next((name for name in ("WORQR_URL", "REDIS_URL") if os.environ.get(name)), DEFAULT)


def _link_settings(settings: ClientSettings, url: str) -> LinkSettings:
    slowest = 0.0 if settings.keepalive is None else answer_timeout(settings.keepalive)
    return LinkSettings(
        url,
        prefix=settings.prefix,
        app=settings.app,
        patience=settings.patience,
        slowest=slowest,
        source=_source(settings),
        credentials=settings.credentials,
    )


async def _start(server: AbstractContextManager[EmbeddedServer]) -> str:
    """Enter the embedded server, and return its URL. If it is cancelled, release the server again."""
    started: list[EmbeddedServer] = []
    try:
        await driver_here().in_thread(lambda: started.append(server.__enter__()))
    except BaseException:
        if started:
            await _release(server)
        raise
    return started[0].url


async def _release(server: AbstractContextManager[EmbeddedServer] | None) -> None:
    """Release the embedded server; the last release stops it."""
    if server is not None:
        await driver_here().in_thread(lambda: server.__exit__(None, None, None))


# `Client`: sends the requests of one mesh.


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
        permits: the permits of named limits that this program holds.
        observer: a test's callback for each run that did not return normally, with its context and error; else None.
        relocation: where a test, or the command line, has moved the mesh to; else None.
    """

    def __init__(self, settings: ClientSettings, slot_watch: Callable[[str], SlotWatch]) -> None:
        self.settings = settings
        codec = settings.codec
        self.values: StoredValues | None = (
            None if codec is None else StoredValues(codec, accept_plain=settings.accept_plain)
        )
        self.declared_shards: dict[str, int] = {}
        self.connections: ConnectionRegistry = ConnectionRegistry(settings, self.declared_shards)
        self.slot_watch = slot_watch
        self.producer: Producer = Producer(self, settings.tracing)
        self.batch_maker: BatchMaker = BatchMaker()
        self.mesh_info: MeshInfoReader = MeshInfoReader(self)
        self.topics: TopicDirectory = TopicDirectory(self)
        self.permits: HeldPermits = HeldPermits(self)
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

    def note_relocation(self, relocation: Relocation) -> None:
        """Let worker processes move the mesh as this process has moved it."""
        self.relocation = relocation

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
