"""Chromium, and a dashboard of a scene for it. `tests.dashboard.test_browser` has the browser itself."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from tests.dashboard.scene import Scene, Texts, open_scene, why_not
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.dashboard import Dashboard, admin

PAGES: set[str] = set()
"""The paths that have answered with a page."""


@dataclass(frozen=True)
class Served:
    """A scene, and the address of its dashboard."""

    scene: Scene
    url: str

    def pages(self) -> list[str]:
        """The addresses of the scene that are pages. Downloads, JSON and figures for other programs have no markup.

        Pages are asked for in the first scene of a process alone: the caller opens them.
        """
        found: list[str] = []
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as client:
            for address in self.scene.addresses():
                path = address.partition("?")[0]
                if path not in PAGES:
                    answer = client.get(address)
                    assert answer.status_code == 200, why_not(address, answer.status_code)
                    if answer.headers["content-type"].startswith("text/html"):
                        PAGES.add(path)
                    else:
                        assert answer.headers["x-content-type-options"] == "nosniff"
                if path in PAGES:
                    found.append(address)
        return found


@contextmanager
def served(
    server: Server, prefix: str, texts: Texts | None = None, hosts: tuple[str, ...] = ("127.0.0.1",)
) -> Generator[Served]:
    """Fill a mesh and serve its dashboard, in a Trio loop in a thread."""
    ready: queue.SimpleQueue[tuple[Served, Callable[[], None]] | BaseException] = queue.SimpleQueue()

    async def run() -> None:
        stop, token = trio.Event(), trio.lowlevel.current_trio_token()
        config, port = Config(), free_port()
        config.bind, config.graceful_timeout = [f"127.0.0.1:{port}"], 1
        config.errorlog = config.accesslog = None
        async with open_scene(server.url, prefix, texts) as scene, trio.open_nursery() as nursery:
            app = Dashboard(scene.mesh, access=lambda scope: admin("ada"), hosts=hosts, allow_enqueue=True)
            await nursery.start(partial(serve, app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
            ready.put((Served(scene, f"http://127.0.0.1:{port}"), partial(token.run_sync_soon, stop.set)))
            await stop.wait()
            app._looks.close()  # pyright: ignore[reportPrivateUsage]
            nursery.cancel_scope.cancel()

    def run_in_thread() -> None:
        try:
            trio.run(run)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=run_in_thread, name=f"dashboard of {prefix}")
    thread.start()
    found = ready.get(timeout=2 * PATIENCE)
    try:
        if isinstance(found, BaseException):
            raise found
        yield found[0]
    finally:
        if not isinstance(found, BaseException):
            found[1]()
        thread.join(PATIENCE)
        with server.client() as client:
            delete_all(client, prefix)


@dataclass
class Watched:
    """A page of the browser, and what happened on it that must not: dialogs, errors, reports of the content security policy."""

    page: Any
    trouble: list[str]

    def open(self, url: str, look: str = "null") -> tuple[int, Any]:
        """Open an address, and return the status of the answer, and what the expression `look` is on the page."""
        answer = self.page.goto(url, wait_until="domcontentloaded")
        refused, found = self.page.evaluate(f"[window.refusedByPolicy || [], {look}]")
        self.trouble += [f"{url}: {each}" for each in refused]
        return answer.status, found


WATCH = """
    window.refusedByPolicy = [];
    document.addEventListener('securitypolicyviolation', (event) => {
        window.refusedByPolicy.push(`${event.effectiveDirective} ${event.blockedURI} ${event.sample}`);
    });
"""


@contextmanager
def watched_page(browser: Any, **options: Any) -> Generator[Watched]:
    """A tab of its own."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(PATIENCE * 1000)
    context.add_init_script(WATCH)
    try:
        page, trouble = context.new_page(), list[str]()
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("console", lambda message: _note(message, trouble))
        yield Watched(page, trouble)
    finally:
        context.close()


def _note(message: Any, trouble: list[str]) -> None:
    if message.type == "error" and "Failed to load resource" not in message.text:  # a page with another status than 200
        trouble.append(f"console: {message.text}")
