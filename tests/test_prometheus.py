"""A real Prometheus scrapes a real mesh, with the configuration and the alerts that deploy/ has.

Without Debian's package ``prometheus`` these are skipped; ``WORQR_TEST_PROMETHEUS=1`` makes that a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

import worqr
from tests.peer.tools import until
from tests.support.children import ROOT, Child
from tests.support.http import get
from tests.support.servers import Server, free_port
from tests.test_metrics import without_part
from tools.grafana import dashboard
from worqr.metrics.fleet import FLEET, PEER

FOLDER = ROOT / "deploy" / "prometheus"
MISSING = not (shutil.which("prometheus") and shutil.which("promtool"))
LONG = 120.0
CLI = "import sys; from worqr.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = [pytest.mark.one_server, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _needs_prometheus() -> None:
    if MISSING:
        if os.environ.get("WORQR_TEST_PROMETHEUS") == "1":
            pytest.fail("prometheus and promtool are not installed: apt-get install prometheus")
        pytest.skip("needs prometheus and promtool: apt-get install prometheus")


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=LONG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    rules = yaml.safe_load((FOLDER / "worqr.rules.yaml").read_text("utf-8"))["groups"][0]["rules"]
    assert f"{len(rules)} rules found" in promtool("check", "rules", "worqr.rules.yaml")


def test_the_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "worqr.rules.test.yaml")
    tested = (FOLDER / "worqr.rules.test.yaml").read_text("utf-8")
    for alert in re.findall(r"alert: (\w+)", (FOLDER / "worqr.rules.yaml").read_text("utf-8")):
        assert alert in tested


@pytest.mark.parametrize(("paused", "age"), [(0, 999), (1, 0)])
def test_the_age_of_a_paused_queue_starts_no_workers(tmp_path: Path, paused: int, age: int) -> None:
    scaled = yaml.safe_load((ROOT / "deploy" / "keda" / "worker.yaml").read_text("utf-8"))
    [query] = [
        each["metadata"]["query"] for each in scaled["spec"]["triggers"] if "age" in each["metadata"].get("query", "")
    ]
    stored = {"worqr_queue_age_seconds": 999, "worqr_queue_paused": paused}
    series = [{"series": f'{name}{{queue="shop.send_mail"}}', "values": f"{n}x5"} for name, n in stored.items()]
    expected = {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": age}]}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": [expected]}]}), "utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_the_configuration_is_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yaml")


class Prometheus:
    """A Prometheus on a port of its own, which scrapes often. A scrape of a server that is away takes some 2 s."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "4s", "scrape_timeout": "4s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        text = yaml.safe_dump(config)
        for given, address in targets.items():
            assert given in text
            text = text.replace(given, address)
        path = folder / "prometheus.yaml"
        path.write_text(text, "utf-8")
        self.address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address={self.address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, path: str, **query: str) -> Any:
        try:
            reply = get(self.address, f"{path}?{urlencode(query)}")
        except OSError:
            return None
        return json.loads(reply.text).get("data") if reply.status == 200 and reply.text.startswith("{") else None

    def value(self, query: str) -> float | None:
        data = self.ask("/api/v1/query", query=query)
        return float(data["result"][0]["value"][1]) if data and data["result"] else None

    def names(self) -> set[str]:
        found = self.ask("/api/v1/label/__name__/values") or ()
        return {without_part(name) for name in found if name.startswith("worqr_")}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def scraping(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Prometheus]]:
    started: list[Prometheus] = []

    def start(targets: dict[str, str]) -> Prometheus:
        started.append(Prometheus(tmp_path, targets))
        return started[-1]

    yield start
    for each in started:
        each.close()


async def address_of(child: Child, pattern: str) -> str:
    await until(lambda: re.search(pattern, child.errors) is not None or child.process.poll() is not None, LONG)
    (found,) = re.findall(pattern, child.errors)
    return str(found)


@pytest.mark.leaves("*")
async def test_prometheus_scrapes_a_mesh(
    scraping: Callable[[dict[str, str]], Prometheus], spawn: Callable[..., Child], own_server: Server, prefix: str
) -> None:
    env = {"WORQR_URL": own_server.url}
    peer = spawn(CLI, "run", "tests.cli.app:mesh", "--prefix", prefix, "--probe", "127.0.0.1:0", env=env)
    exporter = spawn(CLI, "metrics", "--bind", "127.0.0.1:0", "--prefix", prefix, env=env)
    targets = {
        "127.0.0.1:9464": await address_of(exporter, r"serving metrics at (\S+)"),
        "127.0.0.1:9465": await address_of(peer, r"serving probes at (\S+)"),
    }
    prometheus = scraping(targets)
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.enqueue_many([mesh.call("tests.cli.app.nap", seconds=0)] * 3)
        await until(
            lambda: prometheus.value('worqr_tasks_total{queue="tests.cli.app.nap",event="finished"}') == 3, LONG
        )
        await until(lambda: prometheus.value("worqr_peer_ready") == 1, LONG)
        await until(lambda: prometheus.value('worqr_runs_total{outcome="ok"}') == 3, LONG)
        await until(lambda: prometheus.value('worqr_peer_runs_total{outcome="ok"}') == 3, LONG)
        await until(lambda: prometheus.value("worqr_has_leader") == 1, LONG)
        for row in dashboard()["panels"]:
            for target in row.get("targets", ()):  # each query is one that Prometheus understands
                query = target["expr"].replace("$queue", ".*").replace("$__rate_interval", "1m")
                assert prometheus.ask("/api/v1/query", query=query) is not None, query
        optional = {
            *(name for name in FLEET if name.startswith("worqr_schedule_")),  # this mesh has none
            *("worqr_queue_age_seconds", "worqr_queue_age_estimated"),  # no task waits
            *(
                "worqr_queue_held_for_seconds",
                *(name for name in FLEET if name.startswith(("worqr_outbox_", "worqr_limit_"))),
            ),  # nor an outbox, nor a limit with a name
            *(name for name in FLEET if name.startswith(("worqr_events_", "worqr_subscriber_"))),  # nor a topic
        }
        assert (FLEET.keys() | PEER.keys()) - prometheus.names() <= optional
        assert prometheus.names() <= FLEET.keys() | PEER.keys()
        own_server.kill()
        await until(lambda: prometheus.value("worqr_up") == 0, LONG)
        await until(lambda: prometheus.value('ALERTS{alertname="WorqrServerAway"}') == 1, LONG)
        assert prometheus.value("worqr_peer_alive") == 1
        own_server.start()
        await until(lambda: prometheus.value("worqr_up") == 1, LONG)
