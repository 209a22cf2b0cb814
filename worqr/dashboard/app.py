"""`Dashboard`: the ASGI application. It checks each request before any handler runs, and answers errors with pages.

The order of the checks: host, viewer, path, method, origin, right. `ROUTES` has the handler of each address.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, Literal

import jinja2
from markupsafe import Markup
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from worqr.client.client import EMBEDDED, acting_for, url_or_default
from worqr.client.inspection import value_bytes
from worqr.codecs import let_read
from worqr.dashboard import api, batch_pages, bulk, forms, live, openapi, pages, schedule_forms, server_page, state
from worqr.dashboard.access import (
    BY_TOKEN,
    HOW_TO_LOG_IN,
    SECURITY_HEADERS,
    Access,
    Disconnected,
    Message,
    Receive,
    Refused,
    Right,
    Scope,
    Viewer,
    check_host,
    check_origin,
    check_query,
    checked_access,
    host_name,
    read_form,
    viewer_of,
)
from worqr.dashboard.api import scale, scrape
from worqr.dashboard.bulk import BulkActs
from worqr.dashboard.pages import shard_of
from worqr.dashboard.payloads import SECRET_NAMES, Mode, Redactor, Show
from worqr.dashboard.reads import Looks
from worqr.dashboard.request import Answer, Visit, notice
from worqr.dashboard.state import MeshState, run_key
from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrError, did_you_mean
from worqr.escaping import escape
from worqr.inside import declarations_of
from worqr.link import Address
from worqr.log_events import emit
from worqr.mesh import Mesh, side_mesh
from worqr.records import TaskInfo
from worqr.version import __version__
from worqr.views import tables, values
from worqr.views.tables import age_text

# The templates: how they are loaded, and the functions that they use. Each value in a template is escaped.


FOLDER: Final = Path(__file__).parent
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/queues", "Queues"),
    ("/running", "Running"),
    ("/failed", "Failed"),
    ("/workers", "Workers"),
    ("/schedules", "Schedules"),
    ("/topics", "Topics"),
    ("/log", "Log"),
    ("/server", "Server"),
)
"""The pages that the navigation names."""


@cache
def environment() -> jinja2.Environment:
    """Return the templates of this package. Values are escaped, and a name that does not exist is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Any] = {**functions_of(values), **functions_of(state)}
    filters |= {"plain": escape, "age": age_text, "of_queue": _of_queue, "soft": _soft, "shard_of": shard_of}
    filters |= {"value_bytes": value_bytes, "mark_of": forms.mark_of}
    filters |= {"batch_state": tables.batch_state, "schedule_notes": tables.schedule_notes}
    filters |= {"batch_share": state.batch_share, "ended_text": state.ended_text}
    made.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    made.globals["tables"] = tables  # pyright: ignore[reportUnknownMemberType]
    return made


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a module defines."""
    found = {name: each for name, each in vars(module).items() if isinstance(each, FunctionType)}
    return {name: each for name, each in found.items() if each.__module__ == module.__name__ and name[0] != "_"}


def _soft(name: str) -> Markup:
    """Return the name of a queue, which a line may break behind a dot or an underscore."""
    return Markup("<wbr>").join(re.split(r"(?<=[._])(?=.)", escape(name)))


def _of_queue(tasks: list[TaskInfo], queue: str) -> list[tuple[str, TaskInfo]]:
    return [(queue, task) for task in tasks]


def _header(visit: Visit | None) -> dict[str, Any]:
    """Return what is known of the mesh, which handlers read in one batch with the figures of their page; and the time.

    Times in a page are those of the server. So ages are right, even if the clock of this host is not.
    """
    state: MeshState | None = None if visit is None else visit.looks.last("state")
    return {"header": state, "now": datetime.now(UTC) if state is None else state.now()}


class Pages:
    """Renders the pages of one dashboard.

    Args:
        mesh: returns what the header names: the prefix, and the server without its password.
        redactor: it hides secrets in payloads and errors.
        traces: the links to the tracing system.
    """

    def __init__(self, mesh: Callable[[], Mapping[str, str]], redactor: Redactor, traces: TraceLinks) -> None:
        self._mesh = mesh
        self._traces = traces
        self._redactor = redactor

    def render(self, template: str, *, visit: Visit, **context: Any) -> str:
        """Return a page for a viewer."""
        return self._render(
            template,
            notice=notice(visit.query.get("done", "")),
            visit=visit,
            viewer=visit.viewer,
            root=visit.root,
            path=visit.path,
            **_header(visit),
            **context,
        )

    def render_error(self, status: int, title: str, why: str, root: str, *, visit: Visit | None = None) -> str:
        """Return the page of an error; without a `visit`, for an unknown visitor."""
        return self._render(
            "error.html",
            visit=visit,
            viewer=None if visit is None else visit.viewer,
            root=root,
            path="" if visit is None else visit.path,
            **_header(visit),
            status=status,
            title=title,
            why=why,
        )

    def _render(self, template: str, **context: Any) -> str:
        return (
            environment()
            .get_template(template)
            .render(
                mesh=self._mesh(),
                navigation=NAVIGATION,
                redactor=self._redactor,
                traces=self._traces,
                run_key=run_key,
                lane_key=tables.lane_key,
                version=__version__,
                **context,
            )
        )


# `TraceLinks`: links from jobs to the tracing system.


PLACE: Final = "{trace_id}"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_NO_TRACE: Final = "0" * 32


class TraceLinks:
    """Makes the links. `template` is the address of a trace, with ``{trace_id}`` in it; empty: there are none."""

    def __init__(self, template: str) -> None:
        """Raise UsageError if the template is not valid."""
        if template and (PLACE not in template or not re.match(r"https?://[^/\s]", template)):
            raise UsageError(
                f"trace_url must be an address with {PLACE} in it, such as https://traces.example.org/trace/{PLACE}, "
                f"not {template!r}"
            )
        self._template = template

    def link(self, meta: Mapping[str, str]) -> str:
        """Return the address of the trace of a job with this `meta`; empty if it has none, as W3C Trace Context says."""
        found = _TRACEPARENT.fullmatch(meta.get("traceparent", ""))
        if not self._template or found is None or found[1] == _NO_TRACE:
            return ""
        return self._template.replace(PLACE, found[1])


logger: logging.Logger = logging.getLogger("worqr.dashboard")  # a documented name

Send = Callable[[Message], Awaitable[None]]
STATIC: Final = {
    "/static/worqr.css": "text/css",
    "/static/live.js": "text/javascript",
    "/static/icon.svg": "image/svg+xml",
}
"""The files that are served to everyone: the page of a refusal needs them, too."""
PATIENCE: Final = 5.0
"""Seconds after which a page says that the server is away."""
GET: Final = ("GET", "HEAD")


class Dashboard:
    """An ASGI application that shows a mesh, and lets operators act on it. Mount it in yours, or serve it by itself.

    It runs under asyncio and under Trio, and needs no lifespan. It connects to the server with a connection of its own, only
    while a request is served or a page is open.

    Args:
        mesh: The mesh to show.
        access: A function of the ASGI scope of each request. It returns the `Viewer`, or None if you do not know
            who sent it. It may be async.
        url: Connect to this URL instead of the mesh's, for example as a user who may only read.
        hosts: The host names in requests that are accepted, beside the address at which they arrive. None: all, because your
            application or your proxy checks them.
        origins: The public origins of the dashboard, such as ``"https://ops.example.org"``, if a proxy changes the host name.
        read_only: Refuse every change, even if `access` permits it.
        login_url: Redirect unknown visitors there. None: a page with status 401.
        payloads: ``"redacted"``: show the beginning of payloads, with secrets hidden. ``"never"``: show none. ``"full"``: hide
            nothing.
        redact: A regular expression of the keys whose values are secret, in place of the default.
        show: A function of the name of a queue and a payload, which returns the payload as a text that people can read: for
            encrypted or packed payloads. What it returns is redacted like any other payload. It gets whole payloads of at most
            4 KiB, and of the lists of tasks those below 100 bytes.
        allow_enqueue: Let viewers with the right ``enqueue`` put tasks into queues by hand.
        trace_url: The address of a trace in your tracing system, with ``{trace_id}`` in it. The page of a job that was sent
            with a trace then links to it.

    Raises:
        UsageError: `access` is missing, or an argument is not valid.
    """

    def __init__(
        self,
        mesh: Mesh[Any],
        *,
        access: Access | None = None,
        url: str | None = None,
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
        read_only: bool = False,
        login_url: str | None = None,
        payloads: Mode = "redacted",
        redact: str = SECRET_NAMES,
        show: Show | None = None,
        allow_enqueue: bool = False,
        trace_url: str = "",
    ) -> None:
        self._access = checked_access(access)
        if payloads not in ("redacted", "never", "full"):
            raise UsageError(f"payloads must be 'redacted', 'never' or 'full', not {payloads!r}")
        self._mesh = side_mesh(mesh, "dashboard", PATIENCE, url)
        if self._mesh.url not in (None, EMBEDDED):
            Address.parse(self._mesh.url)
        self._hosts = None if hosts is None else frozenset(map(host_name, hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._read_only = read_only
        self._allow_enqueue = allow_enqueue
        self._declarations = declarations_of(mesh)
        self._login_url = login_url
        self._redactor = Redactor(redact, payloads, show)
        self._pages = Pages(partial(_names_of, self._mesh), self._redactor, TraceLinks(trace_url))
        self._looks = Looks()
        self._bulk_acts = BulkActs(partial(side_mesh, mesh, "dashboard", PATIENCE, url))

    def __repr__(self) -> str:
        return f"<Dashboard of {self._mesh!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            self._looks.close()
            self._bulk_acts.stop_all()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            secured = _secured(send, head=scope["method"] == "HEAD")
            try:
                response = await self._response(scope, receive)
                await response(scope, receive, secured)
            except Disconnected:
                return

    async def _response(self, scope: Scope, receive: Receive) -> Answer:
        """Return the response to a request: a page, or the page of an error."""
        root, visit = _root(scope), None
        try:
            check_host(scope, self._hosts)
            path = _path(scope, root)
            if path in STATIC and scope["method"] in GET:
                return Response((FOLDER / path[1:]).read_bytes(), media_type=STATIC[path])
            visit = await self._visit(scope, root, path)
            return await self._answer(scope, receive, visit)
        except Refused as refused:
            return self._error(scope, refused.status, refused.why, visit, refused.headers)
        except Unavailable as error:
            self._looks.failed(error)
            why = f"{escape(str(error)).rstrip('.')}. The figures come back when the server does."
            return self._error(scope, 503, why, visit, {"retry-after": "5"})
        except RefusedByServer as error:
            return self._error(scope, 502, f"The server rejected the request: {escape(str(error))}", visit)
        except UsageError as error:
            return self._error(scope, 400, escape(str(error)), visit)
        except WorqrError as error:
            return self._error(scope, 502, escape(str(error)), visit)
        except Disconnected:
            raise
        except Exception as error:  # the page shows no details, which could be secret
            text = "a request for %(path)s failed: %(error)s"
            emit(logger, "dashboard.failed", text, exc_info=error, path=scope.get("path"), error=repr(error)[:500])
            return self._error(scope, 500, "An error occurred. The log of this program has the details.", visit)

    async def _visit(self, scope: Scope, root: str, path: str) -> Visit:
        """Return the visit of a known viewer. Raises Refused; and what the application's `access` raises."""
        query = check_query(scope)
        viewer = await viewer_of(self._access, scope)
        if viewer is None:
            if self._login_url is not None:
                raise Refused(303, "You have to log in.", {"location": self._login_url})
            how = scope.get(HOW_TO_LOG_IN, "")
            raise Refused(401, f"You have to log in to see this dashboard. {how}".strip())
        seen = (
            viewer.without_acts() if self._read_only else viewer if self._allow_enqueue else viewer.without("enqueue")
        )
        let_read("payloads" in seen.may)
        given = (self._mesh, self._looks, self._redactor, self._bulk_acts, self._pages.render)
        return Visit(
            seen, *given, root, path, query, functions=self._declarations.functions, by_token=bool(scope.get(BY_TOKEN))
        )

    async def _answer(self, scope: Scope, receive: Receive, visit: Visit) -> Answer:
        """Check what the route requires, connect, and call its handler."""
        route = ROUTES.get(visit.path)
        if route is None:
            pages = [path for path, each in ROUTES.items() if each.method == "GET"]
            hint = did_you_mean(visit.path, pages)
            raise Refused(404, f"There is no page at this address{f': {hint}' if hint else '.'}")
        allowed = GET if route.method == "GET" else (route.method,)
        if scope["method"] not in allowed:
            raise Refused(405, f"This address accepts {' and '.join(allowed)} only.", {"allow": ", ".join(allowed)})
        if route.method == "POST":
            check_origin(scope, self._origins)
        check_right(visit.viewer, route)
        if route.method == "POST":
            form = await read_form(scope, receive)
            visit = replace(visit, form=tuple(form))
            self._looks.forget()
        if route.connects:
            return await route.handler(visit)
        with acting_for(visit.viewer.name):
            async with self._mesh.connect():
                response = await route.handler(visit)
        self._looks.answered()
        return response

    def _error(
        self, scope: Scope, status: int, why: str, visit: Visit | None, headers: dict[str, str] | None = None
    ) -> Response:
        if status == 303:
            return RedirectResponse((headers or {})["location"], 303)
        root = _root(scope)
        if _path(scope, root).startswith("/api/") or scope.get(BY_TOKEN):
            return JSONResponse({"error": why}, status, headers)
        page = self._pages.render_error(status, HTTPStatus(status).phrase, why, root, visit=visit)
        return HTMLResponse(page, status, headers)


