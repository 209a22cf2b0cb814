from collections.abc import Iterator
from typing import Any, assert_type

import trio

import worqr

mesh = worqr.Mesh()


@mesh.task
async def resize(image: str, *, width: int = 800) -> int:
    return len(image) * width


@mesh.task(runs_in="thread")
def scan(folder: str) -> None:
    batch = mesh.current_batch()
    assert batch is not None
    worqr.sync(batch.dispatch_many, (resize.call(f"{folder}/{n}") for n in range(3)))


@mesh.task(result_ttl=3600)
async def publish(album: str) -> str:
    ended = worqr.current().ended_batch
    assert ended is not None
    assert_type(ended, worqr.BatchInfo)
    return f"{album}: {ended.finished} of {ended.jobs}"


@mesh.task
async def apologize(album: str) -> None:
    assert_type(worqr.current().batch, worqr.BatchRef | None)


def calls() -> Iterator[worqr.Call[int]]:
    yield from (resize.call(f"{n}.png") for n in range(10))


async def main() -> None:
    async with mesh.connect():
        options = worqr.BatchOptions(then=publish.call("a"), otherwise=apologize.call("a"))
        async with mesh.batch(**options) as batch:
            assert_type(batch, worqr.Batch)
            assert_type(await batch.dispatch(resize.call("x.png", width=80)), worqr.Job[int])
            assert_type(await batch.dispatch_many(calls()), list[worqr.Job[int]])
            await batch.dispatch(scan.call("more"))
            async with mesh.batch(parent=batch, on_failed="cancel", keep=60, meta={"album": "a"}) as inner:
                await inner.dispatch(mesh.call("elsewhere", n=1))
        assert_type(await batch.wait(60), worqr.BatchInfo)
        assert_type(await batch.result(), Any)
        assert_type(await batch.retry_failed(), int)
        async with batch.watch() as infos:
            async for info in infos:
                print(info.state, info.pending, info.cancel_reason)
        found = mesh.queue(batch.queue).batch(batch.id)
        assert_type(await found.cancel(reason="enough"), bool)
        assert_type(await mesh.queue("publish").batches(), list[worqr.BatchInfo])
        try:
            await found.result(1)
        except worqr.BatchFailed as error:
            print(error.info)


def without_a_loop() -> None:
    with worqr.sync_block(mesh.batch, then=publish.call("b")) as batch:
        assert_type(batch, worqr.Batch)
        assert_type(worqr.sync(batch.dispatch, resize.call("y.png")), worqr.Job[int])
    assert_type(worqr.sync(batch.wait, 60), worqr.BatchInfo)
    with worqr.sync_block(batch.watch) as infos:
        print([info.state for info in infos])
    assert_type(mesh.queue("publish").batch("x"), worqr.Batch)


async def wrong(batch: worqr.Batch) -> None:
    with mesh.batch():  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with mesh.batch(then=publish):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        pass
    async with mesh.batch(on_failed="stop"):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        pass
    async with mesh.batch(thn=publish.call("a")):  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        pass
    await batch.dispatch(resize)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    worqr.sync(mesh.current_batch().dispatch, resize.call("z"))  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


trio.run(main)
