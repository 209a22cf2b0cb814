"""`Run`: one claim that this process holds, from the reply that delivered it until it is settled.

A run is internal. A handler sees it as a `Context`, which is made when the handler asks for it. The fields are plain, and no
method waits, so the loop, threads and asyncio tasks can use them alike. `settler` decides how a run ends. A run uses the consumer
that claimed it as a `RunHost`; a worker process and the testing package have hosts of their own.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec
import trio

from worqr import inside
from worqr.call_list import Outcomes
from worqr.codecs import StoredValues
from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.ops import Child, NotedChildren, Result, Wait
from worqr.policy import POLICY_FIELDS, Failure, Policy, RetryDecision, Undecodable, decide_retry
from worqr.records import CancelReason, Failed
from worqr.remote_error import TRACEBACKS_STEP, Description, describe, failed_record, redacted_step
from worqr.stored_values import finite, whole
from worqr.tracebacks import is_a, text_of
from worqr.validation import check_text, encode_json, name_of, qualname_of

if TYPE_CHECKING:
    from worqr.peer.durable import Flow
    from worqr.peer.list_run import ListRun
    from worqr.peer.session import Registration


logger: logging.Logger = logging.getLogger(__name__)

# `JobFields` and `SavedState`: what one run knows of its job's record, and of what the job has saved: bytes, results of steps.
#
# The `SavedState` is made at the first use. Handlers use it from any thread. The steps that applications call are in `context`.


MAX_SAVED: Final = 256 * 1024
"""The most bytes of one save."""
MAX_KEPT: Final = 1024 * 1024
"""The most bytes that a job keeps: what it saved last, and the names and results of its steps."""
STEP_BYTES: Final = 1024
"""The bytes that a step counts at least."""
IN_MEMORY: Final = 5.0
"""Seconds: a workflow sleeps shorter times where it is, and stores nothing."""
MAX_STEP_NAME: Final = 200
"""The most bytes of the name of a step."""

_MAKING: Final = threading.Lock()
_STEP: Final = b"step:"
_INTERNAL: Final = b"step:" + TRACEBACKS_STEP.encode()
"""The field in which worqr itself saves something."""
_END: Final = b"end:"
_NAMED: Final = (b"step:", b"end:", b"try:", b"wait:", b"child:")
_TRY: Final = b"try:"
_WAIT: Final = b"wait:"
RETRY_OF: Final = "retry of "
"""Begins the key of the wait of a step for its next try. Only the step asks for it, and not once it has a result."""
_REMEDY: Final = "keep the data in your database, and save its key"
FULL: Final = (
    f"a job can save at most {MAX_KEPT:,} bytes in all, and a step counts as at least {STEP_BYTES:,}: {_REMEDY}"
)


def check_saved(state: object) -> bytes:
    """Return what a handler saves as bytes.

    Raises:
        UsageError: it is not bytes-like, or too large.
    """
    if not isinstance(state, bytes | bytearray | memoryview):
        raise UsageError(f"save() takes bytes, not {type(state).__name__}: encode it, as in json.dumps(state).encode()")
    saved = bytes(cast("bytes", state))
    if len(saved) > MAX_SAVED:
        raise UsageError(f"{len(saved):,} bytes are over the {MAX_SAVED:,} that save() can store: {_REMEDY}")
    return saved


def check_step(name: object) -> str:
    """Return the name of a step.

    Raises:
        UsageError: it is not a str, or its length is not valid.
    """
    text = check_text(name, "the name of a step")
    if not 0 < len(text.encode()) <= MAX_STEP_NAME:
        raise UsageError(f"the name of a step must have 1 to {MAX_STEP_NAME} bytes, not {len(text.encode()):,}")
    return text


def encode_step(name: str, result: object) -> bytes:
    """Encode the result of a step: its kind, a space, and its value. The kinds are those of results: bytes, none, json.

    Raises:
        Failure: it cannot be stored. Another run would call the function again, so there is none.
    """
    kind = name_of(type(result))
    try:
        if result is None:
            return b"none "
        if isinstance(result, bytes | bytearray | memoryview):
            encoded = b"bytes " + cast("bytes", result)
        else:
            encoded = b"json " + encode_json(result)
    except Exception as error:  # any error from encoding a user's type
        raise Failure(
            f"step {name!r} was done, but its result cannot be saved: {kind} is neither bytes nor JSON "
            f"({error}); return what names it (an id), or None"
        ) from error
    if len(name.encode()) + len(encoded) > MAX_KEPT:
        raise Failure(f"step {name!r} was done, but its result of {len(encoded):,} bytes cannot be saved: {FULL}")
    return encoded


class End(NamedTuple):
    """How a wait of a workflow, or a job that it has started, has ended."""

    outcome: str
    value: bytes

    @classmethod
    def read(cls, stored: bytes) -> End:
        """Return the end that a record has: outcome, time, number of entries, and value, with spaces between them."""
        outcome, _, rest = stored.partition(b" ")
        return cls(outcome.decode("ascii", "replace"), rest.split(b" ", 2)[-1])


_FIRST: Final = re.compile(rb"first of \d+ jobs [0-9a-f]{32}( #\d+)?")
"""The key of a wait for the first of several jobs, whose value is the key of a job."""


def opened_fields(record: Mapping[bytes, bytes], values: StoredValues) -> dict[bytes, bytes]:
    """Return those fields of a record that have values, decoded.

    Raises:
        WrongKey, Undecodable: as `StoredValues.decode`.
    """
    found: dict[bytes, bytes] = {}
    for name, stored in record.items():
        if name in {b"task", b"saved"}:
            found[name] = values.decode(stored)
        elif name.startswith(_STEP) and name != _INTERNAL:
            found[name] = values.decode_tagged(stored)
        elif name.startswith(_END):
            found[name] = opened_end(name.removeprefix(_END), stored, values)
        elif name == b"job_ended":
            length, _, rest = stored.partition(b" ")
            size = whole(length, 0)
            found[name] = b"%b %b%b" % (length, rest[:size], values.decode_tagged(rest[size:]))
    return found


def opened_end(key: bytes, stored: bytes, values: StoredValues) -> bytes:
    """Return the record of how a wait, or a job of a workflow, has ended, with its value decoded. Raises as `opened_fields`."""
    *facts, value = stored.split(b" ", 3)
    is_value = facts[:1] in ([b"value"], [b"finished"]) and not _FIRST.fullmatch(key)
    return b" ".join((*facts, values.decode_tagged(value))) if is_value else stored


def redacted_save(save: Save) -> Save:
    """Return what is saved, without the texts of errors."""
    is_error = save.step == TRACEBACKS_STEP or save.value.startswith(b"failed ") or (save.number and save.step)
    return save._replace(value=redacted_step(save.value)) if save.step and is_error else save


def sealed_save(save: Save, values: StoredValues) -> Save:
    """Return what is saved, as it is stored. Errors of steps, and what worqr saves itself, are no values of the application.

    Raises:
        UsageError: the codec cannot encode it.
    """
    if save.refused or save.step == TRACEBACKS_STEP or (save.step and save.number):
        return save
    return save._replace(value=values.encode_tagged(save.value) if save.step else values.encode(save.value))


class Tries(NamedTuple):
    """The tries of a step that have failed."""

    number: int = 0
    failures: int = 0
    """How many of them count."""
    since: int = 0
    """When the first one began, in ms; 0: it is not known."""


def _read_try(stored: bytes) -> Tries:
    number, _, told = stored.partition(b" ")
    try:
        numbers = [each for each in msgspec.json.decode(told, type=list[str | int]) if isinstance(each, int)]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        numbers = []
    failures = numbers[1] if len(numbers) > 1 else whole(number, 0)
    return Tries(whole(number, 0), failures, numbers[0] if numbers else 0)


class SavedState:
    """What one run knows of what its job has saved. From any thread."""

    def __init__(self, record: Mapping[bytes, bytes]) -> None:
        self._lock = threading.Lock()
        self._saved = record.get(b"saved")
        self._asked_for_saved = self._saved is None
        self._sent = self._stored = whole(record.get(b"saved_number"), 0)
        self._steps = {
            name.removeprefix(_STEP).decode("utf-8", "replace"): value
            for name, value in record.items()
            if name.startswith(_STEP)
        }
        self._ends = {
            name.removeprefix(_END).decode("utf-8", "replace"): End.read(value)
            for name, value in record.items()
            if name.startswith(_END)
        }
        self._tries = {
            name.removeprefix(_TRY).decode("utf-8", "replace"): _read_try(value)
            for name, value in record.items()
            if name.startswith(_TRY)
        }
        self._record = record
        self._unsaved: set[str] = set()
        self._begun: set[str] = set()
        ends = [name for name in self._ends if not name.startswith(RETRY_OF)]
        self._unasked: set[str] = {name for name in (*self._steps, *ends) if name != TRACEBACKS_STEP}

    @property
    def saved(self) -> bytes | None:
        """The bytes that were saved last; None: none were."""
        self._asked_for_saved = True
        return self._saved

    def gets_further(self, saved: bytes) -> bool:
        """Return True if bytes are others than those that were saved last, and the run has asked for these."""
        return self._asked_for_saved and saved != self._saved

    def fields(self, delivered: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the fields of the record, of which `delivered` came with the claim, with what the run has changed. No waits."""
        with self._lock:
            ends = {_END + name.encode() for name in self._ends}
            found = {
                name: value for name, value in delivered.items() if name in ends or not name.startswith((_END, _WAIT))
            }
            found |= {_STEP + name.encode(): value for name, value in self._steps.items() if name not in self._unsaved}
            found |= {
                _TRY + name.encode(): b'%d ["","",%d,%d]' % (tries.number, tries.since, tries.failures)
                for name, tries in self._tries.items()
            }
            if self._saved is not None:
                found |= {b"saved": self._saved, b"saved_number": b"%d" % self._stored}
            return found

    def next_number(self) -> int:
        """Return the number of the next save."""
        with self._lock:
            self._sent += 1
            return self._sent

    def note_saved(self, save: Save) -> None:
        """Note that the server has stored what the run has saved. Steps note that themselves, but for those of a process."""
        if save.refused:
            self.forget_end(save.step)
            return
        with self._lock:
            if not save.step:
                if save.number > self._stored:
                    self._stored, self._saved = save.number, save.value
            elif save.number == 0 or save.step == TRACEBACKS_STEP:
                self._steps[save.step] = save.value
                self._unsaved.discard(save.step)
            else:
                self._tries[save.step] = _read_try(b"%d %b" % (save.number, save.value))

    def begin_step(self, name: str) -> tuple[bytes | None, bool]:
        """Begin a step. Return its result, if it has one; and whether that must be sent to the server.

        Raises:
            UsageError: this run has begun a step of this name before.
        """
        with self._lock:
            if name in self._begun:
                raise UsageError(
                    f"this run has taken the step {name!r} before, and a step is taken once per job: give each step its own "
                    f"name, as in worqr.step(f'{name} {{item}}', ...)"
                )
            self._begun.add(name)
            self._unasked.discard(name)
            return self._steps.get(name), name in self._unsaved

    @property
    def asked_for_all(self) -> bool:
        """True if the run has asked for each step and each end that earlier runs have stored."""
        return not self._unasked

    def unasked(self) -> list[str]:
        """Return the names of the steps and ends that earlier runs have stored, and that this run has not asked for."""
        with self._lock:
            return sorted(self._unasked)

    def has(self, name: str) -> bool:
        """Return True if the record has something of this name: a step, a try of one, a wait, or a job of a workflow."""
        return any(kind + name.encode() in self._record for kind in _NAMED)

    def tries_of(self, name: str) -> Tries:
        """Return the tries of a step that have failed."""
        return self._tries.get(name, Tries())

    def note_try(self, name: str, tries: Tries) -> None:
        """Note that a try of a step has failed, and that the server knows it."""
        with self._lock:
            self._tries[name] = tries

    def end_of(self, key: str) -> End | None:
        """Return how the wait of this key has ended; None if it has not."""
        with self._lock:
            self._unasked.discard(key)
            return self._ends.get(key)

    def note_end(self, key: str, end: End) -> None:
        """Note how a job that the run has started has ended."""
        with self._lock:
            self._ends[key] = end

    def forget_end(self, key: str) -> None:
        """Forget the end of a wait, whose value was refused."""
        with self._lock:
            self._ends.pop(key, None)

    def give_up_step(self, name: str) -> None:
        """Note that a step has raised. The handler may begin it again."""
        with self._lock:
            self._begun.discard(name)

    def has_step(self, name: str) -> bool:
        """Return True if the server has the result of a step, or that it has failed for good."""
        with self._lock:
            return name in self._steps and name not in self._unsaved

    def note_step(self, name: str, result: bytes) -> None:
        """Note the result of a step, which the server does not have yet."""
        with self._lock:
            self._steps[name] = result
            self._unsaved.add(name)

    def note_step_saved(self, name: str) -> None:
        """Note that the server has the result of a step."""
        with self._lock:
            self._unsaved.discard(name)


