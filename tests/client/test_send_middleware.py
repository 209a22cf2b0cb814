"""What send middleware does to the calls of all ways to send, and the default options of a mesh."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, cast

import pytest

import worqr
from tests.support.servers import Server
from worqr import testing

tenant: ContextVar[str] = ContextVar("tenant", default="acme")


def stamp(sending: worqr.Sending) -> None:
    sending.set(meta={"tenant": tenant.get()})


def lower(sending: worqr.Sending) -> None:
    sending.set(meta={"from": sending.meta["tenant"].lower(), "function": sending.name})


def meshed(prefix: str, *middleware: worqr.SendMiddleware) -> worqr.Mesh:
    return worqr.Mesh(prefix=prefix, send_middleware=middleware or [stamp])


Send = Callable[[worqr.Mesh, worqr.AsyncFunction[[int], None]], Awaitable[object]]


async def by_batch(mesh: worqr.Mesh, note: worqr.AsyncFunction[[int], None]) -> None:
    async with mesh.batch() as batch:
        await batch.dispatch(note.call(1))


async def by_follow_up(mesh: worqr.Mesh, note: worqr.AsyncFunction[[int], None]) -> None:
    async with mesh.batch(then=note.call(1)):
        pass


async def by_workflow(mesh: worqr.Mesh, note: worqr.AsyncFunction[[int], None]) -> None:
    async def parent() -> None:
        await note.run(1)

    await mesh.workflow(name="parent")(parent).dispatch()


async def by_schedule(mesh: worqr.Mesh, note: worqr.AsyncFunction[[int], None]) -> None:
    await mesh.schedule("note/1", note.call(1), every=3600)
    await mesh.schedule_handle("note/1").run_now()


async def by_job(mesh: worqr.Mesh, note: worqr.AsyncFunction[[int], None]) -> None:
    @mesh.task(name="before")
    async def before() -> None: ...

    await before.options(then=note.call(1)).dispatch()


WAYS: dict[str, Send] = {
    "enqueue": lambda mesh, note: note.enqueue(1),
    "dispatch": lambda mesh, note: note.dispatch(1),
    "options": lambda mesh, note: note.options(delay=0).dispatch(1),
    "enqueue_many": lambda mesh, note: mesh.enqueue_many([note.call(1)]),
    "dispatch_many": lambda mesh, note: mesh.dispatch_many([note.call(1)]),
    "by name": lambda mesh, note: mesh.dispatch_many([mesh.call("note", n=1)]),
    "raw": lambda mesh, note: mesh.queue("note").enqueue(b'{"n":1}'),
    "raw job": lambda mesh, note: mesh.queue("note").dispatch(b'{"n":1}'),
    "batch": by_batch,
    "follow-up": by_follow_up,
    "workflow": by_workflow,
    "schedule": by_schedule,
    "then": by_job,
}


@pytest.mark.parametrize("way", WAYS)
async def test_each_way_to_send_goes_through_it(server: Server, prefix: str, way: str) -> None:
    mesh, seen = meshed(prefix, stamp, lower), list[dict[str, str]]()

    @mesh.task(name="note")
    async def note(n: int) -> None:
        seen.append(dict(worqr.current().meta))

    async with testing.bench(mesh, url=server.url) as bench:
        await WAYS[way](mesh, note)
        await bench.run_until_empty(raise_errors=False)
    assert seen == [{"tenant": "acme", "from": "acme", "function": "note"}]


async def test_it_runs_once_for_each_call_and_in_the_context_of_the_sender(server: Server, prefix: str) -> None:
    calls: list[tuple[object, ...]] = []

    def count(sending: worqr.Sending) -> None:
        calls.append((sending.name, *sending.args, tenant.get()))
        if sending.args == (2,):
            sending.set(lane="second")

    mesh = meshed(prefix, count)

    @mesh.task(name="note")
    async def note(n: int) -> None: ...

    async with testing.bench(mesh, url=server.url) as bench:
        tenant.set("globex")
        assert await mesh.enqueue_many([note.call(1), note.call(2), note.call(3)]) == 3
        assert calls == [("note", n, "globex") for n in (1, 2, 3)]
        assert [lane.name for lane in await note.queue.lanes()] == ["second"]
        await bench.run_until_empty(raise_errors=False)


@pytest.mark.parametrize("records", [False, True])
async def test_calls_with_options_are_no_plain_tasks(server: Server, prefix: str, records: bool) -> None:
    mesh = meshed(prefix)

    @mesh.task(name="note")
    async def note(n: int) -> None: ...

    with pytest.raises(worqr.UsageError, match="a call of 'note' has options"):
        if records:
            with testing.recording(mesh):
                await mesh.enqueue_many([note.options(id="x").call(1)])
        else:
            async with testing.bench(mesh, url=server.url):
                await mesh.enqueue_many([note.options(id="x").call(1)])


async def test_a_lane_that_it_gives_has_the_bound_of_the_function(server: Server, prefix: str) -> None:
    mesh = meshed(prefix, lambda sending: sending.set(lane=tenant.get()))

    @mesh.task(name="note", lanes=worqr.Lanes(max_length=2))
    async def note(n: int) -> None: ...

    async with testing.bench(mesh, url=server.url):
        await note.enqueue(1)
        await note.dispatch(2)
        for send in (note.enqueue, note.dispatch):
            with pytest.raises(worqr.QueueFull):
                await send(3)


async def test_its_tags_may_come_from_a_generator(prefix: str) -> None:
    mesh = meshed(prefix, lambda sending: sending.set(tags=cast("Any", (each for each in ("b", "a")))))

    @mesh.task(name="note")
    async def note(n: int) -> None: ...

    with testing.recording(mesh) as sent:
        await note.enqueue(1)
    options: Any = sent.calls(note)[0]._options  # pyright: ignore[reportPrivateUsage]
    assert options["tags"] == "a\nb"


async def test_it_may_refuse_a_call(server: Server, prefix: str) -> None:
    def refuse(sending: worqr.Sending) -> None:
        raise PermissionError(f"{sending.name} is closed")

    mesh = meshed(prefix, refuse)

    @mesh.task(name="note")
    async def note(n: int) -> None: ...

    async with testing.bench(mesh, url=server.url):
        for way in ("enqueue", "dispatch", "enqueue_many", "raw", "raw job"):
            with pytest.raises(PermissionError, match="note is closed"):
                await WAYS[way](mesh, note)
        assert await note.queue.count() == 0


async def test_what_it_sets_takes_the_place_of_what_the_call_has_but_names_of_meta_are_added(prefix: str) -> None:
    def later(sending: worqr.Sending) -> None:
        assert (sending.lane, dict(sending.meta)) == ("own", {"a": "1", "b": "1"})
        sending.set(meta={"b": "2"}, lane="other", delay=60, timeout=5)

    mesh = meshed(prefix, later)

    @mesh.task(name="note", retry=worqr.RetryPolicy(max_failures=2))
    async def note(n: int) -> None: ...

    with testing.recording(mesh) as sent:
        await note.options(meta={"a": "1", "b": "1"}, lane="own", delay=5).dispatch(1)
    (call,) = sent.calls(note)
    options: Any = call._options  # pyright: ignore[reportPrivateUsage]
    assert (options["meta"], options["lane"], options["delay"]) == ('{"a":"1","b":"2"}', "other", 60000)
    assert options["fields"] == {"timeout": "5000"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"id": "x"}, "sending.set() has no option 'id'; it takes meta, lane"),
        ({"delay": -1}, "delay must be"),
        ({"meta": 7}, "meta must be a mapping"),
    ],
)
async def test_what_it_may_not_set_is_refused_where_it_is_set(prefix: str, options: Any, what: str) -> None:
    mesh = meshed(prefix, lambda sending: sending.set(**options))
    with testing.recording(mesh), pytest.raises(worqr.UsageError) as refused:
        await mesh.task(name="note")(_note).enqueue(1)
    assert what in str(refused.value)


async def test_what_several_set_is_added_up_and_the_last_time_counts(prefix: str) -> None:
    def first(sending: worqr.Sending) -> None:
        sending.set(tags={"a"}, delay=60, expires=7)

    def second(sending: worqr.Sending) -> None:
        sending.set(tags={"b"}, run_at=datetime(2030, 1, 1, tzinfo=UTC), expires=datetime(2031, 1, 1, tzinfo=UTC))

    mesh = meshed(prefix, first, second)
    note = mesh.task(name="note")(_note)
    with testing.recording(mesh) as sent:
        await note.options(tags={"own"}, delay=5, expires=5).dispatch(1)
    options: Any = sent.calls(note)[0]._options  # pyright: ignore[reportPrivateUsage]
    assert sorted(options["tags"].split("\n")) == ["a", "b", "own"]
    assert (options["run_at"], options["expires_at"]) == (1893456000000, "1924992000000")
    assert not options.keys() & {"delay", "expires"}


async def _note(n: int) -> None: ...


async def test_a_unique_raw_task_cannot_become_a_job(server: Server, prefix: str) -> None:
    mesh = meshed(prefix)
    async with testing.bench(mesh, url=server.url):
        with pytest.raises(worqr.UsageError, match="send_middleware makes jobs of the tasks of queue 'raw'"):
            await mesh.queue("raw").enqueue(b"x", unique=True)


@pytest.mark.parametrize("given", [7, "stamp", [_note], [7]])
def test_what_is_no_send_middleware_is_refused(given: Any) -> None:
    with pytest.raises(worqr.UsageError, match="send_middleware must be"):
        worqr.Mesh(send_middleware=given)


# Default options


async def test_defaults_hold_for_declared_and_included_functions_whose_own_options_come_first(
    server: Server, prefix: str
) -> None:
    failed: list[str] = []
    registry = worqr.Registry()
    mesh = worqr.Mesh(
        prefix=prefix,
        defaults=worqr.HandlerOptions(
            result_ttl=60,
            timeout=5,
            max_length=3,
            retry=worqr.RetryPolicy(max_failures=1),
            on_failure=lambda failure: failed.append(f"{failure.queue} by default"),
        ),
    )

    @registry.task(name="included")
    async def included(n: int) -> int:
        return n

    @registry.task(name="own", result_ttl=None, max_length=1)
    async def own(n: int) -> int:
        raise ValueError(n)

    @own.on_failure
    def _noted(failure: worqr.Failed) -> None:
        failed.append(f"{failure.queue} itself")

    @mesh.task(name="fails")
    async def fails(n: int) -> int:
        raise ValueError(n)

    mesh.include(registry)
    async with testing.bench(mesh, url=server.url) as bench:
        job, _, _ = [await included.dispatch(n) for n in (1, 2, 3)]
        with pytest.raises(worqr.QueueFull):
            await included.enqueue(4)
        await own.enqueue(1)
        with pytest.raises(worqr.QueueFull):
            await own.enqueue(2)
        await fails.enqueue(1)
        await bench.run_until_empty(raise_errors=False)
        assert await job.result(timeout=5) == 1
    assert sorted(failed) == ["fails by default", "own itself"]


@pytest.mark.parametrize(
    ("defaults", "what"),
    [
        (7, "defaults must be worqr.HandlerOptions"),
        ({"timout": 5}, "HandlerOptions() has no option 'timout'"),
        ({"timeout": -1}, "timeout"),
        ({"limit": worqr.Limit(1)}, "limit is an option of one function, and no default: write @mesh.task(limit=...)"),
        ({"runs_in": "thread"}, "write Mesh(runs_in=...)"),
        ({"on_failure_timeout": 5}, "'defaults' has none"),
    ],
)
def test_what_is_no_default_is_refused(defaults: Any, what: str) -> None:
    with pytest.raises(worqr.UsageError) as refused:
        worqr.Mesh(defaults=defaults)
    assert what in str(refused.value)
