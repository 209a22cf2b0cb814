"""A proxy that cuts the connection after the request was sent and before the reply came, for every transaction; and silence.

A life is mostly waiting (for sweeps, above all), so many are lived side by side.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import trio

import worqr
from tests.peer.tools import QUICK
from tests.support.leaks import assert_no_leaks, delete_all
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import ops
from worqr.keys import LimitKeys, QueueKeys, RegistryKeys
from worqr.lua import all_scripts


async def _life_of_lanes(q: worqr.Queue) -> None:
    """Nobody serves this queue."""
    await q.dispatch(b"L1", id="L1", lane="a")
    await q.set_weight("a", 5)
    assert [(lane.name, lane.waiting, lane.weight) for lane in await q.lanes()] == [("a", 1, 5)]
    assert (await q.cancel_lane("a")).waiting == 1
    await q.set_weight("a", None)


async def _whole_life(url: str, prefix: str) -> Counter[bytes]:
    """Everything a mesh does: join, work, fail, cancel, stop, pause, look, sweep somebody, delete, fire, leave; and jobs."""
    ran: Counter[bytes] = Counter()
    mesh, news = worqr.Mesh(url, prefix=prefix, keepalive=3), trio.Event()
    mesh.every(0.2, mesh.call("Q4", b"tick"), name="often")

    async def handler(task: bytes) -> None:
        nonlocal news
        ran[task] += 1
        news.set()
        if task == b"fails once" and ran[task] == 1:
            raise ValueError("the first time")
        if task == b"held":
            await trio.sleep_forever()

    async def until(*tasks: bytes) -> None:
        nonlocal news
        with trio.fail_after(PATIENCE):
            while not all(ran[task] for task in tasks):
                news = trio.Event()
                await news.wait()

    @mesh.task(name="Q8", lanes=worqr.Lanes("who"))
    async def in_a_lane(who: str) -> None:
        ran[who.encode()] += 1
        news.set()

    fulfil = _workflow(mesh)
    async with mesh.join(grace=0) as peer:
        q, hand = mesh.queue("Q1"), mesh.queue("Q2")
        async with trio.open_nursery() as nursery:
            await q.enqueue(b"T1", b"T2")
            await nursery.start(partial(peer.serve, "Q1", handler, retry=QUICK))
            await until(b"T1", b"T2")
            await q.enqueue(b"fails once")
            with trio.fail_after(PATIENCE):
                while ran[b"fails once"] < 2:
                    await trio.sleep(0.01)
            await q.enqueue(b"held")
            await until(b"held")
            assert (await q.cancel(b"held", wait=PATIENCE)).acknowledged == 1
            await q.pause("for the test")
            await q.enqueue(b"T3")
            assert (await q.count(), (await q.find(b"T3")).waiting) == (1, (0,))
            assert await q.recent() == []
            await q.set_limit(worqr.Limit(1000))
            await q.resume()
            await until(b"T3")
            await q.clear_limit()
            await _life_of_lanes(mesh.queue("Q6"))
            await mesh.queue("Q8").enqueue(
                in_a_lane.call("filed").task
            )  # as another program does: its worker finds its lane
            await until(b"filed")
            assert (await mesh.queue("Q8").info()).counts["stopped"] == 1
            await hand.enqueue(b"H1", b"H2", b"H3")
            async with peer.work("Q2") as claims:
                batch = await claims.take(3)
                await batch[0].stop()
                await batch[1].fail("by hand")
                await batch[2].retry(delay=0)
            assert await hand.count() == 2
            await hand.cancel_all()
            await hand.enqueue(b"H4")
            await hand.delete()
            assert await hand.count() == 0
            await hand.running()
            assert (await q.cancel_claims("1")).running == 0
            await mesh.queues()
            await mesh.workers()
            await mesh.ask_worker(peer.id, "resume")
            await mesh.info()
            assert "paused" in {entry.kind for entry in await mesh.log()}
            await nursery.start(partial(peer.serve, "Q3", _jobs, result_ttl=60))
            await _life_of_jobs(mesh.queue("Q3"))
            await _life_of_batches(mesh)
            await _life_of_shards(mesh.queue("Q5", shards=2))
            await _life_of_a_schedule(mesh, prefix)
            await _life_of_names(mesh, prefix)
            await _life_of_workflows(mesh, fulfil, prefix)
            await _life_of_stored_schedules(mesh)
            await _life_of_kept_jobs(mesh.queue("Q12"), prefix)
            await _life_of_outboxes(mesh, prefix)
            await _life_of_a_permit(mesh, prefix)
            await _leave_a_corpse(mesh, prefix)
            with trio.fail_after(PATIENCE):  # the one is swept, the other found by the audit
                while len(await mesh.workers()) > 1 or (await q.info()).workers > 1:
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    after = worqr.Mesh(url, prefix=prefix)
    async with after.connect():
        await after.queue("Q4").cancel_all()  # a firing that was on its way when the schedule was paused
    return ran


async def _jobs(task: bytes) -> bytes:
    if task == b"fails":
        raise worqr.Failure("as it was told to")
    if task == b"tells":
        worqr.current().progress(0.5)
        await trio.sleep(0.15)
        await worqr.current().save(b"half")
        assert await worqr.step("one", str, 1) == "1"
    return b"%d" % worqr.current().attempt


async def _life_of_jobs(q: worqr.Queue) -> None:
    """Dispatched, promoted, awaited, looked at, cancelled, set aside, and dealt with there: each once."""
    job = await q.dispatch(b"later", id="x", delay=0.1)
    assert (job.outcome, await job.result(PATIENCE), (await job.status()).state) == ("created", b"1", "finished")
    assert await (await q.dispatch(b"tells")).result(PATIENCE) == b"1"
    job = await q.dispatch(b"soon", id="y", delay=3600)
    assert (await q.run_now("y"), await job.result(PATIENCE)) == (1, b"1")
    assert (await q.read("y")).id == "y"
    assert await (await q.dispatch(b"never", delay=60)).cancel() == worqr.CancelCount(1, 0, 0)
    for n in range(3):
        with pytest.raises(worqr.JobFailed):
            await (await q.dispatch(b"fails", id=f"{n}")).result(PATIENCE)
    assert (sum((await q.failed.errors()).values()), await q.payload("0")) == (3, b"fails")
    assert await q.failed.retry("0") == 1
    with trio.fail_after(PATIENCE):
        while [record.id for record in await q.failed.list()] != ["0", "2", "1"]:
            await trio.sleep(0.02)
    assert (await q.failed.drop("1"), await q.failed.drop_all()) == (1, 2)
    assert await q.jobs(state="waiting") == []
    counts = (await q.info()).counts
    assert (counts["enqueued"], counts["finished"], counts["failed"], counts["cancelled"]) == (8, 3, 4, 1)


async def _life_of_batches(mesh: worqr.Mesh) -> None:
    """One ends and has a follow-up, another is cancelled. Nobody serves their home, and the members of one are elsewhere."""
    home = mesh.queue("Q7")
    async with mesh.batch(queue="Q7", keep=0.1, then=mesh.call("Q3", b"next")) as batch:
        jobs = [await batch.dispatch(mesh.call("Q3", b"tells")) for _ in range(2)]
        assert (await batch.info()).jobs == 2
    assert len({job.id for job in jobs}) == 2
    with trio.fail_after(PATIENCE):
        while (await mesh.queue("Q3").info()).counts["finished"] < 3 + 3:
            await trio.sleep(0.02)
    async with mesh.batch(queue="Q7", keep=0.1, on_failed="cancel") as batch:
        await batch.dispatch(mesh.call("Q7", b"never"))
    assert (await batch.info()).pending == 1
    assert batch.id in {info.id for info in await home.batches()}
    assert await batch.cancel(reason="enough")
    with trio.fail_after(PATIENCE):  # until both are forgotten
        while await home.batches():
            await trio.sleep(0.02)
    counts = (await mesh.queue("Q3").info()).counts
    assert (counts["enqueued"], counts["finished"]) == (8 + 3, 3 + 3)
    assert (await home.info()).counts["cancelled"] == 1


async def _life_of_shards(q: worqr.Queue) -> None:
    """Declared by the first call, used, and forgotten."""
    for n in range(3):
        await q.enqueue(b"%d" % n)
    job = await q.dispatch(b"x", id="x")
    assert (await q.count(), (await job.cancel()).waiting, (await q.cancel(b"1")).waiting) == (4, 1, 1)
    await q.delete()
    assert await q.count() == 0
    await q.delete()


async def _life_of_a_schedule(mesh: worqr.Mesh, prefix: str) -> None:
    """Declared at the join, fired by now, or soon; stopped, and forgotten."""
    q = mesh.queue("Q4")
    with trio.fail_after(PATIENCE):
        while not (await q.info()).counts.get("enqueued"):
            await trio.sleep(0.02)
    await mesh.override_schedule("often", "0 4 * * *")
    await mesh.override_schedule("often", None)
    await mesh.pause_schedule("often")
    assert [schedule.paused for schedule in await mesh.schedules()] == [True]
    keys = RegistryKeys(prefix)
    assert await mesh._client.ask(ops.renew_schedules(keys, ["often", "never"])) == ["never"]
    assert (await mesh._client.ask(ops.rewind_schedules(keys)))[0] == "0"
    await mesh._client.ask(ops.drop_schedules(keys, 0))
    assert (await mesh._client.ask(ops.drop_outdated_schedules(keys, 0)))[1] == []
    assert await mesh._client.ask(ops.drop_outdated_topics(keys)) == ([], [])
    with trio.fail_after(PATIENCE):
        while await mesh.schedules():  # its worker has connected again meanwhile, and declares it again, once
            await mesh._client.ask(ops.drop_schedules(keys, 0))


async def _life_of_names(mesh: worqr.Mesh, prefix: str) -> None:
    """What a leader's scan sends when it finds something: queues that wait, names that nobody uses, and queues that changed."""
    keys = RegistryKeys(prefix)
    assert await mesh._client.ask(ops.enqueue_traced(ops.enqueue(QueueKeys(prefix, "Q9"), [b"traced"]), "{}")) == 1
    assert (await mesh.queue("Q9").cancel(b"traced")).waiting == 1
    await mesh._client.ask(ops.note_histories(keys, ["Q9"]))
    await mesh._client.ask(ops.sample_queue(QueueKeys(prefix, "Q9"), create=True))
    assert len((await mesh.queue("Q9").history()).points) == 60
    assert await mesh._client.ask(ops.read_runs(QueueKeys(prefix, "Q9"))) == {}
    await mesh._client.ask(ops.drop_history(QueueKeys(prefix, "Q9")))
    await mesh._client.ask(ops.note_histories(keys, dropped="Q9"))
    await mesh._client.ask(ops.post_scan(keys, ["Q1"]))
    assert await mesh._client.ask(ops.list_policies(QueueKeys(prefix, "Q9"))) == ([], 0)
    assert await mesh._client.ask(ops.forget_queues(keys, ["never used"])) == ["never used"]
    assert await mesh._client.ask(ops.adopt_claims(QueueKeys(prefix, "Q9"), "nobody:2", [], [1])) == 0


