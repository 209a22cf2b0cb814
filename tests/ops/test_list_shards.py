from __future__ import annotations

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
