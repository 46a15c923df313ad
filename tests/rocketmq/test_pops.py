"""A receive is one short transaction, without a worker: what it costs, and whom it lets go first."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from psycopg.errors import UniqueViolation
from sqlalchemy import Engine, text

from outbox import Message, Outbox, SubscriptionError, create_engine
from outbox.model.lease import Lease, Partition
from outbox.model.subscription import Declaration, Selection
from outbox.rocketmq import MessageExt, MQClientError, SimpleConsumer, dead_letters, simple_consumer
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.partition_pops import Kept
from outbox.rocketmq.popping import Popping
from outbox.runtime import failpoints
from outbox.store.database import Channel, Database
from outbox.store.log.cursor import Batch, Cursor
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.pops import Pops
from outbox.store.subscriptions.progress import ProgressLog, Settled
from outbox.store.subscriptions.receipts import Receipt, Receipts
from tests.rocketmq.test_simple_consumer import HOUR, NOW, consumer_of, send, texts
from tests.support.leases import step_clock
from tests.support.parked import decisions, states
from tests.support.programs import Program
from tests.support.waiting import eventually

PARTITION = Partition("billing")


def begun(outbox: Outbox, **options) -> SimpleConsumer:
    """A consumer that has declared its group."""
    consumer = consumer_of(outbox, await_duration=NOW, **options)
    assert consumer.receive(1, HOUR) == []
    return consumer


def progress(engine: Engine) -> list[tuple[int, int]]:
    """The epochs and numbers of the stored progress."""
    with engine.connect() as connection:
        stored = "SELECT epoch, n FROM outbox_progress WHERE subscription = 'billing' ORDER BY epoch, n"
        rows = connection.execute(text(stored))
        return [(int(epoch), int(n)) for epoch, n in rows]


# The price of a call


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many statements channels run from now on, as `sql`."""
    asked = Counter[str]()
    for name in ("rows", "run", "rows_of_last"):
        real = getattr(Channel, name)
        monkeypatch.setattr(Channel, name, lambda *given, r=real, **more: asked.update(["sql"]) or r(*given, **more))
    return asked


def test_an_acknowledgement_out_of_order_is_one_statement_also_of_a_message_with_a_key(pg_engine, monkeypatch):
    outbox = Outbox(pg_engine)
    consumer = begun(outbox)
    send(outbox, "1", key="a")
    (found,) = consumer.receive(1, HOUR)
    asked = counted(monkeypatch)
    consumer.ack(found)

    assert (asked["sql"], states(pg_engine)) == (1, {})


def test_a_receive_is_at_most_four_statements_on_a_connection_that_is_there(outbox, monkeypatch):
    consumer = begun(outbox)
    asked, counts = counted(monkeypatch), list[int]()
    real_open = Database.open
    monkeypatch.setattr(Database, "open", lambda self: asked.update(["open"]) or real_open(self))

    def receive(number: int) -> list[MessageExt]:
        found = consumer.receive(number, HOUR)
        counts.append(asked.pop("sql"))
        return found

    send(outbox, *map(str, range(5)))
    found = [receive(1), receive(2), receive(32), receive(1)]
    consumer.change_invisible_duration(found[0][0], NOW)
    del asked["sql"]
    found.append(receive(1))

    assert [texts(each) for each in found] == [["0"], ["1", "2"], ["3", "4"], [], ["0"]]
    assert max(counts) <= 4
    assert asked["open"] == 0


