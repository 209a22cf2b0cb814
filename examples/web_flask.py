"""Flask on gunicorn: every worker process is a web server and a worker, whose Trio loop runs in a thread of its own.

``gunicorn -c examples/web_gunicorn.py web_flask:app``; the configuration starts and stops the peers.
"""

import time

from flask import Flask, abort, request

import worqr

mesh = worqr.Mesh(app="web", patience=10)
peer = mesh.join_in_thread(concurrency=10, grace=2)  # nothing starts yet
app = Flask(__name__)


@mesh.task(name="web.report", result_ttl=600)
def report(name: str, pages: int) -> str:
    for page in range(1, pages + 1):
        time.sleep(0.1)
        worqr.current().check_cancelled()
        worqr.current().progress(page / pages, f"page {page} of {pages}")
    return f"{name}, {pages} pages"


@app.post("/reports/<name>")
def order(name: str) -> tuple[dict[str, str | None], int]:
    job = worqr.sync(report.options(id=name).dispatch, name, request.args.get("pages", 10, int))
    return {"id": job.id, "outcome": job.outcome}, 202


@app.get("/reports/<name>")
def look(name: str) -> dict[str, str | None]:
    status = worqr.sync(report.job(name).status)
    return {"state": status.state, "worker": status.worker, "message": status.message}


@app.get("/reports/<name>/text")
def fetch(name: str) -> dict[str, str]:
    try:
        return {"text": worqr.sync(report.job(name).result, timeout=request.args.get("wait", 0, float))}
    except worqr.NoResult:
        abort(404, "never ordered, or forgotten")
    except worqr.ResultTimeout:
        abort(409, "not finished yet")
    except worqr.JobCancelled as cancelled:
        abort(410, f"cancelled: {cancelled.reason}")


@app.delete("/reports/<name>")
def cancel(name: str) -> dict[str, int]:
    count = worqr.sync(report.job(name).cancel, reason="cancelled by the user", wait=10)
    return {"removed": count.waiting, "stopped": count.acknowledged}


@app.get("/health")
def health() -> dict[str, int]:
    health = peer.health()
    if not health.ready:
        abort(503, health.why)
    return {"running": health.running, "room": health.room}
