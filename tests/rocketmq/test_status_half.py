"""Status tells how transactions stand, by group and topic, at the same cost for any number of them."""

from datetime import timedelta
from typing import Any, cast

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, SubscriptionError
from outbox.model.status import Count, TransactionsStatus
from outbox.rocketmq import TransactionMQProducer
from outbox.store.operations.half_status import transactions
from outbox.store.operations.status import statuses
from tests.rocketmq.halves import ask, begun, fill, producer
from tests.rocketmq.parts import ONE_DATABASE
from tests.store.test_status import Explained, looking
from tests.support.command_line import leading_to, outbox
from tests.support.leases import step_clock


def halves(engine: Engine) -> dict[tuple[str, str], TransactionsStatus]:
    """How half messages stand, by group and topic."""
    with looking(engine) as channel:
        found, _ = transactions(channel, *statuses(channel))
    return {(each.group, each.topic): each for each in found}


def numbers(found: TransactionsStatus) -> tuple[int, int, int, int]:
    """Pending, given up, committed, rolled back."""
    assert found.estimates == ()
    return found.half, found.given_up, found.committed, found.rolled_back


def test_nothing_is_shown_where_there_was_never_a_transaction(engine):
    shown, json = outbox(engine, "status"), outbox(engine, "status", "--json").json

    assert (halves(engine), "HALF" in shown.out, set(json)) == (
        {},
        False,
        {"version", "more", "at", "findings", "subscriptions", "log"},
    )


def test_messages_are_counted_by_group_and_topic(engine):
    begun(engine, "orders", "orders", "mail")
    begun(engine, "orders").commit()
    begun(engine, "mail").rollback()
    begun(engine, "orders", group="depot")

    found = {place: numbers(each) for place, each in halves(engine).items()}

    assert found == {
        ("depot", "orders"): (1, 0, 0, 0),
        ("shop", "mail"): (1, 0, 0, 1),
        ("shop", "orders"): (2, 0, 1, 0),
    }


@pytest.mark.parametrize(("again", "pending", "given_up"), [(False, (2, 1), (0, 0)), (True, (0, 0), (2, 1))])
def test_what_was_asked_about_waits_until_it_is_given_up(engine, again, pending, given_up):
    """It is parked meanwhile; of a transaction that is given up all messages wait for a person."""
    begun(engine, "orders", "orders", "mail")

    ask(engine, again=again)

    found = halves(engine)
    assert [numbers(found["shop", topic]) for topic in ("orders", "mail")] == [
        (pending[place], given_up[place], 0, 0) for place in (0, 1)
    ]


def test_a_verdict_on_what_was_given_up_counts_at_once(engine):
    """Also before a worker has cleared what it parked."""
    transaction = begun(engine, "orders", "orders")
    ask(engine)

    transaction.commit()

    assert numbers(halves(engine)["shop", "orders"]) == (0, 0, 2, 0)


def test_the_backlog_of_a_check_is_that_of_its_group_without_what_has_a_verdict(engine):
    begun(engine, "orders", "orders")
    begun(engine, "orders").commit()
    begun(engine, "orders", group="depot")

    json = outbox(engine, "status", "--json").json

    assert {each["name"]: each["backlog"] for each in json["subscriptions"]} == {
        "check:depot": 1, "check:shop": 2, "relay": 1,
    }  # fmt: skip


def test_the_oldest_and_the_latency_are_in_seconds_by_the_clock_of_the_database(engine):
    slow = begun(engine, "orders")
    step_clock(engine, timedelta(minutes=5), "outbox_message.created_at")
    slow.commit()
    begun(engine, "orders")

    look = Outbox(engine).admin.look()

    (found,), latency = look.transactions, look.latencies["orders"]
    assert found.oldest_seconds is not None and found.last_verdict_seconds is not None
    assert (latency["count"], latency["sum"] == latency["max"], 300 <= latency["max"] < 360) == (1, True, True)
    assert (0 <= found.oldest_seconds < 60, 0 <= found.last_verdict_seconds < 60) == (True, True)


def test_transactions_whose_check_was_dropped_are_shown_all_the_same(engine):
    begun(engine, "orders")
    outbox(engine, "subscriptions", "drop", "check:shop", "--yes")

    assert numbers(halves(engine)["shop", "orders"]) == (1, 0, 0, 0)


def test_a_check_that_is_dropped_during_a_look_is_no_error(engine):
    begun(engine, "orders")
    with looking(engine) as channel:
        now, found = statuses(channel)
        Outbox(engine).admin.drop("check:shop")

        (orders,), _ = transactions(channel, now, found)

    assert (orders.group, orders.topic) == ("shop", "orders")


def test_rocketmqs_metrics_are_there_under_their_names(engine):
    begun(engine, "orders", "mail")
    begun(engine, "orders").commit()
    begun(engine, "mail", group="depot").rollback()

    json = outbox(engine, "status", "--json").json

    latency = json.pop("rocketmq_finish_message_latency")
    assert {name: value for name, value in json.items() if name.startswith("rocketmq_")} == {
        "rocketmq_half_messages": {"orders": 1, "mail": 1},
        "rocketmq_commit_messages_total": {"orders": 1, "mail": 0},
        "rocketmq_rollback_messages_total": {"orders": 0, "mail": 1},
        "rocketmq_send_to_dlq_messages_total": {"relay": 0},
    }
    assert (latency["unit"], set(latency["topics"]), latency["topics"]["orders"]["count"]) == ("seconds", {"orders"}, 1)


