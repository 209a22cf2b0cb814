"""`ChildJob`: a job that a workflow has started, and whose result it awaits. `gather` awaits several at once."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from hashlib import sha256
from typing import Any, Final, Generic, TypeVar, cast

from worqr.client.producer import Call
from worqr.errors import UsageError
from worqr.functions.definition import FunctionDefinition
from worqr.inside import current_run
from worqr.policy import ChildCancelled, ChildFailed
from worqr.records import RemoteError
from worqr.remote_error import packed_error
from worqr.validation import Seconds, check_text, seconds

R = TypeVar("R")

_AGAIN: Final = re.compile(r" ~\d+$")
MAX_NAME: Final = 150
"""The most bytes of the name of a job in its workflow."""


class ChildJob(Generic[R]):
    """A job that a workflow has started with ``function.run(...)``. Await it for its result; it needs no slot meanwhile.

    Raises:
        UsageError: Outside a workflow; or another task of the run makes the same call.
    """

    def __init__(self, definition: FunctionDefinition, call: Call[R], name: str = "") -> None:
        run = current_run.get(None)
        if run is None or run.flow is None:
            raise UsageError(
                f"{definition.name}.run() is for workflows: declare the caller with @mesh.workflow, or use "
                "`await fn.dispatch(...)` and `await job.result()`"
            )
        self._flow: Any = run.flow
        self._definition = definition
        lanes = definition.options.lanes
        self._flow.children.check_place(call, is_strict=lanes is not None and lanes.strict)
        key = _short(name or f"{definition.name} {call.task.decode('utf-8', 'replace')}")
        if not name and self._flow.must_hide(key):
            key = f"{definition.name[:120]} {sha256(call.task).hexdigest()[:32]}"
        key = self._flow.key(key, "give one of them a name, as in fn.named('...').run(...)")
        self.key: str = self._flow.children.name_of(key)
        self._flow.children.add(self.key, call, definition.require_client())

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        (end,) = await self._flow.children.wait([self.key])
        return self._value(end)

    def _value(self, end: Any) -> R:
        """Return the result of the job, or raise why it has none."""
        match end.outcome:
            case "finished":
                kind, _, value = end.value.partition(b" ")
                return cast("R", self._definition.codec.decode_result(kind.decode("ascii", "replace"), value))
            case "cancelled":
                reason = end.value.decode("utf-8", "replace")
                raise ChildCancelled(f"the job {self.key!r} was cancelled{': ' * bool(reason)}{reason}", reason)
            case "failed":
                error = packed_error(end.value)
                raise ChildFailed(f"the job {self.key!r} failed: {error.type}: {error.message}", error)
            case "large":
                size = end.value.decode("ascii", "replace")
                raise ChildFailed(
                    f"the job {self.key!r} has finished, and its result of {size} bytes is too large to come back to a workflow, "
                    "at most 64 KiB: store it elsewhere, and return its name",
                    RemoteError("ResultTooLarge", "", ""),
                )
            case _:
                raise ChildFailed(
                    f"the job {self.key!r} is lost: its queue knows nothing of it", RemoteError("Lost", "", "")
                )

    def __repr__(self) -> str:
        return f"<ChildJob {self.key!r}>"


async def gather(*jobs: ChildJob[R]) -> list[R]:
    """Wait in a workflow until jobs that it has started have all ended, and return their results, in the order of the arguments.

    The workflow holds no slot meanwhile, and runs again once, after the last of them.

    Args:
        *jobs: What ``function.run(...)`` has returned, each once.

    Raises:
        JobFailed: A job failed for good. Of several, the error is that of the first one in the order of the arguments.
        JobCancelled: A job was cancelled.
        UsageError: An argument is no such job; or outside a workflow.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow = _flow_of(jobs)
    if flow is None:
        return []
    ends: Sequence[Any] = await flow.children.wait([job.key for job in jobs])
    return [job._value(end) for job, end in zip(jobs, ends, strict=True)]  # pyright: ignore[reportPrivateUsage]


