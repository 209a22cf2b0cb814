"""`worqr topics`: what queues are subscribed to, and the end of a subscription."""

from __future__ import annotations

import json

import pytest

from tests.ops.driver import Desk
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.cli import main
from worqr.keys import RegistryKeys

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("log")]


def test_subscriptions_are_listed_and_dropped(server: Server, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["topics", "--url", server.url, "--prefix", prefix, "--patience", f"{PATIENCE}s", *arguments])
        return code, *capsys.readouterr()

    assert "no queue is subscribed" in run()[2]
    Desk(server.client(), prefix).call(
        ops.declare_topics(RegistryKeys(prefix), "shop.mail", b'{"app":"shop"}', ["order.*"])
    )
    [row] = map(json.loads, run("--json")[1].splitlines())
    assert (row["pattern"], row["queue"], row["app"]) == ("order.*", "shop.mail", "shop")
    assert run("--drop", "shop.mail")[:2] == (0, "shop.mail is no longer subscribed\n")
    code, _, error = run("--drop", "shop.mail")
    assert code == 1
    assert "'shop.mail'" in error
