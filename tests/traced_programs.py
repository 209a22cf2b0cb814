"""A web application and a worker with tracing, each a program of its own. They print their spans, a line of JSON each.

Run it with the arguments ``web URL PREFIX`` or ``work URL PREFIX``.
"""

from __future__ import annotations

import json
import sys

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import worqr
from worqr.otel import Tracing


def line_of(span: ReadableSpan) -> str:
    """Return a span as a line of JSON."""
    ids = {"id": span.context.span_id, "trace": span.context.trace_id} if span.context else {}
    links = [[link.context.trace_id, link.context.span_id] for link in span.links]
    parent = span.parent.span_id if span.parent else None
    return json.dumps({"name": span.name, **ids, "parent": parent, "links": links}) + "\n"


def main(role: str, url: str, prefix: str) -> None:
    """Run the web application or the worker until it is killed."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line_of)))
    trace.set_tracer_provider(provider)
    mesh = worqr.Mesh(url, prefix=prefix, tracing=Tracing())

    @mesh.task(name="Q1")
    def report(customer: int) -> None: ...

    async def order(request: Request) -> PlainTextResponse:
        with trace.get_tracer("web").start_as_current_span("POST /order"):
            job = await report.dispatch(customer=int(request.query_params["customer"]))
        return PlainTextResponse(job.id)

    async def web() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        app = Starlette(routes=[Route("/order", order, methods=["POST"])])
        async with mesh.connect(), trio.open_nursery() as nursery:
            [address] = await nursery.start(serve, app, config)
            print(address)

    if role == "web":
        trio.run(web)
    else:
        mesh.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
