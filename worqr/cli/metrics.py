"""``worqr metrics``: the metrics of a whole mesh, for Prometheus. Each scrape reads one snapshot of the mesh."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final

import trio
from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, mesh_at
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.escaping import escape
from worqr.http_server import BindAddress, HttpReply, HttpRequest, HttpServer
from worqr.metrics.fleet import GIVE_UP_AFTER, FleetMetrics, FleetReader, FleetSnapshot

if TYPE_CHECKING:
    from worqr.mesh import Mesh


RETRY_AFTER: Final = 1.0
"""Seconds between two attempts to connect at the start."""
PATHS: Final = ("/metrics", "/live")


def metrics(
    *,
    bind: Annotated[str, Parameter(metavar="ADDRESS", help="Serve at [HOST:]PORT or unix:PATH.")] = "127.0.0.1:9464",
    max_queues: Annotated[
        int, Parameter(metavar="N", help='Queues that are shown by name. The others are summed up as "(other)".')
    ] = 300,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Serve the metrics of the mesh for Prometheus, until SIGTERM or Ctrl-C.

    Each scrape reads one snapshot. While the server is away, worqr_up is 0.
    """
    try:
        importlib.import_module("worqr.metrics.prometheus")  # a scrape needs it: tell now if it is missing
    except ImportError as error:
        raise CommandFailed(str(error)) from None

    try:
        address = BindAddress.parse(bind, "--bind")
    except UsageError as error:
        raise InvalidArguments(str(error)) from None
    if max_queues < 0:
        raise InvalidArguments(f"--max-queues must be at least 0, got {max_queues}")
    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())
    mesh = mesh_at(connect, "metrics")
    trio.run(_Exporter(mesh, FleetMetrics(max_queues)).run, address)


class _Exporter:
    """Replies to scrapes in the thread of the HTTP server; looks at the mesh in the loop."""

    def __init__(self, mesh: Mesh, fleet: FleetMetrics) -> None:
        self._mesh = mesh
        self._fleet = fleet
        self._reader = FleetReader(mesh)
        self._token: trio.lowlevel.TrioToken | None = None
        self._connected = trio.Event()

    async def run(self, address: BindAddress) -> None:
        """Serve until a signal comes."""
        self._token = trio.lowlevel.current_trio_token()
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            server = HttpServer(address, self.respond)
            try:
                print(f"worqr: serving metrics at {escape(str(server.address))}", file=sys.stderr, flush=True)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._stay_connected)
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
            except* WorqrError as group:
                raise group.exceptions[0] from None
            finally:
                await trio.to_thread.run_sync(server.close)

    async def _stay_connected(self) -> None:
        """Connect, and wait for a server that is away at the start. The connection outlives later outages."""
        while True:
            try:
                async with self._mesh.connect():
                    self._connected.set()
                    await trio.sleep_forever()
            except Unavailable:
                await trio.sleep(RETRY_AFTER)

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply to a scrape; called in the thread of the server."""
        from worqr.metrics.prometheus import exposition, fleet_collector

        if request.path == "/live":
            return HttpReply.of(HTTPStatus.OK, "ok")
        if request.path != "/metrics":
            return HttpReply.of(HTTPStatus.NOT_FOUND, f"there are {', '.join(PATHS)}")
        try:
            snapshot = trio.from_thread.run(self._look, trio_token=self._token)
        except WorqrError as error:
            return HttpReply.of(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        body, content_type = exposition(fleet_collector(self._fleet.samples(snapshot)), request.accept)
        return HttpReply(HTTPStatus.OK, body, content_type)

    async def _look(self) -> FleetSnapshot | None:
        """Look at the mesh; return None if the server does not reply."""
        with trio.move_on_after(GIVE_UP_AFTER):
            try:
                await self._connected.wait()
                return await self._reader.read()
            except Unavailable:
                return None
        return None
