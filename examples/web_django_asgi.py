"""Django on uvicorn or Hypercorn: the site of `web_django`, whose peer runs handlers on the loop of the requests.

``uvicorn --app-dir examples --port 8001 --lifespan on web_django_asgi:application``, and the same with other ports. Django
itself has no lifespan, so the application answers that part of ASGI.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import django
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, JsonResponse
from django.urls import path

import worqr

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

mesh = worqr.Mesh(app="web", patience=10)


@mesh.task(name="web.report", result_ttl=600)
async def report(name: str, pages: int) -> str:
    for page in range(1, pages + 1):
        await asyncio.sleep(0.1)
        worqr.current().progress(page / pages, f"page {page} of {pages}")
    return f"{name}, {pages} pages"


async def reports(request: HttpRequest, name: str) -> JsonResponse:
    job = report.job(name)
    if request.method == "POST":
        job = await report.options(id=name).dispatch(name, int(request.GET.get("pages", "10")))
        return JsonResponse({"id": job.id, "outcome": job.outcome}, status=202)
    if request.method == "DELETE":
        count = await job.cancel(reason="cancelled by the user", wait=10)
        return JsonResponse({"removed": count.waiting, "stopped": count.acknowledged})
    status = await job.status()
    return JsonResponse({"state": status.state, "worker": status.worker, "message": status.message})


async def fetch(request: HttpRequest, name: str) -> JsonResponse:
    try:
        return JsonResponse({"text": await report.job(name).result(timeout=float(request.GET.get("wait", "0")))})
    except worqr.NoResult:
        return JsonResponse({"error": "never ordered, or forgotten"}, status=404)
    except worqr.ResultTimeout:
        return JsonResponse({"error": "not finished yet"}, status=409)
    except worqr.JobCancelled as cancelled:
        return JsonResponse({"error": f"cancelled: {cancelled.reason}"}, status=410)


async def health(request: HttpRequest) -> JsonResponse:
    health = peers[0].health()
    return JsonResponse({"running": health.running, "room": health.room}, status=200 if health.ready else 503)


peers: list[worqr.Peer] = []
urlpatterns = [path("reports/<name>", reports), path("reports/<name>/text", fetch), path("health", health)]
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="for the example only")
django.setup()
site = ASGIHandler()


async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    else:
        await site(scope, receive, send)


async def lifespan(receive: Receive, send: Send) -> None:
    await receive()  # the server starts
    async with mesh.join(concurrency=10, grace=2) as peer:
        peers.append(peer)
        await send({"type": "lifespan.startup.complete"})
        await receive()  # the server stops
    await send({"type": "lifespan.shutdown.complete"})
