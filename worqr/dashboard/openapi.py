"""The addresses below ``/api/v1`` as a document of OpenAPI 3.1. The types of the records that the rows are made of are in it.

`OPERATIONS` has each address: what its query takes, and what it returns. A test compares both with what the handlers do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NotRequired, TypedDict, cast, get_args, get_origin, get_type_hints

import msgspec
from starlette.responses import JSONResponse, Response

from worqr.batches import BatchInfo
from worqr.cron import Schedule
from worqr.dashboard import api
from worqr.dashboard.bulk import Order, Progress
from worqr.dashboard.ended import OUTCOMES
from worqr.dashboard.pages import ORDERS, SORTS, Subscriber
from worqr.dashboard.request import Visit
from worqr.functions.schema import REFERENCE, Schema
from worqr.keys import MAX_SHARDS
from worqr.limits import LimitInfo
from worqr.mesh_records import LaneInfo, LogEntry, QueueInfo, WorkerInfo
from worqr.records import EndedRun, Entry, Failed, JobRecord, Status, TaskInfo, Try
from worqr.version import __version__

Shape = Mapping[str, Any]
"""The fields of an object, with their types."""


class Error(TypedDict):
    """What a run has raised."""

    type: str
    message: str


class JobName(TypedDict):
    """The name of a batch or of a job: its queue and its id."""

    queue: str | None
    id: str | None


class RatesOfQueue(TypedDict):
    """Tasks per second; null if they are not known yet."""

    enqueued: float | None
    finished: float | None
    failed: float | None


def _fields(record: type[Any], names: str = "") -> dict[str, Any]:
    """Return the types of some attributes of a record, or of all its fields."""
    hints = get_type_hints(record)
    found: dict[str, Any] = {}
    for name in names.split() or hints:
        member = getattr(record, name, None)
        made = cast("Callable[..., Any]", member.fget) if isinstance(member, property) else None
        found[name] = get_type_hints(made)["return"] if made else hints[name]
    return found


_META: Final = {"payload": str, "meta": dict[str, str]}
_STATUS: Final = _fields(Status, f"{api.STATUS} message waits_for") | {"error": Error | None}
_RECORD: Final = _fields(Failed, api.RECORD) | {"error": Error | None, **_META}
_TASK: Final = {
    "queue": str,
    **_STATUS,
    **_fields(TaskInfo, "id claim deadline cancelling place size ended seconds kept"),
    "lane": str | None,
    "tags": list[str],
    "payload": str,
}
_QUEUE: Final = _fields(QueueInfo) | {"rates": RatesOfQueue}
_WORKER: Final = _fields(WorkerInfo) | {"beat_age": float | None}
_LINE: Final = {**_fields(Entry), "seconds": float | None, "error": Error | None}
_BATCH: Final = {
    **_fields(BatchInfo, "queue id state jobs finished failed cancelled pending succeeded endings created ended"),
    "cancel_reason": str | None,
    "queues": list[str],
    "follow_up": JobName,
    "meta": dict[str, str],
}
_ACT: Final = {
    "id": str,
    "act": _fields(Order)["verb"],
    "began": datetime,
    "outcome": str,
    "queue": str,
    "batch": str | None,
    "who": str,
    **_fields(Progress, "state tried total changed"),
}
_SCALE: Final = {
    "queue": str,
    "load": int,
    "age": float,
    "workers": int,
    **_fields(QueueInfo, "held_back held_for"),
    "wanted": NotRequired[int],
}
_JOB: Final = {
    **_fields(JobRecord, api.JOB),
    **_STATUS,
    **_META,
    "options": dict[str, Any],
    "batch": JobName | None,
    "follows": JobName | None,
    "then": str | None,
    "otherwise": str | None,
    "tries": {**_fields(Try, "at seconds worker reason"), "error": Error | None},
    "time_line": _LINE,
    "dead_letters": _RECORD,
}

_TEXT: Final[Schema] = {"type": "string"}
_PAGE: Final[Mapping[str, Schema]] = {"page": {"type": "integer", "minimum": 1}}
_TIME: Final[Schema] = {"type": "string", "description": "a time in ISO 8601, of UTC if it names no zone"}


def _texts(names: str) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), _TEXT)


def _choice(*values: str) -> Schema:
    return {"type": "string", "enum": [*values], "default": values[0]}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one address takes and returns.

    Attributes:
        name: of what is returned: of one row, if there are rows.
        handler: its docstring says what is returned.
        shape: of a row, or of the whole reply; empty if it is an object of any kind.
        query: its parameters. `needs` has those that are required.
        has_rows: it returns a page of a table.
    """

    name: str
    handler: Callable[[Visit], Awaitable[Any]]
    shape: Shape
    query: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    needs: str = ""
    has_rows: bool = True


_QUEUE_ONLY: Final = _texts("queue")
_STATES: Final = ("waiting", "scheduled", "suspended", "blocked", "running", "kept")
_TASKS_QUERY: Final = {
    **_texts("queue after tag"),
    "state": _choice(*_STATES),
    "order": _choice(*ORDERS),
    "outcome": _choice(*OUTCOMES),
    "shard": {"type": "integer", "minimum": 1, "maximum": MAX_SHARDS},
}
_RECORDS_QUERY: Final = {
    **_texts("queue error job home batch"),
    "list": _choice("failed", "undecodable"),
    "since": _TIME,
    "before": _TIME,
    "older": _TIME,
    "past": {"type": "string", "description": "with older: the id behind which the page begins, of those of that time"},
}
_QUEUES_QUERY: Final = {
    "q": _TEXT,
    "sort": _choice("activity", *SORTS),
    "empty": _choice("show", "hide"),
    **_PAGE,
}


