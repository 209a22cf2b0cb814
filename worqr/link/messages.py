"""`Subscriptions`: the messages on channels, over a second connection that the caller's driver drives. The first subscription
opens it.

Here: the use of one connection after another. Not here: attempts to connect (`connector`).

Messages are hints; a lost connection loses some of them. So a subscriber is notified each time that its channels are
confirmed (again), and then checks for what it has missed.

A connection without input for `ping_every` gets a PING. If no input arrives for `pong_timeout` after that, the connection is
closed: TCP would wait for hours. The time in which the loop was blocked does not count. An outage is not logged here; the
data connection logs it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrError
from worqr.link.connector import MOVED, Connector, EndpointResolver, State, Transport, Wire, open_connection, pack
from worqr.link.driver import BUG, LATE, Alarm, Driver, Waiter, copy_of, wake_all
from worqr.link.failures import ConnectionLost, ErrorAction, ErrorReply
from worqr.link.log_thread import LogThread
from worqr.link.session import NOT_YET, NotRedis, new_reader
from worqr.link.settings import LinkSettings
from worqr.log_events import emit
from worqr.stored_values import as_bytes

if TYPE_CHECKING:
    from worqr.link.cluster import ClusterSubscriptions

# The channels of one subscription connection: requested, sent and confirmed ones. No I/O; the driver's loop uses it.
#
# Here: the commands to send and the meaning of each reply. Not here: sockets, waiting, callbacks.
#
# The server replies to commands in their order: a SUBSCRIBE of n channels gets n confirmations or one error. Messages may come
# at any point between. So a queue of the sent commands shows which command an error belongs to. When several channels were
# refused together, each is requested again alone, so that one forbidden channel does not block the others. A channel that was
# refused alone is requested again with each PING, and for each new listener: the user may have got the permission.
#
# A channel is confirmed when it has as many confirmations as SUBSCRIBEs were sent for it. The confirmation of a SUBSCRIBE whose
# channel was unsubscribed meanwhile proves nothing.


_CHANNELS_PER_COMMAND = 500

Command = tuple[str | bytes, ...]


class Words(msgspec.Struct, frozen=True):
    """The commands and replies of one kind of channels: plain ones, or those of a cluster slot (`sharded`)."""

    subscribe: str
    unsubscribe: str
    confirmed: bytes
    gone: bytes
    message: bytes


PLAIN = Words("SUBSCRIBE", "UNSUBSCRIBE", b"subscribe", b"unsubscribe", b"message")
SHARDED = Words("SSUBSCRIBE", "SUNSUBSCRIBE", b"ssubscribe", b"sunsubscribe", b"smessage")


class Listener:
    """The listener of a subscription on one connection.

    Attributes:
        names: the channels, set once.
        missing: the channels that are not confirmed yet. Changed only in the driver's loop.
        refused: those of them that the server refuses, as the listener was told.
    """

    def __init__(self, subscription: Subscription, hub: Subscriptions) -> None:
        self.subscription: Subscription = subscription
        self.hub: Subscriptions = hub
        self.names: dict[bytes, str] = {as_bytes(name): name for name in subscription.channels}
        self.missing: set[bytes] = set()
        self.refused: set[bytes] = set()


class _Channel(msgspec.Struct, eq=False):
    name: str
    listeners: list[Listener] = msgspec.field(default_factory=list[Listener])
    on_wire: bool = False
    stands: bool = False


class Channels:
    """All channels of one connection.

    Args:
        words: the kind of channels.
        group_of: returns the group of a channel. One command names channels of one group only (on a cluster: of one slot).

    Attributes:
        news: (listener, channel, message) in order of arrival; (listener, None, b"") when all channels of a listener are
            confirmed. Until `take_news`.
        expelled: the server has unsubscribed the connection from a channel, because its slot moved to another node.
    """

    def __init__(self, words: Words = PLAIN, group_of: Callable[[bytes], int] | None = None) -> None:
        self._words = words
        self._group_of = group_of
        self.news: list[tuple[Listener, str | None, bytes]] = []
        self.expelled: bool = False
        self._channels: dict[bytes, _Channel] = {}
        self._changed: dict[bytes, None] = {}
        self._suspects: set[bytes] = set()
        self._denied: set[bytes] = set()
        self._asked: deque[dict[bytes, None] | None] = deque()  # None: a PING
        self._unconfirmed: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._channels)

    def listeners(self) -> set[Listener]:
        return {listener for channel in self._channels.values() for listener in channel.listeners}

    def take_news(self) -> list[tuple[Listener, str | None, bytes]]:
        """Return the news, which are delivered now."""
        news, self.news = self.news, []
        return news

    # Wanted channels

    def add(self, listener: Listener) -> None:
        listener.missing = set()
        for key, name in listener.names.items():
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = _Channel(name)
            channel.listeners.append(listener)
            if not channel.stands:
                listener.missing.add(key)
                self._changed[key] = None
        if not listener.missing:
            self.news.append((listener, None, b""))

    def remove(self, listener: Listener) -> None:
        for key in listener.names:
            channel = self._channels.get(key)
            if channel is not None and listener in channel.listeners:
                channel.listeners.remove(listener)
                self._changed[key] = None

    # Commands

    def reset(self) -> None:
        """The connection is gone, and no channel is confirmed. Call it before you add listeners for the next connection."""
        self.expelled = False
        self._asked.clear()
        self._unconfirmed.clear()
        self._suspects.clear()
        self._denied.clear()
        for channel in self._channels.values():
            channel.on_wire = channel.stands = False
        for listener in self.listeners():
            listener.missing, listener.refused = set(listener.names), set()
        self._changed = dict.fromkeys(self._channels)

    def changes(self) -> list[Command]:
        """Return the commands that lead from the requested state to the wanted one."""
        if not self._changed:
            return []
        subscribe: list[bytes] = []
        unsubscribe: list[bytes] = []
        for key in self._changed:
            channel = self._channels.get(key)
            if channel is None:
                continue
            if not channel.listeners:
                del self._channels[key]
                self._denied.discard(key)
                if channel.on_wire:
                    unsubscribe.append(key)
            elif not channel.on_wire:
                channel.on_wire = True
                subscribe.append(key)
        self._changed.clear()
        commands: list[Command] = [(self._words.unsubscribe, *group) for group in self._in_groups(unsubscribe)]
        alone = [key for key in subscribe if key in self._suspects]
        together = [key for key in subscribe if key not in self._suspects]
        groups = [*self._in_groups(together), *([key] for key in alone)]
        for group in groups:
            self._asked.append(dict.fromkeys(group))
            for key in group:
                self._unconfirmed[key] = self._unconfirmed.get(key, 0) + 1
        return commands + [(self._words.subscribe, *group) for group in groups]

    def _in_groups(self, keys: list[bytes]) -> Iterator[list[bytes]]:
        """Group the channels that may share one command."""
        groups: dict[int, list[bytes]] = {}
        for key in keys:
            groups.setdefault(0 if self._group_of is None else self._group_of(key), []).append(key)
        for group in groups.values():
            for start in range(0, len(group), _CHANNELS_PER_COMMAND):
                yield group[start : start + _CHANNELS_PER_COMMAND]

    def ping(self) -> Command:
        self._asked.append(None)
        self._changed.update(dict.fromkeys(self._denied))
        return ("PING",)

    # Replies

    def heard(self, reply: list[bytes] | bytes) -> None:
        """A reply or a message."""
        if type(reply) is not list:
            self._pong()  # to a PING while nothing is subscribed
            return
        kind, key = reply[0], reply[1]
        if kind == self._words.message:
            channel = self._channels.get(key)
            if channel is not None:
                for listener in channel.listeners:
                    self.news.append((listener, channel.name, reply[2]))
        elif kind == self._words.confirmed:
            self._confirm(key)
        elif kind == self._words.gone:
            self._left(key)
        elif kind == b"pong":
            self._pong()

    def _pong(self) -> None:
        if self._asked and self._asked[0] is None:
            self._asked.popleft()

    def _left(self, key: bytes) -> None:
        """An unsubscription: asked for, or because the channel's slot went to another node."""
        channel = self._channels.get(key)
        if channel is not None and channel.stands:
            channel.on_wire = channel.stands = False
            self.expelled = True

    def _confirm(self, key: bytes) -> None:
        group = self._asked[0] if self._asked else None
        if group is not None:
            group.pop(key, None)
            if not group:
                self._asked.popleft()
        left = self._unconfirmed.get(key, 1) - 1
        if left:
            self._unconfirmed[key] = left
            return
        self._unconfirmed.pop(key, None)
        self._denied.discard(key)
        channel = self._channels.get(key)
        if channel is not None and channel.on_wire:
            channel.stands = True
            for listener in channel.listeners:
                listener.refused.discard(key)
                if key in listener.missing:
                    listener.missing.discard(key)
                    if not listener.missing:
                        self.news.append((listener, None, b""))

    def refused(self) -> list[tuple[Listener, str]]:
        """The reply to the oldest command is an error: subscribe each channel alone, or again later.

        Returns:
            (listener, channel) of a channel that the server refuses; each once in a row.
        """
        failures: list[tuple[Listener, str]] = []
        group = self._asked.popleft() if self._asked else None
        for key in group or ():
            self._unconfirmed.pop(key, None)
            channel = self._channels.get(key)
            if channel is None:
                continue
            channel.on_wire = False
            if key not in self._suspects and group is not None and len(group) > 1:
                self._changed[key] = None
            else:
                self._denied.add(key)
                failures += [(each, channel.name) for each in channel.listeners if key not in each.refused]
                for each in channel.listeners:
                    each.refused.add(key)
            self._suspects.add(key)
        return failures


