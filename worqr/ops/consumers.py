"""A worker and a queue: start to serve it, stop to serve it, and recover its claims after the worker's death."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from worqr.command import Argument, Command
from worqr.keys import QueueKeys
from worqr.limits import DECLARES_NOTHING
from worqr.ops.replies import MAX_ITEMS, Reply, new_call, status_word, text, texts

_CHANGES: Final[tuple[Literal["", "limits", "lanes"], ...]] = ("", "limits", "lanes")


@dataclass(frozen=True, slots=True)
class ReleasedClaims:
    """Reply of stop_work and fail_worker: whether there is more to do, and how many claims ended in which way."""

    more: bool
    requeued: int
    cancelled: int
    dead_lettered: int


def start_work(
    keys: QueueKeys,
    worker: str,
    *,
    max_stalls: int,
    keep_failed: int,
    last: int,
    on_failure: bool = False,
    result_ttl_ms: int | None = None,
    limits: str = DECLARES_NOTHING,
    lanes: str | bytes = DECLARES_NOTHING,
    options: str = "",
) -> Command[Literal["", "limits", "lanes"]]:
    """Let the worker claim tasks of the queue; return what that has changed.

    "limits": other limits hold now, and perhaps other rules of lanes. "lanes": only the workers' rules of its lanes are others.

    `last` is the highest start request number that the worker sent to this queue before. `limits`: see
    `worqr.limits`. `lanes`: see `worqr.limits`. `options`: JSON, other options of the handler, for people.

    The server refuses it if the user lacks a right that the scripts of a worker need on this queue.
    """
    ttl = "-" if result_ttl_ms is None else result_ttl_ms
    args = (worker, max_stalls, keep_failed, int(on_failure), ttl, last, limits, lanes, options)
    return new_call("start_work", keys.base, args, _read_changed, numbered=True)


def _read_changed(reply: Reply) -> Literal["", "limits", "lanes"]:
    return _CHANGES[int(reply[1])] if status_word(reply) == "ok" else ""


def _read_released(reply: Reply) -> ReleasedClaims:
    return ReleasedClaims(status_word(reply) == "more", int(reply[1]), int(reply[2]), int(reply[3]))


def stop_work(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Command[ReleasedClaims]:
    """Stop serving the queue; call again while there is more."""
    return new_call("stop_work", keys.base, (worker, limit), _read_released, numbered=True)


@dataclass(frozen=True, slots=True)
class FoundClaims:
    """Reply of find_claims: the server that was asked, the cursor of the next call (0: this was the last), and keys of claims."""

    run_id: str
    cursor: str
    keys: list[str]


def find_claims(keys: QueueKeys, cursor: str, budget: int, older_ms: int) -> Command[FoundClaims | None]:
    """Look at some keys of the server, or of the node of this queue, for claims of any queue that are older than that.

    Returns None if the user may not look at the names of all keys.
    """

    def read(reply: Reply) -> FoundClaims | None:
        if status_word(reply) == "denied":
            return None
        return FoundClaims(text(reply[1]), text(reply[2]), texts(reply[3:]))

    pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", keys.prefix) + ":{*:claim:*"
    return new_call("find_claims", keys.base, (cursor, budget, pattern, older_ms), read)


def adopt_claims(keys: QueueKeys, worker: str, known: Iterable[str], claims: Sequence[int]) -> Command[int]:
    """Give those claims that no worker holds to `worker`, which is no worker of the registry. Returns how many these are.

    `known`: all workers of the registry.
    """
    args: tuple[Argument, ...] = (worker, "\n".join(known), *claims)
    return new_call("adopt_claims", keys.base, args, lambda reply: int(reply[1]) if status_word(reply) == "ok" else 0)


def fail_worker(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Command[ReleasedClaims]:
    """Give a dead worker's claims back to the queue; call again while there is more."""
    return new_call("fail_worker", keys.base, (worker, limit), _read_released)
