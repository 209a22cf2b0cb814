"""`Step`: a function that each job of a workflow calls once for the same arguments, however often the job runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast

from worqr.argument_codec import ArgumentCodec
from worqr.errors import UsageError
from worqr.handler_options import is_async, policy_for
from worqr.inside import current_run
from worqr.policy import Policy, RetryPolicy
from worqr.validation import Seconds, check_text

P = ParamSpec("P")
R = TypeVar("R")

MAX_NAME: Final = 200
"""The most bytes of a key."""


class Step(Generic[P, R]):
    """A function that is a step of workflows; ``@mesh.step`` makes it. Calling it in a workflow calls the function once per job,
    and returns what is stored of it in later runs. Calling it elsewhere calls the function.

    The stored name is the name of the step with its arguments, as JSON. If one task of a run makes the same call again, the call
    is another step, with a number; if two tasks of one run do, `named` distinguishes them.
    """

    def __init__(
        self, fn: Callable[P, R], name: str, retry: RetryPolicy | None = None, timeout: Seconds | None = None
    ) -> None:
        functools.update_wrapper(cast("Any", self), fn)
        if timeout is not None and not is_async(fn):
            raise UsageError(f"step {name!r}: a plain function cannot be stopped after a timeout: declare it async")
        if retry is not None and retry.reset_on_progress is not None:
            raise UsageError(
                f"step {name!r}: reset_on_progress is for functions, and a step makes no progress of its own"
            )
        self._fn = fn
        self._name = name
        self._key: str | None = None
        self._policy: Policy | None = None
        if retry is not None or timeout is not None:
            self._policy = policy_for(retry or RetryPolicy(max_failures=1), timeout=timeout)
        self._codec = ArgumentCodec(fn, name)

    @property
    def name(self) -> str:
        """The name of the step, unique in its registry."""
        return self._name

    def named(self, name: str) -> Step[P, R]:
        """Return this step under another name, which its arguments do not add to: ``charge.named("retry of 7")(7)``.

        Args:
            name: The name of the call in its job, 1 to 200 bytes.

        Raises:
            UsageError: The name is not valid.
        """
        if not 0 < len(check_text(name, "the name of a step").encode()) <= MAX_NAME:
            raise UsageError(f"the name of a step must have 1 to {MAX_NAME} bytes, not {len(name.encode()):,}")
        found: Step[P, R] = object.__new__(type(self))
        vars(found).update(vars(self))
        found._key = name
        return found

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function: in a workflow once per job, elsewhere each time.

        Raises:
            StepFailed: The retry policy of the step allows no further try, in this run or in an earlier one.
            UsageError: In a workflow: another task of the run makes the same call; an argument is not JSON; or as `worqr.step`.
        """
        run = current_run.get(None)
        if run is None or run.flow is None:
            return self._fn(*args, **kwargs)
        remedy = f"give one of them a name, as in {self._name}.named('...')(...)"
        key = run.flow.key(self._key or self._key_of(run.flow, args, kwargs), remedy)
        return cast("R", run.flow.take_step(key, self._fn, args, kwargs, self._policy))

    def _key_of(self, flow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name of a call with these arguments; a digest of them if they are long, or the mesh has a codec."""
        arguments = self._codec.encode(self._codec.bind(args, kwargs)).decode("utf-8", "replace")
        key = f"{self._name} {arguments}"
        if len(key.encode()) > MAX_NAME - len(" #100000") or flow.must_hide(key):
            key = f"{self._name} {hashlib.sha256(arguments.encode()).hexdigest()[:32]}"
        return key

    def __repr__(self) -> str:
        return f"<Step {self._name!r}>"
