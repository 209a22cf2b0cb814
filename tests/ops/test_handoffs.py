"""A task for an empty queue goes to a waiting worker with its wake-up; any other one goes into the queue."""

from __future__ import annotations

import hashlib
import time

import pytest

from tests.ops.driver import Desk, Expires, claim, policy
from worqr import ops
from worqr.keys import MARKER
from worqr.ops import StartReply

SECRET = "0f" * 16


def enter(desk: Desk, *workers: str, handoffs: bool = True, secret: str = SECRET) -> None:
    """Admit workers that wait for tasks."""
    for worker in workers:
        options = {"max_stalls": 3, "keep_failed": 1000, "last": 0, "secret": secret, "handoffs": handoffs}
        desk.call(ops.start_work(desk.q, worker, **options))
        assert desk.start(worker, 5).status == "short"


def message(number: int, task: bytes) -> bytes:
    text = b"%s %d %s" % (SECRET.encode(), number, task)
    return b"t %d %s %s" % (number, hashlib.sha1(text).hexdigest().encode(), task)


def put(desk: Desk, *tasks: bytes, workers: str = "A") -> list[tuple[str, bytes]]:
    """Enqueue tasks. Return what the workers received."""
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.put(*tasks)
    return heard


@pytest.mark.parametrize("task", [b"", b"a b", b"\x00\xff\r\n", b" c 1", b"x" * 16_384])
def test_a_waiting_worker_gets_the_task_claimed_and_with_a_proof(desk: Desk, task: bytes) -> None:
    enter(desk, "A")
    assert put(desk, task) == [(":wake:A", message(claim(1), task))]
    assert desk.state() == {
        f":claim:{claim(1)}": [task],
        ":claims:A": {str(claim(1))},
        ":workers": {"A": f"1 {claim(1)} 0 0"},
        ":policy:A": policy(secret=SECRET, handoffs="1"),
        ":counts": Expires({"enqueued": "1", "claimed": "1", "fence": str(claim(1))}),
    }


def test_a_resend_and_a_late_copy_hand_nothing_over(desk: Desk) -> None:
    enter(desk, "A", "B")
    call = ops.enqueue(desk.q, [b"a"])
    with desk.listening(desk.q.wake_channel("A"), desk.q.wake_channel("B")) as heard:
        reply = desk.send(call)
        before = desk.state()
        assert desk.resend(call) == reply == [b"ok", 1]
        assert desk.late(ops.enqueue(desk.q, [b"b"])) == [b"late"]
    assert desk.state() == before
    assert len(heard) == 1


def test_the_next_start_of_the_worker_finds_nothing_and_waits_again(desk: Desk) -> None:
    enter(desk, "A")
    put(desk, b"a")
    assert desk.start("A", 4) == StartReply("short", claim(2), [], 1)
    assert put(desk, b"b") == [(":wake:A", message(claim(2), b"b"))]
    assert desk.state()[":claims:A"] == {str(claim(1)), str(claim(2))}


@pytest.mark.parametrize("end", ["finish", "stop", "retry", "sweep", "leave", "cancel"])
def test_the_claim_ends_as_any_other(desk: Desk, end: str) -> None:
    enter(desk, "A")
    put(desk, b"a")
    match end:
        case "finish":
            assert desk.call(ops.finish_tasks(desk.q, "A", [claim(1)])) == {}
        case "stop":
            assert desk.call(ops.stop_tasks(desk.q, "A", [claim(1)])) == {}
        case "retry":
            assert desk.retry("A", claim(1)) == "given"
        case "sweep":
            assert desk.call(ops.fail_worker(desk.q, "A")).requeued == 1
        case "leave":
            assert desk.call(ops.stop_work(desk.q, "A")).requeued == 1
        case _:
            assert desk.call(ops.cancel_task(desk.q, b"a")).claims == [claim(1)]
            assert desk.call(ops.finish_tasks(desk.q, "A", [claim(1)])) == {claim(1): "cancelled"}
    assert len(desk.waiting()) == (end not in {"finish", "cancel"})
    assert not {f":claim:{claim(1)}", ":claims:A"} & set(desk.state())


def test_the_worker_finds_it_among_its_claims(desk: Desk) -> None:
    enter(desk, "A")
    put(desk, b"a")
    assert desk.call(ops.list_own_claims(desk.q, "A")) == [claim(1)]
    assert desk.call(ops.fail_worker(desk.q, "A")).requeued == 1
    assert desk.call(ops.finish_tasks(desk.q, "A", [claim(1)])) == {claim(1): "lost"}


