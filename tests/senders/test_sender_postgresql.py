"""Another PostgreSQL: the contract, over a network that fails; and what becomes of a message in the log there."""

import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from outbox import Inbox, Message, Outbox, Relay, create_engine, migrate
from outbox.model.slots import slot_of
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.postgresql import PostgresSender
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_stored
from tests.support.destination import Destination, relay_to
from tests.support.handles import conninfo_of
from tests.support.other_outbox import OtherOutbox, new_id, send
from tests.support.places import opened
from tests.support.remote import a_row
from tests.support.servers.proxy import TcpProxy
from tests.support.several import new_database
from tests.support.waiting import eventually

FIX = "send the message anew without that, and discard this one"
EARLIER = Unavailable("an earlier message of its key was not stored")


sender = opened("other")


class TestPostgresSender(SenderContract):
    """PostgreSQL passes the contract."""

    @pytest.fixture
    def destination(self, other):
        """A database of its own for each test."""
        return other


# What arrives


def test_a_message_becomes_a_message_of_the_other_log_with_all_its_fields(other, sender):
    sent = a_message(
        "orders",
        b"\x00{}",
        key="order 7: ü%",
        tags="placed, päid",
        headers={"X-Trace": "a: b", "name": "Zoë"},
        content_type="application/json",
        deliver_at=datetime(2026, 2, 1, tzinfo=UTC),
        expires_at=datetime(2036, 2, 1, 0, 0, 0, 123456, tzinfo=UTC),
    )
    sent.created_at = datetime(2026, 1, 31, 14, 0, 0, 123456, tzinfo=UTC)

    check_all_done(sender.send([sent]), [sent])

    [row] = other.rows()
    assert {name: value for name, value in row.items() if name not in ("id", "xact_id", "direct")} == {
        "message_id": sent.message_id,
        "topic": "orders",
        "key": "order 7: ü%",
        "slot": slot_of("order 7: ü%", 256),
        "tags": "placed, päid",
        "headers": '{"X-Trace":"a: b","name":"Zoë"}',
        "content_type": "application/json",
        "body": b"\x00{}",
        "created_at": sent.created_at,
        "deliver_at": sent.deliver_at,
        "expires_at": sent.expires_at,
    }


def test_a_field_that_a_message_has_not_is_null(other, sender):
    sent = Message("orders", b"")

    check_all_done(sender.send([sent]), [sent])

    [row] = other.rows()
    empty = ("key", "tags", "headers", "content_type", "deliver_at", "expires_at")
    assert {name: row[name] for name in empty} == dict.fromkeys(empty)
    assert (row["body"], 0 <= row["slot"] < 256) == (b"", True)
    assert abs((datetime.now(UTC) - row["created_at"]).total_seconds()) < 60


def test_what_one_message_has_another_may_lack(other, sender):
    """They travel in columns."""
    sent = [a_message("orders", n, **({"key": "k", "tags": "t", "headers": {"n": "v"}} if n % 3 else {})) for n in (
        range(20)
    )]  # fmt: skip

    check_all_done(sender.send(sent), sent)

    check_stored(other, sent)


def test_a_null_stays_null_where_arrays_hold_none(other):
    """A role may have `array_nulls = off`, by which NULL would be read as a text."""
    other.execute(f"ALTER DATABASE {other.engine.url.database} SET array_nulls = off")
    sent = [a_message("orders", 1), a_message("orders", 2, tags="NULL")]

    check_all_done(send(other.url, *sent), sent)

    assert [(row["key"], row["tags"]) for row in other.rows()] == [(None, None), (None, "NULL")]


def test_slots_are_those_of_the_other_outbox(postgres):
    """A key is in the same slot as if it had been written there."""
    engine = create_engine(postgres.create_database(f"slots_{new_id()}"))
    migrate.upgrade(engine, slots=7)
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        other = OtherOutbox(engine, proxy)
        sent = [a_message("orders", n, key=f"k{n}") for n in range(50)]
        check_all_done(send(other.url, *sent), sent)
        rows = other.rows()
    engine.dispose()

    assert [row["slot"] for row in rows] == [slot_of(message.key, 7) for message in sent]


