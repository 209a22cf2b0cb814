"""An order as a workflow with compensation: the card is charged, each line is packed by a job, and a failure refunds the card.

``workflow_order.py work`` is a worker. ``workflow_order.py order ID LINE [LINE ...]`` orders and waits; a line ``glass`` breaks
while it is packed. However often a worker dies in between, the card is charged once, and refunded once or not at all.
"""

import sys

import trio

import worqr

mesh = worqr.Mesh()
TWICE = worqr.RetryPolicy(max_failures=2, min_backoff=0.1)


@mesh.step(retry=worqr.RetryPolicy(max_failures=3), timeout=30)
async def charge(order: str, cents: int) -> str:
    print(f"{order}: charged {cents} cents", flush=True)  # a real one passes `order` to the bank as idempotency key
    return f"payment-{order}"


@mesh.step
async def refund(payment: str) -> None:
    print(f"refunded {payment}", flush=True)


@mesh.task(name="order.pack", retry=TWICE)
async def pack(order: str, line: str) -> str:
    if line == "glass":
        raise RuntimeError("the glass is broken")
    return f"{line} in box {order}"


@mesh.workflow(name="order", result_ttl=60)
async def fulfil(order: str, lines: list[str]) -> list[str]:
    payment = await charge(order, 500 * len(lines))
    packing = [pack.named(f"line {n}").run(order, line) for n, line in enumerate(lines)]
    try:
        return await worqr.gather(*packing)
    except worqr.JobFailed as failed:  # stored like a result: each later run comes here, too
        await refund(payment)
        raise worqr.Failure(f"refunded, because {failed.error.message}") from None


async def order(name: str, *lines: str) -> None:
    async with mesh.connect():
        job = await fulfil.options(id=name).dispatch(name, list(lines))
        try:
            print("shipped:", ", ".join(await job.result(timeout=60)))
        except worqr.JobFailed as failed:
            print("not shipped:", failed.error.message)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work"]:
            mesh.run()
        case ["order", name, line, *more]:
            trio.run(order, name, line, *more)
        case _:
            sys.exit("usage: workflow_order.py work | order ID LINE [LINE ...]")
