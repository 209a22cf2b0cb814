"""Metrics by OpenTelemetry: they are those for Prometheus, and one look at the server serves all instruments."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint

import worqr
from tests.peer.tools import Held, until
from tests.support.children import ROOT
from tests.support.servers import Server
from tests.test_metrics import FAILED, LIMIT, OUTBOX, RAN, mesh_info, queue, values
from worqr.cron import Schedule
from worqr.link import ServerStats
from worqr.metrics import peer_collector
from worqr.metrics.fleet import FLEET, PEER, FleetMetrics, FleetSnapshot, Samples
from worqr.metrics.prometheus import exposition, fleet_collector
from worqr.otel import measure_mesh, measure_workers, observe
from worqr.validation import from_ms

DURATION = "messaging.process.duration"
INSTRUMENTS = {
    full
    for name, metric in FLEET.items()
    for full in ([f"{name}_{part}" for part in ("bucket", "sum", "count")] if metric.kind == "histogram" else [name])
}


class Exported:
    """What a reader of the SDK collects."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        assert {scope.scope.name for scope in scopes} <= {"worqr"}
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def values(self) -> dict[str, float]:
        """``name{label="value"}`` -> value, as Prometheus has it, without histograms."""
        found: dict[str, float] = {}
        for name, metric in self.metrics().items():
            for point in metric.data.data_points:
                if isinstance(point, NumberDataPoint):
                    labels = ",".join(f'{label}="{value}"' for label, value in sorted((point.attributes or {}).items()))
                    found[f"{name}{{{labels}}}" if labels else name] = point.value
        return found

    def durations(self) -> dict[tuple[Any, ...], HistogramDataPoint]:
        """By outcome and type of error."""
        metric = self.metrics()[DURATION]
        assert metric.unit == "s"
        return {
            (point.attributes["worqr.outcome"], point.attributes.get("error.type")): point
            for point in metric.data.data_points
        }


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.provider.shutdown()


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix)


# Of workers


async def test_a_worker_has_the_metrics_that_prometheus_gets(mesh: worqr.Mesh, exported: Exported) -> None:
    held = Held()
    measure_workers(mesh, meter_provider=exported.provider)
    assert exported.values() == {}, "no peer has joined"
    async with mesh.join(concurrency=7) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", held))
        await mesh.queue("Q1").enqueue(b"x", b"y")
        await held.wait(2)
        found = exported.values()  # in the loop: nothing waits
        text, _ = exposition(peer_collector(peer), "")
        assert found.keys() == values(text.decode()).keys() == PEER.keys() - {"worqr_peer_runs_total"}
        expected = {"alive": 1, "running": 2, "room": 5, "concurrency": 7, "link_up": 1, "registrations_total": 1}
        assert {name: found[f"worqr_peer_{name}"] for name in expected} == expected
        held.gate.set()
        counted = 'worqr_peer_runs_total{outcome="ok",queue="Q1"}'
        await until(lambda: exported.values().get(counted) == 2)
        async with mesh.join(concurrency=3):
            assert exported.values()["worqr_peer_concurrency"] == 3, "that which joined last"
        assert exported.values()["worqr_peer_concurrency"] == 7
        nursery.cancel_scope.cancel()
    assert exported.values() == {}, "it has left"


