"""A dump restored on another server: nothing is sent before somebody says so, and nothing is missed after."""

import re
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import DatabaseError, Message, Outbox, Relay, SubscriptionError
from outbox.admin.repartition import repartition
from outbox.model.lease import Partition
from outbox.model.position import EARLIEST, Position
from outbox.model.subscription import Declaration
from outbox.model.verdict import DONE
from outbox.store.identity import is_copy
from outbox.store.log.log import Limits
from outbox.store.operations.restore import Again, accept, rehearse, restore
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.partitions import KEYS, apart

#: How far the ids of the other server are above those of this one.
FAR = 1_000_000


class Collected:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, messages):
        """Accept everything."""
        self.bodies += [message.body for message in messages]
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is open."""


def send(outbox, *bodies):
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body) for body in bodies])


def pretend_copy(engine):
    """What a restored dump looks like: another server drew the ids, far above the ones that this one is at."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET system_identifier = '42'"))
        connection.execute(text("UPDATE outbox_message SET xact_id = xact_id + :far"), {"far": FAR})
        stored = connection.execute(text("SELECT DISTINCT base, target FROM outbox_progress")).all()
        for position in {each for row in stored for each in row if each is not None}:
            for column in ("base", "target"):
                update = text(f"UPDATE outbox_progress SET {column} = :shifted WHERE {column} = :position")
                connection.execute(update, {"position": position, "shifted": shifted(position)})


def shifted(position):
    """The same position on the other server; the beginning of the log is the same on all."""
    here = Position.parse(position)
    if here == EARLIEST:
        return position
    return str(Position(here.head + FAR, tuple(number + FAR for number in here.open)))


@pytest.fixture
def outbox(pg_engine):
    return Outbox(pg_engine)


@pytest.fixture
def copy(outbox, pg_engine):
    """A copy of an outbox whose relay had sent the only message."""
    send(outbox, b"sent")
    Relay(outbox, Collected()).until_empty()
    pretend_copy(pg_engine)
    return outbox


def test_a_restored_log_delivers_what_was_not_sent_and_what_comes(outbox, pg_engine):
    send(outbox, b"sent")
    Relay(outbox, Collected()).until_empty()
    send(outbox, b"waiting")
    pretend_copy(pg_engine)
    send(outbox, b"written after the restore")
    destination = Collected()

    with pytest.raises(DatabaseError, match="outbox restore"):
        Relay(outbox, destination).until_empty()
    channel = outbox.database.open()
    restore(channel)
    channel.close()
    Relay(outbox, destination).until_empty()
    send(outbox, b"later")
    Relay(outbox, destination).until_empty()

    assert destination.bodies == [b"waiting", b"written after the restore", b"later"]


@pytest.mark.parametrize("topics", [None, ("mail",)])
@pytest.mark.parametrize("rows", [2, 100])
def test_a_settle_stores_the_highest_id_that_was_read(outbox, pg_engine, rows, topics):
    """Also of rows that others select, in whole reads and in pages: a copy passes over nothing with a higher id."""
    relay = Relay(outbox, Collected(), topics=topics, settings=Settings(limits=Limits(rows=rows)))
    highest = []
    for number in (1, 5):
        with outbox.begin() as session:
            outbox.send_all(session, [Message("mail", b"x"), *(Message("orders", b"x") for _ in range(number))])
        relay.until_empty()
        with pg_engine.connect() as connection:
            newest = "SELECT highest_id FROM outbox_progress ORDER BY epoch DESC, n DESC LIMIT 1"
            highest.append(connection.scalar(text(newest)))

    assert highest == [2, 8]


def test_no_clock_decides_what_was_written_on_the_copy(copy, pg_engine):
    """The clock of the other server was ahead, or its relay still settled while writers had moved here."""
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = settled_at + interval '1 hour'"))
    send(copy, b"written here")
    with copy.begin() as session, session.begin_nested():
        copy.send(session, "orders", b"written in a savepoint")
    destination = Collected()

    with closing(copy.database.open()) as channel:
        again = restore(channel)
    Relay(copy, destination).until_empty()

    assert (again, destination.bodies) == ([Again("relay", 0)], [b"written here", b"written in a savepoint"])


