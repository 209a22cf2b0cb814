"""Many calls in few round trips: how many requests they are, what is stored when something goes wrong, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import at_most, eventually, spying
from tests.support.patience import have_patience
from tests.support.servers import Server

MIB = 1 << 20


def numbered(mesh: worqr.Mesh, name: str = "Q1", **options: Any) -> worqr.Function[[int], int]:
    """A function of one number, whose queue is `name`."""

    def double(n: int) -> int:
        return 2 * n

    return mesh.task(name=name, **options)(double)


def stored(*functions: worqr.Function[[int], int]) -> Callable[[], Any]:
    async def count() -> int:
        return sum([await function.queue.count() for function in functions])

    return count


# Enqueueing


@pytest.mark.parametrize(("n", "requests"), [(0, 0), (1, 1), (1000, 1), (1001, 2), (2500, 3)])
async def test_a_thousand_calls_are_one_request(
    mesh: worqr.Mesh, server: Server, prefix: str, n: int, requests: int
) -> None:
    double = numbered(mesh)
    async with mesh.connect():
        await double.queue.count()
        with spying(server, prefix) as spy:
            assert await mesh.enqueue_many(double.call(i) for i in range(n)) == n
            assert spy.calls()["enqueue"] == requests
        assert await double.queue.count() == n
        if n:
            assert await double.queue.peek() == b'{"n":0}'
            assert (await double.queue.tasks(1)) == [b'{"n":%d}' % (n - 1)]
        await double.queue.delete()


async def test_each_queue_of_a_thousand_is_one_request(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    functions = [numbered(mesh, f"Q{i}") for i in range(3)]
    async with mesh.connect():
        await mesh.queue("Q0").count()
        with spying(server, prefix) as spy:
            calls = [functions[i % 3].call(i) for i in range(1500)]
            assert await mesh.enqueue_many(calls) == 1500
            assert spy.calls()["enqueue"] == 6
        for i, function in enumerate(functions):
            assert await function.queue.tasks(500) == [b'{"n":%d}' % n for n in range(1500 - 3 + i, -1, -3)]
            await function.queue.delete()


def requests_to(server: Server) -> int:
    """How many scripts the server was asked to run; a spy would have it print all of their arguments."""
    return int(server.client().info("commandstats")["cmdstat_evalsha"]["calls"])


async def test_large_calls_are_more_requests(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(name="Q1")
    def store(data: bytes, /) -> None: ...

    async with mesh.connect():
        q = mesh.queue("Q1")
        await store.enqueue(b"00")
        before = requests_to(server)
        assert await mesh.enqueue_many([store.call(b"%02d" % i + bytes(MIB)) for i in range(17)]) == 17
        assert requests_to(server) - before == 3
        assert [task[:2] for task in reversed(await q.tasks(3))] == [b"14", b"15", b"16"]
        assert (await q.peek() or b"")[:2] == b"00"
        await q.delete()


async def test_a_call_may_be_sent_twice(mesh: worqr.Mesh) -> None:
    double = numbered(mesh)
    call = double.call(1)
    async with mesh.connect():
        assert await mesh.enqueue_many([call, call]) == 2
        assert await mesh.enqueue_many([call]) == 1
        jobs = await mesh.dispatch_many([call, call])
        assert len({job.id for job in jobs}) == 2
        assert await double.queue.count() == 5
        await double.queue.delete()


async def test_an_iterator_is_read_as_it_goes(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    double = numbered(mesh)
    seen: list[int] = []

    def calls() -> Iterator[worqr.Call[int]]:
        for i in range(2000):
            if i == 1999:
                seen.append(1)
            yield double.call(i)
        raise KeyError("the file ended early")

    async with mesh.connect():
        with pytest.raises(KeyError) as raised:
            await mesh.enqueue_many(calls())
        assert raised.value.__notes__ == ["the first 2,000 calls were stored"]
        assert await double.queue.count() == 2000
        await double.queue.delete()
    assert seen == [1]


async def test_options_belong_to_jobs(mesh: worqr.Mesh) -> None:
    double = numbered(mesh, max_length=5)
    async with mesh.connect():
        for options in ({"id": "x"}, {"delay": 5}, {"result_ttl": 60}):
            calls = [double.call(1), double.options(**options).call(2)]
            with pytest.raises(
                worqr.UsageError, match="a call of 'Q1' has options, which make it a job: use dispatch_many"
            ):
                await mesh.enqueue_many(calls)
        assert await double.queue.count() == 0
        assert await mesh.enqueue_many([double.call(1), double.options(max_length=7).call(2)]) == 2
        await double.queue.delete()


@pytest.mark.parametrize("wrong", [b"task", None, ("Q1", b"x"), numbered])
async def test_only_calls_can_be_sent(mesh: worqr.Mesh, wrong: Any) -> None:
    double = numbered(mesh)
    async with mesh.connect():
        for send in (mesh.enqueue_many, mesh.dispatch_many):
            with pytest.raises(worqr.UsageError, match=r"give calls, as in function\.call\(\.\.\.\), not "):
                await send([double.call(1), wrong])
        assert await double.queue.count() == 0


async def test_a_function_that_was_called_instead_is_told_how_to_make_a_call(mesh: worqr.Mesh) -> None:
    ran: list[int] = []

    @mesh.task
    async def greet(n: int) -> None:
        ran.append(n)

    @mesh.task
    def shout(n: int) -> None:
        ran.append(n)

    called: Any = shout
    async with mesh.connect():
        with pytest.raises(
            worqr.UsageError, match=r"give calls: write greet\.call\(\.\.\.\), not greet\(\.\.\.\), which runs"
        ):
            await mesh.enqueue_many(cast("Any", [greet(1)]))
        assert ran == []  # and no warning of a coroutine that nobody has awaited
        with pytest.raises(worqr.UsageError, match=r"not None: function\(\.\.\.\) runs the function here and now"):
            await mesh.dispatch_many(cast("Any", [called(2)]))


async def test_a_call_of_no_mesh_yet_is_refused(mesh: worqr.Mesh) -> None:
    function = worqr.Registry().task(name="Q1")(print_it)
    async with mesh.connect():
        for send in (mesh.enqueue_many, mesh.dispatch_many):
            with pytest.raises(worqr.UsageError, match="'Q1' belongs to a Registry that no mesh has included yet"):
                await send([function.call(1)])


def print_it(n: int) -> None: ...


async def test_a_call_that_is_too_large_for_this_mesh_is_refused(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    small = new_mesh(max_payload=100)
    async with small.connect():
        with pytest.raises(worqr.PayloadTooLarge):
            await small.enqueue_many([mesh.call("Q1", b"x"), mesh.call("Q1", bytes(101))])
        assert await small.queue("Q1").count() == 0


async def test_a_full_queue_says_how_many_were_stored(mesh: worqr.Mesh) -> None:
    double, other = numbered(mesh, max_length=1500), numbered(mesh, "Q2")
    async with mesh.connect():
        calls = [double.call(i) if i % 2 else other.call(i) for i in range(4000)]
        with pytest.raises(worqr.QueueFull) as raised:
            await mesh.enqueue_many(calls)
        assert raised.value.__notes__ == ["the first 3,000 calls were stored; of the 1,000 after them, some may be"]
        assert await double.queue.count() == 1500
        assert await other.queue.count() == 2000
        for function in (double, other):
            await function.queue.delete()


async def test_each_call_has_a_bound_of_its_own(mesh: worqr.Mesh) -> None:
    double = numbered(mesh)
    async with mesh.connect():
        await double.enqueue(1)
        with pytest.raises(worqr.QueueFull, match="over its max_length of 1"):
            await mesh.enqueue_many([double.call(2), double.options(max_length=1).call(3), double.call(4)])
        assert await double.queue.tasks() == [b'{"n":4}', b'{"n":2}', b'{"n":1}']
        await double.queue.delete()


async def test_one_call_that_is_refused_needs_no_note(mesh: worqr.Mesh) -> None:
    double = numbered(mesh, max_length=1)
    async with mesh.connect():
        await double.enqueue(1)
        for send in (mesh.enqueue_many, mesh.dispatch_many):
            with pytest.raises(worqr.QueueFull) as raised:
                await send([double.call(1)])
            assert not hasattr(raised.value, "__notes__")
        await double.queue.delete()


# Dispatching


@pytest.mark.parametrize(("n", "requests"), [(0, 0), (1000, 1), (1001, 2)])
async def test_a_thousand_jobs_are_one_request(
    mesh: worqr.Mesh, server: Server, prefix: str, n: int, requests: int
) -> None:
    double = numbered(mesh)
    async with mesh.connect():
        await double.queue.count()
        with spying(server, prefix) as spy:
            jobs = await mesh.dispatch_many(double.options(id=f"job-{i}").call(i) for i in range(n))
            assert spy.calls()["dispatch_jobs"] == requests
        assert [job.id for job in jobs] == [f"job-{i}" for i in range(n)]
        assert {job.outcome for job in jobs} <= {"created"}
        assert await double.queue.count() == n
        await double.queue.delete()


async def test_handles_come_in_the_order_of_the_calls(mesh: worqr.Mesh) -> None:
    functions = [numbered(mesh, f"Q{i}", result_ttl=60) for i in range(3)]
    async with mesh.join():
        calls = [functions[i % 3].call(i) for i in range(30)]
        jobs = await mesh.dispatch_many(calls)
        assert [job.queue for job in jobs] == [f"Q{i % 3}" for i in range(30)]
        assert [await job.result(timeout=30) for job in jobs] == [2 * i for i in range(30)]


async def test_large_jobs_are_more_requests(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(name="Q1")
    def store(data: bytes, /) -> None: ...

    async with mesh.connect():
        await store.enqueue(b"00")
        before = requests_to(server)
        calls = [store.options(id=str(i)).call(bytes(MIB)) for i in range(9)]
        assert [job.id for job in await mesh.dispatch_many(calls)] == [str(i) for i in range(9)]
        assert requests_to(server) - before == 2
        await mesh.queue("Q1").delete()


async def test_options_and_types_go_with_each_call(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    double = numbered(mesh)
    async with mesh.join(), other.connect():
        later = double.options(id="later", delay=60).call(1)
        kept = double.options(id="kept", result_ttl=60, meta={"tenant": "x"}).call(2)
        by_name = mesh.call("Q1", n=3)
        jobs = await mesh.dispatch_many([later, kept, by_name])
        assert (await jobs[0].status()).state == "scheduled"
        assert await jobs[1].result(timeout=30) == 4
        assert jobs[2].outcome == "created"
        assert (await jobs[0].cancel()).waiting == 1
        again = await mesh.dispatch_many(
            [double.options(id="a").call(1), double.options(id="a", if_exists="skip").call(2)]
        )
        assert [job.outcome for job in again] == ["created", "unchanged"]
        await eventually(double.queue.count, 0)
        await eventually(double.queue.running, [])


async def test_a_duplicate_leaves_the_others_dispatched(mesh: worqr.Mesh) -> None:
    double = numbered(mesh)
    async with mesh.connect():
        calls = [double.options(id=str(i), if_exists="raise").call(i) for i in range(1500)]
        calls[1200] = double.options(id="7", if_exists="raise").call(1200)
        with pytest.raises(worqr.Duplicate, match="the id '7' is taken on queue 'Q1'") as raised:
            await mesh.dispatch_many(calls)
        assert raised.value.job.id == "7"
        assert raised.value.__notes__ == ["the first 1,000 calls were dispatched; of the 500 after them, some may be"]
        assert await double.queue.count() == 1499
        await double.queue.delete()


# Away


async def test_what_was_not_written_is_withdrawn_when_it_is_cancelled(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=60)
    functions = [numbered(mesh, f"Q{i}") for i in range(3)]
    async with mesh.connect():
        await functions[0].enqueue(1)
        own_server.stop()
        for send in (mesh.enqueue_many, mesh.dispatch_many):
            with trio.move_on_after(0.3) as scope:
                await send([functions[i % 3].call(i) for i in range(30)])
            assert scope.cancelled_caught
        own_server.start()
        await functions[0].enqueue(2)
        await eventually(stored(*functions), 2, within=20)
        await functions[0].queue.delete()


async def test_calls_that_wait_for_the_server_are_sent_when_it_is_back(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=60)
    functions = [numbered(mesh, f"Q{i}") for i in range(3)]
    done: list[int] = []
    async with mesh.connect(), at_most(50), trio.open_nursery() as nursery:
        await functions[0].queue.count()
        own_server.stop()

        async def send() -> None:
            done.append(await mesh.enqueue_many([functions[i % 3].call(i) for i in range(30)]))
            done.append(len(await mesh.dispatch_many([functions[i % 3].call(i) for i in range(30)])))

        nursery.start_soon(send)
        await trio.sleep(0.1)
        assert not done
        own_server.start()
    assert done == [30, 30]
    async with mesh.connect():
        assert await stored(*functions)() == 60
        for function in functions:
            await function.queue.delete()


async def test_patience_ends(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    double = numbered(mesh)
    async with mesh.connect():
        await double.queue.count()
        have_patience(mesh, 3)
        own_server.stop()

        async def fail(send: Callable[[Any], Any]) -> None:
            with pytest.raises(worqr.Unavailable) as raised:
                await send([double.call(i) for i in range(5)])
            assert raised.value.__notes__[-1].endswith("of the 5 after them, some may be")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, mesh.enqueue_many)
            nursery.start_soon(fail, mesh.dispatch_many)
    own_server.start()


async def test_sending_nothing_is_a_checkpoint(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        with trio.CancelScope() as scope:
            scope.cancel()
            await mesh.enqueue_many([])
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await mesh.dispatch_many([])
        assert scope.cancelled_caught
