"""Findings about a group that receives by receipts: in hands is no failure, and messages that wait need a client."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.admin.trace import in_words
from outbox.rocketmq import SimpleConsumer
from tests.rocketmq.test_simple_consumer import HOUR, NOW, consumer_of, send
from tests.support.command_line import outbox as typed
from tests.support.parked import states

BACK = {
    "postgresql": "{0} - interval '2 hours'",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', {0}, '-2 hours')",
}


def two_hours_later(engine: Engine, **columns: str) -> None:
    """Make these columns of tables older, as if the time had passed."""
    with engine.begin() as connection:
        for table, names in columns.items():
            sets = ", ".join(f"{each} = {BACK[engine.dialect.name].format(each)}" for each in names.split())
            connection.execute(text(f"UPDATE {table} SET {sets}"))


def found(outbox: Outbox, name: str = "billing") -> list[tuple[str, str, str | None, str | None, str | None]]:
    """The findings about the group: what, why, and what to do."""
    return [
        (each.kind, each.what, each.evidence, each.advice, each.next_command)
        for each in outbox.admin.diagnosis()
        if each.subscription == name
    ]


def test_what_is_handed_out_is_no_failure_until_its_time_is_over(engine, outbox):
    consumer = consumer_of(outbox)
    send(outbox, "1", "2")
    assert len(consumer.receive(2, 3 * HOUR)) == 2
    two_hours_later(engine, outbox_parked="created_at parked_at due_at", outbox_progress="settled_at")

    assert (found(outbox), states(engine)) == ([], {"retry": 2})


def test_what_is_in_the_hands_of_a_client_counts_apart_from_what_is_tried_again(engine, outbox):
    consumer = consumer_of(outbox)
    send(outbox, "1", "2", "3")
    first, *_ = consumer.receive(3, HOUR)
    consumer.change_invisible_duration(first, NOW)

    (status,) = [each for each in outbox.admin.look().subscriptions if each.name == "billing"]
    shown = typed(engine, "status").out.splitlines()
    (row,) = [line.split() for line in shown if line.startswith("billing")]

    assert status.parked == {"delayed": 0, "waiting": 0, "retry": 1, "dead": 0, "behind": 0, "inflight": 2}
    names = ["DELAYED", "WAITING", "RETRY", "DEAD", "BEHIND", "INFLIGHT"]
    assert (shown[0].split()[-7:-1], row[-7:-1]) == (names, ["0", "0", "1", "0", "0", "2"])


@pytest.mark.parametrize("in_hands", [False, True])
def test_what_was_not_acknowledged_in_time_is_told_with_the_need_of_a_client(engine, outbox, in_hands):
    """Of two messages that went out, one may be in hands still."""
    consumer = consumer_of(outbox)
    send(outbox, "1", "2")
    first, _second = consumer.receive(2, HOUR)
    if in_hands:
        consumer.change_invisible_duration(first, 3 * HOUR)
    two_hours_later(engine, outbox_parked="created_at parked_at due_at", outbox_progress="settled_at")

    line = outbox.database.commands.line
    number = "1 message" if in_hands else "2 messages"
    assert found(outbox) == [
        (
            "failing",
            f"{number} failed and {'is' if in_hands else 'are'} tried again",
            "handed out, and not acknowledged in time",
            "to see them, run",
            line("parked", "list", "--name", "billing", "--state", "retry"),
        ),
        (
            "not_run",
            "no client receives",
            "later messages are not purged",
            "start a client of the group; or, to give the group up, run",
            line("subscriptions", "drop", "billing"),
        ),
    ]


def test_what_comes_again_at_once_is_no_failure_yet(engine, outbox):
    """It may have been in hands for long, and a client that waits gets it in a moment."""
    consumer = consumer_of(outbox)
    send(outbox, "1")
    (message,) = consumer.receive(1, HOUR)
    two_hours_later(engine, outbox_parked="created_at parked_at")

    consumer.change_invisible_duration(message, NOW)

    assert found(outbox) == []


@pytest.mark.parametrize("group", ["billing", "billing|orders"])
@pytest.mark.parametrize(("written", "aged"), [(0, True), (1, False), (1, True)])
def test_a_group_without_a_worker_needs_a_client_once_messages_wait_for_long(engine, outbox, group, written, aged):
    """Clients that wait for messages store no progress for an hour."""
    consumer = SimpleConsumer(group, outbox, {"orders": "*"}, await_duration=timedelta(milliseconds=1))
    assert consumer.receive(1, HOUR) == []
    if "|" in group:
        outbox.admin.reset(group, "earliest")
    send(outbox, *["1"] * written)
    two_hours_later(engine, outbox_progress="settled_at", **({"outbox_message": "created_at"} if aged else {}))

    drop = outbox.database.commands.line("subscriptions", "drop", group)
    advice = "start a client of the group; or, to give the group up, run"
    needs = ("not_run", "no client receives", "1 message waits; later messages are not purged", advice, drop)
    assert found(outbox, group) == ([needs] if written and aged else [])


def test_a_message_in_hands_is_told_as_handed_out(outbox):
    consumer = consumer_of(outbox)
    send(outbox, "1")
    assert len(consumer.receive(1, HOUR)) == 1

    (copy,) = outbox.admin.parked(name="billing")

    assert in_words(copy).startswith("handed out once, the last time until 2")
