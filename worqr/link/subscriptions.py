"""`Subscriptions`: messages on channels, over a second connection that the caller's driver drives. The first subscription
opens it.

Here: the connection. Not here: a caller's channels and callbacks (`subscription`), and which channels are requested, sent and
confirmed (`pubsub_state`).

Messages are hints; a lost connection loses some of them. So a subscriber is notified each time that its channels are
confirmed (again), and then checks for what it has missed.

A connection without input for `ping_every` gets a PING. If no input arrives for `pong_timeout` after that, the connection is
closed: TCP would wait for hours. The time in which the loop was blocked does not count. An outage is not logged here; the
data connection logs it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.connection import MOVED, Wire, pack
from worqr.link.dialer import Dialer
from worqr.link.driver import Driver, Timer
from worqr.link.endpoints import EndpointResolver, resolver_for
from worqr.link.log_thread import LogThread
from worqr.link.outage import pause_after
from worqr.link.pubsub_state import Channels, Command
from worqr.link.replies import NOT_YET, NotRedis, new_reader
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.settings import LinkSettings
from worqr.link.subscription import Subscription, SubscriptionListener, receive_all
from worqr.link.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

_LATE = 0.05  # seconds: a look that is later was held up by a loop that was blocked


class State(enum.Enum):
    """The state of the connection of some `Subscriptions`."""

    UNUSED = "nothing was subscribed yet"
    DIALLING = "an attempt to connect is being made"
    WAITING = "until the next attempt to connect"
    CONNECTED = "channels are asked for as they are wanted"
    ENDED = "nothing is heard any more"


class Subscriptions:
    """All subscriptions of a link, on one connection. All methods belong to the driver's loop.

    Args:
        resolver: finds the server's address; by default the address in the settings.
        channels: the state of the channels, plain or sharded.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        log_thread: LogThread,
        *,
        resolver: EndpointResolver | None = None,
        channels: Channels[SubscriptionListener] | None = None,
    ) -> None:
        self.driver: Driver = driver
        self.connections: int = 0
        self.ended: WorqrError | None = None
        self.state: State = State.UNUSED
        self._settings = settings
        self._log_thread = log_thread
        self._resolver = resolver or resolver_for(settings)
        timeout = settings.pong_timeout
        self._dialer = Dialer(settings, driver, self._resolver, self._dialled, purpose="subscribe", timeout=timeout)
        self._channels: Channels[SubscriptionListener] = Channels() if channels is None else channels
        self._transport: Transport | None = None
        self._reader = new_reader()
        self._attempts = 0
        self._served = False  # the present connection has brought something
        self._heard_at = 0.0
        self._pinged = False
        self._timer: Timer | None = None

    def open(
        self, channels: Iterable[str], deliver: Callable[[str, bytes], object], confirmed: Callable[[], object]
    ) -> Subscription:
        """Listen to `pubsub_state`. `deliver(channel, message)` and `confirmed()` run in the loop.

        `confirmed` is called each time that all the channels have been subscribed: at first, and after each reconnect.
        """
        self._check()
        subscription = Subscription(self, channels, deliver, confirmed)
        with self.driver.entered:
            self.listen(subscription)
        return subscription

    def listen(self, subscription: Subscription) -> None:
        """Listen for it here, and no more where it was listened for before."""
        self._check()
        before, subscription.listener = subscription.listener, SubscriptionListener(subscription, self)
        if self._transport is not None:
            self._readable()  # its channels may stand already, if the connection does
        if not self._channels:
            self._heard_at, self._pinged = time.monotonic(), False  # without channels there was no PING
        self._channels.add(subscription.listener)
        self._ask()
        if before is not None:
            before.hub.let_go(before)

    def forget(self, subscription: Subscription) -> None:
        if subscription.listener is not None:
            with self.driver.entered:
                self.let_go(subscription.listener)

    def let_go(self, listener: SubscriptionListener) -> None:
        """Listen no more for this one."""
        if self.ended is None:
            self._channels.remove(listener)
            self._ask()

    def reconsider(self) -> None:
        """The server may be elsewhere by now: go there, if so."""
        transport = self._transport
        if self.ended is None and transport is not None and not self._resolver.is_current(transport.wire.endpoint):
            self._lost(ConnectionLost(MOVED, innocent=True))

    def close(self) -> None:
        """End it; callers that wait for a confirmation get Unavailable. Idempotent."""
        if self.ended is not None:
            return
        error = self.ended = Unavailable(f"the link to {self._settings.address.redacted} was closed")
        self._drop()
        self._dialer.close()
        self.state = State.ENDED
        for listener in self._channels.listeners():
            if listener.subscription.listener is listener:
                self.driver.post(partial(listener.subscription.fail, error))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: nothing of this works here."""
        self.ended, self.state = error, State.ENDED
        self._dialer.close()
        if self._transport is not None:
            self._transport.abandon()

    def _check(self) -> None:
        if self.ended is not None:
            raise type(self.ended)(*self.ended.args)

    def _dial(self) -> None:
        self.state = State.DIALLING
        self._dialer.dial()

    def _dialled(self, wire: Wire | None, error: WorqrError | None) -> None:
        if wire is not None:
            try:
                self._connected(Transport(wire, self.driver, self._readable, self._progress))
            except (ConnectionLost, WorqrError):
                wire.close()
                self._rest()
            return
        self._rest(refused=isinstance(error, RefusedByServer))

    def _connected(self, transport: Transport) -> None:
        self._transport = transport
        self._reader = new_reader()
        self.state = State.CONNECTED
        self.connections += 1
        self._attempts, self._served = self._attempts + 1, False
        self._heard_at, self._pinged = time.monotonic(), False
        self._ask()

    def _lost(self, lost: ConnectionLost) -> None:
        """The connection is of no use any more; the data connection logs it."""
        if self._transport is None:
            return
        if self._served:
            self._attempts = 1
        self._drop()
        self._resolver.invalidate()
        self._rest(counted=True)

    def _rest(self, *, refused: bool = False, counted: bool = False) -> None:
        """Wait before the next attempt."""
        if self.ended is not None:
            return
        self._attempts += not counted
        pause = pause_after(self._attempts, refused=refused)
        if pause > 0:
            self.state = State.WAITING
            self._call_at(time.monotonic() + pause, self._dial)
        else:
            self._dial()

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        self._channels.reset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call_at(self, when: float, callback: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.driver.call_at(when, callback)

    def _ask(self) -> None:
        """Send the pending commands, and deliver the confirmations that need no reply."""
        if self.state is State.UNUSED:
            self._dial()
        if self._transport is not None:
            try:
                self._send(self._channels.changes())
            except ConnectionLost as lost:
                self._lost(lost)
            else:
                self._plan()
        news, self._channels.news = self._channels.news, []
        if news:
            self.driver.post(partial(receive_all, news))

    def _send(self, commands: list[Command]) -> None:
        if commands and self._transport is not None:
            self._transport.send([pack(command) for command in commands])

    def _progress(self, lost: ConnectionLost | None) -> None:
        if lost is not None:
            self._lost(lost)
        else:
            self._readable()

    def _readable(self) -> None:
        """Read the input and deliver it."""
        try:
            self._receive()
        except ConnectionLost as lost:
            self._lost(lost)
        except Exception as error:  # a bug must cost a connection, not all later messages
            self._log_thread.emit(logger, "link.subscriptions", "a bug of worqr; connecting again", exc_info=error)
            self._lost(ConnectionLost("a bug", innocent=True))
        news, self._channels.news = self._channels.news, []
        if news:
            receive_all(news)

    def _receive(self) -> None:
        transport, channels = self._transport, self._channels
        if transport is None:
            return
        pieces = transport.read()
        if pieces:
            self._heard_at = time.monotonic()
            if self._pinged:
                self._pinged = False
                self._look_again()
        gets = self._reader.gets
        try:
            for data in pieces:
                self._reader.feed(data)
                while (reply := gets()) is not NOT_YET:
                    if isinstance(reply, ErrorReply):
                        self._refused(reply)
                    else:
                        channels.heard(reply)
                        self._served = True
                    if channels.expelled:
                        raise ConnectionLost("channels went to another node", innocent=True)
        except NotRedis as error:
            raise ConnectionLost(f"the server sent something that is no message ({error})") from error
        self._send(channels.changes())

    def _refused(self, refused: ErrorReply) -> None:
        if refused.action is not ErrorAction.REFUSED:
            raise ConnectionLost(str(refused), innocent=True)
        self._channels.refused()
        failures, self._channels.failures = self._channels.failures, []
        for listener, name in failures:
            error = RefusedByServer(f"the server will not let us subscribe to {name}: {refused}")
            self.driver.post(partial(listener.subscription.fail, error))
            self._log_thread.emit(logger, "link.refused", "%(error)s", error=str(error))

    @property
    def _gives_up_at(self) -> float:
        """When the next PING is to be sent, or the one that was sent is overdue."""
        return self._heard_at + self._settings.ping_every + (self._settings.pong_timeout if self._pinged else 0)

    def _plan(self) -> None:
        if self._transport is not None and self._timer is None and self._channels:
            self._call_at(self._gives_up_at, partial(self._look, self._gives_up_at))

    def _look_again(self) -> None:
        """The next look is due at another time than before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._plan()

    def _look(self, planned: float) -> None:
        self._timer = None
        self._readable()  # read the socket's input before checking the time
        now = time.monotonic()
        if self._transport is not None and self._channels:
            if now - planned > _LATE:
                self._heard_at += now - planned
            if now >= self._gives_up_at:
                self._silent()
        self._plan()

    def _silent(self) -> None:
        if self._pinged:
            self._lost(ConnectionLost("no reply to PING"))
            return
        self._pinged = True
        try:
            self._send([self._channels.ping()])
        except ConnectionLost as lost:
            self._lost(lost)
