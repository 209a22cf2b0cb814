from __future__ import annotations

import pytest

import worqr
from tests.ops.driver import Desk
from worqr import ops


def test_tells_which_queues_have_several(desk: Desk) -> None:
    desk.call(ops.declare_shards(desk.g, {"hot": 8, "ä": 2}))
    with desk.nothing_happens():
        assert desk.call(ops.list_shards(desk.g)) == {"hot": 8, "ä": 2}


def test_of_an_empty_mesh_there_is_nothing_to_tell(desk: Desk) -> None:
    assert desk.send(ops.list_shards(desk.g)) == [b"ok"]
    assert desk.call(ops.list_shards(desk.g)) == {}
    assert desk.state(":counts") == {}


def test_a_mesh_of_another_wire_version_is_refused(desk: Desk) -> None:
    desk.call(ops.declare_shards(desk.g, {"hot": 8}))
    desk.client.set(desk.g.version, ops.WIRE_VERSION)
    with desk.nothing_happens():
        assert desk.call(ops.list_shards(desk.g)) == {"hot": 8}
    for found in (b"0", b"2", b"17", b""):
        desk.client.set(desk.g.version, found)
        with desk.nothing_happens():
            assert desk.send(ops.list_shards(desk.g)) == [b"version", found]
            with pytest.raises(
                worqr.WrongVersion, match=f"speaks wire version {found.decode()}, this worqr speaks 1: upgrade"
            ):
                desk.call(ops.list_shards(desk.g))
