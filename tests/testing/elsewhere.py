"""A mesh whose functions run in processes, which find them by their names."""

from __future__ import annotations

import worqr

mesh = worqr.Mesh("redis://nowhere.invalid", replicas=1)  # on a bench, nothing waits for them


@mesh.task(runs_in="process", result_ttl=60)
def divide(a: int, b: int) -> float:
    return a / b


@mesh.task(runs_in="process")
def divide_later(a: int, b: int) -> None:
    worqr.sync(divide.enqueue, a, b)
