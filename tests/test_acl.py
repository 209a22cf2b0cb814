"""The users of docs/reference/permissions.md: each may do what its role does, no part of its rules is idle, and what a user may
not do is told.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import trio

import worqr
from tests.ops.batches import TOKEN
from tests.ops.driver import FUTURE, PAST, Desk, part_of
from tests.ops.scene import AFAR, CALLS, NO_SCENE, SCATTERED, Scene, member_of, next_call, reset_scene, set_scene
from tests.ops.schedules import declared
from tests.peer.tools import QUICK, eventually, serving, until
from tests.support.clusters import cluster_of
from tests.support.leaks import Entry, dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from tests.test_keys import in_batches, in_lanes, makers, plain
from tests.test_lua import WRITES
from worqr import ops
from worqr.command import Command
from worqr.cron import Definition
from worqr.keys import MARKER, LimitKeys, QueueKeys, RegistryKeys
from worqr.lua import Script, all_scripts, script
from worqr.metrics.fleet import FleetReader
from worqr.ops import OutboxMessage
from worqr.validation import is_coroutine_function

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "permissions.md"
SECRET = "s3cret/w0rd"
QUOTED = "s3cret%2Fw0rd"
EVERYTHING = "worqr"
"""The user who may do all that worqr does."""

OPERATORS_ONLY = {
    *(
        "pause",
        "resume",
        "set_limits",
        "set_lane",
        "list_lanes",
        "cancel_lane",
        "pause_schedule",
        "override_schedule",
        "delete_queue",
        "cancel_all",
        "list_running",
        "list_workers",
    ),
    *("list_jobs", "read_job", "read_payload", "cancel_claims", "promote_jobs", "count_errors", "read_snapshot"),
    *("list_events", "read_history", "read_runs", "list_ended", "find_task"),
    *("list_aside", "find_aside", "retry_aside", "drop_aside", "drop_shards"),
    *("ask_worker", "list_batches", "list_policies", "list_outboxes", "drop_topics"),
    *("list_limits", "look_at_limit"),
    *("list_kept", "list_tagged", "cancel_tagged", "forget_tagged", "drop_kept_jobs", "run_again"),
}
RELAY_SCRIPTS = {
    *("take_outbox", "drop_outbox", "report_part", "cancel_part", "put_follow_up", "keep_follow_ups"),
    *("store_end", "cancel_child", "look_for_child"),
}
"""What the relay of messages between queues sends."""
SCHEDULER = {
    *("store_schedule", "unstore_schedule", "read_schedules", "index_schedule", "unindex_schedule", "page_schedules"),
    *("read_outcomes", "survey_schedules", "lease_prefix"),
}
"""What the calls about stored schedules send."""
SCRIPTS = {
    "producer": {
        *(
            "enqueue",
            "enqueue_traced",
            "dispatch_jobs",
            "cancel_job",
            "cancel_task",
            "list_marks",
            "job_status",
            "read_result",
            "send_event",
        ),
        *("note_queues", "list_shards", "hold_follow_ups", "shorten_sent", "read_topics"),
        *("take_permits", "renew_permits", "return_permit", "note_limit"),
        *("open_batch", "open_part", "seal_batch", "close_part", "cancel_batch", "read_batch", "read_part"),
        *RELAY_SCRIPTS,
    },
    "peer": {each.name for each in all_scripts()} - OPERATORS_ONLY - {"find_claims"} | {"drop_topics"},
    "operator": {
        *OPERATORS_ONLY,
        *("cancel_job", "cancel_task", "list_marks", "job_status", "read_result", "note_queues", "note_event"),
        *(
            "list_tasks",
            "list_queues",
            "inspect",
            "list_schedules",
            "purge_queue",
            "list_shards",
            "declare_shards",
            "read_topics",
        ),
        *SCHEDULER,
        *("cancel_batch", "read_batch", "read_part", "send_event", "end_wait", "rewind_job", *RELAY_SCRIPTS),
    },
    "viewer": {
        *(
            "list_queues",
            "inspect",
            "list_tasks",
            "list_jobs",
            "list_kept",
            "list_tagged",
            "list_running",
            "read_job",
            "read_payload",
            "job_status",
        ),
        "list_lanes",
        *("read_result", "list_aside", "count_errors", "list_workers", "list_schedules", "list_shards"),
        *("page_schedules", "read_outcomes", "survey_schedules"),
        *("read_snapshot", "list_events", "read_history", "read_runs", "list_ended", "find_task"),
        *("list_batches", "read_batch", "read_part", "list_policies", "list_outboxes", "read_topics"),
        *("list_limits", "look_at_limit"),
    },
}
"""What the programs of each role send."""

BESIDE = {"evalsha", "script|exists", "script|load", "client|setname", "info", "ping", "subscribe", "unsubscribe"}
"""What a link sends beside its scripts, and, outside of them, nothing else."""


# The lines of the page


def all_lines() -> dict[str, list[str]]:
    """User -> the rules that the page gives it."""
    found: dict[str, list[str]] = {}
    for code in re.findall(r"```bash\n(redis-cli ACL SETUSER .*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        words = shlex.split(code.replace("\\\n", " "))
        assert words[:3] == ["redis-cli", "ACL", "SETUSER"]
        found[words[3]] = words[4:]
    return found


def lines() -> dict[str, list[str]]:
    """User -> the rules that the page gives it; without the user who may do everything."""
    return {user: rules for user, rules in all_lines().items() if user != EVERYTHING}


ROLES = ("producer", "peer", "operator", "viewer")


def commands_in(rules: list[str]) -> set[str]:
    return {command for rule in rules for command in re.findall(r"\+([\w|]+)", rule)}


def patterns_in(rules: list[str]) -> list[str]:
    return [pattern for rule in rules for pattern in re.findall(r"[%RW]*~[^ )]+|&[^ )]+", rule)]


def without(rules: list[str], item: str) -> list[str]:
    """The rules but for one command (``+get``) or pattern, wherever it stands."""
    alone = rf"(?<![^ (]){re.escape(item)}(?![^ )])"
    return [left for rule in rules if (left := re.sub(alone, "", rule)).strip()]


class Users:
    """Users of one test, on its server and under its prefix."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.client = server.client()
        self._made: set[str] = set()

    def grant(self, role: str, rules: list[str] | None = None) -> str:
        """Make the user anew, as the page says or by these rules; answers a URL."""
        name = f"{self.prefix}-{role}"
        for_us = [
            rule.replace("worqr:", f"{self.prefix}:")
            .replace("{worqr}", f"{{{self.prefix}}}")
            .replace(">secret", f">{SECRET}")
            for rule in (lines()[role] if rules is None else rules)
        ]
        self.client.execute_command("ACL", "SETUSER", name, *for_us)
        self._made.add(name)
        return self.server.tcp_url.replace("redis://", f"redis://{name}:{QUOTED}@").removesuffix("/0")

    def change(self, role: str, *rules: str) -> None:
        self.client.execute_command("ACL", "SETUSER", f"{self.prefix}-{role}", *rules)

    def cut(self, role: str) -> None:
        """End all connections of a user."""
        self.client.execute_command("CLIENT", "KILL", "USER", f"{self.prefix}-{role}")

    def mesh(self, role: str, **settings: Any) -> worqr.Mesh:
        return worqr.Mesh(self.grant(role), **{"prefix": self.prefix, "patience": PATIENCE, **settings})

    def by_hand(self, role: str) -> redis.Redis:
        return self.server.client(username=f"{self.prefix}-{role}", password=SECRET, driver_info=None)

    def denied(self) -> list[tuple[str, str, str]]:
        """What our users were refused: role, reason and object. Sees what scripts swallow, too."""
        mine = (entry for entry in self.client.acl_log() if str(entry["username"]).startswith(f"{self.prefix}-"))
        return sorted((str(e["username"]).removeprefix(f"{self.prefix}-"), e["reason"], e["object"]) for e in mine)

    def close(self) -> None:
        for name in self._made:
            self.client.execute_command("ACL", "DELUSER", name)


@pytest.fixture
def users(server: Server, prefix: str) -> Iterator[Users]:
    """`Users`. Nothing that they were refused may be left unmentioned: see `denied`."""
    made = Users(server, prefix)
    made.client.execute_command("ACL", "LOG", "RESET")
    yield made
    made.close()


# Which commands there are


def reachable(source: str) -> set[str]:
    """The commands that a script can come to: of its body, and of the shared functions that are called from there."""
    parts = re.split(r"^(?=(?:local )?function [\w.]+\()|(?<=^end\n)", source, flags=re.MULTILINE)
    functions = {
        name[1]: part for part in parts if (name := re.match(r"(?:local function |function shared\.)(\w+)\(", part))
    }
    todo, seen, found = ["\n".join(part for part in parts if part not in functions.values())], set[str](), set[str]()
    while todo:
        body = todo.pop()
        for first, other, after in re.findall(
            r"redis\.p?call\((?:\w+ and )?'([A-Z_]+)'(?: or '([A-Z_]+)')?(?:, '([A-Z]+)')?", body
        ):
            found |= {f"{first}|{after}"} if first == "PUBSUB" else {first, other} - {""}
        assert len(re.findall(r"redis\.p?call\(", body)) == len(re.findall(r"redis\.p?call\((?:\w+ and )?'[A-Z]", body))
        called = set(re.findall(r"\b(\w+)\(", body)) & functions.keys() - seen
        seen |= called
        todo += [functions[name] for name in called]
    return {command.lower() for command in found}


