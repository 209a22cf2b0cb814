"""The values that users read: the state of tasks, queues, workers and peers; errors and dead-letter records. Pure.

How errors and dead-letter records are stored is in `worqr.remote_error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

# `Matches`: where the tasks with one payload are.


@dataclass(frozen=True, slots=True)
class Matches:
    """The tasks of a queue with one payload. See ``queue.find()``."""

    waiting: tuple[int, ...]
    """Of each that waits: how many tasks of its shard are taken before it."""
    jobs: tuple[str, ...]
    """The ids of jobs that were plain tasks with this payload: they were retried, reported progress or saved."""
    running: tuple[str, ...]
    """The claims of plain tasks that run, for ``queue.cancel_claims()``."""
    complete: bool
    """False if there may be more, because the queue is too long to be searched, or the limit was reached."""


# `EndedRun`: a run that has ended, as workers store it for ``serve(recent=...)``. Pure.
#
# The server keeps a list of them for a queue. Each is a JSON array, so that other programs can read it:
# ``[claim, id, outcome, ms, worker, error]``.


MOST_RECENT: Final = 1000
"""The most ended runs that a queue keeps."""

Outcome = Literal["ok", "raised", "timeout", "cancelled", "lost"]


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended. See ``queue.recent()``."""

    id: str | None
    """The job's id; None for a plain task."""
    claim: str
    """The name of its claim, as `claim` of the tasks in ``queue.running()`` and in the logs."""
    outcome: Outcome
    """How it ended. ``ok``: the handler returned. ``raised``: it raised, and the task was retried or failed. ``timeout``: it took
    too long. ``cancelled``: the task was cancelled. ``lost``: another worker had received the task.
    """
    started: datetime
    """The time of the claim, by the server's clock."""
    seconds: float
    """The seconds from the arrival of the claim in its worker to the end of the handler."""
    worker: str
    """The id of the worker that ran it."""
    error: str | None
    """The type of the exception, or ``Timeout``; None if there was no error."""


class StoredRun(NamedTuple):
    """An ended run as it is stored. `claim`: the fencing token. `error`: empty if there was none."""

    claim: Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    id: str | None
    outcome: Outcome
    ms: Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    worker: str
    error: str


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(StoredRun)


def encode_run(run: StoredRun) -> bytes:
    """Return a run as JSON."""
    return _ENCODER.encode(run)


def decode_run(raw: bytes) -> StoredRun | None:
    """Return a stored run; None if another application has written something else."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


CancelReason = Literal["cancel", "timeout", "lost", "leaving", "suspended"]
"""Why a run is being cancelled."""


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error that a run raised, as text. The run may have been in another process or on another machine."""

    type: str
    """The qualified name of its class, for example ``smtplib.SMTPRecipientsRefused``."""
    message: str
    """Its text, at most 4,096 characters."""
    traceback: str
    """Its traceback, at most the last 16 KiB. If a run in a process wrote to its standard error, a line ``stderr:`` and the last
    16 KiB of that follow.
    """
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """The error's public attributes that JSON can encode: ``error.code = 42`` arrives as ``{"code": 42}``. At most 4 KiB in
    all; attributes that do not fit are left out.
    """


@dataclass(frozen=True, slots=True)
class Failed:
    """A dead-letter record: a task that will not be run again. See ``queue.failed`` and ``queue.undecodable``."""

    id: str
    """The job's id. A plain task has none; its record has one that was generated."""
    queue: str
    """The name of its queue."""
    task: bytes
    """The payload, unchanged. For the payload of a function, see ``function.decode(task)``."""
    reason: Literal["failed", "stalled", "timeout", "expired", "undecodable"]
    """Why it was given up. ``failed``: its failures reached the limit, or it raised `Failure`. ``stalled``: too many workers died
    while running it. ``timeout``: it took too long too often. ``expired``: it was not started in time. ``undecodable``: its
    payload could not be decoded.
    """
    error: RemoteError
    """The error of the last run."""
    failures: int
    """The number of runs that failed. 0, as for `stalls` and `timeouts`, if another program has stored no number there."""
    stalls: int
    """The number of workers that died while running it."""
    timeouts: int
    """The number of runs that took too long."""
    worker: str
    """The id of the worker that ran it last."""
    at: datetime
    """The time at which it was given up, by the server's clock; 1970-01-01 if another program has stored no time there."""
    meta: Mapping[str, str]
    """The `meta` of its dispatch; empty for a plain task."""
    size: int = 0
    """The bytes of the payload; more than `task` has if only its beginning was read."""


