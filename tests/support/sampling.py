"""What a run leaves out, and how long it took: a sample of the exhaustive tests without ``--all``, and the totals at the end."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
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


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("worqr")
    group.addoption("--all", action="store_true", help="run every case of the exhaustive tests, not a random sample")
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
    return "exhaustive tests: " + (f"a sample, --sample={seed} (--all runs every case)" if seed is not None else "all")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases outside the sample of each test that is marked `sweep`, on each kind of server."""
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
    sample.left_out = len(dropped)
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=[*dropped])


def _sweep_of(item: pytest.Item) -> str:
    """The test without its parameters, but for the kind of server."""
    call: Any = getattr(item, "callspec", None)
    return f"{item.nodeid.partition('[')[0]} {call.params.get('server_kind') if call else ''}"


def summary(reporter: pytest.TerminalReporter, sample: Sample) -> None:
    """Say what the tests took together, and how many cases the sample has left out."""
    reports = [each for kind in reporter.stats.values() for each in kind if isinstance(each, pytest.TestReport)]
    took, cpu = sum(each.duration for each in reports), sum(os.times()[:4])
    reporter.write_line(
        f"all tests: {took:.0f} s one after another; {cpu:.0f} s of CPU with all processes they started"
    )
    if sample.left_out:
        reporter.write_line(
            f"left out: {sample.left_out} cases of exhaustive tests (--sample={sample.seed}); --all runs them too"
        )
