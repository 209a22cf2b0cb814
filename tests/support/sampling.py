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

    def share(self, name: str, cases: Sequence[T], share: float) -> list[T]:
        """Return a share of these cases. Of a tenth of two cases, one runs in each fifth run."""
        keep, rest = divmod(len(cases) * share, 1)
        return self(name, cases, int(keep) + (Random(f"{self.seed} share of {name}").random() < rest))


SAMPLE = pytest.StashKey[Sample]()
TESTS = Path(__file__).parent.parent

SLOW = {
    0.02: "chaos/test_run cli/test_workers dashboard/test_accessible docs/test_howto sql/test_places",
    0.05: (
        "dashboard/test_browser dashboard/test_hostile django/test_commands faults/test_batches link/test_refusals "
        "model/test_protocol peer/test_stuck_handlers peer/test_workflows test_typed_clients"
    ),
    0.08: (
        "cli/test_run client/test_sync django/test_outbox faults/test_crash_points "
        "faults/test_jobs faults/test_move faults/test_refusals hosting/test_thread_peer link/test_cluster_faults "
        "link/test_cluster_router peer/leader/test_schedule_ticker peer/test_consumer_shutdown sql/test_outbox test_acl "
        "test_benchmarks test_cluster test_examples test_odd_values test_prometheus test_rivals test_web"
    ),
    0.16: (
        "cli/test_dashboard cli/test_data_server cli/test_main cli/test_terminal cli/top/test_command "
        "client/test_sharded_queues dashboard/test_bulk dashboard/test_faults dashboard/test_live "
        "django/test_admin django/test_backend django/test_transactions docs/test_migrate docs/test_raw "
        "docs/test_tutorial faults/test_cut_connections faults/test_history faults/test_lists faults/test_recovery "
        "faults/test_zombies link/test_heartbeat link/test_outage peer/executors/processes/test_pool "
        "peer/executors/processes/test_worker peer/leader/test_due_jobs peer/test_odd_errors peer/test_session "
        "peer/test_shared_limits sql/test_kills test_demo test_go_client test_probes test_sentinel "
        "test_walks testing/test_plugin"
    ),
    0.22: (
        "cli/test_document client/test_asyncio client/test_mesh_info client/test_schedules dashboard/test_forgery "
        "dashboard/test_mounts dashboard/test_pages dashboard/test_payloads dashboard/test_security docs/test_others "
        "docs/test_pages faults/test_limits faults/test_outages faults/test_saving link/test_cluster_places "
        "link/test_first_contact link/test_node_client "
        "link/test_replicas mistakes/test_command_line ops/test_every_script ops/test_lanes ops/test_odd_values "
        "peer/test_deadlines peer/test_delivery peer/test_limits peer/test_results peer/test_run_counter peer/test_slots "
        "test_credentials test_lua test_mesh test_prefixes test_replicas test_wire"
    ),
    0.4: (
        "cli/test_list_commands cli/test_metrics cli/test_produce_commands cli/test_reload cli/test_schedule_commands "
        "cli/test_script cli/test_task_commands client/test_batches client/test_producer client/test_queue "
        "client/test_room client/test_topics dashboard/test_openapi dashboard/test_tables faults/test_odd_records "
        "hosting/test_asyncio_peer link/test_sentinel link/test_subscriptions link/test_thread_driver "
        "mistakes/test_testing ops/test_clustered ops/test_finished ops/test_job_machine ops/test_keys_of_one_job "
        "peer/executors/processes/test_importable peer/executors/processes/test_serving peer/leader/test_scanner "
        "peer/test_claims peer/test_failure_handlers peer/test_late_functions peer/test_list_functions "
        "peer/test_reconciler peer/test_scheduler peer/test_work_map_refresher test_argument_codec test_editor "
        "test_embedded test_face test_otel_metrics test_project test_support"
    ),
    0.6: (
        "ops/test_batch_ends peer/test_cancellation peer/test_codec peer/test_functions peer/test_handlers peer/test_lists "
        "peer/test_middleware peer/test_retrying peer/test_run peer/test_saving peer/test_webhooks"
    ),
}
"""The share that runs of the files that take longest: they start programs, browsers and clusters, or wait. So a run takes 5
minutes."""
SHARES = {f"{name}.py": share for share, names in SLOW.items() for name in names.split()}


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
            dropped |= {*of_file} - {*sample.share(name, of_file, share_of(of_file[0].path))}
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
    return SHARES.get(file.relative_to(TESTS).as_posix(), 1.0)


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
