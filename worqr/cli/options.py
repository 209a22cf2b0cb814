"""The options that commands share: how their values are parsed, which queue they name, and the connection to the mesh."""

from __future__ import annotations

import getpass
import json
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

from cyclopts import Parameter

from worqr.cli.errors import InvalidArguments
from worqr.cli.output import print_error
from worqr.errors import WorqrError, did_you_mean
from worqr.inside import client_of, set_server
from worqr.limits import Limit

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.link import Credentials
    from worqr.mesh import Mesh


# The queue that a command names: its handle, and hints for a name that no task or worker uses.


def queue_by_name(mesh: Mesh, name: str) -> Queue:
    """Return the queue of this name; ``{Q1}-fail``, as lists show it, is the failure queue of Q1."""
    from worqr.client.queue import queue_named

    return queue_named(mesh.queue, name)


async def unknown_queue_hint(mesh: Mesh, name: str) -> str:
    """Return what to say if the mesh has no queue of this name; empty if it has."""
    from worqr.client.inspection import queue_names
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


# Types of options that several commands share. Each is an annotation for cyclopts, with its help text.


def flag(help: str) -> Parameter:
    """An option without a value."""
    return Parameter(help=help, show_default=False)


def duration_option(help: str) -> Parameter:
    """An option whose value is a duration; `parse_duration` reads it."""
    return Parameter(help=help, metavar="DURATION")


def time_option(help: str) -> Parameter:
    """An option whose value is a time; `parse_time` reads it."""
    return Parameter(help=help, metavar="TIME")


QueueName = Annotated[str, Parameter(help="Name of the queue.")]
JsonLines = Annotated[bool, flag("Print JSON Lines: one object per entry, with all fields.")]


_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


def parse_duration(text: str | None, what: str) -> float | None:
    """Return seconds: ``90``, ``1.5``, ``10m``, ``1h30m``; units are ms, s, m, h, d and w. InvalidArguments names `what`."""
    if text is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidArguments(
            f"{what} must be a duration such as 90 (seconds), 10m or 1h30m (units: ms, s, m, h, d, w), got {text!r}"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_size(text: str | None, what: str) -> int | None:
    """Return bytes: ``800M``, ``1.5G``; units are K, M and G, of 1024. InvalidArguments names `what`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise InvalidArguments(f"{what} must be a size such as 800M or 2G (units: K, M, G), got {text!r}")
    units: int = 1024 ** ("KMG".index(found[2].upper()) + 1)
    return round(float(found[1]) * units)


def parse_rate(text: str, what: str) -> Limit:
    """Return the limit that a number and a period mean: ``100/1m``. InvalidArguments names `what`."""
    number, slash, period = text.partition("/")
    if not slash or not re.fullmatch(r"\d+", number):
        raise InvalidArguments(f"{what} must be a number and a period, such as 100/1m, not {text!r}")
    return Limit(rate=int(number), per=parse_duration(period, f"the period of {what}"))


def parse_time(text: str | None, what: str, *, ago: bool = False) -> datetime | None:
    """Return a time in ISO 8601, by default in this machine's zone. With `ago`, it may be a duration before now."""
    if text is None:
        return None
    try:
        if ago and re.fullmatch(rf"({_PART.pattern})+", text):
            return datetime.now(UTC) - timedelta(seconds=parse_duration(text, what) or 0)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        or_ago = ", or a duration before now such as 2h" if ago else ""
        raise InvalidArguments(
            f"{what} must be a time such as 2031-05-01T12:00 or 2031-05-01T12:00Z{or_ago}, got {text!r}"
        ) from None


def parse_pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    """Return pairs of ``name=text``."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArguments(f"{what} must be name=text, got {text!r}")
        if name in found:
            raise InvalidArguments(f"{what}: {name!r} is given twice")
        found[name] = value
    return found


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a function, typed as ``name=text`` or ``name:=JSON``."""
    found: dict[str, Any] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)(:?=)(.*)", text, re.DOTALL)
        if match is None:
            raise InvalidArguments(f"an argument must be name=text or name:=JSON, got {text!r}")
        name, sign, value = match.groups()
        if name in found:
            raise InvalidArguments(f"the argument {name!r} is given twice")
        try:
            found[name] = value if sign == "=" else json.loads(value)
        except ValueError as error:
            raise InvalidArguments(
                f"the value after {name}:= must be JSON ({error}); to pass text, type {name}=..."
            ) from None
    return found


