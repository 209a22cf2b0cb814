"""An approval as a workflow: an article waits for an editor, who answers with a link. The link holds no slot, and no connection.

``uvicorn --app-dir examples --port 8001 workflow_approval:app``, then ``curl -X POST localhost:8001/articles/worqr`` and open
the link that is printed. The link has the address of this dispatch: an old link answers no later article of the same name.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import worqr

mesh = worqr.Mesh(app="articles", runs_in="asyncio")
FORM = '<form method="post"><button>Publish</button><button formaction="?no">Reject</button></form>'


@dataclass
class Answer:
    publish: bool


@mesh.step
async def mail_editor(article: str, link: str) -> None:
    print(f"mail: may {article} be published? {link}", flush=True)


@mesh.step
async def publish(article: str) -> None:
    print(f"published {article}", flush=True)


@mesh.workflow(name="article", result_ttl=3600)
async def review(article: str, site: str) -> str:
    await mail_editor(article, f"{site}answer/{worqr.current().address}")
    answer = await worqr.wait_for("answer", Answer, timeout=timedelta(days=3))
    if answer is None:
        return "nobody answered"
    if not answer.publish:
        return "rejected"
    await publish(article)
    return "published"


async def submit(request: Request) -> Response:
    article = request.path_params["article"]
    job = await review.options(id=article).dispatch(article, str(request.base_url))
    return JSONResponse({"outcome": job.outcome}, 202)


async def look(request: Request) -> Response:
    job = review.job(request.path_params["article"])
    status = await job.status()
    return JSONResponse({"state": status.state, "result": await job.result() if status.state == "finished" else None})


async def ask(request: Request) -> Response:
    return HTMLResponse(FORM)  # a GET changes nothing: mail programs open links by themselves


async def answer(request: Request) -> Response:
    try:
        sent = await mesh.send(request.path_params["address"], "answer", Answer("no" not in request.query_params))
    except (worqr.NoJob, worqr.UsageError):  # it has ended, or was never there
        return PlainTextResponse("This question is closed.", 410)
    return PlainTextResponse("Thank you." if sent in ("woke", "stored") else "Somebody has answered before.")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with mesh.join(grace=2):
        yield


app = Starlette(
    routes=[
        Route("/articles/{article}", submit, methods=["POST"]),
        Route("/articles/{article}", look),
        Route("/answer/{address}", ask),
        Route("/answer/{address}", answer, methods=["POST"]),
    ],
    lifespan=lifespan,
)
