"""Deploys: what only older deploys of an application have declared is dropped when none of their workers runs any more."""

from __future__ import annotations

import random

import pytest

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, OTHER, declare, facts
from worqr import ops

NAMES = "abcdef"


class World:
    """Workers of two applications, which join and leave; each deploy of an application declares some of its names.

    Attributes:
        runs: the deploy of each worker, by application.
        newest: by name, the highest deploy that has declared it.
    """

    def __init__(self, desk: Desk, rng: random.Random) -> None:
        self.desk, self.rng = desk, rng
        self.code: dict[tuple[str, int], set[str]] = {}
        self.runs: dict[str, list[tuple[str, int]]] = {"shop": [], "a b": []}
        self.newest: dict[str, dict[str, int]] = {"shop": {}, "a b": {}}
        self.joined = 0

    def declared(self, app: str, deploy: int) -> set[str]:
        return self.code.setdefault((app, deploy), {name for name in NAMES if self.rng.random() < 0.5})

    def join(self, app: str, deploy: int) -> None:
        self.joined += 1
        worker = f"w{self.joined}"
        start(self.desk, worker, app, deploy)
        self.runs[app].append((worker, deploy))
        self.declare(app, deploy)

    def declare(self, app: str, deploy: int) -> None:
        names, owner = sorted(self.declared(app, deploy)), f"{deploy} {app}"
        pairs = [(f"{app} {name}", DEF) for name in names]
        renewed = self.desk.call(ops.renew_schedules(self.desk.g, [name for name, _ in pairs], owner))
        assert (
            self.desk.call(ops.declare_schedules(self.desk.g, pairs, replace=self.rng.random() < 0.5, owner=owner))
            == []
        )
        assert set(renewed) <= {name for name, _ in pairs}
        if names:
            self.desk.call(ops.declare_topics(self.desk.g, app, b"{}", names, owner))
        for name in names:
            self.newest[app][name] = max(deploy, self.newest[app].get(name, 0))

    def leave(self, app: str) -> None:
        if self.runs[app]:
            worker, _ = self.runs[app].pop(self.rng.randrange(len(self.runs[app])))
            assert self.desk.call(ops.stop_worker(self.desk.g, worker)) == []

    def drop(self) -> None:
        start = 0
        while start >= 0:
            start, _ = self.desk.call(ops.drop_outdated_schedules(self.desk.g, start, limit=2))
        self.desk.call(ops.drop_outdated_topics(self.desk.g))
        for app, names in self.newest.items():
            lowest = min((deploy for _, deploy in self.runs[app]), default=0)
            for name in [name for name, deploy in names.items() if 0 < deploy < lowest]:
                del names[name]

    def check(self) -> None:
        stored = self.desk.call(ops.survey_schedules(self.desk.g)).rows
        assert {row.name for row in stored} == {f"{app} {name}" for app, names in self.newest.items() for name in names}
        topics = {each.queue: set(each.patterns) for each in self.desk.call(ops.read_topics(self.desk.g))}
        assert topics == {app: set(names) for app, names in self.newest.items() if names}
        for app, workers in self.runs.items():
            for _, deploy in workers:
                assert self.declared(app, deploy) <= self.newest[app].keys()


def start(desk: Desk, worker: str, app: str, deploy: int) -> None:
    desk.call(ops.start_worker(desk.g, worker, keepalive_ms=60_000, facts=[("app", app), ("deploy", deploy)]))


@pytest.mark.parametrize("seed", range(20))
def test_what_a_running_deploy_declares_stays_and_the_rest_goes(desk: Desk, seed: int) -> None:
    """In both directions: newer and older deploys, and workers without a number, join and leave in any order."""
    world = World(desk, random.Random(seed))
    for _ in range(40):
        app = world.rng.choice(["shop", "a b"])
        what = world.rng.choice(["join", "leave", "leave", "declare", "drop", "drop"])
        if what == "join" and len(world.runs[app]) < 4:
            world.join(app, world.rng.choice([0, 1, 2, 3, 3]))
        elif what == "leave":
            world.leave(app)
        elif what == "declare" and world.runs[app]:
            world.declare(app, world.rng.choice(world.runs[app])[1])
        elif what == "drop":
            world.drop()
            with desk.nothing_changes():
                world.drop()
        world.check()


def test_a_schedule_is_dropped_whole(desk: Desk) -> None:
    start(desk, "W", "shop", 2)
    before = desk.state()
    declare(desk, "s", owner="1 shop")
    assert facts(desk)["own s"] == "1 shop"
    assert desk.send(ops.drop_outdated_schedules(desk.g)) == [b"ok", -1, b"s", DEF]
    assert {field for field in facts(desk) if field.endswith(" s")} == set()
    assert desk.state(":schedules") == before
    desk.call(ops.declare_topics(desk.g, "q", b"{}", ["old", "both"], "1 shop"))
    desk.call(ops.declare_topics(desk.g, "q", b"{}", ["both"], "2 shop"))
    desk.call(ops.declare_topics(desk.g, "gone", b"{}", ["old"], "1 shop"))
    left, dropped = desk.call(ops.drop_outdated_topics(desk.g))
    assert (left, sorted(dropped)) == (["gone"], [("gone", "old"), ("q", "old")])


def test_an_older_deploy_changes_no_definition_while_a_newer_one_runs(desk: Desk) -> None:
    start(desk, "W", "shop", 2)
    declare(desk, "s", owner="2 shop")
    declare(desk, "s", owner="1 shop", definition=OTHER)
    assert facts(desk)["def s"] == DEF.decode("latin-1")
    assert desk.call(ops.stop_worker(desk.g, "W")) == []
    declare(desk, "s", owner="1 shop", definition=OTHER)  # a roll-back
    assert (facts(desk)["def s"], facts(desk)["own s"]) == (OTHER.decode(), "2 shop")


def test_a_worker_of_which_nothing_is_known_keeps_everything(desk: Desk) -> None:
    start(desk, "W", "shop", 2)
    declare(desk, "s", owner="1 shop")
    desk.call(ops.declare_topics(desk.g, "q", b"{}", ["old"], "1 shop"))
    desk.client.sadd(desk.g.registered, "frozen")
    with desk.nothing_changes():
        assert desk.call(ops.drop_outdated_schedules(desk.g)) == (-1, [])
        assert desk.call(ops.drop_outdated_topics(desk.g)) == ([], [])


@pytest.mark.parametrize("odd", ["", "x", " ", "1", "-1 shop", "1e9 shop", b"\xff \xff", "9" * 400 + " shop"])
def test_an_owner_that_another_program_wrote_costs_nothing_else(desk: Desk, odd: str | bytes) -> None:
    start(desk, "W", "shop", 2)
    declare(desk, "odd", owner="1 shop")
    declare(desk, "s", owner="1 shop")
    desk.client.hset(desk.g.schedules, "own odd", odd)
    assert ("s", DEF) in desk.call(ops.drop_outdated_schedules(desk.g))[1]
    declare(desk, "odd", owner="2 shop")
    assert desk.call(ops.renew_schedules(desk.g, ["odd"], "2 shop")) == []