@pytest.mark.parametrize(
    "why",
    [
        *("several", "large", "reference", "full", "paused", "limits", "suspects", "lanes", "waiters"),
        *("no hand-offs", "no secret", "evicted", "removed", "leaving", "odd policy", "odd workers", "odd claims"),
    ],
)
def test_otherwise_it_is_in_the_queue_and_the_worker_is_woken(desk: Desk, why: str) -> None:
    base, tasks, asleep = desk.q.base, [b"a"], False
    enter(desk, "A", handoffs=why != "no hand-offs", secret="" if why == "no secret" else SECRET)
    match why:
        case "several":
            tasks = [b"a", b"b"]
        case "large":
            tasks = [b"x" * 16_385]
        case "reference":
            tasks = [MARKER + b"a"]
        case "full":
            desk.client.lpush(base, b"first")
            tasks = [b"a"]
        case "paused":
            desk.client.set(f"{base}:paused", "1")
            asleep = True
        case "limits":
            desk.call(ops.set_limits(desk.q, "10"))
        case "suspects":
            desk.client.lpush(f"{base}:suspects", b"s")
        case "lanes":
            desk.client.hset(f"{base}:lanes", "waiting", 0)
        case "waiters":
            desk.client.hset(f"{base}:waiters", "x-1", "5 1 - 0 ")
        case "evicted":
            desk.client.delete(f"{base}:policy:A")
        case "removed":
            desk.client.hdel(f"{base}:workers", "A")
        case "leaving":
            desk.client.hset(f"{base}:workers", "A", "leaving")
        case "odd policy":
            desk.client.set(f"{base}:policy:A", "odd")
        case "odd workers":
            desk.client.delete(f"{base}:workers")
            desk.client.set(f"{base}:workers", "odd")
        case "odd claims":
            desk.client.set(f"{base}:claims:A", "odd")
        case _:
            pass
    assert put(desk, *tasks) == ([] if asleep else [(":wake:A", b"1")])
    state = desk.state()
    assert len(state["waiting"]) == len(tasks) + (why == "full")
    assert not [key for key in state if key.startswith(":claim:")]
    assert state.get(":claims:A") == ("odd" if why == "odd claims" else None)
    assert desk.counts().get("claimed") is None
    assert desk.counts()["enqueued"] == len(tasks)


def test_a_worker_that_does_not_listen_is_passed_over(desk: Desk) -> None:
    enter(desk, "A")
    desk.put(b"a")
    state = desk.state()
    assert state["waiting"] == [b"a"]
    assert not {":hungry", ":claims:A"} & set(state)
    desk.call(ops.start_work(desk.q, "B", max_stalls=3, keep_failed=1000, last=0))
    assert desk.start("B", 1).entries == [b"a"]


def test_it_takes_another_token_than_the_claim_of_another_application(desk: Desk) -> None:
    enter(desk, "A")
    desk.client.set(f"{desk.q.base}:claim:{claim(1)}", "odd")
    assert put(desk, b"a") == [(":wake:A", b"1")]
    assert desk.state()["waiting"] == [b"a"]


def test_listeners_hear_that_it_was_enqueued_and_claimed(desk: Desk) -> None:
    enter(desk, "A")
    with desk.listening(desk.q.events_channel, desk.q.wake_channel("A")) as heard:
        desk.put(b"a")
    assert [text for name, text in heard if name == ":events"] == [b"enqueued 1", b"claimed 1"]


def test_a_producer_that_may_not_claim_enqueues_as_before(desk: Desk) -> None:
    enter(desk, "A")
    user = f"{desk.prefix}-producer"
    desk.client.execute_command(
        *("ACL", "SETUSER", user, "on", ">secret", f"~{desk.prefix}*", f"&{desk.prefix}*", "+@all"),
        *("clearselectors", "resetkeys", f"%R~{desk.prefix}*:claims:*", f"%R~{desk.prefix}*:claim:*"),
        *(f"~{desk.q.base}", f"~{desk.q.base}:hungry", f"~{desk.q.base}:counts", f"~{desk.q.base}:producer:*"),
        *(
            f"%R~{desk.q.base}:{name}"
            for name in ("paused", "limits", "suspects", "lanes*", "waiters", "policy:*", "workers")
        ),
    )
    desk.client.execute_command("ACL", "LOG", "RESET")
    try:
        with desk.listening(desk.q.wake_channel("A")) as heard:
            desk.client.execute_command("AUTH", user, "secret")
            desk.put(b"a")
            desk.client.execute_command("AUTH", "default", "")
        assert heard == [(":wake:A", b"1")]
        assert desk.state()["waiting"] == [b"a"]
        assert desk.client.execute_command("ACL", "LOG") == []
    finally:
        desk.client.execute_command("AUTH", "default", "")
        desk.client.execute_command("ACL", "DELUSER", user)


def test_the_first_token_of_an_empty_database_is_that_of_the_clock(desk: Desk) -> None:
    enter(desk, "A")
    desk.client.delete(f"{desk.q.base}:counts")
    heard = put(desk, b"a")
    number = int(heard[0][1].split()[1])
    assert abs(number / 1e6 - time.time()) < 60
    assert desk.state()[":claims:A"] == {str(number)}


