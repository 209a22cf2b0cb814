"""Small scripts that show what the link does with a call, and ways to wait without sleeping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.patience import PATIENCE
from tests.support.patience import until as until
from worqr.command import Command
from worqr.errors import UsageError
from worqr.link import Link
from worqr.link.cluster import ClusterRouter
from worqr.lua import Script


def script(name: str, body: str, flags: str = "") -> Script:
    source = f"#!lua{flags}\n{body}"
    return Script(name, source)


ECHO = script("echo", "return {'ok', ARGV[1]}")
LOG = script("log", "return {'ok', redis.call('RPUSH', KEYS[1], ARGV[1])}")
APPEND = script(
    "append",
    """
    local replies = KEYS[1] .. ':producer:' .. ARGV[1]
    local kept = redis.call('HGET', replies, ARGV[2])
    if kept then return {'again', tonumber(kept), tonumber(ARGV[2]), tonumber(ARGV[3])} end
    local length = redis.call('RPUSH', KEYS[1], ARGV[4])
    redis.call('HSET', replies, ARGV[2], length)
    redis.call('EXPIRE', replies, 60)
    return {'ok', length, tonumber(ARGV[2]), tonumber(ARGV[3])}
    """,
)


def echo(text: str, read: Callable[[list[Any]], Any] = lambda reply: reply[1].decode()) -> Command[Any]:
    return Command(ECHO, "t:{Q}", (text,), read)


ECHO_CALL = echo("a")


def log(prefix: str, text: str) -> Command[int]:
    """RPUSH, so that the order of arrival can be looked at."""
    queue = f"{prefix}:{{Q}}"
    return Command(LOG, queue, (text,), lambda reply: reply[1])


def append(prefix: str, text: str, queue: str = "Q") -> Command[list[Any]]:
    """A numbered RPUSH: answers [ok or again, length, number, lowest]."""
    base = f"{prefix}:{{{queue}}}"
    return Command(APPEND, base, (text,), lambda reply: [reply[0].decode(), *reply[1:]], numbered=True)


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(word)]


class Outcomes:
    """What posts delivered: a list of (value, error) and a way to wait for the n-th."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, Exception | None]] = []

    def __call__(self, value: Any, error: Exception | None) -> None:
        self.all.append((value, error))

    @property
    def values(self) -> list[Any]:
        return [value for value, _ in self.all]

    async def wait(self, count: int, within: float = PATIENCE) -> None:
        await until(lambda: len(self.all) >= count, within, f"{count} outcomes, there are {len(self.all)}")


async def notice(link: Link) -> None:
    """Let a link find out that its server is gone, with a request that is of no account."""
    await until(lambda: link.post(ECHO_CALL, lambda *_: None) or link._client.connector.state.name != "READY")  # type: ignore[func-returns-value]


async def knows_why(link: Link, cause: str) -> None:
    """Until a link has found out why it has no server. Only then is it in the error of a call with little patience."""
    client = link._client
    outage = client.topology.outage if isinstance(client, ClusterRouter) else client.outage
    await until(lambda: re.search(cause, outage.cause), what=f"{cause!r} as the cause of an outage")


async def kill_connections(link: Link, client: Any, kind: str = "normal") -> None:
    client.execute_command("CLIENT", "KILL", "TYPE", kind)


def tries_in_a_child(link: Link, channel: str) -> list[str]:
    """What a forked child is told when it calls, starts and subscribes by its parent's link: fork, or whatever else."""
    said: list[str] = []
    tries: tuple[Callable[[], object], ...] = (
        lambda: link.call(echo("a")).send(None),
        link.start,
        lambda: link.subscriptions.open([channel], print, print),  # type: ignore[arg-type]
    )
    for attempt in tries:
        try:
            attempt()
            said.append("nothing")
        except UsageError as error:
            said.append("fork" if "fork" in str(error) else str(error))
    return said
