"""`ThreadDriver`: the driver for plain threads without an event loop. The threads that wait for a reply drive the sockets.

One of the waiting threads drives the sockets for all of them. It waits until a socket is ready, reads replies and wakes the
threads whose replies have arrived. When it has its own reply, another waiting thread takes over. While no thread waits,
nothing is read; the next call detects a connection that was lost meanwhile.

A coroutine that waits only by this driver never yields, so `run_blocking` runs it to its end in one step. Deadlines are kept:
a wait that exceeds its limit raises an internal exception, which ends the block with that limit.

One thread at a time uses the link's state, under the lock `entered`. No thread holds the lock while it waits. A signal
handler may raise (Ctrl-C) while the main thread changes that state, which is then inconsistent. In that case the link ends
with an error for all pending calls, and the next call makes a new link.
"""

from __future__ import annotations

import copy
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar, cast

from worqr.errors import Unavailable, UsageError
from worqr.link.driver import BUG, Driver, TimeLimit, Timer, Timers, Waiter, Watch, run_callback, wake_all
from worqr.log_events import emit

# Run coroutines in plain threads, with time limits like ``trio.move_on_after``. A waiting thread checks its own limits.
#
# A thread of a handler also ends its wait when the run of that handler is cancelled. The peer knows these runs
# (`end_waits_by`).


P = ParamSpec("P")
T = TypeVar("T")

_LONGEST = 3600.0
"""The longest single wait in seconds; the operating system limits it as well."""


class CancellableRun(Protocol):
    """The run of a task, whose handler waits in a thread."""

    def check_wait(self) -> None:
        """Raise the cancellation error of this thread, if the run is being cancelled."""
        ...

    def add_wait(self, wake: Callable[[], object]) -> None:
        """Call `wake`, from any thread, when the run is cancelled."""
        ...

    def remove_wait(self, wake: Callable[[], object]) -> None:
        """Do not call `wake` any more."""
        ...


class LimitPassed(BaseException):
    """A limit has passed. Raised by a wait and caught by the block with that limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__("a time limit has passed")
        self.limit = limit


class Limit:
    """``trio.move_on_after`` for a plain thread."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at: float = ends_at
        self.cancelled_caught: bool = False
        self.outer: Limit | None = None  # the block around it

    def __enter__(self) -> Self:
        self.outer = here.limit
        here.limit = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        here.limit = self.outer
        self.cancelled_caught = isinstance(error, LimitPassed) and error.limit is self
        return self.cancelled_caught


class _Here(threading.local):
    """The innermost limit of this thread, and whether it runs coroutines by `run_blocking`."""

    limit: Limit | None = None
    in_sync: bool = False


class _Runs:
    """How to find the run that this thread belongs to."""

    find: Callable[[], CancellableRun | None] | None = None


here: _Here = _Here()
_runs: Final = _Runs()


def end_waits_by(find: Callable[[], CancellableRun | None]) -> None:
    """Let a cancelled run end the waits of its threads. `find` returns the run that a thread belongs to."""
    _runs.find = find


def run_here() -> CancellableRun | None:
    """Return the run that this thread belongs to; None outside a handler."""
    return None if _runs.find is None else _runs.find()


def next_limit() -> float | None:
    """Return when the first limit of this thread passes; None if it has no limit."""
    return None if here.limit is None else min(limit.ends_at for limit in _limits())


def until(wakes_at: float) -> float | None:
    """Return the seconds until `when` or the first limit of this thread; None if there is neither."""
    end = wakes_at if here.limit is None else min(wakes_at, next_limit() or math.inf)
    return None if end == math.inf else min(max(end - time.monotonic(), 0), _LONGEST)


def _limits() -> Iterator[Limit]:
    limit = here.limit
    while limit is not None:
        yield limit
        limit = limit.outer


def check_limits() -> None:
    """End the outermost block whose limit has passed, with all blocks inside it."""
    if here.limit is not None:
        now = time.monotonic()
        passed = [limit for limit in _limits() if limit.ends_at <= now]
        if passed:
            raise LimitPassed(passed[-1])