def test_the_log_keeps_the_order_of_the_call(other, sender):
    """Of all messages, whatever their ids and keys are."""
    sent = [a_message("orders", n, key=f"k{n % 7}" if n % 2 else None) for n in range(500)]
    sent.reverse()

    check_all_done(sender.send(sent), sent)

    assert [row["message_id"] for row in other.rows()] == [message.message_id for message in sent]


def test_a_call_that_is_too_much_for_one_transaction_is_written_in_order(other, sender):
    sent = [a_message("orders", b"%d" % n, key=f"k{n % 9}") for n in range(5_200)]

    check_all_done(sender.send(sent), sent)

    assert [row["message_id"] for row in other.rows()] == [message.message_id for message in sent]
    assert len({row["xact_id"] for row in other.rows()}) == 2


def test_large_bodies_are_spread_over_several_transactions(other):
    sent = [a_message("orders", bytes(3_000_000), key=f"k{n % 2}") for n in range(12)]

    check_all_done(send(other.url, *sent, timeout=timedelta(seconds=20)), sent)

    check_stored(other, sent)
    assert len({row["xact_id"] for row in other.rows()}) == 3


def test_another_schema_holds_the_tables(postgres):
    engine = create_engine(postgres.create_database(f"schema_{new_id()}"))
    migrate.upgrade(engine, schema="shop")
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        other = OtherOutbox(engine, proxy)
        assert send(f"{other.url}?schema=shop", a_message("orders", 1)) == [DONE]
        found = other.execute("SELECT body FROM shop.outbox_message")
    engine.dispose()

    assert found == [{"body": b"1"}]


# Once


def test_a_second_copy_is_done_and_not_written(other, sender):
    """Whoever sends it, and whatever is new beside it."""
    sent = [a_message("orders", n, key="k") for n in range(3)]
    check_all_done(sender.send(sent[:2]), sent[:2])

    check_all_done(send(other.url, *sent), sent)
    check_all_done(sender.send(sent), sent)

    assert [row["message_id"] for row in other.rows()] == [message.message_id for message in sent]


def test_two_rows_with_one_id_are_one_message(other, sender):
    """In the log here an id may stand twice; the first copy counts."""
    first, again, last = a_message("orders", b"1", key="k"), a_message("mail", b"2"), a_message("orders", b"3", key="k")
    again.message_id = first.message_id

    assert sender.send([first, again, last]) == [DONE, DONE, DONE]

    assert [row["body"] for row in other.rows()] == [b"1", b"3"]


def test_the_inbox_there_remembers_the_id_for_seven_days(other):
    by_default, named = a_message("orders", 1), a_message("orders", 2)
    assert send(other.url, by_default) == [DONE]
    assert send(f"{other.url}?as=warehouse+7", named) == [DONE]

    found = other.execute("SELECT consumer, message_id, expires_at - handled_at AS kept FROM outbox_inbox ORDER BY 1")
    assert found == [
        {"consumer": "outbox", "message_id": by_default.message_id, "kept": timedelta(days=7)},
        {"consumer": "warehouse 7", "message_id": named.message_id, "kept": timedelta(days=7)},
    ]


def test_under_another_name_a_copy_is_new(other):
    sent = a_message("orders", 1)

    assert send(other.url, sent) + send(f"{other.url}?as=second", sent) == [DONE, DONE]

    assert [row["message_id"] for row in other.rows()] == [sent.message_id] * 2


def test_what_an_inbox_has_forgotten_is_written_again(other):
    sent = a_message("orders", 1)
    assert send(other.url, sent) == [DONE]
    other.execute("UPDATE outbox_inbox SET expires_at = now()")
    assert Inbox(other.engine, consumer="outbox").prune() == 1

    assert send(other.url, sent) == [DONE]

    assert [row["message_id"] for row in other.rows()] == [sent.message_id] * 2


