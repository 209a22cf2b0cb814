"""A budget that five functions share in three workers: calls in any minute, and tokens that are known after the call only."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import AsyncExitStack
from itertools import accumulate

import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table
from worqr.embedded import EmbeddedServer

WORKERS = 3
CALLS, TOKENS = 1000, 100_000
"""In each period."""
ESTIMATE, SPREAD = 200, 100
"""Tokens of a call: an estimate, and how far what it uses lies from it at most."""
PERIOD, QUICK = 60.0, 2.0
PERIODS = 2.5
EDGE = 0.2
"""Seconds by which the moment that a caller notes may be later than that of the server."""
NEVER_MORE, IN_BUDGET, USED = Bar(1.0, most=True), Bar(1.02, most=True), Bar(0.95)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Each budget for some periods, with more work than it allows."""
    period = QUICK if plan.quick else PERIOD
    scale = period / PERIOD
    rows: list[Row] = []
    for how in ("block", "option"):
        for name, rate, estimate, most in (
            ("calls", round(CALLS * scale), 1, NEVER_MORE),
            ("tokens", round(TOKENS * scale), ESTIMATE, IN_BUDGET),
        ):
            spread = SPREAD if name == "tokens" else 0
            limit = {"rate": rate, "per": period, "name": f"{name}-{how}"}
            used = await spent(server, limit, estimate, spread, period * PERIODS, as_option=how == "option")
            highest, two = sums_of(used, period)
            what = name if how == "block" else f"{name}, as an option of the functions"
            rows += [
                Row(f"{what}: most in any {period:g} s", f"of {rate:,}", [highest / rate], bar=most),
                Row(f"{what}: used in two periods", f"of {2 * rate:,}", [two / rate / 2], bar=USED),
            ]
    notes = [
        f"{WORKERS} workers, 5 functions, {period * PERIODS:g} s each; a call uses {ESTIMATE - SPREAD} to {ESTIMATE + SPREAD} "
        f"tokens, of which its worker knows the estimate of {ESTIMATE} before",
        f"moments are those of the callers, so the most is that of {period - EDGE:g} s",
    ]
    return [Table("permits: a limit that functions share", "the budget", rows, notes)]


async def spent(
    server: EmbeddedServer, limit: dict[str, object], estimate: int, spread: int, lasts: float, *, as_option: bool
) -> list[tuple[float, int]]:
    """What was used by each call, and when."""
    found: list[tuple[float, int]] = []

    async def listen(child: Child) -> None:
        while True:
            moment, used = (await child.line()).split()
            found.append((float(moment), int(used)))

    mesh = worqr.Mesh(server.url, prefix=str(limit["name"]))
    async with AsyncExitStack() as stack:
        options = {"limit": limit, "estimate": estimate, "spread": spread, "prefix": mesh.prefix}
        options["as_option"] = as_option
        children = [await stack.enter_async_context(open_child("callers", server, **options)) for _ in range(WORKERS)]
        async with mesh.connect(), trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(listen, child)
            each = round(2 * PERIODS * int(str(limit["rate"])) / estimate / 5)
            for n in range(5):
                await mesh.queue(f"f{n}").enqueue(*[b"null"] * each)
            await trio.sleep(lasts)
            nursery.cancel_scope.cancel()
    return sorted(found)


def sums_of(used: list[tuple[float, int]], period: float) -> tuple[int, int]:
    """The most that was used in any period, and what was used in the first two."""
    moments = [moment for moment, _ in used]
    sums = [0, *accumulate(cost for _, cost in used)]
    most = max(sums[bisect_left(moments, moment + period - EDGE)] - sums[n] for n, moment in enumerate(moments))
    return most, sums[bisect_left(moments, moments[0] + 2 * period)]
