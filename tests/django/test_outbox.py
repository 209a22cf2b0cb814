"""The outbox of a Django project: its tables by migrations, tasks that are rows of the transaction, and what is said of both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.django.conftest import TASKS as TASKS_MODULE
from tests.django.conftest import Project
from tests.sql.conftest import cluster  # noqa: F401 - a fixture
from tests.support.postgres import Postgres

pytestmark = pytest.mark.one_server

TASKS = """
    from shop.models import Order

    @task
    def add(a, b):
        return a + b

    @task(queue_name="mail", priority=50)
    @worqr.django.options(result_ttl=60)
    def send(order_id):
        return Order.objects.get(pk=order_id).name

    @task
    @worqr.django.options(retry=worqr.RetryPolicy(max_failures=3, min_backoff=0, max_backoff=0))
    def ship(order_id):
        from django.db import connection, transaction
        with transaction.atomic():
            if worqr.django.outbox().first(connection, "ship"):
                Order.objects.create(name=f"shipped {order_id}")
        if worqr.current().attempt < 3:
            raise RuntimeError("after the commit")
        return Order.objects.filter(name=f"shipped {order_id}").count()
"""
SETTINGS = """
TASKS["default"]["OPTIONS"]["outbox"] = "default"
TASKS["default"]["QUEUES"] = []
"""
BEFORE = """
from django.db import connections, transaction
from shop.models import Order
from worqr.django.meshes import outbox_of
outbox = outbox_of(backend)
count = lambda: worqr.sync(mesh_of(backend).queue("django:default").count)

def rows(alias="default"):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT id FROM worqr_outbox WHERE state <> 'outbox'")
        return [each for each, in cursor.fetchall()]
"""

MIGRATE = """
from django.core.management import call_command
for alias in ("default", "other"):
    call_command("migrate", run_syncdb=True, verbosity=0, database=alias)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def project(request: pytest.FixtureRequest, project: Project) -> Iterator[Project]:
    """A project with an outbox in each kind of database. Its tables are not there yet."""
    settings = project.folder / "shop" / "settings.py"
    project.write(tasks=TASKS)
    settings.write_text(settings.read_text() + SETTINGS)
    if request.param == "sqlite":
        yield project
        return
    postgres: Postgres = request.getfixturevalue("cluster")
    with postgres.database() as name, postgres.database() as other:
        common = {"ENGINE": "django.db.backends.postgresql", "HOST": str(postgres.folder), "PORT": str(postgres.port)}
        databases = {"default": {**common, "NAME": name, "USER": "postgres"}}
        databases["other"] = {**common, "NAME": other, "USER": "postgres"}
        settings.write_text(settings.read_text() + f"\nDATABASES = {databases!r}\n")
        yield project


@pytest.fixture
def migrated(project: Project) -> Project:
    """Its databases have all tables."""
    project.run(MIGRATE)
    return project


def test_backends_of_two_servers_share_no_table(project: Project) -> None:
    settings = project.folder / "shop" / "settings.py"
    same = """
TASKS["second"] = {"BACKEND": "worqr.django.Backend", "OPTIONS": {**TASKS["default"]["OPTIONS"], "result_ttl": 60}}
"""
    settings.write_text(settings.read_text() + same)
    project.manage("check")
    settings.write_text(settings.read_text() + 'TASKS["second"]["OPTIONS"]["prefix"] = "second"\n')
    assert "TASKS['second'] and TASKS['default'] have the outbox 'default'" in project.manage("check", code=1)


def test_migrations_make_the_tables_and_drop_none_in_which_calls_wait(project: Project) -> None:
    said = project.manage("check", "--deploy", code=1)
    assert "(worqr.E004) The outbox of TASKS['default'] cannot be used in the database 'default'" in said
    assert "python manage.py migrate worqr --database default" in said
    project.run(BEFORE, "outbox.create_tables()")  # as by hand, before there were migrations
    project.run(MIGRATE)
    assert "No changes detected" in project.manage("makemigrations", "worqr", "--check", "--dry-run")
    assert "worqr" not in project.manage("check", "--deploy")
    project.run(
        BEFORE,
        """
        from django.apps import apps
        for alias in ("default", "other"):
            for name in ("OutboxRow", "OutboxStep"):
                assert list(apps.get_model("worqr", name).objects.using(alias).all()) == [], name
        outbox.sender.hand_over = lambda rows: None
        with transaction.atomic():
            outbox.enqueue(connections["default"], mesh_of(backend).call("nobody", n=1))
        connections["default"].cursor().execute("UPDATE worqr_outbox SET state = 'failed'")
        [row] = apps.get_model("worqr", "OutboxRow").objects.all()
        assert (row.queue, bytes(row.payload), row.tries) == ("nobody", b'{"n":1}', 0), row
        """,
    )
    assert "1 calls are in worqr_outbox" in project.manage("migrate", "worqr", "0001", code=1)
    project.run(BEFORE, "outbox.sender.ask(lambda sql: sql.drop(rows()))")
    project.manage("migrate", "worqr", "zero", "--verbosity", "0")
    project.manage("migrate", "worqr", "--verbosity", "0")


