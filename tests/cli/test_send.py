"""``worqr send``, and what ``worqr status`` and ``worqr jobs`` show of a workflow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command
from tests.support.patience import PATIENCE

Beside = Callable[..., Awaitable[Answer]]


class Approval(msgspec.Struct):
    by: str
    amount: int = 0


@asynccontextmanager
async def waiting_workflow(mesh: worqr.Mesh, seen: list[Any] | None = None) -> AsyncGenerator[worqr.Job[Any]]:
    """A suspended workflow `order-7` of the queue `shop.fulfil`, which has charged and waits for an approval."""

    @mesh.step(name="charge")
    async def charge(order: int) -> str:
        return f"paid {order}"

    @mesh.workflow(name="shop.fulfil", result_ttl=60)
    async def fulfil(order: int) -> str:
        await charge(order)
        approval = await worqr.wait_for("approved", Approval, timeout=3_600)
        (seen if seen is not None else []).append(worqr.current().address)
        return approval.by if approval else ""

    async with mesh.join():
        job = await fulfil.options(id="order-7").dispatch(7)
        await suspended(job)
        yield job


async def suspended(job: worqr.Job[Any]) -> None:
    with trio.fail_after(PATIENCE):
        while (await job.status()).state != "suspended":
            await trio.sleep(0.01)


async def test_a_value_wakes_the_workflow_and_the_log_has_its_size(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        answer = await beside("send", "shop.fulfil", "order-7", "approved", '{"by": "ada"}', "--as", "grace")
        assert answer == Answer(0, "woke order-7\n", "")
        assert await job.result(PATIENCE) == "ada"
        entry = next(each for each in await mesh.log() if each.kind == "sent")
        assert (entry.who, entry.queue, entry.job, entry.text) == (
            "grace",
            "shop.fulfil",
            "order-7",
            "approved, 12 bytes",
        )
        ended = await beside("send", "shop.fulfil", "order-7", "approved")
        assert (ended.code, ended.out) == (1, "")
        assert "has finished: nothing was sent; `worqr status 'order-7' --queue 'shop.fulfil'` shows it" in ended.err


async def test_a_value_of_another_type_is_not_sent(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        refused = await beside("send", "shop.fulfil", "order-7", "approved", '{"by": 3}')
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.startswith(
            "worqr: nothing was sent: the value is not of the type that the workflow waits for: by: it must be a text, not 3\n"
        )
        assert (await job.status()).state == "suspended"
        for value, more in (("ada", "quote a text twice"), ("NaN", "NaN is no number")):
            answer = await beside("send", "shop.fulfil", "order-7", "approved", value)
            assert answer.code == 2
            assert more in answer.err
        await job.cancel()


async def test_early_values_are_stored_and_one_more_needs_again(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        send = ("send", "shop.fulfil", "order-7", "signed", "1")
        assert (await beside(*send)).out == "stored order-7\n"
        already = await beside(*send, "--json")
        assert already.code == 1
        assert already.json == [{"queue": "shop.fulfil", "id": "order-7", "event": "signed", "outcome": "already"}]
        assert "to send one more, add --again" in already.err
        assert (await beside(*send, "--again")).out == "stored order-7\n"
        await job.cancel()


async def test_an_address_means_one_dispatch(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        record = await mesh.queue("shop.fulfil").read("order-7")
        at = ("send", "--address", f"shop.fulfil~{record.life}~order-7")
        other = await beside("send", "--address", f"shop.fulfil~{record.life + 1}~order-7", "approved", '{"by":"x"}')
        assert other.code == 1
        assert "`worqr jobs 'shop.fulfil' --state suspended` lists workflows that wait" in other.err
        assert (await beside(*at, "approved", '{"by":"ada"}')).out == "woke order-7\n"
        assert await job.result(PATIENCE) == "ada"


async def test_a_waiting_job_shows_what_it_waits_for_its_time_line_and_no_error(
    beside: Beside, mesh: worqr.Mesh
) -> None:
    async with waiting_workflow(mesh) as job:
        text = (await beside("status", "order-7")).out
        assert "state       suspended\n" in text
        assert "waits       approved until 20" in text
        assert "error" not in text.partition("entry")[0]
        lines = text[text.index("entry") :].splitlines()
        assert [line.split()[:2] for line in lines] == [["entry", "name"], ["step", "charge"], ["wait", "approved"]]
        (found,) = (await beside("status", "order-7", "--json")).json
        step, wait = found["time_line"]
        assert (step["kind"], step["name"], step["state"], step["size"]) == ("step", 'charge {"order":7}', "done", 8)
        assert (wait["kind"], wait["name"], wait["state"]) == ("wait", "approved", "open")
        listed = await beside("jobs", "shop.fulfil", "--state", "suspended")
        assert listed.lines[0].split() == ["id", "waits", "for", "attempts", "task"]
        assert "approved until 20" in listed.lines[1]
        await job.cancel()


async def test_a_wait_is_ended_by_the_key_that_status_has_as_json(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        (found,) = (await beside("status", "order-7", "--json")).json
        other = await beside("end-wait", "shop.fulfil", "order-7", found["time_line"][-1]["name"])
        assert (other.code, "`worqr status 'order-7' --json` has the keys of its waits" in other.err) == (1, True)
        ended = await beside("end-wait", "shop.fulfil", "order-7", found["time_line"][-1]["key"])
        assert ended == Answer(0, "ended wait for approved\n", "")
        assert await job.result(PATIENCE) == ""


async def test_a_workflow_runs_again_from_an_entry(beside: Beside, mesh: worqr.Mesh) -> None:
    async with waiting_workflow(mesh) as job:
        at = ("rewind", "shop.fulfil", "order-7")
        unknown = await beside(*at, "charge")
        assert unknown.code == 1
        assert (
            "has no entry 'charge' in its time line, which has 'charge {\"order\":7}', 'wait for approved'"
            in unknown.err
        )
        done = await beside(*at, 'charge {"order":7}', "--as", "grace")
        assert done == Answer(0, 'dropped 2, runs again from charge {"order":7}\n', "")
        await suspended(job)
        assert (await beside(*at, "wait for approved", "--json")).json[0]["dropped"] == 1
        await suspended(job)
        await job.send("approved", Approval("ada"))
        assert await job.result(PATIENCE) == "ada"
        gone = await beside(*at, "wait for approved")
        assert (gone.code, "has finished: it does not run again, so dispatch it anew" in gone.err) == (1, True)
        entries = [(each.who, each.job, each.count, each.text) for each in await mesh.log() if each.kind == "rewound"]
        assert entries[0] == ("grace", "order-7", 2, 'from: charge {"order":7}')
        assert len(entries) == 2


async def test_a_put_back_that_keeps_a_failure_says_how_to_go_on(beside: Beside, mesh: worqr.Mesh) -> None:
    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=1))
    async def charge() -> None:
        raise ValueError("declined")

    @mesh.workflow(name="shop.fulfil")
    async def fulfil(refunds: bool) -> None:
        with suppress(worqr.StepFailed):
            await charge()
        if refunds:
            await worqr.step("refund", lambda: None)
        raise worqr.Failure("declined")

    async with mesh.join():
        for refunds in (True, False):
            with pytest.raises(worqr.JobFailed):
                await (await fulfil.options(id=f"refunds {refunds}", result_ttl=60).dispatch(refunds)).result(PATIENCE)
    async with mesh.connect():
        kept = await beside("failed", "retry", "shop.fulfil", "refunds True")
        assert (kept.code, kept.out) == (0, "1 requeued\n")
        assert "keeps the failure of 'charge {}'" in kept.err
        assert "worqr rewind shop.fulfil 'refunds True' 'charge {}'" in kept.err
        assert (await beside("failed", "retry", "shop.fulfil", "refunds False")) == Answer(0, "1 requeued\n", "")
        await fulfil.queue.delete()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("q",), "name the queue, the id of the job and the event: worqr send QUEUE ID NAME [JSON]"),
        (("q", "x"), "name the queue, the id of the job and the event"),
        (("--address", "x", "approved"), "--address: 'x' is no address"),
        (("--address", "q~1~x", "approved", "1", "2"), "--address names the queue and the job"),
    ],
)
def test_what_is_missing_is_named(cli: Command, arguments: tuple[str, ...], why: str) -> None:
    answer = cli("send", *arguments)
    assert answer.code == 2
    assert why in answer.err


async def test_a_job_that_is_no_workflow_and_one_that_is_unknown(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").dispatch(b"a", id="x")
        plain = await beside("send", "mails", "x", "approved")
        assert plain.code == 1
        assert "is no workflow, which alone can wait for events: nothing was sent" in plain.err
        unknown = await beside("send", "mails", "y", "approved")
        assert "is gone: nothing was sent; `worqr jobs 'mails' --state suspended`" in unknown.err
        assert "no queue 'nails' is in use" in (await beside("send", "nails", "y", "approved")).err
        await mesh.queue("mails").delete()
