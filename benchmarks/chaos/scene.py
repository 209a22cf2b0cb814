"""The targets of faults: servers, processes, proxy, ledger, and the agenda of faults to be undone later."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from benchmarks.chaos.children import Children, Process, Role
from benchmarks.chaos.ledger import Ledger, now
from benchmarks.chaos.servers import Servers
from benchmarks.chaos.workload import DEPLOYS
from tests.support.proxy import FaultProxy


class NotNow(Exception):
    """The fault cannot be injected at the moment: another one is tried."""


@dataclass
class Agenda:
    """Functions to be called later, by time."""

    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))

    def run_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            self._run_next()

    def run_all(self) -> None:
        """Everything at once, also what it adds."""
        while self._due:
            self._run_next()

    def _run_next(self) -> None:
        with suppress(redis.RedisError):  # the calm phase repairs what could not be undone
            heapq.heappop(self._due)[2]()


@dataclass
class Scene:
    """One run's world."""

    servers: Servers
    children: Children
    ledger: Ledger
    rng: random.Random
    proxy: FaultProxy | None = None
    agenda: Agenda = field(default_factory=Agenda)
    faults: Counter[str] = field(default_factory=Counter)
    proxy_busy: bool = False
    paused: bool = False
    moving: bool = False
    rolling: bool = False
    """A rolling deploy is under way."""
    calm: bool = False
    deploy: int = DEPLOYS[0]
    """The version of the application that peers start with."""
    stuck: bool = False
    """A queue did not become empty: the run has failed already."""

    def note(self, kind: str, who: str = "") -> None:
        """Count a fault and write it to the ledger."""
        self.faults[kind] += 1
        self.ledger.write("fault", kind=kind, who=who)

    def troubled(self, begin: float, why: str, who: str | None = None) -> None:
        """Write that something did not work from `begin` until now."""
        self.ledger.write("trouble", begin=begin, end=now(), who=who, why=why)

    def start(self, role: Role) -> Process:
        """Start a process; some go through the proxy."""
        proxied = self.proxy is not None and self.rng.random() < (0.4 if role == "peer" else 0.7)
        url = self.proxy.url if proxied and self.proxy is not None else self.servers.url
        patience = self.rng.choice([3.0, 30.0]) if role == "producer" else 30.0
        return self.children.start(role, url, proxied=proxied, patience=patience, deploy=self.deploy)

    def pick(self, role: Role) -> Process:
        """A process that is up."""
        there = self.children.of(role)
        if not there:
            raise NotNow
        return self.rng.choice(there)
