"""The programs and commands in docs/howto run as they stand there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reading import read_pages
from tests.support.leaks import delete_all
from tests.support.servers import Server
from tools.pages import DOCS, Process, blocks_of

test_the_page_does_what_it_says = read_pages("howto")

KILLED_BEFORE_THE_RETRY = """
import os, signal, articles, worqr

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

worqr.Retry = kill
articles.mesh.run()
"""


class Approvals:
    """The recipe of an approval, in a folder of its own, as an application has it."""

    def __init__(self, folder: Path, url: str) -> None:
        for block in blocks_of(DOCS / "howto" / "resume.md"):
            if block.section == "Wait for an event" and block.title.endswith(".py"):
                (folder / block.title).write_text(block.code, "utf-8")
        self._folder = folder
        self._environment = {**os.environ, "WORQR_URL": url, "PYTHONUNBUFFERED": "1"}
        self._programs: list[Process] = []

    def start(self, *arguments: str) -> Process:
        process = Process([sys.executable, *arguments], self._folder, self._environment)
        self._programs.append(process)
        return process

    def run(self, *arguments: str) -> None:
        process = self.start(*arguments)
        assert process.ended() == 0, process.output

    def start_worker(self) -> Process:
        return self.start("-m", "worqr", "run", "articles:mesh")

    def close(self) -> None:
        for process in self._programs:
            process.close()


@pytest.fixture
def approvals(server: Server, tmp_path: Path) -> Iterator[Approvals]:
    with server.client() as client:
        delete_all(client, "worqr")
        found = Approvals(tmp_path, server.tcp_url)
        yield found
        found.close()
        delete_all(client, "worqr")


def test_an_article_is_not_published_by_runs_before_the_decision(approvals: Approvals) -> None:
    worker = approvals.start_worker()
    approvals.run("start.py")
    worker.wait_for(["no decision yet"])
    for _ in range(2):
        approvals.run("-m", "worqr", "run-now", "articles.publish", "article-7")
    worker.wait_for(["no decision yet"] * 3)
    assert "published" not in worker.output and worker.output.count("asking") == 1
    approvals.run("editor.py")
    worker.wait_for(["published"])


def test_an_article_is_not_published_because_a_worker_died(approvals: Approvals) -> None:
    approvals.run("start.py")
    killed = approvals.start("-c", KILLED_BEFORE_THE_RETRY)
    assert killed.ended() != 0
    assert "no decision yet" in killed.output
    successor = approvals.start_worker()
    successor.wait_for(["no decision yet"])
    approvals.run("editor.py")
    successor.wait_for(["published"])
    assert successor.output.index("no decision yet") < successor.output.index("published")
    assert "asking" not in successor.output
