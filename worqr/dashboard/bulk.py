"""Acts on more tasks than one request may change: each runs in a thread of this process, with a mesh of its own.

The thread has an event loop of its own, so it does not matter which loop serves the dashboard, or whether a page stays open.
It ends with the process. What it has not changed by then stays as it is, and the same act again goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

import trio

from worqr.client.batch import cancel_and_note, retry_and_note
from worqr.client.client import acting_for
from worqr.client.queue import queue_named
from worqr.errors import WorqrError
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh

Verb = Literal["retry", "drop", "run", "cancel", "delete", "cancel-batch", "retry-batch"]
State = Literal["running", "finished", "stopped", "failed"]
KEPT: Final = 50
"""Acts that have ended and are still shown."""
PIECE: Final = 100
MOST_SCHEDULED: Final = 100_000
"""Scheduled jobs of one act: their ids are in memory."""
KINDS: Final[dict[Verb, str]] = {
    "retry": "retried",
    "drop": "dropped",
    "run": "run_now",
    "cancel": "cancelled_all",
    "delete": "deleted",
    "cancel-batch": "batch_cancelled",
    "retry-batch": "batch_retried",
}
"""The kind of the entry in the log of the mesh."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator asked for. `which`, `error`, `before` and `since` choose dead-letter records; `meant` is the number of
    tasks that the page of the confirmation showed.
    """

    verb: Verb
    queue: str
    who: str
    meant: int
    reason: str = ""
    which: Literal["failed", "broken"] = "failed"
    error: str = ""
    before: datetime | None = None
    since: datetime | None = None
    batch: str = ""
    """The id of the batch, whose home is `queue`; empty: the act is about a queue."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an act is: `tried` of `total` tasks. `changed` is known at the end, unless it was stopped or has failed."""

    state: State = "running"
    tried: int = 0
    total: int | None = None
    changed: int | None = None
    why: str = ""


class Stopped(Exception):
    """An operator has stopped the act."""


class Bulk:
    """One act, in a thread of its own.

    Attributes:
        id: names it in addresses.
        order: what was asked for.
        began: when.
        progress: how far it is. It is replaced as a whole, so that other threads never see half of a change.
        ended: is set when the thread has nothing more to do.
    """

    def __init__(self, order: Order, make_mesh: Callable[[], Mesh]) -> None:
        self.id: str = uuid4().hex
        self.order: Order = order
        self.began: datetime = datetime.now(UTC)
        self.progress: Progress = Progress()
        self.ended: threading.Event = threading.Event()
        self._make_mesh = make_mesh
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.progress.state == "running"

    def start(self) -> None:
        """Start the thread. It never keeps the program from ending."""
        threading.Thread(target=self._run, name=f"worqr bulk {self.order.verb}", daemon=True).start()

    def stop(self) -> None:
        """Let it end after the request that is under way."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            trio.run(self._act)
        except WorqrError as error:
            self.progress = replace(self.progress, state="failed", why=str(error)[:300])
        except BaseException as error:  # nothing else reports an error of a thread
            self.progress = replace(self.progress, state="failed", why=f"{type(error).__name__}: {error}"[:300])
        finally:
            self.ended.set()

    async def _act(self) -> None:
        mesh, order = self._make_mesh(), self.order
        with acting_for(order.who):
            async with mesh.connect():
                try:
                    queue = queue_named(mesh.queue, order.queue)
                    changed = await (self._changed_in_batch(mesh, queue) if order.batch else self._changed(queue))
                except Stopped:
                    await self._note(mesh, "bulk_stopped", self.progress.tried)
                    self.progress = replace(self.progress, state="stopped")
                    return
                if order.verb == "run" or (order.verb in ("retry", "drop") and not changed):
                    await self._note(mesh, KINDS[order.verb], changed)
        total = changed if self.progress.total is None else self.progress.total
        self.progress = replace(self.progress, state="finished", changed=changed, total=total)

    async def _note(self, mesh: Mesh, kind: str, count: int) -> None:
        text = f"{KINDS[self.order.verb]}, of {self.progress.total or 0}" if kind == "bulk_stopped" else ""
        await client_of(mesh).note(kind, queue=self.order.queue, count=count, text=text)

    async def _changed(self, queue: Queue) -> int:
        """Do it. Return the number of tasks that were changed. Raise Stopped."""
        order = self.order
        match order.verb:
            case "retry" | "drop":
                aside = queue.failed if order.which == "failed" else queue.broken
                call: Any = aside.retry_all if order.verb == "retry" else aside.drop_all
                chosen = {"error": order.error or None, "before": order.before, "since": order.since}
                return int(await call(progress=self._tried, **chosen))
            case "run":
                return await self._run_scheduled(queue)
            case "cancel":
                count = await queue.cancel_all(reason=order.reason)
                return count.waiting + count.running
            case _:
                await queue.delete()
                return order.meant

    async def _changed_in_batch(self, mesh: Mesh, queue: Queue) -> int:
        client, batch = client_of(mesh), queue.batch(self.order.batch)
        if self.order.verb == "retry-batch":
            return await retry_and_note(client, batch)
        return await cancel_and_note(client, batch, self.order.reason) or 0

    def _tried(self, tried: int, total: int) -> None:
        self.progress = replace(self.progress, tried=tried, total=total)
        if self._stopping.is_set() and tried < total:
            raise Stopped

    async def _run_scheduled(self, queue: Queue) -> int:
        """Make the jobs due that are scheduled now, those that are due first at first."""
        ids = await self._scheduled(queue)
        changed, total = 0, len(ids)
        for start in range(0, total, PIECE):
            piece, began = ids[start : start + PIECE], trio.current_time()
            changed += await queue.run_now(*piece)
            self._tried(start + len(piece), total)
            if start + PIECE < total:
                await trio.sleep(trio.current_time() - began)
        return changed

    async def _scheduled(self, queue: Queue) -> Sequence[str]:
        ids, after = dict[str, None](), ""
        while len(ids) < min(MOST_SCHEDULED, self.order.meant):
            tasks = await queue.jobs(state="scheduled", limit=PIECE, after=after)
            if not tasks:
                break
            ids |= dict.fromkeys(task.id for task in tasks if task.id)
            after = tasks[-1].cursor
            if self._stopping.is_set():
                raise Stopped
        return list(ids)[: min(MOST_SCHEDULED, self.order.meant)]


class BulkActs:
    """The acts of one dashboard: those that run, and the last ones that have ended."""

    def __init__(self, make_mesh: Callable[[], Mesh]) -> None:
        self._make_mesh = make_mesh
        self._acts: dict[str, Bulk] = {}
        self._lock = threading.Lock()

    def start(self, order: Order) -> Bulk | None:
        """Start an act. Return None if another one of the same queue runs."""
        with self._lock:
            if any(each.running and each.order.queue == order.queue for each in self._acts.values()):
                return None
            ended = [each.id for each in self._acts.values() if not each.running]
            for each in ended[: max(0, len(ended) - KEPT + 1)]:
                del self._acts[each]
            made = Bulk(order, self._make_mesh)
            self._acts[made.id] = made
        made.start()
        return made

    def get(self, id: str) -> Bulk | None:
        """Return the act with this id, if this process has it."""
        return self._acts.get(id)

    def newest_first(self) -> list[Bulk]:
        """Return all acts."""
        with self._lock:
            return list(self._acts.values())[::-1]

    def stop_all(self) -> None:
        """Let all acts end, because the program does."""
        for each in self.newest_first():
            each.stop()
