"""The document of OpenAPI: it is valid, it has each address of the API, and the replies of a live dashboard are as it says."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import validate

from tests.dashboard.conftest import Site
from tests.dashboard.scene import Scene, open_scene
from tests.support.servers import Server
from worqr.dashboard.app import ROUTES
from worqr.dashboard.openapi import OPERATIONS, document
from worqr.dashboard.request import Visit


def test_the_document_is_valid_and_has_each_address() -> None:
    validate(document("/jobs"))
    assert document("/jobs")["servers"] == [{"url": "/jobs"}]
    assert set(OPERATIONS) == {path for path in ROUTES if path.startswith("/api/v1/")}
    names = [each["get"]["operationId"] for each in document()["paths"].values()]
    assert len({*names}) == len(names)
    assert all(each["get"]["summary"] for each in document()["paths"].values())


def requests_of(scene: Scene) -> list[tuple[str, dict[str, str]]]:
    """Requests to each address, with each parameter that only some of them ask for."""
    names, texts = scene.names, scene.texts
    states = ("waiting", "scheduled", "suspended", "blocked", "running", "kept")
    tasks = [("tasks", {"queue": name, "state": state}) for name in names.values() for state in states]
    one_queue = ("lanes", "batches", "ended", "dead-letters")
    by_queue = [(table, {"queue": name}) for name in names.values() for table in one_queue]
    return [
        *tasks,
        *by_queue,
        *(
            (table, {})
            for table in ("queues", "running", "workers", "schedules", "topics", "limits", "log", "bulk", "schema")
        ),
        ("dead-letters", {"queue": names["typed"], "list": "undecodable"}),
        ("dead-letters", {"queue": names["batched"], "home": names["batched"], "batch": texts.batch}),
        ("workers", {"app": texts.app, "queue": names["slow"], "id": scene.worker}),
        ("job", {"queue": names["failing"], "id": texts.job}),
        ("job", {"queue": names["flow"], "id": texts.job}),
        ("batch", {"queue": names["batched"], "id": texts.batch}),
        ("scale", {"queue": names["queue"]}),
        ("scale", {"queue": names["queue"], "places": "10"}),
        ("openapi.json", {}),
    ]


FULL = {
    "queues",
    "tasks",
    "lanes",
    "batches",
    "running",
    "ended",
    "dead-letters",
    "workers",
    "schedules",
    "topics",
    "limits",
    "log",
}
"""Tables that have rows in the scene; acts are tested below."""


@pytest.mark.leaves("*")
async def test_the_replies_and_the_parameters_are_those_of_the_document(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, set[str]] = defaultdict(set)
    read = Visit.text

    def recording(self: Visit, name: str, default: str = "") -> str:
        asked[self.path].add(name)
        return read(self, name, default)

    monkeypatch.setattr(Visit, "text", recording)
    async with open_scene(server.url, prefix) as scene:
        site = Site(scene.mesh)
        queue = scene.names["queue"]
        act = (await site.post("/cancel-all", queue=queue, count="0", reason="none")).status_code
        assert act < 500
        full = set[str]()
        for table, query in requests_of(scene):
            answer = await site.get(f"/api/v1/{table}", **query)
            assert answer.status_code == 200, (table, query, answer.text)
            check(f"/api/v1/{table}", "200", answer.json())
            if answer.json().get("rows"):
                full.add(table)
        assert full >= FULL
        refused = await site.get("/api/v1/tasks")
        check("/api/v1/tasks", "default", refused.json())
        assert (await site.get("/api/v1/openapi.json")).json() == document()
    for path in OPERATIONS:
        known = {each["name"] for each in document()["paths"][path]["get"]["parameters"]}
        assert asked[path] - {"count"} == known, path


def check(path: str, status: str, reply: Any) -> None:
    whole = document()
    content = whole["paths"][path]["get"]["responses"][status]["content"]["application/json"]
    schema = {**content["schema"], "components": whole["components"]}
    problems = list(Draft202012Validator(schema, format_checker=FormatChecker()).iter_errors(reply))
    assert not problems, (path, [(each.message, list(each.absolute_path)) for each in problems])
