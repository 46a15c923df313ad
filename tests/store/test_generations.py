"""Changing the number of partitions in the middle of everything: nothing lost, repeated or out of order."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial

import pytest

from outbox import Outbox
from outbox.errors import SubscriptionError
from outbox.model import barrier
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.position import EARLIEST, Progress
from outbox.model.subscription import Declaration, Subscription
from outbox.store.database import Channel, Database
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Log
from outbox.store.subscriptions.generations import Generations
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.partitions import KEYS, LENGTH, OnePartition, apart


class World:
    """Writers whose transactions overlap, the partitions of one subscription, and somebody who changes their number."""

    def __init__(self, outbox: Outbox, channel: Channel, stack: ExitStack, seed: int) -> None:
        self.outbox, self.channel = outbox, channel
        self.random = random.Random(seed)
        many = 1 if outbox.database.dialect.locks.one_writer else 3
        self.writers = [stack.enter_context(outbox.engine.connect()) for _ in range(many)]
        self.subscriptions = Subscriptions(channel)
        self.subscriptions.declare(Declaration(name="relay", destination="callable:tests", partitions=2))
        self.at_work: dict[Partition, OnePartition] = {}
        self.sent: dict[str, int] = defaultdict(int)
        self.received: list[tuple[str, bytes]] = []
        self.numbers: set[int] = set()

    def send(self) -> None:
        """One more message; each key belongs to one writer, so that its order is that of the commits."""
        key = self.random.choice(KEYS)
        writer = self.writers[KEYS.index(key) % len(self.writers)]
        self.outbox.send(writer, "orders", f"{self.sent[key]:04}", key=key)
        self.sent[key] += 1
        if self.outbox.database.dialect.locks.one_writer:
            writer.commit()

    def commit(self) -> None:
        """One writer commits."""
        self.random.choice(self.writers).commit()

    def step(self) -> None:
        """One partition does a batch; its worker takes the lease if nobody has it."""
        partition = self.random.choice(self.subscriptions.get("relay").all_partitions())
        if partition not in self.at_work:
            self.at_work[partition] = OnePartition(self.channel, partition)
        self.received += [(m.key or "", m.body) for m in self.at_work[partition].step()]

    def die(self) -> None:
        """One worker forgets all that is in its memory; its successor begins with what is stored."""
        if self.at_work:
            del self.at_work[self.random.choice(list(self.at_work))]

    def change(self) -> None:
        """Order another number, as a command does: all leases are given back before, and taken anew after."""
        self.give_back()
        with self.subscriptions.changing():
            self.subscriptions.repartition("relay", self.random.choice([1, 2, 3, 4]))

    def give_back(self) -> None:
        """All workers give their leases back; it may be that all have met."""
        for lease in [each.lease for each in self.at_work.values()]:
            Leases(self.channel).release(lease)
        self.at_work.clear()
        self.subscriptions.begin_next_generation("relay")
        self.numbers.add(self.subscriptions.get("relay").partitions)

    def drain(self) -> None:
        """All writers commit; all workers go on until nothing is left and no change is under way."""
        for writer in self.writers:
            writer.commit()
        for _ in range(200):
            partitions = self.subscriptions.get("relay").all_partitions()
            before = len(self.received)
            for partition in partitions:
                if partition not in self.at_work:
                    self.at_work[partition] = OnePartition(self.channel, partition)
                self.received += [(m.key or "", m.body) for m in self.at_work[partition].step()]
            ordered = self.subscriptions.get("relay").next_partitions
            if ordered is not None:
                self.give_back()
            elif len(self.received) == before and all(not each.step() for each in self.at_work.values()):
                return
        raise AssertionError("the change never ends")

    def run(self, steps: int) -> None:
        """Do so many things, in an order that the seed decides."""
        deeds = [self.send] * 8 + [self.commit] * 4 + [self.step] * 10 + [self.die, self.change, self.give_back]
        for _ in range(steps):
            self.random.choice(deeds)()
        self.drain()

    @property
    def expected(self) -> dict[str, list[bytes]]:
        """What was sent of each key, in the order of its writer."""
        return {key: [f"{n:04}".encode() for n in range(count)] for key, count in self.sent.items()}

    @property
    def by_key(self) -> dict[str, list[bytes]]:
        """What came of each key, in the order in which it came."""
        found: dict[str, list[bytes]] = defaultdict(list)
        for key, body in self.received:
            found[key].append(body)
        return dict(found)


@pytest.fixture
def seeds(full: bool) -> range:
    """How many worlds are tried."""
    return range(40 if full else 8)


def worlds(shop: Outbox, seeds: range, steps: int = 250) -> Iterator[World]:
    """One world after the other, each run to its end."""
    for seed in seeds:
        with ExitStack() as stack, closing(Database(shop.engine).open()) as channel:
            with channel.database.engine.begin() as connection:
                for table in ("message", "parked", "progress", "lease", "subscription"):
                    connection.exec_driver_sql(f"DELETE FROM outbox_{table}")
            world = World(shop, channel, stack, seed)
            world.run(steps)
            yield world


@pytest.mark.storm
def test_every_message_comes_once_and_in_order(shop, seeds):
    found = list(worlds(shop, seeds))

    for world in found:
        assert world.by_key == world.expected
    assert {number for world in found for number in world.numbers} == {1, 2, 3, 4}


class Impatient(Generations):
    """Begins the next generation at once, where the first of the partitions stands."""

    def order(self, subscription, partitions):
        """As if all partitions stood there."""
        standing = self._progress.standing(subscription)
        self._begin_next(subscription, partitions, Progress(barrier.stop_at(standing)))


class Repeating(Generations):
    """Begins the next generation at once, where the last of the partitions stands."""

    def order(self, subscription, partitions):
        """As if none had done more."""
        standing = self._progress.standing(subscription)
        self._begin_next(subscription, partitions, min(standing, key=lambda each: each.base.head))


@pytest.mark.parametrize("twin", [Impatient, Repeating])
def test_a_change_without_a_meeting_point_loses_or_repeats(shop, monkeypatch, seeds, twin):
    monkeypatch.setattr("outbox.store.subscriptions.subscriptions.Generations", twin)

    assert any(world.by_key != world.expected for world in worlds(shop, seeds))


@pytest.fixture
def relay(channel):
    """The subscription of these tests."""
    return Subscriptions(channel).declare(Declaration(name="relay", destination="callable:tests"))


def test_one_partition_becomes_several_where_it_stands(shop, channel, relay):
    """Also in the middle of a window: a backlog is shared at once."""
    with shop.begin() as session:
        shop.send_all(session, [Message("orders", b"x", key=str(n)) for n in range(10)])
    worker = OnePartition(channel, relay.partition(0))
    worker.step()
    before = ProgressLog(channel).standing(relay)
    Leases(channel).release(worker.lease)

    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)

    stored = Subscriptions(channel).get("relay")
    assert before[0].target is not None
    assert (stored.partitions, stored.generation, stored.stop_at, stored.next_partitions) == (3, 2, None, None)
    assert ProgressLog(channel).standing(stored) == before * 3
    assert [Leases(channel).look(each) is not None for each in stored.all_partitions()] == [True] * 3


def test_the_worker_of_an_earlier_generation_writes_nothing(shop, channel, relay):
    worker = OnePartition(channel, relay.partition(0))
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 2)
    incarnation = Log().now(channel).incarnation

    with channel.transaction():
        held = Leases(channel).hold(worker.lease, incarnation)
    renewed = Leases(channel).renew(worker.lease, LENGTH)
    settled = ProgressLog(channel).settle(worker.lease, 9, Progress(EARLIEST), incarnation)
    taken = Leases(channel).acquire(relay.partition(0), "worker", LENGTH)

    assert (held, renewed, settled, taken) == (False, False, False, None)


def test_the_next_generation_waits_until_all_leases_were_given_back(shop, channel, relay):
    """A worker whose partition has arrived may still have calls under way, of parked messages."""
    apart(shop, channel)
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    stored = Subscriptions(channel).get("relay")
    workers = [OnePartition(channel, each) for each in stored.all_partitions()]
    for worker in workers:
        while worker.step():
            pass

    began = []
    for worker in workers:
        began.append(Subscriptions(channel).begin_next_generation("relay"))
        Leases(channel).release(worker.lease)
    began.append(Subscriptions(channel).begin_next_generation("relay"))

    assert began == [False, False, True]
    assert Subscriptions(channel).get("relay").partitions == 3


def met_while_messages_come(shop: Outbox, channel: Channel) -> tuple[list[bytes], bool]:
    """What two partitions bring that shall meet while messages come, and whether the next generation begins."""
    apart(shop, channel)
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    brought: list[bytes] = []
    for partition in Subscriptions(channel).get("relay").all_partitions():
        with shop.begin() as session:
            shop.send_all(session, [Message("orders", b"later", key=key) for key in KEYS])
        worker = OnePartition(channel, partition)
        for _ in range(9):
            brought += [message.body for message in worker.step()]
        Leases(channel).release(worker.lease)
    return brought, Subscriptions(channel).begin_next_generation("relay")


def test_partitions_meet_while_messages_come(shop, channel, relay):
    """They read nothing that came later; the one without a message before it stores that it stands there."""
    brought, began = met_while_messages_come(shop, channel)

    assert (set(brought) <= {b"x"}, began) == (True, True)


def test_readers_that_do_not_stop_never_meet(shop, channel, relay, monkeypatch):
    sound = Cursor.__init__

    def unstoppable(cursor, *args, **named):
        sound(cursor, *args, **{**named, "stop": None})

    monkeypatch.setattr(Cursor, "__init__", unstoppable)

    brought, began = met_while_messages_come(shop, channel)

    assert (b"later" in brought, began) == (True, False)


def test_the_number_that_it_has_takes_a_change_back(shop, channel, relay):
    apart(shop, channel)
    subscriptions = Subscriptions(channel)
    for number in (3, 4, 2):
        with subscriptions.changing():
            subscriptions.repartition("relay", number)

    stored = subscriptions.get("relay")
    assert (stored.partitions, stored.stop_at, stored.next_partitions) == (2, None, None)
    assert not subscriptions.begin_next_generation("relay")


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("relay", "relay", 0),
        ("relay", "relay", 257),
        ("check:a", "check", 2),
    ],
)
def test_some_numbers_are_refused(channel, name, kind, number):
    declared = Declaration(name=name, destination="callable:tests", kind=kind, partitions=number)

    with pytest.raises(SubscriptionError, match="partition"):
        Subscriptions(channel).declare(declared)


def test_a_worker_that_declares_another_number_takes_the_stored_one(channel, relay):
    """Nothing depends on it, and a relay must not stop because its number was changed."""
    declared = Declaration(name="relay", destination="callable:tests", partitions=4)

    assert Subscriptions(channel).declare(declared).partitions == 1


def test_a_worker_that_declares_what_was_ordered_may_start_before_that(shop, channel, relay):
    apart(shop, channel)
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 4)

    declared = Declaration(name="relay", destination="callable:tests", partitions=4)

    assert Subscriptions(channel).declare(declared).partitions == 2


@pytest.mark.parametrize("name", ["relay", "another"])
def test_the_first_worker_may_say_how_many_there_are(channel, name):
    """`relay` is there from the first migration on; the other one is created."""
    made = Subscriptions(channel).declare(Declaration(name=name, destination="callable:tests", partitions=4))

    assert (made.partitions, ProgressLog(channel).standing(made)) == (4, [Progress(EARLIEST)] * 4)


def test_nobody_works_between_the_look_where_partitions_stand_and_the_next_generation(
    shop, channel, relay, monkeypatch
):
    """What a worker settles in between would be read again by the next generation."""
    if shop.database.dialect.locks.one_writer:
        pytest.skip("a single writer has the lock of all that declare")
    passed = apart(shop, channel)
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    behind = Subscriptions(channel).get("relay").partition(1)
    found: list[list[bytes]] = []
    with closing(shop.database.open()) as other:
        monkeypatch.setattr(
            Generations, "_are_given_back", between := Meanwhile(other, behind, Generations._are_given_back)
        )
        began = Subscriptions(channel).begin_next_generation("relay")
    stored = Subscriptions(channel).get("relay")
    for partition in stored.all_partitions():
        worker = OnePartition(channel, partition)
        while batch := worker.step():
            found.append([message.body for message in batch])

    assert (began, passed + len(between.settled), found) == (True, len(KEYS), [])


class Meanwhile:
    """A worker that takes the partition behind, settles it and gives it back, right before the look at the leases."""

    def __init__(self, channel: Channel, partition: Partition, look: Callable[..., bool]) -> None:
        self.settled: list[Message] = []
        self._channel, self._partition, self._look = channel, partition, look

    def __get__(self, generations: Generations, _class: object = None) -> Callable[..., bool]:
        return partial(self, generations)

    def __call__(self, generations: Generations, subscription: Subscription) -> bool:
        """Work, then look."""
        worker = OnePartition(self._channel, self._partition)
        while batch := worker.step():
            self.settled += batch
        Leases(self._channel).release(worker.lease)
        return self._look(generations, subscription)
