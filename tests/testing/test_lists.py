"""Functions that take a list, on a bench and in a recording."""

from __future__ import annotations

import pytest

import worqr
from tests.support.servers import Server
from worqr import testing


async def test_a_bench_runs_lists_and_raises_what_their_calls_raised(mesh: worqr.Mesh, server: Server) -> None:
    seen: list[list[int]] = []

    @mesh.task(name="add", batch_size=10, batch_wait=0.01, retry=worqr.RetryPolicy(max_failures=1))
    async def add(numbers: list[int]) -> list[Exception | None]:
        seen.append(numbers)
        return [ValueError("odd") if n % 2 else None for n in numbers]

    async with testing.bench(mesh, url=server.url) as bench:
        for n in (0, 2, 4):
            await add.enqueue(n)
        summary = await bench.run_until_empty()
        assert (summary.finished, summary.failed) == (3, 0)
        await add.options(delay=60).dispatch(6)
        await bench.advance(60)
        await bench.run_until_empty()
        await add.enqueue(1)
        with pytest.raises(ValueError, match="odd"):
            await bench.run_until_empty()
    assert sorted(n for numbers in seen for n in numbers) == [0, 1, 2, 4, 6]
    assert max(map(len, seen)) == 3


async def test_a_recording_has_each_call(mesh: worqr.Mesh) -> None:
    @mesh.task(name="add", batch_size=10)
    async def add(numbers: list[int]) -> None: ...

    with testing.recording(mesh) as sent:
        await add.enqueue(1)
        await mesh.enqueue_many([add.call(2)])
    assert sent.calls(add) == [add.call(1), add.call(2)]