NEVER = {"operator": {"rpush"}}
"""What a script of a role shares with others and cannot come to here: an operator puts tasks to the back."""


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_commands_of_its_scripts_and_no_other(role: str) -> None:
    needed = set().union(*(reachable(part_of(script(name).text, name)) for name in SCRIPTS[role]))
    beside = BESIDE - {"script|load"} if role == "viewer" else BESIDE
    assert commands_in(lines()[role]) == needed - NEVER.get(role, set()) | beside


def test_the_user_for_everything_has_the_commands_of_all_roles_and_no_other() -> None:
    more = {"select", "wait"} | on_a_cluster()
    assert commands_in(all_lines()[EVERYTHING]) == set().union(*(commands_in(lines()[role]) for role in ROLES)) | more


def test_a_connection_that_may_not_ask_loads_as_much_as_the_page_says() -> None:
    [megabytes] = re.findall(r"every connection loads all scripts again, ([\d.]+) MB", PAGE.read_text("utf-8"))
    size = sum(map(len, {each.source for each in all_scripts()})) / 1e6
    assert abs(size - float(megabytes)) < 0.05, size


def test_no_role_has_a_command_that_reaches_beyond_its_keys() -> None:
    everything = set().union(*(commands_in(rules) for rules in all_lines().values()))
    assert not everything & {
        "eval",
        "keys",
        "scan",
        "randomkey",
        "dbsize",
        "flushall",
        "flushdb",
        "config",
        "script",
        "client",
        "function",
        "acl",
    }
    for rules in all_lines().values():
        assert rules[0] == "reset"
        assert not [rule for rule in rules if rule.startswith(("+@", "allkeys", "allchannels", "~*", "&*"))]


# Scripts


def seated(users: Users) -> Desk:
    return Desk(users.client, users.prefix)


def more_calls(q: QueueKeys, g: RegistryKeys, scene: Scene) -> dict[str, list[Command[Any]]]:
    """What the calls of the scene leave out: the other side of an option."""
    kept, other, failures = (
        {"result_ttl": "60000"},
        QueueKeys(q.prefix, "Q2"),
        QueueKeys(q.prefix, q.queue, failures=True),
    )
    shard = QueueKeys(q.prefix, q.queue, tag="1")
    its_failures = QueueKeys(q.prefix, q.queue, failures=True, tag="1")
    return {
        "enqueue": [ops.enqueue(q, [b"f", MARKER], front=True, max_length=1000), ops.enqueue(shard, [b"x"])],
        "dispatch_jobs": [
            ops.dispatch_jobs(q, [({"id": "new2", "front": True, "unique_for": 60_000, "fields": kept}, b"")]),
            ops.dispatch_jobs(q, [({"id": "due", "delay": 60_000, "max_length": 1000, "fields": kept}, b"")]),
            ops.dispatch_jobs(q, [({"id": "done", "delay": 60_000}, b"")]),
            ops.dispatch_jobs(q, [({"id": "overdue", "exists": "cancel", "workflow": True}, b"")]),
            ops.dispatch_jobs(other, [({"delay": 60_000}, b"")]),
            ops.dispatch_jobs(q, [({"id": "again", "batch": {**member_of(other), "token": AFAR, "number": 2}}, b"")]),
        ],
        "cancel_job": [ops.cancel_job(q, job, "why") for job in ("waits", "due", "done", "suspended")],
        "send_event": [ops.send_event(q, job, "a", b"none ") for job in ("done", "flows", "lost", "runs", "nobody")],
        "end_wait": [ops.end_wait(q, job, "a") for job in ("done", "flows", "lost", "suspended", "nobody")],
        "rewind_job": [ops.rewind_job(q, job, "a") for job in ("done", "flows", "lost", "suspended", "nobody")],
        "cancel_task": [ops.cancel_task(q, b"stale"), ops.cancel_task(q, b"marked")],
        "job_status": [ops.job_status(q, job, 0) for job in ("waits", "done", f"@{scene.undecodable}", "nobody")],
        "read_result": [ops.read_result(q, job, 0) for job in ("done", "nobody")],
        "list_queues": [ops.list_queues(g, after) for after in ((b"%d" % PAST, b"old"), (b"1", b"nobody"))],
        "list_aside": [ops.list_aside(q, "undecodable", 9, after=1, after_ms=1)],
        "pause_schedule": [ops.pause_schedule(g, "s", paused=False)],
        "ask_worker": [ops.ask_worker(g, "A", "", "5"), ops.ask_worker(g, "nobody", "drain", "")],
        "override_schedule": [ops.override_schedule(g, "s", b"")],
        "list_events": [ops.list_events(g, 9, "0")],
        "list_workers": [ops.list_workers(g, last="A")],
        "tick_schedules": [ops.tick_schedules(g)],
        "list_due_schedules": [ops.list_due_schedules(g, 0)],
        "fail_worker": [ops.fail_worker(q, "C", 99)],
        "stop_work": [ops.stop_work(q, "A", 99)],
        "finish_tasks": [ops.finish_tasks(q, "A", [scene.member])],
        "cancel_part": [
            ops.cancel_part(q, SCATTERED, 1, q.base, "open", "60000", "why"),
            ops.cancel_part(q, TOKEN, 1, q.base, "last", "60000", "why"),
        ],
        "close_part": [ops.close_part(q, AFAR, 1, other.base, "afar", "60000")],
        "drop_outbox": [
            ops.drop_outbox(
                q,
                [
                    OutboxMessage(
                        b"report " + AFAR.encode(),
                        msgspec.msgpack.encode(["report", other.base, "afar", AFAR, q.base, "1", "1", "1 1 0 0 0 0"]),
                        *("report", ()),
                    )
                ],
            )
        ],
        "read_batch": [ops.read_batch(q, "last")],
        "list_jobs": [
            *(ops.list_jobs(q, "due", after=f"{FUTURE} due"), ops.list_jobs(q, "due", after="1 gone")),
            *(ops.list_jobs(q, "blocked"), ops.list_jobs(shard, "waiting")),
        ],
        "list_tasks": [ops.list_tasks(keys, 9) for keys in (failures, shard, its_failures)],
    }


def play(desk: Desk, scene: Scene, name: str, client: redis.Redis) -> None:
    """Send every call of one script through `client`; a refusal is for the server's ACL LOG to tell."""
    reset_scene(desk, scene)
    for call in [next_call(desk, scene, name), *more_calls(desk.q, desk.g, scene).get(name, ())]:
        own, desk.client = desk.client, client
        try:
            desk.send(call)
        except redis.ResponseError as error:
            if not re.search("permission|executing the script|the user may not: ", str(error)):
                raise
        finally:
            desk.client = own


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.leaves("*")
def test_the_rights_of_a_role_are_enough_for_its_scripts(users: Users, role: str) -> None:
    desk = seated(users)
    scene = set_scene(desk)
    users.grant(role)
    client = users.by_hand(role)
    for name in sorted(SCRIPTS[role]):
        play(desk, scene, name, client)
        assert users.denied() == [], name


IDLE = {
    "+ping": "subscriptions try their connection by it",
    "+subscribe": "see the stories",
    "+unsubscribe": "see the stories",
    "+client|setname": "for people; nothing fails without it",
    "+info": "the server's version; nothing fails without it",
    "+script|exists": "without it every connection loads every script",
    "+script|load": "the desk had them loaded",
}


@pytest.mark.one_server
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.leaves("*")
def test_no_right_of_a_role_is_idle(users: Users, role: str) -> None:
    desk = seated(users)
    scene = set_scene(desk)
    rules = lines()[role]
    users.grant(role)
    reaches = {name: reachable(part_of(script(name).text, name)) for name in SCRIPTS[role]}
    idle = []
    for item in [*(f"+{command}" for command in sorted(commands_in(rules))), *patterns_in(rules)]:
        users.grant(role, without(rules, item))
        client = users.by_hand(role)
        for name in sorted(SCRIPTS[role], key=lambda name: item[1:] not in reaches[name]):
            if item[1:] in reaches[name] or not item.startswith("+") or item == "+evalsha":
                play(desk, scene, name, client)
                if users.denied():
                    break
        else:
            idle.append(item)
        users.client.execute_command("ACL", "LOG", "RESET")
        client.close()
    known = IDLE.keys() - (set() if role == "producer" else {"+info"})  # the others look at the memory
    if (
        role == "viewer"
    ):  # it may not load scripts; the channels are for events and results, which it hears and never sends
        known = known - {"+script|load"} | {"&worqr:{*"}
    if "%R~{worqr}:moved" in rules:
        known = known | {"%R~{worqr}:moved"}  # read on a server that the mesh has left
    assert set(idle) == known


# Stories: programs as applications write them, each with the rights of its role alone