def test_a_sequence_that_was_left_behind_is_mended_before_a_restore(outbox, pg_engine):
    """A logical copy has it at its beginning, and ids below those of the log are drawn until somebody sets it."""
    send(outbox, b"purged", b"purged", b"sent")
    Relay(outbox, Collected()).until_empty()
    pretend_copy(pg_engine)
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = settled_at + interval '1 hour'"))
        connection.execute(text("DELETE FROM outbox_message WHERE id < 3"))
        connection.execute(text("ALTER TABLE outbox_message ALTER id RESTART WITH 1"))
    send(outbox, b"before the sequence was set")
    with outbox.begin() as session, session.begin_nested():
        outbox.send(session, "orders", b"in a savepoint")
    destination = Collected()

    with closing(outbox.database.open()) as channel:
        with pytest.raises(DatabaseError, match=r"has drawn ids up to 2, but outbox_message\.id has 3") as refused:
            restore(channel)
        with pytest.raises(DatabaseError, match=re.escape(str(refused.value))):
            rehearse(channel)
        with pg_engine.begin() as connection:
            connection.execute(text("ALTER TABLE outbox_message ALTER id RESTART WITH 4"))
        restore(channel)
    Relay(outbox, destination).until_empty()

    assert "run: ALTER TABLE outbox_message ALTER id RESTART WITH 4" in str(refused.value)
    assert destination.bodies == [b"before the sequence was set", b"in a savepoint"]


def test_positions_that_a_copy_does_not_tell_are_in_doubt_and_read_again(copy, pg_engine):
    """Rows of progress of an earlier version have no highest id."""
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET highest_id = NULL"))
    destination = Collected()

    with closing(copy.database.open()) as channel:
        expected, again = rehearse(channel), restore(channel)
    Relay(copy, destination).until_empty()

    assert (expected, again, destination.bodies) == ([Again("relay", 1)], [Again("relay", 1)], [b"sent"])


def test_a_server_behind_the_positions_is_not_accepted(copy):
    """What is written until its counter has passed them would never be sent."""
    with closing(copy.database.open()) as channel:
        with pytest.raises(DatabaseError, match=r"relay stands at 1\d{6}:.*, and this server is only at .* --accept"):
            accept(channel)
        copied = is_copy(channel)

    assert copied


def test_a_subscription_that_nobody_has_run_has_nothing_sent_again(outbox, pg_engine):
    """The migration makes `relay`; here all relays have other names."""
    sent, later = Collected(), Collected()
    send(outbox, b"1", b"2")
    Relay(outbox, sent, name="billing").until_empty()
    pretend_copy(pg_engine)
    channel = outbox.database.open()

    again = restore(channel)
    channel.close()
    send(outbox, b"3")
    Relay(outbox, sent, name="billing").until_empty()
    Relay(outbox, later).until_empty()

    assert again == [Again("billing", 0), Again("relay", 0)]
    assert (sent.bodies, later.bodies) == ([b"1", b"2", b"3"], [b"1", b"2", b"3"])


def test_partitions_that_stand_apart_have_nothing_sent_again(outbox, pg_engine):
    """What one of them has passed was in its own slots; the position where they were to meet means nothing here."""
    sent = Collected()
    with closing(outbox.database.open()) as channel:
        subscriptions = Subscriptions(channel)
        subscriptions.declare(Declaration(name="relay", destination="sender:test_restore.Collected"))
        passed = apart(outbox, channel)
        repartition(channel, "relay", 3, wait=timedelta(0))
        pretend_copy(pg_engine)

        again = restore(channel)
        stored = subscriptions.get("relay")
    Relay(outbox, sent).until_empty()

    assert (stored.partitions, stored.next_partitions, stored.stop_at) == (2, None, None)
    assert (again, len(sent.bodies)) == ([Again("relay", 0)], len(KEYS) - passed)


