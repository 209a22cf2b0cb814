"""The public API as type checkers see it: never run, checked in the session `types`. A line that must be an error says which."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import trio

import worqr


@dataclass
class Pool:
    size: int


@asynccontextmanager
async def lifespan() -> AsyncGenerator[Pool]:
    yield Pool(10)


@contextmanager
def connections() -> Generator[None]:
    yield


async def timing(context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
    return await call_next()


mesh = worqr.Mesh(lifespan=lifespan, middleware=[timing], around_thread=connections, process_lifespan=connections)
plain = worqr.Mesh("redis://localhost", app="shop", keepalive=timedelta(seconds=5))
registry = worqr.Registry()
mesh.include(registry, prefix="shop.")

assert_type(mesh, worqr.Mesh[Pool])
assert_type(mesh.state, Pool)
assert_type(plain, worqr.Mesh[None])
assert_type(plain.state, None)
assert_type(worqr.Mesh(runs_in="asyncio", asyncio_lifespan=lifespan), worqr.Mesh[None])
worqr.Mesh(asyncio_lifespan=connections)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
worqr.Mesh(runs_in="thread")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
worqr.Mesh(lifespam=lifespan)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@mesh.task
async def add(a: int, b: int = 2, *, c: int = 3) -> int:
    return a + b + c


@registry.task(name="double", aliases=["twice"], concurrency=5, size=2, priority=50, max_length=1000, keep_failed=0)
def double(n: float, /) -> float:
    return 2 * n


@mesh.every(timedelta(minutes=5), overlap="skip", jitter=3)
@mesh.task(runs_in="asyncio", timeout=None, result_ttl=None)
async def tick() -> None: ...


@mesh.cron("0 3 * * *", timezone="Europe/Berlin", misfire="once")
@registry.task()
def nightly() -> None: ...


@add.on_failure
async def gave_up(record: worqr.Failed) -> bool:
    assert_type(add.decode(record.task), worqr.Call[int])
    return record.reason == "failed"


@mesh.task
async def untyped(data: dict[str, object]) -> dict[str, Any]:
    return data


mesh.task(tiemout=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
mesh.task(retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
mesh.task(timeout=5, max_retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
mesh.task(runs_in="cloud")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
mesh.every(5)(add)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
mesh.every(5, add.call(1), name="adding")
mesh.every(5, add)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
add.on_failure(double)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]


async def produce(record: worqr.Failed) -> None:
    assert_type(await add(1), int)
    assert_type(double(1), float)
    assert_type(await gave_up(record=record), bool)
    assert_type(await add.enqueue(1, b=3, c=4), None)
    assert_type(await add.dispatch(1), worqr.Job[int])
    assert_type(add.call(1), worqr.Call[int])
    assert_type(add.options(delay=timedelta(days=1), meta={"tenant": "x"}).call(1), worqr.Call[int])
    assert_type(add.job("id"), worqr.Job[int])
    assert_type(await add.job("id").result(timeout=5), int)
    assert_type(await mesh.dispatch_many([add.call(1), add.options(id="x").call(2)]), list[worqr.Job[int]])
    assert_type(await mesh.enqueue_many(add.call(i) for i in range(10)), int)
    assert_type(await mesh.enqueue_many([add.call(1), double.call(1.5), mesh.call("x", a=1)]), int)
    assert_type(mesh.call("elsewhere", a=1), worqr.Call[Any])
    assert_type(mesh.functions["double"], worqr.Function[..., Any])
    await add.dispatch("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await add.dispatch(1, 2, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await double.dispatch(n=1.5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await add.options(delay=1).enqueue(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    await add.options(max_length=5, wait=1, delay=1).enqueue(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    assert_type(await add.options(max_length=5, wait=timedelta(seconds=1), replicas=1).enqueue(1, c=4), None)
    assert_type(await add.options(wait=1).dispatch(1), worqr.Job[int])
    await add.options(max_length=5).enqueue("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(await mesh.queue("q").enqueue(b"x", bytearray(b"y"), unique=True, front=True, replicas=1), int)
    assert_type(await mesh.queue("q").enqueue(b"x", max_length=5, wait=timedelta(seconds=1)), int)
    await mesh.queue("q").enqueue(b"x", max_lenght=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await mesh.queue("q").enqueue(b"x", lane="acme")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await mesh.queue("q").enqueue(b"x", front="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await mesh.queue("q").enqueue("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await mesh.enqueue_many([add])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def produce_in_a_thread() -> None:
    assert_type(worqr.sync(add.enqueue, 1, c=4), None)
    assert_type(worqr.sync(worqr.sync(add.options(delay=5).dispatch, 1).result, timeout=5), int)
    assert_type(worqr.sync(add.job("id").status), worqr.Status)
    worqr.sync(add.options(max_length=5, wait=1).enqueue, 1)
    assert_type(worqr.sync(mesh.queue("q").enqueue, b"x", front=True), int)
    assert_type(worqr.sync(mesh.queue("q").enqueue, b"x", unique=True, max_length=None, replicas=None), int)
    worqr.sync(mesh.queue("q").enqueue, b"x", max_lenght=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    worqr.sync(mesh.queue("q").enqueue, "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(worqr.sync(mesh.enqueue_many, [add.call(1)]), int)
    worqr.sync(add.dispatch, a="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def consume() -> None:
    async with mesh.join(
        concurrency="auto", grace=timedelta(seconds=5), threads=10, processes=2, only=["mail.*"]
    ) as peer:
        assert_type(peer, worqr.Peer)
        async with peer.work("q", retry=worqr.RetryPolicy(max_failures=3)) as claims:
            assert_type(await claims.take(10, within=1), list[worqr.Claim])
            async for claim in claims:
                assert_type(claim, worqr.Claim)
                await claim.retry(delay=5)
        peer.set_concurrency("auto")
        assert_type(peer.health().ready, bool)
        await peer.drain(grace=5)
    async with mesh.join(concurency=5):  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        pass


async def serve(peer: worqr.Peer, nursery: trio.Nursery) -> None:
    await peer.serve("q", print, timeout=5, on_failure=gave_up)
    await peer.serve("q", print, tiemout=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nursery.start_soon(peer.wait)


def run() -> None:
    context = worqr.current()
    assert_type(context.task, bytes)
    assert_type(context.deadline, float | None)
    context.progress(0.5, "half")
    context.extend(timedelta(seconds=5))
    raise worqr.Retry("not yet", delay=timedelta(minutes=1), counted=False)


@dataclass
class Receipt:
    id: str


async def charge(amount: int, *, currency: str = "EUR") -> Receipt:
    return Receipt(f"{amount} {currency}")


def charge_plain(amount: int) -> Receipt | None:
    return Receipt(str(amount)) if amount else None


class Gateway:
    async def refund(self, id: str) -> bool:
        return bool(id)


async def keeping(gateway: Gateway) -> None:
    context = worqr.current()
    assert_type(context.saved, bytes | None)
    assert_type(await context.save(b"page 7"), None)
    assert_type(await worqr.step("charge", charge, 5, currency="USD"), Receipt)
    assert_type(await worqr.step("plain", charge_plain, 5), Receipt | None)
    assert_type(await worqr.step("refund", gateway.refund, "7"), bool)
    assert_type(await worqr.step("add", add, 1), int)
    await context.save("page 7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await worqr.step("charge", charge, "5")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await worqr.step("charge", charge)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await worqr.step("charge", charge, 5, curency="USD")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await worqr.step("charge", charge(5))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def keeping_in_a_thread() -> None:
    worqr.current().save_now(b"page 7")
    assert_type(worqr.step_now("plain", charge_plain, 5), Receipt | None)
    worqr.step_now("plain", charge_plain, "5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def looking() -> None:
    queue = mesh.queue("mails")
    for task in await queue.jobs(state="scheduled", limit=10, after=""):
        assert_type(task, worqr.TaskInfo)
        assert_type(task.id, str | None)
        assert_type(task.error, worqr.RemoteError | None)
    assert_type(await queue.running(), list[worqr.TaskInfo])
    await queue.jobs(state="due ")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(worqr.sync(mesh.dispatch_many, [add.call(1)]), list[worqr.Job[int]])
    add.delay(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
