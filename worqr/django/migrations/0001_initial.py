"""The permissions of the dashboard. No table is made."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Adds the model `Dashboard`, which has no table."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Dashboard",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"))
            ],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "permissions": (
                    ("view", "Can look at the dashboard of worqr"),
                    ("operate", "Can cancel, retry, drop and pause tasks"),
                ),
                "managed": False,
                "default_permissions": (),
            },
        ),
    )
