"""`PeerFactory`: makes the peers of one mesh, from its settings, its declarations and the options of a join.

A `Mesh` has one. The other modules of this folder run such a peer in a thread, under asyncio, or as a program. What a peer does
is in `worqr.peer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from worqr.client.mesh_client import MeshClient
from worqr.errors import UsageError
from worqr.functions.declarations import Declarations
from worqr.handler_options import refuse_unknown
from worqr.hosting.measuring import Measuring
from worqr.hosting.settings import WorkerSettings
from worqr.inside import definition_of
from worqr.peer.cpu import default_processes
from worqr.peer.engine import Engine
from worqr.peer.late_functions import serving_late
from worqr.peer.lifespans import LifespanStates, warn_if_unused
from worqr.peer.options import CONCURRENCY, GRACE, THREADS, JoinOptions, Only, check_concurrency
from worqr.peer.peer import Peer
from worqr.peer.settings import PeerSettings
from worqr.validation import check_count, seconds

if TYPE_CHECKING:
    from worqr.peer.executors.host_loop import HostLoop

S = TypeVar("S")


class PeerFactory(Generic[S]):
    """Makes the peers of one mesh.

    Attributes:
        settings: the settings of the workers.
        client: the client of the mesh.
        declarations: the functions and schedules of the mesh.
    """

    def __init__(self, settings: WorkerSettings[S], client: MeshClient, declarations: Declarations) -> None:
        self.settings = settings
        self.client = client
        self.declarations = declarations
        self._states = LifespanStates[S]()
        self._measuring: Measuring | None = None

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
        """Tell `measuring` of the peers that join from now on.

        Raises:
            UsageError: The peers of this mesh are measured already.
        """
        if self._measuring is not None:
            raise UsageError(f"the workers of {self!r} are measured already: call measure_workers(mesh) once")
        self._measuring = measuring

    def _measured(self, peer: Peer) -> AbstractContextManager[object]:
        return nullcontext() if self._measuring is None else self._measuring.joined(peer)

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
            async with _with_asyncio(lifespan, settings) as settings, Engine(settings, here.link).joined() as engine:
                if host is not None:
                    watch = partial(
                        host.watch_until_ended, engine.block_limit, engine.body.cancel, engine.scheduler.dispatch_soon
                    )
                    engine.spawn(watch)
                await engine.serve_all(handlers)
                with serving_late(engine, self.declarations, only, known):
                    peer = Peer(engine)
                    with self._measured(peer):
                        yield peer
        if host is not None:
            host.raise_if_ended()

    def _peer_settings(self, options: Mapping[str, Any], host: HostLoop | None = None) -> PeerSettings:
        refuse_unknown("join", options, tuple(JoinOptions.__annotations__))
        ours, server = self.settings, self.client.settings
        memory = options.get("process_memory")
        nothing = f"no function is declared on {self!r} with @mesh.task, nor a schedule"
        return PeerSettings(
            prefix=server.prefix,
            app=server.app,
            concurrency=check_concurrency(options.get("concurrency", CONCURRENCY)),
            grace=seconds(options.get("grace", GRACE), "grace"),
            keepalive=server.keepalive,
            block_limit=ours.block_limit,
            max_payload=server.max_payload,
            schedules=self.declarations.schedules,
            threads=check_count(options.get("threads", THREADS), "threads"),
            processes=check_count(options.get("processes", default_processes()), "processes"),
            process_memory=None if memory is None else check_count(memory, "process_memory"),
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
    from worqr.peer.asyncio_lifespan import with_asyncio_lifespan  # it imports asyncio

    async with with_asyncio_lifespan(lifespan, settings) as found:
        yield found