logger: logging.Logger = logging.getLogger(__name__)


class Subscriptions:
    """All subscriptions of a link, on one connection. All methods belong to the driver's loop.

    Attributes:
        connections: how many there have been.
        ended: why no subscription works; None while they do.
        problem: why there is no connection; empty if there is one, or none was tried.
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
        channels: Channels | None = None,
    ) -> None:
        self.driver: Driver = driver
        self.connections: int = 0
        self.ended: WorqrError | None = None
        self.problem: str = ""
        connect = partial(open_connection, settings, resolver, "subscribe", timeout=settings.pong_timeout)
        self.connector: Connector = Connector(driver, resolver, connect, self._connected, failed=self._failed)
        self._settings = settings
        self._log_thread = log_thread
        self._channels: Channels = Channels() if channels is None else channels
        self._alarm = Alarm(driver, self._look)
        self._transport: Transport | None = None  # the open connection
        self._reader = new_reader()
        self._served = False  # it has brought a message or a confirmation
        self._pinged = False  # the reply to a PING is pending
        self._heard_at = 0.0

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
        self._readable()  # its channels may stand already, if the connection does
        if not self._channels:
            self._heard()  # without channels there was no PING
        self._channels.add(listener)
        self._ask()
        if before is not None:
            before.hub.let_go(before)

    def forget(self, subscription: Subscription) -> None:
        """Stop listening for a subscription."""
        if subscription.listener is not None:
            with self.driver.entered:
                self.let_go(subscription.listener)

    def let_go(self, listener: Listener) -> None:
        """Remove one listener."""
        if self.ended is None:
            self._channels.remove(listener)
            self._ask()

    def reconsider(self) -> None:
        """Connect to the server's new address, if it has changed."""
        transport = self._transport
        if transport is not None and not self.connector.resolver.is_current(transport.wire.endpoint):
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
        if self._transport is not None:
            self._transport.abandon()

    def _check(self) -> None:
        if self.ended is not None:
            raise copy_of(self.ended)

    # The connection

    def _connected(self, wire: Wire) -> None:
        self._transport = self.connector.transport(wire, self._readable, self._progress)
        if self._transport is not None:
            self._reader, self._served, self.problem = new_reader(), False, ""
            self._heard()
            self.connections += 1
            self._ask()

    def _failed(self, error: WorqrError) -> None:
        """An attempt to connect has failed."""
        self.problem = str(error)

    def _lost(self, lost: ConnectionLost) -> None:
        """The connection is of no use any more; the data connection logs it."""
        if self._transport is not None:
            self.problem = lost.cause
            if self._served:
                self.connector.works()
            self._drop()
            self.connector.lost()
            self.connector.retry()

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        self._channels.reset()
        self._alarm.cancel()

    # Commands and messages

    def _ask(self) -> None:
        """Send the pending commands, and deliver the confirmations that need no reply."""
        if self.connector.state is State.NEW:
            self.connector.dial()
        if self._transport is not None:
            try:
                self._send(self._transport, self._channels.changes())
            except ConnectionLost as lost:
                self._lost(lost)
            else:
                self._plan()
        news = self._channels.take_news()
        if news:
            self.driver.post(partial(receive_all, news))

    def _send(self, transport: Transport, commands: list[Command]) -> None:
        """Send commands. Raises ConnectionLost."""
        if commands:
            transport.send([pack(command) for command in commands])

    def _progress(self, lost: ConnectionLost | None) -> None:
        if lost is not None:
            self._lost(lost)
        else:
            self._readable()

    def _readable(self) -> None:
        """Read the input and deliver it. What Ctrl-C interrupts, the next connection confirms again."""
        try:
            self._read_all()
        except BaseException:
            self._lost(ConnectionLost("it was interrupted", innocent=True))
            raise

    def _read_all(self) -> None:
        try:
            if self._transport is not None:
                self._receive(self._transport)
        except ConnectionLost as lost:
            self._lost(lost)
        except Exception as error:  # a bug must cost a connection, not all later messages
            self._log_thread.emit(logger, "link.subscriptions", "a bug of worqr; connecting again", exc_info=error)
            self._lost(ConnectionLost("a bug", innocent=True))
        news = self._channels.take_news()
        if news:
            receive_all(news)

    def _receive(self, transport: Transport) -> None:
        channels, gets, pinged = self._channels, self._reader.gets, self._pinged
        if not transport.read(self._reader.feed):
            return
        self._heard()
        if pinged:
            self._alarm.cancel()  # its time was the deadline of the PONG
            self._plan()
        try:
            while (reply := gets()) is not NOT_YET:
                if type(reply) is ErrorReply:
                    self._refused(reply)
                else:
                    channels.heard(reply)
                    self._served = True
                if channels.expelled:
                    raise ConnectionLost("channels went to another node", innocent=True)
        except NotRedis as error:
            raise ConnectionLost(f"the server sent something that is no message ({error})") from error
        if commands := channels.changes():
            self._send(transport, commands)

    def _refused(self, refused: ErrorReply) -> None:
        if refused.action is not ErrorAction.REFUSED:
            raise ConnectionLost(str(refused), innocent=True)
        for listener, name in self._channels.refused():
            error = RefusedByServer(f"the server will not let us subscribe to {name}: {refused}")
            self.driver.post(partial(listener.subscription.fail, error))
            self._log_thread.emit(logger, "link.refused", "%(error)s", error=str(error))

    # Silence

    def _heard(self) -> None:
        """Begin to wait anew: something has arrived, or nothing was expected until now."""
        self._heard_at, self._pinged = time.monotonic(), False

    def _silent_until(self) -> float:
        """Return when the next PING is to be sent, or the one that was sent is overdue."""
        return self._heard_at + self._settings.ping_every + (self._settings.pong_timeout if self._pinged else 0)

    def _plan(self) -> None:
        """Look again when the server has been silent for long."""
        if self._transport is not None and self._channels:
            self._alarm.set(self._silent_until())

    def _look(self, late: float) -> None:
        """Send a PING if nothing has arrived for long; close the connection if the reply to the last one is overdue."""
        self._readable()  # read the socket's input before checking the time
        if self._transport is not None and self._channels:
            if late > LATE:
                self._heard_at += late  # the loop was blocked, so the server is not to blame for its silence
            if time.monotonic() >= self._silent_until():
                try:
                    if self._pinged:
                        raise ConnectionLost("no reply to PING")
                    self._pinged = True
                    self._send(self._transport, [self._channels.ping()])
                except ConnectionLost as lost:
                    self._lost(lost)
        self._plan()


