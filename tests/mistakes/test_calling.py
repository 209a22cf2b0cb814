"""Mistakes in a call: all are found in the caller, before anything is sent."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

import worqr
import worqr.testing
from tests.support.servers import Server

mesh = worqr.Mesh("redis://nowhere.invalid")


@mesh.task(name="mails.send")
async def send(to: str, copies: int = 1) -> None: ...


@mesh.task(name="mails.plain")
def plain(what, more=None) -> None: ...  # type: ignore[no-untyped-def]


@mesh.task(name="rows.insert", batch_size=100)
def insert(rows: list[dict[str, str]]) -> None: ...


function: Any = send
anything: Any = mesh
untyped: Any = plain


# Words of other libraries


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (
            lambda: function.delay("ada"),
            "use `await send.enqueue(...)`, or `worqr.sync(send.enqueue, ...)` where no event",
        ),
        (lambda: function.send("ada"), "use `await send.enqueue(...)`"),
        (lambda: function.kiq("ada"), "use `await send.enqueue(...)`"),
        (lambda: function.apply_async(("ada",)), "use `await send.options(delay=60).dispatch(...)`"),
        (lambda: function.enqueue_many(["ada"]), "use `await mesh.enqueue_many(map(send.call, values))`"),
        (lambda: function.s("ada"), "use `send.call(...)`, which is a call as a value"),
        (lambda: function.delay("ada"), "or `worqr.sync(send.enqueue, ...)`"),
        (lambda: function.apply_async(("ada",)), "or `worqr.sync(send.options(delay=60).dispatch, ...)`"),
        (lambda: function.options(delay=5).enqueue("ada"), "use `await send.options(...).dispatch(...)`"),
        (lambda: function.options(delay=5).delay("ada"), "use `await send.options(...).dispatch(...)`"),
    ],
)
def test_a_method_of_another_library(mistake: Callable[[], object], why: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(why)):
        mistake()


job = function.job("x")
queue = mesh.queue("mails")


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda: job.get(timeout=3), "'Job' object has no attribute 'get': use `await job.result(timeout=30)`"),
        (lambda: job.wait(), "use `await job.result(timeout=30)`"),
        (lambda: job.ready(), "use `await job.status()`: its `state` is 'waiting',"),
        (lambda: job.state, "use `await job.status()`: its `state` is 'waiting',"),
        (lambda: job.revoke(), "use `await job.cancel()`"),
        (lambda: function.job("x").get(), "'Job' object has no attribute 'get': use `await job.result("),
        (
            lambda: anything.send_task("mails.send", ["ada"]),
            "'Mesh' object has no attribute 'send_task': use `await fn.enq",
        ),
        (
            lambda: anything.enqueue("mails.send", to="ada"),
            "`await mesh.enqueue_many([mesh.call('shop.send', to='ada')])`",
        ),
        (lambda: anything.delay, "use `await fn.enqueue(...)` of the function, or `worqr.sync(fn.enqueue, ...)`"),
        (lambda: anything.apply_async, "'Mesh' object has no attribute 'apply_async': use `await fn.enq"),
        (lambda: anything.AsyncResult("x"), "use fn.job(id), or mesh.queue('name').job(id)"),
        (lambda: queue.put(b"x"), "'Queue' object has no attribute 'put': use `await queue.enqueue(b'...')`"),
        (lambda: anything.queue("mails").push, "use `await queue.enqueue(b'...')`"),
        (
            lambda: in_a_handler().retry(countdown=5),
            "'Context' object has no attribute 'retry': write raise worqr.Retry(",
        ),
        (lambda: in_a_handler().request.retries, "worqr.current() is it: .id, .attempt, .meta"),
        (lambda: in_a_handler().update_state(state="x"), "use .progress(0.5, 'half')"),
    ],
)
def test_an_attribute_of_an_object_of_another_library(mistake: Callable[[], object], why: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(why)):
        mistake()


def in_a_handler() -> Any:
    with worqr.testing.context():
        return worqr.current()


@pytest.mark.parametrize("thing", [job, mesh, queue, function.job("x"), mesh.queue("q")])
def test_an_attribute_that_no_library_has(thing: Any) -> None:
    with pytest.raises(AttributeError, match=rf"^'{type(thing).__name__}' object has no attribute 'nothing'$"):
        _ = thing.nothing


async def test_a_batch_that_gets_a_function(server: Server, prefix: str) -> None:
    mesh: Any = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        with pytest.raises(TypeError, match=re.escape("write batch.dispatch(fn.call(...)): a batch takes a call")):
            async with mesh.batch() as batch:
                await batch.dispatch(send, "ada")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"eta": dt.datetime.now(dt.UTC)},
            "use run_at, as in fn.options(run_at=datetime.now(UTC) + timedelta(hours=1))",
        ),
        ({"countdown": 60}, "use delay, as in fn.options(delay=60).dispatch(...)"),
        ({"task_id": "1"}, "use id, as in fn.options(id='report-7').dispatch(...)"),
        ({"retry": 3}, "write retry=worqr.RetryPolicy(max_failures=3)"),
        ({"dely": 3}, "dispatch() has no option 'dely'; did you mean 'delay'?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_of_another_library(options: dict[str, Any], why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        function.options(**options)


def test_a_datetime_without_a_timezone() -> None:
    with pytest.raises(worqr.UsageError, match=r"run_at must know its timezone: .* use datetime\.now\(UTC\)"):
        function.options(run_at=dt.datetime.now())


# Arguments


@pytest.mark.parametrize(
    ("mistake", "error", "why"),
    [
        (
            partial(function.call, object()),
            worqr.UsageError,
            "JSON cannot carry these arguments: JSON does not know object",
        ),
        (
            partial(function.call, lambda: 1),
            worqr.UsageError,
            "JSON cannot carry these arguments: JSON does not know function",
        ),
        (partial(untyped.call, float("nan")), worqr.UsageError, "JSON has neither NaN nor infinity"),
        (partial(function.call, 7), worqr.UsageError, "Expected `str`, got `int` - at `$.to`"),
        (partial(function.call), TypeError, "mails.send(): missing a required argument: 'to'"),
        (partial(function.call, "ada", 1, 2), TypeError, "mails.send(): too many positional arguments"),
        (
            partial(function.call, "ada", copeis=2),
            TypeError,
            "mails.send(): got an unexpected keyword argument 'copeis'",
        ),
        (
            partial(function.call, "ada", delay=60),
            TypeError,
            "unexpected keyword argument 'delay'; if it is an option of the job, write send.options(delay=...).dispatch(...)",
        ),
    ],
    ids=["not JSON", "a lambda", "NaN", "a wrong type", "one is missing", "too many", "misspelt", "an option"],
)
def test_arguments_that_its_handler_would_not_take(
    mistake: Callable[[], object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=re.escape(why)):
        mistake()


def test_a_whole_list_for_a_function_that_takes_a_list_of_calls() -> None:
    rows: Any = [{"name": "Ada"}, {"name": "Grace"}]
    why = "Expected `object`, got `array`; a call is one element of the list: for several, mesh.enqueue_many(map(insert.call, "
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        insert.call(rows)


@pytest.mark.parametrize("value", [dt.datetime.now(dt.UTC), (1, 2), b"raw"], ids=["datetime", "tuple", "bytes"])
def test_an_argument_that_would_arrive_as_another_type(value: object) -> None:
    kind = type(value).__name__
    with pytest.raises(worqr.UsageError, match=f"annotate it, as in `what: {kind}`"):
        untyped.call(value)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("lane", "a job takes more, as in queue.dispatch(task, lane=...)"), ("max_lenght", "did you mean 'max_length'?")],
)
async def test_an_option_that_raw_tasks_do_not_have(option: str, remedy: str) -> None:
    words, given = re.escape(f"enqueue() has no option {option!r}; {remedy}"), {option: "acme"}
    with pytest.raises(worqr.UsageError, match=words):
        await worqr.Mesh().queue("mails").enqueue(b"x", **given)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(worqr.UsageError, match=words):
        await trio.to_thread.run_sync(partial(worqr.sync, worqr.Mesh().queue("mails").enqueue, b"x", **given))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_payload_of_17_mb() -> None:
    with pytest.raises(
        worqr.PayloadTooLarge, match=r"17,000,0.. bytes is over the limit of 16,777,216 .*: store the data"
    ):
        function.call("x" * 17_000_000)


class Whole:
    """As an integer of numpy."""

    ndim = 0

    def __index__(self) -> int:
        return 7

    def __float__(self) -> float:
        return 7.0

    def tolist(self) -> int:
        return 7


class Real:
    """As a float of numpy that is no float of Python."""

    def __float__(self) -> float:
        return 7.0


class Several(Whole):
    """As an array of numpy."""

    ndim = 1


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(Whole(), "int(value)"), (Real(), "float(value)"), (Several(), "value.tolist()"), (Word("x"), "str(value)")],
)
def test_a_number_of_another_library(value: object, remedy: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(f".{type(value).__name__}: pass {remedy}")):
        untyped.call({"n": [value]})


@pytest.mark.parametrize("key", [True, None, (1, 2), frozenset({1})])
def test_a_key_that_json_does_not_have(key: object) -> None:
    words = f"JSON does not know {type(key).__name__} as a key: use keys that are texts or numbers"
    with pytest.raises(worqr.UsageError, match=words):
        untyped.call({key: 1})


def test_calls_of_10_mb(caplog: pytest.LogCaptureFixture) -> None:
    registry = worqr.Registry()
    read: Any = registry.task(name="read")(lambda data: None)
    for _ in range(5):
        read.call("x" * 10_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "payload.large: a call of 'read' has 10000011 bytes, which the server keeps in its memory until the task has run: store "
        "the data elsewhere, and pass its name or key"
    ]


def test_progress_in_percent() -> None:
    with worqr.testing.context():
        with pytest.warns(UserWarning, match=re.escape("progress(50): worqr shows a fraction from 0 to 1")) as caught:
            worqr.current().progress(50)
        assert caught[0].filename == __file__
        worqr.current().progress(1)


async def test_calling_the_function_in_place_of_naming_the_call(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    run_here = function("ada")
    with pytest.raises(
        worqr.UsageError, match=re.escape("write send.call(...), not send(...), which runs the function")
    ):
        async with mesh.connect():
            await mesh.enqueue_many([run_here])
    run_here.close()


# Raw queues


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("ada", "use text.encode(); to pass Python values, declare a function with @mesh.task"),
        ({"to": "ada"}, "use json.dumps(value).encode(); to pass Python values, declare a function with @mesh.task"),
        ([1, 2], "use json.dumps(value).encode(); to pass Python values, declare a function with @mesh.task"),
        (7, "use json.dumps(value).encode()"),
        ([b"a", b"b"], "pass several tasks as arguments, as in queue.enqueue(*tasks)"),
        (send.call("ada"), "pass calls to mesh.enqueue_many([...]) or mesh.dispatch_many([...])"),
        (object(), "to pass Python values, declare a function with @mesh.task"),
    ],
    ids=["str", "dict", "list", "int", "list of bytes", "call", "object"],
)
def test_something_else_than_bytes_in_a_raw_queue(task: Any, hint: str) -> None:
    queue = mesh.queue("mails")
    for mistake in (partial(worqr.sync, queue.enqueue), partial(worqr.sync, queue.dispatch), queue.enqueue):
        with pytest.raises(worqr.UsageError) as error:
            mistake(task)
        wanted = f"a task must be bytes, bytearray or memoryview, not {type(task).__name__}: {hint}"
        assert str(error.value).startswith(wanted)


# Threads


async def test_a_call_from_a_thread_says_what_to_use(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    add = mesh.task(name="add")(lambda: None)
    async with mesh.connect():

        def in_a_thread() -> None:
            with pytest.raises(worqr.UsageError, match=r"Write worqr\.sync\(add\.enqueue, \.\.\.\)"):
                add.enqueue()
            worqr.sync(add.enqueue)

        await trio.to_thread.run_sync(in_a_thread)
        assert (await add.queue.info()).waiting == 1
        await add.queue.delete()
    await trio.to_thread.run_sync(mesh.close)