class Hands:
    """A handler whose tasks say what becomes of them."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def __call__(self, task: bytes) -> bytes:
        self.seen.append(task)
        if task == b"hold":
            worqr.current().progress(0.5, "half")
            await trio.sleep_forever()
        if task == b"again" and not worqr.current().failures:
            raise worqr.Retry(delay=0)
        if task in (b"fail", b"later"):
            raise worqr.Failure("on purpose")
        if task == b"nonsense":
            raise worqr.Undecodable("cannot be read")
        if task == b"steps" and await worqr.step("half", lambda: "done") == "done" and not worqr.current().failures:
            await worqr.current().save(b"state")
            raise worqr.Retry(delay=0)
        if task == b"steps":
            return worqr.current().saved or b"nothing"
        return b"did " + task

    async def saw(self, task: bytes, times: int = 1) -> None:
        await until(lambda: self.seen.count(task) >= times, what=f"{task!r} in {self.seen}")


async def produce(mesh: worqr.Mesh, hands: Hands) -> None:
    """All that a producer does; Q1 is served, Q2 is not."""
    q, idle = mesh.queue("Q1"), mesh.queue("Q2")
    assert await q.enqueue(b"a", b"b") == 2
    assert await q.enqueue(MARKER + b"c", front=True) == 1
    await hands.saw(MARKER + b"c")
    assert await idle.enqueue(b"u", unique=True, max_length=2) == 1
    with pytest.raises(worqr.Duplicate):
        await idle.enqueue(b"u", unique=True)
    with pytest.raises(worqr.QueueFull):
        await idle.enqueue(b"x", b"y", max_length=2)
    await idle.enqueue(b"raw")
    assert (await idle.cancel(b"raw")).waiting == 1

    for _ in range(2):  # the second result retires the first
        job = await q.dispatch(b"x", id="x", result_ttl=60)
        assert await job.result(timeout=PATIENCE) == b"did x"
    assert (await job.status()).state == "finished"
    due = await idle.dispatch(b"x", id="due", delay=60, unique_for=60)
    assert (await due.status()).state == "scheduled"
    assert (await idle.dispatch(b"y", id="due", delay=90, update=worqr.Update(run_at="if_later"))).outcome == "updated"
    assert (await idle.dispatch(b"y", id="due", if_exists="skip")).outcome == "unchanged"
    assert (await idle.dispatch(b"y", id="due", front=True)).outcome == "updated"
    assert (await due.cancel()).waiting == 1
    failing = await q.dispatch(b"fail", result_ttl=60)
    with pytest.raises(worqr.JobFailed):
        await failing.result(timeout=PATIENCE)
    unkept = await q.dispatch(b"fail")
    await eventually(lambda: state_of(unkept), "failed")

    job = await q.dispatch(b"hold", id="held")
    await hands.saw(b"hold")
    assert (await q.dispatch(b"hold", id="held")).outcome == "blocked"
    async with job.watch() as states:
        assert (await anext(states)).state == "active"
    count = await job.cancel(reason="enough", wait=PATIENCE)
    assert (count.waiting, count.running, count.acknowledged) == (1, 1, 1)
    await q.enqueue(b"hold")
    await hands.saw(b"hold", 2)
    assert (await q.cancel(b"hold", wait=PATIENCE)).acknowledged == 1

    async with mesh.batch(queue="Q2", then=mesh.call("Q1", b"next")) as batch:
        await batch.dispatch(mesh.call("Q1", b"x"))
        await batch.dispatch(mesh.call("Q1", b"y"))
    assert (await batch.wait(PATIENCE)).succeeded
    await hands.saw(b"next")
    async with mesh.batch(on_failed="cancel") as batch:
        await batch.dispatch(mesh.call("Q2", b"x"))
        async with mesh.batch(parent=batch) as inner:
            await inner.dispatch(mesh.call("Q2", b"y"))
    assert (await batch.info()).pending == 2
    assert await batch.cancel()
    assert (await batch.wait(PATIENCE)).failed + (await inner.wait(PATIENCE)).cancelled == 2

    job = await q.dispatch(b"steps", result_ttl=60)
    assert await job.result(timeout=PATIENCE) == b"state"
    lanes = mesh.queue("lanes")  # served, with a limit
    made = [await lanes.dispatch(b"l", lane=f"{n % 2}", max_length=1, wait=PATIENCE, result_ttl=60) for n in range(6)]
    assert {await job.result(timeout=PATIENCE) for job in made} == {b"did l"}
    wide = mesh.queue("wide")  # a worker has declared its shards
    assert await wide.enqueue(b"a", b"b", b"c", b"d") == 4
    await wide.dispatch(b"x", id="x", delay=60)
    assert (await wide.job("x").cancel()).waiting == 1
    assert (await wide.cancel(b"c")).waiting == 1
    await trio.to_thread.run_sync(partial(produce_in_a_thread, mesh))


def produce_in_a_thread(mesh: worqr.Mesh) -> None:
    assert worqr.sync(mesh.queue("Q1").enqueue, b"t") == 1
    assert worqr.sync(worqr.sync(mesh.queue("Q1").dispatch, b"t", result_ttl=60).result, timeout=PATIENCE) == b"did t"
    mesh.close()


async def state_of(job: worqr.Job[bytes]) -> str:
    return (await job.status()).state


@pytest.mark.leaves("*")
async def test_a_producer_and_a_peer_have_the_rights_for_their_day(users: Users) -> None:
    """The peer leads, too: it sweeps a worker that died, adopts one that stands in no registry, promotes, and fires."""
    desk = seated(users)
    peers, producer = users.mesh("peer"), users.mesh("producer")
    desk.register("dead", queues=["Q1"])
    desk.hold("dead", b"x", b"y")
    desk.client.delete(desk.g.worker("dead"))
    desk.hold("unknown", b"z")
    fired, failures, hands = trio.Event(), list[worqr.Failed](), Hands()
    peers.every(0.25, peers.call("ticks", b""), name="s")
    policy = worqr.RetryPolicy(min_backoff=0.05, max_failures=3)
    desk.client.hset(desk.g.shards, "wide", 3)
    async with serving(peers, "Q1", hands, retry=policy, on_failure=failures.append) as peer, producer.connect():
        await hands.saw(b"x")
        await hands.saw(b"z")
        async with trio.open_nursery() as nursery:
            await nursery.start(peer.serve, "ticks", lambda task: trio.from_thread.run_sync(fired.set))
            one = worqr.Limit(1)
            await nursery.start(partial(peer.serve, "lanes", hands, limit=worqr.Limit(2), lanes=worqr.Lanes(limit=one)))
            await produce(producer, hands)
            await producer.queue("Q1").dispatch(b"promoted", delay=0.2)
            await producer.queue("Q1").enqueue(b"again", b"nonsense")
            await hands.saw(b"promoted")
            await hands.saw(b"again", 2)
            await until(lambda: len(failures) >= 2)
            await until(fired.is_set)
            await eventually(lambda: trio.to_thread.run_sync(desk.client.exists, desk.g.work_map("dead")), 0)
            await producer.queue("Q1").enqueue(b"hold")
            await hands.saw(b"hold", 3)
            nursery.cancel_scope.cancel()  # leaves "ticks"
    # and has given the task that it held back
    assert b"hold" in desk.waiting()
    assert users.denied() == []


@pytest.mark.leaves("*")
async def test_an_operator_has_the_rights_for_his_day(users: Users) -> None:
    peers, hands = users.mesh("peer"), Hands()
    peers.every(3600, peers.call("ticks", b""), name="s")
    async with serving(peers, "Q1", hands, retry=QUICK, on_failure=fail_too):
        mesh = users.mesh("operator")
        async with mesh.connect():
            await operate(mesh, peers, hands, "Q1")
    assert users.denied() == []


async def fail_too(failed: worqr.Failed) -> None:
    raise worqr.Failure("nor can this be done")


async def operate(mesh: worqr.Mesh, peers: worqr.Mesh, hands: Hands, name: str) -> None:
    q, theirs = mesh.queue(name), peers.queue(name)
    await q.pause("lunch")
    await theirs.enqueue(b"a", b"b")
    await theirs.dispatch(b"c", id="c")
    assert (await q.info()).paused == "lunch"
    assert await q.count() == 3
    assert await q.peek() == b"a"
    assert await q.tasks() == [b"c", b"b", b"a"]
    assert (await q.job("c").status()).state == "waiting"
    assert (await q.cancel(b"a")).waiting == 1
    assert (await q.job("c").cancel()).waiting == 1
    await theirs.dispatch(b"d", id="d", delay=60)
    assert [task.id for task in await q.jobs(state="scheduled")] == ["d"]
    assert await q.run_now("d") == 1
    assert (await q.read("d", payload=True)).task == b"d"
    assert (await mesh.find("d"))[name].state == "waiting"
    assert len((await q.history(600)).points) == len((await q.history()).points) == 60
    await q.delete()
    async with q.events() as events:
        await q.resume()
        await theirs.enqueue(b"fail", b"fail", b"nonsense", b"hold")
        await hands.saw(b"hold")
        assert (await anext(events)).queue == name
    await eventually(lambda: states_of(q), ["active"])
    (running,) = await q.running()
    assert await q.payload(claim=running.claim) == b"hold"
    assert (await q.cancel_claims(str(running.claim), wait=PATIENCE)).acknowledged == 1
    await theirs.enqueue(b"hold")
    await hands.saw(b"hold", 2)
    assert q.name in {info.name for info in await mesh.queues()}
    assert len(await mesh.workers()) == 1
    assert [schedule.name for schedule in await mesh.schedules()] == ["s"]
    await mesh.pause_schedule("s")
    await mesh.override_schedule("s", "0 4 * * *")
    await mesh.override_schedule("s", None)
    await eventually(lambda: listed(q.failed), 2)
    assert [failed.reason for failed in await q.undecodable.list()] == ["undecodable"]
    assert await q.failed.errors() == {"worqr.Failure": 2}
    [one, two] = await q.failed.list()
    assert await q.failed.retry(one.id) == 1
    await hands.saw(b"fail", 3)
    assert await q.failed.drop(two.id) == 1
    await eventually(lambda: listed(q.failed), 1)
    await eventually(lambda: listed(q.failures.failed), 4)  # the two, the one once more, and what was broken
    assert await q.failures.failed.retry_all(limit=1) == 1
    assert await q.failures.failed.drop_all() >= 3
    assert await q.undecodable.retry_all() == 1
    assert await q.failed.drop_all(error="Failure") == 1
    async with peers.batch() as batch:
        await batch.dispatch(peers.call(name, b"fail"))
    assert (await q.batch(batch.id).wait(PATIENCE)).failed == 1
    assert await q.batch(batch.id).retry_failed() == 1
    async with peers.batch(queue=name) as batch:
        await batch.dispatch(peers.call("broad", b"a"))
    assert await q.batch(batch.id).cancel()
    assert len(await q.batches()) == 2
    count = await q.cancel_all(reason="night", wait=PATIENCE)
    assert count.acknowledged == count.running >= 1
    await q.failures.pause()
    await q.failures.delete()
    await q.failures.resume()
    broad = mesh.queue("broad", shards=3)
    await peers.queue("broad", shards=3).enqueue(b"a", b"b", b"c")
    assert await broad.count() == 3
    await broad.pause()
    await broad.delete()
    assert await broad.count() == 0


CALL = worqr.Mesh("redis://localhost").call("Q1", b"x")
LINE = '{"name":"report/c","queue":"Q1","times":{"every_ms":3600000}}'
INTERNAL = {"reopen", "entry"}
"""Of a batch: what its parts of the client call."""
READS: dict[type, dict[str, Callable[[Any], Any]]] = {
    worqr.Mesh: {
        "find": lambda mesh: mesh.find("waits"),
        "info": lambda mesh: mesh.info(),
        "log": lambda mesh: mesh.log(),
        "queues": lambda mesh: mesh.queues(),
        "schedules": lambda mesh: mesh.schedules(),
        "export_schedules": lambda mesh: mesh.export_schedules(),
        "limits": lambda mesh: mesh.limits(),
        "topics": lambda mesh: mesh.topics(),
        "workers": lambda mesh: mesh.workers(),
    },
    worqr.Queue: {
        "count_tagged": lambda queue: queue.count_tagged("red"),
        "count": lambda queue: queue.count(),
        "info": lambda queue: queue.info(),
        "jobs": lambda queue: queue.jobs(state="scheduled"),
        "payload": lambda queue: queue.payload("waits"),
        "peek": lambda queue: queue.peek(),
        "history": lambda queue: queue.history(),
        "recent": lambda queue: queue.recent(),
        "lanes": lambda queue: queue.lanes(),
        "batches": lambda queue: queue.batches(),
        "find": lambda queue: queue.find(b"raw"),
        "read": lambda queue: queue.read("runs", payload=True),
        "running": lambda queue: queue.running(),
        "tasks": lambda queue: queue.tasks(),
    },
    worqr.DeadLetters: {
        "count": lambda aside: aside.count(),
        "errors": lambda aside: aside.errors(),
        "list": lambda aside: aside.list(),
    },
    worqr.Job: {"result": lambda job: job.result(), "status": lambda job: job.status()},
    worqr.Batch: {
        "info": lambda queue: queue.batch("open").info(),
        "wait": lambda queue: queue.batch("old").wait(),
        "result": lambda queue: queue.batch("old").result(),
    },
}
"""The calls that only read, all of them: see `ACTS`."""
ACTS: dict[type, dict[str, Callable[[Any], Any]]] = {
    worqr.Mesh: {
        "dispatch_many": lambda mesh: mesh.dispatch_many([mesh.call("Q1", b"x")]),
        "enqueue_many": lambda mesh: mesh.enqueue_many([mesh.call("Q1", b"x")]),
        "evict": lambda mesh: mesh.evict("A"),
        "forget_tagged": lambda mesh: mesh.forget_tagged("red"),
        "pause_schedule": lambda mesh: mesh.pause_schedule("s"),
        "publish": lambda mesh: mesh.publish("order.paid", 1),
        "unsubscribe": lambda mesh: mesh.unsubscribe("Q1"),
        "ask_worker": lambda mesh: mesh.ask_worker("A", "quiet"),
        "run_schedule": lambda mesh: mesh.run_schedule("s"),
        "override_schedule": lambda mesh: mesh.override_schedule("s", None),
        "schedule": lambda mesh: mesh.schedule("report/a", CALL, every=3600),
        "import_schedules": lambda mesh: mesh.import_schedules([LINE]),
        "schedules_apply": lambda mesh: mesh.schedules_apply("report/", [("report/b", CALL, {"every": 3600})]),
        "send": lambda mesh: mesh.send("Q1~1~waits", "approved", 1),
    },
    worqr.Queue: {
        "cancel": lambda queue: queue.cancel(b"x"),
        "cancel_all": lambda queue: queue.cancel_all(),
        "cancel_claims": lambda queue: queue.cancel_claims("1"),
        "delete": lambda queue: queue.delete(),
        "dispatch": lambda queue: queue.dispatch(b"x"),
        "enqueue": lambda queue: queue.enqueue(b"x"),
        "pause": lambda queue: queue.pause(),
        "resume": lambda queue: queue.resume(),
        "set_limit": lambda queue: queue.set_limit(worqr.Limit(5)),
        "set_weight": lambda queue: queue.set_weight("gold", 5),
        "cancel_lane": lambda queue: queue.cancel_lane("gold"),
        "cancel_tagged": lambda queue: queue.cancel_tagged("red"),
        "forget": lambda queue: queue.forget("1"),
        "forget_tagged": lambda queue: queue.forget_tagged("red"),
        "retry_tagged": lambda queue: queue.retry_tagged("red"),
        "run_again": lambda queue: queue.run_again("1"),
        "clear_limit": lambda queue: queue.clear_limit(),
        "run_now": lambda queue: queue.run_now("due"),
    },
    worqr.DeadLetters: {
        "drop": lambda aside: aside.drop("lost"),
        "drop_all": lambda aside: aside.drop_all(),
        "retry": lambda aside: aside.retry("lost"),
        "retry_all": lambda aside: aside.retry_all(),
    },
    worqr.Job: {
        "cancel": lambda job: job.cancel(),
        "send": lambda job: job.send("approved", 1),
        "end_wait": lambda job: job.end_wait("approved #1"),
        "rewind": lambda job: job.rewind("approved #1"),
    },
    worqr.Batch: {
        "cancel": lambda queue: queue.batch("open").cancel(),
        "dispatch": lambda queue: queue.batch("open").dispatch(CALL),
        "dispatch_many": lambda queue: queue.batch("open").dispatch_many([CALL]),
        "retry_failed": lambda queue: queue.batch("ended").retry_failed(),
    },
}
"""The calls that change something."""


@pytest.mark.parametrize("of", READS, ids=lambda of: of.__name__)
def test_each_call_is_one_that_reads_or_one_that_acts(of: type) -> None:
    calls = {name for name in dir(of) if not name.startswith("_") and is_coroutine_function(getattr(of, name))}
    assert calls - READS[of].keys() - ACTS[of].keys() - {"history"} - INTERNAL == set()
    assert READS[of].keys() | ACTS[of].keys() <= calls


@pytest.mark.leaves("*")
async def test_a_viewer_reads_everything_and_changes_nothing(users: Users) -> None:
    desk = seated(users)
    set_scene(desk)
    declared(desk)
    desk.call(ops.declare_topics(desk.g, "Q1", b"{}", ["order.paid"]))
    desk.call(ops.note_limit(desk.g, "Q1", "tokens"))
    desk.call(ops.take_permits(LimitKeys(desk.prefix, "Q1"), "1 9/60000", ["held"], 1, 60_000))
    definition = Definition(name="s", queue="Q1", task=b"x", every_ms=1000)
    desk.client.hset(desk.g.schedules, "def s", definition.encode())
    desk.client.delete(desk.g.watched)
    mesh = users.mesh("viewer")
    queue = mesh.queue("Q1")
    handles: dict[type, Any] = {
        worqr.Mesh: mesh,
        worqr.Queue: queue,
        worqr.DeadLetters: queue.failed,
        worqr.Job: queue.job("done"),
        worqr.Batch: queue,
    }
    before = dump(desk.client, desk.prefix)

    def changed() -> set[str]:
        """Keys that are new or have another value. Some expire meanwhile."""
        now = dump(desk.client, desk.prefix).items()
        return {desk.short(key.decode()) for key, entry in now if before.get(key) != entry}

    async with mesh.connect(), queue.events(), mesh.connection_events():
        for of, calls in READS.items():
            for read in calls.values():
                await read(handles[of])
        assert users.denied() == []
        assert changed() == {":watched"}
        for of, calls in ACTS.items():
            for name, act in calls.items():
                with pytest.raises(worqr.RefusedByServer):
                    await act(handles[of])
                assert changed() == {":watched"}, name


@pytest.mark.parametrize("role", ["operator", "viewer"])
@pytest.mark.leaves("*")
async def test_an_exporter_of_metrics_needs_no_more_than_a_viewer(users: Users, role: str) -> None:
    desk = seated(users)
    set_scene(desk)
    declared(desk)
    desk.call(ops.note_runs(desk.q, "A", 100, {"ok": 2}))
    desk.call(ops.post_scan(desk.g, ["Q1"]))
    desk.client.delete(desk.g.snapshot)
    mesh = users.mesh(role)
    async with mesh.connect():
        found = await FleetReader(mesh).read()
        assert {info.name for info in found.mesh.queues} >= {"Q1"}
        assert found.runs["Q1"] == {"ok": 2}
        assert found.schedules
        assert found.server.memory
    assert users.denied() == []


async def states_of(queue: worqr.Queue) -> list[str]:
    return [status.state for status in await queue.running()]


async def listed(aside: worqr.DeadLetters) -> int:
    return len(await aside.list())


@pytest.mark.leaves("*")
def test_a_producer_cancels_the_job_of_a_schedule_and_notes_no_outcome(users: Users) -> None:
    desk = seated(users)
    desk.dispatch("cron:s")
    desk.client.hset(f"{desk.q.base}:fired", "s", "1 elsewhere")
    users.grant("producer")
    desk.client = users.by_hand("producer")
    assert desk.call(ops.cancel_job(desk.q, "cron:s", "why")).waiting == 1
    desk.client.close()
    desk.client = users.client
    assert desk.state().keys().isdisjoint({":job:cron:s", ":outcomes", ":done_fired"})


@pytest.mark.leaves("*")
def test_a_producer_with_the_rights_of_an_older_version_cancels_what_runs(users: Users) -> None:
    desk = seated(users)
    held = desk.run("A", "x")
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, secret="s"))
    users.grant("producer", without(lines()["producer"], "%R~worqr:{*}*:policy:*"))
    with desk.listening(desk.q.cancel_channel) as heard, as_user(desk, users.by_hand("producer")):
        assert desk.call(ops.cancel_job(desk.q, "x", "why")).claims == [held]
    assert heard == [("_cancel", str(held).encode())]
    assert desk.state()[":cancelling"] == {str(held)}


@pytest.mark.leaves("*")
def test_a_producer_that_says_to_be_a_workflow_gets_no_dead_letter_out(users: Users) -> None:
    desk = seated(users)
    option = {"base": desk.q.base, "id": "x", "life": "1", "key": "k", "after": "0"}
    desk.enter("A")
    desk.dispatch("x/k", parent=option)
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    before = desk.state()[f":aside:{held}"]
    users.grant("producer")
    desk.client = users.by_hand("producer")
    assert desk.dispatch("x/k", parent={**option, "after": str(held)}).outcome == "created"
    desk.client.close()
    desk.client = users.client
    assert desk.state()[f":aside:{held}"] == before
    assert desk.client.zscore(desk.q.failed, held) is not None


# A producer that is limited to some queues


def limited(rules: list[str]) -> list[str]:
    """The rules of a producer for the queues mail.* alone, as the page says it."""
    return [rule.replace("worqr:{*", "worqr:{mail.*") for rule in rules]


def raw(value: bytes | str) -> bytes:
    """A text as the scripts pack it."""
    data = value if isinstance(value, bytes) else value.encode()
    return b"\xda" + len(data).to_bytes(2, "big") + data


@pytest.mark.leaves("*")
async def test_a_limited_producer_starts_nothing_in_other_queues_by_a_batch(
    users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor by a message in the outbox of its own queue: the leader, who may do more, delivers it."""
    peers, hands, paid = users.mesh("peer"), Hands(), Hands()
    mesh = worqr.Mesh(users.grant("producer", limited(lines()["producer"])), prefix=users.prefix, patience=PATIENCE)
    async with (
        serving(peers, "mail.send", hands) as peer,
        mesh.connect(),
        trio.open_nursery() as nursery,
    ):
        await nursery.start(peer.serve, "mail.done", hands)
        await nursery.start(peer.serve, "payments", paid)
        transfer = mesh.call("payments", b"evil")
        for options in ({"then": transfer}, {"otherwise": transfer}, {"queue": "payments"}):
            with pytest.raises(worqr.RefusedByServer, match="NOPERM|permission|access"):
                async with mesh.batch(**{"queue": "mail.send", **options}):  # type: ignore[arg-type]
                    raise AssertionError
        with pytest.raises(worqr.RefusedByServer):
            async with mesh.batch(queue="mail.send") as batch:
                await batch.dispatch(transfer)
        assert not [
            key for key in dump(users.client, users.prefix) if b"{payments}:part" in key or b"{payments}:batch" in key
        ]
        # an honest batch of two of its queues, whose follow-up is in the other one
        async with mesh.batch(queue="mail.send", then=mesh.call("mail.done", b"next")) as batch:
            await batch.dispatch(mesh.call("mail.send", b"a"))
        await hands.saw(b"next")
        forge(users, mesh.queue("mail.send").name)
        # its own follow-up, put in line by the same round of the leader
        async with mesh.batch(queue="mail.send", then=mesh.call("mail.done", b"last")) as batch:
            await batch.dispatch(mesh.call("mail.send", b"b"))
        await hands.saw(b"last")
        await eventually(partial(trio.to_thread.run_sync, partial(users.client.hlen, outbox(users, "mail.send"))), 1)
        assert paid.seen == []
        nursery.cancel_scope.cancel()
    [left] = users.client.hkeys(outbox(users, "mail.send"))
    assert left == b"follow_up old 1", "it was never delivered, and it is not lost"
    assert "nothing delivers them (1): " in caplog.text.lower()
    assert "of queue 'mail.send' were not enqueued, because their queues do not hold them" in caplog.text


