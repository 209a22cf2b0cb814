"""Recording: what would be sent is noted, nothing is, and no server is there."""

from __future__ import annotations

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
    """Its coroutines never wait, so that a call from a plain thread can step through them."""
    with testing.recording(mesh) as sent:
        with pytest.raises(StopIteration):
            mail.enqueue("Ada").send(None)
        with pytest.raises(StopIteration) as answer:
            mail.dispatch("Grace").send(None)
    assert isinstance(answer.value.value, testing.RecordedJob)
    assert sent.calls(mail) == [mail.call("Ada"), mail.call("Grace")]


def test_plain_threads_are_recorded(mesh: worqr.Mesh, mail: Mail) -> None:
    with testing.recording(mesh) as sent:
        mail.blocking.enqueue("Ada")
        job = mail.blocking.options(delay=60).dispatch("Grace")
        assert mesh.blocking.enqueue_many([mail.call("Barbara")]) == 1
        with pytest.raises(worqr.NoResult):
            job.result(timeout=60)
        with pytest.raises(worqr.UsageError, match="has no server"):
            mesh.blocking.queue("mail").info()
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
