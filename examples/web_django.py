"""Django on gunicorn (or its own runserver): a whole project in one file, whose processes are web servers and workers.

``gunicorn --chdir examples "web_django:application()"``, or ``python examples/web_django.py runserver``. Every process that
serves the site runs tasks too: `Reports.ready` starts its worker. Processes for other commands only enqueue.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import django
from django.apps import AppConfig
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import execute_from_command_line
from django.db import close_old_connections, connection
from django.http import HttpRequest, JsonResponse
from django.urls import path

import worqr


@contextmanager
def fresh_connections() -> Generator[None]:
    """Wraps each handler in its thread, as Django wraps each request."""
    close_old_connections()
    yield
    close_old_connections()


mesh = worqr.Mesh(app="web", patience=10, around_thread=fresh_connections)
peer = mesh.join_in_thread(concurrency=10, grace=2)


@mesh.task(name="web.report", result_ttl=600)
def report(name: str, pages: int) -> str:
    with connection.cursor() as cursor:  # the ORM works as in a view
        cursor.execute("SELECT %s || ', ' || %s || ' pages'", [name, pages])
        return cursor.fetchone()[0]


def serves() -> bool:
    """False in ``manage.py migrate`` and the like, and in the first of runserver's two processes, which only watches files."""
    if Path(sys.argv[0]).name in {"manage.py", "django-admin", "web_django.py"}:
        return "runserver" in sys.argv and ("--noreload" in sys.argv or os.environ.get("RUN_MAIN") == "true")
    return True


class Reports(AppConfig):
    name = "web_django"

    def ready(self) -> None:
        if serves():
            peer.start()


def order(request: HttpRequest, name: str) -> JsonResponse:
    job = worqr.sync(report.options(id=name).dispatch, name, int(request.GET.get("pages", "10")))
    return JsonResponse({"id": job.id, "outcome": job.outcome}, status=202)


def fetch(request: HttpRequest, name: str) -> JsonResponse:
    return JsonResponse({"text": worqr.sync(report.job(name).result, timeout=30)})


def health(request: HttpRequest) -> JsonResponse:
    health = peer.health()
    return JsonResponse({"ready": health.ready, "why": health.why}, status=200 if health.ready else 503)


urlpatterns = [path("reports/<name>", order), path("reports/<name>/text", fetch), path("health", health)]


def application() -> WSGIHandler:
    django.setup()
    return WSGIHandler()


if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        DEBUG=False,
        INSTALLED_APPS=["web_django.Reports"],
        ROOT_URLCONF="web_django",
    )

if __name__ == "__main__":
    execute_from_command_line()
