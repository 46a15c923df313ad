"""Purging takes only what every subscription is past and what is old enough, and writes down how far it went."""

import threading
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import DatabaseError, Done, Outbox, Reject, Relay, SubscriptionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.model.subscription import Declaration
from outbox.store.database import Database
from outbox.store.dialects.statements import executor, run
from outbox.store.half_messages.op import Ops
from outbox.store.log.log import Log
from outbox.store.operations.purge import Held, Purge, Purged
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.store.test_status import settle
from tests.support.parked import decide

NOTHING = timedelta(0)
WEEK = timedelta(days=7)


class Destination:
    """Answers everything with one verdict."""

    destination = "callable:test"

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.verdict: Done | Reject = Done()

    def send(self, messages):
        """Keep the bodies of what is done."""
        if isinstance(self.verdict, Done):
            self.bodies += [message.body for message in messages]
        return [self.verdict] * len(messages)

    def close(self):
        """Nothing is open."""


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def send(outbox, *bodies):
    with outbox.begin() as session:
        for body in bodies:
            outbox.send(session, "orders", body)


def numbered(count) -> list[bytes]:
    return [str(n).encode() for n in range(1, count + 1)]


def purge(outbox, older_than=NOTHING, batch=2) -> Purged:
    with closing(outbox.database.open()) as channel:
        return Purge(channel, batch=batch).run(older_than)


def now(outbox) -> Position:
    with closing(outbox.database.open()) as channel:
        return Log().now(channel).position


def kept(outbox) -> list[bytes]:
    with outbox.engine.connect() as connection:
        return [bytes(body) for (body,) in connection.execute(text("SELECT body FROM outbox_message ORDER BY id"))]


def meta(outbox):
    with outbox.engine.connect() as connection:
        return connection.execute(text("SELECT purged, purged_id FROM outbox_meta")).one()


def aged(outbox, *bodies):
    """Make rows look as if they had been written eight days ago."""
    ago = {"postgresql": "created_at - interval '8 days'", "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-8 days')"}
    with outbox.engine.begin() as connection:
        statement = f"UPDATE outbox_message SET created_at = {ago[outbox.engine.dialect.name]} WHERE body = :body"
        connection.execute(text(statement), [{"body": body} for body in bodies])


def test_only_what_is_older_than_the_retention_goes(outbox):
    send(outbox, b"old", b"new")
    aged(outbox, b"old")
    Relay(outbox, Destination()).until_empty()

    purged = purge(outbox, WEEK)

    assert (purged.rows, purged.held_by, kept(outbox)) == (1, (), [b"new"])


def test_a_young_row_between_old_ones_stays(outbox):
    """Ids are drawn before the rows are written, so a younger row may have a lower id than an older one."""
    send(outbox, *numbered(7))
    aged(outbox, *(body for body in numbered(7) if body not in (b"2", b"5")))
    Relay(outbox, Destination()).until_empty()
    with closing(outbox.database.open()) as channel:
        rehearsed = Purge(channel, batch=2).run(WEEK, rehearsal=True)

    purged = purge(outbox, WEEK)

    assert (rehearsed.rows, purged.rows, kept(outbox)) == (5, 5, [b"2", b"5"])


def test_a_message_that_nobody_has_read_stays_however_old_it_is(outbox):
    send(outbox, b"a", b"b")
    aged(outbox, b"a", b"b")

    purged = purge(outbox, WEEK)

    assert (purged.rows, purged.held_by, kept(outbox)) == (0, ("relay",), [b"a", b"b"])


def test_the_slowest_subscription_decides(outbox):
    send(outbox, *numbered(3))
    settle(outbox.engine, Progress(now(outbox)))
    with closing(outbox.database.open()) as channel:
        declared = Declaration(name="slow", destination="callable:test")
        Subscriptions(channel).declare(declared, start="latest")
    send(outbox, b"4", b"5")
    settle(outbox.engine, Progress(now(outbox)))

    purged = purge(outbox)

    assert (purged.rows, purged.held_by, kept(outbox)) == (3, ("slow",), [b"4", b"5"])


def test_a_window_that_is_half_done_is_not_passed(outbox):
    """Its base has seen none of it, and a worker that starts again reads from there."""
    send(outbox, *numbered(4))
    settle(outbox.engine, Progress(EARLIEST, now(outbox), 3))

    assert (purge(outbox).rows, len(kept(outbox))) == (0, 4)


def test_without_any_subscription_it_refuses(outbox):
    send(outbox, b"a")
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).drop("relay")

    with pytest.raises(SubscriptionError, match="no subscription"):
        purge(outbox)

    assert kept(outbox) == [b"a"]