def outbox(users: Users, queue: str) -> str:
    return f"{users.prefix}:{{{queue}}}:outbox"


def forge(users: Users, queue: str) -> None:
    """Write messages into the outbox of a queue, as the limited producer may, which would enqueue a task in `payments`."""
    target, token = f"{users.prefix}:{{payments}}", "T" * 20
    record = {"then": target, "then_options": b"\x80", "then_task": b"evil", "token": token, "state": "sealed"}
    eve = users.by_hand("producer")
    for topic, *parts in [
        ("follow_up old 1", "follow_up", target, token, "1", b"\x80", b"evil"),
        ("a", "release", target, token, "then", "1", b"\x80"),
        ("b", "release", target, token, "then", "1", msgspec.msgpack.encode({"task": "evil", "then_task": "evil"})),
        ("c", "release", f"{target}:part:x", token, "then", "1", b"\x80"),
        ("d", "keep", target, token, "0"),
        ("e", "report", target, "b", token, target, "9", "1", "1 1 0 0 0 0"),
        ("f", "report", target, "b", token, target, "x", "1", "1 1"),
        ("g", "cancel", target, token, "1", target, "b", "60000", "why"),
        ("h", "cancel", target, "t:x", "1e9", "", "b", "x", "why"),
        ("i", "hold", target, token, b"evil"),
        ("j",),
    ]:
        eve.hset(outbox(users, queue), topic, bytes([0x90 + len(parts)]) + b"".join(map(raw, parts)))
    own = f"{users.prefix}:{{{queue}}}"
    eve.hset(f"{own}:batch:forged", mapping={**record, "keep": "60000", "open": "0"})
    eve.zadd(f"{own}:batches", {"forged": 1})
    eve.publish(f"{{{users.prefix}}}:due", f"0 {own}")
    eve.close()


