"""docs/reference/conformance.json: requests of clients and their replies, which ``python -m tools.conformance`` records anew.

Any client can replay the file. A case begins on an empty database. Each step sends a script or a command, and has its reply.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
import redis

from tools.pages import DOCS
from worqr.embedded import EmbeddedServer
from worqr.lua import script

PATH: Final = DOCS / "reference" / "conformance.json"
QUEUE: Final = "worqr:{Q1}"
RANDOM: Final = "0123456789abcdef0123456789abcdef"
Step = dict[str, Any]


def numbered(name: str, number: int, *args: object) -> Step:
    """A request of the producer P, whose earlier requests have their replies."""
    return {"script": name, "key": QUEUE, "args": ["P", f"{number}", f"{number}", *map(_argument, args)]}


def read(name: str, *args: str) -> Step:
    return {"script": name, "key": QUEUE, "args": [*args]}


def command(*words: str) -> Step:
    return {"command": [*words]}


def _argument(value: object) -> object:
    """Options are MessagePack, which the file has in base64, and as what they mean."""
    if isinstance(value, dict):
        return {"base64": base64.b64encode(msgspec.msgpack.encode(value)).decode(), "msgpack": value}
    return value


def _dispatch(number: int, task: str, **options: object) -> Step:
    return numbered("dispatch_jobs", number, "0", options, task)


def _result(id: str, *fields: str) -> Step:
    return command("HSET", f"{QUEUE}:result:{id}", "first", "1", "last", "1", *fields)


CASES: Final[dict[str, list[Step]]] = {
    "tasks are stored in their order": [
        numbered("enqueue", 1, "-1", "0", "a", "b"),
        numbered("enqueue", 2, "-1", "1", "c"),
        command("LRANGE", QUEUE, "0", "-1"),
    ],
    "a request that is sent again is done once": [
        numbered("enqueue", 1, "-1", "0", "a"),
        numbered("enqueue", 1, "-1", "0", "a"),
        command("LLEN", QUEUE),
    ],
    "a request below the lowest number is not done": [
        numbered("enqueue", 2, "-1", "0", "a"),
        numbered("enqueue", 1, "-1", "0", "b"),
        command("LRANGE", QUEUE, "0", "-1"),
    ],
    "a full queue stores nothing, and its answer is kept": [
        numbered("enqueue", 1, "1", "0", "a"),
        numbered("enqueue", 2, "1", "0", "b"),
        command("DEL", QUEUE),
        numbered("enqueue", 2, "1", "0", "b"),
        numbered("enqueue", 3, "1", "0", "b"),
        command("LRANGE", QUEUE, "0", "-1"),
    ],
    "a job with an id is created, changed and refused": [
        _dispatch(1, "a", id="x"),
        _dispatch(1, "a", id="x"),
        _dispatch(2, "b", id="x"),
        _dispatch(3, "c", id="x", exists="raise"),
        _dispatch(4, "c", id="x", exists="skip"),
        command("HMGET", f"{QUEUE}:job:x", "state", "task"),
        command("LRANGE", QUEUE, "0", "-1"),
    ],
    "a job without an id gets one": [_dispatch(1, "a", random=RANDOM), command("LLEN", QUEUE)],
    "a job is scheduled": [
        _dispatch(1, "a", id="x", run_at=7000000000000),
        command("ZCOUNT", f"{QUEUE}:due", "7000000000000", "7000000000000"),
        read("job_status", "0", "x"),
        command("LLEN", QUEUE),
    ],
    "options become fields of the record": [
        _dispatch(
            1,
            "a",
            id="x",
            lane="l",
            tags="t\nu",
            meta='{"by":"ada"}',
            fields={"timeout": "5000", "result_ttl": "60000"},
        ),
        command("HMGET", f"{QUEUE}:job:x", "lane", "tags", "meta", "timeout", "result_ttl"),
    ],
    "an option that does not exist stores nothing": [
        _dispatch(1, "a", id="x", delays=1),
        command("EXISTS", f"{QUEUE}:job:x"),
    ],
    "the state of a job": [
        read("job_status", "0", "x"),
        _dispatch(1, "a", id="x"),
        read("job_status", "0", "x"),
        read("read_result", "0", "x"),
    ],
    "the results of jobs": [
        _result("x", "outcome", "finished", "kind", "json", "value", "7"),
        _result(
            "y", "outcome", "failed", "error_type", "ValueError", "error_message", "no", "error_traceback", "line 1"
        ),
        _result("z", "outcome", "cancelled", "reason", "why"),
        *(read("read_result", "0", each) for each in "xyz"),
        read("job_status", "0", "x"),
        read("read_result", "2", "x"),
        read("read_result", "0", "unknown"),
    ],
    "a job is cancelled": [
        _dispatch(1, "a", id="x"),
        numbered("cancel_job", 2, "x", "why"),
        numbered("cancel_job", 2, "x", "why"),
        numbered("cancel_job", 3, "x", "why"),
        command("LLEN", QUEUE),
        command("EXISTS", f"{QUEUE}:job:x"),
    ],
}


def recorded(client: redis.Redis, forget: Callable[[], object]) -> dict[str, Any]:
    """Return the content of the file. `forget` empties the database."""
    cases: list[dict[str, Any]] = []
    for name, steps in CASES.items():
        forget()
        cases.append({"case": name, "steps": [{**step, "reply": reply_to(client, step)} for step in steps]})
    forget()
    return {"wire_version": 1, "cases": cases}


def reply_to(client: redis.Redis, step: Step) -> Any:
    """Send one step, and return its reply as the file has it."""
    try:
        if "command" in step:
            return shown(client.execute_command(*step["command"]))
        args = [base64.b64decode(each["base64"]) if isinstance(each, dict) else each for each in step["args"]]
        return shown(client.eval(script(step["script"]).source, 1, step["key"], *args))
    except redis.ResponseError:
        return {"error": True}


def shown(value: Any) -> Any:
    """A reply without what differs from run to run: numbers that are made of the time, and generated ids."""
    if isinstance(value, list):
        return [shown(each) for each in value]
    text = value.decode() if isinstance(value, bytes) else value
    if re.fullmatch(r"@\d{16}-\w+", str(text)):
        return {"matches": r"^@\d{16}-" + str(text).partition("-")[2] + "$"}
    if re.fullmatch(r"1\d{12}|1\d{15}", str(text)):
        return {"matches": rf"^\d{{{len(str(text))}}}$"}
    return text


def main() -> None:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        PATH.write_text(f"{json.dumps(recorded(client, client.flushall), indent=1)}\n", "utf-8")


if __name__ == "__main__":
    main()