def test_half_messages_wait_for_the_verdict_on_their_transaction(outbox):
    send(outbox, b"half", b"whole")
    with outbox.engine.begin() as connection:
        update = text("UPDATE outbox_message SET topic = :half WHERE body = :body")
        connection.execute(update, {"half": HALF_TOPIC, "body": b"half"})
    Relay(outbox, Destination()).until_empty()

    assert (purge(outbox).rows, kept(outbox)) == (1, [b"half"])


def test_half_messages_wait_until_they_are_restored_also_after_the_verdict(outbox):
    """A business transaction that joined was committed, and nobody saw that yet."""
    send(outbox, b"half", b"whole")
    with outbox.engine.begin() as connection:
        update = text("UPDATE outbox_message SET topic = :half, key = 'tx' WHERE body = :body")
        connection.execute(update, {"half": HALF_TOPIC, "body": b"half"})
        run(executor(connection), Ops(outbox.database).join("tx", by="producer shop"))
    Relay(outbox, Destination()).until_empty()
    before = purge(outbox).rows
    with outbox.engine.begin() as connection:
        # As restoring leaves it.
        connection.execute(text("UPDATE outbox_op SET decided_by = 'producer shop'"))

    assert (before, purge(outbox).rows, kept(outbox)) == (1, 1, [])


def test_what_was_purged_is_written_down(outbox):
    send(outbox, *numbered(5))
    settle(outbox.engine, Progress(now(outbox)))
    number = "xact_id" if outbox.engine.dialect.name == "postgresql" else "id"
    with outbox.engine.connect() as connection:
        highest = connection.execute(text(f"SELECT max({number}) FROM outbox_message")).scalar_one()
    before = meta(outbox)

    purge(outbox)

    assert (tuple(before), tuple(meta(outbox))) == ((None, 0), (str(Position(highest + 1)), 5))


def test_only_what_was_deleted_is_written_down_as_purged(outbox):
    """A reader without a subscription goes by it: of the rows that were passed and are there it has lost nothing."""
    send(outbox, b"old")
    seen = now(outbox)
    send(outbox, b"young")
    aged(outbox, b"old")
    settle(outbox.engine, Progress(now(outbox)))

    purge(outbox, WEEK)

    purged = Position.parse(meta(outbox).purged)
    assert (Window(seen, now(outbox)).overlaps(purged), Window(EARLIEST, seen).overlaps(purged)) == (False, True)


def test_a_later_purge_forgets_nothing_of_an_earlier_one(outbox):
    """A subscription that begins anew at earliest has a lower position; what is gone stays gone."""
    send(outbox, *numbered(5))
    settle(outbox.engine, Progress(now(outbox)))
    purge(outbox)
    first = meta(outbox)
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).drop("relay")
        Subscriptions(channel).declare(Declaration(name="relay", destination="callable:test"))
    send(outbox, b"6")

    purge(outbox)

    assert (tuple(meta(outbox)), kept(outbox)) == (tuple(first), [b"6"])


def test_rows_and_record_go_together_or_not_at_all(outbox):
    """The connection is lost between the deletes of the second batch and their record: the first batch stands."""
    send(outbox, *numbered(5))
    settle(outbox.engine, Progress(now(outbox)))
    channel = outbox.database.open()
    written, run = [], channel.run

    def lose_the_second(statement, /, **parameters):
        if "purged = :purged" in statement:
            written.append(parameters)
            if len(written) == 2:
                raise ConnectionError
        return run(statement, **parameters)

    channel.run = lose_the_second

    with closing(channel), pytest.raises(ConnectionError):
        Purge(channel, batch=2).run(NOTHING)

    assert (len(kept(outbox)), meta(outbox).purged_id) == (3, 2)


def test_a_rehearsal_counts_what_would_go_and_deletes_nothing(outbox):
    send(outbox, *numbered(5))
    settle(outbox.engine, Progress(now(outbox)))

    with closing(outbox.database.open()) as channel:
        rehearsed = Purge(channel, batch=2).run(NOTHING, rehearsal=True)

    assert (rehearsed.rows, len(kept(outbox)), tuple(meta(outbox))) == (5, 5, (None, 0))
    assert purge(outbox).rows == 5


def test_a_message_that_was_parked_is_a_copy_and_stays(outbox):
    """Its row in the log goes; a replay still delivers it."""
    send(outbox, b"poison")
    destination = Destination()
    destination.verdict = Reject("no")
    Relay(outbox, destination).until_empty()
    purge(outbox)
    decide(outbox.engine, "replay")

    destination.verdict = Done()
    Relay(outbox, destination).until_empty()

    assert (kept(outbox), destination.bodies) == ([], [b"poison"])


