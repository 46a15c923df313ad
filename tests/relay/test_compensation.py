"""Compensation: what direct writers have left behind is sent by the relay, after its grace, exactly once."""

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import HungHandlerError, Message, Outbox, Relay, SubscriptionError, Verdict
from outbox.admin import commands
from outbox.model.subscription import Declaration, compensation_of
from outbox.model.verdict import DONE
from outbox.store.database import Database
from outbox.store.log.log import Limits
from outbox.store.operations.purge import Purge
from outbox.store.operations.status import statuses
from outbox.store.subscriptions.notices import refused_workers
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE, Destination
from tests.support.direct import BRIEFLY, BRISK, acked, declare_compensation, relay_of, stored_acks, write
from tests.support.readers import delivered
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


def test_each_row_is_sent_by_its_own(engine):
    """`relay` skips what its writers send, its compensation sends what they left, another reader ignores all that."""
    first, other = Destination(), Destination()
    declare_compensation(engine)
    ids = write(engine, "sent", "left behind")
    acked(engine, ids[:1])
    write(engine, "plain", direct=None)
    write(engine, "of another", direct="other")

    own = delivered(Database(engine), destination="test")
    relay_of(engine, first).until_empty()
    relay_of(engine, other, name="second").until_empty()

    assert [message.body for message in own] == [b"plain", b"of another"]
    assert first.bodies == [b"left behind"]
    assert other.bodies == [b"sent", b"left behind", b"plain", b"of another"]


def test_rows_of_direct_writers_are_skipped_also_while_nobody_compensates(engine):
    """They may appear before the relay knows; whoever wrote them has made sure that somebody will."""
    write(engine, "direct")
    write(engine, "plain", direct=None)

    assert [message.body for message in delivered(Database(engine))] == [b"plain"]
    assert [message.body for message in delivered(Database(engine), name="chosen", topics=("t",))] == [
        b"direct",
        b"plain",
    ]


def test_a_selection_skips_them_too(engine):
    write(engine, "direct")
    write(engine, "plain", direct=None)

    assert [message.body for message in delivered(Database(engine), topics=("t",))] == [b"plain"]


def test_a_backlog_half_of_which_was_sent(engine):
    """Many pages; nothing that has an ack is sent, everything else once and in order."""
    destination = Destination()
    declare_compensation(engine)
    ids = [id for n in range(20) for id in write(engine, *map(str, range(1000 * n, 1000 * (n + 1))))]
    for start in range(0, 20_000, 100):
        acked(engine, [id for id in ids[start : start + 100] if id % 2])

    relay = relay_of(engine, destination, settings=Settings())
    relay.until_empty()
    relay.until_empty()

    assert destination.bodies == [str(n).encode() for n, id in enumerate(ids) if id % 2 == 0]
    assert stored_acks(engine) == []


def test_a_relay_finds_its_first_direct_writer_without_a_restart(engine):
    """And takes over when the grace after the commit is over."""
    destination = Destination()
    relay = relay_of(engine, destination)
    relay.start()
    write(engine, "plain", direct=None)
    eventually(lambda: len(destination.messages) == 1)
    declare_compensation(engine)
    time.sleep(2.5)
    committing = time.monotonic()
    write(engine, "left behind")
    arrived = eventually(lambda: len(destination.messages) == 2)
    took = time.monotonic() - committing
    relay.stop()
    relay.join(60)

    assert arrived
    assert destination.bodies == [b"plain", b"left behind"]
    assert took >= BRIEFLY.total_seconds()