def test_an_inbox_with_the_name_of_the_sender_takes_everything_for_handled(other):
    """So no consumer there may have that name; any other handles it once."""
    sent = a_message("orders", 1)
    assert send(other.url, sent) == [DONE]

    with Session(other.engine) as session, session.begin():
        names = ("outbox", "billing", "billing")
        handled = [Inbox(other.engine, name).once(session, sent) for name in names]

    assert handled == [False, True, False]


# Who reads it there


@pytest.mark.storm
def test_a_relay_there_sends_it_on_at_once(other, sender):
    """Its hint comes with the commit: the relay looks by itself only after ten minutes."""
    from outbox.worker.settings import Settings

    outbox, destination = Outbox(other.engine), Destination()
    slow = Settings(poll=(timedelta(minutes=10), timedelta(minutes=10)))
    relay = relay_to(destination, outbox, settings=slow)
    relay.start()
    try:
        sent = [a_message("orders", n, key="k", tags="t") for n in range(3)]
        time.sleep(2)
        check_all_done(sender.send(sent), sent)
        assert eventually(lambda: len(destination.messages) == 3)
    finally:
        relay.stop()
        relay.join(60)

    arrived = [(m.message_id, m.topic, m.key, m.tags, m.body, m.created_at) for m in destination.messages]
    assert arrived == [(m.message_id, m.topic, m.key, m.tags, m.body, m.created_at) for m in sent]


@pytest.mark.parametrize(("schema", "channel"), [(None, "outbox"), ("shop", "outbox_shop"), ("s" * 63, "s" * 63)])
def test_a_hint_comes_with_what_is_new_and_only_with_that(postgres, schema, channel):
    engine = create_engine(postgres.create_database(f"hints_{new_id()}"))
    migrate.upgrade(engine, schema=schema)
    url = conninfo_of(engine.url)
    sent = a_message("orders", 1)
    name = channel if schema is None or len(schema) < 63 else f"outbox_{schema}"[:63]
    with (
        psycopg.connect(url, autocommit=True) as ear,
        closing(PostgresSender(f"{url}?schema={schema}" if schema else url)) as sender,
    ):
        ear.execute(f'LISTEN "{name}"'.encode())
        heard = []
        for seconds in (60, 0.5):
            assert sender.send([sent]) == [DONE]
            heard.append([(each.channel, each.payload) for each in ear.notifies(timeout=seconds, stop_after=1)])
    engine.dispose()

    assert heard == [[(name, "")], []]


def test_an_outbox_that_is_told_to_write_into_itself_doubles_each_message_once(other, sender):
    """It cannot know; and it ends."""
    outbox = Outbox(other.engine)
    with outbox.begin() as session:
        ids = outbox.send_all(session, [Message("orders", b"%d" % n, key="k") for n in range(5)])

    relay_to(sender, outbox).until_empty()
    relay_to(sender, outbox).until_empty()

    assert [row["message_id"] for row in other.rows()] == ids * 2


# What is refused


def test_behind_a_rejected_row_its_key_waits(other, sender):
    sent = [a_message("orders", 1, key="k"), a_row(key="k", headers="[]"), a_message("orders", 2, key="k")]
    sent += [a_row(key="k", topic="a b"), a_message("orders", 3, key="other"), a_message("orders", 4)]

    verdicts = sender.send(sent)

    rejected = Reject(f"headers: must be a JSON object of strings, not '[]'; {FIX}")
    assert verdicts == [DONE, rejected, EARLIER, EARLIER, DONE, DONE]
    assert [row["body"] for row in other.rows()] == [b"1", b"3", b"4"]


