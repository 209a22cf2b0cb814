from collections.abc import AsyncGenerator

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

import worqr

mesh = worqr.Mesh()


@mesh.task(timeout=600, result_ttl=3600)
async def report(customer: int) -> str:
    context = worqr.current()
    try:
        for page in range(100):
            await trio.sleep(1)
            context.progress(page / 100, f"page {page}")
            context.extend(30)
    except trio.Cancelled:
        if context.cancel_reason == "cancel":
            with trio.move_on_after(1, shield=True):
                await trio.sleep(0.1)
        raise
    return f"/reports/{customer}.pdf"


async def start(request: Request) -> JSONResponse:
    customer = int(request.path_params["id"])
    job = await report.options(id=f"report-{customer}", if_exists="skip").dispatch(customer)
    return JSONResponse({"job": job.id, "new": job.outcome == "created"})


async def progress(request: Request) -> StreamingResponse:
    async def stream() -> AsyncGenerator[str]:
        async with report.job(request.path_params["job"]).watch() as updates:
            async for update in updates:
                yield f"data: {update.progress} {update.message}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


async def cancel(request: Request) -> JSONResponse:
    outcome = await report.job(request.path_params["job"]).cancel(wait=5, reason="button")
    return JSONResponse({"stopped": outcome.running == outcome.acknowledged})
