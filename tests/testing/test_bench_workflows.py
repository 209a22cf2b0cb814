"""A workflow of two weeks in a bench: the clock moves, and the waits end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import worqr
from worqr import testing

pytestmark = pytest.mark.one_server

DAY = 86_400


@dataclass
class Payment:
    id: str


@dataclass
class Approval:
    by: str


async def test_two_weeks_pass_in_a_moment(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    done: list[str] = []

    @mesh.step(retry=worqr.RetryPolicy(max_failures=3), timeout=30)
    async def charge(order: int) -> Payment:
        done.append("charged")
        return Payment(f"p{order}")

    @mesh.step
    async def refund(payment: Payment) -> None:
        done.append("refunded")

    @mesh.task
    def pack(order: int, line: int) -> str:
        done.append(f"packed {line}")
        if line < 0:
            raise worqr.Failure("no such line")
        return f"{order}.{line}"

    @mesh.task
    async def remind(order: int) -> None:
        done.append("reminded")

    @mesh.workflow(result_ttl=DAY)
    async def fulfil(order: int, lines: list[int]) -> str:
        payment = await charge(order)
        try:
            labels = await worqr.gather(*(pack.run(order, n) for n in lines))
        except worqr.JobFailed:
            await refund(payment)
            raise worqr.Failure("cannot be packed") from None
        answer = await worqr.wait_for("approved", Approval, timeout=3 * DAY)
        done.append(f"{labels} {answer and answer.by}")
        await worqr.sleep(14 * DAY)
        await remind.run(order)
        return payment.id

    job = await fulfil.options(id="order-7").dispatch(7, [1, 2])
    await bench.run_until_empty()
    assert (await job.status()).state == "suspended"
    assert sorted(done) == ["charged", "packed 1", "packed 2"]
    assert await fulfil.job("order-7").send("approved", Approval("ada")) == "woke"
    await bench.run_until_empty()
    await bench.advance(14 * DAY - 3600)
    await bench.run_until_empty()
    assert done[3:] == ["['7.1', '7.2'] ada"]
    await bench.advance(2 * 3600)
    await bench.run_until_empty()
    assert (done.count("charged"), done.count("packed 1"), done.count("reminded")) == (1, 1, 1)
    assert await job.result(0) == "p7"

    done.clear()
    other = await fulfil.dispatch(8, [-1])
    await bench.run_until_empty(raise_errors=False)
    assert done == ["charged", "packed -1", "refunded"]
    with pytest.raises(worqr.JobFailed, match="cannot be packed"):
        await other.result(0)
    late = await fulfil.dispatch(9, [1])
    await bench.run_until_empty()
    await bench.advance(3 * DAY + 1)
    await bench.run_until_empty()
    assert done[-1] == "['9.1'] None"
    await late.cancel()


async def test_scheduled_tasks_are_run_beside_a_workflow_whose_job_waits_for_long(
    bench: testing.Bench, mesh: worqr.Mesh
) -> None:
    @mesh.workflow(name="ask")
    async def ask(days: int) -> None:
        await worqr.sleep(days * DAY)
        await worqr.wait_for("approved", Approval)

    @mesh.workflow(name="order")
    async def order(days: int) -> None:
        await ask.run(days)

    jobs = [await order.dispatch(days) for days in (0, 100)]
    await bench.run_until_empty(scheduled=True)
    assert [(await job.status()).state for job in jobs] == ["suspended", "suspended"]
    assert [each.waits_for for each in await ask.queue.jobs(state="suspended")] == ["approved", "approved"]
