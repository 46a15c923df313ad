"""Several partitions: the workers of a subscription share them, and keep the order of keys when shares change."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tenacity import wait_fixed

from outbox import Outbox, Retry
from outbox.admin.borrowing import LENGTH, borrowed
from outbox.admin.commands import alter
from outbox.admin.repartition import repartition
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.retry import RetryPolicy
from outbox.model.verdict import DONE, Verdict
from outbox.store.database import Database
from outbox.store.log.log import Limits
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from tests.scenarios.moving.arrivals import arrivals, arrived
from tests.support.destination import LONG_LEASE
from tests.support.partitions import KEYS, apart
from tests.support.programs import Program
from tests.support.readers import QUICK, Collector, Worker, at_work, declared, worker
from tests.support.waiting import eventually

KEY_COUNT = 40
#: No worker loses such a lease by itself, however busy the machine is.
SMALL = Settings(limits=Limits(rows=7), lease=LONG_LEASE, renew_every=QUICK.renew_every)


class Destination(Collector):
    """Keeps what several workers bring, in the order in which it comes."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, all of them."""
        with self._lock:
            return super().__call__(messages)

    @property
    def by_key(self) -> dict[str, list[int]]:
        """The numbers of each key, in the order in which they came."""
        found: dict[str, list[int]] = defaultdict(list)
        for message in self.messages:
            found[message.key or ""].append(int(message.body))
        return dict(found)


