"""The templates: how they are loaded, and the functions that they use. Each value in a template is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from worqr.dashboard import figures, holds
from worqr.dashboard.notices import notice
from worqr.dashboard.numbers import batch_state, lane_key, run_key
from worqr.dashboard.payloads import Redactor
from worqr.dashboard.serving import shard_of
from worqr.dashboard.state import MeshState, age_text, leader_text, source_text
from worqr.dashboard.trace_links import TraceLinks
from worqr.dashboard.visit import Visit
from worqr.escaping import escape
from worqr.records import TaskInfo
from worqr.version import __version__

FOLDER: Final = Path(__file__).parent
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/queues", "Queues"),
    ("/running", "Running"),
    ("/failed", "Failed"),
    ("/workers", "Workers"),
    ("/schedules", "Schedules"),
    ("/log", "Log"),
    ("/server", "Server"),
)
"""The pages that the navigation names."""
FIGURES: Final = (
    *(
        "count",
        "rate",
        "duration",
        "brief",
        "clock",
        "in_zone",
        "iso",
        "since",
        "until",
        "size",
        "percent",
        "worker",
        "plural",
        "line",
    ),
)
"""The functions of `worqr.dashboard.figures` that templates use as filters."""


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
    filters: dict[str, Callable[..., Any]] = {name: getattr(figures, name) for name in FIGURES}
    filters |= {"plain": escape, "age": age_text, "leader": leader_text, "source": source_text, "of_queue": _of_queue}
    filters |= {
        each.__name__: each
        for each in (
            holds.hold_word,
            holds.hold_text,
            holds.pause_text,
            holds.limits_text,
            holds.lanes_text,
            holds.lane_hold_text,
            holds.batches_text,
        )
    }
    filters |= {"soft": _soft, "batch_state": batch_state, "shard_of": shard_of}
    made.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return made


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
                lane_key=lane_key,
                version=__version__,
                **context,
            )
        )
