"""Which mesh a command means, and its one connection to it. And kinds of options, and hints about queues."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from cyclopts import Parameter

from worqr.cli.output import complain
from worqr.cli.parsing import duration
from worqr.errors import WorqrError, did_you_mean
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh

T = TypeVar("T")

_FAILURES: Final = "}-fail"


def flag(help: str) -> Parameter:
    """An option without a value."""
    return Parameter(help=help, show_default=False)


def time(help: str, *, metavar: str = "DURATION") -> Parameter:
    """An option whose value is a duration, or with ``metavar="TIME"`` a moment."""
    return Parameter(help=help, metavar=metavar)


@Parameter(name="*", group="Connection")
@dataclass(frozen=True, slots=True)
class Where:
    """The server, the mesh on it, and how long to wait for the server."""

    url: Annotated[
        str | None,
        Parameter(
            metavar="URL",
            help="URL of the server. Default: $WORQR_URL, then $REDIS_URL, then redis://localhost:6379/0.",
        ),
    ] = None
    prefix: Annotated[
        str,
        Parameter(metavar="NAME", env_var="WORQR_PREFIX", help="Prefix of the mesh's keys, as in Mesh(prefix=...)."),
    ] = "worqr"
    patience: Annotated[str, time("Give up if the server does not respond for this long.")] = "5s"


QueueName = Annotated[str, Parameter(help="Name of the queue.")]
HERE: Final = Where()
"""The mesh that the environment names: no option was given."""


def ask(where: Where, command: Callable[[Mesh], Awaitable[T]]) -> T:
    """Connect, run `command` with the mesh, and return its result. Raises what ``Mesh.connect`` and `command` raise."""
    import trio

    from worqr.mesh import Mesh

    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())  # the error has what the log would have
    mesh = Mesh(where.url, prefix=where.prefix, app="cli", patience=duration(where.patience, "--patience") or 0)

    async def connected() -> T:
        async with mesh.connect():
            return await command(mesh)

    return trio.run(connected)


def queue_of(mesh: Mesh, name: str) -> Queue:
    """Return the queue of this name; ``{Q1}-fail``, as lists show it, is the failure queue of Q1."""
    if name.startswith("{") and name.endswith(_FAILURES):
        return mesh.queue(name[1 : -len(_FAILURES)]).failures
    return mesh.queue(name)


async def hint_at(mesh: Mesh, name: str) -> str:
    """Return what to say if the mesh has no queue of this name; empty if it has."""
    from worqr.client.stats import queue_names
    from worqr.keys import QueueKeys, RegistryKeys

    names = await queue_names(client_of(mesh).ask, RegistryKeys(mesh.prefix))
    known = {QueueKeys.of(mesh.prefix, each).shown for each in names}
    if name in known:
        return ""
    hint = did_you_mean(name, known, "`worqr queues` lists those in use")
    return f"no queue {name!r} is in use; {hint}"


async def warn_if_unserved(mesh: Mesh, name: str) -> None:
    """Print on the standard error that no worker serves the queue; print nothing if the user may not look."""
    from worqr.client.inspection import nearest_served

    with suppress(WorqrError):
        if not (await queue_of(mesh, name).info()).workers:
            hint = await nearest_served(client_of(mesh), name)
            complain(f"no worker serves queue {name!r} now; {hint or 'its tasks run when a worker serves it'}")
