"""`Limit`: what may start of a queue in the whole mesh. Its checks, its parts for the shards of a queue, and its text. Pure.

The server enforces limits where tasks are claimed (``worqr/lua/limits.lua``), so a task that may not start is never claimed. The
text of several limits is the concurrency, or ``-`` for none, then each rate as starts/period in ms: ``10 100/60000 5/1000``.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, cast

import msgspec

from worqr.errors import UsageError
from worqr.foreign import LIMIT, explained_class
from worqr.keys import check_name
from worqr.validation import Seconds, check_between, check_count, check_text, seconds

MOST: Final = 1_000_000
"""The largest concurrency and the largest rate."""
MOST_LIMITS: Final = 4
"""Limits that a queue may have at once."""
SHORTEST: Final = 0.01
LONGEST: Final = 31 * 86400.0
"""Seconds: the bounds of `per`."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNIT: Final = r"(\w[\w .-]{0,39})?"
_RATE: Final = re.compile(r"(\d{1,6})\s*(?:/\s*([smhd])[a-z]*)?")
HELD_BACK: Final = {
    "": "",
    "paused": "paused",
    "concurrency": "limit reached",
    "rate": "rate reached",
    "lanes": "all lanes held",
}
"""The values of ``QueueInfo.held_back`` in words."""
DECLARES_NOTHING: Final = "*"
"""Instead of the text of limits: those of the queue stay as they are."""


@explained_class(LIMIT)
@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a queue may start in the whole mesh. A task that may not start yet waits in its place; nothing is dropped.

    A rate holds in *any* period of that length, by the server's clock. A task that is retried or given back starts again.

    The concurrency and the rate are 1 to 1,000,000. `per` is 0.01 s to 31 days, 1 s if it is not given.

    Raises:
        UsageError: Neither a concurrency nor a rate is given, `per` is given without a rate, a number is out of its bounds, or
            the name is not valid.
    """

    concurrency: int | None = None
    """The number of tasks that may run at once; None: any number."""
    rate: int | None = field(default=None, kw_only=True)
    """The number of tasks that may start in any period of `per` seconds; None: any number."""
    per: Seconds | None = field(default=None, kw_only=True)
    """The period in seconds; None without a rate."""
    name: str | None = field(default=None, kw_only=True)
    """The name under which code of several functions and programs shares the limit, by ``mesh.limit``; None: it is the limit of
    one function.
    """
    unit: str = field(default="", kw_only=True)
    """What the rate counts, such as ``tokens``, for lists and errors. Only for a limit with a name and a rate. Empty: calls."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "name of a Limit")
        if self.concurrency is None and self.rate is None:
            raise UsageError("a Limit needs a concurrency or a rate: write Limit(10), or Limit(rate=100, per=60)")
        _check_number(self.concurrency, "concurrency")
        _check_number(self.rate, "rate", self.per)
        self._check_unit()
        if self.rate is None:
            if self.per is not None:
                raise UsageError("a Limit has per only with a rate: write Limit(rate=100, per=60)")
            return
        per = seconds(1 if self.per is None else self.per, "per of a Limit")
        if not SHORTEST <= per <= LONGEST:
            raise UsageError(f"per of a Limit must be 0.01 s to 31 days, not {per:g} s")
        object.__setattr__(self, "per", per)

    def _check_unit(self) -> None:
        if not isinstance(self.unit, str) or not re.fullmatch(_UNIT, self.unit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"unit of a Limit must be a word like 'tokens', up to 40 characters, not {self.unit!r}")
        if self.unit and (self.name is None or self.rate is None):
            raise UsageError(
                f"a Limit has a unit only with a rate and a name: write Limit(rate=100_000, per=60, unit={self.unit!r}, "
                f"name='...')"
            )

    def __str__(self) -> str:
        running = None if self.concurrency is None else f"{self.concurrency:,} at once"
        unit = f" {self.unit}" if self.unit else ""
        rate = None if self.rate is None else f"{self.rate:,}{unit} per {_duration(cast('float', self.per))}"
        return ", ".join(filter(None, (running, rate)))


def _check_number(value: object, what: str, per: object = None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST):
        hint = f": write Limit({meant})" if (meant := _meant(value, what, per)) else ""
        raise UsageError(f"{what} of a Limit must be a whole number from 1 to {MOST:,}, not {value!r}{hint}")


def _meant(value: object, what: str, per: object) -> str:
    """Return the arguments that say a number such as "10", "10/m" or 0.5; empty if it is none."""
    if isinstance(value, str) and (found := _RATE.fullmatch(value.strip())):
        number = int(found[1])
        if found[2]:
            return f"rate={number}, per={_UNITS[found[2]]}"
        return str(number) if what == "concurrency" else f"rate={number}"
    if isinstance(value, float) and 0 < value < MOST and isinstance(per, int | float | None):
        whole = Fraction(value).limit_denominator(1000)
        if whole > 0 and (whole.denominator > 1 or per is not None):
            return f"rate={whole.numerator}, per={whole.denominator * (1 if per is None else per):g}"
    return ""


