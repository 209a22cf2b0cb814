"""The entry in Django's admin: who sees the dashboard, and what they may do there, under WSGI and under ASGI."""

from __future__ import annotations

import pytest

from tests.django.conftest import Project

pytestmark = pytest.mark.one_server

TESTS = """
import asyncio
from urllib.parse import urlencode
from django.contrib.auth.models import Permission, User
from django.test import AsyncClient, Client
import worqr
from worqr.django.meshes import mesh_of

def user(name, *permissions, **facts):
    made = User.objects.create_user(name, password="x", is_staff=True, **facts)
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="worqr", codename__in=permissions))
    return made

def client_of(name):
    client = Client(raise_request_exception=True)
    assert client.login(username=name, password="x")
    return client

user("reader", "view"), user("operator", "operate"), user("boss", is_superuser=True), user("stranger")
User.objects.create_user("customer", password="x")
"""


def test_who_sees_it_and_may_act(project: Project) -> None:
    project.write(tasks="@task\ndef add(a, b):\n    return a + b\n")
    project.manage("migrate", "--run-syncdb", "--verbosity", "0")
    project.run(
        TESTS
        + """
sent = tasks.add.enqueue(1, 2)
assert Client().get("/admin/worqr/dashboard/")["location"].startswith("/admin/login/?next=")
for name in ("stranger", "customer"):
    assert client_of(name).get("/admin/worqr/dashboard/queues").status_code == 302, name
assert "/admin/worqr/dashboard/" not in client_of("stranger").get("/admin/").content.decode()
for name in ("reader", "operator", "boss"):
    client = client_of(name)
    assert "/admin/worqr/dashboard/" in client.get("/admin/").content.decode()
    page = client.get("/admin/worqr/dashboard/queues")
    assert page.status_code == 200 and "django:default" in page.content.decode(), page
    assert 'href="/admin/worqr/dashboard/workers"' in page.content.decode()
    assert client.get("/admin/worqr/dashboard/static/worqr.css")["content-type"].startswith("text/css")
    assert client.get("/admin/worqr/dashboard/nothing").status_code == 404
    form = urlencode({"queue": "django:default", "reason": name, "back": "/queues"})
    kind = "application/x-www-form-urlencoded"
    for origin, status in (("http://evil.example", 403), ("http://testserver", 403 if name == "reader" else 303)):
        done = client.post("/admin/worqr/dashboard/pause", form, kind, headers={"origin": origin})
        assert done.status_code == status, (name, origin, done.status_code, done.content)
assert worqr.sync(mesh_of(backend).queue("django:default").info).paused.endswith("boss")
"""
    )


def test_live_pages_need_asgi(project: Project) -> None:
    project.manage("migrate", "--run-syncdb", "--verbosity", "0")
    project.run(
        TESTS
        + """
import re
page = client_of("boss").get("/admin/worqr/dashboard/").content.decode()
live = re.search('data-live="([^"]+)"', page)[1].replace("&amp;", "&")
assert client_of("boss").get(live).status_code == 204

async def look():
    client = AsyncClient()
    await client.alogin(username="boss", password="x")
    response = await client.get(live)
    assert response.streaming and response["content-type"].startswith("text/event-stream"), response
    stream = aiter(response.streaming_content)
    assert b"event" in await anext(stream) + await anext(stream)
    await stream.aclose()
asyncio.run(look())
"""
    )
