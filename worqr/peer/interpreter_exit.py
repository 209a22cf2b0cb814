"""The exit of the interpreter: whether it has begun, and callbacks that run at its beginning.

The callbacks run while threads can still be started, which is before threads are joined and before ``atexit``.
`worqr.hosting.peer_thread` ends the threads of peers there. `host_loop` asks whether a loop of the main thread may run again.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Final

from worqr.errors import UsageError

_callbacks: Final[list[Callable[[], None]]] = []
_begun: Final = threading.Event()


def call_at_exit(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the main thread, while threads can still be started.

    Python has such a function for its own pools, under a private name. If that is missing, ``atexit`` is used: it runs later,
    after threads were joined.

    Raises:
        UsageError: the interpreter is exiting.
    """
    try:
        if callback not in _callbacks:
            import_module(
                "concurrent.futures.thread"
            )  # it waits for handlers when it exits, so `callback` must run before
            register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
            register(lambda: _run(callback))
            _callbacks.append(callback)
    except RuntimeError as error:
        raise UsageError("the interpreter is exiting: no peer can start") from error
    if _begun.is_set():
        raise UsageError("the interpreter is exiting: no peer can start")


def is_exiting() -> bool:
    """Return True once the interpreter has begun to exit: no loop of the main thread runs again."""
    return _begun.is_set()


def _run(callback: Callable[[], None]) -> None:
    _begun.set()
    callback()
