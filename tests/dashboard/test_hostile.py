"""Texts that would become markup or scripts, at every place where a page shows a text of others, in Chromium."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from tests.dashboard.browsing import Watched, served, watched_page
from tests.dashboard.scene import Texts
from tests.dashboard.test_browser import browser, pytestmark  # noqa: F401 - a fixture, and the marks of the module
from tests.support.servers import Server

SCRIPT = "document.title=1"
CORPUS = (
    f"<script>{SCRIPT}</script>",
    f"</script><script>{SCRIPT}</script>",
    f"</title><script>{SCRIPT}</script>",
    f"</textarea><script>{SCRIPT}</script>",
    f"</style><script>{SCRIPT}</script>",
    f"</pre></details><script>{SCRIPT}</script>",
    f"--><script>{SCRIPT}</script><!--",
    f"<ScRiPt>{SCRIPT}</sCrIpT>",
    f"<script/x>{SCRIPT}</script>",
    f"<<script>{SCRIPT}//<</script>",
    f'<img src=x onerror="{SCRIPT}">',
    f'"><img src=x onerror={SCRIPT}>',
    f"'><img src=x onerror={SCRIPT}>",
    f"<svg onload={SCRIPT}>",
    f"<svg><script>{SCRIPT}</script></svg>",
    f"<svg><animate onbegin={SCRIPT} attributeName=x dur=1s>",
    f"<math><mi//xlink:href='data:x,<script>{SCRIPT}</script>'>",
    f'" autofocus onfocus="{SCRIPT}',
    f"' autofocus onfocus='{SCRIPT}",
    f'" onmouseover="{SCRIPT}" style="position:fixed;inset:0',
    f"<iframe srcdoc='<script>parent.{SCRIPT}</script>'>",
    f"<details open ontoggle={SCRIPT}>",
    f"<body onload={SCRIPT}>",
    f"<a href='javascript:{SCRIPT}' autofocus>x</a>",
    f"javascript:{SCRIPT}//",
    "<meta http-equiv=refresh content='0;url=data:text/html,x'>",
    "<base href='https://evil.example/'><link rel=stylesheet href=x>",
    "<form action='https://evil.example'><button formaction=x>",
    f"&lt;script&gt;{SCRIPT}&lt;/script&gt;%3Cscript%3E",
    f"\u202e\u2028<script>{SCRIPT}</script>\ufeff\u2066",
)
"""None has a brace or a control character, so that each can be the name of a queue, too."""
ADDED = "main img, main script, main iframe, main base, main meta, main style, main [onload]"
LOOK = f"[document.title, location.href, document.querySelectorAll('main').length, document.querySelectorAll('{ADDED}').length]"
PAIRS = [*zip(sorted(CORPUS, key=len)[:15], sorted(CORPUS, key=len)[:14:-1], strict=True)]
"""Two texts stand at each place one after the other, and what is escaped of one does not hide the other. A short one is with a
long one, because the name of an event has at most 100 characters."""


def texts_of(text: str, *, as_json: bool) -> Texts:
    """The same text at every place."""
    payload = json.dumps([text, {text: text}]) if as_json else text
    names = {"queue": text[:180], "job": text, "app": text, "schedule": text, "event": text}
    return Texts(payload=payload.encode(), meta=text, error=text, reason=text, progress=text, **names)


@pytest.mark.leaves("*")
@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_no_text_becomes_markup(number: int, server: Server, prefix: str, browser: Any) -> None:
    text = "".join(PAIRS[number])
    with served(server, prefix, texts_of(text, as_json=number % 2 == 0)) as site, watched_page(browser) as tab:
        for address in site.pages():
            assert look_at(tab, site.url + address) == 200, address
        for path in (
            "/search?q=",
            "/queues?q=",
            "/workers?app=",
            "/nothing?q=",
            "/queue?tab=failed&name=",
            "/job?queue=x&id=",
        ):
            look_at(tab, site.url + path + quote(text))
        look_at(tab, f"{site.url}/queue?name={quote(site.scene.names['failing'])}&tab=failed&error={quote(text)}")
        look_at(tab, f"{site.url}/queue?name=x&done={quote(text)}")
    assert tab.trouble == []


def look_at(tab: Watched, url: str) -> int:
    """Open a page, and return its status."""
    status, (title, address, mains, added) = tab.open(url, LOOK)
    assert title != "1", url
    assert address.startswith(url.partition("?")[0]), f"{url} went to {address}"
    assert (mains, added) == (1, 0), url
    return status


def test_there_are_thirty_and_each_has_its_place() -> None:
    assert {*CORPUS} == {text for pair in PAIRS for text in pair}
    assert len({*CORPUS}) == 30
    assert f"javascript:{SCRIPT}//" in {first for first, _ in PAIRS}  # as a link, it would act at the beginning alone
    assert max(len("".join(pair).encode()) for pair in PAIRS) <= 100
