from __future__ import annotations

import re

import pytest

from tests.ops.driver import BOOM, PAST, Desk, digest, fields_of, record, reference, remembered
from tests.support.servers import Server
from worqr import ops

KIB = 1024


def save(desk: Desk, worker: str, held: int, number: int, state: bytes) -> str:
    return desk.call(ops.save_state(desk.q, worker, held, number, "", state))


def step(desk: Desk, worker: str, held: int, name: str, result: bytes) -> str:
    return desk.call(ops.save_state(desk.q, worker, held, 0, name, result))


@pytest.mark.parametrize("kind", ["raw", "job", "workflow"])
def test_the_first_step_makes_a_workflow_of_a_job_that_was_dispatched_without_a_life(desk: Desk, kind: str) -> None:
    desk.enter("A")
    if kind == "raw":
        desk.call(ops.enqueue(desk.q, [b"a"]))
    else:
        desk.dispatch("x", workflow=kind == "workflow")
    [held] = desk.take("A", 1)
    desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"none ", took=90))
    [found] = [fields for name, fields in desk.state().items() if name.startswith(":active:")]
    assert found["life"] == found["first"]
    assert re.fullmatch(r"1 \d{13} 90", found["at:step:charge"])
    assert found["entries"] == "1"


def saved(state: str, number: int = 1, **steps: str) -> dict[str, str]:
    """The fields of a record that saved this."""
    size = len(state) + KIB * len(steps)
    return {
        "saved": state,
        "saved_number": str(number),
        "saved_size": str(size),
        **{f"step:{name}": value for name, value in steps.items()},
    }


def test_a_job_saves_bytes_and_steps_beside_them(desk: Desk) -> None:
    held = desk.run("A", "x")
    before = desk.state()
    assert desk.send(ops.save_state(desk.q, "A", held, 1, "", b"page 7")) == [b"ok", 6]
    before[":active:x"] |= saved("page 7")
    assert desk.state() == before
    assert desk.send(ops.save_state(desk.q, "A", held, 0, "charge it", b'json {"id":1}')) == [b"ok", 6 + KIB]
    assert desk.send(ops.save_state(desk.q, "A", held, 2, "", b"")) == [b"ok", KIB]
    before[":active:x"] |= saved("", 2, **{"charge it": 'json {"id":1}'})
    assert desk.state() == before


def test_the_entry_of_the_next_start_has_what_was_saved(desk: Desk) -> None:
    held = desk.run("A", "x")
    save(desk, "A", held, 1, b"page 7")
    step(desk, "A", held, "charge", b"none ")
    [again] = desk.call(ops.start_tasks(desk.q, "A", desk.starts["A"], 1)).entries
    desk.retry("A", held)
    [entry] = desk.start("A", 1).entries
    for found in (fields_of(again), fields_of(entry)):
        assert saved("page 7", charge="none ").items() <= found.items()


