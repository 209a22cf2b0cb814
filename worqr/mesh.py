"""The mesh: where an application says which server it uses, and connects, or joins as a peer.

A `Mesh` is settings and nothing else until `connect()` or `join()`: it does no I/O when it is made. Per running loop there
is one link, counted, so that nested and parallel `connect` and `join` share it.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack

import trio

from worqr import function, ops
from worqr.call import Call
from worqr.cron import Schedule
from worqr.embedded import EmbeddedServer, shared_server
from worqr.errors import UsageError
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.link import Link, LinkSettings, TrioMailbox
from worqr.peer.options import CONCURRENCY, GRACE, THREADS, JoinOptions, Only, check_concurrency, refuse_unknown
from worqr.peer.peer import Peer
from worqr.peer.settings import PeerSettings, usable_cpus
from worqr.peer.ticking import schedule_of
from worqr.queue import Queue
from worqr.task import QueueInfo, Seconds, WorkerInfo, check_count, check_text, seconds
from worqr.timetable import Timetable

T = TypeVar("T")

MAX_PATIENCE = 1800.0
"""Seconds. The server remembers replies for an hour; a request that is sent again must find its own there."""
NOTE_EVERY = 3600.0
"""Seconds after which a queue's name is noted again for those who list queues."""


@dataclass(slots=True)
class _Connection:
    """The link of one running loop. Changed only in that loop."""

    link: Link
    server: AbstractContextManager[EmbeddedServer] | None
    users: int = 0
    noted: dict[str, float] = field(default_factory=dict[str, float])


async def _release(server: AbstractContextManager[EmbeddedServer] | None) -> None:
    """Let go of the embedded server; the last who does stops it."""
    if server is not None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.__exit__, None, None, None)