class JobFields(dict[bytes, bytes]):
    """The fields of a job's record, as the claim delivered them, and what its run has saved since."""

    __slots__ = ("_saved_state",)

    _saved_state: SavedState

    def resumed(self, waits: Sequence[Wait], ends: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the fields for another run under the same claim; see `Run.resumed`."""
        found = self.saved_state().fields(self)
        found |= {_WAIT + wait.key.encode(): b"" for wait in waits}
        return found | dict(ends)

    def saved_state(self) -> SavedState:
        """Return what the run knows of what its job has saved; from any thread."""
        try:
            return self._saved_state
        except AttributeError:
            pass
        with _MAKING:
            if not hasattr(self, "_saved_state"):
                self._saved_state = SavedState(self)
            return self._saved_state


# Results of runs, encoded for storage, and errors, described for it: where the handler ran, not on the peer's loop.
#
# A worker process encodes its own results, so this module needs no connection.


class Encoded(NamedTuple):
    """A result that was encoded where the handler ran."""

    kind: str
    value: bytes


class FromProcess(NamedTuple):
    """A result that a worker process has made bytes of. The codec of the mesh encodes it in the peer: the process has no keys."""

    kind: str
    value: bytes


class NotEncoded(NamedTuple):
    """A result that could not be encoded where the handler ran."""

    why: str


def encode_result(value: object, max_result: int, values: StoredValues | None = None) -> Result:
    """Encode a handler's return value for storage: bytes unchanged, None as None, everything else as JSON; then by the codec of
    the mesh.

    Raises:
        UsageError: it cannot be encoded, or is over `max_result` bytes.
    """
    if type(value) is Encoded:
        return value
    if type(value) is NotEncoded:
        raise UsageError(value.why)
    if value is None or (type(value) is FromProcess and value.kind == "none"):
        return "none", b""
    try:
        if type(value) is FromProcess:
            kind, encoded = value
        elif issubclass(type(value), (bytes, bytearray, memoryview)):
            kind, encoded = "bytes", bytes(cast("bytes", value))
        else:
            kind, encoded = "json", encode_json(value)
    except BaseException as error:  # any error from encoding a user's type
        raise UsageError(
            f"its result cannot be kept: {qualname_of(type(value))} is neither bytes nor JSON ({text_of(error, 1000)})"
        ) from error
    try:
        encoded = encoded if values is None else values.encode(encoded)
    except UsageError as error:
        raise UsageError(f"its result cannot be kept: {error}") from error
    if len(encoded) > max_result:
        raise UsageError(
            f"its result cannot be kept: {len(encoded):,} bytes are over the limit of {max_result:,} "
            "(Mesh(max_payload=...)); store it elsewhere and return its name"
        )
    return kind, encoded


def encoded_outcome(run: Run[Any] | None, value: object, max_result: int) -> object:
    """Return what a handler returned, encoded as far as it will be stored, and describe the errors among it.

    Called in the thread or on the loop in which the handler ran.
    """
    if run is None:
        return value
    if not run.is_list:
        return _encoded(run, value, max_result)
    calls = cast("ListRun", run)
    outcomes = Outcomes(calls.outcomes(True, value, None))
    for place, (item, outcome) in enumerate(zip(calls.claimed, outcomes, strict=True)):
        if is_a(outcome, BaseException):
            describe_end(item, outcome)
        else:
            outcomes[place] = _encoded(item, outcome, max_result)
    return outcomes


def _encoded(run: Run[Any], value: object, max_result: int) -> object:
    if not run.keeps_result():
        return None
    try:
        return Encoded(*encode_result(value, max_result, run.host.values))
    except UsageError as error:
        return NotEncoded(str(error))


def describe_end(run: Run[Any] | None, error: BaseException) -> None:
    """Describe the error of a run for its end. Called in the thread or on the loop in which the handler ran."""
    if run is not None and run.cancel_reason is None:
        run.describe(decide_retry(error, run.policy, run.failures, run.stalls).error)


PolicyFields = tuple[tuple[bytes, bytes], ...]
"""Policy fields of a job, which replace those of its queue."""

_BECOMING: Final = threading.Lock()
_waits: Final[dict[Callable[[], object], Run[Any]]] = {}
"""The threads of handlers that wait for the server: how each is woken, and its run. Changed from any thread, by single steps."""
_POLICY_FIELDS: Final = frozenset(name.encode() for name in POLICY_FIELDS)
_NUMBERS: Final = frozenset(
    (
        *(
            b"run_at",
            b"queued",
            b"expires",
            b"expires_at",
            b"retried_at",
            b"scheduled_for",
            b"latest",
            b"failing_since",
        ),
        *(b"failures", b"stalls", b"timeouts", b"saved_number", b"saved_size"),
    )
)
"""Fields of a record that are whole numbers, beside those of its policy."""


class Save(NamedTuple):
    """What a run saves: bytes, the result of a step, or a failed try of one."""

    number: int
    """Grows with each save of bytes; for a step, the number of its failed try, 0 for its result; 1 to replace what
    `TRACEBACKS_STEP` has.
    """
    step: str
    """The name of the step; empty for bytes."""
    value: bytes
    """The bytes, the encoded result, or the error of the try."""
    progress: bool = False
    """The run has asked for all that earlier runs have stored, so a new result is progress."""
    refused: bool = False
    """Nothing is saved: `step` is the key of a wait, whose value does not count."""
    took: int | None = None
    """The ms that the step of a workflow took; None of another job."""


class Suspension(NamedTuple):
    """With what a run is suspended."""

    waits: tuple[Wait, ...]
    progress: bool
    """The run has asked for all that earlier runs have stored."""


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

    def report_progress(self, run: Run[Any], done: float | None, message: str, value: bytes, /) -> None:
        """Send the progress of a run, and its value; empty: it stays. From any thread."""
        ...

    def extend(self, run: Run[Any], seconds: float, /) -> None:
        """Move the deadline of a run; from any thread."""
        ...

    def note_cost(self, run: Run[Any], used: int, /) -> None:
        """Note how much of limits with a unit a run has used; from any thread."""
        ...

    def save(self, run: Run[Any], save: Save, /) -> Future[None]:
        """Store what a run saves; from any thread. The future is done when it is stored."""
        ...

    @property
    def base(self) -> str:
        """The base of the keys of its queue, or of its shard of it."""
        ...

    def note_children(self, run: Run[Any], children: Sequence[Child], /) -> Future[NotedChildren]:
        """Note that the run of a workflow starts jobs; from any thread."""
        ...

    @property
    def values(self) -> StoredValues | None:
        """Encodes what is stored, and decodes it; None: the mesh has no codec, or its peer does that for this process."""
        ...

    @property
    def hides_arguments(self) -> bool:
        """The mesh has a codec: the names of steps and jobs of workflows have digests of arguments."""
        ...

    @property
    def deploy(self) -> int:
        """The number of the version of the application; 0: it has none."""
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

    def call_in_peer(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the peer's loop, unless that has ended. From any thread."""
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
        described: the errors of it that were described, by their ids; None: none was.
        flow: what it knows of its durable calls; None: it is not the run of a workflow here.
        suspension: with what it is suspended; None: it is not.
        progressed: it got further than the runs before it, and the counters of its job have begun anew.
        opened: its payload, and what its job has saved, were decoded by the codec of the mesh.
    """

    __slots__ = (
        *("task", "fence", "began", "record", "policy", "host", "registration", "progressed", "opened"),
        *("state", "cancel_reason", "scope", "timer", "offloaded", "described", "flow", "suspension"),
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
        self.described: dict[int, tuple[BaseException, Description]] | None = None
        self.flow: Flow | None = None
        self.suspension: Suspension | None = None
        self.progressed: bool = False
        self.opened: bool = False
        if type(entry) is bytes:
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
        return 0 if self.record is None else whole(self.record.get(name), 0)

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
        """Return True if the handler's return value is to be stored or kept, or is for a follow-up, or for the workflow that has
        started the job.
        """
        record = self.record
        return record is not None and (
            self.policy.result_ttl > 0 or b"parent" in record or b"follow" in record or b"done" in record
        )

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
                for wake, run in list(_waits.items()):
                    if run is self:
                        wake()

    def open(self, values: StoredValues) -> None:
        """Decode its payload and what its job has saved, before its handler begins.

        Raises:
            WrongKey: a value has a key that this mesh does not have.
            Undecodable: a value was changed, or is plain and must not be.
        """
        if not self.opened:
            record = None if self.record is None else {**self.record, **opened_fields(self.record, values)}
            self.task = values.decode(self.task)
            if record is not None:
                self.record = JobFields(record)
            self.opened = True

    def note_opened(self) -> None:
        """Note that it was made of decoded fields."""
        self.opened = True

    def begin_flow(self, flow: Flow) -> None:
        """Note that the handler of a workflow begins."""
        self.flow = flow

    def suspend(self, waits: Sequence[Wait], *, progress: bool) -> None:
        """Cancel the run, because it only waits. From any thread.

        Args:
            waits: what it waits for.
            progress: it has asked for all that earlier runs have stored.
        """
        self.suspension = Suspension(tuple(waits), progress)
        if self.cancel_reason is None:
            self.cancel_reason = "suspended"
        if self.offloaded is None:
            self.cancel("suspended")
        else:
            self.offloaded.call_in_peer(partial(self.cancel, "suspended"))

    def note_progress(self) -> None:
        """Note that it got further than the runs before it."""
        self.progressed = True

    def note_lost(self) -> None:
        """Note that its claim is lost. The handler is not cancelled, because the save that it waits for raises ClaimLost."""
        if self.state is not SETTLED:
            self.cancel_reason = "lost"

    def settle(self) -> None:
        """Note that the end of the run was decided. It may not be settled again, and its deadline does not count any more."""
        self.state = SETTLED
        if self.timer is not None:
            self.timer.run = None

    # Its next try

    def decide(self, error: BaseException) -> RetryDecision:
        """Decide the next step for its task, because it raised `error`. Once for each run: a function of the application may
        decide about the delay.
        """
        stalls, failures = (0, 0) if self.progressed else (self.stalls, self.failures)
        decision = decide_retry(error, self.policy, failures, stalls)
        if decision.backs_off and self.policy.own_backoff is not None:
            kind = self.describe(decision.error).error.type
            decision = replace(decision, delay=self.delay_after(stalls if decision.stalled else failures, kind))
        if decision.kind != "retry" or not decision.counted or decision.stalled:
            return decision
        return decision if self.has_time_for(decision.delay, decision.run_at_ms) else replace(decision, last=True)

    def delay_after(self, times: int, error: str) -> float:
        """Return the seconds until the next try, after `times` earlier runs that ended in the same way."""

        def report(why: str) -> None:
            text = (
                "queue %(queue)r, job %(job)s: its function for the backoff failed, and the default decides: %(error)s"
            )
            emit(logger, "retry.backoff", text, queue=self.queue, job=self.id, error=why)

        return self.policy.delay_after(times, error, report)

    @property
    def failing_since(self) -> int | None:
        """When the first run of its job that failed has begun, in ms; this one, if none has. None: its policy does not ask."""
        if self.policy.retry_for is None:
            return None
        known = 0 if self.record is None or self.progressed else whole(self.record.get(b"failing_since"), 0)
        return known or self.fence // 1000

    def has_time_for(self, delay: float, run_at_ms: int | None = None) -> bool:
        """Return True if a retry may begin after `delay` seconds, or at a time. Tokens of claims are the server's clock."""
        since = self.failing_since
        if since is None or self.policy.retry_for is None:
            return True
        elapsed = time.monotonic() - self.began if self.began else 0.0
        at = self.fence / 1000 + (elapsed + delay) * 1000 if run_at_ms is None else run_at_ms
        return at <= since + self.policy.retry_for * 1000

    # Its errors

    def describe(self, error: BaseException) -> Description:
        """Return an error of this run as text. It is described once, in the first thread that asks."""
        described = self.described
        if described is None:
            described = self.described = {}
        if (known := described.get(id(error))) is None:
            known = described[id(error)] = error, describe(error)
        return known[1]

    def forget_errors(self) -> None:
        """Forget the described errors, whose tracebacks hold the frames of the handler."""
        self.described = None

    # Called by its handler

    def report_progress(self, done: float | None, message: str, value: bytes = b"") -> None:
        """Pass a progress report to the host; from any thread. `value`: as `ops.Progress` has it."""
        record = self._become_job()
        record[b"progress"], record[b"message"] = b"" if done is None else repr(done).encode(), message.encode()
        self.host.report_progress(self, done, message, value)

    def report_value(self, value: bytes) -> None:
        """Pass a value to the host, with the progress as it is; from any thread."""
        record = self._become_job()
        message = record.get(b"message", b"").decode("utf-8", "replace")
        self.report_progress(finite(record.get(b"progress")), message, value)

    def _become_job(self) -> JobFields:
        with _BECOMING:  # two threads of a handler may save at the same time
            if self.record is None:
                self.record = JobFields(((b"id", self.id.encode()), (b"task", self.task)))
            return self.record

    def saved_state(self) -> SavedState:
        """Return what it knows of what its job has saved; from any thread. Its task becomes a job, if it is none."""
        return self._become_job().saved_state()

    def resumed(self, waits: Sequence[Wait], ends: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the fields of the record for another run under this claim: as they were delivered, with what was saved since.

        Args:
            waits: for what this run waits.
            ends: fields that say which of these waits have ended.
        """
        return self._become_job().resumed(waits, ends)

    def save(self, save: Save) -> Future[None]:
        """Store what its handler saves; from any thread. The future is done when it is stored."""
        return self.host.save(self, save)

    def check_may_wait(self, instead: str) -> None:
        """Raise UsageError if an event loop runs in this thread, which must not wait. `instead`: the code to write."""
        from worqr.link import loop_name_here  # a worker process does without the link

        if name := loop_name_here():
            raise UsageError(f"this would block the running {name} event loop: write `{instead}`")

    def check_awaitable(self, call: str, instead: str) -> None:
        """Raise UsageError in a plain function, which cannot await what a call returns, and would go on at once.

        Args:
            call: what was called.
            instead: the code to write.
        """
        from worqr.link import can_wait_here  # a worker process does without the link

        if not can_wait_here():
            raise UsageError(
                f"{call} has done nothing, because no event loop runs in this thread that could await it: in a plain "
                f"function, write {instead}"
            )

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

    # Called by a thread that waits for the server, in a call of worqr

    def check_wait(self) -> None:
        """Do as `check_cancelled`. A thread that the handler has started itself goes on."""
        with suppress(UsageError):
            self.check_cancelled()

    def add_wait(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the run is cancelled."""
        _waits[wake] = self

    def remove_wait(self, wake: Callable[[], object]) -> None:
        """Do not call `wake` any more."""
        _waits.pop(wake, None)


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

    Such a job does not run, because no worker can tell when, or how often, it should. Its policy is checked where it is read.
    """
    record[b"id"].decode()
    numbers = _NUMBERS.intersection(record)
    if not all(map(bytes.isdigit, map(record.__getitem__, numbers))):
        wrong = {name.decode(): record[name][:40] for name in record if name in numbers and not record[name].isdigit()}
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
        Undecodable: another program enqueued it.
    """
    facts = run.record.get(b"failed") if run.record is not None else None
    if facts is None:
        raise Undecodable("a task in a failure queue that no failure put there")
    return failed_record(queue, run.task, msgspec.msgpack.decode(facts, type=dict[str, Any]))


current_run: Final[ContextVar[Run[Any]]] = inside.current_run