@pytest.mark.leaves("*")
async def test_a_producer_stores_schedules_only_with_the_right_that_the_page_names(users: Users) -> None:
    row = re.search(r"^\| `(.*:schedules.*)` \| a producer that \[stores", PAGE.read_text("utf-8"), re.MULTILINE)
    assert row
    mesh = users.mesh("producer")
    async with mesh.connect():
        with pytest.raises(worqr.RefusedByServer):
            await mesh.schedule("a", mesh.call("Q1", b""), every=3600)
    url = users.grant("producer", [*lines()["producer"], *shlex.split(row[1].replace("worqr:{*", "worqr:{Q1"))])
    mesh = worqr.Mesh(url, prefix=users.prefix, patience=PATIENCE)
    async with mesh.connect():
        assert await mesh.schedule("a", mesh.call("Q1", b""), every=3600) == "created"
        with pytest.raises(worqr.RefusedByServer):
            await mesh.schedule("b", mesh.call("payments", b""), every=3600)
        assert [each.name for each in await mesh.schedules("a")] == ["a"]
        assert await mesh.schedule_handle("a").delete()
    users.grant("producer")


@pytest.mark.leaves("*")
async def test_a_producer_declares_shards_only_with_the_right_that_the_page_names(users: Users) -> None:
    [row] = re.findall(
        r"^\| `(.*:shards.*)` \| a producer that declares `shards=`", PAGE.read_text("utf-8"), re.MULTILINE
    )
    mesh = users.mesh("producer")
    mesh.queue("wide", shards=3)
    with pytest.raises(worqr.RefusedByServer, match="refused declare_shards"):
        async with mesh.connect():
            await mesh.queue("wide").enqueue(b"x")
    url = users.grant("producer", [*lines()["producer"], *shlex.split(row)])
    allowed = worqr.Mesh(url, prefix=users.prefix, patience=PATIENCE)
    allowed.queue("wide", shards=3)
    async with allowed.connect():
        assert await allowed.queue("wide").enqueue(b"x") == 1
    users.grant("producer")
    again = worqr.Mesh(mesh.url, prefix=users.prefix, patience=PATIENCE)
    again.queue("wide", shards=3)  # as it is stored
    async with again.connect():
        assert await again.queue("wide").enqueue(b"x") == 1


