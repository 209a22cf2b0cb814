"""``worqr demo --dashboard``: the shop on a private server, with real workers, behind the dashboard."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable

import trio

import worqr
from worqr.cli.demo.worker_processes import start_workers, wait_for_end_of_stdin
from worqr.dashboard import standalone
from worqr.dashboard.standalone import App
from worqr.embedded import open_embedded

# The mesh that ``worqr demo --dashboard`` shows: a shop with several queues, failures, progress and schedules.
#
# Run as ``python -m worqr.cli.demo.shop_dashboard URL NAME``, it is one worker of the shop, until its standard input ends.
# `feed` enqueues the work.


CONCURRENCY = 8
GRACE = 1.0
APP = "shop"
CITIES = ("Reykjavik", "Wellington", "Montevideo", "Yokohama", "Marrakesh", "Tromsø")
SHOPS = ("acme", "globex", "initech", "umbrella")
PAUSED = "newsletter"
UNSERVED = "legacy.export"


class PaymentRefused(Exception):
    """The bank has refused a payment. The demo raises it at random."""

    __module__ = "shop"  # a worker runs this file as `__main__`


class AddressUnknown(Exception):
    """A mail has no valid address. The demo raises it at random."""

    __module__ = "shop"


def make_mesh(url: str, name: str) -> worqr.Mesh:
    """Return the mesh of the shop with its functions."""
    mesh = worqr.Mesh(url, app=name)
    soon = worqr.RetryPolicy(max_failures=3, min_backoff=2, max_backoff=20)

    @mesh.task(name="mail.send", retry=soon)
    async def send(to: str, subject: str) -> None:
        await trio.sleep(random.expovariate(4))
        if random.random() < 0.01:
            raise worqr.Failure(f"no mailbox at {to}") from AddressUnknown(to)

    @mesh.task(name="payments.charge", retry=soon)
    async def charge(order: int, amount: float, card_number: str) -> None:
        await trio.sleep(random.uniform(0.2, 1.2))
        if random.random() < 0.4:
            raise PaymentRefused(f"order {order}: the bank refused {amount:.2f} EUR")

    @mesh.task(name="images.resize", concurrency=3)
    async def resize(file: str, width: int) -> None:
        for step in range(20):
            worqr.current().progress(step / 20, f"{file}: row {step * width // 20} of {width}")
            await trio.sleep(random.uniform(0.05, 0.25))

    @mesh.task(name="reports.build", result_ttl=600, concurrency=2, timeout=300)
    async def build(month: str, city: str) -> str:
        for page in range(60):
            worqr.current().progress(page / 60, f"{city}, page {page + 1} of 60")
            await trio.sleep(random.uniform(0.3, 0.9))
        return f"{month} in {city}"

    _declare_schedules(mesh)
    _declare_limited(mesh)
    _declare_batched(mesh)
    return mesh


def _declare_schedules(mesh: worqr.Mesh) -> None:
    @mesh.every(15)
    @mesh.task(name="stock.count")
    async def count_stock() -> None:
        await trio.sleep(0.5)

    @mesh.every(6 * 3600)
    @mesh.task(name="day.close")
    async def close_day() -> None:
        await trio.sleep(2)


def _declare_limited(mesh: worqr.Mesh) -> None:
    """Declare the functions that have a limit, or lanes."""

    @mesh.task(name="geo.locate", limit=worqr.Limit(rate=2))
    async def locate(address: str) -> None:
        await trio.sleep(random.uniform(0.1, 0.3))

    @mesh.task(name="catalog.sync", lanes=worqr.Lanes("shop", limit=worqr.Limit(1), weights={"acme": 3}))
    async def sync(shop: str, page: int) -> None:
        await trio.sleep(random.uniform(2, 5))


def _declare_batched(mesh: worqr.Mesh) -> None:
    """Declare the functions of the batches: new prices for the products of a shop, which are published when all are there."""

    @mesh.task(name="prices.update", concurrency=4)
    async def update(shop: str, product: int) -> None:
        await trio.sleep(random.uniform(0.2, 1.0))
        if random.random() < 0.01:
            raise worqr.Failure(f"{shop} has no product {product}")

    @mesh.task(name="prices.publish")
    async def publish(shop: str) -> None:
        await trio.sleep(1)

    @mesh.task(name="prices.correct")
    async def correct(shop: str) -> None:
        await trio.sleep(1)


async def prepare(mesh: worqr.Mesh) -> None:
    """Enqueue what is there from the beginning: paused, unserved and scheduled work, and payloads that cannot be decoded."""
    await mesh.queue(PAUSED).pause("the layout is wrong, Ada repairs it")
    letters = [b'{"to": "user%d@example.org", "token": "s3cret-%d"}' % (n, n) for n in range(1200)]
    await mesh.queue(PAUSED).enqueue(*letters)
    await mesh.queue("catalog.sync").pause("their server is down", duration=3600, lane=SHOPS[2])
    await mesh.queue(UNSERVED).enqueue(*[b'{"table": "orders_%d"}' % year for year in range(2014, 2022)])
    await mesh.queue("mail.send").enqueue(b"\x00\x01 this is no JSON", b'{"subject": "nobody to send it to"}')
    for number, city in enumerate(CITIES):
        report = f'{{"month": "2026-12", "city": "{city}"}}'.encode()
        later = 3600 * (number + 1)
        await mesh.queue("reports.build").dispatch(report, id=f"report-2026-12-{city.lower()}", delay=later)


async def sync(mesh: worqr.Mesh, shop: str, page: int) -> None:
    """Dispatch the synchronisation of one page of a shop's catalogue, in the lane of the shop."""
    task = f'{{"shop": "{shop}", "page": {page}}}'.encode()
    await mesh.queue("catalog.sync").dispatch(task, id=f"{shop}-{page}", lane=shop)


