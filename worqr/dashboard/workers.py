"""The forms of a worker: quiet, resume, drain, another concurrency, and its eviction."""

from __future__ import annotations

from typing import Final, Literal

from starlette.responses import Response

from worqr.dashboard.acts import done
from worqr.dashboard.guard import Refused
from worqr.dashboard.reading import all_workers
from worqr.dashboard.visit import Visit

MODES: Final[dict[str, Literal["quiet", "resume", "drain"]]] = {"quiet": "quiet", "resume": "resume", "drain": "drain"}


async def ask(visit: Visit) -> Response:
    """Ask a worker for something."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Requests to workers are for viewers who see all queues only.")
    worker, what = visit.text("id"), visit.choice("what", ("quiet", "resume", "drain", "concurrency"))
    mode = MODES.get(what)
    concurrency = _concurrency(visit.text("n").strip()) if mode is None else None

    async def act() -> str:
        await visit.mesh.ask_worker(worker, mode, concurrency=concurrency)
        return "worker-asked"

    return await done(visit, act)


def _concurrency(word: str) -> int | Literal["auto"]:
    if word == "auto":
        return "auto"
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word)):
        raise Refused(400, "The number of tasks must be a whole number, at least 1, or: auto.")
    return int(word)


async def evict(visit: Visit) -> Response:
    """Declare a worker dead whose process is gone. The form repeats the number of its process, because it may not be."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Workers are evicted by viewers who see all queues only.")
    found = [each for each in await all_workers(visit) if each.id == visit.text("id")]
    if not found:
        raise Refused(400, "There is no worker with this id: it has left, or it was evicted before.")
    if visit.text("typed").strip() != str(found[0].pid):
        raise Refused(400, f"Nothing was done. To confirm, type the number of the process: {found[0].pid}.")

    async def act() -> str:
        await visit.mesh.evict(found[0].id)
        return "worker-evicted"

    return await done(visit, act)
