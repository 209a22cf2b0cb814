"""``manage.py worqr``, the checks, the meshes of a process, and tasks with options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.django.conftest import TASKS as TASKS_MODULE
from tests.django.conftest import Project
from tests.support.children import ROOT
from tests.support.servers import Server

pytestmark = pytest.mark.one_server

TASKS = """
    import os

    @task
    def add(a, b):
        return a + b

    @task
    @worqr.django.options(runs_in="process", timeout=60)
    def where(name):
        from shop.models import Order
        return [os.getpid(), Order.objects.create(name=name).pk]

    @task(queue_name="mail")
    @worqr.django.options(lanes=worqr.Lanes("customer"), limit=worqr.Limit(2))
    def send(customer, text=""):
        return worqr.current().lane
"""


def test_importing_worqr_imports_nothing_of_django() -> None:
    code = "import sys, worqr, worqr.django, worqr.django.task_options as o; o.options(timeout=5); print('django' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


def test_the_commands_need_no_url_and_no_target(project: Project, server: Server) -> None:
    project.write(tasks=TASKS)
    project.run("tasks.add.enqueue(1, 2)")
    unset = {"WORQR_URL": server.tcp_url}
    assert "django:default" in project.manage("worqr", "queues", **unset)
    assert "django:default" in project.manage("worqr", "queues", "--backend", "committed")
    assert "Manage a worqr mesh" in project.manage("worqr")
    assert "Run a worker" in project.manage("worqr", "run", "--help")
    assert "Paused queue django:default" in project.manage("worqr", "pause", "django:default")
    assert "django:default" in project.run(
        "from django.core.management import call_command; call_command('worqr', 'queues')"
    )
    assert "unknown" in project.manage("worqr", "nothing", code=2).lower()
    assert "TASKS has no 'other'" in project.manage("worqr", "run", "--backend", "other", code=1)


def test_a_worker_serves_each_task_of_the_project(project: Project) -> None:
    """Those of QUEUES, those with a queue of their own, also in a process, which sets Django up."""
    project.write(tasks=TASKS)
    project.manage("migrate", "--run-syncdb", "--verbosity", "0")
    worker = project.worker("--processes", "1")
    project.run("""
    assert ended(tasks.add.using(queue_name="mail").enqueue(1, 2)).return_value == 3
    pid, pk = ended(tasks.where.enqueue("x")).return_value
    assert pid != os.getpid() and pk == 1
    sent = ended(tasks.send.enqueue("ada", text="hello"))
    assert sent.return_value == "ada" and sent.id.startswith("mail/shop.tasks.send:"), sent
    assert sent.task == tasks.send
    try:
        tasks.send.using(priority=1)
    except Exception as error:
        assert "takes no priority" in str(error), error
    else:
        raise AssertionError
    """)
    assert "django:mail/shop.tasks.send" in worker.errors


def test_the_options_of_a_task_mean_nothing_to_other_backends(project: Project) -> None:
    project.write(tasks=TASKS)
    settings = project.folder / "shop" / "settings.py"
    settings.write_text(
        settings.read_text()
        + f"\nTASKS = {{'default': {{'BACKEND': '{TASKS_MODULE}.backends.immediate.ImmediateBackend', 'QUEUES': []}}}}\n"
    )
    said = project.run("print(tasks.send.enqueue('ada').status, tasks.add.enqueue(1, 2).return_value)")
    assert "3" in said
    assert "worqr.django.Backend" in project.manage("worqr", "run", code=1)


def test_keywords_of_a_task_are_its_options(project: Project) -> None:
    project.write(
        tasks="""
        @task(timeout=60, lanes=worqr.Lanes("customer"), queue_name="mail")
        def send(customer):
            return worqr.current().lane

        def plain(n):
            return n

        @worqr.django.options(timeout=5)
        def both(n):
            return n
        """
    )
    project.run("""
    import copy
    from worqr.django.task_options import options_of

    assert options_of(tasks.send.func)["timeout"] == 60 and tasks.send.queue_name == "mail"
    assert tasks.send.using(queue_name="default") != tasks.send
    assert copy.deepcopy(tasks.send) == tasks.send
    assert len({tasks.send, tasks.send.using()}) == 1

    def check(run):
        result = tasks.send.enqueue("ada")
        assert result.id.startswith("mail/shop.tasks.send:"), result
        run()
        result.refresh()
        assert result.return_value == "ada"
    on_bench(check)

    for function, options, text in (
        (tasks.plain, {"timout": 60}, "did you mean 'timeout'"),
        (tasks.plain, {"timeout": -1}, "timeout"),
        (tasks.both, {"result_ttl": 60}, "both() has options in @task(...) and in @worqr.django.options(...)"),
    ):
        try:
            task(**options)(function)
        except worqr.UsageError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    """)


def test_checks(project: Project) -> None:
    project.write(tasks=TASKS)
    settings = project.folder / "shop" / "settings.py"
    good = settings.read_text()
    assert "no issues" in project.manage("check", WORQR_URL="unix:///nowhere/worqr.sock")
    said = project.manage("check", "--deploy", code=1, WORQR_URL="unix:///nowhere/worqr.sock", PATIENCE="0.5")
    assert "(worqr.E003) The server of TASKS['committed'] cannot be used" in said
    assert "worqr" not in project.manage("check", "--deploy")
    for options, text in (
        ("'OPTIONS': {'patence': 3}", "has no 'patence'; did you mean 'patience'?"),
        ("'OPTIONS': {'mesh': 'shop.nothing:mesh'}", "['mesh'] cannot be imported"),
        ("'OPTIONS': {'mesh': 'shop.tasks:add'}", "not a worqr.Mesh"),
        ("'OPTIONS': {'mesh': 'shop.tasks:mesh', 'url': 'x'}", "has 'mesh' and 'url'"),
        ("'OPTIONS': {'timeout': -1}", "timeout"),
        ("'ENQUEUE_ON_COMMIT': 'elsewhere'", "(worqr.E002)"),
    ):
        settings.write_text(
            good + f"\nTASKS = {{'default': {{'BACKEND': 'worqr.django.Backend', 'QUEUES': [], {options}}}}}\n"
        )
        assert text in project.manage("check", code=1), options


def test_one_mesh_for_each_alias_and_process(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    import threading
    from django.test import override_settings
    found = []
    other = threading.Thread(target=lambda: found.append((task_backends["default"], mesh_of(task_backends["default"]))))
    other.start()
    other.join()
    assert found[0][0] is not backend and found[0][1] is mesh_of(backend)
    assert mesh_of(task_backends["committed"]) is not mesh_of(backend)

    tasks.add.enqueue(1, 2)
    if (child := os.fork()) == 0:
        os._exit(0 if tasks.add.enqueue(1, 2).enqueued_at else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worqr.sync(mesh_of(backend).queue("django:default").count) == 2

    before = mesh_of(backend)
    options = {"url": os.environ["WORQR_URL"], "prefix": os.environ["WORQR_TEST_PREFIX"] + "x"}
    with override_settings(TASKS={"default": {"BACKEND": "worqr.django.Backend", "OPTIONS": options}}):
        mesh = mesh_of(task_backends["default"])
        assert mesh is not before and mesh.prefix.endswith("x") and "django:default" in mesh.functions
    assert mesh_of(task_backends["default"]).prefix == before.prefix
    """)


def test_a_mesh_of_ones_own(project: Project) -> None:
    project.write(
        tasks=TASKS,
        mesh="""
        import os, worqr
        mesh = worqr.Mesh(os.environ["WORQR_URL"], prefix=os.environ["WORQR_TEST_PREFIX"])

        @mesh.task(result_ttl=60)
        def double(n: int) -> int:
            return 2 * n
        """,
    )
    settings = project.folder / "shop" / "settings.py"
    settings.write_text(
        settings.read_text().replace(
            '"OPTIONS": {"url": os.environ["WORQR_URL"], "prefix"',
            '"OPTIONS": {"mesh": "shop.mesh:mesh"}, "X": {"prefix"',
        )
    )
    project.worker()
    project.run("""
    from shop.mesh import double, mesh
    assert mesh_of(backend) is mesh
    assert ended(tasks.add.enqueue(1, 2)).return_value == 3
    assert worqr.sync(worqr.sync(double.dispatch, 4).result, timeout=60) == 8
    """)
