"""Dependencies of handlers: when they are made and closed, where they work, and how a test replaces them."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, cast

import pytest
import trio

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import testing
from worqr.functions.depends import injected

events: list[str] = []


class Session:
    """What a handler needs."""

    def __init__(self) -> None:
        self.number = len(events)


class Fake(Session):
    """What a test puts in its place."""


@asynccontextmanager
async def open_session() -> AsyncGenerator[Session]:
    events.append("open")
    try:
        yield Session()
    except BaseException as error:
        events.append(type(error).__name__)
        raise
    finally:
        events.append("close")


@contextmanager
def open_plainly() -> Generator[Session]:
    events.append("open")
    try:
        yield Session()
    finally:
        events.append("close")


async def load() -> str:
    return "loaded"


def repository(session: Session = worqr.Depends(open_session)) -> Session:
    return session


@pytest.fixture(autouse=True)
def no_events() -> None:
    events.clear()


@pytest.fixture
def mesh(prefix: str) -> worqr.Mesh:
    return worqr.Mesh(prefix=prefix, defaults=worqr.HandlerOptions(result_ttl=60))


async def of_one_run(mesh: worqr.Mesh[Any], server: Server, function: Any) -> Any:
    async with testing.bench(mesh, url=server.url) as bench:
        job = await function.dispatch(7)
        await bench.run_until_empty(raise_errors=False)
        return await job.result(timeout=PATIENCE)


async def test_a_run_has_its_own_which_is_closed_after_it(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task
    async def save(n: int, *, session: Session = worqr.Depends(open_session)) -> str:
        events.append("run")
        return f"{n} {type(session).__name__}"

    assert await of_one_run(mesh, server, save) == "7 Session"
    assert events == ["open", "run", "close"]


async def test_each_is_made_once_for_a_run_and_those_that_need_it_share_it(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task
    async def save(
        n: int,
        *,
        there: Session = worqr.Depends(repository),
        session: Session = worqr.Depends(open_session),
        text: str = worqr.Depends(load),
    ) -> tuple[bool, str]:
        return there is session, text

    assert await of_one_run(mesh, server, save) == (True, "loaded")
    assert events == ["open", "close"]


class Lease:
    """As a pool gives it: to be awaited, or entered and left."""

    def __await__(self) -> Generator[Any, Any, Session]:
        events.append("never given back")
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Session:
        events.append("open")
        return Session()

    async def __aexit__(self, *_error: object) -> None:
        events.append("close")


async def test_what_may_be_awaited_or_entered_is_entered(mesh: worqr.Mesh) -> None:
    @mesh.task
    async def save(*, session: Session = worqr.Depends(Lease)) -> str:
        return type(session).__name__

    assert (await save(), events) == ("Session", ["open", "close"])


async def test_the_error_of_a_run_reaches_it(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task(retry=worqr.RetryPolicy(max_failures=1))
    async def save(n: int, *, session: Session = worqr.Depends(open_session)) -> None:
        raise ValueError(n)

    with pytest.raises(worqr.JobFailed):
        await of_one_run(mesh, server, save)
    assert events == ["open", "ValueError", "close"]


async def test_an_error_of_its_own_is_one_of_the_run(mesh: worqr.Mesh, server: Server) -> None:
    def broken() -> Session:
        raise OSError("no database")

    @mesh.task(retry=worqr.RetryPolicy(max_failures=1))
    async def save(n: int, *, session: Session = worqr.Depends(broken)) -> None: ...

    with pytest.raises(worqr.JobFailed, match="no database"):
        await of_one_run(mesh, server, save)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_whose_contexts_are_a_circle_is_raised(is_async: bool) -> None:
    @contextmanager
    def circular() -> Generator[int]:
        yield 1
        first, second = ValueError("first"), KeyError("second")
        first.__context__, second.__context__ = second, first
        raise first

    def plain(n: int, *, one: int = worqr.Depends(circular)) -> int:
        return n + one

    async def on_loop(n: int, *, one: int = worqr.Depends(circular)) -> int:
        return n + one

    raised = list[BaseException]()

    def call() -> None:
        with pytest.raises(ValueError, match="first") as found:
            trio.run(injected(on_loop), 7) if is_async else injected(plain)(7)
        raised.append(found.value)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert [type(each) for each in raised] == [ValueError]


async def test_a_plain_function_has_it_in_its_thread(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task
    def save(n: int, *, session: Session = worqr.Depends(open_plainly)) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert await of_one_run(mesh, server, save) is False
    assert events == ["open", "close"]


def declared(failed: worqr.Failed, *, session: Session = worqr.Depends(open_plainly)) -> None:
    events.append(type(session).__name__)


@pytest.mark.parametrize("how", ["decorator", "option", "default", "declared"])
async def test_a_failure_handler_has_it(prefix: str, server: Server, how: str) -> None:
    given = worqr.HandlerOptions(on_failure=declared)
    mesh = worqr.Mesh(prefix=prefix, defaults=given if how == "default" else None)

    @mesh.task(**cast("Any", given if how == "option" else {}))
    def save(n: int) -> None:
        raise worqr.Failure("never")

    if how == "decorator":
        save.on_failure(declared)
    elif how == "declared":
        save.on_failure(mesh.task(declared))
    async with testing.bench(mesh, url=server.url) as bench:
        await save.enqueue(7)
        await bench.run_until_empty(raise_errors=False)
    assert events == ["open", "Session", "close"]


async def test_what_the_lifespan_yields_has_its_type(prefix: str, server: Server) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[Session]:
        yield Session()

    mesh = worqr.Mesh(prefix=prefix, lifespan=lifespan, defaults={"result_ttl": 60, "retry": ONCE})

    @mesh.task
    async def save(n: int, *, session: Session = worqr.State(Session)) -> str:
        return type(session).__name__

    @mesh.task
    async def wrong(n: int, *, pool: Fake = worqr.State(Fake)) -> None: ...

    assert await of_one_run(mesh, server, save) == "Session"
    with pytest.raises(worqr.JobFailed, match=r"worqr.State\(Fake\): the lifespan of this place has yielded"):
        await of_one_run(mesh, server, wrong)


PERHAPS: Any = Session | None


def test_the_type_of_a_state_may_be_a_union(mesh: worqr.Mesh) -> None:
    @mesh.task
    def save(n: int, *, session: Session | None = worqr.State(PERHAPS)) -> str:
        return type(session).__name__

    for state in (Fake(), None):
        with testing.context(state=state):
            assert save(7) == type(state).__name__
    with (
        testing.context(state=7),
        pytest.raises(worqr.UsageError, match=r"Session \| None\): the lifespan .* yielded 7"),
    ):
        save(7)
    with pytest.raises(worqr.UsageError, match=r"None\) is only known inside a handler: in a test, pass the parameter"):
        save(7)


class Closable(Protocol):
    def close(self) -> None: ...


@pytest.mark.parametrize("kind", [7, "Session", Any, Closable])
def test_a_state_without_a_class_is_refused(kind: Any) -> None:
    with pytest.raises(worqr.UsageError, match="State takes a class, or a union of classes, not "):
        worqr.State(kind)


ONCE = worqr.RetryPolicy(max_failures=1)


async def test_a_worker_calls_it_with_any_number_of_arguments(prefix: str, server: Server) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, defaults=worqr.HandlerOptions(result_ttl=60))

    @mesh.task
    async def none(*, session: Session = worqr.Depends(open_session)) -> str:
        return type(session).__name__

    @mesh.task
    def two(a: int, b: int, *, session: Session = worqr.Depends(open_plainly)) -> int:
        return a + b

    @mesh.task
    def three(a: int, b: int, c: int = 3, *, session: Session = worqr.Depends(open_plainly)) -> int:
        return a + b + c

    @mesh.workflow
    async def flow(a: int, b: int, *, session: Session = worqr.Depends(open_session)) -> int:
        return a * b

    async with mesh.join(grace=0):
        jobs = [await none.dispatch(), await two.dispatch(1, 2), await three.dispatch(1, 2), await flow.dispatch(3, 4)]
        assert [await job.result(timeout=PATIENCE) for job in jobs] == ["Session", 3, 6, 12]


async def test_it_is_no_part_of_the_call(mesh: worqr.Mesh) -> None:
    @mesh.task
    async def save(n: int, *, session: Session = worqr.Depends(open_session)) -> int:
        return n

    @mesh.task
    async def annotated(n: int, *, session: Annotated[Session, worqr.Depends(open_session)]) -> str:
        return type(session).__name__

    assert save.call(7).task == b'{"n":7}'
    with pytest.raises(TypeError, match="session"):
        cast("Any", save).call(7, session=Session())
    assert cast("Any", annotated).call(7).task == b'{"n":7}'
    assert await cast("Any", annotated)(7) == "Session"


class Saver:
    """A handler that is an object. Its class has an annotation of another type for the same name."""

    n: str = ""

    def __call__(self, n: int, *, session: Session = worqr.Depends(open_plainly)) -> str:
        return f"{n} {type(session).__name__}"


class AnnotatedSaver:
    def __call__(self, n: int, *, session: Annotated[Session, worqr.Depends(open_plainly)]) -> str:
        return f"{n} {type(session).__name__}"


def with_url(url: str, n: int, *, session: Session = worqr.Depends(open_plainly)) -> str:
    return f"{n} {type(session).__name__}"


def annotated_with_url(url: str, n: int, *, session: Annotated[Session, worqr.Depends(open_plainly)]) -> str:
    return f"{n} {type(session).__name__}"


@pytest.mark.parametrize(
    "handler", [Saver(), AnnotatedSaver(), partial(with_url, "db:"), partial(annotated_with_url, "db:")]
)
async def test_an_object_and_a_partial_have_it(mesh: worqr.Mesh, server: Server, handler: Callable[[int], str]) -> None:
    save = mesh.task(name="save")(handler)
    assert save.call(7).task == b'{"n":7}'
    with pytest.raises(worqr.UsageError, match="Expected `int`, got `str`"):
        cast("Any", save).call("7")
    assert await of_one_run(mesh, server, save) == "7 Session"


async def test_a_test_passes_its_own_or_replaces_it(mesh: worqr.Mesh, server: Server) -> None:
    @mesh.task
    async def save(n: int, *, session: Session = worqr.Depends(repository)) -> str:
        return type(session).__name__

    assert await save(7) == "Session"
    assert await save(7, session=Fake()) == "Fake"
    with testing.replaced(open_session, Fake):
        assert await save(7) == "Fake"
        with testing.replaced(open_session, open_plainly):
            assert await save(7) == "Session"
        assert await of_one_run(mesh, server, save) == "Fake"
    assert await save(7) == "Session"


def generated() -> Generator[Session]:
    yield Session()


class Generating:
    def __call__(self) -> Generator[Session]:
        yield Session()


@dataclass
class WithoutHash:
    url: str = ""

    def __call__(self) -> Session:
        return Session()


def with_parameter(url: str) -> Session:
    return Session()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (7, "takes a function that makes the value, not 7"),
        (generated, "generator: put @contextlib.contextmanager above it"),
        (Generating(), "generator: put @contextlib.contextmanager above it"),
        (WithoutHash(), r"unhashable type: 'WithoutHash', .* with @dataclass\(eq=False\)"),
        (with_parameter, "nothing gives it its parameter 'url'"),
    ],
)
def test_what_makes_no_value_is_refused(make: Any, what: str) -> None:
    with pytest.raises(worqr.UsageError, match=what):
        worqr.Depends(make)


def by_position(n: int, session: Session = worqr.Depends(open_plainly)) -> None: ...
def async_in_plain(n: int, *, session: Session = worqr.Depends(open_session)) -> None: ...
def async_below(n: int, *, session: Session = worqr.Depends(repository)) -> None: ...


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (by_position, r"put a \* in front of the parameter 'session'"),
        (async_in_plain, "is async, and this handler is a plain function"),
        (async_below, "is async, and this handler is a plain function"),
    ],
)
def test_a_function_that_cannot_have_it_is_refused(mesh: worqr.Mesh, function: Callable[..., None], what: str) -> None:
    with pytest.raises(worqr.UsageError, match=what):
        mesh.task(function)


def test_an_annotation_that_names_what_is_not_there_is_refused_at_once(mesh: worqr.Mesh) -> None:
    def early(n: int, *, session: Session) -> None: ...

    early.__annotations__["session"] = "Annotated[Later, worqr.Depends(open_plainly)]"
    with pytest.raises(
        worqr.UsageError, match="early: an annotation with a dependency .*'Later'.* make it the default"
    ):
        mesh.task(name="early")(early)


SessionDep = Annotated[Session, worqr.Depends(open_plainly)]
"""A name for both, as programs with FastAPI have them. The annotations of this module are texts."""


class Users:
    def __init__(self, session: SessionDep, other: Annotated[Session, worqr.Depends(open_plainly)]) -> None:
        assert session is other
        self.session = session


def test_a_name_may_stand_for_the_annotation(mesh: worqr.Mesh) -> None:
    @mesh.task(name="named")
    def named(n: int, *, session: SessionDep, users: Users = worqr.Depends(Users)) -> None:
        assert users.session is session
        events.append(f"ran {n}")

    assert named.call(7).task == b'{"n":7}'
    events.clear()
    cast("Any", named)(7)
    assert events == ["open", "ran 7", "close"]


async def test_steps_and_raw_queues_refuse_it(mesh: worqr.Mesh, server: Server) -> None:
    def handle(task: bytes, *, session: Session = worqr.Depends(open_plainly)) -> None: ...
    def plain(task: bytes) -> None: ...

    with pytest.raises(worqr.UsageError, match="step 'handle' gets no dependencies, .* make the value inside the step"):
        mesh.step(name="handle")(handle)
    async with testing.bench(mesh, url=server.url), mesh.join() as peer:
        for serve in (partial(peer.serve, "raw", handle), partial(peer.serve, "raw", plain, on_failure=declared)):
            with pytest.raises(worqr.UsageError, match="raw queue 'raw' gets no dependencies.* with @mesh.task"):
                await serve()


def test_an_annotation_that_raises_is_named_by_the_function(mesh: worqr.Mesh) -> None:
    def odd(n: int, *, session: Session) -> None: ...

    odd.__annotations__["session"] = "Annotated[Session, worqr.Depends(1 / 0)]"
    with pytest.raises(worqr.UsageError, match="annotations cannot be read: ZeroDivisionError"):
        mesh.task(name="odd")(odd)
