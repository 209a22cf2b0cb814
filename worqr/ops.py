"""One typed function per transaction: builds the call and says how its reply is read. No I/O, no loops around calls.

Each function mirrors the file of its name in ``lua/``, whose header has the guarantees; here stand only the Python side's
words. A reply is a list whose first item is a word; a word that means a refusal becomes an error, all others a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from worqr.call import Argument, Call
from worqr.errors import QueueFull, WorqrBug, WrongVersion
from worqr.keys import QueueKeys, RegistryKeys
from worqr.lua import script
from worqr.task import RemoteError

T = TypeVar("T")
Reply = list[Any]

WIRE_VERSION = 1
MAX_ITEMS = 1000
"""Tasks or claims in one request."""
MAX_BYTES = 8 * 1024 * 1024
"""Bytes of payload in one request; a larger single task travels alone."""
MAX_SKIPPED = 1000
"""References to nothing that one script skips."""
CANCEL_BUDGET = 10_000
"""Claims that one cancel looks at in one script."""
QUEUES_EXPIRE_S = 30 * 24 * 3600
WAITING_EXPIRE_S = 10
INFO_EXPIRE_S = 60


@dataclass(frozen=True, slots=True)
class Started:
    """Reply of start_tasks: its word, the first claim's fence number, and one entry per claim.

    An entry is the payload, or ``[payload, id, failures, stalls, timeouts]`` of a job, or None for a claim that is gone.
    """

    word: str
    first: int
    entries: list[Any]


@dataclass(frozen=True, slots=True)
class Returned:
    """Reply of stop_work and fail_worker: whether there is more to do, and how many claims ended in which way."""

    more: bool
    given: int
    cancelled: int
    aside: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Reply of a cancel: removed while waiting, claims marked while running, and where to go on, if there is more."""

    more: bool
    waiting: int
    claims: list[int]
    cursor: str
    after: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """Reply of inspect; `workers` are the members of the fence."""

    waiting: int
    due: int
    running: int
    failed: int
    broken: int
    paused: str | None
    trash: bool
    workers: list[str]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Beat:
    """Reply of keep_worker_alive: alive or dead, re-armed after it had lapsed, holds the lease, queues that wait."""

    alive: bool
    revived: bool
    leads: bool
    waiting: list[str]


@dataclass(frozen=True, slots=True)
class Look:
    """Reply of look_at_workers: the server's run id, each registered worker's beat (None: missing), and the dying."""

    run_id: str
    beats: dict[str, bytes | None]
    dying: list[str]


def _word(reply: Reply) -> str:
    word: bytes | str = reply[0]
    return word.decode() if isinstance(word, bytes) else word


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _texts(values: Iterable[bytes]) -> list[str]:
    return [_text(value) for value in values]


