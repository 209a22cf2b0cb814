"""The mistakes of a first hour with worqr whose tests stand beside the code that answers. All others have theirs in this folder.

A row is a mistake; its tests assert what the user sees.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent

ELSEWHERE = """
the server is down
    link: test_a_dead_server_is_named_with_its_cause_and_the_remedy
    link: test_the_remedy_names_where_the_url_comes_from
    cli: test_a_missing_server_is_one_sentence_with_the_remedy
    cli: test_a_server_that_is_away_is_one_line_and_no_log
the host name does not resolve
    link: test_a_host_name_that_does_not_resolve_fails_at_once
    link: test_a_host_name_that_cannot_be_one_fails_at_once
the port speaks HTTP
    link: test_a_port_that_speaks_http_is_refused_with_its_own_words
the server is in protected mode
    link: test_protected_mode_is_refused_with_its_own_words
the server never answers
    link: test_patience_ends_while_connecting_hangs
rediss:// to a port without TLS
    link: test_tls_at_a_port_without_is_refused_with_what_the_server_says
worqr flower, ui, web
    cli: test_names_of_others_lead_to_commands_that_exist
worqr dispatch --wait of what cannot be decoded
    cli: test_a_payload_that_cannot_be_decoded_has_no_traceback_of_worqr
Ctrl-C once, twice; a handler that does not end
    cli: test_the_first_signal_lets_what_runs_end
    cli: test_the_second_signal_cancels_what_runs_and_gives_it_back
    cli: test_a_handler_that_refuses_to_end_is_named_and_left_behind
no terminal, | head
    cli: test_a_reader_who_has_seen_enough_is_no_traceback
a function name that is misspelt at the producer
    peer: test_a_queue_is_named_with_what_waits_what_was_meant_and_the_remedy
    peer: test_the_leader_says_so
    cli: test_a_queue_that_no_worker_serves_is_named_on_the_standard_error
a function that is declared after the join
    peer: test_a_function_is_served_whether_it_was_declared_before_or_after_the_join
a function that was renamed while tasks waited
    peer: test_the_leader_says_so
join_in_thread() that nobody started
    hosting: test_one_that_is_dropped_without_a_start_is_warned_of_where_it_was_made
    hosting: test_one_that_is_left_at_the_exit
a worker with another prefix or on another server
    peer: test_a_result_that_does_not_come_says_where_it_has_looked
a parent that waits for its child with a concurrency of 1
    peer: test_a_parent_whose_worker_has_no_slot_for_its_child_is_logged_once_with_the_remedy
    peer: test_a_function_that_waits_for_itself_needs_a_higher_concurrency
a plain function with a timeout that sleeps
    peer: test_a_thread_that_goes_on_after_its_timeout_is_told_of_at_once_and_again_when_it_returns
a new required parameter while old calls wait
    peer: test_a_decoder_that_quotes_nothing_is_quoted
a pickled payload
    peer: test_a_decoder_that_quotes_the_payload_is_not
"""


def test_its_tests_are_there() -> None:
    for folder, name in re.findall(r"^    (\w+): (\w+)$", ELSEWHERE, re.MULTILINE):
        assert any(f"def {name}(" in file.read_text("utf-8") for file in (TESTS / folder).rglob("test_*.py")), name
