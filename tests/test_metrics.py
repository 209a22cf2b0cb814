"""The metrics of a peer: each is there, says what is so, and costs the application nothing that it did not ask for."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import worqr
from tests.peer.tools import Held, spying, until
from tests.support.children import ROOT
from tests.support.http import get
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.test_probes import Patient
from worqr import probes
from worqr.client.inspection import OutboxInfo
from worqr.cron import Schedule, ScheduleOutcome
from worqr.history_records import RUN_BOUNDS, RUN_FIELDS, WAIT_BOUNDS, WAIT_FIELDS
from worqr.hosting.peer_thread import no_health
from worqr.limits import LimitInfo
from worqr.link import ServerStats
from worqr.metrics import peer_collector
from worqr.metrics.fleet import EVENTS, FLEET, OTHER, PEER, FleetMetrics, FleetReader, FleetSnapshot
from worqr.metrics.prometheus import exposition, fleet_collector
from worqr.validation import from_ms


def without_part(name: str) -> str:
    """The metric of a sample: that of a histogram has several."""
    return re.sub("_(bucket|count|sum)$", "", name)


def values(text: str) -> dict[str, float]:
    """``name{label="value"}`` -> value, of a scrape."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


# Of a peer


async def test_a_peer_has_every_metric(server: Server, prefix: str) -> None:
    mesh, held = worqr.Mesh(server.url, prefix=prefix), Held()
    registry = CollectorRegistry()
    async with mesh.join(concurrency=7) as peer, trio.open_nursery() as nursery:
        registry.register(peer_collector(peer))
        await nursery.start(partial(peer.serve, "Q1", held))
        await mesh.queue("Q1").enqueue(b"x")
        await held.wait(1)
        with probes.serve(peer, "127.0.0.1:0") as address, trio.fail_after(PATIENCE):
            scrape = partial(trio.to_thread.run_sync, get, address, "/metrics")
            reply = await scrape()
            while values(reply.text)["worqr_peer_room"] != 6:  # there is none while tasks are being requested
                reply = await scrape()
        assert reply.status == 200
        assert reply.type.startswith("text/plain; version=")
        found = values(reply.text)
        assert found.keys() == PEER.keys() - {"worqr_peer_runs_total"}  # none has ended
        expected = {
            "alive": 1,
            "ready": 1,
            "running": 1,
            "room": 6,
            "concurrency": 7,
            "stuck": 0,
            "link_up": 1,
            "children": 0,
        }
        assert {name: found[f"worqr_peer_{name}"] for name in expected} == expected
        counters = {name for name, metric in PEER.items() if metric.kind == "counter" and not metric.labels}
        assert {name: found[name] for name in counters} == {
            **dict.fromkeys(counters, 0),
            "worqr_peer_registrations_total": 1,
        }
        assert 0 <= found["worqr_peer_beat_age_seconds"] < PATIENCE
        assert registry.get_sample_value("worqr_peer_running") == 1
        held.gate.set()
        await until(lambda: registry.get_sample_value("worqr_peer_runs_total", {"queue": "Q1", "outcome": "ok"}) == 1)
        nursery.cancel_scope.cancel()


