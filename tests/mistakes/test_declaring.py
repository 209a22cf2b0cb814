"""Mistakes in the declaration of a function or a schedule: all are found when the module is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

import worqr
from tests.mistakes.conftest import Ended

mesh = worqr.Mesh("redis://nowhere.invalid")
declare: Any = mesh.task


class Customer:
    """What JSON does not know."""


async def send(to: str) -> None: ...


def customer(who: Customer) -> None: ...


def anything(*args: int) -> None: ...


def lines() -> Iterator[str]:
    yield "a"


class Shop:
    def sell(self, what: str) -> None: ...


@pytest.mark.parametrize("name", ["task", "workflow", "every"])
def test_a_decorator_of_the_module_in_place_of_one_of_a_mesh(name: str) -> None:
    why = f"module 'worqr' has no attribute '{name}': write mesh = worqr.Mesh(), and @mesh.{name} above the function"
    with pytest.raises(AttributeError, match=re.escape(why)):
        getattr(worqr, name)


# Options


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_retries": 3}, "task() has no option 'max_retries'; use retry=worqr.RetryPolicy(max_failures=3)"),
        ({"retries": 3}, "task() has no option 'retries'; use retry=worqr.RetryPolicy(max_failures=3)"),
        ({"queue": "mails"}, "a function's name is its queue: set it with @mesh.task(name=...)"),
        ({"eta": datetime.now()}, "task() has no option 'eta'; use run_at, as in fn.options(run_at=datetime.now(UTC)"),
        ({"countdown": 60}, "task() has no option 'countdown'; use delay, as in fn.options(delay=60).dispatch(...)"),
        ({"bind": True}, "worqr.current() is the running task"),
        ({"acks_late": True}, "worqr always acknowledges a task after its run"),
        ({"ignore_result": True}, "results are not kept unless you set result_ttl"),
        ({"rate_limit": "10/m"}, "task() has no option 'rate_limit'; use limit=worqr.Limit(rate=10, per=60)"),
        ({"tenant": "customer"}, "task() has no option 'tenant'; use lanes=worqr.Lanes('customer') for a parameter"),
        ({"group": "a"}, "or fn.options(lane='acme')"),
        (
            {"cron": "0 3 * * *"},
            "task() has no option 'cron'; write @mesh.cron('0 3 * * *') or @mesh.every(60) above @mesh.task",
        ),
        ({"wait": 5}, "it is an option of a call: fn.options(wait=30)"),
        (
            {"soft_time_limit": 5},
            "use timeout, in seconds: it cancels a coroutine, kills a process, and asks a thread to stop",
        ),
        (
            {"base": object},
            "share options with a dict, as in BASE: worqr.HandlerOptions = {'timeout': 30} and @mesh.task(**BASE)",
        ),
        ({"dont_autoretry_for": (OSError,)}, "use retry=worqr.RetryPolicy(fail_on=(ValueError,))"),
        ({"expires": 60}, "it is an option of a call: fn.options(expires=60).dispatch(...)"),
        ({"tiemout": 5}, "task() has no option 'tiemout'; did you mean 'timeout'?"),
        ({"retry": 3}, "retry must be a worqr.RetryPolicy, not 3: write retry=worqr.RetryPolicy(max_failures=3)"),
        ({"timeout": "5"}, "timeout must be seconds (a number or a timedelta), not '5'"),
        ({"concurrency": "auto"}, "concurrency of task must be a whole number of at least 1, not 'auto'"),
        ({"runs_in": "threads"}, "runs_in must be one of 'loop', 'thread', 'process', 'asyncio', not 'threads'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_of_another_library_or_with_another_value(options: dict[str, Any], why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        declare(**options)(send)


worqr_: Any = worqr
"""Without the type checker, which finds these mistakes."""


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (
            lambda: worqr_.RetryPolicy(max_retries=3),
            "RetryPolicy() has no option 'max_retries'; use max_failures, which count",
        ),
        (lambda: worqr_.RetryPolicy(max_attempts=3, backoff=2), "use max_failures, which counts the first run, too"),
        (lambda: worqr_.RetryPolicy(max_failures=3, backoff=2), "or set min_backoff and max_backoff"),
        (lambda: worqr_.RetryPolicy(3), "write worqr.RetryPolicy(max_failures=3)"),
        (lambda: worqr_.RetryPolicy(jiter=True), "RetryPolicy() has no option 'jiter'; did you mean 'jitter'?"),
        (lambda: worqr_.Retry(countdown=5), "use delay, in seconds, as in raise worqr.Retry(delay=5)"),
        (lambda: worqr_.Retry(exc=OSError()), "write raise worqr.Retry(delay=5) from error"),
        (lambda: worqr_.Retry("why", 5), "write worqr.Retry('why', delay=5)"),
        (lambda: worqr_.RateLimited(delay=5), "write raise worqr.RateLimited(30)"),
        (lambda: worqr_.RateLimited(), "write raise worqr.RateLimited(30)"),
        (
            lambda: worqr_.Limit(10, 60),
            "write worqr.Limit(10) for 10 at once, or worqr.Limit(rate=10, per=60) for 10 starts",
        ),
        (lambda: worqr_.Limit(rate=10, period=60), "use per, in seconds, as in worqr.Limit(rate=10, per=60)"),
        (lambda: worqr_.Limit("10/m"), "not '10/m': write Limit(rate=10, per=60)"),
        (lambda: worqr_.Limit(rate="100/hour"), "not '100/hour': write Limit(rate=100, per=3600)"),
        (lambda: worqr_.Limit("10"), "not '10': write Limit(10)"),
        (lambda: worqr_.Limit(rate=0.5), "not 0.5: write Limit(rate=1, per=2)"),
        (lambda: worqr_.Limit(rate=2.5, per=60), "not 2.5: write Limit(rate=5, per=120)"),
        (lambda: declared("every", minutes=5), "use a timedelta or seconds, as in mesh.every(timedelta(minutes=5))"),
        (
            lambda: declared("every", 60, minutes=5),
            "use a timedelta or seconds, as in mesh.every(timedelta(minutes=5))",
        ),
    ],
)
def test_an_option_of_an_object_of_another_library(mistake: Callable[[], object], why: str) -> None:
    with pytest.raises((TypeError, worqr.UsageError), match=re.escape(why)):
        mistake()


# The function


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (
            customer,
            "parameter 'who' has the type tests.mistakes.test_declaring.Customer, which JSON does not know; take a",
        ),
        (anything, "*args has no fixed names and types to travel by: name its parameters, or take one list or dict"),
        (lines, "is a generator: calling it runs nothing; take the `yield` out of it"),
        (
            Shop.sell,
            "Shop.sell is a method: no self travels with its arguments; declare a function, a @staticmethod, or",
        ),
        (lambda: None, "has no name to be known by: give it one, as in mesh.task(name=...)"),
        (Shop, "@mesh.task takes a function, not"),
        ("mails", "@mesh.task takes a function, not 'mails'"),
    ],
    ids=["a class in the signature", "*args", "a generator", "a method", "a lambda", "a class", "a str"],
)
def test_what_cannot_be_a_task(fn: Any, why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        declare(fn)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (send, "is async, and runs_in='process' calls plain functions: take the async off it"),
        (
            lambda: None,
            "is a lambda, which another process cannot import: make it a def, and define it at the top level",
        ),
    ],
    ids=["async", "lambda"],
)
def test_what_cannot_run_in_a_process(fn: Any, why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        declare(name="x", runs_in="process")(fn)


def test_a_closure_cannot_run_in_a_process() -> None:
    def inner() -> None: ...

    with pytest.raises(worqr.UsageError, match="define it at the top level of a module that can be imported"):
        declare(runs_in="process")(inner)


def test_a_process_of_a_script_without_a_guard(program: Callable[..., Ended]) -> None:
    ended = program(
        "import worqr\n"
        "mesh = worqr.Mesh()\n"
        "@mesh.task(runs_in='process', retry=worqr.RetryPolicy(max_failures=1), result_ttl=60)\n"
        "def work() -> None: ...\n"
        "with mesh.join_in_thread():\n"
        "    worqr.sync(worqr.sync(work.dispatch).result, timeout=60)\n"
    )
    assert ended.code == 1
    assert "worqr.JobFailed: <Job" in ended.err
    assert 'put what starts the application under `if __name__ == "__main__":`' in ended.err


def test_a_failure_handler_that_takes_nothing() -> None:
    function = worqr.Registry().task(name="x")(send)

    def tell() -> None: ...

    handler: Any = tell
    mistakes: list[Callable[[], object]] = [
        lambda: function.on_failure(handler),
        lambda: declare(name="y", on_failure=handler),
    ]
    for mistake in mistakes:
        with pytest.raises(worqr.UsageError) as error:
            mistake()
        assert "tell" in str(error.value)
        assert "is called with one argument, a worqr.Failed (too many positional arguments)" in str(error.value)
        assert "declare it as def on_failure(failed: worqr.Failed)" in str(error.value)


def test_a_failure_handler_may_take_its_record_in_any_way() -> None:
    class Handler:
        def __call__(self, failed: worqr.Failed, _also: int = 0) -> None: ...

        def method(self, failed: worqr.Failed) -> None: ...

    handlers: list[Any] = [
        Handler(),
        Handler().method,
        print,
        lambda *all: None,
        mesh.task(name="told")(Handler().method),
    ]
    for handler in handlers:
        _ = worqr.Registry().task(name="x", on_failure=handler)(send)


# Declared twice


def test_a_notebook_cell_that_runs_twice(program: Callable[..., Ended]) -> None:
    cell = "@mesh.task\ndef add(a: int) -> int: return a + %s\n"
    ended = program(
        "import code, sys\n"
        "sys.modules['__main__'].__dict__.pop('__file__')\n"  # as in a notebook, or in a console
        f"exec('import worqr\\nmesh = worqr.Mesh()\\n' + {cell % 1!r})\n"
        f"exec({cell % 2!r})\n"
        "print(mesh.functions, add(1))\n"
    )
    assert (ended.code, ended.out) == (0, "{'__main__.add': <Function '__main__.add'>} 3\n"), ended.err


def test_two_functions_of_one_name() -> None:
    registry = worqr.Registry()
    registry.task(name="mails.send")(send)
    with pytest.raises(
        worqr.UsageError,
        match=r"there is a function 'mails\.send' already that has the name .*: give one of them name=",
    ):
        registry.task(name="mails.send")(Shop().sell)


# Schedules


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda: mesh.cron("* * *"), "cron expression '* * *' must have five fields"),
        (lambda: mesh.cron("61 * * * *"), "'61 * * * *'"),
        (lambda: mesh.cron("0 25 * * *"), "'0 25 * * *'"),
        (lambda: mesh.cron("0 7 * * mon-foo"), "'0 7 * * mon-foo'"),
        (lambda: mesh.cron("@midnigth"), "'@midnigth'"),
        (lambda: mesh.cron("0 7 * * *", timezone="Europe/Berln"), "'Europe/Berln'"),
        (lambda: declared("cron", "0 7 * * *", tz="Europe/Berlin"), "use timezone, as in mesh.cron("),
        (lambda: mesh.cron("0 25 * * *"), "Bad hour, because hours are 0 to 23"),
        (
            lambda: mesh.cron("0 0 30 2 *"),
            "Bad day-of-month, because days are 1 to 31, and the month must have that day",
        ),
        (lambda: mesh.cron("@daily"), ": @daily is written '0 0 * * *'"),
        (lambda: mesh.cron("@midnigth"), ": @midnight is written '0 0 * * *'"),
        (
            lambda: mesh.cron("0 0 3 * * *"),
            ": leave the seconds out, as in '0 3 * * *'; what happens several times a minute is",
        ),
        (
            lambda: mesh.cron("0 7 * * *", timezone="CEST"),
            "an abbreviation is no time zone: take the zone of a city, for exam",
        ),
        (
            lambda: mesh.cron("0 7 * * *", timezone="UTC+2"),
            "an offset is no time zone: take the zone of a city, for example",
        ),
        (lambda: mesh.cron("0 7 * * *", timezone="berlin"), "did you mean 'Europe/Berlin'?"),
        (
            lambda: mesh.cron("0 7 * * *")(with_argument),
            "as in mesh.cron('0 3 * * *', with_argument.call(...)) below the fun",
        ),
        (lambda: mesh.every(0), "period must be"),
        (lambda: mesh.every(-5), "period must be"),
        (lambda: declared("every", "5m"), "period must be seconds (a number or a timedelta), not '5m'"),
        (lambda: declared("every", send), "period must be seconds (a number or a timedelta), not <function send"),
        (lambda: declared("every", 60, jiter=3), "a schedule has no option 'jiter'"),
    ],
)
def test_a_schedule_that_cannot_be(mistake: Callable[[], object], why: str) -> None:
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        mistake()


@declare(name="with argument")
def with_argument(day: str) -> None: ...


def declared(what: str, *args: Any, **options: Any) -> object:
    return getattr(mesh, what)(*args, **options)