def _workflow(mesh: worqr.Mesh) -> worqr.Function[[str], int]:
    """A workflow that starts a job in another queue, and then waits for a number."""

    @mesh.task(name="Q11")
    async def child(what: str) -> str:
        if what == "held":
            await trio.sleep_forever()
        return what

    @mesh.workflow(name="Q10", result_ttl=60)
    async def fulfil(what: str) -> int:
        assert await child.run(what) == what
        return await worqr.wait_for("number", int) or 0

    return fulfil


async def _suspended(job: worqr.Job[int]) -> None:
    with trio.fail_after(PATIENCE):
        while (await job.status()).waits_for.partition(" ")[0] != "number":
            await trio.sleep(0.02)


async def _life_of_workflows(mesh: worqr.Mesh, fulfil: worqr.Function[[str], int], prefix: str) -> None:
    """One gets what it waits for, after a value that it cannot decode; another is cancelled with the job that it has started."""
    job = await fulfil.options(id="w").dispatch("child")
    await _suspended(job)
    assert await job.send("number", "seven") == "woke"
    with trio.fail_after(PATIENCE):
        while await job.send("number", 7) == "already":
            await trio.sleep(0.02)
    assert await job.result(PATIENCE) == 7
    late = await fulfil.options(id="late").dispatch("child")
    await _suspended(late)
    assert await late.rewind("wait for number") == 1
    with trio.fail_after(PATIENCE):
        while not await late.end_wait("wait for number"):
            await trio.sleep(0.02)
    assert await late.result(PATIENCE) == 0
    other = await fulfil.dispatch("held")
    with trio.fail_after(PATIENCE):
        while not (await mesh.queue("Q11").info()).running:
            await trio.sleep(0.02)
    await other.cancel()
    with trio.fail_after(PATIENCE):
        while not (await mesh.queue("Q11").info()).counts.get("cancelled"):
            await trio.sleep(0.02)
    home, away = QueueKeys(prefix, "Q10"), QueueKeys(prefix, "Q11")
    await mesh._client.ask(ops.look_for_child(away, home.base, "w", "1", "no such key", 0, "no such child"))


