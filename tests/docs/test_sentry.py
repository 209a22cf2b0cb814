"""The middleware that docs/howto/middleware.md shows reports each error of a handler to Sentry."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import worqr
from tests.support.servers import Server
from tools.pages import DOCS, blocks_of
from worqr import testing


def test_errors_are_reported(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sentry_sdk = pytest.importorskip("sentry_sdk")
    # the default integrations, which the page uses, would change `logging` and `threading` for all later tests of this process
    monkeypatch.setattr(sentry_sdk, "init", partial(sentry_sdk.init, default_integrations=False))
    transport = pytest.importorskip("sentry_sdk.transport").Transport
    reported = list[tuple[str, bool]]()

    class Keep(transport):  # type: ignore[misc,valid-type]
        def capture_envelope(self, envelope: Any) -> None:
            if event := envelope.get_event():
                reported.append((event["exception"]["values"][-1]["type"], event["tags"]["last_attempt"]))

    (block,) = [
        each for each in blocks_of(DOCS / "howto" / "middleware.md") if each.section == "Report errors to Sentry"
    ]
    shown: dict[str, Any] = {"__name__": "shop"}
    exec(compile(block.code, str(block), "exec", dont_inherit=True), shown)
    mesh: worqr.Mesh[Any] = shown["mesh"]

    @mesh.task(name="send_mail", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0.1))
    def send_mail(address: str) -> None:
        raise ConnectionError("the mail server is down")

    sentry_sdk.init(dsn="https://key@sentry.invalid/1", transport=Keep)
    try:
        with worqr.sync_block(testing.bench, mesh, url=server.tcp_url) as bench:
            worqr.sync(send_mail.enqueue, "ada@example.org")
            worqr.sync(bench.run_until_empty, scheduled=True, raise_errors=False)
        sentry_sdk.flush()
    finally:
        sentry_sdk.init()
    assert reported == [("ConnectionError", False), ("ConnectionError", True)]
