"""The faults of the chaos run, as far as one could spoil another."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos.faults import move_clock, pause_clients, roll_out
from benchmarks.chaos.scene import NotNow


class Agenda:
    """What is to be done later, which the test does."""

    def __init__(self) -> None:
        self.planned: list[Callable[[], object]] = []

    def add(self, _seconds: float, act: Callable[[], object]) -> None:
        self.planned.append(act)

    def do_next(self) -> None:
        self.planned.pop(0)()


def test_the_clock_is_not_moved_while_a_frozen_server_has_a_pause_to_end() -> None:
    """A pause ends by the server's clock: set back by a minute, it would take a minute longer."""
    node = SimpleNamespace(state="up", ask=lambda *_: None)
    clock, agenda = SimpleNamespace(offset=60, move_to=lambda _: None), Agenda()
    scene: Any = SimpleNamespace(
        rng=random.Random(1),
        agenda=agenda,
        paused=False,
        servers=SimpleNamespace(nodes=[node], primaries=[node], clock=clock),
        ledger=SimpleNamespace(write=lambda *_, **__: None),
        note=lambda *_: None,
        troubled=lambda *_: None,
    )
    pause_clients(scene)
    node.state = "frozen"
    agenda.do_next()
    with pytest.raises(NotNow):
        move_clock(scene)
    node.state = "up"
    agenda.do_next()
    move_clock(scene)
    assert not agenda.planned


def test_a_rolling_deploy_replaces_each_peer_that_a_fault_has_not_replaced() -> None:
    peers = [SimpleNamespace(name=name, state="up", runs=True) for name in ("one", "two", "three")]
    started: list[int] = []
    ended: list[str] = []
    agenda = Agenda()
    scene: Any = SimpleNamespace(
        rng=random.Random(1),
        agenda=agenda,
        deploy=1,
        rolling=False,
        children=SimpleNamespace(of=lambda _: peers, terminate=lambda process: ended.append(process.name)),
        start=lambda _: started.append(scene.deploy),
        note=lambda *_: None,
    )
    roll_out(scene)
    assert (scene.deploy, started) == (2, []), "one after the other"
    with pytest.raises(NotNow):
        roll_out(scene)
    agenda.do_next()
    peers[1].state = "killed"
    for _ in range(3):
        agenda.do_next()
    assert (started, ended) == ([2, 2], ["one", "three"])
    roll_out(scene)
    assert scene.deploy == 1
