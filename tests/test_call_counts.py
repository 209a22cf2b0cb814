"""How many functions Python calls for each task, and how often the loop waits: figures that no other load on the machine changes.

They grow before any clock shows it. A change that needs more says why, and raises the limit here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARGIN = 1.1
LIMITS = {
    "enqueue, raw, Trio": 130 * MARGIN,
    "enqueue, raw, Trio: waits": 1,
    "enqueue, typed, Trio": 137 * MARGIN,
    "enqueue, typed, Trio: waits": 1,
    "enqueue, typed, asyncio": 118 * MARGIN,
    "enqueue, typed, asyncio: waits": 1,
    "enqueue, typed, blocking": 122 * MARGIN,
    "enqueue, typed, blocking: waits": 1,
    "worker, one task after the other": 425 * MARGIN,
    "worker: waits": 3.5 * MARGIN,
    "worker: switches between tasks": 4.7 * MARGIN,
}
"""The most of each, by its row in the table of `benchmarks.calls`. A worker makes about 390 calls, 3.1 waits and 3.2 switches.
Where others use the CPU, a run of a hand-off counts as long, and a start follows it.
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the loop of another system waits in another way")
def test_the_counts_for_each_task_have_not_grown(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "calls", "--quick", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        timeout=240,
        check=True,
    )
    found = {row["what"]: row["values"][0] for row in json.loads(file.read_text("utf-8"))["tables"][0]["rows"]}
    assert found.keys() == LIMITS.keys()
    assert {what: value for what, value in found.items() if value > LIMITS[what]} == {}
