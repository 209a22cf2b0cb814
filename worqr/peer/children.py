"""`Children`: the jobs that one run of a workflow starts, and how they have ended.

The parent notes a child in its own record before it dispatches it. The id of the child is made of the id and the life of the
parent and of the key of the call, so a child that is dispatched again is the same job. Its end comes back into the record of
the parent, and is there when the parent runs again. Not here: what a workflow awaits (`worqr.functions.function`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from worqr.client.client import Client
from worqr.client.producer import Call
from worqr.client.sync import sync
from worqr.errors import ClaimLost, QueueFull, UsageError
from worqr.inside import options_of
from worqr.job_options import FOLLOW_UPS, MAX_ID
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, Child, NotedChild, NotedChildren, Wait
from worqr.peer.error_throttle import sleep_here, wait_done
from worqr.peer.run import FULL, End
from worqr.policy import Failure, LifetimeOver, Snooze
from worqr.stored_values import whole
from worqr.validation import encode_json

if TYPE_CHECKING:
    from worqr.peer.durable import Flow

MOST_LEVELS: Final = 16
"""The most levels of jobs below a workflow that no other workflow has started."""
FULL_PAUSE: Final = 1.0
"""Seconds before a job is sent again whose queue is at its `max_length`."""
ROOM_WITHIN: Final = 2.0
"""Seconds for which a run waits for room with its slot."""
ROOM_AGAIN: Final = 5.0
"""Seconds after which it runs again then: the jobs that make room may need the slot."""
AGAIN: Final = " ~"
"""Stands between the key of a job and a number, in the name of a job that a workflow has started since it ran again."""
_REFUSED: Final = ("id", "unique_for", "exists", "batch")


class _Unsent(NamedTuple):
    key: str
    call: Call[Any]
    client: Client


class Children:
    """The jobs that one run starts. From any thread.

    Args:
        flow: the durable calls of the run.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._unsent: list[_Unsent] = []

    @property
    def unsent(self) -> bool:
        """There are jobs that were started, and that no task of the run is sending."""
        return bool(self._unsent)

    def check_place(self, call: Call[Any], *, is_strict: bool) -> None:
        """Check where a job would stand. `is_strict`: the lanes of its queue run one task after the other.

        Raises:
            UsageError: it would wait for ever behind a workflow above it, or too many workflows are above it.
        """
        above, lane = self._above(), str(options_of(call).get("lane", ""))
        if is_strict and lane and [call.queue, lane] in above:
            raise UsageError(
                f"the job would wait for ever behind a workflow that waits for it, in the strict lane {lane!r} of "
                f"{call.queue!r}: start it in another lane, or make it another function"
            )
        if len(above) > MOST_LEVELS:
            raise UsageError(
                f"{call.name}.run() is at level {len(above)} below the first workflow, and at most {MOST_LEVELS} are allowed: "
                "dispatch it as a job of its own, or end the recursion"
            )

    def _above(self) -> list[list[str]]:
        """Return the queue and the lane of each workflow above a job of this run, this run last; empty without a lane."""
        run = self._flow.run
        record: Mapping[bytes, bytes] = run.record or {}
        lane = record.get(b"lane", b"")
        try:
            above = msgspec.json.decode(record.get(b"above", b"[]"), type=list[list[str]])
        except (msgspec.MsgspecError, UnicodeDecodeError):  # another program has written it
            above = []
        return [*above, [run.queue, lane.decode("utf-8", "replace")] if lane else []]

    def name_of(self, key: str) -> str:
        """Return the name of a job in the record. After a person has let the workflow run again from an earlier entry, a job that
        is started again has a new name. So it is another job, and neither the end nor the cancellation of the old one is its own.
        """
        record: Mapping[bytes, bytes] = self._flow.run.record or {}
        rewinds = whole(record.get(b"rewinds"), 0)
        if not rewinds or b"child:" + key.encode() in record:
            return key
        stem = f"child:{key}{AGAIN}".encode()
        found = [name for name in record if name.startswith(stem) and name[len(stem) :].isdigit()]
        return found[0].decode()[len("child:") :] if found else f"{key}{AGAIN}{rewinds}"

    def add(self, key: str, call: Call[Any], client: Client) -> None:
        """Note that the run starts a job. It is sent when the run waits for something, or ends.

        Raises:
            UsageError: the call has an option that belongs to the workflow.
        """
        if FOLLOW_UPS in options_of(call):
            raise UsageError(
                "a job that a workflow starts has no then= and otherwise=: await it, and start the next one from the workflow"
            )
        for option in _REFUSED:
            if option in options_of(call):
                raise UsageError(
                    f"the id of a job that a workflow starts is made of the workflow's: leave out {option}"
                )
        if self._flow.ended(key) is None:
            self._unsent.append(_Unsent(key, call, client))

    async def send(self) -> None:
        """Send the jobs that were started since the last call. While a queue of them is full, wait for room.

        Raises:
            Snooze: there was no room for some seconds. The next run sends them.
        """
        if not self._unsent:
            return
        with self._flow.busy(), self._taken() as unsent:
            noted = list[NotedChild]()
            for some in _parts(unsent):
                done = self._flow.run.host.note_children(self._flow.run, [await self._child(each) for each in some])
                await wait_done(done)
                noted += _checked(done.result(), len(unsent))
            until = time.monotonic() + ROOM_WITHIN
            for client, calls, places in self._calls(unsent, noted):
                while True:
                    try:
                        await client.producer.dispatch_many(calls, places)
                        break
                    except QueueFull as error:
                        _check_patience(until, error)
                        await sleep_here(FULL_PAUSE)

    def send_now(self) -> None:
        """As `send`, in a thread or a process."""
        if not self._unsent:
            return
        with self._taken() as unsent:
            noted = list[NotedChild]()
            for some in _parts(unsent):
                done = self._flow.run.host.note_children(self._flow.run, [sync(self._child, each) for each in some])
                noted += _checked(done.result(), len(unsent))
            until = time.monotonic() + ROOM_WITHIN
            for client, calls, places in self._calls(unsent, noted):
                while True:
                    try:
                        sync(client.producer.dispatch_many, calls, places)
                        break
                    except QueueFull as error:
                        _check_patience(until, error)
                        time.sleep(FULL_PAUSE)
                        self._flow.run.check_wait()

    @contextmanager
    def _taken(self) -> Generator[list[_Unsent]]:
        """Take the unsent jobs, and take them back if they could not be sent: sending a job again changes nothing."""
        unsent, self._unsent = self._unsent, []
        try:
            yield unsent
        except BaseException:
            self._unsent[:0] = unsent
            raise

    async def _child(self, child: _Unsent) -> Child:
        keys, id_ = QueueKeys(child.client.settings.prefix, child.call.queue), self._id_of(child.key)
        shard = await child.client.sharding.shard_of_id(keys, id_)
        return Child(child.key, shard.base, id_)

    def _calls(
        self, unsent: Sequence[_Unsent], noted: Sequence[NotedChild]
    ) -> Iterable[tuple[Client, list[Call[Any]], dict[str, QueueKeys]]]:
        """Return the calls to dispatch, by client, and the place of each id: where it was noted first, also if its queue
        was split since. A child that has ended meanwhile is not dispatched.
        """
        found: dict[Client, tuple[Client, list[Call[Any]], dict[str, QueueKeys]]] = {}
        for child, known in zip(unsent, noted, strict=True):
            if known.end is not None:
                self._flow.note_end(child.key, End.read(known.end))
            else:
                id_ = self._id_of(child.key)
                options = {**options_of(child.call), "id": id_, "parent": self._parent(child, known)}
                _, calls, places = found.setdefault(child.client, (child.client, [], {}))
                calls.append(replace(child.call, _options=options))
                if place := QueueKeys.of_base(child.client.settings.prefix, known.base):
                    places[id_] = place
        return found.values()

    def _parent(self, child: _Unsent, noted: NotedChild) -> dict[str, str]:
        run = self._flow.run
        return {
            "base": run.host.base,
            "id": run.id,
            "life": self._flow.life,
            "key": child.key,
            "after": str(noted.after),
            "above": encode_json(self._above()).decode(),
        }

    def _id_of(self, key: str) -> str:
        """Return the id of a child; with a digest of the key and of the parent's id if they are long."""
        parent, life = self._flow.run.id.removeprefix("@"), self._flow.life
        found = f"{parent}/{life}/{key}"
        if len(found.encode()) <= MAX_ID:
            return found
        return f"{_digest(parent)}/{life}/{_digest(key)}"

    # Waiting for them

    async def wait(self, keys: Sequence[str]) -> list[End]:
        """Return how jobs have ended. If one of them has not, wait until the run is suspended."""
        await self.send()
        if (wait := self._wait(keys)) is not None:
            await self._flow.park(wait)
        return self._ends(keys)

    def wait_now(self, keys: Sequence[str]) -> list[End]:
        """As `wait`, in a thread or a process."""
        self.send_now()
        if (wait := self._wait(keys)) is not None:
            self._flow.park_now(wait)
        return self._ends(keys)

    async def first(self, keys: Sequence[str], timeout_ms: int | None) -> tuple[int, End] | None:
        """Return which of the jobs has ended first, and how; None after the timeout. Later runs get the same."""
        await self.send()
        found, wait = self._first(keys, timeout_ms)
        if wait is not None:
            await self._flow.park(wait)
        return found

    def first_now(self, keys: Sequence[str], timeout_ms: int | None) -> tuple[int, End] | None:
        """As `first`, in a thread or a process."""
        self.send_now()
        found, wait = self._first(keys, timeout_ms)
        if wait is not None:
            self._flow.park_now(wait)
        return found

    def _first(self, keys: Sequence[str], timeout_ms: int | None) -> tuple[tuple[int, End] | None, Wait | None]:
        """Return what the server has decided, or the wait by which it will: it decides also if the run knows an end."""
        name = self._flow.key(f"first of {len(keys)} jobs {_digest(chr(10).join(keys))}", "wait in one of them")
        end = self._flow.ended(name)
        if end is None:
            return None, Wait(name, "first", about="\n".join(keys), in_ms=timeout_ms)
        check_lifetime(end)
        if end.outcome != "value":
            return None, None
        winner = end.value.decode("utf-8", "replace")
        won = self._flow.ended(winner)
        if won is None or winner not in keys:
            raise UsageError(f"the record of this workflow says that {winner!r} has ended first, and not how")
        return (keys.index(winner), won), None

    def _ends(self, keys: Sequence[str]) -> list[End]:
        return [end for end in map(self._flow.ended, keys) if end is not None]

    def _wait(self, keys: Sequence[str]) -> Wait | None:
        """Return the wait for those jobs that have not ended; None if all have."""
        name = f"job {keys[0]}" if len(keys) == 1 else f"{len(keys)} jobs {_digest(chr(10).join(keys))}"
        if (waited := self._flow.ended(name)) is not None:
            check_lifetime(waited)  # also if they have ended since: an earlier run has taken that branch
        if len(self._ends(keys)) == len(keys):
            return None
        return Wait(name, "children", about="\n".join(keys))


def _parts(unsent: Sequence[_Unsent]) -> list[Sequence[_Unsent]]:
    """Return the jobs in parts that one request may note."""
    return [unsent[start : start + MAX_ITEMS] for start in range(0, len(unsent), MAX_ITEMS)]


def _checked(noted: NotedChildren, number: int) -> Sequence[NotedChild]:
    """Return what the server knows of jobs, of which the run starts `number`.

    Raises:
        ClaimLost: another worker has the task.
        Failure: the job would keep too much.
    """
    if noted.status == "lost":
        raise ClaimLost("the task was reassigned to another worker, so it starts no more jobs: let the run end")
    if noted.status == "full":
        raise Failure(f"the workflow cannot start {number} more jobs: {FULL}")
    return noted.children


def _check_patience(until: float, full: QueueFull) -> None:
    """Raise Snooze if a run has waited for room until then."""
    if time.monotonic() >= until:
        raise Snooze(ROOM_AGAIN, f"room for its jobs: {full}") from full


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_lifetime(end: End) -> None:
    """Raise `LifetimeOver` if a wait has ended because the lifetime of the job is over."""
    if end.outcome == "lifetime":
        raise LifetimeOver("the lifetime of this workflow is over, so its waits have ended")
