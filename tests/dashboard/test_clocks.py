"""Times and ages on pages are those of the server, whatever the clock of this host says."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, tzinfo

import pytest

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_live import opened
from tests.peer.tools import Held, serving


class FiveHoursAhead(datetime):
    """The clock of a host that is wrong."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=5)


@pytest.fixture
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("state", "app"):
        monkeypatch.setattr(f"worqr.dashboard.{module}.datetime", FiveHoursAhead)


@pytest.mark.leaves("*")
@pytest.mark.usefixtures("wrong_clock")
async def test_a_clock_that_is_wrong_changes_no_age(connected: worqr.Mesh, site: Site) -> None:
    mails, held = connected.queue("mails"), Held()
    await mails.dispatch(b"1", id="later", delay=3 * 3600)
    for path in ("/queue?name=mails&tab=scheduled", "/job?queue=mails&id=later"):
        assert "in 2 h" in (await site.ask("GET", path)).text
    await mails.cancel_all()
    async with serving(connected, "mails", held):
        await mails.dispatch(b"1", id="now")
        await held.wait(1)
        for path in ("/queue?name=mails&tab=running", "/job?queue=mails&id=now"):
            assert " h" not in age_in((await site.ask("GET", path)).text)
        for view in ("queue&name=mails&tab=running", "job&queue=mails&id=now"):
            async with opened(site, f"view={view}") as stream:
                texts = await stream.wait_for("set")
                [age] = [text for key, text in texts.items() if key.endswith(".for")]
                assert " h" not in age
        held.gate.set()


def age_in(page: str) -> str:
    """For how long the task runs, on a page with one."""
    [age] = re.findall(r'data-k="(?:run|job)[^"]*\.for"[^>]*>([^<]+)<', page)
    return str(age)
