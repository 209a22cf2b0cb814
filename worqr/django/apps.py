"""The Django application: its checks, and the meshes that follow the settings."""

from __future__ import annotations

from contextlib import suppress

from django.apps import AppConfig
from django.core import checks


class WorqrConfig(AppConfig):
    """``"worqr.django"`` in `INSTALLED_APPS`. Its label is ``worqr``, as in the permission ``worqr.view``."""

    name = "worqr.django"
    label = "worqr"
    verbose_name = "worqr"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks; those of Django's own are registered when its tasks are imported."""
        from worqr.django.checks import check_server

        with suppress(ImportError):  # a project without tasks, on Django 5.2
            import worqr.django.task_api  # noqa: F401
        checks.register(check_server, deploy=True)