def test_the_rows_of_a_test_are_gone_after_it_with_migrations_and_without(project: Project) -> None:
    project.write(
        tasks=TASKS,
        tests=f"""
        from django.db import transaction
        from django.test import TransactionTestCase
        from {TASKS_MODULE} import TaskResultStatus
        from shop import tasks
        from worqr.django.models import OutboxRow

        class Tests(TransactionTestCase):
            def store(self):
                self.assertEqual(OutboxRow.objects.count(), 0)
                with transaction.atomic():
                    self.assertEqual(tasks.add.enqueue(1, 2).status, TaskResultStatus.READY)
                self.assertEqual(OutboxRow.objects.count(), 1)

            def test_one(self):
                self.store()

            def test_another(self):
                self.store()
        """,
    )
    settings = project.folder / "shop" / "settings.py"
    for more in ("", "\nMIGRATION_MODULES = {'worqr': None}\n"):
        settings.write_text(settings.read_text() + more)
        said = project.manage("test", "--verbosity", "0", WORQR_URL="unix:///nowhere/worqr.sock", PATIENCE="0.5")
        assert "OK" in said
        assert "the server did not reply within 6 s" in said or "postgresql" in settings.read_text()


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_rows_in_memory_are_sent_before_the_commit_returns_or_with_later_ones(project: Project) -> None:
    """There, another connection at the same time makes the next statement of a test fail: `database table is locked`."""
    project.write(
        tasks=TASKS,
        tests="""
        import worqr
        from django.db import transaction
        from django.test import TransactionTestCase
        from shop import tasks
        from worqr.django.meshes import mesh_of, outbox_of
        from worqr.django.models import OutboxRow
        from worqr.sql import sender
        from django_tasks_or_django import task_backends

        sender.HERE_WITHIN = 60.0  # a slow machine

        class Tests(TransactionTestCase):
            def test_sent(self):
                backend = task_backends["default"]
                outbox = outbox_of(backend)
                before = worqr.sync(mesh_of(backend).queue("django:default").count)
                with outbox.sender.sweeping():  # as beside a worker
                    for n in range(50):
                        with transaction.atomic():
                            tasks.add.enqueue(n, n)
                        self.assertEqual(OutboxRow.objects.all().delete()[0], 0)
                    self.assertIsNone(outbox.sender._thread)
                self.assertEqual(worqr.sync(mesh_of(backend).queue("django:default").count) - before, 50)

            def test_later(self):
                backend = task_backends["default"]
                mesh, outbox = mesh_of(backend), outbox_of(backend)
                dispatch = mesh._client.producer.dispatch_rows
                before = worqr.sync(mesh.queue("django:default").count)

                async def away(*_):
                    raise worqr.Unavailable("no server")

                mesh._client.producer.dispatch_rows = away
                for n in range(2):  # the second one does not ask again so soon
                    with transaction.atomic():
                        tasks.add.enqueue(n, n)
                self.assertEqual(OutboxRow.objects.count(), 2)
                mesh._client.producer.dispatch_rows = dispatch
                outbox.sender._again_at = 0.0
                outbox.send()
                self.assertEqual(OutboxRow.objects.count(), 0)
                self.assertEqual(worqr.sync(mesh.queue("django:default").count) - before, 2)
        """.replace("django_tasks_or_django", TASKS_MODULE),
    )
    said = project.manage("test", "--verbosity", "0")
    assert "OK" in said
    assert said.count("wait, because they cannot be sent: Unavailable: no server") == 1


def test_a_task_is_a_row_of_the_transaction(migrated: Project) -> None:
    migrated.run(
        BEFORE,
        """
        heard = []
        signals.task_enqueued.connect(lambda task_result, **_: heard.append(task_result), weak=False)
        hand_over, outbox.sender.hand_over = outbox.sender.hand_over, lambda rows: None  # a process that dies then
        with transaction.atomic():
            kept = tasks.add.enqueue(1, 2)
            assert kept.enqueued_at is None and heard == [] and len(rows()) == 1
            try:
                with transaction.atomic():
                    tasks.add.enqueue(3, 4)
                    raise KeyError
            except KeyError:
                pass
            with transaction.atomic():
                sent = tasks.send.enqueue(7)
        assert heard == [kept, sent] and kept.enqueued_at, heard
        try:
            with transaction.atomic():
                lost = tasks.add.enqueue(5, 6)
                raise KeyError
        except KeyError:
            pass
        assert len(heard) == 2 and count() == 0
        assert sorted(rows()) == sorted(each.id.rpartition(":")[2] for each in (kept, sent))

        # the result tells of the row, until its job does
        found = backend.get_result(kept.id)
        assert (found.status, found.args, found.task) == (TaskResultStatus.READY, [1, 2], tasks.add), found
        for unknown in (lost.id, kept.id.replace("default", "mail")):
            try:
                backend.get_result(unknown)
            except TaskResultDoesNotExist:
                continue
            raise AssertionError(unknown)
        connections["default"].cursor().execute("UPDATE worqr_outbox SET state = 'failed', error = 'odd'")
        found = backend.get_result(kept.id)
        assert found.status == TaskResultStatus.FAILED and "odd" in found.errors[0].traceback, found
        assert issubclass(found.errors[0].exception_class, worqr.WorqrError)
        outbox.sender.ask(lambda sql: sql.again("failed", None))
        connections["default"].cursor().execute("UPDATE worqr_outbox SET at = at - 3000")
        outbox.sender.once(lambda passes: passes.sweep())
        assert count() == 1 and rows() == [] and backend.get_result(kept.id).args == [1, 2]
        assert backend.get_result(sent.id).task == tasks.send

        # no transaction of the outbox's database: as without an outbox
        assert tasks.add.enqueue(1, 2).enqueued_at and count() == 2
        with transaction.atomic(using="other"):
            assert tasks.add.enqueue(1, 2).enqueued_at and count() == 3
            with transaction.atomic():
                tasks.add.enqueue(1, 2)
                assert len(rows()) == 1
        assert len(rows()) == 1 and count() == 3, "the commit of the other database is not waited for"

        outbox.sender.hand_over = hand_over
        connections["default"].cursor().execute("DELETE FROM worqr_outbox")
        with transaction.atomic():
            tasks.add.enqueue(1, 2)
        outbox.close(60)
        assert count() == 4 and rows() == []
        """,
    )


