from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest
from p09_report_cancel_progress import mesh, report

import worqr
from worqr import testing


@pytest.fixture
async def bench() -> AsyncGenerator[testing.Bench]:
    async with testing.bench(mesh) as bench:
        yield bench


async def test_report_runs(bench: testing.Bench) -> None:
    job = await report.dispatch(7)
    assert (await bench.run_until_empty()).finished == 1
    assert await job.result() == "/reports/7.pdf"


async def test_due_later(bench: testing.Bench) -> None:
    await report.options(delay=timedelta(days=1)).dispatch(7)
    assert (await bench.run_until_empty()).finished == 0
    await bench.advance(timedelta(days=1))
    assert (await bench.run_until_empty()).finished == 1
    assert bench.sent(report) == [report.call(7)]


def test_sync_view_enqueues() -> None:
    with testing.recording(mesh) as sent:
        worqr.sync(report.enqueue, 7)
    assert sent.calls(report) == [report.call(7)]


async def test_direct_call() -> None:
    with testing.context(id="x") as context:
        await report(7)
    assert context.cancel_reason is None
