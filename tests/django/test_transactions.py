"""When tasks are sent: at once, after the commit, or never; in tests of users, and for functions of a mesh."""

from __future__ import annotations

import pytest

from tests.django.conftest import TASKS as TASKS_MODULE
from tests.django.conftest import Project

pytestmark = pytest.mark.one_server

TASKS = """
    from shop.models import Order

    @task
    def rename(order_id, name):
        Order.objects.filter(pk=order_id).update(name=name)
        return name

    @task
    async def count():
        return await Order.objects.acount()

    @task(backend="committed")
    def late(order_id):
        return Order.objects.get(pk=order_id).name

    @task
    def chain(n):
        if n:
            chain.enqueue(n - 1)

    @task
    def fail():
        raise ZeroDivisionError("a task that fails")
"""


def test_enqueue_on_commit(project: Project) -> None:
    project.write(tasks=TASKS)
    project.manage("migrate", "--run-syncdb", "--verbosity", "0")
    project.run("""
    from django.conf import settings
    from django.db import transaction
    from django.test import override_settings
    from shop.models import Order
    count = lambda: worqr.sync(mesh_of(task_backends["committed"]).queue("django:default").count)
    heard = []
    signals.task_enqueued.connect(lambda task_result, **_: heard.append(task_result), weak=False)

    assert tasks.late.enqueue(1).enqueued_at is not None and count() == 1  # no transaction
    with transaction.atomic():
        result = tasks.late.enqueue(1)
        assert result.enqueued_at is None and count() == 1 and len(heard) == 1
        try:
            tasks.late.get_result(result.id)
        except TaskResultDoesNotExist:
            pass
        else:
            raise AssertionError("it was sent before the commit")
        tasks.rename.enqueue(1, "now")
        assert count() == 2 and len(heard) == 2
    assert count() == 3 and result.enqueued_at is not None and heard[-1] is result
    assert tasks.late.get_result(result.id) == result

    try:
        with transaction.atomic():
            tasks.late.enqueue(1)
            raise KeyError
    except KeyError:
        pass
    with transaction.atomic():
        try:
            with transaction.atomic():
                tasks.late.enqueue(1)
                raise KeyError
        except KeyError:
            pass
    assert count() == 3, "a rollback, of a savepoint too, sends nothing"

    with transaction.atomic(using="other"):
        with transaction.atomic():
            tasks.late.enqueue(1)
        assert count() == 3
    assert count() == 4, "the last of two commits sends"
    one = {"committed": {**settings.TASKS["committed"], "ENQUEUE_ON_COMMIT": "other"}, "default": settings.TASKS["default"]}
    with override_settings(TASKS=one):
        with transaction.atomic(using="other"):
            with transaction.atomic():
                tasks.late.enqueue(1)
            assert count() == 4
        assert count() == 5, "the commit of the named database sends"
        with transaction.atomic():
            tasks.late.enqueue(1)
            assert count() == 6
    """)