async def _life_of_stored_schedules(mesh: worqr.Mesh) -> None:
    """Stored, listed, and deleted."""
    assert await mesh.schedule("user/7", mesh.call("Q4", b"tock"), every=3600) == "created"
    assert [each.name for each in await mesh.schedules(prefix="user/")] == ["user/7"]
    await mesh.schedule_handle("user/7").run_now()
    assert (await mesh.schedules_apply("user/", [("user/7", mesh.call("Q4", b"tock"), {"every": 3600})])).unchanged == 1
    await mesh.schedule_handle("user/7").delete()
    assert await mesh.schedules(prefix="user/") == []


async def _life_of_kept_jobs(q: worqr.Queue, prefix: str) -> None:
    """Kept after their end, listed, run again, and forgotten."""
    for n in range(2):
        await q.dispatch(b"%d" % n, id=f"k{n}", keep=worqr.Keep(), tags={"t"})
    assert (await q.cancel_tagged("t")).waiting == 2
    ended = await q.jobs(state="ended")
    assert sorted(each.id or "" for each in ended) == ["k0", "k1"]
    first, second = [each.kept or "" for each in ended]
    again = await q.run_again(first)
    assert await q.count_tagged("t") == {"cancelled": 2, "waiting": 1}
    assert await q.forget(second) == 1
    assert (await again.cancel()).waiting == 1
    forgotten = await q.forget_tagged("t")
    assert (forgotten.waiting, forgotten.kept) == (0, 2)
    await q._client.ask(ops.trim_kept(QueueKeys(prefix, "Q12")))


