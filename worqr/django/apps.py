"""The Django application, with its checks for ``manage.py check --deploy``: they connect to the server of each backend."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from worqr.client.sync import sync
from worqr.errors import WorqrError
from worqr.inside import client_of

GIVE_UP_AFTER: Final = 5.0

"""Seconds that the server has for its answer."""


def check_server(app_configs: Any = None, **_: Any) -> Iterable[checks.CheckMessage]:
    """Check the server of each backend, and whether it evicts keys; the tables of outboxes; and the meaning of naive times."""
    try:
        from worqr.django.backend import Backend
        from worqr.django.meshes import mesh_of, outbox_of
        from worqr.django.task_api import task_backends
    except ImportError:  # a project without tasks, on Django 5.2
        return

    backends = [each for each in task_backends.all() if isinstance(each, Backend)]
    for backend in backends:
        try:
            yield from _check_mesh(backend.alias, mesh_of(backend))
            yield from _check_outbox(backend.alias, outbox_of(backend))
        except ImproperlyConfigured as error:
            yield checks.Error(str(error), id="worqr.E001")
    if backends and not settings.USE_TZ:
        yield checks.Warning(
            f"USE_TZ is False: a run_after of the hour that the clocks of {settings.TIME_ZONE} show twice means the first one.",
            hint="Set USE_TZ = True, or pass aware times.",
            id="worqr.W002",
        )


def _check_mesh(alias: str, mesh: Any) -> Iterable[checks.CheckMessage]:
    async def keeps_everything() -> bool | None:
        return client_of(mesh).link.server_stats(GIVE_UP_AFTER).keeps_everything  # no loop runs here that it would stop

    try:
        keeps = sync(keeps_everything)
    except WorqrError as error:
        yield checks.Error(
            f"The server of TASKS[{alias!r}] cannot be used: {error}",
            hint="Set OPTIONS={'url': 'redis://...'}, or start the server.",
            id="worqr.E003",
        )
        return
    if keeps is False:
        yield checks.Warning(
            f"The server of TASKS[{alias!r}] may evict keys, and with them tasks.",
            hint="Set `maxmemory-policy noeviction` on the server.",
            id="worqr.W001",
        )


def _check_outbox(alias: str, outbox: Any) -> Iterable[checks.CheckMessage]:
    """Check that an outbox has its tables, with all columns. No check of databases does it: `migrate` runs those first."""
    if outbox is None:
        return
    try:
        outbox.sender.ask(lambda sql: sql.to_sweep(None, ()))
        outbox.sender.ask(lambda sql: sql.by_id([""]))
        outbox.sender.ask(lambda sql: sql.value("", "", ""))
    except Exception as error:  # of the database's driver
        yield checks.Error(
            f"The outbox of TASKS[{alias!r}] cannot be used in the database {outbox.alias!r}: {error}",
            hint=f"Create its tables: python manage.py migrate worqr --database {outbox.alias}",
            id="worqr.E004",
        )


class WorqrConfig(AppConfig):
    """``"worqr.django"`` in `INSTALLED_APPS`. Its label is ``worqr``, as in the permission ``worqr.view``."""

    name = "worqr.django"
    label = "worqr"
    verbose_name = "worqr"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks; those of Django's own are registered when its tasks are imported."""
        with suppress(ImportError):  # a project without tasks, on Django 5.2
            import worqr.django.task_api  # noqa: F401
        checks.register(check_server, deploy=True)
