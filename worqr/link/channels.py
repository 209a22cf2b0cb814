"""Which channels are wanted, which were asked for, and which stand. Pure; used by the subscriptions' thread alone.

Here: the commands to send and what each reply means. Not here: sockets, threads, callbacks.

The server answers commands in their order, a SUBSCRIBE of n channels with n confirmations or one error; messages may
come anywhere between. So a queue of what was asked tells whose answer an error is. When several channels were refused
together, each is asked for once more by itself, so that one forbidden channel takes nobody else's away. A channel
stands when as many confirmations have come as SUBSCRIBEs were sent for it: the confirmation of one that was
unsubscribed meanwhile proves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

_CHANNELS_PER_COMMAND = 500

Command = tuple[str | bytes, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """How channels are subscribed and what is then heard: plain ones, and those of a slot of a cluster (`sharded`)."""

    subscribe: str
    unsubscribe: str
    confirmed: bytes
    gone: bytes
    message: bytes


PLAIN = Words("SUBSCRIBE", "UNSUBSCRIBE", b"subscribe", b"unsubscribe", b"message")
SHARDED = Words("SSUBSCRIBE", "SUNSUBSCRIBE", b"ssubscribe", b"sunsubscribe", b"smessage")


class Listener:
    """Whoever wants to hear some channels.

    Attributes:
        names: the channels, set once.
        missing: those that do not stand yet. Changed only by the thread.
    """

    def __init__(self, channels: Iterable[str]) -> None:
        self.names: dict[bytes, str] = {name.encode(): name for name in channels}
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
        words: which kind of channels.
        group_of: only channels of the same group may be asked for together: those of one slot.

    Attributes:
        news: (listener, channel, message) as they arrive; (listener, None, b"") when all of its channels stand.
        failures: (listener, channel) that the server refuses. Whoever uses these lists empties them.
        expelled: the server has unsubscribed us from a channel: its slot is elsewhere now.
    """

    def __init__(self, words: Words = PLAIN, group_of: Callable[[bytes], int] | None = None) -> None:
        self._words = words
        self._group_of = group_of
        self.news: list[tuple[L, str | None, bytes]] = []
        self.failures: list[tuple[L, str]] = []
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

    # What is wanted

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

    # What to send

    def reset(self) -> None:
        """The connection is gone, and nothing stands any more. Before anybody is added for the next one."""
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
        """The commands that lead from what was asked for to what is wanted."""
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
        """What may go into one command each."""
        groups: dict[int, list[bytes]] = {}
        for key in keys:
            groups.setdefault(0 if self._group_of is None else self._group_of(key), []).append(key)
        for group in groups.values():
            for start in range(0, len(group), _CHANNELS_PER_COMMAND):
                yield group[start : start + _CHANNELS_PER_COMMAND]

    def ping(self) -> Command:
        self._asked.append(None)
        return ("PING",)

    # What was heard

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

    def refused(self) -> None:
        """The oldest question was answered with an error: ask again, one by one, or leave it to the next connection."""
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
                self.failures += [(listener, channel.name) for listener in channel.listeners]
