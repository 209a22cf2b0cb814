"""An error as text, for logs and records: in one line, or with a traceback that begins at the user's first frame. Pure.

Formatted frames are cached, because thousands of tasks often fail in the same place.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import Final, cast

FRAMES: Final = 30
"""Frames of a traceback that are kept: the last ones."""
MANY_PLACES: Final = 100
TRACEBACK: Final = "Traceback (most recent call last):\n"
OURS: Final = f"{Path(__file__).parent}{os.sep}"
"""The prefixes of worqr's own source files."""
ONE_LINE: Final = 500
"""Characters of an error's text in a log line; a traceback has all of it."""
MANY_ERRORS: Final = 3
"""Errors of a group that are named in one line."""

_RUNNERS: Final = re.compile(r"[/\\](?:trio[/\\](?:_core[/\\]|_threads\.py)|asyncio[/\\]\w+\.py$)")
"""Source files of the event loops, which call worqr's code."""
_frames: dict[tuple[tuple[int, int], ...], tuple[str, list[CodeType]]] = {}
"""The formatted frames of errors, by code and instruction. The code objects are kept, so that their ids are not used again."""


def one_line(error: BaseException) -> str:
    """Return the type and text of an error in one line of limited length; for a group, also those of the first errors in it."""
    text = " ".join(text_of(error).split())
    found = f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        more = "; ..." if len(inner) > MANY_ERRORS else ""
        found += f" ({'; '.join(one_line(each) for each in inner[:MANY_ERRORS])}{more})"
    return shortened(found)


def shortened(text: str) -> str:
    """Return `text`, cut to the length that a log line may have."""
    return text if len(text) <= ONE_LINE else f"{text[: ONE_LINE - 3]}..."


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a replacement if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException as unprintable:  # even a SystemExit: a request for a text must not end the process
        return f"<its __str__ raised {type(unprintable).__name__}>"


def users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that belongs neither to worqr nor to an event loop; all of it if all do."""
    at = error.__traceback__
    while at is not None and _is_ours(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at or error.__traceback__


def _is_ours(path: str) -> bool:
    return path.startswith(OURS) or _RUNNERS.search(path) is not None


def format_error(error: BaseException) -> str:
    """Format an error like ``traceback.format_exception``, from the user's first frame on.

    That function checks each source file and parses its lines, in the loop's thread. So the frames of an error without a chain
    are cached by place, because thousands of tasks often fail in the same place.
    """
    chained = error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)
    if chained or issubclass(type(error), BaseExceptionGroup) or error.__traceback__ is None:
        formatted = traceback.TracebackException.from_exception(error, limit=-FRAMES, compact=True)
        _remove_our_frames(formatted, set())
        return "".join(formatted.format())
    codes: list[CodeType] = []
    path: list[tuple[int, int]] = []
    first = at = users_traceback(error)
    while at is not None:
        codes.append(at.tb_frame.f_code)
        path.append((id(at.tb_frame.f_code), at.tb_lasti))
        at = at.tb_next
    key = tuple(path[-FRAMES:])
    known = _frames.get(key)
    if known is None:
        if len(_frames) >= MANY_PLACES:
            _frames.clear()
        known = _frames[key] = "".join(traceback.format_tb(first, limit=-FRAMES)), codes[-FRAMES:]
    return "".join((TRACEBACK, known[0], *traceback.format_exception_only(error)))


def _remove_our_frames(error: traceback.TracebackException, seen: set[int]) -> None:
    """Remove the frames above the user's first one, from an error and from all errors in its chain or group."""
    if id(error) in seen:
        return
    seen.add(id(error))
    first = next((i for i, frame in enumerate(error.stack) if not _is_ours(frame.filename)), 0)
    del error.stack[:first]
    for each in (error.__cause__, error.__context__, *(error.exceptions or ())):
        if each is not None:
            _remove_our_frames(each, seen)