# A viewer, which may not load scripts


@pytest.mark.leaves("*")
async def test_a_viewer_is_told_who_loads_the_scripts(users: Users) -> None:
    viewer = users.mesh("viewer")
    users.client.script_flush()
    remedy = "start a worker or producer of the same version of worqr once, .*grant the user .script.load"
    with pytest.raises(worqr.RefusedByServer, match=f"refused to load the script list_shards: NOPERM.*{remedy}"):
        async with viewer.connect():
            raise AssertionError
    async with users.mesh("producer").connect():
        pass
    async with viewer.connect():
        assert await viewer.queues() == []
        assert (await viewer.queue("Q1").info()).waiting == 0


ODD_NUMBERS = ("0", "-1", "1e15", "-1e15", "9007199254740993", "nan", "inf", "-inf", "", "x")


@pytest.mark.parametrize("name", sorted(SCRIPTS["viewer"]))
@pytest.mark.leaves("*")
def test_a_viewer_cannot_keep_the_server_busy_by_an_argument(users: Users, name: str) -> None:
    desk = seated(users)
    scene = set_scene(desk)
    declared(desk)
    users.grant("viewer")
    client = users.server.client(
        username=f"{users.prefix}-viewer", password=SECRET, driver_info=None, socket_timeout=PATIENCE
    )
    for call in [next_call(desk, scene, name), *more_calls(desk.q, desk.g, scene).get(name, ())]:
        desk.send(call)
        for position in range(len(call.args)):
            for odd in ODD_NUMBERS:
                args = [*call.args[:position], odd, *call.args[position + 1 :]]
                try:
                    client.evalsha(call.script.sha, 1, call.base, *args, *call.script.tail)
                except redis.ResponseError:
                    pass
                except redis.exceptions.TimeoutError:
                    users.client.script_kill()
                    raise AssertionError(f"argument {position + 1} of {name} is {odd!r}: it does not end") from None
    client.close()


# What a role may not do, whoever uses its credential and however

Q, G = "worqr:{Q1}", "{worqr}"
TASKS, LISTS, CLAIMS, REGISTRY, PAUSE = (
    "see the waiting",
    "many of them",
    "take and end claims",
    "work and lead",
    "pause and delete",
)
MAY = {
    EVERYTHING: {TASKS, LISTS, CLAIMS, REGISTRY, PAUSE},
    "producer": set[str](),
    "peer": {TASKS, LISTS, CLAIMS, REGISTRY, PAUSE},
    "operator": {TASKS, LISTS, PAUSE},
    "viewer": {TASKS, LISTS},
    "shop": set[str](),
}
TRIES: list[tuple[str, tuple[str | int, ...]]] = [
    (TASKS, ("LINDEX", Q, 0)),
    (LISTS, ("LRANGE", Q, 0, 9)),
    (CLAIMS, ("RPOPLPUSH", Q, f"{Q}:claim:1")),
    (CLAIMS, ("SREM", f"{Q}:claims:W", 1)),
    (CLAIMS, ("LPOP", f"{Q}:claim:1")),
    (CLAIMS, ("DEL", f"{Q}:claim:1")),
    (REGISTRY, ("HSET", f"{Q}:workers", "W", "1 0 0 0")),
    (REGISTRY, ("HDEL", f"{Q}:workers", "W")),
    (REGISTRY, ("DEL", f"{Q}:policy:W")),
    (REGISTRY, ("SADD", f"{G}:Workers", "W")),
    (REGISTRY, ("SREM", f"{G}:Dying", "W")),
    (REGISTRY, ("SET", f"{G}:leader", "W 1")),
    (REGISTRY, ("DEL", f"{G}:worker:W")),
    (REGISTRY, ("SET", f"{G}:version", "9")),
    (PAUSE, ("SET", f"{Q}:paused", "")),
    (PAUSE, ("DEL", f"{Q}:paused")),
    (PAUSE, ("DEL", Q)),
    (PAUSE, ("RENAME", Q, f"{Q}:trash")),
    (PAUSE, ("ZREM", f"{Q}:failed", 1)),
    (PAUSE, ("HSET", f"{G}:schedules", "paused s", 1)),
]
NOBODY: list[tuple[str | int, ...]] = [
    *(
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("RANDOMKEY",),
        ("DBSIZE",),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
    ),
    *(("MODULE", "LIST"), ("DEBUG", "JMAP"), ("REPLICAOF", "NO", "ONE"), ("SCRIPT", "FLUSH"), ("CLIENT", "LIST")),
    *(("MONITOR",), ("EVAL", "return 1", 0), ("FUNCTION", "LIST"), ("BRPOP", Q, 1), ("SCRIPT", "KILL")),
    *(("PUBSUB", "CHANNELS"), ("FUNCTION", "FLUSH"), ("FCALL", "x", 0), ("MOVE", Q, 1), ("MEMORY", "STATS")),
    *(("LPUSH", "other:{Q1}", "x"), ("LPUSH", "worqr", "x"), ("HGET", "other:{Q1}:counts", "x"), ("GET", "secret")),
    *(
        ("SADD", "{other}:queues", "x"),
        ("LPUSH", "worqrs:{Q1}", "x"),
        ("PUBLISH", "other", "x"),
        ("SUBSCRIBE", "other:{Q1}"),
    ),
]


def is_refused(client: redis.Redis, words: tuple[str | int, ...]) -> bool:
    """Would the server refuse the command to this client's user?"""
    try:
        client.execute_command(*words)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError:  # some other reason: it was let through
        pass
    return False


def scripted(client: redis.Redis, words: tuple[str | int, ...]) -> bool:
    """Would it refuse that in a script? That is loaded already."""
    return not client.execute_command("EVALSHA", sha1(RELAY.encode()).hexdigest(), 0, *words)


RELAY = """#!lua
local answer = redis.pcall(unpack(ARGV))
local text = type(answer) == 'table' and answer.err or ''
for _, refusal in ipairs({'permissions', 'The user executing', 'not allowed from script'}) do
  if string.find(text, refusal) then
    return 0
  end
end
return 1
"""


@pytest.mark.parametrize("role", [EVERYTHING, *ROLES, "shop"])
@pytest.mark.leaves("*")
def test_a_role_may_not_do_what_is_not_its_own(users: Users, role: str) -> None:
    users.grant(role, all_lines()[role])
    client = users.by_hand(role)
    users.client.script_load(RELAY)
    assert is_refused(client, ("SCRIPT", "LOAD", "return 1")) == (role in {"viewer", "shop"})

    def named(words: tuple[str | int, ...]) -> tuple[str | int, ...]:
        mine = (str(w).replace("worqr:", f"{users.prefix}:").replace("{worqr}", f"{{{users.prefix}}}") for w in words)
        return tuple(mine)

    for right, words in TRIES:
        assert is_refused(client, named(words)) == (right not in MAY[role]), words
        if role != "shop":
            assert scripted(client, named(words)) == (right not in MAY[role]), words
    for words in NOBODY:
        assert is_refused(client, named(words)), words
        if role != "shop":
            assert scripted(client, named(words)), words


@pytest.mark.leaves("*")
async def test_a_foreign_producer_fills_its_one_queue(users: Users) -> None:
    users.grant("shop")
    client, mine, hands = users.by_hand("shop"), users.mesh("peer"), Hands()
    async with serving(mine, "mails", hands):
        assert client.lpush(f"{users.prefix}:{{mails}}", "from afar") == 1
        assert client.publish(f"{users.prefix}:{{mails}}", 1) == 1
        await hands.saw(b"from afar")
    for words in (("LPUSH", f"{users.prefix}:{{Q1}}", "x"), ("LLEN", f"{users.prefix}:{{mails}}"), ("PING",)):
        assert is_refused(client, words)