def _duration(per: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if per == size:
            return unit
    return f"{per:g} s"


def describe_limits(limits: Iterable[Limit]) -> str:
    """Return limits in words."""
    return ", ".join(map(str, limits)) or "no limit"


@dataclass(frozen=True, slots=True)
class LimitInfo:
    """A limit with a name, and how much of it is in use."""

    name: str
    """Its name."""
    concurrency: int | None
    """How many permits may be held at once; None: any number."""
    held: int
    """How many are held."""
    rate: int | None
    """How much may be started in any period of `per` seconds; None: any number."""
    per: float | None
    """The period in seconds; None without a rate."""
    unit: str
    """What the rate counts; empty: calls."""
    used: int | None
    """What was started in the last period; None without a rate."""
    waiting: int
    """Blocks, and functions of workers, that wait for a permit."""
    expired: int
    """Permits, not counted in `held`, of programs that died while they held them. The next caller frees them."""

    @property
    def bound(self) -> str:
        """The numbers of the limit in words: ``20 at once, 100,000 tokens per minute``."""
        unit = f" {self.unit}" if self.unit else ""
        return ", ".join(
            ([] if self.concurrency is None else [f"{self.concurrency:,} at once"])
            + ([] if self.rate is None else [f"{self.rate:,}{unit} per {_duration(self.per or 1.0)}"])
        )


def check_limits(value: object, where: str, *, named: bool = False) -> tuple[Limit, ...]:
    """Return one limit, or a collection of them, as a tuple. `named`: limits with a name are possible there.

    Raises:
        UsageError: it is something else, or there are too many, or two have one name, or one has a name where none is possible.
    """
    limits = (value,) if isinstance(value, Limit) else value
    if not isinstance(limits, Collection) or not all(
        isinstance(each, Limit) for each in cast("Collection[object]", limits)
    ):
        raise UsageError(f"{where} must be a worqr.Limit or a list of them, not {value!r}: write worqr.Limit(10)")
    found = tuple(cast("Collection[Limit]", limits))
    if len(found) > MOST_LIMITS:
        raise UsageError(f"{where}: a queue may have {MOST_LIMITS} limits, not {len(found)}")
    names = [each.name for each in found if each.name is not None]
    if len(set(names)) < len(names):
        raise UsageError(f"{where}: two limits have one name: write Limit(20, rate=100, per=60, name={names[0]!r})")
    if names and not named:
        raise UsageError(
            f"{where}: the limit {names[0]!r} has a name, so that several functions share it: leave the name out here, and write "
            f"@mesh.task(limit=...), or `async with mesh.limit(...)` in the functions"
        )
    return found


def limits_text(limits: Iterable[Limit], queue: str, shards: int = 1, shard: int = 0) -> str:
    """Return the text of the part of one shard; empty if there are no limits.

    Raises:
        UsageError: a limit is smaller than the number of shards.
    """
    concurrency: int | None = None
    rates: dict[int, int] = {}
    for each in limits:
        if each.concurrency is not None:
            part = _part(each.concurrency, queue, shards, shard)
            concurrency = part if concurrency is None else min(concurrency, part)
        if each.rate is not None:
            ms = round(cast("float", each.per) * 1000)
            rates[ms] = min(_part(each.rate, queue, shards, shard), rates.get(ms, MOST))
    if concurrency is None and not rates:
        return ""
    return " ".join(["-" if concurrency is None else str(concurrency), *(f"{n}/{ms}" for ms, n in rates.items())])


def _part(number: int, queue: str, shards: int, shard: int) -> int:
    """Return the part of a number that one shard has. The parts differ by one at most, and add up to the number."""
    if number < shards:
        raise UsageError(
            f"a limit of {number} cannot be divided among the {shards} shards of queue {queue!r}: use fewer shards, or a limit "
            f"of at least {shards}"
        )
    return number // shards + (shard < number % shards)


def parse_limits(text: str | None) -> tuple[Limit, ...]:
    """Return the limits of a text; none for None, and for what is no such text."""
    words = (text or "").split()
    found: list[Limit] = []
    try:
        for word in words:
            rate, slash, ms = word.partition("/")
            if slash:
                found.append(Limit(rate=int(rate), per=int(ms) / 1000))
            elif word != "-":
                found.append(Limit(int(word)))
    except (ValueError, UsageError):
        return ()
    return tuple(found)


def add_limits(shards: Iterable[tuple[Limit, ...]]) -> tuple[Limit, ...]:
    """Return the limits of a queue from those of its shards."""
    concurrency = 0
    rates: dict[float, int] = {}
    for limits in shards:
        for each in limits:
            concurrency += each.concurrency or 0
            if each.rate is not None:
                per = cast("float", each.per)
                rates[per] = rates.get(per, 0) + each.rate
    running = [Limit(concurrency)] if concurrency else []
    return (*running, *(Limit(rate=number, per=per) for per, number in rates.items()))


# `Lanes`: lines of jobs within one queue that take turns. Its checks, the lane of a call, and its wire form. Pure.
#
# The server decides whose turn it is where tasks are claimed (``worqr/lua/lanes.lua``), and which lanes may start a task.
# A lane is declared nowhere: it exists while it has a task.


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
        limits = [*check_limits(self.limit, "limit of Lanes")]
        if not isinstance(self.strict, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"strict of Lanes must be True or False, not {self.strict!r}")
        if self.max_length is not None:
            check_count(self.max_length, "max_length of Lanes")
        for name, weight in _named(self.weights, "weights").items():
            check_weight(weight, f"the weight of lane {name!r}")
        for name, limit in _named(self.limits, "limits").items():
            limits += check_limits(limit, f"the limit of lane {name!r}")
        if self.strict and any(each.concurrency is not None for each in limits):
            raise UsageError("strict lanes run one task at a time: leave the concurrency out of their limits")


def _named(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} of Lanes must be a dict by the names of lanes, not {value!r}")
    named = cast("Mapping[object, Any]", value)
    if len(named) > MOST_NAMED:
        raise UsageError(f"{what} of Lanes may name {MOST_NAMED:,} lanes, not {len(named):,}")
    return {check_lane(name): each for name, each in named.items()}


def check_weight(value: object, what: str) -> int:
    """Return `value` if it is a whole number from 1 to 1,000. Raises UsageError, which names `what`."""
    return check_between(value, what, 1, MOST_WEIGHT)


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
