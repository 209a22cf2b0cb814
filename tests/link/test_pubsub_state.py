"""Which channels stand: the bookkeeping, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from worqr.link.messages import Channels, Listener


def listening(channels: list[str]) -> Listener:
    return Listener(cast("Any", SimpleNamespace(channels=channels)), cast("Any", None))


def confirm(channels: Channels, *names: bytes) -> None:
    for name in names:
        channels.heard([b"subscribe", name, 1])


def news(channels: Channels) -> list[tuple[Listener, str | None, bytes]]:
    found, channels.news = channels.news, []
    return found


def test_a_listener_stands_when_its_last_channel_does() -> None:
    channels, listener = Channels(), listening(["a", "b"])
    channels.add(listener)
    assert channels.changes() == [("SUBSCRIBE", b"a", b"b")]
    confirm(channels, b"a")
    assert news(channels) == []
    confirm(channels, b"b")
    assert news(channels) == [(listener, None, b"")]


def test_a_channel_that_stands_is_not_asked_for_again() -> None:
    channels, first, second = Channels(), listening(["a"]), listening(["a"])
    channels.add(first)
    channels.changes()
    confirm(channels, b"a")
    news(channels)
    channels.add(second)
    assert channels.changes() == []
    assert news(channels) == [(second, None, b"")]
    channels.heard([b"message", b"a", b"1"])
    assert news(channels) == [(first, "a", b"1"), (second, "a", b"1")]


def test_the_last_one_to_leave_unsubscribes() -> None:
    channels, first, second = Channels(), listening(["a"]), listening(["a", "b"])
    channels.add(first)
    channels.add(second)
    channels.changes()
    channels.remove(second)
    assert channels.changes() == [("UNSUBSCRIBE", b"b")]
    channels.remove(first)
    assert channels.changes() == [("UNSUBSCRIBE", b"a")]
    assert not channels


def test_what_came_and_went_between_is_never_asked_for() -> None:
    channels, listener = Channels(), listening(["a"])
    channels.add(listener)
    channels.remove(listener)
    assert channels.changes() == []


def test_the_confirmation_of_an_older_subscription_proves_nothing() -> None:
    channels, first, second = Channels(), listening(["a"]), listening(["a"])
    channels.add(first)
    channels.changes()
    channels.remove(first)
    channels.changes()
    channels.add(second)
    assert channels.changes() == [("SUBSCRIBE", b"a")]
    confirm(channels, b"a")
    assert news(channels) == []
    confirm(channels, b"a")
    assert news(channels) == [(second, None, b"")]


def test_a_new_connection_asks_for_everything_and_confirms_anew() -> None:
    channels, listener = Channels(), listening(["a", "b"])
    channels.add(listener)
    channels.changes()
    confirm(channels, b"a", b"b")
    news(channels)
    channels.reset()
    assert channels.changes() == [("SUBSCRIBE", b"a", b"b")]
    confirm(channels, b"a", b"b")
    assert news(channels) == [(listener, None, b"")]


def test_what_stood_on_the_old_connection_stands_for_nobody_on_the_new_one() -> None:
    channels, old, new = Channels(), listening(["a"]), listening(["a"])
    channels.add(old)
    channels.changes()
    confirm(channels, b"a")
    news(channels)
    channels.reset()
    channels.add(new)
    channels.changes()
    assert news(channels) == []
    confirm(channels, b"a")
    assert news(channels) == [(old, None, b""), (new, None, b"")]


def test_one_forbidden_channel_takes_no_other_away() -> None:
    channels, good, bad = Channels(), listening(["a"]), listening(["x"])
    channels.add(good)
    channels.add(bad)
    channels.changes()
    assert channels.refused() == []
    assert channels.changes() == [("SUBSCRIBE", b"a"), ("SUBSCRIBE", b"x")]
    confirm(channels, b"a")
    assert channels.refused() == [(bad, "x")]
    assert news(channels) == [(good, None, b"")]


def test_an_error_to_a_ping_is_not_blamed_on_a_channel() -> None:
    channels, listener = Channels(), listening(["a"])
    assert channels.ping() == ("PING",)
    channels.add(listener)
    channels.changes()
    assert channels.refused() == []  # the PING
    confirm(channels, b"a")
    assert news(channels) == [(listener, None, b"")]


def test_pongs_of_both_shapes_are_taken() -> None:
    channels, listener = Channels(), listening(["a"])
    channels.ping()
    channels.heard(b"PONG")
    channels.ping()
    channels.heard([b"pong", b""])
    channels.add(listener)
    channels.changes()
    assert channels.refused() == [(listener, "a")]


def test_many_channels_are_asked_for_in_parts() -> None:
    channels = Channels()
    channels.add(listening([f"c{i}" for i in range(1200)]))
    assert [len(command) - 1 for command in channels.changes()] == [500, 500, 200]
