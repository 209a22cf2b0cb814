"""Stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from worqr.command import Command
from worqr.keys import QueueKeys


class Wait(NamedTuple):
    key: str
    kind: Literal["event", "sleep", "children"]
    name: str = ""
    schema: bytes = b""
    in_ms: int | None = None
    at_ms: int | None = None


class Suspended(NamedTuple):
    status: str
    ends: dict[str, bytes]


class Sent(NamedTuple):
    status: str
    state: str


def suspend_task(
    keys: QueueKeys, worker: str, claim: int, waits: Sequence[Wait], *, progress: bool = False
) -> Command[Suspended]:
    raise NotImplementedError


def send_event(
    keys: QueueKeys, id: str, name: str, value: bytes, *, number: int = 0, life: int = 0, again: bool = False
) -> Command[Sent]:
    raise NotImplementedError


def refuse_event(keys: QueueKeys, worker: str, claim: int, key: str) -> Command[str]:
    raise NotImplementedError


class NotedChild(NamedTuple):
    status: str
    after: int
    end: bytes


def note_child(keys: QueueKeys, worker: str, claim: int, key: str, base: str, id: str) -> Command[NotedChild]:
    raise NotImplementedError
