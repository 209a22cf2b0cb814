"""When a call is sent: now, or after the commit of the transaction."""

# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable

from django.db import connections


def after_commit(send: Callable[[], object], using: bool | str = True) -> None:
    """Call `send` after the commit, or now if no ``atomic`` block is open. After a rollback it is never called.

    An error of `send` after a commit is logged by Django (``django.db.backends.base``) and stops no later hook.

    Args:
        send: Sends a call. Its arguments were checked and encoded before.
        using: The alias of a database. True: all databases with an open block; the last commit calls `send`. False: now.
    """
    if using is False:
        send()
        return
    blocks = [connections[using]] if isinstance(using, str) else list(connections.all(initialized_only=True))
    blocks = [each for each in blocks if each.in_atomic_block]
    left = len(blocks)
    if not blocks:
        send()
        return

    def committed() -> None:
        nonlocal left
        left -= 1
        if not left:
            send()

    for each in blocks:
        each.on_commit(committed, robust=True)
