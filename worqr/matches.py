"""`Matches`: where the tasks with one payload are. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matches:
    """The tasks of a queue with one payload. See ``queue.find()``."""

    waiting: tuple[int, ...]
    """Of each that waits: how many tasks of its shard are taken before it."""
    jobs: tuple[str, ...]
    """The ids of jobs that were plain tasks with this payload: they were retried, reported progress or saved."""
    running: tuple[str, ...]
    """The claims of plain tasks that run, for ``queue.cancel_claims()``."""
    complete: bool
    """False if there may be more, because the queue is too long to be searched, or the limit was reached."""