@dataclass(frozen=True, slots=True)
class CancelCount:
    """The number of tasks that a cancel affected."""

    waiting: int
    """Tasks that had not started; they were removed."""
    running: int
    """Tasks that were running; their runs are being cancelled."""
    acknowledged: int
    """Of the running tasks, those that had ended before `wait` was over."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What ``forget_tagged`` has deleted."""

    waiting: int
    """Jobs that did not run: they were cancelled, with what they had saved."""
    running: int
    """Jobs that ran: they are being cancelled, and nothing is kept of them at their end."""
    kept: int
    """Jobs that had ended, and were kept."""
    results: int
    """Results."""
    dead_letters: int
    """Dead letters."""
    unreached: tuple[str, ...] = ()
    """Where data may still be, as texts for people: nothing in the server can delete it there."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a job, and the result of its tries. For a plain task, only `state`, `worker` and `since` are known."""

    state: Literal["waiting", "scheduled", "suspended", "blocked", "active", "finished", "failed", "cancelled", "gone"]
    """The state. ``scheduled``: it has to wait for its time. ``suspended``: it is a workflow that waits for an event, a time
    or other jobs. ``blocked``: it waits until another run of its id has ended.
    ``active``: it runs. ``gone``: nothing is stored about it any more.
    """
    worker: str | None = None
    """The id of the worker that runs it; None if it does not run."""
    since: datetime | None = None
    """The time at which its run began, by the server's clock; None if it does not run."""
    run_at: datetime | None = None
    """The time before which it does not run; None if it has ended."""
    progress: float | None = None
    """The progress that the handler reported last; None if it reported none."""
    message: str = ""
    """The message that the handler reported last."""
    failures: int = 0
    """The number of tries that ended with an error."""
    attempts: int = 0
    """The number of tries that have begun, the present one included. Tries that were not counted are left out."""
    error: RemoteError | None = None
    """The error of the last try: its type and the first 500 bytes of its message, without a traceback. It is there while the
    job waits for its next try, during that try, and after the job has failed. ``queue.failed`` has the traceback.
    """
    next_run: datetime | None = None
    """The time before which a ``scheduled`` job does not run, and at which a ``suspended`` one runs at the latest; None in other
    states.
    """
    waits_for: str = ""
    """What it waits for: the message of the `Snooze` or the ``Retry(counted=False)`` that ended its last try, which is no error;
    for a ``suspended`` job the names of its waits and the first deadline: ``approved until 2031-05-01 12:00:00 UTC``. Empty if
    its last try ended in another way, or while it runs.
    """
    value: Any = None
    """What a run of the job has set last with ``worqr.state(value)``, as JSON has it, or in the type that was passed to
    ``job.status()``. None: no run has set it, or it went with the end of the job. Only ``job.status()``, ``job.watch()`` and
    ``queue.read()`` read it.
    """


@dataclass(frozen=True, slots=True)
class TaskInfo(Status):
    """One task in a list of many, with its `Status`."""

    id: str | None = None
    """The job's id; None for a plain task, which has none."""
    task: bytes = b""
    """The first 100 bytes of the payload. Empty if the list contains 8 MiB of payload already."""
    cursor: str = field(default="", compare=False, repr=False)
    """The position in a list of ``queue.jobs()``. Pass the last one as ``after`` to get the next page."""
    claim: str | None = None
    """The name of its run, for ``queue.cancel_claims()``, also of a plain task; None if it does not run."""
    cancelling: bool = False
    """True if its run was cancelled and has not ended yet."""
    size: int | None = None
    """The length of the whole payload in bytes; None if it is not known."""
    deadline: datetime | None = None
    """The time at which its run takes too long, if the job has a `timeout` of its own. The `timeout` of a handler is not known
    to the server.
    """
    place: int | None = field(default=None, compare=False)
    """Its place among the waiting tasks, 1 for the one that is taken next; None if it does not wait. With lanes it is the place
    in its lane, and with several shards the place in its shard. Cancelled jobs count until a worker skips them.
    """
    lane: str = ""
    """The lane in which it waits; empty if it waits in none, or does not wait. Of a job that has ended, that in which it was."""
    tags: tuple[str, ...] = ()
    """Its tags, in lists by tag and of jobs that have ended."""
    ended: datetime | None = None
    """The time at which it ended, by the server's clock; None if it has not, or if that is not stored."""
    seconds: float | None = None
    """The seconds from the start of its last run to its end; None if it did not run, or has not ended."""
    kept: str | None = None
    """The name of what is kept of it, for ``queue.forget()`` and ``queue.run_again()``; None if nothing is."""