@pytest.mark.leaves("{Q1}:failed", "{Q1}:broken", "{Q1}:aside*")
async def test_the_duration_of_each_run_is_recorded_with_its_outcome(mesh: worqr.Mesh, exported: Exported) -> None:
    measure_workers(mesh, meter_provider=exported.provider)
    waits = trio.Event()

    @mesh.task(name="Q1", timeout=0.05, retry=worqr.RetryPolicy(max_timeouts=1, min_backoff=0, max_backoff=0))
    async def work(how: str) -> None:
        if how == "late":
            await trio.sleep_forever()
        elif how == "retry" and worqr.current().attempt == 1:
            raise worqr.Retry
        elif how == "raise" and worqr.current().attempt == 1:
            raise ValueError("the payload, perhaps")
        elif how == "fail":
            raise worqr.Failure("no")

    @mesh.task(name="Q2")
    async def wait() -> None:
        waits.set()
        await trio.sleep_forever()

    async with mesh.join():
        await mesh.enqueue_many([work.call(how) for how in ("fine", "late", "retry", "raise", "fail")])
        job = await wait.dispatch()
        await waits.wait()
        await job.cancel(wait=30)
        await until(lambda: sum(point.count for point in exported.durations().values()) == 8)
        await mesh.queue("Q1").failed.drop_all()
    found = exported.durations()
    assert {key: point.count for key, point in found.items()} == {
        ("ok", None): 3,
        ("retry", None): 1,
        ("cancel", None): 1,
        ("timeout", "timeout"): 1,
        ("raised", "ValueError"): 1,
        ("failure", "worqr.Failure"): 1,
    }
    late = found["timeout", "timeout"]
    assert late.sum >= 0.05
    assert (late.explicit_bounds[0], late.explicit_bounds[-1]) == (0.005, 10)
    assert dict(late.attributes or {}) == {
        "messaging.system": "worqr",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "Q1",
        "worqr.outcome": "timeout",
        "error.type": "timeout",
    }


def test_the_workers_of_a_mesh_are_measured_once(mesh: worqr.Mesh, exported: Exported) -> None:
    measure_workers(mesh, meter_provider=exported.provider)
    with pytest.raises(worqr.UsageError, match=r"are measured already: call measure_workers\(mesh\) once"):
        measure_workers(mesh, meter_provider=exported.provider)


async def test_a_mesh_that_is_not_measured_has_no_metrics(mesh: worqr.Mesh, exported: Exported) -> None:
    done = trio.Event()

    @mesh.task(name="Q1")
    async def work() -> None:
        done.set()

    async with mesh.join():
        await mesh.queue("Q1").enqueue(b"{}")
        await done.wait()
        assert exported.metrics() == {}


# Of a mesh


def test_a_mesh_has_the_values_that_prometheus_gets(exported: Exported) -> None:
    schedules = [Schedule("s", from_ms(5000), from_ms(2000), paused=True, last_outcome=FAILED)]
    stats = ServerStats(1, 2, keeps_everything=True, clients=3)
    queues = queue('a "b"\\c', 1, finished=10), replace(queue("q", 2), held_for=2.5), queue("worqr.publish", 1)
    info = mesh_info(*queues, left_out=3)
    snapshot = FleetSnapshot(info, 1, schedules, {"q": RAN}, stats, [OUTBOX], subscribed={"q": 1.0}, limits=[LIMIT])
    samples = FleetMetrics(300).samples(snapshot)
    observe(exported.provider.get_meter("worqr"), FLEET, lambda: samples)
    text, _ = exposition(fleet_collector(samples), "")
    found = exported.metrics()
    assert found.keys() == INSTRUMENTS
    assert exported.values() == values(text.decode())
    for name, metric in found.items():
        assert metric.unit == "", "an exporter for Prometheus would add it to the name"
        assert "`" not in metric.description
        assert getattr(metric.data, "is_monotonic", False) == name.endswith("_total")


async def test_a_mesh_is_read_in_the_thread_of_the_exporter(mesh: worqr.Mesh, exported: Exported) -> None:
    measure_mesh(mesh, meter_provider=exported.provider)
    collect = partial(trio.to_thread.run_sync, exported.values)

    @mesh.task(name="Q1", result_ttl=60)
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.connect():
        await double.enqueue(1)
        found = await collect()
        assert found['worqr_queue_waiting{queue="Q1"}'] == 1
        assert (found["worqr_up"], found["worqr_has_leader"]) == (1, 0)
        assert exported.values() == {}, "the loop does not wait for the server"
    async with mesh.join():
        await (await double.dispatch(2)).result()
        counted = {  # the server is read in two steps: at first, one of them may be behind the other
            'worqr_run_seconds_count{queue="Q1"}',
            'worqr_run_seconds_bucket{le="+Inf",queue="Q1"}',
            'worqr_tasks_total{event="finished",queue="Q1"}',
        }
        with trio.fail_after(60):
            while {(found := await collect()).get(name) for name in counted} != {2}:
                await trio.sleep(0.05)
    assert found["worqr_server_memory_bytes"] > 0


