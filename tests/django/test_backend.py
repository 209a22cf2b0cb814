"""`worqr.django.Backend`: what tasks return, how they fail, and what is known of them until their results expire."""

from __future__ import annotations

import pytest

from tests.django.conftest import Project

pytestmark = pytest.mark.one_server

TASKS = """
    @task
    def add(a, b):
        return a + b

    @task(takes_context=True)
    async def who(context):
        return [context.task_result.id, context.attempt]

    @task(priority=90)
    @worqr.django.options(retry=worqr.RetryPolicy(max_failures=12, min_backoff=0, max_backoff=0))
    def fail(times):
        if worqr.current().attempt <= times:
            raise KeyError(f"try {worqr.current().attempt}")
        return "at last"

    @task
    def give(name):
        return {"tuple": (1, 2), "nan": float("nan"), "object": object(), "keys": {1: 2}}[name]
"""


def test_a_worker_process_runs_tasks_and_their_results_tell_all(project: Project) -> None:
    project.write(tasks=TASKS)
    project.worker()
    print(
        project.run("""
        import copy
        from datetime import timedelta
        from django.utils import timezone
        added = tasks.add.enqueue(1, b=2)
        assert added.status == TaskResultStatus.READY and added.enqueued_at and added.attempts == 0, added
        assert ended(added).return_value == 3 and added.status == TaskResultStatus.SUCCESSFUL, added
        assert added.enqueued_at <= added.started_at == added.last_attempted_at <= added.finished_at, added
        assert len(added.worker_ids) == 1 and added.worker_ids[0] and added.errors == [], added
        assert (added.args, added.kwargs, added.backend) == ([1], {"b": 2}, "default")
        assert tasks.add.get_result(added.id) == added == copy.deepcopy(added)

        asked = ended(tasks.who.enqueue())
        assert asked.return_value == [asked.id, 1], asked

        failed = ended(tasks.fail.enqueue(2))
        assert failed.return_value == "at last" and failed.attempts == 3 and len(set(failed.worker_ids)) == 1, failed
        assert [each.exception_class for each in failed.errors] == [KeyError, KeyError]
        for n, error in enumerate(failed.errors, 1):
            assert error.traceback.startswith("Traceback") and error.traceback.endswith(f"KeyError: 'try {n}'\\n"), error
        assert failed.started_at <= failed.last_attempted_at <= failed.finished_at
        from worqr.django.results import in_order  # runs of less than a ms
        one, two = timezone.now(), timezone.now() + timedelta(microseconds=900)
        assert in_order(one, None, two, one) == [one, None, two, two] and in_order(None, one, two) == [None, one, two]

        failed = ended(tasks.fail.enqueue(99))
        assert failed.status == TaskResultStatus.FAILED and failed.attempts == 12, failed
        assert len(failed.errors) == 10 and failed.errors[-1].traceback.endswith("KeyError: 'try 12'\\n"), failed.errors
        assert failed.worker_ids[:2] == ["", ""] and all(failed.worker_ids[2:]), failed.worker_ids

        later = tasks.add.using(run_after=timezone.now() + timedelta(seconds=0.3), queue_name="mail", priority=-7)
        result = ended(later.enqueue("a", "b"))
        assert result.return_value == "ab" and result.task == later and result.started_at >= later.run_after, result
        """)
    )