# `Subscription`: some channels, the callbacks for their messages, and the wait until the channels are confirmed.


class Subscription:
    """Some channels, and the callbacks for their messages. Created by `Subscriptions.open`; all methods belong to the loop.

    Attributes:
        channels: their names, each once; at least one.
        listener: the listener of the connection. Set when the subscription is opened, and replaced when its channels move to
            another node.
    """

    def __init__(
        self,
        hub: Subscriptions | ClusterSubscriptions,
        channels: Iterable[str],
        deliver: Callable[[str, bytes], object],
        confirmed: Callable[[], object],
    ) -> None:
        self.channels: tuple[str, ...] = tuple(dict.fromkeys(channels))
        if not self.channels:
            raise UsageError("a subscription needs at least one channel")
        self.listener: Listener | None = None
        self._hub = hub
        self._deliver = deliver
        self._confirmed = confirmed
        self._closed = False
        self._stood = False
        self._error: Exception | None = None
        self._waiters: list[Waiter] = []

    def move_to(self, hub: Subscriptions) -> tuple[Listener, Listener | None]:
        """Return the listener for the connection of `hub`, which is used from now on, and the one before it."""
        before, self.listener = self.listener, Listener(self, hub)
        return self.listener, before

    @property
    def problem(self) -> str:
        """Return what keeps the server from a confirmation, behind a colon; empty if it is not known."""
        problem = "" if self.listener is None else self.listener.hub.problem
        return f": {problem}" if problem else ""

    async def wait_confirmed(self) -> None:
        """Return when all channels have been subscribed once.

        Waits through outages: put a deadline around it.

        Raises:
            RefusedByServer: the user has no permission for one of the channels.
            Unavailable: the link was closed.
        """
        driver, waiter = self._hub.driver, Waiter()
        await driver.prepare(waiter)
        self._waiters.append(waiter)  # before the check: in a plain thread the confirmation may come meanwhile
        if not self._stood and self._error is None and self._hub.ended is None:
            await driver.wait(waiter)
        error = self._error or (None if self._stood else self._hub.ended)
        if error is not None:
            raise copy_of(error)

    def close(self) -> None:
        """Receive no more messages. Channels without another subscription are unsubscribed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._hub.forget(self)
            self.fail(UsageError("this subscription was closed"))

    def receive(self, channel: str | None, data: bytes) -> None:
        """In the loop: a message, or (without a channel) the news that all channels are confirmed."""
        if self._closed:
            return
        if channel is not None:
            self._deliver(channel, data)
            return
        self._stood, self._error = True, None
        self._wake()
        self._confirmed()

    def fail(self, error: Exception) -> None:
        """In the loop: the channels cannot be subscribed."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        wake_all(self._waiters)
        self._waiters.clear()  # last: those that Ctrl-C leaves are woken with the next confirmation


def receive_all(news: list[tuple[Listener, str | None, bytes]]) -> None:
    """In the loop. One callback that fails does not keep the news from the others."""
    for listener, channel, data in news:
        try:
            if listener.subscription.listener is listener:
                listener.subscription.receive(channel, data)
        except Exception as error:
            emit(logger, "link.deliver", BUG, exc_info=error)
