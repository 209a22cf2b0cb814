"""The faults that every kind of server knows: processes, connections, memory, scripts, clock, latency, the server itself."""

from __future__ import annotations

from collections.abc import Callable

import redis

from benchmarks.chaos.children import Process, Role
from benchmarks.chaos.ledger import now
from benchmarks.chaos.scene import NotNow, Scene
from benchmarks.chaos.servers import Node
from benchmarks.chaos.workload import DEPLOYS

Fault = Callable[[Scene], None]

ROLES: tuple[Role, ...] = ("peer", "producer")
FROZEN = (0.5, 1.5, 2.5, 4.0, 7.0)
CLOCK_OFFSETS = (-3, -1, 0, 1, 5, 20, 60)
"""Seconds against the true time. Small enough that no schedule owes more firings than are made up for."""
LOOK_AGAIN = 0.5
"""Seconds until a fault looks again at a server that is frozen. A server that goes on has that time to act."""


# Processes


def kill_peer(scene: Scene) -> None:
    _kill(scene, scene.pick("peer"), "SIGKILL of a peer", scene.rng.uniform(0, 2))


def kill_producer(scene: Scene) -> None:
    _kill(scene, scene.pick("producer"), "SIGKILL of a producer", 0.3)


def _kill(scene: Scene, process: Process, kind: str, pause: float) -> None:
    scene.children.kill(process)
    scene.note(kind, process.name)
    _replace(scene, process.role, pause)


def _replace(scene: Scene, role: Role, pause: float) -> None:
    def start() -> None:
        if not scene.calm or role == "peer":
            scene.start(role)

    scene.agenda.add(pause, start)


def freeze_peer(scene: Scene) -> None:
    _freeze(scene, scene.pick("peer"), "SIGSTOP of a peer", scene.rng.choice(FROZEN))


def freeze_producer(scene: Scene) -> None:
    _freeze(scene, scene.pick("producer"), "SIGSTOP of a producer", scene.rng.choice(FROZEN))


def _freeze(scene: Scene, process: Process, kind: str, seconds: float) -> None:
    scene.children.freeze(process)
    scene.note(kind, process.name)
    scene.agenda.add(seconds, lambda: scene.children.thaw(process))


def end_peer(scene: Scene) -> None:
    process = scene.pick("peer")
    scene.children.terminate(process)
    scene.note("SIGTERM of a peer", process.name)
    _replace(scene, "peer", scene.rng.uniform(0, 1))


def end_producer(scene: Scene) -> None:
    process = scene.pick("producer")
    scene.children.terminate(process)
    scene.note("SIGTERM of a producer", process.name)
    _replace(scene, "producer", 0.3)


def roll_out(scene: Scene) -> None:
    """Replace the peers by those of the other version of the application, one after the other."""
    old = scene.children.of("peer")
    if scene.rolling or not old:
        raise NotNow
    scene.deploy = next(each for each in DEPLOYS if each != scene.deploy)
    scene.rolling = True
    scene.note("rolling deploy", f"to {scene.deploy}")
    for n, process in enumerate(old):
        scene.agenda.add(n * scene.rng.uniform(0.5, 1.5), lambda process=process: _replace_old(scene, process))

    def over() -> None:
        scene.rolling = False

    scene.agenda.add(len(old) * 1.5, over)


def _replace_old(scene: Scene, process: Process) -> None:
    if process.state == "up" and process.runs:  # else a fault has replaced it
        scene.start("peer")
        scene.children.terminate(process)


# Connections


def kill_connections(scene: Scene) -> None:
    """CLIENT KILL of one, some or all connections of one kind: requests, subscriptions, beats, topology."""
    node = pick_node(scene)
    clients: dict[str, list[tuple[str, str]]] = {}
    for line in node.ask("CLIENT", "LIST").decode().splitlines():
        facts = dict(word.partition("=")[::2] for word in line.split())
        if facts.get("name", "").startswith("worqr:"):
            _, app, kind = facts["name"].split(":", 2)
            clients.setdefault(kind, []).append((facts["id"], app))
    if not clients:
        raise NotNow
    kind = scene.rng.choice(sorted(clients))
    there = clients[kind]
    for number, app in scene.rng.sample(there, min(len(there), scene.rng.choice([1, 1, 3, 100]))):
        node.ask("CLIENT", "KILL", "ID", number)
        scene.troubled(now(), "connection killed", app)
        scene.note(f"CLIENT KILL ({kind})", app)


def lose_reply(scene: Scene) -> None:
    """The server does what a proxied process asks, and the connection breaks before the reply."""
    role = scene.rng.choice(ROLES)
    there = [each for each in scene.children.of(role) if each.proxied]
    if scene.proxy is None or not there:
        raise NotNow
    process = scene.rng.choice(there)
    scene.proxy.drop_reply(nth=scene.rng.randint(1, 4), on=f":{process.name}:data")
    scene.troubled(now(), "connection killed", process.name)
    scene.note(f"lost reply of a {process.role}", process.name)


def delay_peers(scene: Scene) -> None:
    """Each request of one proxied peer takes longer."""
    seconds, span = scene.rng.choice([0.05, 0.3, 0.8, 1.4]), scene.rng.uniform(2, 8)
    _through_proxy(scene, "latency", span, lambda name: scene.proxy and scene.proxy.delay(seconds, f":{name}:"))


