"""An agent that pays for each call, and whose worker is killed at each of them: every call is paid once.

``workflow_agent.py ask QUESTION`` runs the agent in a worker that kills itself (SIGKILL) after each paid call, before its result
can be stored. That is the worst moment: the next worker has to call again. The ledger of the provider, printed at the end, shows
that each call was asked for twice and paid once. It is kept in the file ``$LEDGER``, by default ``ledger.db``.
"""

import os
import signal
import sqlite3
import sys
from contextlib import closing

import trio

import worqr

mesh = worqr.Mesh(keepalive=1)  # a dead worker is noticed after a second, as we let many of them die
LEDGER = os.environ.get("LEDGER", "ledger.db")
TABLE = "CREATE TABLE IF NOT EXISTS calls (key TEXT PRIMARY KEY, prompt TEXT, cents INTEGER, asked INTEGER)"
PAY = "INSERT INTO calls VALUES (?, ?, 2, 1) ON CONFLICT (key) DO UPDATE SET asked = asked + 1 RETURNING asked"


def pay(prompt: str) -> None:
    """Stand for a provider: a request with a key that it knows gets the same answer, and costs nothing."""
    key = f"{worqr.current().address} {prompt}"  # the same in each run of this job, and in no other job
    with closing(sqlite3.connect(LEDGER, timeout=30)) as database, database:
        database.execute(TABLE)
        [(asked,)] = database.execute(PAY, (key, prompt)).fetchall()
    if asked == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@mesh.step
def think(question: str, notes: list[str]) -> str:
    pay(f"think, with {len(notes)} notes")
    return ["search: prices", "search: opinions", f"{question}: yes, by {len(notes)} sources"][len(notes)]


@mesh.step
def search(topic: str) -> str:
    pay(f"search {topic}")
    return f"a page about {topic}"


@mesh.workflow(name="agent", result_ttl=60)
def agent(question: str) -> str:
    notes: list[str] = []
    while (thought := think(question, notes)).startswith("search: "):
        notes.append(search(thought.removeprefix("search: ")))
    return thought


async def keep_a_worker() -> None:
    while True:
        ended = await trio.run_process([sys.executable, __file__, "work"], check=False)
        print("the worker has died:", signal.Signals(-ended.returncode).name, flush=True)


async def ask(question: str) -> None:
    async with mesh.connect(), trio.open_nursery() as nursery:
        job = await agent.dispatch(question)
        nursery.start_soon(keep_a_worker)
        print("the answer is", await job.result(timeout=120))
        nursery.cancel_scope.cancel()
    with closing(sqlite3.connect(LEDGER)) as database:
        for prompt, cents, asked in database.execute("SELECT prompt, cents, asked FROM calls ORDER BY rowid"):
            print(f"{prompt}: asked for {asked} times, paid {cents} cents")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work"]:
            mesh.run()
        case ["ask", question]:
            trio.run(ask, question)
        case _:
            sys.exit("usage: workflow_agent.py ask QUESTION")
