"""The tables of the outbox. They stay as they are where `Outbox.create_tables` has made them before."""

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import migrations, models

from worqr.sql.statements import IDENTITY, NOW, Statements

TABLE = "worqr_outbox"


def _create(_apps: Any, editor: Any) -> None:
    vendor = editor.connection.vendor
    for statement in Statements(vendor, TABLE).create() if vendor in NOW else ():
        editor.execute(statement)


def _drop(_apps: Any, editor: Any) -> None:
    """Drop the tables, unless calls wait there, which would be lost."""
    if editor.connection.vendor not in NOW:
        return
    with editor.connection.cursor() as cursor:
        cursor.execute(f"SELECT COUNT(*) FROM {TABLE} WHERE state <> '{IDENTITY}'")  # noqa: S608
        [count] = cursor.fetchone()
    if count:
        raise ImproperlyConfigured(
            f"{count:,} calls are in {TABLE}, which would be lost: wait until workers have sent them, or delete those that "
            "failed with `manage.py worqr outbox`"
        )
    for name in (TABLE, f"{TABLE}_steps"):
        editor.execute(f"DROP TABLE {name}")


class Migration(migrations.Migration):
    """Adds the models `OutboxRow` and `OutboxStep`, with the tables as `Outbox.create_tables` makes them."""

    dependencies = (("worqr", "0001_initial"),)
    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(_create, _drop, hints={"model_name": "outboxrow"})],
            state_operations=[
                migrations.CreateModel(
                    name="OutboxRow",
                    fields=[
                        ("id", models.TextField(primary_key=True, serialize=False)),
                        ("format", models.IntegerField()),
                        ("queue", models.TextField()),
                        ("payload", models.BinaryField()),
                        ("options", models.BinaryField()),
                        ("at", models.BigIntegerField()),
                        ("tries", models.IntegerField(db_default=0)),
                        ("retry_at", models.BigIntegerField(db_default=0)),
                        ("state", models.TextField(db_default="waiting")),
                        ("error", models.TextField(null=True)),
                    ],
                    options={
                        "db_table": TABLE,
                        "default_permissions": (),
                        "required_db_features": ("supports_partial_indexes",),
                    },
                ),
                migrations.CreateModel(
                    name="OutboxStep",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "queue",
                                "life",
                                "step",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("queue", models.TextField()),
                        ("life", models.TextField()),
                        ("step", models.TextField()),
                        ("at", models.BigIntegerField()),
                        ("value", models.BinaryField(null=True)),
                    ],
                    options={
                        "db_table": f"{TABLE}_steps",
                        "default_permissions": (),
                        "required_db_features": ("supports_partial_indexes",),
                    },
                ),
            ],
        ),
    )