def test_groups_that_share_a_limit_read_the_log_again_and_get_every_message_in_order(outbox, monkeypatch):
    """Two groups by turns, both of which may keep what they have read, or one, or none."""
    send(outbox, *map(str, range(8)))
    reads, real = list[Cursor](), Cursor.read

    def read(cursor: Cursor, channel: Channel) -> Batch:
        reads.append(cursor)
        return real(cursor, channel)

    monkeypatch.setattr(Cursor, "read", read)

    def received(most_bytes: int) -> tuple[dict[str, list[bytes]], int]:
        kept, found = Kept(most_bytes), dict[str, list[bytes]]()
        names = [f"{name}{most_bytes}" for name in ("billing", "stock")]
        groups = {name: Declaration(name=name, destination=None, kind="consumer", topics=("orders",)) for name in names}
        pops = {
            name: Popping(outbox, declared, start="earliest", max_attempts=17, kept=kept)
            for name, declared in groups.items()
        }
        reads.clear()
        with closing(outbox.database.open()) as channel:
            for turn in range(4):
                for name, popping in pops.items():
                    (messages,) = popping.pop(channel, f"{name} {turn}", [Asked(2, HOUR)])
                    found.setdefault(name[: -len(str(most_bytes))], []).extend(each.body for each in messages)
        return found, len(reads)

    bodies = [b"%d" % number for number in range(8)]
    all_of_it = {"billing": bodies, "stock": bodies}
    assert [received(most) for most in (16, 12, 0)] == [(all_of_it, 2), (all_of_it, 4), (all_of_it, 8)]


def test_calls_that_come_during_a_pop_are_served_together_by_the_next(outbox):
    consumer, found, pops = begun(outbox), list[str](), list[str]()
    send(outbox, *map(str, range(4)))
    threads = [threading.Thread(target=lambda: found.extend(texts(consumer.receive(1, HOUR)))) for _ in range(4)]

    def let_the_others_come() -> None:
        for each in threads[1:]:
            each.start()
        assert eventually(lambda: len(consumer._pops._waiting) == 3)

    def at(point: str) -> None:
        pops.append(point) if point == "pop.after_commit" else None
        if point == "pop.before_write" and not pops:
            let_the_others_come()

    failpoints.arm(at)
    try:
        threads[0].start()
        threads[0].join()
        for each in threads[1:]:
            each.join()
    finally:
        failpoints.arm(None)

    assert (sorted(found), len(pops)) == (["0", "1", "2", "3"], 2)


def test_a_call_may_wait_for_another_time_than_the_consumer(outbox):
    consumer = consumer_of(outbox, await_duration=HOUR)

    assert consumer.receive(1, HOUR, NOW) == []
    with pytest.raises(ValueError, match="wait is a timedelta of at least 0:00:00, not 3"):
        consumer.receive(1, HOUR, 3)  # type: ignore[arg-type]


def test_most_of_the_progress_of_earlier_pops_is_deleted(engine, outbox):
    begun(outbox)
    with closing(outbox.database.open()) as channel, channel.transaction():
        log = ProgressLog(channel)
        newest = log.newest(PARTITION)
        assert newest is not None
        for n in range(2, 301):
            log.append(PARTITION, 0, n, newest.progress.base)
        log.thin(PARTITION, Settled(newest.progress, newest.settled_at, 0, 300))

    assert progress(engine) == [(0, 0), *((0, n) for n in (100, *range(200, 301)))]


# Nothing is handed out twice


def test_eight_callers_at_once_get_each_message_once_and_each_key_in_order(outbox):
    """Four consumers with two threads each. With an order the next message of a key comes after the last was done."""
    keys = "abcd"
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{key}{n}", key=key) for n in range(6) for key in keys])
    consumers = [consumer_of(outbox, fifo=True, await_duration=NOW) for _ in range(4)]
    got, lock = list[str](), threading.Lock()

    def receive(consumer: SimpleConsumer) -> None:
        while len(got) < 6 * len(keys):
            for each in consumer.receive(2, HOUR):
                with lock:
                    got.append(each.body.decode())
                consumer.ack(each)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(receive, consumers * 2))

    assert [[body for body in got if body[0] == key] for key in keys] == [
        [f"{key}{n}" for n in range(6)] for key in keys
    ]


def meet(engine: Engine, outbox: Outbox) -> list[list[str]]:
    """What two consumers get, of which the second receives while the first is about to write."""
    mine, yours = begun(outbox), consumer_of(outbox, await_duration=NOW)
    send(outbox, "1", "2")
    second, found = threading.Thread(target=lambda: found.append(texts(yours.receive(1, HOUR)))), list[list[str]]()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"

    def met() -> bool:
        with engine.connect() as connection:
            return not second.is_alive() or bool(connection.execute(text(waiting)).scalar_one())

    def at(point: str) -> None:
        if point == "pop.before_write" and second.ident is None:
            second.start()
            assert eventually(met)

    failpoints.arm(at)
    try:
        found.insert(0, texts(mine.receive(1, HOUR)))
    finally:
        failpoints.arm(None)
        second.join()
    return found


