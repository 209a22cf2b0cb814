"""`Depends`: what a handler needs for one run, such as a session of a database: made before it, closed after it.

A dependency is the default of a keyword-only parameter. It is no part of the calls of the function, nor of their payloads. The
function is wrapped once, when it is declared, so that its dependencies are resolved wherever it runs: on a loop, in a thread, in
a process, and when it is called directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
)
from types import UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, overload

from worqr.argument_codec import annotated
from worqr.errors import UsageError
from worqr.handler_options import is_async
from worqr.inside import current_run

T = TypeVar("T")

_CONTEXT: Final[Any] = vars(BaseException)["__context__"]
_replaced: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
"""By the function of a dependency, the one that a test has put in its place."""


class _Dependency:
    """The default, or the annotation, of a parameter that has a dependency.

    Attributes:
        make: returns the value, or a context manager of it.
        needs: the dependencies of `make` itself, by the names of its parameters.
    """

    __slots__ = ("make", "needs")

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.needs = dependencies_of(make)

    def __repr__(self) -> str:
        return f"worqr.Depends({getattr(self.make, '__name__', self.make)})"


@overload
def Depends(make: Callable[..., AbstractAsyncContextManager[T, Any]], /) -> T: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def Depends(make: Callable[..., AbstractContextManager[T, Any]], /) -> T: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def Depends(make: Callable[..., Awaitable[T]], /) -> T: ...
@overload
def Depends(make: Callable[..., T], /) -> T: ...
def Depends(make: Callable[..., Any], /) -> Any:  # noqa: N802 - the name that it has in the field
    """Give a keyword-only parameter of a handler what ``make()`` returns, for the length of one run.

    ``async def save(order: int, *, session: Session = worqr.Depends(open_session)) -> None``. Within one run, each `make` is
    called once. A context manager is entered before the run and left after it, with the error of the run if it has one. Callers
    do not pass it, and no payload has it; a test passes its own: ``await save(7, session=fake)``.

    Args:
        make: A function that returns the value, a context manager of it (as ``contextlib.contextmanager`` and
            ``asynccontextmanager`` make them), or, for an ``async def`` handler, an awaitable; what is both is entered. Its own
            parameters may have dependencies, and need defaults otherwise.

    Returns:
        To type checkers, the value.

    Raises:
        UsageError: `make` is no function, is a generator without ``@contextmanager``, has no hash, or has a parameter without a
            default.
    """
    if not callable(make):
        raise UsageError(f"worqr.Depends takes a function that makes the value, not {make!r}")
    for each in (make, getattr(make, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            kind = "asynccontextmanager" if inspect.isasyncgenfunction(each) else "contextmanager"
            raise UsageError(f"worqr.Depends({_name_of(make)}): it is a generator: put @contextlib.{kind} above it")
    try:
        hash(make)
    except TypeError as error:
        raise UsageError(
            f"worqr.Depends({_name_of(make)}): {error}, so a run cannot make it once: give it a function, or declare its class "
            "with @dataclass(eq=False)"
        ) from None
    dependency = _Dependency(make)
    for each in _parameters_of(make):
        if each.default is each.empty and each.name not in dependency.needs and each.kind not in _VARIABLE:
            raise UsageError(
                f"worqr.Depends({_name_of(make)}): nothing gives it its parameter {each.name!r}: give it a default, for "
                f"instance worqr.Depends(...)"
            )
    return dependency


def State(kind: type[T], /) -> T:  # noqa: N802 - as `Depends`
    """Give a keyword-only parameter what the lifespan has yielded: ``pool: Pool = worqr.State(Pool)``.

    It is the typed form of ``worqr.current().state``.

    Args:
        kind: The class of the value, or a union of classes.

    Returns:
        To type checkers, the value.

    Raises:
        UsageError: `kind` is no class of which a value can be known to be, such as a Protocol without ``@runtime_checkable``.
    """
    is_union = get_origin(kind) in {Union, UnionType}
    classes = tuple(get_origin(each) or each for each in (get_args(kind) if is_union else (kind,)))
    try:
        isinstance(None, classes)
    except TypeError as error:
        raise UsageError(f"worqr.State takes a class, or a union of classes, not {kind!r}: {error}") from None
    given: T = Depends(functools.partial(_state, classes, f"worqr.State({getattr(kind, '__name__', kind)})"))
    return given


def _state(classes: tuple[type, ...], what: str) -> Any:
    run = current_run.get(None)
    if run is None:
        raise UsageError(
            f"{what} is only known inside a handler: in a test, pass the parameter, or call the handler inside "
            "worqr.testing.context(state=...)"
        )
    found: Any = run.host.state
    if not isinstance(found, classes):
        raise UsageError(
            f"{what}: the lifespan of this place has yielded {found!r}; give Mesh(lifespan=...), and asyncio_lifespan or "
            "process_lifespan for handlers there, one that yields such a value"
        )
    return found


_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _name_of(make: object) -> str:
    return str(getattr(make, "__name__", make))


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # some builtins have no signature


def dependencies_of(function: Callable[..., Any]) -> Mapping[str, _Dependency]:
    """Return the dependencies of a function, by the names of its parameters.

    Raises:
        UsageError: an annotation with one names what is not there yet.
    """
    found: dict[str, _Dependency] = {}
    for each in _parameters_of(function):
        given = each.default if isinstance(each.default, _Dependency) else _annotated(each.annotation, function)
        if given is not None:
            found[each.name] = given
    return found


def refuse_dependencies(function: Callable[..., Any], what: str, instead: str) -> None:
    """Raise UsageError for a function that nothing gives its dependencies, and that would get their declarations."""
    if not hasattr(function, "__worqr_handler__") and (found := dependencies_of(function)):
        name = next(iter(found))
        raise UsageError(f"{what} gets no dependencies, and its parameter {name!r} has {found[name]!r}: {instead}")


def _annotated(annotation: object, function: Callable[..., Any]) -> _Dependency | None:
    """Return the dependency in ``Annotated[T, Depends(...)]``, or in a name of it."""
    if isinstance(annotation, str):
        is_here = "Depends(" in annotation or "State(" in annotation  # else its name may stand for one
        try:
            source: Any = cast("Any", function).__init__ if inspect.isclass(function) else annotated(function)
            names = getattr(inspect.unwrap(source), "__globals__", {})
            annotation = eval(annotation, names)  # noqa: S307 - its own code
        except NameError as error:
            if not is_here:
                return None
            raise UsageError(
                f"{_name_of(function)}: an annotation with a dependency names what is not there when the function is declared "
                f"({error}): make it the default, as in `session: Session = worqr.Depends(...)`, or import or define it before"
            ) from None
        except Exception:  # an annotation is code of the user: the codec says what is wrong with it
            return None
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, _Dependency)), None)


def injected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that resolves the dependencies of `function`, and takes its other parameters; itself if it has none.

    Raises:
        UsageError: a parameter with a dependency is not keyword-only; or a plain function has an async dependency.
    """
    found = dependencies_of(function)
    if not found:
        return function
    signature = inspect.signature(function)
    for name in found:
        if signature.parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            raise UsageError(
                f"{_name_of(function)}: put a * in front of the parameter {name!r}: what has a dependency is keyword-only, "
                "because no caller passes it"
            )
    run: Callable[..., Any] = _async_run(function, found) if is_async(function) else _run(function, found)
    others = [each for name, each in signature.parameters.items() if name not in found]
    run = functools.wraps(function)(run)
    source: Any = annotated(function)
    vars(run).update(__signature__=signature.replace(parameters=others), __wrapped__=source)
    run.__annotations__ = {name: kind for name, kind in source.__annotations__.items() if name not in found}
    return run


