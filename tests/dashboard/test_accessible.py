"""Every page for everyone, in Chromium: axe-core in light and dark colours, a window of 400 px, a keyboard without a mouse."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.dashboard.browsing import Served, Watched, served, watched_page
from tests.dashboard.test_browser import CONTRAST, browser, pytestmark  # noqa: F401 - a fixture, and the marks of the module
from tests.support.children import ROOT
from tests.support.npm import packages
from tests.support.servers import Server

BROKEN = ("serious", "critical")
WIDE = """
(() => {
  const wide = document.documentElement.clientWidth;
  for (const each of document.querySelectorAll('details')) each.open = true;
  const scrolls = (e) => e && (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const outside = [...document.querySelectorAll('body *')].filter((e) => {
    const box = e.getBoundingClientRect();
    return e.checkVisibility() && box.width && box.right > wide + 1 && !scrolls(e.parentElement) && !e.closest('.hidden, .skip');
  });
  return [document.documentElement.scrollWidth - wide, outside.map((e) => e.outerHTML.slice(0, 120))];
})()
"""
"""How far the page scrolls sideways, and what is wider than the window, unless it is in a box that scrolls by itself."""
FOCUSED = """
(() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  const shown = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
  const text = (e.getAttribute('aria-label') || e.textContent).trim().slice(0, 40);
  const name = e === document.body ? '' : `${e.tagName} ${e.id} ${text}`;
  return [name, shown, box.width > 0 && box.bottom > 0 && box.top < innerHeight];
})()
"""
"""Name of the element with the focus; whether it is marked; whether it is in the window."""
CAN_HAVE_FOCUS = "a[href], button, input, select, textarea, summary, [tabindex='0']"
STOPS = f"""
[...document.querySelectorAll("{CAN_HAVE_FOCUS}")].filter((e) => !e.disabled && e.type !== 'hidden' && e.checkVisibility()).length
"""
LONG = "a-very-long-name-" * 8


@pytest.fixture(scope="module")
def site(server_of_session: Server) -> Iterator[Served]:
    with served(server_of_session, "accessible") as found:
        yield found


@pytest.fixture(scope="module")
def axe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    found = packages(ROOT / "tests" / "axe", request.config, tmp_path_factory)
    if isinstance(found, str):
        (pytest.fail if os.environ.get("WORQR_TEST_BROWSER") else pytest.skip)(f"axe-core is missing: {found}")
    return (found / "axe-core" / "axe.min.js").read_text("utf-8")


OF_COLOURS = ("color-contrast", "link-in-text-block", "html-has-lang")
"""The rules that a scheme of colours can break, and one that the test breaks by itself."""


def problems(tab: Watched, axe: str, rules: Sequence[str] = ()) -> list[str]:
    """What axe-core finds on the open page, by these rules or by all."""
    tab.page.evaluate(axe)
    options = {"resultTypes": ["violations"], **({"runOnly": {"type": "rule", "values": rules}} if rules else {})}
    found = tab.page.evaluate("(options) => axe.run(document, options).then((found) => found.violations)", options)
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in BROKEN
    ]


@pytest.mark.parametrize(("scheme", "rules"), [("light", ()), ("dark", OF_COLOURS)], ids=["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page(
    scheme: str, rules: Sequence[str], site: Served, axe: str, browser: Any
) -> None:
    found: dict[str, list[str]] = {}
    with watched_page(browser, color_scheme=scheme) as tab:
        for address in [*site.pages(), "/nothing"]:
            tab.open(site.url + address)
            found[address] = problems(tab, axe, rules)
        tab.page.evaluate("document.documentElement.removeAttribute('lang')")
        assert "html-has-lang (serious)" in str(problems(tab, axe, rules))  # so it does find something
    assert {address: each for address, each in found.items() if each} == {}


def test_no_page_is_wider_than_a_phone(site: Served, browser: Any) -> None:
    found: dict[str, Any] = {}
    with watched_page(browser, viewport={"width": 400, "height": 800}, color_scheme="dark") as tab:
        for address in [*site.pages(), f"/queue?name={LONG}", f"/search?q={LONG}", f"/nothing?{LONG}"]:
            tab.open(site.url + address)
            over, outside = tab.page.evaluate(WIDE)
            if over > 0 or outside or tab.page.evaluate(CONTRAST):
                found[address] = (over, outside, tab.page.evaluate(CONTRAST))
    assert found == {}


def test_every_page_is_used_by_keyboard_only(site: Served, browser: Any) -> None:
    """Tab reaches everything that can be used, each stop is visible and marked, and the first leads to the content."""
    found: dict[str, Any] = {}
    with watched_page(browser) as tab:
        for address in site.pages():
            tab.open(site.url + address)
            stops, seen, wrong = tab.page.evaluate(STOPS), 0, list[str]()
            tab.page.keyboard.press("Tab")
            name, shown, inside = tab.page.evaluate(FOCUSED)
            assert name.endswith("Skip to content"), address
            while name and seen <= stops + 5:
                seen += 1
                if not (shown and inside):
                    wrong.append(name)
                tab.page.keyboard.press("Tab")
                name, shown, inside = tab.page.evaluate(FOCUSED)
            if wrong or seen < stops:
                found[address] = (seen, stops, wrong)
    assert found == {}
