"""`EndedRun`: a run that has ended, as workers store it for ``serve(recent=...)``. Pure.

The server keeps a list of them for a queue. Each is a JSON array, so that other programs can read it:
``[claim, id, outcome, ms, worker, error]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

MOST_RECENT: Final = 1000
"""The most ended runs that a queue keeps."""

Outcome = Literal["ok", "raised", "timeout", "cancelled", "lost"]


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended. See ``queue.recent()``."""

    id: str | None
    """The job's id; None for a plain task."""
    claim: str
    """The name of its claim, as `claim` of the tasks in ``queue.running()`` and in the logs."""
    outcome: Outcome
    """How it ended. ``ok``: the handler returned. ``raised``: it raised, and the task was retried or failed. ``timeout``: it took
    too long. ``cancelled``: the task was cancelled. ``lost``: another worker had received the task.
    """
    started: datetime
    """The time of the claim, by the server's clock."""
    seconds: float
    """The seconds from the arrival of the claim in its worker to the end of the handler."""
    worker: str
    """The id of the worker that ran it."""
    error: str | None
    """The type of the exception, or ``Timeout``; None if there was no error."""


class StoredRun(NamedTuple):
    """An ended run as it is stored. `claim`: the fencing token. `error`: empty if there was none."""

    claim: Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    id: str | None
    outcome: Outcome
    ms: Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    worker: str
    error: str


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(StoredRun)


def encode_run(run: StoredRun) -> bytes:
    """Return a run as JSON."""
    return _ENCODER.encode(run)


def decode_run(raw: bytes) -> StoredRun | None:
    """Return a stored run; None if another application has written something else."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
