"""Starlette on uvicorn or Hypercorn: every instance is a web server and a peer, and handlers share what a lifespan opens.

``uvicorn --app-dir examples --port 8001 web_starlette:app``, and the same with other ports.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import worqr


class Press:
    """A resource that the handlers of one worker share: at most five of them print at once. It stands for a connection pool."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(5)

    async def print_page(self) -> None:
        async with self._places:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def open_press() -> AsyncGenerator[Press]:
    yield Press()


mesh = worqr.Mesh(app="web", runs_in="asyncio", asyncio_lifespan=open_press)  # runs_in: for `worqr run`, too


@mesh.task(name="web.report", result_ttl=600)
async def report(name: str, pages: int) -> str:
    press: Press = worqr.current().state
    for page in range(1, pages + 1):
        await press.print_page()
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