@dataclass(frozen=True, slots=True)
class Try:
    """A run of a job that did not end well. See ``queue.read()``."""

    at: datetime
    """The time at which it ended, by the server's clock."""
    seconds: float
    """The seconds from its claim to its end."""
    worker: str
    """The id of the worker that ran it."""
    reason: Literal["failed", "retry", "timeout", "stalled", "undecodable"]
    """How it ended. ``failed``: it raised. ``retry``: it raised `Retry` with ``counted=False``. ``timeout``: it took too long.
    ``stalled``: its worker or its process died. ``undecodable``: its payload could not be decoded.
    """
    error: RemoteError
    """Its error: the type, and the first 500 bytes of the message, without a traceback unless the handler saved it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, as its stored result has it. See ``queue.read()``. ``job.result()`` returns the value."""

    state: Literal["finished", "failed", "cancelled"]
    """The state in which the job ended."""
    attempts: int
    """The number of its tries."""
    failures: int
    """The number of tries that ended with an error."""
    progress: float | None
    """The progress that the handler reported last; None if it reported none."""
    message: str
    """The message that the handler reported last."""
    error: RemoteError | None
    """The error of a failed job."""
    reason: str
    """The reason that was given to the cancel of a cancelled job."""
    expires_in: float
    """The seconds for which the result is kept from now on."""
    at: datetime | None = None
    """The time at which it ended, by the server's clock. It is only known of a job with `keep` or `keep_task`."""
    started: datetime | None = None
    """The time at which its last run began, as `at`; None if it did not run."""
    worker: str = ""
    """The id of the worker that ran it last, of a job with `keep` or `keep_task`."""


