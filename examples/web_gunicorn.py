"""The configuration of gunicorn for web_flask.py: each worker process starts a peer of its own, and stops it when it ends.

With ``--preload`` the application is imported once, before the workers are forked; this file works unchanged.
"""

from pathlib import Path
from typing import Any

pythonpath = str(Path(__file__).parent)
workers = 2
threads = 8
graceful_timeout = 30  # seconds until a worker is killed; its peer's grace is less


def post_worker_init(worker: Any) -> None:
    from web_flask import peer

    peer.start()


def worker_exit(server: Any, worker: Any) -> None:
    from web_flask import peer

    peer.stop()
