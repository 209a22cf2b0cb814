"""Two revisions are compared figure by figure, so that more than 1 is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import Figure


def test_a_higher_rate_and_a_shorter_time_are_better() -> None:
    assert Figure("drain", "drain", "tasks/s", [100, 200, 100], [110, 180, 120]).ratio == pytest.approx(1.1)
    assert Figure("pickup", "p50", "ms", [1.0, 2.0, 4.0], [2.0, 2.0, 4.0]).ratio == pytest.approx(1.0)


def test_trees_take_turns_and_what_only_one_has_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, order = Path("/there"), []

    def run(tree: Path, names: object) -> dict[tuple[str, str, str], float]:
        order.append(tree)
        common = {("drain", "drain", "tasks/s"): 50.0 if tree == there else 100.0}
        return common if tree == there else {**common, ("drain", "new", "ms"): 1.0}

    monkeypatch.setattr(compare, "run", run)
    [figure] = compare.measured(there, ["drain"], 2)
    assert order == [there, compare.ROOT, compare.ROOT, there]
    assert figure.ratio == 2
    assert compare.table([figure], "v1").splitlines()[1].split() == ["drain", "drain", "tasks/s", "50", "100", "2.00"]


def test_medians_are_read_from_what_a_run_wrote() -> None:
    rows = [{"what": "drain", "unit": "tasks/s", "median": 7.0}]
    assert compare.medians({"tables": [{"title": "drain: no-op", "rows": rows}]}) == {
        ("drain", "drain", "tasks/s"): 7.0
    }
