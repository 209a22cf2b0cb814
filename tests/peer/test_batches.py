"""What handlers see of batches: on the loop, in threads and in processes; and what the leader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.peer import batch_process
from tests.peer.conftest import NewMesh
from tests.peer.tools import eventually, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.keys import BatchKeys, QueueKeys
from worqr.peer.leader import leader

pytestmark = [
    pytest.mark.one_server,
    pytest.mark.leaves("{*}*:batch*", "{*}:failed", "{*}:aside*", "{*}:part:*", "{*}:job:*", "{*}:due", "{*}:outbox"),
]


# What handlers see


async def test_handlers_in_threads_see_their_batch_and_add_to_it(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    told: list[Any] = []

    @mesh.task(runs_in="thread")
    def count_down(n: int) -> None:
        told.append(worqr.current().batch)
        batch = mesh.current_batch()
        assert batch is not None
        if n:
            assert worqr.sync(batch.dispatch, count_down.call(n - 1)).queue == count_down.name

    @mesh.task(runs_in="thread")
    def done() -> None:
        told.append(worqr.current().ended_batch)
        assert mesh.current_batch() is None

    async with mesh.join():
        async with mesh.batch(then=done.call(), meta={"k": "v"}) as batch:
            await batch.dispatch(count_down.call(5))
        assert (await batch.wait(PATIENCE)).finished == 6
        await until(lambda: len(told) == 7)
        await eventually(lambda: _running(mesh, done.name), 0)
    assert {(ref.queue, ref.id) for ref in told[:6]} == {(done.name, batch.id)}
    assert (told[6].id, told[6].jobs, told[6].meta, told[6].succeeded) == (batch.id, 6, {"k": "v"}, True)
    mesh.close()


async def _running(mesh: worqr.Mesh, queue: str) -> int:
    info = await mesh.queue(queue).info()
    return info.running + info.waiting


async def test_handlers_in_processes_see_their_batch_and_add_to_it(
    server: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORQR_URL", server.url)
    monkeypatch.setenv("WORQR_TEST_PREFIX", prefix)
    monkeypatch.setattr(batch_process.mesh, "prefix", prefix)
    mesh, path = batch_process.mesh, str(tmp_path / "told")
    async with mesh.join(processes=1):
        async with mesh.batch(then=batch_process.done.call(path)) as batch:
            await batch.dispatch(batch_process.count_down.call(3, path))
        assert await batch.result(PATIENCE) == f"{batch.id} 4 4"
    lines = (tmp_path / "told").read_text().splitlines()
    assert lines == [f"{n} {batch.queue} {batch.id}" for n in (3, 2, 1, 0)]


async def test_other_runs_are_in_no_batch(new_mesh: NewMesh) -> None:
    mesh, told = new_mesh(), list[object]()

    @mesh.task
    async def alone() -> None:
        told.extend([worqr.current().batch, worqr.current().ended_batch, mesh.current_batch()])

    async with mesh.join():
        await alone.enqueue()
        await alone.dispatch()
        await until(lambda: len(told) == 6)
        await eventually(lambda: _running(mesh, alone.name), 0)
    assert told == [None] * 6
    with pytest.raises(LookupError):
        mesh.current_batch()


# The leader


class Nets:
    """Two queues with one job of a batch each, and a home in a third one."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.mesh = mesh
        self.ended = 0

        @mesh.task(name="work")
        async def work() -> None:
            pass

        @mesh.task(name="done")
        async def done() -> None:
            self.ended += 1

        self.work, self.done = work, done

    @property
    def home(self) -> QueueKeys:
        return QueueKeys(self.mesh.prefix, "home")


async def last_seen(batch: worqr.Batch) -> worqr.BatchInfo:
    """The last state of a batch for somebody who only looks: unlike `wait`, that delivers no messages."""
    with trio.fail_after(PATIENCE):
        async with batch.watch() as infos:
            return [info async for info in infos][-1]


@pytest.fixture
def nets(new_mesh: NewMesh) -> Nets:
    return Nets(new_mesh())


@pytest.mark.usefixtures("without_scans")
async def test_a_message_is_delivered_without_a_scan(nets: Nets) -> None:
    """The script that posts it tells the leader: the report, the follow-up, and a cancel."""
    mesh = nets.mesh
    async with mesh.join() as peer:
        await until(lambda: peer._engine.leader.leads)
        async with mesh.batch(then=nets.done.call(), queue="home") as batch:
            await batch.dispatch(nets.work.call())
            await eventually(lambda: _running(mesh, "work"), 0)
        await until(lambda: nets.ended == 1)
        async with mesh.batch(queue="home") as batch:
            await batch.dispatch(nets.work.options(delay=600).call())
        await mesh._client.ask(ops.cancel_batch(nets.home, batch.id, "", "no"))
        assert (await batch.wait(PATIENCE)).cancelled == 1


