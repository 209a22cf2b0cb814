"""The mesh of ``worqr run tests.cli.asyncio_app:mesh``: its async handlers run on asyncio."""

from __future__ import annotations

import asyncio

import worqr

mesh = worqr.Mesh(app="tests", runs_in="asyncio")


@mesh.task
async def nap() -> None:
    await asyncio.sleep(0.01)
    print("awake", flush=True)


@mesh.task
def plain() -> None: ...


@mesh.task(runs_in="loop")
async def on_trio() -> None: ...
