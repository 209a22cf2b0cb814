"""The random part of the ids that worqr makes for jobs. Pure.

A job that is dispatched without an id gets one from the script: ``@``, the number of the dispatch, ``-``, and this random part.
The number makes ids unique and sortable by time; the random part makes them impossible to guess. The random part is an argument
of the request, so a request that is sent again makes the same id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

RANDOM_BYTES: Final = 16
"""In each id: 128 bits, written as 32 hexadecimal digits."""
_AHEAD: Final = 64
"""Random parts drawn in one system call, which costs as much as all other work on the id of a dispatch."""

_Job = tuple[Mapping[str, object], bytes]
"""The options of a dispatch, encoded, and its payload."""

_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)  # else parent and child would use the same ones


def with_random_ids(jobs: Sequence[_Job]) -> list[_Job]:
    """Return the jobs of a dispatch. Each job without an id gets the random part of a new one."""
    if len(jobs) > 1:
        parts = _draw(len(jobs))
        return [(o if "id" in o else {**o, "random": part}, task) for part, (o, task) in zip(parts, jobs, strict=True)]
    return [(o if "id" in o else {**o, "random": random_part()}, task) for o, task in jobs]


def random_part() -> str:
    """Return 32 new random hexadecimal digits. Safe from any thread."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(_draw(_AHEAD))


def _draw(n: int) -> list[str]:
    text, width = os.urandom(RANDOM_BYTES * n).hex(), 2 * RANDOM_BYTES
    return [text[i : i + width] for i in range(0, len(text), width)]