def rejoin(desk: Desk, *claims: int, number: int = 1) -> tuple[int, dict[int, str]]:
    """End claims of A so that it waits for tasks again. `number`: of its last start."""
    ended = desk.call(ops.finish_tasks(desk.q, "A", claims, rejoins=number))
    return ended.waiting_workers, ended


def test_its_end_takes_the_worker_back_among_those_that_wait(desk: Desk) -> None:
    enter(desk, "A")
    put(desk, b"a")
    enter(desk, "B")
    call = ops.finish_tasks(desk.q, "A", [claim(1)], rejoins=1)
    assert desk.send(call) == [b"waits", 2]
    state = desk.state()
    assert (state[":hungry"], state.get(":claims:A")) == ({"A", "B"}, None)
    assert state[":workers"]["A"] == f"1 {claim(1)} 0 0"
    assert desk.counts()["finished"] == 1
    assert desk.send(call) == [b"waits", 2, str(claim(1)).encode(), b"mine"]
    assert desk.state() == state
    assert rejoin(desk, claim(1)) == (2, {claim(1): "mine"})
    desk.client.srem(f"{desk.q.base}:hungry", "B")
    assert put(desk, b"b") == [(":wake:A", message(claim(2), b"b"))]
    assert rejoin(desk, claim(1), claim(2)) == (1, {claim(1): "mine"})


def test_one_that_was_cancelled_takes_it_back_too(desk: Desk) -> None:
    enter(desk, "A")
    put(desk, b"a")
    assert desk.call(ops.cancel_task(desk.q, b"a")).claims == [claim(1)]
    assert rejoin(desk, claim(1)) == (1, {claim(1): "cancelled"})
    assert desk.state()[":hungry"] == {"A"}


@pytest.mark.parametrize("key", ["due", "suspended"])
def test_a_job_that_is_due_later_keeps_no_worker_from_waiting(desk: Desk, key: str) -> None:
    enter(desk, "A")
    put(desk, b"a")
    desk.client.zadd(f"{desk.q.base}:{key}", {"j": time.time() * 1000 + 60_000})
    assert rejoin(desk, claim(1)) == (1, {})
    assert desk.state()[":hungry"] == {"A"}


@pytest.mark.parametrize(
    "why",
    [
        *("waiting", "due", "suspended", "suspects", "paused", "limits", "lanes", "waiters", "blocked"),
        *("a start came since", "removed", "leaving", "swept"),
        *("odd list", "odd waiting workers", "odd workers", "odd due", "odd suspended"),
    ],
)
def test_otherwise_it_only_ends(desk: Desk, why: str) -> None:
    """Its worker then starts tasks."""
    base, held = desk.q.base, claim(1)
    enter(desk, "A")
    if why == "blocked":
        desk.dispatch("J")
        [held] = desk.take("A", 1)
        desk.dispatch("J", policy="timeout")
    else:
        put(desk, b"a")
    match why:
        case "waiting":
            desk.put(b"b")
        case "due" | "suspended":
            desk.client.zadd(f"{base}:{why}", {"j": time.time() * 1000 - 1})
        case "suspects":
            desk.client.lpush(f"{base}:suspects", b"s")
        case "paused":
            desk.client.set(f"{base}:paused", "1")
        case "limits":
            desk.call(ops.set_limits(desk.q, "10"))
        case "lanes":
            desk.client.hset(f"{base}:lanes", "waiting", 0)
        case "waiters":
            desk.client.hset(f"{base}:waiters", "x-1", "5 1 - 0 ")
        case "removed":
            desk.client.hdel(f"{base}:workers", "A")
        case "leaving":
            desk.client.hset(f"{base}:workers", "A", "leaving")
        case "swept":
            desk.call(ops.fail_worker(desk.q, "A"))
        case "a start came since":  # what is under way is a late copy, and the worker may be leaving
            desk.call(ops.start_tasks(desk.q, "A", 2, 0))
        case "odd workers":
            desk.client.delete(f"{base}:workers")
            desk.client.set(f"{base}:workers", "odd")
        case "odd due" | "odd suspended":
            desk.client.set(f"{base}:{why.split()[1]}", "odd")
        case "odd list":
            desk.client.set(base, "odd")
        case "odd waiting workers":
            desk.client.set(f"{base}:hungry", "odd")
        case _:
            pass
    assert rejoin(desk, held) == (0, {held: "lost"} if why == "swept" else {})
    assert desk.client.type(f"{base}:hungry") == (b"string" if why == "odd waiting workers" else b"none")
    assert not desk.client.exists(f"{base}:claims:A", f"{base}:claim:{held}")
