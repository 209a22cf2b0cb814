"""`Subscriptions`: messages on channels, over a second connection that the caller's driver drives. The first subscription
opens it.

Here: the use of one connection after another. Not here: attempts to connect (`connector`), a caller's channels and callbacks
(`subscription`), and which channels are requested, sent and confirmed (`pubsub_state`).

Messages are hints; a lost connection loses some of them. So a subscriber is notified each time that its channels are
confirmed (again), and then checks for what it has missed.

A connection without input for `ping_every` gets a PING. If no input arrives for `pong_timeout` after that, the connection is
closed: TCP would wait for hours. The time in which the loop was blocked does not count. An outage is not logged here; the
data connection logs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.connection import MOVED, Wire, open_connection, pack
from worqr.link.connector import Connector, State
from worqr.link.driver import Driver, copy_of
from worqr.link.endpoints import EndpointResolver
from worqr.link.log_thread import LogThread
from worqr.link.pubsub_state import Channels, Command
from worqr.link.server_errors import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.settings import LinkSettings
from worqr.link.subscription import Subscription, SubscriptionListener, receive_all
from worqr.link.timers import LATE, Alarm
from worqr.link.transport import Transport
from worqr.link.wire_form import NOT_YET, NotRedis, ReplyReader, new_reader

logger: logging.Logger = logging.getLogger(__name__)


class _PubSubConnection:
    """An open connection, until its loss.

    Attributes:
        transport: its socket.
        reader: parses the replies.
        served: it has brought a message or a confirmation.
        pinged: the reply to a PING is pending.
    """

    def __init__(self, transport: Transport, settings: LinkSettings) -> None:
        self.transport: Transport = transport
        self.reader: ReplyReader = new_reader()
        self.served: bool = False
        self.pinged: bool = False
        self._settings = settings
        self._heard_at = time.monotonic()

    @property
    def gives_up_at(self) -> float:
        """When the next PING is to be sent, or the one that was sent is overdue."""
        return self._heard_at + self._settings.ping_every + (self._settings.pong_timeout if self.pinged else 0)

    def read(self) -> list[bytes]:
        """Read the input. Raises ConnectionLost."""
        pieces = self.transport.read()
        if pieces:
            self.heard()
        return pieces

    def heard(self) -> None:
        """Begin to wait anew: something has arrived, or nothing was expected until now."""
        self._heard_at, self.pinged = time.monotonic(), False

    def forgive(self, seconds: float) -> None:
        """The loop was blocked for this time, so the server is not to blame for its silence."""
        self._heard_at += seconds

    def send(self, commands: list[Command]) -> None:
        """Send commands. Raises ConnectionLost."""
        if commands:
            self.transport.send([pack(command) for command in commands])

    def check_silence(self, ping: Callable[[], Command]) -> None:
        """Send a PING if nothing has arrived for long. Raises ConnectionLost if the reply to the last one is overdue."""
        if time.monotonic() >= self.gives_up_at:
            if self.pinged:
                raise ConnectionLost("no reply to PING")
            self.pinged = True
            self.send([ping()])


class Subscriptions:
    """All subscriptions of a link, on one connection. All methods belong to the driver's loop.

    Attributes:
        connections: how many there have been.
        ended: why no subscription works; None while they do.
        connector: keeps the connection open.

    Args:
        resolver: finds the server's address.
        channels: the state of the channels, plain or sharded.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        log_thread: LogThread,
        *,
        resolver: EndpointResolver,
        channels: Channels[SubscriptionListener] | None = None,
    ) -> None:
        self.driver: Driver = driver
        self.connections: int = 0
        self.ended: WorqrError | None = None
        connect = partial(open_connection, settings, resolver, "subscribe", timeout=settings.pong_timeout)
        self.connector: Connector = Connector(driver, resolver, connect, self._connected)
        self._settings = settings
        self._log_thread = log_thread
        self._channels: Channels[SubscriptionListener] = Channels() if channels is None else channels
        self._connection: _PubSubConnection | None = None
        self._alarm = Alarm(driver, self._look)

    def open(
        self, channels: Iterable[str], deliver: Callable[[str, bytes], object], confirmed: Callable[[], object]
    ) -> Subscription:
        """Listen to `channels`. `deliver(channel, message)` and `confirmed()` run in the loop.

        `confirmed` is called each time that all the channels have been subscribed: at first, and after each reconnect.
        """
        self._check()
        subscription = Subscription(self, channels, deliver, confirmed)
        with self.driver.entered:
            self.listen(subscription)
        return subscription

    def listen(self, subscription: Subscription) -> None:
        """Listen on this connection, and no longer on the one before."""
        self._check()
        listener, before = subscription.move_to(self)
        if self._connection is not None:
            self._readable()  # its channels may stand already, if the connection does
        if not self._channels and self._connection is not None:
            self._connection.heard()  # without channels there was no PING
        self._channels.add(listener)
        self._ask()
        if before is not None:
            before.hub.let_go(before)

    def forget(self, subscription: Subscription) -> None:
        """Stop listening for a subscription."""
        if subscription.listener is not None:
            with self.driver.entered:
                self.let_go(subscription.listener)

    def let_go(self, listener: SubscriptionListener) -> None:
        """Remove one listener."""
        if self.ended is None:
            self._channels.remove(listener)
            self._ask()

    def reconsider(self) -> None:
        """Connect to the server's new address, if it has changed."""
        connection = self._connection
        if connection is not None and not self.connector.resolver.is_current(connection.transport.wire.endpoint):
            self._lost(ConnectionLost(MOVED, innocent=True))

    def close(self) -> None:
        """End the connection; callers that wait for a confirmation get Unavailable. Idempotent."""
        if self.ended is not None:
            return
        error = self.ended = Unavailable(f"the link to {self._settings.address.redacted} was closed")
        self._drop()
        self.connector.close()
        for listener in self._channels.listeners():
            if listener.subscription.listener is listener:
                self.driver.post(partial(listener.subscription.fail, error))

    def poison(self, error: WorqrError) -> None:
        """In a forked child: subscriptions work in the parent only."""
        self.ended = error
        self.connector.poison()
        if self._connection is not None:
            self._connection.transport.abandon()

    def _check(self) -> None:
        if self.ended is not None:
            raise copy_of(self.ended)

    # The connection

    def _connected(self, wire: Wire) -> None:
        transport = self.connector.transport(wire, self._readable, self._progress)
        if transport is not None:
            self._connection = _PubSubConnection(transport, self._settings)
            self.connections += 1
            self._ask()

    def _lost(self, lost: ConnectionLost) -> None:
        """The connection is of no use any more; the data connection logs it."""
        connection = self._connection
        if connection is not None:
            if connection.served:
                self.connector.works()
            self._drop()
            self.connector.lost()
            self.connector.retry()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()
        self._channels.reset()
        self._alarm.cancel()

    # Commands and messages

    def _ask(self) -> None:
        """Send the pending commands, and deliver the confirmations that need no reply."""
        if self.connector.state is State.NEW:
            self.connector.dial()
        if self._connection is not None:
            try:
                self._connection.send(self._channels.changes())
            except ConnectionLost as lost:
                self._lost(lost)
            else:
                self._plan()
        news = self._channels.take_news()
        if news:
            self.driver.post(partial(receive_all, news))

    def _progress(self, lost: ConnectionLost | None) -> None:
        if lost is not None:
            self._lost(lost)
        else:
            self._readable()

    def _readable(self) -> None:
        """Read the input and deliver it."""
        try:
            if self._connection is not None:
                self._receive(self._connection)
        except ConnectionLost as lost:
            self._lost(lost)
        except Exception as error:  # a bug must cost a connection, not all later messages
            self._log_thread.emit(logger, "link.subscriptions", "a bug of worqr; connecting again", exc_info=error)
            self._lost(ConnectionLost("a bug", innocent=True))
        news = self._channels.take_news()
        if news:
            receive_all(news)

    def _receive(self, connection: _PubSubConnection) -> None:
        channels, gets, pinged = self._channels, connection.reader.gets, connection.pinged
        pieces = connection.read()
        if not pieces:
            return
        if pinged:
            self._alarm.cancel()  # its time was the deadline of the PONG
            self._plan()
        try:
            for data in pieces:
                connection.reader.feed(data)
                while (reply := gets()) is not NOT_YET:
                    if isinstance(reply, ErrorReply):
                        self._refused(reply)
                    else:
                        channels.heard(reply)
                        connection.served = True
                    if channels.expelled:
                        raise ConnectionLost("channels went to another node", innocent=True)
        except NotRedis as error:
            raise ConnectionLost(f"the server sent something that is no message ({error})") from error
        connection.send(channels.changes())

    def _refused(self, refused: ErrorReply) -> None:
        if refused.action is not ErrorAction.REFUSED:
            raise ConnectionLost(str(refused), innocent=True)
        for listener, name in self._channels.refused():
            error = RefusedByServer(f"the server will not let us subscribe to {name}: {refused}")
            self.driver.post(partial(listener.subscription.fail, error))
            self._log_thread.emit(logger, "link.refused", "%(error)s", error=str(error))

    # Silence

    def _plan(self) -> None:
        """Look again when the server has been silent for long."""
        if self._connection is not None and self._channels and self._connection.gives_up_at < self._alarm.at:
            self._alarm.set(self._connection.gives_up_at)

    def _look(self, late: float) -> None:
        self._readable()  # read the socket's input before checking the time
        connection = self._connection
        if connection is not None and self._channels:
            if late > LATE:
                connection.forgive(late)
            try:
                connection.check_silence(self._channels.ping)
            except ConnectionLost as lost:
                self._lost(lost)
        self._plan()
