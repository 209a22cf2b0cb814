"""The options of the `enqueue` of a raw queue: `EnqueueOptions`, and their checks. Pure; nothing is sent before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypedDict

from worqr.errors import UsageError, did_you_mean
from worqr.job_options import check_bounded, check_replicas, check_wait
from worqr.validation import Seconds, check_count


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
_KNOWN: Final = tuple(EnqueueOptions.__annotations__)


def check_names(options: Iterable[str]) -> None:
    """Raise UsageError for an option that an enqueue does not have. The error names `dispatch`, which takes more."""
    for name in options:
        if name not in _KNOWN:
            job = f"a job takes more, as in queue.dispatch(task, {name}=...)"
            raise UsageError(f"enqueue() has no option {name!r}; {did_you_mean(name, _KNOWN, job)}")


def checked_options(options: EnqueueOptions) -> RawOptions:
    """Return the options of an enqueue with their defaults.

    Raises:
        UsageError: an option does not exist, or its value is not valid; or it has a `wait`, and no `max_length`.
    """
    check_names(options)
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