def test_a_pop_waits_for_the_end_of_another(pg_engine):
    """On SQLite one process writes at a time."""
    outbox = Outbox(pg_engine)

    assert meet(pg_engine, outbox) == [["1"], ["2"]]
    outbox.close()


def test_without_the_lock_both_take_the_same_message_and_one_of_them_fails(pg_engine, monkeypatch):
    """A broken twin of the test before: the number of the progress keeps the message from going out twice."""
    outbox = Outbox(pg_engine)
    monkeypatch.setattr(Pops, "lock", lambda _pops: None)

    with pytest.raises(UniqueViolation, match="outbox_progress_pkey"):
        meet(pg_engine, outbox)
    outbox.close()


def test_what_commits_late_is_handed_out_although_later_ids_were(pg_engine):
    """The second transaction draws its ids later, and commits first."""
    outbox = Outbox(pg_engine)
    consumer = begun(outbox)
    with pg_engine.connect() as early, early.begin():
        outbox.send(early, "orders", "early")
        send(outbox, "late")
        first = consumer.receive(32, HOUR)
    second = consumer.receive(32, HOUR)
    outbox.close()

    assert (texts(first), texts(second)) == (["late"], ["early"])


def test_what_is_passed_by_the_expression_of_one_call_is_passed_for_all(outbox):
    declared = Declaration(name="billing", destination=None, kind="consumer", topics=("orders",), on_dead="continue")
    paid, all_of_them = (
        Popping(outbox, declared, start="earliest", max_attempts=17, selection=Selection(topics=("orders",), tags=tags))
        for tags in (("paid",), None)
    )
    with outbox.begin() as session:
        outbox.send_all(
            session, [Message("orders", str(n), tags=tags) for n, tags in enumerate(["new", "paid", "new"])]
        )

    with closing(outbox.database.open()) as channel:
        found = [each.pop(channel, str(n), [Asked(32, HOUR)]) for n, each in enumerate((paid, all_of_them))]

    assert [[each.body for each in messages] for (messages,) in found] == [[b"1"], []]


def test_of_the_calls_of_one_pop_each_gets_messages_of_other_keys(outbox):
    """Also of what is parked: a key goes to one call, and the next key to the call that has the most room."""
    declared = Declaration(name="billing", destination=None, kind="consumer", topics=("orders",), on_dead="continue")
    popping = Popping(outbox, declared, start="earliest", max_attempts=17)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{key}{n}", key=key) for n in range(3) for key in "abc"])
    asked = [Asked(2, HOUR), Asked(1, HOUR), Asked(3, HOUR)]

    with closing(outbox.database.open()) as channel:
        found = [popping.pop(channel, str(n), asked) for n in range(2)]
        ids = [Receipt(each.id or 0, "0") for messages in found[0] for each in messages]
        Receipts(channel, "billing").ack(ids)
        found.append(popping.pop(channel, "2", asked))

    assert [["".join(each.body.decode() for each in messages) for messages in pop] for pop in found] == [
        ["b0b1", "c0", "a0a1a2"], ["", "", ""], ["b2", "", "c1c2"],
    ]  # fmt: skip


# Beside a worker, and its lease


def lease_of(outbox: Outbox, length: timedelta = HOUR) -> Lease:
    """The lease of the group, in the hands of a worker."""
    with closing(outbox.database.open()) as channel:
        lease = Leases(channel).acquire(PARTITION, "host:1:x", length)
        assert lease is not None
        return lease


def test_beside_a_worker_nothing_is_handed_out_and_the_call_says_why(outbox, monkeypatch):
    monkeypatch.setattr(simple_consumer, "_SHORTEST_SECONDS", 0.1)
    consumer = begun(outbox)
    send(outbox, "1")
    lease = lease_of(outbox)

    with pytest.raises(SubscriptionError, match="billing: host:1:x has the lease of the group"):
        consumer.receive(1, HOUR)
    with closing(outbox.database.open()) as channel:
        Leases(channel).release(lease)

    assert texts(consumer.receive(1, HOUR)) == ["1"]


