"""The options of a dispatch, and of an enqueue of raw tasks: their checks and their encoding. Pure; nothing is sent before."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, Protocol, TypedDict, cast

import msgspec

from worqr.errors import UsageError, did_you_mean
from worqr.foreign import hint_at_option
from worqr.limits import check_lane
from worqr.policy import POLICY_FIELDS, RetryPolicy, retry_fields
from worqr.validation import Seconds, check_between, check_count, check_text, seconds, to_ms

MAX_ID: Final = 200
"""Bytes of UTF-8 in a job's id."""
MAX_META: Final = 4096
"""Bytes of a job's meta, as JSON."""
RAW_OPTIONS: Final = frozenset({"max_length", "wait", "replicas"})
"""The options that a raw task can have; every other option makes it a job."""
FOLLOW_UPS: Final = "follow_ups"
"""The encoded option with the calls `then` and `otherwise`, until the job is sent."""
LANE_OPTIONS: Final = frozenset({"lane", "max_lane_length"})
"""The encoded options by which a function puts each of its calls into a lane."""
DECLARED_OPTIONS: Final = frozenset({"lane", "done", "tags"})
"""The encoded options that a function may give to each of its calls, and which make a job of it."""
SCHEDULE_OPTIONS: Final = frozenset({"lane", "meta", "fields", "done", "tags"})
"""The encoded options of a call that each job of its schedule has, besides those of a workflow."""
MAX_REPLICAS: Final = 100
"""The most replicas that a call may wait for. More are a mistake: no server has so many."""
_EXAMPLES: Final = {
    "retry": ": write retry=worqr.RetryPolicy(max_failures=3)",
    "update": ": write update=worqr.Update(data=False)",
    "keep": ": write keep=worqr.Keep(jobs=10_000, days=7)",
}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a dispatch changes in the job with its id that waits, is scheduled or is blocked.

    If several dispatches change a blocked job, it is as if they came one after the other.

    Raises:
        UsageError: A value is not valid.
    """

    data: bool = True
    """True: replace the payload and `meta`."""
    run_at: bool | Literal["if_later", "if_earlier"] = True
    """True: replace its time and `expires`. False: keep the old time. "if_later": the later of both; "if_earlier": the earlier.
    """
    counts: bool | None = None
    """True: set failures, stalls and timeouts to zero. None: only if `data` is True."""
    policy: bool | Collection[str] = False
    """Which of the given retry settings, `timeout` and `result_ttl` replace the job's own: all, none, or those named. Settings
    that the job does not have are added in any case.
    """
    at_most: Seconds | None = None
    """Seconds, more than 0: no update moves the job to a time later than this after the first dispatch that has an `at_most`,
    usually the one that created the job. None: no limit.
    """

    def __post_init__(self) -> None:
        name: str
        value: object
        allowed: tuple[object, ...]
        for name, value, allowed in (
            ("data", self.data, (True, False)),
            ("run_at", self.run_at, (True, False, "if_later", "if_earlier")),
            ("counts", self.counts, (True, False, None)),
        ):
            if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
                raise UsageError(f"Update({name}=...) must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        if self.at_most is not None:
            seconds(self.at_most, "Update(at_most=...)", positive=True)
            if self.run_at is False or self.run_at == "if_earlier":
                raise UsageError(
                    'Update(at_most=...) limits a later time: use it with run_at=True or run_at="if_later"'
                )
        if not isinstance(self.policy, bool):
            names = cast("object", self.policy)
            if isinstance(names, str) or not isinstance(names, Collection):
                raise UsageError(f"Update(policy=...) must be True, False or a collection of names, not {names!r}")
            for each in cast("Collection[object]", names):
                if not isinstance(each, str) or each not in POLICY_FIELDS:
                    raise UsageError(f"Update(policy=...) knows {', '.join(sorted(POLICY_FIELDS))}; not {each!r}")


def encode_update(update: Update) -> dict[str, object]:
    """Return the flags that differ from the default, as the script takes them."""
    wire: dict[str, object] = {}
    if not update.data:
        wire["data"] = False
    if update.run_at is not True:
        wire["when"] = {False: "keep", "if_later": "later", "if_earlier": "earlier"}[update.run_at]
    if update.counts is not None:
        wire["counts"] = update.counts
    if update.policy is True:
        wire["policy"] = " ".join(sorted(POLICY_FIELDS))
    elif update.policy:
        wire["policy"] = " ".join(sorted(update.policy))
    if update.at_most is not None:
        wire["at_most"] = _milliseconds(update.at_most, "Update(at_most=...)", positive=True)
    return wire


MAX_TAGS: Final = 8
"""Tags of one job."""
MAX_TAG: Final = 100
"""Bytes of UTF-8 in a tag."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays of jobs after their end, for ``@mesh.task(keep=...)`` and for one dispatch.

    The bounds hold for each queue, and for each shard of it. The oldest jobs go first. A job that takes more than a tenth of
    `bytes` is kept without its payload, its result and its traceback.

    Raises:
        UsageError: A bound is not valid.
    """

    jobs: int = 10_000
    """The number of jobs, 0 to 1,000,000. With 0, nothing is kept, also of the runs of a schedule."""
    days: float = 7
    """The days for which a job is kept, more than 0, at most 3,650."""
    bytes: int = 64 << 20
    """The memory of all of them, at least 10,000. A job counts at least what the server takes for it."""

    def __post_init__(self) -> None:
        check_between(self.jobs, "Keep(jobs=...)", 0, 1_000_000)
        check_between(self.bytes, "Keep(bytes=...)", 10_000, 1 << 40)
        if seconds(self.days, "Keep(days=...)", positive=True) > 3650:
            raise UsageError(f"Keep(days=...) must be at most 3650, not {self.days!r}")


def encode_keep(keep: Keep) -> str:
    """Return the bounds as a record has them: jobs, milliseconds and bytes."""
    return f"{keep.jobs} {max(1, round(keep.days * 86_400_000))} {keep.bytes}"


def check_tag(tag: object) -> str:
    """Return `tag` if it is valid. Raises UsageError."""
    name = check_text(tag, "a tag")
    if not 1 <= len(name.encode()) <= MAX_TAG or _CONTROL.search(name):
        raise UsageError(
            f"a tag must have 1 to {MAX_TAG} bytes of UTF-8 without control characters, not {name[:120]!r}"
        )
    return name


def encode_tags(tags: object, what: str = "tags") -> str:
    """Return a collection of tags as a record has it: sorted, with line breaks between them.

    Raises:
        UsageError: it is no collection of valid tags, or they are more than MAX_TAGS.
    """
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise UsageError(f"{what} must be a collection of texts, as in {{'customer:acme'}}, not {tags!r}"[:300])
    names = {check_tag(each) for each in islice(cast("Iterable[object]", tags), MAX_TAGS + 1)}
    if len(names) > MAX_TAGS:
        raise UsageError(f"{what} has more than {MAX_TAGS} tags: {', '.join(map(repr, sorted(names)))}, ...")
    return "\n".join(sorted(names))


class NoSuchOption:
    """The type of an option that does not exist. With it, a type checker reports a misspelt option of an overloaded method."""


class FollowUp(Protocol):
    """A `Call`, which is enqueued later."""

    @property
    def queue(self) -> str:
        """The name of the queue that it goes to."""
        ...

    @property
    def task(self) -> bytes:
        """The payload."""
        ...


class JobOptions(TypedDict, total=False):
    """The options of a dispatch, for ``queue.dispatch`` and ``function.options``."""

    id: str
    """1 to 200 bytes of UTF-8 without control characters, not beginning with ``@``. Default: a new id, which sorts by time and
    ends with 22 random letters and digits.
    """
    delay: Seconds
    """Seconds, at least 0, from now before which the job does not run; not together with `run_at`. Default: 0."""
    run_at: datetime
    """A timezone-aware datetime before which the job does not run; not together with `delay`. Default: now."""
    result_ttl: Seconds
    """Seconds, at least 0, to keep its result, failure or cancellation. Default: the handler's."""
    timeout: Seconds
    """Seconds, more than 0, that a run may take. Default: the handler's."""
    retry: RetryPolicy
    """How often and when to retry; what is set overrides the handler's. Default: the handler's."""
    update: Update
    """What to change in a job that has this id already, see `if_exists`. Default: ``Update()``, the payload and the time, not
    the retry settings.
    """
    replicas: int
    """The number of replicas, 0 to 100, that must have the job before the dispatch returns; else `NotReplicated`. Default: the
    mesh's.
    """
    expires: Seconds | datetime
    """A timezone-aware datetime, or seconds from the time at which it may run: give the job up if it has not started by then. A
    job that has started once does not expire. Default: never.
    """
    if_exists: Literal["update", "skip", "raise", "cancel"]
    """What to do if a job with this id waits or runs. "update": change the waiting job as `update` says; if it runs, block the
    new one until the run has ended. "cancel": the same, and cancel the run. "skip": nothing. "raise": raise `Duplicate`.
    Default: "update".
    """
    unique_for: Seconds
    """Seconds, more than 0, from now for which the id stays taken, also after the end of the job. A cancel frees it. Default:
    while the job waits or runs.
    """
    meta: Mapping[str, str]
    """Names and texts that travel with the job (trace, tenant), at most 4 KiB as JSON. Default: none."""
    max_length: int
    """Raise `QueueFull` for a new job if this many tasks wait, are scheduled or are blocked, at least 1. Default: the
    function's, or no limit.
    """
    wait: Seconds
    """Seconds, at least 0, to wait for room if the queue or the lane is at its `max_length`; then `QueueFull`. ``math.inf``: no
    limit. Default: 0, raise at once.
    """
    front: bool
    """True: take it before all that wait, if it may run at once; in a lane, before all that wait there. Default: False, at the
    end.
    """
    lane: str
    """The lane of the queue that the job waits in, 1 to 200 bytes of UTF-8 without control characters; lanes take turns. An
    update does not move it. Default: that of the function's ``Lanes(by=...)``, or none.
    """
    then: FollowUp
    """A call that is enqueued when the job has finished: ``then=other.call(...)``. Its run reads ``worqr.current().ended_job``.
    Default: none.
    """
    otherwise: FollowUp
    """A call that is enqueued instead when the job has failed for good, has expired or was cancelled. Default: none."""
    keep: Keep
    """What stays of the job after its end, see `Keep`. Default: the function's, or nothing."""
    tags: Collection[str]
    """Up to 8 names by which the job is found, 1 to 100 bytes of UTF-8 each, in addition to the function's. All who may list jobs
    see them. An update with a payload replaces them. Default: those of the function, or none.
    """
    keep_task: bool
    """True: keep the payload, the `meta` and the last tries together with the result, for ``queue.read()``. Default: False."""


