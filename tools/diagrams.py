"""Draws the diagrams of the documentation: ``python -m tools.diagrams``.

Each diagram is a function that returns the text of an SVG file in ``docs/assets``. The states and moves of "life of a job" come
from `worqr.job_states`; this module has their positions and labels. The seconds of the other diagrams come from the code. Colours
follow the reader's light or dark mode. ``tests/test_diagrams.py`` compares the committed files with the output.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from worqr.job_states import TRANSACTIONS, State, moves
from worqr.peer.engine import DEFAULT_KEEPALIVE
from worqr.peer.leader.leader import CHECK_EVERY, MISSING_FOR
from worqr.peer.leader.scanner import SCAN_EVERY
from worqr.peer.session import BEAT_EVERY
from worqr.stored_values import public_name

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
STYLE = """\
  svg { --paper: #ffffff; --box: #f1f3f9; --line: #8a93a8; --ink: #1d2433; --soft: #5b6477;
        --producer: #1c5fd4; --worker: #15803d; --operator: #b45309; --dead: #c62828; color-scheme: light dark; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #1e2129; --box: #2b303c; --line: #7d8699; --ink: #eef1f8; --soft: #b0b8c9;
          --producer: #7fb0ff; --worker: #5fd38d; --operator: #f5b35c; --dead: #ff8a80; }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 13px; fill: var(--ink); }
  .name { font-weight: 600; font-size: 14px; }
  .soft { fill: var(--soft); font-size: 12px; }
  .box { fill: var(--box); stroke: var(--line); }
  path { fill: none; stroke-width: 1.6; stroke: var(--line); }
  path.producer { stroke: var(--producer); } path.worker { stroke: var(--worker); }
  path.operator { stroke: var(--operator); stroke-dasharray: 5 4; } path.dead { stroke: var(--dead); }
  path.thick { stroke-width: 10; } path.wait { stroke-width: 10; stroke: var(--line); }
  path.bound { stroke-dasharray: 3 4; }
  text.producer { fill: var(--producer); } text.worker { fill: var(--worker); }
  text.operator { fill: var(--operator); } text.dead { fill: var(--dead); }
  .head-producer { fill: var(--producer); } .head-worker { fill: var(--worker); }
  .head-operator { fill: var(--operator); } .head-dead { fill: var(--dead); }
"""
KINDS = ("producer", "worker", "operator", "dead")

Point = tuple[float, float]


class Drawing:
    """The elements of one SVG file, in the order in which they are painted."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._open = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>\n'
        )
        self._parts: list[str] = [f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>']

    def box(self, x: float, y: float, width: float, height: float, **data: str) -> None:
        """A rectangle with round corners, by its upper left corner."""
        self._parts.append(
            f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"{_data(data)}/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """Lines of text, the first with its baseline at `y`."""
        for number, line in enumerate(words.split("\n")):
            kind = f' class="{style}"' if style else ""
            self._parts.append(
                f'<text x="{x:g}" y="{y + 16 * number:g}" text-anchor="{anchor}"{kind}>{escape(line)}</text>'
            )

    def node(self, x: float, y: float, width: float, height: float, name: str, words: str, **data: str) -> None:
        """A box around its centre, with a name and a line below it."""
        self.box(x - width / 2, y - height / 2, width, height, **data)
        self.text(x, y - 2, name, "name")
        self.text(x, y + 15, words, "soft")

    def line(self, points: list[Point], style: str, tip: str = "", *, head: bool = True, **data: str) -> None:
        """A line through these points; with a head, an arrow."""
        way = "M" + " L".join(f"{x:g},{y:g}" for x, y in points)
        end = f' marker-end="url(#{style.split()[0]})"' if head else ""
        content = f"><title>{escape(tip)}</title></path>" if tip else "/>"
        self._parts.append(f'<path class="{style}" d="{way}"{end}{_data(data)}{content}')

    def written(self) -> str:
        """The text of the file."""
        heads = "".join(
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="head-{kind}" style="stroke:none;fill:var(--{kind})" d="M0,0 L10,5 L0,10 z"/></marker>\n'
            for kind in KINDS
        )
        return f"{self._open}<style>\n{STYLE}</style>\n<defs>\n{heads}</defs>\n" + "\n".join(self._parts) + "\n</svg>\n"


def _data(data: dict[str, str]) -> str:
    return "".join(f' data-{name.replace("_", "-").strip("-")}="{escape(value)}"' for name, value in data.items())


# Life of a job

WIDTH, HEIGHT = 116, 46
PLACES: Final[dict[State, tuple[float, float, str]]] = {
    "new": (380, 40, "not stored yet"),
    "due": (130, 175, "waits for its time"),
    "waiting": (380, 175, "in the queue"),
    "blocked": (630, 175, "waits for its id"),
    "suspended": (240, 280, "waits for an event"),
    "active": (380, 325, "a worker runs it"),
    "cancelled": (130, 475, "kept: result_ttl"),
    "finished": (290, 475, "kept: result_ttl"),
    "failed": (470, 475, "dead-letter queue"),
    "undecodable": (640, 475, "undecodable"),
    "gone": (555, 590, "nothing is kept"),
}
"""The centre of each state, and its meaning."""


class Route(NamedTuple):
    """The path of one move, and its label, if it has none in common with another move on the same path."""

    points: list[Point]
    words: str = ""
    at: Point = (0, 0)
    anchor: str = "middle"


_CANCELLED: Final[list[Point]] = [(95, 232), (95, 452)]
_BACK_IN_LINE: Final[list[Point]] = [(728, 475), (728, 134), (420, 134), (420, 152)]
_OUT_OF_FAILED: Final[list[Point]] = [(528, 475), (556, 475), (556, 425), (728, 425)]
ROUTES: Final[dict[tuple[State, State], Route]] = {
    ("new", "waiting"): Route([(380, 63), (380, 152)], "enqueued,\nor dispatched", (388, 82), "start"),
    ("new", "due"): Route([(322, 40), (130, 40), (130, 152)], "dispatched with a delay", (220, 32)),
    ("new", "blocked"): Route([(438, 40), (630, 40), (630, 152)], "dispatched while its id runs", (536, 32)),
    ("due", "waiting"): Route([(188, 167), (322, 167)], "its time comes", (255, 160)),
    ("waiting", "due"): Route([(322, 185), (188, 185)], "gets a new time", (255, 202)),
    ("blocked", "waiting"): Route([(572, 175), (438, 175)], "the run of its id ends", (506, 168)),
    ("blocked", "due"): Route(
        [(605, 152), (605, 116), (160, 116), (160, 152)], "... and its time is still to come", (268, 110)
    ),
    ("waiting", "active"): Route([(366, 198), (366, 302)], "a worker\nclaims it", (358, 262), "end"),
    ("active", "waiting"): Route([(394, 302), (394, 198)], "its worker\nleaves or dies", (402, 262), "start"),
    ("active", "due"): Route(
        [(322, 325), (160, 325), (160, 198)], "it fails or times out:\nretry after a backoff", (240, 343)
    ),
    ("active", "suspended"): Route([(322, 314), (310, 314), (310, 290), (298, 290)]),
    ("suspended", "waiting"): Route([(298, 270), (330, 270), (330, 198)]),
    ("suspended", "cancelled"): Route([(182, 280), (95, 280), (95, 452)]),
    ("active", "finished"): Route(
        [(350, 348), (350, 400), (290, 400), (290, 452)], "its handler\nreturns", (298, 424), "start"
    ),
    ("active", "cancelled"): Route(
        [(350, 348), (350, 400), (150, 400), (150, 452)], "cancelled while it runs", (225, 394)
    ),
    ("active", "failed"): Route(
        [(410, 348), (410, 400), (460, 400), (460, 452)], "it fails for\nthe last time", (452, 424), "end"
    ),
    ("active", "undecodable"): Route(
        [(438, 325), (640, 325), (640, 452)], "its handler\ncannot read it", (632, 342), "end"
    ),
    ("waiting", "failed"): Route(
        [(438, 188), (500, 188), (500, 452)], "it expires before\nits first run", (508, 262), "start"
    ),
    ("waiting", "cancelled"): Route([(340, 198), (340, 232), *_CANCELLED], "cancelled before it runs", (250, 226)),
    ("due", "cancelled"): Route([(95, 198), *_CANCELLED[1:]]),
    ("blocked", "cancelled"): Route([(630, 198), (630, 232), *_CANCELLED]),
    ("failed", "waiting"): Route([*_OUT_OF_FAILED, *_BACK_IN_LINE[1:]]),
    ("undecodable", "waiting"): Route([(698, 475), *_BACK_IN_LINE], "you\nput it\nback", (684, 250)),
    ("failed", "gone"): Route(
        [(470, 498), (470, 590), (497, 590)], "too many failed,\nor you drop it", (462, 560), "end"
    ),
    ("undecodable", "gone"): Route([(640, 498), (640, 590), (613, 590)], "you drop it", (648, 560), "start"),
}
"""Each move of the table: a move that is missing here, or is not in the table any more, is an error."""
LEGEND: Final = (
    ("producer", "a producer or a schedule"),
    ("worker", "worqr: a worker or the leader"),
    ("operator", "on request: you, or your code"),
)


def life_of_a_job() -> str:
    """Every state and every move of `worqr.job_states`."""
    taken: dict[tuple[State, State], list[str]] = {}
    for transaction, before, after in moves():
        taken.setdefault((before, after), []).append(transaction)
    if taken.keys() != ROUTES.keys():
        raise ValueError(f"ROUTES and the table of worqr.job_states differ in {sorted(taken.keys() ^ ROUTES.keys())}")
    drawing = Drawing(
        760, 650, "Life of a job", "States of a job and the moves between them, coloured by who causes the move."
    )
    for (before, after), route in ROUTES.items():
        names = taken[before, after]
        tip = f"{shown(before)} to {shown(after)}: {', '.join(names)}"
        drawing.line(route.points, kind_of(names), tip, from_=before, to=after, by=" ".join(names))
    for (before, after), route in ROUTES.items():
        drawing.text(*route.at, route.words, f"soft {kind_of(taken[before, after])}", route.anchor)
    for state, (x, y, words) in PLACES.items():
        drawing.node(x, y, WIDTH, HEIGHT, shown(state), words, state=state)
    for number, (kind, words) in enumerate(LEGEND):
        drawing.line([(24, 572 + 24 * number), (64, 572 + 24 * number)], kind)
        drawing.text(72, 576 + 24 * number, words, "soft", "start")
    return drawing.written()


def shown(state: State) -> str:
    """The name of a state for people."""
    return public_name(state)


def kind_of(names: list[str]) -> str:
    """The actor of a move: worqr itself if it may, else a producer, else an operator on request."""
    actors = {TRANSACTIONS[name].by for name in names}
    if "worker" in actors:
        return "worker"
    return "producer" if "producer" in actors else "operator"


# Who talks to whom


def who_talks_to_whom() -> str:
    """Processes above and below, the server between them: no process talks to another one."""
    drawing = Drawing(
        760, 580, "Who talks to whom", "Workers and producers talk to the Redis or Valkey server, never to each other."
    )
    tops = [
        ("web application", "instance 1", "peer"),
        ("web application", "instance 2", "peer"),
        ("worqr run shop:mesh", "standalone worker", "peer, leader"),
    ]
    for column, (name, words, peer) in enumerate(tops):
        x = 140 + 240 * column
        drawing.box(x - 105, 20, 210, 104)
        drawing.text(x, 42, name, "name")
        drawing.text(x, 60, words, "soft")
        drawing.box(x - 62, 74, 124, 36)
        drawing.text(x, 97, peer, "worker")
        drawing.line([(x - 14, 110), (x - 14, 258)], "worker")
        drawing.line([(x + 14, 258), (x + 14, 110)], "operator")
        drawing.text(x + 22, 172, "wake-up,\ncancel", "soft operator", "start")
    for x in (140, 380):
        drawing.text(x - 22, 156, f"enqueue,\nclaim, finish,\nheartbeat\nevery {BEAT_EVERY:g} s", "soft worker", "end")
    drawing.text(
        598,
        148,
        f"as others, and:\ndead workers?\nevery {CHECK_EVERY:g} s,\nlost wake-ups?\nevery {SCAN_EVERY:g} s,\nschedules",
        "soft worker",
        "end",
    )
    drawing.box(30, 260, 700, 84)
    drawing.text(380, 286, "Redis or Valkey server", "name")
    drawing.text(380, 304, "one server, Sentinel, or Redis Cluster", "soft")
    drawing.text(380, 328, "queues · jobs · results · claims · heartbeats · schedules · dead-letter queues")
    bottoms = [
        ("script, Django, Flask", "worqr.sync, or\nmesh.connect()", "enqueue,\ndispatch", "results"),
        ("another language", "any Redis client", "LPUSH,\nPUBLISH", ""),
        ("worqr command line", "queues, status, pause,\ncancel, failed", "requests", "replies"),
    ]
    for column, (name, words, up, down) in enumerate(bottoms):
        x = 140 + 240 * column
        drawing.box(x - 105, 464, 210, 84)
        drawing.text(x, 490, name, "name")
        drawing.text(x, 510, words, "soft")
        drawing.line([(x - 14, 464), (x - 14, 346)], "producer")
        drawing.text(x - 22, 402, up, "soft producer", "end")
        if down:
            drawing.line([(x + 14, 346), (x + 14, 462)], "operator")
            drawing.text(x + 22, 410, down, "soft operator", "start")
    return drawing.written()


# What happens when a worker dies

LEFT, SECOND = 150, 96.0
MISSED = DEFAULT_KEEPALIVE + CHECK_EVERY
DEAD = MISSED + MISSING_FOR
BOUND = DEFAULT_KEEPALIVE + 2
"""Seconds after a worker's last heartbeat, at worst: its leader misses it, declares it dead; its tasks run elsewhere."""
ROWS = {"worker A": 90, "server": 170, "leader": 250, "worker B": 330}


def death_of_a_worker() -> str:
    """The slowest case with default settings, on an axis of seconds."""

    def at(second: float) -> float:
        return LEFT + SECOND * (second + 0.5)

    drawing = Drawing(
        760,
        430,
        "What happens when a worker dies",
        f"From the kill of worker A until its task runs on worker B, {BOUND:g} s.",
    )
    for name, y in ROWS.items():
        drawing.text(24, y + 4, name, "name", "start")
    for second in range(int(BOUND) + 1):
        drawing.line([(at(second), 366), (at(second), 374)], "axis", head=False)
        drawing.text(at(second), 392, f"{second} s", "soft")
    drawing.line([(at(-0.5), 370), (at(BOUND) + 40, 370)], "axis", head=False)
    drawing.text(at(BOUND / 2), 416, "seconds after the last heartbeat, in the slowest case", "soft")
    drawing.line([(at(-0.5), ROWS["worker A"]), (at(0.05), ROWS["worker A"])], "worker thick", head=False)
    drawing.line([(at(0.05), 78), (at(0.05), 102)], "dead", head=False)
    drawing.text(at(0.05) + 8, 86, "killed (SIGKILL, power failure),", "dead", "start")
    drawing.text(at(0.05) + 8, 102, "just after a heartbeat", "dead", "start")
    drawing.text(at(-0.5), 74, "runs a task", "soft worker", "start")
    drawing.line([(at(0), 170), (at(DEFAULT_KEEPALIVE), 170)], "wait", head=False)
    drawing.text(at(DEFAULT_KEEPALIVE / 2), 158, f"heartbeat key of A, expires after {DEFAULT_KEEPALIVE:g} s", "soft")
    drawing.line([(at(DEFAULT_KEEPALIVE), 158), (at(DEFAULT_KEEPALIVE), 182)], "dead", head=False)
    drawing.text(at(DEFAULT_KEEPALIVE), 198, "key expires", "soft dead")
    looks = [CHECK_EVERY * n for n in range(int(DEFAULT_KEEPALIVE / CHECK_EVERY))]
    for second in [*looks, DEFAULT_KEEPALIVE - 0.03]:
        drawing.line([(at(second), 244), (at(second), 256)], "axis", head=False)
    drawing.text(at(DEFAULT_KEEPALIVE / 2), 276, f"looks at all heartbeats every {CHECK_EVERY:g} s", "soft")
    drawing.line([(at(MISSED), 238), (at(MISSED), 262)], "dead", head=False)
    drawing.text(at(MISSED), 232, f"{MISSED:g} s: A is missing", "soft dead")
    drawing.line([(at(DEAD), 238), (at(DEAD), 262)], "dead", head=False)
    drawing.text(at(DEAD) + 4, 278, f"{DEAD:g} s: still missing,\nA is declared dead", "soft dead", "end")
    drawing.line([(at(DEAD), 238), (at(DEAD), 182)], "worker")
    drawing.text(at(DEAD) + 4, 158, "tasks of A go to the\nfront of their queues", "soft worker", "end")
    drawing.line([(at(DEAD) + 14, 182), (at(DEAD) + 14, 316)], "operator")
    drawing.text(at(DEAD) + 8, 313, "wake-up", "soft operator", "end")
    drawing.line([(at(DEAD) + 14, 330), (at(BOUND) + 40, 330)], "worker thick", head=False)
    drawing.text(at(DEAD) - 4, 334, "runs the task again", "soft worker", "end")
    drawing.line([(at(BOUND), 40), (at(BOUND), 366)], "bound", head=False)
    drawing.text(at(BOUND) + 4, 32, f"promised: {BOUND:g} s", "name", "end")
    return drawing.written()


# How a batch ends


def end_of_a_batch() -> str:
    """The home queue of a batch, two queues of its jobs, and who carries what between them."""
    drawing = Drawing(
        760,
        470,
        "How a batch ends",
        "Each queue counts its own jobs, and reports to the home queue of the batch when the last one has ended.",
    )
    drawing.box(30, 20, 210, 64)
    drawing.text(135, 46, "producer", "name")
    drawing.text(135, 66, "async with mesh.batch(...)", "soft")
    drawing.box(450, 20, 280, 130)
    drawing.text(590, 46, "home queue: publish", "name")
    drawing.text(590, 68, "record of the batch:\nthen, otherwise, and for each part\nits version and counters", "soft")
    drawing.text(590, 134, "all parts closed: the follow-up is stored", "soft worker")
    for x, name in ((150, "queue: resize"), (400, "queue: mail")):
        drawing.box(x - 110, 300, 220, 130)
        drawing.text(x, 326, name, "name")
        drawing.text(x, 348, "part of the batch:\nids of jobs that have not ended,\ncounters", "soft")
        drawing.text(x, 414, "no id left: the part closes", "soft worker")
    drawing.line([(240, 38), (448, 38)], "producer")
    drawing.text(345, 30, "1 open a part; 3 seal", "soft producer")
    drawing.line([(110, 84), (110, 298)], "producer")
    drawing.text(104, 190, "2 add\njobs", "soft producer", "end")
    drawing.line([(200, 84), (200, 190), (400, 190), (400, 298)], "producer")
    drawing.box(590, 300, 140, 64)
    drawing.text(660, 326, "outbox", "name")
    drawing.text(660, 346, "of each queue", "soft")
    drawing.line([(510, 332), (588, 332)], "worker")
    drawing.line([(150, 430), (150, 450), (660, 450), (660, 366)], "worker")
    drawing.line([(660, 300), (660, 152)], "operator")
    drawing.text(652, 212, "4 the part is closed:\nthe leader delivers\nthe report", "soft operator", "end")
    return drawing.written()


# The layers of the code


class Layer(NamedTuple):
    """A box of the picture, and what is in it: the names of files and folders of ``worqr/``."""

    title: str
    words: str
    parts: str


SPINE: Final = (
    Layer(
        "outside", "command line, dashboard, Django, tests, OpenTelemetry", "cli dashboard django testing otel views"
    ),
    Layer("mesh", "Mesh puts the layers together", "mesh"),
    Layer("hosting", "a worker in a thread, in asyncio, or as a service", "hosting"),
    Layer("peer", "a worker: claiming, running, settling, leading, leaving", "peer"),
    Layer("functions", "@mesh.task, registries, schedules", "functions"),
    Layer("client", "queues, jobs, dead letters: producing and operating", "client"),
    Layer("link", "connections, resending, heartbeats, Sentinel, cluster", "link"),
    Layer("operations", "one function for each script: arguments, reply", "ops"),
    Layer("values and scripts", "errors, keys, options, policies; the Lua scripts", "errors keys policy lua"),
)
"""The layers from the top to the bottom. ``tests/test_diagrams.py`` compares them with those of ``tests/test_layering.py``."""
BESIDE: Final = {
    "mesh": Layer("SQL", "outboxes", "sql"),
    "hosting": Layer("metrics, probes", "numbers and health", "metrics probes"),
    "client": Layer("HTTP", "a small server", "http_server"),
    "link": Layer("log, traces", "events and fences", "log_events tracing"),
}
"""Parts beside the layers that use them, or that they serve."""


def layers() -> str:
    """The layers of ``worqr/``, with an arrow for the only way in which they import each other."""
    drawing = Drawing(
        760, 34 + 62 * len(SPINE), "The layers of worqr", "A layer imports those below it, and none above it."
    )
    for number, layer in enumerate(SPINE):
        y = 46 + 62 * number
        drawing.node(330, y, 400, 48, layer.title, layer.words, parts=layer.parts)
        if side := BESIDE.get(layer.title):
            drawing.node(650, y, 180, 48, side.title, side.words, parts=side.parts)
    drawing.line([(88, 26), (88, 22 + 62 * (len(SPINE) - 1) + 48)], "producer")
    drawing.text(78, 270, "imports", "soft producer", "end")
    return drawing.written()


DIAGRAMS: Final[dict[str, Callable[[], str]]] = {
    "life-of-a-job.svg": life_of_a_job,
    "who-talks-to-whom.svg": who_talks_to_whom,
    "death-of-a-worker.svg": death_of_a_worker,
    "end-of-a-batch.svg": end_of_a_batch,
    "layers.svg": layers,
}


def main() -> None:
    """Write all diagrams to ``docs/assets``."""
    for name, draw in DIAGRAMS.items():
        (ASSETS / name).write_text(draw(), "utf-8")
        print(ASSETS / name)


if __name__ == "__main__":
    main()