def test_a_pop_writes_nothing_after_a_worker_has_taken_the_lease(pg_engine):
    """It had found the lease free. On SQLite nobody can take a lease beside it."""
    outbox = Outbox(pg_engine)
    consumer, taken, tries = begun(outbox), list[Lease](), list[str]()
    send(outbox, "1")
    before = progress(pg_engine)

    def at(point: str) -> None:
        if point == "pop.before_write":
            tries.append(point)
            if len(tries) == 1:
                taken.append(lease_of(outbox))
        elif point == "pop.after_commit" and taken:
            with closing(outbox.database.open()) as channel:
                Leases(channel).release(taken.pop())

    failpoints.arm(at)
    try:
        (message,) = consumer.receive(1, HOUR)
    finally:
        failpoints.arm(None)
    outbox.close()

    assert (texts([message]), message.reconsume_times, len(tries)) == (["1"], 0, 2)
    assert len(progress(pg_engine)) == len(before) + 1


def test_the_lease_of_a_worker_that_has_ended_is_given_back(engine, outbox):
    consumer = begun(outbox)
    send(outbox, "1")
    lease_of(outbox, timedelta(milliseconds=10))

    assert texts(consumer.receive(1, HOUR)) == ["1"]
    with engine.connect() as connection:
        lease = connection.execute(text("SELECT owner, lease_until FROM outbox_lease WHERE subscription = 'billing'"))
        assert lease.one() == (None, None)


def test_a_worker_goes_on_where_pops_have_ended_and_leaves_alone_what_is_in_hands(engine, outbox):
    """The progress of a pop is not that of a worker that has begun and settled nothing: nothing is handled alone."""
    handled = list[bytes]()
    send(outbox, "1")
    consumer = consumer_of(outbox, await_duration=NOW)
    (first,) = consumer.receive(1, HOUR)
    worker = outbox.consumer("billing", topics=["orders"], ordered=False, on_dead="continue")
    worker.on()(lambda message: handled.append(message.body))
    numbers = progress(engine)
    send(outbox, "2")

    worker.until_empty()
    consumer.ack(first)
    send(outbox, "3")

    assert (numbers, handled, texts(consumer.receive(1, HOUR)), states(engine)) == (
        [(0, 0), (0, 2)], [b"2"], ["3"], {"retry": 1},
    )  # fmt: skip


# People, and moments


def test_decisions_of_people_are_carried_out_by_pops(engine, outbox):
    """On messages that nobody has read yet, too: no worker has to come for that."""
    consumer = begun(outbox)
    with outbox.begin() as session:
        gone, aside, _ = outbox.send_all(session, [Message("orders", str(n), key="k") for n in range(3)])
    outbox.admin.discard(gone, name="billing", unread=True, reason="cancelled", by="ann")
    outbox.admin.set_aside(aside, name="billing", reason="poison", by="bob")

    found = consumer.receive(32, HOUR)

    assert (texts(found), [each.body for each in dead_letters(outbox, "%DLQ%billing")]) == (["2"], [b"1"])
    assert [(by, verb, count, done) for by, verb, *_, count, done in decisions(engine)] == [
        ("ann", "discard", 1, True), ("bob", "set_aside", 1, True),
    ]  # fmt: skip


def test_what_a_person_has_paused_is_not_handed_out(outbox):
    consumer = begun(outbox, fifo=True)
    outbox.admin.pause("billing", key="a")
    send(outbox, "1", key="a")
    send(outbox, "2", key="b")
    some = consumer.receive(32, HOUR)
    outbox.admin.pause("billing")
    outbox.admin.resume("billing", key="a")
    send(outbox, "3")
    nothing = consumer.receive(32, HOUR)
    outbox.admin.resume("billing")

    assert (texts(some), nothing) == (["2"], [])
    assert sorted(texts([*consumer.receive(32, HOUR), *consumer.receive(32, HOUR)])) == ["1", "3"]