async def test_a_scan_finds_an_outbox_that_the_leader_was_not_told_of(
    nets: Nets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is lost: nobody leads when the last job ends. The first scan of the next leader finds the message."""
    mesh = nets.mesh
    async with mesh.connect():
        async with mesh.batch(then=nets.done.call(), queue="home") as batch:
            await batch.dispatch(nets.work.options(delay=600).call())
        assert (await mesh.queue("work").delete(), (await batch.info()).state) == (None, "sealed")
        assert await mesh._client.ask(ops.take_outbox(QueueKeys(mesh.prefix, "work"))) != []
        async with mesh.join():
            assert (await last_seen(batch)).cancelled == 1


async def test_a_check_makes_up_for_a_message_that_was_lost(nets: Nets, server: Server) -> None:
    """The outbox of a part is lost, as by a failover. The leader asks the part again; the test makes the check due now."""
    mesh = nets.mesh
    async with mesh.connect():
        async with mesh.batch(then=nets.done.call(), queue="home") as batch:
            await batch.dispatch(nets.work.options(delay=600).call())
        await mesh.queue("work").delete()
        part = BatchKeys(QueueKeys(mesh.prefix, "work"))
        assert server.look.delete(part.outbox) == 1
        assert (await batch.info()).state == "sealed"
        server.look.zadd(BatchKeys(nets.home).batches, {batch.id: 1})
        async with mesh.join():
            assert (await last_seen(batch)).state == "ended"


async def test_a_member_whose_record_was_lost_is_counted_as_failed(nets: Nets, server: Server) -> None:
    mesh = nets.mesh
    async with mesh.connect():
        async with mesh.batch(otherwise=nets.done.call(), queue="home") as batch:
            job = await batch.dispatch(nets.work.options(delay=600).call())
        keys = QueueKeys(mesh.prefix, "work")
        server.look.delete(keys.job(job.id), keys.due)
        server.look.zadd(BatchKeys(nets.home).batches, {batch.id: 1})
        async with mesh.join():
            assert (await last_seen(batch)).failed == 1
            await until(lambda: nets.ended == 1)


async def test_what_cannot_be_delivered_is_tried_again_and_logged(
    nets: Nets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "worqr.peer.leader.leader")
    monkeypatch.setattr(leader, "RETRY_AFTER", 0.05)
    original, left = leader.relay_and_check, [worqr.Unavailable("down", sent=False), worqr.RefusedByServer("no")]

    async def fail_first(*args: Any) -> None:
        if left:
            raise left.pop(0)
        await original(*args)

    monkeypatch.setattr(leader, "relay_and_check", fail_first)
    mesh = nets.mesh
    async with mesh.join():
        while left:  # the producer may deliver the messages of a batch before the leader does
            async with mesh.batch(then=nets.done.call(), queue="home") as batch:
                await batch.dispatch(nets.work.call())
            assert (await batch.wait(timeout=60)).state == "ended"
    events = [(record.__dict__["event"], record.levelname) for record in caplog.records]
    assert ("relay", "INFO") in events
    assert ("relay", "ERROR") in events


async def test_a_batch_is_forgotten_after_its_keep(nets: Nets, server: Server) -> None:
    mesh = nets.mesh
    async with mesh.join():
        async with mesh.batch(queue="home", keep=0.05) as batch:
            await batch.dispatch(nets.work.call())
        await eventually(lambda: _exists(server, BatchKeys(nets.home).batch(batch.id)), False)
        assert await mesh.queue("home").batches() == []


async def _exists(server: Server, key: str) -> bool:
    await trio.lowlevel.checkpoint()
    return bool(server.look.exists(key))


async def test_a_new_leader_delivers_what_the_old_one_has_left(
    nets: Nets, new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leader stands still in the middle of the delivery, and leaves. What it has not confirmed, the next one does."""
    original, held = leader.relay_and_check, trio.Event()

    async def stand_still(*_: Any) -> None:
        held.set()
        await trio.sleep_forever()

    monkeypatch.setattr(leader, "relay_and_check", stand_still)
    mesh = nets.mesh
    async with mesh.connect():
        async with new_mesh().join() as first:
            await until(lambda: first._engine.leader.leads)
            async with mesh.batch(queue="home") as batch:
                await batch.dispatch(nets.work.options(delay=600).call())
            await mesh.queue("work").delete()
            with trio.fail_after(PATIENCE):
                await held.wait()
            monkeypatch.setattr(leader, "relay_and_check", original)
        async with mesh.join():
            assert (await last_seen(batch)).state == "ended"
