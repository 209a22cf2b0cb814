"""Programs get in by a token, read JSON, and act."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio

import worqr
from tests.support.patience import PATIENCE
from worqr.dashboard.standalone import (
    VIEWERS,
    Settings,
    build,
    check_settings,
    hash_password,
    hash_token,
    new_token,
    read_tokens,
    token_line,
)
from worqr.errors import UsageError

READER, OPERATOR = new_token(), new_token()
FILE = f"# programs\n\n{token_line('keda', 'reader', READER)}\n{token_line('deploy', 'operator', OPERATOR)}\n"
LEFT = pytest.mark.leaves("*")


async def ask(app: Any, method: str, path: str, token: str = "", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE) as client:
        return await client.request(method, path, **{"headers": headers, **options})


def served(mesh: worqr.Mesh, **settings: Any) -> Any:
    app, _ = build(mesh, Settings(tokens=FILE, **settings))
    return app


@LEFT
async def test_a_program_reads_with_its_token(connected: worqr.Mesh) -> None:
    app = served(connected)
    await connected.queue("mails").enqueue(b"1")
    answer = await ask(app, "GET", "/api/v1/queues", READER)
    assert [row["name"] for row in answer.json()["rows"]] == ["mails"]
    assert "worqr_up 1.0" in (await ask(app, "GET", "/metrics", READER)).text
    assert (await ask(app, "GET", "/api/v1/queues")).status_code == 401
    assert (await ask(app, "GET", "/")).status_code == 401


@LEFT
async def test_a_program_acts_with_its_token_and_gets_the_outcome(connected: worqr.Mesh) -> None:
    app, queue = served(connected), connected.queue("mails")
    await queue.dispatch(b"1", id="one")
    refused = await ask(app, "POST", "/cancel", READER, data={"queue": "mails", "id": "one"})
    assert (refused.status_code, refused.json()["error"]) == (
        403,
        "You are 'keda', and lack the right 'cancel' for this.",
    )
    for outcome in ("1 waiting job removed.", "There was nothing to cancel: the job has ended already."):
        answer = await ask(app, "POST", "/cancel", OPERATOR, data={"queue": "mails", "id": "one"})
        assert (answer.status_code, answer.json()) == (200, {"outcome": outcome})
    assert await queue.count() == 0
    assert {entry.who for entry in await connected.log() if entry.queue == "mails"} == {"deploy"}
    await queue.enqueue(b"1", b"2")
    act = await ask(app, "POST", "/cancel-all", OPERATOR, data={"queue": "mails", "count": "2"})
    assert act.json()["act"]
    assert act.json()["outcome"]
    with trio.fail_after(PATIENCE):
        while (row := await act_row(app, act.json()["act"]))["state"] == "running":
            await trio.sleep(0.01)
    assert (row["act"], row["queue"], row["who"], row["changed"]) == ("cancel", "mails", "deploy", 2)
    assert row["outcome"] == "2 tasks were cancelled."
    assert (await ask(app, "GET", "/api/v1/bulk?id=unknown", READER)).status_code == 404
    wrong = await ask(app, "POST", "/cancel-all", OPERATOR, data={"queue": "mails"})
    assert (wrong.status_code, "not confirmed" in wrong.json()["error"]) == (400, True)


async def act_row(app: Any, act: str) -> dict[str, Any]:
    [row] = (await ask(app, "GET", f"/api/v1/bulk?id={act}", READER)).json()["rows"]
    return dict(row)


async def test_a_wrong_token_is_refused_at_every_door() -> None:
    mesh = worqr.Mesh("redis://127.0.0.1:1/0", patience=0.1)
    for settings in ({}, {"passwords": f"ada:{hash_password('correct horse')}"}, {"open_to_all": True}):
        app = served(mesh, **settings)
        for token in ("wrong", hash_token(READER), READER[:-1], "é"):
            answer = await ask(app, "GET", "/nothing", headers={"authorization": f"bearer {token}".encode()})
            assert answer.status_code == 401
            assert "token file" in answer.json()["error"]
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert "content-security-policy" in answer.headers
        assert (await ask(app, "GET", "/nothing", READER)).status_code == 404


async def test_without_a_token_the_other_door_decides() -> None:
    mesh = worqr.Mesh("redis://127.0.0.1:1/0", patience=0.1)
    app = served(mesh, passwords=f"ada:{hash_password('correct horse')}")
    assert (await ask(app, "GET", "/nothing", auth=("ada", "correct horse"), headers={})).status_code == 404
    programs_only = served(mesh, host="10.0.0.1")
    assert (await ask(programs_only, "GET", "/nothing", READER)).status_code == 404
    assert (await ask(programs_only, "GET", "/nothing")).status_code == 401
    check_settings(Settings(host="10.0.0.1", tokens=FILE))


async def test_a_foreign_page_cannot_use_a_token_that_it_does_not_know() -> None:
    app = served(worqr.Mesh("redis://127.0.0.1:1/0", patience=0.1), open_to_all=False)
    headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert (await ask(app, "POST", "/pause", data={"queue": "mails"}, headers=headers)).status_code in (401, 403)


async def test_read_only_holds_for_programs() -> None:
    app = served(worqr.Mesh("redis://127.0.0.1:1/0", patience=0.1), read_only=True)
    assert (await ask(app, "POST", "/pause", OPERATOR, data={"queue": "mails"})).status_code == 403


def test_a_token_file_names_the_viewers() -> None:
    found = read_tokens(FILE, VIEWERS)
    assert {viewer.name: "cancel" in viewer.may for viewer in found.values()} == {"keda": False, "deploy": True}
    assert READER not in FILE
    assert len(READER) >= 43  # 256 bits


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        (f"keda:{READER}", "line 1 of the token file is not NAME:RIGHTS:sha256"),
        (token_line("keda", "god", READER), "with the rights reader, operator, admin"),
        (f"keda:reader:sha256${'0' * 63}", "line 1"),
        (f"{token_line('a', 'reader', READER)}\n{token_line('b', 'admin', READER)}", "line 2 .* the same token"),
    ],
    ids=["empty", "comment", "token", "rights", "hash", "twice"],
)
def test_a_bad_token_file_is_refused_with_the_line(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_tokens(text, VIEWERS)