@dataclass(frozen=True, slots=True)
class BatchRef:
    """The batch that a job belongs to. ``mesh.queue(ref.queue).batch(ref.id)`` is its handle."""

    queue: str
    """The name of its home queue."""
    id: str
    """Its id."""
    _home: str = field(default="", repr=False)
    """Its base, without the prefix of the mesh."""
    _token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the time line of a workflow. See ``queue.read()``. It has no value that was saved or sent."""

    kind: Literal["step", "sleep", "wait", "children", "child", "event"]
    """What it is. ``step``: a step. ``sleep``, ``wait``, ``children``: the run waits for a time, for an event, or for jobs that
    it has started. ``child``: such a job. ``event``: a value that was sent, and that no wait has taken.
    """
    name: str
    """Its name: of a step with its arguments, of a wait and an event the name of the event."""
    key: str
    """Its key in the job, which is unique among the entries of its kind."""
    state: str
    """Its state.

    Of a step: ``done``, ``trying`` (its last try has failed, and it is not done) or ``failed`` (for good). Of a wait: ``open``,
    ``value`` (it has its event), ``ended`` (the jobs have ended), ``timeout`` (its time has passed) or ``lifetime`` (that of the
    job has passed). Of a child: ``started``, ``finished``, ``failed``, ``cancelled``, ``large`` (its result is too large for the
    record of the workflow) or ``gone`` (it was lost). Of an event: ``stored``, or ``refused`` (it was not of the type that the
    workflow waits for).
    """
    tries: int = 0
    """The number of tries of a step that have failed. It is forgotten when the step is done."""
    began: datetime | None = None
    """The time at which a step, a wait or a child began, by the server's clock; None if it is not known."""
    ended: datetime | None = None
    """The time at which it ended, by the server's clock: the result of a step or the end of a child was stored, or a wait was
    found to have ended. A later run changes no time.
    """
    until: datetime | None = None
    """The time at which a wait ends at the latest; None if it has no limit."""
    size: int | None = None
    """The bytes of the value; None if there is none."""
    error: RemoteError | None = None
    """The error of a failed step, of the last failed try, or of a failed child."""
    schema: str = ""
    """The JSON schema of the value that an open wait needs; empty if it is not known."""
    queue: str = ""
    """The name of the queue of a child."""
    job: str = ""
    """The id of a child."""

    @property
    def seconds(self) -> float | None:
        """How many seconds it took; None if it is not known."""
        return None if self.began is None or self.ended is None else (self.ended - self.began).total_seconds()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Everything that is stored about one job. ``queue.read()`` returns it."""

    id: str
    """The job's id."""
    queue: str
    """The name of its queue."""
    status: Status
    """The state, as ``job.status()`` returns it. If the id is unknown, ``status.state`` is ``gone``."""
    task: bytes
    """The first 4,096 bytes of the payload, or all of it with ``payload=True``. Empty without a record, and for a payload of more
    than 1 MiB of which you did not ask for all.
    """
    size: int | None
    """The length of the whole payload in bytes; None without a record."""
    plain: bool
    """True if it was enqueued as a plain task, which became a job when it was retried, reported progress or saved."""
    meta: Mapping[str, str]
    """The `meta` of its dispatch."""
    options: Mapping[str, int | float | bool | str]
    """The options of its own that the dispatch set, such as ``timeout`` and ``max_failures``; times in seconds. A count without a
    limit is ``unlimited``.
    """
    dispatched: datetime | None
    """The time of its first dispatch, by the server's clock; None for a plain task and without a record."""
    scheduled_for: datetime | None
    """The nominal time of the schedule's firing that dispatched it."""
    expires_at: datetime | None
    """The time after which it does not start; None if it does not expire, or has started before."""
    failures: int
    """The number of tries that raised."""
    stalls: int
    """The number of workers that died while running it."""
    timeouts: int
    """The number of tries that took too long."""
    tries: tuple[Try, ...]
    """The last ten tries that did not end well, the oldest first. They are reset together with the counters."""
    claim: str | None
    """The name of its run, as in `TaskInfo`; None if it does not run."""
    cancelling: bool
    """True if its run was cancelled and has not ended yet."""
    cancel_reason: str
    """The reason that was given to that cancel."""
    deadline: datetime | None
    """The time at which its run takes too long, if the job has a `timeout` of its own."""
    reserved: float | None
    """The seconds for which `unique_for` reserves the id from now on; None if it does not."""
    blocked: TaskInfo | None
    """The next dispatch of this id, which waits until the run has ended."""
    ended: tuple[Ended, ...]
    """The stored results of the last two runs, the newest first."""
    dead_letters: tuple[Failed, ...]
    """The dead-letter records of this id, at most ten, the newest first. Each `task` has the first 4,096 bytes of the payload."""
    twins: tuple[str, ...] = ()
    """For a plain task that became a job: the ids of others with the same payload, at most ten."""
    lane: str = ""
    """Its lane; empty if it has none."""
    batch: BatchRef | None = None
    """The batch that it belongs to; None if it belongs to none, or only a result of it is stored."""
    then: str = ""
    """The queue of the call that is enqueued when it has finished; empty if there is none."""
    otherwise: str = ""
    """The queue of the call that is enqueued when it has failed for good, or was cancelled; empty if there is none."""
    follows: tuple[str, str] | None = None
    """Of the follow-up of a job: the queue and the id of the job that has ended; else None."""
    saved_size: int = 0
    """The bytes that the job keeps for its next run: what it saved, and its steps. A step counts as at least 1 KiB."""
    time_line: tuple[Entry, ...] = ()
    """What is stored of the runs of a workflow: its steps, by their names, then what it has waited for and waits for, the oldest
    first, its children, and events that it has not taken. Up to 3,000 entries.
    """
    life: int = 0
    """The number of the dispatch that the workflow began with, which is part of its address; 0 if it is no workflow."""
    tags: tuple[str, ...] = ()
    """Its tags."""
    kept: str | None = None
    """The name of what is kept of its end, for ``queue.forget()`` and ``queue.run_again()``; None if nothing is."""
