"""``worqr demo --dashboard``: the shop on a private server, with real workers, behind the dashboard."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from worqr.cli.demo.shop import feed, make_mesh, prepare
from worqr.cli.demo.worker_processes import start_workers
from worqr.dashboard import standalone
from worqr.dashboard.doors import App
from worqr.embedded import open_embedded

WORKER: str = "worqr.cli.demo.shop"


async def run_shop(workers: int, port: int, tell: Callable[[str], None]) -> None:
    """Run the shop and its dashboard until Ctrl-C.

    Args:
        workers: the number of worker processes.
        port: the port of the dashboard on 127.0.0.1.
        tell: called with the address, when it can be opened.
    """
    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())
    async with open_embedded() as server:
        mesh = make_mesh(server.url, "shop")
        settings = standalone.Settings(port=port)
        app, address = standalone.build(mesh, settings)
        async with mesh.connect(), start_workers(server.url, workers, WORKER) as processes:
            await prepare(mesh)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed, mesh)
                await nursery.start(_serve_until_stopped, app, settings, nursery.cancel_scope)
                tell(address)
            await processes.stop()


async def _serve_until_stopped(
    app: App,
    settings: standalone.Settings,
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Serve; when the user stops the dashboard, end everything else."""
    await standalone.serve(app, settings, task_status=task_status)
    everything.cancel()