@pytest.mark.one_server
def test_a_server_that_is_away_leaves_one_metric(own_server: Server, prefix: str, exported: Exported) -> None:
    measure_mesh(worqr.Mesh(own_server.url, prefix=prefix), meter_provider=exported.provider)
    own_server.kill()
    assert exported.values() == {"worqr_up": 0}, "also if it was never there"
    own_server.start()
    while exported.values()["worqr_up"] == 0:
        pass  # each collection waits for up to 1.5 s
    assert "worqr_has_leader" in exported.values()
    own_server.kill()
    while exported.values()["worqr_up"] == 1:
        pass
    assert exported.values() == {"worqr_up": 0}


@pytest.mark.one_server
def test_a_mesh_is_read_as_its_own_user(server: Server, prefix: str, exported: Exported) -> None:
    asked: list[str] = []

    def credentials() -> tuple[str, str]:
        asked.append(prefix)
        return prefix, "secret"

    with server.client() as client:
        client.execute_command("ACL", "SETUSER", prefix, "on", ">secret", "~*", "&*", "+@all")
        try:
            mesh = worqr.Mesh(server.tcp_url, prefix=prefix, credentials=credentials)
            measure_mesh(mesh, meter_provider=exported.provider)
            assert exported.values()["worqr_up"] == 1
        finally:
            client.execute_command("ACL", "DELUSER", prefix)
    assert asked


@pytest.mark.parametrize("n", [0, -1, True, "10", None])
def test_a_bad_number_of_queues_is_refused(mesh: worqr.Mesh, exported: Exported, n: Any) -> None:
    with pytest.raises(worqr.UsageError, match="max_queues"):
        measure_mesh(mesh, max_queues=n, meter_provider=exported.provider)
    assert exported.metrics() == {}


# One look


class Looks:
    """Values that tell which look they are of."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Samples:
        self.count += 1
        samples = Samples()
        for name, metric in FLEET.items():
            if metric.kind != "histogram" and not metric.labels:
                samples.add(name, self.count)
        return samples


def test_a_collection_looks_once(exported: Exported) -> None:
    looks = Looks()
    observe(exported.provider.get_meter("worqr"), FLEET, looks)
    for n in (1, 2, 3):
        found = exported.values()
        assert len(found) > 5
        assert set(found.values()) == {n}


def test_two_exporters_may_collect_at_once() -> None:
    readers, looks = [InMemoryMetricReader(), InMemoryMetricReader()], Looks()
    provider = MeterProvider(readers)
    observe(provider.get_meter("worqr"), FLEET, looks)
    threads = [threading.Thread(target=reader.get_metrics_data) for reader in readers for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert looks.count >= 2
    provider.shutdown()


def test_an_error_is_logged_once_and_leaves_no_values(exported: Exported, caplog: pytest.LogCaptureFixture) -> None:
    looks = Looks()

    def look() -> Samples:
        if looks.count == 1:
            looks.count += 1
            raise worqr.RefusedByServer("NOPERM")
        return looks()

    observe(exported.provider.get_meter("worqr"), FLEET, look)
    assert set(exported.values().values()) == {1}
    caplog.clear()
    assert exported.values() == {}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert set(exported.values().values()) == {3}


def test_no_prometheus_client_is_needed() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import worqr; from worqr.otel import measure_mesh, measure_workers\n"
        "mesh = worqr.Mesh(); measure_mesh(mesh); measure_workers(mesh); print('measured')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "measured\n"
