"""Calling a handler directly: a `Context` without a run, for handlers that call ``worqr.current()``, and for workflows."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import trio

from worqr.batches import BatchInfo, BatchRef, EndedJob, with_result
from worqr.client.client import Client
from worqr.client.inspection import shown_value
from worqr.client.producer import Call
from worqr.codecs import StoredValues
from worqr.errors import JobCancelled, JobFailed, UsageError
from worqr.job_options import check_id, encode_options
from worqr.ops import Child, NotedChild, NotedChildren, Wait
from worqr.peer.children import Children
from worqr.peer.context import Context, ListContext, current_context
from worqr.peer.durable import Flow
from worqr.peer.list_run import ListItem, ListRun
from worqr.peer.run import End, PolicyFields, Run, Save, check_saved, check_step, current_run, encode_step
from worqr.policy import Policy
from worqr.records import RemoteError
from worqr.validation import check_count, check_task, name_of

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
        self.deploy = 0
        self.state = state
        self.reported: list[tuple[float | None, str]] = []
        self.values_shown: list[Any] = []
        self.extended: list[float] = []
        self.costs: list[int] = []
        self.saves: list[bytes] = []
        self.steps: dict[str, Any] = {}

    def policy_with(self, own: PolicyFields) -> Policy:
        return self.policy

    def report_progress(self, run: Run[Any], done: float | None, message: str, value: bytes = b"") -> None:
        if value:
            self.values_shown.append(shown_value(value))
        else:
            self.reported.append((done, message))

    def extend(self, run: Run[Any], seconds: float) -> None:
        self.extended.append(seconds)

    def note_cost(self, run: Run[Any], used: int) -> None:
        self.costs.append(used)

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
        done.set_result(NotedChildren("ok", [NotedChild(0, child.base, None) for child in children]))
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


# A workflow that a test calls like any function: its waits end at once, with what the test has given.


class _DirectChildren(Children):
    """The jobs that it starts. Nothing is sent."""

    def __init__(self, flow: _DirectFlow, ends: Mapping[str, Sequence[object]]) -> None:
        super().__init__(flow)
        self._left = _by_name("ends", ends)
        self._known = flow
        self.started: list[Call[Any]] = []

    def add(self, key: str, call: Call[Any], client: Client) -> None:
        super().add(key, call, client)
        self._unsent.clear()
        self.started.append(call)
        if left := self._left.get(key) or self._left.get(call.name):
            self._known.note_end(key, _end_of(key, left.pop(0)))

    def _first(self, keys: Sequence[str], timeout_ms: int | None) -> tuple[tuple[int, End] | None, Wait | None]:
        for n, key in enumerate(keys):
            if (end := self._known.ended(key)) is not None:
                return (n, end), None
        return None, Wait(f"first of {', '.join(keys)}", "first", in_ms=timeout_ms)


class _DirectFlow(Flow):
    """What the run knows of its durable calls."""

    def __init__(
        self, run: Run[Any], events: Mapping[str, Sequence[object]], ends: Mapping[str, Sequence[object]]
    ) -> None:
        super().__init__(run)
        self._events = _by_name("events", events)
        self.jobs: _DirectChildren = _DirectChildren(self, ends)
        self.children = self.jobs

    async def park(self, wait: Wait) -> None:
        self._pass(wait)

    def park_now(self, wait: Wait) -> None:
        self._pass(wait)

    def _pass(self, wait: Wait) -> None:
        """End a wait. Raises UsageError if the test has not said how."""
        values = self._events.get(wait.name)
        if wait.kind == "event" and values and (value := values.pop(0)) is not None:
            self.note_end(wait.key, End("value", encode_step(wait.key, value)))
        elif wait.kind == "event" and wait.in_ms is not None:
            self.note_end(wait.key, End("timeout", b""))
        elif wait.kind != "sleep" and wait.in_ms is None:
            what = "events={name: [value]}" if wait.kind == "event" else "ends={function.name: [result]}"
            raise UsageError(f"the workflow waits for ever, for {wait.key!r}: say how it ends, as in context({what})")


def _by_name(what: str, given: Mapping[str, Sequence[object]]) -> dict[str, list[object]]:
    for name, values in given.items():
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{what} of context must have a list for each name, in order, as in {{{name!r}: [...]}}")
    return {name: list(values) for name, values in given.items()}


def _end_of(key: str, end: object) -> End:
    """Return how a job has ended: with this result, or this error."""
    if isinstance(end, JobCancelled):
        return End("cancelled", end.reason.encode())
    if isinstance(end, BaseException):
        error = end.error if isinstance(end, JobFailed) else RemoteError(name_of(type(end)), str(end), "")
        return End("failed", msgspec.msgpack.encode((error.type, error.message, "", "")))
    return End("finished", encode_step(key, end))


class DirectContext(Context):
    """What ``worqr.current()`` returns inside `context`.

    Attributes:
        started: The calls of the jobs that a workflow started with ``function.run(...)``, in order.
        reported: What the handler reported with `progress`, in order: the number and the message.
        states: The values that it passed to ``worqr.state``, in order, as JSON has them.
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
        self.states: list[Any] = run.host.values_shown
        self.extended: list[float] = run.host.extended
        self.saves: list[bytes] = run.host.saves
        self.steps: dict[str, Any] = run.host.steps
        self.started: list[Call[Any]] = run.flow.jobs.started if isinstance(run.flow, _DirectFlow) else []

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


