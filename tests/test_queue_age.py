"""Estimates for how long the oldest task has waited, against queues that are simulated task by task."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr.mesh_records import MAX_SAMPLES, QueuePlaces, count_taken

SAMPLE_EVERY = 3.0
STEP = 0.1


def sampled(*samples: tuple[float, int, int]) -> QueuePlaces:
    """The places after samples of the time, the waiting tasks, and those claimed since the totals began."""
    places = QueuePlaces()
    for now, waiting, claimed in samples:
        places.record(now, waiting, 0, {"claimed": claimed})
    return places


def test_an_empty_queue_has_no_age() -> None:
    assert QueuePlaces().age(7.0) is None
    assert sampled((0.0, 0, 0)).age(1.0) is None
    assert sampled((0.0, 3, 0), (3.0, 0, 3)).age(3.0) is None


def test_a_task_came_between_the_samples_before_and_after_it() -> None:
    assert sampled((0.0, 0, 10), (3.0, 1, 10)).age(3.0) == 1.5
    assert sampled((0.0, 0, 10), (3.0, 2, 10)).age(3.0) == 2.0
    assert sampled((0.0, 0, 10), (3.0, 2, 10), (6.0, 1, 11)).age(6.0) == 4.0
    assert sampled((0.0, 0, 10), (3.0, 1, 10), *((3.0 * n, 1, 10) for n in range(2, 900))).age(3000.0) == 2998.5


def test_a_task_that_waited_before_the_first_sample_counts_from_it() -> None:
    assert sampled((5.0, 4, 10)).age(6.0) == 1.0
    assert sampled((5.0, 4, 10), (8.0, 4, 10)).age(9.0) == 4.0


def test_tasks_that_were_given_back_keep_their_age() -> None:
    places = sampled((0.0, 0, 0), (3.0, 1, 0))
    places.record(6.0, 9, 1, {"claimed": 1})
    places.record(9.0, 10, 0, {"claimed": 1, "stopped": 1})
    assert places.age(9.0) == 7.5
    places.record(12.0, 9, 1, {"claimed": 2, "stopped": 1})
    places.record(15.0, 10, 0, {"claimed": 2, "stopped": 1, "stalled": 1})
    assert places.age(15.0) == 13.5


@pytest.mark.parametrize("counts", [{"claimed": 2}, {"claimed": 1000, "deleted": 50}])
def test_tasks_before_a_deletion_and_before_the_totals_began_anew_do_not_count(counts: dict[str, int]) -> None:
    places = sampled((0.0, 0, 1000), (3.0, 50, 1000))
    places.record(300.0, 2, 0, counts)
    assert places.age(301.0) == 1.0


def test_old_samples_are_thinned_out() -> None:
    arrivals = [(3.0 * n, 10 * n, 0) for n in range(5000)]
    places = sampled(*arrivals)
    assert len(places._samples) <= MAX_SAMPLES
    age = places.age(15000.0)
    assert age is not None
    assert age == pytest.approx(15000, abs=3.0)
    for front in range(0, 49000, 500):
        half = sampled(*arrivals, (14998.0, 49990 - front, front))
        found, truth = half.age(15000.0), 15000 - 0.3 * front
        assert found is not None
        assert found == pytest.approx(truth, abs=3.0)  # with even arrivals, wider samples cost nothing


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 9), st.integers(0, 1)), max_size=400))
def test_an_age_is_never_negative_and_known_exactly_while_tasks_wait(
    samples: list[tuple[int, int, int, int]],
) -> None:
    places, claimed, deleted, now = QueuePlaces(), 0, 0, 0.0
    for waiting, more, running, deletion in samples:
        claimed, deleted, now = claimed + more, deleted + deletion, now + SAMPLE_EVERY
        places.record(now, waiting, running, {"claimed": claimed, "deleted": deleted})
        age = places.age(now)
        assert (age is None) == (waiting == 0)
        assert age is None or 0 <= age <= now
        assert [place for _, place in places._samples] == sorted(place for _, place in places._samples)


# Simulated queues


@dataclass
class Simulation:
    """A queue with random load, in steps of 0.1 s. `line` has the time at which each waiting task was enqueued, front first."""

    random: random.Random
    given_back: float = 0.0
    retried: float = 0.0
    cancels_per_second: float = 0.0
    line: list[float] = field(default_factory=list[float])
    running: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    counts: Counter[str] = field(default_factory=Counter[str])

    def errors(self, seconds: float) -> tuple[list[float], float]:
        """Return the errors of the estimates in seconds, and the largest true age."""
        places, errors, oldest, arrivals, workers = QueuePlaces(), list[float](), 0.0, 20.0, 20
        for step in range(int(seconds / STEP)):
            now = step * STEP
            if step % 200 == 0:
                arrivals = self.random.choice([2.0, 10.0, 20.0, 40.0])
                workers = self.random.choice([0, 5, 10, 30])
            self._step(now, arrivals, workers)
            if step % round(SAMPLE_EVERY / STEP) == 0:
                places.record(now, len(self.line), len(self.running), self.counts)
                found = places.age(now)
                assert (found is None) == (not self.line)
                if found is not None:
                    oldest = max(oldest, now - self.line[0])
                    errors.append(abs(found - (now - self.line[0])))
        return errors, oldest

    def _step(self, now: float, arrivals: float, workers: int) -> None:
        chance = self.random
        new = int(arrivals * STEP) + (chance.random() < arrivals * STEP % 1)
        self.line += sorted(now - chance.random() * STEP for _ in range(new))
        if self.line and chance.random() < self.cancels_per_second * STEP:
            del self.line[chance.randrange(len(self.line))]
            self.counts["cancelled"] += 1
        ended = [run for run in self.running if run[0] <= now]
        self.running = [run for run in self.running if run[0] > now]
        for _, enqueued in ended:
            fate = chance.random()
            if fate < self.given_back:
                self.line.insert(0, enqueued)
                self.counts["stopped"] += 1
            elif fate < self.given_back + self.retried:
                self.line.append(now)
                self.counts["retried"] += 1
            elif self.cancels_per_second and fate > 0.9:
                self.counts["cancelled"] += 1
            else:
                self.counts["finished"] += 1
        while self.line and len(self.running) < workers:
            self.running.append((now + chance.expovariate(1.0), self.line.pop(0)))
            self.counts["claimed"] += 1


@pytest.mark.parametrize(
    ("given_back", "retried", "cancels", "most"),
    [
        pytest.param(0.0, 0.0, 0.0, 1.0, id="plain"),
        pytest.param(0.05, 0.0, 0.0, 1.0, id="given back"),
        pytest.param(0.0, 0.05, 0.0, 1.5, id="retried"),
        pytest.param(0.0, 0.0, 1.0, 2.0, id="cancelled"),
    ],
)
def test_estimates_of_simulated_queues_are_near_the_truth(
    given_back: float, retried: float, cancels: float, most: float
) -> None:
    errors, ages = list[float](), list[float]()
    for seed in range(2):
        simulation = Simulation(random.Random(seed), given_back, retried, cancels)
        found, oldest = simulation.errors(900)
        errors += found
        ages.append(oldest)
        assert count_taken(simulation.counts) > 1000
    ordered = sorted(errors)
    assert max(ages) > 100
    assert statistics.median(errors) < most / 4
    assert ordered[int(0.95 * len(ordered))] < most