def test_what_is_sent_again_is_known_before(outbox, pg_engine):
    """By each subscription that was ahead of another one, of its own topics; nothing is changed by counting."""
    ahead, some = Collected(), Collected()
    send(outbox, b"0")
    Relay(outbox, Collected()).until_empty()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"1"), Message("mail", b"2"), Message("mail", b"3")])
    Relay(outbox, ahead, name="ahead").until_empty()
    Relay(outbox, some, name="some", topics=["mail"]).until_empty()
    pretend_copy(pg_engine)
    before = (len(ahead.bodies), len(some.bodies))
    channel = outbox.database.open()

    stamps = channel.rows("SELECT id, xact_id FROM outbox_message ORDER BY id")
    expected = rehearse(channel)
    unchanged = channel.rows("SELECT id, xact_id FROM outbox_message ORDER BY id") == stamps
    again = restore(channel)
    channel.close()
    Relay(outbox, ahead, name="ahead").until_empty()
    Relay(outbox, some, name="some", topics=["mail"]).until_empty()

    assert (expected, unchanged, before) == (again, True, (4, 2))
    assert again == [Again("ahead", 3), Again("relay", 0), Again("some", 2)]
    assert (ahead.bodies[4:], some.bodies[2:]) == ([b"1", b"2", b"3"], [b"2", b"3"])


def test_subscriptions_that_stood_apart_miss_nothing(outbox, pg_engine):
    send(outbox, b"1")
    Relay(outbox, Collected()).until_empty()
    slow = Collected()
    Relay(outbox, Collected(), name="slow", start="latest").until_empty()
    send(outbox, b"2")
    Relay(outbox, Collected()).until_empty()
    pretend_copy(pg_engine)
    channel = outbox.database.open()

    restore(channel)
    channel.close()
    Relay(outbox, slow, name="slow").until_empty()

    assert b"2" in slow.bodies


def test_a_window_that_is_half_done_goes_on_where_it_was(outbox, pg_engine):
    """What was settled of it is not sent again, what was not is sent; so is what was open when it ended."""
    destination, paged = Collected(), Settings(limits=Limits(rows=2))
    send(outbox, b"1")
    with pg_engine.connect() as late:
        outbox.send(late, "orders", b"late")
        send(outbox, b"2", b"3", b"4")
        Relay(outbox, destination, settings=paged).once()
        late.commit()
    before = list(destination.bodies)
    pretend_copy(pg_engine)
    channel = outbox.database.open()

    restore(channel)
    channel.close()
    Relay(outbox, destination, settings=paged).until_empty()

    assert before == [b"1", b"2"]
    assert destination.bodies == [b"1", b"2", b"late", b"3", b"4"]


def test_an_upgraded_server_keeps_its_positions(outbox, pg_engine):
    send(outbox, b"sent")
    Relay(outbox, Collected()).until_empty()
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET system_identifier = '42'"))
    send(outbox, b"next")
    channel = outbox.database.open()
    destination = Collected()

    accept(channel)
    channel.close()
    Relay(outbox, destination).until_empty()

    assert destination.bodies == [b"next"]


def test_a_log_is_not_restored_under_a_live_worker(outbox, pg_engine):
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET owner = 'x', lease_until = now() + interval '1 hour'"))
    channel = outbox.database.open()

    with pytest.raises(SubscriptionError, match=r"a worker of relay is alive; .* until \d\d:\d\d:\d\d UTC: then"):
        restore(channel)
    channel.close()


def test_a_bid_for_a_lease_begins_no_progress(outbox, pg_engine):
    """Its row stands in place of a partition, and nobody would move such a progress: it would hold purge back."""
    send(outbox, b"1")
    Relay(outbox, Collected()).until_empty()
    channel = outbox.database.open()
    Leases(channel).ask(Partition("relay"), "command")
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET lease_until = now() - interval '1 hour'"))

    restore(channel)
    channel.close()

    with pg_engine.connect() as connection:
        assert connection.execute(text("SELECT DISTINCT partition FROM outbox_progress")).scalars().all() == [0]
