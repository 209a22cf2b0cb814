"""What the page of a workflow shows, and the forms by which people send it values."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from html import unescape
from typing import Any, Literal

import msgspec
import pytest
import trio

import worqr
from tests.dashboard.conftest import Site
from tests.dashboard.test_pages import text_of
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.dashboard import Viewer, admin, operator
from worqr.keys import QueueKeys

LEFT = pytest.mark.leaves("*")
SECRET = "s3cr3t-value"


class Approval(msgspec.Struct):
    by: str
    amount: float
    verdict: Literal["yes", "no"] = "yes"
    urgent: bool = False
    lines: list[str] = []


@asynccontextmanager
async def waiting_workflow(mesh: worqr.Mesh, kind: Any = Approval) -> AsyncGenerator[worqr.Job[Any]]:
    """A workflow that has taken a step, and waits for a value."""

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> Any:
        await worqr.step("charge token=abc", str.upper, SECRET)
        return await worqr.wait_for("approved", kind, timeout=3_600)

    async with mesh.join():
        job = await fulfil.options(id="order-7").dispatch()
        await until_suspended(job)
        yield job


async def until_suspended(job: worqr.Job[Any]) -> None:
    with trio.fail_after(PATIENCE):
        while (await job.status()).state != "suspended":
            await trio.sleep(0.01)


async def page_of(site: Site) -> str:
    answer = await site.get("/job", queue="fulfil", id="order-7")
    assert answer.status_code == 200
    return answer.text


def words(page: str) -> str:
    """The text of a page, with one space between two words."""
    return " ".join(text_of(page).split())


def hidden_fields(page: str) -> dict[str, str]:
    """The hidden fields of the form of a wait."""
    form = page[page.index('action="/send"') :]
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form[: form.index("</form>")])
    return {name: unescape(value) for name, value in found}


@pytest.fixture
async def site(mesh: worqr.Mesh) -> Site:
    return Site(mesh)


@LEFT
async def test_the_page_shows_what_was_done_and_what_it_waits_for_and_no_error(mesh: worqr.Mesh, site: Site) -> None:
    async with waiting_workflow(mesh):
        page = await page_of(site)
        shown = words(page)
        assert "The workflow waits, and holds no slot." in shown
        assert re.search(r"Waits for approved until 20\d\d", shown)
        assert "Error of the last try" not in shown
        assert re.search(
            r"Time line .* step charge token=.* Run again from here.* done .* wait approved End the wait .* open",
            shown,
        )
        assert SECRET.upper() not in page
        assert "abc" not in page, "the names of steps are redacted: they have arguments"
        assert 'href="/queue?name=fulfil&amp;tab=suspended#tasks"' in (await site.get("/queue", name="fulfil")).text
        listed = words((await site.get("/queue", name="fulfil", tab="suspended")).text)
        assert re.search(r"order-7 .* approved until 20\d\d", listed)
        fields = (await site.get("/api/v1/job", queue="fulfil", id="order-7")).json()
        assert [(each["kind"], each["state"]) for each in fields["time_line"]] == [("step", "done"), ("wait", "open")]
        assert fields["waits_for"].startswith("approved until 20")
        assert "abc" not in repr(fields)


@LEFT
async def test_a_form_has_an_input_for_each_field_and_sends_the_value(mesh: worqr.Mesh, site: Site) -> None:
    async with waiting_workflow(mesh) as job:
        page = await page_of(site)
        for part in ('<input id="wait-1-1" name="field.by"', 'name="field.amount" required inputmode="decimal"'):
            assert part in page
        assert (
            '<select id="wait-1-3" name="field.verdict"><option value=""></option><option value="no">no</option>'
            in page
        )
        assert '<textarea id="wait-1-5" name="field.lines"' in page
        fields = hidden_fields(page)
        typed = {f"field.{name}": "" for name in ("urgent", "more")} | {
            "field.by": f"ada {SECRET}",
            "field.amount": "2.5",
        }
        typed |= {"field.verdict": "no", "field.lines": '["a"]'}
        answer = await site.post("/send", **fields, **typed)
        assert answer.headers["location"] == "/job?queue=fulfil&id=order-7&done=sent-woke"
        taken = await job.result(PATIENCE)
        assert taken == {"by": f"ada {SECRET}", "amount": 2.5, "verdict": "no", "urgent": False, "lines": ["a"]}
        assert "the workflow runs again" in (await site.ask("GET", answer.headers["location"])).text
        [entry] = [each for each in await mesh.log() if each.kind == "sent"]
        assert (entry.who, entry.queue, entry.job) == ("ada", "fulfil", "order-7")
        assert re.fullmatch(r"approved, \d+ bytes", entry.text)
        again = await site.post("/send", **fields, **typed)
        assert again.status_code == 400
        assert "does not wait for this any more" in again.text


@LEFT
@pytest.mark.parametrize(
    ("kind", "part", "typed", "value"),
    [
        (str, '<input id="wait-1-1" name="text"', {"text": "3"}, "3"),
        (int, 'name="value" required inputmode="decimal"', {"value": "3"}, 3),
        (bool, '<select id="wait-1-1" name="value" required', {"value": "true"}, True),
        (dict[str, int], '<textarea id="wait-1-1" name="value"', {"value": '{"a":\r\n1}'}, {"a": 1}),
    ],
)
async def test_a_value_that_is_no_object_has_one_field(
    kind: Any, part: str, typed: dict[str, str], value: Any, mesh: worqr.Mesh, site: Site
) -> None:
    async with waiting_workflow(mesh, kind) as job:
        page = await page_of(site)
        assert part in page
        assert (await site.post("/send", **hidden_fields(page), **typed)).status_code == 303
        assert await job.result(PATIENCE) == value


@LEFT
async def test_a_value_of_another_type_or_for_another_dispatch_is_not_sent(mesh: worqr.Mesh, site: Site) -> None:
    async with waiting_workflow(mesh) as job:
        fields = hidden_fields(await page_of(site))
        for typed, why in (
            ({"field.by": "ada", "field.amount": "lots"}, "amount: this must be JSON"),
            ({"field.by": "ada", "field.amount": "true"}, "amount: it must be a number, not true"),
            ({"field.by": "ada", "field.amount": ""}, "amount: it is missing"),
            (
                {"field.by": "ada", "field.amount": "1", "field.more": "1", "life": "7"},
                "does not wait for this any more",
            ),
            ({"value": "{"}, "this must be JSON"),
        ):
            answer = await site.post("/send", **{**fields, **typed})
            assert (answer.status_code, why in answer.text) == (400, True), answer.text
        assert (await site.post("/send", **{**fields, "name": "\x00"}, value="1")).status_code == 400
        assert (await job.status()).state == "suspended"
        assert not [each for each in await mesh.log() if each.kind == "sent"]


@LEFT
async def test_the_right_is_one_of_its_own(mesh: worqr.Mesh, site: Site) -> None:
    async with waiting_workflow(mesh) as job:
        fields = {**hidden_fields(await page_of(site)), "field.by": "eve", "field.amount": "1"}
        for viewer in (operator("eve"), Viewer("eve", ("look",)), admin("eve", queues=("other",))):
            site.viewer = viewer
            answer = await site.post("/send", **fields)
            assert answer.status_code == (403 if "send" not in viewer.may else 404)
            if viewer.sees("fulfil"):
                assert "/send" not in await page_of(site)
        site.viewer = admin("ada")
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}, {}):
            assert (await site.ask("POST", "/send", data=fields, headers=headers)).status_code == 403
        assert (await job.status()).state == "suspended"
        site.viewer = Viewer("ada", ("look", "send"))
        assert (await site.post("/send", **fields)).status_code == 303
        assert (await job.result(PATIENCE))["by"] == "eve"


@LEFT
async def test_early_values_of_programs_and_jobs_that_take_none(mesh: worqr.Mesh, site: Site) -> None:
    async with waiting_workflow(mesh):
        early = {"queue": "fulfil", "id": "order-7", "name": "signed", "value": "1"}
        for outcome in ("stored", "already"):
            assert (await site.post("/send", **early)).headers["location"].endswith(f"done=sent-{outcome}")
        assert "event signed stored" in words(await page_of(site))
        gone = await site.post("/send", **{**early, "id": "unknown"})
        assert "it is no workflow" in (await site.ask("GET", gone.headers["location"])).text


FOREIGN = "<b>x</b>"


@LEFT
async def test_names_and_schemas_of_others_are_text_and_spoilt_records_are_shown(
    server: Server, mesh: worqr.Mesh, site: Site
) -> None:
    schemas = [
        f'{{"type":"object","properties":{{"{FOREIGN}":{{"enum":["{FOREIGN}"]}},"y":{{"type":"string"}}}}}}',
        "[" * 3_000,
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}',
        '{"properties":3}',
    ]
    key = QueueKeys.of(mesh.prefix, "fulfil").job("order-7")
    async with mesh.connect():
        await mesh.queue("fulfil").dispatch(b"[]", id="order-7")
        with server.client() as client:
            client.hset(key, mapping={"state": "suspended", "life": "x", "saved_size": "-1", "error_message": FOREIGN})
            names = [f"{FOREIGN} {n}" for n in range(len(schemas))]
            client.hset(key, "open", msgspec.msgpack.encode(names))
            for name, schema in zip(names, schemas, strict=True):
                client.hset(key, f"wait:{name}", f"event 99999999999999999999 -\n{FOREIGN}\n{schema}")
            for name, value in (
                ("step:", b"\xff"),
                (f"step:{FOREIGN}", b"failed ["),
                ("end:x", b""),
                ("child:y", b"\xff\n"),
            ):
                client.hset(key, name, value)
            client.hset(key, f"child:{FOREIGN}", f"0 0 {mesh.prefix}:{{{FOREIGN}}}\n{FOREIGN}")
            client.hset(key, f"event:1:{FOREIGN}", b"json 1")
        page = await page_of(site)
        assert FOREIGN not in page
        assert page.count('action="/send"') == len(schemas)
        assert (await site.get("/api/v1/job", queue="fulfil", id="order-7")).status_code == 200
        fields = {**hidden_fields(page), "name": FOREIGN}
        refused = await site.post("/send", **fields, **{f"field.{FOREIGN}": "else"})
        assert (refused.status_code, FOREIGN in refused.text) == (400, False)
        sent = await site.post("/send", **fields, **{f"field.{FOREIGN}": FOREIGN})
        assert sent.headers["location"].endswith("done=sent-woke")
        log = (await site.get("/log")).text
        assert "&lt;b&gt;x&lt;/b&gt;, " in log
        assert FOREIGN not in log