def test_many_writers_declare_at_once(engine):
    """One of them creates it, at a position before its first row; a relay that comes in between changes nothing."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def declare(n: int) -> None:
        barrier.wait()
        try:
            for round in range(3):
                declare_compensation(engine, timedelta(seconds=1), name=f"name-{round}")
                write(engine, f"{n}-{round}", direct=f"name-{round}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=declare, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {round: Destination() for round in range(3)}
    for round, destination in found.items():
        relay_of(engine, destination, name=f"name-{round}", start="latest").until_empty()
        declare_compensation(engine, timedelta(seconds=1), name=f"name-{round}")

    assert errors == []
    for round, destination in found.items():
        assert sorted(destination.bodies) == sorted(f"{n}-{round}".encode() for n in range(8))


class Once:
    """A sender whose calls never overlap, or it says so."""

    destination = "test"

    def __init__(self) -> None:
        self.overlapped = False
        self.sent: list[Message] = []
        self._busy = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, slowly."""
        self.overlapped = self.overlapped or not self._busy.acquire(blocking=False)
        time.sleep(0.02)
        self.sent += messages
        self._busy.release()
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is open."""


def test_both_workers_call_the_sender_one_at_a_time(engine):
    sender = Once()
    declare_compensation(engine, timedelta(milliseconds=50))
    for n in range(20):
        write(engine, *(f"d{n}-{m}" for m in range(50)))
        write(engine, *(f"p{n}-{m}" for m in range(50)), direct=None)
    relay = Relay(Outbox(engine), sender, settings=Settings(limits=Limits(rows=20)))
    relay.start()
    arrived = eventually(lambda: len(sender.sent) >= 2000)
    relay.stop()
    relay.join(60)

    assert arrived
    assert len({message.body for message in sender.sent}) == len(sender.sent) == 2000
    assert not sender.overlapped


def test_a_call_that_hangs_in_one_worker_does_not_stop_the_other(engine):
    destination, over = Destination(), threading.Event()
    destination.hanging = lambda messages: not over.is_set() and messages[0].direct is None
    declare_compensation(engine)
    write(engine, "plain", direct=None)
    relay = relay_of(engine, destination, deadline=timedelta(seconds=0.5))
    relay.start()
    eventually(lambda: destination.calls > 0)
    write(engine, "left behind")
    arrived = eventually(lambda: b"left behind" in destination.bodies)
    over.set()
    relay.stop()
    relay.join(60)

    assert arrived


def test_calls_that_never_come_back_end_the_process_from_either_worker(engine):
    destination, over = Destination(), threading.Event()
    destination.hanging = lambda messages: not over.is_set() and messages[0].direct is not None
    declare_compensation(engine)
    write(engine, *map(str, range(20)))
    relay = relay_of(engine, destination, deadline=timedelta(seconds=0.3))
    with pytest.raises(HungHandlerError):
        relay.run(signals=False)
    over.set()


def test_an_embedded_relay_begins_again_beside_calls_that_hang(engine):
    destination, over = Destination(), threading.Event()
    destination.hanging = lambda messages: not over.is_set() and messages[0].direct is not None
    declare_compensation(engine)
    write(engine, "left behind")
    relay = relay_of(engine, destination, deadline=timedelta(seconds=0.3))
    relay.start()
    time.sleep(3)
    over.set()
    write(engine, "plain", direct=None)
    arrived = eventually(lambda: set(destination.bodies) == {b"left behind", b"plain"})
    relay.stop()
    relay.join(60)

    assert arrived
    assert not [thread for thread in threading.enumerate() if thread.name in ("outbox-compensation", "outbox-relay")]


def test_a_compensation_that_is_refused_does_not_stop_the_relay(engine, caplog):
    """It was told to read something else. When somebody mends that, the relay goes on with it by itself."""
    destination = Destination()
    with closing(Database(engine).open()) as channel:
        declared = Declaration(
            name="relay:compensation", destination="test", kind="compensation", topics=("elsewhere",), grace=BRIEFLY
        )
        Subscriptions(channel).declare(declared, "latest")
        write(engine, "left behind")
        relay = relay_of(engine, destination)
        relay.start()
        heard = eventually(lambda: "relay:compensation: cannot work, trying again" in caplog.text)
        noted = eventually(lambda: [each.name for each in refused_workers(channel)] == ["relay:compensation"])
        write(engine, "plain", direct=None)
        sent = eventually(lambda: destination.bodies == [b"plain"])
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_subscription SET topics = NULL"))
        mended = eventually(lambda: destination.bodies == [b"plain", b"left behind"])
        relay.stop()
        relay.join(60)

    assert (heard, noted, sent, mended) == (True, True, True, True)
    assert "elsewhere" in caplog.text


def test_a_stop_ends_both_workers_and_gives_both_leases_back(engine):
    destination = Destination()
    declare_compensation(engine)
    relay = relay_of(engine, destination)
    relay.start()
    write(engine, "left behind")
    eventually(lambda: bool(destination.messages))
    relay.stop()
    relay.join(60)

    with engine.connect() as connection:
        owners = connection.execute(text("SELECT subscription, owner FROM outbox_lease ORDER BY 1")).all()
    assert owners == [("relay", None), ("relay:compensation", None)]


def test_another_relay_takes_both_over(engine):
    """It stands by for both, and need not have been the one to find the compensation."""
    first, second = Destination(), Destination()
    settings = replace(BRISK, lease=LONG_LEASE)
    relays = [relay_of(engine, each, settings=settings) for each in (first, second)]
    relays[0].start()
    time.sleep(0.5)
    relays[1].start()
    declare_compensation(engine)
    write(engine, "1")
    eventually(lambda: len(first.messages) + len(second.messages) == 1)
    relays[0].stop()
    relays[0].join(60)
    write(engine, "2")
    write(engine, "3", direct=None)
    arrived = eventually(lambda: {b"2", b"3"} <= set(second.bodies))
    relays[1].stop()
    relays[1].join(60)

    assert arrived
    assert sorted(first.bodies + second.bodies) == [b"1", b"2", b"3"]


def test_once_sends_one_batch_of_each(engine):
    destination = Destination()
    declare_compensation(engine)
    write(engine, "left behind")
    write(engine, "plain", direct=None)

    relay_of(engine, destination).once()

    assert destination.bodies == [b"plain", b"left behind"]


def test_until_empty_does_not_wait_when_writers_have_sent_everything(engine):
    destination = Destination()
    declare_compensation(engine, timedelta(minutes=5))
    acked(engine, write(engine, "1", "2"))
    began = time.monotonic()

    relay_of(engine, destination).until_empty()

    assert destination.bodies == []
    assert time.monotonic() - began < 60


def test_a_compensation_has_no_relay_of_its_own(engine):
    with pytest.raises(SubscriptionError, match="is the compensation of 'relay', whose workers do its work"):
        relay_of(engine, Destination(), name="relay:compensation")


def test_it_stands_in_the_status_with_what_is_its_own(engine):
    declare_compensation(engine)
    write(engine, "1", "2")
    write(engine, "3", direct=None)

    with closing(Database(engine).open()) as channel:
        _, found = statuses(channel)

    assert {each.name: each.backlog for each in found} == {"relay": 1, "relay:compensation": 2}


def test_nothing_is_purged_that_it_has_not_passed(engine):
    declare_compensation(engine)
    write(engine, "left behind")
    write(engine, "plain", direct=None)
    with closing(Database(engine).open()) as channel:
        delivered(Database(engine), destination="test")
        time.sleep(0.1)
        before = Purge(channel).run(timedelta(0))
        relay_of(engine, Destination()).until_empty()
        after = Purge(channel).run(timedelta(0))

    assert (before.rows, before.held_by) == (0, ("relay:compensation",))
    assert (after.rows, after.held_by) == (2, ())


def test_it_follows_its_subscription(engine):
    """Altered with it, dropped with it, and not altered alone."""
    database = Database(engine)
    declare_compensation(engine)
    acked(engine, write(engine, "1"))
    relay_of(engine, Destination()).until_empty()
    acked(engine, write(engine, "2"))
    with closing(database.open()) as channel:
        subscriptions = Subscriptions(channel)
        main, own = subscriptions.get("relay"), subscriptions.get(compensation_of("relay"))
        with pytest.raises(SubscriptionError, match="follows relay"):
            commands.alter(channel, replace(own, destination="elsewhere"))
        commands.alter(channel, replace(main, destination="elsewhere"))
        altered = {each.name: each.destination for each in subscriptions.all()}
        commands.drop(channel, main.name)
        left = subscriptions.all()

    assert altered == {"relay": "elsewhere", "relay:compensation": "elsewhere"}
    assert (left, stored_acks(engine)) == ([], [])
