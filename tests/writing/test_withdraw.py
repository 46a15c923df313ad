"""A delayed message that its writer takes back, or replaces, reaches nobody; and the answer is never wrong."""

import asyncio
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import InvalidMessageError, Message, NoTransactionError, Outbox, Relay
from outbox.model.message import uuid7
from outbox.store.database import Database
from outbox.store.idempotency.withdrawals import Withdrawals
from outbox.store.operations.purge import Purge
from tests.support.destination import Destination
from tests.support.leases import step_clock
from tests.support.parked import states
from tests.support.waiting import eventually

HOUR = timedelta(hours=1)
MOMENTS = ("outbox_message.deliver_at", "outbox_parked.deliver_at", "outbox_parked.due_at")


def pass_hours(engine: Engine, hours: float) -> None:
    """All that is delayed is due so much earlier."""
    for moment in MOMENTS:
        step_clock(engine, hours * HOUR, moment)


def relayed(engine: Engine, *, name: str = "relay") -> list[bytes]:
    """The bodies that a relay sends now."""
    found = Destination()
    with closing(Relay(Outbox(engine), found, name=name)) as relay:
        relay.until_empty()
    return found.bodies


def send(engine: Engine, body: str, **fields) -> UUID:
    outbox = Outbox(engine)
    with outbox.begin() as session:
        return outbox.send(session, "orders", body, **{"delay": HOUR, **fields})


def withdraw(engine: Engine, *given, **named) -> bool:
    outbox = Outbox(engine)
    with outbox.begin() as session:
        return outbox.withdraw(session, *given, **named)


def log(engine: Engine) -> list[bytes]:
    with engine.connect() as connection:
        return [bytes(body) for body in connection.scalars(text("SELECT body FROM outbox_message ORDER BY id"))]


# In time


@pytest.mark.parametrize("key", [None, "order-7"])
@pytest.mark.parametrize("read", [False, True], ids=["nobody has read it", "it is parked"])
def test_a_delayed_message_that_is_taken_back_reaches_nobody(engine, read, key):
    id = send(engine, "close", key=key)
    if read:
        assert (relayed(engine), states(engine)) == ([], {"delayed": 1})

    in_time = withdraw(engine, id)
    pass_hours(engine, 2)

    assert (in_time, relayed(engine), states(engine), log(engine)) == (True, [], {}, [b"close"])


def test_other_messages_go_on(engine):
    ids = [send(engine, body, key="order-7") for body in ("first", "second", "third")]
    relayed(engine)

    withdraw(engine, ids[1])
    pass_hours(engine, 2)

    assert relayed(engine) == [b"first", b"third"]


def test_every_subscription_leaves_the_message_out(engine):
    id = send(engine, "close")
    relayed(engine, name="first")

    withdraw(engine, id)
    pass_hours(engine, 2)

    assert (relayed(engine, name="first"), relayed(engine, name="second")) == ([], [])


