"""A peer in a thread of its own, for programs that do not run on Trio: ``mesh.join_in_thread()``.

A `PeerThread` is one thread with a Trio loop, and one join of a mesh in it, from its start to its end. A `ThreadPeer` is the
object that an application holds; each start makes a `PeerThread`.

When the interpreter exits, all running threads are asked to stop, before threads are joined and before ``atexit`` (where no
thread can be started any more). They are daemons, so that a thread that cannot stop does not delay the exit. Event loops
wait for such a thread by a `ThreadWaiter`.
"""

# The private fields of ThreadPeer are hidden from users, not from the functions below it.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import enum
import inspect
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from importlib import import_module
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Self, TypeVar, Unpack

import trio

from worqr.errors import Unavailable, UsageError
from worqr.handler_options import HandlerOptions, ListHandlerOptions
from worqr.hosting.peer_factory import PeerFactory
from worqr.inside import engine_of, readings_of
from worqr.log_events import emit
from worqr.mesh_records import Health
from worqr.peer.error_throttle import wait_done
from worqr.peer.options import GRACE, check_concurrency
from worqr.peer.peer import Peer, PeerReadings
from worqr.tracebacks import text_of
from worqr.validation import KEEP_FAILED, Seconds, seconds

if TYPE_CHECKING:
    from worqr.peer.manual_consumer import Claims
    from worqr.policy import RetryPolicy

# The exit of the interpreter: whether it has begun, and callbacks at its beginning, while threads can still be started. That is
# before threads are joined and before ``atexit``.

_callbacks: Final[list[Callable[[], None]]] = []
_begun: Final = threading.Event()


