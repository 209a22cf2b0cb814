"""Join a mesh: from its settings and the options of a join to a running peer. For `worqr.mesh`.

What a peer does is in `worqr.peer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from worqr.inside import client_of, declarations_of, declared_of
from worqr.peer.cpu import default_processes
from worqr.peer.engine import Engine
from worqr.peer.late_functions import serving_late
from worqr.peer.lifespans import States, warn_if_unused
from worqr.peer.options import (
    CONCURRENCY,
    GRACE,
    THREADS,
    JoinOptions,
    Only,
    check_concurrency,
    refuse_unknown,
)
from worqr.peer.peer import Peer
from worqr.peer.settings import PeerSettings
from worqr.validation import check_count, seconds

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.peer.executors.host_loop import HostLoop

S = TypeVar("S")


def check_join(mesh: Mesh[Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of a join that do not exist or are not valid."""
    Only(options.get("only"))
    _peer_settings(mesh, options)


@asynccontextmanager
async def joined(
    mesh: Mesh[S], states: States[S], options: Mapping[str, Any], host: HostLoop | None = None
) -> AsyncGenerator[Peer]:
    """Join the mesh for the length of a block, on Trio; see ``Mesh.join``.

    Args:
        mesh: the mesh.
        states: they hold what the lifespan yields.
        options: as `JoinOptions`.
        host: the asyncio loop of the application, in another thread, if handlers are to run there.
    """
    only = Only(options.get("only"))
    settings = _peer_settings(mesh, options, host)
    declarations, connections = declarations_of(mesh), client_of(mesh).connections
    only.check(declarations.functions)
    known = {name: declared_of(function) for name, function in declarations.functions.items()}
    handlers = [each for name, declared in known.items() if name in only for each in declared.served()]
    if mesh.asyncio_lifespan is not None:
        warn_if_unused([declared.how.runs_in for declared in known.values()], settings.runs_in)
    if host is not None:
        host.attach()
    async with mesh.connect(), states.entered(mesh.lifespan) as state:
        here = connections.here()
        hosting = partial(connections.hosting, peers=here)
        settings = replace(settings, state=state, asyncio_state=state, sharding=here.sharding, hosting=hosting)
        async with (
            _with_asyncio(mesh.asyncio_lifespan, settings) as settings,
            Engine(settings, here.link).joined() as engine,
        ):
            if host is not None:
                watch = partial(
                    host.watch_forever, engine.block_limit, engine.body.cancel, engine.scheduler.dispatch_soon
                )
                engine.spawn(watch)
            await engine.serve_all(handlers)
            with serving_late(engine, declarations, only, known):
                yield Peer(engine)
    if host is not None:
        host.raise_if_ended()


def _peer_settings(mesh: Mesh[Any], options: Mapping[str, Any], host: HostLoop | None = None) -> PeerSettings:
    refuse_unknown("join", options, tuple(JoinOptions.__annotations__))
    declarations = declarations_of(mesh)
    memory = options.get("process_memory")
    nothing = f"no function is declared on {mesh!r} with @mesh.task, nor a schedule" if declarations.is_empty else ""
    return PeerSettings(
        prefix=mesh.prefix,
        app=mesh.app,
        concurrency=check_concurrency(options.get("concurrency", CONCURRENCY)),
        grace=seconds(options.get("grace", GRACE), "grace"),
        keepalive=mesh.keepalive,
        block_limit=mesh.block_limit,
        max_payload=mesh.max_payload,
        schedules=declarations.schedules,
        threads=check_count(options.get("threads", THREADS), "threads"),
        processes=check_count(options.get("processes", default_processes()), "processes"),
        process_memory=None if memory is None else check_count(memory, "process_memory"),
        nothing=nothing,
        middleware=mesh.middleware,
        around_thread=mesh.around_thread,
        process_lifespan=mesh.process_lifespan,
        onlooker=client_of(mesh).onlooker,
        relocation=client_of(mesh).relocation,
        runs_in=mesh.runs_in or ("loop" if host is None else "asyncio"),
        asyncio_loop=host,
    )


@asynccontextmanager
async def _with_asyncio(
    lifespan: Callable[[], AbstractAsyncContextManager[object]] | None, settings: PeerSettings
) -> AsyncGenerator[PeerSettings]:
    """The block of ``asyncio_lifespan`` around a peer, and the peer's settings in it; only its users import asyncio."""
    if lifespan is None:
        yield settings
        return
    from worqr.peer.asyncio_lifespan import with_asyncio_lifespan

    async with with_asyncio_lifespan(lifespan, settings) as found:
        yield found
