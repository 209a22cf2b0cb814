"""The handlers of forms: each is one kind of call of the public API, and returns to its page with the exact outcome.

Clicking twice changes nothing more: a job that was cancelled, retried or dropped is not found the second time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
from starlette.responses import Response

from worqr.dashboard.access import Right
from worqr.dashboard.batch_pages import batch_to_change
from worqr.dashboard.bulk import MOST_SCHEDULED, Bulk, Order, Verb
from worqr.dashboard.figures import plural
from worqr.dashboard.guard import Refused
from worqr.dashboard.notices import UNKNOWN, UNSENT
from worqr.dashboard.numbers import bar
from worqr.dashboard.reading import gathered
from worqr.dashboard.records_page import Chosen
from worqr.dashboard.visit import LONGEST_VALUE, Visit
from worqr.errors import Unavailable
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.client.dead_letters import Aside
    from worqr.client.queue import Queue
    from worqr.records import CancelCount


ACKNOWLEDGED_WITHIN: Final = 5.0
"""Seconds for which a cancel waits for the runs to end."""
LONGEST_PAUSE: Final = 366 * 86400
"""Seconds."""
MOST: Final = 100
"""Tasks of one act, so that it never holds up the server."""


def _ids(visit: Visit) -> list[str]:
    ids = _values(visit, "id")
    if not ids:
        raise Refused(400, "No task was chosen. Tick the box of at least one, then try again.")
    return ids


def _values(visit: Visit, name: str) -> list[str]:
    """Return the values of a field that a form may have several times."""
    found = [value for field, value in visit.form if field == name and value]
    if max(map(len, found), default=0) > LONGEST_VALUE:
        raise Refused(400, f"{name!r} is longer than {LONGEST_VALUE} characters.")
    if len(found) > MOST:
        raise Refused(400, f"At most {MOST} tasks at a time. For more, act on all tasks that a list shows.")
    return found


async def done(visit: Visit, act: Callable[[], Awaitable[str]]) -> Response:
    """Return to the page of the form, also if the server has not answered."""
    try:
        done = await act()
    except Unavailable as error:
        done = UNSENT if error.sent is False else UNKNOWN
    return visit.see_other(done)


async def note(visit: Visit, kind: str, queue: str, ids: Sequence[str] = (), count: int = 0, text: str = "") -> None:
    """Write an act into the log of the mesh, unless the call of the API does so."""
    job = ids[0] if len(ids) == 1 else ""
    await client_of(visit.mesh).note(kind, queue=queue, job=job, count=count, text=text)


def reason_of(visit: Visit) -> str:
    """Return the name of the viewer, with the reason in the form."""
    words = visit.text("reason").strip()
    return f"{visit.viewer.name}: {words}" if words else visit.viewer.name


async def cancel(visit: Visit) -> Response:
    """Cancel jobs, and wait until their runs have ended."""
    queue, reason, claims = visit.queue(visit.text("queue")), reason_of(visit), _values(visit, "claim")
    ids = [] if claims else _ids(visit)

    async def one(job: str) -> CancelCount:
        return await queue.job(job).cancel(reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def plain() -> CancelCount:
        return await queue.cancel_claims(*claims, reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def act() -> str:
        began = time.monotonic()
        counts = await gathered([partial(one, job) for job in ids] + ([plain] if claims else []))
        ms = round((time.monotonic() - began) * 1000)
        sums = [sum(getattr(each, name) for each in counts) for name in ("waiting", "running", "acknowledged")]
        await note(visit, "cancelled", queue.name, ids, sums[0] + sums[1], visit.text("reason").strip())
        return ":".join(map(str, ("cancel", *sums, ms)))

    return await done(visit, act)


def _aside(visit: Visit) -> Aside:
    queue = visit.queue(visit.text("queue"))
    return queue.failed if visit.choice("list", ("failed", "broken")) == "failed" else queue.broken


async def retry(visit: Visit) -> Response:
    """Put dead-letter records back into their queue."""
    aside, ids = _aside(visit), _ids(visit)

    async def act() -> str:
        count = await aside.retry(*ids)
        if not count:
            await note(visit, "retried", visit.text("queue"), ids)
        return f"retry:{count}:{len(ids)}"

    return await done(visit, act)


async def run_now(visit: Visit) -> Response:
    """Make scheduled jobs due now."""
    queue, ids = visit.queue(visit.text("queue")), _ids(visit)

    async def act() -> str:
        count = await queue.run_now(*ids)
        await note(visit, "run_now", queue.name, ids, count)
        return f"run:{count}:{len(ids)}"

    return await done(visit, act)


async def drop(visit: Visit) -> Response:
    """Delete dead-letter records."""
    aside, ids = _aside(visit), _ids(visit)

    async def act() -> str:
        count = await aside.drop(*ids)
        if not count:
            await note(visit, "dropped", visit.text("queue"), ids)
        return f"drop:{count}:{len(ids)}"

    return await done(visit, act)


async def pause(visit: Visit) -> Response:
    """Pause a queue or a lane, until it is resumed or for some seconds."""
    queue, lane, reason = visit.queue(visit.text("queue")), visit.text("lane") or None, reason_of(visit)
    seconds = visit.number("duration", -1, 0, LONGEST_PAUSE)

    async def act() -> str:
        await queue.pause(reason, duration=None if seconds < 0 else seconds, lane=lane)
        return "pause" if lane is None else "lane-pause"

    return await done(visit, act)


async def resume(visit: Visit) -> Response:
    """Resume a queue or a lane."""
    queue, lane = visit.queue(visit.text("queue")), visit.text("lane") or None

    async def act() -> str:
        await queue.resume(lane=lane)
        return "resume" if lane is None else "lane-resume"

    return await done(visit, act)


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
