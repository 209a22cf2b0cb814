"""The queue that a command names: its handle, and hints for a name that no task or worker uses."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from worqr.cli.output import print_error
from worqr.errors import WorqrError, did_you_mean
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh


def queue_by_name(mesh: Mesh, name: str) -> Queue:
    """Return the queue of this name; ``{Q1}-fail``, as lists show it, is the failure queue of Q1."""
    from worqr.client.queue import queue_named

    return queue_named(mesh.queue, name)


async def unknown_queue_hint(mesh: Mesh, name: str) -> str:
    """Return what to say if the mesh has no queue of this name; empty if it has."""
    from worqr.client.stats import queue_names
    from worqr.keys import QueueKeys, RegistryKeys

    names = await queue_names(client_of(mesh).ask, RegistryKeys(mesh.prefix))
    known = {QueueKeys.of(mesh.prefix, each).display_name for each in names}
    if name in known:
        return ""
    hint = did_you_mean(name, known, "`worqr queues` lists those in use")
    return f"no queue {name!r} is in use; {hint}"


async def warn_if_unserved(mesh: Mesh, name: str) -> None:
    """Print on the standard error that no worker serves the queue; print nothing if the user may not look."""
    from worqr.client.inspection import nearest_served

    with suppress(WorqrError):
        if not (await queue_by_name(mesh, name).info()).workers:
            hint = await nearest_served(client_of(mesh), name)
            print_error(f"no worker serves queue {name!r} now; {hint or 'its tasks run when a worker serves it'}")