def test_a_message_is_taken_back_in_the_transaction_that_sent_it(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        in_time = outbox.withdraw(session, outbox.send(session, "orders", "close", delay=HOUR))
    pass_hours(engine, 2)

    assert (in_time, relayed(engine)) == (True, [])


def test_a_second_withdrawal_says_the_same(engine):
    id = send(engine, "close")

    assert [withdraw(engine, id), withdraw(engine, id)] == [True, True]


def test_a_withdrawal_that_is_rolled_back_was_none(engine):
    outbox, id = Outbox(engine), send(engine, "close")

    with pytest.raises(ZeroDivisionError), outbox.begin() as session:
        outbox.withdraw(session, id)
        raise ZeroDivisionError
    pass_hours(engine, 2)

    assert relayed(engine) == [b"close"]


# Too late


def test_what_is_due_is_not_taken_back(engine):
    id = send(engine, "close")
    pass_hours(engine, 2)

    assert (withdraw(engine, id), relayed(engine), withdraw(engine, id)) == (False, [b"close"], False)


def test_only_delayed_messages_are_taken_back(engine):
    id = send(engine, "now", delay=None)

    assert (withdraw(engine, id), withdraw(engine, uuid7()), relayed(engine)) == (False, False, [b"now"])


def test_a_delayed_message_that_a_person_has_replayed_is_not_taken_back(engine):
    """It went out before its time."""
    id = send(engine, "close")
    relayed(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_parked SET due_at = :now"), {"now": now_of(connection)})

    assert (relayed(engine), withdraw(engine, id)) == ([b"close"], False)


def now_of(connection: Connection) -> object:
    now = datetime.now(UTC)
    return now.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if connection.dialect.name == "sqlite" else now


# Beside a relay


def test_a_message_that_falls_due_in_a_transaction_that_takes_it_back_waits_for_the_end(pg_engine):
    """The other messages do not, except those of its key."""
    outbox = Outbox(pg_engine)
    id = send(pg_engine, "close", key="order-7")
    send(pg_engine, "behind", key="order-7")
    relayed(pg_engine)
    with pg_engine.connect() as writer:
        in_time = outbox.withdraw(writer, id)
        pass_hours(pg_engine, 2)
        send(pg_engine, "other", delay=None)
        meanwhile = Destination()
        with Relay(outbox, meanwhile):
            assert eventually(lambda: meanwhile.bodies == [b"other"])
            assert eventually(lambda: "delayed" not in states(pg_engine))
        writer.commit()

    assert (in_time, meanwhile.bodies, relayed(pg_engine)) == (True, [b"other"], [b"behind"])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_message_that_a_relay_first_reads_when_it_is_due_waits_as_well(pg_engine, end):
    outbox, id = Outbox(pg_engine), send(pg_engine, "close")
    with pg_engine.connect() as writer:
        outbox.withdraw(writer, id)
        pass_hours(pg_engine, 2)
        with Relay(outbox, Destination()):
            assert eventually(lambda: states(pg_engine) == {"delayed": 1})
        getattr(writer, end)()

    assert relayed(pg_engine) == {"commit": [], "rollback": [b"close"]}[end]


def test_a_reader_sees_a_withdrawal_that_ends_between_its_two_looks(pg_engine):
    """The locks are tried in a statement of their own: a snapshot from before would not hold the withdrawal."""
    outbox, id = Outbox(pg_engine), send(pg_engine, "close")
    message = Message("orders", b"")
    message.message_id, message.deliver_at = id, datetime.now(UTC)
    with closing(Database(pg_engine).open()) as channel, pg_engine.connect() as writer:
        outbox.withdraw(writer, id)
        open = Withdrawals(channel).of([message])
        writer.commit()

        assert (open.open, Withdrawals(channel).of([message]).withdrawn) == ([message], [message])


def test_writers_beside_relays_are_never_told_wrongly(engine):
    """Each message that falls due about now is either sent or taken back."""
    outbox, sent, taken = Outbox(engine), Destination(), list[UUID]()
    delays = [timedelta(milliseconds=10 * n) for n in range(40)]
    with outbox.begin() as session:
        ids = outbox.send_all(session, [Message("orders", b"", delay=delay) for delay in delays])

    def take_back() -> None:
        for id in ids[::-1]:
            if withdraw(engine, id):
                taken.append(id)

    with Relay(outbox, sent):
        writer = threading.Thread(target=take_back)
        writer.start()
        writer.join(120)
        assert eventually(lambda: len(sent.messages) + len(taken) >= len(ids))

    assert sorted(map(str, [*taken, *(m.message_id for m in sent.messages)])) == sorted(map(str, ids))


# By dedup key


def test_a_message_is_taken_back_by_its_dedup_key_which_is_free_again(engine):
    send(engine, "close", dedup_key="order-7")

    in_time = withdraw(engine, dedup_key="order-7")
    send(engine, "close again", dedup_key="order-7")
    pass_hours(engine, 2)

    assert (in_time, relayed(engine)) == (True, [b"close again"])


def test_a_dedup_key_that_stands_for_no_message_takes_nothing_back(engine):
    assert withdraw(engine, dedup_key="order-7") is False


def test_the_dedup_key_of_what_is_due_stays(engine):
    send(engine, "close", dedup_key="order-7")
    pass_hours(engine, 2)

    in_time = withdraw(engine, dedup_key="order-7")
    send(engine, "again", dedup_key="order-7", delay=None)

    assert (in_time, relayed(engine)) == (False, [b"close"])


# Replaced


def test_a_delayed_message_is_replaced(engine):
    first = send(engine, "at five", dedup_key="order-7", dedup="replace")
    relayed(engine)

    second = send(engine, "at six", dedup_key="order-7", dedup="replace")
    pass_hours(engine, 2)

    assert (first == second, relayed(engine)) == (False, [b"at six"])


def test_what_is_due_is_followed_by_what_would_have_replaced_it(engine):
    send(engine, "first", dedup_key="order-7", dedup="replace")
    pass_hours(engine, 2)
    send(engine, "second", dedup_key="order-7", dedup="replace")
    pass_hours(engine, 2)

    assert relayed(engine) == [b"first", b"second"]


def test_of_messages_that_replace_each_other_in_one_list_the_last_is_written(engine):
    outbox = Outbox(engine)
    messages = [Message("orders", body, delay=HOUR, dedup_key="order-7", dedup="replace") for body in "abc"]

    with outbox.begin() as session:
        ids = outbox.send_all(session, messages)

    assert (ids, log(engine)) == ([messages[2].message_id] * 3, [b"c"])


def test_a_message_that_keeps_does_not_replace(engine):
    first = send(engine, "first", dedup_key="order-7", dedup="replace")

    assert (send(engine, "second", dedup_key="order-7") == first, log(engine)) == (True, [b"first"])


def test_writers_that_replace_at_once_leave_one_message(engine):
    bodies = [f"{n}" for n in range(12)]
    send(engine, "first", dedup_key="order-7", dedup="replace")
    threads = [
        threading.Thread(target=send, args=(engine, body), kwargs={"dedup_key": "order-7", "dedup": "replace"})
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    pass_hours(engine, 2)

    assert (sorted(log(engine)[1:]), relayed(engine)) == (sorted(b.encode() for b in bodies), [log(engine)[-1]])


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"dedup": "replace"}, "needs a dedup_key"), ({"dedup": "newest", "dedup_key": "a"}, "must be")],
)
def test_a_replacement_needs_a_key(fields, told):
    with pytest.raises(InvalidMessageError, match=told):
        Message("orders", b"", **fields)


