"""Who serves a queue and with which handler options, and the shards of a queue, for its page.

Workers store their options when they enter a queue. The server keeps those of a worker until it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from worqr import ops
from worqr.client.inspection import ask_each, list_jobs, merge_queue_info
from worqr.dashboard import figures
from worqr.dashboard.guard import Refused
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.shard_layout import MAX_SHARDS

if TYPE_CHECKING:
    from worqr.dashboard.visit import Visit
    from worqr.mesh_records import QueueInfo
    from worqr.ops import ServedPolicy
    from worqr.records import TaskInfo

UNKNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class Options:
    """The handler options of some workers, as texts for a row of a table."""

    failures: str
    timeouts: str
    stalls: str
    backoff: str
    timeout: str
    errors: str
    kept: str
    results: str
    handler: str


@dataclass(frozen=True, slots=True)
class Served:
    """Workers with the same options. `workers`: the first of them by id. `number`: how many they are."""

    number: int
    workers: Sequence[str]
    options: Options


@dataclass(frozen=True, slots=True)
class Serving:
    """All that serve a queue, most workers first.

    Attributes:
        left_out: how many workers were not looked at.
    """

    groups: Sequence[Served]
    left_out: int = 0

    @property
    def differing(self) -> set[str]:
        """The names of the options that are not the same for all workers."""
        known = [group.options for group in self.groups]
        names = (each.name for each in fields(Options))
        return {name for name in names if len({getattr(each, name) for each in known}) > 1}


def serving_of(found: Sequence[ServedPolicy], left_out: int = 0) -> Serving:
    """Return the options of workers as texts."""
    return Serving([Served(each.number, each.workers, options_of(each.fields)) for each in found], left_out)


def options_of(stored: Mapping[str, str]) -> Options:
    """Return handler options as texts. What is not stored, or is no number, is not known."""
    lowest, highest = _time(stored, "min_backoff"), _time(stored, "max_backoff")
    only, never = stored.get("retry_on", ""), stored.get("fail_on", "")
    known = "max_failures" in stored
    errors = [f"only {only}" if only else "", f"never {never}" if never else ""]
    return Options(
        failures=_number(stored, "max_failures"),
        timeouts=_number(stored, "max_timeouts"),
        stalls=_number(stored, "max_stalls"),
        backoff=UNKNOWN if UNKNOWN in (lowest, highest) else f"{lowest} to {highest}",
        timeout=_time(stored, "timeout") if "timeout" in stored or not known else "none",
        errors="; ".join(filter(None, errors)) or ("all" if known else UNKNOWN),
        kept=_number(stored, "keep_failed"),
        results=_time(stored, "result_ttl") if "result_ttl" in stored else "not kept",
        handler={"1": "handler", "0": "none"}.get(stored.get("on_failure", ""), UNKNOWN),
    )


def _number(stored: Mapping[str, str], name: str) -> str:
    value = stored.get(name, "")
    return figures.count(int(value)) if value.isascii() and value.isdecimal() and len(value) < 16 else UNKNOWN


def _time(stored: Mapping[str, str], name: str) -> str:
    value = stored.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        return UNKNOWN
    seconds = int(value) / 1000
    return figures.duration(seconds) if seconds.is_integer() else f"{seconds:g} s"


async def read_serving(visit: Visit, name: str) -> Serving:
    """Return who serves a queue. Workers serve all shards of a queue, so the first shard tells."""
    client = client_of(visit.mesh)
    shards = await client.sharding.shards(QueueKeys.of(visit.mesh.prefix, name))
    return serving_of(*await client.ask(ops.list_policies(shards[0])))


async def read_info(visit: Visit, name: str) -> tuple[QueueInfo, list[QueueInfo]]:
    """Return the counters of a queue, and those of each of its shards; of a queue with one shard only the former."""
    client, keys = client_of(visit.mesh), QueueKeys.of(visit.mesh.prefix, name)
    found = await ask_each(client, await client.sharding.shards(keys), ops.inspect)
    shards = [merge_queue_info(f"{keys.display_name} {n}", [each]) for n, each in enumerate(found, 1)]
    return merge_queue_info(keys.display_name, found), shards if len(shards) > 1 else []


async def waiting_tasks(visit: Visit, name: str, limit: int, *, newest: bool) -> list[TaskInfo]:
    """Return one page of the waiting tasks of a queue, or of the shard whose number the field `shard` is.

    Raises:
        Refused: the queue has no such shard.
    """
    client = client_of(visit.mesh)
    shards, number = (
        await client.sharding.shards(QueueKeys.of(visit.mesh.prefix, name)),
        visit.number("shard", 0, 1, MAX_SHARDS),
    )
    if number > len(shards):
        raise Refused(404, f"The queue has {figures.plural(len(shards), 'shard')}.")
    chosen = shards[number - 1 : number] if number else shards
    return await list_jobs(client, chosen, "waiting", limit, visit.text("after"), newest=newest)


def shard_of(task: TaskInfo) -> int:
    """Return the number of the shard in which a listed task waits, from 1 on. Its cursor begins with the state and the shard."""
    return int(task.cursor.split(" ")[1]) + 1


def shard_numbers(name: str, shards: Sequence[QueueInfo]) -> dict[str, str]:
    """Return the numbers of the shards of a queue that change while its page is open."""
    names = ("waiting", "scheduled", "running", "failed")
    return {
        f"shard.{name}.{n}.{each}": figures.count(getattr(info, each) + (info.broken if each == "failed" else 0))
        for n, info in enumerate(shards, 1)
        for each in names
    }
