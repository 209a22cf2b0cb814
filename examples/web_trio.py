"""Starlette on Hypercorn with its Trio worker: the peer runs on the loop of the web server, without a thread.

``hypercorn -k trio --bind 127.0.0.1:8001 web_trio:app`` in this folder, and the same with other ports.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import worqr

mesh = worqr.Mesh(app="web")


@mesh.task(name="web.report", result_ttl=600)
async def report(name: str, pages: int) -> str:
    for page in range(1, pages + 1):
        await trio.sleep(0.1)
        worqr.current().progress(page / pages, f"page {page} of {pages}")
    return f"{name}, {pages} pages"


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with mesh.join(concurrency=10, grace=2) as peer:
        app.state.peer = peer
        yield


async def order(request: Request) -> JSONResponse:
    name, pages = request.path_params["name"], int(request.query_params.get("pages", "10"))
    job = await report.options(id=name).dispatch(name, pages)
    return JSONResponse({"id": job.id, "outcome": job.outcome}, 202)


async def look(request: Request) -> JSONResponse:
    status = await report.job(request.path_params["name"]).status()
    return JSONResponse({"state": status.state, "worker": status.worker, "message": status.message})


async def fetch(request: Request) -> JSONResponse:
    try:
        job = report.job(request.path_params["name"])
        return JSONResponse({"text": await job.result(timeout=float(request.query_params.get("wait", "0")))})
    except worqr.NoResult:
        raise HTTPException(404, "never ordered, or forgotten") from None
    except worqr.ResultTimeout:
        raise HTTPException(409, "not finished yet") from None
    except worqr.JobCancelled as cancelled:
        raise HTTPException(410, f"cancelled: {cancelled.reason}") from None


async def cancel(request: Request) -> JSONResponse:
    count = await report.job(request.path_params["name"]).cancel(reason="cancelled by the user", wait=10)
    return JSONResponse({"removed": count.waiting, "stopped": count.acknowledged})


async def health(request: Request) -> JSONResponse:
    health = request.app.state.peer.health()
    if not health.ready:
        raise HTTPException(503, health.why)
    return JSONResponse({"running": health.running, "room": health.room})


app = Starlette(
    routes=[
        Route("/reports/{name}", order, methods=["POST"]),
        Route("/reports/{name}", look),
        Route("/reports/{name}/text", fetch),
        Route("/reports/{name}", cancel, methods=["DELETE"]),
        Route("/health", health),
    ],
    lifespan=lifespan,
)
