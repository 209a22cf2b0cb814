"""An error's traceback as text, quickly: what fails by the thousand mostly fails in the same place. Pure."""

from __future__ import annotations

import traceback
from types import CodeType, TracebackType
from typing import Final

FRAMES: Final = 30
"""Frames of a traceback that are kept: the last ones."""
MANY_PLACES: Final = 100
TRACEBACK: Final = "Traceback (most recent call last):\n"

_frames: dict[tuple[tuple[int, int], ...], tuple[str, list[CodeType]]] = {}
"""Where errors were raised, and how that reads; the code is kept so that no other gets its id."""


def format_error(error: BaseException) -> str:
    """As ``traceback.format_exception``, which looks at every source file anew and parses its lines, in the loop's thread. What
    fails by the thousand mostly fails in the same place: of an error without a chain the frames are formatted but once.
    """
    chained = error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)
    if chained or issubclass(type(error), BaseExceptionGroup) or error.__traceback__ is None:
        return "".join(traceback.format_exception(error, limit=-FRAMES))
    codes: list[CodeType] = []
    path: list[tuple[int, int]] = []
    at: TracebackType | None = error.__traceback__
    while at is not None:
        codes.append(at.tb_frame.f_code)
        path.append((id(at.tb_frame.f_code), at.tb_lasti))
        at = at.tb_next
    place = tuple(path[-FRAMES:])
    known = _frames.get(place)
    if known is None:
        if len(_frames) >= MANY_PLACES:
            _frames.clear()
        known = _frames[place] = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES)), codes[-FRAMES:]
    return "".join((TRACEBACK, known[0], *traceback.format_exception_only(error)))
