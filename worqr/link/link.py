"""`Link`: the connection of one peer or producer to its server. All of worqr's requests go through it.

Here: the interface, and the fork guard. Not here: requests (`node`, `cluster_router`), messages (`subscriptions`), the
keepalive (`heartbeat`).

Create a link in the loop that uses it, or outside of a loop for plain threads, which may all use it at once. `start` begins
to connect; `close` ends all connections and threads. A call submits a request to the driver and waits for its outcome. The
calling task does not own the socket: its cancellation abandons one reply, and no other request is affected.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, TypeVar, cast

import msgspec
import trio

from worqr.command import Command
from worqr.errors import NotReplicated, Unavailable, UsageError, WorqrError, note_reply
from worqr.keys import RegistryKeys
from worqr.link.cluster import ClusterRouter, ClusterSubscriptions, ShardEndpoint
from worqr.link.connector import EndpointResolver, MovableEndpoint, Wire, info_fields, open_connection
from worqr.link.driver import Driver, TrioDriver, Waiter, Watch, copy_of
from worqr.link.failures import ConnectionLost, ErrorReply
from worqr.link.heartbeat import Heartbeat
from worqr.link.log_thread import LogThread, Watchers
from worqr.link.messages import Subscriptions
from worqr.link.node import LinkCondition, NodeClient
from worqr.link.sentinel import SentinelEndpoint
from worqr.link.session import Posted, Request, WorkerHandle
from worqr.link.settings import LinkSettings
from worqr.link.thread_driver import ThreadDriver, here

# Detect the event loop of this thread, and return the matching driver.
#
# asyncio is checked only if the program has imported it. Otherwise no asyncio loop can run, and the import is slow.


def loop_here() -> object | None:
    """Return what runs in this thread: the token of a Trio run, or an asyncio loop; None: neither.

    Two results for the same loop are equal. If a Trio run is a guest of an asyncio loop, the result depends on the calling task.
    """
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()
    loop = _asyncio_loop()
    if loop is None and trio.lowlevel.in_trio_run():  # in a callback
        return trio.lowlevel.current_trio_token()
    return loop


def can_wait_here() -> bool:
    """Return True if a coroutine that is made here can be awaited here: a loop runs in this thread, or `as_sync` does."""
    # asyncio first: where Trio does not run, its check takes long
    if here.in_sync or (_running_loop is not None and _running_loop() is not None):
        return True
    return trio.lowlevel.in_trio_run() or _asyncio_loop() is not None


def loop_name_here() -> Literal["Trio", "asyncio", ""]:
    """Return the name of `loop_here`, for messages."""
    loop = loop_here()
    if loop is None:
        return ""
    return "Trio" if isinstance(loop, trio.lowlevel.TrioToken) else "asyncio"


def driver_here() -> Driver:
    """Return the driver for a link that is created here: that of the running loop, or else that of plain threads."""
    name = loop_name_here()
    if name == "Trio":
        return TrioDriver()
    if name == "asyncio":
        from worqr.link.asyncio_driver import AsyncioDriver

        return AsyncioDriver()
    return ThreadDriver()


_running_loop: Callable[[], object | None] | None = None
"""What returns the asyncio loop of this thread, once the program has imported asyncio. It raises nothing where none runs."""


def _asyncio_loop() -> object | None:
    global _running_loop  # noqa: PLW0603
    running = _running_loop
    if running is None:
        asyncio = sys.modules.get("asyncio")
        running = getattr(asyncio, "_get_running_loop", None)  # missing, too, while another thread is importing asyncio
        if running is None:
            return None
        _running_loop = running
    return running()


# What the server reports of itself: numbers for metrics, and everything for people. One short connection each time, which
# blocks its thread.


_SECTIONS = ("memory", "clients")
MOST_CLIENTS: Final = 2000
"""Connections that are listed. The list of more of them would occupy the server for milliseconds."""
_CLIENT_NAME: Final = re.compile(r"(?:^| )name=(\S*)")


class ServerStats(msgspec.Struct, frozen=True):
    """Numbers of one server; None where the user may not ask, or the provider hides them.

    Attributes:
        memory: bytes that its data take.
        max_memory: the limit; 0: there is none.
        keeps_everything: it refuses writes when its memory is full, and evicts nothing.
        clients: open connections.
    """

    memory: int | None = None
    max_memory: int | None = None
    keeps_everything: bool | None = None
    clients: int | None = None


def read_server_stats(settings: LinkSettings, resolver: EndpointResolver, timeout: float) -> ServerStats:
    """Ask the server; see `Link.server_stats`."""
    wire = open_connection(settings, resolver, "metrics", timeout=timeout, replica=True)
    try:
        replies = wire.exchange([("INFO", section) for section in _SECTIONS])
    except ConnectionLost as error:
        raise Unavailable(str(error)) from error
    finally:
        wire.close()
    found = {name: value for reply in replies for name, value in info_fields(reply).items()}
    memory, most, clients = (_number(found, name) for name in ("used_memory", "maxmemory", "connected_clients"))
    policy = found.get("maxmemory_policy")
    return ServerStats(memory, most, policy == "noeviction" if policy else None, clients)


class ServerReport(msgspec.Struct, frozen=True):
    """What one server reports of itself.

    Attributes:
        address: the server, without secrets.
        info: the fields of INFO.
        clients: the number of connections by their names; empty if they were not read.
        problem: why something is missing; empty if nothing is.
    """

    address: str
    info: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    clients: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    problem: str = ""


def read_server_report(settings: LinkSettings, resolver: EndpointResolver, timeout: float) -> ServerReport:
    """Ask one server for everything; see `Link.server_reports`. An error is a part of the report."""
    wire: Wire | None = None
    try:
        wire = open_connection(settings, resolver, "report", timeout=timeout, replica=True)
        return _report(wire, resolver.name)
    except (WorqrError, ConnectionLost) as error:
        return ServerReport(resolver.name, problem=str(error))
    finally:
        if wire is not None:
            wire.close()


def _report(wire: Wire, address: str) -> ServerReport:
    (reply,) = wire.exchange([("INFO",)])
    if isinstance(reply, ErrorReply):
        return ServerReport(address, problem=str(reply))
    info = info_fields(reply)
    if (_number(info, "connected_clients") or 0) > MOST_CLIENTS:
        return ServerReport(address, info)
    (listed,) = wire.exchange([("CLIENT", "LIST")])
    if isinstance(listed, ErrorReply):
        return ServerReport(address, info, problem=str(listed))
    names = (_CLIENT_NAME.search(line) for line in listed.decode("utf-8", "replace").splitlines())
    return ServerReport(address, info, Counter(name.group(1) for name in names if name is not None))


def _number(found: dict[str, str], name: str) -> int | None:
    value = found.get(name, "")
    return int(value) if value.isdecimal() else None


T = TypeVar("T")
R = TypeVar("R")

logger: logging.Logger = logging.getLogger(__name__)

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Together(threading.local):
    """Blocks of a thread in which requests are posted together, without an await. The outermost of them submits.

    Attributes:
        posted: the requests of the block; None outside.
    """

    posted: Posted | None = None

    def __init__(self, submit: Callable[[Request | Posted], object]) -> None:
        self._submit = submit
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self.posted is None:
            self.posted = Posted()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        posted, self.posted = self.posted, None
        if posted:
            posted.end_block()
            self._submit(posted if len(posted) > 1 else posted[0])


class Link:
    """The access to the server, which survives lost connections.

    Attributes, set once:
        producer: identifies this link in the server's stored replies; 128 random bits, never shared.
        settings: its settings.
        driver: waits for the callers, in their loop or threads.
        subscriptions: messages on channels.
        watchers: the listeners for a lost server and its return.
        together: a block whose posted requests are submitted together: one submission costs less than many.
    """

    def __init__(self, settings: LinkSettings, driver: Driver) -> None:
        self.producer: str = secrets.token_urlsafe(16)
        self.settings = settings
        self.driver: Driver = driver
        self._log_thread = LogThread()
        self.watchers: Watchers = self._log_thread.watchers
        self._resolver: EndpointResolver = MovableEndpoint(settings, self._followed)
        self._sentinels: SentinelEndpoint | None = None
        if settings.address.topology == "sentinel":
            self._resolver = self._sentinels = SentinelEndpoint(settings, self._log_thread, self._moved)
        self._client: NodeClient | ClusterRouter
        self.subscriptions: Subscriptions | ClusterSubscriptions
        if settings.clustered:
            registry = RegistryKeys(settings.prefix).base
            router = self._client = ClusterRouter(settings, driver, self._log_thread, self.producer, registry)
            self._resolver = ShardEndpoint(router.topology, router.home, settings.address.redacted)
            self.subscriptions = ClusterSubscriptions(settings, driver, self._log_thread, router, registry)
        else:
            self._client = NodeClient(settings, driver, self._log_thread, self.producer, resolver=self._resolver)
            self.subscriptions = Subscriptions(settings, driver, self._log_thread, resolver=self._resolver)
        self._submit: Callable[[Request | Posted], Watch | None] = driver.submits(self._client.submit)
        self.together: Together = Together(self._submit)
        self._heartbeats: list[Heartbeat[object]] = []
        self._has_begun = False  # started, or closed
        _links.add(self)

    @property
    def connected_at(self) -> float:
        """The monotonic time of the present (or last) data connection; changes with every new one."""
        return self._client.history.connected_at

    @property
    def connections(self) -> int:
        """The number of data connections so far."""
        return self._client.history.count

    @property
    def condition(self) -> LinkCondition:
        """The state of its data connections; from any thread."""
        return self._client.condition

    def server_stats(self, timeout: float) -> ServerStats:
        """Ask the server for its memory and clients, by a connection of its own; blocks, so call it in a thread.

        Raises:
            RefusedByServer, WrongVersion, Unavailable: as `wait_ready`.
        """
        return read_server_stats(self.settings, self._resolver, timeout)

    def server_reports(self, timeout: float) -> list[ServerReport]:
        """Ask the server, or each primary of a cluster, what it reports of itself; blocks, so call it in a thread.

        Args:
            timeout: seconds for each reply.
        """
        every = self._client.nodes() if isinstance(self._client, ClusterRouter) else [self._resolver]
        return [read_server_report(self.settings, resolver, timeout) for resolver in every]

    @property
    def run_id(self) -> str:
        """Return the run id of the server at the last connection; it changes when the server restarts.

        Empty if the user has no permission to ask.
        """
        return self._client.history.run_id

    @property
    def has_ended(self) -> bool:
        """True if nothing can be sent any more."""
        return self._has_begun and self._client.ended is not None

    def start(self) -> None:
        """Begin to connect, in the background. Idempotent.

        Raises:
            Unavailable: the system cannot start a thread, which Sentinel and Redis Cluster need.
        """
        if self._has_begun:
            self._check()
            return
        self._has_begun = True
        try:
            if self._sentinels is not None:
                self._sentinels.watcher.start()
            with self.driver.entered:
                self._client.start()
        except BaseException as exc:  # also Ctrl-C, which may arrive while a thread starts
            self.close()
            if not isinstance(exc, RuntimeError):
                raise
            raise Unavailable(
                f"cannot start the link's threads ({exc}): this process is at its limit (ulimit -u)"
            ) from exc
        if ("ssl_cert_reqs", "none") in self.settings.address.tls:
            text = (
                "TLS certificate verification is disabled by ssl_cert_reqs=none: %(server)s is not authenticated; name its CA "
                "with ssl_ca_certs"
            )
            self._log_thread.emit(logger, "link.insecure", text, server=self.settings.address.redacted)

    async def wait_ready(self) -> None:
        """Return when a connection is open.

        Raises:
            RefusedByServer, WrongVersion: at once; waiting does not help.
            Unavailable: there was no connection within `patience`.
        """
        waiter = Waiter()
        await self.driver.prepare(waiter)
        with self.driver.entered:
            self._client.wait_ready(waiter, time.monotonic() + self.settings.patience)
        await self.driver.wait(waiter)
        waiter.raise_error()

    async def call(self, call: Command[T], *, patience: float | None = None) -> T:
        """Send `call` and wait for its value. After a lost connection it is resent until the server replies.

        If you cancel the call before it is written, it is withdrawn. After that it may take effect, and its reply is dropped.

        Args:
            patience: seconds; by default the settings'.

        Raises:
            Unavailable: no reply within `patience`; `sent` is False if withdrawn, None if it may have taken effect.
            RefusedByServer, QueueFull, WorqrError: the server's error, as the call decodes it.
            NotReplicated: it took effect, but fewer replicas than the call requires have it; `answer` is its value.
        """
        if self._client.ended is not None:
            self._check()
        request = Request(call, self.settings.patience if patience is None else patience, time.monotonic())
        await self.driver.exchange(request, self._submit)
        if request.error is not None:
            if isinstance(request.error, NotReplicated):
                note_reply(request.error, request.value)
            request.raise_error()
        value: T = request.value
        return value

    async def call_all(self, calls: Sequence[Command[T]]) -> list[T]:
        """Send `calls` together, wait for all of them, and return their values in order. Cancellation works as for `call`.

        Raises:
            WorqrError: as `call`; the first error, after all calls have ended. The other calls may have taken effect: then the
                `sent` of an Unavailable is None.
            NotReplicated: no call failed in another way; `answer` has all values.
        """
        if self._client.ended is not None:
            self._check()
        if not calls:
            await self.driver.checkpoint()
            return []
        everything = Waiter()
        await self.driver.prepare(everything)
        now = time.monotonic()
        requests = Posted(Request(call, self.settings.patience, now) for call in calls)
        requests.settle_last(everything)
        self._submit(requests)
        try:
            await self.driver.wait(everything)
        except BaseException:
            requests.abandon()
            raise
        everything.raise_error()
        return _values(requests)

    def post(
        self,
        call: Command[T],
        deliver: Callable[[T | None, Exception | None], None],
        *,
        owner: WorkerHandle | None = None,
        patience: float = math.inf,
    ) -> None:
        """Send `call` without waiting; the loop calls `deliver(value, error)` with its outcome.

        With an owner the call is resent until the server replies, or until the owner is dead (then `error` is ClaimLost).
        """
        request = Request(call, patience, time.monotonic(), owner, deliver)
        posted = self.together.posted
        if posted is None:
            self._submit(request)
        else:
            posted.append(request)

    def heartbeat(
        self,
        *,
        make: Callable[[int, bool], Command[R]],
        replied: Callable[[R], None],
        every: float,
        block_limit: float,
        describe: Callable[[], str],
        timeout: float = 1.5,
    ) -> Heartbeat[R]:
        """Return a keepalive with its own thread and connection, which ends with the link at the latest. See `Heartbeat`."""
        self._check()
        heartbeat = Heartbeat(
            self.settings,
            self.driver,
            make=make,
            replied=replied,
            every=every,
            block_limit=block_limit,
            describe=describe,
            timeout=timeout,
            log_thread=self._log_thread,
            resolver=self._resolver,
        )
        self._heartbeats = [other for other in self._heartbeats if not other.stopped]
        self._heartbeats.append(cast("Heartbeat[object]", heartbeat))
        return heartbeat

    def close(self) -> None:
        """Close all sockets and end all threads, now. Pending calls get Unavailable. Idempotent."""
        self._has_begun = True
        with ExitStack() as stack:  # Ctrl-C may end the wait for a thread: the rest is closed all the same
            stack.callback(self._log_thread.stop)
            stack.callback(self._disconnect)
            if self._sentinels is not None:
                stack.callback(self._sentinels.close)
            for heartbeat in self._heartbeats:
                stack.callback(heartbeat.stop)

    def _disconnect(self) -> None:
        with self.driver.entered, ExitStack() as stack:
            for close in (self.driver.close, self._client.close, self.subscriptions.close):
                stack.callback(close)

    def _followed(self, before: str, after: str) -> None:
        """The mesh has moved to another server. Called in the thread of an attempt to connect."""
        text = "the primary of %(service)s is %(server)s now; it was %(before)s"
        self._log_thread.emit(
            logger, "link.moved", text, service=self.settings.address.redacted, server=after, before=before
        )
        self._moved()

    def _moved(self) -> None:
        """The primary has changed. Called in another thread; heartbeats check the resolver at every beat."""
        if isinstance(self._client, NodeClient) and isinstance(self.subscriptions, Subscriptions):
            self.driver.post(self._client.reconsider)
            self.driver.post(self.subscriptions.reconsider)

    def _check(self) -> None:
        """Raise the link's error if it has ended. Raises a copy, because a traceback belongs to one task."""
        ended = self._client.ended
        if ended is not None:
            raise copy_of(ended)

    def _poison(self) -> None:
        error = UsageError(
            "this mesh was connected before a fork, and the connection belongs to the parent: run a new event loop in the child, "
            "and connect there"
        )
        if self._sentinels is not None:
            self._sentinels.watcher.poison(error)
        self._client.poison(error)
        self.driver.poison()
        self._log_thread.poison()
        self.subscriptions.poison(error)
        for heartbeat in self._heartbeats:
            heartbeat.poison(error)


def _may_have_effect(request: Request) -> bool:
    error = request.error
    return error is None or isinstance(error, NotReplicated) or (isinstance(error, Unavailable) and error.sent is None)


def _values(requests: Posted) -> list[Any]:
    """Return the values of settled requests. Raises the first error, and NotReplicated only if there is no other error."""
    late: NotReplicated | None = None
    for request in requests:
        if (
            isinstance(request.error, Unavailable)
            and request.error.sent is False
            and any(map(_may_have_effect, requests))
        ):
            raise Unavailable(*request.error.args, sent=None) from request.error
        if not isinstance(request.error, NotReplicated):
            request.raise_error()
        elif late is None:
            late = request.error
    values = [request.value for request in requests]
    if late is not None:
        note_reply(late, values)
        raise late
    return values


def _after_fork_in_child() -> None:
    for link in _links:
        link._poison()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
