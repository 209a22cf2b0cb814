"""Functions that run in processes, which import them from here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from decimal import Decimal

import worqr

mesh = worqr.Mesh()


@dataclass
class Bill:
    items: list[Decimal]
    rate: Decimal = Decimal("0.19")


@mesh.task(name="tax", runs_in="process", result_ttl=60)
def tax(bill: Bill, *, owner: int) -> Decimal:
    assert os.getpid() != owner
    return sum(bill.items, Decimal()) * bill.rate
