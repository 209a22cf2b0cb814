"""Calling a handler directly: a `Context` without a run, for handlers that call ``worqr.current()``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import trio

from worqr.batches import BatchInfo, BatchRef, EndedJob, with_result
from worqr.codecs import StoredValues
from worqr.job_options import check_id, encode_options
from worqr.ops import Child, NotedChild, NotedChildren
from worqr.peer.context import Context, ListContext, current_context
from worqr.peer.list_run import ListItem, ListRun
from worqr.peer.run import PolicyFields, Run, Save, check_saved, check_step, current_run, encode_step
from worqr.policy import Policy
from worqr.validation import check_count, check_task

_MOST: Final = 16 * 1024 * 1024


class _NoConsumer:
    """The `RunHost` of a handler that a test calls directly."""

    def __init__(self, state: object, queue: str) -> None:
        self.queue = queue
        self.base = ""
        self.id_suffix = ""
        self.policy = Policy()
        self.values: StoredValues | None = None
        self.hides_arguments = False
        self.state = state
        self.reported: list[tuple[float | None, str]] = []
        self.extended: list[float] = []
        self.saves: list[bytes] = []
        self.steps: dict[str, Any] = {}

    def policy_with(self, own: PolicyFields) -> Policy:
        return self.policy

    def report_progress(self, run: Run[Any], done: float | None, message: str) -> None:
        self.reported.append((done, message))

    def extend(self, run: Run[Any], seconds: float) -> None:
        self.extended.append(seconds)

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        if save.step:
            kind, _, value = save.value.partition(b" ")
            self.steps[save.step] = value if kind == b"bytes" else msgspec.json.decode(value or b"null")
        else:
            self.saves.append(save.value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def note_children(self, run: Run[Any], children: Sequence[Child]) -> Future[NotedChildren]:
        done: Future[NotedChildren] = Future()
        done.set_result(NotedChildren("ok", [NotedChild(0, None) for _ in children]))
        return done


class _WithoutClaim:
    """The part of a run that has no claim."""

    __slots__ = ()

    def check_cancelled(self) -> None:
        if not trio.lowlevel.in_trio_task():
            with suppress(RuntimeError):  # the test calls the function directly
                trio.from_thread.check_cancelled()

    def check_may_wait(self, instead: str) -> None:
        """Do nothing, because nothing waits."""


class _DirectRun(_WithoutClaim, Run[_NoConsumer]):
    """A run without a claim."""


class _DirectItem(_WithoutClaim, ListItem):
    """A call of a list, without a claim."""

    __slots__ = ()


class _DirectListRun(_WithoutClaim, ListRun):
    """The run of a list, without claims."""

    __slots__ = ()


def _list_run(items: Sequence[ListItem]) -> ListRun:
    run = _DirectListRun(items[0])
    for item in items[1:]:
        run.add(item)
    return run


class DirectContext(Context):
    """What ``worqr.current()`` returns inside `context`.

    Attributes:
        reported: What the handler reported with `progress`, in order: the number and the message.
        extended: What it passed to `extend`, in seconds.
        saves: The bytes that it saved, in order.
        steps: The results of the steps that it took, by name, as JSON has them.
    """

    def __init__(
        self,
        run: Run[_NoConsumer],
        batch: BatchRef | None = None,
        ended_batch: BatchInfo | None = None,
        ended_job: EndedJob | None = None,
    ) -> None:
        super().__init__(run)
        self._batch = batch
        self._ended_batch = ended_batch
        self._ended_job = ended_job
        self.reported: list[tuple[float | None, str]] = run.host.reported
        self.extended: list[float] = run.host.extended
        self.saves: list[bytes] = run.host.saves
        self.steps: dict[str, Any] = run.host.steps

    @property
    def batch(self) -> BatchRef | None:
        """The batch that the test has given."""
        return self._batch

    @property
    def ended_batch(self) -> BatchInfo | None:
        """The batch that the test has given as the one that has ended."""
        return self._ended_batch

    @property
    def ended_job(self) -> EndedJob | None:
        """The job that the test has given as the one that has ended."""
        return self._ended_job


class DirectListContext(ListContext, DirectContext):
    """What ``worqr.current()`` returns inside `context` for a handler that takes a list."""


def _kept(meta: Mapping[str, str] | None, saved: bytes | None, steps: Mapping[str, object]) -> list[bytes]:
    """Return the meta and what earlier runs saved, as the record has them: names and values in turn."""
    found = [b"meta", str(encode_options({"meta": meta})["meta"]).encode()] if meta else []
    found += [] if saved is None else [b"saved", check_saved(saved), b"saved_number", b"1"]
    for name, result in steps.items():
        found += [b"step:" + check_step(name).encode(), encode_step(name, result)]
    return found


@contextmanager
def context(
    *,
    id: str = "test",
    queue: str = "test",
    task: bytes = b"",
    failures: int = 0,
    meta: Mapping[str, str] | None = None,
    state: Any = None,
    saved: bytes | None = None,
    steps: Mapping[str, object] | None = None,
    calls: int | None = None,
    batch: BatchRef | None = None,
    ended_batch: BatchInfo | None = None,
    ended_job: EndedJob | None = None,
    ended_result: object = None,
) -> Generator[DirectContext]:
    """Make ``worqr.current()`` work inside the block, to call a handler directly, without a mesh or a server.

    The run has the default retry policy. It is not settled, and not cancelled. Child tasks and
    threads of ``trio.to_thread`` see it too.

    Args:
        id: The job's id.
        queue: The name of its queue.
        task: The payload.
        failures: The number of earlier failures; 9 makes this the last attempt.
        meta: The `meta` of the dispatch.
        state: The value that the mesh's lifespan would yield.
        saved: What an earlier run saved.
        steps: The results of the steps that earlier runs took, by name. The functions of these steps are not called.
        calls: For a handler that takes a list: how many `items` the run has. Their ids are ``test-0``, ``test-1`` and so on,
            after `id`. None: the handler takes one task.
        batch: The batch that the job belongs to. What the handler adds to ``mesh.current_batch()`` needs a `recording`.
        ended_batch: The batch that has ended, for a handler that is a follow-up.
        ended_job: The job that has ended, for a handler that is a follow-up: ``worqr.EndedJob("7", "export", "finished")``.
        ended_result: The result of that job, if it has finished.

    Yields:
        DirectContext: The run.

    Raises:
        UsageError: An argument is not valid.
    """
    check_count(failures, "failures", least=0)
    fence, host = time.time_ns() // 1000, _NoConsumer(state, queue)
    shared = [b"task", check_task(task, _MOST), b"failures", b"%d" % failures, *_kept(meta, saved, steps or {})]

    def entry(id: str) -> list[bytes]:
        return [b"id", check_id(id, generated=True).encode(), *shared]

    if ended_job is not None and ended_job.outcome == "finished":
        ended_job = with_result(ended_job, encode_step("result", ended_result))
    found: DirectContext
    if calls is None:
        run: Run[Any] = _DirectRun(host, None, fence, entry(id))
        found = DirectContext(run, batch, ended_batch, ended_job)
    else:
        check_count(calls, "calls of context")
        run = _list_run([_DirectItem(host, None, fence + n, entry(f"{id}-{n}")) for n in range(calls)])
        found = DirectListContext(run, batch, ended_batch, ended_job)
    tokens = current_run.set(run), current_context.set(found)
    try:
        yield found
    finally:
        current_run.reset(tokens[0])
        current_context.reset(tokens[1])