async def update_prices(mesh: worqr.Mesh, shop: str, number: int) -> None:
    """Dispatch a batch of price updates. Its follow-up publishes the prices, or corrects the products that failed."""
    publish, correct = mesh.call("prices.publish", shop=shop), mesh.call("prices.correct", shop=shop)
    async with mesh.batch(
        id=f"prices-{shop}-{number}", then=publish, otherwise=correct, meta={"shop": shop}, keep=3600
    ) as batch:
        await batch.dispatch_many([mesh.call("prices.update", shop=shop, product=n) for n in range(40)])


async def feed(mesh: worqr.Mesh) -> None:
    """Enqueue work for ever, at a rate that rises and falls."""
    mail, charge = mesh.queue("mail.send"), mesh.queue("payments.charge")
    order = 1000
    while True:
        order += 1
        number = random.randint(1, 12) if order % 40 < 25 else 1
        await mail.enqueue(
            *[b'{"to": "user%d@example.org", "subject": "Order %d"}' % (n, order) for n in range(number)]
        )
        card = b"4242-%04d" % random.randrange(10_000)
        payment = b'{"order": %d, "amount": %d.5, "card_number": "%s"}' % (order, random.randint(5, 300), card)
        await charge.dispatch(payment, id=f"order-{order}")
        if order % 3 == 0:
            picture = b'{"file": "photo-%d.jpg", "width": 1600}' % order
            await mesh.queue("images.resize").dispatch(picture, id=f"photo-{order}")
        if order % 3 == 1:
            await sync(mesh, random.choices(SHOPS, (6, 3, 2, 1))[0], order)
        if order % 25 == 1:
            await update_prices(mesh, random.choice(SHOPS), order)
        if order % 20 == 1:
            places = [b'{"address": "%d Harbour Road"}' % n for n in range(15)]
            await mesh.queue("geo.locate").enqueue(*places)
            city = random.choice(CITIES)
            report = f'{{"month": "2026-11", "city": "{city}"}}'.encode()
            await mesh.queue("reports.build").dispatch(report, id=f"report-2026-11-{city.lower()}", if_exists="skip")
        await trio.sleep(random.uniform(0.2, 0.6))


async def run_worker(url: str, name: str) -> None:
    """Join, serve, and stop when the standard input ends. `name` only tells the processes apart, in the list of the system."""
    stop = trio.Event()
    threading.Thread(target=wait_for_end_of_stdin, args=(stop, trio.lowlevel.current_trio_token()), daemon=True).start()
    async with make_mesh(url, APP).join(concurrency=CONCURRENCY, grace=GRACE) as peer:
        await stop.wait()
        await peer.drain()


if __name__ == "__main__":
    trio.run(run_worker, sys.argv[1], sys.argv[2])


WORKER: str = "worqr.cli.demo.shop_dashboard"


async def run_shop(workers: int, port: int, tell: Callable[[str], None]) -> None:
    """Run the shop and its dashboard until Ctrl-C.

    Args:
        workers: the number of worker processes.
        port: the port of the dashboard on 127.0.0.1.
        tell: called with the address, when it can be opened.
    """
    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())
    async with open_embedded() as server:
        mesh = make_mesh(server.url, "shop")
        settings = standalone.Settings(port=port)
        app, address = standalone.build(mesh, settings)
        async with mesh.connect(), start_workers(server.url, workers, WORKER) as processes:
            await prepare(mesh)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed, mesh)
                await nursery.start(_serve_until_stopped, app, settings, nursery.cancel_scope)
                tell(address)
            await processes.stop()


async def _serve_until_stopped(
    app: App,
    settings: standalone.Settings,
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Serve; when the user stops the dashboard, end everything else."""
    await standalone.serve(app, settings, task_status=task_status)
    everything.cancel()
