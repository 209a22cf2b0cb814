"""A mesh as a program: ``worqr run`` and ``mesh.run()``. It joins, serves until it is asked to stop, and always ends.

The first SIGTERM or SIGINT gives running tasks `grace` seconds to end. The second cancels handlers, whose tasks return to the
front of their queues. The third ends the process at once. They are Python's own signal handlers, so that the third works even
while a handler blocks the loop. SIGHUP, which a terminal sends when it is closed, acts like the first SIGTERM. It does not
count, because the kernel and the shell may both send it.

A peer cannot leave while one of its handlers refuses to end, so a thread watches the shutdown. It logs what still runs, and
ends the process after a bounded time; other workers get its tasks some seconds later.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Final, NoReturn

import trio
from trio_util import periodic

from worqr.errors import Unavailable, UsageError
from worqr.functions.function import Function
from worqr.handler_options import AsyncRunsIn
from worqr.hosting.logs import LINE, PlainFormatter
from worqr.hosting.peer_factory import PeerFactory
from worqr.hosting.systemd import READY, STOPPING, SystemdNotifier
from worqr.http_server import BindAddress, HttpReply, HttpRequest, HttpServer
from worqr.inside import definition_of, engine_of, readings_of
from worqr.link import loop_name_here
from worqr.log_events import emit, emit_fields
from worqr.mesh_records import Health
from worqr.peer.options import GRACE, Only
from worqr.peer.peer import Peer, PeerReadings
from worqr.probes import Probes
from worqr.tracebacks import one_line
from worqr.validation import seconds
from worqr.version import __version__

# `Supervision`: what a service tells those who supervise it, an orchestrator by probes over HTTP and systemd by messages.
#
# Both reply or send in threads of their own, from before the service joins until it has left.


logger: logging.Logger = logging.getLogger("worqr.service")  # a documented name

LEAVING: Final = "the peer is leaving"


class Supervision:
    """The probes and the messages of one service.

    Args:
        probe: where the probes listen; None: as ``$WORQR_PROBE`` says, else nowhere.

    Raises:
        UsageError: that is not an address.
    """

    def __init__(self, probe: str | int | None) -> None:
        self._bind: BindAddress | None = None
        if probe is not None:
            self._bind = BindAddress.parse(probe, "probe")
        elif given := os.environ.get("WORQR_PROBE"):
            self._bind = BindAddress.parse(given, "WORQR_PROBE")
        self._peer: Peer | None = None
        self._stopping = False
        self._probes = Probes(self)
        self._systemd = SystemdNotifier(self.health, os.environ)

    @contextmanager
    def running(self) -> Generator[None]:
        """Serve the probes, and send messages, in a block.

        Raises:
            UsageError: the address of the probes is in use.
        """
        server = None if self._bind is None else HttpServer(self._bind, self._probes.respond)
        try:
            self._systemd.start()
            if server is not None:
                emit(logger, "probe", "serving probes at %(address)s", address=str(server.address))
            yield
        finally:
            self._systemd.end()
            if server is not None:
                server.close()

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply of the probes to a request; from any thread."""
        return self._probes.respond(request)

    def serves(self, peer: Peer) -> None:
        """The peer has joined, and serves its queues."""
        self._peer = peer
        self._probes.observe()
        self._systemd.tell(READY)

    def stopping(self) -> None:
        """The service begins to leave; from any thread, and from a signal handler."""
        if not self._stopping:
            self._stopping = True
            self._systemd.tell(STOPPING)

    def _readings(self) -> PeerReadings | None:
        return None if self._peer is None else readings_of(self._peer)

    def health(self) -> Health:
        """Return the health of the service, from any thread."""
        if self._peer is None:
            return Health(alive=True, ready=False, why="joining the mesh", running=0, room=0, loop_lag=0.0)
        health = self._peer.health()
        if self._stopping and health.ready:  # a loop that is blocked does not know it yet
            return replace(health, ready=False, why=LEAVING)
        return health


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARN_AFTER: Final = 4.0
"""Seconds after a cancellation at which handlers that still run are logged."""
EXIT_AFTER: Final = 10.0
"""Seconds after a cancellation at which the process exits. It is longer than the 6 s that a peer takes at most to leave while
the server does not reply.
"""
LOG_TIMEOUT: Final = 1.0
"""Seconds for writing the last log lines: the process that reads the log may hang."""


