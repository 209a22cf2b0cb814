"""Jobs that have ended and are kept, and jobs by their tags: list, cancel and forget them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops.jobs import JobState
from worqr.ops.operators import CANCEL_PAGE, CancelReply
from worqr.ops.replies import MAX_BYTES, MAX_ITEMS, Reply, error_of, new_call, status_word, text, waits_for_of, wholes
from worqr.stored_values import exact, finite, readable, whole

EndState = Literal["finished", "failed", "cancelled", "ended"]
"""How a job has ended; ``ended``: in any way."""
AnyState = Literal["waiting", "due", "suspended", "blocked", "active", "finished", "failed", "cancelled", "ended", ""]
FORGET_PAGE: Final = 200
"""Jobs that one script forgets, at most: each takes the server about 30 us."""
_TOO_LARGE: Final = "large"


@dataclass(frozen=True, slots=True)
class FoundJob:
    """One job of a list by tag, or of the kept jobs: its cursor, the number of its first dispatch, its state, and what is known
    of its end. `kept`: it is a kept job, which can be dropped by its number. `dead_letter`: the claim of its dead letter.
    """

    cursor: str
    id: str
    task: bytes
    size: int
    number: int
    state: JobState
    tags: tuple[str, ...]
    ended_ms: int | None
    kept: bool
    lane: str = ""
    dead_letter: int | None = None


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Reply of list_kept and list_tagged. `too_large`: not all jobs of the tag are in its set."""

    more: bool
    after: str
    jobs: list[FoundJob]
    too_large: bool = False


def _found(entry: Sequence[Any]) -> FoundJob:
    cursor, name, word, task, size, first, claim, worker, run_at, progress, message, *more = entry
    failures, stalls, timeouts, attempts, error_type, error_message, tags, ended, at, kept_size, lane, reason = more[
        :12
    ]
    is_live = text(word) in {"waiting", "due", "suspended", "blocked", "active"}
    tried = sum(whole(each, 0) for each in (failures, stalls, timeouts)) + (text(word) == "active")
    state = JobState(
        state=text(word),
        claim=whole(claim),
        worker=text(worker) if worker else None,
        run_at_ms=whole(run_at) if is_live else None,
        progress=finite(progress),
        message=text(message or (reason if text(word) == "cancelled" else b"") or b""),
        failures=whole(failures, 0),
        attempts=whole(attempts, tried),
        error=error_of(error_type, error_message),
        waits_for=waits_for_of(error_type, error_message) if is_live else "",
    )
    names = tuple(filter(None, text(tags or b"").split("\n")))
    ended_ms = None if is_live else whole(ended) or whole(at)
    number, is_kept = whole(first, 0), kept_size is not None
    shown = FoundJob(exact(cursor), text(name), task, int(size), number, state, names, ended_ms, is_kept)
    return replace(shown, lane=readable(text(lane or b"")), dead_letter=whole(more[12]) if len(more) > 12 else None)


def _page(reply: Reply) -> FoundPage:
    word = status_word(reply)
    if word == _TOO_LARGE:
        return FoundPage(False, "", [], too_large=True)
    return FoundPage(word == "more", exact(reply[1]), [_found(entry) for entry in reply[2:]])


def list_kept(
    keys: QueueKeys,
    state: EndState = "ended",
    limit: int = MAX_ITEMS,
    *,
    after: str = "",
    since_ms: int | None = None,
    tag: str = "",
) -> Command[FoundPage]:
    """Return one page of the kept jobs, the one that ended last first."""
    args = (state, limit, MAX_ITEMS, MAX_BYTES, after, "-inf" if since_ms is None else since_ms, tag)
    return new_call("list_kept", keys.base, args, _page)


def list_tagged(
    keys: QueueKeys,
    tag: str,
    state: AnyState = "",
    limit: int = MAX_ITEMS,
    *,
    after: str = "",
    since_ms: int | None = None,
) -> Command[FoundPage]:
    """Return one page of the jobs with a tag, in any state, the one that was dispatched last first."""
    args = (tag, state, limit, MAX_ITEMS, MAX_BYTES, after or "+inf", "-inf" if since_ms is None else since_ms)
    return new_call("list_tagged", keys.base, args, _page)


def cancel_tagged(
    keys: QueueKeys, tag: str, after: str = "-", *, reason: str = "", budget: int = CANCEL_PAGE
) -> Command[CancelReply | None]:
    """Cancel jobs of a tag; call again with `after` while there is more. None: the tag has too many jobs."""

    def read(reply: Reply) -> CancelReply | None:
        word = status_word(reply)
        if word == _TOO_LARGE:
            return None
        return CancelReply(word == "more", int(reply[1]), wholes(reply[4:]), "-", exact(reply[3]))

    return new_call("cancel_tagged", keys.base, (tag, after, budget, reason), read, numbered=True)


@dataclass(frozen=True, slots=True)
class ForgetReply:
    """Reply of forget_tagged: numbers of what was deleted, and where the next step begins."""

    more: bool
    last: str
    waiting: int
    running: int
    kept: int
    results: int
    dead_letters: int


def forget_tagged(
    keys: QueueKeys, tag: str, last: str = "0", *, reason: str = "", budget: int = FORGET_PAGE
) -> Command[ForgetReply | None]:
    """Delete what is stored of jobs of a tag; call again with `last` while there is more. None: the tag has too many jobs."""

    def read(reply: Reply) -> ForgetReply | None:
        word = status_word(reply)
        if word == _TOO_LARGE:
            return None
        return ForgetReply(word == "more", text(reply[1]), *(int(each) for each in reply[2:]))

    return new_call("forget_tagged", keys.base, (tag, last, budget, reason), read, numbered=True)


def _number(reply: Reply) -> int:
    status_word(reply)
    return int(reply[1])


def drop_kept_jobs(keys: QueueKeys, numbers: Sequence[int]) -> Command[int]:
    """Delete up to MAX_ITEMS kept jobs by the numbers of their dispatches; return how many there were."""
    return new_call("drop_kept_jobs", keys.base, tuple(numbers), _number, numbered=True)


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Reply of run_again: ok, gone or cut; the id and the number of the new job."""

    word: str
    id: str = ""
    number: int = 0


def run_again(keys: QueueKeys, number: int, random: str) -> Command[RunAgain]:
    """Dispatch a kept job once more, under an id that is made with `random`."""

    def read(reply: Reply) -> RunAgain:
        word = status_word(reply)
        return RunAgain(word, text(reply[1]), int(reply[2])) if len(reply) == 3 else RunAgain(word)

    return new_call("run_again", keys.base, (number, random), read, numbered=True)


def trim_kept(keys: QueueKeys, limit: int = MAX_ITEMS) -> Command[bool]:
    """Remove entries of kept jobs that have expired; return whether there may be more."""

    def read(reply: Reply) -> bool:
        return status_word(reply) == "more"

    return new_call("trim_kept", keys.base, (limit,), read)
