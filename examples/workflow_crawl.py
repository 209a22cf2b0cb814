"""A crawl as a workflow: each page is a job, the workflow starts the jobs of a level together and uses their results.

``workflow_crawl.py work`` is a worker; start as many as you like. ``workflow_crawl.py crawl URL [PAGES]`` reads at most PAGES
pages of that site, and prints how many each level had. At most four pages are read at once, by all workers together.
"""

import re
import sys
from urllib.error import HTTPError
from urllib.parse import urldefrag, urljoin, urlsplit
from urllib.request import urlopen

import trio

import worqr

mesh = worqr.Mesh()


@mesh.task(name="crawl.links_of", limit=worqr.Limit(concurrency=4), timeout=30, retry=worqr.RetryPolicy(max_failures=3))
def links_of(url: str) -> list[str] | None:
    """Return at most 50 links of a page to its own site; None if there is no such page: that is a result, no failure."""
    try:
        with urlopen(url, timeout=10) as page:
            text = page.read(1_000_000).decode("utf-8", "replace")
    except HTTPError as error:
        if error.code < 500:
            return None
        raise
    links = dict.fromkeys(urldefrag(urljoin(url, link)).url for link in re.findall(r'href="([^"]+)"', text))
    return [link for link in links if urlsplit(link)[:2] == urlsplit(url)[:2]][:50]


@mesh.workflow(name="crawl", result_ttl=60)
async def crawl(start: str, pages: int) -> list[str]:
    seen = {start: None}  # a dict keeps its order; that of a set differs between processes, and so would the cut below
    level, report = [start], list[str]()
    while level:
        found = await worqr.gather(*(links_of.run(url) for url in level))
        missing = found.count(None)
        report.append(f"level {len(report)}: {len(level) - missing} pages" + f", {missing} missing" * bool(missing))
        new = dict.fromkeys(link for links in found for link in links or () if link not in seen)
        level = list(new)[: max(0, pages - len(seen))]
        seen |= dict.fromkeys(level)
    return [*report, f"{len(seen)} addresses"]


async def main(start: str, pages: int) -> None:
    async with mesh.connect():
        job = await crawl.dispatch(start, pages)
        print(*await job.result(timeout=300), sep="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work"]:
            mesh.run()
        case ["crawl", url, *pages] if len(pages) <= 1:
            trio.run(main, url, int(*pages or ["50"]))
        case _:
            sys.exit("usage: workflow_crawl.py work | crawl URL [PAGES]")
