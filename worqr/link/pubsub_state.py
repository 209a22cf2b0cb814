"""The channels of one subscription connection: requested, sent and confirmed ones. No I/O; the driver's loop uses it.

Here: the commands to send and the meaning of each reply. Not here: sockets, waiting, callbacks.

The server replies to commands in their order: a SUBSCRIBE of n channels gets n confirmations or one error. Messages may come
at any point between. So a queue of the sent commands shows which command an error belongs to. When several channels were
refused together, each is requested again alone, so that one forbidden channel does not block the others.

A channel is confirmed when it has as many confirmations as SUBSCRIBEs were sent for it. The confirmation of a SUBSCRIBE whose
channel was unsubscribed meanwhile proves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from worqr.stored_values import as_bytes

_CHANNELS_PER_COMMAND = 500

Command = tuple[str | bytes, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """The commands and replies of one kind of channels: plain ones, or those of a cluster slot (`sharded`)."""

    subscribe: str
    unsubscribe: str
    confirmed: bytes
    gone: bytes
    message: bytes


PLAIN = Words("SUBSCRIBE", "UNSUBSCRIBE", b"subscribe", b"unsubscribe", b"message")
SHARDED = Words("SSUBSCRIBE", "SUNSUBSCRIBE", b"ssubscribe", b"sunsubscribe", b"smessage")


class Listener:
    """A listener for some channels.

    Attributes:
        names: the channels, set once.
        missing: the channels that are not confirmed yet. Changed only in the driver's loop.
    """

    def __init__(self, channels: Iterable[str]) -> None:
        self.names: dict[bytes, str] = {as_bytes(name): name for name in channels}
        self.missing: set[bytes] = set()


L = TypeVar("L", bound=Listener)


@dataclass(slots=True, eq=False)
class _Channel(Generic[L]):
    name: str
    listeners: list[L] = field(default_factory=list[L])
    on_wire: bool = False
    stands: bool = False


class Channels(Generic[L]):
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
        self.news: list[tuple[L, str | None, bytes]] = []
        self.expelled: bool = False
        self._channels: dict[bytes, _Channel[L]] = {}
        self._changed: dict[bytes, None] = {}
        self._suspects: set[bytes] = set()
        self._asked: deque[dict[bytes, None] | None] = deque()  # None: a PING
        self._unconfirmed: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._channels)

    def listeners(self) -> set[L]:
        return {listener for channel in self._channels.values() for listener in channel.listeners}

    def take_news(self) -> list[tuple[L, str | None, bytes]]:
        """Return the news, which are delivered now."""
        news, self.news = self.news, []
        return news

    # Wanted channels

    def add(self, listener: L) -> None:
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

    def remove(self, listener: L) -> None:
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
        for channel in self._channels.values():
            channel.on_wire = channel.stands = False
        for listener in self.listeners():
            listener.missing = set(listener.names)
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
        return ("PING",)

    # Replies

    def heard(self, reply: object) -> None:
        """A reply or a message."""
        if not isinstance(reply, list):
            self._pong()  # to a PING while nothing is subscribed
            return
        kind, key = cast("list[bytes]", reply)[:2]
        if kind == self._words.message:
            channel = self._channels.get(key)
            if channel is not None:
                data = cast("bytes", reply[2])
                self.news.extend((listener, channel.name, data) for listener in channel.listeners)
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
        channel = self._channels.get(key)
        if channel is not None and channel.on_wire:
            channel.stands = True
            for listener in channel.listeners:
                if key in listener.missing:
                    listener.missing.discard(key)
                    if not listener.missing:
                        self.news.append((listener, None, b""))

    def refused(self) -> list[tuple[L, str]]:
        """The reply to the oldest command is an error: subscribe each channel alone, or leave it to the next connection.

        Returns:
            (listener, channel) of a channel that the server refuses.
        """
        failures: list[tuple[L, str]] = []
        group = self._asked.popleft() if self._asked else None
        for key in group or ():
            self._unconfirmed.pop(key, None)
            channel = self._channels.get(key)
            if channel is None:
                continue
            if key not in self._suspects and group is not None and len(group) > 1:
                self._suspects.add(key)
                channel.on_wire = False
                self._changed[key] = None
            else:
                failures += [(listener, channel.name) for listener in channel.listeners]
        return failures