class Mesh(Timetable):
    """A mesh of peers around one Redis or Valkey server.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, with user, password and database; ``embedded:`` starts a private server
            of this process. None: ``$WORQR_URL``, else ``$REDIS_URL``, else ``redis://localhost:6379/0``, read when
            connecting.
        prefix: first part of all keys; two meshes on one server need two (channels ignore the database number).
        app: the application's name, shown in lists of workers and of the server's clients.
        patience: seconds a call waits for a server that is away before it raises `Unavailable`.
        keepalive: seconds without a beat after which a worker counts as dead. None: never; dangerous, because the tasks of
            such a worker that dies come back only when somebody removes it by hand.
        stall_limit: seconds the event loop may be blocked before the peer stops beating and loses its work.
        max_payload: bytes of the largest task.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "worqr",
        app: str = "",
        patience: Seconds = 30,
        keepalive: Seconds | None = 3,
        stall_limit: Seconds = 15,
        max_payload: int = 16 * 1024 * 1024,
    ) -> None:
        super().__init__()
        if url is not None and not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"url must be a str, not {type(url).__name__}")
        self.url = url
        self.prefix: str = check_name(prefix, "prefix")
        self.app = app
        self.patience: float = seconds(patience, "patience", positive=True)
        if self.patience > MAX_PATIENCE:
            raise UsageError(f"patience must be at most {MAX_PATIENCE:g} s, not {patience!r}")
        self.keepalive: float | None = None if keepalive is None else seconds(keepalive, "keepalive", positive=True)
        if self.keepalive is not None and self.keepalive < 1:
            raise UsageError(f"keepalive must be at least 1 s (ordinary stalls last that long), not {keepalive!r}")
        self.stall_limit: float = seconds(stall_limit, "stall_limit", positive=True)
        self.max_payload: int = check_count(max_payload, "max_payload")
        self._connections: dict[object, _Connection] = {}

    def __repr__(self) -> str:
        return f"<Mesh {self.prefix!r}>"

    # Connecting

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[None]:
        """Connect to the server for the length of a block, under Trio.

        Nests, and parallel blocks share one link per running loop.

        Raises:
            UsageError: the URL is wrong, or there is no server for ``embedded:``.
            RefusedByServer: wrong password or rights; WrongVersion: a server older than Redis 7.0 or Valkey 7.2.
            Unavailable: nothing answered within `patience`.
        """
        if not trio.lowlevel.in_trio_run():
            raise UsageError("mesh.connect() needs a running Trio loop: use it inside trio.run(...)")
        token = trio.lowlevel.current_trio_token()
        connection = self._connections.get(token) or await self._open(token)
        connection.users += 1
        try:
            await connection.link.wait_ready()
            yield
        finally:
            connection.users -= 1
            if connection.users == 0:
                del self._connections[token]
                connection.link.close()
                await _release(connection.server)

    async def _open(self, token: object) -> _Connection:
        """The connection of this loop, made now; the embedded server, if that is meant, runs as long as it."""
        url = self.url or os.environ.get("WORQR_URL") or os.environ.get("REDIS_URL") or "redis://localhost:6379/0"
        server: AbstractContextManager[EmbeddedServer] | None = None
        if url == "embedded:":
            server = shared_server()
            with trio.CancelScope(shield=True):
                url = (await trio.to_thread.run_sync(server.__enter__)).url
            if token in self._connections:  # somebody else was quicker
                await _release(server)
                return self._connections.get(token) or await self._open(token)
        link = self._new_link(url)
        link.start()
        connection = self._connections[token] = _Connection(link, server)
        return connection

    def _new_link(self, url: str) -> Link:
        settings = LinkSettings(url, prefix=self.prefix, app=self.app, patience=self.patience)
        return Link(settings, TrioMailbox())

    def _connection(self) -> _Connection:
        token = trio.lowlevel.current_trio_token() if trio.lowlevel.in_trio_run() else None
        connection = self._connections.get(token)
        if connection is None:
            raise UsageError(
                "this mesh is not connected here: use it inside `async with mesh.connect():` (or mesh.join())"
            )
        return connection

    def check_connected(self) -> None:
        """UsageError outside `connect`."""
        self._connection()

    @property
    def link(self) -> Link:
        """The link of the running loop; UsageError outside `connect`."""
        return self._connection().link

    async def ask(self, call: Call[T]) -> T:
        """Send one request and wait for its answer."""
        return await self._connection().link.call(call)

    def link_to(self, queue: str) -> Link:
        """The link for tasks that go into `queue`, whose name is remembered for those who list queues."""
        connection = self._connection()
        now = time.monotonic()
        if connection.noted.get(queue, -NOTE_EVERY) + NOTE_EVERY <= now:
            connection.noted[queue] = now
            call = ops.note_queues(RegistryKeys(self.prefix), [queue])
            connection.link.post(call, lambda _word, _failure: None, patience=self.patience)
        return connection.link

    # Joining

    @asynccontextmanager
    async def join(self, **options: Unpack[JoinOptions]) -> AsyncGenerator[Peer]:
        """Join the mesh as a peer for the length of a block, under Trio; connects as well.

        A block that ends normally drains for `grace` seconds; one that ends by an exception or a cancellation cancels its
        handlers at once and gives their tasks back within 2 s.

        Args:
            options: see `JoinOptions`.

        Raises: as `connect`; UsageError: an option that does not exist or cannot be; WrongVersion: the mesh on this server
            speaks another wire version.
        """
        settings = self._peer_settings(options)
        async with self.connect(), Peer(settings, self.link).joined() as peer:
            yield peer

    def _peer_settings(self, options: Mapping[str, Any]) -> PeerSettings:
        refuse_unknown("join", options, tuple(JoinOptions.__annotations__))
        Only(options.get("only")).check(())
        return PeerSettings(
            prefix=self.prefix,
            app=self.app,
            concurrency=check_concurrency(options.get("concurrency", CONCURRENCY)),
            grace=seconds(options.get("grace", GRACE), "grace"),
            keepalive=self.keepalive,
            stall_limit=self.stall_limit,
            max_payload=self.max_payload,
            schedules=self.declared_schedules,
            threads=check_count(options.get("threads", THREADS), "threads"),
            processes=check_count(options.get("processes", usable_cpus()), "processes"),
        )

    # Looking

    def queue(self, name: str) -> Queue:
        """The queue of this name; no I/O, it need not exist.

        Raises:
            UsageError: not 1 to 200 bytes of UTF-8, or with braces or control characters.
        """
        return Queue(self, QueueKeys(self.prefix, check_name(name)))

    async def queues(self) -> list[QueueInfo]:
        """All queues that hold something or are served, by name."""
        names = await self.ask(ops.list_queues(RegistryKeys(self.prefix)))
        infos = [await Queue(self, QueueKeys.of(self.prefix, name)).info() for name in sorted(names)]
        return [
            i
            for i in infos
            if i.waiting or i.running or i.due or i.blocked or i.failed or i.broken or i.workers or i.paused is not None
        ]

    async def workers(self) -> list[WorkerInfo]:
        """All registered workers, by id; one that died is listed until it is swept (within 5 s)."""
        found: list[WorkerInfo] = []
        for worker, ttl, facts, queues in await self.ask(ops.list_workers(RegistryKeys(self.prefix))):
            keepalive_ms = int(facts.get("keepalive_ms", "0"))
            age = 0.0 if ttl == -1 else max(0, keepalive_ms - ttl) / 1000 if ttl >= 0 else float("inf")
            found.append(
                WorkerInfo(
                    id=worker,
                    host=facts.get("host", ""),
                    pid=int(facts.get("pid", "0")),
                    app=facts.get("app", ""),
                    version=facts.get("version", ""),
                    queues=frozenset(queues),
                    running=int(facts.get("running", "0")),
                    room=int(facts.get("room", "0")),
                    beat_age=age,
                )
            )
        return sorted(found, key=lambda info: info.id)

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

    async def schedules(self) -> list[Schedule]:
        """All schedules of the mesh, whoever declared them, by name."""
        found = await self.ask(ops.list_schedules(RegistryKeys(self.prefix)))
        return [schedule_of(row) for row in found.rows]

    async def pause_schedule(self, name: str, *, paused: bool = True) -> None:
        """Let the firings of a schedule pass until ``paused=False``; what was let pass is not made up for.

        What it has enqueued already runs. A pause outlives restarts and changes of the schedule.

        Raises:
            UsageError: no schedule of the mesh has this name.
        """
        registry = RegistryKeys(self.prefix)
        if not await self.ask(ops.pause_schedule(registry, check_text(name, "schedule name"), paused=bool(paused))):
            known = [row.name for row in (await self.ask(ops.list_schedules(registry))).rows]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, known[:20])) or 'none'}"
            raise UsageError(f"there is no schedule {name!r} in this mesh; {hint}")
