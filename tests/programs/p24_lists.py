import asyncio
from dataclasses import dataclass
from functools import partial
from typing import assert_type

import trio

import worqr

mesh = worqr.Mesh()


@dataclass
class Page:
    url: str
    text: str


@mesh.task(batch_size=100, batch_wait=0.5)
async def index(pages: list[Page]) -> None: ...


@mesh.task(batch_size=100, result_ttl=60, timeout=30)
async def translate(texts: list[str], /) -> list[str | Exception]:
    return [text.upper() if text else worqr.Failure("it is empty") for text in texts]


@mesh.task(batch_size=10, runs_in="asyncio")
async def fetch(urls: list[str]) -> list[BaseException | None]:
    return await asyncio.gather(*[asyncio.sleep(1) for _ in urls], return_exceptions=True)


@mesh.task(batch_size=50, runs_in="process")
def square(numbers: list[int]) -> list[int | Exception] | None:
    return [number * number for number in numbers]


@mesh.task(timeout=5)
async def archive(pages: list[Page]) -> None: ...


async def store(rows: list[bytes]) -> list[worqr.Retry | None]:
    calls = worqr.current().items
    assert_type(calls[0].id, str)
    return [worqr.Retry(delay=5) if call.cancel_reason is None else None for call in calls]


async def one(row: bytes) -> None: ...


def wrong() -> None:
    @mesh.task(batch_size=10)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
    def no_list(page: Page) -> None: ...

    @mesh.task(batch_size=10)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
    def two_lists(pages: list[Page], more: list[Page]) -> None: ...

    @mesh.task(batch_size=10)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
    def number(pages: list[Page]) -> int:
        return len(pages)


async def use(page: Page, peer: worqr.Peer, nursery: trio.Nursery) -> None:
    assert_type(index, worqr.AsyncListFunction[Page, None])
    assert_type(square, worqr.SyncListFunction[int, int])
    await index.enqueue(page)
    await index.options(delay=5).dispatch(page)
    worqr.sync(index.enqueue, page)
    await mesh.enqueue_many([index.call(page)])
    await index([page, page])
    assert_type(await (await translate.dispatch("hello")).result(), str)
    assert_type(await square.job("x").result(), int)
    await archive.enqueue([page])
    await index.enqueue([page])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await index.enqueue(page, page)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await translate.options(id="x").dispatch(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await index(page)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await archive.enqueue(page)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await peer.serve_list("rows", store, batch_size=100, batch_wait=0.2, timeout=10)
    await nursery.start(partial(peer.serve_list, "rows", store, batch_size=100))
    await peer.serve_list("rows", store)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await peer.serve_list("rows", one, batch_size=100)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await peer.serve("rows", one, batch_size=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await peer.serve("rows", store)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
