"""How much a page asks of the server."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.dashboard.conftest import Site
from tests.dashboard.scene import open_scene, why_not
from tests.support.servers import Server
from worqr.link.session import Session

MOST = 3
"""Requests of a page, without those that connect (`CONNECTING`)."""
CONNECTING = ["list_shards"]
"""Every connection begins with it, beside its handshake."""


class Batches:
    """The batches that each link of this process has sent, by its producer id: the names of the scripts in each.

    What is sent together counts as one request, because it takes one round trip. A request that is submitted while another
    is under way is sent with all others that were submitted meanwhile.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[list[str]]] = defaultdict(list)

    def of_new_links(self, known: set[str]) -> list[list[str]]:
        (link,) = self.sent.keys() - known or {""}
        return [batch for batch in self.sent[link] if batch != CONNECTING]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    begin, found = Session.begin, Batches()

    def counting(self: Session, batch: list[Any], *args: Any) -> Any:
        found.sent[self._producer].append([each.call.script.name for each in batch])
        return begin(self, batch, *args)

    monkeypatch.setattr(Session, "begin", counting)
    return found


@pytest.mark.leaves("*")
async def test_every_page_takes_at_most_three_requests(server: Server, prefix: str, batches: Batches) -> None:
    async with open_scene(server.url, prefix) as scene:
        too_many: dict[str, list[list[str]]] = {}
        for address in scene.addresses():
            known = set(batches.sent)
            answer = await Site(scene.mesh).ask("GET", address)  # a new site, which has read nothing yet
            assert answer.status_code == 200, why_not(address, answer.status_code)
            sent = batches.of_new_links(known)
            if len(sent) > MOST:
                too_many[address] = sent
        assert too_many == {}, "send requests side by side (reading.gathered), or ask for less"
