"""A declared function: what it looks like, what calling it does, and its calls as values. No server is needed."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import worqr
from tests.test_argument_codec import ORDER, Order
from tests.testing.elsewhere import divide

Mesh = worqr.Mesh


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def add(a: int, b: int = 2, *, c: int = 3) -> int:
    """Add them."""
    return a + b + c


async def add_later(a: int, b: int = 2) -> int:
    """Add them, later."""
    return a + b


add.colour = "red"  # type: ignore[attr-defined]


# The function itself


async def test_calling_it_calls_the_function(mesh: Mesh) -> None:
    assert mesh.task(add)(1, c=4) == 7
    assert await mesh.task(add_later)(1, b=3) == 4
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        mesh.task(name="again")(add)(1, d=4)


async def test_calling_it_checks_no_types(mesh: Mesh) -> None:
    assert mesh.task(add)(1.5) == 6.5  # type: ignore[arg-type]


def test_it_is_copied_and_pickled_as_a_plain_function() -> None:
    assert copy.copy(divide) is copy.deepcopy(divide) is divide
    assert pickle.loads(pickle.dumps(divide)) is divide


def test_it_looks_like_what_it_is_made_of(mesh: Mesh) -> None:
    for fn in (add, add_later):
        function: Any = mesh.task(fn)
        assert function.__name__ == fn.__name__
        assert function.__qualname__ == fn.__qualname__
        assert function.__module__ == fn.__module__
        assert function.__doc__ == fn.__doc__
        assert function.__wrapped__ is fn
        assert inspect.signature(function) == inspect.signature(fn)
        assert repr(function) == f"<Function 'tests.functions.test_function.{fn.__name__}'>"
    assert mesh.functions["tests.functions.test_function.add"].colour == "red"  # type: ignore[attr-defined]


def test_its_own_attributes_do_not_stand_in_front_of_ours(mesh: Mesh) -> None:
    @functools.singledispatch
    def send(to: str) -> None: ...

    send.name = "mine"  # type: ignore[attr-defined]
    send._definition = "mine"  # type: ignore[attr-defined]
    function: Any = mesh.task(send)
    assert function.name == f"{__name__}.{send.__qualname__}"
    assert function.dispatch.__func__ is worqr.Function.dispatch
    assert function.register == send.register
    assert function.call("ada").task == b'{"to":"ada"}'


def test_others_can_see_which_is_to_be_awaited(mesh: Mesh) -> None:
    plain, later = mesh.task(add), mesh.task(add_later)
    assert isinstance(plain, worqr.SyncFunction)
    assert isinstance(later, worqr.AsyncFunction)
    assert not inspect.iscoroutinefunction(plain.__call__)
    assert inspect.iscoroutinefunction(later.__call__)
    if sys.version_info >= (3, 12):
        assert inspect.iscoroutinefunction(later)
        assert not inspect.iscoroutinefunction(plain)


def test_a_decorated_function_may_be_decorated_again_by_others(mesh: Mesh) -> None:
    calls: list[tuple[Any, ...]] = []

    def noting(fn: Callable[..., int]) -> Callable[..., int]:
        def noted(*args: Any) -> int:
            calls.append(args)
            return fn(*args)

        return noted

    assert noting(mesh.task(add))(1) == 6
    assert calls == [(1,)]


def test_all_ways_to_decorate(mesh: Mesh) -> None:
    @mesh.task
    def one(a: int) -> int:
        return a

    @mesh.task()
    def two(a: int) -> int:
        return a

    @mesh.task(name="three", timeout=5)
    def three(a: int) -> int:
        return a

    prefix = f"{__name__}.test_all_ways_to_decorate.<locals>"
    assert [one.name, two.name, three.name] == [f"{prefix}.one", f"{prefix}.two", "three"]
    assert list(mesh.functions.values()) == [one, two, three]
    assert one.queue.name == one.name


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiemout": 1}, r"task\(\) has no option 'tiemout'; did you mean 'timeout'"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": "1"}, "timeout must be seconds"),
        ({"retry": 3}, "retry must be a worqr.RetryPolicy"),
        ({"concurrency": 0}, "concurrency of task must be a whole number of at least 1, not 0"),
        ({"size": 1.5}, "size of task must be a whole number"),
        ({"priority": -1}, "priority of task must be a whole number"),
        ({"max_length": 0}, "max_length of task must be a whole number"),
        ({"keep_failed": -1}, "keep_failed must be a whole number of at least 0"),
        ({"result_ttl": -1}, "result_ttl must be at least 0"),
        ({"on_failure": "mail"}, "on_failure must be a handler"),
        ({"runs_in": "cloud"}, "runs_in must be one of 'loop', 'thread', 'process', 'asyncio', not 'cloud'"),
        ({"aliases": "old"}, r"aliases must be a collection of names, as in aliases=\['old'\]"),
        ({"aliases": ["a{b}"]}, "alias 'a{b}' contains '{'"),
        ({"aliases": [7]}, "alias must be a str"),
        ({"name": 7}, "function name must be a str"),
        ({"name": ""}, "function name must have 1 to 200 bytes"),
    ],
)
def test_wrong_options_are_refused_at_once(mesh: Mesh, options: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        mesh.task(**options)
    assert not mesh.functions


@pytest.mark.parametrize(
    ("fn", "runs_in", "words"),
    [
        (add, "loop", "is a plain function and would block the loop"),
        (add, "asyncio", "is a plain function"),
        (add_later, "thread", "is an async function"),
        (add_later, "process", "is async, and runs_in='process' calls plain functions"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_at_once(mesh: Mesh, fn: Any, runs_in: Any, words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        mesh.task(runs_in=runs_in)(fn)
    assert not mesh.functions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dealy": 1}, r"dispatch\(\) has no option 'dealy'; did you mean 'delay'"),
        ({"delay": -1}, "delay must be at least 0"),
        ({"id": ""}, "a job's id must have 1 to 200 bytes"),
        ({"if_exists": "maybe"}, "if_exists must be one of"),
    ],
)
def test_wrong_options_of_a_dispatch_are_refused_at_once(mesh: Mesh, options: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        mesh.task(add).options(**options)


def test_options_make_a_job_and_so_leave_no_enqueue(mesh: Mesh) -> None:
    bound = mesh.task(add).options(delay=1)
    assert not hasattr(bound, "enqueue")
    assert not hasattr(bound, "options")
    assert not callable(bound)


WORDS = {
    "delay": r"use `await add\.enqueue\(\.\.\.\)`, or `worqr\.sync\(add\.enqueue, \.\.\.\)` where no event loop runs",
    "apply_async": r"use `await add\.options\(delay=60\)\.dispatch\(\.\.\.\)`",
    "send": r"use `await add\.enqueue\(\.\.\.\)`",
    "kiq": r"use `await add\.enqueue\(\.\.\.\)`",
    "s": r"use `add\.call\(\.\.\.\)`",
}


@pytest.mark.parametrize(("name", "words"), WORDS.items())
def test_methods_of_other_task_queues_are_answered_with_the_one_that_works(mesh: Mesh, name: str, words: str) -> None:
    function: Any = mesh.task(add)
    with pytest.raises(AttributeError, match=f"'SyncFunction' object has no attribute '{name}': {words}"):
        getattr(function, name)
    bound = function.options(id="x")
    with pytest.raises(
        AttributeError, match=r"'Bound' object .*: use `await add\.options\(\.\.\.\)\.dispatch\(\.\.\.\)`"
    ):
        getattr(bound, name)


def test_options_and_enqueue_do_not_go_together_and_say_so(mesh: Mesh) -> None:
    bound: Any = mesh.task(add).options(delay=5)
    with pytest.raises(AttributeError, match=r"options make a job: use `await add\.options\(\.\.\.\)\.dispatch"):
        bound.enqueue  # noqa: B018
    with pytest.raises(AttributeError, match="^'SyncFunction' object has no attribute 'nonsense'$"):
        getattr(mesh.task(name="other")(add), "nonsense")  # noqa: B009
    assert copy.copy(bound).call(1) == bound.call(1)


@pytest.mark.parametrize("options", [{}, {"max_length": 5, "wait": 3}, {"replicas": 0}])
def test_options_that_a_plain_task_can_have_leave_the_enqueue(mesh: Mesh, options: dict[str, Any]) -> None:
    function = mesh.task(max_length=9)(add)
    bound: Any = function.options(**options)
    assert callable(bound.enqueue)
    assert bound.call(1)._options == {"max_length": 9, **options}
    assert not hasattr(function.options(**options, delay=5), "enqueue")


def test_max_length_goes_with_every_call_and_can_be_overridden(mesh: Mesh) -> None:
    function = mesh.task(max_length=5)(add)
    assert function.call(1)._options == {"max_length": 5}
    assert function.options(delay=timedelta(seconds=2)).call(1)._options == {"max_length": 5, "delay": 2000}
    assert function.options(max_length=7).call(1)._options == {"max_length": 7}


# Calls


def test_a_call_is_a_value(mesh: Mesh) -> None:
    call = mesh.task(add).call(1, c=5)
    assert call.name == "tests.functions.test_function.add"
    assert (call.args, call.kwargs) == ((1, 2), {"c": 5})
    assert call.task == b'{"a":1,"b":2,"c":5}'
    assert repr(call) == (
        "Call(name='tests.functions.test_function.add', args=(1, 2), kwargs={'c': 5}, task=b'{\"a\":1,\"b\":2,\"c\":5}')"
    )


def test_calls_of_one_payload_are_equal(mesh: Mesh) -> None:
    function, other = mesh.task(add), mesh.task(name="other")(add)
    calls = [function.call(1), function.call(a=1), function.call(1, 2, c=3), function.options(delay=5).call(1)]
    assert len(set(calls)) == 1
    assert all(call == calls[0] for call in calls)
    assert function.call(1) not in {function.call(2), other.call(1)}
    assert function.call(1) == mesh.call(function.name, a=1, b=2, c=3)
    assert function.call(1) != b'{"a":1,"b":2,"c":3}'


def test_calls_with_lists_can_be_hashed(mesh: Mesh) -> None:
    def many(numbers: list[int]) -> None: ...

    function = mesh.task(many)
    assert function.call([1]) in {function.call([1])}


def test_a_call_is_of_what_its_arguments_were_then(mesh: Mesh) -> None:
    def many(numbers: list[int]) -> None: ...

    numbers = [1]
    call = mesh.task(many).call(numbers)
    numbers.append(2)
    assert call.task == b'{"numbers":[1]}'


def test_a_payload_says_the_call_it_was_made_of(mesh: Mesh) -> None:
    def ship(order: Order, *, express: bool = False) -> None: ...

    function = mesh.task(ship)
    call = function.call(ORDER, express=True)
    assert function.decode(call.task) == call
    assert (function.decode(call.task).args, function.decode(call.task).kwargs) == ((ORDER,), {"express": True})
    with pytest.raises(worqr.Undecodable, match="ship: DecodeError"):
        function.decode(b"x")


async def test_a_wrong_call_fails_where_it_is_made(mesh: Mesh) -> None:
    function: Any = mesh.task(add)
    ways = (function.enqueue, function.dispatch, function.call, function.options(delay=1).dispatch)
    for way in ways:
        with pytest.raises(
            TypeError, match=r"^tests\.functions\.test_function\.add\(\): got an unexpected keyword argument 'd'"
        ):
            await result_of(way(1, d=2))
        with pytest.raises(TypeError, match="missing a required argument: 'a'"):
            await result_of(way())
        with pytest.raises(worqr.UsageError, match=r"invalid arguments: .* at `\$.b`"):
            await result_of(way(1, "2"))


async def result_of(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


async def test_a_call_that_is_too_large_fails_where_it_is_made() -> None:
    def upload(data: bytes, /) -> None: ...

    function = Mesh(max_payload=1000).task(upload)
    assert len(function.call(bytes(1000)).task) == 1000
    with pytest.raises(worqr.PayloadTooLarge, match="1,001 bytes is over the limit of 1,000"):
        function.call(bytes(1001))


async def test_sending_needs_a_connection(mesh: Mesh) -> None:
    function = mesh.task(add)
    for send in (
        function.enqueue(1),
        function.dispatch(1),
        function.options(id="x").dispatch(1),
        function.job("x").status(),
        mesh.enqueue_many([]),
        mesh.dispatch_many([function.call(1)]),
    ):
        with pytest.raises(worqr.UsageError, match="this mesh is not connected here"):
            await send


async def test_a_function_of_a_registry_belongs_to_no_mesh_yet(mesh: Mesh) -> None:
    registry = worqr.Registry()
    function = registry.task(name="shop.add")(add)
    uses: list[Callable[[], Any]] = [
        lambda: function.enqueue(1),
        lambda: function.dispatch(1),
        lambda: function.options(delay=1).dispatch(1),
        lambda: function.queue,
        lambda: function.job("x"),
    ]
    for use in uses:
        with pytest.raises(
            worqr.UsageError, match=r"^'shop\.add' belongs to a Registry that no mesh has included yet: call"
        ):
            await result_of(use())
    assert function(1) == 6
    assert function.call(1) == mesh.call("shop.add", a=1, b=2, c=3)
    mesh.include(registry)
    assert function.queue.name == "shop.add"


# Calls by name


@pytest.mark.parametrize(
    ("args", "kwargs", "task"),
    [
        ((), {}, b"{}"),
        ((), {"to": "ada", "order": ORDER.lines[0]}, b'{"to":"ada","order":{"sku":"a","price":"1.10","amount":1}}'),
        ((b"\x00{",), {}, b"\x00{"),
        ((bytearray(b"x"),), {}, b"x"),
        (([1, None],), {}, b"[1,null]"),
        (("text",), {}, b'"text"'),
        ((None,), {}, b"null"),
        ((), {"name": 1, "self": 2}, b'{"name":1,"self":2}'),
    ],
)
def test_a_call_by_name(args: tuple[Any, ...], kwargs: dict[str, Any], task: bytes) -> None:
    call = Mesh().call("mail.send", *args, **kwargs)
    assert (call.name, call.args, call.kwargs, call.task) == ("mail.send", args, kwargs, task)
    assert call.queue == "mail.send"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "words"),
    [
        ("mail.send", (1, 2), {}, r"call\('mail.send', ...\): positional arguments need the function itself"),
        ("mail.send", (1,), {"a": 2}, "positional arguments need the function itself"),
        ("mail.send", (), {"a": object()}, r"call\('mail.send', ...\): JSON cannot carry these arguments"),
        ("mail.send", (float("nan"),), {}, "JSON has neither NaN nor infinity"),
        ("", (), {}, "function name must have 1 to 200 bytes"),
        ("a{b}", (), {}, "function name 'a{b}' contains"),
    ],
)
def test_a_wrong_call_by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        Mesh().call(name, *args, **kwargs)


def test_a_call_by_name_that_is_too_large() -> None:
    with pytest.raises(worqr.PayloadTooLarge):
        Mesh(max_payload=10).call("mail.send", text="longer than that")


# Failure handlers


def gave_up(record: worqr.Failed) -> None: ...


def test_a_failure_handler_is_declared_by_a_decorator(mesh: Mesh) -> None:
    function = mesh.task(add)
    assert function.on_failure(gave_up) is gave_up
    assert function._definition.options.on_failure is gave_up
    assert function._definition.options.policy.on_failure


def test_there_is_one_failure_handler(mesh: Mesh) -> None:
    by_option = mesh.task(on_failure=gave_up)(add)
    by_decorator = mesh.task(add_later)
    by_decorator.on_failure(gave_up)
    for function in (by_option, by_decorator):
        with pytest.raises(
            worqr.UsageError, match=r"tests\.functions\.test_function\.add.* has a failure handler already: <function"
        ):
            function.on_failure(print)


def test_what_is_no_failure_handler(mesh: Mesh) -> None:
    with pytest.raises(worqr.UsageError, match="on_failure must be a handler that can be called"):
        mesh.task(add).on_failure(7)  # type: ignore[type-var]


# Results that a caller gets as something else


def test_a_result_that_its_caller_gets_as_something_else_is_logged_once_and_returned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    due = {"due": datetime(2031, 1, 1, tzinfo=UTC)}

    @worqr.Registry().task(name="plan", result_ttl=60)
    def plan() -> dict[str, Any]:
        return due

    for _ in range(3):
        assert plan.__worqr_handler__(b"{}") is due
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "result.changed: a result of 'plan' is kept as JSON has it: $.due is a datetime and would arrive as str, because no"
    )


def test_other_results_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def plan(due):  # type: ignore[no-untyped-def]
        return due

    def declared(hint: Any, **options: Any) -> Any:
        plan.__annotations__ = {"return": hint}
        return worqr.Registry().task(name="plan", **options)(plan)

    for hint, options in (
        (dict[str, datetime], {"result_ttl": 60}),
        (dict, {}),
        (int, {"result_ttl": 60}),
    ):
        declared(hint, **options).__worqr_handler__(b'{"due":{"at":1}}')
    declared(dict, result_ttl=60).__worqr_handler__(b'{"due":null}')
    assert not caplog.records
