"""Forms of other sites, sent by Chromium itself: what it says of their origin, and that nothing comes of them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.dashboard.browsing import Served, served, watched_page
from tests.dashboard.test_browser import CHROMIUM, browser, pytestmark  # noqa: F401 - a fixture, and the marks
from tests.support.patience import PATIENCE
from tests.support.servers import Server

FORM = """
<!doctype html><title>evil</title>
<form method="post" action="{action}"><input name="queue" value="{queue}"><input name="back" value="/"></form>
<script>document.forms[0].submit()</script>
"""
PAGES = {
    "a form": FORM,
    "a form without a referrer": '<meta name="referrer" content="no-referrer">' + FORM,
    "a form in a sandbox": "<iframe sandbox='allow-scripts allow-forms' src='/a form'></iframe>",
    "a form as text": FORM.replace("<form", '<form enctype="text/plain"'),
    "a form with a file": FORM.replace("<form", '<form enctype="multipart/form-data"'),
    "a script": "<script>fetch('{action}', {{method: 'POST', mode: 'no-cors', credentials: 'include', headers: "
    "{{'content-type': 'application/x-www-form-urlencoded'}}, body: 'queue={queue}&back=/'}}).then(() => document.title = 'sent')"
    "</script>",
}


@contextmanager
def foreign_site(site: Served) -> Iterator[str]:
    """A site under another name, which sends forms to the dashboard."""
    values = {"action": f"{site.url}/resume", "queue": site.scene.names["queue"]}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path[1:].replace("%20", " ")
            body = PAGES.get(name, "").format(**values).encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(server_of_session: Server) -> Iterator[Served]:
    with served(server_of_session, "forgery", hosts=("127.0.0.1", "ops.internal")) as found:
        yield found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_another_site_changes_nothing(name: str, site: Served, browser: Any) -> None:
    with foreign_site(site) as evil, watched_page(browser) as tab:
        with tab.page.expect_response(lambda response: response.url.startswith(f"{site.url}/resume")) as found:
            tab.page.goto(f"{evil}/{name}", wait_until="commit")
        assert found.value.status == 403
        if name != "a script":  # Playwright does not see all headers of its request
            assert found.value.request.all_headers()["sec-fetch-site"] == "cross-site"
    page = httpx.get(f"{site.url}/queue", params={"name": site.scene.names["queue"]}, timeout=PATIENCE)
    assert f"“{site.scene.texts.reason}”" in page.text  # the queue is paused, as it was


def test_a_host_on_plain_http_sends_its_origin_only(site: Served, browser: Any) -> None:
    """Chromium sends `Sec-Fetch-Site` to https and to loopback only. So the origin decides, and the policy keeps it in forms."""
    port = site.url.rpartition(":")[2]
    options = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP ops.internal 127.0.0.1"]
    chromium = browser.browser_type.launch(executable_path=CHROMIUM, args=options)
    try:
        with watched_page(chromium) as tab:
            tab.page.goto(f"http://ops.internal:{port}/queue?name={site.scene.names['queue']}")
            with tab.page.expect_response(lambda response: "/resume" in response.url) as found:
                tab.page.get_by_role("button", name="Resume").click()
            headers = found.value.request.all_headers()
            assert "sec-fetch-site" not in headers
            assert headers["origin"] == f"http://ops.internal:{port}"
            assert found.value.status == 303
    finally:
        chromium.close()