def _async_run(function: Callable[..., Any], found: Mapping[str, _Dependency]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        async with AsyncExitStack() as stack:
            made: dict[Callable[..., Any], Any] = {}
            for name, each in found.items():
                if name not in kwargs:
                    kwargs[name] = await _made_async(each, made, stack)
            return await function(*args, **kwargs)

    return run


async def _made_async(dependency: _Dependency, made: dict[Callable[..., Any], Any], stack: AsyncExitStack) -> Any:
    make = _replaced.get(dependency.make, dependency.make)
    if make not in made:
        needs = dependency.needs if make is dependency.make else dependencies_of(make)
        value = make(**{name: await _made_async(each, made, stack) for name, each in needs.items()})
        # What a pool gives is both, and goes back to the pool only if it is entered.
        if inspect.isawaitable(value) and not isinstance(value, AbstractAsyncContextManager):
            value = await value
        if isinstance(value, AbstractAsyncContextManager):
            value = await stack.enter_async_context(_Block(value))
        elif isinstance(value, AbstractContextManager):
            value = stack.enter_context(_Block(value))
        made[make] = value
    return made[make]


class _Block(AbstractContextManager[Any], AbstractAsyncContextManager[Any]):
    """A block of the application. A stack follows the contexts of its error to their end, and blocks if there is none."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __enter__(self) -> Any:
        return self._block.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        try:
            return cast("bool | None", self._block.__exit__(*raised))
        except BaseException as error:
            _end_chain(error)
            raise

    async def __aenter__(self) -> Any:
        return await self._block.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        try:
            return cast("bool | None", await self._block.__aexit__(*raised))
        except BaseException as error:
            _end_chain(error)
            raise


def _end_chain(error: BaseException) -> None:
    """Remove the context of an error if it leads back to an error of the chain."""
    seen, each = set[int](), _CONTEXT.__get__(error)
    while each is not None:
        if id(each) in seen:
            _CONTEXT.__set__(error, None)
            return
        seen.add(id(each))
        each = _CONTEXT.__get__(each)


def _run(function: Callable[..., Any], found: Mapping[str, _Dependency]) -> Callable[..., Any]:
    for each in found.values():
        _refuse_async(function, each)

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            made: dict[Callable[..., Any], Any] = {}
            for name, each in found.items():
                if name not in kwargs:
                    kwargs[name] = _made(each, made, stack)
            return function(*args, **kwargs)

    return run


def _made(dependency: _Dependency, made: dict[Callable[..., Any], Any], stack: ExitStack) -> Any:
    make = _replaced.get(dependency.make, dependency.make)
    if make not in made:
        needs = dependency.needs if make is dependency.make else dependencies_of(make)
        value: Any = make(**{name: _made(each, made, stack) for name, each in needs.items()})
        if inspect.iscoroutine(value):
            value.close()
        if inspect.isawaitable(value) or isinstance(value, AbstractAsyncContextManager):
            raise _no_async(make)
        if isinstance(value, AbstractContextManager):
            value = stack.enter_context(_Block(value))
        made[make] = value
    return made[make]


def _refuse_async(function: Callable[..., Any], dependency: _Dependency) -> None:
    """Raise UsageError for a dependency of a plain function that is known to be async."""
    inner = inspect.unwrap(dependency.make)
    if is_async(inner) or inspect.isasyncgenfunction(inner):
        raise UsageError(f"{_name_of(function)}: {_no_async(dependency.make)}")
    for each in dependency.needs.values():
        _refuse_async(function, each)


def _no_async(make: object) -> UsageError:
    return UsageError(
        f"worqr.Depends({_name_of(make)}) is async, and this handler is a plain function: make one of them the other kind"
    )


@contextmanager
def replaced(make: Callable[..., Any], by: Callable[..., Any]) -> Generator[None]:
    """Let handlers of this process get their dependency from another function in the block, for tests.

    Args:
        make: The function that was given to `Depends`.
        by: The function in its place. It may be of any kind that `Depends` takes.
    """
    Depends(by)  # checks it
    before = _replaced.get(make)
    _replaced[make] = by
    try:
        yield
    finally:
        if before is None:
            del _replaced[make]
        else:
            _replaced[make] = before
