"""Drives the scripts by a bare client: one queue and its registry, requests numbered as the link numbers them, and the
state of the server as one value to compare.

Claims are predictable: the queue's last fence number is set far above the clock, so the first claim is `claim(1)`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import redis

import worqr.lua
from tests.support.leaks import Entry, dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops
from worqr.client.outbox_relay import Relay
from worqr.command import Command
from worqr.keys import MARKER, QueueKeys, RegistryKeys
from worqr.lua import Script, all_scripts
from worqr.lua.assembler import Assembler, library, transactions
from worqr.ops import Dispatched, StartReply
from worqr.records import RemoteError

T = TypeVar("T")

FENCE = 8_000_000_000_000_000
"""Above the clock in microseconds until the year 2223, below 2**53, and one that Lua's tostring would spoil."""
BOOM = RemoteError("Boom", "it broke", "line 1\nline 2")
TRIED = {"error_type": BOOM.type, "error_message": BOOM.message}
"""The error that a job keeps of a failed attempt."""
DIED = {"error_type": "Stalled", "error_message": "its worker died while it ran"}
PAST = 1_000_000_000_000
"""A time long ago, in ms."""
FUTURE = 7_000_000_000_000
"""One that no test will see."""
KEEPALIVE = 100_000
"""ms, like those of the lease: longer than a test can take, wherever it runs."""
LEASE = 60_000
HEARD_ALL = b"heard all"


ALL_BYTES = bytes(range(256))


def grown(task: bytes) -> bytes:
    """16 MiB in place of `ALL_BYTES`, else the same payload. As a parameter, they would stay in memory while all tests run."""
    return task * 65536 if task == ALL_BYTES else task


class Expires(NamedTuple):
    """The value of a key that expires by itself."""

    value: Any


def claim(n: int) -> int:
    """The `n`-th claim of a queue, from 1."""
    return FENCE + n


def reference(id: str) -> bytes:
    """The item that refers to the job `id`."""
    return MARKER + id.encode()


def policy(max_stalls: int = 3, keep_failed: int = 1000, *, on_failure: bool = False, **more: Any) -> dict[str, str]:
    """The options of a worker's handler in the queue, as `Desk.enter` stores them."""
    known = {"max_stalls": max_stalls, "keep_failed": keep_failed, "on_failure": int(on_failure), **more}
    return {name: str(value) for name, value in known.items()}


def record(task: str, dispatched: int, state: str = "waiting", **fields: Any) -> dict[str, str]:
    """The record of a job in `state`: `dispatched` is the fence number of its dispatch, and of its place in line."""
    known = {"task": task, "state": state, "first": dispatched, "last": dispatched, "queued": dispatched, **fields}
    return {name: str(value) for name, value in known.items()}


def remembered(task: str, claimed: int, **fields: Any) -> dict[str, str]:
    """The record of a raw task that became a job when `claimed` was given back."""
    failed = "failures" in fields or "timeouts" in fields
    error = TRIED if failed else DIED if "stalls" in fields else {}
    return record(task, claimed, **{"twin": digest(task), "started": 1, **error, **fields})


def digest(task: str) -> str:
    """By which the twins of a payload are found."""
    return hashlib.sha1(task.encode()).hexdigest()


def aside(
    task: str,
    id: str,
    *,
    reason: str,
    failures: int = 0,
    stalls: int = 0,
    timeouts: int = 0,
    error: RemoteError = BOOM,
    **kept: Any,
) -> dict[str, str]:
    """The record of a task that failed under A; `kept` has the fields of a job itself."""
    counters = {"failures": str(failures), "stalls": str(stalls), "timeouts": str(timeouts)}
    why = {"error_type": error.type, "error_message": error.message, "error_traceback": error.traceback}
    brought = {name: str(value) for name, value in kept.items()}
    return {"task": task, "id": id, "reason": reason, "worker": "A", **counters, **why, **brought}


def job(id: str | None, task: bytes = b"a", **options: Any) -> tuple[dict[str, Any], bytes]:
    """One job as dispatch_jobs takes it, due at PAST unless `options` say when."""
    when = {} if "delay" in options or "run_at" in options else {"run_at": PAST}
    return {**({} if id is None else {"id": id}), **when, **options}, task