@ONE_DATABASE
def test_people_see_a_table_of_their_own(engine):
    begun(engine, "orders")

    shown = outbox(engine, "status").out.splitlines()

    assert shown[-2].split() == [
        "GROUP", "TOPIC", "HALF", "OLDEST", "GIVEN", "UP", "COMMITTED", "ROLLED", "BACK", "LAST", "VERDICT",
    ]  # fmt: skip
    assert (shown[-1].split()[:3], shown[-1].split()[-4:]) == (["shop", "orders", "1"], ["0", "0", "0", "-"])


@ONE_DATABASE
def test_a_group_that_nobody_checks_back_on_is_told_with_what_to_do(engine):
    begun(engine, "orders", timeout=timedelta(hours=1))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = '2020-01-01 00:00:00'"))

    (found,) = [each for each in Outbox(engine).admin.diagnosis() if each.subscription == "check:shop"]

    assert (found.what, found.advice, found.next_command) == (
        "no worker checks back on group shop",
        "start a producer of the group, or a check of the group; for the command of a check, run",
        f"outbox half list --group shop {leading_to(engine)}",
    )


@ONE_DATABASE
def test_a_check_is_no_reason_to_drop_the_relay(engine):
    """It sends nothing."""
    begun(engine, "orders")

    assert "subscriptions drop relay" not in outbox(engine, "status").err


@ONE_DATABASE
def test_a_check_is_listed_with_its_group(engine):
    begun(engine, "orders")

    shown = outbox(engine, "subscriptions", "list").out.splitlines()[1].split("  ")
    json = outbox(engine, "subscriptions", "list", "--json").json["subscriptions"][0]

    assert [each.strip() for each in shown if each][:4] == [
        "check:shop",
        "transactions of shop",
        "(check-back)",
        "block",
    ]
    assert (json["kind"], json["topics"], json["tags"]) == ("check", ["RMQ_SYS_TRANS_HALF_TOPIC"], ["shop"])


@ONE_DATABASE
def test_of_a_check_only_its_grace_may_be_altered(engine):
    """Given other topics it would pass over transactions."""
    begun(engine, "orders")

    ended = [
        outbox(engine, "subscriptions", "alter", "check:shop", *options)
        for options in (["--topics", "a"], ["--to", "nats://localhost"], ["--grace", "9s"])
    ]

    assert [each.code for each in ended] == [2, 2, 0]
    assert ended[0].err == "Error: check:shop reads the transactions of its producer group; alter its grace only\n"


@ONE_DATABASE
def test_a_producer_that_wants_to_wait_longer_is_told_how(engine):
    begun(engine, "orders", timeout=timedelta(seconds=6))

    with pytest.raises(SubscriptionError, match="give this worker a transaction_timeout of 6 s, or run: outbox subscr"):
        begun(engine, "orders", timeout=timedelta(seconds=7))


@ONE_DATABASE
def test_what_goes_with_a_dropped_check_is_told(engine):
    begun(engine, "orders")

    asked = outbox(engine, "subscriptions", "drop", "check:shop")

    assert (asked.code, "answer no and run: outbox half list --group shop" in asked.err) == (2, True)


@ONE_DATABASE
def test_a_transaction_that_was_given_up_is_no_dead_letter_to_discard(engine):
    """It would be forgotten, without a verdict."""
    begun(engine, "orders")
    ask(engine)
    (letter,) = outbox(engine, "parked", "list", "--state", "dead", "--json").json["parked"]

    by_name = outbox(engine, "parked", "discard", "--all", "--name", "check:shop", "--reason", "x", "--yes")
    by_id = outbox(engine, "parked", "discard", str(letter["id"]), "--reason", "x")
    by_all = outbox(engine, "parked", "discard", "--all", "--reason", "x", "--yes")

    assert (by_name.code, "outbox half list" in by_name.err, by_id.code, by_all.code) == (2, True, 2, 0)
    assert outbox(engine, "parked", "list", "--state", "dead", "--json").json["parked"] == [letter]


@pytest.mark.storm
def test_what_is_beyond_a_bounded_look_is_estimated(engine):
    TransactionMQProducer("shop", producer(engine)._outbox)._broker.declare("shop", timedelta(0))
    fill(engine, 40_000, decided=30_000)

    found = halves(engine)["shop", "orders"]

    assert found.count("half").about and found.half == pytest.approx(10_000, rel=0.35)
    assert found.count("committed").about and found.committed == pytest.approx(30_000, rel=0.35)
    assert found.count("rolled_back") == Count(0)


@pytest.mark.storm
@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
def test_no_statement_reads_more_than_its_bound(pg_engine, plans):
    """100 000 transactions, half of them with a verdict; 10 000 were asked about, some wait behind one given up."""
    TransactionMQProducer("shop", producer(pg_engine)._outbox)._broker.declare("shop", timedelta(0))
    with pg_engine.begin() as connection:
        for table in ("message", "op", "parked"):
            connection.execute(text(f"ALTER TABLE outbox_{table} SET (autovacuum_enabled = off)"))
    fill(pg_engine, 100_000, decided=50_000)
    with pg_engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, tags, headers, created_at,
                                           state, unit, place, attempts, due_at, parked_at, body)
                SELECT 'check:shop', id, message_id, topic, key, slot, tags, headers, created_at,
                       CASE WHEN id % 10 = 0 THEN 'dead' WHEN id % 10 >= 5 THEN 'retry' END,
                       key, 1, 1, created_at, created_at, body
                FROM outbox_message WHERE key > 'b000090000'""")
        )
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    with looking(pg_engine) as channel:
        channel.run(f"SET plan_cache_mode = {plans}")
        explained = Explained(channel)

        transactions(cast("Any", explained), *statuses(cast("Any", explained)))

    most = max(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in explained.nodes()
    )
    scans = {
        node["Node Type"] for node in explained.nodes() if node.get("Relation Name") in ("outbox_message", "outbox_op")
    }
    assert (most <= 10_001, "Seq Scan" in scans) == (True, False)