def check_id(id: object, *, generated: bool = False) -> str:
    """Return `id` if it is a valid job id. With `generated`, it may also be one that worqr has generated.

    Raises:
        UsageError: it is not a str, is empty or longer than 200 bytes of UTF-8, has a control character, or begins with ``@``.
    """
    text = check_text(id, "a job's id")
    size = len(text.encode())
    if not 1 <= size <= MAX_ID:
        raise UsageError(f"a job's id must have 1 to {MAX_ID} bytes of UTF-8, this one has {size}: {text[:60]!r}")
    if _CONTROL.search(text):
        raise UsageError(f"a job's id must have no control characters: {text!r}")
    if text.startswith("@") and not generated:
        raise UsageError(f"a job's id must not begin with '@', as generated ones do: {text!r}")
    return text


def check_replicas(value: object) -> int:
    """Return `value` if it is a valid number of replicas.

    Raises:
        UsageError: it is not a whole number from 0 to 100.
    """
    return check_between(value, "replicas", 0, MAX_REPLICAS)


def check_wait(value: object) -> float:
    """Return the seconds that a producer waits for room, which may be infinite. Raises UsageError."""
    if type(value) is int and not value:
        return 0.0  # as most calls have it
    return math.inf if value == math.inf else seconds(value, "wait")


