"""`Lanes`: lines of jobs within one queue that take turns. Its checks, the lane of a call, and its wire form. Pure.

The server decides whose turn it is where tasks are claimed (``worqr/lua/_turns.lua``), and which lanes may start a task
(``_lanes.lua``). A lane is declared nowhere: it exists while it has a task.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec

from worqr.errors import UsageError
from worqr.limits import DECLARES_NOTHING, Limit, check_limits, limits_text
from worqr.validation import check_count, check_text

MAX_LANE: Final = 200
"""Bytes of UTF-8 in the name of a lane."""
MOST_NAMED: Final = 1000
"""Lanes that the weights, or the limits, may name."""
MOST_WEIGHT: Final = 1000
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _no_weights() -> Mapping[str, int]:
    return {}


def _no_limits() -> Mapping[str, Limit | Collection[Limit]]:
    return {}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lines of jobs within one queue that take turns: one for each customer, say. A lane with many tasks delays no other lane.

    A task of a lane is a job, also if it is enqueued. Tasks without a lane take turns with the lanes, as one lane of weight 1.

    Raises:
        UsageError: A name, a weight or a limit is not valid, or `strict` is given together with a limit on the concurrency.
    """

    by: str | Callable[..., str | None] | None = None
    """The lane of a call: the name of a parameter, whose value is the lane (a str, int, UUID or enum member); or a function of
    the call's arguments. None: only ``options(lane=...)`` puts a job into a lane. A call whose value is None has no lane.
    """
    limit: Limit | Collection[Limit] = field(default=(), kw_only=True)
    """What may start in each lane; at most four limits, and all of them hold."""
    weights: Mapping[str, int] = field(default_factory=_no_weights, kw_only=True)
    """For lanes by name: how many tasks start for each task of a lane of weight 1; 1 to 1,000, at most 1,000 names."""
    limits: Mapping[str, Limit | Collection[Limit]] = field(default_factory=_no_limits, kw_only=True)
    """For lanes by name: what may start there, instead of `limit`; at most 1,000 names."""
    strict: bool = field(default=False, kw_only=True)
    """Within a lane, a task starts only when the one before it has ended for good, after all its retries."""
    max_length: int | None = field(default=None, kw_only=True)
    """An enqueue or dispatch raises `QueueFull` if this many tasks wait in its lane, at least 1. None: no limit."""

    def __post_init__(self) -> None:
        if self.by is not None and not isinstance(self.by, str) and not callable(self.by):
            raise UsageError(f"by of Lanes must be the name of a parameter, or a function, not {self.by!r}")
        limit = check_limits(self.limit, "limit of Lanes")
        if not isinstance(self.strict, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"strict of Lanes must be True or False, not {self.strict!r}")
        if self.strict and any(each.concurrency is not None for each in limit):
            raise UsageError("strict lanes run one task at a time: leave the concurrency out of their limit")
        if self.max_length is not None:
            check_count(self.max_length, "max_length of Lanes")
        for name, weight in _named(self.weights, "weights").items():
            check_weight(weight, f"the weight of lane {name!r}")
        for name, limits in _named(self.limits, "limits").items():
            check_limits(limits, f"the limit of lane {name!r}")


def _named(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} of Lanes must be a dict by the names of lanes, not {value!r}")
    named = cast("Mapping[object, Any]", value)
    if len(named) > MOST_NAMED:
        raise UsageError(f"{what} of Lanes may name {MOST_NAMED:,} lanes, not {len(named):,}")
    return {check_lane(name): each for name, each in named.items()}


def check_weight(value: object, what: str) -> int:
    """Return `value` if it is a whole number of 1 to 1,000. Raises UsageError, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WEIGHT:
        raise UsageError(f"{what} must be a whole number of 1 to {MOST_WEIGHT:,}, not {value!r}")
    return value


def check_lane(value: object, what: str = "a lane") -> str:
    """Return `value` if it can be the name of a lane: 1 to 200 bytes of UTF-8 without control characters.

    Raises:
        UsageError: it is something else. The error names `what`.
    """
    text = check_text(value, what)
    size = len(text.encode())
    if not 1 <= size <= MAX_LANE:
        raise UsageError(f"{what} must have 1 to {MAX_LANE} bytes of UTF-8, this one has {size}: {text[:60]!r}")
    if _CONTROL.search(text):
        raise UsageError(f"{what} must have no control characters: {text!r}")
    return text


def lane_name(value: object, what: str) -> str | None:
    """Return the name of the lane for a value: a str, int, UUID or enum member; None for None.

    Raises:
        UsageError: it is something else, or no valid name. The error names `what`.
    """
    if isinstance(value, enum.Enum):
        value = cast("object", value.value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | uuid.UUID):
        raise UsageError(
            f"{what} must be a str, an int, a UUID or an enum member, not {value!r}: give Lanes(by=...) a function"
        )
    return check_lane(str(value), what)


def wire_rules(lanes: Lanes | None, queue: str) -> bytes:
    """Return what a worker declares of the lanes of a queue, as the server takes it; empty for nothing.

    A lane is in one shard of a queue, so that each shard has the same rules.
    """
    if lanes is None:
        return b""
    rules: dict[str, object] = {}
    limit = limits_text(check_limits(lanes.limit, "limit of Lanes"), queue)
    if limit:
        rules["limit"] = limit
    if lanes.strict:
        rules["strict"] = True
    if lanes.weights:
        rules["weights"] = dict(sorted(lanes.weights.items()))
    if lanes.limits:
        named = {name: check_limits(each, "limits of Lanes") for name, each in sorted(lanes.limits.items())}
        rules["limits"] = {name: limits_text(each, queue) for name, each in named.items()}
    return msgspec.msgpack.encode(rules) if rules else b""


NO_RULES: Final = DECLARES_NOTHING.encode()
"""Instead of what a worker declares of lanes: the rules stay as they are."""
