"""A request of a web application, and the run of its job in another program: their spans are linked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from signal import SIGTERM
from typing import Any

import httpx
import pytest

import worqr
from tests.support.children import ROOT, Child
from tests.support.servers import Server

pytestmark = pytest.mark.one_server

PROGRAM = ROOT / "tests" / "traced_programs.py"


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def spans_of(child: Child, *names: str) -> dict[str, Any]:
    """The next spans of these names that a program prints."""
    found: dict[str, Any] = {}
    while not found.keys() >= set(names):
        span = json.loads(await child.line_with("{"))
        found[span["name"]] = span
    return found


@pytest.mark.leaves("{Q1}*")
async def test_a_request_is_followed_to_the_run_in_another_program(
    server: Server, prefix: str, children: ExitStack
) -> None:
    def start(role: str) -> Child:
        child = Child(PROGRAM, role, server.url, prefix)
        children.callback(child.close)
        return child

    web = start("web")
    address = await web.line_with("http://")
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{address}/order", params={"customer": "7"})
    sent = await spans_of(web, "dispatch Q1", "POST /order")
    dispatch, request = sent["dispatch Q1"], sent["POST /order"]
    assert (dispatch["trace"], dispatch["parent"]) == (request["trace"], request["id"])

    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        record = await mesh.queue("Q1").read(answer.text, payload=True)
        assert record.task == b'{"customer":7}', "the context is not in the payload"
    worker = start("work")
    run = (await spans_of(worker, "process Q1"))["process Q1"]
    assert run["links"] == [[dispatch["trace"], dispatch["id"]]]
    assert run["parent"] is None
    assert run["trace"] != request["trace"]
    worker.signal(SIGTERM)  # it deregisters
    await worker.ended()