def fields_of(entry: Any) -> dict[str, Any]:
    """A start's reply for a job, by name; bytes as text, except the payload and what is MessagePack."""
    assert isinstance(entry, list)
    names = [name.decode() for name in entry[::2]]
    assert len(names) == len(set(names))
    raw = {"task", "batch_ended", "job_ended", "open"}
    return {name: value if name in raw else value.decode() for name, value in zip(names, entry[1::2], strict=True)}


def payloads(entries: Sequence[Any]) -> list[bytes]:
    """A start's reply, without the jobs' own fields."""
    return [fields_of(entry)["task"] if isinstance(entry, list) else entry for entry in entries]


_FILES = [path.read_text("utf-8") for path in sorted(Path(worqr.lua.__file__).parent.glob("*.lua"))]
BODIES = {each.name: each.body for text in _FILES for each in transactions(text)}
_ALONE = Assembler(library(_FILES))


def alone(name: str) -> str:
    """The text of one transaction: its body and the functions that it needs, without those of others in its group."""
    return _ALONE.readable({name: BODIES[name]})


def part_of(text: str, name: str) -> str:
    """Of a script of several transactions: what they share, and what this one has. Any other script as it is."""
    common, *branches = re.split(r"^(?:else)?if transaction=='(\w+)' then\n", text, flags=re.MULTILINE)
    parts = dict(zip(branches[::2], branches[1::2], strict=True))
    return (
        common.removesuffix("local transaction=table.remove(ARGV)\n")
        + parts.get(name, "").partition("else\nreturn redis.err")[0]
    )