class StopLevel(enum.IntEnum):
    """How urgently a service should end."""

    DRAIN = 1
    CANCEL = 2
    NOW = 3


IDLE_CHECK_EVERY: Final = 0.1
"""Seconds between two checks whether a worker that retires still runs tasks."""
RETRY_AFTER: Final = 2.0
"""Seconds between a failed join and the next try. Some joins fail at once, for example if the host name does not resolve."""
_STOP_TEXTS: Final = {
    StopLevel.DRAIN: "shutting down: waiting up to %(grace)g s for running tasks (Ctrl-C again to cancel them)",
    StopLevel.CANCEL: "cancelling the running tasks, which go back to their queues (Ctrl-C again to end the process at once)",
}


def run(peers: PeerFactory[Any], options: Mapping[str, Any], probe: str | int | None = None) -> None:
    """Join the mesh and serve its functions until a signal comes: the last line of a script.

    The first SIGTERM or SIGINT (Ctrl-C) drains for `grace`, the second cancels what runs and gives it back, the third ends the
    process at once. SIGHUP drains, unless it is ignored, as under `nohup`. While the server is away it waits, also at the
    start. Logs to the standard error, if nothing has set up logging.

    Args:
        options: as for ``join``.
        probe: where it serves probes; None: as ``$WORQR_PROBE`` says.

    Returns: after a drain. If something refuses to end, the process ends with code 1 instead, 10 s after it was cancelled.

    Raises:
        UsageError: nothing to serve, an option that cannot be, not the main thread, inside a running loop, while the
            command line imports this module, or the address of the probes is in use.
        RefusedByServer, WrongVersion: waiting would not help.
    """
    service = Service(peers, options, probe)
    service.check()
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(PlainFormatter(LINE))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    service.run()