def text_like_json(text: str) -> str | None:
    """Return the name in ``name=text`` if the text is also a number, true, false, null, a list or an object in JSON."""
    name, sign, value = text.partition("=")
    try:
        found = None if not sign or name.endswith(":") else json.loads(value)
    except ValueError:
        return None
    return None if isinstance(found, str) or (found is None and value != "null") else name


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
        Parameter(metavar="NAME", env_var="WORQR_PREFIX", help="Prefix of the mesh."),
    ] = "worqr"
    patience: Annotated[
        str,
        Parameter(
            metavar="DURATION",
            env_var="WORQR_PATIENCE",
            help="Give up if the server does not reply for this long.",
        ),
    ] = "5s"
    codec: Annotated[
        str | None,
        Parameter(
            metavar="MODULE:MESH",
            env_var="WORQR_CODEC",
            help="Show and send payloads with the codec of this mesh. Default: none.",
        ),
    ] = None
    who: Annotated[
        str | None,
        Parameter(
            name="--as",
            metavar="NAME",
            help="Your name for `worqr log`. Default: the user of this process.",
        ),
    ] = None


def prefix_read(connect: ConnectOptions) -> str:
    """Return the end of the message that a mesh is empty: it may be another one than that of the program."""
    return f"; the prefix is {connect.prefix!r}: for a Mesh(prefix='shop'), add --prefix shop"


_credentials: list[Credentials] = []
_codec_of: list[Mesh] = []


def use_mesh(mesh: Mesh) -> None:
    """Let the commands of this process use the server, the prefix, the credentials and the codec of a mesh, unless options name
    others.
    """
    if mesh.url is not None:
        os.environ["WORQR_URL"] = mesh.url
    os.environ["WORQR_PREFIX"] = mesh.prefix
    _credentials[:] = [] if mesh.credentials is None else [mesh.credentials]
    _codec_of[:] = [mesh]


def mesh_at(connect: ConnectOptions, app: str) -> Mesh:
    """Return the mesh that the options name.

    Args:
        connect: the options.
        app: the name of the command, for the server's list of clients.
    """
    from worqr.mesh import Mesh

    patience = parse_duration(connect.patience, "--patience") or 0
    known = _codec_of
    if connect.codec is not None:
        known = [_mesh_with_codec(connect.codec)]
    codec = known[0].codec if known else None
    mesh = Mesh(connect.url, prefix=connect.prefix, app=app, patience=patience, codec=codec)
    if _credentials and connect.url is None:
        set_server(mesh, url=mesh.url, prefix=mesh.prefix, credentials=_credentials[0])
    return mesh


def _mesh_with_codec(target: str) -> Mesh:
    """Return the mesh that ``package.module:name`` names, for its codec. Raises InvalidArguments if there is none."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = pkgutil.resolve_name(target)
    except Exception as error:  # the module is the user's
        why = f"{type(error).__name__}: {error}"
        raise InvalidArguments(f"--codec {target} cannot be imported ({why}): type package.module:mesh") from None
    if getattr(found, "codec", None) is None:
        raise InvalidArguments(f"--codec {target} names no mesh that has a codec: write Mesh(codec=...) there")
    return cast("Mesh", found)


FROM_ENVIRONMENT: Final = ConnectOptions()
"""No option was given: the environment names the mesh."""


def run_connected(connect: ConnectOptions, command: Callable[[Mesh], Awaitable[T]]) -> T:
    """Connect, run `command` with the mesh, and return its result. Raise the errors of ``Mesh.connect`` and of `command`."""
    import trio

    from worqr.client.client import EMBEDDED, url_or_default

    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())  # the error has the text that the log would have
    mesh = mesh_at(connect, "cli")

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
