"""What it costs to begin: importing worqr, beside a bare interpreter and beside its dependencies."""

from __future__ import annotations

import subprocess
import sys
import time

import trio

from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from worqr.embedded import EmbeddedServer


async def started(code: str) -> float:
    """Milliseconds from starting an interpreter to its end."""
    began = time.perf_counter()
    await trio.run_process([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1000


async def measure(plan: Plan, _server: EmbeddedServer) -> list[Table]:
    """Interpreters that import something and end."""
    bare, dependencies, ours = await in_turn(
        2 * plan.runs,
        lambda: started("pass"),
        lambda: started("import trio, redis, msgspec"),
        lambda: started("import worqr"),
    )
    over = [one - other for one, other in zip(ours, bare, strict=True)]
    needed = [one - other for one, other in zip(dependencies, bare, strict=True)]
    return [
        Table(
            "startup: a process that imports and ends",
            "importing trio, redis and msgspec, in turn",
            [
                Row("import worqr, over a bare interpreter", "ms", over, needed, Bar(150, most=True)),
                Row("a bare interpreter", "ms", bare),
            ],
        )
    ]
