"""The scripts as an earlier version of this library sends them, and a mesh that is one of that version. See README.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import worqr
from worqr.call import Call
from worqr.connecting import Connections
from worqr.link import Link, LinkSettings, Owner, mailbox_here
from worqr.link.heart import Heart
from worqr.lua import Script, all_scripts
from worqr.ops import WIRE_VERSION

T = TypeVar("T")

HERE = Path(__file__).parent

CALLED_OTHERWISE: Final[dict[str, Callable[[Call[Any]], Call[Any]]]] = {
    "start_work": lambda call: replace(call, keys=call.keys[1:]),  # without the queue
}
"""Scripts whose KEYS or ARGV are no longer what they were when they were frozen: how to make the old call of a new one."""


@cache
def frozen_scripts() -> dict[str, Script]:
    """Those of the present wire version, by name."""
    return {path.stem: Script(path.stem, path.read_text("utf-8")) for path in (HERE / str(WIRE_VERSION)).glob("*.lua")}


def freeze() -> None:
    """Write down the present scripts, in the place of those that were frozen for their wire version."""
    folder = HERE / str(WIRE_VERSION)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.lua"):
        old.unlink()
    for script in all_scripts():
        (folder / f"{script.name}.lua").write_text(script.source, "utf-8")


def how_it_is_called(script: Script) -> list[str]:
    """The lines of its header that a caller goes by."""
    return re.findall(r"^-- (?:KEYS|ARGV)\[.*$", script.source, re.MULTILINE)


def as_then(call: Call[T]) -> Call[T]:
    """The same request of the version that was frozen, if that knew it.

    It is not joined with others: the joined one would be of today's.
    """
    old = frozen_scripts().get(call.script.name)
    if old is not None and call.script is not old:
        call = CALLED_OTHERWISE.get(old.name, _unchanged)(call)
        call.script, call.merge = old, None
    return call


def _unchanged(call: Call[Any]) -> Call[Any]:
    return call


class FrozenLink(Link):
    """A link that sends what was frozen."""

    async def call(self, call: Call[T], *, patience: float | None = None) -> T:
        return await super().call(as_then(call), patience=patience)

    async def call_all(self, calls: Sequence[Call[T]]) -> list[T]:
        return await super().call_all([as_then(call) for call in calls])

    def post(
        self,
        call: Call[T],
        deliver: Callable[[T | None, Exception | None], None],
        *,
        owner: Owner | None = None,
        patience: float = float("inf"),
    ) -> None:
        super().post(as_then(call), deliver, owner=owner, patience=patience)

    def heart(self, *, make: Callable[[int, bool], Call[T]], **how: Any) -> Heart[T]:
        return super().heart(make=lambda beat, leads: as_then(make(beat, leads)), **how)


class FrozenConnections(Connections):
    """What a mesh of that version is connected by."""

    def new_link(self, settings: LinkSettings) -> Link:
        return FrozenLink(settings, mailbox_here())


def frozen(mesh: worqr.Mesh) -> worqr.Mesh:
    """This mesh, which is not connected, as a program with the frozen version would have it."""
    mesh.connections = FrozenConnections()
    return mesh
