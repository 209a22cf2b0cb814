"""`Run`: one claim that this process holds, from the reply that delivered it until it is settled.

A run is internal. A handler sees it as a `Context`, which is made when the handler asks for it. The fields are plain, and no
method waits, so the loop, threads and asyncio tasks can use them alike. `settler` decides how a run ends. A run uses the consumer
that claimed it as a `RunHost`; a worker process and the testing package have hosts of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import trio

from worqr.errors import UsageError
from worqr.peer.saved_state import JobFields, SavedState
from worqr.policy import POLICY_FIELDS, Broken, Policy
from worqr.records import CancelReason, Failed
from worqr.remote_error import failed_record
from worqr.validation import whole_number

if TYPE_CHECKING:
    from worqr.peer.registration import Registration

PolicyFields = tuple[tuple[bytes, bytes], ...]
"""Policy fields of a job, which replace those of its queue."""

_BECOMING: Final = threading.Lock()
_POLICY_FIELDS: Final = frozenset(name.encode() for name in POLICY_FIELDS)
_NUMBERS: Final = frozenset(
    (
        *(b"run_at", b"queued", b"expires", b"expires_at", b"retried_at", b"scheduled_for", b"latest"),
        *(b"failures", b"stalls", b"timeouts", b"saved_number", b"saved_size"),
    )
)
"""Fields of a record that are whole numbers, beside those of its policy."""


class Save(NamedTuple):
    """What a run saves: bytes, or the result of a step."""

    number: int
    """Grows with each save of bytes; 0 for a step."""
    step: str
    """The name of the step; empty for bytes."""
    value: bytes
    """The bytes, or the encoded result."""


class RunHost(Protocol):
    """The part of the consumer that a run uses."""

    @property
    def queue(self) -> str:
        """The queue's name."""
        ...

    @property
    def id_suffix(self) -> str:
        """The suffix of the ids that are generated there."""
        ...

    @property
    def policy(self) -> Policy:
        """The policy of tasks without policy fields of their own."""
        ...

    @property
    def state(self) -> object:
        """The value that the lifespan yielded."""
        ...

    def policy_with(self, own: PolicyFields, /) -> Policy:
        """Return the policy of a job with these fields."""
        ...

    def report_progress(self, run: Run[Any], done: float | None, message: str, /) -> None:
        """Send the progress of a run. From any thread."""
        ...

    def extend(self, run: Run[Any], seconds: float, /) -> None:
        """Move the deadline of a run; from any thread."""
        ...

    def save(self, run: Run[Any], save: Save, /) -> Future[None]:
        """Store what a run saves; from any thread. The future is done when it is stored."""
        ...


class Offloaded(Protocol):
    """The part that the peer uses of a run whose handler runs in a thread, on an asyncio loop or in a process."""

    overdue_remedy: ClassVar[str]
    """A remedy for the author of a handler that still runs after its timeout; empty: the remedy for a handler on the Trio
    loop.
    """
    stoppable: ClassVar[bool]
    """The run can be stopped from outside, if its handler cooperates."""

    @property
    def raised(self) -> bool:
        """The exception that came out of the slot is the handler's own."""
        ...

    @property
    def detachable(self) -> bool:
        """A slot waits for this run and nothing else."""
        ...

    @property
    def killed_output(self) -> str:
        """The standard error of a process that was killed; empty if none was killed."""
        ...

    def current_stack(self) -> str:
        """Return the present stack of the handler, formatted as in a traceback; empty if it does not run."""
        ...

    def allow_replacement(self) -> bool:
        """Let another run take the place of a handler that is stuck. Return False if there is no such place."""
        ...

    def detach(self) -> None:
        """Stop waiting for a run that was cancelled."""
        ...

    def check_cancelled(self) -> None:
        """Raise the cancellation error of that thread or loop, if the run is being cancelled."""
        ...


Host = TypeVar("Host", bound=RunHost, covariant=True)


class RunState(Enum):
    """The phases of a run.

    | state      | meaning                                             | leaves it by                           |
    |------------|-----------------------------------------------------|----------------------------------------|
    | CLAIMED    | this worker holds the claim, no handler has begun   | `begin`, `cancel`, `settle`            |
    | RUNNING    | a handler, or the block of a claim by hand, runs    | `cancel`, `settle`                     |
    | CANCELLING | cancelled, before or during its handler             | `settle`                               |
    | SETTLED    | its end was decided; a request reports or reported it | never                                |
    """

    CLAIMED = auto()
    RUNNING = auto()
    CANCELLING = auto()
    SETTLED = auto()