def _kept(
    meta: Mapping[str, str] | None, saved: bytes | None, steps: Mapping[str, object] | None, began_with: int | None
) -> list[bytes]:
    """Return the meta and what earlier runs saved, as the record has them: names and values in turn."""
    found = [b"meta", str(encode_options({"meta": meta})["meta"]).encode()] if meta else []
    found += [] if saved is None else [b"saved", check_saved(saved), b"saved_number", b"1"]
    found += [] if began_with is None else [b"began_with", b"%d" % check_count(began_with, "began_with")]
    for name, result in (steps or {}).items():
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
    began_with: int | None = None,
    events: Mapping[str, Sequence[object]] | None = None,
    ends: Mapping[str, Sequence[object]] | None = None,
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
        began_with: The `deploy` of the mesh that ran the job first.
        events: For a workflow: the values that it waits for, by the name of the event, each a list in order. None in a list, and
            a list that has ended: the wait is over without a value, if it has a timeout. With `events` or `ends`, sleeps end at
            once.
        ends: For a workflow: how the jobs end that it starts, by ``function.name``, such as ``"shop.pack"``, or the name that
            ``function.named(...)`` has given, each a list in order: a result, or an error. An error is raised as `JobFailed`,
            ``JobCancelled(...)`` as itself.
        calls: For a handler that takes a list: how many `items` the run has. Their ids are ``test-0``, ``test-1`` and so on,
            after `id`. None: the handler takes one task.
        batch: The batch that the job belongs to. What the handler adds to ``mesh.current_batch()`` needs a `recording`.
        ended_batch: The batch that has ended, for a handler that is a follow-up.
        ended_job: The job that has ended, for a handler that is a follow-up: ``worqr.EndedJob("7", "export", "finished")``.
        ended_result: The result of that job, if it has finished.

    Yields:
        DirectContext: The run.

    Raises:
        UsageError: An argument is not valid. In the block: a workflow waits without a timeout for what was not given.
    """
    check_count(failures, "failures", least=0)
    fence, host = time.time_ns() // 1000, _NoConsumer(state, queue)
    shared = [b"task", check_task(task, _MOST), b"failures", b"%d" % failures, *_kept(meta, saved, steps, began_with)]

    def entry(id: str) -> list[bytes]:
        return [b"id", check_id(id, generated=True).encode(), *shared]

    if ended_job is not None and ended_job.outcome == "finished":
        ended_job = with_result(ended_job, encode_step("result", ended_result))
    found: DirectContext
    if calls is None:
        run: Run[Any] = _DirectRun(host, None, fence, entry(id))
        if events is not None or ends is not None:
            run.begin_flow(_DirectFlow(run, events or {}, ends or {}))
        found = DirectContext(run, batch, ended_batch, ended_job)
    else:
        check_count(calls, "calls of context")
        run = _list_run([_DirectItem(host, None, fence + n, entry(f"{id}-{n}")) for n in range(calls)])
        found = DirectListContext(run, batch, ended_batch, ended_job)
    with _current(run, found):
        yield found


@contextmanager
def _current(run: Run[Any], context: DirectContext) -> Generator[None]:
    tokens = current_run.set(run), current_context.set(context)
    try:
        yield
    finally:
        current_run.reset(tokens[0])
        current_context.reset(tokens[1])
