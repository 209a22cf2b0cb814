"""The pictures of the dashboard in its guide: ``python -m tools.dashboard_pictures docs/assets``. It takes two minutes.

The demo shop runs on a server of its own with real workers, after three days of history that are made up. Chromium takes the
pictures. They look best with the font Inter as the sans-serif of the system (Debian: ``fonts-inter``).

Needs playwright and pillow, and ``/usr/bin/chromium`` or ``CHROMIUM``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import trio

import worqr
from worqr.cli.demo.shop_dashboard import WORKER, feed, make_mesh, prepare
from worqr.cli.demo.worker_processes import start_workers
from worqr.dashboard import standalone
from worqr.embedded import open_embedded
from worqr.history_records import (
    COUNTERS,
    MINUTE_RECORDS,
    RECORD_BYTES,
    RUN_BUCKETS,
    RUN_FIELDS,
    RUN_SUM,
    TEN_MINUTE_RECORDS,
    WAIT_BUCKETS,
    WAIT_FIELDS,
    WAIT_SUM,
    Record,
    encode_record,
)
from worqr.keys import QueueKeys

PORT: Final = 19390
CHROMIUM: Final = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDTH, SCALE = 1280, 1.5
LIVES: Final = 90.0
"""Seconds for which the shop runs before the pictures: some payments have failed three times by then."""
DAYS: Final = 3
FAILED: Final = "/queue?name=payments.charge&tab=failed"


@dataclass(frozen=True, slots=True)
class Past:
    """What a queue did: tasks a minute, the shares of them that were retried and that failed, and how long runs took."""

    per_minute: float
    retried: float = 0.0
    failed: float = 0.0
    seconds: float = 0.3


PASTS: Final = {
    "mail.send": Past(420, failed=0.01),
    "payments.charge": Past(140, retried=0.5, failed=0.05, seconds=0.7),
    "images.resize": Past(45, seconds=3),
    "reports.build": Past(5, seconds=35),
    "geo.locate": Past(105, seconds=0.2),
    "catalog.sync": Past(42, seconds=3.5),
    "stock.count": Past(4, seconds=0.5),
}


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: its page, or the selector of the link to it on that page; its theme, and its height in CSS pixels. The page is
    opened again and again until it has an element `with_`.
    """

    name: str
    path: str
    height: int
    theme: str = "light"
    link: str = ""
    with_: str = ""


SHOTS: Final = (
    Shot("overview", "/", 1000),
    Shot("queue", "/queue?name=payments.charge", 860),
    Shot("queues", "/queues", 660, "dark"),
    Shot("failed", "/failed?count=errors", 620),
    Shot("job", FAILED, 860, "dark", "#tasks ~ .table a.id"),
    Shot("running", "/running", 760, "dark"),
    Shot("batches", "/batches?queue=prices.publish", 620, with_="tr:has(.busy) progress:not([value='0.000'])"),
)


