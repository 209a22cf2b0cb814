"""The options that say which mesh a command uses, and the connection to that mesh."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from cyclopts import Parameter

from worqr.cli.errors import InvalidArguments
from worqr.cli.parsing import duration_option, parse_duration

if TYPE_CHECKING:
    from worqr.mesh import Mesh

T = TypeVar("T")


@Parameter(name="*", group="Connection")
@dataclass(frozen=True, slots=True)
class ConnectOptions:
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
    patience: Annotated[str, duration_option("Give up if the server does not respond for this long.")] = "5s"
    who: Annotated[
        str | None,
        Parameter(
            name="--as",
            metavar="NAME",
            help="Your name for `worqr log`, which shows who paused, cancelled or deleted. Default: the user of this process.",
        ),
    ] = None


FROM_ENVIRONMENT: Final = ConnectOptions()
"""No option was given: the environment names the mesh."""


def run_connected(connect: ConnectOptions, command: Callable[[Mesh], Awaitable[T]]) -> T:
    """Connect, run `command` with the mesh, and return its result. Raise the errors of ``Mesh.connect`` and of `command`."""
    import trio

    from worqr.client.connections import EMBEDDED, url_or_default
    from worqr.inside import client_of
    from worqr.mesh import Mesh

    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())  # the error has the text that the log would have
    mesh = Mesh(
        connect.url, prefix=connect.prefix, app="cli", patience=parse_duration(connect.patience, "--patience") or 0
    )

    if url_or_default(mesh.url) == EMBEDDED:
        raise InvalidArguments(
            f"{EMBEDDED} is a private server that would start and end with this command: run `worqr server` in another terminal, "
            "and set WORQR_URL to the URL that it prints"
        )
    client_of(mesh).act_as(_user() if connect.who is None else connect.who)

    async def connected() -> T:
        async with mesh.connect():
            return await command(mesh)

    return trio.run(connected)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run a process as a user without a name
        return ""