def test_what_json_cannot_carry_is_refused_at_the_enqueue_or_fails_the_task(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    import datetime
    for value, kind in (
        (float("nan"), ValueError), (float("inf"), ValueError), ("\\ud800", ValueError), (b"\\xff", ValueError),
        ({1, 2}, TypeError), (datetime.datetime.now(), TypeError),
    ):
        try:
            tasks.add.enqueue(value, 0)
        except kind:
            continue
        raise AssertionError(value)

    def check(run):
        sent = tasks.add.enqueue({1: "x"}, b"text")
        assert sent.args == [{"1": "x"}, "text"] and backend.get_result(sent.id).args == sent.args
        worqr.sync(mesh_of(backend).queue("django:default").cancel_all)
        big = tasks.add.enqueue(2**80, 1)
        results = {name: tasks.give.enqueue(name) for name in ("tuple", "nan", "object", "keys")}
        run()
        for result in results.values():
            result.refresh()
        big.refresh()
        assert big.return_value == 2**80 + 1, big
        assert results["tuple"].return_value == [1, 2] and results["keys"].return_value == {"1": 2}
        assert results["nan"].errors[0].exception_class is ValueError
        assert results["object"].errors[0].exception_class is TypeError
    on_bench(check)
    """)


def test_a_task_that_workers_could_not_import_is_refused_at_the_enqueue(project: Project) -> None:
    project.write(
        tasks="""
        def work(): ...
        renamed = task(work)
        unnamed = task(lambda: 1)
        """
    )
    project.run("""
    from worqr.django.task_api import InvalidTask
    for each in (tasks.renamed, tasks.unnamed):
        try:
            each.enqueue()
        except InvalidTask as error:
            assert f"{each.module_path} is not this task" in str(error), error
            continue
        raise AssertionError(each)
    assert worqr.sync(mesh_of(backend).queue("django:default").count) == 0
    """)


def test_a_task_that_was_cancelled_or_is_gone(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    from worqr.django.results import job_of, task_error
    from worqr.records import RemoteError

    for kind in ("Timeout", "Stalled", "Expired", "ValueError", "worqr.Failure"):
        assert issubclass(task_error(RemoteError(kind, "why", "")).exception_class, Exception), kind

    def check(run):
        mesh = mesh_of(backend)
        cancelled, gone, foreign = (tasks.add.enqueue(1, 2) for _ in range(3))
        queue, job = job_of(cancelled.id)
        worqr.sync(mesh.queue(queue).job(job).cancel, reason="too late")
        cancelled.refresh()
        assert cancelled.status == TaskResultStatus.FAILED and cancelled.finished_at and cancelled.started_at is None
        assert cancelled.errors[0].exception_class is worqr.JobCancelled and "too late" in cancelled.errors[0].traceback
        assert (cancelled.args, cancelled.attempts) == ([1, 2], 0), cancelled

        for path in ("shop.tasks.nothing", "subprocess.check_output", "shop.nothing.add"):
            call = mesh.functions["django:default"].options(id="bad", keep_task=True, lane="3-normal", result_ttl=60)
            worqr.sync(call.dispatch, path, ["exit", "1"], {})
            try:
                backend.get_result("default:bad")
            except TaskResultDoesNotExist as error:
                assert path.rpartition(".")[0] in str(error), error
            else:
                raise AssertionError(path)
            run()
            [record] = worqr.sync(mesh.queue("django:default").undecodable.list)
            assert "cannot be run" in record.error.message, record
            worqr.sync(mesh.queue("django:default").undecodable.drop, "bad")
        for unknown in ("x", "default:x", ":", "a{b}:x", "default:", "default:\\x00", "123"):
            try:
                backend.get_result(unknown)
            except TaskResultDoesNotExist:
                continue
            raise AssertionError(unknown)
    on_bench(check)
    """)


def test_signals_and_their_receivers(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    heard = []

    def hear(name):
        def receiver(sender, task_result, **_):
            heard.append((name, sender.__name__, str(task_result.status), len(task_result.errors), sys.exc_info()[0]))
            raise RuntimeError("a receiver that fails")
        return receiver

    for name in ("task_enqueued", "task_started", "task_finished"):
        getattr(signals, name).connect(hear(name), weak=False)

    def check(run):
        tasks.add.enqueue(1, 2)
        run()
        assert heard == [
            ("task_enqueued", "Backend", "READY", 0, None), ("task_started", "Backend", "RUNNING", 0, None),
            ("task_finished", "Backend", "SUCCESSFUL", 0, None),
        ], heard
        heard.clear()
        tasks.fail.enqueue(99)
        run(scheduled=True)
        assert [each[0] for each in heard] == ["task_enqueued"] + ["task_started"] * 12 + ["task_finished"], heard
        assert heard[-1][2:] == ("FAILED", 1, KeyError), heard[-1]
    on_bench(check)
    """)


def test_priorities_take_turns_by_their_weights(project: Project) -> None:
    project.write(tasks=TASKS)
    project.run("""
    from worqr.django.meshes import lane_of
    assert [lane_of(n)[0] for n in (100, 51, 50, 1, 0, -1, -50, -51, -100)] == [*"112234455"]
    order = []
    signals.task_started.connect(lambda task_result, **_: order.append(task_result.task.priority), weak=False)

    def check(run):
        for priority in (-100, 0, 100) * 3:
            tasks.add.using(priority=priority).enqueue(1, 2)
        run(concurrency=1)
        assert order[:3] == [100, 0, -100] and order[-4:] == [0, 0, -100, -100], order  # each lane has a turn, then by weights
    on_bench(check)
    for wrong in (True, 1.0):
        try:
            tasks.add.using(priority=wrong)
        except Exception as error:
            assert "priority must be a whole number" in str(error), error
        else:
            raise AssertionError(wrong)
    """)
