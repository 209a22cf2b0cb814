"""Which mesh a command means, and how it is asked: one connection for the length of the command. And kinds of options."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from cyclopts import Parameter

from worqr.cli.words import duration
from worqr.errors import did_you_mean
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.queue import Queue

T = TypeVar("T")

_FAILURES: Final = "}-fail"


def flag(help: str) -> Parameter:
    """An option without a value."""
    return Parameter(help=help, show_default=False)


def time(help: str, *, metavar: str = "DURATION") -> Parameter:
    """An option whose value is a duration, or with ``metavar="TIME"`` a moment."""
    return Parameter(help=help, metavar=metavar)


@Parameter(name="*", group="Which mesh")
@dataclass(frozen=True, slots=True)
class Where:
    """The server, the mesh on it, and how long to wait for them."""

    url: Annotated[
        str | None,
        Parameter(metavar="URL", help="The server; else $WORQR_URL, $REDIS_URL, or redis://localhost:6379/0."),
    ] = None
    prefix: Annotated[
        str,
        Parameter(metavar="NAME", env_var="WORQR_PREFIX", help="The first part of all keys, as in Mesh(prefix=...)."),
    ] = "worqr"
    patience: Annotated[str, time("How long to wait for a server that is away.")] = "5s"


HERE: Final = Where()
"""Nothing was said: as the environment has it."""


def ask(where: Where, command: Callable[[Mesh], Awaitable[T]]) -> T:
    """Connect, run `command` with the mesh, and answer what it returns.

    Raises: as ``Mesh.connect`` and `command`.
    """
    import trio

    from worqr.mesh import Mesh

    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())  # what the log would say is said by the error
    mesh = Mesh(where.url, prefix=where.prefix, app="cli", patience=duration(where.patience, "--patience") or 0)

    async def connected() -> T:
        async with mesh.connect():
            return await command(mesh)

    return trio.run(connected)


def queue_of(mesh: Mesh, name: str) -> Queue:
    """The queue of this name; ``{Q1}-fail``, as lists show it, is the failure queue of Q1."""
    if name.startswith("{") and name.endswith(_FAILURES):
        return mesh.queue(name[1 : -len(_FAILURES)]).failures
    return mesh.queue(name)


async def hint_at(mesh: Mesh, name: str) -> str:
    """What to say if nobody knows of a queue of this name; empty if somebody does."""
    from worqr.keys import QueueKeys, RegistryKeys
    from worqr.summing import queue_names

    names = await queue_names(client_of(mesh).ask, RegistryKeys(mesh.prefix))
    known = {QueueKeys.of(mesh.prefix, each).shown for each in names}
    if name in known:
        return ""
    hint = did_you_mean(name, known)
    return f"nobody has used a queue {name!r} lately" + (f"; {hint}" if hint else "")
