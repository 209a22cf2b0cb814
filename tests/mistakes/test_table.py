"""The mistakes that newcomers made in their first hour with worqr, and the tests that read what comes of each.

A row is a mistake; its tests assert what the user sees. Most stand in this folder, others beside the code that answers.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

TABLE: dict[str, tuple[str, ...]] = {
    # The server
    "a URL without scheme, http://, a database name, a password with / # @": (
        "mistakes/test_servers.py::test_a_url_that_cannot_be_read",
    ),
    "an option of redis-py in the URL, TLS options of redis://": (
        "mistakes/test_servers.py::test_a_url_that_cannot_be_read",
    ),
    "Mesh('embedded')": ("mistakes/test_servers.py::test_a_url_that_cannot_be_read",),
    "Mesh(redis_url=...)": ("mistakes/test_servers.py::test_the_url_under_the_name_that_others_give_it",),
    "Mesh(keep_alive=...)": ("mistakes/test_servers.py::test_an_option_of_the_mesh_that_is_misspelt",),
    "the server is down": (
        "link/test_first_contact.py::test_a_dead_server_is_named_with_its_cause_and_the_remedy",
        "link/test_first_contact.py::test_the_remedy_names_where_the_url_comes_from",
        "cli/test_main.py::test_a_missing_server_is_one_sentence_with_the_remedy",
        "cli/test_main.py::test_a_server_that_is_away_is_one_line_and_no_log",
    ),
    "the host name does not resolve": (
        "link/test_first_contact.py::test_a_host_name_that_does_not_resolve_fails_at_once",
        "link/test_first_contact.py::test_a_host_name_that_cannot_be_one_fails_at_once",
    ),
    "the port speaks HTTP": ("link/test_first_contact.py::test_a_port_that_speaks_http_is_refused_with_its_own_words",),
    "the server is in protected mode": (
        "link/test_first_contact.py::test_protected_mode_is_refused_with_its_own_words",
    ),
    "the server never answers": ("link/test_outage.py::test_patience_ends_while_connecting_hangs",),
    "no password, a wrong one, a wrong user": ("mistakes/test_servers.py::test_a_wrong_password_and_a_wrong_user",),
    "too few rights": ("mistakes/test_servers.py::test_too_few_rights",),
    "database 99": ("mistakes/test_servers.py::test_a_database_that_is_not_there",),
    "Redis 6.2": ("mistakes/test_servers.py::test_a_server_that_is_too_old",),
    "rediss:// to a port without TLS": (
        "link/test_first_contact.py::test_tls_at_a_port_without_is_refused_with_what_the_server_says",
    ),
    "the URL of a cluster or of Sentinels to a single server": (
        "mistakes/test_servers.py::test_the_url_of_a_cluster_or_of_sentinels_to_a_single_server",
    ),
    # The command line
    "a package of the command line is missing": (
        "mistakes/test_servers.py::test_the_command_line_without_its_packages",
    ),
    "worqr run shop.py, shop:msh, shp:mesh, --queues rep": ("mistakes/test_command_line.py::test_what_cannot_be_run",),
    "worqr call shop.add a=1 for a number": ("mistakes/test_command_line.py::test_a_number_that_is_typed_as_a_text",),
    "worqr flower, ui, web": ("cli/test_usage_messages.py::test_names_of_others_lead_to_commands_that_exist",),
    "worqr dispatch --wait of what cannot be decoded": (
        "cli/test_produce_commands.py::test_a_payload_that_cannot_be_decoded_has_no_traceback_of_worqr",
    ),
    "worqr run of a module with a SyntaxError": (
        "mistakes/test_command_line.py::test_a_module_with_a_syntax_error",
        "mistakes/test_command_line.py::test_a_script_whose_module_is_run_as_well",
    ),
    "worqr run of a Django project": (
        "mistakes/test_command_line.py::test_a_worker_of_a_django_project",
        "mistakes/test_command_line.py::test_a_worker_of_a_django_project_with_wrong_settings",
    ),
    "Ctrl-C once, twice; a handler that does not end": (
        "cli/test_run.py::test_the_first_signal_lets_what_runs_end",
        "cli/test_run.py::test_the_second_signal_cancels_what_runs_and_gives_it_back",
        "cli/test_run.py::test_a_handler_that_refuses_to_end_is_named_and_left_behind",
    ),
    "no terminal, | head": ("cli/test_main.py::test_a_reader_who_has_seen_enough_is_no_traceback",),
    # No worker for it
    "a function name that is misspelt at the producer": (
        "peer/test_unserved_queue_reporter.py::test_a_queue_is_named_with_what_waits_what_was_meant_and_the_remedy",
        "peer/test_unserved_queue_reporter.py::test_the_leader_says_so",
        "cli/test_named_queue.py::test_a_queue_that_no_worker_serves_is_named_on_the_standard_error",
    ),
    "a function that is declared after the join": (
        "peer/test_late_functions.py::test_a_function_is_served_whether_it_was_declared_before_or_after_the_join",
    ),
    "a function that was renamed while tasks waited": (
        "peer/test_unserved_queue_reporter.py::test_the_leader_says_so",
    ),
    "join_in_thread() that nobody started": (
        "hosting/test_thread_peer.py::test_one_that_is_dropped_without_a_start_is_warned_of_where_it_was_made",
        "hosting/test_thread_peer.py::test_one_that_is_left_at_the_exit",
    ),
    "a worker with another prefix or on another server": (
        "peer/test_results.py::test_a_result_that_does_not_come_says_where_it_has_looked",
    ),
    "a parent that waits for its child with a concurrency of 1": (
        "peer/test_starvation_detector.py::test_a_parent_whose_worker_has_no_slot_for_its_child_is_logged_once_with_the_remedy",
        "peer/test_starvation_detector.py::test_a_function_that_waits_for_itself_needs_a_higher_concurrency",
    ),
    # Loops and threads
    "a plain function with a timeout that sleeps": (
        "peer/test_task_log.py::test_a_thread_that_goes_on_after_its_timeout_is_told_of_at_once_and_again_when_it_returns",
    ),
    "an asyncio call in a handler on Trio, a Trio call in one on asyncio": (
        "mistakes/test_loops.py::test_a_handler_that_calls_libraries_of_the_other_loop",
    ),
    "enqueue in a handler on asyncio": (
        "mistakes/test_loops.py::test_a_handler_on_asyncio_enqueues_without_a_connection_of_its_own",
    ),
    "not connected, join without a loop, run() in a loop": (
        "mistakes/test_loops.py::test_a_call_without_a_connection",
        "mistakes/test_loops.py::test_a_connection_without_a_loop",
        "mistakes/test_loops.py::test_joining_without_a_loop",
        "mistakes/test_loops.py::test_run_in_a_loop",
        "mistakes/test_loops.py::test_run_with_a_wrong_option_has_changed_nothing",
    ),
    "worqr.sync in a loop": ("mistakes/test_loops.py::test_sync_in_a_loop",),
    "with mesh.connect() instead of async with": ("mistakes/test_loops.py::test_a_block_without_async",),
    "a missing await": ("mistakes/test_loops.py::test_a_missing_await",),
    "a handler that blocks the loop": ("mistakes/test_loops.py::test_a_handler_that_blocks_the_loop",),
    "a call from a thread": ("mistakes/test_calling.py::test_a_call_from_a_thread_says_what_to_use",),
    "a fork after connecting": (
        "mistakes/test_loops.py::test_a_fork_after_connecting",
        "mistakes/test_loops.py::test_mistakes_leave_nothing",
    ),
    # Calls
    "fn() in place of fn.enqueue()": (
        "mistakes/test_calling.py::test_calling_the_function_in_place_of_naming_the_call",
    ),
    ".delay, .apply_async, .send, .kiq": ("mistakes/test_calling.py::test_a_method_of_another_library",),
    ".options(delay=5).enqueue": ("mistakes/test_calling.py::test_a_method_of_another_library",),
    "job.get(), .ready(), .state, .revoke(); mesh.send_task(), .enqueue(); queue.put(); worqr.current().retry()": (
        "mistakes/test_calling.py::test_an_attribute_of_an_object_of_another_library",
        "mistakes/test_calling.py::test_an_attribute_that_no_library_has",
    ),
    "batch.dispatch(fn, 1)": ("mistakes/test_calling.py::test_a_batch_that_gets_a_function",),
    "a number, an array or a str of numpy as an argument": (
        "mistakes/test_calling.py::test_a_number_of_another_library",
    ),
    "a dict with keys such as True or (1, 2)": ("mistakes/test_calling.py::test_a_key_that_json_does_not_have",),
    "calls of 10 MB": ("mistakes/test_calling.py::test_calls_of_10_mb",),
    "progress(50) for 50 %": ("mistakes/test_calling.py::test_progress_in_percent",),
    "countdown=, eta=, task_id= of a call": ("mistakes/test_calling.py::test_an_option_of_another_library",),
    "a datetime without a timezone": ("mistakes/test_calling.py::test_a_datetime_without_a_timezone",),
    "an argument that is not JSON, of a wrong type, missing, too many": (
        "mistakes/test_calling.py::test_arguments_that_its_handler_would_not_take",
    ),
    "a datetime, tuple or bytes for a parameter without annotation": (
        "mistakes/test_calling.py::test_an_argument_that_would_arrive_as_another_type",
    ),
    "str, dict or list in a raw queue": ("mistakes/test_calling.py::test_something_else_than_bytes_in_a_raw_queue",),
    "an option of a job at queue.enqueue()": ("mistakes/test_calling.py::test_an_option_that_raw_tasks_do_not_have",),
    "a payload of 17 MB": ("mistakes/test_calling.py::test_a_payload_of_17_mb",),
    # Declarations
    "@mesh.task(max_retries=, queue=), retry=3, eta=, tz=": (
        "mistakes/test_declaring.py::test_an_option_of_another_library_or_with_another_value",
    ),
    "RetryPolicy(max_retries=), Retry(countdown=), Limit(10, 60), Limit('10/m'), every(minutes=5)": (
        "mistakes/test_declaring.py::test_an_option_of_an_object_of_another_library",
    ),
    "a class or *args in the signature, a method, a generator": (
        "mistakes/test_declaring.py::test_what_cannot_be_a_task",
    ),
    'runs_in="process" with a lambda, a closure, async def, without the guard of __main__': (
        "mistakes/test_declaring.py::test_what_cannot_run_in_a_process",
        "mistakes/test_declaring.py::test_a_closure_cannot_run_in_a_process",
        "mistakes/test_declaring.py::test_a_process_of_a_script_without_a_guard",
    ),
    "on_failure without a parameter": (
        "mistakes/test_declaring.py::test_a_failure_handler_that_takes_nothing",
        "mistakes/test_declaring.py::test_a_failure_handler_may_take_its_record_in_any_way",
    ),
    "a notebook cell that runs twice": (
        "mistakes/test_declaring.py::test_a_notebook_cell_that_runs_twice",
        "mistakes/test_declaring.py::test_two_functions_of_one_name",
    ),
    "a wrong cron or every": ("mistakes/test_declaring.py::test_a_schedule_that_cannot_be",),
    # Results
    "result() without result_ttl": ("mistakes/test_results.py::test_a_result_that_nobody_keeps",),
    "result() of a failed job without result_ttl": (
        "mistakes/test_results.py::test_a_failed_job_whose_result_nobody_keeps",
    ),
    "a result that is not JSON": ("mistakes/test_results.py::test_a_result_that_is_not_json",),
    "two applications with one prefix and another signature": (
        "mistakes/test_results.py::test_two_applications_with_one_prefix_and_another_signature",
    ),
    "a new required parameter while old calls wait": (
        "mistakes/test_results.py::test_a_new_required_parameter_while_old_calls_wait",
        "peer/test_task_log.py::test_a_decoder_that_quotes_nothing_is_quoted",
    ),
    "a new default, a parameter that is gone": (
        "mistakes/test_results.py::test_a_new_default_and_a_parameter_that_is_gone",
    ),
    "a pickled payload": (
        "mistakes/test_results.py::test_a_payload_that_no_call_has_made",
        "peer/test_task_log.py::test_a_decoder_that_quotes_the_payload_is_not",
    ),
    "a process that dies": ("mistakes/test_results.py::test_a_process_that_dies",),
    # Tests
    "with testing.bench() instead of async with": ("mistakes/test_testing.py::test_a_bench_without_async",),
    "a bench in a test on asyncio": (
        "mistakes/test_testing.py::test_the_fixture_for_trio_in_a_test_on_asyncio",
        "mistakes/test_testing.py::test_the_fixtures_that_work_there",
    ),
}


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of the tests at the top of a file."""
    functions = (
        node
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("mistake", TABLE)
def test_its_tests_are_there(mistake: str) -> None:
    for node in TABLE[mistake]:
        file, _, name = node.partition("::")
        assert name in names_in(TESTS / file), node


def test_every_test_of_this_folder_has_its_row() -> None:
    named = {node for nodes in TABLE.values() for node in nodes}
    folder = Path(__file__).parent
    there = {
        f"mistakes/{path.name}::{name}"
        for path in folder.glob("test_*.py")
        if path != Path(__file__)
        for name in names_in(path)
    }
    assert there - named == set()
