"""The files in deploy/ are what the pages show, and say what this version of worqr can do."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.docs.tables import rows
from tests.support.children import ROOT
from tools.pages import DOCS, Block, blocks_of, name_of
from worqr.cli import make_app
from worqr.dashboard.api import scale
from worqr.dashboard.app import ROUTES
from worqr.hosting import service
from worqr.peer.options import GRACE
from worqr.probes import PATHS

DEPLOY = ROOT / "deploy"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in DEPLOY.rglob("*") if path.is_file())
SPARE = 5.0
"""Seconds between the last moment at which a worker ends by itself, and its killing."""


def shown() -> Iterator[Block]:
    """Blocks of pages that show a file."""
    for page in sorted(DOCS.rglob("*.md")):
        yield from (block for block in blocks_of(page) if block.title.startswith("deploy/"))


@pytest.mark.parametrize("block", list(shown()), ids=str)
def test_a_page_shows_the_file_as_it_is(block: Block) -> None:
    assert block.code == (ROOT / block.title).read_text("utf-8")


@pytest.mark.parametrize("path", FILES)
def test_each_file_is_told_of_on_a_page(path: str) -> None:
    pages = [page for page in sorted((DOCS / "howto").glob("*.md")) if path in page.read_text("utf-8")]
    assert pages, path
    assert len([block for block in shown() if block.title == path]) <= 1, [name_of(page) for page in pages]


def typed(words: list[str]) -> dict[str, Any]:
    """The arguments of a ``worqr`` command."""
    assert words[0].rpartition("/")[2] == "worqr"
    _, bound, _ = make_app().parse_args(words[1:], print_error=False, exit_on_error=False)
    return bound.arguments


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    return [
        each for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
    ]


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_commands_of_the_manifests_can_be_typed() -> None:
    deployments = [each for each in manifests() if each["kind"] == "Deployment"]
    assert deployments
    for each in deployments:
        typed(container(each)["command"])
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]


def test_programs_have_no_more_rights_than_they_need() -> None:
    for each in manifests():
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container(each)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


def test_the_probes_of_the_worker_are_served() -> None:
    (worker,) = [each for each in manifests() if each["metadata"]["name"] == "shop-worker"]
    found = container(worker)
    probes = {kind: found[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/startup",
        "liveness": "/live",
        "readiness": "/ready",
    }
    assert {probe["path"] for probe in probes.values()} == set(PATHS)
    (port,) = found["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert typed(found["command"])["probe"] == str(port["containerPort"])


def test_a_worker_is_not_killed_before_it_has_ended_by_itself() -> None:
    ended = GRACE + service.EXIT_AFTER
    (worker,) = [each for each in manifests() if each["metadata"]["name"] == "shop-worker"]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == ended + SPARE
    assert float(unit()["Service"]["TimeoutStopSec"]) == ended + SPARE
    for program, own, period in rows("../howto/kubernetes.md", "Grace periods"):
        if program.startswith("`worqr run"):
            grace = float(own.split()[0])
            assert float(period) == grace + service.EXIT_AFTER + SPARE


# systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd" / "worqr@.service").read_text())
    return parser


def test_the_unit_is_told_when_the_worker_serves_and_when_it_is_stuck() -> None:
    found = unit()["Service"]
    assert found["Type"] == "notify"
    assert found["TimeoutStartSec"] == "infinity"
    assert float(found["WatchdogSec"]) > 0
    typed(shlex.split(found["ExecStart"]))


def test_the_unit_of_the_server_has_a_command_that_can_be_typed() -> None:
    text = (DEPLOY / "systemd" / "worqr-server.service").read_text()
    (command,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    assert typed(shlex.split(command))["data"] == Path("/srv/worqr")
    assert {"Type=notify", "NotifyAccess=all", "ReadWritePaths=/srv/worqr"} <= set(text.splitlines())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["worqr@.service", "worqr-server.service"])
def test_systemd_knows_each_setting_and_finds_the_unit_well_protected(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text((DEPLOY / "systemd" / name).read_text().replace("/srv/shop/.venv/bin/worqr", "/bin/true"))
    security = [
        "security",
        "--offline=yes",
        "--threshold=40",
    ]  # 4.0 of 10: with the two settings of before, it was above 8
    for words in (["verify"], security):
        command = ["systemd-analyze", *words, path]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "Unknown" not in found.stderr


# KEDA


def test_the_dashboard_has_what_keda_asks_it_for() -> None:
    documents = yaml.safe_load_all((DEPLOY / "keda" / "worker-dashboard.yaml").read_text())
    (scaled,) = [each for each in documents if each["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    assert ROUTES[url.path].handler is scale
    assert set(parse_qs(url.query)) == {"queue", "places"}
    page = (DOCS / "howto" / "autoscaling.md").read_text("utf-8")
    assert f"| `{trigger['metadata']['valueLocation']}` |" in page
