"""Functions of a batch that run in worker processes. They write what they see into a file."""

from __future__ import annotations

import os

import worqr

mesh = worqr.Mesh(prefix=os.environ.get("WORQR_TEST_PREFIX", "worqr"))


@mesh.task(runs_in="process")
def count_down(n: int, path: str) -> None:
    """Note the batch of the run, and add one more job to it while `n` is more than 0."""
    ref, batch = worqr.current().batch, mesh.current_batch()
    assert ref is not None
    assert batch is not None
    with open(path, "a") as file:
        file.write(f"{n} {ref.queue} {ref.id}\n")
    if n:
        worqr.sync(batch.dispatch, count_down.call(n - 1, path))


@mesh.task(runs_in="process", result_ttl=60)
def done(path: str) -> str:
    """Return what the follow-up is told of the batch."""
    ended = worqr.current().ended_batch
    assert ended is not None
    assert mesh.current_batch() is None
    return f"{ended.id} {ended.jobs} {ended.finished}"
