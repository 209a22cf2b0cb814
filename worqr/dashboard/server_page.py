"""The page of the server: what it reports of itself, judged by what worqr needs. It is read when the page is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal

import anyio.to_thread
from starlette.responses import Response

from worqr.client.inspection import OutboxInfo, outboxes_of
from worqr.dashboard.pages import with_state
from worqr.dashboard.request import Visit
from worqr.errors import RefusedByServer
from worqr.inside import client_of
from worqr.link import ServerReport, server_version
from worqr.views import values

# What the page of the server says: the values of INFO in words, whether they are as worqr needs them, and what to do.


Level = Literal["good", "warn", "bad", ""]
Info = Mapping[str, str]
HIDDEN: Final = "hidden"
"""The text of a value that the user may not read, or that the provider hides."""
LUA_FIXED: Final = {
    "Redis": {(7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
"""The first patch of each series without the holes in Lua of CVE-2025-49844 and others. Newer series never had them."""
MUCH_MEMORY: Final = 0.85
MUCH_FRAGMENTED: Final = 1.5
LARGE: Final = 100 * 1024 * 1024
"""Bytes of data from which on fragmentation matters."""
YOUNG: Final = 600
"""Seconds since its start in which a restart is mentioned."""
LAGGING: Final = 10
"""Seconds after which a replica counts as late."""
MANY_CLIENTS: Final = 0.8
NAMES: Final = 12
"""Names of connections that are listed."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the page. Without a level, it is neither good nor bad."""

    name: str
    value: str
    level: Level = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server: its address, its lines, the connections by name, and why something is missing."""

    address: str
    facts: list[Fact]
    clients: list[tuple[str, int]]
    problem: str

    @property
    def level(self) -> Level:
        """The worst of its lines."""
        levels = {fact.level for fact in self.facts}
        return "bad" if "bad" in levels or not self.facts else "warn" if "warn" in levels else "good"


def facts_of(report: ServerReport) -> ServerFacts:
    """Return what the page says of one server."""
    found: list[Fact] = []
    if report.info:
        for facts in (_server, _memory, _persistence, _replicas, _connections):
            found += facts(report.info)
    return ServerFacts(report.address, found, _named(report.clients), report.problem)


def _server(info: Info) -> Iterator[Fact]:
    server, version = server_version(info)
    level, advice = _judged_version(server, version)
    yield Fact("Version", f"{server} {version}" if version else HIDDEN, level, advice)
    if (seconds := number(info, "uptime_in_seconds")) is not None:
        young = seconds < YOUNG
        yield Fact(
            "Running for",
            values.duration(seconds),
            "warn" if young else "",
            "It was started a moment ago." if young else "",
        )
    if (rate := number(info, "instantaneous_ops_per_sec")) is not None:
        yield Fact("Commands", f"{rate:,} per second")


def _judged_version(server: str, version: str) -> tuple[Level, str]:
    """Return the level of a version, and what to do about it."""
    parts = version.split(".")
    if len(parts) < 3 or not all(part.isdecimal() and len(part) < 10 for part in parts[:3]):
        return "", ""
    series, patch = (int(parts[0]), int(parts[1])), int(parts[2])
    fixed = LUA_FIXED[server]
    if series > max(fixed) or patch >= fixed.get(series, 1 << 30):
        return "good", ""
    wanted = ", ".join(f"{major}.{minor}.{least}" for (major, minor), least in fixed.items())
    return "warn", (
        f"Users who may send scripts can use holes in its Lua engine (CVE-2025-49844 and others). They are closed in {server} "
        f"{wanted}. Distributions close them in older versions under numbers of their own."
    )


def _memory(info: Info) -> Iterator[Fact]:
    used, most = number(info, "used_memory"), number(info, "maxmemory")
    if used is None:
        yield Fact("Memory", HIDDEN)
    elif not most:
        yield Fact("Memory", f"{values.size(used)}, without a limit", "", "Set maxmemory below what the machine has.")
    else:
        full, much = used >= most, used > MUCH_MEMORY * most
        advice = (
            "New tasks are refused. Raise maxmemory, or let the workers catch up." if full else "Raise maxmemory soon."
        )
        level: Level = "bad" if full else "warn" if much else "good"
        yield Fact(
            "Memory",
            f"{values.size(used)} of {values.size(most)} ({used / most:.0%})",
            level,
            advice if much or full else "",
        )
    ratio = info.get("mem_fragmentation_ratio", "")
    if used and used > LARGE and ratio.replace(".", "", 1).isdecimal() and float(ratio) > MUCH_FRAGMENTED:
        yield Fact(
            "Fragmentation", ratio, "warn", "The system counts more memory than the data take: activedefrag may help."
        )
    policy = info.get("maxmemory_policy", "")
    if policy in ("", "noeviction"):
        yield Fact("Eviction", policy or HIDDEN, "good" if policy else "")
    else:
        yield Fact(
            "Eviction",
            policy,
            "bad",
            "The server deletes tasks when its memory is full: set maxmemory-policy noeviction.",
        )
    if evicted := number(info, "evicted_keys"):
        yield Fact(
            "Evicted keys",
            f"{evicted:,}",
            "bad",
            "Keys were deleted since the server's start; tasks may be among them.",
        )


def _persistence(info: Info) -> Iterator[Fact]:
    if info.get("loading", "0") != "0":
        yield Fact("Loading", "the data are read from disk", "warn", "It answers when that is done.")
    if "aof_enabled" not in info:
        yield Fact("Persistence", HIDDEN)
    elif info["aof_enabled"] == "0":
        yield Fact(
            "Persistence",
            "snapshots only",
            "warn",
            "A restart loses what is newer than the last one: set appendonly yes.",
        )
    elif info.get("aof_last_write_status", "ok") != "ok":
        yield Fact(
            "Persistence",
            "the append-only file cannot be written",
            "bad",
            "The server refuses writes. Is the disk full?",
        )
    else:
        yield Fact("Persistence", "append-only file", "good")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Fact(
            "Last snapshot",
            "failed",
            "bad",
            "The server may refuse writes (MISCONF). Is the disk full? Its log says why.",
        )
    elif (saved := _last_save(info)) is not None:
        yield Fact("Last snapshot", saved)


def _last_save(info: Info) -> str | None:
    """Return when the last snapshot was made, by the server's clock."""
    at, now = number(info, "rdb_last_save_time"), number(info, "server_time_usec")
    if at is None or now is None:
        return None
    return f"{values.since(datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now / 1e6, UTC))} ago"


