"""Jobs that were sent with a trace link to it."""

from __future__ import annotations

import pytest

import worqr
from tests.dashboard.conftest import Site
from worqr.dashboard import Dashboard
from worqr.dashboard.app import TraceLinks
from worqr.dashboard.standalone import Settings, build
from worqr.errors import UsageError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
META = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
URL = "https://traces.example.org/trace/{trace_id}?from=worqr"


def test_the_id_of_the_trace_takes_its_place() -> None:
    assert TraceLinks(URL).link(META) == f"https://traces.example.org/trace/{TRACE}?from=worqr"
    assert TraceLinks("").link(META) == ""


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"traceparent": ""},
        {"traceparent": TRACE},
        {"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"},
        {"traceparent": f"00-{TRACE.upper()}-00f067aa0ba902b7-01"},
        {"traceparent": 'javascript:alert(1)//"><script>'},
    ],
)
def test_what_is_no_trace_has_no_link(meta: dict[str, str]) -> None:
    assert TraceLinks(URL).link(meta) == ""


@pytest.mark.parametrize(
    "url", ["https://traces.example.org/", "javascript:{trace_id}", "{trace_id}", "https://{trace_id"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="trace_url must be an address with"):
        Dashboard(worqr.Mesh(), access=lambda scope: None, trace_url=url)


@pytest.mark.leaves("{mail}:*")
async def test_the_page_of_a_job_has_the_link(connected: worqr.Mesh, site: Site) -> None:
    await connected.queue("mail").dispatch(b"x", id="traced", meta=META)
    await connected.queue("mail").dispatch(b"x", id="untraced")
    site.options["trace_url"] = URL
    link = f'<a href="https://traces.example.org/trace/{TRACE}?from=worqr" rel="noreferrer">'
    assert link in (await site.get("/job", queue="mail", id="traced")).text
    assert "noreferrer" not in (await site.get("/job", queue="mail", id="untraced")).text


@pytest.mark.leaves("{mail}:*")
async def test_the_program_of_its_own_has_the_same_options(connected: worqr.Mesh) -> None:
    await connected.queue("mail").dispatch(b'{"plan": "secret plan", "token": "shown"}', id="traced", meta=META)
    settings = Settings(open_to_all=True, redact="plan", trace_url=URL)
    app, _ = build(connected, settings)
    text = (await Site(connected, _app=app).get("/job", queue="mail", id="traced")).text  # type: ignore[arg-type]
    assert "secret plan" not in text
    assert "shown" in text
    assert TRACE in text
    app, _ = build(connected, Settings(open_to_all=True, payloads="never"))
    assert "shown" not in (await Site(connected, _app=app).get("/job", queue="mail", id="traced")).text  # type: ignore[arg-type]
