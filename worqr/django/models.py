"""`Dashboard`: a model without a table, for the entry in Django's admin and for the permissions."""

from __future__ import annotations

from django.db import models


class Dashboard(models.Model):
    """The dashboard of the mesh. Its permissions are ``worqr.view`` and ``worqr.operate``."""

    class Meta:
        """It has no table."""

        managed = False
        default_permissions = ()
        permissions = (
            ("view", "Can look at the dashboard of worqr"),
            ("operate", "Can cancel, retry, drop and pause tasks"),
        )
        verbose_name = "dashboard"
        verbose_name_plural = "dashboard"

    def __str__(self) -> str:
        return "dashboard"