def test_times_are_sent_absolute_and_async_views_enqueue_in_their_own_transaction(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    import asyncio
    from datetime import datetime, timedelta
    from django.db import connections, transaction
    from django.test import override_settings
    from django.utils import timezone
    from worqr.django.results import job_of
    mesh = mesh_of(backend)

    def due(result):
        queue, job = job_of(result.id)
        return worqr.sync(mesh.queue(queue).job(job).status).run_at

    with override_settings(TIME_ZONE="Asia/Kolkata", USE_TZ=False):
        naive = (datetime.now() + timedelta(hours=5)).replace(microsecond=0)
        assert due(tasks.chain.using(run_after=naive).enqueue(0)) == timezone.make_aware(naive)
    aware = (timezone.now() + timedelta(hours=5)).replace(microsecond=0)
    with transaction.atomic():
        result = tasks.late.using(run_after=aware).enqueue(0)
    assert due(result) == aware

    count = lambda: worqr.sync(mesh.queue("django:default").info).waiting
    async def view():
        from asgiref.sync import sync_to_async
        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        result = await tasks.late.aenqueue(1)
        assert result.enqueued_at is None
        assert await sync_to_async(count)() == 0
        await sync_to_async(block.__exit__)(None, None, None)
        assert result.enqueued_at is not None
        assert (await tasks.late.aget_result(result.id)).id == result.id
        try:
            tasks.late.enqueue(1)
        except worqr.UsageError as error:
            assert "await shop.tasks.late.aenqueue" in str(error).replace("await late", "await shop.tasks.late"), error
        else:
            raise AssertionError
    asyncio.run(view())
    assert count() == 1
    """)


def test_an_error_after_the_commit_is_logged_and_later_hooks_run(project: Project) -> None:
    project.write(tasks=TASKS)
    said = project.run(
        """
        from django.db import transaction
        later = []
        with transaction.atomic():
            result = tasks.late.enqueue(1)
            transaction.on_commit(lambda: later.append(1))
        assert later == [1] and result.enqueued_at is None
        """,
        WORQR_URL="unix:///nowhere/worqr.sock",
        PATIENCE="0.5",
    )
    assert (
        "commit.unsent: shop.tasks.late was not enqueued, although the transaction was committed: Unavailable" in said
    )


def test_the_mesh_functions_of_a_project(project: Project) -> None:
    project.write(
        tasks="""
        import os
        mesh = worqr.Mesh(os.environ["WORQR_URL"], prefix=os.environ["WORQR_TEST_PREFIX"])

        @mesh.task
        def confirm(order_id: int) -> None: ...
        """
    )
    project.run("""
    from django.db import transaction
    confirm = tasks.confirm
    count = lambda: worqr.sync(confirm.queue.count)
    with transaction.atomic():
        confirm.on_commit(7)
        confirm.options(id="order-7").on_commit(7)
        assert count() == 0
    assert count() == 2
    assert worqr.sync(confirm.job("order-7").status).state == "waiting"
    confirm.on_commit(8)
    assert count() == 3
    try:
        confirm.on_commit("seven")
    except worqr.UsageError:
        pass
    else:
        raise AssertionError("its arguments are checked")
    """)


def test_run_tasks_in_a_test_case(project: Project) -> None:
    project.write(
        tasks=TASKS,
        tests=f"""
        from django.db import transaction
        from django.test import TestCase
        from {TASKS_MODULE} import TaskResultStatus
        from shop import tasks
        from shop.models import Order
        from worqr.django.testing import run_tasks

        class Tests(TestCase):
            databases = {{"default", "other"}}

            def test_in_the_thread_and_the_transaction_of_the_test(self):
                order = Order.objects.create(name="a")
                with run_tasks() as ran:
                    renamed = tasks.rename.enqueue(order.pk, "b")
                    tasks.late.enqueue(order.pk)
                    tasks.count.using(priority=50).enqueue()
                    self.assertEqual(ran, [])
                self.assertEqual([each.return_value for each in ran], ["b", 1, "b"])
                self.assertEqual(ran[0].id, renamed.id)
                order.refresh_from_db()
                self.assertEqual(order.name, "b")

            def test_what_tasks_enqueue_runs_too(self):
                with run_tasks() as ran:
                    tasks.chain.enqueue(3)
                self.assertEqual([each.args for each in ran], [[3], [2], [1], [0]])
                with self.assertRaisesMessage(AssertionError, "does django:default enqueue itself?"):
                    with run_tasks():
                        tasks.chain.enqueue(2000)

            def test_errors(self):
                with self.assertRaisesMessage(ZeroDivisionError, "a task that fails"), run_tasks():
                    tasks.fail.enqueue()
                with run_tasks(raise_errors=False) as ran:
                    tasks.fail.enqueue()
                self.assertEqual(ran[0].status, TaskResultStatus.FAILED)
                self.assertIs(ran[0].errors[0].exception_class, ZeroDivisionError)

            def test_hooks(self):
                from worqr import testing
                from worqr.django.meshes import mesh_of
                with testing.recording(mesh_of(tasks.late.get_backend())) as sent:
                    with self.captureOnCommitCallbacks(execute=False) as callbacks:
                        tasks.late.enqueue(1)
                    self.assertEqual((len(callbacks), sent.all()), (1, []))
                    callbacks[0]()
                    self.assertEqual(len(sent.all()), 1)

            def test_a_call_for_another_application_does_not_run(self):
                import worqr
                from worqr.django.meshes import mesh_of
                mesh = mesh_of(tasks.late.get_backend())
                with run_tasks() as ran:
                    worqr.sync(mesh.enqueue_many, [mesh.call("billing.invoice", order=7)])
                    tasks.count.enqueue()
                self.assertEqual(len(ran), 1)

            def test_a_function_that_takes_a_list(self):
                import worqr
                from worqr.django.meshes import mesh_of
                mesh, lists = mesh_of(tasks.late.get_backend()), []

                @mesh.task(batch_size=10)
                def index(orders: list[int]) -> None:
                    lists.append((orders, len(worqr.current().items)))

                @mesh.task(batch_size=10)
                async def search(orders: list[int]) -> None:
                    lists.append((orders, len(worqr.current().items)))

                with run_tasks():
                    index.on_commit(7)
                    index.options(id="order-8").on_commit(8)
                    search.on_commit(9)
                self.assertEqual(lists, [([7], 1), ([8], 1), ([9], 1)])
        """,
    )
    said = project.manage("test", "--verbosity", "0", WORQR_URL="unix:///nowhere/worqr.sock")
    assert "Ran 6 tests" in said
