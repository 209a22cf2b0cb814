"""The meshes of a project as ``worqr run`` finds them, ``worqr.django.worker:ALIAS``, and their outboxes, ``ALIAS.outbox``.

The import discovers all ``tasks.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from worqr.mesh import Mesh

if TYPE_CHECKING:
    from worqr.sql import Outbox

autodiscover_modules("tasks")


def mesh_of_alias(alias: str) -> Mesh[Any]:
    """Return the mesh of the backend with this alias.

    Raises:
        ImportError: Django has no tasks, and the backport is not installed.
        LookupError: `TASKS` has no such alias, or another backend there.
        ImproperlyConfigured: Its `OPTIONS` are not valid.
    """
    from worqr.django.meshes import mesh_of

    return mesh_of(_backend(alias))


def outbox_of_alias(alias: str) -> Outbox | None:
    """Return the outbox of the backend with this alias; None if it has none. Raises as `mesh_of_alias`."""
    from worqr.django.meshes import outbox_of

    return outbox_of(_backend(alias))


def _backend(alias: str) -> Any:
    from worqr.django.backend import Backend
    from worqr.django.task_api import task_backends

    known = getattr(settings, "TASKS", {})
    if alias not in known:
        raise LookupError(
            f"TASKS has no {alias!r}; there are {', '.join(map(repr, known)) or 'none'}: choose one with --backend"
        )
    backend = task_backends[alias]
    if not isinstance(backend, Backend):
        kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
        raise LookupError(  # noqa: TRY004 - the settings are wrong
            f"TASKS[{alias!r}] has the backend {kind}: set BACKEND to 'worqr.django.Backend', or choose another with --backend"
        )
    return backend


def __getattr__(name: str) -> Mesh[Any] | Outbox | None:
    """Return the mesh of an alias, or its outbox."""
    if name.startswith("__"):
        raise AttributeError(name)
    alias, dot, _ = name.rpartition(".outbox")
    return outbox_of_alias(alias) if dot else mesh_of_alias(name)