class Service:
    """One run of a mesh as a program. Any thread may change `_level` and `_retires`; the rest is changed in the loop's thread.

    Args:
        restarted: why the worker ended that this one replaces, for the log of the mesh; empty: it replaces none.
    """

    def __init__(
        self, peers: PeerFactory[Any], options: Mapping[str, Any], probe: str | int | None = None, restarted: str = ""
    ) -> None:
        self._peers = peers
        self._options = options
        self._supervision = Supervision(probe)
        self._grace = seconds(options.get("grace", GRACE), "grace")
        self._signals = 0
        self._level = 0
        self._logged_level = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._stopping = trio.Event()
        self._retires = False
        self._retiring = trio.Event()
        self._restarted = restarted
        self._peer: Peer | None = None
        self._watchdog = _ShutdownWatchdog(self._describe_running, self._grace)
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise UsageError if this mesh cannot run here, or has nothing to serve. Changes nothing."""
        _check_can_run_here()
        self._peers.check_not_empty("it runs")
        Only(self._options.get("only")).check(self._peers.declarations.functions)

    def run(self) -> None:
        """Block until the service has ended; see the function `run`."""
        self.check()
        with self._supervision.running():
            self._run_until_stopped()

    def _run_until_stopped(self) -> None:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # the parent process asked to ignore it, as `nohup` does
                self._before[number] = signal.SIG_DFL if before is None else before
                signal.signal(number, self._on_signal)
        self._watchdog.start()
        try:
            trio.run(self._run)
        finally:
            self._watchdog.end()
            for caught, handler in self._before.items():
                signal.signal(caught, handler)

    def request_stop(self, level: int) -> None:
        """Request a stop with at least this level (see `StopLevel`). Called from any thread, and from a signal handler."""
        if level >= StopLevel.NOW:
            os._exit(1)
        self._level = max(self._level, level)
        self._watchdog.begin(self._level)
        self._supervision.stopping()
        self._wake()

    def retire(self) -> None:
        """Take no more tasks, and stop when the running ones have ended, however long they take. Called from any thread."""
        self._retires = True
        self._wake()

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply of the probes to a request. Called from any thread."""
        return self._supervision.respond(request)

    def _wake(self) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_stop, idempotent=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of a handler, which must end as if there were no service
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            self.request_stop(StopLevel.DRAIN)
            return
        self._signals += 1
        self.request_stop(self._signals)

    def _apply_stop(self) -> None:
        """Retire, or stop with the requested level. Called in the loop."""
        if self._retires:
            self._retiring.set()
        if self._level > self._logged_level:
            self._logged_level = self._level
            text = _STOP_TEXTS[StopLevel(self._level)]
            emit(logger, "stop", text, grace=self._grace)
        if self._level:
            self._stopping.set()
        if self._level >= StopLevel.CANCEL or (self._level and self._peer is None):
            self._scope.cancel()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._apply_stop()  # a stop may have been requested before there was a token
        with self._scope:
            while self._peer is None:
                try:
                    await self._serve()
                except Unavailable as error:
                    if self._peer is not None:
                        raise
                    emit(logger, "start", "%(error)s; retrying", level=logging.WARNING, error=str(error))
                    await trio.sleep(RETRY_AFTER)

    async def _serve(self) -> None:
        async with self._peers.joined(self._options) as peer:
            self._peer = peer
            served = _served(self._peers, peer)
            banner = _banner(self._peers, peer, served).replace("%", "%%")
            emit_fields(logger, "start", banner, _facts(self._peers, peer, served))
            self._supervision.serves(peer)
            if self._restarted:
                engine_of(peer).session.note("restarted", self._restarted)
            try:
                await self._wait_until_stopping(peer)
            except BaseException:
                self._watchdog.begin(StopLevel.CANCEL)
                raise
            self._watchdog.begin(StopLevel.DRAIN)
            self._supervision.stopping()

    async def _wait_until_stopping(self, peer: Peer) -> None:
        """Wait until a stop is requested, or the peer has drained; a handler may drain it."""
        async with trio.open_nursery() as nursery:

            async def drained() -> None:
                await peer.wait()
                self._stopping.set()

            nursery.start_soon(drained)
            nursery.start_soon(self._retire_when_asked, peer)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()

    async def _retire_when_asked(self, peer: Peer) -> None:
        await self._retiring.wait()
        scheduler = engine_of(peer).scheduler
        emit(logger, "stop", "this worker is renewed: it takes no more tasks, and ends after those that run")
        scheduler.be_quiet()
        async for _ in periodic(IDLE_CHECK_EVERY):
            if not scheduler.running:
                break
        self.request_stop(StopLevel.DRAIN)

    def _describe_running(self) -> str:
        """Return a text that says which handlers still run. Called in the thread of the watchdog, while the loop runs."""
        try:
            return self._running_now()
        except Exception as error:  # the loop changes what is read here
            return f"unknown handlers ({one_line(error)})"

    def _running_now(self) -> str:
        peer = self._peer
        if peer is None:
            return "the peer has not joined yet"
        runs = [f"{len(each.running)} of {each.name!r}" for each in engine_of(peer).consumers.entered() if each.running]
        what = f"still running: {', '.join(runs)}" if runs else "no handler runs any more"
        blocking = engine_of(peer).slots.describe_blocking()
        return f"{what}; the loop is blocked by {blocking}" if blocking.startswith("handler") else what


class _ShutdownWatchdog:
    """A thread that ends the process if the peer takes too long to leave."""

    def __init__(self, describe: Callable[[], str], grace: float) -> None:
        self._describe = describe
        self._grace = grace
        self._levels: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put() is allowed in a signal handler

    def start(self) -> None:
        """Start the thread. The time limit starts at the first `begin`."""
        threading.Thread(target=self._run, name="worqr-watch", daemon=True).start()

    def begin(self, level: int) -> None:
        """Start or shorten the time limit: the peer leaves, with this level."""
        self._levels.put(level)

    def end(self) -> None:
        """End the thread: the peer has left."""
        self._levels.put(0)

    def _run(self) -> None:
        cancelled_at: float | None = None
        warned = False
        while True:
            wait = None
            if cancelled_at is not None:
                wait = max(0.0, cancelled_at + (EXIT_AFTER if warned else WARN_AFTER) - time.monotonic())
            try:
                level = self._levels.get(timeout=wait)
            except queue.Empty:
                if warned:
                    exit_now("stuck", "%(reason)s; the process ends without it", self._describe())
                emit(logger, "stuck", "%(reason)s; the process ends in some seconds", reason=self._describe())
                warned = True
                continue
            if not level:
                return
            due = time.monotonic() + (self._grace if level == StopLevel.DRAIN else 0.0)
            cancelled_at = due if cancelled_at is None else min(cancelled_at, due)