def test_a_worker_runs_what_a_process_has_left_and_the_commands_know_the_outbox(migrated: Project) -> None:
    migrated.run(
        BEFORE,
        """
        outbox.sender.hand_over = lambda rows: None
        with transaction.atomic():
            order = Order.objects.create(name="ada")
            print("id", tasks.send.enqueue(order.pk).id)
        """,
    )
    assert "django:mail/shop.tasks.send" in migrated.manage("worqr", "outbox")
    assert "no row is failed" in migrated.manage("worqr", "outbox", "--state", "failed")
    migrated.worker()
    migrated.run(
        BEFORE,
        """
        import time
        while rows():
            time.sleep(0.1)
        with transaction.atomic():
            result, shipped = tasks.send.enqueue(1), tasks.ship.enqueue(1)
        outbox.close(60)
        assert ended(result).return_value == "ada", result
        assert ended(shipped).return_value == 1 and shipped.attempts == 3, shipped
        try:
            worqr.django.outbox("committed")
        except Exception as error:
            assert "TASKS['committed'] has no outbox" in str(error), error
        else:
            raise AssertionError
        """,
    )


def test_run_tasks_runs_what_was_committed(migrated: Project) -> None:
    migrated.write(
        tasks=TASKS,
        tests="""
        from django.db import transaction
        from django.test import TestCase
        from shop import tasks
        from worqr.django.models import OutboxRow
        from worqr.django.testing import run_tasks

        class Tests(TestCase):
            def test_rolled_back_and_committed(self):
                with run_tasks() as ran:
                    tasks.add.enqueue(1, 2)
                    try:
                        with transaction.atomic():
                            tasks.add.enqueue(3, 4)
                            raise KeyError
                    except KeyError:
                        pass
                self.assertEqual([each.return_value for each in ran], [3])
                self.assertEqual(OutboxRow.objects.count(), 0)

            def test_without_it(self):
                tasks.add.enqueue(1, 2)
                self.assertEqual(OutboxRow.objects.count(), 1)
        """,
    )
    assert "Ran 2 tests" in migrated.manage("test", "--verbosity", "0", WORQR_URL="unix:///nowhere/worqr.sock")


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_settings_of_an_outbox_that_are_wrong(project: Project) -> None:
    project.write(
        mesh="""
        import os, sqlite3, worqr
        from django.db import connection
        from worqr.sql import Outbox
        mesh = worqr.Mesh(os.environ["WORQR_URL"], prefix=os.environ["WORQR_TEST_PREFIX"])
        outbox = Outbox(mesh, connection, table="shop_outbox")
        raw = Outbox(mesh, lambda: sqlite3.connect("x"))
        """
    )
    settings = project.folder / "shop" / "settings.py"
    good = settings.read_text()
    for options, text in (
        ({"outbox": "elsewhere"}, "give the alias of a database ('default', 'other')"),
        ({"outbox": "shop.mesh:nothing"}, "['outbox'] cannot be imported"),
        ({"outbox": "shop.mesh:mesh"}, "which is Mesh, not a worqr.sql"),
        ({"outbox": "shop.mesh:raw", "mesh": "shop.mesh:mesh"}, "must be in a database of Django"),
        ({"outbox": "shop.mesh:outbox"}, "is of another mesh"),
        ({"outbox": "shop.mesh:outbox", "mesh": "shop.mesh:mesh"}, ""),
    ):
        default = {"BACKEND": "worqr.django.Backend", "QUEUES": [], "OPTIONS": options}
        settings.write_text(f"{good}\nTASKS = {{'default': {default!r}}}\n")
        said = project.manage("check", code=1 if text else 0)
        assert text in said, said
    project.run(BEFORE, "assert outbox.ddl('sqlite')[0].startswith('CREATE TABLE IF NOT EXISTS shop_outbox')")