def test_a_scrape_may_ask_for_openmetrics(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    mesh.task(name="f")(lambda: None)
    with mesh.join_in_thread() as peer, probes.serve(peer, "127.0.0.1:0") as address:
        reply = get(address, "/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert reply.type.startswith("application/openmetrics-text")
        assert {family.name for family in openmetrics(reply.text)} == {
            name.removesuffix("_total") for name in PEER if name != "worqr_peer_runs_total"
        }


def test_a_peer_that_has_not_joined_has_what_is_known() -> None:
    peer = Patient(no_health("not started"))
    with probes.serve(peer, "127.0.0.1:0") as address:
        found = values(get(address, "/metrics").text)
    assert found == {f"worqr_peer_{name}": 0 for name in ("alive", "ready", "running", "room", "loop_lag_seconds")}


@pytest.mark.one_server
async def test_what_goes_wrong_is_counted(own_server: Server, prefix: str) -> None:
    """The server is killed, the loop is blocked, and the worker is declared dead."""
    mesh = worqr.Mesh(own_server.url, prefix=prefix, keepalive=1800)
    registry = CollectorRegistry()

    def count(name: str) -> float:
        return registry.get_sample_value(f"worqr_peer_{name}") or 0

    async with mesh.join() as peer:
        registry.register(peer_collector(peer))
        own_server.kill()
        await until(lambda: not count("link_up") and count("beats_failed_total") > 0)
        failed = count("beats_failed_total")
        own_server.start()
        await until(lambda: count("link_up") == 1 and count("reconnects_total") == 1)
        await until(lambda: count("beat_age_seconds") < 1)
        blocked = threading.Event()
        with probes.serve(peer, "127.0.0.1:0") as address:

            def watch() -> None:
                while not values(get(address, "/metrics").text)["worqr_peer_loop_blocked_total"]:
                    pass
                blocked.set()

            thread = threading.Thread(target=watch)
            thread.start()
            assert blocked.wait(PATIENCE)  # the loop is blocked until it is counted
            thread.join()
        await until(lambda: count("loop_lag_seconds") < 1)
        await mesh.evict(peer.id)
        await until(lambda: count("registrations_total") == 2)
        assert count("beats_failed_total") >= failed, "those of the first registration still count"
        assert count("loop_blocked_total") >= 1


# The extra


def test_without_the_extra_the_reply_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from worqr import probes; from tests.support.http import get; from tests.test_probes import Patient\n"
        "from worqr.hosting.peer_thread import no_health\n"
        "with probes.serve(Patient(no_health('not started')), '127.0.0.1:0') as address:\n"
        "    print(*get(address, '/metrics')[:2], get(address, '/ready').status)\n"
        "from worqr.cli import main; print(main(['metrics']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sentence = "worqr.metrics needs the Prometheus client: pip install 'worqr[metrics]'"
    assert done.stdout == f"501 {sentence}\n 503\n1\n"
    assert f"worqr: {sentence}\n" in done.stderr


def test_nothing_is_imported_that_was_not_asked_for() -> None:
    code = (
        "import sys, worqr, worqr.probes, worqr.cli.run; worqr.Mesh, worqr.Peer\n"
        "print([name for name in sys.modules if 'prometheus' in name or name.startswith('worqr.metrics')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_global_registry_is_left_alone() -> None:
    code = (
        "import prometheus_client, worqr.metrics.prometheus\n"
        "print('worqr' in prometheus_client.generate_latest().decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Of a mesh


def queue(name: str, waiting: int = 0, **counts: int) -> worqr.QueueInfo:
    return worqr.QueueInfo(
        name, waiting, 2, 3, 4, 5, 6, None, None, 1, counts, age=7.5, age_estimated=True, suspended=9
    )


def mesh_info(
    *queues: worqr.QueueInfo, leader: str | None = "w", left_out: int = 0, others: worqr.QueueInfo | None = None
) -> worqr.MeshInfo:
    apps = {"a": worqr.AppInfo(2, 6, 194), "b": worqr.AppInfo(1, 3, 97)}
    return worqr.MeshInfo(from_ms(0), "leader", 1.5, leader, queues, left_out, others, apps)


RAN = {"ok": 6, "raised": 1, "r0": 1, "r2": 2, "r3": 1, "r19": 2, "rs": 9_500, "w1": 3, "w15": 1, "ws": 400}


FAILED = ScheduleOutcome("failed", from_ms(3000), 1.5, from_ms(2000), "ValueError", "no")
LIMIT = LimitInfo("openai", 20, 3, 500, 60.0, "tokens", 40, 2, 1)
OUTBOX = OutboxInfo("a", "worqr_outbox", 3, 7.5, 1, 0, 0.0)


def scraped(
    fleet: FleetMetrics,
    mesh: worqr.MeshInfo,
    runs: Mapping[str, Mapping[str, int]] | None = None,
    subscribed: Mapping[str, float] | None = None,
) -> dict[str, float]:
    schedules = [
        Schedule("s", from_ms(5000), from_ms(2000), paused=True, pending=3, last_outcome=FAILED),
        Schedule("t", from_ms(5000), None, paused=False),
    ]
    stats = ServerStats(1, 2, keeps_everything=True, clients=3)
    snapshot = FleetSnapshot(mesh, 1, schedules, runs or {}, stats, [OUTBOX], 2, 7, 1, subscribed or {}, [LIMIT])
    text, _ = exposition(fleet_collector(fleet.samples(snapshot)), "")
    return values(text.decode())


def test_a_mesh_has_every_metric() -> None:
    limited = replace(queue("q", 1, finished=10, timed_out=1), held_back="rate", held_for=2.5, lanes=3, held_lanes=1)
    limited = replace(limited, batches=9, open_batches=2, relay_pending=True)
    publishing = queue("worqr.publish", 1, enqueued=8, retried=2)
    found = scraped(FleetMetrics(300), mesh_info(limited, publishing), {"q": RAN}, {"q": 60.0})
    assert {without_part(name.partition("{")[0]) for name in found} == FLEET.keys()
    for name, value in {
        "worqr_up": 1,
        "worqr_has_leader": 1,
        "worqr_snapshot_age_seconds": 1.5,
        "worqr_queues_not_shown": 0,
        'worqr_workers{app="a"}': 2,
        'worqr_workers{app="b"}': 1,
        'worqr_worker_running{app="a"}': 6,
        'worqr_worker_room{app="a"}': 194,
        "worqr_workers_dying": 1,
        'worqr_queue_waiting{queue="q"}': 1,
        'worqr_queue_scheduled{queue="q"}': 2,
        'worqr_queue_blocked{queue="q"}': 3,
        'worqr_queue_suspended{queue="q"}': 9,
        'worqr_queue_running{queue="q"}': 4,
        'worqr_queue_dead_letters{list="failed",queue="q"}': 5,
        'worqr_queue_dead_letters{list="undecodable",queue="q"}': 6,
        'worqr_queue_workers{queue="q"}': 1,
        'worqr_queue_paused{queue="q"}': 0,
        'worqr_queue_held_back{queue="q"}': 1,
        'worqr_queue_held_for_seconds{queue="q"}': 2.5,
        'worqr_queue_lanes{queue="q"}': 3,
        'worqr_queue_held_lanes{queue="q"}': 1,
        'worqr_queue_batches{queue="q"}': 2,
        'worqr_queue_relay_pending{queue="q"}': 1,
        'worqr_queue_age_seconds{queue="q"}': 7.5,
        'worqr_queue_age_estimated{queue="q"}': 1,
        'worqr_tasks_total{event="finished",queue="q"}': 10,
        'worqr_tasks_total{event="timed_out",queue="q"}': 1,
        'worqr_tasks_total{event="stalled",queue="q"}': 0,
        'worqr_schedule_next_timestamp_seconds{schedule="s"}': 5,
        'worqr_schedule_last_timestamp_seconds{schedule="s"}': 2,
        'worqr_runs_total{outcome="ok",queue="q"}': 6,
        'worqr_runs_total{outcome="raised",queue="q"}': 1,
        'worqr_runs_total{outcome="lost",queue="q"}': 0,
        'worqr_run_seconds_bucket{le="0.004",queue="q"}': 3,
        'worqr_run_seconds_bucket{le="0.016",queue="q"}': 4,
        'worqr_run_seconds_bucket{le="262.144",queue="q"}': 4,
        'worqr_run_seconds_bucket{le="+Inf",queue="q"}': 6,
        'worqr_run_seconds_count{queue="q"}': 6,
        'worqr_run_seconds_sum{queue="q"}': 9.5,
        'worqr_wait_seconds_bucket{le="0.004",queue="q"}': 3,
        'worqr_wait_seconds_bucket{le="+Inf",queue="q"}': 4,
        'worqr_wait_seconds_sum{queue="q"}': 0.4,
        'worqr_schedule_pending{schedule="s"}': 3,
        'worqr_schedule_pending{schedule="t"}': 0,
        'worqr_schedules{kind="declared"}': 2,
        'worqr_schedules{kind="stored"}': 7,
        "worqr_schedules_late": 1,
        'worqr_events_total{event="published"}': 8,
        'worqr_events_total{event="retried"}': 2,
        'worqr_events_total{event="failed"}': 0,
        "worqr_events_pending": 1 + 2 + 4,
        'worqr_subscriber_seen_seconds{queue="q"}': 60,
        'worqr_subscriber_events_total{event="delivered",queue="q"}': 0,
        'worqr_schedule_last_failed{schedule="s"}': 1,
        'worqr_schedule_last_seconds{schedule="s"}': 1.5,
        'worqr_schedule_paused{schedule="s"}': 1,
        'worqr_schedule_paused{schedule="t"}': 0,
        'worqr_limit_held{limit="openai"}': 3,
        'worqr_limit_concurrency{limit="openai"}': 20,
        'worqr_limit_used{limit="openai",unit="tokens"}': 40,
        'worqr_limit_rate{limit="openai",unit="tokens"}': 500,
        'worqr_limit_waiting{limit="openai"}': 2,
        'worqr_limit_expired{limit="openai"}': 1,
        "worqr_server_memory_bytes": 1,
        "worqr_server_max_bytes": 2,
        "worqr_server_keeps_everything": 1,
        "worqr_server_clients": 3,
    }.items():
        assert found[name] == value, name
    assert 'worqr_schedule_last_timestamp_seconds{schedule="t"}' not in found
    assert 'worqr_schedule_last_failed{schedule="t"}' not in found


def test_a_queue_without_runs_and_without_tasks_has_no_series_of_them() -> None:
    found = scraped(FleetMetrics(300), mesh_info(replace(queue("q"), age=None)))
    absent = ("worqr_runs", "worqr_run_", "worqr_wait_", "worqr_queue_age_")
    assert not [name for name in found if name.startswith(absent)]


@pytest.mark.parametrize("field", [*RUN_FIELDS, *WAIT_FIELDS])
def test_a_histogram_has_each_bucket_below_its_bound(field: str) -> None:
    found = scraped(FleetMetrics(300), mesh_info(queue("q")), {"q": {field: 1}})
    name, bounds = ("run", RUN_BOUNDS) if field in RUN_FIELDS else ("wait", WAIT_BOUNDS)
    upper = (*bounds, math.inf)[int(field[1:])]
    for le in (4**i / 1000 for i in range(1, 10)):
        assert found[f'worqr_{name}_seconds_bucket{{le="{le}",queue="q"}}'] == (upper <= le)
    assert found[f'worqr_{name}_seconds_bucket{{le="+Inf",queue="q"}}'] == 1


def test_too_many_queues_are_summed_up_and_those_that_were_shown_stay() -> None:
    fleet = FleetMetrics(2)
    found = scraped(
        fleet,
        mesh_info(queue("a", 1), queue("b", 20, finished=1), queue("c", 30, finished=5), queue("d", 2, finished=7)),
        {"a": RAN, "b": RAN, "d": RAN},
    )
    assert found["worqr_queues_not_shown"] == 2
    assert {name for name in found if name.startswith("worqr_queue_waiting")} == {
        f'worqr_queue_waiting{{queue="{name}"}}' for name in ("b", "c", OTHER)
    }
    assert found[f'worqr_queue_waiting{{queue="{OTHER}"}}'] == 3
    assert found[f'worqr_tasks_total{{event="finished",queue="{OTHER}"}}'] == 7
    assert f'worqr_queue_paused{{queue="{OTHER}"}}' not in found
    assert found[f'worqr_runs_total{{outcome="ok",queue="{OTHER}"}}'] == 12
    assert found['worqr_runs_total{outcome="ok",queue="b"}'] == 6
    assert found[f'worqr_run_seconds_bucket{{le="+Inf",queue="{OTHER}"}}'] == 12
    found = scraped(fleet, mesh_info(queue("a", 99), queue("c"), queue("d", 100)))  # b has gone, c is idle
    assert 'worqr_queue_waiting{queue="c"}' in found
    assert 'worqr_queue_waiting{queue="d"}' in found
    assert found[f'worqr_queue_waiting{{queue="{OTHER}"}}'] == 99


def test_subscribers_have_series_if_their_queues_have() -> None:
    queues = [queue(name, n, enqueued=n, refused=1) for n, name in enumerate("abc")]
    found = scraped(FleetMetrics(1), mesh_info(*queues), subscribed=dict.fromkeys("abcd", 1.0))
    assert {name: value for name, value in found.items() if "subscriber" in name} == {
        'worqr_subscriber_seen_seconds{queue="c"}': 1,
        'worqr_subscriber_events_total{event="delivered",queue="c"}': 2,
        'worqr_subscriber_events_total{event="refused",queue="c"}': 1,
        f'worqr_subscriber_events_total{{event="delivered",queue="{OTHER}"}}': 1,
        f'worqr_subscriber_events_total{{event="refused",queue="{OTHER}"}}': 2,
    }


def test_queues_that_the_snapshot_leaves_out_count_among_the_others() -> None:
    mesh = mesh_info(queue("a", 5), queue("b", 1), leader=None, left_out=7, others=queue("", 10, finished=2))
    found = scraped(FleetMetrics(1), mesh)
    assert (found["worqr_queues_not_shown"], found["worqr_has_leader"]) == (8, 0)
    assert found[f'worqr_queue_waiting{{queue="{OTHER}"}}'] == 11
    assert found[f'worqr_tasks_total{{event="finished",queue="{OTHER}"}}'] == 2


def finished_in_others(fleet: FleetMetrics, mesh: worqr.MeshInfo) -> float:
    return scraped(fleet, mesh)[f'worqr_tasks_total{{event="finished",queue="{OTHER}"}}']


def test_the_counters_of_the_others_do_not_fall_when_a_queue_leaves_them() -> None:
    fleet, shown = FleetMetrics(1), queue("shown", 9)
    assert finished_in_others(fleet, mesh_info(shown, queue("a", finished=100), queue("b", finished=50))) == 150
    assert finished_in_others(fleet, mesh_info(shown, queue("a", finished=101))) == 151, "b is not in use any more"
    assert finished_in_others(fleet, mesh_info(shown, queue("a", finished=101), queue("b", finished=52))) == 153
    assert finished_in_others(fleet, mesh_info(queue("a", 1, finished=104), queue("b", finished=52))) == 153
    assert finished_in_others(fleet, mesh_info(shown, queue("a", 1, finished=105), queue("b", finished=3))) == 153
    assert finished_in_others(fleet, mesh_info(shown, queue("a", 1, finished=105), queue("b", finished=5))) == 155


def test_queues_that_the_snapshot_names_by_turns_change_no_sum() -> None:
    fleet, shown = FleetMetrics(1), queue("shown", 9)
    for named, left_out, total in ((10, 500, 510), (500, 10, 510), (11, 501, 512), (502, 11, 513), (13, 502, 515)):
        mesh = mesh_info(
            shown, queue(f"q{named < 100}", finished=named), left_out=1, others=queue("", finished=left_out)
        )
        assert finished_in_others(fleet, mesh) == total


def test_subscribers_and_runs_that_are_not_shown_do_not_fall() -> None:
    fleet, subscribed = FleetMetrics(1), dict.fromkeys("ab", 1.0)
    busy, a, b = queue("busy", 9), queue("a", enqueued=5), queue("b", enqueued=7)
    delivered = f'worqr_subscriber_events_total{{event="delivered",queue="{OTHER}"}}'
    ran = f'worqr_runs_total{{outcome="ok",queue="{OTHER}"}}'
    found = scraped(fleet, mesh_info(busy, a, b), {"a": RAN, "b": RAN}, subscribed)
    assert (found[delivered], found[ran]) == (12, 12)
    found = scraped(fleet, mesh_info(busy, a), {"a": RAN}, subscribed)
    assert (found[delivered], found[ran]) == (12, 12)


def test_the_number_of_lines_is_bounded() -> None:
    queues = [queue(f"q{n}", n, **dict.fromkeys(EVENTS, n)) for n in range(1000)]
    subscribed = {info.name: 1.0 for info in queues}
    found = scraped(FleetMetrics(300), mesh_info(*queues), {info.name: RAN for info in queues}, subscribed)
    assert len([name for name in found if "queue=" in name]) <= 301 * 67
    assert found["worqr_queues_not_shown"] == 700


def test_names_of_any_kind_are_labels() -> None:
    name = 'a "b"\\c\u202e{d}'
    found = scraped(FleetMetrics(300), mesh_info(queue(name)))
    assert found[f'worqr_queue_waiting{{queue="{name}"}}'] == 0


def test_a_server_that_is_away_leaves_one_metric() -> None:
    text, _ = exposition(fleet_collector(FleetMetrics(300).samples(None)), "")
    assert values(text.decode()) == {"worqr_up": 0}


@pytest.mark.one_server
@pytest.mark.leaves("*")
async def test_a_scrape_reads_only_the_limits_that_it_shows(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        for name in "dbca":
            async with mesh.limit(worqr.Limit(1, name=name)):
                pass
        monkeypatch.setattr("worqr.metrics.fleet.MAX_LIMITS", 2)
        with spying(server, prefix) as spy:
            found = await FleetReader(mesh).read()
            assert spy.calls()["look_at_limit"] == 2
    assert [limit.name for limit in found.limits] == ["a", "b"]


def test_an_outbox_has_its_rows_by_state_and_two_databases_are_added_up() -> None:
    boxes = [OUTBOX, OutboxInfo("b", "worqr_outbox", 2, 1.0, 0, 4, 90.0)]
    snapshot = FleetSnapshot(
        worqr.MeshInfo(from_ms(0), "leader", 1.5, "", [], 0, None, {}),
        0,
        [],
        {},
        ServerStats(1, 2, keeps_everything=True, clients=3),
        boxes,
    )
    text, _ = exposition(fleet_collector(FleetMetrics(9).samples(snapshot)), "")
    found = {name: value for name, value in values(text.decode()).items() if "outbox" in name}
    assert found == {
        'worqr_outbox_rows{state="waiting",table="worqr_outbox"}': 5,
        'worqr_outbox_rows{state="failed",table="worqr_outbox"}': 1,
        'worqr_outbox_rows{state="held",table="worqr_outbox"}': 4,
        'worqr_outbox_oldest_seconds{table="worqr_outbox"}': 7.5,
        'worqr_outbox_unseen_seconds{table="worqr_outbox"}': 90,
    }
