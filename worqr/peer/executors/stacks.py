"""The present stack of a handler, for log lines about handlers that do not end."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Frames = list[tuple[FrameType, int]]
"""Frames and their line numbers, the innermost last."""

MAX_FRAMES = 40
PACKAGE = str(Path(__file__).parents[2])


def thread_frames(ident: int, below: CodeType | None = None) -> Frames:
    """Return the stack of a thread, the innermost frame last. With `below`, return only the frames that this function has
    called.
    """
    frame = sys._current_frames().get(ident)  # public in all but name
    found: Frames = []
    while frame is not None and frame.f_code is not below:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def awaited_frames(coroutine: Any) -> Frames:
    """Return the stack of a suspended coroutine: its own frame, then the frame that it awaits, and so on."""
    found: Frames = []
    while coroutine is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame: FrameType | None = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                found.append((frame, frame.f_lineno))
                coroutine = getattr(coroutine, inner)
                break
        else:
            break
    return found


def describe(frames: Frames) -> str:
    """Format frames as in a traceback, without worqr's own, and at most the innermost 40."""
    shown = [place for place in frames if not place[0].f_code.co_filename.startswith(PACKAGE)][-MAX_FRAMES:]
    lines = traceback.StackSummary.extract(iter(shown)).format()
    return "".join(lines).rstrip() if lines else "  (nothing is known of where it is)"