def test_a_raw_task_that_saves_becomes_a_job(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    before = desk.state()
    assert save(desk, "A", held, 1, b"s") == "ok"
    known = record("a", held, "active", twin=digest("a"), claim=held, worker="A", **saved("s"))
    assert desk.state() == {
        **before,
        f":claim:{held}": [reference(f"@{held}")],
        f":active:@{held}": known,
        f":twins:{digest('a')}": {f"@{held}"},
    }


def test_a_copy_and_a_late_copy_change_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    save(desk, "A", held, 1, b"old")
    save(desk, "A", held, 2, b"new")
    step(desk, "A", held, "charge", b"json 1")
    with desk.nothing_changes():
        assert save(desk, "A", held, 2, b"new") == "ok"
        assert save(desk, "A", held, 1, b"old") == "ok"
        assert step(desk, "A", held, "charge", b"json 1") == "ok"
        assert step(desk, "A", held, "charge", b"json 2") == "ok"  # the first result is the one that counts


@pytest.mark.parametrize("how", ["other", "stranger", "swept", "stopped", "finished", "empty"])
def test_only_the_run_that_holds_the_claim_saves(desk: Desk, how: str) -> None:
    [held] = desk.hold("A", b"a")
    save(desk, "A", held, 1, b"mine")
    desk.enter("B")
    match how:
        case "swept":
            desk.call(ops.fail_worker(desk.q, "A"))
        case "stopped":
            desk.call(ops.stop_tasks(desk.q, "A", [held]))
        case "finished":
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case "empty":
            desk.wipe()
    successor = desk.take("B", 1) if how in ("swept", "stopped") else []
    for one in successor:
        assert save(desk, "B", one, 2, b"its successor's") == "ok"
    worker = {"other": "B", "stranger": "nobody"}.get(how, "A")
    with desk.nothing_changes():
        assert save(desk, worker, held, 9, b"a zombie's") == "lost"
        assert step(desk, worker, held, "charge", b"json 1") == "lost"


@pytest.mark.parametrize("what", ["missing", "foreign", "another's"])
def test_a_record_that_is_not_of_this_claim_is_lost(desk: Desk, what: str) -> None:
    held = desk.run("A", "x")
    key = f"{desk.q.base}:active:x"
    if what == "another's":
        desk.client.hset(key, "claim", 7)
    else:
        desk.client.delete(key)
        if what == "foreign":
            desk.client.set(key, "foreign")
    with desk.nothing_changes():
        assert save(desk, "A", held, 1, b"s") == step(desk, "A", held, "charge", b"none ") == "lost"


def test_a_job_keeps_a_limited_number_of_bytes(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    most = b"x" * (256 * KIB)
    with desk.nothing_changes():
        assert save(desk, "A", held, 1, most + b"x") == "full"
    assert save(desk, "A", held, 1, most) == "ok"
    assert save(desk, "A", held, 2, most) == "ok"  # which replaces the other
    rest = 768 * KIB - len("big")
    with desk.nothing_changes():
        assert desk.send(ops.save_state(desk.q, "A", held, 0, "big", b"x" * (rest + 1))) == [b"full", 1024 * KIB + 1]
    assert step(desk, "A", held, "big", b"x" * rest) == "ok"
    with desk.nothing_changes():
        assert step(desk, "A", held, "small", b"none ") == "full"
    assert save(desk, "A", held, 3, most[: -2 * KIB]) == "ok"
    assert [step(desk, "A", held, name, b"none ") for name in ("one", "two", "three")] == ["ok", "ok", "full"]


def test_what_was_saved_survives_every_way_back(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    save(desk, "A", held, 1, b"s")
    step(desk, "A", held, "charge", b"none ")
    keeps = saved("s", charge="none ")
    name = f"@{held}"
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert desk.state()[f":job:{name}"] == remembered("a", held, **keeps)
    [held] = desk.take("A", 1)
    desk.retry("A", held)
    assert keeps.items() <= desk.state()[f":job:{name}"].items()
    [held] = desk.take("A", 1)
    desk.call(ops.retry_task(desk.q, "A", held, BOOM, counter="", limit=9, run_at_ms=PAST))
    assert keeps.items() <= desk.state()[f":job:{name}"].items()
    [held] = desk.take("A", 1)
    desk.call(ops.fail_worker(desk.q, "A"))
    assert keeps.items() <= desk.state()[f":job:{name}"].items()
    desk.enter("A")
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    assert keeps.items() <= desk.state()[f":aside:{held}"].items()
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert keeps.items() <= desk.state()[f":job:{name}"].items()
    [held] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert not any("s" in value for key, value in desk.state().items() if isinstance(value, dict) and name in key)
    assert f":active:{name}" not in desk.state()


def test_it_follows_its_job_through_lanes(desk: Desk) -> None:
    held = desk.run("A", "x", lane="gold")
    save(desk, "A", held, 1, b"s")
    desk.retry("A", held)
    assert saved("s").items() <= desk.state()[":job:x"].items()
    [entry] = desk.start("A", 1).entries
    assert (fields_of(entry)["lane"], fields_of(entry)["saved"]) == ("gold", "s")


def test_a_dispatch_with_the_same_payload_keeps_it_and_another_payload_forgets_it(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    save(desk, "A", held, 1, b"s")
    step(desk, "A", held, "charge", b"none ")
    desk.retry("A", held)
    keeps = saved("s", charge="none ")
    for options in ({}, {"data": False}):
        assert desk.dispatch("x", b"old", **options).outcome in ("updated", "unchanged")
        assert keeps.items() <= desk.state()[":job:x"].items()
    assert desk.dispatch("x", b"new", data=False, front=True).outcome == "unchanged"
    assert keeps.items() <= desk.state()[":job:x"].items()
    assert desk.dispatch("x", b"new").outcome == "updated"
    assert not keeps.keys() & desk.state()[":job:x"].keys()


@pytest.mark.parametrize("task", [b"old", b"new"])
def test_a_blocked_job_that_is_merged_decides_by_its_payload(desk: Desk, task: bytes) -> None:
    held = desk.run("A", "x", b"old")
    save(desk, "A", held, 1, b"s")
    assert desk.dispatch("x", task).outcome == "blocked"
    desk.retry("A", held)
    assert (saved("s").items() <= desk.state()[":job:x"].items()) == (task == b"old")
    assert desk.state()[":job:x"]["task"] == task.decode()


@pytest.mark.parametrize("task", [b"old", b"new"])
def test_a_job_that_is_put_back_after_another_of_its_id_brings_what_it_saved(desk: Desk, task: bytes) -> None:
    held = desk.run("A", "x", b"old")
    save(desk, "A", held, 1, b"first life")
    desk.fail("A", held)
    other = desk.run("A", "x", task)
    if task == b"new":
        step(desk, "A", other, "charge", b"none ")
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 0, "it stays while its id runs"
    desk.call(ops.finish_tasks(desk.q, "A", [other]))
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    found = desk.state()[":job:x"]
    assert found["task"] == "old"
    assert saved("first life").items() <= found.items()
    assert "step:charge" not in found


def test_a_blocked_job_that_follows_an_ended_run_begins_anew(desk: Desk) -> None:
    held = desk.run("A", "x")
    save(desk, "A", held, 1, b"s")
    desk.dispatch("x")
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert not saved("s").keys() & desk.state()[":job:x"].keys()


def test_lists_and_reads_leave_out_what_was_saved(desk: Desk) -> None:
    secret = b"s" * 300
    held = desk.run("A", "x", b"payload")
    save(desk, "A", held, 1, secret)
    step(desk, "A", held, "charge", b"bytes " + secret)

    def seen() -> str:
        replies = [
            ops.read_job(desk.q, "x"),
            ops.list_running(desk.q),
            ops.list_jobs(desk.q, "waiting"),
            ops.job_status(desk.q, "x", 0),
            ops.find_task(desk.q, b"payload", 9),
            ops.list_aside(desk.q, "failed", 9),
        ]
        return repr([desk.send(call) for call in replies])

    assert "s" * 300 not in seen()
    assert desk.call(ops.read_job(desk.q, "x")).run is not None
    desk.retry("A", held)
    assert "s" * 300 not in seen()
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    assert "s" * 300 not in seen()
    [record] = desk.call(ops.list_aside(desk.q, "failed", 9)).records
    assert b"payload" in repr(record).encode()
    assert desk.state()[f":aside:{held}"]["saved_size"] == str(300 + KIB)


def test_a_start_counts_it_among_the_bytes_of_its_reply(desk: Desk) -> None:
    held = [desk.run("A", f"x{n}") for n in range(3)]
    for one in held:
        save(desk, "A", one, 1, b"s" * 200_000)
    for one in held:
        desk.retry("A", one)
    call = ops.start_tasks(desk.q, "A", desk.starts["A"] + 1, 3)
    desk.starts["A"] += 1
    args = list(call.args)
    args[3] = 300_000
    reply = desk.client.execute_command("EVALSHA", call.script.sha, 1, call.base, *args)
    assert len(reply[2:]) == 2  # the second one crosses the limit


def test_it_goes_on_when_memory_is_full(own_desk: Desk, own_server: Server) -> None:
    desk = own_desk
    [held] = desk.hold("A", b"a")
    desk.client.config_set("maxmemory", 1)
    assert step(desk, "A", held, "charge", b"none ") == "ok"
    desk.client.config_set("maxmemory", 0)


def test_a_new_step_of_a_run_that_has_asked_for_all_others_is_progress(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    for _ in range(2):
        desk.retry("A", held)
        [held] = desk.take("A", 1)
    key = f":active:@{held - 2}"
    progress = ops.save_state(desk.q, "A", held, 0, "charge", b"json 1", progress=True)
    assert desk.send(progress) == [b"ok", KIB]
    found = desk.state()[key]
    assert not {"failures", "stalls", "timeouts", "suspect", "error_type", "error_message"} & found.keys()
    assert (found["earlier"], found["entries"]) == ("2", "1")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    with desk.nothing_changes():
        assert desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"json 1", progress=True)) == "ok"
    assert desk.state()[key]["failures"] == "1"
    assert step(desk, "A", held, "ship", b"json 1") == "ok"  # it has not asked for all
    assert desk.state()[key]["failures"] == "1"


def test_a_failed_try_of_a_step_is_counted_until_its_result_is_stored(desk: Desk) -> None:
    held = desk.run("A", "x")

    def fail(number: int, how: bytes) -> str:
        return desk.call(ops.save_state(desk.q, "A", held, number, "charge", how))

    assert fail(1, b"boom") == "ok"
    assert fail(2, b"Boom") == "ok"
    with desk.nothing_changes():
        assert (fail(2, b"Boom"), fail(1, b"boom")) == ("ok", "ok")
    found = desk.state()[":active:x"]
    assert (found["try:charge"], found["saved_size"]) == ("2 Boom", str(KIB))
    assert "entries" not in found
    assert step(desk, "A", held, "charge", b"json 1") == "ok"
    found = desk.state()[":active:x"]
    assert "try:charge" not in found
    assert (found["step:charge"], found["saved_size"]) == ("json 1", str(KIB))
    with desk.nothing_changes():
        assert fail(3, b"late") == "ok"


def test_a_step_that_is_replaced_counts_once(desk: Desk) -> None:
    held = desk.run("A", "x")
    for value in (b"json 1", b"json 2"):
        assert desk.send(ops.save_state(desk.q, "A", held, 1, "@errors", value)) == [b"ok", KIB]
    assert desk.send(ops.save_state(desk.q, "A", held, 1, "@errors", b"x" * 3000)) == [b"ok", 3007]
    assert desk.send(ops.save_state(desk.q, "A", held, 0, "@errors", b"json 3")) == [b"ok", 3007]
    assert desk.client.hget(f"{desk.q.base}:active:x", "step:@errors") == b"x" * 3000