CLAIMED: Final = RunState.CLAIMED
RUNNING: Final = RunState.RUNNING
CANCELLING: Final = RunState.CANCELLING
SETTLED: Final = RunState.SETTLED


class Run(Generic[Host]):
    """One run of one task. Its methods change it; other modules only read its fields.

    Attributes:
        task, fence: as in `Context`.
        began: when its claim arrived, by ``time.monotonic()``; 0 outside a peer.
        record: the fields of a job; None for a plain task. A plain task that reports progress or saves becomes a job.
        policy: of this job, or of its queue.
        host: the consumer that claimed it.
        registration: the worker id that holds the claim.
        state: its phase.
        cancel_reason: why it was cancelled first, or ``lost``; None: it was not.
        scope: what `cancel` cancels; None: no handler has begun.
        timer: its deadline; None: it has none.
        offloaded: where its handler runs, if that is not the Trio loop.
    """

    __slots__ = (
        *("task", "fence", "began", "record", "policy", "host", "registration"),
        *("state", "cancel_reason", "scope", "timer", "offloaded"),
    )

    task: bytes
    record: JobFields | None
    policy: Policy

    def __init__(
        self, host: Host, registration: Registration | None, fence: int, entry: Any, began: float = 0.0
    ) -> None:
        """`entry`: the payload of a plain task, or the fields of a job. `registration`: None outside a peer.

        Raises ValueError if another program wrote fields of the job that cannot be read.
        """
        self.host: Host = host
        self.registration: Registration = registration  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        self.fence: int = fence
        self.began: float = began
        self.state: RunState = CLAIMED
        self.cancel_reason: CancelReason | None = None
        self.scope: trio.CancelScope | None = None
        self.timer: Timer | None = None
        self.offloaded: Offloaded | None = None
        if isinstance(entry, bytes):
            self.task = entry
            self.record = None
            self.policy = host.policy
        else:
            record = self.record = JobFields(zip(entry[::2], entry[1::2], strict=True))
            self.task = record[b"task"]
            check_fields(record)
            if _POLICY_FIELDS.isdisjoint(record):
                self.policy = host.policy
            else:
                self.policy = host.policy_with(tuple([each for each in record.items() if each[0] in _POLICY_FIELDS]))

    # Reading it

    @property
    def id(self) -> str:
        """The job's id. A plain task has none; this is the id that it would get."""
        return f"@{self.fence}{self.host.id_suffix}" if self.record is None else self.record[b"id"].decode()

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self.host.queue

    @property
    def failures(self) -> int:
        """The number of earlier runs that failed."""
        return self._count(b"failures")

    @property
    def stalls(self) -> int:
        """The number of workers that died while running this task."""
        return self._count(b"stalls")

    @property
    def timeouts(self) -> int:
        """The number of earlier runs that took too long."""
        return self._count(b"timeouts")

    def _count(self, name: bytes) -> int:
        return 0 if self.record is None else whole_number(self.record.get(name))

    @property
    def attempt(self) -> int:
        """The number of this run: 1 at the first. Runs that were not counted are left out."""
        return 1 + self.failures + self.stalls + self.timeouts

    @property
    def deadline(self) -> float | None:
        """The time at which it will be cancelled, by ``time.monotonic()``."""
        return None if self.timer is None else self.timer.deadline

    @property
    def is_list(self) -> bool:
        """It is the run of a list handler, which takes several claims together (`list_run`)."""
        return False

    @property
    def items(self) -> Sequence[Run[Any]]:
        """The runs of single tasks that it consists of."""
        return (self,)

    @property
    def settled(self) -> bool:
        """The end of the run was decided."""
        return self.state is SETTLED

    def keeps_result(self) -> bool:
        """Return True if the handler's return value is to be stored."""
        return self.record is not None and self.policy.result_ttl > 0

    # Its transitions

    def begin(self, scope: trio.CancelScope) -> None:
        """Note that the handler begins inside `scope`.

        A run that was cancelled before begins with a cancelled scope.
        """
        self.scope = scope
        if self.cancel_reason is None:
            self.state = RUNNING
        else:
            scope.cancel()

    def end_block(self) -> trio.CancelScope:
        """Note that the block of a claim has ended. Return its scope, which is not cancelled any more."""
        scope, self.scope = self.scope, None
        assert scope is not None
        return scope

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the run.

        The first reason stays, unless the claim is lost later.
        """
        if self.cancel_reason is None or reason == "lost":
            self.cancel_reason = reason
        if self.state is not SETTLED:  # otherwise the scope may belong to the slot's next run
            self.state = CANCELLING
            if self.scope is not None:
                self.scope.cancel()

    def note_lost(self) -> None:
        """Note that its claim is lost. The handler is not cancelled, because the save that it waits for raises ClaimLost."""
        if self.state is not SETTLED:
            self.cancel_reason = "lost"

    def settle(self) -> None:
        """Note that the end of the run was decided. It may not be settled again, and its deadline does not count any more."""
        self.state = SETTLED
        if self.timer is not None:
            self.timer.run = None

    # Called by its handler

    def report_progress(self, done: float | None, message: str) -> None:
        """Pass a progress report to the host; from any thread."""
        self._become_job()
        self.host.report_progress(self, done, message)

    def _become_job(self) -> JobFields:
        with _BECOMING:  # two threads of a handler may save at the same time
            if self.record is None:
                self.record = JobFields(((b"id", self.id.encode()), (b"task", self.task)))
            return self.record

    def saved_state(self) -> SavedState:
        """Return what it knows of what its job has saved; from any thread. Its task becomes a job, if it is none."""
        return self._become_job().saved_state()

    def save(self, save: Save) -> Future[None]:
        """Store what its handler saves; from any thread. The future is done when it is stored."""
        return self.host.save(self, save)

    def check_may_wait(self, instead: str) -> None:
        """Raise UsageError if an event loop runs in this thread, which must not wait. `instead`: the code to write."""
        from worqr.link import loop_name_here  # a worker process does without the link

        if name := loop_name_here():
            raise UsageError(f"this would block the running {name} event loop: write `{instead}`")

    def offload(self, offloaded: Offloaded) -> None:
        """Note that the handler runs in a thread, on an asyncio loop or in a process."""
        self.offloaded = offloaded

    def check_cancelled(self) -> None:
        """Raise the cancellation error of the current thread or asyncio task, if the run is being cancelled."""
        if trio.lowlevel.in_trio_task():
            return
        if self.offloaded is not None:
            self.offloaded.check_cancelled()
        else:
            check_thread()


class Timer:
    """A deadline of one run. A run that is extended gets a new timer.

    Attributes:
        run: None after the run was settled, cancelled or extended.
        deadline: by ``time.monotonic()``.
    """

    __slots__ = ("deadline", "run")

    def __init__(self, run: Run[Any], deadline: float) -> None:
        self.run: Run[Any] | None = run
        self.deadline: float = deadline
        run.timer = self

    def move_to(self, deadline: float) -> None:
        """Set the deadline that the handler sees. From any thread."""
        self.deadline = deadline

    def stop(self) -> Run[Any] | None:
        """Return the run of this timer, if the timer was not stopped before."""
        run, self.run = self.run, None
        return run


def check_fields(record: JobFields) -> None:
    """Raise ValueError if the id of a job is no text, or a number in its record is none: another program has written it.

    Such a job does not run: its record does not tell when, or how often, it should. Its policy is checked where it is read.
    """
    record[b"id"].decode()
    if not all(map(bytes.isdigit, [value for name, value in record.items() if name in _NUMBERS])):
        wrong = {
            name.decode(): value[:40] for name, value in record.items() if name in _NUMBERS and not value.isdigit()
        }
        raise ValueError(f"these fields are no whole numbers: {wrong}")


def check_thread() -> None:
    """Raise ``trio.Cancelled`` if the task that waits for this thread of Trio's is cancelled."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        raise UsageError(
            "check_cancelled() is for the thread that runs the handler, not for one of its own; ask cancel_reason there"
        ) from None


def failed_of(run: Run[RunHost], queue: str) -> Failed:
    """Decode the payload of a failure job of `queue`.

    Raises:
        Broken: another program enqueued it.
    """
    facts = run.record.get(b"failed") if run.record is not None else None
    if facts is None:
        raise Broken("a task in a failure queue that no failure put there")
    return failed_record(queue, run.task, msgspec.msgpack.decode(facts, type=dict[str, Any]))


current_run: ContextVar[Run[Any]] = ContextVar("worqr.run")
"""The run that this code belongs to. It is set in the slot before the handler begins."""
