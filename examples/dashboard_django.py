"""The dashboard in Django on uvicorn, behind Django's own login: members of the staff may use it.

In this folder: ``python dashboard_django.py migrate``, ``python dashboard_django.py createsuperuser``, and
``uvicorn --port 8001 --timeout-graceful-shutdown 3 dashboard_django:application``. Open http://127.0.0.1:8001/worqr/.
"""

import io
import os
from collections.abc import Awaitable, Callable
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpRequest, HttpResponse

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY="for the example only",
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "site.db")}},
    INSTALLED_APPS=[f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
)
django.setup()

from django.contrib import admin  # noqa: E402 - these modules need the settings
from django.contrib.auth.middleware import AuthenticationMiddleware  # noqa: E402
from django.contrib.sessions.middleware import SessionMiddleware  # noqa: E402
from django.urls import path  # noqa: E402

import worqr  # noqa: E402
from worqr.dashboard import Dashboard, Viewer, operator  # noqa: E402

urlpatterns = [path("admin/", admin.site.urls)]
site = ASGIHandler()


def viewer_of(scope: dict[str, Any]) -> Viewer | None:
    """Let Django's middleware find the user of the cookie `sessionid`."""

    def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    request = ASGIRequest(scope, io.BytesIO())
    SessionMiddleware(answer).process_request(request)
    AuthenticationMiddleware(answer).process_request(request)
    user = request.user
    return operator(user.get_username()) if user.is_active and user.is_staff else None


access = sync_to_async(viewer_of)  # Django reads the session from its database
mesh = worqr.Mesh(app="web", patience=10)
dashboard = Dashboard(mesh, access=access, login_url="/admin/login/?next=/worqr/")


async def application(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Send requests below /worqr to the dashboard, and all others to Django."""
    if scope["type"] == "http" and f"{scope['path']}/".startswith("/worqr/"):
        await dashboard({**scope, "root_path": f"{scope.get('root_path', '')}/worqr"}, receive, send)
    else:
        await site(scope, receive, send)


if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line()
