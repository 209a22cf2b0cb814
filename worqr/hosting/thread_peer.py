"""A peer in a thread of its own, for programs that do not run on Trio: ``mesh.join_in_thread()``.

`ThreadPeer` is the object that an application holds; each start makes a `PeerThread`. Threads, Trio and asyncio
wait for it with its two futures.

A `ThreadPeer` that is dropped without a start causes a RuntimeWarning, like a coroutine that was never awaited. One that still
exists at the exit may be meant for other processes that import the same module: there is no warning if it was made while a module
was imported, nor after a fork.
"""

# The private fields of ThreadPeer are hidden from users, not from the functions below it.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, Self

from worqr.hosting.peer_factory import PeerFactory
from worqr.hosting.peer_thread import (
    EXIT_PATIENCE,
    PeerThread,
    Phase,
    leave_and_wait,
    no_health,
    stop_at_exit,
    wait_joined,
)
from worqr.mesh_records import Health
from worqr.peer.options import GRACE
from worqr.peer.peer import PeerReadings
from worqr.validation import Seconds, seconds


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

        A worker that runs already is not changed. A worker that was stopped starts again. If it raises, nothing is left
        running.

        Returns:
            The worker itself.

        Raises:
            UsageError: Nothing is declared on the mesh, another thread stopped the worker meanwhile, or the interpreter is
                exiting.
            RefusedByServer: The server rejected the connection.
            WrongVersion: The server or its mesh has the wrong version.
            Unavailable: The server did not reply within `patience`.
        """
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


def _after_fork_in_child() -> None:
    for peer in list(_all_peers):
        peer._unstarted = None
        peer._lock = threading.RLock()  # a thread that does not exist in the child may hold the old one
        if peer._thread is not None and peer._thread.phase is not Phase.ENDED:
            peer._thread = None  # `peer_thread` keeps it alive
            peer._why_no_thread = "it was started before a fork, and runs in the parent only: start it here as well"


def _after_fork_in_parent() -> None:
    for peer in list(_all_peers):
        peer._unstarted = None  # the child process may be the one that starts it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)
