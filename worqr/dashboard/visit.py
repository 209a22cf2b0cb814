"""One request as the handlers of pages see it: the viewer, the query, the form, the mesh, and how to answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from worqr.client.queue import queue_named
from worqr.dashboard.access import Scope, Viewer
from worqr.dashboard.bulk import BulkActs
from worqr.dashboard.guard import Message, Receive, Refused
from worqr.dashboard.looks import Looks
from worqr.dashboard.notices import UNANSWERED, notice
from worqr.dashboard.payloads import Redactor

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh

Render = Callable[..., str]
Answer = Callable[[Scope, Receive, Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""What a handler returns: an ASGI application for this one request, such as a `Response`."""
LONGEST_VALUE: Final = 2048
"""Characters of one field of a query or of a form."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request. The handler returns a `Response`."""

    viewer: Viewer
    mesh: Mesh
    looks: Looks
    redactor: Redactor
    bulk_acts: BulkActs
    render: Render
    root: str
    path: str
    query: Mapping[str, str]
    form: tuple[tuple[str, str], ...] = field(default=())
    functions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The functions of the application's mesh by their queues; none in a dashboard that stands alone."""
    by_token: bool = False
    """A program with a token made it, and gets JSON in place of a redirection."""

    def text(self, name: str, default: str = "") -> str:
        """Return a field of the query, or of the form of a POST."""
        value = dict(self.form).get(name, self.query.get(name, default))
        if len(value) > LONGEST_VALUE:
            raise Refused(400, f"{name!r} is longer than {LONGEST_VALUE} characters.")
        return value

    def number(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a whole number of the query, between two limits."""
        value = self.text(name)
        if not value:
            return default
        if not value.isascii() or not value.isdecimal() or len(value) > 9:
            raise Refused(400, f"{name!r} must be a whole number.")
        return min(max(int(value), lowest), highest)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return a field that has one of these values; the first is the default."""
        value = self.text(name, allowed[0]) or allowed[0]
        if value not in allowed:
            raise Refused(400, f"{name!r} must be one of: {', '.join(allowed)}.")
        return value

    def queue(self, name: str) -> Queue:
        """Return the queue, which has to exist for this viewer."""
        if not name:
            raise Refused(400, "The address does not name a queue.")
        if not self.viewer.sees(name):
            raise Refused(404, "There is no queue of this name.")
        return queue_named(self.mesh.queue, name)

    def link(self, path: str, **query: object) -> str:
        """Return the address of a page."""
        fields = {name: value for name, value in query.items() if value not in ("", None)}
        return f"{self.root}{path}" + (f"?{urlencode(fields)}" if fields else "")

    @property
    def here(self) -> str:
        """The path and the query of this page inside the dashboard, for forms that return to it."""
        fields = {name: value for name, value in self.query.items() if name != "done"}
        return self.path + (f"?{urlencode(fields)}" if fields else "")

    def page(self, template: str, http_status: int = 200, **context: Any) -> Response:
        """Return a page made of a template."""
        return HTMLResponse(self.render(template, visit=self, **context), http_status)

    def show_act(self, id: str, outcome: str) -> Response:
        """Return the browser to the page of an act on many tasks; tell a program the same."""
        if self.by_token:
            return JSONResponse({"outcome": outcome, "act": id})
        return RedirectResponse(self.link("/bulk", id=id), 303)

    def see_other(self, done: str) -> Response:
        """Return the browser to the page of the form, with a notice that is made of `done`; tell a program the notice."""
        if self.by_token:
            return JSONResponse({"outcome": notice(done)}, 503 if done in UNANSWERED else 200)
        back = urlsplit(self.text("back", "/"))
        if back.scheme or back.netloc or not back.path.startswith("/") or "\\" in back.path or back.path[:2] == "//":
            raise Refused(400, "'back' must be the path of a page of this dashboard.")
        query = f"{back.query}&" if back.query else ""
        return RedirectResponse(f"{self.root}{back.path}?{query}{urlencode({'done': done})}", 303)
