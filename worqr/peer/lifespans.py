"""Lifespans: what an application opens before its peer, or a process of it, takes anything, and closes when that has left.

Here: checking them where they are given.
"""

from __future__ import annotations

import inspect

from worqr.errors import UsageError


def check_lifespan(name: str, manager: object) -> None:
    """UsageError for what cannot make a context manager; `name` is the option of the mesh."""
    if manager is not None and not callable(manager):
        raise UsageError(f"{name} must be a function that gives a context manager, not {manager!r}")
    if inspect.isasyncgenfunction(manager) or inspect.isgeneratorfunction(manager):
        decorator = "asynccontextmanager" if name == "lifespan" else "contextmanager"
        raise UsageError(f"{name} must give a context manager: put @contextlib.{decorator} above {manager!r}")
