"""A Django project in a temporary folder, on the server of the tests: its programs run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.children import ROOT, Child
from tests.support.leaks import delete_all
from tests.support.servers import Server

HAS_TASKS = find_spec("django.tasks") is not None if find_spec("django") else False
BACKPORT = [] if HAS_TASKS else ["django_tasks"]
TASKS = "django.tasks" if HAS_TASKS else "django_tasks"
"""The module with Django's tasks, for the code of the tests."""

SETTINGS = f"""
import os
SECRET_KEY = "for tests"
USE_TZ = True
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", *{BACKPORT!r}, "worqr.django", "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware", "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{{
    "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "OPTIONS": {{"context_processors": [
        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]}},
}}]
DATABASES = {{
    name: {{
        "ENGINE": "django.db.backends.sqlite3", "NAME": f"{{os.path.dirname(__file__)}}/{{name}}.db",
        "OPTIONS": {{"timeout": 60}},  # another process that writes may stand still
    }}
    for name in ("default", "other")
}}
TASKS = {{
    "default": {{
        "BACKEND": "worqr.django.Backend", "QUEUES": ["default", "mail"],
        "OPTIONS": {{"url": os.environ["WORQR_URL"], "prefix": os.environ["WORQR_TEST_PREFIX"], "keepalive": 1}},
    }},
    "committed": {{
        "BACKEND": "worqr.django.Backend", "QUEUES": ["default"], "ENQUEUE_ON_COMMIT": True,
        "OPTIONS": {{
            "url": os.environ["WORQR_URL"], "prefix": os.environ["WORQR_TEST_PREFIX"],
            "patience": float(os.environ.get("PATIENCE", 30)),
        }},
    }},
}}
"""
MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
MODELS = """
from django.db import models

class Order(models.Model):
    name = models.CharField(max_length=50)
"""
URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
BEFORE = f"""
import os, sys
import django
django.setup()
import worqr
from worqr import testing
from {TASKS} import TaskResultStatus, task, task_backends
from worqr.django.meshes import mesh_of
from worqr.django.task_api import TaskResultDoesNotExist, signals
from shop import tasks

backend = task_backends["default"]

def ended(result):
    # Wait until a task has ended, and return its result.
    from worqr.django.results import job_of
    queue, job = job_of(result.id)
    try:
        worqr.sync(mesh_of(backend).queue(queue).job(job).result, timeout=60)
    except (worqr.JobFailed, worqr.JobCancelled):
        pass
    result.refresh()
    return result

def on_bench(check):
    with worqr.sync_block(testing.bench, mesh_of(backend), url=os.environ["WORQR_URL"]) as bench:
        check(lambda **how: worqr.sync(bench.run_until_empty, raise_errors=False, **how))
"""
"""What each script of a test begins with."""


@dataclass
class Project:
    """A project with the application `shop`. `files` are its modules by name."""

    folder: Path
    env: dict[str, str]
    spawn: Callable[..., Child]

    def write(self, **files: str) -> None:
        """Write modules of the application, below the imports that their tests need."""
        for name, text in files.items():
            imports = f"import worqr\nimport worqr.django\nfrom {TASKS} import task\n" if name == "tasks" else ""
            (self.folder / "shop" / f"{name}.py").write_text(imports + textwrap.dedent(text))

    def manage(self, *words: str, code: int = 0, **env: str) -> str:
        """Run ``manage.py``, and return what it printed, its errors too."""
        return self._ran(["manage.py", *words], code, env)

    def run(self, *scripts: str, **env: str) -> str:
        """Run a script, of one or more parts, after `BEFORE`, and return what it printed."""
        (self.folder / "script.py").write_text(BEFORE + "".join(map(textwrap.dedent, scripts)))
        return self._ran(["script.py"], 0, env)

    def worker(self, *words: str) -> Child:
        """Start ``manage.py worqr run``; it ends with the test."""
        return self.spawn(self.folder / "manage.py", "worqr", "run", *words, env=self.env)

    def _ran(self, command: list[str], code: int, env: dict[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::ResourceWarning", *command],
            cwd=self.folder,
            env={**os.environ, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture
def project(tmp_path: Path, server: Server, spawn: Callable[..., Child]) -> Iterator[Project]:
    """A project without tables, on the server of the tests, with a prefix of its own."""
    prefix = f"dj{os.getpid()}"
    (tmp_path / "shop").mkdir()
    env = {
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "WORQR_URL": server.tcp_url,
        "WORQR_TEST_PREFIX": prefix,
    }
    (tmp_path / "manage.py").write_text(MANAGE)
    found = Project(tmp_path, env, spawn)
    found.write(__init__="", settings=SETTINGS, models=MODELS, urls=URLS, tasks="")
    with server.client() as client:
        delete_all(client, prefix)
        yield found
        delete_all(client, prefix)
