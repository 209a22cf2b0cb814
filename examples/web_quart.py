"""Quart on Hypercorn or uvicorn: every instance is a web server and a peer, and handlers run on the loop of the requests.

``cd examples && hypercorn --bind 127.0.0.1:8001 web_quart:app``, and the same with other ports.
"""

import asyncio
from collections.abc import AsyncGenerator

from quart import Quart, abort, request

import worqr

mesh = worqr.Mesh(app="web")
app = Quart(__name__)


@mesh.task(name="web.report", result_ttl=600)
async def report(name: str, pages: int) -> str:
    for page in range(1, pages + 1):
        await asyncio.sleep(0.1)
        worqr.current().progress(page / pages, f"page {page} of {pages}")
    return f"{name}, {pages} pages"


@app.while_serving
async def serve() -> AsyncGenerator[None]:
    async with mesh.join(concurrency=10, grace=2) as peer:
        app.extensions["worqr"] = peer
        yield


@app.post("/reports/<name>")
async def order(name: str) -> tuple[dict[str, str | None], int]:
    job = await report.options(id=name).dispatch(name, request.args.get("pages", 10, type=int))
    return {"id": job.id, "outcome": job.outcome}, 202


@app.get("/reports/<name>")
async def look(name: str) -> dict[str, str | None]:
    status = await report.job(name).status()
    return {"state": status.state, "worker": status.worker, "message": status.message}


@app.get("/reports/<name>/text")
async def fetch(name: str) -> dict[str, str]:
    try:
        return {"text": await report.job(name).result(timeout=request.args.get("wait", 0, type=float))}
    except worqr.NoResult:
        abort(404, "never ordered, or forgotten")
    except worqr.ResultTimeout:
        abort(409, "not finished yet")
    except worqr.JobCancelled as cancelled:
        abort(410, f"cancelled: {cancelled.reason}")


@app.delete("/reports/<name>")
async def cancel(name: str) -> dict[str, int]:
    count = await report.job(name).cancel(reason="cancelled by the user", wait=10)
    return {"removed": count.waiting, "stopped": count.acknowledged}


@app.get("/health")
async def health() -> dict[str, int]:
    health = app.extensions["worqr"].health()
    if not health.ready:
        abort(503, health.why)
    return {"running": health.running, "room": health.room}
