"""Looking at queues: one request to each shard, and what they answer as one. For `worqr.queue` and `worqr.mesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from worqr import ops
from worqr.call import Call
from worqr.keys import QueueKeys
from worqr.summing import info_of
from worqr.task import QueueInfo

if TYPE_CHECKING:
    from worqr.mesh import Mesh

T = TypeVar("T")


async def ask_each(mesh: Mesh[Any], shards: Sequence[QueueKeys], make: Callable[[QueueKeys], Call[T]]) -> list[T]:
    """One request to each of these shards, all together."""
    if len(shards) == 1:
        return [await mesh.ask(make(shards[0]))]
    return await mesh.link.call_all([make(keys) for keys in shards])


async def all_infos(mesh: Mesh[Any], known: Iterable[QueueKeys]) -> list[QueueInfo]:
    """What there is to know of the queues that the registry knows by `known`, by name; all shards of one as one."""
    found: dict[str, set[QueueKeys]] = {}
    for keys in known:
        every = await mesh.sharding.of(replace(keys, tag=""), declare=False)
        found.setdefault(keys.shown, set(every)).add(keys)
    infos: list[QueueInfo] = []
    for name, shards in sorted(found.items()):
        infos.append(info_of(name, await ask_each(mesh, sorted(shards, key=lambda keys: keys.name), ops.inspect)))
    return infos