async def serve(visit: Visit) -> Response:
    """Return this document."""
    return JSONResponse(document(visit.root))


OPERATIONS: Final[Mapping[str, Operation]] = {
    "/api/v1/queues": Operation("Queue", api.queues, _QUEUE, _QUEUES_QUERY),
    "/api/v1/tasks": Operation("Task", api.tasks, _TASK, _TASKS_QUERY, "queue"),
    "/api/v1/lanes": Operation("Lane", api.lanes, _fields(LaneInfo), _QUEUE_ONLY, "queue"),
    "/api/v1/batches": Operation("Batch", api.batches, _BATCH, _QUEUE_ONLY, "queue"),
    "/api/v1/running": Operation("RunningTask", api.running, _TASK, _texts("worker")),
    "/api/v1/ended": Operation("EndedTask", api.ended, {"queue": str, **_fields(EndedRun)}, _QUEUE_ONLY, "queue"),
    "/api/v1/dead-letters": Operation("DeadLetter", api.records, _RECORD, _RECORDS_QUERY, "queue"),
    "/api/v1/workers": Operation("Worker", api.workers, _WORKER, {**_texts("app queue id"), **_PAGE}),
    "/api/v1/schedules": Operation("Schedule", api.schedules, _fields(Schedule), _texts("q after")),
    "/api/v1/limits": Operation("Limit", api.limits, _fields(LimitInfo), _PAGE),
    "/api/v1/topics": Operation("Subscription", api.topics, _fields(Subscriber), _PAGE),
    "/api/v1/log": Operation("LogEntry", api.log, _fields(LogEntry), {**_texts("kind queue who"), **_PAGE}),
    "/api/v1/bulk": Operation("Act", api.bulk, _ACT, {**_texts("id"), **_PAGE}),
    "/api/v1/job": Operation("Job", api.job, _JOB, _texts("queue id"), "queue id", has_rows=False),
    "/api/v1/batch": Operation("OneBatch", api.batch, _BATCH, _texts("queue id"), "queue id", has_rows=False),
    "/api/v1/scale": Operation(
        "Load",
        api.scale,
        _SCALE,
        {**_QUEUE_ONLY, "places": {"type": "integer", "minimum": 1, "maximum": api.MOST_PLACES}},
        "queue",
        has_rows=False,
    ),
    "/api/v1/schema": Operation("AsyncAPI", api.schema, {}, has_rows=False),
    "/api/v1/openapi.json": Operation("OpenAPI", serve, {}, has_rows=False),
}


def document(root: str = "") -> Schema:
    """Return the document. `root` is the path below which the dashboard is served."""
    schemas: Schema = {"Problem": _object({"error": _TEXT})}
    paths = {path: {"get": _operation(path, each, schemas)} for path, each in OPERATIONS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "The dashboard of worqr", "version": __version__},
        "servers": [{"url": root or "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, operation: Operation, schemas: Schema) -> Schema:
    query = dict(operation.query)
    schemas[operation.name] = _shape(operation.shape, schemas) if operation.shape else {"type": "object"}
    reply: Schema = {"$ref": f"{REFERENCE}{operation.name}"}
    content: Schema = {}
    if operation.has_rows:
        reply = _object({"rows": {"type": "array", "items": reply}, "next": {"type": ["string", "null"]}})
        query |= {"limit": {"type": "integer", "minimum": 1, "maximum": api.MOST_ROWS, "default": api.ROWS}}
        query |= {"format": _choice("json", "csv")}
        content = {"text/csv": {"schema": _TEXT}}
    refused = {"description": "a refusal", "content": {"application/json": {"schema": {"$ref": f"{REFERENCE}Problem"}}}}
    return {
        "operationId": path.rpartition("/")[2].partition(".")[0].replace("-", "_"),
        "summary": (operation.handler.__doc__ or "").partition("\n")[0],
        "parameters": [
            {"name": name, "in": "query", "required": name in operation.needs.split(), "schema": each}
            for name, each in query.items()
        ],
        "responses": {
            "200": {"description": "the reply", "content": {"application/json": {"schema": reply}, **content}},
            "default": refused,
        },
    }


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _shape(shape: Shape, schemas: Schema) -> Schema:
    """Return the schema of an object, and add those of the records in it to `schemas`. A shape in a shape is a list of such."""
    lists = {name: cast("Shape", each) for name, each in shape.items() if isinstance(each, Mapping)}
    types = {name: each for name, each in shape.items() if name not in lists}
    optional = {name for name, each in types.items() if get_origin(each) is NotRequired}
    hints = [get_args(each)[0] if name in optional else each for name, each in types.items()]
    found, components = msgspec.json.schema_components(hints, ref_template=f"{REFERENCE}{{name}}")
    schemas |= components
    inner = {name: {"type": "array", "items": _shape(each, schemas)} for name, each in lists.items()}
    made = _object({**dict(zip(types, found, strict=True)), **inner})
    return {**made, "required": [name for name in shape if name not in optional]}