async def _life_of_outboxes(mesh: worqr.Mesh, prefix: str) -> None:
    """What the sender of an outbox sends: who sweeps, which rows were deleted, and what its table has."""
    keys = RegistryKeys(prefix)
    assert (await mesh._client.ask(ops.lease_outbox(keys, "shop:1", "me", 60_000, "{}"))).held
    assert len(await mesh._client.ask(ops.list_outboxes(keys))) == 1
    await mesh._client.ask(ops.shorten_sent(QueueKeys(prefix, "Q9"), ["0123456789abcdef"]))
    await mesh._client.ask(ops.declare_topics(keys, "Q9", b"{}", ["order.paid"]))
    assert (await mesh.publish("order.paid", 1, id="x")).to == ("Q9",)
    assert (await mesh.queue("Q9").job("e:x").cancel()).waiting == 1
    assert await mesh.unsubscribe("Q9")
    await mesh._client.ask(ops.lease_outbox(keys, "shop:1", "me", 0))


async def _life_of_a_permit(mesh: worqr.Mesh, prefix: str) -> None:
    """What a block under a named limit sends, and the thread that renews its permit."""
    keys = LimitKeys(prefix, "api")
    async with mesh.limit(worqr.Limit(2, rate=9, per=60, name="api"), cost=3) as permit:
        [held] = mesh._client.permits.held_of(keys)
        await mesh._client.ask(ops.renew_permits(keys, [held], 10_000))
        permit.cost(1)
        assert [(each.name, each.held) for each in await mesh.limits()] == [("api", 1)]
    assert await mesh._client.ask(ops.return_permit(keys, held)) is False


