from __future__ import annotations

import pytest

from tests.ops.driver import KEEPALIVE, Desk
from worqr import ops


def ask(desk: Desk, mode: str = "", concurrency: str = "", worker: str = "A") -> bool:
    return desk.call(ops.ask_worker(desk.g, worker, mode, concurrency))


def facts(desk: Desk, worker: str = "A") -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in desk.client.hgetall(desk.g.info(worker)).items()}


def heard(desk: Desk, answer: str = "") -> str:
    """What the reply to a heartbeat asks for."""
    call = ops.keep_worker_alive(
        *(desk.g, "A", 1), keepalive_ms=KEEPALIVE, lease_ms=0, running=2, room=3, answer=answer
    )
    return desk.call(call).request


def test_the_next_heartbeats_bring_it_until_it_is_answered(desk: Desk) -> None:
    desk.register("A")
    assert heard(desk) == ""
    desk.client.expire(desk.g.info("A"), 10)
    assert ask(desk, "quiet")
    assert desk.client.ttl(desk.g.info("A")) > 50
    request = heard(desk)
    number, _, wanted = request.partition(" ")
    assert wanted == "quiet -"
    assert abs(int(number) - desk.client.time()[0] * 1000) < 60_000
    assert heard(desk) == request
    assert heard(desk, "1 done") == request  # an answer to another one
    assert heard(desk, f"{number} done") == ""
    assert "request" not in facts(desk)
    assert facts(desk)["answer"] == f"{number} done"
    assert heard(desk, f"{number} done") == ""
    assert heard(desk) == ""


def test_a_new_request_replaces_what_it_names_of_one_that_is_not_answered(desk: Desk) -> None:
    desk.register("A")
    ask(desk, "quiet")
    first = heard(desk)
    ask(desk, concurrency="5")
    second = heard(desk)
    assert second.partition(" ")[2] == "quiet 5"
    assert int(second.split()[0]) > int(first.split()[0])
    ask(desk, "resume", "auto")
    assert heard(desk, f"{first.split()[0]} done").partition(" ")[2] == "resume auto"


def test_a_new_request_removes_the_old_answer(desk: Desk) -> None:
    desk.register("A")
    ask(desk, "quiet")
    heard(desk, f"{heard(desk).split()[0]} done")
    ask(desk, concurrency="5")
    assert "answer" not in facts(desk)
    assert heard(desk).partition(" ")[2] == "- 5"


@pytest.mark.parametrize("gone", ["dead", "unknown"])
def test_a_worker_that_is_not_registered_is_unknown(desk: Desk, gone: str) -> None:
    if gone == "dead":
        desk.register("A")
        desk.call(ops.condemn_worker(desk.g, "A", ops.ANY_BEAT))
    with desk.nothing_happens():
        assert not ask(desk, "drain")


def test_a_resend_and_a_late_copy_undo_nothing(desk: Desk) -> None:
    desk.register("A")
    call = ops.ask_worker(desk.g, "A", "quiet", "")
    desk.send(call)
    number = desk.numbers[desk.g.base]
    ask(desk, "resume")
    with desk.nothing_changes():
        assert desk.send(call, number=number) == [b"late"]
    desk.send(call)
    desk.client.hdel(desk.g.info("A"), "request")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
