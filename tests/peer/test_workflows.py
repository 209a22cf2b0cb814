"""Workflows: a run that only waits is suspended, and runs again when a wait has ended; nothing turns that into an end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
import trio

import worqr
import worqr.testing as worqr_testing
from tests.peer.tools import QUICK, eventually, until
from tests.peer.workflow_jobs import Approval, dying, keeping, registry, unawaited
from tests.support.patience import PATIENCE
from worqr.client.producer import Producer
from worqr.keys import QueueKeys
from worqr.peer import children, durable, steps

if TYPE_CHECKING:
    from tests.peer.conftest import NewMesh
    from tests.support.servers import Server

pytestmark = pytest.mark.one_server

ADA = Approval("ada")


async def suspended(job: worqr.Job[Any]) -> None:
    async with job.watch(PATIENCE) as states:
        async for status in states:
            if status.state == "suspended":
                return
    raise AssertionError("it has ended")


async def approved(job: worqr.Job[Any]) -> Any:
    """Send the event when the job is suspended, and return its result."""
    await suspended(job)
    assert await job.send("approved", ADA) == "woke"
    return await job.result(PATIENCE)


async def failure_of(job: worqr.Job[Any]) -> str:
    with pytest.raises(worqr.JobFailed) as caught:
        await job.result(PATIENCE)
    return str(caught.value)


# Where it runs


async def test_on_each_loop_a_wait_ends_the_run_and_its_steps_are_taken_once(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="charge")
    async def charge(order: int) -> str:
        calls.append(order)
        return f"paid {order}"

    async def fulfil(order: int) -> tuple[str, Approval | None, int]:
        paid = await charge(order)
        approval = await worqr.wait_for("approved", Approval)
        return paid, approval, worqr.current().run

    on_trio = mesh.workflow(name="on Trio", result_ttl=60)(fulfil)
    on_asyncio = mesh.workflow(name="on asyncio", result_ttl=60, runs_in="asyncio")(fulfil)
    async with mesh.join():
        for n, function in enumerate((on_trio, on_asyncio)):
            assert await approved(await function.dispatch(n)) == (f"paid {n}", ADA, 2)
    assert calls == [0, 1]


async def test_in_a_thread(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="charge")
    def charge(order: int) -> str:
        calls.append(order)
        return f"paid {order}"

    @mesh.workflow(name="in a thread", result_ttl=60)
    def fulfil(order: int) -> tuple[str, Approval | None, int]:
        paid = charge(order)
        approval = worqr.wait_for_now("approved", Approval)
        return paid, approval, worqr.current().run

    async with mesh.join():
        assert await approved(await fulfil.dispatch(7)) == ("paid 7", ADA, 2)
    assert calls == [7]


async def test_in_a_process(new_mesh: NewMesh, tmp_path: Path) -> None:
    mesh, path = new_mesh(), tmp_path / "calls"
    mesh.include(registry)
    fulfil: Any = mesh.functions["in a process"]
    async with mesh.join():
        job = await fulfil.dispatch(str(path), 7)
        await suspended(job)
        assert (await job.status(Approval)).value == Approval("nobody yet")
        assert await approved(job) == ("paid 7", ADA, 2)
        swallowing: Any = mesh.functions["swallows in a process"]
        assert "it swallowed the cancellation" in await failure_of(await swallowing.dispatch())
    assert path.read_text() == "7\n"


async def test_in_a_process_a_run_that_keeps_its_claim_finds_what_was_saved(new_mesh: NewMesh, tmp_path: Path) -> None:
    mesh, path = new_mesh(), tmp_path / "calls"
    mesh.include(keeping)
    function: Any = mesh.functions["goes on in a process"]
    further: Any = mesh.functions["gets further in a process"]
    async with mesh.connect():
        job = await function.dispatch(str(path), 7)
        other = await further.dispatch(str(tmp_path / "others"))
        for each in (job, other):
            assert await each.send("approved", ADA) == "stored"
    async with mesh.join():
        assert await function.job(job.id).result(PATIENCE) == ("paid 7 ada", b"half", 1)
        assert await further.job(other.id).result(PATIENCE) is False
    assert path.read_text() == "7\ntried\ntried\n"


async def test_a_job_that_gets_further_with_each_run_is_not_given_up(new_mesh: NewMesh, tmp_path: Path) -> None:
    mesh, path, other = new_mesh(), tmp_path / "calls", tmp_path / "others"
    mesh.include(dying)
    path.touch()
    further: Any = mesh.functions["dies after each step"]
    stuck: Any = mesh.functions["dies in a step"]
    async with mesh.join():
        assert await (await further.dispatch(str(path))).result(PATIENCE) == 6
        assert "Stalled" in await failure_of(await stuck.dispatch(str(other)))
    assert path.read_text() == "0\n1\n2\n3\n4\n"
    assert other.read_text() == "1\n"


async def test_a_value_that_comes_early_is_found_and_a_timeout_is_none(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> list[str | None]:
        return [
            await worqr.wait_for("first", str),
            await worqr.wait_for("again", str),
            await worqr.wait_for("again", str),
            await worqr.wait_for("never", str, timeout=0.2),
        ]

    async with mesh.connect():
        job = await fulfil.options(id="7").dispatch()
        assert await job.send("first", "one") == "stored"
        assert await job.send("first", "two") == "already"
        assert await job.send("again", "a") == "stored"
        assert await job.send("again", "b", again=True) == "stored"
        async with mesh.join():
            assert await job.result(PATIENCE) == ["one", "a", "b", None]
        with pytest.raises(worqr.NoJob, match="has finished"):
            await job.send("first", "three")
        with pytest.raises(worqr.NoJob, match="is gone"):
            await fulfil.job("8").send("first", "three")


async def test_an_address_means_one_dispatch_of_an_id(new_mesh: NewMesh) -> None:
    mesh, addresses = new_mesh(), list[str]()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str | None:
        addresses.append(worqr.current().address)
        return await worqr.wait_for("approved", str)

    async with mesh.join():
        first = await fulfil.options(id="order 7/ä").dispatch()
        await suspended(first)
        assert await mesh.send(addresses[0], "approved", "first") == "woke"
        assert await first.result(PATIENCE) == "first"
        second = await fulfil.options(id="order 7/ä").dispatch()
        await suspended(second)
        with pytest.raises(worqr.NoJob):
            await mesh.send(addresses[0], "approved", "an old link")
        for wrong in ("order 7", f"fulfil~{'9' * 5000}~x"):
            with pytest.raises(worqr.UsageError, match="is no address"):
                await mesh.send(wrong, "approved", "x")
        assert await mesh.send(addresses[-1], "approved", "second") == "woke"
        assert await second.result(PATIENCE) == "second"


@pytest.mark.leaves("shards")
async def test_an_address_has_any_id_and_queue(new_mesh: NewMesh) -> None:
    mesh, addresses = new_mesh(), dict[str, str]()

    @mesh.workflow(name="ful~fil", shards=2, result_ttl=60)
    async def fulfil() -> str | None:
        addresses[worqr.current().id] = worqr.current().address
        return await worqr.wait_for("approved", str)

    async with mesh.join():
        jobs = [await fulfil.dispatch(), await fulfil.dispatch()]
        jobs += [await fulfil.options(id=each).dispatch() for each in ("order~7 ~1", "eu/7", "50%25=ä")]
        for job in jobs:
            await suspended(job)
            assert addresses[job.id].count("~") == 2
            in_a_path = unquote(addresses[job.id])  # as web frameworks pass it on
            assert "/" not in in_a_path
            assert await mesh.send(in_a_path, "approved", job.id) == "woke"
            assert await job.result(PATIENCE) == job.id
    assert any("~" in job.id for job in jobs[:2]), "the ids of one shard end in ~ and its tag"


@pytest.mark.leaves("shards")
@pytest.mark.parametrize("runs_in", ["loop", "thread"])
async def test_jobs_that_were_started_run_once_though_their_queue_was_split_since(
    new_mesh: NewMesh, runs_in: Any
) -> None:
    calls = list[int]()

    def program(mesh: worqr.Mesh, **options: Any) -> worqr.Function[[], list[int]]:
        @mesh.task(name="pack", **options)
        def pack(line: int) -> int:
            calls.append(line)
            return line

        def jobs() -> list[worqr.ChildJob[int]]:
            return [pack.run(line) for line in range(6)]

        async def fulfil() -> list[int]:
            started = jobs()
            await worqr.wait_for("approved", Approval)
            return await worqr.gather(*started)

        def in_a_thread() -> list[int]:
            started = jobs()
            worqr.wait_for_now("approved", Approval)
            return worqr.gather_now(*started)

        body: Any = fulfil if runs_in == "loop" else in_a_thread
        return mesh.workflow(name="fulfil", result_ttl=60, runs_in=runs_in)(body)

    old, new = new_mesh(), new_mesh()
    fulfil, later = program(old), program(new, shards=4)
    async with old.join():
        await old.queue("pack").pause()
        job = await fulfil.dispatch()
        await suspended(job)
    async with new.join():
        again = later.job(job.id)
        assert await again.send("approved", ADA) == "woke"
        await suspended(again)
        await new.queue("pack").resume()
        assert await again.result(PATIENCE) == [0, 1, 2, 3, 4, 5]
    assert sorted(calls) == [0, 1, 2, 3, 4, 5]


async def test_a_value_of_another_type_is_set_aside_and_the_wait_goes_on(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="on a loop", result_ttl=60)
    async def on_a_loop() -> Approval | None:
        return await worqr.wait_for("approved", Approval)

    @mesh.workflow(name="in a thread", result_ttl=60)
    def in_a_thread() -> Approval | None:
        return worqr.wait_for_now("approved", Approval)

    async with mesh.join():
        for function in (on_a_loop, in_a_thread):
            job = await function.dispatch()
            await suspended(job)
            assert await job.send("approved", {"bx": 1}) == "woke"
            await until(lambda: "workflow.refused" in caplog.text)
            await suspended(job)
            caplog.clear()
            assert await job.send("approved", ADA) == "woke"
            assert await job.result(PATIENCE) == ADA
            assert (await job.status()).failures == 0


async def test_on_asyncio_a_wait_goes_on_whose_value_is_refused_while_another_task_of_the_run_waits(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "QUIET", 0.05)
    mesh, is_done = new_mesh(), durable.wait_done

    async def is_slow(done: Any) -> None:
        await is_done(done)
        await asyncio.sleep(0.5)

    monkeypatch.setattr(durable, "wait_done", is_slow)

    @mesh.workflow(name="fulfil", result_ttl=60, runs_in="asyncio")
    async def fulfil() -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(worqr.wait_for("paid", int))
            group.create_task(wait())

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        assert await job.send("approved", 7) == "woke"
        await suspended(job)
        assert await job.send("approved", ADA) == "woke"
        await job.cancel()


# Nothing turns a suspension into an end


async def wait(**options: Any) -> Approval | None:
    return await worqr.wait_for("approved", Approval, **options)


async def catches_exceptions() -> Approval | None:
    try:
        return await wait()
    except Exception:
        return None


async def suppresses_exceptions() -> Approval | None:
    with contextlib.suppress(Exception):
        return await wait()
    return None


async def waits_in_a_nursery() -> Approval | None:
    found: list[Approval | None] = []

    async def child() -> None:
        found.append(await wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
        nursery.start_soon(worqr.sleep, 0.01)
    return found[0]


async def waits_in_a_shield() -> Approval | None:
    with trio.CancelScope(shield=True):
        return await wait()


async def awaits_in_finally() -> Approval | None:
    try:
        return await wait()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.01)


async def raises_in_finally() -> Approval | None:
    try:
        return await wait()
    finally:
        if worqr.current().suspending:
            raise ValueError("of the application")


async def makes_durable_calls_in_finally() -> Approval | None:
    try:
        return await wait()
    finally:
        if worqr.current().suspending:
            with trio.CancelScope(shield=True):
                await worqr.step("in finally", trio.sleep, 0)


async def waits_in_a_task_group() -> Approval | None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(wait())
        group.create_task(asyncio.sleep(0.01))
    return waiting.result()


async def gathers_exceptions() -> Approval | None:
    found = await asyncio.gather(wait(), asyncio.sleep(0.01), return_exceptions=True)
    assert isinstance(found[0], Approval)
    return found[0]


async def takes_errors_as_results() -> Approval | None:
    found = await asyncio.gather(wait(), asyncio.sleep(0.01), return_exceptions=True)
    return next((each for each in found if isinstance(each, Approval)), None)


async def looks_for_tasks_without_errors() -> Approval | None:
    tasks = [asyncio.create_task(wait()), asyncio.create_task(asyncio.sleep(0.01))]
    await asyncio.wait(tasks)
    return next((each.result() for each in tasks[:1] if each.exception() is None), None)


ON_TRIO = (
    *(catches_exceptions, suppresses_exceptions, waits_in_a_nursery, waits_in_a_shield, awaits_in_finally),
    *(raises_in_finally, makes_durable_calls_in_finally),
)
ON_ASYNCIO = (
    *(catches_exceptions, suppresses_exceptions, waits_in_a_task_group, gathers_exceptions),
    *(takes_errors_as_results, looks_for_tasks_without_errors),
)


@pytest.mark.parametrize("fulfil", ON_TRIO)
async def test_a_handler_on_trio_is_suspended(new_mesh: NewMesh, fulfil: Callable[[], Awaitable[Any]]) -> None:
    mesh = new_mesh()
    function: Any = mesh.workflow(name="fulfil", result_ttl=60)(fulfil)
    async with mesh.join():
        job = await function.dispatch()
        assert await approved(job) == ADA
        assert (await job.status()).failures == 0


@pytest.mark.parametrize("fulfil", ON_ASYNCIO)
async def test_a_handler_on_asyncio_is_suspended(new_mesh: NewMesh, fulfil: Callable[[], Awaitable[Any]]) -> None:
    mesh = new_mesh()
    function: Any = mesh.workflow(name="fulfil", result_ttl=60, runs_in="asyncio")(fulfil)
    async with mesh.join():
        job = await function.dispatch()
        assert await approved(job) == ADA
        assert (await job.status()).failures == 0


async def swallows_everything() -> str:
    try:
        await wait()
    except BaseException:
        return "done"
    return "woken"


def swallows_in_a_thread() -> str:
    try:
        worqr.sleep_now(60)
    except BaseException:
        return "done"
    return "woken"


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread"])
async def test_a_handler_that_swallows_everything_fails(new_mesh: NewMesh, place: Any) -> None:
    mesh = new_mesh()
    fulfil = swallows_in_a_thread if place == "thread" else swallows_everything
    function: Any = mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0, runs_in=place)(fulfil)
    async with mesh.join():
        assert "it swallowed the cancellation" in await failure_of(await function.dispatch())


async def test_nothing_is_stored_by_a_run_that_is_being_suspended(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="release")
    async def release() -> None:
        calls.append("released")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        try:
            await wait()
        finally:
            with trio.CancelScope(shield=True):
                await release()

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        assert calls == []
        await job.send("approved", ADA)
        await job.result(PATIENCE)
        assert calls == ["released"]


async def test_a_run_is_not_suspended_while_another_task_of_it_works(new_mesh: NewMesh) -> None:
    mesh, works, done = new_mesh(), trio.Event(), trio.Event()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Approval | None:
        async with trio.open_nursery() as nursery:
            if not done.is_set():
                nursery.start_soon(work)
            return await wait()

    async def work() -> None:
        works.set()
        await trio.sleep(0.3)
        done.set()

    async with mesh.join():
        job = await fulfil.dispatch()
        await works.wait()
        assert (await job.status()).state == "active"
        await suspended(job)
        assert done.is_set()
        assert await approved(job) == ADA


async def test_a_run_goes_on_that_cancels_a_task_of_it_which_waits(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Approval | None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worqr.sleep, 3600)
            approval = await worqr.wait_for("approved", Approval)
            nursery.start_soon(partial(worqr.sleep, 3600, name="before the next reminder"))
            nursery.cancel_scope.cancel()
        return approval

    async with mesh.join():
        assert await approved(await fulfil.dispatch()) == ADA


async def test_a_run_is_suspended_although_a_middleware_has_tasks(new_mesh: NewMesh) -> None:
    async def beating(_: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            result = await call_next()
            nursery.cancel_scope.cancel()
        return result

    mesh = new_mesh(middleware=[beating])
    function: Any = mesh.workflow(name="fulfil", result_ttl=60)(waits_in_a_nursery)
    async with mesh.join():
        assert await approved(await function.dispatch()) == ADA


async def test_on_asyncio_a_short_sleep_ends_although_another_task_of_the_run_waits(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "QUIET", 0.05)
    mesh, runs = new_mesh(), list[int]()

    async def remind() -> None:
        await worqr.sleep(0.5)
        await worqr.step("remind", asyncio.sleep, 0)
        runs.append(worqr.current().run)

    @mesh.workflow(name="fulfil", result_ttl=60, runs_in="asyncio")
    async def fulfil() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(remind())
            group.create_task(worqr.wait_for("approved", Approval))

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        assert runs == [1]
        await job.send("approved", ADA)
        await job.result(PATIENCE)


async def test_on_asyncio_jobs_are_sent_although_another_task_of_the_run_waits(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "QUIET", 0.05)
    mesh, send, packed = new_mesh(), Producer.dispatch_many, trio.Event()

    async def is_slow(*args: Any) -> Any:
        await asyncio.sleep(0.5)
        return await send(*args)

    monkeypatch.setattr(Producer, "dispatch_many", is_slow)

    @mesh.task(name="pack")
    async def pack() -> None:
        packed.set()

    @mesh.workflow(name="fulfil", result_ttl=60, runs_in="asyncio")
    async def fulfil() -> None:
        async def packing() -> None:
            await pack.run()

        async with asyncio.TaskGroup() as group:
            group.create_task(packing())
            group.create_task(worqr.wait_for("approved", Approval))

    async with mesh.join():
        job = await fulfil.dispatch()
        with trio.fail_after(PATIENCE):
            await packed.wait()
        await job.cancel()


@pytest.mark.parametrize("is_until", [False, True])
async def test_the_first_run_decides_how_long_a_sleep_is(new_mesh: NewMesh, is_until: bool) -> None:
    mesh, woken = new_mesh(), list[int]()

    async def sleep() -> None:
        duration = 3600 if worqr.current().run == 1 else 0
        if is_until:
            await worqr.sleep_until(datetime.now(UTC) + timedelta(seconds=duration))
        else:
            await worqr.sleep(duration)
        woken.append(worqr.current().run)

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep)
            await wait()

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        assert await job.send("approved", ADA) == "woke"
        await suspended(job)
        assert woken == []
        assert await job.end_wait("sleep")
        await job.result(PATIENCE)
    assert woken == [3]


async def test_a_wait_begins_when_a_task_of_the_run_comes_to_it(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worqr.sleep, 5)
            nursery.start_soon(worqr.step, "work", trio.sleep, 5.5)
        return worqr.current().run

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == 1  # the sleep was over


async def test_an_event_that_comes_while_the_run_unwinds_is_not_lost(new_mesh: NewMesh) -> None:
    mesh, runs = new_mesh(), list[int]()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Approval | None:
        runs.append(worqr.current().fence)
        try:
            return await wait()
        finally:
            if worqr.current().suspending:
                with trio.CancelScope(shield=True):
                    await fulfil.job("7").send("approved", ADA)

    async with mesh.join():
        job = await fulfil.options(id="7").dispatch()
        assert await job.result(PATIENCE) == ADA
    assert len(runs) == 2
    assert runs[0] == runs[1]  # the claim was kept


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread"])
async def test_others_read_what_a_run_shows_also_while_it_is_suspended(new_mesh: NewMesh, place: Any) -> None:
    mesh = new_mesh()

    def show() -> None:
        worqr.state({"step": 1})
        worqr.state(Approval("nobody yet"))
        worqr.current().progress(0.5, "half")

    async def on_a_loop() -> None:
        show()
        await worqr.wait_for("approved", Approval)

    def in_a_thread() -> None:
        show()
        worqr.wait_for_now("approved", Approval)

    flow: Any = mesh.workflow(name="flow", runs_in=place, result_ttl=60)(
        in_a_thread if place == "thread" else on_a_loop
    )
    async with mesh.join():
        job = await flow.dispatch()
        await suspended(job)
        status = await job.status(Approval)
        assert status.value == Approval("nobody yet")
        assert (await mesh.queue("flow").read(job.id)).status.value == {"by": "nobody yet"}
        with pytest.raises(worqr.UsageError, match="is not of the type"):
            await job.status(int)
        await approved(job)
        assert (await job.status()).value is None


async def test_a_run_knows_with_which_deploy_its_job_began(new_mesh: NewMesh) -> None:
    async def flow(step: bool) -> int | None:
        before = worqr.current().began_with
        if step:
            await worqr.step("once", lambda: None)
        assert worqr.current().began_with == before
        await worqr.wait_for("go", type(None))
        return before

    def deployed(deploy: int | None) -> tuple[worqr.Mesh, Any]:
        mesh = new_mesh(app="shop", deploy=deploy)
        return mesh, mesh.workflow(name="flow", result_ttl=60)(flow)

    jobs: dict[str, worqr.Job[int | None]] = {}
    for deploy in 1, None, 2:
        mesh, function = deployed(deploy)
        async with mesh.join():
            for step in True, False:
                jobs[f"{deploy} {step}"] = job = await function.dispatch(step)
                await suspended(job)
    mesh, function = deployed(3)
    async with mesh.join():
        for name, job in jobs.items():
            await function.job(job.id).send("go")
            assert str(await function.job(job.id).result(PATIENCE)) == name.split()[0]
    with worqr_testing.context(began_with=7):
        assert worqr.current().began_with == 7


async def test_a_state_that_cannot_be_stored_is_refused(new_mesh: NewMesh) -> None:
    with pytest.raises(worqr.UsageError, match="inside a handler"):
        worqr.state(1)
    with worqr_testing.context() as context:
        worqr.state([1])
        for value, why in (("x" * 65_536, "store what is large"), (object(), "neither bytes nor JSON")):
            with pytest.raises(worqr.UsageError, match=why):
                worqr.state(value)
    assert (context.states, context.reported) == ([[1]], [])


async def test_a_suspended_job_is_cancelled_at_once(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Approval | None:
        return await wait()

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        await job.cancel(reason="not wanted")
        with pytest.raises(worqr.JobCancelled) as caught:
            await job.result(PATIENCE)
        assert caught.value.reason == "not wanted"


async def test_a_cancel_that_comes_while_the_run_unwinds_is_acknowledged(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Approval | None:
        try:
            return await wait()
        finally:
            if worqr.current().suspending:
                with trio.CancelScope(shield=True):
                    await fulfil.job("7").cancel()

    async with mesh.join():
        job = await fulfil.options(id="7").dispatch()
        with pytest.raises(worqr.JobCancelled):
            await job.result(PATIENCE)


# Keys


async def test_calls_of_one_task_are_numbered_and_those_of_two_need_names(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="count")
    async def count(n: int) -> int:
        calls.append(n)
        return len(calls)

    @mesh.workflow(name="one", result_ttl=60)
    async def one() -> list[int]:
        found = [await count(7), await count(7), await count(8), await count.named("third of 7")(7)]
        await worqr.wait_for("go", int)
        return found

    @mesh.workflow(name="two", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    async def two() -> None:
        async def child() -> None:
            await count(9)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            nursery.start_soon(child)

    async with mesh.join():
        job = await one.dispatch()
        await suspended(job)
        await job.send("go", 1)
        assert await job.result(PATIENCE) == [1, 2, 3, 4]
        assert "two tasks of this run call 'count" in await failure_of(await two.dispatch())


async def test_a_run_that_waits_for_too_much_at_the_same_time_fails(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0)
    async def fulfil() -> None:
        async with trio.open_nursery() as nursery:
            for n in range(1001):
                nursery.start_soon(worqr.wait_for, f"line {n}", int)

    async with mesh.join():
        assert "a run may wait for 1,000" in await failure_of(await fulfil.dispatch())


@pytest.mark.parametrize("names", [("go #2", "go", "go"), ("go", "go", "go #2")])
async def test_two_calls_never_have_one_name(new_mesh: NewMesh, names: tuple[str, ...]) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    async def fulfil() -> list[int | None]:
        return [await worqr.wait_for(name, int, timeout=0) for name in names]

    async with mesh.join():
        assert "would have the name 'wait for go #2'" in await failure_of(await fulfil.dispatch())


@pytest.mark.parametrize("name", ["job 7", "7 ~1", "", "a" * 151, 7])
def test_a_name_that_is_not_one_of_a_job_is_refused(name: Any) -> None:
    @worqr.Mesh().task(name="pack")
    async def pack() -> None: ...

    with pytest.raises(worqr.UsageError, match="the name of a job of a workflow must"):
        pack.named(name)


# Steps


@pytest.mark.parametrize("name", ["charge", "@charge"])
async def test_a_step_with_a_policy_is_tried_again_and_keeps_its_tries(new_mesh: NewMesh, name: str) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name=name, retry=worqr.RetryPolicy(max_failures=3, min_backoff=0))
    async def charge(what: str) -> str:
        calls.append(what)
        if calls.count(what) < 3:
            raise ValueError(what)
        return what

    @mesh.step(name="refuse", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0))
    async def refuse() -> None:
        calls.append("refused")
        raise ValueError("no")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> list[str]:
        found = [await charge("a")]
        try:
            await refuse()
        except worqr.StepFailed as error:
            found.append(f"{error.step} {error.error.message}")
        await worqr.wait_for("go", int)
        return found

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        await job.send("go", 1)
        assert await job.result(PATIENCE) == ["a", "refuse {} no"]
        assert (await job.status()).failures == 0
    assert calls == ["a", "a", "a", "refused", "refused"]


async def test_a_step_that_waits_for_its_next_try_waits_on_when_the_run_is_woken(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=3, min_backoff=3600, max_backoff=3600))
    async def charge() -> None:
        calls.append("charge")
        raise ValueError("no")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(charge)
            for name in ("first", "second"):
                await worqr.wait_for(name, int)
                calls.append(name)

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        assert await job.send("first", 1) == "woke"
        await until(lambda: "first" in calls)
        await suspended(job)
        await job.cancel()
    assert calls == ["charge", "first"]


async def test_a_step_that_waits_for_its_next_try_waits_on_when_the_run_keeps_its_claim(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=3, min_backoff=3600, max_backoff=3600))
    async def charge() -> None:
        calls.append("charge")
        raise ValueError("no")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(charge)
            await worqr.wait_for("go", int)
            calls.append("go")

    async with mesh.connect():
        assert await (job := await fulfil.dispatch()).send("go", 1) == "stored"
    async with mesh.join():
        await until(lambda: "go" in calls)
        await suspended(fulfil.job(job.id))
        await fulfil.job(job.id).cancel()
    assert calls == ["charge", "go"]


async def test_a_workflow_whose_step_has_waited_for_its_next_try_goes_on_to_make_progress(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, tried, noted = new_mesh(), list[int](), list[int]()

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=3, min_backoff=3600, max_backoff=3600))
    async def charge() -> None:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("no")

    @mesh.step(name="note")
    async def note(n: int) -> None:
        noted.append(n)

    @mesh.workflow(name="fulfil", result_ttl=60, retry=worqr.RetryPolicy(max_failures=2, min_backoff=0))
    async def fulfil() -> None:
        await charge()
        for n in range(4):
            await note(n)
            if worqr.current().run == n + 3:
                raise ValueError("fails once after each step")

    async with mesh.join():
        job = await fulfil.dispatch()
        for n in (1, 2):
            await suspended(job)
            assert await job.end_wait(f"retry of charge {{}} #{n}")
        await job.result(PATIENCE)
    assert noted == [0, 1, 2, 3]
    assert "workflow.drift" not in caplog.text


async def call_a_step() -> None:
    await worqr.step("inner", trio.sleep, 0)


@pytest.mark.parametrize("setting", ["max_stalls", "max_timeouts"])
def test_a_step_has_no_policy_that_counts_the_runs_of_a_job(setting: str) -> None:
    with pytest.raises(worqr.UsageError, match=f"'charge': {setting} is for functions, .* write max_failures"):
        worqr.Registry().step(name="charge", retry=worqr.RetryPolicy(**{setting: 2}))(lambda order: order)


@pytest.mark.parametrize("inside", [wait, partial(worqr.sleep, 0), call_a_step])
async def test_a_durable_call_inside_a_step_is_refused(new_mesh: NewMesh, inside: Callable[[], Awaitable[Any]]) -> None:
    mesh = new_mesh()

    @mesh.step(name="outer")
    async def outer() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside)

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str:
        with pytest.raises(ExceptionGroup) as caught:
            await outer()
        await worqr.sleep(0)
        return str(caught.value.exceptions[0])

    async with mesh.join():
        assert "is called inside the step 'outer {}'" in await (await fulfil.dispatch()).result(PATIENCE)


async def test_a_step_waits_for_its_next_try_whatever_its_arguments_are(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.step(name="ask", retry=worqr.RetryPolicy(max_failures=2, min_backoff=3600, max_backoff=3600))
    async def ask(question: str) -> None:
        raise ValueError("no")

    with pytest.raises(worqr.UsageError, match="control characters"):
        ask.named("two\nlines")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await ask("why\x7f")

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        await job.cancel()


async def test_a_run_that_keeps_its_claim_has_got_further_by_its_wait(
    new_mesh: NewMesh, server: Server, prefix: str
) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.workflow(
        name="fulfil", result_ttl=60, retry=worqr.RetryPolicy(retry_for=86400, min_backoff=3600, max_backoff=3600)
    )
    async def fulfil() -> None:
        calls.append("run")
        if len(calls) == 1:
            raise ValueError("before the wait")
        await worqr.wait_for("go", int)
        if "waited" not in calls:
            calls.append("waited")
            raise ValueError("after the wait")

    async with mesh.join():
        job = await fulfil.dispatch()
        await job.send("go", 1)
        key = f"{prefix}:{{fulfil}}:job:{job.id}"
        await until(lambda: server.client().hexists(key, "failing_since"))
        server.client().hset(key, "failing_since", 1)  # it has failed for longer than the policy allows
        assert await fulfil.queue.run_now(job.id) == 1
        await until(lambda: "waited" in calls and server.client().exists(key))  # it is tried again
        assert await fulfil.queue.run_now(job.id) == 1
        await job.result(PATIENCE)


@pytest.mark.parametrize("place", ["loop", "thread"])
async def test_a_step_that_the_handler_calls_again_after_an_error_is_the_same_step(
    new_mesh: NewMesh, place: Any
) -> None:
    mesh, calls = new_mesh(), list[str]()

    def pay() -> str:
        calls.append("charge")
        if len(calls) == 1:
            raise ConnectionError("away")
        return "paid"

    @mesh.step(name="charge")
    async def charge() -> str:
        return pay()

    @mesh.step(name="charge in a thread")
    def charge_now() -> str:
        return pay()

    @mesh.workflow(name="on the loop", result_ttl=60)
    async def on_the_loop() -> str:
        try:
            paid = await charge()
        except ConnectionError:
            paid = await charge()
        await worqr.wait_for("approved", Approval)
        return paid

    @mesh.workflow(name="in a thread", result_ttl=60)
    def in_a_thread() -> str:
        try:
            paid = charge_now()
        except ConnectionError:
            paid = charge_now()
        worqr.wait_for_now("approved", Approval)
        return paid

    function = on_the_loop if place == "loop" else in_a_thread
    async with mesh.join():
        assert await approved(await function.dispatch()) == "paid"
    assert calls == ["charge", "charge"]


async def test_a_step_whose_name_ends_in_a_number_is_the_same_step_when_it_is_called_again(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="charge")
    async def charge(order: int) -> str:
        calls.append(order)
        if len(calls) == 1:
            raise ConnectionError("away")
        return "paid"

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str:
        pay = charge.named("order #7")
        try:
            paid = await pay(7)
        except ConnectionError:
            paid = await pay(7)
        await worqr.wait_for("approved", Approval)
        return paid

    async with mesh.join():
        assert await approved(await fulfil.dispatch()) == "paid"
    assert calls == [7, 7]


@pytest.mark.parametrize("error", [worqr.Retry("busy", delay=0, counted=False), worqr.RateLimited(0.001)])
async def test_a_try_that_is_no_failure_does_not_count(new_mesh: NewMesh, error: worqr.Retry) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="ask", retry=worqr.RetryPolicy(max_failures=2, min_backoff=6, jitter=False))
    async def ask() -> str:
        calls.append(worqr.current().run)
        if len(calls) == 3:
            raise ConnectionError("away")
        if len(calls) < 6:
            raise error
        raise ValueError("wrong")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str:
        try:
            return await ask()
        except worqr.StepFailed as failed:
            return failed.error.message

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == "wrong"
    assert calls == [1, 1, 1, 2, 2, 2]


async def test_a_step_that_is_told_to_wait_waits_before_its_next_try(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="ask", retry=worqr.RetryPolicy(max_failures=3, min_backoff=0))
    async def ask() -> None:
        calls.append("ask")
        raise worqr.RateLimited(3600)

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await ask()

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        await job.cancel()
    assert calls == ["ask"]


async def test_a_workflow_that_is_put_back_puts_its_failed_job_back_which_pays_nothing_twice(new_mesh: NewMesh) -> None:
    mesh, paid, is_broken = new_mesh(), list[int](), True

    @mesh.step
    async def charge(order: int) -> int:
        paid.append(order)
        return order

    @mesh.workflow(name="pack")
    async def pack(order: int) -> int:
        payment = await charge(order)
        if is_broken:
            raise worqr.Failure("no paper")
        return payment

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        return await pack.run(7)

    async with mesh.join():
        job = await fulfil.dispatch()
        assert "no paper" in await failure_of(job)
        is_broken = False
        assert await fulfil.queue.failed.retry(job.id)
        assert await job.result(PATIENCE) == 7
    assert paid == [7]


async def test_a_step_that_is_tried_again_after_a_put_back_holds_no_slot_between_its_tries(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=2, min_backoff=3600, max_backoff=3600))
    async def charge() -> None:
        raise ValueError("no")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await charge()

    async with mesh.join():
        for again in (False, True):
            job = fulfil.job("o") if again else await fulfil.options(id="o").dispatch()
            await suspended(job)
            assert await job.end_wait("retry of charge {} #1")
            await failure_of(job)
            assert await (fulfil.queue.failed.drop("o") if again else fulfil.queue.failed.retry("o"))


async def test_a_step_in_a_thread_that_has_failed_for_good_ends_the_job(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="refuse", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0))
    def refuse() -> None:
        calls.append("refused")
        raise ValueError("no")

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0, retry=QUICK)
    def fulfil() -> None:
        refuse()

    async with mesh.join():
        assert "has failed for good: ValueError: no" in await failure_of(await fulfil.dispatch())
    assert calls == ["refused", "refused"]


@pytest.mark.parametrize("place", ["loop", "asyncio"])
async def test_a_plain_step_in_an_async_workflow_says_how_to_declare_it(new_mesh: NewMesh, place: Any) -> None:
    mesh = new_mesh()

    @mesh.step(name="tell")
    def tell(who: str) -> None:
        raise AssertionError("it was called on the event loop")

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1), runs_in=place)
    async def fulfil() -> None:
        tell("Ada")

    async with mesh.join():
        assert "event loop: write `async def tell(...)`" in await failure_of(await fulfil.dispatch())


async def test_a_call_that_a_plain_workflow_cannot_await_fails(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    mesh.include(unawaited)
    functions: list[Any] = list(mesh.functions.values())
    async with mesh.join():
        for function, call in itertools.product(functions, ("sleep", "sleep_until", "wait_for", "step")):
            assert f"write worqr.{call}_now(...)" in await failure_of(await function.dispatch(call))
    assert len(functions) == 2


@pytest.mark.parametrize("call", ["gather", "first", "step"])
async def test_what_a_plain_workflow_cannot_await_is_refused(new_mesh: NewMesh, call: str) -> None:
    mesh = new_mesh()

    @mesh.task(name="pack")
    async def pack() -> None: ...

    @mesh.step(name="charge")
    async def charge() -> None: ...

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    def fulfil() -> None:
        unawaited: Any = charge() if call == "step" else getattr(worqr, call)(pack.run())
        unawaited.close()

    async with mesh.join():
        instead = "def charge(...) for the step" if call == "step" else f"worqr.{call}_now(...)"
        assert f"in a plain function, write {instead}" in await failure_of(await fulfil.dispatch())


async def test_a_step_takes_at_most_its_timeout(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.step(name="slow", timeout=0.05)
    async def slow() -> None:
        if trio.lowlevel.in_trio_task():
            await trio.sleep_forever()
        await asyncio.Event().wait()

    async def fulfil() -> str:
        try:
            await slow()
        except TimeoutError as error:
            return str(error)
        return ""

    on_trio = mesh.workflow(name="on Trio", result_ttl=60)(fulfil)
    on_asyncio = mesh.workflow(name="on asyncio", result_ttl=60, runs_in="asyncio")(fulfil)
    async with mesh.join():
        for function in (on_trio, on_asyncio):
            job = await function.dispatch()
            assert await job.result(PATIENCE) == "the step took longer than 0.05 s"
    with pytest.raises(worqr.UsageError, match="declare it async"):
        mesh.step(name="plain", timeout=1)(lambda: None)


async def test_the_error_of_a_step_with_a_timeout_alone_is_that_of_the_run(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[int]()

    @mesh.step(name="ask", timeout=60)
    async def ask() -> str:
        calls.append(worqr.current().run)
        if len(calls) == 1:
            raise ConnectionError("away")
        return "asked"

    @mesh.workflow(name="fulfil", result_ttl=60, retry=QUICK)
    async def fulfil() -> str:
        return await ask()

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == "asked"
    assert calls == [1, 2]


# Jobs that a workflow starts


async def test_a_workflow_uses_the_results_of_the_jobs_that_it_starts(new_mesh: NewMesh) -> None:
    mesh, packed = new_mesh(), list[int]()

    @mesh.task(name="pack")
    async def pack(order: int, line: int) -> Approval:
        packed.append(line)
        return Approval(f"{order}.{line}")

    @mesh.workflow(name="on Trio", result_ttl=60)
    async def on_trio(order: int) -> list[Approval]:
        first = await pack.run(order, 0)
        return [first, *await worqr.gather(*(pack.run(order, n) for n in range(1, 5)))]

    @mesh.workflow(name="on asyncio", result_ttl=60, runs_in="asyncio")
    async def on_asyncio(order: int) -> list[Approval]:
        return await worqr.gather(*(pack.run(order, n) for n in range(5)))

    @mesh.workflow(name="in a thread", result_ttl=60)
    def in_a_thread(order: int) -> list[Approval]:
        return worqr.gather_now(*(pack.run(order, n) for n in range(5)))

    async with mesh.join():
        for n, function in enumerate((on_trio, on_asyncio, in_a_thread)):
            packed.clear()
            job: worqr.Job[Any] = await function.dispatch(n)
            assert await job.result(PATIENCE) == [Approval(f"{n}.{line}") for line in range(5)]
            assert sorted(packed) == [0, 1, 2, 3, 4]


@dataclass
class Basket:
    orders: set[int]


async def test_sets_and_dicts_in_arguments_name_the_same_call_whatever_their_order_is(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="charge")
    async def charge(basket: Basket, prices: dict[str, int]) -> None:
        calls.append("charge")

    @mesh.task(name="pack")
    async def pack(orders: frozenset[int], places: dict[str, list[set[int]]]) -> None:
        calls.append("pack")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        orders = [0, 8] if worqr.current().run == 1 else [8, 0]  # these sets have another order, as in another process
        assert list({*orders}) == orders
        await charge(Basket({*orders}), {str(n): n for n in orders})
        await pack.run(frozenset(orders), {"a": [{*orders}]})
        return worqr.current().run

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == 2
    assert calls == ["charge", "pack"]


async def test_a_task_that_gives_up_a_wait_leaves_it_to_the_others(new_mesh: NewMesh) -> None:
    mesh, may_end = new_mesh(), trio.Event()

    @mesh.task(name="pack")
    async def pack() -> str:
        await may_end.wait()
        return "packed"

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str:
        job, scope = pack.run(), trio.CancelScope()

        async def give_up() -> None:
            with scope:
                await job

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            nursery.start_soon(wait_for_it, job)
            await trio.sleep(0.1)
            scope.cancel()
        return await job

    async def wait_for_it(job: Any) -> None:
        await job

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        may_end.set()
        assert await job.result(PATIENCE) == "packed"


async def test_a_job_that_fails_raises_the_same_in_each_run(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.task(name="pack", retry=worqr.RetryPolicy(max_failures=1), keep_failed=0)
    async def pack(line: int) -> None:
        raise ValueError(f"line {line}")

    @mesh.step(name="refund")
    async def refund() -> None:
        calls.append("refunded")

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0)
    async def fulfil() -> None:
        try:
            await worqr.gather(pack.run(1), pack.run(2))
        except worqr.JobFailed as error:
            calls.append(error.error.message)
            await refund()
            await worqr.wait_for("go", int)
            raise

    async with mesh.join():
        job = await fulfil.dispatch()
        await until(lambda: "refunded" in calls)
        await job.send("go", 1)
        assert "line 1" in await failure_of(job)
    assert calls == ["line 1", "refunded", "line 1"]


async def test_a_cancelled_workflow_cancels_its_jobs_and_a_cancelled_job_is_told(new_mesh: NewMesh) -> None:
    mesh, begun, ended = new_mesh(), trio.Event(), trio.Event()

    @mesh.task(name="pack")
    async def pack(line: int) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil(line: int) -> str:
        try:
            await pack.run(line)
        except worqr.JobCancelled as error:
            return error.reason
        return ""

    async with mesh.join():
        job = await fulfil.dispatch(1)
        await begun.wait()
        await suspended(job)
        await job.cancel()
        await ended.wait()
        job = await fulfil.dispatch(2)
        await suspended(job)
        (running,) = await pack.queue.jobs(state="active")
        await pack.job(running.id or "").cancel(reason="not wanted")
        assert await job.result(PATIENCE) == "not wanted"


async def test_a_job_that_could_not_be_sent_is_sent_by_the_next_wait(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, send, failures = new_mesh(), Producer.dispatch_many, [worqr.Unavailable("away")]

    async def fails_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await send(*args)

    monkeypatch.setattr(Producer, "dispatch_many", fails_once)

    @mesh.task(name="pack")
    async def pack(line: int) -> int:
        return line

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        job = pack.run(7)
        try:
            return await job
        except worqr.Unavailable:
            return await job

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == 7


async def test_jobs_that_have_ended_before_the_run_is_suspended_are_known_to_each_task_of_the_next_one(
    new_mesh: NewMesh, server: Server, prefix: str
) -> None:
    mesh, packed = new_mesh(), list[int]()

    @mesh.task(name="pack")
    async def pack(line: int) -> int:
        packed.append(line)
        return line

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        jobs, found = [pack.run(line) for line in (1, 2)], list[int]()

        async def take(job: Any) -> None:
            found.append(await job)

        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(take, job)
            record = QueueKeys(prefix, "fulfil").active(worqr.current().id)
            await until(lambda: sum(field.startswith(b"end:pack ") for field in server.look.hkeys(record)) == 2)
        assert set(found) == {1, 2}
        return worqr.current().run

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == 1


@pytest.mark.parametrize("place", ["loop", "asyncio"])
async def test_a_job_that_another_task_could_not_send_is_sent_all_the_same(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    mesh, send, failures = new_mesh(), Producer.dispatch_many, [worqr.Unavailable("away")]

    async def fails_once(*args: Any) -> Any:
        if failures:
            await (trio.sleep if place == "loop" else asyncio.sleep)(0.05)
            raise failures.pop()
        return await send(*args)

    monkeypatch.setattr(Producer, "dispatch_many", fails_once)

    @mesh.task(name="pack")
    async def pack(line: int) -> int:
        return line

    @mesh.workflow(name="fulfil", result_ttl=60, runs_in=place)
    async def fulfil() -> list[int]:
        jobs, found = [pack.run(line) for line in (1, 2)], list[int]()

        async def take(job: Any) -> None:
            with contextlib.suppress(worqr.Unavailable):
                found.append(await job)

        if place == "loop":
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(take, job)
        else:
            await asyncio.gather(*map(take, jobs))
        return found

    async with mesh.join():
        assert set(await (await fulfil.dispatch()).result(PATIENCE)) & {1, 2}


@pytest.mark.parametrize("place", ["loop", "thread"])
async def test_a_workflow_starts_as_many_jobs_as_it_can_keep(new_mesh: NewMesh, place: Any) -> None:
    mesh = new_mesh()

    @mesh.task(name="pack")
    async def pack(line: int) -> None: ...

    def start(number: int) -> None:
        for line in range(number):
            pack.run(line)

    @mesh.workflow(name="fulfil", result_ttl=60, keep_failed=0)
    async def on_the_loop(number: int) -> None:
        start(number)

    @mesh.workflow(name="fulfil in a thread", result_ttl=60, keep_failed=0)
    def in_a_thread(number: int) -> None:
        start(number)

    function = on_the_loop if place == "loop" else in_a_thread
    async with mesh.join():
        await (await function.dispatch(1001)).result(PATIENCE)
        assert "cannot start 1025 more jobs" in await failure_of(await function.dispatch(1025))
        while await pack.queue.count():
            await trio.sleep(0.05)


async def test_a_workflow_that_a_schedule_has_started_starts_each_job_once(new_mesh: NewMesh) -> None:
    mesh, packed = new_mesh(), list[int]()

    @mesh.task(name="pack")
    async def pack(line: int) -> int:
        packed.append(line)
        return line

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> int:
        found = await pack.run(1)
        await worqr.wait_for("go", int)
        return found + await pack.run(2)

    mesh.every(3600, fulfil.call())
    async with mesh.join():
        await mesh.run_schedule("fulfil")
        job = fulfil.job("cron:fulfil")
        await until(lambda: packed == [1])
        await suspended(job)
        with trio.fail_after(PATIENCE):
            while (await job.status()).waits_for.partition(" ")[0] != "go":
                await trio.sleep(0.01)
        assert await job.send("go", 1) == "woke"
        assert await job.result(PATIENCE) == 3
    assert packed == [1, 2]


# Where it cannot be used


async def test_durable_calls_outside_a_workflow_say_what_to_write(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.step
    async def charge(order: int) -> int:
        return order

    @mesh.task(name="plain", result_ttl=60, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    async def plain() -> None:
        assert await charge(7) == 7
        await worqr.sleep(60)

    @mesh.workflow(name="fulfil")
    async def fulfil() -> None:
        pass

    assert await charge(8) == 8
    with pytest.raises(worqr.UsageError, match=r"declare the function with @mesh\.workflow"):
        await worqr.sleep(60)
    with pytest.raises(worqr.UsageError, match=r"use `await fulfil\.dispatch"):
        await fulfil.enqueue()
    with pytest.raises(worqr.UsageError, match="leave out batch_size"):
        mesh.workflow(batch_size=10)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    with pytest.raises(worqr.UsageError, match="there is a step"):
        mesh.step(name=charge.name)(lambda: None)
    async with mesh.join():
        assert "which is no workflow" in await failure_of(await plain.dispatch())


# The first of several jobs, mailboxes, time limits, and waits that a person ends


async def waiting_for(function: worqr.Function[..., Any], job: worqr.Job[Any], key: str) -> None:
    async def is_open() -> bool:
        record = await function.queue.read(job.id)
        return record.status.state == "suspended" and (key, "open") in {
            (each.key, each.state) for each in record.time_line
        }

    await eventually(is_open, True)


async def test_the_first_job_that_ends_wins_and_later_runs_get_the_same(new_mesh: NewMesh) -> None:
    mesh, runs = new_mesh(), list[tuple[int, str] | None]()

    @mesh.task(name="quick", result_ttl=60)
    async def quick(text: str) -> str:
        return text

    @mesh.workflow(name="slow", result_ttl=60)
    async def slow(text: str) -> str:
        await worqr.wait_for("go on", str)
        return text

    @mesh.workflow(name="race", result_ttl=60)
    async def race() -> tuple[int, str] | None:
        jobs = slow.run("slow"), quick.run("quick"), quick.run("as quick")
        found = await worqr.first(*jobs[:2], timeout=60)
        runs.append(found)
        assert await worqr.first(jobs[2]) == (0, "as quick")
        assert await worqr.first(jobs[0], timeout=0.05) is None
        await worqr.wait_for("stop", str)
        return found

    async with mesh.join():
        job = await race.dispatch()
        await waiting_for(race, job, "wait for stop")
        await job.send("stop", "x")
        assert await job.result(PATIENCE) == (1, "quick")
        await slow.queue.cancel_all()
    assert set(runs) == {(1, "quick")}


async def test_a_job_is_not_started_behind_its_workflow_in_a_strict_lane(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="visit", lanes=worqr.Lanes("site", strict=True), result_ttl=60)
    async def visit(site: str, depth: int) -> str:
        if depth == 0:
            return site
        with pytest.raises(
            worqr.UsageError, match="for ever behind a workflow that waits for it, in the strict lane 'a'"
        ):
            visit.run(site, depth - 1)
        return await visit.run("b", depth - 1)

    async with mesh.join():
        assert await (await visit.dispatch("a", 1)).result(PATIENCE) == "b"
        assert await (await visit.dispatch("a", 0)).result(5) == "a"  # the lane is free again


async def test_a_job_is_not_started_behind_any_workflow_above_it(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="visit", lanes=worqr.Lanes("site", strict=True), result_ttl=60)
    async def visit(site: str, back: bool) -> str:
        return site if back else await between.run()

    @mesh.workflow(name="between", retry=worqr.RetryPolicy(max_failures=1))
    async def between() -> str:
        with pytest.raises(worqr.UsageError, match="in the strict lane 'a'"):
            visit.run("a", True)
        return await visit.run("b", True)

    async with mesh.join():
        assert await (await visit.dispatch("a", False)).result(PATIENCE) == "b"


async def test_at_most_sixteen_levels_of_jobs_are_below_a_workflow(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="down", result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    async def down(level: int) -> int:
        try:
            job = down.run(level + 1)
        except worqr.UsageError as error:
            assert "is at level 17" in str(error)
            return level
        return await job

    async with mesh.join():
        assert await (await down.dispatch(0)).result(PATIENCE) == 16


async def test_the_time_line_has_when_steps_and_jobs_began_and_ended_and_a_replay_changes_nothing(
    new_mesh: NewMesh,
) -> None:
    mesh = new_mesh()

    @mesh.task(name="pack")
    async def pack() -> None: ...

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await worqr.step("charge", trio.sleep, 0.05)
        await pack.run()
        for _ in range(2):
            await worqr.wait_for("go", type(None))

    async def done(job: worqr.Job[None], key: str) -> list[Any]:
        await waiting_for(fulfil, job, key)
        line = (await fulfil.queue.read(job.id)).time_line
        return [(each.key, each.began, each.ended) for each in line if each.kind in ("step", "child")]

    async with mesh.join():
        job = await fulfil.dispatch()
        before = await done(job, "wait for go")
        assert [key for key, began, ended in before if ended >= began] == ["charge", "pack {}"]
        [step] = [each for each in (await fulfil.queue.read(job.id)).time_line if each.kind == "step"]
        assert 0.05 <= (step.seconds or 0) < PATIENCE
        await job.send("go")
        assert await done(job, "wait for go #2") == before
        await job.send("go")
        await job.result(PATIENCE)


@pytest.mark.parametrize("place", ["loop", "thread"])
@pytest.mark.parametrize("fails", [False, True])
async def test_the_time_line_has_how_long_a_step_took_also_of_a_job_that_its_function_has_not_dispatched(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch, place: Any, fails: bool
) -> None:
    mesh, clock = new_mesh(), [1000.0]
    monkeypatch.setattr(steps, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0]))

    @mesh.step(name="charge now", retry=worqr.RetryPolicy(max_failures=1))
    def charge_now() -> None:
        clock[0] += 90.5
        if fails:
            raise ValueError("declined")

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=1))
    async def charge() -> None:
        clock[0] += 90.5
        if fails:
            raise ValueError("declined")

    async def on_a_loop() -> None:
        with contextlib.suppress(worqr.StepFailed):
            await charge()
        await worqr.wait_for("approved", Approval)

    def in_a_thread() -> None:
        with contextlib.suppress(worqr.StepFailed):
            charge_now()
        worqr.wait_for_now("approved", Approval)

    handler: Any = in_a_thread if place == "thread" else on_a_loop
    mesh.workflow(name="fulfil", runs_in=place)(handler)
    async with mesh.join():
        job = await mesh.queue("fulfil").dispatch(b"{}")  # as a schedule does
        await suspended(job)
        [step] = [each for each in (await mesh.queue("fulfil").read(job.id)).time_line if each.kind == "step"]
        assert step.began is not None
        assert step.ended is not None
        assert (step.ended - step.began).total_seconds() == 90.5
        await job.cancel()


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread"])
async def test_a_workflow_runs_again_from_an_entry_and_starts_new_jobs(new_mesh: NewMesh, place: Any) -> None:
    mesh, calls, packed, stopped = new_mesh(), list[str](), list[str](), trio.Event()

    def charge() -> None:
        calls.append("charge")

    @mesh.task(name="pack")
    async def pack() -> str:
        packed.append(worqr.current().id)
        if len(packed) == 1:
            try:
                await trio.sleep_forever()
            finally:
                stopped.set()
        return f"parcel {len(packed)}"

    async def on_a_loop() -> tuple[str, Any]:
        await worqr.step("charge", charge)
        return await pack.run(), await worqr.wait_for("approved", Approval)

    def in_a_thread() -> tuple[str, Any]:
        worqr.step_now("charge", charge)
        return worqr.gather_now(pack.run())[0], worqr.wait_for_now("approved", Approval)

    handler: Any = in_a_thread if place == "thread" else on_a_loop
    fulfil: Any = mesh.workflow(name="fulfil", runs_in=place, result_ttl=60)(handler)
    async with mesh.join():
        job = await fulfil.options(id="o").dispatch()
        await waiting_for(fulfil, job, "job pack {}")
        assert await job.rewind("pack {}") == 2
        await waiting_for(fulfil, job, "wait for approved")
        with trio.fail_after(PATIENCE):
            await stopped.wait()
        with pytest.raises(
            worqr.UsageError, match=r"no entry 'pack \{\}' in its time line, which has 'charge', 'pack \{\} ~1'"
        ):
            await job.rewind("pack {}")
        assert await job.rewind("wait for approved") == 1
        await waiting_for(fulfil, job, "wait for approved")
        assert len(packed) == 2
        assert await job.rewind("charge") == 4
        await waiting_for(fulfil, job, "wait for approved")
        assert await approved(job) == ("parcel 3", {"by": "ada"})
        with pytest.raises(worqr.NoJob, match="has finished: it does not run again, so dispatch it anew"):
            await job.rewind("charge")
    assert calls == ["charge", "charge"]
    assert [each.rpartition("/")[2] for each in packed] == ["pack {}", "pack {} ~1", "pack {} ~3"]


async def test_one_in_the_dead_letter_queue_runs_again_from_an_entry(new_mesh: NewMesh) -> None:
    mesh, calls = new_mesh(), list[str]()

    @mesh.step(name="charge", retry=worqr.RetryPolicy(max_failures=1))
    async def charge() -> None:
        calls.append("charge")
        if len(calls) == 1:
            raise ValueError("declined")

    @mesh.step(name="refund")
    async def refund() -> None:
        calls.append("refund")

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str:
        try:
            await charge()
        except worqr.StepFailed:
            await refund()
            raise worqr.Failure("declined") from None
        return "paid"

    async with mesh.join():
        job = await fulfil.options(id="o").dispatch()
        await failure_of(job)
        assert await fulfil.queue.failed.retry("o")
        await failure_of(job)
        assert calls == ["charge", "refund"]  # what was stored after it keeps the failure
        assert await fulfil.job("o").rewind("charge {}") == 2
        assert await fulfil.job("o").result(PATIENCE) == "paid"
    assert calls == ["charge", "refund", "charge"]


async def test_of_one_that_was_dropped_no_error_says_that_it_is_in_the_dead_letter_queue(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        raise worqr.Failure("declined")

    async with mesh.join():
        job = await fulfil.options(id="o").dispatch()
        await failure_of(job)
        with pytest.raises(
            worqr.NoJob, match="goes on only if it is put back from the dead-letter queue: nothing was sent"
        ):
            await job.send("approved")
        assert await fulfil.queue.failed.drop("o")
        with pytest.raises(worqr.NoJob, match="has failed, and is not in the dead-letter queue any more"):
            await job.rewind("charge")


async def test_a_workflow_that_runs_does_not_run_again(new_mesh: NewMesh) -> None:
    mesh, begun, go = new_mesh(), trio.Event(), trio.Event()

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await worqr.step("charge", lambda: None)
        begun.set()
        await go.wait()

    async with mesh.join():
        job = await fulfil.dispatch()
        with trio.fail_after(PATIENCE):
            await begun.wait()
        with pytest.raises(
            worqr.UsageError, match="runs: wait until it is suspended, or cancel it and dispatch it anew"
        ):
            await job.rewind("charge")
        go.set()
        await job.result(PATIENCE)
        with pytest.raises(worqr.NoJob, match="is gone"):
            await fulfil.job("other").rewind("charge")


async def test_the_time_line_names_the_jobs_that_were_started(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.task(name="pack")
    async def pack() -> None: ...

    @mesh.workflow(name="fulfil")
    async def fulfil() -> None:
        await pack.run()

    async with mesh.join(only=["fulfil"]):
        job = await fulfil.dispatch()
        await waiting_for(fulfil, job, "job pack {}")
        line = (await fulfil.queue.read(job.id)).time_line
        assert [(each.kind, each.queue) for each in line if each.job] == [("child", "pack")]
        await job.cancel()
        await pack.queue.delete()


async def has_ended(queue: worqr.Queue, job: worqr.Job[Any], key: str) -> None:
    with trio.fail_after(PATIENCE):
        while not any(each.key == key and each.state == "finished" for each in (await queue.read(job.id)).time_line):
            await trio.sleep(0.01)


async def test_the_job_that_ended_first_wins_although_both_have_ended(new_mesh: NewMesh) -> None:
    mesh, may_end = new_mesh(), [trio.Event(), trio.Event()]

    @mesh.task(name="pack")
    async def pack(n: int) -> int:
        await may_end[n].wait()
        return n

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> tuple[int, int] | None:
        return await worqr.first(pack.run(0), pack.run(1))

    async with mesh.join():
        job = await fulfil.dispatch()
        await suspended(job)
        await fulfil.queue.pause()
        may_end[1].set()
        await has_ended(fulfil.queue, job, 'pack {"n":1}')
        may_end[0].set()
        await has_ended(fulfil.queue, job, 'pack {"n":0}')
        await fulfil.queue.resume()
        assert await job.result(PATIENCE) == (1, 1)


async def test_a_race_in_a_thread_raises_how_the_winner_has_failed(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.task(name="broken", keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    async def broken() -> None:
        raise ValueError("no")

    @mesh.workflow(name="race", result_ttl=60)
    def race() -> str:
        try:
            worqr.first_now(broken.run())
        except worqr.JobFailed as error:
            return str(error)
        return "won"

    async with mesh.join():
        assert "ValueError: no" in await (await race.dispatch()).result(PATIENCE)


@pytest.mark.parametrize("jobs", [(), (7,)])
async def test_what_is_no_job_cannot_win(new_mesh: NewMesh, jobs: Any) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="race", keep_failed=0, result_ttl=60, retry=worqr.RetryPolicy(max_failures=1))
    async def race() -> None:
        await worqr.first(*jobs)

    async with mesh.join():
        assert "first() takes" in await failure_of(await race.dispatch())


@pytest.mark.parametrize("place", ["loop", "asyncio", "thread"])
async def test_a_mailbox_yields_each_value_once_and_ends_when_none_comes(new_mesh: NewMesh, place: str) -> None:
    mesh, timeout = new_mesh(), 2.5 if place == "asyncio" else 0.5  # there it takes a second until the run is suspended

    async def awaiting() -> list[int]:
        return [each async for each in worqr.wait_for("orders", int, timeout=timeout, many=True)]

    def calling() -> list[int]:
        return list(worqr.wait_for_now("orders", int, timeout=timeout, many=True))

    options: dict[str, Any] = {} if place == "thread" else {"runs_in": place}
    function: Any = calling if place == "thread" else awaiting
    read = mesh.workflow(name="read", result_ttl=60, **options)(function)
    async with mesh.connect():
        job = await read.dispatch()
        for n in (1, 2, 3):
            await job.send("orders", n, again=True)
        async with mesh.join():
            await suspended(job)
            await job.send("orders", 4, again=True)
            assert await job.result(PATIENCE) == [1, 2, 3, 4]


@pytest.mark.parametrize("place", ["loop", "asyncio"])
async def test_a_wait_inside_a_time_limit_is_refused(new_mesh: NewMesh, place: Any) -> None:
    mesh = new_mesh()

    @mesh.workflow(
        name="limited", runs_in=place, timeout=60, keep_failed=0, result_ttl=60, retry=worqr.RetryPolicy(max_failures=1)
    )
    async def limited() -> None:
        if place == "loop":
            with trio.fail_after(50):
                await worqr.wait_for("never", str)
        else:
            async with asyncio.timeout(50):
                await worqr.wait_for("never", str)

    async with mesh.join():
        assert "is inside a time limit" in await failure_of(await limited.dispatch())


async def test_a_person_ends_a_wait(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.task(name="pack")
    async def pack() -> None: ...

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> str | None:
        await worqr.sleep(3600)
        approval = await worqr.wait_for("approved", str)
        await pack.run()
        return approval

    async with mesh.connect():
        job = await fulfil.dispatch()
        async with mesh.join(only=["fulfil"]):
            for key, other in (("sleep", "wait for approved"), ("wait for approved", "sleep")):
                await waiting_for(fulfil, job, key)
                assert not await job.end_wait(other)
                assert await job.end_wait(key)
            await waiting_for(fulfil, job, "job pack {}")
            with pytest.raises(worqr.UsageError, match="waits for jobs"):
                await job.end_wait("job pack {}")
        async with mesh.join():
            assert await job.result(PATIENCE) is None
        with pytest.raises(worqr.NoJob, match="no wait was ended"):
            await job.end_wait("sleep")


async def test_a_job_that_ends_after_the_lifetime_is_no_result_in_any_run(new_mesh: NewMesh) -> None:
    mesh, may_end, branches = new_mesh(), trio.Event(), list[str]()

    @mesh.task(name="pack")
    async def pack() -> str:
        await may_end.wait()
        return "packed"

    @mesh.workflow(name="fulfil", result_ttl=60, lifetime=0.5, retry=worqr.RetryPolicy(min_backoff=2, jitter=False))
    async def fulfil() -> None:
        try:
            branches.append(await pack.run())
        except worqr.LifetimeOver:
            branches.append("refunded")
            may_end.set()
            if len(branches) == 1:
                raise ValueError("after the refund") from None

    async with mesh.join():
        await (await fulfil.dispatch()).result(PATIENCE)
    assert branches == ["refunded", "refunded"]


async def test_the_lifetime_ends_all_waits(new_mesh: NewMesh) -> None:
    mesh = new_mesh()

    @mesh.workflow(name="fulfil", result_ttl=60, lifetime=0.3)
    async def fulfil() -> str:
        try:
            await worqr.wait_for("approved", str)
        except worqr.LifetimeOver:
            return "too late"
        return "approved"

    async with mesh.join():
        assert await (await fulfil.dispatch()).result(PATIENCE) == "too late"
    with pytest.raises(worqr.UsageError, match="lifetime"):
        mesh.workflow(lifetime=0)(fulfil)
    with pytest.raises(worqr.UsageError, match="no option 'lifetime'"):
        mesh.task(lifetime=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("in_thread", [False, True])
async def test_the_lifetime_ends_the_tries_of_a_step(new_mesh: NewMesh, in_thread: bool) -> None:
    mesh, calls = new_mesh(), list[str]()
    policy = worqr.RetryPolicy(max_failures=20, min_backoff=3600)

    def fail() -> None:
        calls.append("ask")
        raise ConnectionError("away")

    async def fail_here() -> None:
        fail()

    ask: Any = mesh.step(name="ask", retry=policy)(fail if in_thread else fail_here)

    def wait() -> None:
        ask()

    async def wait_here() -> None:
        await ask()

    fulfil: Any = mesh.workflow(name="fulfil", result_ttl=60, lifetime=0.3, keep_failed=0)(
        wait if in_thread else wait_here
    )
    async with mesh.join():
        assert "the lifetime of this workflow is over" in await failure_of(await fulfil.dispatch())
    assert calls == ["ask"]


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_run_that_waits_for_room_gives_its_slot_to_the_jobs_that_make_room(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    monkeypatch.setattr(children, "ROOM_WITHIN", 0.0)
    monkeypatch.setattr(children, "ROOM_AGAIN", 0.2)
    mesh, ran = new_mesh(), list[int]()

    @mesh.task(name="child", max_length=2)
    async def child(n: int) -> int:
        ran.append(n)
        return n

    async def parent() -> list[int]:
        return await worqr.gather(*(child.run(n) for n in range(5)))

    def parent_in_thread() -> list[int]:
        return worqr.gather_now(*(child.run(n) for n in range(5)))

    function: Any = mesh.workflow(name="parent", result_ttl=60)(parent_in_thread if in_thread else parent)
    async with mesh.join(concurrency=1):
        job = await function.dispatch()
        assert await job.result(PATIENCE) == [0, 1, 2, 3, 4]
    assert sorted(ran) == [0, 1, 2, 3, 4]
