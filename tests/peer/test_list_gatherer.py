"""Which claims run together, without a server: any order of arrivals, cancellations and ends."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from worqr.peer.list_run import ListGatherer, ListItem, ListRun
from worqr.peer.run import RunHost
from worqr.policy import Policy


class Host:
    queue, id_suffix, policy, state = "Q1", "", Policy(), None

    def policy_with(self, own: Any) -> Policy:
        return self.policy


def item(fence: int, *, failed: bool = False) -> ListItem:
    entry: Any = [b"id", b"%d" % fence, b"task", b"", b"failures", b"1"] if failed else b""
    return ListItem(cast("RunHost", Host()), None, fence, entry)


Steps = st.lists(st.one_of(st.lists(st.booleans(), max_size=8), st.sampled_from(["close", "units", "begin", "cancel"])))


@given(st.integers(1, 5), Steps, st.randoms(use_true_random=False))
def test_each_claim_is_in_one_run_of_the_right_size(size: int, steps: list[list[bool] | str], dice: Any) -> None:
    gatherer, fence = ListGatherer(size), 0
    held: set[int] = set()
    begun: list[ListRun] = []
    for step in steps:
        if isinstance(step, list):
            new = [item(fence + n, failed=failed) for n, failed in enumerate(step)]
            fence += len(new)
            held |= {each.fence for each in new}
            gatherer.add(new)
        elif step == "close":
            gatherer.close()
        elif step == "units":
            for run in gatherer.without_units()[:1]:
                run.reserve_units()
        elif step == "begin":
            begun += gatherer.take_ready()
        elif found := gatherer.items():
            gone = dice.choice(found)
            gatherer.remove(gone)
            held.remove(gone.fence)
        waiting = [each.fence for each in gatherer.items()]
        running = [each.fence for run in begun for each in run.claimed]
        assert sorted(waiting + running) == sorted(held)
        assert 0 <= gatherer.room < size
        assert gatherer.open is None or gatherer.open.claimed
    for run in begun:
        assert run.has_units
        assert 1 <= len(run.claimed) <= size
        assert len(run.claimed) == 1 or not any(each.is_alone for each in run.claimed)
        fences = [each.fence for each in run.claimed]
        assert fences == sorted(fences)
