"""docs/reference/metrics.md has every metric, and pages, alerts and dashboards name none that does not exist."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.tables import REFERENCE, columns
from tests.support.children import ROOT
from tools import grafana
from tools.pages import DOCS
from worqr.metrics.fleet import FLEET, PEER, Metric

PAGE = REFERENCE / "metrics.md"
FILES = [
    *(DOCS / "howto").glob("*.md"),
    *DOCS.glob("reference/*.md"),
    *(path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".yaml", ".json"}),
]
NAME = re.compile(
    r"\bworqr_(?:up|has|queues?|workers?|tasks|runs?|wait|schedules?|server|peer|snapshot|events|subscriber|limit|outbox_rows|outbox_oldest|outbox_unseen)"
    r"(?:_[a-z_]+)?\b"
)


def table(metrics: dict[str, Metric]) -> str:
    lines = ["| metric{labels} | meaning |", "|---|---|"]
    for name, metric in metrics.items():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"| `{name}{labels}` | {metric.meaning} |")
    return "\n".join(lines)


TABLES = {"metrics of the mesh": FLEET, "metrics of a worker": PEER}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table(name: str) -> None:
    """Write it with ``python -m tests.docs.test_metrics``."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert found == table(TABLES[name])


def test_a_name_tells_the_kind() -> None:
    """As the page says before the tables."""
    for name, metric in {**FLEET, **PEER}.items():
        assert name.endswith("_total") == (metric.kind == "counter")
    histograms = {name for name, metric in FLEET.items() if metric.kind == "histogram"}
    assert histograms == {"worqr_run_seconds", "worqr_wait_seconds"}
    assert {metric.kind for metric in PEER.values()} == {"counter", "gauge"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_metric_that_is_named_exists(path: object) -> None:
    named = set(NAME.findall(path.read_text("utf-8")))  # type: ignore[attr-defined]
    named = {name.removesuffix("_bucket") for name in named}
    assert named - FLEET.keys() - PEER.keys() - {"worqr_server"} == set()  # that one is a fixture


def test_every_metric_has_an_alert_or_a_panel() -> None:
    used = {
        name.removesuffix("_bucket")
        for path in (ROOT / "deploy" / "prometheus" / "worqr.rules.yaml", grafana.PATH)
        for name in NAME.findall(path.read_text("utf-8"))
    }
    assert used == FLEET.keys() | PEER.keys()


def test_the_dashboard_is_that_of_the_program() -> None:
    """Write it with ``python -m tools.grafana``."""
    assert grafana.PATH.read_text("utf-8") == grafana.text()


def test_the_page_lists_the_alerts() -> None:
    path = ROOT / "deploy" / "prometheus" / "worqr.rules.yaml"
    (group,) = yaml.safe_load(path.read_text("utf-8"))["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    assert list(columns("../howto/metrics.md", "Get alerts")) == alerts
    for rule in group["rules"]:
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    for title, metrics in TABLES.items():
        lines = table(metrics)
        text = re.sub(
            rf"(<!-- {title} -->\n).*?(<!-- end -->)",
            lambda found, lines=lines: f"{found[1]}{lines}\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
    PAGE.write_text(text, "utf-8")
