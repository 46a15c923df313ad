"""What the page about promises says is shown by the quick tier: each promise, and each row of what happens when."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.support.pages import TOP

PAGE = (TOP / "docs" / "promises.md").read_text()
DATABASES = {"postgresql", "sqlite"}
#: A cell is one fact or one consequence; more is said below its table.
MOST_WORDS_OF_A_CELL = 20

#: The promises of each item of the list in the words of the page, with the tests below `tests/` that show them.
PROMISES = [
    {
        "Every committed message is delivered **at least once**;": [
            "scenarios/exactness/test_exactness.py::test_three_writers_and_two_relays",
            "scenarios/crash/test_crash_points.py::test_a_relay_that_dies_repeats_a_batch_at_most",
        ],
        "of a rolled-back transaction none, ever.": [
            "writing/test_transactions.py::test_a_keyed_message_shares_the_fate_of_its_transaction",
            "scenarios/matrix/test_matrix.py::test_a_row_and_its_message_share_the_fate_of_their_transaction",
        ],
    },
    {
        "**Per key in the order of commit**, also across topics, retries and dead letters, for writers of a key that"
        " [take turns](sending.md#order-of-a-key).": [
            "scenarios/exactness/test_exactness.py::test_three_writers_and_two_relays",
            "scenarios/crash/test_poison.py::test_a_decision_lets_the_key_go_on_in_order",
            "worker/test_parked.py::test_a_replayed_message_comes_before_later_ones_of_its_key",
        ],
        "A delayed message counts from when it falls due.": [
            "worker/test_parked.py::test_delayed_messages_of_a_key_come_in_the_order_in_which_they_fall_due",
        ],
    },
    {
        "Id and bytes of a message are **the same at every attempt**.": [
            "scenarios/crash/test_parking.py::test_a_retried_message_keeps_its_id_and_its_bytes",
        ],
        "Without failures nothing comes twice;": [
            "scenarios/exactness/test_exactness.py::test_three_writers_and_two_relays",
        ],
        "after a crash at most the unsettled batch.": [
            "scenarios/crash/test_crash_points.py::test_a_relay_that_dies_repeats_a_batch_at_most",
        ],
    },
    {
        "An outage of the destination moves **nothing to the dead letters**,": [
            "scenarios/crash/test_outage.py::test_an_outage_counts_nothing_and_the_backlog_drains_in_order",
        ],
        "and no message is dropped for its age.": [
            "store/test_purge.py::test_a_message_that_nobody_has_read_stays_however_old_it_is",
        ],
        "A message with an `expires_at` from its writer becomes a dead letter at that time.": [
            "scenarios/crash/test_parking.py::test_an_expired_message_dies_and_blocks_nothing",
        ],
    },
    {
        "The verdict on a transaction of [half messages](rocketmq.md) is **final**.": [
            "rocketmq/test_transaction_shape.py::test_commits_and_rollbacks_at_the_same_time_come_to_one_verdict",
        ],
        "An [extract](archive.md) **misses no message**.": [
            "spark/test_extract.py::test_a_second_extract_brings_what_came_after_the_first",
            "spark/test_extract.py::test_rows_of_a_transaction_that_commits_late_come_in_a_later_window",
        ],
    },
]

#: What may fail, in the words of the page, with the tests that show what happens then.
ROWS = {
    "the destination is down, refuses, or never answers": [
        "scenarios/crash/test_outage.py::test_an_outage_counts_nothing_and_the_backlog_drains_in_order",
        "unit/test_batch_handler_hanging.py::test_a_call_that_hangs_when_nothing_else_is_accepted_counts_nothing",
    ],
    "one stream is missing": [
        "scenarios/crash/test_outage.py::test_one_missing_topic_among_three_stops_only_itself",
        "cli/test_cli_relay.py::test_a_topic_that_is_not_accepted_is_named_in_the_log_with_the_destinations_text",
    ],
    "no answer comes for one topic": [
        "worker/test_refused_topics.py::test_a_topic_for_which_no_answer_comes_is_tried_alone_and_the_others_go_on",
        "unit/test_untried_topics.py::test_behind_two_calls_without_an_answer_the_log_goes_on_although_nothing_was_accepted",
    ],
    "one message always fails, while others are accepted": [
        "scenarios/crash/test_poison.py::test_a_decision_lets_the_key_go_on_in_order",
        "unit/test_retry.py::test_a_message_is_tried_ten_times_with_pauses_from_one_second_to_ten_minutes",
    ],
    "one message always fails, and nothing else comes": [
        "scenarios/crash/test_poison.py::test_of_a_message_that_fails_while_nothing_else_comes_only_a_retry_counts",
    ],
    "a call of the destination takes very long": [
        "scenarios/crash/test_hanging.py::test_a_key_waits_for_a_call_that_hangs",
    ],
    "eight calls hang, or four for five minutes": [
        "relay/test_relay_in_process.py::test_calls_that_never_come_back_do_not_pile_up_threads",
        "unit/test_batch_handler_hanging.py::test_too_many_calls_that_hang_end_it_and_what_they_have_is_parked",
        "unit/test_batch_handler_hanging.py::test_half_as_many_calls_end_it_when_they_hang_for_minutes",
    ],
    "the relay is killed": [
        "worker/test_worker.py::test_the_place_of_a_killed_worker_is_taken_when_its_lease_ends",
        "worker/test_standby.py::test_a_lease_is_not_claimed_at_the_first_look_whatever_the_clock_of_the_database_says",
    ],
    "a message ends the process each time it is handled: out of memory, a C library": [
        "worker/test_process_ends.py::test_a_message_that_ends_its_process_becomes_a_dead_letter",
    ],
    "the relay is suspended beyond its lease": [
        "worker/test_standby.py::test_no_call_begins_after_the_lease_has_gone_to_another",
        "store/test_leases.py::test_a_worker_without_its_lease_settles_nothing",
    ],
    "the tables are not there yet, or a privilege is missing for a while": [
        "relay/test_relay_in_process.py::test_what_passes_by_itself_ends_no_relay",
        "relay/test_relay_in_process.py::test_a_privilege_that_is_missing_for_a_while_ends_no_relay",
    ],
    "progress cannot be written: the disk is full, a privilege is missing": [
        "scenarios/crash/test_unsettled.py::test_a_process_that_is_started_again_sends_nothing_before_it_can_settle",
        "relay/test_relay_in_process.py::test_a_privilege_that_is_missing_for_a_while_ends_no_relay",
    ],
    "a pooler or a firewall ends the relay's idle connection while the destination works": [
        "worker/test_settling_together.py::test_a_lost_connection_repeats_none_of_them",
    ],
    "a connection to the PostgreSQL database stays open, and is never answered again": [
        "store/test_own_connections.py::test_a_silent_connection_is_given_up",
        "relay/test_relays.py::test_connections_that_fall_silent_are_given_up",
    ],
    "the database restarts": [
        "worker/test_worker_events.py::test_a_database_that_is_away_and_back_is_told_and_logged",
    ],
    "the clock of the database steps": [
        "worker/test_worker.py::test_a_lease_that_nobody_renews_is_taken_although_the_clock_went_back",
        "worker/test_standby.py::test_a_lease_is_not_claimed_at_the_first_look_whatever_the_clock_of_the_database_says",
    ],
    "a PostgreSQL database is loaded from a dump, or copied to another server": [
        "store/test_log_traps.py::test_a_copy_on_another_server_is_refused",
        "store/test_restore.py::test_a_restored_log_delivers_what_was_not_sent_and_what_comes",
    ],
    "a PostgreSQL server is recovered to an [earlier moment](deploy.md#after-a-restore)": [
        "scenarios/moving/test_restores.py::test_a_recovery_to_an_earlier_moment",
    ],
    "the log is truncated by hand, or its sequence restored, and ids are given out again": [
        "store/test_reused_ids.py::test_a_message_under_the_id_of_another_that_is_parked_stops_the_relay",
        "store/test_doctor.py::test_a_sequence_behind_ids_that_are_in_use_is_found_and_mended",
    ],
    "a writer is killed": [
        "scenarios/crash/test_crash_points.py::test_a_writer_that_dies_loses_and_invents_nothing",
    ],
    "a process that writes and [relays](embedded.md) is killed after its commit": [
        "relay/test_embedded.py::test_what_a_killed_process_has_committed_is_sent_by_the_relay_inside_another_one",
    ],
    "a transaction stays open for an hour": [
        "writing/test_transactions.py::test_a_transaction_that_stays_open_holds_back_no_other_and_comes_at_its_commit",
    ],
    "a statement of a PostgreSQL transaction failed, and the code commits nevertheless": [
        "writing/test_transactions_hard.py::test_a_block_whose_transaction_failed_does_not_pretend_to_commit",
    ],
}

#: Of a server, of copies of it, and of writers that do not wait for each other. SQLite has none of these.
ON_POSTGRESQL_ALONE = {
    "a connection to the PostgreSQL database stays open, and is never answered again",
    "the database restarts",
    "a PostgreSQL database is loaded from a dump, or copied to another server",
    "a PostgreSQL server is recovered to an [earlier moment](deploy.md#after-a-restore)",
    "a transaction stays open for an hour",
    "a statement of a PostgreSQL transaction failed, and the code commits nevertheless",
}


def section(title: str) -> str:
    """Return the text below a heading of the page, up to the next one of its kind."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_promise_of_the_page_has_its_tests():
    items = re.findall(r"^- (.*?)(?=^- |\Z)", section("Promised"), re.MULTILINE | re.DOTALL)

    assert [" ".join(promises) for promises in PROMISES] == [" ".join(item.split()) for item in items]


