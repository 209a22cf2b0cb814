"""A mesh that a test has moved to another server, as worker processes of that test see it.

A worker process imports the application's module again, so its `Mesh` would use the server of the application. While a test
moves a mesh, its worker processes get a `Relocation`. Each mesh that they make for the old server then uses the new one.
"""

from __future__ import annotations

import msgspec


class Relocation(msgspec.Struct, array_like=True, frozen=True):
    """From a server and prefix, as a `Mesh` was given them, to those of a test."""

    from_url: str | None
    from_prefix: str
    url: str
    prefix: str


_present: list[Relocation] = []


def relocate(relocation: Relocation | None) -> None:
    """Move each mesh that this process makes from now on; None: move none."""
    _present[:] = [] if relocation is None else [relocation]


def relocated(url: str | None, prefix: str) -> tuple[str, str] | None:
    """Return the server and prefix that a mesh for these two uses instead; None: these two."""
    for each in _present:
        if (each.from_url, each.from_prefix) == (url, prefix):
            return each.url, each.prefix
    return None