@pytest.mark.one_server
@pytest.mark.leaves("*")
async def test_a_producer_can_be_kept_to_some_queues(users: Users) -> None:
    only = [rule.replace("worqr:{*", "worqr:{mail.*") for rule in lines()["producer"]]
    url = users.grant("producer", only)
    mesh = worqr.Mesh(url, prefix=users.prefix, patience=PATIENCE)
    async with mesh.connect():
        assert await mesh.queue("mail.out").enqueue(b"a") == 1
        job = await mesh.queue("mail.in").dispatch(b"b", id="b", delay=60, result_ttl=60)
        assert (await job.cancel()).waiting == 1
        assert users.denied() == []
        for name in ("orders", "ail.out", "mail"):
            with pytest.raises(worqr.RefusedByServer, match="NOPERM"):
                await mesh.queue(name).enqueue(b"a")


# Rights that are missing: a peer does not enter


KEYS = QueueKeys("p", "Q1")
OF_QUEUES = [
    name
    for name in sorted(SCRIPTS["peer"] - {"list_tasks"})
    if CALLS[name](KEYS, RegistryKeys("p"), NO_SCENE).base == KEYS.base
]
"""What a peer sends to its queues. A worker that may not list what waits does its work all the same."""


def asked_for(source: str, base: str) -> list[list[str]]:
    """What ``start_work`` asks the server about, in full."""
    [examples] = re.findall(r"\bRIGHTS = \[\[(.*?)\]\]", source, re.DOTALL)
    return [[re.sub("^@", base, word) for word in example.split()] for example in examples.split(",")]


def named(words: list[str]) -> str:
    return "|".join(words[:2] if words[0] == "PUBSUB" else words[:1]).lower()


@pytest.mark.parametrize("clustered", [False, True])
def test_before_it_enters_a_peer_asks_for_every_command_of_its_scripts(clustered: bool) -> None:
    found = {name: script(name).sharded if clustered else script(name) for name in OF_QUEUES}
    sources = {name: part_of(each.text, name) for name, each in found.items()}
    needed = set().union(*(reachable(source) for source in sources.values()))
    elsewhere = {"publish"} if clustered else set()  # to the registry's channel
    asked = {named(words) for words in asked_for(sources["start_work"], "q")}
    assert asked == needed - elsewhere, "`RIGHTS` has an example of each"


def test_and_for_every_kind_of_key() -> None:
    words = {word for example in asked_for(script("start_work").text, KEYS.base) for word in example}
    known = {**plain(KEYS), **{name: make("1") for name, make in makers(KEYS).items()}}
    known |= {name: make("1") for name, make in in_lanes(KEYS, period="1").items()}
    known |= {name: make("1") for name, make in in_batches(KEYS).items()}
    assert {name for name, key in known.items() if key not in words} == {
        *("cancel_channel", "cancelled_channel"),
        *("event_ids_channel", "event_ends_channel"),  # without the right to them, events have no ids and no ends
        *("runs", "recent"),  # and runs are neither counted nor kept
        "outcomes",  # which are not noted then
        "kept_firings",  # and runs of schedules are not kept
        "schedules",  # which the leader reads: without the right, it says so
    }
    assert {word for word in words if word.startswith(KEYS.base)} <= set(known.values())


@pytest.mark.leaves("*")
def test_what_it_asks_about_are_calls_that_could_be_made(server: Server, prefix: str) -> None:
    """With as many arguments as the command wants: some servers say no to any other."""
    desk = Desk(server.client(), prefix)
    for words in asked_for(script("start_work").text, desk.q.base):
        try:
            desk.client.execute_command(*words)
        except redis.ResponseError as error:
            assert "no such key" in str(error), words


@pytest.mark.leaves("*")
def test_a_peer_without_one_of_them_does_not_enter(users: Users) -> None:
    desk = seated(users)
    set_scene(desk)
    entering = ops.start_work(desk.q, "new", max_stalls=3, keep_failed=9, last=0)
    examples = asked_for(entering.script.text, desk.q.base)

    def refusal(*rules: str) -> str:
        users.grant("peer", [*rules])
        with as_user(desk, users.by_hand("peer")), pytest.raises(redis.exceptions.NoPermissionError) as caught:
            desk.send(entering)
        return str(caught.value)

    rules = lines()["peer"]
    with desk.nothing_changes():
        for command in {named(words) for words in examples} - {"hmget"}:  # which comes before: is it a copy?
            lacking = ", ".join(" ".join(words) for words in examples if named(words) == command)
            assert refusal(*without(rules, f"+{command}")) == f"the user may not: {lacking}"
        keyed = [words for words in examples if not words[0].startswith("PUB")]  # the others name channels
        keys = {word for words in keyed for word in words if word.startswith(desk.q.base)}
        others = [*without(rules, "~worqr:{*"), "~worqr:{Q1}:producer:*"]
        for key in keys - {entering.base}:
            assert key in refusal(*others, *(f"~{each}" for each in (keys | {entering.base}) - {key}))
    users.grant("peer")
    with as_user(desk, users.by_hand("peer")):
        assert desk.send(entering) == [b"ok", 0]


@contextmanager
def as_user(desk: Desk, client: redis.Redis) -> Iterator[None]:
    """In the block the desk sends by `client`, which is then closed."""
    own, desk.client = desk.client, client
    try:
        yield
    finally:
        desk.client = own
        client.close()


@pytest.mark.leaves("*")
def test_a_server_that_cannot_be_asked_lets_it_enter(users: Users) -> None:
    desk = seated(users)
    entering = ops.start_work(desk.q, "new", max_stalls=3, keep_failed=9, last=0)
    entering.script = Script("start_work", entering.script.source.replace("acl_check_cmd", "unheard_of"))
    desk.client.script_load(entering.script.source)
    users.grant("peer", without(lines()["peer"], "+lset"))
    with as_user(desk, users.by_hand("peer")):
        assert desk.send(entering) == [b"ok", 0]


@pytest.mark.leaves("*")
async def test_a_missing_right_to_write_is_told_before_a_task_is_touched(users: Users) -> None:
    desk = seated(users)
    desk.put(b"a")
    desk.dispatch("x", b"b")
    before, told = of_queue(desk), set[str]()
    for command in sorted(WRITES - {"SMOVE", "XDEL"}):  # for the leader, and for many workers that join at once
        rules = without(lines()["peer"], f"+{command.lower()}")
        mesh = worqr.Mesh(users.grant("peer", rules), prefix=users.prefix, patience=PATIENCE)
        with pytest.raises(worqr.RefusedByServer, match="NOPERM|permission|can't run this command") as caught:
            async with mesh.join(grace=0) as peer:
                await peer.serve("Q1", never)
        assert of_queue(desk) == before, command
        if "refused start_work: NOPERM the user may not: " in str(caught.value):
            assert f": {command} {desk.q.base}" in str(caught.value)
            assert "ACL LOG" not in str(caught.value)  # which has nothing of it
            told.add(command)
    assert {"LPOP", "RPOPLPUSH", "RENAME", "SPOP"} <= told  # others are needed to join


def of_queue(desk: Desk) -> dict[bytes, Entry]:
    """All keys of the queue but the history and the replies that are kept: leaving may have been answered."""
    base, others = desk.q.base.encode(), (f"{desk.q.base}:producer:".encode(), desk.q.history.encode())
    everything = dump(desk.client, desk.prefix).items()
    return {key: entry for key, entry in everything if key.startswith(base) and not key.startswith(others)}


async def never(task: bytes) -> None:
    raise AssertionError(task)


# Rights that are missing: elsewhere


@pytest.mark.leaves("*")
async def test_a_missing_right_is_one_clear_error_when_connecting_or_at_the_call(users: Users) -> None:
    async def refused(rules: list[str], what: str, url_end: str = "") -> str:
        users.client.script_flush()
        mesh = worqr.Mesh(users.grant("producer", rules) + url_end, prefix=users.prefix, patience=PATIENCE)
        with pytest.raises(worqr.RefusedByServer, match=what) as caught:
            async with mesh.connect():
                await mesh.queue("Q1").enqueue(b"PAYLOAD")
        message = str(caught.value)
        assert "PAYLOAD" not in message
        assert SECRET not in message
        assert "\n" not in message
        return message

    rules, log = lines()["producer"], "; ACL LOG on the server names what is missing"
    assert "evalsha" in await refused(without(rules, "+evalsha"), "refused list_shards: NOPERM .*" + log)
    assert "script|load" in await refused(
        without(rules, "+script|load"), "refused to load the script list_shards: NOPERM.*" + log
    )
    await refused(without(rules, "+llen"), "refused enqueue: .*(in script|executing the script).*" + log)
    await refused(without(rules, "~worqr:{*}*:counts"), "refused enqueue: .*key.*" + log)
    await refused(["reset", "on", ">secret"], "refused (list_shards|to load)")
    await refused(rules, "refused the connection: .*select.*check the rights of the user", url_end="/1")
    await refused(["reset", "off", ">secret"], "refused the connection: .*check user and password")
    assert users.denied() != []