def check_bounded(options: Mapping[str, object], where: str) -> None:
    """Raise UsageError if the encoded options of a job have a `wait`, and no bound to wait at."""
    if options.get("wait") and "max_length" not in options:
        raise UsageError(
            f"{where} has wait= without max_length=, so it is never full: write max_length=1000, wait=30, or leave wait out"
        )


def _meta(value: object) -> str:
    if not isinstance(value, Mapping):
        raise UsageError(f"meta must be a mapping of str to str, not {type(value).__name__}")
    meta = {
        check_text(name, "a name in meta"): check_text(text, "a text in meta")
        for name, text in cast("Mapping[object, object]", value).items()
    }
    encoded = msgspec.json.encode(meta)
    if len(encoded) > MAX_META:
        raise UsageError(f"meta must have at most {MAX_META:,} bytes as JSON, this one has {len(encoded):,}")
    return encoded.decode()


def _milliseconds(value: object, what: str, *, positive: bool = False) -> int:
    return max(round(seconds(value, what, positive=positive) * 1000), int(positive))


def check_choice(value: object, what: str, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`. Raises UsageError, which names `what`."""
    if value not in allowed:
        raise UsageError(f"{what} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return str(value)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} must be True or False, not {value!r}")
    return value


def _instance(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{what} must be a worqr.{kind.__name__}, not {value!r}{_EXAMPLES.get(what, '')}")
    return value


def encode_options(options: Mapping[str, Any]) -> dict[str, object]:
    """Return checked `JobOptions` in the form that ``dispatch_jobs`` takes.

    Raises:
        UsageError: an option does not exist, or its value is not valid.
    """
    wire: dict[str, object] = {}
    fields: dict[str, str] = {}
    for name, value in options.items():
        if name in _FIELDS:
            fields |= _FIELDS[name](value)
        elif name in _WIRE:
            wire |= _WIRE[name](value)
        else:
            _refuse(name)
    if follow_ups := {name: options[name] for name in ("then", "otherwise") if name in options}:
        wire[FOLLOW_UPS] = follow_ups
    if fields:
        wire["fields"] = fields
    if "delay" in options and "run_at" in options:
        raise UsageError("a dispatch takes a delay or a run_at, not both")
    if "unique_for" in options and "id" not in options:
        raise UsageError("unique_for needs an id: it is the id that stays taken")
    return wire


def schedule_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the encoded options of a call that the jobs of its schedule have.

    Raises:
        UsageError: the call has another option.
    """
    workflow = {"workflow", "lifetime"}
    for option in options.keys() - SCHEDULE_OPTIONS - workflow - LANE_OPTIONS - RAW_OPTIONS:
        raise UsageError(
            "a schedule keeps the lane, meta, tags, keep, timeout, retry and result_ttl of its call; "
            f"{option!r} would be without effect"
        )
    return {name: options[name] for name in sorted((SCHEDULE_OPTIONS | workflow) & options.keys())}


def without_replicas(options: Mapping[str, object], default: int) -> tuple[Mapping[str, object], int]:
    """Split the encoded options of a job into those for the script and the number of replicas that must have it."""
    if "replicas" not in options and "wait" not in options:
        return options, default
    for_script = {name: value for name, value in options.items() if name not in {"replicas", "wait"}}
    return for_script, cast("int", options.get("replicas", default))


def wait_in(options: Mapping[str, object]) -> float:
    """Return the seconds for which the call with these encoded options waits for room."""
    return cast("float", options.get("wait", 0.0))


def _follow_up(value: object, what: str) -> dict[str, object]:
    """Check that a value is a call. The producer encodes all follow-ups of a job together."""
    if not hasattr(type(value), "_target"):
        raise UsageError(f"{what} must be a call: write {what}=function.call(...), not {value!r}")
    return {}


def _expires(value: object) -> dict[str, object]:
    if isinstance(value, datetime):
        return {"expires_at": str(to_ms(value, "expires"))}
    return {"expires": str(_milliseconds(value, "expires"))}


_FIELDS: Final[dict[str, Callable[[Any], dict[str, str]]]] = {
    "result_ttl": lambda value: {"result_ttl": str(_milliseconds(value, "result_ttl"))},
    "timeout": lambda value: {"timeout": str(_milliseconds(value, "timeout", positive=True))},
    "retry": lambda value: retry_fields(_instance(value, RetryPolicy, "retry")),
}
"""Options that become fields of the record."""

_WIRE: Final[dict[str, Callable[[Any], dict[str, object]]]] = {
    "id": lambda value: {"id": check_id(value)},
    "delay": lambda value: {"delay": _milliseconds(value, "delay")},
    "run_at": lambda value: {"run_at": to_ms(value, "run_at")},
    "update": lambda value: encode_update(_instance(value, Update, "update")),
    "expires": _expires,
    "if_exists": lambda value: {"exists": check_choice(value, "if_exists", ("update", "skip", "raise", "cancel"))},
    "unique_for": lambda value: {"unique_for": _milliseconds(value, "unique_for", positive=True)},
    "meta": lambda value: {"meta": _meta(value)},
    "max_length": lambda value: {"max_length": check_count(value, "max_length")},
    "wait": lambda value: {"wait": check_wait(value)},
    "front": lambda value: {"front": _flag(value, "front")},
    "lane": lambda value: {"lane": check_lane(value)},
    "then": lambda value: _follow_up(value, "then"),
    "otherwise": lambda value: _follow_up(value, "otherwise"),
    "keep": lambda value: {"done": encode_keep(_instance(value, Keep, "keep"))},
    "tags": lambda value: {"tags": tags} if (tags := encode_tags(value)) else {},
    "keep_task": lambda value: {"keep": _flag(value, "keep_task")},
    "replicas": lambda value: {"replicas": check_replicas(value)},
}
"""Options that become arguments of the script."""


def _refuse(name: str) -> None:
    known = sorted(JobOptions.__annotations__)
    hint = hint_at_option(name, known, f"it takes {', '.join(known)}")
    raise UsageError(f"dispatch() has no option {name!r}; {hint}")


class EnqueueOptions(TypedDict, total=False):
    """The options of an enqueue of raw tasks, for ``queue.enqueue``. A job takes more: see `JobOptions`."""

    unique: bool
    """True: dispatch the tasks as jobs whose ids are hashes of the payloads. While such a job waits or runs, another one is
    refused. All tasks are stored or none; with several shards, enqueue one at a time. Default: False.
    """
    front: bool
    """True: put the tasks before all that wait. Default: False, at the end."""
    max_length: int | None
    """Raise `QueueFull` if more than this many tasks would wait, scheduled ones included. Each of several shards has its share
    of the limit. Default: None, no limit.
    """
    wait: Seconds
    """Seconds, at least 0, to wait for room instead of raising `QueueFull` at once; ``math.inf``: no limit. The first producer to
    wait is not always the first to get room. Default: 0.
    """
    replicas: int | None
    """Wait until this many replicas have the tasks, 0 to 100. Default: None, the mesh's `replicas`."""


class RawOptions(NamedTuple):
    """Checked `EnqueueOptions`. A `replicas` of None stands for the mesh's."""

    unique: bool = False
    front: bool = False
    max_length: int | None = None
    wait: float = 0.0
    replicas: int | None = None


PLAIN: Final = RawOptions()
"""What an enqueue without options has."""


def checked_raw_options(options: EnqueueOptions) -> RawOptions:
    """Return the options of an enqueue with their defaults.

    Raises:
        UsageError: an option does not exist, or its value is not valid; or it has a `wait`, and no `max_length`.
    """
    known = tuple(EnqueueOptions.__annotations__)
    for name in options:
        if name not in known:
            job = f"a job takes more, as in queue.dispatch(task, {name}=...)"
            raise UsageError(f"enqueue() has no option {name!r}; {did_you_mean(name, known, job)}")
    values: dict[str, Any] = {**options}
    if values.get("max_length") is not None:
        check_count(values["max_length"], "max_length")
    if "wait" in values:
        values["wait"] = check_wait(values["wait"])
        if values.get("max_length") is None:
            check_bounded({"wait": values["wait"]}, "an enqueue")
    if values.get("replicas") is not None:
        check_replicas(values["replicas"])
    return RawOptions(**values)
