"""Serve functions that are declared after their mesh has joined: in a module that is imported late, or in a notebook.

`join` serves the functions that are declared when it is entered. Each later declaration notifies the peers of the mesh, from any
thread. Each peer serves the new function soon afterwards. A function that replaces another one of its name is not exchanged,
because runs of the older one may be under way. That is logged, and the next join serves the new function.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Final

import trio

from worqr.errors import WorqrError
from worqr.inside import definition_of
from worqr.log_events import emit
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.options import Only

if TYPE_CHECKING:
    from worqr.functions.definition import FunctionDefinition
    from worqr.functions.registry import Declarations
    from worqr.peer.engine import Engine

logger: logging.Logger = logging.getLogger(__name__)

SETTLE: Final = 0.1
"""Seconds to wait after a declaration, because its failure handler and more functions are declared in that time."""
RETRY_AFTER: Final = 3.0
"""Seconds until the next try to serve a function."""


@contextmanager
def serving_late(
    engine: Engine, declarations: Declarations, only: Only, known: Mapping[str, FunctionDefinition]
) -> Generator[None]:
    """Serve the functions that are declared during the block.

    Args:
        engine: the peer's engine.
        declarations: the mesh's declarations.
        only: the names that this peer may serve.
        known: the functions that were declared before.
    """
    late = _LateServer(engine, declarations, only, known)
    if engine.spawn(late.serve_forever):
        with declarations.when_declared(late.on_declared):
            late.on_declared()  # functions were declared while the peer joined
            yield
    else:
        yield


class _LateServer:
    """Serves late functions, for one peer. `on_declared` is called from any thread, everything else in the loop."""

    def __init__(
        self, engine: Engine, declarations: Declarations, only: Only, known: Mapping[str, FunctionDefinition]
    ) -> None:
        self._engine = engine
        self._declarations = declarations
        self._only = only
        self._known = dict(known)
        self._token = trio.lowlevel.current_trio_token()
        self._declared = trio.Event()
        self._missing = False
        self._throttle = ErrorThrottle(logger)

    def on_declared(self) -> None:
        """Wake the task that serves new functions."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self._declared.set()

    async def serve_forever(self) -> None:
        """Serve new functions after each notification, until the peer leaves."""
        while not self._engine.leaving:
            with trio.move_on_after(RETRY_AFTER if self._missing else inf):
                await self._declared.wait()
            self._declared = trio.Event()
            await trio.sleep(SETTLE)
            self._missing = False
            for name, function in dict(self._declarations.functions).items():
                declared = definition_of(function)
                if name in self._only and declared is not self._known.get(name) and not self._engine.leaving:
                    await self._serve(name, declared)

    async def _serve(self, name: str, declared: FunctionDefinition) -> None:
        if name in self._known:
            self._known[name] = declared
            text = "%(function)r was declared again; this worker runs the older one until it joins again"
            emit(logger, "function.replaced", text, function=name)
            return
        here = {served.queue for served in self._engine.consumers.entered()}
        try:
            await self._engine.serve_all(each for each in declared.handlers() if each[0] not in here)
        except WorqrError as error:
            if not self._engine.leaving:
                self._missing = True
                text = "%(function)r, declared after the join, is not served: %(error)s; trying again"
                self._throttle.error(name, "function.unserved", text, function=name, error=error)
            return
        self._known[name] = declared
        self._throttle.resolve(name)
        emit(logger, "function.served", "%(function)r, declared after the join, is served now", function=name)
