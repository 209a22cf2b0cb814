"""Recording: what would be sent is noted, nothing is, and no server is there."""

from __future__ import annotations

from typing import Any, cast

import pytest

import worqr
from worqr import testing


@pytest.fixture
def mail(mesh: worqr.Mesh) -> worqr.Function[[str], int]:
    @mesh.task(name="mail", result_ttl=60)
    async def mail(to: str) -> int:
        return len(to)

    return mail


Mail = worqr.Function[[str], int]


async def test_what_is_sent_is_noted_in_order(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        await mail.enqueue("Ada")
        await mail.options(delay=5).dispatch("Grace")
        assert await mesh.enqueue_many([mail.call("Barbara"), mesh.call("elsewhere", n=1)]) == 2
        jobs = await mesh.dispatch_many(mail.options(id=name).call(name) for name in ("Tony", "Edsger"))
    assert sent.calls(mail) == [mail.call(to) for to in ("Ada", "Grace", "Barbara", "Tony", "Edsger")]
    assert sent.calls("elsewhere") == [mesh.call("elsewhere", n=1)]
    assert [job.id for job in jobs] == ["Tony", "Edsger"]


async def test_the_code_under_test_may_connect(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        async with mesh.connect(), mesh.connect():
            await mail.enqueue("Ada")
    assert sent.calls(mail) == [mail.call("Ada")]


def test_no_loop_is_needed(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        worqr.sync(mail.enqueue, "Ada")
        job = worqr.sync(mail.dispatch, "Grace")
        with pytest.raises(worqr.UsageError, match=r"worqr\.sync\(mail\.enqueue"):
            mail.enqueue("Charles")
    assert isinstance(job, testing.RecordedJob)
    assert sent.calls(mail) == [mail.call("Ada"), mail.call("Grace")]


def test_plain_threads_are_recorded(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        worqr.sync(mail.enqueue, "Ada")
        job = worqr.sync(mail.options(delay=60).dispatch, "Grace")
        assert worqr.sync(mesh.enqueue_many, [mail.call("Barbara")]) == 1
        with pytest.raises(worqr.NoResult):
            worqr.sync(job.result, timeout=60)
        with pytest.raises(worqr.UsageError, match="has no server"):
            worqr.sync(mesh.queue("mail").info)
    assert sent.calls(mail) == [mail.call(to) for to in ("Ada", "Grace", "Barbara")]


async def test_the_handle_of_a_dispatch_waits_for_ever(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh):
        job, other = await mail.dispatch("Ada"), await mail.dispatch("Ada")
        assert (job.queue, job.outcome) == ("mail", "created")
        assert job.id.startswith("@")
        assert job.id != other.id
        assert (await job.status()).state == "waiting"
        with pytest.raises(worqr.NoResult, match="recorded and never sent"):
            await job.result(timeout=60)
        assert (await job.cancel(reason="why")).waiting == 1


async def test_arguments_are_checked_as_always(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        with pytest.raises(worqr.UsageError):
            await mail.enqueue(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await mail.enqueue()  # type: ignore[call-arg]
        with pytest.raises(worqr.UsageError):
            mail.options(delay=-1)
    assert sent.calls(mail) == []


async def test_what_many_at_once_refuse_is_refused(mesh: worqr.Mesh, mail: Mail) -> None:
    given = cast("Any", mail)("Ada")  # the coroutine of the handler
    with testing.recording(mesh) as sent:
        with pytest.raises(worqr.UsageError, match="use dispatch_many"):
            await mesh.enqueue_many([mail.call("Ada"), mail.options(delay=5).call("Grace")])
        with pytest.raises(worqr.UsageError, match=r"write mail\.call"):
            await mesh.enqueue_many([given])
        with pytest.raises(worqr.UsageError, match="give calls"):
            await mesh.dispatch_many([mail.call("Ada"), cast("Any", "Grace")])
    assert sent.all() == []


async def test_what_a_dispatch_refuses_is_refused(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        with pytest.raises(worqr.UsageError, match="leave id= out"):
            await mail.options(then=mail.options(id="7").call("Grace")).dispatch("Ada")
        async with mesh.batch() as batch:
            with pytest.raises(worqr.UsageError, match="give calls"):
                await batch.dispatch(cast("Any", "Grace"))
        await mail.options(then=mail.options(delay=5).call("Grace")).dispatch("Ada")
    assert sent.all() == [mail.call("Ada")]


async def test_what_needs_a_server_says_so(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh):
        with pytest.raises(worqr.UsageError, match=r"use worqr\.testing\.bench"):
            await mail.queue.enqueue(b"T1")
        with pytest.raises(worqr.UsageError, match="has no server"):
            await mesh.queues()
        with pytest.raises(worqr.UsageError, match="has no server"):
            async with mesh.join():
                pytest.fail("it must not join")


async def test_the_mesh_is_as_before_afterwards_also_when_the_test_has_failed(mesh: worqr.Mesh, mail: Mail) -> None:
    before = vars(mesh) | vars(mesh._client)
    with pytest.raises(AssertionError, match="own"), testing.recording(mesh) as sent:
        await mail.enqueue("Ada")
        raise AssertionError("the test's own")
    assert vars(mesh) | vars(mesh._client) == before
    assert sent.calls(mail) == [mail.call("Ada")]
    with pytest.raises(worqr.UsageError, match="not connected"):
        await mail.enqueue("Ada")


async def test_one_recording_at_a_time(mesh: worqr.Mesh) -> None:
    with testing.recording(mesh), pytest.raises(worqr.UsageError, match="in a recording, already"):
        with testing.recording(mesh):
            pytest.fail("it must not record")
    with testing.recording(mesh), testing.recording(worqr.Mesh()):
        pass


# Batches


async def test_batches_are_noted_with_the_calls_of_their_jobs(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        async with mesh.batch(then=mail.call("boss"), otherwise=mail.call("on-call"), meta={"run": "7"}) as batch:
            assert (await batch.info()).state == "open"
            job = await batch.dispatch(mail.call("Ada"))
            assert len(await batch.dispatch_many(mail.call(to) for to in ("Grace", "Barbara"))) == 2
        await mail.enqueue("Tony")
        async with mesh.batch(parent=batch, id="night"):
            pass
        info = await batch.info()
    assert isinstance(job, testing.RecordedJob)
    first, second = sent.batches
    assert first.calls == [mail.call(to) for to in ("Ada", "Grace", "Barbara")]
    assert (first.then, first.otherwise, first.meta) == (mail.call("boss"), mail.call("on-call"), {"run": "7"})
    assert (second.calls, second.then, second.cancelled) == ([], None, [])
    assert sent.calls(mail) == [mail.call(to) for to in ("Ada", "Grace", "Barbara", "Tony")]
    assert (info.state, info.jobs, info.pending, info.queue, info.queues) == ("sealed", 3, 3, "mail", ("mail",))
    assert info.id == batch.id


async def test_a_recorded_batch_never_ends(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        with pytest.raises(ZeroDivisionError):
            async with mesh.batch() as batch:
                await batch.dispatch(mail.call("Ada"))
                raise ZeroDivisionError
        for wait in (batch.wait, batch.result):
            with pytest.raises(worqr.NoResult, match="recorded and never sent"):
                await wait(60)
        with pytest.raises(worqr.NoResult):
            async with batch.watch():
                raise AssertionError
        with pytest.raises(worqr.BatchEnded, match="was cancelled: its block ended with ZeroDivisionError"):
            await batch.dispatch(mail.call("Grace"))
        assert await batch.retry_failed() == 0
        assert (await batch.info()).cancel_reason == "its block ended with ZeroDivisionError"
    assert sent.batches[0].cancelled == ["its block ended with ZeroDivisionError"]


def test_batches_of_plain_threads_are_recorded(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        with worqr.sync_block(mesh.batch, then=mail.call("boss")) as batch:
            worqr.sync(batch.dispatch, mail.call("Ada"))
        assert worqr.sync(batch.info).jobs == 1
    assert [each.calls for each in sent.batches] == [[mail.call("Ada")]]


async def test_what_a_handler_adds_to_its_batch_is_noted(mesh: worqr.Mesh, mail: Mail) -> None:
    @mesh.task(name="spread")
    async def spread() -> None:
        batch = mesh.current_batch()
        assert batch is not None
        await batch.dispatch(mail.call(batch.id))

    with testing.recording(mesh) as sent, testing.context(batch=worqr.BatchRef("home", "night")) as context:
        assert context.batch == worqr.BatchRef("home", "night")
        await spread()
    assert [each.calls for each in sent.batches] == [[mail.call("night")]]


async def test_the_options_of_a_batch_are_checked_as_always(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        with pytest.raises(worqr.UsageError, match="then of a batch must be a call"):
            async with mesh.batch(then=mail):  # type: ignore[arg-type]
                raise AssertionError
        with pytest.raises(worqr.UsageError, match="leave id= out"):
            async with mesh.batch(then=mail.options(id="x").call("Ada")):
                raise AssertionError
    assert sent.batches == []
