"""Check that the server is one that worqr can use. No I/O: reads the replies to INFO and returns or raises the reason.

worqr needs shebang flags for scripts, which Redis has since 7.0. Valkey forked later; 7.2 is its first release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worqr.errors import RefusedByServer, Unavailable, WrongVersion

INFO_SECTIONS = ("server", "replication", "memory")
_SAFE_POLICIES = ("noeviction", "")  # some providers hide the policy
_OLDEST = {"Redis": (7, 0), "Valkey": (7, 2)}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The facts from INFO; empty where the user's permissions do not allow it."""

    server: str = ""
    version: str = ""
    run_id: str = ""
    role: str = ""
    eviction: str = ""

    @property
    def evicts(self) -> bool:
        return self.eviction not in _SAFE_POLICIES


def read_server_info(answers: Sequence[Any], address: str, *, replica: bool = False) -> ServerInfo:
    """Return the facts from the replies to INFO.

    Raises:
        WrongVersion: the server is too old.
        RefusedByServer: it is a Sentinel.
        Unavailable: it is a replica, unless `replica`.
    """
    info: dict[str, str] = {}
    for answer in answers:
        info |= info_fields(answer)
    server, version = server_version(info)
    facts = ServerInfo(server, version, info.get("run_id", ""), info.get("role", ""), info.get("maxmemory_policy", ""))
    if version and _numbers(version) < _OLDEST[server]:
        wanted = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in _OLDEST.items())
        raise WrongVersion(f"the server at {address} is {server} {version}; worqr needs {wanted}, or newer")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # the latter is Valkey's
        raise RefusedByServer(
            f"{address} is a Sentinel, which holds no data: write redis+sentinel://HOST:PORT/SERVICE, with its place and "
            "the name that it knows the server by"
        )
    if facts.role == "slave" and not replica:
        raise Unavailable("READONLY this server is a replica; only its primary can work")
    return facts


def info_fields(reply: Any) -> dict[str, str]:
    """Return the fields of a reply to INFO; none if the user may not ask."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, _, value in lines}


def server_version(info: Mapping[str, str]) -> tuple[str, str]:
    """Return whether it is ``Redis`` or ``Valkey``, and its version; that is empty if it is hidden."""
    server = "Valkey" if "valkey_version" in info or info.get("server_name") == "valkey" else "Redis"
    return server, info.get("valkey_version") or info.get("redis_version", "")


def _numbers(version: str) -> tuple[int, ...]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major) if major.isdigit() else 0, int(minor) if minor.isdigit() else 0)