@pytest.mark.leaves("*")
async def test_a_channel_that_may_not_be_heard_is_one_clear_error(users: Users) -> None:
    url = users.grant("producer", without(lines()["producer"], "&worqr:{*"))
    mesh = worqr.Mesh(url, prefix=users.prefix, patience=PATIENCE)
    async with mesh.connect():
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        with pytest.raises(worqr.RefusedByServer, match="subscribe to .*NOPERM"):
            await job.result(timeout=PATIENCE)


@pytest.mark.leaves("*")
async def test_rights_that_are_taken_away_and_given_back(users: Users, caplog: pytest.LogCaptureFixture) -> None:
    """The caller is told, the peer tries again, and both go on when the rights are back."""
    hands, peers, producer = Hands(), users.mesh("peer"), users.mesh("producer")
    async with serving(peers, "Q1", hands, grace=0), producer.connect():
        queue = producer.queue("Q1")
        await queue.enqueue(b"a")
        await hands.saw(b"a")
        users.change("producer", "resetkeys", "clearselectors")
        with pytest.raises(worqr.RefusedByServer, match="refused enqueue: NOPERM"):
            await queue.enqueue(b"b")
        users.grant("producer")
        users.change("peer", "-evalsha")
        await queue.enqueue(b"c")
        await until(lambda: "refused start_tasks: NOPERM" in caplog.text)
        assert b"c" not in hands.seen
        users.grant("peer")
        await hands.saw(b"c")
    assert b"b" not in hands.seen


async def why_unavailable(mesh: worqr.Mesh) -> str:
    try:
        await mesh._client.link.call(ops.list_marks(QueueKeys(mesh.prefix, "Q1"), [1]), patience=0.5)
    except worqr.Unavailable as error:
        return "WRONGPASS" if "WRONGPASS" in str(error) else str(error)
    return "it is there"


@pytest.mark.leaves("*")
async def test_a_password_that_is_changed_and_changed_back(users: Users, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hands, peers, producer = Hands(), users.mesh("peer"), users.mesh("producer")
    async with serving(peers, "Q1", hands, grace=0), producer.connect():
        queue = producer.queue("Q1")
        for role in ("peer", "producer"):
            users.change(role, "resetpass", ">another")
        await queue.enqueue(b"a")  # connections that stand go on
        await hands.saw(b"a")
        for role in ("peer", "producer"):
            users.cut(role)
        await until(lambda: "WRONGPASS" in caplog.text)
        with pytest.raises(worqr.RefusedByServer, match="WRONGPASS.*check user and password"):
            async with worqr.Mesh(producer.url, prefix=users.prefix, patience=PATIENCE).connect():
                raise AssertionError
        await eventually(lambda: why_unavailable(producer), "WRONGPASS")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.enqueue, b"b")  # waits
            for role in ("peer", "producer"):
                users.change(role, f">{SECRET}")
            await hands.saw(b"b")
        await until(lambda: caplog.text.count("link.back") == 2)
    assert caplog.text.count("link.lost") == 3  # told once each, however often it was tried
    assert SECRET not in caplog.text
    assert QUOTED not in caplog.text


@pytest.mark.one_server
@pytest.mark.leaves("*")
async def test_nothing_that_a_failing_session_says_has_the_password(
    users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = users.grant("producer", without(lines()["producer"], "+llen"))
    said = []
    for bad in (
        url,
        url + "/7",
        url.replace(f"{users.prefix}-", "nobody"),
        url + "?timeout=1",
        url.replace(QUOTED, SECRET),
        url.replace("redis://", "rediss://"),
        url.replace("redis://", "rediss://") + f"/0?ssl_ca_certs=/nowhere&ssl_password={QUOTED}",
        url.replace("127.0.0.1", "[::1]"),
    ):
        slow = "::1" in bad or bad.startswith("rediss:")
        mesh = worqr.Mesh(bad, prefix=users.prefix, patience=1 if slow else PATIENCE)
        said.append(repr(mesh))
        with pytest.raises(worqr.WorqrError) as caught:
            async with mesh.connect():
                said.append(repr(mesh._client.link) + repr(mesh._client.link.settings))
                await mesh.queue("Q1").enqueue(b"PAYLOAD")
        error: BaseException | None = caught.value
        while error is not None:
            said += [str(error), repr(error), *getattr(error, "__notes__", ())]
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    everything = caplog.text + "\n".join(said)
    assert "nowhere" in everything
    assert "WRONGPASS" in everything
    for word in (SECRET, QUOTED, SECRET.partition("/")[0], "PAYLOAD"):
        assert word not in everything


# A cluster


def on_a_cluster() -> set[str]:
    """What the page says that all users need there, too."""
    [found] = re.findall(r"On a Redis Cluster .*?:\s+((?:`[^`]*`\s*)+)", PAGE.read_text("utf-8"))
    return set(re.findall(r"\+([\w|]+)", found))


def test_on_a_cluster_the_scripts_need_what_the_page_says() -> None:
    more = set().union(*(reachable(each.sharded.text) - reachable(each.text) for each in all_scripts()))
    assert on_a_cluster() - more == {"ssubscribe", "sunsubscribe", "cluster|slots", "cluster|info"}
    assert more <= on_a_cluster()


@pytest.fixture
def node(server_kind: str) -> Iterator[Server]:
    """A server that is a cluster by itself."""
    with cluster_of(server_kind, primaries=1, replicas=0) as cluster:
        yield cluster.nodes[0]


@pytest.mark.one_server
async def test_a_day_on_a_cluster(node: Server) -> None:
    users, more = Users(node, "worqr"), [f"+{command}" for command in on_a_cluster()]
    meshes = {}
    for role in ROLES:
        url = users.grant(role, [*lines()[role], *more]).replace("redis://", "redis+cluster://")
        meshes[role] = worqr.Mesh(url, prefix="worqr", patience=PATIENCE)
    meshes["peer"].every(3600, meshes["peer"].call("ticks", b""), name="s")
    meshes["peer"].queue("wide", shards=3)
    hands = Hands()
    async with (
        serving(meshes["peer"], "Q1", hands) as peer,
        meshes["producer"].connect(),
        trio.open_nursery() as nursery,
    ):
        await nursery.start(peer.serve, "lanes", hands)
        await produce(meshes["producer"], hands)
        nursery.cancel_scope.cancel()
    hands = Hands()
    async with serving(meshes["peer"], "Q3", hands, on_failure=fail_too), meshes["operator"].connect():
        await operate(meshes["operator"], meshes["peer"], hands, "Q3")
    assert users.denied() == []


# One user for everything


async def test_the_rights_are_enough(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", EVERYTHING, *all_lines()[EVERYTHING])
    url = own_server.tcp_url.replace("redis://", f"redis://{EVERYTHING}:secret@")
    mesh = worqr.Mesh(url)
    with trio.fail_after(PATIENCE):
        async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
            await use_everything(mesh, peer, nursery)
            nursery.cancel_scope.cancel()
    assert "link.refused" not in caplog.text
    elsewhere = worqr.Mesh(url, prefix="elsewhere")
    with pytest.raises(worqr.RefusedByServer):
        async with elsewhere.connect(), elsewhere.join():
            pass


async def use_everything(mesh: worqr.Mesh, peer: worqr.Peer, nursery: trio.Nursery) -> None:
    """Every script that a single healthy peer can be made to send."""
    queue, running = mesh.queue("Q1"), trio.Event()

    async def handler(task: bytes) -> bytes:
        if task == b"fail":
            raise ValueError("on purpose")
        if task != b"job":
            running.set()
            await trio.sleep_forever()
        worqr.current().progress(0.5, "half")
        return b"done"

    twice = worqr.RetryPolicy(max_failures=2, min_backoff=0.05)
    async with queue.events() as events:
        await nursery.start(partial(peer.serve, "Q1", handler, retry=twice, on_failure=lambda failed: None))
        await queue.enqueue(b"fail", b"run")
        await running.wait()
        assert (await queue.cancel(b"run", wait=PATIENCE)).acknowledged == 1
        async for event in events:
            if event.type == "failed":
                break
    job = await queue.dispatch(b"job", id="job", delay=60, result_ttl=60)
    assert (await job.status()).state == "scheduled"
    await queue.dispatch(b"job", id="job", delay=0.1)
    async with job.watch() as states:
        assert [status.state async for status in states][-1] == "finished"
    assert await job.result() == b"done"
    await queue.dispatch(b"job", id="later", delay=60)
    assert (await queue.job("later").cancel()).waiting == 1
    (failed,) = await queue.failed.list()
    assert await queue.failed.retry(failed.id) == 1
    while not await queue.failed.list():  # it fails again
        await trio.sleep(0.01)
    assert await queue.failed.drop_all() == 1
    await queue.pause("why")
    await queue.enqueue(b"a", b"b")
    assert await queue.tasks() == [b"b", b"a"]
    assert await queue.peek() == b"a"
    assert await queue.running() == []
    await queue.cancel_all()
    await queue.delete()
    await queue.resume()
    assert {info.name for info in await mesh.queues()} == {"Q1", "{Q1}-fail"}
    assert len(await mesh.workers()) == 1
    await trio.sleep(1.2)  # a beat, and a round of the leader's chores
    while not peer.health().ready:
        await trio.sleep(0.01)
