"""Noting: a peer stores the names of the queues that it serves, so that they are found and not forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trio_util import periodic

from worqr import ops
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.ops import MAX_ITEMS, NOTE_EVERY


async def register_queues_forever(link: Link, keys: RegistryKeys, names: Callable[[], Sequence[str]]) -> None:
    """Note them every NOTE_EVERY seconds, also queues that the peer is still entering. `map_work` has noted each of them."""
    async for _ in periodic(NOTE_EVERY):
        register_queues(link, keys, names())


def register_queues(link: Link, keys: RegistryKeys, names: Sequence[str]) -> None:
    """Note these names; those that are not noted within NOTE_EVERY wait for the next time."""
    for start in range(0, len(names), MAX_ITEMS):
        call = ops.note_queues(keys, names[start : start + MAX_ITEMS])
        link.post(call, lambda _word, _failure: None, patience=NOTE_EVERY)
