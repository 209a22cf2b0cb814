"""`PeerFactory`: makes the peers of one mesh, from its settings, its declarations and the options of a join.

A `Mesh` has one. The other modules of this folder run such a peer in a thread, under asyncio, or as a program. What a peer does
is in `worqr.peer`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

import trio

from worqr.client.client import Client
from worqr.errors import UsageError, WorqrError
from worqr.functions.registry import Declarations
from worqr.handler_options import RUNS_IN, AsyncRunsIn, refuse_unknown
from worqr.inside import definition_of
from worqr.log_events import emit
from worqr.peer.engine import Engine
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.lifespans import LifespanStates, Middleware, check_lifespan, checked_middleware, warn_if_unused
from worqr.peer.options import CONCURRENCY, GRACE, THREADS, JoinOptions, Only, PeerSettings, check_concurrency
from worqr.peer.peer import Peer
from worqr.peer.scheduler import default_processes
from worqr.validation import Seconds, check_between, check_count, seconds

if TYPE_CHECKING:
    from worqr.functions.definition import FunctionDefinition
    from worqr.peer.executors.asyncio_loop import HostLoop

# Serve functions that are declared after their mesh has joined: in a module that is imported late, or in a notebook.
#
# `join` serves the functions that are declared when it is entered. Each later declaration notifies the peers of the mesh,
# from any thread. Each peer serves the new function soon afterwards. A function that replaces another one of its name is not
# exchanged, because runs of the older one may be under way. That is logged, and the next join serves the new function.

logger: logging.Logger = logging.getLogger(__name__)

SETTLE: Final = 0.1
"""Seconds to wait after a declaration, because its failure handler and more functions are declared in that time."""
RETRY_AFTER: Final = 3.0
"""Seconds until the next try to serve a function."""


@contextmanager
def serving_late(
    engine: Engine, declarations: Declarations, only: Only, known: Mapping[str, FunctionDefinition]
) -> Generator[None]:
    """Serve the functions that are declared during the block.

    Args:
        engine: the peer's engine.
        declarations: the mesh's declarations.
        only: the names that this peer may serve.
        known: the functions that were declared before.
    """
    late = _LateServer(engine, declarations, only, known)
    if engine.spawn(late.serve_forever):
        with declarations.when_declared(late.on_declared):
            late.on_declared()  # functions were declared while the peer joined
            yield
    else:
        yield


class _LateServer:
    """Serves late functions, for one peer. `on_declared` is called from any thread, everything else in the loop."""

    def __init__(
        self, engine: Engine, declarations: Declarations, only: Only, known: Mapping[str, FunctionDefinition]
    ) -> None:
        self._engine = engine
        self._declarations = declarations
        self._only = only
        self._known = dict(known)
        self._token = trio.lowlevel.current_trio_token()
        self._declared = trio.Event()
        self._missing = False
        self._throttle = ErrorThrottle(logger)

    def on_declared(self) -> None:
        """Wake the task that serves new functions."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self._declared.set()

    async def serve_forever(self) -> None:
        """Serve new functions after each notification, until the peer leaves."""
        while not self._engine.leaving:
            with trio.move_on_after(RETRY_AFTER if self._missing else inf):
                await self._declared.wait()
            self._declared = trio.Event()
            await trio.sleep(SETTLE)
            self._missing = False
            for name, function in dict(self._declarations.functions).items():
                declared = definition_of(function)
                if name in self._only and declared is not self._known.get(name) and not self._engine.leaving:
                    await self._serve(name, declared)

    async def _serve(self, name: str, declared: FunctionDefinition) -> None:
        if name in self._known:
            self._known[name] = declared
            text = "%(function)r was declared again; this worker runs the older one until it joins again"
            emit(logger, "function.replaced", text, function=name)
            return
        here = {served.queue for served in self._engine.consumers.entered()}
        try:
            await self._engine.serve_all(each for each in declared.handlers() if each[0] not in here)
        except WorqrError as error:
            if not self._engine.leaving:
                self._missing = True
                text = "%(function)r, declared after the join, is not served: %(error)s; trying again"
                self._throttle.error(name, "function.unserved", text, function=name, error=error)
            return
        self._known[name] = declared
        self._throttle.resolve(name)
        emit(logger, "function.served", "%(function)r, declared after the join, is served now", function=name)


# `PeerFactory`: makes the peers of one mesh, from its settings, its declarations and the options of a join.

# `Measuring`: what gets the peers of a mesh and their runs. `worqr.otel` implements it.


class Measuring(Protocol):
    """The measuring of a mesh."""

    def run(self, context: Any, call_next: Callable[[], Awaitable[object]]) -> Awaitable[object]:
        """Run a handler. A middleware: see ``Mesh(middleware=...)``."""
        ...

    def joined(self, peer: Peer) -> AbstractContextManager[object]:
        """Return a context manager around the life of a peer that has joined."""
        ...


