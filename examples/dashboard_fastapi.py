"""The dashboard in FastAPI on uvicorn, behind the login of the site. The name and the password are ``ada`` and ``open sesame``.

``uvicorn --app-dir examples --port 8001 --timeout-graceful-shutdown 3 dashboard_fastapi:app``, then open
http://127.0.0.1:8001/worqr/. The option ends open pages when the server stops.
"""

import secrets
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

import worqr
from worqr.dashboard import Dashboard, Viewer, operator

mesh = worqr.Mesh(app="web", patience=10)
USERS = {"ada": "open sesame"}  # stands for your table of users, which has hashes
sessions: dict[str, str] = {}

PAGE = """
<form method="post" action="/login">
<label>Name <input name="name"></label> <label>Password <input name="password" type="password"></label> <button>Log in</button>
</form>
"""


def access(scope: dict[str, Any]) -> Viewer | None:
    cookies = SimpleCookie(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1"))
    name = sessions.get(cookies["session"].value) if "session" in cookies else None
    return operator(name) if name else None


app = FastAPI()
app.mount("/worqr", Dashboard(mesh, access=access, login_url="/login"))


@app.get("/login")
async def ask() -> HTMLResponse:
    return HTMLResponse(PAGE)


@app.post("/login")
async def login(request: Request) -> RedirectResponse:
    form = dict(parse_qsl((await request.body()).decode()))
    name, password = form.get("name", ""), form.get("password", "")
    if name not in USERS or not secrets.compare_digest(password.encode(), USERS[name].encode()):
        return RedirectResponse("/login", 303)
    session = secrets.token_urlsafe(32)
    sessions[session] = name
    response = RedirectResponse("/worqr/", 303)
    response.set_cookie("session", session, httponly=True, samesite="lax")
    return response