def as_sync(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that makes a coroutine for `run_blocking`; meanwhile the mesh may be used in this thread."""
    outer, here.in_sync = here.in_sync, True
    try:
        return call(*args, **kwargs)
    finally:
        here.in_sync = outer


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread. It may wait only by a `ThreadDriver`.

    Raises:
        UsageError: it waits for an event loop.
    """
    outer, here.limit = here.limit, None  # the interrupted caller's limits do not apply to this coroutine
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        here.limit = outer
    with suppress(RuntimeError):  # it waits again while it is closed
        coroutine.close()
    raise UsageError(
        f"{getattr(coroutine, '__qualname__', 'the coroutine')} waits for an event loop, and none runs in this thread: "
        "without one, a coroutine may wait only by calls of worqr, not by those of asyncio or Trio"
    )


logger: logging.Logger = logging.getLogger(__name__)


class ThreadDriver(Driver):
    """The driver for any number of plain threads."""

    def __init__(self) -> None:
        self._state = _Entered()
        self.entered: AbstractContextManager[object] = self._state.lock
        self._roles = threading.Lock()  # guards the choice of the driving thread; held for a moment
        self._reactor: Reactor | None = None
        self._timers = Timers(run_callback)
        self._followers: dict[_Gate, None] = {}  # gates of threads that wait while another one drives
        self._waiting: set[Waiter] = set()
        self._broken: Exception | None = None  # the link has ended in the middle of a change
        self._driving: _Gate | None = None  # the gate of the thread that drives
        self._wakes_at = math.inf  # the latest time at which it checks the timers
        self._gathering = False  # a request is about to be sent, and others may join it
        self._closed = False

    def submits(self, send: Callable[[Any], Watch | None]) -> Callable[[Any], Watch | None]:
        self._send = send
        return self._submit

    def _submit(self, requests: Any) -> None:
        try:
            self._state.submit(self._send, requests)
        except BaseException:
            self.wake_driving()  # it sends what this thread was about to send for others
            raise

    # Called by the link, under the lock

    def post(self, deliver: Callable[[], object]) -> None:
        with self.entered:
            run_callback(deliver)

    def soon(self, callback: Callable[[], object]) -> None:
        self._gathering = True
        self.call_at(time.monotonic(), callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = self._timers.add(when, callback)
        if when < self._wakes_at:
            self.wake_driving()
        return timer

    def watch(
        self, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]
    ) -> ReactorWatch:
        with self._roles:
            reactor = self._the_reactor()
        return ReactorWatch(reactor, sock, readable, writable)

    def close(self) -> None:
        self._timers.clear()
        with self._roles:
            self._closed = True
            if self._driving is None:
                self._free()

    def interrupted(self, error: Exception) -> None:
        self._broken = error
        for waiter in tuple(self._waiting):
            if not waiter.settled:
                waiter.fail(copy.copy(error))
                waiter.settle()
        wake_all(tuple(self._waiting))

    def poison(self) -> None:
        self._waiting.clear()
        self._state = _Entered()  # the parent's threads may have held the old locks
        self.entered = self._state.lock
        self._roles = threading.Lock()
        self._driving = None
        self._free()

    def _the_reactor(self) -> Reactor:
        """Return the reactor, created on demand. The caller holds the lock of the roles."""
        if self._reactor is None:
            try:
                self._reactor = Reactor()
            except OSError as error:
                raise Unavailable(
                    f"cannot watch a socket ({error}): this process is at its limit (ulimit -n)"
                ) from error
        return self._reactor

    def wake_driving(self, gate: _Gate | None = None) -> None:
        """Wake the thread that drives, unless it is this one. With a gate: only if the thread of this gate drives."""
        driving, reactor = self._driving, self._reactor
        if driving is None or reactor is None or driving.thread == threading.get_ident():
            return
        if gate is None or gate is driving:
            reactor.ring()

    def _free(self) -> None:
        reactor, self._reactor = self._reactor, None
        if reactor is not None:
            reactor.close()

    # The waiting threads

    async def checkpoint(self) -> None:
        check_limits()

    async def prepare(self, request: Waiter) -> None:
        if here.limit is not None:
            check_limits()
        if self._state.is_owned():
            raise UsageError(
                "this call comes from a signal handler that has interrupted another call of the same mesh: set a flag in the "
                "handler, or hand the call to a thread"
            )
        request.when_settled(_Gate(self))

    async def wait(self, request: Waiter) -> None:
        gate = request.wake
        if gate is None:
            return  # it was settled meanwhile
        assert isinstance(gate, _Gate), "a thread that waits has prepared to"
        run = run_here() if request.ends_with_run else None
        self._waiting.add(request)
        try:
            if run is not None:
                gate.follow()  # so that a cancellation is noticed that comes before this thread follows another one
                run.add_wait(gate.nudge)
            if self._broken is not None:
                request.fail(copy.copy(self._broken))
                request.settle()
                return
            while not gate.is_open:
                if run is not None:
                    run.check_wait()
                if self._takes_over(gate):
                    try:
                        self._drive(gate, run)
                    finally:
                        self._stop_driving(gate)
                elif not gate.is_open:
                    gate.wait()
        except BaseException:
            request.abandon()
            raise
        finally:
            try:
                self._leave(request, gate, run)
            except BaseException:  # Ctrl-C: without its end, the threads that follow this one would wait for ever
                self._leave(request, gate, run)
                raise

    def _leave(self, request: Waiter, gate: _Gate, run: CancellableRun | None) -> None:
        """End a wait, and let another thread drive if this one did. It may be repeated."""
        if run is not None:
            run.remove_wait(gate.nudge)
        self._waiting.discard(request)
        self._followers.pop(gate, None)
        if self._driving is gate:  # an interrupt came as it began, or ceased, to drive
            self._stop_driving(gate)
        if self._followers and self._driving is None:
            self._hand_on()

    def _takes_over(self, gate: _Gate) -> bool:
        """Drive, if no other thread does; else wait until it is this thread's turn, or its reply has arrived."""
        with self._roles:
            outer = self._driving
            # a signal handler makes this call, if it has interrupted a call of this thread that drives
            if outer is None or outer.thread == gate.thread:
                if self._reactor is None:
                    self._the_reactor()
                gate.outer, self._driving = outer, gate
                return True
            gate.follow()
            if not gate.is_open:
                self._followers[gate] = None
            return False

    def _drive(self, gate: _Gate, run: CancellableRun | None) -> None:
        """Wait for the sockets and timers of all threads, until this thread's reply has arrived, or its `run` is cancelled."""
        reactor = self._reactor
        assert reactor is not None, "it was made when this thread took over"
        if self._state.submitted:  # Ctrl-C ended the call of the thread that would have sent them
            self._state.send_submitted()
        while True:
            self._wakes_at = self._timers.next()
            gate.is_awake = False  # before it is checked: who opens the gate does so before this is read
            if gate.is_open:
                return
            if run is not None:  # also if it was cancelled before this thread took over: that has woken nothing
                run.check_wait()
            ready = reactor.wait(until(self._wakes_at))
            gate.is_awake = True
            if self._gathering:
                self._let_join()
            self._handle(ready)
            if gate.is_open:
                return
            check_limits()

    def _handle(self, ready: list[tuple[ReactorWatch, int]]) -> None:
        """Use what the sockets have, and run the timers that are due."""
        state = self._state
        with state.lock:
            state.takes = True
            try:
                for watch, mask in ready:
                    watch.ready(mask)
                self._timers.run()
            finally:
                state.takes = False
        if state.submitted:
            state.send_submitted()

    def _let_join(self) -> None:
        """Let other threads submit their requests, so that they are sent together; repeat while more arrive."""
        self._gathering = False
        before = -1
        while len(self._followers) > before:
            before = len(self._followers)
            time.sleep(0)

    def _stop_driving(self, gate: _Gate) -> None:
        with self._roles:
            self._driving = gate.outer
            self._wakes_at = math.inf
            if self._closed and gate.outer is None:
                self._free()

    def _hand_on(self) -> None:
        """Let one of the waiting threads drive the sockets, if none does."""
        with self._roles:
            if self._driving is None and self._followers:
                first = next(iter(self._followers))
                first.promote()
                self._followers.pop(first, None)

    def move_on_after(self, seconds: float, *, shield: bool = False) -> AbstractContextManager[TimeLimit]:
        return Limit(time.monotonic() + seconds)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()


class Reactor:
    """The sockets of a driver. The driving thread calls `wait`; all other methods need the lock."""

    def __init__(self) -> None:
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._listener, self._bell = socket.socketpair()
        self._listener.setblocking(False)
        self._bell.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ)

    def wait(self, timeout: float | None) -> list[tuple[ReactorWatch, int]]:
        """Return the ready sockets; none after a timeout or a wake-up."""
        ready: list[tuple[ReactorWatch, int]] = []
        for key, mask in self.selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._listener.recv(4096)
            else:
                ready.append((key.data, mask))
        return ready

    def ring(self) -> None:
        with suppress(OSError):  # the buffer is full, so the thread wakes anyway
            self._bell.send(b"!")

    def close(self) -> None:
        self.selector.close()
        self._listener.close()
        self._bell.close()


