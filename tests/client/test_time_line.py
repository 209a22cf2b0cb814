"""The time line of a workflow, and what it shows of a record that another program has spoilt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, new_mesh  # noqa: F401 - fixtures
from tests.support.patience import PATIENCE
from worqr.client.time_line import time_line

AT = 1_767_225_600_000
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def line(**fields: bytes) -> tuple[worqr.Entry, ...]:
    return time_line("worqr", fields)


def fields(*pairs: tuple[str, bytes]) -> dict[str, bytes]:
    return dict(pairs)


def opened(*keys: str) -> bytes:
    return msgspec.msgpack.encode(list(keys))


def test_steps_are_done_failed_or_tried_in_the_order_of_their_numbers() -> None:
    found = time_line(
        "worqr",
        {
            "step:charge 7 #10": b"7 json ",
            "step:charge 7 #2": b"5 none ",
            "step:charge 7": b"11 bytes ",
            "step:ship": b'30 failed ["shop.Gone","no stock","Traceback"]',
            "try:pack": b'20 2 ["shop.Jam","paper"]',
            "try:ship": b'20 3 ["shop.Jam","paper"]',
        },
    )
    assert [(each.key, each.state, each.tries, each.size) for each in found] == [
        ("charge 7", "done", 0, 5),
        ("charge 7 #2", "done", 0, 0),
        ("charge 7 #10", "done", 0, 2),
        ("pack", "trying", 2, None),
        ("ship", "failed", 3, None),
    ]
    assert [each.error and (each.error.type, each.error.message) for each in found[3:]] == [
        ("shop.Jam", "paper"),
        ("shop.Gone", "no stock"),
    ]


def test_steps_and_children_have_their_times_if_they_are_stored() -> None:
    found = line(
        **fields(
            ("step:b", b"5 none "),
            ("at:step:b", b"1 %d 1500" % AT),
            ("step:a", b"5 none "),
            ("at:step:a", b"2 %d " % (AT + 9_000)),
            ("step:old", b"5 none "),
            ("step:spoilt", b"5 none "),
            ("at:step:spoilt", b"1 \xff 2"),
            ("child:c", b"0 0 worqr:{q}\nx"),
            ("at:child:c", b"3 %d 2000" % AT),
        )
    )
    seconds = {each.key: each.seconds for each in found}
    assert seconds == {"old": None, "spoilt": None, "a": None, "b": 1.5, "c": 2.0}
    ends = {each.key: each.ended for each in found}
    assert (ends["b"], ends["c"], ends["a"]) == (
        NEW_YEAR,
        NEW_YEAR + timedelta(seconds=2),
        NEW_YEAR + timedelta(seconds=9),
    )


def test_waits_are_open_or_have_their_outcome_the_oldest_first() -> None:
    end = f"value {AT + 5_000} 3 "
    found = time_line(
        "worqr",
        {
            "open": opened("wait for signed", "gather"),
            "wait:wait for signed": f'event {AT + 9_000} -\nsigned\n{{"type":"string"}}'.encode(),
            "wait:gather": f"children {AT + 8_000} -\n\npack 1\npack 2".encode(),
            "wait:wait for approved": f"event {AT + 1_000} {AT + 60_000}\napproved\n".encode(),
            "end:wait for approved": f"{len(end) + 12} {end}".encode(),
            "wait:sleep": f"sleep {AT} {AT + 7_000}\n\n".encode(),
            "end:sleep": f"22 timeout {AT + 7_000} 4 ".encode(),
            "wait:left over": f"sleep {AT} {AT}\n\n".encode(),
        },
    )
    assert [(each.kind, each.name, each.state, each.size) for each in found] == [
        ("sleep", "sleep", "timeout", None),
        ("wait", "approved", "value", 12),
        ("children", "pack 1, pack 2", "open", None),
        ("wait", "signed", "open", None),
    ]
    assert found[0].began == NEW_YEAR
    assert found[1].ended is not None
    assert [each.schema for each in found] == ["", "", "", '{"type":"string"}']


def test_children_have_their_job_and_how_it_ended_and_events_are_counted() -> None:
    failed = b"failed 17 3 " + msgspec.msgpack.encode(["shop.Jam", "paper", "Traceback", ""])
    found = time_line(
        "worqr",
        {
            "child:pack 1": b"0 0 worqr:{packing}\norder-7/1/pack 1",
            "child:pack 2": b"0 0 worqr:{packing}:s3\norder-7/1/pack 2",
            "end:pack 2": b"%d %s" % (len(failed), failed),
            "event:12:approved": b"14 json ",
            "event:9:approved": b"9 bytes ",
            "refused:1:signed": b"7 json ",
        },
    )
    assert [(each.kind, each.name, each.state, each.job, each.size) for each in found] == [
        ("child", "pack 1", "started", "order-7/1/pack 1", None),
        ("child", "pack 2", "failed", "order-7/1/pack 2", None),
        ("event", "approved", "stored", "", 3),
        ("event", "approved", "stored", "", 9),
        ("event", "signed", "refused", "", 2),
    ]
    assert found[0].queue == "packing"
    assert found[1].error == worqr.RemoteError("shop.Jam", "paper", "")


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b" ", b"12", b"x y z", b"9" * 400 + b" json ", b"3 failed [", b"1 2 3 4 5", b"\xc1"]
)
@pytest.mark.parametrize(
    "name", ["step:a", "try:a", "wait:a", "end:a", "event:1:a", "event:", "refused:a", "child:a", "open"]
)
def test_what_another_program_has_stored_never_raises(name: str, value: bytes) -> None:
    good = fields(("open", opened("a")), ("wait:a", b"event 1 -\na\n"), ("child:b", b"0 0 worqr:{q}\nid"))
    assert isinstance(time_line("worqr", good | {name: value, f"{name}\xff": value}), tuple)
    for wait in (
        b"event %s -\na\n" % value,
        b"event 1 %s\na\n" % value,
        b"sleep 999999999999999999 1\n" + value + b"\n",
    ):
        time_line("worqr", good | {"wait:a": wait})
    for base in (value, b"worqr:{" + value, b"other:{q}"):
        time_line("worqr", good | {"child:a": b"0 0 " + base + b"\nid"})


async def test_of_a_workflow_that_has_taken_a_step_and_waits(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.step(name="charge")
    async def charge(order: int) -> str:
        return f"paid {order}"

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil(order: int) -> str | None:
        await charge(order)
        return await worqr.wait_for("approved", str, timeout=3_600)

    async with mesh.join():
        job = await fulfil.options(id="7").dispatch(7)
        with trio.fail_after(PATIENCE):
            while (status := await job.status()).state != "suspended":
                await trio.sleep(0.01)
        record = await mesh.queue("fulfil").read("7")
        assert record.status == status
        assert status.error is None
        step, wait = record.time_line
        assert (step.kind, step.name, step.state, step.size) == ("step", 'charge {"order":7}', "done", 8)
        assert (wait.kind, wait.name, wait.state, wait.schema) == ("wait", "approved", "open", '{"type":"string"}')
        assert wait.until is not None
        assert status.waits_for == f"approved until {wait.until:%Y-%m-%d %H:%M:%S} UTC"
        await mesh.queue("fulfil").job("7").send("approved", "yes")
        assert await job.result(PATIENCE) == "yes"


def test_a_plain_job_has_none() -> None:
    assert line(task=b"x", state=b"waiting") == ()