def test_every_row_of_what_happens_when_has_its_tests():
    cells = re.findall(r"^\| (.*?) \|", section("What happens when"), re.MULTILINE)

    assert list(ROWS) == [cell for cell in cells if cell != "something fails"]


def test_a_cell_is_one_fact_or_one_consequence():
    """Of all tables of the page, and of the table of the README that shows a part of them."""
    readme = (TOP / "README.md").read_text().partition("| something fails |")[2].partition("\n\n")[0]

    cells = [cell for line in f"{PAGE}\n{readme}".splitlines() if line.startswith("|") for cell in line.split("|")]
    assert {cell: words for cell in cells if (words := len(cell.split())) > MOST_WORDS_OF_A_CELL} == {}
    assert len(cells) > 100


@pytest.mark.smoke("collects the named files")
def test_the_quick_tier_shows_each_on_every_database_that_it_concerns():
    """A test that names neither database runs on PostgreSQL alone, or needs none."""
    shown = {said: tests for promises in [*PROMISES, ROWS] for said, tests in promises.items()}
    collected = quick({test for tests in shown.values() for test in tests})

    found = {said: set[str]().union(*(collected[test] for test in tests)) for said, tests in shown.items()}
    assert {test for test, databases in collected.items() if not databases} == set()
    assert {said: databases & DATABASES for said, databases in found.items() if said not in ON_POSTGRESQL_ALONE} == {
        said: DATABASES for said in shown if said not in ON_POSTGRESQL_ALONE
    }
    assert [said for said in ON_POSTGRESQL_ALONE if "sqlite" in found[said]] == []


def quick(tests: set[str]) -> Mapping[str, set[str]]:
    """Return for each test on which databases the quick tier has it, or "" where it names none."""
    files = sorted({f"tests/{test.partition('::')[0]}" for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--tier", "quick", *files]
    output = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=True).stdout
    return {test: databases_of(f"tests/{test}", output.splitlines()) for test in tests}


def databases_of(test: str, collected: Sequence[str]) -> set[str]:
    """Return the databases on which a test was collected, by its parameters."""
    cases = [name.removeprefix(test) for name in collected if name == test or name.startswith(f"{test}[")]
    return {next((database for database in DATABASES if database in re.split(r"\W", case)), "") for case in cases}