def _pairs(values: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


def _call(
    name: str,
    base: str,
    keys: tuple[str, ...],
    args: tuple[Argument, ...],
    read: Callable[[Reply], T],
    *,
    numbered: bool = False,
    size: int = 0,
) -> Call[T]:
    return Call(script(name), base, keys, args, read, numbered, size)


def _expect(*words: str) -> Callable[[Reply], str]:
    """A reader that answers the reply's word, one of `words`."""

    def read(reply: Reply) -> str:
        word = _word(reply)
        if word not in words:
            raise WorqrBug(f"the server answered {word!r} where one of {', '.join(words)} was expected")
        return word

    return read


_done = _expect("ok", "late")


# Producing


def enqueue(keys: QueueKeys, tasks: Sequence[bytes], *, front: bool = False, max_length: int | None = None) -> Call[int]:
    """Put up to MAX_ITEMS tasks into the queue; answers how many."""

    def read(reply: Reply) -> int:
        if _word(reply) == "full":
            raise QueueFull(
                f"queue {keys.queue!r} holds {int(reply[1])} tasks, {len(tasks)} more are over its max_length of {max_length}"
            )
        return int(reply[1]) if len(reply) > 1 else len(tasks)

    bound = -1 if max_length is None else max_length
    args = (bound, 1 if front else 0, *tasks)
    return _call("enqueue", keys.base, (keys.base,), args, read, numbered=True, size=sum(map(len, tasks)))


# Consuming


def start_tasks(keys: QueueKeys, worker: str, number: int, wanted: int) -> Call[Started]:
    """Claim up to `wanted` tasks; 0 only passes a wake-up on."""

    def read(reply: Reply) -> Started:
        return Started(_word(reply), int(reply[1]) if len(reply) > 1 else 0, reply[2:])

    names = (keys.base, keys.workers, keys.claims(worker), keys.hungry, keys.suspects, keys.paused)
    return _call("start_tasks", keys.base, names, (worker, number, wanted, MAX_BYTES, MAX_SKIPPED), read)


def _exceptions(reply: Reply) -> dict[int, str]:
    """Claim -> word, for the claims that did not simply end as asked."""
    if len(reply) == 1:
        return {}
    return {int(claim): _text(word) for claim, word in _pairs(reply[1:])}


def finish_tasks(keys: QueueKeys, worker: str, claims: Sequence[int]) -> Call[dict[int, str]]:
    """End up to MAX_ITEMS claims as finished; answers those that did not (cancelled, mine, lost)."""
    names = (keys.base, keys.workers, keys.claims(worker), keys.suspects)
    return _call("finish_tasks", keys.base, names, (worker, *claims), _exceptions)


def stop_tasks(keys: QueueKeys, worker: str, claims: Sequence[int]) -> Call[dict[int, str]]:
    """Give up to MAX_ITEMS claims back to the front; answers those that were not (cancelled, dropped, mine, lost)."""
    names = (keys.base, keys.workers, keys.claims(worker), keys.policy(worker))
    return _call("stop_tasks", keys.base, names, (worker, *claims), _exceptions)


def _ended(keys: QueueKeys, worker: str) -> tuple[str, ...]:
    return (keys.base, keys.workers, keys.claims(worker), keys.suspects)


def retry_task(
    keys: QueueKeys,
    worker: str,
    claim: int,
    error: RemoteError,
    *,
    max_failures: int,
    keep_failed: int,
    counted: bool = True,
) -> Call[str]:
    """The run failed: to the back with one failure more, or set aside at the limit."""
    args = (worker, claim, 1 if counted else 0, max_failures, keep_failed, error.type, error.message, error.traceback)
    read = _expect("given", "aside", "cancelled", "dropped", "gone", "mine", "lost")
    return _call("retry_task", keys.base, _ended(keys, worker), args, read)


def fail_task(
    keys: QueueKeys, worker: str, claim: int, error: RemoteError, *, keep_failed: int, broken: bool = False
) -> Call[str]:
    """The run failed for good: set aside."""
    kind = "broken" if broken else "failed"
    args = (worker, claim, kind, keep_failed, error.type, error.message, error.traceback)
    return _call("fail_task", keys.base, _ended(keys, worker), args, _expect("aside", "cancelled", "gone", "mine", "lost"))


def reconcile(keys: QueueKeys, worker: str, named: Sequence[int] = ()) -> Call[tuple[list[int], list[int]] | None]:
    """(marked, gone) among the worker's claims; None when it stands outside the fence."""

    def read(reply: Reply) -> tuple[list[int], list[int]] | None:
        if _word(reply) == "not_serving":
            return None
        marked = int(reply[1])
        return [int(claim) for claim in reply[2 : 2 + marked]], [int(claim) for claim in reply[2 + marked :]]

    names = (keys.workers, keys.claims(worker), keys.cancelling)
    return _call("reconcile", keys.base, names, (worker, *named), read)


# Joining, leaving, sweeping


def start_worker(
    keys: RegistryKeys, worker: str, *, keepalive_ms: int, facts: Sequence[tuple[str, str | int]]
) -> Call[str]:
    """Register a worker; keepalive_ms 0: it never counts as dead."""

    def read(reply: Reply) -> str:
        if _word(reply) == "version":
            raise WrongVersion(
                f"the mesh {keys.prefix!r} on this server speaks wire version {_text(reply[1])}, this worqr speaks "
                f"{WIRE_VERSION}: upgrade the older side, or use another prefix"
            )
        return _done(reply)

    names = (keys.registered, keys.worker(worker), keys.version, keys.info(worker))
    flat = [part for fact in facts for part in fact]
    args = (worker, keepalive_ms, WIRE_VERSION, INFO_EXPIRE_S, *flat)
    return _call("start_worker", keys.base, names, args, read, numbered=True)


def keep_worker_alive(
    keys: RegistryKeys, worker: str, beat: int, *, keepalive_ms: int, lease_ms: int, running: int, room: int
) -> Call[Beat]:
    """One beat; lease_ms 0: do not ask for the lease."""

    def read(reply: Reply) -> Beat:
        word = _word(reply)
        if word == "dead":
            return Beat(False, False, False, [])
        return Beat(True, word == "revived", bool(reply[1]), _texts(reply[2:]))

    names = (keys.registered, keys.worker(worker), keys.leader, keys.waiting, keys.info(worker))
    args = (worker, beat, keepalive_ms, lease_ms, INFO_EXPIRE_S, running, room)
    return _call("keep_worker_alive", keys.base, names, args, read)


def _still_mapped(reply: Reply) -> list[str]:
    return _texts(reply[1:]) if _word(reply) == "busy" else []


def stop_worker(keys: RegistryKeys, worker: str) -> Call[list[str]]:
    """Leave the registry; answers the queues still mapped, which must be stopped first (then nothing was done)."""
    names = (keys.registered, keys.worker(worker), keys.work_map(worker), keys.info(worker), keys.leader)
    return _call("stop_worker", keys.base, names, (worker,), _still_mapped)


def map_work(keys: RegistryKeys, worker: str, queue: str) -> Call[str]:
    """Note that the worker is about to serve the queue: ok, or dead."""
    names = (keys.registered, keys.work_map(worker), keys.queues)
    args = (worker, queue, QUEUES_EXPIRE_S)
    return _call("map_work", keys.base, names, args, _expect("ok", "dead", "late"), numbered=True)


def unmap_work(keys: RegistryKeys, worker: str, queue: str) -> Call[str]:
    """Note that the worker serves the queue no more."""
    return _call("unmap_work", keys.base, (keys.work_map(worker),), (queue,), _done, numbered=True)


def start_work(keys: QueueKeys, worker: str, *, max_stalls: int, keep_failed: int, last: int) -> Call[str]:
    """Into the fence; `last` is the highest number of a start request that the worker sent to this queue before."""
    names = (keys.workers, keys.policy(worker))
    return _call("start_work", keys.base, names, (worker, max_stalls, keep_failed, last), _done, numbered=True)


def _returned(reply: Reply) -> Returned:
    word = _word(reply)
    if word == "late":
        return Returned(False, 0, 0, 0)
    return Returned(word == "more", int(reply[1]), int(reply[2]), int(reply[3]))


def stop_work(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Call[Returned]:
    """Leave the queue; call again while there is more."""
    return _call("stop_work", keys.base, (keys.base,), (worker, limit), _returned, numbered=True)


def fail_worker(keys: QueueKeys, worker: str, limit: int = MAX_ITEMS) -> Call[Returned]:
    """Give a dead worker's claims back; call again while there is more."""
    return _call("fail_worker", keys.base, (keys.base,), (worker, limit), _returned)


def look_at_workers(keys: RegistryKeys) -> Call[Look]:
    """Who is registered, with what beat."""

    def read(reply: Reply) -> Look:
        beats = {_text(worker): beat for worker, beat in _pairs(reply[2])}
        return Look(_text(reply[1]), beats, _texts(reply[3]))

    return _call("look_at_workers", keys.base, (keys.registered, keys.dying), (keys.worker(""),), read)


def condemn_worker(keys: RegistryKeys, worker: str, seen: bytes | None) -> Call[str]:
    """Declare the worker dead if its beat is still `seen` (None: missing): ok, alive or gone."""
    names = (keys.registered, keys.dying, keys.worker(worker))
    return _call("condemn_worker", keys.base, names, (worker, seen or b""), _expect("ok", "alive", "gone"))


def forget_worker(keys: RegistryKeys, worker: str) -> Call[list[str]]:
    """End a sweep; answers the queues still mapped, which must be failed and unmapped first."""
    names = (keys.dying, keys.work_map(worker), keys.info(worker))
    return _call("forget_worker", keys.base, names, (worker,), _still_mapped)


# Cancelling, clearing, looking


def _cancelled(reply: Reply, cursor: str, after: str, claims: Sequence[Any]) -> Cancelled:
    return Cancelled(_word(reply) == "more", int(reply[1]), [int(claim) for claim in claims], cursor, after)


def cancel_task(keys: QueueKeys, task: bytes, cursor: str = "0", after: str = "-") -> Call[Cancelled]:
    """Cancel every task with this payload; call again with cursor and after while there is more."""

    def read(reply: Reply) -> Cancelled:
        if _word(reply) == "late":
            return Cancelled(False, 0, [], "-", "-")
        cursor, after = (str(part) if isinstance(part, int) else _text(part) for part in reply[3:5])
        return _cancelled(reply, cursor, after, reply[5:])

    args = (task, cursor, after, CANCEL_BUDGET)
    return _call("cancel_task", keys.base, (keys.base,), args, read, numbered=True, size=len(task))


def cancel_all(keys: QueueKeys, after: str = "-") -> Call[Cancelled | None]:
    """Cancel every task; call again with after while there is more. None: purge_queue first."""

    def read(reply: Reply) -> Cancelled | None:
        word = _word(reply)
        if word == "busy":
            return None
        if word == "late":
            return Cancelled(False, 0, [], "-", "-")
        return _cancelled(reply, "-", _text(reply[3]), reply[4:])

    return _call("cancel_all", keys.base, (keys.base,), (after, CANCEL_BUDGET), read, numbered=True)


def delete_queue(keys: QueueKeys) -> Call[bool]:
    """Put all that waits out of reach; False: purge_queue first."""

    def read(reply: Reply) -> bool:
        return _word(reply) != "busy"

    return _call("delete_queue", keys.base, (keys.base, keys.counts), (), read, numbered=True)


def purge_queue(keys: QueueKeys, limit: int = MAX_ITEMS) -> Call[bool]:
    """One step of emptying what delete_queue and cancel_all put out of reach; True: there is more."""

    def read(reply: Reply) -> bool:
        return _word(reply) == "more"

    return _call("purge_queue", keys.base, (keys.base, keys.trash, keys.trash_suspects), (limit,), read)


def pause(keys: QueueKeys, reason: str) -> Call[str]:
    """Stop claims on the queue."""
    return _call("pause", keys.base, (keys.base, keys.paused), (reason,), _done, numbered=True)


def resume(keys: QueueKeys) -> Call[str]:
    """Let claims on the queue go on."""
    return _call("resume", keys.base, (keys.base, keys.paused), (), _done, numbered=True)


def inspect(keys: QueueKeys) -> Call[Inspected]:
    """What there is to know of the queue."""

    def read(reply: Reply) -> Inspected:
        waiting, due, running, failed, broken = (int(part) for part in reply[1:6])
        paused = None if reply[6] is None else _text(reply[6])
        counts = {_text(name): int(value) for name, value in _pairs(reply[9])}
        return Inspected(waiting, due, running, failed, broken, paused, bool(reply[7]), _texts(reply[8]), counts)

    names = (
        *(keys.base, keys.suspects, keys.workers, keys.due, keys.failed, keys.broken),
        *(keys.paused, keys.counts, keys.trash, keys.trash_suspects),
    )
    return _call("inspect", keys.base, names, (), read)


def list_tasks(keys: QueueKeys, limit: int, *, from_front: bool = False) -> Call[tuple[int, list[bytes]]]:
    """How many tasks wait, and up to `limit` payloads, newest first or in the order in which they will be taken."""

    def read(reply: Reply) -> tuple[int, list[bytes]]:
        return int(reply[1]), reply[2:]

    args = (limit, 1 if from_front else 0, MAX_BYTES, MAX_SKIPPED)
    return _call("list_tasks", keys.base, (keys.base, keys.suspects, keys.counts), args, read)


def list_claims(keys: QueueKeys, limit: int = MAX_ITEMS) -> Call[list[tuple[int, str, int]]]:
    """(claim, worker, failures) of what runs."""

    def read(reply: Reply) -> list[tuple[int, str, int]]:
        return [(int(claim), _text(worker), int(failures)) for claim, worker, failures in reply[1:]]

    return _call("list_claims", keys.base, (keys.base, keys.workers), (limit,), read)


def list_workers(keys: RegistryKeys) -> Call[list[tuple[str, int, dict[str, str], list[str]]]]:
    """(worker, ms until its key expires, facts, queues) of every registered worker; -1: never, -2: no key."""

    def read(reply: Reply) -> list[tuple[str, int, dict[str, str], list[str]]]:
        return [
            (_text(worker), int(ttl), {_text(k): _text(v) for k, v in _pairs(facts)}, _texts(queues))
            for worker, ttl, facts, queues in reply[1:]
        ]

    stems = (keys.worker(""), keys.info(""), keys.work_map(""))
    return _call("list_workers", keys.base, (keys.registered,), stems, read)


def list_queues(keys: RegistryKeys) -> Call[list[str]]:
    """The names of all queues seen or served."""

    def read(reply: Reply) -> list[str]:
        return _texts(reply[1:])

    names = (keys.queues, keys.registered, keys.dying)
    return _call("list_queues", keys.base, names, (keys.work_map(""),), read)


def note_queues(keys: RegistryKeys, names: Sequence[str]) -> Call[str]:
    """Remember names of queues that tasks were put into."""
    return _call("note_queues", keys.base, (keys.queues,), (QUEUES_EXPIRE_S, *names), _done)


def post_waiting(keys: RegistryKeys, names: Sequence[str]) -> Call[str]:
    """Tell every beat which queues wait."""
    return _call("post_waiting", keys.base, (keys.waiting,), (WAITING_EXPIRE_S, *names), _done)


def adopt_worker(keys: RegistryKeys, worker: str, queue: str) -> Call[str]:
    """Put a worker that stands in the queue's fence but in no registry among the dying: ok, or alive."""
    names = (keys.registered, keys.dying, keys.work_map(worker))
    return _call("adopt_worker", keys.base, names, (worker, queue), _expect("ok", "alive"))


def list_marks(keys: QueueKeys, claims: Sequence[int]) -> Call[list[int]]:
    """Those of up to MAX_ITEMS claims whose cancellation is asked for and not settled yet."""

    def read(reply: Reply) -> list[int]:
        return [int(claim) for claim in reply[1:]]

    return _call("list_marks", keys.base, (keys.cancelling,), tuple(claims), read)