class Desk:
    """Where a test sits: `client`, `q` and `g` (the keys), and what it can do with them."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.prefix = prefix
        self.q = QueueKeys(prefix, "Q1")
        self.g = RegistryKeys(prefix)
        self.producer = "X"
        self.numbers: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        scripts = all_scripts()
        there = client.script_exists(*(script.sha for script in scripts))
        for script in (script for script, is_there in zip(scripts, there, strict=True) if not is_there):
            assert client.script_load(script.source) == script.sha

    # Sending

    def send(self, call: Command[Any], *, number: int | None = None, lowest: int | None = None) -> list[Any]:
        """The raw reply. Numbered calls count from 1 per base, each with itself as the lowest that is unanswered."""
        args = call.args
        if call.numbered:
            if number is None:
                number = self.numbers[call.base] = self.numbers.get(call.base, 0) + 1
            args = (self.producer, number, number if lowest is None else lowest, *args)
        script, keys = self.sent(call)
        reply: list[Any] = self.client.execute_command("EVALSHA", script.sha, len(keys), *keys, *args, *script.tail)
        return reply

    def sent(self, call: Command[Any]) -> tuple[Script, tuple[str, ...]]:
        """The script and the KEYS that are sent for a call."""
        return call.script, (call.base,)

    def call(self, call: Command[T]) -> T:
        """The value that `call` returns to its caller."""
        return call.read(self.send(call))

    async def deliver(self, keys: QueueKeys) -> None:
        """Deliver the messages in the outbox of a queue, as the leader does."""

        async def ask(call: Command[Any]) -> Any:
            return self.call(call)

        await Relay(ask, self.prefix).messages(keys)

    def resend(self, call: Command[Any]) -> list[Any]:
        """The raw reply to the last call's number once more."""
        return self.send(call, number=self.numbers[call.base])

    def late(self, call: Command[Any]) -> list[Any]:
        """The raw reply to a copy that comes when its number is below the lowest, for the first time."""
        skipped = self.numbers[call.base] = self.numbers.get(call.base, 0) + 1
        if call.base == self.q.base:
            self.call(ops.cancel_task(self.q, b"which nobody has"))
        else:
            self.call(ops.unmap_work(self.g, "nobody", "nothing"))
        return self.send(call, number=skipped)

    # Common steps

    def set_fence(self) -> None:
        self.client.hset(self.q.counts, "fence", FENCE)
        self.client.expire(self.q.counts, 1000)

    def commands_of(self, call: Command[Any]) -> list[str]:
        """Send a call, and return the commands of its script, as the server sees them."""
        found: list[str] = []
        with self.client.monitor() as monitor:
            self.send(call)
            self.client.echo(self.prefix)
            for line in monitor.listen():
                if line["command"] == f"ECHO {self.prefix}":
                    break
                if line["client_type"] == "lua":
                    found.append(line["command"])
        return found

    def touched_by(self, call: Command[Any]) -> set[str]:
        """Send a call, and return the keys of its commands without a space in their names, as the server sees them."""
        words = {word for command in self.commands_of(call) if command[:3] != "PUB" for word in command.split(" ")}
        return {word for word in words if re.fullmatch(rf"\{{?{self.prefix}\b[^\\@*]*", word)}

    def wipe(self) -> None:
        """Remove all keys, however many, at once."""
        with self.client.pipeline(transaction=False) as pipe:
            for key in self.all_keys():
                pipe.unlink(key)
            pipe.execute()

    def all_keys(self) -> list[bytes]:
        """Every key under the prefix."""
        return sorted(key for pattern in self.patterns for key in self.client.scan_iter(match=pattern, count=10_000))

    @property
    def patterns(self) -> tuple[str, str]:
        """That all keys of the prefix match."""
        return f"{self.prefix}:{{*", f"{{{self.prefix}}}:*"

    def put(self, *tasks: bytes, front: bool = False) -> None:
        assert self.call(ops.enqueue(self.q, tasks, front=front)) == len(tasks)

    def enter(
        self,
        *workers: str,
        max_stalls: int = 3,
        keep_failed: int = 1000,
        on_failure: bool = False,
        result_ttl_ms: int | None = None,
    ) -> None:
        for worker in workers:
            call = ops.start_work(
                *(self.q, worker),
                max_stalls=max_stalls,
                keep_failed=keep_failed,
                last=0,
                on_failure=on_failure,
                result_ttl_ms=result_ttl_ms,
            )
            self.call(call)

    def start(self, worker: str, wanted: int) -> StartReply:
        number = self.starts[worker] = self.starts.get(worker, 0) + 1
        return self.call(ops.start_tasks(self.q, worker, number, wanted))

    def take(self, worker: str, wanted: int) -> list[int]:
        """The claims of a start that must get as many as it wants."""
        started = self.start(worker, wanted)
        assert len(started.entries) == wanted
        return list(range(started.first, started.first + wanted))

    def hold(self, worker: str, *tasks: bytes) -> list[int]:
        """Claims of `worker` on new `tasks` (nothing else may wait)."""
        self.enter(worker)
        self.put(*tasks)
        return self.take(worker, len(tasks))

    def retry(self, worker: str, claimed: int, **options: Any) -> str:
        """retry_task with defaults for the arguments that do not matter."""
        return self.call(
            ops.retry_task(self.q, worker, claimed, BOOM, **{"counter": "failures", "limit": 10, **options})
        )

    def fail(self, worker: str, claimed: int, *, undecodable: bool = False) -> str:
        return self.call(ops.fail_task(self.q, worker, claimed, BOOM, undecodable=undecodable))

    def dispatch(self, id: str | None, task: bytes = b"a", **options: Any) -> Dispatched:
        """One job, due long ago unless `options` say when; `fields` as a record has them."""
        [done] = self.call(ops.dispatch_jobs(self.q, [job(id, task, **options)]))
        return done

    def run(self, worker: str, id: str, task: bytes = b"a", **options: Any) -> int:
        """The claim of `worker`, which then serves the queue, on a new job (nothing else may wait)."""
        self.enter(worker)
        assert self.dispatch(id, task, **options).outcome == "created"
        [held] = self.take(worker, 1)
        return held

    def run_id(self, worker: str) -> str:
        """The id of the job that `worker` is given, which then serves the queue."""
        self.enter(worker)
        [entry] = self.start(worker, 1).entries
        return str(fields_of(entry)["id"])

    def now(self) -> int:
        """The server's time, in ms."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def stall(self, *tasks: bytes, times: int = 2) -> None:
        """Enqueue `tasks`, whose workers then die that many times (nothing else may wait): 2 make suspects of them."""
        self.put(*tasks)
        for _ in range(times):
            for n in range(len(tasks)):
                self.enter(f"stalled{n}")
                self.take(f"stalled{n}", 1)
            for n in reversed(range(len(tasks))):
                self.call(ops.fail_worker(self.q, f"stalled{n}"))

    def register(self, *workers: str, queues: Sequence[str] = (), keepalive_ms: int = KEEPALIVE) -> None:
        for worker in workers:
            self.call(ops.start_worker(self.g, worker, keepalive_ms=keepalive_ms, facts=[("host", "h")]))
            for queue in queues:
                assert self.call(ops.map_work(self.g, worker, queue)) == "ok"

    def beat(
        self, worker: str, n: int = 1, *, keepalive_ms: int = KEEPALIVE, lease_ms: int = 0, standing: str = ""
    ) -> ops.Beat:
        call = ops.keep_worker_alive(
            *(self.g, worker, n), keepalive_ms=keepalive_ms, lease_ms=lease_ms, running=2, room=3, stale_lease=standing
        )
        return self.call(call)

    # Looking

    def waiting(self) -> list[bytes]:
        """Payloads in the order in which they will be taken, which must be as many as are counted."""
        count, tasks = self.call(ops.list_tasks(self.q, 10_000, from_front=True))
        assert count == len(tasks)
        return tasks

    def counts(self) -> dict[str, int]:
        return self.call(ops.inspect(self.q)).counts

    def state(self, *ignored: str) -> dict[str, Any]:
        """Every key under the prefix but the stored replies, short names, `Expires` where it does.

        Text is str, items of lists are bytes, sorted sets are lists. Left out: the fields that tell the time, the `tries` (which
        `tries` returns), and the keys that begin with one of `ignored`.
        """
        found: dict[str, Any] = {}
        for key, entry in dump(self.client, self.prefix).items():
            name = self.short(key.decode())
            if ":producer:" not in name and name != ":log" and not name.startswith(ignored):
                value = _told(name, entry)
                found[name] = Expires(value) if entry.expires else value
        return found

    def tries(self, key: str) -> list[list[Any]]:
        """The tries in a record: each is when (ms), for how many ms, the worker, why, and the error's type and message."""
        kept = self.client.hget(key, "tries")
        found: list[list[Any]] = [] if kept is None else msgspec.msgpack.decode(bytes(kept))
        return found

    def replies(self) -> dict[bytes, Entry]:
        """The stored replies, as they are."""
        return {key: entry for key, entry in dump(self.client, self.prefix).items() if b":producer:" in key}

    def log(self) -> list[dict[str, str]]:
        """The entries of the log of the mesh, without their empty fields."""
        entries: Any = self.client.xrange(self.g.log)
        told = [{_text(name): _text(value) for name, value in fields.items()} for _, fields in entries]
        return [{name: value for name, value in entry.items() if value} for entry in told]

    def short(self, key: str) -> str:
        """The key without its base; the list of the queue is called waiting."""
        for base in (self.q.base, self.g.base):
            if key.startswith(base):
                return key.removeprefix(base) or "waiting"
        return key

    # Expecting

    @contextmanager
    def nothing_changes(self) -> Iterator[None]:
        """No key is written, made or lost in the block."""
        before = self.state(), self.replies(), self.log()
        yield
        assert (self.state(), self.replies(), self.log()) == before

    @contextmanager
    def nothing_happens(self) -> Iterator[None]:
        """As `nothing_changes`, but replies may be stored in the block."""
        before = self.state(), self.log()
        yield
        assert (self.state(), self.log()) == before

    @contextmanager
    def listening(self, *channels: str) -> Iterator[list[tuple[str, bytes]]]:
        """Fills the list with (channel without its base, message), in their order, when the block ends."""
        heard: list[tuple[str, bytes]] = []
        with self.client.pubsub() as pubsub:
            pubsub.subscribe(self.prefix, *channels)
            for _ in range(len(channels) + 1):
                assert pubsub.get_message(timeout=PATIENCE)
            yield heard
            self.client.publish(self.prefix, HEARD_ALL)
            while message := pubsub.get_message(timeout=PATIENCE):
                if message["data"] == HEARD_ALL:
                    return
                heard.append((self.short(message["channel"].decode()), message["data"]))
            raise AssertionError("the last message did not come")


def _told(name: str, entry: Entry) -> Any:
    match entry.type:
        case "string":
            return _text(entry.value)
        case "set":
            return {_text(member) for member in entry.value}
        case "zset":
            return [_text(member) for member in entry.value]
        case "hash":
            fields = {_text(field): _text(value) for field, value in entry.value.items()}
            if name.startswith(":aside:"):
                assert fields.pop("at").isdigit()
            if name.startswith(":info:"):
                assert fields.pop("started", "0").isdigit()
            if name.startswith((":aside:", ":job:", ":active:")):
                fields.pop("tries", None)
            return fields
        case _:
            return entry.value


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def desk_on(server: Server, prefix: str) -> Iterator[Desk]:
    """A `Desk` for a fixture; afterwards no key is left."""
    with server.client() as client:
        desk = Desk(client, prefix)
        desk.set_fence()
        yield desk
        desk.wipe()
