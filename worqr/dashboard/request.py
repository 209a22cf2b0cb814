"""One request as handlers see it: the viewer, the query, the form, the mesh, and how to answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from worqr.client.queue import queue_named
from worqr.dashboard.access import MAX_QUERY, Message, Receive, Refused, Scope, Viewer
from worqr.dashboard.payloads import Redactor
from worqr.dashboard.reads import Looks
from worqr.views.values import plural

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.dashboard.bulk import BulkActs
    from worqr.mesh import Mesh


Render = Callable[..., str]
Answer = Callable[[Scope, Receive, Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""What a handler returns: an ASGI application for this one request, such as a `Response`."""
LONGEST_VALUE: Final = 2048
"""Characters of one field of a query or of a form."""
LONGEST_BACK: Final = MAX_QUERY - 100
"""Characters of the address of a page to which a form returns: the notice has room behind it."""


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
        path, query = self.back()
        query = f"{query}&" if query else ""
        return RedirectResponse(f"{self.root}{path}?{query}{urlencode({'done': done})}", 303)

    def back(self) -> tuple[str, str]:
        """Return the path and the query of the page of the form; of the overview, if they are too long to return there.

        Raises:
            Refused: they are none of a page of this dashboard.
        """
        given = dict(self.form).get("back", self.query.get("back", "/"))
        try:
            back = urlsplit(given)
        except ValueError:  # a bracket without its other one
            back = urlsplit("")
        if back.scheme or back.netloc or not back.path.startswith("/") or "\\" in back.path or back.path[:2] == "//":
            raise Refused(400, "Nothing was changed: 'back' must be the path of a page of this dashboard.")
        return (back.path, back.query) if len(given) <= LONGEST_BACK else ("/", "")


# What an act did, as a sentence on the page to which it returns. Pure.


UNSENT: Final = "unsent"
UNKNOWN: Final = "unknown"
NEW: Final = "new"
UNANSWERED: Final = frozenset({UNSENT, UNKNOWN})
"""What an act did to which the server did not reply."""


def notice(done: str) -> str:
    """Return what an act did as a sentence; empty if `done` is not from an act. It is made of numbers only, so a foreign link
    cannot put words on a page.
    """
    word, *rest = done.split(":")
    numbers = [int(each) for each in rest if each.isascii() and each.isdecimal() and len(each) < 10]
    if len(numbers) != len(rest):
        return ""
    match word, numbers:
        case "cancel", [waiting, running, acknowledged, ms]:
            return _cancelled(waiting, running, acknowledged, ms)
        case "retry", [count, asked]:
            return _counted("put back into the queue", count, asked)
        case "run", [count, asked]:
            return _counted("due now", count, asked)
        case "rewind", [count]:
            dropped = "1 entry was" if count == 1 else f"{count:,} entries were"
            return f"{dropped} dropped, and the workflow runs again from there."
        case "drop", [count, asked]:
            return _counted("deleted", count, asked)
        case _:
            return _FIXED.get(word, "") if not numbers else ""


_FIXED: Final = {
    NEW: "The task is in the queue.",
    "again": "The job is in the queue again, under a new id.",
    "pause": "The queue is paused. Running tasks continue.",
    "resume": "The queue is resumed.",
    "lane-pause": "The lane is paused. Running tasks continue.",
    "lane-resume": "The lane is resumed.",
    "sent-woke": "The value was sent, and the workflow runs again.",
    "sent-stored": "The value was sent. The workflow finds it when it waits for it.",
    "sent-already": "Nothing was sent: a value of this name lies there that the workflow has not taken yet.",
    "sent-full": "Nothing was sent: 1,000 values of this name lie there, or the job has no room for more.",
    "wait-ended": "The wait was ended, and the workflow goes on.",
    "wait-none": "Nothing was ended: the workflow does not wait for that any more.",
    "rewind-none": "Nothing was dropped: the workflow runs, has ended, or has no such entry any more. Reload its page.",
    "sent-none": "Nothing was sent: the job has ended, or it is no workflow.",
    "limit": "The limit holds now. Tasks that run continue.",
    "limit-cleared": "The limit of the code holds again.",
    "weight": "The lane has its new weight.",
    "schedule-pause": "The schedule is paused.",
    "schedule-resume": "The schedule is resumed.",
    "worker-asked": "The worker was asked. It answers with its next heartbeat, within about a second: reload this page.",
    "worker-evicted": "The worker was declared dead, and its tasks are back in their queues.",
    "schedule-run": "The task of the schedule is enqueued. Its next run stays as planned.",
    "schedule-busy": "Nothing was enqueued, because the previous run of the schedule still waits or runs.",
    "schedule-override": "The schedule has other times now, until you return to those of the code.",
    "schedule-reset": "The schedule has the times of its code.",
    "schedule-stored": "The schedule is stored.",
    "schedule-deleted": "The schedule is deleted. It does not fire any more.",
    "schedule-none": "There is no stored schedule of this name, so nothing was deleted.",
    UNSENT: "The server did not answer, and nothing was sent. Nothing was changed.",
    UNKNOWN: "The server did not answer. The change may have taken effect: look before you try again.",
}


def _cancelled(waiting: int, running: int, acknowledged: int, ms: int) -> str:
    parts: list[str] = []
    if waiting:
        parts.append(f"{plural(waiting, 'waiting job')} removed")
    if acknowledged:
        parts.append(f"{plural(acknowledged, 'run')} cancelled and ended after {ms:,} ms")
    if running > acknowledged:
        parts.append(f"{plural(running - acknowledged, 'run')} cancelled, and still unwinding")
    return f"{', '.join(parts)}." if parts else "There was nothing to cancel: the job has ended already."


def _counted(what: str, count: int, asked: int) -> str:
    if not count:
        return "Nothing was changed: the tasks are not in this list any more, or a job with the same id waits or runs."
    return f"{count:,} of {plural(asked, 'task')} {what}." if count < asked else f"{plural(count, 'task')} {what}."