async def _leave_a_corpse(mesh: worqr.Mesh, prefix: str) -> None:
    """A worker that is registered, stands in two fences, and never beats; and one that only stands in a fence."""
    registry, queue = RegistryKeys(prefix), QueueKeys(prefix, "Q1")
    await mesh._client.ask(ops.start_worker(registry, "dead:1", keepalive_ms=100, facts=[]))
    await mesh._client.ask(ops.map_work(registry, "dead:1", "Q1"))
    await mesh._client.ask(ops.start_work(queue, "dead:1", max_stalls=3, keep_failed=10, last=0))
    await mesh._client.ask(ops.start_work(queue, "nobody:1", max_stalls=3, keep_failed=10, last=0))


async def _recover(server: Server, prefix: str) -> None:
    """Recover a worker that could not deregister in time, because the machine held up this process while it left."""
    mesh = worqr.Mesh(server.url, prefix=prefix, keepalive=3)
    async with mesh.join():
        with trio.fail_after(PATIENCE):
            while len(await mesh.workers()) > 1:
                await trio.sleep(0.1)
    async with mesh.connect():
        await mesh.queue("Q4").cancel_all()  # it may have fired the schedule, which the worker had declared again


NOT_IN_A_LIFE = {"list_marks", "list_own_claims", "list_due_schedules"}
"""Asked when the acknowledgement of a cancel takes longer than a second; after a new connection (`peer/test_reconciler`); and
when more schedules are due than one page has (`peer/leader/test_schedule_ticker`)."""


NAMES = [s.name for s in all_scripts() if s.name not in NOT_IN_A_LIFE]
LIVES = 6
"""Lives side by side. A life takes as long with many cuts as with one, so each has a sixth of the scripts."""


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
async def test_a_connection_cut_at_each_script_changes_nothing(
    fault: str, server: Server, proxy_to: Callable[[Server], FaultProxy], caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        for life in range(LIVES):
            nursery.start_soon(_cut_at, NAMES[life::LIVES], fault, server, proxy_to(server), caplog)


async def _cut_at(
    names: list[str], fault: str, server: Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client, prefix = server.client(), f"c{os.urandom(4).hex()}"
    cuts = {name: getattr(proxy, fault)(sent_as(name)) for name in names}
    try:
        ran = await _whole_life(proxy.url, prefix)
        assert [name for name, cut in cuts.items() if not cut.fired] == [], "never sent"
        assert ran == {b"T1": 1, b"T2": 1, b"T3": 1, b"held": 1, b"filed": 1, b"fails once": 2}
        if any(getattr(record, "event", "") == "heartbeat.late" for record in caplog.records):
            await _recover(server, prefix)
        assert_no_leaks(client, prefix, ["{Q2}:failed", "{Q2}:aside*"])
    except BaseException as error:
        error.add_note(f"{fault} of {', '.join(names)}, prefix {prefix}")
        raise
    finally:
        delete_all(client, prefix)


async def test_a_silent_data_connection_is_noticed_and_nothing_is_lost(
    server: Server, prefix: str, proxy: FaultProxy
) -> None:
    mesh = worqr.Mesh(proxy.url, prefix=prefix)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"T1")
        proxy.blackhole(":data")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(q.enqueue, b"T2")
            await trio.sleep(0.3)
            proxy.pass_all()  # new connections pass; the old one stays dead and must be given up by itself
        assert await q.tasks() == [b"T2", b"T1"]


async def test_a_silent_subscription_is_noticed_within_seconds(server: Server, prefix: str, proxy: FaultProxy) -> None:
    mesh, direct = worqr.Mesh(proxy.url, prefix=prefix), worqr.Mesh(server.url, prefix=prefix)
    woken = trio.Event()

    async def handler(_task: bytes) -> None:
        woken.set()

    async with direct.connect(), mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler))
        proxy.blackhole(":subscribe")
        proxy.pass_all()
        await direct.queue("Q1").enqueue(b"T1")  # its wake-up goes into the hole
        with trio.fail_after(PATIENCE):
            await woken.wait()
        nursery.cancel_scope.cancel()
