"""What the scripts that run for each task make at once: all that a usual call needs; then what lanes and limits need."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import Desk, job
from worqr import ops
from worqr.command import Command
from worqr.lua import Script

MADE = "setmetatable(shared, {__index = function(shared, name)\n"
HOT = ("dispatch_jobs", "enqueue", "finish_tasks", "start_tasks")


class StrictDesk(Desk):
    """Sends scripts that fail where they would make their functions: those of the first step, or those of the last."""

    step = 0

    def sent(self, call: Command[Any]) -> tuple[Script, tuple[str, ...]]:
        script, keys = super().sent(call)
        if script.name not in HOT:
            return script, keys
        parts = script.text.split(MADE)
        step = min(self.step, len(parts) - 2)
        parts[step + 1] = f"error('made for ' .. name)\n{parts[step + 1]}"
        strict = Script(script.name, MADE.join(parts))
        self.client.script_load(strict.source)
        return strict, keys


@pytest.fixture
def strict(desk: Desk) -> StrictDesk:
    desk.client.hdel(desk.q.counts, "fence")  # that of a desk is ahead of the clock
    desk.hold("first", b"the first task of an hour")  # which renews the counters
    strict = StrictDesk(desk.client, desk.prefix)
    strict.producer = "Y"
    return strict


def run(desk: Desk, worker: str, wanted: int) -> int:
    """Start up to so many tasks, and end them; return how many it were."""
    claims = desk.start(worker, wanted)
    found = [claims.first + n for n, entry in enumerate(claims.entries) if entry]
    if found:
        assert desk.call(ops.finish_tasks(desk.q, worker, found)) == {}
    return len(found)


def test_a_usual_call_makes_nothing_later(strict: StrictDesk) -> None:
    desk = strict
    desk.enter("A", "B")
    desk.put(b"a", b"b")
    desk.put(b"c")
    assert [run(desk, "A", n) for n in (1, 1, 5, 1)] == [1, 1, 1, 0]
    kept: dict[str, Any] = {"result_ttl": "60000", "timeout": "1000"}
    for name in (None, "x"):
        assert desk.dispatch(name, b"job", fields=kept).outcome == "created"
        assert desk.dispatch(None, b"later", delay=60_000).outcome == "created"
        assert run(desk, "B", 1) == 1
    desk.put(b"d")
    assert run(desk, "B", 1) == 1


def test_a_script_that_needs_more_makes_it(strict: StrictDesk) -> None:
    desk = strict
    desk.enter("A")
    desk.call(ops.set_limits(desk.q, "10"))
    desk.put(b"a")
    with pytest.raises(Exception, match="made for"):
        desk.start("A", 1)


def test_lanes_and_limits_need_only_what_is_made_first(strict: StrictDesk) -> None:
    desk, strict.step = strict, 1
    desk.enter("A")
    desk.call(ops.set_limits(desk.q, "10 1000/60000"))
    desk.put(b"a", b"b")
    assert [run(desk, "A", n) for n in (1, 3)] == [1, 1]
    desk.call(ops.set_limits(desk.q, ""))
    for n in range(6):
        dispatched = desk.call(ops.dispatch_jobs(desk.q, [job(None, b"job", lane=f"lane{n % 3}")]))
        assert [each.outcome for each in dispatched] == ["created"]
    assert [run(desk, "A", n) for n in (1, 3, 5)] == [1, 3, 2]