def call_at_exit(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the main thread, while threads can still be started.

    Python has such a function for its own pools, under a private name. If that is missing, ``atexit`` is used: it runs later,
    after threads were joined.

    Raises:
        UsageError: the interpreter is exiting.
    """
    try:
        if callback not in _callbacks:
            import_module(
                "concurrent.futures.thread"
            )  # it waits for handlers when it exits, so `callback` must run before
            register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
            register(lambda: _run(callback))
            _callbacks.append(callback)
    except RuntimeError as error:
        raise UsageError("the interpreter is exiting: no peer can start") from error
    if _begun.is_set():
        raise UsageError("the interpreter is exiting: no peer can start")


def is_exiting() -> bool:
    """Return True once the interpreter has begun to exit: no loop of the main thread runs again."""
    return _begun.is_set()


def _run(callback: Callable[[], None]) -> None:
    _begun.set()
    callback()


# Wait on an event loop, asyncio's or Trio's, for the thread of a peer. For `ThreadPeer` and `asyncio_peer`.


async def wait_done_shielded(future: Future[Any]) -> None:
    """Wait until the future is done. A cancellation is raised only afterwards, so use it for short waits."""
    if trio.lowlevel.in_trio_task():
        with trio.CancelScope(shield=True):
            await wait_done(future)
        return
    import asyncio

    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await wait_done(future)
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # its traceback refers to this frame: a cycle


async def wait_finished(thread: PeerThread) -> None:
    """Wait until the thread has finished, which it is about to do. A cancellation is raised only afterwards."""
    try:
        await wait_done_shielded(thread.ended)
    finally:
        thread.join()


async def wait_joined(thread: PeerThread) -> None:
    """Wait until the peer of a started thread has joined. If that fails or is cancelled, wait until the thread has finished."""
    try:
        await wait_done(thread.joined)
    except BaseException:
        thread.request_stop(0)
        await wait_finished(thread)
        raise
    thread.raise_if_not_joined()


async def leave_and_wait(thread: PeerThread, grace: float, error: BaseException | None) -> None:
    """Let the peer leave at the end of a block, and wait until the thread has finished. `error` ended the block, if not None."""
    thread.request_stop(grace if error is None else 0)
    try:
        if error is None:
            await wait_done(thread.ended)
    except BaseException:
        thread.request_stop(0)
        raise
    finally:
        await wait_finished(thread)
    if error is None:
        thread.raise_end_error()


logger: logging.Logger = logging.getLogger("worqr.thread_life")  # a documented name

EXIT_PATIENCE: Final = 5.0
"""Seconds that the interpreter's exit waits for peers that the application has not stopped."""


class Phase(enum.Enum):
    """The phases of a peer's thread.

    | phase    | begins when             | a stop request                           |
    |----------|-------------------------|------------------------------------------|
    | STARTING | the object is made      | cancels the join                         |
    | JOINED   | the peer has joined     | lets it drain                            |
    | DRAINING | a stop was requested    | drains again if its deadline is earlier  |
    | ENDED    | the Trio loop has ended | does nothing                             |

    STARTING may be followed by ENDED: the join failed or was cancelled, or no thread could be started. So may JOINED: an error
    ended the peer.
    """

    STARTING = enum.auto()
    JOINED = enum.auto()
    DRAINING = enum.auto()
    ENDED = enum.auto()


class PeerThread:
    """The thread of one peer. Each stop request carries a deadline; of several requests the earliest deadline applies.

    Attributes:
        phase: written by the thread; any thread may read it, without a lock.
        joined: done when the peer has joined, or will not. It has no result.
        ended: done when the loop has ended. It has no result.
    """

    def __init__(
        self, join: Callable[[], AbstractAsyncContextManager[Peer, Any]], variables: Variables | None = None
    ) -> None:
        """Prepare the thread, without starting it.

        Args:
            join: joins the mesh, on Trio.
            variables: the context variables of the code that runs in the thread.
        """
        self.phase: Phase = Phase.STARTING
        self.joined: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._join = join
        self._variables = variables or Variables()
        self._thread = threading.Thread(target=self._run, name="worqr-peer", daemon=True)
        self._deadlines: list[float] = []  # moments of time.monotonic(), one for each stop request
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()  # of the current wait: for the join, for a stop request, or for the drain
        self._peer: Peer | None = None
        self._error: BaseException | None = None
        self._why = ""

    # From any thread

    def start(self) -> None:
        """Start the thread. Raises Unavailable if the process has reached its limit of threads."""
        _running.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._why = f"it has not begun: {error}"
            self._end()
            raise Unavailable(
                f"cannot start the peer's thread ({error}): this process is at its limit (ulimit -u)"
            ) from error
        except BaseException:  # Ctrl-C may arrive while the new thread starts
            self.request_stop(0)
            raise

    def request_stop(self, grace: float) -> None:
        """Have the peer leave within `grace` seconds. A peer that has not joined leaves at once."""
        self._deadlines.append(time.monotonic() + grace)
        token = self._token
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._apply_stop, idempotent=True)

    def wait_ended(self, patience: float | None = None) -> bool:
        """Wait up to that many seconds; return True if the loop has ended."""
        try:
            self.ended.result(patience)
        except TimeoutError:
            return False
        return True

    def join(self) -> None:
        """Wait until the thread has finished. Called after `ended`, so it takes milliseconds."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def leaves(self) -> bool:
        """True if a peer that has joined was asked to stop, and the loop has not ended."""
        return bool(self._deadlines) and self._peer is not None and not self.ended.done()

    def check_not_inside(self) -> None:
        """Raise UsageError if the caller runs in this thread, because it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise UsageError(
                "a handler on the peer's own loop cannot stop or restart the peer: it would wait for its own end"
            )

    def raise_if_not_joined(self) -> None:
        """Raise the error that prevented the join, if there is one. Called after `joined`."""
        if self._peer is None:
            self.join()
            raise self._error or UsageError("the peer was stopped before it had joined")

    def raise_end_error(self) -> None:
        """Raise the error that ended the peer, once. Called after `ended`."""
        error, self._error = self._error, None
        if error is not None and self._peer is not None:
            raise error

    def health(self) -> Health:
        """See ``ThreadPeer.health``."""
        if self.ended.done():
            return no_health(self._why)
        if self._peer is None:
            return Health(alive=True, ready=False, why="joining the mesh", running=0, room=0, loop_lag=0.0)
        return self._peer.health()

    def readings(self) -> PeerReadings | None:
        """The state of the peer as numbers; None: it has not joined, or has ended."""
        return None if self._peer is None or self.ended.done() else readings_of(self._peer)

    # In the thread

    def _run(self) -> None:
        try:
            self._variables.run(trio.run, self._join_until_stopped)
        except BaseException as error:
            self._error = error
            self._why = f"it has ended: {type(error).__name__}: {text_of(error)}"
            # `start` raises an error from before the join, so that is not logged.
            if self._peer is not None and not isinstance(error, KeyboardInterrupt):
                emit(logger, "peer.ended", "the worker in a thread has ended by an error", exc_info=error)
        else:
            self._why = "stopped"
        finally:
            self._end()

    def _end(self) -> None:
        self.phase = Phase.ENDED
        _running.discard(self)
        for future in (self.ended, self.joined):
            if not future.done():
                future.set_result(None)

    async def _join_until_stopped(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._apply_stop()  # a stop may have been requested before there was a token
        with self._scope:
            async with self._join() as peer:
                self._peer, self.phase = peer, Phase.JOINED
                self.joined.set_result(None)
                await self._wait_and_drain(peer)

    def _apply_stop(self) -> None:
        """End the current wait, so that the next step reads the deadlines. Called in the loop."""
        if self._deadlines:
            self._scope.cancel()

    async def _wait_and_drain(self, peer: Peer) -> None:
        """Wait for a stop request, then let the peer drain until the earliest deadline."""
        while not self._deadlines:
            with trio.CancelScope() as self._scope:
                await trio.sleep_forever()
        self.phase = Phase.DRAINING
        while True:
            with trio.CancelScope() as self._scope:
                await peer.drain(max(0.0, round(min(self._deadlines) - time.monotonic(), 1)))
                return


def no_health(why: str) -> Health:
    """Return the health of a peer that does not run."""
    return Health(alive=False, ready=False, why=why, running=0, room=0, loop_lag=0.0)


# The exit of the interpreter

_running: set[PeerThread] = set()


def stop_at_exit() -> None:
    """Stop all threads when the interpreter exits. Raises UsageError if it exits already."""
    call_at_exit(_stop_all)


def _stop_all() -> None:
    """Stop all threads. A thread that takes longer than `EXIT_PATIENCE` ends with the process."""
    threads = list(_running)
    for thread in threads:
        thread.request_stop(0)
    until = time.monotonic() + EXIT_PATIENCE
    for thread in threads:
        if not thread.wait_ended(max(0.0, until - time.monotonic())):
            text = (
                "a worker has not left within %(duration)g s, and the process ends without it; other workers give back its tasks "
                "some seconds later"
            )
            emit(logger, "stuck", text, duration=EXIT_PATIENCE)


# The peer that an application holds.
#
# One that is dropped without a start causes a RuntimeWarning, like a coroutine that was never awaited. One that still exists at
# the exit may be meant for other processes that import the same module: there is no warning if it was made while a module was
# imported, nor after a fork.


class ThreadPeer(AbstractContextManager["ThreadPeer"], AbstractAsyncContextManager["ThreadPeer"]):
    """A worker in a thread of its own, with a Trio loop of its own; ``mesh.join_in_thread()`` makes it.

    Use it in a ``with`` block, in an ``async with`` block under asyncio or Trio, which does not block the loop, or call
    `start` and `stop`. It serves all functions of its mesh, also those declared later. It handles no signals.

    A block that ends normally drains: running tasks have `grace` seconds to end. A block that ends by an exception or a
    cancellation cancels its handlers at once, and their tasks return to their queues. If you never call `stop`, the worker
    shuts down when the interpreter exits, within 5 s. A process that a signal kills does not do so: its tasks return when the
    worker is found dead.

    A forked process begins without the worker; call `start` there.
    """

    def __init__(self, peers: PeerFactory[Any], options: Mapping[str, Any]) -> None:
        self._peers = peers
        self._options = options
        self._grace: float = seconds(options.get("grace", GRACE), "grace")
        self._lock = threading.RLock()  # reentrant: a signal handler may run in the thread that holds it
        self._thread: PeerThread | None = None
        self._why_no_thread: str = "not started"
        self._unstarted: _CreationSite | None = _creation_site()
        _all_peers.add(self)

    def __del__(self) -> None:
        _warn_if_unstarted(self)

    def __repr__(self) -> str:
        health = self.health()
        return f"<ThreadPeer of {self._peers!r}: {health.why or 'ready'}>"

    def start(self) -> Self:
        """Join the mesh, and wait until all declared functions are served. This blocks.

        A worker that runs already is not changed. A worker that was stopped starts again, once it has left. If it raises,
        nothing is left running.

        Returns:
            The worker itself.

        Raises:
            UsageError: Nothing is declared on the mesh, another thread stopped the worker meanwhile, the interpreter is
                exiting, or it is called on the loop of the worker, which leaves.
            RefusedByServer: The server rejected the connection.
            WrongVersion: The server or its mesh has the wrong version.
            Unavailable: The server did not reply within `patience`.
        """
        if (before := self._leaving()) is not None:
            before.wait_ended()
        thread = self._begin()
        try:
            thread.joined.result()
        except BaseException:  # Ctrl-C during the wait
            thread.request_stop(0)
            thread.wait_ended(EXIT_PATIENCE)
            raise
        thread.raise_if_not_joined()
        return self

    def stop(self, grace: Seconds | None = None) -> None:
        """Take no more tasks, wait for those that run, and wait until the thread has ended. This blocks.

        You may call it more than once, and on a worker that was never started. Of several calls at once, the shortest grace
        applies. Ctrl-C cancels the running tasks.

        Args:
            grace: Seconds that running tasks have to end; then they are cancelled and return to their queues. Default: the
                `grace` of the options. A handler on the Trio loop that ignores its cancellation is waited for.

        Raises:
            UsageError: Called on the worker's own loop, which it would wait for.
            WorqrBug: The worker had ended by an error. That error is raised once, and is in the log; it may be any exception
                that a lifespan raised.
        """
        wait = self._grace if grace is None else seconds(grace, "grace")
        thread = self._thread
        if thread is not None:
            thread.check_not_inside()
            try:
                thread.request_stop(wait)
                thread.wait_ended()
            except BaseException:
                thread.request_stop(0)
                raise
            thread.join()
            thread.raise_end_error()

    def health(self) -> Health:
        """Return the worker's health, without any I/O, from any thread.

        It is not `alive` before the start and after the end; `why` has the reason. While it starts, it is alive and not
        ready.
        """
        thread = self._thread
        return no_health(self._why_no_thread) if thread is None else thread.health()

    def _readings(self) -> PeerReadings | None:
        return None if self._thread is None else self._thread.readings()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        elif self._thread is not None:
            self._thread.request_stop(0)
            self._thread.wait_ended()
            self._thread.join()

    async def __aenter__(self) -> Self:
        if (before := self._leaving()) is not None:
            await wait_done(before.ended)
        await wait_joined(self._begin())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = self._thread
        if thread is None:
            return
        thread.check_not_inside()
        await leave_and_wait(thread, self._grace, error)

    def _leaving(self) -> PeerThread | None:
        """Return the current thread if its peer leaves. Raises UsageError in that thread, which would wait for itself."""
        thread = self._thread
        if thread is None or not thread.leaves:
            return None
        thread.check_not_inside()
        return thread

    def _begin(self) -> PeerThread:
        """Return the current thread, or start a new one."""
        with self._lock:
            self._unstarted = None
            if self._thread is None or self._thread.ended.done():
                self._peers.check_not_empty("the peer starts")
                stop_at_exit()
                self._thread = PeerThread(partial(self._peers.joined, self._options))
                self._thread.start()
            return self._thread


# Warning about a peer that was never started


NEVER_STARTED: Final = (
    "mesh.join_in_thread() was called here, but its peer was never started, so it has run no task: write "
    "`with mesh.join_in_thread():` (or `async with`), or call its start()"
)


class _CreationSite(NamedTuple):
    """Where in the application an object was made, and whether that was while a module was imported."""

    file: str
    line: int
    importing: bool


def _creation_site() -> _CreationSite:
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "worqr":
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename != "<frozen importlib._bootstrap>":
        above = above.f_back
    return _CreationSite(file, line, importing=above is not None)


def _warn_if_unstarted(peer: ThreadPeer, *, at_exit: bool = False) -> None:
    """Warn, once, if the application never started the peer."""
    made: _CreationSite | None = getattr(peer, "_unstarted", None)  # missing if its constructor failed
    peer._unstarted = None
    if made is not None and not (at_exit and made.importing):
        warnings.warn_explicit(NEVER_STARTED, RuntimeWarning, made.file, made.line)


@atexit.register
def _at_exit() -> None:
    for peer in list(_all_peers):
        _warn_if_unstarted(peer, at_exit=True)


# Forks

_all_peers: weakref.WeakSet[ThreadPeer] = weakref.WeakSet()
_inherited: list[PeerThread] = []
"""Objects of the parent that a forked child keeps alive. Threads that the child does not have may hold their locks."""


def _after_fork_in_child() -> None:
    _inherited.extend(_running)
    _running.clear()
    for peer in list(_all_peers):
        peer._unstarted = None
        peer._lock = threading.RLock()  # a thread that does not exist in the child may hold the old one
        if peer._thread is not None and peer._thread.phase is not Phase.ENDED:
            peer._thread = None  # `_inherited` keeps it alive
            peer._why_no_thread = "it was started before a fork, and runs in the parent only: start it here as well"


def _after_fork_in_parent() -> None:
    for peer in list(_all_peers):
        peer._unstarted = None  # the child process may be the one that starts it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)


# A peer in an asyncio program: ``async with mesh.join():`` where asyncio runs.
#
# The peer's Trio loop runs in a thread, as that of ``mesh.join_in_thread()`` does; ``async def`` handlers run on the
# application's loop. Trio as a guest of that loop would need no thread, but then a forked child could not run Trio, a loop
# that is closed inside the block would leave a Trio run behind that cannot be ended, and a blocked loop would stop the
# heartbeat.

# Calls from an asyncio loop to a Trio loop in another thread. For the methods of a peer that an asyncio program has joined.


T = TypeVar("T")

PEER_LEFT: Final = "this peer has left the mesh: use it inside the block of mesh.join()"


class TrioCalls:
    """Runs calls on one Trio loop, inside the block of `accepting`. Only code on the Trio loop changes it."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def accepting(self) -> AsyncGenerator[None]:
        """Accept calls in this block, on Trio. Calls that still run when the block ends are cancelled."""
        error: BaseException | None = None
        async with trio.open_nursery() as nursery:
            self._token, self._nursery = trio.lowlevel.current_trio_token(), nursery
            try:
                yield
            except BaseException as raised:
                error = raised  # raised again below, because the nursery would wrap it in a group
            self._nursery = None
            nursery.cancel_scope.cancel()
        if error is not None:
            try:
                raise error
            finally:
                del error

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` on Trio, for a task of an asyncio loop.

        A cancellation of the caller cancels it there, and is raised in the caller once it has ended.

        Raises:
            UsageError: The block has ended. What `work` raises is raised, too.
        """
        return await self.call_with_status(lambda _status: work(), None)

    async def call_with_status(
        self, work: Callable[[trio.TaskStatus[None]], Awaitable[T]], started: Callable[[], object] | None
    ) -> T:
        """Like `call`; ``started()`` runs in the caller's task as soon as `work` calls ``status.started()``."""
        call, variables = _Call(work), copy_context()
        self._post(lambda: variables.run(self._start, call), call)
        try:
            if started is not None:
                await wait_done(call.began)
                if call.began.result():
                    started()
            await wait_done(call.done)
        except BaseException:
            self._post(call.scope.cancel, None)
            await wait_done_shielded(call.done)
            raise
        return call.done.result()

    def post(self, work: Callable[[], object]) -> None:
        """Run a function on Trio soon, from any thread; do nothing if the block has ended."""
        self._post(work, None)

    def _post(self, callback: Callable[[], object], call: _Call[Any] | None) -> None:
        assert self._token is not None, "calls come from the block of `join`"
        try:
            self._token.run_sync_soon(callback)
        except trio.RunFinishedError:
            if call is not None:
                call.refuse()

    def _start(self, call: _Call[Any]) -> None:
        if self._nursery is None:
            call.refuse()
        else:
            self._nursery.start_soon(call.run)


class _Call(trio.TaskStatus[None], Generic[T]):
    """One call, and its task status.

    Attributes:
        began: done when `work` has called ``started()``, then with True, or when it has ended.
        done: done when `work` has ended, with its result.
        scope: cancels it.
    """

    def __init__(self, work: Callable[[trio.TaskStatus[None]], Awaitable[T]]) -> None:
        self.began: Future[bool] = Future()
        self.done: Future[T] = Future()
        self.scope: trio.CancelScope = trio.CancelScope()
        self._work = work

    async def run(self) -> None:
        try:
            with self.scope:
                self.done.set_result(await self._work(self))
        except trio.Cancelled:
            raise
        except BaseException as error:
            self.done.set_exception(error)
        finally:
            self.refuse()

    def started(self, value: None = None) -> None:
        self.began.set_result(True)

    def refuse(self) -> None:
        """Finish the futures of a call that does not run or was cancelled; do nothing if it has ended."""
        if not self.done.done():
            self.done.set_exception(UsageError(PEER_LEFT))
        if not self.began.done():
            self.began.set_result(False)


@asynccontextmanager
async def joined_under_asyncio(factory: PeerFactory[Any], options: Mapping[str, Any]) -> AsyncGenerator[AsyncioPeer]:
    """Join the mesh for the length of a block, under asyncio; see ``Mesh.join``."""
    factory.check_options(options)
    stop_at_exit()
    grace = seconds(options.get("grace", GRACE), "grace")
    async with factory.client.connections.open():
        from worqr.peer.executors.asyncio_loop import (
            HostLoop,  # imports asyncio, which most programs on Trio do without
        )

        host, calls, peers = HostLoop(is_exiting), TrioCalls(), list[Peer]()

        @asynccontextmanager
        async def join() -> AsyncGenerator[Peer]:
            async with calls.accepting(), factory.joined(options, host) as peer:
                peers.append(peer)
                yield peer

        thread = PeerThread(join, copy_context())
        thread.start()
        await wait_joined(thread)
        error: BaseException | None = None
        try:
            yield AsyncioPeer(peers[0], thread, calls)
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await leave_and_wait(thread, grace, error)
            finally:
                del error  # its traceback refers to this frame: a cycle


class AsyncioPeer(Peer):
    """A peer whose methods are used on the asyncio loop of the program that has joined."""

    def __init__(self, peer: Peer, thread: PeerThread, calls: TrioCalls) -> None:
        super().__init__(engine_of(peer))
        self._peer = peer
        self._thread = thread
        self._calls = calls
        self._pid = os.getpid()

    async def serve(
        self,
        queue: str,
        handler: Callable[[bytes], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[HandlerOptions],
    ) -> None:
        def serve(status: trio.TaskStatus[None]) -> Awaitable[None]:
            return self._peer.serve(queue, handler, task_status=status, **options)

        await self._calls.call_with_status(serve, task_status.started)

    async def serve_list(
        self,
        queue: str,
        handler: Callable[[list[bytes]], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[ListHandlerOptions],
    ) -> None:
        def serve(status: trio.TaskStatus[None]) -> Awaitable[None]:
            return self._peer.serve_list(queue, handler, task_status=status, **options)

        await self._calls.call_with_status(serve, task_status.started)

    def work(
        self, queue: str, *, retry: RetryPolicy | None = None, keep_failed: int = KEEP_FAILED
    ) -> AbstractAsyncContextManager[Claims]:
        raise UsageError(
            "peer.work() needs Trio: under asyncio, use peer.serve(), or take the tasks in a program that runs on Trio"
        )

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        engine = self._engine
        engine.scheduler.check_concurrency(check_concurrency(n))
        self._calls.post(partial(engine.set_concurrency, n))

    def health(self) -> Health:
        if os.getpid() != self._pid:
            return no_health("it was started before a fork, and runs in the parent only")
        return self._thread.health()

    async def drain(self, grace: Seconds | None = None) -> None:
        await self._calls.call(partial(self._peer.drain, grace))

    async def wait(self) -> None:
        await self._calls.call(self._peer.wait)
