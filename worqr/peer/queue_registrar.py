"""Store the names of the queues that a peer serves, so that callers and the leader find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trio_util import periodic

from worqr import ops
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.ops import MAX_ITEMS, NOTE_EVERY


async def register_queues_forever(link: Link, keys: RegistryKeys, names: Callable[[], Sequence[str]]) -> None:
    """Store them every NOTE_EVERY seconds, including queues that the peer is still entering.

    `map_work` has stored each of them once when the peer entered it.
    """
    async for _ in periodic(NOTE_EVERY):
        register_queues(link, keys, names())


def register_queues(link: Link, keys: RegistryKeys, names: Sequence[str]) -> None:
    """Store these names. A request that the server does not accept within NOTE_EVERY is dropped, because the next one follows."""
    for start in range(0, len(names), MAX_ITEMS):
        call = ops.note_queues(keys, names[start : start + MAX_ITEMS])
        link.post(call, lambda _word, _failure: None, patience=NOTE_EVERY)