def gather_now(*jobs: ChildJob[R]) -> list[R]:
    """Wait for jobs in a workflow that is a plain function, in a thread or a process. See `gather`.

    Args:
        *jobs: What ``function.run(...)`` has returned, each once.

    Raises:
        JobFailed: A job failed for good.
        JobCancelled: A job was cancelled.
        UsageError: An event loop runs in this thread; or as `gather`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow = _flow_of(jobs)
    if flow is None:
        return []
    flow.run.check_may_wait("await worqr.gather(...)")
    ends: Sequence[Any] = flow.children.wait_now([job.key for job in jobs])
    return [job._value(end) for job, end in zip(jobs, ends, strict=True)]  # pyright: ignore[reportPrivateUsage]


async def first(*jobs: ChildJob[R], timeout: Seconds | None = None) -> tuple[int, R] | None:
    """Wait in a workflow until one of the jobs that it has started has ended; later runs get the same one.

    The others go on, and their ends are kept: await them later, or let them be. The workflow holds no slot meanwhile.

    Args:
        *jobs: What ``function.run(...)`` has returned, at least one, each once.
        timeout: Seconds, or a timedelta, from the first run that comes here. None: no limit.

    Returns:
        The place of the job among the arguments, and its result; None if the time is over.

    Raises:
        JobFailed: The job that ended first failed for good.
        JobCancelled: It was cancelled.
        UsageError: An argument is no such job, or there is none; or outside a workflow.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, ms = _first_of(jobs, timeout)
    return _won(jobs, await flow.children.first([job.key for job in jobs], ms))


def first_now(*jobs: ChildJob[R], timeout: Seconds | None = None) -> tuple[int, R] | None:
    """Wait for the first of several jobs in a workflow that is a plain function, in a thread or a process. See `first`.

    Args:
        *jobs: What ``function.run(...)`` has returned, at least one, each once.
        timeout: Seconds, or a timedelta. None: no limit.

    Returns:
        The place of the job among the arguments, and its result; None if the time is over.

    Raises:
        JobFailed: The job that ended first failed for good.
        JobCancelled: It was cancelled.
        UsageError: An event loop runs in this thread; or as `first`.
        LifetimeOver: The `lifetime` of the workflow is over.
    """
    flow, ms = _first_of(jobs, timeout)
    flow.run.check_may_wait("await worqr.first(...)")
    return _won(jobs, flow.children.first_now([job.key for job in jobs], ms))


def _first_of(jobs: Sequence[object], timeout: Seconds | None) -> tuple[Any, int | None]:
    flow = _flow_of(jobs, "first")
    if flow is None:
        raise UsageError("first() takes at least one job, as in first(pack.run(7), timeout=60)")
    return flow, None if timeout is None else round(seconds(timeout, "timeout of first") * 1000)


def _won(jobs: Sequence[ChildJob[R]], found: tuple[int, Any] | None) -> tuple[int, R] | None:
    return None if found is None else (found[0], jobs[found[0]]._value(found[1]))  # pyright: ignore[reportPrivateUsage]


def _flow_of(jobs: Sequence[object], what: str = "gather") -> Any:
    for job in jobs:
        if not isinstance(job, ChildJob):
            raise UsageError(
                f"{what}() takes jobs that this workflow has started, as in {what}(pack.run(7)), not {job!r}"
            )
    return cast("ChildJob[Any]", jobs[0])._flow if jobs else None  # pyright: ignore[reportPrivateUsage]


def check_child_name(name: object) -> str:
    """Return the name of a job in its workflow. Raises UsageError if it is not valid."""
    text = check_text(name, "the name of a job of a workflow")
    if not 0 < len(text.encode()) <= MAX_NAME:
        raise UsageError(f"the name of a job of a workflow must have 1 to {MAX_NAME} bytes, not {len(text.encode()):,}")
    if _AGAIN.search(text):
        raise UsageError(
            f"the name of a job of a workflow must not end in ' ~' and a number, which marks what runs again: {text!r}"
        )
    return text


def _short(key: str) -> str:
    if len(key.encode()) <= 190 and not any(ord(char) < 32 or ord(char) == 127 for char in key):
        return key
    return f"{key.partition(' ')[0][:120]} {sha256(key.encode()).hexdigest()[:32]}"
