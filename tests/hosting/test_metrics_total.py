"""The sum of the metrics of several workers: what is added, what is the largest, and what stays when a worker has ended."""

from __future__ import annotations

from typing import Any

import pytest

from worqr.hosting import supervisor
from worqr.hosting.supervisor import Limits, MetricsTotal, Plan
from worqr.http_server import HttpReply, HttpRequest

# pyright: reportPrivateUsage=false


def metrics(running: int, lag: float, runs: dict[str, int], registrations: int = 1) -> str:
    counted = "".join(f'worqr_peer_runs_total{{outcome="finished",queue="{name}"}} {n}.0\n' for name, n in runs.items())
    return (
        f"# HELP worqr_peer_running Tasks that it runs.\n# TYPE worqr_peer_running gauge\nworqr_peer_running {running}.0\n"
        f"# HELP worqr_peer_loop_lag_seconds Lag.\n# TYPE worqr_peer_loop_lag_seconds gauge\nworqr_peer_loop_lag_seconds {lag}\n"
        "# HELP worqr_peer_registrations_total Joins.\n# TYPE worqr_peer_registrations_total counter\n"
        f"worqr_peer_registrations_total {registrations}.0\n"
        f"# HELP worqr_peer_runs_total Runs.\n# TYPE worqr_peer_runs_total counter\n{counted}"
    )


def test_values_are_added_and_of_gauges_in_seconds_the_largest_counts() -> None:
    total = MetricsTotal(2)
    found = total.text({0: metrics(3, 0.5, {"a b": 10}), 1: metrics(4, 0.25, {"a b": 1, "c{}": 5})})
    assert found == metrics(7, 0.5, {"a b": 11, "c{}": 5}, registrations=2)


def test_counters_never_fall_when_a_worker_is_renewed() -> None:
    total = MetricsTotal(2)
    first, second = metrics(3, 0.0, {"a": 10}), metrics(4, 0.0, {"a": 20})
    assert total.text({0: first, 1: second}) == metrics(7, 0.0, {"a": 30}, registrations=2)
    third = metrics(1, 0.0, {"a": 1})
    assert total.text({0: first, 1: second, 2: third}) == metrics(8, 0.0, {"a": 31}, registrations=2)
    total.ended(0, first)
    assert total.text({1: second, 2: third}) == metrics(5, 0.0, {"a": 31}, registrations=2)
    total.ended(2, metrics(1, 0.0, {"a": 2}, registrations=3))  # it was declared dead twice
    assert 'worqr_peer_runs_total{outcome="finished",queue="a"} 32.0' in total.text({1: second})
    assert "worqr_peer_registrations_total 4.0" in total.text({1: second})


def test_the_name_of_a_queue_may_have_a_separator_of_lines() -> None:
    total, text = MetricsTotal(1), metrics(0, 0.0, {"a\u2028b 1": 10})
    total.ended(0, text)
    assert 'queue="a\u2028b 1"} 20.0\n' in total.text({0: text})


def test_a_worker_without_metrics_adds_nothing() -> None:
    total = MetricsTotal(1)
    total.ended(0, "")
    assert total.text({1: ""}) == ""


def test_a_worker_that_ends_during_a_scrape_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndsWhenAsked:
        pid = 1

        def __init__(self, *_: object) -> None:
            pass

        @staticmethod
        def ask_all(children: list[Any], *_: str) -> list[HttpReply | None]:
            if children:
                parent._on_end(worker, 0)
            return [None] * len(children)

        def close(self) -> None:
            pass

    monkeypatch.setattr(supervisor, "ControlledChild", EndsWhenAsked)
    parent: Any = supervisor._Supervisor(Plan([], 1, Limits(), grace=0, probe=None))
    worker = supervisor._Worker(0, [], Limits(), "")
    worker.metrics = metrics(0, 0.0, {"a": 10})
    parent._workers.append(worker)
    for _ in range(2):
        assert b'queue="a"} 10.0' in parent.respond(HttpRequest("/metrics")).body
