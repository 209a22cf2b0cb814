"""The mesh: which server an application uses, and what it declares.

A `Mesh` does no I/O until `connect()` or `join()`. How it connects is in `worqr.client.client`, how it joins in
`worqr.hosting.peer_factory`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, Unpack

from worqr.client.batch import Batch, BatchOptions, batch_block, plan_of
from worqr.client.client import CONNECT, JOIN, Client, ClientSettings, async_block, check_loop
from worqr.client.fleet import Fleet
from worqr.client.inspection import queues_of
from worqr.client.job import Delivery, Job, read_address, send_value
from worqr.client.permits import Permit, permit_block
from worqr.client.producer import Call, SendMiddleware, named_call
from worqr.client.queue import Queue
from worqr.client.stored_schedules import StoredSchedules
from worqr.client.sync import sent_by
from worqr.client.topics import Topics
from worqr.codecs import Codec
from worqr.cron import Definition
from worqr.foreign import MESH_ATTRIBUTES, explain_options, no_such_attribute
from worqr.functions.registry import Declarations, Registry
from worqr.handler_options import AsyncRunsIn, HandlerOptions
from worqr.hosting import service
from worqr.hosting.peer_factory import PeerFactory, WorkerSettings
from worqr.hosting.peer_thread import ThreadPeer
from worqr.keys import QueueKeys, check_name, check_shards
from worqr.limits import Limit
from worqr.link import Credentials, GivenCredentials
from worqr.mesh_records import QueueInfo
from worqr.peer.context import current
from worqr.peer.lifespans import Middleware
from worqr.peer.options import HISTORY_QUEUES, JoinOptions
from worqr.peer.peer import Peer
from worqr.peer.scheduler import StarvationDetector
from worqr.tracing import Tracing
from worqr.validation import Seconds, returns_coroutine

R = TypeVar("R")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    S = TypeVarWithDefault("S", default=None)
else:
    S = TypeVar("S")

BATCH_OPTIONS: Final = (
    "write `async with mesh.batch(...) as batch:`, or without an event loop "
    "`with worqr.sync_block(mesh.batch, ...) as batch:`"
)

LIMIT_HINT: Final = (
    "write `async with mesh.limit(...):`, or without an event loop `with worqr.sync_block(mesh.limit, ...):`"
)


class Mesh(ClientSettings, WorkerSettings[S], Registry, Fleet, StoredSchedules, Topics, Generic[S]):
    """A mesh of workers around one Redis or Valkey server. It does no I/O until `connect` or `join`.

    Args:
        url: The URL of the server: ``redis://``, ``rediss://`` or ``unix://``, with user, password and database;
            ``redis+cluster://`` or ``redis+sentinel://``, with several hosts; or ``embedded:``, which starts a private server.
            None: ``$WORQR_URL``, else ``$REDIS_URL``, else ``redis://localhost:6379/0``, read when connecting.
        prefix: The first part of all keys. Two meshes on one server need two prefixes, because channels ignore the database
            number.
        app: The application's name, for lists of workers and for the server's list of clients.
        deploy: The number of this version of the application, which grows with each: for example, the time of the build.
            Schedules and subscriptions that only older deploys of the same `app` declare are removed when no worker of those
            runs any more. Needs `app`. None: schedules are removed after a day, subscriptions by ``mesh.unsubscribe``.
        patience: Seconds that a call waits for an unavailable server before it raises `Unavailable`. More than 0, at most 1800.
        keepalive: Seconds without a heartbeat after which a worker counts as dead and its tasks return to their queues. At
            least 1. None: never; its tasks then wait for `evict`.
        block_limit: Seconds that a handler may block the event loop before the worker stops its heartbeat and loses its tasks.
        max_payload: The size limit of a task, in bytes. Default: 16 MiB.
        replicas: The number of replicas that must have a task before an enqueue or dispatch returns, 0 to 100. 0: none; a
            failover can then lose the newest tasks.
        lifespan: A function that returns an async context manager. Each `join` enters it before the peer takes any task, and
            leaves it when the peer has left. The value it yields is `state`, and ``current().state`` in handlers.
        middleware: Functions ``async def middleware(context, call_next)`` around every run, the first outermost.
            ``await call_next()`` runs the handler.
        around_thread: A function that returns a context manager around each call of a plain function, in its thread or process.
        process_lifespan: A function that returns a context manager around the life of each process of ``runs_in="process"``. The
            value it yields is ``current().state`` there. Define it at the top level of a module.
        runs_in: Where ``async def`` handlers run by default. ``"loop"``: the peer's Trio loop; ``"asyncio"``: the loop of an
            asyncio program that has called `join`, else an asyncio loop in a thread. None: ``"asyncio"`` if an asyncio program
            has called `join`, else ``"loop"``.
        asyncio_lifespan: As `lifespan`, for handlers on asyncio. It is entered on their loop, after `lifespan`; the value it
            yields is ``current().state`` in those handlers.
        credentials: A function that returns ``(username, password)``, or a ``CredentialProvider`` of redis-py. It is called for
            each new connection, in the thread that connects, and may block. Several connections may call it at once.
        history: Store the history of the busiest queues, which ``queue.history()`` returns. The leader of the mesh stores it.
            False: a leader of this program stores none.
        history_queues: How many queues have a history, 0 to 1000. Each takes 230 KB of the server's memory.
        tracing: Spans around calls that send tasks, and around runs: ``worqr.otel.Tracing()``. None: no tracing, at no cost.
        defaults: Options of all functions of the mesh, also of those that are included: ``worqr.HandlerOptions(timeout=30)``. A
            function's own options come first.
        send_middleware: Plain functions ``def middleware(sending: worqr.Sending) -> None``, called in order for each call that
            this program sends. They may give it `meta`, a lane and more, or raise.
        codec: Encodes what is stored of values: payloads, results, saved state, events and more. One of `worqr.codecs`, or an
            object with `encode` and `decode`, which is called in any thread. None: values are stored as they are.
        accept_plain: Take values of programs without the codec. False: their tasks are undecodable. Without a codec, no effect.
        redact_errors: Store of errors only their types and places, without texts.

    Raises:
        UsageError: An argument is not valid.
    """

    _told_undeclared: bool = False

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "worqr",
        app: str = "",
        deploy: int | None = None,
        patience: Seconds = 30,
        keepalive: Seconds | None = 3,
        block_limit: Seconds = 15,
        max_payload: int = 16 * 1024 * 1024,
        replicas: int = 0,
        lifespan: Callable[[], AbstractAsyncContextManager[S]] | None = None,
        middleware: Collection[Middleware] = (),
        around_thread: Callable[[], AbstractContextManager[object]] | None = None,
        process_lifespan: Callable[[], AbstractContextManager[object]] | None = None,
        runs_in: AsyncRunsIn | None = None,
        asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None = None,
        credentials: GivenCredentials | None = None,
        tracing: Tracing | None = None,
        history: bool = True,
        history_queues: int = HISTORY_QUEUES,
        defaults: HandlerOptions | None = None,
        send_middleware: Collection[SendMiddleware] = (),
        codec: Codec | None = None,
        accept_plain: bool = True,
        redact_errors: bool = False,
    ) -> None:
        ClientSettings.__init__(
            self, url, credentials, prefix, app, patience, keepalive, max_payload, replicas, tracing
        )
        self._set_calls(defaults, send_middleware, codec, accept_plain, redact_errors)
        WorkerSettings.__init__(  # pyright: ignore[reportUnknownMemberType] - it does not infer S
            self, block_limit, lifespan, asyncio_lifespan, middleware, runs_in, around_thread, process_lifespan
        )
        self._set_facts(history, history_queues, deploy, self.app)
        self._client = Client(self, StarvationDetector)
        self._declarations = Declarations(self._client)
        self._peers = PeerFactory(self, self._client, self._declarations)
        self._client.connections.for_threads.greet_with(self._tell_undeclared)

    if not TYPE_CHECKING:
        __init__ = explain_options(__init__)

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("Mesh", name, MESH_ATTRIBUTES))

    def __repr__(self) -> str:
        return f"<Mesh {self.prefix!r}>"

    # Connecting

    @async_block(CONNECT)
    async def connect(self) -> AsyncGenerator[None]:
        """Connect to the server for the length of a block, under Trio or asyncio.

        Blocks may be nested. Parallel blocks share one connection per event loop. The first block logs a warning if the mesh
        declares schedules that no worker has declared, because a program that only connects fires none. So does the first call of
        ``worqr.sync``.

        Yields:
            None: Nothing.

        Raises:
            UsageError: No event loop runs here, the URL is wrong, or no server program is installed for ``embedded:``.
            RefusedByServer: The password or permissions are wrong, protected mode is on, or the port is not that of a Redis
                server.
            WrongVersion: The server is older than Redis 7.0 or Valkey 7.2, or its mesh has another wire version.
            Unavailable: The server did not reply within `patience`, or its host name does not resolve.
        """
        async with self._client.connections.open():
            await self._tell_undeclared()
            yield

    async def _tell_undeclared(self) -> None:
        """Warn once of schedules that do not fire, unless this program joins, too."""
        if self._declarations.schedules and not self._told_undeclared and self._client.relocation is None:
            self._told_undeclared = True
            await self._warn_undeclared()

    def close(self) -> None:
        """Disconnect the plain threads, which `worqr.sync` has connected. You do not need it at the end of a program.

        Calls of other threads that wait for a reply raise `Unavailable`; the next one connects again. Call it from any thread,
        also where an event loop runs; it takes at most about a second. Blocks of `connect` and `join` are not affected.
        """
        self._client.connections.for_threads.close()

    def _declared_schedules(self) -> Mapping[str, Definition]:
        return self._declarations.schedules

    # Joining

    @async_block(JOIN)
    async def join(self, **options: Unpack[JoinOptions]) -> AsyncGenerator[Peer]:
        """Connect, and join the mesh as a worker for the length of a block, under Trio or asyncio.

        A block that ends normally drains: running tasks have `grace` seconds to end. A block that ends by an exception or a
        cancellation cancels its handlers at once; their tasks return to their queues within 2 s. Handlers that ignore their
        cancellation are logged. Those in threads or on an asyncio loop are left behind after 5 s; their tasks run again when
        this worker is found dead. A handler on the Trio loop keeps the block open until it ends.

        Under Trio, the worker runs on the loop of your program. Under asyncio, it runs on a Trio loop in a thread, and
        ``async def`` handlers run on the loop of your program. `lifespan` and middleware run on Trio. An error that ends the
        worker ends the block at once under Trio. Under asyncio, the error is logged, ``peer.health()`` reports it, and the end
        of the block raises it.

        Args:
            **options: See `JoinOptions`.

        Yields:
            Peer: The peer, which serves all declared functions.

        Raises:
            UsageError: No event loop runs here, or an option does not exist or is not valid; and as `connect`.
            RefusedByServer: As `connect`.
            WrongVersion: As `connect`.
            Unavailable: As `connect`.
        """
        self._told_undeclared = True
        if check_loop("mesh.join()") == "Trio":
            async with self._peers.joined(options) as peer:
                yield peer
        else:
            from worqr.hosting.peer_thread import joined_under_asyncio  # programs on Trio need no asyncio

            async with joined_under_asyncio(self._peers, options) as asyncio_peer:
                yield asyncio_peer

    def join_in_thread(self, **options: Unpack[JoinOptions]) -> ThreadPeer:
        """Return a worker that runs in a thread of its own, for programs without an event loop. It is not started yet.

        Use it in a ``with`` or ``async with`` block, or call its `start` and `stop`. `lifespan` and handlers run on the Trio loop
        of that thread, unless their `runs_in` says otherwise. In a program with an event loop, use `join`.

        Args:
            **options: See `JoinOptions`.

        Raises:
            UsageError: An option does not exist or is not valid.
        """
        self._peers.check_options(options)
        self._told_undeclared = True
        return ThreadPeer(self._peers, options)

    def run(self, *, probe: str | int | None = None, **options: Unpack[JoinOptions]) -> None:
        """Join, and run tasks until the process is asked to stop; the last line of a script. ``worqr run`` does the same.

        The first SIGTERM or SIGINT (Ctrl-C) lets running tasks end within `grace`. The second cancels them, and they return to
        the front of their queues. The third ends the process at once. SIGHUP acts like the first SIGTERM, unless it is ignored.
        If a handler does not end, the process exits some seconds later with code 1. While the server is unavailable, `run` waits
        for it. It logs to the standard error if logging is not configured.

        Args:
            probe: Where to serve the probes ``/live``, ``/ready`` and ``/startup`` over HTTP: ``[HOST:]PORT`` or ``unix:PATH``.
                None: at ``$WORQR_PROBE``, if that is set.
            **options: See `JoinOptions`.

        Raises:
            UsageError: Nothing is declared, an option is not valid, this is not the main thread, an event loop runs here, or the
                address of `probe` is in use.
            RefusedByServer: As `connect`.
            WrongVersion: As `connect`.
        """
        self._peers.check_options(options)
        self._told_undeclared = True
        service.run(self._peers, options, probe)

    @property
    def state(self) -> S:
        """The value that `lifespan` yielded, inside `join`. If several peers joined, that of the last; None without a lifespan.

        Raises:
            UsageError: The mesh has a lifespan, and no peer has joined.
        """
        return self._peers.state

    # Queues

    def queue(self, name: str, *, shards: int = 1) -> Queue:
        """Return a raw queue by its name. This does no I/O; the queue does not have to exist.

        Args:
            name: 1 to 200 bytes of UTF-8, without braces and control characters.
            shards: The number of lists that the queue consists of, for a queue that is too busy for one node of a cluster. The
                first program that sets it decides for the whole mesh. 1: as many as were declared anywhere, else one.

        Raises:
            UsageError: The name is not valid, or this program declared another number of shards before. If another program
                did, the first call of the queue raises it.
        """
        keys = QueueKeys(self.prefix, check_name(name))
        if check_shards(shards) > 1:
            self._client.declare_shards(name, shards)
        return Queue(self._client, keys)

    async def queues(self) -> list[QueueInfo]:
        """Return all queues that are not empty or that a worker serves, by name.

        Queues that the server refuses to read, because another program has written a key of another type, are left out;
        ``(await mesh.info()).unreadable`` names them.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return (await queues_of(self._client))[0]

    # Functions

    @returns_coroutine
    def send(
        self, address: str, name: str, value: object = None, /, *, again: bool = False
    ) -> Coroutine[Any, Any, Delivery]:
        """Send a value to one workflow, by its address: for links, forms and web-hooks. See `Job.send`.

        Args:
            address: What ``worqr.current().address`` was in the workflow. It means this dispatch of the id, and no later one.
            name: The name of the event.
            value: What JSON can encode, bytes, or None; at most 64 KiB.
            again: Send it although a value of this name lies there that no wait has taken.

        Returns:
            As `Job.send`.

        Raises:
            NoJob: The workflow has ended, or another one has its id now.
            UsageError: The address, the name or the value is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        queue, life, job = read_address(address)

        async def sent() -> Delivery:
            keys = QueueKeys(self._client.settings.prefix, check_name(queue))
            shard = await self._client.sharding.shard_of_id(keys, job)
            return await send_value(self._client, shard, job, name, value, life=life, again=again)

        return sent_by("mesh.send", sent())

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Return a call of a function that another program declares, by its name. Nothing is sent.

        Args:
            name: The function's name.
            *args: The whole payload as one argument: bytes are sent unchanged, other values as JSON.
            **kwargs: The function's arguments by name; the payload is the JSON object of them.

        Raises:
            UsageError: The name is not valid, there are several positional arguments, or JSON cannot encode an argument.
            PayloadTooLarge: The payload is larger than `max_payload`.
        """
        return named_call(name, args, kwargs, self.max_payload)

    @returns_coroutine
    def enqueue_many(self, calls: Iterable[Call[Any]]) -> Coroutine[Any, Any, int]:
        """Enqueue calls as raw tasks, a thousand in one round trip. Of a thousand, those of one queue are stored all or none.

        Args:
            calls: Made by ``function.call(...)`` or ``mesh.call(...)``. An iterator is read as the calls are sent.

        Returns:
            The number of calls, all of which were stored.

        Raises:
            UsageError: A call has options, which make it a job; or outside `connect` and `join`.
            QueueFull: A queue is at its `max_length`, after the `wait` of its calls. A note says how many calls were stored.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            Unavailable: The server did not reply within `patience`. A note says how many calls were stored.
        """
        return sent_by("mesh.enqueue_many", self._client.producer.enqueue_many(calls))

    @returns_coroutine
    def dispatch_many(self, calls: Iterable[Call[R]]) -> Coroutine[Any, Any, list[Job[R]]]:
        """Dispatch calls as jobs, a thousand in one round trip.

        Args:
            calls: Made by ``function.call(...)``, ``function.options(...).call(...)`` or ``mesh.call(...)``.

        Returns:
            The handle of each job, in the order of the calls.

        Raises:
            UsageError: A value is not a call; or outside `connect` and `join`.
            Duplicate: An id is taken, and ``if_exists="raise"``. Other calls of its thousand may be stored.
            QueueFull: A queue is at its `max_length`, after the `wait` of its calls. Other calls of its thousand may be stored.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            Unavailable: The server did not reply within `patience`. A note says how many calls were stored.
        """
        return sent_by("mesh.dispatch_many", self._client.producer.dispatch_many(calls))

    @async_block(LIMIT_HINT)
    async def limit(self, limit: Limit | str, *, cost: int = 1) -> AsyncGenerator[Permit]:
        """Hold a permit of a limit that several functions and programs share, for the length of a block.

        The block begins when the limit allows it, and a wait counts toward the timeout of a handler. A permit that is held counts
        against the concurrency until the block ends, however it ends. If the process dies, the permit is free after 10 s.

        Args:
            limit: A `Limit` with a name, the same in all programs: ``OPENAI = worqr.Limit(20, name="openai")``. If its numbers
                differ, the newest hold. Or the name alone, of a limit that a program has used within 30 days.
            cost: How much of the rate it takes; an estimate, which ``permit.cost(n)`` replaces by what was used. 0 to 1,000,000.

        Yields:
            Permit: The permit.

        Raises:
            UsageError: The limit has no name, no program gave its numbers, or the cost is above its rate; or outside `connect`
                and `join`.
            Unavailable: The server did not reply within `patience`, before the block began.
        """
        async with permit_block(self._client, limit, cost) as permit:
            yield permit

    @async_block(BATCH_OPTIONS)
    async def batch(self, *, parent: Batch | None = None, **options: Unpack[BatchOptions]) -> AsyncGenerator[Batch]:
        """Make a batch: jobs of any functions and queues that are counted, watched and cancelled together.

        Add jobs in the block with ``batch.dispatch(call)``; they may run at once. The end of the block seals the batch, and an
        error in it cancels the batch. When all jobs have ended for good, one follow-up is enqueued: `then` if all have finished,
        else `otherwise`. A batch without jobs ends at once, with `then`.

        Args:
            parent: A batch that this one is a job of: it does not end before. The batch of a running job is
                ``mesh.current_batch()``.
            **options: See `BatchOptions`.

        Yields:
            Batch: The batch.

        Raises:
            UsageError: An option does not exist or is not valid; or outside `connect` and `join`.
            Duplicate: The home queue has a batch with this id, which has not ended, or ended less than its `keep` ago.
            BatchEnded: `parent` has ended, or was cancelled.
            Unavailable: The server did not reply within `patience`.
        """
        async with batch_block(self._client.batch_maker.open(self._client, plan_of(options), parent)) as batch:
            yield batch

    def current_batch(self) -> Batch | None:
        """Return the batch that the running job belongs to, to add jobs to it; None if it belongs to none.

        Raises:
            LookupError: Called outside a handler.
        """
        ref = current().batch
        return None if ref is None else self._client.batch_maker.of_ref(self._client, ref)


def side_mesh(mesh: Mesh[Any], app: str, patience: float, url: str | None = None) -> Mesh[None]:
    """Return a mesh for requests that must not stand before those of the application.

    Args:
        mesh: The application's.
        app: The name of the new one, which its connections have.
        patience: Its patience in seconds, at most that of `mesh`.
        url: Another URL, whose user is then meant in place of the credentials of `mesh`.
    """
    given = mesh.credentials
    credentials = None if given is None or url is not None else partial(_asked, given)
    return Mesh(
        url or mesh.url,
        prefix=mesh.prefix,
        app=app,
        patience=min(mesh.patience, patience),
        credentials=credentials,
        codec=mesh.codec,
        accept_plain=mesh.accept_plain,
    )


def _asked(credentials: Credentials) -> tuple[str, str]:
    """Ask the application's credentials for one connection."""
    found = credentials.get("the server")
    return ("default", found[0]) if len(found) == 1 else (found[0], found[1])
