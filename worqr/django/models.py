"""Models: `Dashboard`, without a table, for the entry in Django's admin and its permissions; and the tables of the outbox.

The outbox reads and writes its tables itself, by `worqr.sql.statements`. Django migrates them, and empties them between tests.
"""

from __future__ import annotations

from typing import Final

from django.db import models

from worqr.sql.statements import WAITING

OUTBOX_FEATURES: Final = ("supports_partial_indexes",)
"""Of PostgreSQL and SQLite only. In a database of another kind, Django makes no tables for the outbox."""


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


class OutboxRow(models.Model):
    """A call that was stored in a transaction, and is not a job yet."""

    id = models.TextField(primary_key=True)
    format = models.IntegerField()
    queue = models.TextField()
    payload = models.BinaryField()
    options = models.BinaryField()
    at = models.BigIntegerField()
    tries = models.IntegerField(db_default=0)
    retry_at = models.BigIntegerField(db_default=0)
    state = models.TextField(db_default=WAITING)
    error = models.TextField(null=True)

    class Meta:
        """The table of an `Outbox` that has no name of its own."""

        db_table = "worqr_outbox"
        default_permissions = ()
        required_db_features = OUTBOX_FEATURES

    def __str__(self) -> str:
        return str(self.id)


class OutboxStep(models.Model):
    """A step of a job that was committed, by `Outbox.first` or `Outbox.step`."""

    pk = models.CompositePrimaryKey("queue", "life", "step")
    queue = models.TextField()
    life = models.TextField()
    step = models.TextField()
    at = models.BigIntegerField()
    value = models.BinaryField(null=True)

    class Meta:
        """The second table of an `Outbox`."""

        db_table = "worqr_outbox_steps"
        default_permissions = ()
        required_db_features = OUTBOX_FEATURES

    def __str__(self) -> str:
        return f"{self.queue} {self.step}"
