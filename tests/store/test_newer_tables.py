"""Code of this version works beside tables of the next one, which have more columns, indexes and tables."""

import pytest
from sqlalchemy import text

from outbox import Done, Inbox, Message, Outbox, Reject, Relay, migrate
from outbox.errors import SchemaError
from outbox.model.limits import HALF_TOPIC
from outbox.schema import VERSION, VERSION_TABLE, tables
from tests.rocketmq.halves import begun
from tests.support.command_line import outbox
from tests.support.destination import Destination

COMMANDS = (
    "status", "parked replay --all --yes", "relay --name look --to stdout: --until-empty", "doctor", "db upgrade",
    "purge --older-than 1h", "subscriptions pause look", "subscriptions resume look",
    "subscriptions alter look --partitions 2", "erase --key z", "subscriptions backfill look --topics orders",
)  # fmt: skip


@pytest.fixture
def newer(engine):
    """The database after an upgrade by the next version, which adds and takes nothing away."""
    ours = tables(None, engine.dialect.name).meta.metadata.sorted_tables
    with engine.begin() as connection:
        for table in ours:
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN next_one text"))
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN next_two integer NOT NULL DEFAULT 7"))
            connection.execute(text(f"CREATE INDEX {table.name}_next ON {table.name} (next_one)"))
        connection.execute(text("CREATE TABLE outbox_next (id integer PRIMARY KEY)"))
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    return engine


@pytest.mark.storm
def test_writers_relays_consumers_and_commands_of_this_version_go_on(newer):
    shop, handled = Outbox(newer), list[Message]()
    sent = Destination(lambda message: Reject("no") if message.key == "b" else Done())
    with shop.begin() as session:
        shop.send_all(session, [Message("orders", key.encode(), key=key) for key in "abc"])
        shop.send(session, "orders", b"d", dedup_key="d")

    Relay(shop, sent, name="relay").until_empty()
    codes = [outbox(newer, *each.split()).code for each in COMMANDS]
    consumer = shop.consumer("billing")
    consumer.on("orders")(handled.append)
    consumer.until_empty()
    with newer.begin() as connection:
        first = Inbox(newer, "billing").once(connection, handled[0])

    assert (codes, first, migrate.current_revision(newer)) == ([0] * len(COMMANDS), True, "9999")
    assert (sorted(sent.bodies), sorted(message.body for message in handled)) == (
        [b"a", b"c", b"d"],
        [b"a", b"b", b"c", b"d"],
    )


def test_code_that_must_not_use_the_tables_is_refused(newer):
    """The next version says so by a higher number."""
    with newer.begin() as connection:
        connection.execute(text(f"UPDATE outbox_meta SET version = {VERSION + 1}"))

    with pytest.raises(SchemaError, match=rf"of version {VERSION + 1}, this is {VERSION}; install a newer outbox-log"):
        Relay(Outbox(newer), Destination(), name="relay").until_empty()


def test_transactions_go_on_beside_tables_that_only_workers_must_not_use(newer):
    """A new version lets writers of the version before go on, a producer that begins among them."""
    with newer.begin() as connection:
        connection.execute(text(f"UPDATE outbox_meta SET version = {VERSION + 1}"))

    transaction = begun(newer, "orders")
    transaction.commit()

    with newer.connect() as connection:
        topics = connection.scalars(text("SELECT topic FROM outbox_message ORDER BY id")).all()
    assert topics == [HALF_TOPIC, "orders"]
