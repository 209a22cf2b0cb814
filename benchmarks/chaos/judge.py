"""A second judge of a chaos run: ``python -m benchmarks.chaos.judge FOLDER``. It shares no code with the checker.

It reads the files of the ledger by itself, as histories of three simple objects, and asks of each whether one copy of it could
have said what was seen:

* a queue for each kind of task: what comes out was put in, and what was put in comes out, once it is settled never again;
* a mutex for each id, with the number of the claim as its token: an older token is not accepted once a newer one was given out,
  and two healthy processes do not hold it at once;
* a register for each value that is kept: what a job has saved, the result of each of its steps, and the end of each of its waits;
* a mailbox for each workflow: what a wait takes out was put in, once, and the end of a job that it takes out is that job's.

It knows less about faults than the checker, so it says nothing where any of them may be the reason.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

Line = dict[str, Any]
FINAL: Final = {"returned", "failure", "undecodable"}
STARTED: Final = {"flow_jobs", "flow_nested"}
NOT_SENT: Final = {"ticks", "follow_ups", *STARTED}
"""Queues into which no producer puts tasks: firings of schedules, follow-ups, and jobs of workflows."""
PAUSED: Final = ": suspended"
"""The end of how a run ends that waits. It may begin again under its claim."""
MANY_PER_ID: Final = {"single", "updates"}
"""Queues in which a dispatch may take the place of another one."""
HELD: Final = 45.0
LIFETIME: Final = 8.0
"""Seconds that a wait lasts for what is never sent, and a workflow of the queue `flow_brief`."""
FAILURES: Final = {-1, "failed", "cancelled", "lost"}
DECLARED_DEAD: Final = 10.0
"""Seconds within which a worker that is away loses its claims, and learns of it."""
FOREVER: Final = float("inf")
CLOCKS: Final = 0.25
"""Seconds by which lines of two processes may be out of order."""


def lines_of(folder: Path) -> list[Line]:
    """Return all lines by time, each with the process that wrote it as ``by``."""
    found: list[Line] = [
        json.loads(text) | {"by": path.name.split(".")[0]}
        for path in sorted(folder.glob("*.ledger"))
        for text in path.read_text("utf-8").splitlines()
    ]
    return sorted(found, key=lambda line: line["t"])


def _absence(line: Line, frozen: dict[str, float]) -> list[tuple[str | None, float, float]]:
    """Return for which time a line says that a process (None: all) may have lost its claims, if it says so."""
    t = line["t"]
    match line["what"]:
        case "trouble" | "failover":
            return [(line.get("who"), line["begin"] - CLOCKS, line["end"] + DECLARED_DEAD)]
        case "gap":
            return [(line["by"], line["begin"] - CLOCKS, line["end"] + DECLARED_DEAD)]
        case "thawed":
            return [(line["who"], frozen.pop(line["who"]), t + DECLARED_DEAD)]
        case "killed" | "died" | "terminated":
            return [(line["who"], t - CLOCKS, FOREVER)]
        case "leaving":
            return [(line["by"], t - CLOCKS, FOREVER)]
        case "left_queue":
            return [(line["by"], line["at"] - CLOCKS, t + DECLARED_DEAD)]
        case "registered":
            return [(line["by"], t - DECLARED_DEAD, t)]
        case _:
            return []


def _call(line: Line) -> tuple[str, int]:
    return line["by"], line["call"]


def _forget_failures(results: dict[str, Any]) -> None:
    """Drop the failures that are the last thing that a workflow has stored: it was put back. Jobs are stored by others."""
    for name in reversed(list(results)):
        failed = results[name] in FAILURES
        if failed:
            del results[name]
        if name.startswith(("step", "undo")):
            return


class Judge:
    """The histories, and what cannot be."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = lines
        self.wrong: list[str] = []
        self._away: list[tuple[str | None, float, float]] = []
        """Stretches of time in which a process, or all of them, may have lost their claims."""
        self._failovers = [
            (line["begin"] - 2 * DECLARED_DEAD, line["end"] + DECLARED_DEAD)
            for line in lines
            if line["what"] == "failover"
        ]
        self._jumps = any(line["what"] == "clock" for line in lines)
        self._answers = {
            _call(line): line["t"]
            for line in lines
            if line["what"] == "signalled" and line["answer"] in {"woke", "stored"}
        }
        self._names = {_call(line): (line["task"], line["name"]) for line in lines if line["what"] == "end_wait"}
        self._ended = {
            _call(line): line["t"] for line in lines if line["what"] == "wait_ended" and line["answer"] == "ended"
        }
        self._results: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._by_task: dict[tuple[str, str], list[Line]] = defaultdict(list)
        self._put_back: dict[str, list[float]] = defaultdict(list)
        self._asked: dict[str, list[float]] = defaultdict(list)
        self._sent: dict[str, list[float]] = defaultdict(list)
        self._marks: dict[str, set[str]] = defaultdict(set)
        self._took: dict[tuple[str, str], list[float]] = defaultdict(list)
        for call, t in self._ended.items():
            self._took[self._names.get(call, ("", ""))].append(t)
        self._read()

    def _read(self) -> None:
        began: dict[tuple[str, str, int], Line] = {}
        frozen: dict[str, float] = {}
        paused: set[tuple[str, str, int]] = set()
        for line in self._lines:
            key = line["by"], line.get("queue", ""), line.get("fence", 0)
            match line:
                case {"what": "ended", "how": how} if how.endswith(PAUSED):
                    paused.add(key)
                case {"what": "began"} if key in paused:
                    paused.remove(key)
                case {"what": "began", "task": task, "queue": queue}:
                    name = f"{task} at {line['nominal']}" if line.get("nominal") is not None else task
                    name = f"{name} {line['id']}" if queue == "follow_ups" else name
                    run = began[key] = line | {"task": name, "saves": [], "steps": []}
                    self._by_task[queue, name].append(run)
                case {"what": "result", "outcome": "finished"}:
                    self._results[line["queue"], line["task"]].append(line["t"])
                case {"what": "froze", "who": who}:
                    frozen[who] = line["t"]
                case {"what": "retry", "t": t, "batch": name}:
                    self._put_back[name].append(t)
                case {"what": "end_wait", "t": t, "task": task}:
                    self._asked[task].append(t)
                case {"what": "send", "t": t, "tasks": tasks}:
                    for task in tasks:
                        self._sent[task].append(t)
                case {"what": "dead" | "buried" | "cancel" as what, "task": task}:
                    self._marks[task].add(what)
                case _:
                    self._away += _absence(line, frozen)
        self._away += [(who, begin, FOREVER) for who, begin in frozen.items()]
        for line in self._lines:
            run = began.get((line["by"], line.get("queue", ""), line.get("fence", 0)), {})
            match line:
                case {"what": "ended", "t": t, "how": how} if run.get("how", PAUSED).endswith(
                    PAUSED
                ):  # a process, then its peer
                    run |= {"ended": t, "how": how}
                case {"what": "settled", "t": t, "answer": answer}:
                    run |= {"settled": t, "answer": answer}
                case {"what": "saved", "value": value}:
                    run["saves"].append(value)
                case {"what": "step" | "stepped" | "waited", "name": name}:
                    run["steps"].append((name, line.get("value")))
                case _:
                    pass
        for runs in self._by_task.values():
            runs.sort(key=lambda run: run["fence"])

    def _disturbed(self, begin: float, end: float, *who: str) -> bool:
        """Return True if one of these processes, or the server, was away at a time between."""
        return any((name is None or name in who) and since <= end and till >= begin for name, since, till in self._away)

    def judge(self) -> list[str]:
        """Return what cannot be, one line each."""
        self._queues()
        self._mutexes()
        self._registers()
        self._mailboxes()
        return self.wrong

    # Queues

    def _is_anew(self, task: str, begin: float, end: float) -> bool:
        """Return True if a workflow above this job may have been put back in between."""
        above = (task[:at] for at, letter in enumerate(task) if letter == "/")
        return any(begin <= t <= end for name in above for t in self._put_back.get(name, ()))

    def _queues(self) -> None:
        sent: dict[tuple[str, str], tuple[Line, Line | None]] = {}
        calls: dict[tuple[str, int], Line] = {}
        gone = {(line["queue"], line["task"]) for line in self._lines if line["what"] == "dead"}
        broken = {
            line["name"]
            for line in self._lines
            if line["what"] == "batch" and (line["reason"] is not None or line["cancelled"])
        }
        for line in self._lines:
            if line["what"] in {"send", "cancel", "retry"}:
                calls[line["by"], line["call"]] = line
            if line["what"] == "send":
                sent.update({(line["queue"], task): (line, None) for task in line["tasks"]})
            elif line["what"] in {"acked", "refused"} and (asked := calls[line["by"], line["call"]])["what"] == "send":
                sent.update({(asked["queue"], task): (asked, line) for task in asked["tasks"]})
            elif line["what"] == "cancel":
                gone.add((line["queue"], line["task"]))  # it may have hit, whatever was answered
        for subject, runs in self._by_task.items():
            origin = sent[subject][0] if subject in sent else None
            if subject[0] not in NOT_SENT and (origin is None or min(run["t"] for run in runs) < origin["t"] - CLOCKS):
                self.wrong.append(f"came out and was not put in: {subject}")
            names = {subject[1], "" if origin is None else origin.get("batch", "")}
            is_put_back = not names.isdisjoint(self._put_back) or self._is_anew(subject[1], 0, FOREVER)
            self._settled_once(subject, runs, is_put_back=is_put_back)
        for subject, (request, answer) in sent.items():
            if (
                answer is None
                or answer["what"] != "acked"
                or subject[0] in MANY_PER_ID
                or request.get("batch") in broken
            ):
                continue
            ended = any(run.get("how") in FINAL for run in self._by_task.get(subject, ()))
            if answer.get("outcome") != "unchanged" and not ended and subject not in gone:
                self.wrong.append(f"was put in and did not come out: {subject}, sent at {request['t']:.3f}")

    def _settled_once(self, subject: tuple[str, str], runs: list[Line], *, is_put_back: bool) -> None:
        """What the server said is settled for good does not come out again."""
        for first, second in pairwise(runs):
            ends = [first["settled"]] if first.get("answer") == "ok" and first.get("how") in FINAL else []
            ends += [t for t in self._results[subject] if first.get("ended", t) <= t]
            if (
                ends
                and second["t"] > min(ends) + CLOCKS
                and not is_put_back
                and not self._failed_over(min(ends), second["t"])
            ):
                self.wrong.append(
                    f"was settled and came out again: {subject}, claims {first['fence']} and {second['fence']}"
                )

    def _failed_over(self, begin: float, end: float) -> bool:
        return any(since <= end and till >= begin for since, till in self._failovers)

    # Mutexes

    def _mutexes(self) -> None:
        by_id: dict[tuple[str, str], list[Line]] = defaultdict(list)
        for (queue, task), runs in self._by_task.items():
            for run in runs:
                by_id[queue, task if run["id"].startswith("@") else f"id {run['id']}"].append(run)
        for subject, runs in by_id.items():
            runs.sort(key=lambda run: run["fence"])
            for first, second in pairwise(runs):
                if first["fence"] == second["fence"]:
                    self.wrong.append(f"one token was given out twice: {subject}, {first['fence']}")
                final = first.get("how") in FINAL  # of a task that was given back, only the reply may come late
                if final and first.get("answer") == "ok" and first["settled"] > second["t"] + CLOCKS:
                    self.wrong.append(f"an old token was accepted: {subject}, {first['fence']} after {second['fence']}")
                end = first.get("ended", FOREVER)
                if second["t"] < end - CLOCKS and not self._disturbed(
                    first["t"], second["t"] + CLOCKS, first["by"], second["by"]
                ):
                    self.wrong.append(f"two held it at once: {subject}, {first['by']} and {second['by']}")

    # Registers

    def _registers(self) -> None:
        for subject, runs in self._by_task.items():
            if not self._failed_over(runs[0]["t"], runs[-1]["t"]):
                self._saved(subject, runs)
                self._steps(subject, runs)

    def _saved(self, subject: tuple[str, str], runs: list[Line]) -> None:
        newest = 0
        for run in runs:
            found = run.get("saved", 0)
            if found < newest:
                self.wrong.append(f"a save was forgotten: {subject} found {found} after {newest}")
            newest = max([newest, found, *run["saves"]])

    def _steps(self, subject: tuple[str, str], runs: list[Line]) -> None:
        results: dict[str, Any] = {}
        before = runs[0]["t"]
        for run in runs:
            if self._is_anew(subject[1], before, run["t"]):
                results.clear()
            elif any(before <= t <= run["t"] for t in self._put_back.get(subject[1], ())):
                _forget_failures(results)
            before = run["t"]
            for name, value in run["steps"]:
                if value is None and name in results:
                    self.wrong.append(f"a step ran after its result was stored: {subject}, {name}")
                elif value is not None and results.setdefault(name, value) != value:
                    self.wrong.append(f"a step has two results: {subject}, {name}")

    # Mailboxes

    def _mailboxes(self) -> None:
        sent: dict[tuple[str, str], dict[str, Line]] = defaultdict(dict)
        for line in self._lines:
            if line["what"] == "signal":
                sent[line["queue"], line["task"]][line["value"]] = line
        for subject, runs in self._by_task.items():
            if self._failed_over(runs[0]["t"], runs[-1]["t"]):
                continue
            above = subject[1].rpartition("/")[0]
            if subject[0] in STARTED and len({run["id"] for run in runs}) > 1 and not self._is_anew(above, 0, FOREVER):
                self.wrong.append(f"a job of a workflow has two ids: {subject}")
            self._ends(subject, runs)
            taken: dict[str, str] = {}
            for name, value in (each for run in runs for each in run["steps"]):
                if name.startswith(("event ", "mail ")) and value not in {"timeout", "over"}:
                    if value not in sent[subject] or taken.setdefault(value, name) != name:
                        self.wrong.append(f"a wait took out what was not there: {subject}, {name}: {value}")
                elif name.startswith("job ") and not self._ended_so(name.removeprefix("job "), value):
                    self.wrong.append(f"a workflow took out a false end: {subject}, {name}: {value}")

            self._order(
                subject, [(name, sent[subject][value]) for value, name in taken.items() if value in sent[subject]]
            )

    def _order(self, subject: tuple[str, str], taken: list[tuple[str, Line]]) -> None:
        """What came out of a mailbox first was put in first."""
        numbered = sorted((*name.split(" "), line["t"], self._answers.get(_call(line))) for name, line in taken)
        for (kind, first, put_in, _), (other, second, _, answered) in pairwise(numbered):
            if kind == other and answered is not None and answered < put_in:
                self.wrong.append(f"a mailbox is out of order: {subject}, {kind} {first} and {second}")

    def _ends(self, subject: tuple[str, str], runs: list[Line]) -> None:
        """A wait for what is never sent lasts until it is ended, by a request, its time, or the lifetime of its workflow."""
        if self._jumps:
            return
        asked, sent = self._asked.get(subject[1], ()), self._sent.get(subject[1], ())
        took = self._took.get((subject[1], "held"), ())
        seen = [run["t"] for run in runs if "held" in dict(run["steps"])]
        if (
            took
            and seen
            and min(seen) > (late := min(took) + 2 * DECLARED_DEAD)
            and not self._disturbed(min(took), late)
        ):
            self.wrong.append(f"a wait went on that was ended: {subject}, at {min(took):.3f}")
        for run in runs:
            ends, now = dict(run["steps"]), run.get("ended", FOREVER)
            lasted = now - min([runs[0]["t"], *sent]) + CLOCKS
            if "over" in ends.values() and (subject[0] != "flow_brief" or lasted < LIFETIME - 2 * CLOCKS):
                self.wrong.append(f"a lifetime is not that of its workflow: {subject}, claim {run['fence']}")
            if (
                ends.get("held") == "timeout"
                and not any(t <= now for t in asked)
                and (lasted < HELD or subject[0] == "flow_brief")
            ):
                self.wrong.append(f"a wait is over that no one ended: {subject}, claim {run['fence']}")

    def _ended_so(self, job: str, end: str) -> bool:
        """Return True if a job of a workflow can have ended so."""
        how, _, number = end.partition(" ")
        runs = self._by_task.get(("flow_nested" if job.endswith("nests") else "flow_jobs", job), [])
        if how == "finished":
            return any(run.get("how") == "returned" and run["fence"] == int(number) for run in runs)
        told_by = {"failed": {"dead", "buried"}, "cancelled": {"cancel"}}.get(how, set[str]())
        return not told_by.isdisjoint(self._marks.get(job, ()))


def main(folder: str) -> int:
    """Print what cannot be; exit code 1 if there is anything."""
    lines = lines_of(Path(folder))
    wrong = Judge(lines).judge()
    print("\n".join([*wrong, f"judged {len(lines):,} lines: {len(wrong)} that cannot be"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
