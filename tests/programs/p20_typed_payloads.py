from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import assert_type
from uuid import UUID

import worqr

mesh = worqr.Mesh()


@dataclass
class Order:
    id: UUID
    total: Decimal
    at: datetime


@mesh.task
async def ship(order: Order, /) -> UUID:
    return order.id


@mesh.task(timeout=5)
def vat(amount: Decimal, *, rate: Decimal = Decimal("0.19")) -> Decimal:
    return amount * rate


async def use(order: Order) -> None:
    assert_type(await ship(order), UUID)
    assert_type(vat(Decimal(1)), Decimal)
    job = await ship.dispatch(order)
    assert_type(await job.result(), UUID)
    assert_type(await ship.job("x").result(), UUID)
    await ship.enqueue(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await vat.enqueue(Decimal(1), Decimal(2))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await vat.options(delay=1).dispatch(Decimal(1), rate=Decimal("0.07"))
    await vat.options(dealy=1).dispatch(Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    worqr.sync(ship.enqueue, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await mesh.queue("q").dispatch(b"x", dealy=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