def test_rows_that_the_server_refuses_are_found_among_many(other, sender):
    """All others are written, but for those that stand behind one of them."""
    other.fail("beta")
    plan = [("beta" if n % 40 == 20 else "alpha", f"k{n % 9}" if n % 3 else None) for n in range(400)]
    sent = [a_message(topic, n, key=key) for n, (topic, key) in enumerate(plan)]

    verdicts = sender.send(sent)

    refused = Reject('PostgreSQL: new row for relation "outbox_message" violates check constraint "no_beta" (23514)')
    stopped: set[str | None] = set()
    for message, verdict in zip(sent, verdicts, strict=True):
        waits = message.key in stopped
        assert verdict == (EARLIER if waits else refused if message.topic == "beta" else DONE)
        if message.topic == "beta" and message.key is not None:
            stopped.add(message.key)
    written = [message for message, verdict in zip(sent, verdicts, strict=True) if verdict is DONE]
    assert [row["message_id"] for row in other.rows()] == [message.message_id for message in written]
    assert len(other.execute("SELECT 1 FROM outbox_inbox")) == len(written)


def test_a_letter_that_the_database_cannot_hold_is_rejected_alone(postgres):
    engine = create_engine(postgres.create_database(f"latin_{new_id()}", encoding="LATIN1"))
    migrate.upgrade(engine)
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        other = OtherOutbox(engine, proxy)
        sent = [a_message("orders", n, key=key) for n, key in enumerate(["é", "😀", "e", "😀", "é"])]
        verdicts = send(other.url, *sent)
        bodies = [row["body"] for row in other.rows()]
    engine.dispose()

    refused = Reject(
        'PostgreSQL: character with byte sequence 0xf0 0x9f 0x98 0x80 in encoding "UTF8" has no equivalent in encoding'
        ' "LATIN1" (22P05)'
    )
    assert verdicts == [DONE, refused, DONE, EARLIER, DONE]
    assert bodies == [b"0", b"2", b"4"]


RAISING = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN IF NEW.topic = 'beta' THEN RAISE EXCEPTION 'not today'; END IF; RETURN NEW; END $$
"""


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [
        ("TRIGGER t BEFORE INSERT", "not today (P0001)"),
        ("CONSTRAINT TRIGGER t AFTER INSERT", "not today (P0001)"),
        ("CONSTRAINT TRIGGER t AFTER INSERT DEFERRABLE INITIALLY DEFERRED", "not today (P0001)"),
    ],
    ids=["at-once", "after-the-statement", "at-the-commit"],
)
def test_a_row_for_which_a_trigger_raises_waits_alone(other, sender, trigger, reason):
    """Nobody knows whether it always will. An error of the COMMIT is one, too."""
    other.execute(RAISING)
    where = trigger.split(" ON ")[0]
    event, _, timing = where.partition(" INSERT")
    other.execute(f"CREATE {event} INSERT ON outbox_message {timing} FOR EACH ROW EXECUTE FUNCTION refuse()")

    verdicts = sender.send([a_message(topic, n) for n, topic in enumerate(["alpha", "beta", "alpha", "gamma"])])

    assert verdicts == [DONE, Unavailable(f"PostgreSQL: {reason}"), DONE, DONE]
    assert [row["body"] for row in other.rows()] == [b"0", b"2", b"3"]


def test_a_relay_from_one_database_to_another_needs_nothing_else(pg_template, postgres, sqlite_engine):
    """Row by row, what was committed here is in the log there."""
    with new_database(postgres, pg_template) as there:
        here = Outbox(sqlite_engine)
        with here.begin() as session:
            ids = here.send_all(
                session, [Message("orders", {"n": n}, key=f"k{n % 3}", headers={"a": "b"}) for n in range(30)]
            )
        with closing(PostgresSender(conninfo_of(there.url))) as sender:
            Relay(here, sender).until_empty()
        with there.connect() as connection, sqlite_engine.connect() as origin:
            columns = "topic, key, slot, tags, headers, content_type, body"
            select = sqlalchemy.text(f"SELECT {columns} FROM outbox_message ORDER BY id")
            assert connection.execute(select).all() == origin.execute(select).all()
            order = sqlalchemy.text("SELECT message_id FROM outbox_message ORDER BY id")
            assert list(connection.scalars(order)) == ids
