"""The forms of a worker: quiet, resume, drain, and another concurrency."""

from __future__ import annotations

from typing import Final, Literal

from starlette.responses import Response

from worqr.dashboard.acts import done
from worqr.dashboard.guard import Refused
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
