"""The same act on many tasks in two programs at once, for each act: each task is changed once, and the counts add up."""

from __future__ import annotations

import threading

import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_bulk import act_of, confirmed, fill_failed
from tests.support.patience import PATIENCE
from worqr.client.queue import Queue
from worqr.dashboard.bulk import Bulk, Verb

TASKS = 250
FIELDS = {"delete": {"typed": "mails"}}
"""What a form needs besides what its page has filled in."""


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both acts begin at once, and wait for each other when both know which tasks are meant."""
    both, changed, tried = threading.Barrier(2, timeout=PATIENCE), Bulk._changed, Bulk._tried  # pyright: ignore[reportPrivateUsage]

    async def begin_together(self: Bulk, queue: Queue) -> int:
        both.wait()
        return await changed(self, queue)

    def go_on_together(self: Bulk, done: int, total: int) -> None:
        if done == 100:
            both.wait()
        tried(self, done, total)

    monkeypatch.setattr(Bulk, "_changed", begin_together)
    monkeypatch.setattr(Bulk, "_tried", go_on_together)


async def fill(mesh: worqr.Mesh, verb: Verb) -> None:
    """Make 250 tasks on which the act is done."""
    queue = mesh.queue("mails")
    if verb in ("retry", "drop"):
        await fill_failed(mesh, "mails", TASKS)
    for number in range(0 if verb in ("retry", "drop") else TASKS):
        later = 3600 if verb == "run" or number % 2 else None
        await queue.dispatch(b"%d" % number, id=f"job-{number}", **({} if later is None else {"delay": later}))


async def act_twice(verb: Verb, sites: list[Site]) -> list[Bulk]:
    """Confirm the act in both programs, and wait until both have ended."""
    acts: list[Bulk] = []

    async def act(site: Site) -> None:
        form = await confirmed(site, verb, queue="mails")
        answer = await site.post("/delete" if verb == "delete" else f"/{verb}-all", **form, **FIELDS.get(verb, {}))
        acts.append(act_of(site, answer.headers["location"]))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for site in sites:
                nursery.start_soon(act, site)
    for each in acts:
        assert await trio.to_thread.run_sync(each.ended.wait, PATIENCE)
    return acts


@pytest.mark.leaves("*")
@pytest.mark.parametrize("verb", ["retry", "drop", "run", "cancel", "delete"])
async def test_each_task_is_changed_once(connected: worqr.Mesh, site: Site, verb: Verb) -> None:
    await fill(connected, verb)
    other = Site(worqr.Mesh(connected.url, prefix=connected.prefix, patience=10))
    acts = await act_twice(verb, [site, other])
    assert [act.progress.state for act in acts] == ["finished", "finished"]
    if verb != "delete":  # which does not count what it deletes
        assert sum(act.progress.changed or 0 for act in acts) == TASKS
    queue = connected.queue("mails")
    info = await queue.info()
    assert (info.scheduled, info.failed, info.blocked) == (0, 0, 0)
    waiting = sorted(map(int, await queue.tasks(1000)))
    assert waiting == (list(range(TASKS)) if verb in ("retry", "run") else [])
    if verb == "cancel":
        assert info.counts["cancelled"] == TASKS
