"""The history of a subscription, told from its settles: messages a second, lag, and what is parked."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import HistoryStep, Message, Outbox
from tests.support.command_line import outbox as run

MINUTE = timedelta(minutes=1)


def change(engine: Engine, statement: str, **parameters: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement), parameters)


def write(outbox: Outbox, number: int, seconds_ago: int, topic: str = "orders") -> int:
    """Write messages that are so old; return the id of the last."""
    with outbox.begin() as session:
        outbox.send_all(session, (Message(topic, b"1") for _ in range(number)))
    last = int(max(each.id or 0 for each in outbox.admin.newest()))
    past = outbox.database.later(str(-seconds_ago))
    change(outbox.database.engine, f"UPDATE outbox_message SET created_at = {past} WHERE id > :id", id=last - number)
    return last


def settle(outbox: Outbox, n: int, passed: int, seconds_ago: int, name: str = "relay", partition: int = 0) -> None:
    """Store that the ids up to one were passed so long ago."""
    reads = outbox.database.dialect.reads
    columns, values = (", highest_id", ", :passed") if reads.transaction_ids else ("", "")
    past = outbox.database.later(str(-seconds_ago))
    change(
        outbox.database.engine,
        "INSERT INTO outbox_progress"
        f" (subscription, generation, partition, epoch, n, base, settled_at{columns})"
        f" VALUES (:name, 1, :partition, 1, :n, :base, {past}{values})",
        name=name,
        n=n,
        passed=passed,
        base=f"{passed + 1}:{passed + 1}:",
        partition=partition,
    )


def begins(outbox: Outbox, name: str = "relay") -> None:
    """Make the beginning of a subscription a day old, and forget it."""
    change(outbox.database.engine, "DELETE FROM outbox_progress WHERE subscription = :name", name=name)


def numbers(steps: tuple[HistoryStep, ...]) -> list[tuple[int | None, float | None]]:
    """What each step has passed, and its lag to the ten seconds."""
    return [(each.passed, None if each.lag_seconds is None else round(each.lag_seconds, -1)) for each in steps]


def test_each_step_has_what_was_passed_and_the_lag_at_its_end(engine):
    outbox = Outbox(engine)
    begins(outbox)
    first = write(outbox, 3, 200)
    second = write(outbox, 5, 100)
    settle(outbox, 1, 0, 400)
    settle(outbox, 2, first, 150)
    settle(outbox, 3, second - 1, 90)
    settle(outbox, 4, second, 30)

    found = outbox.admin.history("relay", since=4 * MINUTE, step=MINUTE)

    # At the end of the first minute the first three are 20 s old; in the second minute the worker has passed them.
    assert numbers(found.steps) == [(0, 20.0), (3, 0.0), (4, 40.0), (1, 0.0)]
    assert [each.per_second for each in found.steps] == [0.0, 0.05, 0.067, 0.017]
    assert (found.subscription, found.step_seconds) == ("relay", 60.0)


def test_of_a_time_before_the_first_settle_nothing_is_known(engine):
    outbox = Outbox(engine)
    begins(outbox)
    settle(outbox, 7, write(outbox, 3, 200), 90)
    settle(outbox, 8, write(outbox, 3, 50), 30)

    assert numbers(outbox.admin.history("relay", since=3 * MINUTE, step=MINUTE).steps) == [
        (None, None), (None, 0.0), (3, 0.0),
    ]  # fmt: skip


def test_a_subscription_that_has_just_begun_has_passed_nothing_before(engine):
    outbox = Outbox(engine)
    settle(outbox, 1, write(outbox, 3, 1), 0)

    (found,) = outbox.admin.history("relay", since=MINUTE, step=MINUTE).steps

    assert (found.passed, found.lag_seconds) == (3, 0.0)


def test_only_selected_messages_count_and_many_are_estimated_from_a_sample(engine):
    outbox = Outbox(engine)
    outbox.admin.create("mails", destination="nats://h:4222", topics=["mail"])
    begins(outbox, "mails")
    settle(outbox, 1, 0, 90, "mails")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("mail" if n % 4 == 0 else "orders", b"1") for n in range(1000)])
    settle(outbox, 2, 10, 30, "mails")
    (few,) = outbox.admin.history("mails", since=MINUTE, step=MINUTE).steps
    settle(outbox, 3, 1000, 5, "mails")

    (many,) = outbox.admin.history("mails", since=MINUTE, step=MINUTE).steps

    assert (few.passed, many.passed) == (3, 250)


def test_partitions_are_added_up_and_the_one_that_is_behind_has_the_lag(engine):
    outbox = Outbox(engine)
    outbox.admin.create("other", destination="nats://h:4222", partitions=2)
    begins(outbox, "other")
    with outbox.begin() as session:
        outbox.send_all(session, (Message("t", b"1") for _ in range(8)))
    change(engine, "UPDATE outbox_message SET slot = id % 2")
    change(engine, f"UPDATE outbox_message SET created_at = {outbox.database.later('-50')}")
    for partition in (0, 1):
        settle(outbox, 1, 0, 90, "other", partition)
    settle(outbox, 2, 8, 30, "other", 0)

    (found,) = outbox.admin.history("other", since=MINUTE, step=MINUTE).steps

    assert (found.passed, found.lag_seconds and round(found.lag_seconds, -1)) == (4, 50.0)


def test_what_is_parked_now_is_shown_by_the_time_of_its_parking(engine):
    outbox = Outbox(engine)
    write(outbox, 2, 300)
    for id, ago in ((1, 90), (2, 30)):
        change(
            engine,
            "INSERT INTO outbox_parked (subscription, id, message_id, topic, slot, created_at, state, place, attempts,"
            " parked_at, body) SELECT 'relay', id, message_id, topic, slot, created_at, 'dead', 1, 1,"
            f" {outbox.database.later(str(-ago))}, body FROM outbox_message WHERE id = :id",
            id=id,
        )

    found = outbox.admin.history("relay", since=3 * MINUTE, step=MINUTE)

    assert ([each.parked["dead"] for each in found.steps], found.parked_is_minimum) == ([0, 1, 2], ())


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"since": timedelta(0)}, "since must be at least 1 s"),
        ({"step": timedelta(milliseconds=1)}, "step must be at least 1 s"),
        ({"step": 60}, "step must be a timedelta"),
        ({"since": timedelta(days=1), "step": timedelta(seconds=1)}, "more than 1000 steps"),
    ],
)
def test_a_length_of_time_that_makes_no_sense_is_refused(sqlite_engine, lengths, said):
    with pytest.raises(ValueError, match=said):
        Outbox(sqlite_engine).admin.history("relay", **lengths)


def test_the_awaited_form_and_the_command_line_show_the_same(engine):
    outbox = Outbox(engine)
    settle(outbox, 1, write(outbox, 3, 1), 0)
    found = asyncio.run(outbox.admin.ahistory("relay", since=MINUTE, step=MINUTE))

    assert [each.passed for each in found.steps] == [3]
    lines = run(engine, "subscriptions", "history", "relay", "--since", "1m", "--step", "1m").out.splitlines()
    assert [line.split()[2:5] for line in lines[1:]] == [["3", "0.05", "0"]]
