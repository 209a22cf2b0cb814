"""A producer that uses redis-py without worqr: the same two commands work from any client in any language."""

import os
import sys

import redis

QUEUE = "worqr:{greetings}"

with redis.Redis.from_url(os.environ.get("WORQR_URL", "redis://localhost:6379/0")) as server:
    for name in sys.argv[1:]:
        server.lpush(QUEUE, name)
        server.publish(QUEUE, "1")