def check_right(viewer: Viewer, route: Route) -> None:
    """Raise Refused if the viewer lacks the right that the route requires."""
    for right in ("look", route.right):
        if right not in viewer.may:
            more = (
                " The dashboard must allow it, too: allow_enqueue=True, or --allow-enqueue."
                if right == "enqueue"
                else ""
            )
            raise Refused(403, f"You are {viewer.name!r}, and lack the right {right!r} for this.{more}")


def _names_of(mesh: Mesh[Any]) -> dict[str, str]:
    """Return the prefix of the mesh, and the address of its server without the password, as workers log it."""
    url = url_or_default(mesh.url)
    try:
        server = "embedded server" if url == EMBEDDED else Address.parse(url).redacted
    except UsageError:  # of an environment variable
        server = "a server with a wrong URL"
    return {"prefix": mesh.prefix, "server": server}


def _root(scope: Scope) -> str:
    """Return the path below which the dashboard is served."""
    root: str = scope.get("root_path", "")
    return root.rstrip("/")


def _path(scope: Scope, root: str) -> str:
    """Return the path inside the dashboard: servers leave the path of a mounted application whole, or cut it."""
    path: str = scope["path"]
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


def _secured(send: Send, *, head: bool) -> Send:
    """Return `send` with the security headers on each response, and without a body for HEAD."""

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = {name for name, _ in SECURITY_HEADERS}
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in ours]
            message = {**message, "headers": [*kept, *SECURITY_HEADERS]}
        elif head and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return secured


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge the start and the end of the server; the dashboard has nothing to open."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