def test_a_delayed_message_is_handed_out_when_it_is_due_unless_its_writer_took_it_back(engine, outbox):
    consumer = begun(outbox, fifo=True)
    with outbox.begin() as session:
        outbox.send(session, "orders", "due", key="a", delay=HOUR)
        back = outbox.send(session, "orders", "taken back", delay=HOUR)
        outbox.send(session, "orders", "now", key="a")
    (first,) = consumer.receive(32, HOUR)
    parked = states(engine)
    with outbox.begin() as session:
        outbox.withdraw(session, back)
    consumer.ack(first)
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")

    (second,) = consumer.receive(32, HOUR)
    consumer.ack(second)

    assert (texts([first]), texts([second]), parked) == (["now"], ["due"], {"delayed": 2, "retry": 1})
    assert (consumer.receive(32, HOUR), states(engine)) == ([], {})


def test_a_message_that_expires_in_somebodys_hands_does_not_come_again(engine, outbox):
    consumer = begun(outbox)
    with outbox.begin() as session:
        outbox.send(session, "orders", "1", expires_at=datetime.now(UTC) + HOUR)
    found = consumer.receive(32, HOUR)
    for column in ("due_at", "expires_at"):
        step_clock(engine, 2 * HOUR, f"outbox_parked.{column}")

    assert (texts(found), consumer.receive(32, HOUR), states(engine)) == (["1"], [], {"dead": 1})


@pytest.mark.storm
def test_all_partitions_are_asked_also_while_their_number_changes(engine, outbox):
    consumer = begun(outbox)
    outbox.admin.alter("billing", partitions=3)
    keys = [f"key-{n}" for n in range(12)]
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", key, key=key) for key in keys])
    found = consumer.receive(1, HOUR)
    outbox.admin.alter("billing", partitions=1)

    def receive() -> bool:
        found.extend(consumer.receive(32, HOUR))
        return any(each.name == "billing" and each.partitions == 1 for each in outbox.admin.subscriptions())

    assert eventually(receive)
    send(outbox, "last")
    assert texts([*found, *consumer.receive(32, HOUR)]) == [*sorted(keys, key=keys.index), "last"]


# Processes that are killed


def receiver(url: str, log: str) -> None:
    """Receive and acknowledge until the process is killed; note each delivery before that."""
    consumer = SimpleConsumer("billing", Outbox(create_engine(url)), {"orders": "*"})
    with Path(log).open("a", buffering=1) as noted:
        while True:
            for each in consumer.receive(8, timedelta(seconds=2)):
                noted.write(f"{each.body.decode()} {each.reconsume_times}\n")
                with suppress(MQClientError):
                    consumer.ack(each)


@pytest.mark.storm
def test_eight_processes_that_are_killed_lose_nothing_and_get_no_delivery_twice(engine, outbox, tmp_path):
    """Writers commit in another order than they draw their ids. A delivery is a message with its number."""
    begun(outbox)
    chance, logs = random.Random(1), [str(tmp_path / str(n)) for n in range(8)]
    url = engine.url.render_as_string(hide_password=False)
    late = 1 if engine.dialect.name == "sqlite" else 3

    def program(n: int) -> Program:
        code = f"from tests.rocketmq.test_pops import receiver; receiver({url!r}, {logs[n]!r})"
        return Program(["-c", code])

    def write(writer: int) -> None:
        for n in range(60):
            with outbox.begin() as session:
                outbox.send(session, "orders", f"{writer}-{n}")
                time.sleep(0.02 * writer)
                outbox.send(session, "orders", f"{writer}-{n}-b")

    programs = [program(n) for n in range(8)]
    writers = [threading.Thread(target=write, args=(n,)) for n in range(late)]
    try:
        for each in writers:
            each.start()
        for _ in range(20):
            time.sleep(0.2)
            killed = chance.randrange(8)
            programs[killed].kill()
            programs[killed].wait(60)
            programs[killed] = program(killed)
        for each in writers:
            each.join()

        def received() -> list[str]:
            return [line for log in logs if Path(log).exists() for line in Path(log).read_text().splitlines()]

        sent = {f"{writer}-{n}{part}" for writer in range(late) for n in range(60) for part in ("", "-b")}
        assert eventually(lambda: {line.split()[0] for line in received()} == sent and not states(engine), 300)
    finally:
        for one in programs:
            one.kill()
            one.wait(60)
    assert [line for line, times in Counter(received()).items() if times > 1] == []
