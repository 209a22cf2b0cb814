"""`PeerThread`: one thread with a Trio loop, and one join of a mesh in it, from its start to its end.

When the interpreter exits, all running threads are asked to stop, before threads are joined and before ``atexit`` (where no
thread can be started any more). They are daemons, so that a thread that cannot stop does not delay the exit. Event loops
wait for such a thread by a `ThreadWaiter`.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context as Variables
from typing import Any, Final

import trio

from worqr.errors import Unavailable, UsageError
from worqr.inside import readings_of
from worqr.log_events import emit
from worqr.mesh_records import Health
from worqr.peer.error_throttle import wait_done
from worqr.peer.interpreter_exit import call_at_exit
from worqr.peer.peer import Peer, PeerReadings
from worqr.tracebacks import text_of

# Wait on an event loop, asyncio's or Trio's, for the thread of a peer. For `thread_peer` and `asyncio_peer`.


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

    def check_not_inside(self) -> None:
        """Raise UsageError if the caller runs in this thread, because it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise UsageError("a handler on the peer's own loop cannot stop the peer: it would wait for its own end")

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


# Forks, and the exit of the interpreter

_running: set[PeerThread] = set()
_inherited: list[PeerThread] = []
"""Objects of the parent that a forked child keeps alive. Threads that the child does not have may hold their locks."""


def _after_fork_in_child() -> None:
    _inherited.extend(_running)
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


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
