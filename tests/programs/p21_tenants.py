import math
from datetime import timedelta
from typing import assert_type

import worqr

mesh = worqr.Mesh()


@mesh.task(
    limit=[worqr.Limit(200), worqr.Limit(rate=100, per=timedelta(minutes=1))],
    max_length=100_000,
    lanes=worqr.Lanes(
        "tenant",
        limit=worqr.Limit(5, rate=600, per=60),
        weights={"acme": 5, "urgent": 100},
        limits={"initech": worqr.Limit(1)},
        max_length=1000,
    ),
)
async def sync(tenant: str, since: int) -> str:
    if since < 0:
        raise worqr.RateLimited(retry_after=30)
    return worqr.current().lane


def lane_of(order: int) -> str:
    return f"order {order}"


@mesh.task(lanes=worqr.Lanes(lane_of, strict=True))
def pack(order: int) -> None: ...


async def use() -> None:
    await sync.enqueue("acme", 1)
    await sync.options(wait=5).enqueue("acme", 1)
    worqr.sync(sync.options(max_length=10, wait=5).enqueue, "acme", 1)
    job = await sync.options(lane="urgent", wait=30).dispatch("acme", 2)
    assert_type(await job.result(), str)
    await sync.options(max_length=10, wait=math.inf).dispatch("acme", 3)
    await mesh.enqueue_many(sync.options(wait=timedelta(seconds=5)).call("acme", n) for n in range(3))
    worqr.sync(pack.options(lane="order 7", max_length=5, wait=1).dispatch, 7)
    queue = sync.queue
    await queue.set_limit(worqr.Limit(3), worqr.Limit(rate=10, per=1), lane="acme")
    await queue.clear_limit(lane="acme")
    await queue.pause("their server is down", duration=600, lane="acme")
    await queue.resume(lane="acme")
    await queue.set_weight("acme", 5)
    for lane in await queue.lanes(limit=100):
        assert_type(lane.waiting, int)
        assert_type(lane.name, str)
    assert_type((await queue.cancel_lane("acme", reason="left")).waiting, int)
    info = await queue.info()
    assert_type(info.held_for, float | None)
    if info.held_back == "rate":
        print("slow")
    await queue.enqueue(b"x", max_length=1000, wait=30)
    await queue.enqueue(b"x", max_length=1000, wait="30")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await sync.options(lanes="acme").dispatch("acme", 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    await sync.options(lane="acme", wait=5).enqueue("acme", 1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    worqr.Limit("5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    worqr.Limit(rate=5, period=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    worqr.Lanes("tenant", weights={"acme": "5"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    raise worqr.RateLimited("30")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