# The settings of the workers of a mesh, and their checks.
#
# `worqr.Mesh` is a `WorkerSettings`: its public attributes are these settings. Those of its connections are in
# `worqr.client.client`; the options of one join are in `worqr.peer.options`.


S = TypeVar("S")

MAX_HISTORIES: Final = 1000
"""The largest `history_queues`: that many take 230 MB of the server's memory."""


MAX_DEPLOY: Final = 10**15
"""The largest `deploy`. A time in seconds, or as YYYYMMDDHHMM, is below it."""


class WorkerSettings(Generic[S]):
    """What surrounds the handlers of a mesh in each of its workers."""

    block_limit: float
    """Seconds that a handler may block the event loop."""
    lifespan: Callable[[], AbstractAsyncContextManager[S]] | None
    """The async context manager around each `join`."""
    asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None
    """The async context manager around each `join`, on the asyncio loop of handlers."""
    middleware: tuple[Middleware, ...]
    """The functions around every run, the first outermost."""
    runs_in: AsyncRunsIn | None
    """Where ``async def`` handlers run by default; None: on the loop of the program that has joined."""
    around_thread: Callable[[], AbstractContextManager[object]] | None
    """The context manager around each call of a plain function."""
    process_lifespan: Callable[[], AbstractContextManager[object]] | None
    """The context manager around the life of each process."""
    history_queues: int
    """How many queues have a history; 0: none."""
    deploy: int
    """The number of this version of the application; 0: it has none."""

    def __init__(
        self,
        block_limit: Seconds,
        lifespan: Callable[[], AbstractAsyncContextManager[S]] | None,
        asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None,
        middleware: Collection[Middleware],
        runs_in: AsyncRunsIn | None,
        around_thread: Callable[[], AbstractContextManager[object]] | None,
        process_lifespan: Callable[[], AbstractContextManager[object]] | None,
    ) -> None:
        self.block_limit = seconds(block_limit, "block_limit", positive=True)
        self.lifespan, self.asyncio_lifespan = lifespan, asyncio_lifespan
        self.middleware = checked_middleware(middleware)
        self.runs_in = _checked_runs_in(runs_in)
        self.around_thread, self.process_lifespan = around_thread, process_lifespan
        for name in ("lifespan", "asyncio_lifespan", "around_thread", "process_lifespan"):
            check_lifespan(name, getattr(self, name))

    def _set_facts(self, history: bool, queues: int, deploy: int | None, app: str) -> None:
        """Set how many queues have a history, and the number of this version of the application. Used once, before any peer
        joins.
        """
        self.history_queues = _checked_history(history, queues)
        self.deploy = 0 if deploy is None else check_between(deploy, "deploy", 1, MAX_DEPLOY)
        if self.deploy and not (app and app.isprintable()):
            raise UsageError(
                f"deploy={deploy} needs app=, a name in one line: it is compared with other deploys of the same application"
            )


def _checked_runs_in(value: object) -> AsyncRunsIn | None:
    """Return `value` if all async handlers of a mesh may run there, else raise UsageError."""
    if value is None or value in ("loop", "asyncio"):
        return value
    hint = ""
    if value in RUNS_IN:
        hint = f"; it is the place of async handlers: for a plain function say runs_in={value!r} in @mesh.task"
    raise UsageError(f"runs_in of a mesh must be 'loop' or 'asyncio', not {value!r}{hint}")


def _checked_history(history: object, queues: object) -> int:
    """Return how many queues have a history, or raise UsageError."""
    if not isinstance(history, bool):
        raise UsageError(f"history must be True or False, not {history!r}; history_queues=... says for how many queues")
    number = check_between(queues, "history_queues", 0, MAX_HISTORIES)
    return number if history else 0


