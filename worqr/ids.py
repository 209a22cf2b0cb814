"""The random part of the ids that worqr makes for jobs. Pure.

A job that is dispatched without an id gets one from the script: ``@``, the number of the dispatch, ``-``, and this random part.
The number makes ids unique and sortable by time; the random part makes them impossible to guess. The random part is an argument
of the request, so a request that is sent again makes the same id.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping, Sequence
from typing import Final

RANDOM_CHARACTERS: Final = 22
"""In each id: letters and digits, one for each random byte. They are hard to guess like 124 random bits, and shorter than these
in hexadecimal digits: each byte of an id is stored several times with the job."""
BATCH_TOKEN_CHARACTERS: Final = 16
_ALPHABET: Final = string.ascii_letters.encode() + string.digits.encode()
_CHARACTER_OF_BYTE: Final = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))
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
    """Return 22 new random letters and digits. Safe from any thread."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(_draw(_AHEAD))


def batch_token() -> str:
    """Return the token of a new batch, 16 random letters and digits: each of its jobs stores it, so it is as short as may be."""
    return random_part()[:BATCH_TOKEN_CHARACTERS]


def _draw(n: int) -> list[str]:
    text, width = os.urandom(RANDOM_CHARACTERS * n).translate(_CHARACTER_OF_BYTE).decode(), RANDOM_CHARACTERS
    return [text[i : i + width] for i in range(0, len(text), width)]
