"""The meshes of a project as ``worqr run`` finds them: ``worqr.django.worker:ALIAS``. The import discovers all ``tasks.py``."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from worqr.mesh import Mesh

autodiscover_modules("tasks")


def mesh_of_alias(alias: str) -> Mesh[Any]:
    """Return the mesh of the backend with this alias.

    Raises:
        ImportError: Django has no tasks, and the backport is not installed.
        LookupError: `TASKS` has no such alias, or another backend there.
        ImproperlyConfigured: Its `OPTIONS` are not valid.
    """
    from worqr.django.backend import Backend
    from worqr.django.meshes import mesh_of
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
    return mesh_of(backend)


def __getattr__(alias: str) -> Mesh[Any]:
    """Return the mesh of an alias."""
    if alias.startswith("__"):
        raise AttributeError(alias)
    return mesh_of_alias(alias)
