"""The handlers of acts on more tasks than one page has: to confirm, to start, to watch and to stop them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
from starlette.responses import Response

from worqr.dashboard.access import Right
from worqr.dashboard.acts import reason_of
from worqr.dashboard.batch_pages import batch_to_change
from worqr.dashboard.bulk import MOST_SCHEDULED, Bulk, Order, Verb
from worqr.dashboard.figures import plural
from worqr.dashboard.guard import Refused
from worqr.dashboard.numbers import bar
from worqr.dashboard.records_page import Chosen
from worqr.dashboard.visit import Visit

if TYPE_CHECKING:
    from worqr.client.queue import Queue

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
    chosen, counts = Chosen.of(visit, visit.choice("list", ("failed", "broken"))), dict[str, int]()
    if verb in BATCH_ACTS:
        return await _confirm_batch(visit, verb)
    if verb in ("retry", "drop"):
        chosen, meant = await _meant(queue, chosen)
    else:
        info = await queue.info()
        counts = {"waiting": info.waiting, "scheduled": info.scheduled, "blocked": info.blocked}
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
    chosen = Chosen.of(visit, visit.choice("list", ("failed", "broken")))
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


async def bulk(visit: Visit) -> Response:
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


def numbers(visit: Visit) -> tuple[dict[str, str], str]:
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
