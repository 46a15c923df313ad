"""The messages of a person can be deleted: those that are delivered, and no others, wherever they lie in the log."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Reject, Relay
from outbox.admin.admin import Admin
from outbox.model.lease import Partition
from outbox.store.database import Channel
from outbox.store.operations.erasure import Erasure
from outbox.store.operations.purge import purged_id
from outbox.store.subscriptions.leases import Leases
from tests.rocketmq.halves import producer
from tests.store.test_purge import Destination
from tests.support.command_line import outbox as command
from tests.support.parked import decisions, states
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


@pytest.fixture
def channel(outbox: Outbox) -> Iterator[Channel]:
    with closing(outbox.database.open()) as channel:
        yield channel


@pytest.fixture
def destination() -> Destination:
    return Destination()


def send(outbox: Outbox, *keys: str) -> list[UUID]:
    with outbox.begin() as session:
        return [outbox.send(session, "orders", f"of {key}", key=key) for key in keys]


def left(outbox: Outbox) -> list[str]:
    """The bodies in the log."""
    with outbox.engine.connect() as connection:
        bodies = connection.execute(text("SELECT body FROM outbox_message ORDER BY id")).scalars()
        return [bytes(body).decode() for body in bodies]


def erased(channel: Channel, *keys: str, rehearsal: bool = False) -> tuple[int, int, Mapping[str, int], int]:
    done = Admin(channel).erase(keys=keys, by="test", rehearsal=rehearsal)
    return done.rows, done.dead_letters, done.waiting, done.undecided


def test_messages_go_from_the_middle_of_the_log_and_nobody_is_confused(outbox, channel, destination):
    """What was purged is written down as before: other messages are neither lost nor unwatched for Spark's readers."""
    (first, *_) = send(outbox, "ann", "bob", "ann", "eve", "bob", "ann")
    Relay(outbox, destination).until_empty()

    rehearsed = erased(channel, "bob", rehearsal=True)
    done = Erasure(channel, keys=("bob",), message_ids=(first,), batch=2).run({})
    send(outbox, "bob")
    Relay(outbox, destination).until_empty()

    assert (rehearsed, done) == ((2, 0, {}, 0), (3, 0, 0))
    assert left(outbox) == ["of ann", "of eve", "of ann", "of bob"]
    assert len(destination.bodies) == 7
    assert (purged_id(channel), channel.rows("SELECT purged FROM {meta}")[0][0]) == (0, None)


def test_what_is_not_delivered_stays_and_the_command_says_for_whom(engine, outbox, destination):
    send(outbox, "ann", "bob")

    early = command(engine, "erase", "--key", "ann")
    kept = left(outbox)
    Relay(outbox, destination).until_empty()
    late = command(engine, "erase", "--key", "ann")

    said = "0 messages deleted\n1 message stays with relay for now; see: outbox status; then run this again\n"
    assert (early.code, early.err, kept) == (1, said, ["of ann", "of bob"])
    assert (late.code, late.err, left(outbox)) == (0, "1 message deleted\n", ["of bob"])


def test_dead_letters_are_discarded_and_what_they_held_back_goes_later(outbox, channel, destination):
    destination.verdict = Reject("no")
    send(outbox, "ann", "bob")
    Relay(outbox, destination).until_empty()
    send(outbox, "ann")
    Relay(outbox, destination).until_empty()

    first = erased(channel, "ann")
    Relay(outbox, Destination()).until_empty()
    second = erased(channel, "ann")

    assert (first, second) == ((1, 1, {"relay": 1}, 0), (1, 0, {}, 0))
    assert (left(outbox), states(outbox.engine)) == (["of bob"], {"dead": 1})


def test_a_live_worker_discards_them_itself(outbox, channel, destination):
    destination.verdict = Reject("no")
    send(outbox, "ann")
    Relay(outbox, destination).until_empty()
    with closing(outbox.database.open()) as other:
        assert Leases(other).acquire(Partition("relay"), "a worker", timedelta(minutes=5))

        done = erased(channel, "ann")

    assert (done, states(outbox.engine)) == ((0, 1, {"relay": 1}, 0), {"dead": 1})
    assert [each[:4] for each in decisions(outbox.engine)] == [
        ("test", "erase", None, None),
        ("test", "discard", "relay", "outbox erase"),
    ]