def exit_now(event: str, text: str, reason: str) -> NoReturn:
    """Log the reason as an error, and end the process with code 1, even if the logging hangs or fails."""

    def log() -> None:
        emit(logger, event, text, level=logging.ERROR, reason=reason)
        logging.shutdown()

    try:
        logging_thread = threading.Thread(target=log, daemon=True)
        logging_thread.start()
        logging_thread.join(LOG_TIMEOUT)
    finally:
        os._exit(1)


def exit_after(patience: float) -> None:
    """End the process with code 1 if threads of the program keep it running for that many seconds more."""

    def wait() -> None:
        time.sleep(patience)
        names = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        exit_now(
            "stuck", "these threads have not ended, and the process ends without them: %(reason)s", ", ".join(names)
        )

    threading.Thread(target=wait, name="worqr-end", daemon=True).start()


# Where a mesh may run


class _RunRefused(threading.local):
    """In each thread: `now` is True while the command line imports a user's module."""

    now: bool = False


_run_refused = _RunRefused()


@contextmanager
def refuse_run() -> Generator[None]:
    """Refuse ``mesh.run()`` in this block, in which the command line imports a user's module."""
    _run_refused.now = True
    try:
        yield
    finally:
        _run_refused.now = False


def _check_can_run_here() -> None:
    """Raise UsageError if a mesh cannot run as a program in this thread."""
    if _run_refused.now:
        raise UsageError(
            "mesh.run() was called while `worqr run` imports this module: put it under `if __name__ == '__main__':`"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "mesh.run() takes the signals of the process, so it needs the main thread; elsewhere use mesh.join()"
        )
    if loop_name_here():
        raise UsageError("mesh.run() starts a loop of its own; inside a running one use `async with mesh.join():`")


# The banner


def _served(peers: PeerFactory[Any], peer: Peer) -> list[Function[..., Any]]:
    """Return the functions that this peer serves."""
    queues = {consumer.queue for consumer in engine_of(peer).consumers.entered()}
    return [function for name, function in sorted(peers.declarations.functions.items()) if name in queues]


def _banner(peers: PeerFactory[Any], peer: Peer, served: list[Function[..., Any]]) -> str:
    """Return the lines that a service logs when it has joined: its server, its settings, and its functions."""
    settings = engine_of(peer).settings
    width = max((len(function.name) for function in served), default=0)
    functions = [f"{function.name:<{width}}  {_options(function, settings.runs_in)}".rstrip() for function in served]
    facts = {
        "server": [peers.client.link.settings.address.redacted],
        "prefix": [settings.prefix],
        "app": [settings.app] if settings.app else [],
        "worker": [peer.id],
        "capacity": [
            f"{settings.concurrency} concurrent tasks, {settings.threads} threads, {settings.processes} processes"
        ],
        "functions": functions or ["none"],
        "schedules": sorted(settings.schedules),
    }
    lines = [f"  {name if i == 0 else '':<10} {text}" for name, texts in facts.items() for i, text in enumerate(texts)]
    return "\n".join([f"worqr {__version__} serves", *lines])


def _options(function: Function[..., Any], default: AsyncRunsIn) -> str:
    """Return a text with the options of a function that are not defaults."""
    declared = definition_of(function)
    options = declared.options
    found = [
        options.runs_in or (default if declared.is_async else "thread"),
        "" if options.policy.timeout is None else f"timeout {options.policy.timeout:g} s",
        "" if options.concurrency is None else f"concurrency {options.concurrency}",
        "" if options.size == 1 else f"size {options.size}",
        "" if options.priority == 100 else f"priority {options.priority}",
        "" if not declared.aliases else f"also {', '.join(declared.aliases)}",
    ]
    return ", ".join(filter(None, found))


def _facts(peers: PeerFactory[Any], peer: Peer, served: list[Function[..., Any]]) -> dict[str, object]:
    """Return the fields of the log record that has the banner."""
    settings = engine_of(peer).settings
    return {
        "server": peers.client.link.settings.address.redacted,
        "prefix": settings.prefix,
        "app": settings.app,
        "worker": peer.id,
        "concurrency": settings.concurrency,
        "functions": [function.name for function in served],
    }