def swallow_peer(scene: Scene) -> None:
    """One proxied peer's connections swallow everything and stay open."""
    span = scene.rng.choice([0.5, 2, 4])
    _through_proxy(
        scene, "half-open connections", span, lambda name: scene.proxy and scene.proxy.blackhole(f":{name}:")
    )


def _through_proxy(scene: Scene, kind: str, seconds: float, begin: Callable[[str], object]) -> None:
    there = [process for process in scene.children.of("peer") if process.proxied]
    if scene.proxy is None or scene.proxy_busy or not there:
        raise NotNow
    process, proxy, began = scene.rng.choice(there), scene.proxy, now()
    begin(process.name)
    scene.proxy_busy = True
    scene.note(kind, process.name)

    def undo() -> None:
        proxy.pass_all()
        if kind != "latency":
            proxy.cut(f":{process.name}:")
        proxy.forget_requests()
        scene.proxy_busy = False
        scene.troubled(began, kind, process.name)

    scene.agenda.add(seconds, undo)


# The server


def pick_node(scene: Scene) -> Node:
    """A primary that is up; no other fault is under way on any node."""
    if any(node.state != "up" for node in scene.servers.nodes):
        raise NotNow
    return scene.rng.choice(scene.servers.primaries)


def flush_scripts(scene: Scene) -> None:
    pick_node(scene).ask("SCRIPT", "FLUSH")
    scene.note("SCRIPT FLUSH")


def fill_memory(scene: Scene) -> None:
    """The memory limit is where the memory is: after a few more tasks the server refuses them."""
    node = pick_node(scene)
    used = int(node.facts("memory")["used_memory"])
    node.ask("CONFIG", "SET", "maxmemory", max(1, used + scene.rng.choice([-10_000_000, 0, 20_000, 200_000])))
    scene.note("memory full")

    def undo() -> None:
        if node.state == "up":  # a restart resets the limit
            node.ask("CONFIG", "SET", "maxmemory", 0)
        elif node.state == "frozen":
            scene.agenda.add(LOOK_AGAIN, undo)

    scene.agenda.add(scene.rng.choice([0.3, 1, 2]), undo)


def pause_clients(scene: Scene) -> None:
    node, ms = pick_node(scene), scene.rng.choice([200, 1500])
    node.ask("CLIENT", "PAUSE", ms, scene.rng.choice(["ALL", "WRITE"]))
    began, scene.paused = now(), True
    scene.note("CLIENT PAUSE")

    def over() -> None:
        if node.state == "frozen":  # it ends the pause when it goes on, by its clock
            scene.agenda.add(LOOK_AGAIN, over)
        else:
            scene.paused = False
            scene.troubled(began, "clients paused")

    scene.agenda.add(ms / 1000 + LOOK_AGAIN, over)


def freeze_server(scene: Scene) -> None:
    if scene.servers.clustered:
        raise NotNow  # a failover may follow: `cluster_faults`
    node, began = pick_node(scene), now()
    node.freeze()
    scene.note("SIGSTOP of the server")

    def undo() -> None:
        node.thaw()
        scene.troubled(began, "server frozen")

    scene.agenda.add(scene.rng.choice([0.2, 1, 2, 3.5, 6]), undo)


def kill_server(scene: Scene) -> None:
    _restart(scene, "SIGKILL and restart of the server", Node.kill)


def restart_server(scene: Scene) -> None:
    _restart(scene, "SIGTERM and restart of the server", Node.stop)


def _restart(scene: Scene, kind: str, end: Callable[[Node], None]) -> None:
    if scene.servers.clustered:
        raise NotNow
    node, began = pick_node(scene), now()
    end(node)
    scene.note(kind)

    def undo() -> None:
        node.start()
        scene.troubled(began, "server down")

    scene.agenda.add(scene.rng.choice([0, 0.5, 2, 5]), undo)


def move_clock(scene: Scene) -> None:
    clock = scene.servers.clock
    if clock is None or scene.paused:  # a pause ends by the server's clock: set back, that would take a minute
        raise NotNow
    clock.move_to(scene.rng.choice([offset for offset in CLOCK_OFFSETS if offset != clock.offset]))
    scene.ledger.write("clock", offset=clock.offset)
    scene.note("clock jump", f"{clock.offset:+d} s")


FAULTS: list[tuple[float, Fault]] = [
    (16, kill_peer),
    (12, freeze_peer),
    (8, end_peer),
    (3, roll_out),
    (4, kill_producer),
    (3, freeze_producer),
    (3, end_producer),
    (20, kill_connections),
    (16, lose_reply),
    (5, delay_peers),
    (3, swallow_peer),
    (5, flush_scripts),
    (5, fill_memory),
    (3, pause_clients),
    (5, freeze_server),
    (5, kill_server),
    (2, restart_server),
    (6, move_clock),
]
"""Each fault with its weight."""


def inject(scene: Scene, faults: list[tuple[float, Fault]]) -> None:
    """Inject one fault, chosen at random."""
    for _ in range(20):
        ((_, fault),) = scene.rng.choices(faults, [weight for weight, _ in faults])
        try:
            fault(scene)
        except NotNow:
            continue
        except (redis.RedisError, OSError) as error:
            scene.note(f"not injected: {type(error).__name__}", fault.__name__)
        return
