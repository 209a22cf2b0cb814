"""Putting a mesh on a bench: it is the test's own inside the block, and as it was before afterwards, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import trio
import trio.testing

import worqr
from tests.peer.tools import until
from tests.support.children import Child
from tests.support.servers import Server
from tests.testing.conftest import NOWHERE
from worqr import testing
from worqr.testing.benches import bench_server


async def test_the_mesh_is_connected_to_the_bench_and_is_its_own_again_afterwards(
    mesh: worqr.Mesh, server: Server
) -> None:
    before = vars(mesh) | vars(mesh._client)
    async with testing.bench(mesh, url=server.url):
        assert mesh.url == server.url
        assert mesh.prefix.startswith("bench")
        assert await mesh.queue("Q1").enqueue(b"T1", b"T2") == 2
        async with mesh.connect():  # as the code under test may
            assert await mesh.queue("Q1").count() == 2
    assert vars(mesh) | vars(mesh._client) == before
    assert (mesh.url, mesh.prefix) == (NOWHERE, "worqr")
    with pytest.raises(worqr.UsageError, match="not connected"):
        await mesh.queue("Q1").enqueue(b"T3")


async def test_a_mesh_that_waits_for_replicas_waits_for_none_on_a_bench(server: Server) -> None:
    mesh = worqr.Mesh(NOWHERE, replicas=1)

    @mesh.task(name="double")
    async def double(n: int) -> None: ...

    async with testing.bench(mesh, url=server.url) as bench:
        await double.enqueue(1)
        await double.options(replicas=2).dispatch(2)
        await mesh.enqueue_many([double.call(3)])
        await mesh.queue("double").enqueue(double.call(4).task)
        assert (await bench.run_until_empty()).finished == 4
        assert bench.sent(double) == [double.call(n) for n in (1, 2, 3)]


async def test_everything_is_as_before_when_the_test_has_failed(mesh: worqr.Mesh, server: Server) -> None:
    before = vars(mesh) | vars(mesh._client)
    with pytest.raises(AssertionError, match="the test's own"):
        async with testing.bench(mesh, url=server.url):
            prefix = mesh.prefix
            await mesh.queue("Q1").enqueue(b"T1")
            await mesh.queue("Q1").dispatch(b"T2", delay=60)
            raise AssertionError("the test's own")
    assert vars(mesh) | vars(mesh._client) == before
    with server.client() as client:
        assert [key for key in client.scan_iter(count=1000) if prefix.encode() in key] == []


async def test_keys_are_deleted_also_when_the_test_is_cancelled(mesh: worqr.Mesh, server: Server) -> None:
    with trio.CancelScope() as scope:
        async with testing.bench(mesh, url=server.url):
            prefix = mesh.prefix
            await mesh.queue("Q1").enqueue(b"T1")
            scope.cancel()
            await trio.sleep_forever()
    assert mesh.prefix == "worqr"
    with server.client() as client:
        assert [key for key in client.scan_iter(count=1000) if prefix.encode() in key] == []


async def test_many_keys_are_deleted(mesh: worqr.Mesh, server: Server) -> None:
    async with testing.bench(mesh, url=server.url):
        prefix = mesh.prefix
        calls = [mesh.call("elsewhere", n=n) for n in range(2500)]
        await mesh.dispatch_many(calls)
        with server.client() as client:
            assert sum(prefix.encode() in key for key in client.scan_iter(count=1000)) > 2500
    with server.client() as client:
        assert [key for key in client.scan_iter(count=1000) if prefix.encode() in key] == []


async def test_other_keys_of_the_server_are_left_alone(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    other = worqr.Mesh(server.url, prefix=prefix)
    async with other.connect():
        await other.queue("Q1").enqueue(b"T1")
        async with testing.bench(mesh, url=server.url):
            await mesh.queue("Q1").enqueue(b"T2")
        assert await other.queue("Q1").tasks() == [b"T1"]


async def test_two_meshes_have_two_benches_and_two_clocks(mesh: worqr.Mesh, server: Server) -> None:
    other = worqr.Mesh(NOWHERE)
    async with testing.bench(mesh, url=server.url) as bench, testing.bench(other, url=server.url):
        for each in (mesh, other):
            await each.queue("Q1").dispatch(b"T1", delay=60)
        await bench.advance(60)
        assert (await mesh.queue("Q1").info()).waiting == 1
        assert (await other.queue("Q1").info()).scheduled == 1


async def test_a_mesh_that_is_taken_already_is_refused(mesh: worqr.Mesh, server: Server) -> None:
    async with testing.bench(mesh, url=server.url):
        with pytest.raises(worqr.UsageError, match="on a bench"):
            async with testing.bench(mesh, url=server.url):
                pytest.fail("it must not open")
        with pytest.raises(worqr.UsageError, match="on a bench"), testing.recording(mesh):
            pytest.fail("it must not record")
    with testing.recording(mesh):
        with pytest.raises(worqr.UsageError, match="in a recording, already"):
            async with testing.bench(mesh, url=server.url):
                pytest.fail("it must not open")


async def test_a_mesh_that_is_connected_is_refused(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="before anything connects it"):
            async with testing.bench(mesh, url=server.url):
                pytest.fail("it must not open")
        assert mesh.prefix == prefix
        assert await mesh.queue("Q1").count() == 0


async def test_a_clock_that_does_not_go_on_is_refused(
    mesh: worqr.Mesh, server: Server, mock_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(worqr.UsageError, match="remove the fixture autojump_clock or mock_clock"):
        async with testing.bench(mesh, url=server.url):
            pass


async def test_a_server_that_is_not_there_leaves_the_mesh_as_it_was(mesh: worqr.Mesh) -> None:
    quick = worqr.Mesh(NOWHERE, patience=0.2)
    with pytest.raises(worqr.Unavailable):
        async with testing.bench(quick, url="unix:///nowhere/at/all"):
            pytest.fail("it must not open")
    assert (quick.url, quick.prefix) == (NOWHERE, "worqr")


async def test_plain_threads_have_the_bench_too(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(name="double", result_ttl=60)
    async def double(n: int) -> int:
        return 2 * n

    async with testing.bench(mesh, url=server.url) as bench:
        prefix, held = mesh.prefix, mesh._client.connections  # as somebody's local variable may hold them
        await trio.to_thread.run_sync(worqr.sync, double.enqueue, 1)
        job = await trio.to_thread.run_sync(worqr.sync, double.dispatch, 2)
        await trio.to_thread.run_sync(worqr.sync, double.options(delay=3600).dispatch, 3)
        assert bench.sent(double) == [double.call(n) for n in (1, 2, 3)]
        await bench.advance(3600)
        assert (await bench.run_until_empty()).finished == 3
        assert await trio.to_thread.run_sync(worqr.sync, job.result) == 4
    assert mesh.url == NOWHERE
    with server.client() as client:
        await until(lambda: not [each for each in client.client_list() if prefix in each["name"]])
    del held


# Which server


async def test_the_embedded_server_is_one_for_all_benches(mesh: worqr.Mesh) -> None:
    urls: set[str] = set()
    for _ in range(3):
        async with testing.bench(mesh):
            assert mesh.url is not None
            urls.add(mesh.url)
            assert await mesh.queue("Q1").enqueue(b"T1") == 1
    assert urls == {bench_server().url}


async def test_a_variable_names_another_server(
    mesh: worqr.Mesh, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORQR_TEST_URL", server.url)
    async with testing.bench(mesh):
        assert mesh.url == server.url


async def test_the_embedded_server_ends_with_the_process(spawn: Callable[..., Child]) -> None:
    child = spawn("from worqr.testing.benches import bench_server; print(bench_server().pid, flush=True)")
    pid = int(await child.line())
    assert await child.ended() == 0, child.errors
    assert child.errors == ""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# What was sent


async def test_what_was_sent_is_told_in_order_also_when_it_has_run(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="mail")
    async def mail(to: str, subject: str = "hello") -> None:
        if to == "Ada":
            await mail.enqueue("Grace", subject="from a handler")

    @mesh.task(name="other")
    async def other() -> None: ...

    await mail.enqueue("Ada")
    await mail.options(delay=60, id="x").dispatch(to="Edsger", subject="later")
    await mesh.enqueue_many([mail.call("Barbara"), other.call(), mail.call("Barbara", "twice")])
    await mesh.dispatch_many([other.call(), mail.options(delay=5).call("Tony")])
    await bench.run_until_empty()
    assert bench.sent(mail) == [
        mail.call("Ada"),
        mail.call("Edsger", "later"),
        mail.call("Barbara", "hello"),
        mail.call("Barbara", "twice"),
        mail.call("Tony"),
        mail.call("Grace", "from a handler"),
    ]
    assert bench.sent(other) == [other.call()] * 2
    assert bench.sent(mail)[1].args == ("Edsger", "later")
    assert bench.sent(mail) != [mail.call("Ada")]


async def test_calls_by_name_are_told_by_name(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    await mesh.enqueue_many([mesh.call("billing.invoice", order=7)])
    assert bench.sent("billing.invoice") == [mesh.call("billing.invoice", order=7)]
    assert bench.sent("billing.other") == []


async def test_what_was_refused_was_not_sent(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="once", max_length=1)
    async def once() -> None: ...

    await once.options(id="x").dispatch()
    with pytest.raises(worqr.QueueFull):
        await once.enqueue()
    with pytest.raises(worqr.QueueFull):
        await mesh.enqueue_many([once.call()])
    with pytest.raises(worqr.Duplicate):
        await once.options(id="x", if_exists="raise").dispatch()
    with pytest.raises(TypeError):
        await once.enqueue(7)  # type: ignore[call-arg]
    assert bench.sent(once) == [once.call()]


async def test_a_bench_forgets_what_was_sent_on_the_one_before(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(name="once")
    async def once() -> None: ...

    async with testing.bench(mesh, url=server.url) as bench:
        await once.enqueue()
    async with testing.bench(mesh, url=server.url) as bench:
        assert bench.sent(once) == []
        assert (await bench.run_until_empty()).finished == 0