def test_a_purged_log_goes_on(outbox):
    """On SQLite, too, where an empty table would draw its ids from 1 again."""
    destination = Destination()
    send(outbox, b"1", b"2")
    Relay(outbox, destination).until_empty()
    purge(outbox)
    send(outbox, b"3")

    Relay(outbox, destination).until_empty()

    assert destination.bodies == [b"1", b"2", b"3"]


def test_a_transaction_that_commits_late_loses_nothing(pg_engine):
    """Its row is older than all that is purged, and was open at every position so far."""
    outbox, destination = Outbox(pg_engine), Destination()
    with pg_engine.connect() as late:
        outbox.send(late, "orders", b"late")
        send(outbox, b"1", b"2")
        Relay(outbox, destination).until_empty()
        purge(outbox)
        late.commit()
        purge(outbox)

    Relay(outbox, destination).until_empty()

    assert destination.bodies == [b"1", b"2", b"late"]


def test_of_what_is_kept_elsewhere_only_what_its_position_sees_goes(pg_engine):
    """A row that was committed behind it stays, also one whose id is below those that go."""
    outbox = Outbox(pg_engine)
    with pg_engine.connect() as late:
        outbox.send(late, "orders", b"late")
        send(outbox, b"1", b"2")
        position = now(outbox)
        late.commit()
    send(outbox, b"3")
    settle(outbox.engine, Progress(now(outbox)))
    with closing(outbox.database.open()) as channel:
        work = Purge(channel, batch=2)
        kept_elsewhere = work.kept(NOTHING, position)

        rehearsed, purged = (work.run(NOTHING, kept=kept_elsewhere, rehearsal=is_one) for is_one in (True, False))

    assert (rehearsed.rows, purged.rows, kept(outbox)) == (2, 2, [b"late", b"3"])


def test_of_what_is_kept_elsewhere_nothing_goes_that_was_not_old_when_it_was_compared(outbox):
    send(outbox, *numbered(3))
    settle(outbox.engine, Progress(now(outbox)))
    with closing(outbox.database.open()) as channel:
        work = Purge(channel)
        purged = work.run(NOTHING, kept=replace(work.kept(NOTHING, now(outbox)), last_id=2))

    assert (purged.rows, kept(outbox)) == (2, [b"3"])


def test_the_ids_between_which_old_messages_lie_are_told(outbox):
    """However long the log was: a gap without them is none of what has to be compared with their copies."""
    send(outbox, *numbered(9))
    number = "xact_id" if outbox.engine.dialect.name == "postgresql" else "id"
    with outbox.engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message WHERE id = 1"))
        connection.execute(text("UPDATE outbox_message SET id = id + 4000 WHERE id >= 4"))
        lowest = connection.execute(text(f"SELECT min({number}) FROM outbox_message")).scalar_one()
    position = Position(5000) if number == "id" else now(outbox)
    with closing(outbox.database.open()) as channel:
        work = Purge(channel, batch=2)

        elsewhere = replace(work.kept(NOTHING, position), last_id=4007, position=position)
        held = work.held(elsewhere)
        nothing = work.held(replace(elsewhere, position=EARLIEST))

    assert held == Held(lowest, ((2, 3), (4004, 4007)))
    assert nothing is None


def test_a_copied_log_is_not_purged(pg_engine):
    """Positions of another server say nothing about the ids of this one."""
    outbox = Outbox(pg_engine)
    send(outbox, b"1")
    Relay(outbox, Destination()).until_empty()
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET system_identifier = '42'"))

    with pytest.raises(DatabaseError, match="copy"):
        purge(outbox)

    assert kept(outbox) == [b"1"]


def test_purging_without_pause_beside_writers_and_a_relay_loses_nothing(engine):
    outbox, destination = Outbox(engine), Destination()
    wanted = numbered(400)
    stop = threading.Event()

    def purge_on():
        database = Database(engine)
        with closing(database.open()) as channel:
            while not stop.wait(0.01):
                Purge(channel, batch=7).run(NOTHING)

    purger = threading.Thread(target=purge_on)
    purger.start()
    with outbox.running(destination):
        for body in wanted:
            send(outbox, body)
        Relay(outbox, Destination(), name="other").until_empty()
    stop.set()
    purger.join()
    Relay(outbox, destination).until_empty()

    assert destination.bodies == wanted


@pytest.mark.parametrize("wrong", [-WEEK, timedelta.max], ids=["before", "long"])
def test_an_age_that_is_none_is_refused(outbox, wrong):
    """With the moment of 7 days ago in mind, somebody would purge all, and not what is older."""
    send(outbox, "1")
    Relay(outbox, Destination()).until_empty()

    with pytest.raises(ValueError, match="older_than must be a timedelta from 0 to 36525 days, not"):
        outbox.admin.purge(wrong)

    assert kept(outbox) == [b"1"]
