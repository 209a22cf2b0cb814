"""The leader's rounds where a node of a cluster is away: it costs one wait, whoever has died meanwhile."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from worqr import ops
from worqr.errors import Unavailable
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import Look
from worqr.peer.leading import LEASE, NODE_PATIENCE, Leader

WORKERS = ["W1", "W2", "W3"]


class HalfACluster:
    """A link that reaches the registry and Q1, and waits in vain for Q0. Every worker is dying, and mapped to both."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(clustered=True)
        self.connected_at = 0.0
        self.asked: Counter[tuple[str, str]] = Counter()
        self.left = {worker: ["Q0", "Q1"] for worker in WORKERS}

    async def call(self, call: ops.Call[Any], *, patience: float) -> Any:
        name = call.script.name
        self.asked[name, call.base] += 1
        if call.base == "p:{Q0}":
            assert patience == NODE_PATIENCE < LEASE
            raise Unavailable("the node is away")
        if name == "look_at_workers":
            return Look("run", {}, list(WORKERS))
        if name == "forget_worker":
            return list(self.left[str(call.args[0])])
        if name == "fail_worker":
            return SimpleNamespace(given=1, aside=0, more=False)
        if name == "unmap_work":
            self.left[call.keys[0].rpartition(":")[2]].remove("Q1")
            return None
        raise AssertionError(name)


async def test_a_node_that_is_away_is_waited_for_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = HalfACluster()
    peer: Any = SimpleNamespace(queue_keys=lambda queue: QueueKeys("p", queue))
    leader = Leader(peer, link, RegistryKeys("p"), keepalive=3)
    leader._next_scan = float("inf")
    for rounds in (1, 2):
        await leader.round_once()
        assert link.asked["fail_worker", "p:{Q0}"] == rounds
    assert link.asked["fail_worker", "p:{Q1}"] == len(WORKERS)
    assert link.left == {worker: ["Q0"] for worker in WORKERS}