def test_a_letter_that_is_replayed_meanwhile_is_not_counted(outbox, channel, destination, monkeypatch):
    destination.verdict = Reject("no")
    send(outbox, "ann")
    Relay(outbox, destination).until_empty()
    find = Erasure.parked

    def find_and_replay(erasure: Erasure) -> list[tuple[str, int, str]]:
        found = find(erasure)
        channel.run("UPDATE {parked} SET state = 'retry'")
        return found

    monkeypatch.setattr(Erasure, "parked", find_and_replay)

    assert erased(channel, "ann") == (0, 0, {"relay": 1}, 0)


def test_half_messages_go_with_what_was_restored_and_not_before_the_verdict(engine, outbox, channel, destination):
    """The key of the message is inside of the half message, whose own key is the transaction."""
    transaction = producer(engine).begin_transaction()
    transaction.send("orders", "of ann", key="ann")
    Relay(outbox, destination).until_empty()

    undecided = erased(channel, "ann")
    transaction.commit()
    Relay(outbox, destination).until_empty()
    waiting = erased(channel, "ann")
    channel.run("DELETE FROM {subscription} WHERE name <> 'relay'")
    decided = erased(channel, "ann")

    assert undecided == (0, 0, {"check:shop": 1}, 1)
    assert waiting == (0, 0, {"check:shop": 2}, 0)
    assert (decided, left(outbox), destination.bodies) == ((2, 0, {}, 0), [], [b"of ann"])


def test_a_writer_that_repeats_a_dedup_key_keeps_only_the_message_of_that_key(pg_engine):
    """Others go at once, whatever lies beside them in a batch; this one goes when the transaction has ended."""
    outbox = Outbox(pg_engine)
    with outbox.begin() as session:
        for name in ("1", "2", "3"):
            outbox.send(session, "orders", name, key="ann", dedup_key=name)
    Relay(outbox, Destination()).until_empty()
    with outbox.begin() as session, closing(outbox.database.open()) as channel:
        channel.run("SET lock_timeout = '50ms'")
        outbox.send(session, "orders", "2 again", key="ann", dedup_key="2")
        during = Admin(channel).erase(keys=["ann"], by="test")
        meanwhile = left(outbox)
    after = command(pg_engine, "erase", "--key", "ann", "--json")

    assert (during.rows, during.repeated, meanwhile) == (2, 1, ["2"])
    assert (after.json["rows"], after.json["repeated"], after.code, left(outbox)) == (1, 0, 0, [])


def test_a_message_whose_key_is_repeated_for_a_moment_goes_after_a_wait(pg_engine):
    outbox = Outbox(pg_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", "1", key="ann", dedup_key="1")
    Relay(outbox, Destination()).until_empty()
    with closing(outbox.database.open()) as channel, ThreadPoolExecutor(1) as pool:
        with outbox.begin() as session:
            outbox.send(session, "orders", "1 again", key="ann", dedup_key="1")
            erasing = pool.submit(Admin(channel).erase, keys=["ann"], by="test")
            assert eventually(lambda: waits_for_a_lock(pg_engine))
        done = erasing.result(60)

    assert (done.rows, done.repeated, left(outbox)) == (1, 0, [])


def waits_for_a_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(connection.execute(text(waiting)).scalar_one())


def test_somebody_must_be_meant(sqlite_engine):
    ended = command(sqlite_engine, "erase")

    assert (ended.code, "say whose messages: --key KEY or --message-id UUID" in ended.err) == (2, True)


@pytest.mark.parametrize(("chosen", "field"), [({"keys": "bob"}, "keys"), ({"message_ids": "bob"}, "message_ids")])
def test_one_text_in_place_of_a_list_is_refused(outbox, channel, destination, chosen, field):
    """Its letters would be taken for the keys of others."""
    send(outbox, "b", "o", "bob")
    Relay(outbox, destination).until_empty()

    with pytest.raises(TypeError, match=rf"{field} must be a list, and not one text: 'bob'; pass \[…\]"):
        Admin(channel).erase(**chosen)

    assert left(outbox) == ["of b", "of o", "of bob"]