class ReactorWatch(Watch):
    """A socket that is watched while any thread waits."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        readable: Callable[[], object],
        writable: Callable[[], object],
    ) -> None:
        super().__init__(sock, readable, writable)
        self._reactor = reactor
        reactor.selector.register(sock, selectors.EVENT_READ, self)

    def _watch_write(self, wanted: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._reactor.selector.modify(self._socket, events, self)
        self._reactor.ring()

    def _unwatch(self) -> None:
        self._reactor.selector.unregister(self._socket)

    def ready(self, mask: int) -> None:
        """Handle a socket that is ready, or was ready a moment ago."""
        if mask & selectors.EVENT_WRITE and self.wants_write:
            run_callback(self._writable)
        if mask & selectors.EVENT_READ and not self._closed:
            try:
                self._readable()
            except Exception as error:
                emit(logger, "link.deliver", BUG, exc_info=error)


class _Entered:
    """The lock of the link's state. If another thread holds it, a thread leaves its requests to that one, if that `takes` them.

    Blocks enter the lock itself: Python could deliver Ctrl-C where a method of this class begins, and it would never be free.

    Attributes:
        lock: the lock.
        is_owned: returns True if this thread has the lock.
        submitted: the requests that were left.
        takes: the thread that has the lock sends them when it has let go of it. Only that thread changes this.
    """

    def __init__(self) -> None:
        self.lock: AbstractContextManager[object] = threading.RLock()
        self.is_owned: Callable[[], bool] = cast("Any", self.lock)._is_owned
        self.submitted: deque[tuple[Callable[[Any], object], Any]] = deque()
        self.takes: bool = False
        self._lock: Any = self.lock

    def submit(self, send: Callable[[Any], object], requests: Any) -> None:
        """Send the requests now, or leave them to the thread that has the lock."""
        if self.is_owned():
            if self.submitted:
                self.submitted.append((send, requests))
                self._send_all()
            else:
                send(requests)
            return
        try:
            if self.submitted or not self._lock.acquire(blocking=False):
                self.submitted.append((send, requests))
                self.send_submitted()
                if self.submitted and not self.takes:
                    with self.lock:
                        self._send_all()
                return
            self.takes = True
            try:
                send(requests)
            finally:
                self.takes = False
                self._lock.release()
        except BaseException:
            self._let_go()
            raise
        if self.submitted:
            self.send_submitted()

    def send_submitted(self) -> None:
        """Send what other threads have left, unless one of them has the lock now."""
        try:
            while self.submitted and self._lock.acquire(blocking=False):
                self.takes = True
                try:
                    self._send_all()
                finally:
                    self.takes = False
                    self._lock.release()
        except BaseException:
            self._let_go()
            raise

    def _send_all(self) -> None:
        while self.submitted:
            send, requests = left = self.submitted.popleft()
            try:
                send(requests)
            except Exception:
                raise
            except BaseException:  # Ctrl-C, where `send` began, or else the link has ended, and says so again
                self.submitted.appendleft(left)
                raise

    def _let_go(self) -> None:
        """Release the lock if Ctrl-C came when this thread had just taken it."""
        if self.is_owned():
            self.takes = False
            self._lock.release()


class _Gate:
    """A gate for one waiting thread, used once; opened by a call, from any thread.

    A thread that drives needs no lock: it is woken by the reactor, or is awake.
    """

    __slots__ = ("_driver", "_lock", "is_awake", "is_open", "outer", "thread")

    def __init__(self, driver: ThreadDriver) -> None:
        self.is_open: bool = False
        self.outer: _Gate | None = None  # the gate of an interrupted call of this thread that drives
        self.thread: int = threading.get_ident()
        self.is_awake: bool = False  # its thread drives, and handles events: it sees by itself that the gate is open
        self._driver = driver
        self._lock: threading.Lock | None = None

    def __call__(self) -> None:
        self.is_open = True
        if not self.is_awake:
            self.nudge()

    def follow(self) -> None:
        """Let the thread wait for the one that drives. Call it before you check whether the gate is open."""
        if self._lock is None:
            self._lock = threading.Lock()
            self._lock.acquire()

    def nudge(self) -> None:
        """Wake the thread, so that it checks whether its run is cancelled. Callable from any thread."""
        self.promote()
        self._driver.wake_driving(self)

    def promote(self) -> None:
        """Wake the thread, so that it drives the sockets. Callable from any thread; idempotent."""
        if self._lock is not None:
            with suppress(RuntimeError):  # it is awake
                self._lock.release()

    def wait(self) -> None:
        """Wait until the gate is open or the thread has to drive. Raises when a limit of this thread has passed."""
        assert self._lock is not None, "it follows another thread"
        while (limit := next_limit()) is not None:
            check_limits()
            left = limit - time.monotonic()
            patience = -1 if left == math.inf else min(max(left, 0), threading.TIMEOUT_MAX)
            if self._lock.acquire(timeout=patience):
                return
        self._lock.acquire()
