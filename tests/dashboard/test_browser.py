"""The dashboard in a real browser: Debian's Chromium, driven by Playwright, against a real server with real peers.

One browser, one dashboard and one mesh serve all tests. Without Chromium the tests are skipped, unless ``WORQR_TEST_BROWSER=1``.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

import worqr
from tests.dashboard.browsing import served, watched_page
from tests.dashboard.conftest import write_quiet_hour
from tests.support.leaks import delete_all
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.dashboard import Dashboard, admin, graphs

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
PREFIX = "browser"
WAIT = PATIENCE * 1000
ROWS = "tbody tr:not(.values tr)"
"""The rows of a list: the values of the graphs are a table, too."""
NASTY = '</script><script>document.title = "hacked"</script><img src=x onerror="document.title = 1">'

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None and not os.environ.get("WORQR_TEST_BROWSER"),
        reason="Chromium is not installed, so the dashboard is not tried in it: try `apt-get install chromium`",
    ),
    pytest.mark.timeout(300),
]


@dataclass
class Running:
    """A dashboard and a peer, in a Trio loop in a thread."""

    url: str
    mesh: worqr.Mesh
    portal: trio.lowlevel.TrioToken
    stop: trio.Event

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run an async function in that loop."""
        return trio.from_thread.run(call, *args, trio_token=self.portal)

    def enqueue(self, queue: str, *payloads: bytes) -> None:
        self.run(partial(self.mesh.queue(queue).enqueue, *payloads))

    def dispatch(self, queue: str, payload: bytes, **options: Any) -> None:
        self.run(partial(self.mesh.queue(queue).dispatch, payload, **options))


async def until_cancelled(task: bytes) -> None:
    worqr.current().progress(0.4, "page 4 of 10")
    await trio.sleep_forever()


async def in_steps(task: bytes) -> None:
    """Reports and ends when the test says so, by the events of the job's id."""
    steps = STEPS[task.decode()]
    await steps[0].wait()
    worqr.current().progress(0.5, "half of it")
    await steps[1].wait()


STEPS: dict[str, tuple[trio.Event, trio.Event]] = {}


async def fails(task: bytes) -> None:
    raise worqr.Failure("the bank refused it: " + NASTY)


