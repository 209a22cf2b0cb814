"""Every script as a link sends it to a node of a cluster: its sharded variant, with the key that is never there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.ops.driver import Desk
from tests.ops.scene import CALLS, next_call, reset_scene, set_scene
from tests.support.clusters import open_node
from tests.support.patience import PATIENCE
from worqr.command import Command
from worqr.keys import NONEXISTENT
from worqr.link.session import as_sent, slot_of
from worqr.lua import Script, all_scripts


class ClusterDesk(Desk):
    """Sends what a link to a cluster sends."""

    def sent(self, call: Command[Any]) -> tuple[Script, tuple[str, ...]]:
        script, keys = as_sent(call, clustered=True)
        assert keys == (call.base, call.base + NONEXISTENT)
        assert len({slot_of(key) for key in keys}) == 1
        self.client.script_load(script.source)
        return script, keys


@pytest.fixture
def node(server_kind: str) -> Iterator[redis.Redis]:
    """The only node of a cluster."""
    with open_node(server_kind) as node:
        yield node.client()


def calls_of(node: redis.Redis) -> dict[str, dict[str, int]]:
    """What each command has been called for: calls, failed_calls, rejected_calls."""
    found: dict[str, dict[str, int]] = {}
    for name, stats in node.info("commandstats").items():
        found[name.removeprefix("cmdstat_")] = {word: int(n) for word, n in stats.items() if word.endswith("calls")}
    return found


def test_every_script_works_on_a_node_and_tells_it_in_the_slot(node: redis.Redis) -> None:
    """A script hides from its caller what goes wrong when it publishes: the server's own counts show it."""
    plain, sharded = Desk(node, "mesh"), ClusterDesk(node, "mesh")
    plain.set_fence()
    scene = set_scene(plain)
    with node.pubsub(ignore_subscribe_messages=True) as listener:
        listener.ssubscribe(plain.q.events_channel)
        listener.get_message(timeout=PATIENCE)
        answers: dict[str, Any] = {}
        for name in CALLS:
            reset_scene(plain, scene)
            answers[name] = plain.send(next_call(plain, scene, name))[0]
        node.config_resetstat()
        for name in CALLS:
            reset_scene(sharded, scene)
            sharded.starts |= plain.starts
            assert sharded.send(next_call(sharded, scene, name))[0] == answers[name], name
        stats = calls_of(node)
        assert {name: n for name, n in stats.items() if n["failed_calls"] or n["rejected_calls"]} == {}
        assert stats["spublish"]["calls"] > 10
        assert stats["pubsub|shardnumsub"]["calls"] > 10
        assert "pubsub|numsub" not in stats
        heard = listener.get_message(timeout=PATIENCE)
    assert heard is not None
    assert re.fullmatch(rb"\w+ \d+", heard["data"])
    assert {slot_of(key.decode()) for key in plain.all_keys()} == {
        slot_of(plain.q.base),
        slot_of(plain.g.base),
        slot_of("Q2"),
    }
    assert not [key for key in plain.all_keys() if key.endswith(NONEXISTENT.encode())]


def test_what_is_said_of_the_registry_is_said_to_all_nodes() -> None:
    """Its channels are plain, and whoever says something on one of a queue says it in the slot."""
    for script in all_scripts():
        published = re.findall(r"'(S?PUBLISH)', ('\{'|mesh|[\w. :']+)", script.sharded.source)
        for command, channel in published:
            assert command == ("PUBLISH" if channel in ("'{'", "mesh") else "SPUBLISH"), (script.name, command, channel)
        assert "'NUMSUB'" not in script.sharded.source
