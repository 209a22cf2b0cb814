"""The thread of a peer: one Trio loop in it, and one join of a mesh in that, from its start to its end.

Each request to leave sets a time by which the thread should have left; the earliest time applies. When the interpreter exits,
all running threads are asked to leave, before threads are joined and before ``atexit`` (where no thread can be started any
more). They are daemons, so that one that cannot leave does not delay the exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context as Variables
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import trio

from worqr.errors import Unavailable, UsageError
from worqr.inside import declarations_of
from worqr.log_events import emit
from worqr.records import Health

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.peer.peer import Peer

logger: logging.Logger = logging.getLogger("worqr.thread_life")  # a documented name

EXIT_PATIENCE: Final = 5.0
"""Seconds that the interpreter's exit waits for peers that the application has not stopped."""


class Life:
    """One thread, from the start of a peer to its end.

    Attributes, set once by the thread:
        joined: done when it has joined, or will not; ended: done when nothing of it runs any more. They have no result.
        over: the same as `ended`, without a lock.
    """

    def __init__(
        self, join: Callable[[], AbstractAsyncContextManager[Peer, Any]], variables: Variables | None = None
    ) -> None:
        """Make it, not started; `join` joins, on Trio, and `variables` are the context variables of what runs there."""
        self.joined: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.over: bool = False
        self._join = join
        self._variables = variables or Variables()
        self._thread = threading.Thread(target=self._run, name="worqr-peer", daemon=True)
        self._leave_by: list[float] = []  # moments of time.monotonic(), one for each request to leave
        self._token: trio.lowlevel.TrioToken | None = None
        self._joining = trio.CancelScope()
        self._waiting = trio.CancelScope()
        self._peer: Peer | None = None
        self._error: BaseException | None = None
        self._why = ""

    # From any thread

    def begin(self) -> None:
        """Start the thread; raise Unavailable if the system cannot."""
        _lives.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._why = f"it has not begun: {error}"
            self._end()
            raise Unavailable(
                f"cannot start the peer's thread ({error}): this process is at its limit (ulimit -u)"
            ) from error

    def leave(self, grace: float) -> None:
        """Leave within that many seconds. Of several requests the earliest applies; a peer that has not joined leaves at once."""
        self._leave_by.append(time.monotonic() + grace)
        token = self._token
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._heed, idempotent=True)

    def wait_ended(self, patience: float | None = None) -> bool:
        """Wait up to that many seconds; return True if it has ended."""
        try:
            self.ended.result(patience)
        except TimeoutError:
            return False
        return True

    def join(self) -> None:
        """After `ended`: wait until the thread has really finished."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def check_outside(self) -> None:
        """Raise UsageError on the loop that the caller would wait for."""
        if threading.current_thread() is self._thread:
            raise UsageError("a handler on the peer's own loop cannot stop the peer: it would wait for its own end")

    def raise_if_not_joined(self) -> None:
        """After `joined`: raise the error that prevented it."""
        if self._peer is None:
            self.join()
            raise self._error or UsageError("the peer was stopped before it had joined")

    def raise_what_ended_it(self) -> None:
        """After `ended`: raise its error, once."""
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

    # In the thread

    def _run(self) -> None:
        try:
            self._variables.run(trio.run, self._live)
        except BaseException as error:
            self._error = error
            self._why = f"it has ended: {type(error).__name__}: {error}"
            if self._peer is not None and not isinstance(error, KeyboardInterrupt):  # else `start` raises it
                emit(logger, "peer.ended", "the worker in a thread has ended by an error", exc_info=error)
        else:
            self._why = "stopped"
        self._end()

    def _end(self) -> None:
        self.over = True
        _lives.discard(self)
        for future in (self.ended, self.joined):
            if not future.done():
                future.set_result(None)

    async def _live(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._heed()  # a request may have come before there was a token
        with self._joining:
            async with self._join() as peer:
                self._peer = peer
                self.joined.set_result(None)
                await self._wait_and_drain(peer)

    def _heed(self) -> None:
        """A thread requests that the peer leaves, or leaves sooner."""
        if self._leave_by:
            (self._waiting if self._peer is not None else self._joining).cancel()

    async def _wait_and_drain(self, peer: Peer) -> None:
        """Wait until asked to leave, then until the earliest requested time."""
        while not self._leave_by:
            with trio.CancelScope() as self._waiting:
                await trio.sleep_forever()
        while True:
            with trio.CancelScope() as self._waiting:
                await peer.drain(max(0.0, round(min(self._leave_by) - time.monotonic(), 1)))
                return


def check_startable(mesh: Mesh[Any]) -> None:
    """Raise UsageError if a peer would be of no use, or would outlive the interpreter."""
    if declarations_of(mesh).is_empty:
        raise UsageError(
            f"there is nothing to serve: no function is declared on {mesh!r} with @mesh.task, nor a schedule; import the "
            "modules that declare them before the peer starts"
        )
    end_at_exit()


def no_health(why: str) -> Health:
    return Health(alive=False, ready=False, why=why, running=0, room=0, loop_lag=0.0)


# Forks, and the end

_lives: set[Life] = set()
"""The running ones."""
_of_parents: list[Life] = []
"""Objects of the parent that a forked child must keep alive: their locks may be held by threads that it does not have."""
_ending: list[str] = []
"""Empty, then "awaited", then "begun" too."""


def _after_fork_in_child() -> None:
    _of_parents.extend(_lives)
    _lives.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def end_at_exit() -> None:
    """Have `_at_exit` called at the end of the main thread, while threads can still be started; UsageError if that has come.

    Python has this for its own pools only, under a private name. Without it, ``atexit`` is nearly as good.
    """
    try:
        if not _ending:
            import_module("concurrent.futures.thread")  # its exit waits for our handlers, so ours must run before it
            register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
            register(_at_exit)
            _ending.append("awaited")
    except RuntimeError as error:
        raise UsageError("the interpreter is exiting: no peer can start") from error
    if "begun" in _ending:
        raise UsageError("the interpreter is exiting: no peer can start")


def is_exiting() -> bool:
    """Return True once the interpreter has begun to exit: no loop of the main thread runs again."""
    return "begun" in _ending


def _at_exit() -> None:
    """Ask all to leave; a thread that takes too long is left behind, and ends with the process."""
    _ending.append("begun")
    lives = list(_lives)
    for life in lives:
        life.leave(0)
    until = time.monotonic() + EXIT_PATIENCE
    for life in lives:
        if not life.wait_ended(max(0.0, until - time.monotonic())):
            text = (
                "a worker has not left within %(duration)g s, and the process ends without it; other workers give back its tasks "
                "some seconds later"
            )
            emit(logger, "stuck", text, duration=EXIT_PATIENCE)
