"""How much a page asks of the server."""

from __future__ import annotations

import pytest

from tests.dashboard.conftest import Batches, Site
from tests.dashboard.scene import open_scene, why_not
from tests.support.servers import Server

MOST = 3
"""Requests of a page, without those that connect."""


@pytest.mark.leaves("*")
async def test_every_page_takes_at_most_three_requests(server: Server, prefix: str, batches: Batches) -> None:
    async with open_scene(server.url, prefix) as scene:
        too_many: dict[str, list[list[str]]] = {}
        for address in scene.addresses():
            known = set(batches.sent)
            answer = await Site(scene.mesh).ask("GET", address)  # a new site, which has read nothing yet
            assert answer.status_code == 200, why_not(address, answer.status_code)
            sent = batches.of_new_links(known)
            # The list of queues asks for names of limits, and then for what is in use; the overview for schedules that are
            # due, and then for their times, if one just is.
            more = address == "/queues" or (address == "/" and ["survey_schedules"] in sent)
            if len(sent) > MOST + more:
                too_many[address] = sent
        assert too_many == {}, "send requests side by side (reading.gathered), or ask for less"
