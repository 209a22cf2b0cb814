"""Channels to listen to: a thread and a connection of their own, made at the first subscription.

Here: `Subscription` (the face, in the loop) and `Subscriptions` (the thread). Which channels are wanted, asked for
and confirmed is `channels`' business. Messages are hints; they get lost whenever a connection does. So whoever
subscribes learns each time that its channels stand (again): that is the moment to look for what was missed.

The thread sleeps in a selector on its socket and on a socket pair, through which the loop wakes it when orders wait.
A connection that has said nothing for `ping_every` gets a PING; one that then says nothing for `pong_timeout` is
dropped: redis-py would wait for the TCP timeout, hours. Nothing about an outage is logged here; the data connection
does that.
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrError
from worqr.link.channels import Channels, Command, Listener
from worqr.link.connection import MOVED, Wire, open_connection, pack
from worqr.link.driver import BUG, Driver, Waiter, wake_all
from worqr.link.faults import Kind, Lost, Refused
from worqr.link.outage import pause_after
from worqr.link.routes import Route, route_to
from worqr.link.scribe import Scribe
from worqr.link.settings import LinkSettings
from worqr.log_events import emit

logger: logging.Logger = logging.getLogger(__name__)

_MESSAGES_PER_DELIVERY = 1000  # a flood reaches the loop in parts, so that other tasks have their turn
_END_WAIT = 0.2  # seconds that closing waits for the thread; only one that is just connecting takes longer


class Hub(Protocol):
    """Where subscriptions come from."""

    driver: Driver
    ended: WorqrError | None

    def forget(self, subscription: Subscription) -> None:
        """It hears nothing more. From any thread."""
        ...


class Subscription:
    """Some channels, and whom to tell. Made by `Subscriptions.open`; all of its methods belong to the loop.

    Attributes:
        channels: their names, each once; at least one.
        ear: what listens for it. Set by whoever opened it; another one when its channels move to another node.
    """

    def __init__(
        self,
        hub: Hub,
        channels: Iterable[str],
        deliver: Callable[[str, bytes], object],
        confirmed: Callable[[], object],
    ) -> None:
        self.channels: tuple[str, ...] = tuple(dict.fromkeys(channels))
        if not self.channels:
            raise UsageError("a subscription needs at least one channel")
        self.ear: Ear | None = None
        self._hub = hub
        self._deliver = deliver
        self._confirmed = confirmed
        self._closed = False
        self._stood = False
        self._error: Exception | None = None
        self._waiters: list[Waiter] = []

    async def wait_confirmed(self) -> None:
        """Return when all channels have been subscribed once. Waits through outages: put a deadline around it.

        Raises:
            RefusedByServer: our user may not hear one of them.
            Unavailable: the link was closed.
        """
        driver, waiter = self._hub.driver, Waiter()
        await driver.prepare(waiter)
        self._waiters.append(waiter)  # before the look: in a plain thread the news may come meanwhile
        if not self._stood and self._error is None and self._hub.ended is None:
            await driver.wait(waiter)
        error = self._error or (None if self._stood else self._hub.ended)
        if error is not None:
            raise type(error)(*error.args) from error.__cause__

    def close(self) -> None:
        """Hear nothing more, from now on. Channels that nobody else wants are unsubscribed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._hub.forget(self)
            self.fail(UsageError("this subscription was closed"))

    def receive(self, channel: str | None, data: bytes) -> None:
        """In the loop: a message, or (without a channel) the news that all channels stand."""
        if self._closed:
            return
        if channel is not None:
            self._deliver(channel, data)
            return
        self._stood, self._error = True, None
        self._wake()
        self._confirmed()

    def fail(self, error: Exception) -> None:
        """In the loop: it cannot be had."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        wake_all(waiters)


class Ear(Listener):
    """What listens for a subscription, in the thread of one connection."""

    def __init__(self, subscription: Subscription, hub: Subscriptions) -> None:
        super().__init__(subscription.channels)
        self.subscription = subscription
        self.hub = hub


class Subscriptions:
    """All subscriptions of a link, on one connection. `open` belongs to the loop, or to plain threads; `close` to any thread.

    Args:
        route: where the server is; by default where the settings say.
        channels: what it keeps its channels in: of which kind they are.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        scribe: Scribe,
        *,
        route: Route | None = None,
        channels: Channels[Ear] | None = None,
    ) -> None:
        self.driver: Driver = driver
        self.connections: int = 0
        self.ended: WorqrError | None = None
        self._settings = settings
        self._scribe = scribe
        self._route = route or route_to(settings)
        self._orders: queue.SimpleQueue[tuple[Ear, bool]] = queue.SimpleQueue()
        self._channels: Channels[Ear] = Channels() if channels is None else channels
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None
        self._wire: Wire | None = None
        self._served = False

    # In the loop

    def open(
        self, channels: Iterable[str], deliver: Callable[[str, bytes], object], confirmed: Callable[[], object]
    ) -> Subscription:
        """Listen to `channels`. `deliver(channel, message)` and `confirmed()` run in the loop.

        `confirmed` is called each time that all the channels have been subscribed: at first, and after each reconnect.
        """
        self._check()
        subscription = Subscription(self, channels, deliver, confirmed)
        self.listen(subscription)
        return subscription

    def listen(self, subscription: Subscription) -> None:
        """Listen for it here, and no more where it was listened for before. From any thread."""
        with self._starting:  # whoever ends us comes before the check, or finds the order
            self._check()
            self._ensure_thread()
            before, subscription.ear = subscription.ear, Ear(subscription, self)
            self._orders.put((subscription.ear, True))
        self.ring()
        if before is not None:
            before.hub.let_go(before)

    def forget(self, subscription: Subscription) -> None:
        if subscription.ear is not None:
            self.let_go(subscription.ear)

    def let_go(self, ear: Ear) -> None:
        """Listen no more for this one. From any thread."""
        if self.ended is None:
            self._orders.put((ear, False))
            self.ring()

    def close(self) -> None:
        """End the thread; whoever waits for a confirmation gets Unavailable. Idempotent."""
        if self.ended is not None:
            return
        with self._starting:  # a thread that is there is known
            self.ended = Unavailable(f"the link to {self._settings.address.redacted} was closed")
        thread, wire = self._thread, self._wire
        if thread is not None:
            self.ring()
            if wire is not None:
                wire.interrupt()
            if thread is not threading.current_thread():
                thread.join(_END_WAIT)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: nothing of this works here."""
        self.ended = error
        if self._wire is not None:
            self._wire.abandon()

    def _check(self) -> None:
        if self.ended is not None:
            raise type(self.ended)(*self.ended.args)

    def _ensure_thread(self) -> None:
        if self._thread is not None:
            return
        try:
            listener, bell = socket.socketpair()
            selector = selectors.DefaultSelector()
        except OSError as exc:
            raise Unavailable(f"cannot listen to channels ({exc}): this process is at its limit (ulimit -n)") from exc
        listener.setblocking(False)
        bell.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        thread = threading.Thread(target=self._run, args=(selector, listener), name="worqr-subscriptions", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            for each in (selector, listener, bell):
                each.close()
            raise Unavailable(f"cannot listen to channels ({exc}): this process is at its limit (ulimit -u)") from exc
        self._thread, self._bell = thread, bell

    def ring(self) -> None:
        """Have the thread look for orders, and whether the server is elsewhere by now. From any thread."""
        try:
            if self._bell is not None:
                self._bell.send(b"!")
        except OSError:
            pass  # full: it will wake anyway; closed: it has ended

    # The thread

    def _run(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        attempts = 0
        while self.ended is None:
            refused, before = False, self.connections
            try:
                timeout, look = self._settings.pong_timeout, self._while_silent
                self._wire = open_connection(
                    *(self._settings, self._route, "subscribe"), timeout=timeout, on_silence=look
                )
                self._stand(self._wire, selector, listener)
            except Lost:
                self._route.doubt()  # and the data connection tells of it
            except WorqrError as exc:
                refused = isinstance(exc, RefusedByServer)
            except Exception as exc:  # a bug must cost a connection, not every message from now on
                self._scribe.emit(logger, "link.subscriptions", "a bug of worqr; connecting again", exc_info=exc)
            attempts = 1 if self.connections > before and self._served else attempts + 1
            self._drop()
            self._rest(selector, listener, pause_after(attempts, refused=refused))
        self._finish(selector, listener)

    def _while_silent(self) -> None:
        if self.ended is not None:
            raise Lost("the link was closed", innocent=True)

    def _stand(self, wire: Wire, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Serve one connection until it is lost (`Lost`) or the end comes."""
        self.connections += 1
        self._served = False
        self._channels.reset()
        self._take_orders()
        self._send(wire, self._channels.changes())
        descriptor = wire.fileno()
        selector.register(descriptor, selectors.EVENT_READ)
        try:
            heard, pinged = time.monotonic(), False
            while self.ended is None:
                quiet = self._settings.ping_every + (self._settings.pong_timeout if pinged else 0)
                ready = selector.select(max(heard + quiet - time.monotonic(), 0) if self._channels else None)
                rung = self._answer_bell(ready, listener)
                if rung:
                    if not self._route.leads_to(wire.endpoint):
                        raise Lost(MOVED, innocent=True)
                    if not self._channels:
                        heard, pinged = time.monotonic(), False  # nobody listened, so nobody looked
                    self._take_orders()
                    self._send(wire, self._channels.changes())
                if len(ready) > rung:
                    self._receive(wire)
                    heard, pinged = time.monotonic(), False
                elif self._channels and time.monotonic() - heard >= quiet:
                    if pinged:
                        raise Lost(f"nothing was heard for {quiet:g} s")
                    self._send(wire, [self._channels.ping()])
                    pinged = True
        finally:
            selector.unregister(descriptor)

    def _receive(self, wire: Wire) -> None:
        """Everything that has arrived, in deliveries of moderate size."""
        channels = self._channels
        while self.ended is None:
            try:
                channels.heard(wire.read_nowait())
                self._served = True
            except BlockingIOError:
                break
            except Refused as refused:
                self._refused(refused)
            if channels.expelled:
                raise Lost("channels went to another node", innocent=True)
            if len(channels.news) >= _MESSAGES_PER_DELIVERY:
                self._take_orders()  # a flood must not keep others from subscribing
                self._send(wire, channels.changes())
        self._send(wire, channels.changes())

    def _refused(self, refused: Refused) -> None:
        if refused.kind is not Kind.REFUSED:
            raise Lost(str(refused), innocent=True)
        self._channels.refused()
        failures, self._channels.failures = self._channels.failures, []
        for ear, name in failures:
            error = RefusedByServer(f"the server will not let us subscribe to {name}: {refused}")
            self.driver.post(partial(ear.subscription.fail, error))
            self._scribe.emit(logger, "link.refused", "%(error)s", error=str(error))

    def _send(self, wire: Wire, commands: list[Command]) -> None:
        """Send what is to be sent, and deliver what there is to deliver."""
        if commands:
            wire.send([pack(command) for command in commands])
        self._deliver()

    def _deliver(self) -> None:
        """Hand what was heard to the loop, all at once."""
        news, self._channels.news = self._channels.news, []
        if news:
            self.driver.post(partial(_receive_all, news))

    def _take_orders(self) -> None:
        for _ in range(self._orders.qsize()):
            ear, wanted = self._orders.get_nowait()
            if wanted:
                self._channels.add(ear)
            else:
                self._channels.remove(ear)

    def _answer_bell(self, ready: list[tuple[selectors.SelectorKey, int]], listener: socket.socket) -> bool:
        if not any(key.fileobj is listener for key, _ in ready):
            return False
        try:
            while listener.recv(4096):
                pass
        except BlockingIOError:
            pass
        return True

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _rest(self, selector: selectors.BaseSelector, listener: socket.socket, pause: float) -> None:
        """Wait before the next attempt; orders are kept, only the end wakes it."""
        end = time.monotonic() + pause
        while self.ended is None and (left := end - time.monotonic()) > 0:
            self._answer_bell(selector.select(left), listener)

    def _finish(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        self._drop()
        self._take_orders()
        error = self.ended or Unavailable("the link was closed")
        for ear in self._channels.listeners():
            if ear.subscription.ear is ear:
                self.driver.post(partial(ear.subscription.fail, error))
        selector.close()
        listener.close()
        if self._bell is not None:
            self._bell.close()


def _receive_all(news: list[tuple[Ear, str | None, bytes]]) -> None:
    """In the loop. One callback that fails does not keep the news from the others."""
    for ear, channel, data in news:
        try:
            if ear.subscription.ear is ear:
                ear.subscription.receive(channel, data)
        except Exception as error:
            emit(logger, "link.deliver", BUG, exc_info=error)