def _replicas(info: Info) -> Iterator[Fact]:
    if info.get("role") == "slave":
        yield Fact("Role", "replica", "bad", "Only its primary can work: the address should lead there.")
        return
    count = number(info, "connected_slaves")
    if count is None:
        yield Fact("Replicas", HIDDEN)
        return
    if not count:
        yield Fact("Replicas", "none", "", "Without a replica, the data are lost with the machine.")
    for each in (info.get(f"slave{n}", "") for n in range(count)):
        fields = dict(part.split("=", 1) for part in each.split(",") if "=" in part)
        lag, state = number(fields, "lag"), fields.get("state", "")
        place = f"{fields.get('ip', '?')}:{fields.get('port', '?')}"
        if state != "online":
            yield Fact("Replica", f"{place}, {state or 'state unknown'}", "warn", "It has no complete copy yet.")
        elif lag is not None and lag > LAGGING:
            yield Fact("Replica", f"{place}, {values.duration(lag)} behind", "warn", "A failover would lose that much.")
        else:
            yield Fact("Replica", f"{place}, in step", "good")


def _connections(info: Info) -> Iterator[Fact]:
    count, most = number(info, "connected_clients"), number(info, "maxclients")
    if count is None:
        yield Fact("Connections", HIDDEN)
        return
    many = most is not None and count > MANY_CLIENTS * most
    of = f" of {most:,}" if most is not None else ""
    yield Fact("Connections", f"{count:,}{of}", "warn" if many else "good", "Raise maxclients." if many else "")
    if refused := number(info, "rejected_connections"):
        yield Fact("Refused connections", f"{refused:,}", "warn", "maxclients was reached since the server's start.")


def _named(clients: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the most frequent names of connections, and the sum of the others."""
    found = Counter({name or "without a name": count for name, count in clients.items()})
    listed = sorted(found.items(), key=lambda each: (-each[1], each[0]))
    rest = sum(count for _, count in listed[NAMES:])
    return [*listed[:NAMES], *([(f"{len(listed) - NAMES} other names", rest)] if rest else [])]


def number(info: Info, name: str) -> int | None:
    """Return a whole number of INFO; None if it is not there."""
    value = info.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 20 else None


TIMEOUT: Final = 2.0
"""Seconds for each reply of a server."""


async def page(visit: Visit) -> Response:
    """The server, or each primary of a cluster."""
    servers, _ = await with_state(visit, partial(_servers, visit))
    return visit.page("server.html", live="", servers=servers, outboxes=await _outboxes(visit))


async def _outboxes(visit: Visit) -> list[OutboxInfo]:
    """Return the outboxes of the mesh; none if the server refuses to say."""
    try:
        return await outboxes_of(client_of(visit.mesh))
    except RefusedByServer:
        return []


async def _servers(visit: Visit) -> list[ServerFacts]:
    async def read(_before: object) -> list[ServerFacts]:
        link = client_of(visit.mesh).link
        reports = await anyio.to_thread.run_sync(link.server_reports, TIMEOUT, abandon_on_cancel=True)
        return [facts_of(report) for report in reports]

    return await visit.looks.get("server", read)
