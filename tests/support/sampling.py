"""What a run leaves out, and how long it took: a sample of exhaustive and slow tests without ``--all``, and the totals."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Sample:
    """Chooses some cases of an exhaustive test. The seed decides, so all processes of a run choose the same ones.

    Without a seed nothing is left out.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.left_out = 0

    def __call__(self, name: str, cases: Sequence[T], keep: int) -> list[T]:
        """Return `keep` of these cases, in their order."""
        if self.seed is None or keep >= len(cases):
            return list(cases)
        return [cases[n] for n in sorted(Random(f"{self.seed} {name}").sample(range(len(cases)), keep))]


SAMPLE = pytest.StashKey[Sample]()
TESTS = Path(__file__).parent.parent

SLOW = {
    "chaos/test_run.py": 0.1,
    "cli": 0.3,
    "cli/test_run.py": 0.25,
    "cli/test_workers.py": 0.15,
    "client/test_asyncio.py": 0.5,
    "client/test_mesh_info.py": 0.3,
    "client/test_stored_schedules.py": 0.5,
    "client/test_sync.py": 0.3,
    "dashboard": 0.4,
    "dashboard/test_accessible.py": 0.1,
    "dashboard/test_browser.py": 0.15,
    "dashboard/test_bulk.py": 0.3,
    "dashboard/test_faults.py": 0.3,
    "dashboard/test_forgery.py": 0.3,
    "dashboard/test_hostile.py": 0.1,
    "dashboard/test_live.py": 0.2,
    "dashboard/test_mounts.py": 0.2,
    "dashboard/test_payloads.py": 0.3,
    "dashboard/test_security.py": 0.3,
    "dashboard/test_waiting.py": 0.3,
    "django": 0.2,
    "docs": 0.08,
    "faults": 0.15,
    "hosting": 0.4,
    "hosting/test_thread_peer.py": 0.3,
    "link/test_cluster_faults.py": 0.3,
    "link/test_cluster_places.py": 0.3,
    "link/test_cluster_router.py": 0.3,
    "link/test_first_contact.py": 0.4,
    "link/test_heartbeat.py": 0.4,
    "link/test_node_client.py": 0.4,
    "link/test_outage.py": 0.3,
    "link/test_refusals.py": 0.3,
    "mistakes": 0.3,
    "model": 0.1,
    "ops/test_every_script.py": 0.3,
    "ops/test_job_machine.py": 0.5,
    "ops/test_odd_values.py": 0.3,
    "peer/executors/processes": 0.3,
    "peer/leader/test_due_jobs.py": 0.4,
    "peer/leader/test_schedule_ticker.py": 0.3,
    "peer/test_consumer_shutdown.py": 0.3,
    "peer/test_odd_errors.py": 0.3,
    "peer/test_session.py": 0.3,
    "peer/test_slots.py": 0.5,
    "peer/test_stuck_handlers.py": 0.2,
    "peer/test_workflows.py": 0.5,
    "sql": 0.35,
    "testing": 0.5,
    "testing/test_plugin.py": 0.3,
    "test_acl.py": 0.4,
    "test_auto_benchmark.py": 0.2,
    "test_benchmarks.py": 0.1,
    "test_cluster.py": 0.2,
    "test_demo.py": 0.2,
    "test_editor.py": 0.3,
    "test_examples.py": 0.2,
    "test_metrics.py": 0.5,
    "test_odd_values.py": 0.3,
    "test_prefixes.py": 0.4,
    "test_probes.py": 0.3,
    "test_project.py": 0.5,
    "test_prometheus.py": 0.3,
    "test_replicas.py": 0.3,
    "test_rivals.py": 0.1,
    "test_sentinel.py": 0.2,
    "test_support.py": 0.4,
    "test_tls.py": 0.4,
    "test_typed_clients.py": 0.3,
    "test_walks.py": 0.5,
    "test_web.py": 0.1,
    "test_wire.py": 0.5,
}
"""Files and folders whose tests start programs, browsers and clusters, or wait for what takes its time: the share that runs."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("worqr")
    group.addoption(
        "--all", action="store_true", help="run every case of the exhaustive and slow tests, not a random sample"
    )
    group.addoption("--sample", type=int, metavar="SEED", help="choose the same sample as another run")


def configure(config: pytest.Config) -> None:
    """Draw the seed; a process that runs tests for another one has been given it."""
    given = getattr(config, "workerinput", {})
    if "sample" in given:
        config.option.sample = given["sample"]
    elif config.option.all:
        config.option.sample = None
    elif config.option.sample is None:
        config.option.sample = Random().randrange(1_000_000)
    config.stash[SAMPLE] = Sample(config.option.sample)


def header(config: pytest.Config) -> str:
    seed = config.option.sample
    return "exhaustive and slow tests: " + (
        f"a sample, --sample={seed} (--all runs every case)" if seed is not None else "all"
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases outside the sample: of each test that is marked `sweep`, and in a run of all files of the slow ones."""
    sample = config.stash[SAMPLE]
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            cases[_sweep_of(item)].append(item)
    dropped: set[pytest.Item] = set()
    for name, all_cases in cases.items():
        mark = all_cases[0].get_closest_marker("sweep")
        assert mark is not None
        dropped |= {*all_cases} - {*sample(name, all_cases, **mark.kwargs)}
    if config.option.keyword == "" and [config.rootpath / each for each in config.args] == [TESTS]:
        slow: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if share_of(item.path) < 1:
                slow[f"{item.path} {_server_of(item)}"].append(item)
        for name, of_file in slow.items():
            dropped |= {*of_file} - {*sample(name, of_file, max(1, round(len(of_file) * share_of(of_file[0].path))))}
    sample.left_out = len(dropped)
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=[*dropped])


def _sweep_of(item: pytest.Item) -> str:
    """The test without its parameters, but for the kind of server."""
    return f"{item.nodeid.partition('[')[0]} {_server_of(item)}"


def _server_of(item: pytest.Item) -> str:
    call: Any = getattr(item, "callspec", None)
    return str(call.params.get("server_kind") if call else "")


def share_of(file: Path) -> float:
    """Return the share of the tests of a file that runs without ``--all``."""
    path = file.relative_to(TESTS)
    return min((SLOW[name] for each in (path, *path.parents) if (name := each.as_posix()) in SLOW), default=1.0)


def summary(reporter: pytest.TerminalReporter, sample: Sample) -> None:
    """Say what the tests took together, and how many cases the sample has left out."""
    reports = [each for kind in reporter.stats.values() for each in kind if isinstance(each, pytest.TestReport)]
    took, cpu = sum(each.duration for each in reports), sum(os.times()[:4])
    reporter.write_line(
        f"all tests: {took:.0f} s one after another; {cpu:.0f} s of CPU with all processes they started"
    )
    if sample.left_out:
        reporter.write_line(
            f"left out: {sample.left_out} cases of exhaustive and slow tests (--sample={sample.seed}); --all runs them too"
        )
