"""`side_mesh`: the same mesh with connections of its own, for a dashboard or an exporter inside an application."""

from __future__ import annotations

from functools import partial
from typing import Any

from worqr.link import Credentials
from worqr.mesh import Mesh


def side_mesh(mesh: Mesh[Any], app: str, patience: float, url: str | None = None) -> Mesh[None]:
    """Return a mesh for requests that must not stand before those of the application.

    Args:
        mesh: The application's.
        app: The name of the new one, which its connections have.
        patience: Its patience in seconds, at most that of `mesh`.
        url: Another URL, whose user is then meant in place of the credentials of `mesh`.
    """
    given = mesh.credentials
    credentials = None if given is None or url is not None else partial(_asked, given)
    return Mesh(
        url or mesh.url,
        prefix=mesh.prefix,
        app=app,
        patience=min(mesh.patience, patience),
        credentials=credentials,
    )


def _asked(credentials: Credentials) -> tuple[str, str]:
    """Ask the application's credentials for one connection."""
    found = credentials.get("the server")
    return ("default", found[0]) if len(found) == 1 else (found[0], found[1])
