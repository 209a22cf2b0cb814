"""When a call is sent: now, or after the commit of the transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.db import connections

from worqr.log_events import emit
from worqr.tracebacks import one_line

logger: logging.Logger = logging.getLogger(__name__)


def after_commit(send: Callable[[], object], name: str, using: bool | str = True) -> None:
    """Call `send` after the commit, or now if no ``atomic`` block is open. After a rollback it is never called.

    An error of `send` after a commit is logged, and stops no later hook: the transaction cannot be undone any more.

    Args:
        send: Sends a call. Its arguments were checked and encoded before.
        name: The name of what is sent, for the log.
        using: The alias of a database. True: all databases with an open block; the last commit calls `send`. False: now.
    """
    blocks = _open_blocks(using)
    left = len(blocks)
    if not blocks:
        send()
        return

    def committed() -> None:
        nonlocal left
        left -= 1
        if not left:
            _send(send, name)

    for each in blocks:
        each.on_commit(committed, robust=True)


def _open_blocks(using: bool | str) -> list[Any]:
    """Return the connections whose commits are waited for."""
    if using is False:
        return []
    if isinstance(using, str):
        return [connections[using]] if connections[using].in_atomic_block else []
    found = [each for each in connections.all(initialized_only=True) if each.in_atomic_block]
    own = [each for each in found if not all(getattr(block, "_from_testcase", False) for block in each.atomic_blocks)]
    return own or found[:1]  # a `TestCase` opens a block on each of its databases


def _send(send: Callable[[], object], name: str) -> None:
    try:
        send()
    except Exception as error:
        text = "%(function)s was not enqueued, although the transaction was committed: %(error)s"
        emit(logger, "commit.unsent", text, exc_info=error, function=name, error=one_line(error))
