from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import worqr

mesh = worqr.Mesh()


@mesh.task
async def resize(path: str) -> None:
    await trio.sleep(1)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with mesh.join(concurrency=20, grace=10) as peer:
        app.state.peer = peer
        yield


async def upload(request: Request) -> JSONResponse:
    await resize.enqueue(request.query_params["path"])
    return JSONResponse({"ok": True})


async def readyz(request: Request) -> JSONResponse:
    peer: worqr.Peer = request.app.state.peer
    health = peer.health()
    return JSONResponse({"ready": health.ready, "why": health.why}, 200 if health.ready else 503)


app = Starlette(lifespan=lifespan, routes=[Route("/upload", upload, methods=["POST"]), Route("/readyz", readyz)])


async def run_peer(
    task_status: trio.TaskStatus[worqr.Peer] = trio.TASK_STATUS_IGNORED,
) -> None:  # quart-trio: app.nursery.start_soon(run_peer)
    async with mesh.join() as peer:
        task_status.started(peer)
        await peer.wait()
