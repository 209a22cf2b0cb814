"""Acts on more tasks than one request may change: to confirm, to start, to watch and to stop them.

Each runs in a thread of this process, with a mesh and an event loop of its own. So it does not matter which loop serves the
dashboard, or whether a page stays open. It ends with the process. What it has not changed by then stays as it is, and the same
act again goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

import anyio.to_thread
import trio
from starlette.responses import Response

from worqr.client.batch import cancel_and_note, retry_and_note
from worqr.client.client import acting_for
from worqr.client.queue import queue_named
from worqr.dashboard.access import Refused, Right
from worqr.dashboard.batch_pages import batch_to_change
from worqr.dashboard.ended import Chosen
from worqr.dashboard.forms import reason_of
from worqr.dashboard.request import Visit
from worqr.dashboard.state import bar
from worqr.errors import WorqrError
from worqr.inside import client_of
from worqr.views.values import plural

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh


# The handlers of acts on more tasks than one page has: to confirm, to start, to watch and to stop them.


TYPED_ABOVE: Final = 1000
"""An act on more tasks needs their number typed."""
RIGHTS: Final[dict[Verb, Right]] = {
    "retry": "retry",
    "drop": "drop",
    "run": "retry",
    "cancel": "cancel",
    "delete": "delete",
    "cancel-batch": "cancel",
    "retry-batch": "retry",
}
"""The right that each act needs."""
BATCH_ACTS: Final[tuple[Verb, ...]] = ("cancel-batch", "retry-batch")
WAIT: Final = 1.0
"""Seconds that the answer waits for the end: a short act has ended when its page opens."""
_DID: Final[dict[Verb, str]] = {
    "retry": "put back into the queue",
    "drop": "deleted from the list",
    "run": "made due",
    "cancel": "cancelled",
    "delete": "deleted",
    "cancel-batch": "cancelled",
    "retry-batch": "put back",
}


async def confirm(visit: Visit) -> Response:
    """Ask whether an act is meant, with the number of its tasks."""
    queue, verb = visit.queue(visit.text("queue")), _verb(visit)
    if RIGHTS[verb] not in visit.viewer.may:
        raise Refused(403, f"You are {visit.viewer.name!r}, and lack the right {RIGHTS[verb]!r} for this.")
    chosen, counts = Chosen.of(visit, visit.choice("list", ("failed", "undecodable"))), dict[str, int]()
    if verb in BATCH_ACTS:
        return await _confirm_batch(visit, verb)
    if verb in ("retry", "drop"):
        chosen, meant = await _meant(queue, chosen)
    else:
        info = await queue.info()
        counts = {
            "waiting": info.waiting,
            "scheduled": info.scheduled,
            "suspended": info.suspended,
            "blocked": info.blocked,
        }
        if verb == "cancel":
            counts["running"] = info.running
        meant = min(info.scheduled, MOST_SCHEDULED) if verb == "run" else sum(counts.values())
    given: dict[str, Any] = {"verb": verb, "queue": queue.name, "chosen": chosen, "counts": counts, "meant": meant}
    return visit.page("confirm.html", live="", typed_above=TYPED_ABOVE, **given)


async def _confirm_batch(visit: Visit, verb: Verb) -> Response:
    info = await batch_to_change(visit)
    counts = {name: getattr(info, name) for name in ("jobs", "finished", "failed", "cancelled", "pending")}
    meant = info.pending if verb == "cancel-batch" else info.failed
    idle = info.state == "ended" if verb == "cancel-batch" else not meant
    given: dict[str, Any] = {"verb": verb, "queue": info.queue, "batch": info.id, "counts": counts, "meant": meant}
    return visit.page("confirm_batch.html", live="", typed_above=TYPED_ABOVE, idle=idle, **given)


async def _meant(queue: Queue, chosen: Chosen) -> tuple[Chosen, int]:
    """Return the same choice without what fails from now on, by the clock of the server; and its number of records."""
    aside = chosen.aside(queue)
    newest = await aside.list(1, payload=False, **chosen.options)
    if not newest:
        return chosen, 0
    chosen = replace(chosen, before=newest[0].at + timedelta(milliseconds=1))
    return chosen, await aside.count(**chosen.options)


def _verb(visit: Visit) -> Verb:
    text = visit.choice("act", tuple(RIGHTS))
    return next(verb for verb in RIGHTS if verb == text)


async def start(verb: Verb, visit: Visit) -> Response:
    """Start an act that was confirmed, and show its page."""
    queue, meant, batch = visit.queue(visit.text("queue")), _confirmed(verb, visit), ""
    if verb in BATCH_ACTS:
        batch = (await batch_to_change(visit)).id
    chosen = Chosen.of(visit, visit.choice("list", ("failed", "undecodable")))
    made = visit.bulk_acts.start(
        Order(
            *(verb, queue.name, visit.viewer.name, meant, reason_of(visit)),
            *(chosen.which, chosen.error, chosen.before, chosen.since, batch),
        )
    )
    if made is None:
        raise Refused(
            409, f"Nothing was changed: another act on queue {queue.name!r} runs. Wait until it ends, or stop it."
        )
    await anyio.to_thread.run_sync(made.ended.wait, WAIT)
    return visit.show_act(made.id, sentence(made))


def _confirmed(verb: Verb, visit: Visit) -> int:
    """Return the number that the viewer has seen. Raise Refused unless the act was confirmed."""
    count, typed = visit.text("count"), visit.text("typed").strip()
    if not (count.isascii() and count.isdecimal()) or len(count) > 12:
        raise Refused(
            400, "Nothing was changed, because the act was not confirmed. Choose it on the page of its queue."
        )
    if verb == "delete":
        if typed != visit.text("queue"):
            raise Refused(400, "Nothing was deleted. To confirm, type the name of the queue: go back to try again.")
    elif int(count) > TYPED_ABOVE and typed.replace(",", "").replace(".", "").replace(" ", "") != count:
        raise Refused(400, f"Nothing was changed. To confirm, type the number {int(count):,}: go back to try again.")
    return int(count)


START: Final[dict[Verb, Callable[[Visit], Awaitable[Response]]]] = {verb: partial(start, verb) for verb in RIGHTS}


def seen_acts(visit: Visit) -> list[Bulk]:
    """Return the act that the address names; without an id, all that this process has, the newest first."""
    name = visit.text("id")
    acts = [each for each in visit.bulk_acts.newest_first() if visit.viewer.sees(each.order.queue)]
    found = [each for each in acts if not name or each.id == name]
    if name and not found:
        raise Refused(404, "There is no such act: it ended long ago, or this program was started since.")
    return found


async def page(visit: Visit) -> Response:
    """One act, and how far it is; without an id, all that this process has."""
    name, found = visit.text("id"), seen_acts(visit)
    live = visit.link("/live", view="bulk", id=name) if name and found[0].running else ""
    rows: list[dict[str, Any]] = [
        {
            "bulk": each,
            "order": each.order,
            "state": each.progress.state,
            "text": sentence(each),
            "bar": share(each),
            "right": RIGHTS[each.order.verb],
        }
        for each in found
    ]
    return visit.page("bulk.html", live=live, rows=rows, single=bool(name))


async def stop(right: Right, visit: Visit) -> Response:
    """Let an act end after the request that is under way."""
    found = visit.bulk_acts.get(visit.text("id"))
    if found is None or not visit.viewer.sees(found.order.queue) or RIGHTS[found.order.verb] != right:
        raise Refused(400, "Nothing was stopped: there is no such act, or it ended long ago.")
    found.stop()
    await anyio.to_thread.run_sync(found.ended.wait, WAIT)
    return visit.show_act(found.id, sentence(found))


def act_numbers(visit: Visit) -> tuple[dict[str, str], str]:
    """Return the texts that change on the page of an act, and its state. Raise Refused if there is no such act."""
    found = visit.bulk_acts.get(visit.text("id"))
    if found is None or not visit.viewer.sees(found.order.queue):
        raise Refused(404, "There is no such act.")
    texts = {f"bulk.{found.id}.text": sentence(found), f"bulk.{found.id}.bar": share(found)}
    return texts, found.progress.state


def share(bulk: Bulk) -> str:
    """Return how much of an act is done, from 0 to 1."""
    progress = bulk.progress
    return bar(progress.tried / progress.total if progress.total else 0.0)


def sentence(bulk: Bulk) -> str:
    """Return how far an act is, as a sentence."""
    progress, order = bulk.progress, bulk.order
    total, changed = progress.total or 0, progress.changed or 0
    match progress.state:
        case "running":
            known = progress.total is not None
            return f"{progress.tried:,} of {plural(total, 'task')}" if known else "The tasks are being found."
        case "stopped":
            return f"Stopped after {progress.tried:,} of {plural(total, 'task')}. The others stay as they were."
        case "failed":
            done = f"Ended after {progress.tried:,} of {plural(total, 'task')}" if total else "Ended"
            return f"{done}: {progress.why}. What was done stays done. To go on, do it again."
        case "finished" if order.verb == "delete":
            return f"The queue was deleted, with the {plural(changed, 'task')} that it had when you confirmed."
        case "finished" if not changed:
            return "There was nothing to do: no task is as it was when you confirmed."
        case "finished":
            were = "was" if changed == 1 else "were"
            left = f" {total - changed:,} were not: others changed them meanwhile." if total > changed else ""
            return f"{plural(changed, 'task')} {were} {_DID[order.verb]}.{left}"


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
    which: Literal["failed", "undecodable"] = "failed"
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
                aside = queue.failed if order.which == "failed" else queue.undecodable
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
