"""Typed functions: the arguments are dataclasses, results keep their type, and a failure handler reports failed tasks.

``orders.py work`` is a peer, ``orders.py ship TOTAL [TOTAL ...]`` ships orders of these totals and prints when each will arrive.
"""

import sys
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from uuid import UUID, uuid4

import trio

import worqr

mesh = worqr.Mesh()


@dataclass
class Order:
    id: UUID
    total: Decimal


@mesh.task(name="ship", result_ttl=60, retry=worqr.RetryPolicy(max_failures=3, min_backoff=0))
async def ship(order: Order, /, *, ordered: date = date(2026, 1, 1)) -> date:
    if order.total <= 0:
        raise worqr.Failure("nothing to ship")
    return ordered + timedelta(days=2)


@ship.on_failure
async def gave_up(record: worqr.Failed) -> None:
    call = ship.decode(record.task)
    print(f"not shipped: an order of {call.args[0].total}: {record.error.message}", flush=True)


async def order(*totals: str) -> None:
    async with mesh.connect():
        orders = [Order(uuid4(), Decimal(total)) for total in totals]
        for job in await mesh.dispatch_many(ship.call(order) for order in orders):
            try:
                print(f"arrives on {await job.result(timeout=30):%d %B}")
            except worqr.JobFailed as failed:
                print(f"never arrives: {failed.error.message}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work"]:
            mesh.run()
        case ["ship", total, *more]:
            trio.run(order, total, *more)
        case _:
            sys.exit("usage: orders.py work | ship TOTAL [TOTAL ...]")