# Handles


def test_every_kind_of_handle_takes_messages_back(pg_engine):
    outbox, ids = Outbox(pg_engine), [send(pg_engine, "close") for _ in range(4)]
    with Session(pg_engine) as session, session.begin():
        answers = [outbox.withdraw(session, ids[0])]
    with pg_engine.begin() as connection:
        answers.append(outbox.withdraw(connection, ids[1]))
    url = pg_engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as driver:
        answers.append(outbox.withdraw(driver, ids[2]))
    answers.append(asyncio.run(withdrawn_on_an_async_driver(outbox, url, ids[3])))

    pass_hours(pg_engine, 2)
    assert (answers, relayed(pg_engine)) == ([True] * 4, [])


async def withdrawn_on_an_async_driver(outbox: Outbox, url: str, id) -> bool:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return await outbox.awithdraw(connection, id)


@pytest.mark.parametrize(
    "given", [{}, {"message_id": "7"}, {"message_id": uuid7(), "dedup_key": "a"}], ids=["neither", "no UUID", "both"]
)
def test_a_withdrawal_names_one_message(sqlite_engine, given):
    with pytest.raises(TypeError, match="not both"):
        withdraw(sqlite_engine, **given)


def test_a_withdrawal_needs_a_transaction(engine):
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NoTransactionError),
    ):
        Outbox(engine).withdraw(connection, uuid7())


# What is left


def test_a_purge_deletes_a_withdrawal_after_the_message_and_its_copies(engine):
    id = send(engine, "close")
    relayed(engine)
    withdraw(engine, id)

    left = []
    for hours in (0, 2):
        pass_hours(engine, hours)
        relayed(engine)
        purge_all(engine)
        left.append((log(engine), count(engine, "outbox_parked"), count(engine, "outbox_withdrawal")))

    assert left == [([], 1, 1), ([], 0, 0)]


def purge_all(engine: Engine) -> None:
    with closing(Database(engine).open()) as channel:
        Purge(channel).run(timedelta(0))


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)
