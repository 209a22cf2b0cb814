"""`step` and `step_now`: call a function once per job, however often the job runs.

The result is stored under the name of the step, and decoded by the function's return annotation: in the run that calls the
function as well, so that all runs get an equal value. What is stored is in `saved_state`.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast, get_type_hints, overload
from weakref import WeakKeyDictionary

import msgspec

from worqr.arrival import Changed, Check, arrival_of
from worqr.errors import UsageError
from worqr.json_types import annotated, check_known, decoder_of
from worqr.peer.futures import wait_done
from worqr.peer.run import Run, Save, current_run
from worqr.peer.saved_state import check_step, encode_step

P = ParamSpec("P")
R = TypeVar("R")


@overload
async def step(name: str, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def step(name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
async def step(name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a handler, unless an earlier run of this job has called it: then return what it returned.

    A step is called again if its worker dies between its effect and the save. If that must not happen, pass the other system
    an idempotency key, such as ``worqr.current().id``. If the function raises, nothing is stored. Steps of other names may
    run at the same time.

    Args:
        name: The name of the step in this job, 1 to 200 bytes. Each step of a job needs its own.
        fn: An async function, or a plain one that does not block. Its result is stored as JSON and decoded by its return
            annotation, in every run. Bytes and None are stored unchanged.
        *args: Passed to the function. They are not stored and not compared.
        **kwargs: Passed to the function.

    Returns:
        What the function returned, in this run or in an earlier one.

    Raises:
        UsageError: Called outside a handler; this run has taken a step of this name before; JSON does not know the return
            annotation; the stored result is not of that type; or it would arrive as another type or value than was returned.
        Failure: The function was called, and its result cannot be stored: it is no JSON, or the job would keep more than 1 MiB.
            The job moves to the dead-letter queue, because another run would call the function again.
        ClaimLost: The task was reassigned to another worker, or has ended.
        RefusedByServer: The server does not permit it.
        Unavailable: The peer has left.
    """
    with _Step[Any](name, fn) as begun:
        if begun.result is None:
            value = fn(*args, **kwargs)
            begun.note(await value if inspect.isawaitable(value) else value)
        if begun.unsaved:
            await wait_done(done := begun.send())
            begun.saved(done)
        return begun.value()


def step_now(name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a plain function as a step, in a handler that runs in a thread or a process. See `step`.

    A step is called again if its worker dies between its effect and the save.

    Args:
        name: The name of the step in this job, 1 to 200 bytes. Each step of a job needs its own.
        fn: A plain function. Its result is stored as JSON and decoded by its return annotation, in every run.
        *args: Passed to the function. They are not stored and not compared.
        **kwargs: Passed to the function.

    Returns:
        What the function returned, in this run or in an earlier one.

    Raises:
        UsageError: An event loop runs in this thread; the function is async; or as `step`.
        Failure: The function was called, and its result cannot be stored.
        ClaimLost: The task was reassigned to another worker, or has ended.
        RefusedByServer: The server does not permit it.
        Unavailable: The peer has left.
    """
    with _Step[R](name, fn) as begun:
        begun.run.check_may_wait(f"await worqr.step({name!r}, ...)")
        if begun.result is None:
            begun.note(_not_awaitable(name, fn(*args, **kwargs)))
        if begun.unsaved:
            begun.saved(begun.send())
        return begun.value()


def _not_awaitable(name: str, value: R) -> R:
    if not inspect.isawaitable(value):
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise UsageError(f"step {name!r} is an async function: write `await worqr.step({name!r}, ...)` in an async handler")


class _Step(Generic[R]):
    """One step of the current run, as a block. If the block raises, the handler may begin the step again.

    Raises:
        UsageError: as `step`. The function was not called.
    """

    def __init__(self, name: str, fn: Callable[..., object]) -> None:
        try:
            self.run: Run[Any] = current_run.get()
        except LookupError:
            raise UsageError(
                "worqr.step() is for code inside a handler, which a worker runs: elsewhere, call the function itself; in a "
                "test, use `with worqr.testing.context():`"
            ) from None
        self._name = check_step(name)
        self._hint, self._arrival = _return_type(name, fn)
        self._changed = ""
        self._state = self.run.saved_state()
        self.result, self.unsaved = self._state.begin_step(name)

    def __enter__(self) -> _Step[R]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._state.give_up_step(self._name)

    def note(self, value: object) -> None:
        """Note what the function returned. A result that would arrive as something else is marked, and kept all the same."""
        result = encode_step(self._name, value)
        if result.startswith(b"json "):
            with suppress(Exception):  # `value` reports what cannot be decoded
                try:
                    self._arrival.check(value, decoder_of(self._hint)(result[5:]))
                except Changed as changed:
                    self._changed = f"{changed}{changed.remedy}"
                    result = _mark(self._hint) + result[4:]
        self.result, self.unsaved = result, True
        self._state.note_step(self._name, result)

    def send(self) -> Future[None]:
        """Send the result to the server."""
        assert self.result is not None
        return self.run.save(Save(0, self._name, self.result))

    def saved(self, done: Future[None]) -> None:
        """Note that the server has the result, or raise the error."""
        done.result()
        self._state.note_step_saved(self._name)

    def value(self) -> R:
        """Return the decoded result."""
        assert self.result is not None
        kind, _, value = self.result.partition(b" ")
        if kind == _mark(self._hint):
            why = (
                self._changed
                or "part of it would arrive as something else: change the return annotation of the function"
            )
            raise UsageError(
                f"the result of step {self._name!r} is not what its function returned: {why}. It is saved: the next run does not "
                "call the function again"
            )
        try:
            if kind == b"bytes":
                found: object = msgspec.convert(value, self._hint)
            else:
                found = decoder_of(self._hint)(b"null" if kind == b"none" else value)
        except Exception as error:
            raise UsageError(
                f"the saved result of step {self._name!r} does not have the type that its function declares ({error}): "
                "it returned something else, or another version of it ran. Correct its annotation; the next run gets the "
                "same result"
            ) from error
        return cast("R", found)


_hints: WeakKeyDictionary[Any, tuple[Any, Check]] = WeakKeyDictionary()
"""The return annotations of functions that were checked."""
_MODULES: Final = re.compile(r"[\w.]+\.")


def _mark(hint: object) -> bytes:
    """Return the kind of a saved result that this annotation does not restore; another annotation may. A script has two names."""
    return b"json-%08x" % zlib.crc32(_MODULES.sub("", repr(hint)).encode())


def _return_type(name: str, fn: object) -> tuple[Any, Check]:
    """Return the type of what `fn` returns, and its check.

    Raises:
        UsageError: JSON does not know it, or it names what is not there when the program runs.
    """
    if not callable(fn):
        raise UsageError(
            f"step {name!r} needs a function and its arguments, as in step({name!r}, charge, order), not {fn!r}"
        )
    key = getattr(fn, "__func__", fn)
    with suppress(KeyError, TypeError):
        return _hints[key]
    hint: Any = fn
    if not isinstance(fn, type):
        try:
            hint = get_type_hints(annotated(fn), include_extras=True).get("return", Any)
        except Exception as error:  # an annotation is code of the user, which may raise anything
            raise UsageError(
                f"step {name!r}: the annotations of its function cannot be read ({type(error).__name__}: {error}): import "
                "what they name outside of `if TYPE_CHECKING:`"
            ) from None
    check_known(f"step {name!r}", "return", hint)
    found = hint, arrival_of(hint)
    if hint is not fn:
        with suppress(TypeError):  # no weak references to it
            _hints[key] = found
    return found