@dataclass(frozen=True, slots=True)
class Route:
    """One address.

    Attributes:
        handler: makes the response.
        method: the method that it accepts; with GET, also HEAD.
        right: the right that a viewer needs.
        connects: the handler connects to the server by itself: a stream while its client listens, a scrape because it reports a
            server that is away.
    """

    handler: Callable[[Visit], Awaitable[Answer]]
    method: Literal["GET", "POST"] = "GET"
    right: Right = "look"
    connects: bool = False


ROUTES: Final[dict[str, Route]] = {
    "/": Route(pages.overview),
    "/queues": Route(pages.queues),
    "/queue": Route(pages.queue),
    "/lanes": Route(pages.lanes),
    "/batches": Route(batch_pages.listed),
    "/batch": Route(batch_pages.page),
    "/job": Route(pages.job),
    "/running": Route(pages.running),
    "/failed": Route(pages.failed),
    "/workers": Route(pages.workers),
    "/worker": Route(pages.worker),
    "/schedules": Route(pages.schedules),
    "/topics": Route(pages.topics),
    "/log": Route(pages.log),
    "/server": Route(server_page.page),
    "/search": Route(pages.search),
    "/payload": Route(pages.payload, right="payloads"),
    "/api/v1/scale": Route(scale),
    "/api/v1/schema": Route(api.schema),
    "/api/v1/openapi.json": Route(openapi.serve),
    "/api/v1/job": Route(api.job),
    "/api/v1/batch": Route(api.batch),
    **{path: Route(partial(api.serve, read)) for path, read in api.READERS.items()},
    "/metrics": Route(scrape, connects=True),
    "/live": Route(live.stream, connects=True),
    "/new": Route(forms.new_task),
    "/enqueue": Route(forms.enqueue, "POST", "enqueue"),
    "/cancel": Route(forms.cancel, "POST", "cancel"),
    "/retry": Route(partial(forms.change_dead_letters, "retry"), "POST", "retry"),
    "/send": Route(forms.send, "POST", "send"),
    "/end-wait": Route(forms.end_wait, "POST", "send"),
    "/rewind": Route(forms.rewind, "POST", "retry"),
    "/run-now": Route(forms.run_now, "POST", "retry"),
    "/run-again": Route(forms.run_again, "POST", "retry"),
    "/forget": Route(forms.forget, "POST", "drop"),
    "/cancel-tagged": Route(partial(forms.change_tagged, "cancel"), "POST", "cancel"),
    "/retry-tagged": Route(partial(forms.change_tagged, "retry"), "POST", "retry"),
    "/forget-tagged": Route(partial(forms.change_tagged, "forget"), "POST", "drop"),
    "/drop": Route(partial(forms.change_dead_letters, "drop"), "POST", "drop"),
    "/confirm": Route(bulk.confirm),
    "/bulk": Route(bulk.page),
    "/retry-all": Route(bulk.START["retry"], "POST", "retry"),
    "/drop-all": Route(bulk.START["drop"], "POST", "drop"),
    "/run-all": Route(bulk.START["run"], "POST", "retry"),
    "/cancel-all": Route(bulk.START["cancel"], "POST", "cancel"),
    "/cancel-batch": Route(bulk.START["cancel-batch"], "POST", "cancel"),
    "/retry-batch": Route(bulk.START["retry-batch"], "POST", "retry"),
    "/delete": Route(bulk.START["delete"], "POST", "delete"),
    "/stop-retry": Route(partial(bulk.stop, "retry"), "POST", "retry"),
    "/stop-drop": Route(partial(bulk.stop, "drop"), "POST", "drop"),
    "/pause": Route(forms.pause, "POST", "pause"),
    "/resume": Route(forms.resume, "POST", "pause"),
    "/limit": Route(forms.limit, "POST", "pause"),
    "/lane-weight": Route(forms.weigh, "POST", "pause"),
    "/schedule": Route(forms.pause_schedule, "POST", "schedules"),
    "/worker-ask": Route(forms.ask_worker, "POST", "workers"),
    "/worker-evict": Route(forms.evict_worker, "POST", "workers"),
    "/schedule-run": Route(forms.run_schedule, "POST", "schedules"),
    "/schedule-times": Route(forms.override_schedule, "POST", "schedules"),
    "/schedule-form": Route(schedule_forms.page),
    "/schedule-store": Route(schedule_forms.store, "POST", "schedules"),
    "/schedule-delete": Route(schedule_forms.delete, "POST", "schedules"),
}
"""The handlers of POST are in `worqr.dashboard.forms`, or beside their page."""