class PeerFactory(Generic[S]):
    """Makes the peers of one mesh.

    Attributes:
        settings: the settings of the workers.
        client: the client of the mesh.
        declarations: the functions and schedules of the mesh.
    """

    def __init__(self, settings: WorkerSettings[S], client: Client, declarations: Declarations) -> None:
        self.settings = settings
        self.client = client
        self.declarations = declarations
        self._states = LifespanStates[S]()
        self._measuring: Measuring | None = None
        self._beside: list[Callable[[], AbstractContextManager[object]]] = []

    def __repr__(self) -> str:
        return repr(self.settings)

    @property
    def state(self) -> S:
        """The value that the lifespan yielded for the peer that joined last; None without a lifespan.

        Raises:
            UsageError: The mesh has a lifespan, and no peer has joined.
        """
        try:
            return self._states.newest
        except IndexError:
            if self.settings.lifespan is None:
                return cast("S", None)
        raise UsageError("mesh.state is what the lifespan gives, so it is there inside `async with mesh.join():` only")

    def measure_with(self, measuring: Measuring) -> None:
        """Tell the measuring of metrics of the peers that join from now on.

        Raises:
            UsageError: The peers of this mesh are measured already.
        """
        if self._measuring is not None:
            raise UsageError(f"the workers of {self!r} are measured already: call measure_workers(mesh) once")
        self._measuring = measuring

    def run_beside(self, block: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter a block around the life of each peer that joins from now on. It must neither wait nor raise."""
        self._beside.append(block)

    @contextmanager
    def _with_all(self, peer: Peer) -> Generator[None]:
        with ExitStack() as stack:
            for block in self._beside:
                stack.enter_context(block())
            stack.enter_context(nullcontext() if self._measuring is None else self._measuring.joined(peer))
            yield

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise UsageError for options of a join that do not exist or are not valid."""
        Only(options.get("only"))
        self._peer_settings(options)

    def check_not_empty(self, before: str) -> None:
        """Raise UsageError if nothing is declared. `before`: what the declaring modules must be imported before."""
        if self.declarations.is_empty:
            raise UsageError(
                f"there is nothing to serve: no function is declared on {self!r} with @mesh.task, nor a schedule; import the "
                f"modules that declare them before {before}"
            )

    @asynccontextmanager
    async def joined(self, options: Mapping[str, Any], host: HostLoop | None = None) -> AsyncGenerator[Peer]:
        """Join the mesh for the length of a block, on Trio; see ``Mesh.join``.

        Args:
            options: as `JoinOptions`.
            host: the asyncio loop of the application, in another thread, if handlers are to run there.
        """
        only = Only(options.get("only"))
        settings = self._peer_settings(options, host)
        connections, lifespan = self.client.connections, self.settings.asyncio_lifespan
        only.check(self.declarations.functions)
        known = {name: definition_of(function) for name, function in self.declarations.functions.items()}
        handlers = [each for name, declared in known.items() if name in only for each in declared.handlers()]
        if lifespan is not None:
            warn_if_unused([declared.options.runs_in for declared in known.values()], settings.runs_in)
        if host is not None:
            host.attach()
        async with connections.open(), self._states.enter(self.settings.lifespan) as state:
            here = connections.for_current_loop()
            hosting = partial(connections.hosting, peers=here)
            settings = replace(settings, state=state, asyncio_state=state, sharding=here.sharding, hosting=hosting)
            settings = replace(settings, permits=self.client.permits)
            async with _with_asyncio(lifespan, settings) as settings, Engine(settings, here.link).joined() as engine:
                if host is not None:
                    watch = partial(
                        host.watch_until_ended, settings.block_limit, engine.body.cancel, engine.scheduler.dispatch_soon
                    )
                    engine.spawn(watch)
                await engine.serve_all(handlers)
                with serving_late(engine, self.declarations, only, known):
                    peer = Peer(engine)
                    with self._with_all(peer):
                        yield peer
        if host is not None:
            host.raise_if_ended()

    def _peer_settings(self, options: Mapping[str, Any], host: HostLoop | None = None) -> PeerSettings:
        refuse_unknown("join", options, tuple(JoinOptions.__annotations__))
        ours, server = self.settings, self.client.settings

        def optional(name: str) -> int | None:
            return None if options.get(name) is None else check_count(options[name], name)

        nothing = f"no function is declared on {self!r} with @mesh.task, nor a schedule"
        return PeerSettings(
            prefix=server.prefix,
            app=server.app,
            deploy=ours.deploy,
            concurrency=check_concurrency(options.get("concurrency", CONCURRENCY)),
            grace=seconds(options.get("grace", GRACE), "grace"),
            keepalive=server.keepalive,
            block_limit=ours.block_limit,
            max_payload=server.max_payload,
            schedules=self.declarations.schedules,
            subscriptions=self.client.topics.declared,
            threads=check_count(options.get("threads", THREADS), "threads"),
            processes=check_count(options.get("processes", default_processes()), "processes"),
            process_memory=optional("process_memory"),
            runs_per_process=optional("runs_per_process"),
            memory_per_process=optional("memory_per_process"),
            why_idle=nothing if self.declarations.is_empty else "",
            middleware=(
                *(each.run for each in (server.tracing, self._measuring) if each is not None),
                *ours.middleware,
            ),
            tracing=server.tracing,
            around_thread=ours.around_thread,
            process_lifespan=ours.process_lifespan,
            history_queues=ours.history_queues,
            observer=self.client.observer,
            relocation=self.client.relocation,
            values=self.client.values,
            redact_errors=server.redact_errors,
            runs_in=ours.runs_in or ("loop" if host is None else "asyncio"),
            asyncio_loop=host,
        )


@asynccontextmanager
async def _with_asyncio(
    lifespan: Callable[[], AbstractAsyncContextManager[object]] | None, settings: PeerSettings
) -> AsyncGenerator[PeerSettings]:
    """Enter ``asyncio_lifespan`` for the length of a block, if there is one, and yield the peer's settings in it."""
    if lifespan is None:
        yield settings
        return
    from worqr.peer.executors.asyncio_loop import AsyncioLoop, inside_lifespan  # it imports asyncio

    loop = settings.asyncio_loop or AsyncioLoop(settings.hosting)
    async with inside_lifespan(loop, lifespan) as state:
        yield replace(settings, asyncio_loop=loop, asyncio_state=state)