def records_of(past: Past, dice: random.Random) -> Iterator[tuple[Record, Counter[str]]]:
    """Yield a record for each minute, the oldest first, with all totals until then."""
    now, totals = int(time.time()) // 60 * 60, Counter[str]()
    for minute in range(-DAYS * 1440, 0):
        hour = (now + minute * 60) % 86400 / 3600
        wave = 1 + 0.35 * math.sin((hour - 9) / 24 * 2 * math.pi) + dice.uniform(-0.12, 0.12)
        slow = 2.2 if -24 <= minute < -15 else 1.0  # the bank was slow, so tasks waited
        tasks = round(past.per_minute * wave)
        totals.update(enqueued=tasks, claimed=tasks, finished=round(tasks * (1 - past.failed)))
        totals.update(retried=round(tasks * past.retried * slow), failed=round(tasks * past.failed * slow))
        for _ in range(min(tasks, 40)):
            took = dice.gammavariate(4, past.seconds * slow / 4) * 1000
            totals[RUN_FIELDS[min(RUN_BUCKETS - 1, max(0, math.ceil(math.log2(max(took, 1)))))]] += max(tasks // 40, 1)
            totals[RUN_SUM] += round(took) * max(tasks // 40, 1)
            waited = dice.expovariate(1 / (20 * slow**4))
            bucket = min(WAIT_BUCKETS - 1, max(0, math.ceil(math.log(max(waited, 1), 4))))
            totals[WAIT_FIELDS[bucket]] += max(tasks // 40, 1)
            totals[WAIT_SUM] += round(waited) * max(tasks // 40, 1)
        waiting = round(tasks * (slow - 1) * (minute + 25) / 4) if slow > 1 else 0
        running = min(8, round(past.per_minute / 60 * past.seconds * slow + dice.random()))
        yield (
            Record(
                at_ms=(now + minute * 60) * 1000,
                since=0,
                workers=4,
                age_ms=waiting * 300,
                gauges=(waiting, 0, running, totals["failed"] % 50),
                totals=tuple(totals[name] for name in (*COUNTERS, RUN_SUM, WAIT_SUM)),
                runs=tuple(totals[name] for name in RUN_FIELDS),
                waits=tuple(totals[name] for name in WAIT_FIELDS),
            ),
            totals,
        )


async def write_past(mesh: worqr.Mesh[Any], client: Any) -> None:
    """Store the history of the queues, and totals that continue it."""
    dice = random.Random(7)
    for name, past in PASTS.items():
        keys, totals = QueueKeys.of(mesh.prefix, name), Counter[str]()
        minutes, tens = bytearray(RECORD_BYTES * MINUTE_RECORDS), bytearray(RECORD_BYTES * TEN_MINUTE_RECORDS)
        for record, until_then in records_of(past, dice):
            totals = until_then
            for ring, step, size in ((minutes, 1, MINUTE_RECORDS), (tens, 10, TEN_MINUTE_RECORDS)):
                start = record.minute // step % size * RECORD_BYTES
                ring[start : start + RECORD_BYTES] = encode_record(record)
        client.set(keys.history, bytes(minutes), ex=86400)
        client.set(keys.history10, bytes(tens), ex=86400)
        client.hset(keys.counts, mapping={name: totals[name] for name in COUNTERS if totals[name]})
        ran = {name: totals[name] for name in (*RUN_FIELDS, RUN_SUM, *WAIT_FIELDS, WAIT_SUM)}
        client.hset(keys.runs, mapping={**{name: n for name, n in ran.items() if n}, "ok": totals["finished"]})


def take_pictures(address: str, folder: Path) -> None:
    """Write all pictures."""
    sync_playwright = import_module("playwright.sync_api").sync_playwright
    base = f"http://127.0.0.1:{PORT}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        visitor = browser.new_context()
        visitor.new_page().goto(address)
        cookies = visitor.storage_state()
        for shot in SHOTS:
            context = browser.new_context(
                viewport={"width": WIDTH, "height": shot.height},
                device_scale_factor=SCALE,
                color_scheme=shot.theme,
                storage_state=cookies,
            )
            page = context.new_page()
            page.goto(base + shot.path, wait_until="domcontentloaded")
            if shot.link:
                page.goto(base + page.get_attribute(shot.link, "href"), wait_until="domcontentloaded")
            page.wait_for_timeout(8000)  # the leader reads the queues twice, so that rates are known
            while shot.with_ and not page.query_selector(shot.with_):
                page.goto(base + shot.path, wait_until="load")
            page.evaluate("document.getElementById('moved').remove()")
            write_small(page.screenshot(), folder / f"dashboard-{shot.name}.png")
            context.close()
        browser.close()


def write_small(picture: bytes, path: Path) -> None:
    """Write a picture with at most 256 colours."""
    image = import_module("PIL.Image")
    image.open(BytesIO(picture)).convert("RGB").quantize(256, method=2, dither=0).save(path, optimize=True)
    print(path)


async def run(folder: Path) -> None:
    """Run the shop, and take the pictures."""
    async with open_embedded() as server:
        mesh = make_mesh(server.url, "shop")
        await write_past(mesh, import_module("redis").Redis.from_url(server.url))
        settings = standalone.Settings(port=PORT)
        app, address = standalone.build(mesh, settings)
        async with mesh.connect(), start_workers(server.url, 4, WORKER), trio.open_nursery() as nursery:
            await prepare(mesh)
            nursery.start_soon(feed, mesh)
            await nursery.start(standalone.serve, app, settings)
            await trio.sleep(LIVES)
            await trio.to_thread.run_sync(take_pictures, address, folder)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    trio.run(run, parser.parse_args().folder)
