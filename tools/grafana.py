"""Writes the dashboard for Grafana, deploy/grafana/worqr.json: ``python -m tools.grafana``.

Each panel is a line of `ROWS`: its title, the unit of its values, and its queries with their legends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

PATH: Final = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "worqr.json"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
Q: Final = 'queue=~"$queue"'
WIDTH, HEIGHT = 8, 7
"""The size of a panel; a row of Grafana has 24 columns."""


def _quantiles(histogram: str) -> dict[str, str]:
    """Return the queries of three quantiles, over all chosen queues."""
    rates = f"sum by (le) (rate({histogram}_bucket{{{Q}}}[$__rate_interval]))"
    return {f"histogram_quantile({n / 100}, {rates})": f"p{n}" for n in (50, 95, 99)}


Panel = tuple[str, str, dict[str, str]]
ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Mesh": (
        ("Server and leader", "short", {"worqr_up": "server", "worqr_has_leader": "leader"}),
        ("Workers", "short", {"worqr_workers": "{{app}}", "worqr_workers_dying": "dying"}),
        ("Age of the numbers", "s", {"worqr_snapshot_age_seconds": "age"}),
        ("Load", "short", {"worqr_worker_running": "running {{app}}", "worqr_worker_room": "free {{app}}"}),
    ),
    "Queues": (
        (
            "Tasks in and out",
            "ops",
            {
                f'sum(rate(worqr_tasks_total{{{Q},event="enqueued"}}[$__rate_interval]))': "enqueued",
                f'sum(rate(worqr_tasks_total{{{Q},event="finished"}}[$__rate_interval]))': "finished",
            },
        ),
        ("Waiting", "short", {f"worqr_queue_waiting{{{Q}}}": "{{queue}}"}),
        ("Running", "short", {f"worqr_queue_running{{{Q}}}": "{{queue}}"}),
        (
            "Age of the oldest task",
            "s",
            {
                f"worqr_queue_age_seconds{{{Q}}}": "{{queue}}",
                f"worqr_queue_age_seconds{{{Q}}} and worqr_queue_age_estimated > 0": "{{queue}} (estimated)",
            },
        ),
        (
            "Scheduled, suspended and blocked",
            "short",
            {
                f"worqr_queue_scheduled{{{Q}}}": "{{queue}} scheduled",
                f"worqr_queue_suspended{{{Q}}}": "{{queue}} suspended",
                f"worqr_queue_blocked{{{Q}}}": "{{queue}} blocked",
            },
        ),
        (
            "Workers of queues, and pauses",
            "short",
            {
                f"worqr_queue_workers{{{Q}}}": "{{queue}}",
                f"worqr_queue_paused{{{Q}}} > 0": "{{queue}} is paused",
                f"worqr_queue_held_back{{{Q}}} > 0": "{{queue}} is at its limit",
            },
        ),
        (
            "Time until held tasks may start",
            "s",
            {f"worqr_queue_held_for_seconds{{{Q}}}": "{{queue}}"},
        ),
        (
            "Lanes",
            "short",
            {
                f"worqr_queue_lanes{{{Q}}} > 0": "{{queue}} lanes with tasks",
                f"worqr_queue_held_lanes{{{Q}}} > 0": "{{queue}} lanes that start nothing",
            },
        ),
        (
            "Batches",
            "short",
            {
                f"worqr_queue_batches{{{Q}}} > 0": "{{queue}} open batches",
                f"worqr_queue_relay_pending{{{Q}}} > 0": "{{queue}} has messages to deliver",
            },
        ),
        ("Jobs that have ended and are kept", "short", {f"worqr_queue_kept{{{Q}}} > 0": "{{queue}}"}),
        ("Memory of kept jobs", "bytes", {f"worqr_queue_kept_bytes{{{Q}}} > 0": "{{queue}}"}),
        ("Queues that are summed up", "short", {"worqr_queues_not_shown": "queues"}),
    ),
    "Runs": (
        ("Run times", "s", _quantiles("worqr_run_seconds")),
        ("Waiting times of jobs", "s", _quantiles("worqr_wait_seconds")),
        (
            "Runs by outcome",
            "ops",
            {f"sum by (outcome) (rate(worqr_runs_total{{{Q}}}[$__rate_interval]))": "{{outcome}}"},
        ),
    ),
    "Failures": (
        (
            "Failures, retries and crashes",
            "ops",
            {
                f'sum by (event) (rate(worqr_tasks_total{{{Q},event=~"failed|retried|stalled|undecodable"}}'
                "[$__rate_interval]))": "{{event}}"
            },
        ),
        ("Dead letters", "short", {f"worqr_queue_dead_letters{{{Q}}}": "{{queue}} {{list}}"}),
    ),
    "Worker processes": (
        ("Alive and ready", "short", {"sum(worqr_peer_alive)": "alive", "sum(worqr_peer_ready)": "ready"}),
        ("Lag of the event loop", "s", {"worqr_peer_loop_lag_seconds": "{{instance}}"}),
        ("Age of the heartbeat", "s", {"worqr_peer_beat_age_seconds": "{{instance}}"}),
        (
            "Tasks",
            "short",
            {
                "sum(worqr_peer_running)": "running",
                "sum(worqr_peer_room)": "free",
                "sum(worqr_peer_concurrency)": "concurrency",
                "sum(worqr_peer_stuck)": "stuck",
                "sum(worqr_peer_children)": "processes",
            },
        ),
        (
            "Connections",
            "short",
            {
                "sum(worqr_peer_link_up)": "connected",
                "sum(worqr_peer_requests_in_flight)": "requests without a reply",
                "sum(worqr_peer_leads)": "leaders",
            },
        ),
        (
            "Runs",
            "ops",
            {f"sum by (instance) (rate(worqr_peer_runs_total{{{Q}}}[$__rate_interval]))": "{{instance}}"},
        ),
        (
            "Trouble",
            "short",
            {
                "sum(increase(worqr_peer_beats_failed_total[$__rate_interval]))": "failed heartbeats",
                "sum(increase(worqr_peer_reconnects_total[$__rate_interval]))": "lost connections",
                "sum(increase(worqr_peer_registrations_total[$__rate_interval]))": "joined",
                "sum(increase(worqr_peer_loop_blocked_total[$__rate_interval]))": "blocked loops",
                "sum(increase(worqr_peer_counts_lost_total[$__rate_interval]))": "runs that were not counted",
            },
        ),
    ),
    "Schedules": (
        ("Time to the next firing", "s", {"worqr_schedule_next_timestamp_seconds - time()": "{{schedule}}"}),
        ("Time since the last firing", "s", {"time() - worqr_schedule_last_timestamp_seconds": "{{schedule}}"}),
        ("Last run failed", "short", {"worqr_schedule_last_failed > 0": "{{schedule}}"}),
        ("Last run", "s", {"worqr_schedule_last_seconds": "{{schedule}}"}),
        ("Schedules", "short", {"worqr_schedules": "{{kind}}", "worqr_schedules_late > 0": "late"}),
        ("Paused", "short", {"worqr_schedule_paused > 0": "{{schedule}}"}),
        ("Firings that wait to be enqueued", "short", {"worqr_schedule_pending > 0": "{{schedule}}"}),
    ),
    "Topics": (
        ("Events", "ops", {"rate(worqr_events_total[$__rate_interval])": "{{event}}"}),
        ("Events that some queue has not got", "short", {"worqr_events_pending": "events"}),
        (
            "Events by subscriber",
            "ops",
            {f"rate(worqr_subscriber_events_total{{{Q}}}[$__rate_interval])": "{{queue}} {{event}}"},
        ),
        ("Since a worker has declared it", "s", {f"worqr_subscriber_seen_seconds{{{Q}}}": "{{queue}}"}),
    ),
    "Limits with a name": (
        (
            "In use",
            "short",
            {"worqr_limit_held": "{{limit}}", "worqr_limit_concurrency": "{{limit}} at most"},
        ),
        (
            "In the last period",
            "short",
            {"worqr_limit_used": "{{limit}} {{unit}}", "worqr_limit_rate": "{{limit}} {{unit}} at most"},
        ),
        (
            "Waiting, and of dead programs",
            "short",
            {"worqr_limit_waiting": "{{limit}}", "worqr_limit_expired > 0": "{{limit}} of dead programs"},
        ),
    ),
    "Outboxes": (
        ("Rows", "short", {"worqr_outbox_rows": "{{table}} {{state}}"}),
        ("Oldest row", "s", {"worqr_outbox_oldest_seconds": "{{table}}"}),
        ("Without a worker", "s", {"worqr_outbox_unseen_seconds > 0": "{{table}}"}),
    ),
    "Server": (
        ("Memory", "bytes", {"worqr_server_memory_bytes": "used", "worqr_server_max_bytes > 0": "limit"}),
        ("Connections of the server", "short", {"worqr_server_clients": "connections"}),
        ("Keeps everything", "short", {"worqr_server_keeps_everything": "noeviction"}),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        for n, panel in enumerate(row):
            panels.append(_panel(panel, x=n % 3 * WIDTH, y=y + 1 + n // 3 * HEIGHT))
        y += 1 + (len(row) + 2) // 3 * HEIGHT
    for n, each in enumerate(panels):
        each["id"] = n + 1
    queues = _variable(
        "queue", "Queue", "query", {"query": "label_values(worqr_queue_waiting, queue)", "refId": "queues"}
    )
    queues |= {"datasource": SOURCE, "includeAll": True, "multi": True, "allValue": ".*", "refresh": 2, "sort": 1}
    queues["current"] = {"text": "All", "value": "$__all"}
    return {
        "uid": "worqr",
        "title": "worqr",
        "tags": ["worqr"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": [_variable("source", "Data source", "datasource", "prometheus"), queues]},
        "panels": panels,
    }


def _variable(name: str, label: str, kind: str, query: object) -> dict[str, Any]:
    return {"name": name, "label": label, "type": kind, "query": query}


def _panel(panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    title, unit, queries = panel
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for n, (query, legend) in enumerate(queries.items())
        ],
    }


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text(), "utf-8")
