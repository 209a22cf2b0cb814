"""Every script as a link sends it to a node of a cluster: its sharded variant, with the key that is never there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.ops.driver import Desk
from tests.ops.scene import CALLS, NO_SCENE, next_call, reset_scene, set_scene
from tests.support.clusters import cluster_of, open_node
from tests.support.patience import PATIENCE
from worqr.command import Command
from worqr.keys import NONEXISTENT, QueueKeys, RegistryKeys
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
        published = re.findall(r"'(S?PUBLISH)', ('\{'|mesh|[\w. :']+)", script.sharded.text)
        for command, channel in published:
            assert command == ("PUBLISH" if channel in ("'{'", "mesh") else "SPUBLISH"), (script.name, command, channel)
        assert "'NUMSUB'" not in script.sharded.source


@pytest.mark.parametrize("is_there", [True, False])
def test_while_a_slot_moves_key_by_key_no_script_runs_on_a_part_of_its_keys(server_kind: str, is_there: bool) -> None:
    """The base is still there, or has moved already. Both the node that it leaves and the one that it goes to refuse the call."""
    queue, registry = QueueKeys("mesh", "Q1"), RegistryKeys("mesh")
    calls = {name: make(queue, registry, NO_SCENE) for name, make in CALLS.items()}
    with cluster_of(server_kind, primaries=2, replicas=0) as cluster:
        for base in {call.base for call in calls.values()}:
            source = cluster.owner(base)
            [target] = [node for node in cluster.nodes if node is not source]
            source.ask("SET" if base == registry.base else "RPUSH", base, "a task")
            target.ask("CLUSTER", "SETSLOT", slot_of(base), "IMPORTING", source.id)
            source.ask("CLUSTER", "SETSLOT", slot_of(base), "MIGRATING", target.id)
            if not is_there:
                source.ask("MIGRATE", "127.0.0.1", target.port, base, 0, 5000)
        before = cluster.all_keys()
        for name, call in calls.items():
            script, keys = as_sent(call, clustered=True)
            numbers = ("producer", 1, 1) if call.numbered else ()
            source = cluster.owner(call.base)
            [target] = [node for node in cluster.nodes if node is not source]
            for node in cluster.nodes:
                node.look.script_load(script.source)
            sent = ("EVALSHA", script.sha, len(keys), *keys, *numbers, *call.args, *script.tail)
            refusal = r"TRYAGAIN|Multiple keys" if is_there else rf"ASK|{slot_of(call.base)} 127.0.0.1:{target.port}"
            with pytest.raises(redis.ResponseError, match=refusal):
                source.look.execute_command(*sent)
            with target.look.pipeline(transaction=False) as pipe:
                pipe.execute_command("ASKING")
                pipe.execute_command(*sent)
                asked, refused = pipe.execute(raise_on_error=False)
            assert asked in {b"OK", True}
            assert isinstance(refused, redis.ResponseError), (name, refused)
            assert re.search(r"TRYAGAIN|Multiple keys", str(refused)), (name, refused)
            assert cluster.all_keys() == before, name
