"""FastAPI on uvicorn or Hypercorn: every instance is a web server and a peer, and handlers run on the loop of the requests.

``uvicorn --app-dir examples --port 8001 web_fastapi:app``, and the same with other ports. Whichever instance gets a request,
any of them may write the report, show its progress, and cancel it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

import worqr

mesh = worqr.Mesh(app="web")


@mesh.task(name="web.report", result_ttl=600)
async def report(name: str, pages: int) -> str:
    for page in range(1, pages + 1):
        await asyncio.sleep(0.1)
        worqr.current().progress(page / pages, f"page {page} of {pages}")
    return f"{name}, {pages} pages"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with mesh.join(concurrency=10, grace=2) as peer:
        app.state.peer = peer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/reports/{name}", status_code=202)
async def order(name: str, pages: int = 10) -> dict[str, str | None]:
    job = await report.options(id=name).dispatch(name, pages)
    return {"id": job.id, "outcome": job.outcome}


@app.get("/reports/{name}")
async def look(name: str) -> dict[str, str | None]:
    status = await report.job(name).status()
    return {"state": status.state, "worker": status.worker, "message": status.message}


@app.get("/reports/{name}/text")
async def fetch(name: str, wait: float = 0) -> dict[str, str]:
    try:
        return {"text": await report.job(name).result(timeout=wait)}
    except worqr.NoResult:
        raise HTTPException(404, "never ordered, or forgotten") from None
    except worqr.ResultTimeout:
        raise HTTPException(409, "not finished yet") from None
    except worqr.JobCancelled as cancelled:
        raise HTTPException(410, f"cancelled: {cancelled.reason}") from None


@app.delete("/reports/{name}")
async def cancel(name: str) -> dict[str, int]:
    count = await report.job(name).cancel(reason="cancelled by the user", wait=10)
    return {"removed": count.waiting, "stopped": count.acknowledged}


@app.get("/health")
async def health() -> dict[str, int]:
    health = app.state.peer.health()
    if not health.ready:
        raise HTTPException(503, health.why)
    return {"running": health.running, "room": health.room}