async def run_site(server: Server, ready: Callable[[Running], None]) -> None:
    mesh, port, stop = worqr.Mesh(server.url, prefix=PREFIX, app="shop"), free_port(), trio.Event()
    site = Running(f"http://127.0.0.1:{port}", mesh, trio.lowlevel.current_trio_token(), stop)
    dashboard = Dashboard(mesh, access=lambda scope: admin("ada"), hosts=("127.0.0.1",))

    config = Config()
    config.bind, config.graceful_timeout, config.errorlog, config.accesslog = [f"127.0.0.1:{port}"], 1, None, None
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "slow", until_cancelled)
        await nursery.start(peer.serve, "failing", fails)
        await nursery.start(peer.serve, "stepping", in_steps)
        await nursery.start(partial(serve, dashboard, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
        ready(site)
        await stop.wait()
        dashboard._looks.close()  # pyright: ignore[reportPrivateUsage]
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def site(server_of_session: Server) -> Iterator[Running]:
    import queue
    import threading

    with server_of_session.client() as client:
        delete_all(client, PREFIX)
    found: queue.SimpleQueue[Running] = queue.SimpleQueue()
    thread = threading.Thread(target=trio.run, args=(run_site, server_of_session, found.put), name="site")
    thread.start()
    running = found.get(timeout=PATIENCE)
    yield running
    running.portal.run_sync_soon(running.stop.set)
    thread.join(PATIENCE)
    with server_of_session.client() as client:
        delete_all(client, PREFIX)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the browser. What the browser complains about is noted."""

    page: Any
    url: str
    complaints: list[str]
    expected: str = "nothing"
    """A regular expression of complaints that the test provokes. They may come late, so they are not waited for."""

    def open(self, path: str) -> None:
        self.page.goto(self.url + path, wait_until="domcontentloaded")

    def text_of(self, key: str) -> str:
        return self.page.locator(f'[data-k="{key}"]').first.text_content()

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true. Playwright's own way evaluates a text in the page, which the policy forbids.

        In a page that is still being loaded, an element may be missing, and the expression raises.
        """
        deadline, raised = time.monotonic() + PATIENCE, None
        while True:
            try:
                if self.page.evaluate(expression):
                    return
            except sync_api.Error as error:
                raised = error
            assert time.monotonic() < deadline, f"{expression} {raised or ''}"
            self.page.wait_for_timeout(30)


@pytest.fixture
def open_tab(site: Running, browser: Any) -> Iterator[Callable[..., Tab]]:
    contexts: list[Any] = []
    tabs: list[Tab] = []

    def make(**options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page, complaints = context.new_page(), list[str]()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        tabs.append(Tab(page, site.url, complaints))
        return tabs[-1]

    yield make
    for context in contexts:
        context.close()
    found = [text for tab in tabs for text in tab.complaints if not re.search(tab.expected, text)]
    assert found == []


def test_numbers_move_without_a_reload(site: Running, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.expected = "404"  # the queue was not used yet
    tab.open("/queue?name=counted")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    assert tab.text_of("queue.counted.waiting") == "0"
    tab.page.evaluate("window.sameDocument = true")
    site.enqueue("counted", b"1", b"2", b"3")
    tab.wait_for("""document.querySelector('[data-k="queue.counted.waiting"]').textContent === '3'""")
    tab.wait_for("!document.querySelector('#moved').hidden")  # the list itself stays still
    assert tab.page.evaluate("window.sameDocument")
    tab.page.locator("#moved a").click()
    tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 3")


BAR = """document.querySelector('main progress')"""


def step(site: Running, job: str, number: int) -> None:
    site.portal.run_sync_soon(STEPS[job][number].set)


@pytest.mark.parametrize("result_ttl", [60, None])
def test_the_page_of_a_job_follows_the_job_to_its_end(
    site: Running, open_tab: Callable[..., Tab], result_ttl: float | None
) -> None:
    job = f"followed-{result_ttl}"
    STEPS[job] = (trio.Event(), trio.Event())
    site.run(partial(site.mesh.queue("stepping").pause))
    site.dispatch("stepping", job.encode(), id=job, **({} if result_ttl is None else {"result_ttl": result_ttl}))
    tab, lists = open_tab(), open_tab()
    tab.open(f"/job?queue=stepping&id={job}")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    tab.page.evaluate("window.sameDocument = true")
    state = "document.querySelector('.state').textContent"
    assert "waits" in tab.page.evaluate(state)
    site.run(site.mesh.queue("stepping").resume)
    tab.wait_for(f"{state}.includes('A worker runs the job')")
    assert tab.page.evaluate(f"getComputedStyle({BAR}).visibility") == "hidden"
    lists.open("/running")
    while not lists.page.get_by_role("link", name=job).count():
        lists.page.wait_for_timeout(100)
        lists.page.reload()
    lists.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    row = f"[...document.querySelectorAll('tr')].find((each) => each.textContent.includes('{job}')).querySelector('progress')"
    assert lists.page.evaluate(f"getComputedStyle({row}).visibility") == "hidden"
    step(site, job, 0)
    for each, bar in ((tab, BAR), (lists, row)):
        each.wait_for(f"{bar}.value === 0.5 && getComputedStyle({bar}).visibility === 'visible'")
    tab.wait_for("document.querySelector('.run').textContent.includes('half of it')")
    assert tab.page.get_by_text("Running for").count() == 1
    assert tab.page.locator("summary", has_text="Cancel").count() == 1
    step(site, job, 1)
    text = "The job has finished." if result_ttl else "The job has ended. Its result was not kept"
    tab.wait_for(f"{state}.includes('{text}')")
    assert tab.page.get_by_text("Running for").count() == 0
    assert tab.page.locator("summary", has_text="Cancel").count() == 0
    said = "document.querySelector('#news').textContent"
    assert tab.page.evaluate(said) == ("This job has finished." if result_ttl else "This job has ended.")
    assert tab.page.evaluate("window.sameDocument && document.querySelector('#moved').hidden")


def test_a_form_that_is_open_stays_when_a_job_ends(site: Running, open_tab: Callable[..., Tab]) -> None:
    STEPS["typing"] = (trio.Event(), trio.Event())
    site.dispatch("stepping", b"typing", id="typing", result_ttl=60)
    tab = open_tab()
    tab.open("/job?queue=stepping&id=typing")
    tab.wait_for("document.querySelector('.state').textContent.includes('A worker runs the job')")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    tab.page.locator("summary", has_text="Cancel").click()
    tab.page.get_by_label("Reason, for the handler").fill("half a sen")
    step(site, "typing", 0)
    step(site, "typing", 1)
    tab.wait_for("!document.querySelector('#moved').hidden")
    assert tab.page.locator("#moved").text_content() == "This job has finished. Show it"
    assert tab.page.get_by_label("Reason, for the handler").input_value() == "half a sen"
    tab.page.locator("#moved a").click()
    tab.wait_for("document.querySelector('.state').textContent.includes('The job has finished.')")


def test_a_pause_appears_and_goes_without_a_reload(site: Running, open_tab: Callable[..., Tab]) -> None:
    site.enqueue("halted", b"1")
    tab, queue = open_tab(), site.mesh.queue("halted")
    tab.open("/queue?name=halted")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    note = """document.querySelector('[data-k="queue.halted.pause"]')"""
    assert tab.page.evaluate(f"{note}.parentElement.hidden")
    site.run(partial(queue.pause, duration=600))
    tab.wait_for(f"!{note}.parentElement.hidden && {note}.textContent.includes('The pause ends in 9 min')")
    site.run(queue.resume)
    tab.wait_for(f"{note}.parentElement.hidden")


def test_the_numbers_of_lanes_move_without_a_reload(site: Running, open_tab: Callable[..., Tab]) -> None:
    tab, queue = open_tab(), site.mesh.queue("laned")
    site.dispatch("laned", b"1", lane="acme")
    tab.open("/lanes?queue=laned")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    tab.page.evaluate("window.sameDocument = true")
    waiting = """document.querySelector('[data-k="lane.{laned}.acme.waiting"]').textContent"""
    assert tab.page.evaluate(waiting) == "1"
    tab.page.locator("summary", has_text="Change").click()  # an open form stays open
    site.dispatch("laned", b"2", lane="acme")
    tab.wait_for(f"{waiting} === '2'")
    assert tab.page.evaluate("document.querySelector('#moved').hidden")
    site.dispatch("laned", b"3", lane="new")
    tab.wait_for("!document.querySelector('#moved').hidden")
    assert tab.page.evaluate("window.sameDocument && document.querySelector('td details').open")
    tab.page.locator("#moved a").click()
    tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 2")
    site.run(queue.cancel_all)


def test_the_browser_asks_for_nothing_by_itself_but_streams(site: Running, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.expected = "404"  # the queue was not used yet
    tab.open("/queue?name=quiet")
    tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
    requests: list[str] = []
    tab.page.on("request", lambda request: requests.append(request.url.removeprefix(site.url)))
    before = tab.text_of("queue.quiet.waiting")
    for n in range(3):
        site.enqueue("quiet", b"1")
        tab.wait_for(
            f"""document.querySelector('[data-k="queue.quiet.waiting"]').textContent === '{int(before) + n + 1}'"""
        )
    assert [path for path in requests if not path.startswith(("/live?", "/static/"))] == []  # the icon may come late


SHIFTS = """
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    window.shifts = [...(window.shifts || []), ...entry.sources.map((source) => source.node?.outerHTML?.slice(0, 80) || "text")];
  }
}).observe({type: "layout-shift", buffered: false});
"""
"""Notes what the browser moves."""


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_moves_when_numbers_do(width: int, site: Running, open_tab: Callable[..., Tab]) -> None:
    tab, name = open_tab(viewport={"width": width, "height": 900}), f"growing-{width}"
    site.enqueue(name, b"1")
    waiting = f"""document.querySelector('[data-k="queue.{name}.waiting"]')?.textContent"""
    for path, before, thousands, after in (
        (f"/queue?name={name}", "1", 2, "2,001"),
        (f"/queues?q={name}", "2,001", 10, "12,001"),
    ):
        tab.open(path)
        while not tab.page.evaluate(f"{waiting} === '{before}'"):  # the state of the mesh may be from before
            tab.page.wait_for_timeout(100)
            tab.page.reload()
        tab.wait_for("document.querySelector('#live').textContent.startsWith('Live')")
        tab.page.evaluate(SHIFTS)
        for _ in range(thousands):
            site.enqueue(name, *[b"1"] * 1000)
        tab.wait_for(f"{waiting} === '{after}'")
        assert tab.page.evaluate("window.shifts || []") == [], path


def test_the_id_of_a_job_is_copied(site: Running, open_tab: Callable[..., Tab]) -> None:
    site.dispatch("copied", b"1", id="job <1>", delay=3600)
    tab = open_tab(permissions=["clipboard-read", "clipboard-write"])
    tab.open("/job?queue=copied&id=job%20%3C1%3E")
    tab.page.get_by_role("button", name="Copy id").click()
    tab.wait_for("document.querySelector('.copy').textContent === 'Copied'")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "job <1>"


def test_the_pointer_shows_the_values_of_its_time_in_all_charts(
    site: Running, server_of_session: Server, open_tab: Callable[..., Tab]
) -> None:
    write_quiet_hour(server_of_session, PREFIX, "drawn")
    site.enqueue("drawn", b"1", b"2")
    tab = open_tab(timezone_id="Asia/Kolkata")
    tab.open("/queue?name=drawn")
    waiting = tab.page.locator("figure", has_text="Waiting").first.locator(".value").first
    latest = waiting.text_content()
    assert latest != "0"
    assert "until" in tab.page.locator("#history-at").text_content()
    assert tab.page.locator(".cross[visibility=visible]").count() == 0
    plot = tab.page.locator(".plot > svg").first
    box = plot.bounding_box()
    tab.page.mouse.move(box["x"] + 2, box["y"] + 20)
    assert waiting.text_content() == "0"  # an hour ago
    assert tab.page.locator(".cross[visibility=visible]").count() == 6
    oldest = tab.page.locator("#values tbody tr").last.locator("th").text_content()
    assert tab.page.locator("#history-at").text_content() == oldest
    ticks = tab.page.locator(".plot").first.locator("text[data-at]").all_text_contents()
    assert ticks
    assert all(re.fullmatch(r"\d\d:(00|15|30|45)", tick) for tick in ticks)
    utc = tab.page.evaluate("document.querySelector('text[data-at]').dataset.at")[11:16]
    assert ticks[0] != utc
    tab.page.mouse.move(0, 0)
    assert waiting.text_content() == latest
    tab.page.locator(".values summary").focus()
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("#values").is_visible()


COUNT_GRAPHS = """
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (name, listener) {
  const counted = (event) => { listener(event); if (name === "graphs") window.graphs = (window.graphs || 0) + 1; };
  listen.call(this, name, counted);
};
"""


def test_graphs_are_drawn_again_but_not_under_the_pointer(
    site: Running, server_of_session: Server, open_tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "FRESH", 0.5)
    write_quiet_hour(server_of_session, PREFIX, "redrawn")
    site.enqueue("redrawn", b"1")
    tab = open_tab(timezone_id="Asia/Kolkata")
    tab.page.add_init_script(COUNT_GRAPHS)
    tab.open("/queue?name=redrawn")
    tab.page.locator(".values summary").click()
    tab.page.locator("h1").click()  # so that the focus and the pointer leave the graphs
    site.enqueue("redrawn", *[b"1"] * 6)
    tab.wait_for("[...document.querySelectorAll('figure .value')].some((value) => value.textContent === '7')")
    assert tab.page.locator("#values").is_visible()
    assert tab.page.locator(".zone").count() == 0
    box = tab.page.locator(".plot > svg").first.bounding_box()
    tab.page.mouse.move(box["x"] + 2, box["y"] + 20)
    assert tab.page.locator(".cross[visibility=visible]").count() == 6
    tab.page.evaluate("window.graphs = 0")
    tab.wait_for("window.graphs > 1")
    assert tab.page.locator(".cross[visibility=visible]").count() == 6


def test_charts_are_drawn_without_javascript(
    site: Running, server_of_session: Server, open_tab: Callable[..., Tab]
) -> None:
    write_quiet_hour(server_of_session, PREFIX, "drawn")
    site.enqueue("drawn", b"1", b"2")
    tab = open_tab(java_script_enabled=False)
    tab.open("/queue?name=drawn")
    for plot in tab.page.locator(".plot").all():
        assert plot.get_attribute("aria-label")
        assert plot.bounding_box()["height"] > 100
    assert tab.page.locator("figure", has_text="Waiting").first.locator(".plot .stroke").bounding_box()["width"] > 50


def test_a_hidden_tab_closes_its_stream(site: Running, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.page.add_init_script("""
        Object.defineProperty(document, 'hidden', {get: () => window.isHidden === true});
        const Original = window.EventSource;
        window.EventSource = class extends Original {
            constructor(...args) { super(...args); window.streams = (window.streams || 0) + 1; }
            close() { super.close(); window.streams -= 1; }
        };
    """)
    tab.open("/")
    tab.wait_for("window.streams === 1")
    change = "window.isHidden = {}; document.dispatchEvent(new Event('visibilitychange')); window.streams"
    assert tab.page.evaluate(change.format("true")) == 0
    assert tab.page.evaluate(change.format("false")) == 1


def test_a_server_that_goes_away_and_comes_back(own_server: Server, browser: Any) -> None:
    """The figures stay, greyed, with the time that they are of; no button works; and all is as before when it is back."""
    with served(own_server, "away") as other, watched_page(browser) as tab:
        tab.open(f"{other.url}/queue?name=orders")
        until(tab.page, "document.querySelector('#live').textContent.startsWith('Live')")
        waiting = tab.page.locator('[data-k="queue.orders.waiting"]').first.text_content()
        own_server.stop()
        until(tab.page, "!document.querySelector('#down').hidden")
        assert re.search(r"The figures are of \d\d:\d\d:\d\d", tab.page.locator("#down").text_content())
        assert tab.page.locator('[data-k="queue.orders.waiting"]').first.text_content() == waiting
        assert tab.page.evaluate("document.body.classList.contains('away')")
        enabled = "[...document.querySelectorAll('form[method=post] button')].filter((b) => !b.disabled).length"
        assert tab.page.evaluate(enabled) == 0
        own_server.start()
        until(tab.page, "document.querySelector('#down').hidden")
        assert not tab.page.evaluate("document.body.classList.contains('away')")
        assert tab.page.evaluate(enabled) > 0


def test_a_server_that_comes_back_while_the_tab_is_hidden(own_server: Server, browser: Any) -> None:
    with served(own_server, "away") as other, watched_page(browser) as tab:
        tab.open(f"{other.url}/queue?name=orders")
        until(tab.page, "document.querySelector('#live').textContent.startsWith('Live')")
        own_server.stop()
        until(tab.page, "!document.querySelector('#down').hidden")
        _show(tab.page, hidden=True)
        own_server.start()
        address, deadline = f"{other.url}/queue?name=orders", time.monotonic() + PATIENCE
        while tab.page.request.get(address).status != 200:
            assert time.monotonic() < deadline
        tab.page.wait_for_timeout(3500)  # a look that failed is kept for 3 s
        _show(tab.page, hidden=False)
        until(tab.page, "document.querySelector('#down').hidden")
        assert tab.page.evaluate("document.querySelectorAll('form[method=post] button:disabled').length") == 0


def _show(page: Any, *, hidden: bool) -> None:
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def until(page: Any, expression: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(30)


def test_a_job_is_cancelled_by_keyboard_and_the_notice_has_the_milliseconds(
    site: Running, open_tab: Callable[..., Tab]
) -> None:
    site.dispatch("slow", b"1", id="by-keyboard")
    tab = open_tab()
    tab.open("/queue?name=slow&tab=running")
    while not tab.page.locator(ROWS).count():
        tab.page.reload()
    tab.page.get_by_role("link", name="by-keyboard").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/job?**")
    tab.wait_for("document.querySelector('progress').value === 0.4")
    tab.page.locator("summary", has_text="Cancel").focus()
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.type("typed reason")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**done=cancel**")
    assert re.search(r"1 run cancelled and ended after [\d,]+ ms\.", tab.page.locator(".notice").text_content())


def test_the_first_tab_stop_skips_to_the_content(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.open("/queues")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to content"
    assert tab.page.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    for _ in range(40):  # every stop is visible, and the focus does not get stuck
        tab.page.keyboard.press("Tab")
        shown = "getComputedStyle(document.activeElement).outlineStyle !== 'none' || document.activeElement === document.body"
        assert tab.page.evaluate(shown)


def test_failed_jobs_are_retried_without_javascript(site: Running, open_tab: Callable[..., Tab]) -> None:
    for name in ("first", "second"):
        site.dispatch("failing", b'{"token": "s3cr3t"}', id=name)
    tab = open_tab(java_script_enabled=False)
    tab.open("/queue?name=failing&tab=failed")
    while tab.page.locator(ROWS).count() < 2:
        tab.page.reload()
    assert "s3cr3t" not in tab.page.content()
    assert tab.page.locator("input[data-all]").is_hidden()
    tab.page.get_by_label("Choose first").check()
    tab.page.get_by_role("button", name="Retry chosen").click()
    assert tab.page.locator(".notice").text_content() == "1 task put back into the queue."
    assert "As of" in tab.page.locator("#live").text_content()
    tab.page.get_by_label("Choose second").check()
    tab.page.get_by_role("button", name="Delete chosen").click()
    assert tab.page.locator(".notice").text_content() == "1 task deleted."


def test_payloads_and_names_are_no_markup(site: Running, open_tab: Callable[..., Tab]) -> None:
    site.enqueue("nasty", NASTY.encode(), b'{"a": "' + NASTY.replace('"', "'").encode() + b'"}')
    site.dispatch("nasty", b"1", id=NASTY)
    site.dispatch("failing", b"1", id="nasty")
    tab = open_tab()
    tab.open("/queue?name=failing&tab=failed")
    while not tab.page.locator(ROWS).count():
        tab.page.reload()
    job = f"/job?queue=nasty&id={quote(NASTY)}"
    for path in ("/queue?name=nasty", "/queue?name=failing&tab=failed", job, f"/search?q={quote(NASTY)}", "/failed"):
        tab.open(path)
        assert "hacked" not in tab.page.title() or "</script>" in tab.page.title()
        assert tab.page.locator("main img, main script, main iframe").count() == 0


def test_injected_scripts_and_styles_do_not_run(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.expected = "Content Security Policy|404"
    tab.open("/")
    tab.page.evaluate("""
        document.body.insertAdjacentHTML('beforeend', '<img src="x" onerror="window.ran = 1"><p style="color: red" id="p">x</p>');
        const script = document.createElement('script');
        script.textContent = 'window.ran = 2';
        document.body.append(script);
    """)
    tab.wait_for("document.querySelector('img').complete")
    ran, colour = tab.page.evaluate("[window.ran, getComputedStyle(document.querySelector('#p')).color]")
    assert ran is None
    assert colour != "rgb(255, 0, 0)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_every_page_fits_and_can_be_read(scheme: str, width: int, site: Running, open_tab: Callable[..., Tab]) -> None:
    long = "a-very-long-name-" * 10
    site.dispatch(long, b"x" * 4000, id="b" * 200)
    tab = open_tab(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.expected = "404"  # of /nothing
    paths = ["/", "/queues", "/running", "/failed", "/workers", "/schedules", "/search?q=x", "/nothing"]
    paths += [f"/queue?name={long}", f"/job?queue={long}&id={'b' * 200}", "/queue?name=failing&tab=failed"]
    for path in paths:
        tab.open(path)
        sizes = tab.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sizes[0] <= sizes[1], (path, "the page scrolls sideways")
        dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(20, 21, 23)") == (scheme == "dark"), path
        assert tab.page.evaluate(CONTRAST) == [], path


CONTRAST = """
(() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest(".hidden, svg")) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 30)}`);
  }
  return bad;
})()
"""
"""The elements whose text has a contrast of less than 4.5 to its background."""


@pytest.mark.parametrize("java_script_enabled", [True, False])
def test_all_records_are_deleted_by_keyboard_only(
    site: Running, open_tab: Callable[..., Tab], java_script_enabled: bool
) -> None:
    for number in range(3):
        site.dispatch("failing", b"1", id=f"bulk-{java_script_enabled}-{number}")
    tab = open_tab(java_script_enabled=java_script_enabled)
    tab.open("/queue?name=failing&tab=failed&error=Failure")
    while tab.page.locator(ROWS).count() < 3:
        tab.page.reload()
    tab.page.get_by_role("link", name="Delete all that match").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/confirm?**")
    question = tab.page.locator("h1").text_content()
    assert re.fullmatch(r"Delete the records of \d+ tasks\?", question), question
    tab.page.get_by_role("button", name="Delete all").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/bulk?**")
    ended = tab.page.locator(".state", has_text="deleted from the list")
    while not ended.count():
        tab.page.reload()
    assert "By" in tab.page.locator("dl.facts").text_content()
    assert "ada" in tab.page.locator("dl.facts").text_content()
