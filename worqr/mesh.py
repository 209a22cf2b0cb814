"""The mesh: where an application says which server it uses, and connects, or joins as a peer.

A `Mesh` is settings and nothing else until `connect()` or `join()`: it does no I/O when it is made. Per running loop there
is one link, counted, so that nested and parallel `connect` and `join` share it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

from worqr import function, ops, service
from worqr.blocking import BlockingMesh
from worqr.blocks import async_block
from worqr.call import Call
from worqr.connecting import CONNECT, JOIN, Connections, check_trio
from worqr.cron import Schedule
from worqr.errors import UsageError, did_you_mean
from worqr.fleet import Fleet
from worqr.foreign import explain_options
from worqr.job import Job
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.link import Credentials, GivenCredentials, Link, checked_credentials
from worqr.looking import all_infos
from worqr.options import check_replicas
from worqr.peer.late import serving_late
from worqr.peer.lifespans import LIFESPAN, check_lifespan, entered, warn_if_unused, with_asyncio
from worqr.peer.options import (
    CONCURRENCY,
    GRACE,
    THREADS,
    AsyncRunsIn,
    JoinOptions,
    Only,
    check_concurrency,
    check_default_place,
    checked_keepalive,
    checked_patience,
    checked_url,
    refuse_unknown,
)
from worqr.peer.peer import Peer
from worqr.peer.runners import Middleware, checked_middleware
from worqr.peer.settings import Onlooker, PeerSettings, usable_cpus
from worqr.peer.ticking import all_schedules, schedule_of
from worqr.queue import Queue
from worqr.registry import Registry
from worqr.sending import Sender
from worqr.sharding import Sharding
from worqr.shards import check_shards
from worqr.summing import queue_names
from worqr.task import QueueInfo, Seconds, check_count, check_text, seconds
from worqr.thread_peer import ThreadPeer

T = TypeVar("T")
R = TypeVar("R")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    S = TypeVarWithDefault("S", default=None)
else:
    S = TypeVar("S")


class Mesh(Registry, Fleet, Generic[S]):
    """A mesh of peers around one Redis or Valkey server.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, with user, password and database; ``redis+cluster://`` and
            ``redis+sentinel://``, with several hosts; ``embedded:`` starts a private server of this process. None:
            ``$WORQR_URL``, else ``$REDIS_URL``, else ``redis://localhost:6379/0``, read when connecting.
        prefix: first part of all keys; two meshes on one server need two (channels ignore the database number).
        app: the application's name, shown in lists of workers and of the server's clients.
        patience: seconds a call waits for a server that is away before it raises `Unavailable`.
        keepalive: seconds without a beat after which a worker counts as dead. None: never; its tasks then wait for `evict`.
        block_limit: seconds the event loop may be blocked before the peer stops beating and loses its work.
        max_payload: bytes of the largest task.
        replicas: how many must have a task before an enqueue or dispatch returns. 0: none; a failover can lose the last tasks.
        lifespan: an async context manager around each `join`, entered before the peer takes anything and left when it has left;
            what it gives is `state`, and ``current().state`` in handlers (connection pools, models).
        asyncio_lifespan: the same for handlers on asyncio: it is entered on their loop, after `lifespan`, and what it gives is
            ``current().state`` in those handlers.
        middleware: ``async def each(context, call_next)`` around every run, the first outermost; ``await call_next()`` runs it.
        around_thread: a context manager around each call of a plain function, in its thread or process.
        process_lifespan: a context manager around the life of each process of ``runs_in="process"``; what it gives is
            ``current().state`` there. Like the functions, it is found by its name, so it stands at the top of a module.
        runs_in: where ``async def`` handlers run by default. ``"loop"``: the peer's Trio loop; ``"asyncio"``: a loop in a thread.
        credentials: a function that returns ``(username, password)``, or a ``CredentialProvider`` of redis-py. It is called for
            each new connection, in the thread that connects, and may block; several connections may call it at once.
    """

    lifespan: Callable[[], AbstractAsyncContextManager[S]] | None
    asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None
    around_thread: Callable[[], AbstractContextManager[object]] | None
    process_lifespan: Callable[[], AbstractContextManager[object]] | None

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "worqr",
        app: str = "",
        patience: Seconds = 30,
        keepalive: Seconds | None = 3,
        block_limit: Seconds = 15,
        max_payload: int = 16 * 1024 * 1024,
        replicas: int = 0,
        lifespan: Callable[[], AbstractAsyncContextManager[S]] | None = None,
        middleware: Collection[Middleware] = (),
        around_thread: Callable[[], AbstractContextManager[object]] | None = None,
        process_lifespan: Callable[[], AbstractContextManager[object]] | None = None,
        runs_in: AsyncRunsIn = "loop",
        asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None = None,
        credentials: GivenCredentials | None = None,
    ) -> None:
        super().__init__()
        self.url: str | None = checked_url(url)
        self.credentials: Credentials | None = checked_credentials(credentials, self.url)
        self.prefix: str = check_name(prefix, "prefix")
        self.app = app
        self.patience: float = checked_patience(patience)
        self.keepalive: float | None = None if keepalive is None else checked_keepalive(keepalive)
        self.block_limit: float = seconds(block_limit, "block_limit", positive=True)
        self.max_payload: int = check_count(max_payload, "max_payload")
        self.replicas: int = check_replicas(replicas)
        self.lifespan, self.asyncio_lifespan = lifespan, asyncio_lifespan
        self.middleware: tuple[Middleware, ...] = checked_middleware(middleware)
        self.runs_in: AsyncRunsIn = check_default_place(runs_in)
        self.around_thread, self.process_lifespan = around_thread, process_lifespan
        for name in ("lifespan", "asyncio_lifespan", "around_thread", "process_lifespan"):
            check_lifespan(name, getattr(self, name))
        self.sender: Sender = Sender(self)
        self._mesh = self
        self._states: list[S] = []
        self.connections: Connections = Connections()
        self.onlooker: Onlooker | None = None

    if not TYPE_CHECKING:
        __init__ = explain_options(__init__)

    def __repr__(self) -> str:
        return f"<Mesh {self.prefix!r}>"

    # Connecting

    @async_block(CONNECT)
    async def connect(self) -> AsyncGenerator[None]:
        """Connect to the server for the length of a block, under Trio or asyncio.

        Nests, and parallel blocks share one link per running loop.

        Raises:
            UsageError: no loop runs here; the URL is wrong, or there is no server for ``embedded:``.
            RefusedByServer: wrong password or rights, protected mode, something else at the port.
            WrongVersion: a server older than Redis 7.0 or Valkey 7.2; the mesh on it has another wire version.
            Unavailable: nothing answered within `patience`; at once, if the host name does not resolve.
        """
        async with self.connections.open(self):
            yield

    def check_connected(self) -> None:
        """UsageError outside `connect`."""
        self.connections.here()

    @property
    def link(self) -> Link:
        """The link of the running loop; UsageError outside `connect`."""
        return self.connections.here().link

    async def ask(self, call: Call[T]) -> T:
        """Send one request and wait for its answer."""
        return await self.connections.here().link.call(call)

    @property
    def sharding(self) -> Sharding:
        """What the running loop's connection knows of queues of several shards; UsageError outside `connect`."""
        return self.connections.here().sharding

    def link_to(self, queue: str) -> Link:
        """The link for tasks that go into `queue` (or this shard of it), whose name is remembered for those who list queues."""
        connection = self.connections.here()
        connection.note(self, queue)
        return connection.link

    @property
    def blocking(self) -> BlockingMesh:
        """This mesh for plain threads, where no event loop runs: it connects at first use, and needs no `connect`."""
        return BlockingMesh(self)

    # Joining

    @async_block(JOIN)
    async def join(self, **options: Unpack[JoinOptions]) -> AsyncGenerator[Peer]:
        """Join the mesh as a peer for the length of a block, under Trio; connects as well.

        A block that ends normally drains for `grace` seconds; one that ends by an exception or a cancellation cancels its
        handlers at once and gives their tasks back within 2 s. Handlers that do not end when they are cancelled are logged:
        those in threads and on an asyncio loop are left behind after 5 s, and their tasks run elsewhere when this worker is
        found dead; one on the Trio loop keeps the peer until it ends.

        Args:
            options: see `JoinOptions`.

        Raises: as `connect`; UsageError: no Trio runs here, an option that does not exist or cannot be; WrongVersion: the mesh
            on this server speaks another wire version.
        """
        check_trio("mesh.join()")
        only = Only(options.get("only"))
        settings = self._peer_settings(options)
        only.check(self.functions)
        known = dict(self.functions)
        handlers = [each for name, function in known.items() if name in only for each in function.served()]
        if self.asyncio_lifespan is not None:
            warn_if_unused([function.declared.how.runs_in for function in self.functions.values()], self.runs_in)
        async with self.connect(), self._open_state() as state:
            here = self.connections.here()
            hosting = partial(self.connections.hosting, peers=here)
            settings = replace(settings, state=state, sharding=here.sharding, hosting=hosting)
            async with (
                with_asyncio(self.asyncio_lifespan, settings) as settings,
                Peer(settings, here.link).joined() as peer,
            ):
                await peer.serve_all(handlers)
                with serving_late(peer, self, only, known):
                    yield peer

    def join_in_thread(self, **options: Unpack[JoinOptions]) -> ThreadPeer:
        """A peer in a thread of its own, for programs that do not run on Trio; nothing starts yet.

        ``with`` and ``async with`` start and stop it, or its `start` and `stop`. `lifespan` and handlers run on that thread's
        Trio loop, but for handlers whose `runs_in` says otherwise.

        Args:
            options: see `JoinOptions`.

        Raises:
            UsageError: an option that does not exist or cannot be.
        """
        self._check_join(options)
        return ThreadPeer(self, options)

    def run(self, **options: Unpack[JoinOptions]) -> None:
        """Join and serve until told to stop; a script's last line, the same as ``worqr run``.

        The first SIGTERM or SIGINT (Ctrl-C) lets what runs end within `grace`; the second cancels it, and the tasks go back to
        the front of their queues; the third ends the process at once. While the server is away it waits, also at the start. What
        refuses to end does not keep the process: that ends some seconds later, with code 1. Logs to the standard error, if
        nothing has set up logging.

        Raises:
            UsageError: nothing to serve, an option that cannot be, not the main thread, inside a running loop.
            RefusedByServer, WrongVersion: waiting would not help.
        """
        self._check_join(options)
        service.run(self, **options)

    def _check_join(self, options: Mapping[str, Any]) -> None:
        Only(options.get("only"))
        self._peer_settings(options)

    def _peer_settings(self, options: Mapping[str, Any]) -> PeerSettings:
        refuse_unknown("join", options, tuple(JoinOptions.__annotations__))
        declared = self.functions or self.declared_schedules
        return PeerSettings(
            prefix=self.prefix,
            app=self.app,
            concurrency=check_concurrency(options.get("concurrency", CONCURRENCY)),
            grace=seconds(options.get("grace", GRACE), "grace"),
            keepalive=self.keepalive,
            block_limit=self.block_limit,
            max_payload=self.max_payload,
            schedules=self.declared_schedules,
            threads=check_count(options.get("threads", THREADS), "threads"),
            processes=check_count(options.get("processes", usable_cpus()), "processes"),
            process_memory=options.get("process_memory"),
            nothing="" if declared else f"no function is declared on {self!r} with @mesh.task, nor a schedule",
            middleware=self.middleware,
            around_thread=self.around_thread,
            process_lifespan=self.process_lifespan,
            onlooker=self.onlooker,
            runs_in=self.runs_in,
        )

    @asynccontextmanager
    async def _open_state(self) -> AsyncGenerator[S | None]:
        """The lifespan around a peer."""
        if self.lifespan is None:
            yield None
            return
        async with entered(LIFESPAN, self.lifespan) as state:
            self._states.append(state)
            try:
                yield state
            finally:
                last = max(i for i, each in enumerate(self._states) if each is state)  # equal ones are others
                del self._states[last]

    @property
    def state(self) -> S:
        """What `lifespan` gave, inside `join`; of several peers, that of the last. Without a lifespan None.

        Raises:
            UsageError: no peer of this mesh has joined.
        """
        if self._states:
            return self._states[-1]
        if self.lifespan is None:
            return cast("S", None)
        raise UsageError("mesh.state is what the lifespan gives, so it is there inside `async with mesh.join():` only")

    # Looking

    def queue(self, name: str, *, shards: int = 1) -> Queue:
        """The queue of this name; no I/O, it need not exist.

        Args:
            shards: how many lists it has, each in a slot of its own, for a queue that is too much for one node of a cluster. The
                first program that says so decides for the whole mesh; 1: as many as were declared anywhere, else one.

        Raises:
            UsageError: not 1 to 200 bytes of UTF-8, or with braces or control characters; another number of shards was declared
                in this program. If it was in another one, the first call of the queue says so.
        """
        keys = QueueKeys(self.prefix, check_name(name))
        if check_shards(shards) > 1:
            self.declare_shards(name, shards)
        return Queue(self, keys)

    async def queues(self) -> list[QueueInfo]:
        """All queues that hold something or are served, by name."""
        names = await queue_names(self.ask, RegistryKeys(self.prefix))
        infos = await all_infos(self, [QueueKeys.of(self.prefix, name) for name in names])
        return [
            i
            for i in infos
            if any((i.waiting, i.running, i.scheduled, i.blocked, i.failed, i.broken, i.workers))
            or i.paused is not None
        ]

    # Functions and schedules

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> function.Call[Any]:
        """A call of a function that lives elsewhere, by its name; nothing is sent.

        Keyword arguments are the payload, as a JSON object; a single positional one is the payload whole: bytes as they are,
        else as JSON.

        Raises:
            UsageError: other positional arguments (they need the function itself), a bad name, what JSON cannot carry.
            PayloadTooLarge: over `max_payload` bytes.
        """
        return function.named_call(name, args, kwargs, self.max_payload)

    async def enqueue_many(self, calls: Iterable[function.Call[Any]]) -> int:
        """Enqueue calls as raw tasks, in one round trip per thousand; within a thousand, those of one queue are stored together
        or not at all.

        Args:
            calls: as ``function.call(...)`` and ``mesh.call(...)`` make them; an iterator is read as it goes.

        Returns:
            How many: all of them.

        Raises:
            UsageError: a call with options, which make it a job.
            QueueFull, Unavailable: as ``queue.enqueue``; a note says how many were stored.
            NotReplicated: all were stored.
        """
        return await self.sender.enqueue_many(calls)

    async def dispatch_many(self, calls: Iterable[function.Call[R]]) -> list[Job[R]]:
        """Dispatch calls as jobs, in one round trip per thousand; answers their handles, in the order of the calls.

        Raises:
            Duplicate, QueueFull: one of them was refused; those of its thousand are stored or refused each by itself.
            Unavailable: as ``queue.dispatch``; NotReplicated: all were stored.
        """
        return await self.sender.dispatch_many(calls)

    async def schedules(self) -> list[Schedule]:
        """All schedules of the mesh, whoever declared them, by name."""
        rows, now = await all_schedules(self.ask, RegistryKeys(self.prefix))
        return [schedule_of(row, now) for row in rows]

    async def pause_schedule(self, name: str, *, paused: bool = True) -> None:
        """Let the firings of a schedule pass until ``paused=False``; what was let pass is not made up for.

        What it has enqueued already runs. A pause outlives restarts and changes of the schedule.

        Raises:
            UsageError: no schedule of the mesh has this name.
        """
        registry = RegistryKeys(self.prefix)
        if not await self.ask(ops.pause_schedule(registry, check_text(name, "schedule name"), paused=bool(paused))):
            known = [row.name for row in (await all_schedules(self.ask, registry))[0]]
            hint = did_you_mean(name, known, f"there are {', '.join(map(repr, known[:20])) or 'none'}")
            raise UsageError(f"there is no schedule {name!r} in this mesh; {hint}")
