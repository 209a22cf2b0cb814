"""The entry in Django's admin: the dashboard of a mesh, for users with the permission ``worqr.view`` or ``worqr.operate``.

Under ASGI its pages are live. Under WSGI they are as of their request, because an endless response would keep a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.contrib import admin
from django.contrib.auth.views import redirect_to_login
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path, re_path, reverse
from django.views.decorators.csrf import csrf_exempt

from worqr.django.models import Dashboard as DashboardModel

VIEW: Final = "worqr.view"
OPERATE: Final = "worqr.operate"


@admin.register(DashboardModel)
class DashboardAdmin(admin.ModelAdmin):
    """Shows the entry, and serves the dashboard below its address."""

    def get_urls(self) -> list[Any]:
        """Return the addresses: that of the entry, and all below it."""
        return [
            path("", serve, name="worqr_dashboard_changelist"),
            re_path(r"^(?P<rest>.+)$", serve, name="worqr_dashboard_page"),
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return True if the user may look."""
        return may(request.user, VIEW) or may(request.user, OPERATE)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may look."""
        return self.has_module_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: there is nothing to add."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is nothing to change."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is nothing to delete."""
        return False


def may(user: Any, permission: str) -> bool:
    """Return True for an active member of the staff with this permission; superusers have all."""
    return bool(user.is_active and user.is_staff and user.has_perm(permission))


def _viewer_of(request: HttpRequest) -> Any:
    from worqr.dashboard import admin as admin_viewer
    from worqr.dashboard import operator, reader

    user = request.user
    if user.is_active and user.is_staff and user.is_superuser:
        return admin_viewer(user.get_username())
    if may(user, OPERATE):
        return operator(user.get_username())
    return reader(user.get_username()) if may(user, VIEW) else None


_dashboards: dict[str, Any] = {}
_VIEWER: Final = "worqr.viewer"


def _dashboard() -> Any:
    """Return the dashboard of the first backend of worqr."""
    from worqr.dashboard import Dashboard
    from worqr.django.backend import Backend
    from worqr.django.meshes import mesh_of
    from worqr.django.task_api import task_backends

    for backend in task_backends.all():
        if isinstance(backend, Backend):
            mesh = mesh_of(backend)
            if backend.alias not in _dashboards or _dashboards[backend.alias][0] is not mesh:
                _dashboards[backend.alias] = mesh, Dashboard(mesh, access=lambda scope: scope[_VIEWER])
            return _dashboards[backend.alias][1]
    return None


@csrf_exempt  # the dashboard compares the origin of each POST
async def serve(request: HttpRequest, rest: str = "") -> HttpResponse:
    """Serve one request of the dashboard."""
    viewer = await sync_to_async(_viewer_of)(request)
    if viewer is None:
        return redirect_to_login(request.get_full_path(), reverse("admin:login"))
    try:
        dashboard = await sync_to_async(_dashboard)()
    except ModuleNotFoundError as error:
        return HttpResponse(f"{error}\n", status=501, content_type="text/plain")
    if dashboard is None:
        return HttpResponse("TASKS names no worqr.django.Backend.\n", status=404, content_type="text/plain")
    exchange = _Exchange({**_scope(request, rest), _VIEWER: viewer}, request.body)
    return await exchange.run(dashboard, streams=isinstance(request, ASGIRequest))


def _scope(request: HttpRequest, rest: str) -> dict[str, Any]:
    root = reverse("admin:worqr_dashboard_changelist").rstrip("/")
    headers = {name.lower(): str(value) for name, value in request.headers.items()}
    headers["host"] = request.get_host()  # the public one, as the settings say; origins are compared with it
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": f"{root}/{rest}",
        "root_path": root,
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": [(n.encode("latin-1", "replace"), headers[n].encode("latin-1", "replace")) for n in headers],
        "client": (request.META.get("REMOTE_ADDR", ""), 0),
        "server": (request.META.get("SERVER_NAME", ""), int(request.META.get("SERVER_PORT") or 0)),
    }


class _Exchange:
    """One request and its response, between Django and an ASGI application."""

    def __init__(self, scope: dict[str, Any], body: bytes) -> None:
        self._scope = scope
        self._body: bytes | None = body
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)

    async def run(self, application: Any, *, streams: bool) -> HttpResponse:
        """Return the response. Without `streams`, one that has no end is 204, after which a browser does not ask again."""
        task = asyncio.create_task(application(self._scope, self._receive, self._sent.put))
        try:
            start = await self._next(task)
            chunks = [part := await self._next(task)]
            while part.get("more_body") and not _is_live(start):
                chunks.append(part := await self._next(task))
        except BaseException:
            task.cancel()
            raise
        if not part.get("more_body"):
            await task
            return _headed(HttpResponse(b"".join(each.get("body", b"") for each in chunks)), start)
        if streams:
            return _headed(StreamingHttpResponse(self._stream(task, chunks[0])), start)
        task.cancel()
        return HttpResponse(status=204)

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # until the exchange ends
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _next(self, task: asyncio.Task[None]) -> dict[str, Any]:
        """Return the next message of the application. Raises its error if it has ended without one."""
        message = asyncio.ensure_future(self._sent.get())
        await asyncio.wait((message, task), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            message.cancel()
            await task
            raise RuntimeError("the dashboard has ended without a response")
        return message.result()

    async def _stream(self, task: asyncio.Task[None], part: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            yield part.get("body", b"")
            while part.get("more_body"):
                part = await self._next(task)
                yield part.get("body", b"")
        finally:
            task.cancel()


def _is_live(start: dict[str, Any]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"]
    )


def _headed(response: Any, start: dict[str, Any]) -> Any:
    response.status_code = start["status"]
    response.headers.pop("Content-Type", None)
    for name, value in start["headers"]:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response