class Writer:
    """Commits numbered messages of many keys."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.written: Counter[str] = Counter()

    def write(self, transactions: int = 40) -> None:
        """Each transaction has a message of each key."""
        for _ in range(transactions):
            with self._outbox.begin() as session:
                keys = [f"key-{n}" for n in range(KEY_COUNT)]
                self._outbox.send_all(session, [Message("orders", str(self.written[key]), key=key) for key in keys])
                self.written.update(keys)

    @property
    def by_key(self) -> dict[str, list[int]]:
        """What was written, in order."""
        return {key: list(range(count)) for key, count in self.written.items()}


@pytest.fixture
def destination() -> Destination:
    """What all workers of a test send to."""
    return Destination()


@pytest.fixture
def writer(shop) -> Writer:
    """The writer of a test."""
    return Writer(shop)


@pytest.fixture
def four(channel) -> Sequence[Partition]:
    """The four partitions of `relay`, which nobody has run yet."""
    return Subscriptions(channel).declare(declared(partitions=4)).all_partitions()


def owners(channel) -> list[str | None]:
    """Who holds the lease of each partition."""
    partitions = Subscriptions(channel).get("relay").all_partitions()
    holders = Leases(channel).look_all(partitions)
    return [holders[each].owner if each in holders else None for each in partitions]


def shares(channel) -> list[int]:
    """How many partitions each worker has; nothing while a partition has none."""
    found = Counter(owners(channel))
    return [] if None in found else sorted(found.values())


@contextmanager
def workers(engine, destination, count: int, settings: Settings = QUICK) -> Iterator[list[Worker]]:
    """So many workers at work, each with connections of its own."""
    with ExitStack() as stack:
        found = [worker(Database(engine), destination, settings=settings) for _ in range(count)]
        for each in found:
            stack.enter_context(at_work(each))
        yield found


@pytest.mark.parametrize(
    ("partitions", "count", "expected"),
    [(1, 2, [1]), (2, 1, [2]), (2, 3, [1, 1]), (3, 2, [1, 2]), (4, 2, [2, 2]), (4, 3, [1, 1, 2]), (4, 4, [1, 1, 1, 1])],
)
def test_workers_share_the_partitions_evenly(engine, channel, destination, writer, partitions, count, expected):
    Subscriptions(channel).declare(declared(partitions=partitions))
    with workers(engine, destination, count, SMALL):
        writer.write(5)
        even = eventually(lambda: shares(channel) == expected)
        writer.write(5)
        complete = eventually(lambda: len(destination.messages) == 10 * KEY_COUNT)

    assert (even, complete, destination.by_key) == (True, True, writer.by_key)
    assert owners(channel) == [None] * partitions


def test_a_worker_that_joins_gets_its_share_and_leaves_it_again(engine, channel, destination, writer, four):
    """Few partitions move, and no message is repeated or overtaken for it."""
    with workers(engine, destination, 1, SMALL) as (first,):
        assert eventually(lambda: owners(channel) == [first.owner] * 4)
        writer.write()
        with workers(engine, destination, 1, SMALL) as (second,):
            writer.write()
            assert eventually(lambda: shares(channel) == [2, 2])
            writer.write()
        # The one that stops says so, and its partitions are not waited for until it would count as dead.
        assert eventually(lambda: owners(channel) == [first.owner] * 4)
        writer.write()
        assert eventually(lambda: len(destination.messages) == 160 * KEY_COUNT)

    assert destination.by_key == writer.by_key
    assert second.owner not in owners(channel)


def test_the_share_of_a_worker_that_died_is_taken(engine, channel, destination, writer, four):
    """It left its leases and its row; the others wait for the length of a lease, and take them then."""
    with workers(engine, destination, 1) as (first,):
        assert eventually(lambda: owners(channel) == [first.owner] * 4)
        channel.run("INSERT INTO {worker} (subscription, id, seen_at) VALUES ('relay', 'dead', {now})")
        assert eventually(lambda: owners(channel).count(None) == 2)
        for partition in four:
            Leases(channel).acquire(partition, "dead", timedelta(seconds=1))
        channel.run("UPDATE {worker} SET seen_at = '2020-01-01 00:00:00' WHERE id = 'dead'")
        writer.write(2)

        assert eventually(lambda: owners(channel) == [first.owner] * 4)
        assert eventually(lambda: len(destination.messages) == 2 * KEY_COUNT)

    assert destination.by_key == writer.by_key


def test_all_partitions_are_handled_by_one_worker_until_they_are_empty(engine, channel, destination, writer, four):
    writer.write()

    worker(Database(engine), destination, settings=SMALL).until_empty()

    assert destination.by_key == writer.by_key
    assert owners(channel) == [None] * 4


def test_once_handles_one_batch_of_each_partition(engine, channel, destination, writer, four):
    writer.write()

    worker(Database(engine), destination, settings=SMALL).once()

    assert 0 < len(destination.messages) <= 4 * SMALL.limits.rows


def test_what_failed_waits_in_its_own_partition(engine, channel, writer, four):
    """Each partition tries its own again, and no message of its key passes it."""
    destination = Destination()
    failed: set[str] = set()

    def handle(messages: Sequence[Message]) -> Sequence[Verdict]:
        verdicts: list[Verdict] = []
        for message in messages:
            first = message.key not in failed and message.body == b"1"
            failed.update([message.key or ""] if first else [])
            verdicts.append(Retry("not now") if first else DONE)
        held = {m.key for m, v in zip(messages, verdicts, strict=True) if v is not DONE}
        seen: set[str | None] = set()
        for index, message in enumerate(messages):
            if message.key in seen:
                verdicts[index] = Retry("behind another one")
            elif message.key in held and verdicts[index] is not DONE:
                seen.add(message.key)
        destination([m for m, v in zip(messages, verdicts, strict=True) if v is DONE])
        return verdicts

    policy = HandlerPolicy(retry=RetryPolicy(wait=wait_fixed(0.05)))
    writer.write(6)
    found = worker(Database(engine), handle, settings=SMALL, policy=policy)

    with at_work(found):
        complete = eventually(lambda: sum(map(len, destination.by_key.values())) == 6 * KEY_COUNT)

    assert (complete, destination.by_key, len(failed)) == (True, writer.by_key, KEY_COUNT)


@pytest.mark.parametrize("count", [1, 2])
def test_the_number_changes_under_load(engine, channel, destination, writer, count):
    """1 → 4 → 2 → 3: nothing is lost, repeated or overtaken, and no command waits for long."""
    Subscriptions(channel).declare(declared())
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            writer.write(1)

    thread = threading.Thread(target=write)
    with workers(engine, destination, count, SMALL), closing(Database(engine).open()) as commands:
        thread.start()
        try:
            changed = [repartition(commands, "relay", number) for number in (4, 2, 3)]
        finally:
            stop.set()
            thread.join()
        complete = eventually(lambda: len(destination.messages) == sum(writer.written.values()))

    assert [(each.partitions, each.next_partitions, each.generation) for each in changed] == [
        (4, None, 2), (2, None, 3), (3, None, 4),
    ]  # fmt: skip
    assert (complete, destination.by_key) == (True, writer.by_key)


def test_a_command_that_renews_a_lease_counts_as_no_other_worker(engine, channel, destination, caplog):
    """Its lease has a length of its own, which a worker need not have; and stays stored when it is given back."""
    stored = Subscriptions(channel).declare(declared())
    found = worker(Database(engine), destination, settings=QUICK)
    caplog.set_level("INFO")

    with borrowed(channel, [stored]) as leases, at_work(found):
        assert Leases(channel).renew_all(leases, LENGTH) == set(leases)
        stands_by = eventually(lambda: "standing by" in caplog.text)
        time.sleep(1)
        Leases(channel).release(leases[0])
        works = eventually(lambda: "the lease is free" in caplog.text)

    assert (stands_by, works, "the lease of the other worker" in caplog.text) == (True, True, False)


@pytest.mark.storm
def test_a_change_that_was_ordered_is_carried_out_by_the_workers(engine, channel, shop, destination):
    """The command is gone; one partition has to catch up, and the other one waits for it."""
    Subscriptions(channel).declare(declared())
    passed = apart(shop, channel)
    ordered = repartition(channel, "relay", 3, wait=QUICK.lease)

    worker(Database(engine), destination, settings=SMALL).until_empty()

    stored = Subscriptions(channel).get("relay")
    assert (ordered.partitions, ordered.next_partitions) == (2, 3)
    assert (stored.partitions, stored.next_partitions, stored.stop_at) == (3, None, None)
    assert len(destination.messages) == len(KEYS) - passed


def test_a_subscription_with_partitions_is_altered_under_load(engine, channel, destination, writer, four):
    """The command gets all leases; the workers finish their calls before, and go on after."""
    with workers(engine, destination, 2, SMALL), closing(Database(engine).open()) as commands:
        writer.write()
        stored = Subscriptions(commands).get("relay")
        alter(commands, replace(stored, on_dead="continue"))
        writer.write()
        complete = eventually(lambda: len(destination.messages) == 80 * KEY_COUNT)

    assert (complete, destination.by_key) == (True, writer.by_key)
    assert Subscriptions(channel).get("relay").on_dead == "continue"


@contextmanager
def processes(engine, path: Path, count: int) -> Iterator[list[Program]]:
    """So many relays, each in a process of its own, that write down what arrives."""
    url = engine.url.render_as_string(hide_password=False)
    arguments = ["-m", "tests.scenarios.moving.relaying", url, str(path), "callable:tests"]
    with ExitStack() as stack:
        found = [Program(arguments) for _ in range(count)]
        for each in found:
            stack.callback(each.wait)
            stack.callback(each.kill)
        yield found


@pytest.mark.storm
@pytest.mark.parametrize(
    ("partitions", "count", "before", "after"),
    [(1, 2, [1], [1]), (2, 2, [1, 1], [2]), (4, 3, [1, 1, 2], [2, 2]), (3, 4, [1, 1, 1], [1, 1, 1]), (4, 1, [4], [])],
)
def test_the_share_of_a_killed_process_is_taken_by_the_others(
    engine, channel, writer, tmp_path, partitions, count, before, after
):
    """Each may repeat what the killed one had not settled, in order and from there on."""
    path = tmp_path / "arrived"
    Subscriptions(channel).declare(declared(partitions=partitions))
    with processes(engine, path, count) as found:
        assert eventually(lambda: shares(channel) == before, 120)
        writer.write(5)
        assert eventually(lambda: arrived(path) > KEY_COUNT)
        doomed = next(each for each in found if f":{each.pid}:" in f":{owners(channel)[0]}:")
        doomed.kill()
        writer.write(5)
        # Without another one, somebody starts a new one.
        with processes(engine, path, 0 if after else 1):
            even = eventually(lambda: shares(channel) == (after or before), 120)
            complete = eventually(lambda: len({(a.key, a.number) for a in arrivals(path)}) == 10 * KEY_COUNT, 120)

    last: dict[str, int] = defaultdict(lambda: -1)
    passed_over = 0
    for each in arrivals(path):
        passed_over += each.number > last[each.key] + 1
        last[each.key] = each.number
    assert (even, complete, passed_over) == (True, True, 0)
    assert set(last.values()) == {9}
