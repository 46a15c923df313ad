"""Parts of the contract of dialects: leases and progress, which epochs protect, and parked messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from outbox.errors import SubscriptionError
from outbox.model.lease import Lease, Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.parking import Held, Parking
from outbox.model.position import EARLIEST, Position, Progress
from outbox.model.slots import slot_of
from outbox.model.status import Count
from outbox.model.subscription import Declaration, Subscription
from outbox.outbox import Outbox
from outbox.schema import record_metadata
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row, Script, executor, run
from outbox.store.half_messages.half import Half, Halves
from outbox.store.half_messages.op import DecidedHalves, Ops
from outbox.store.half_messages.record import Records
from outbox.store.idempotency import dedup, inbox
from outbox.store.idempotency.dedup import Dedup
from outbox.store.idempotency.inbox import InboxRows
from outbox.store.idempotency.withdrawals import Withdrawals, Withdrawing
from outbox.store.log.log import Log
from outbox.store.operations.half_status import transactions
from outbox.store.operations.purge import Purge, purged_id
from outbox.store.operations.status import statuses
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.notices import RefusalNotice, refused_workers
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.store.subscriptions.workers import LiveWorkers
from tests.support import probe
from tests.support.parked import by_id

R = TypeVar("R")

_NAME = "contract"
_LONG = timedelta(minutes=10)
_LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


class LeaseContract:
    """The tests of leases: only the holder of the newest epoch may write progress, on the server that it read from."""

    def test_a_lease_has_one_holder(self, channel: Channel) -> None:
        """Refuse others until the lease is released, or is claimed as it was seen; each holder's epoch is new."""
        leases, partition = Leases(channel), _declared(channel)
        first = leases.acquire(partition, "first", _LONG)
        refused = leases.acquire(partition, "second", _LONG)
        assert first is not None

        assert refused is None
        seen = leases.look(partition)
        assert leases.renew(first, _LONG)
        assert leases.acquire(partition, "second", _LONG, seen) is None
        second = leases.acquire(partition, "second", _LONG, leases.look(partition))
        assert second is not None and second.epoch > first.epoch
        assert not leases.renew(first, _LONG)
        leases.release(first)
        assert leases.acquire(partition, "third", _LONG) is None
        leases.release(second)
        third = leases.acquire(partition, "third", _LONG)
        assert third is not None and third.epoch > second.epoch

    def test_a_lost_lease_writes_nothing(self, channel: Channel) -> None:
        """Refuse the holder of an old epoch: it can neither move the position nor hold the lease row."""
        leases, progress, partition = Leases(channel), ProgressLog(channel), _declared(channel)
        incarnation = Log().now(channel).incarnation
        old, new = _taken(leases, partition, "old"), _taken(leases, partition, "new")
        before = probe.count(channel, "progress")

        settled = progress.settle(old, 1, Progress(Position(7)), incarnation)
        with channel.transaction():
            held = [leases.hold(lease, incarnation) for lease in (old, new)]

        assert (settled, held) == (False, [False, True])
        assert probe.count(channel, "progress") == before
        assert progress.settle(new, 1, Progress(Position(7)), incarnation)

    def test_a_position_of_another_server_is_not_stored(self, channel: Channel) -> None:
        """Refuse a position of another incarnation: a server that was restarted may give its numbers out again."""
        leases, progress, partition = Leases(channel), ProgressLog(channel), _declared(channel)
        lease = _taken(leases, partition, "holder")
        elsewhere = Log().now(channel).incarnation + " restarted"

        settled = progress.settle(lease, 1, Progress(Position(7)), elsewhere)
        with channel.transaction():
            held = leases.hold(lease, elsewhere)

        assert (settled, held) == (False, False)
        assert _stored(progress, partition) == Progress(EARLIEST)

    def test_the_newest_progress_counts(self, channel: Channel) -> None:
        """Read the last progress of the newest epoch, however high the numbers before it are; also after a prune."""
        leases, progress, partition = Leases(channel), ProgressLog(channel), _declared(channel)
        incarnation = Log().now(channel).incarnation
        inside = Progress(Position(3), Position(9, (4, 7)), 12)
        seen = [_stored(progress, partition)]
        old = _taken(leases, partition, "old")
        for n, each in enumerate([Progress(Position(20)), Progress(Position(30, (21, 25)))], 1):
            assert progress.settle(old, n, each, incarnation)
            seen.append(_stored(progress, partition))
        leases.release(old)
        new = _taken(leases, partition, "new")
        assert progress.settle(new, 1, inside, incarnation)
        seen.append(_stored(progress, partition))

        progress.prune(new.partition)

        seen.append(_stored(progress, partition))
        assert seen == [
            Progress(EARLIEST), Progress(Position(20)), Progress(Position(30, (21, 25))), inside, inside
        ]  # fmt: skip

    def test_a_transaction_of_a_channel_is_whole(self, channel: Channel) -> None:
        """Roll back a transaction in which something raised; the channel can be used again."""
        leases, progress, partition = Leases(channel), ProgressLog(channel), _declared(channel)
        incarnation = Log().now(channel).incarnation
        lease = _taken(leases, partition, "holder")
        try:
            with channel.transaction():
                assert progress.settle(lease, 1, Progress(Position(7)), incarnation)
                raise ZeroDivisionError
        except ZeroDivisionError:
            seen = [_stored(progress, partition)]
        with channel.transaction():
            assert progress.settle(lease, 1, Progress(Position(8)), incarnation)
        seen.append(_stored(progress, partition))

        assert seen == [Progress(EARLIEST), Progress(Position(8))]

    def test_a_channel_has_one_transaction_at_a_time(self, channel: Channel) -> None:
        """Refuse a second one while the first is open: as a part of the first it could be taken back with it."""
        leases, progress, partition = Leases(channel), ProgressLog(channel), _declared(channel)
        lease = _taken(leases, partition, "holder")
        refused = False
        with channel.transaction():
            assert progress.settle(lease, 1, Progress(Position(7)), Log().now(channel).incarnation)
            try:
                with channel.transaction():
                    pass
            except Exception:
                refused = True

        assert (refused, _stored(progress, partition)) == (True, Progress(Position(7)))


class ParkedContract:
    """The tests of parked messages: which of them may be tried now, and in which order."""

    def test_parked_messages_come_in_the_order_of_their_keys(self, outbox: Outbox, channel: Channel) -> None:
        """Read the heads that are due, and what stands behind one that did not fail; a keyless message stands alone."""
        ids = _appended(outbox, channel, ["a", "b", "a", "b", None, None, "c", "a"])
        parked = Parked(channel, _NAME)
        now, later, before, long_before = (timedelta(minutes=minutes) for minutes in (0, 60, -1, -2))
        parkings = {
            Parking(state="retry", holds=True, attempts=1, error="x", delay=now): [ids[0]],
            Parking(state="retry", holds=True, attempts=1, error="x", delay=before): [ids[4]],
            Parking(state="waiting", holds=True, error="y", delay=later): [ids[1], ids[5]],
            Parking(state="behind", holds=True): [ids[2], ids[3], ids[7]],
            Parking(state="dead", holds=True, attempts=9, error="z"): [ids[6]],
        }
        with channel.transaction():
            parked.park(by_id(parkings))

        assert _ready(parked) == [(ids[4], 2), (ids[0], 2)]
        assert parked.keys(4) == parked.held_among(["a", "b", "c", "d"]) == {"a", "b", "c"}
        assert parked.keys(2) is None
        assert 3_500 < (parked.next_due() or 0) <= 3_600
        parked.remove([ids[0]])
        parked.advance({"a", "b"})
        assert parked.keys(4) == {"a", "b", "c"}
        assert _ready(parked) == [(ids[4], 2), (ids[2], 1), (ids[7], 1)]
        parked.change(by_id({Parking(state="retry", holds=True, attempts=3, delay=long_before): [ids[1]]}))
        everything = [(ids[1], 4), (ids[4], 2), (ids[2], 1), (ids[7], 1)]
        assert _ready(parked) == _ready(parked, refused=["beta"]) == everything
        assert _ready(parked, refused=["alpha"]) == []
        assert _ready(parked, probed=["alpha"]) == everything[:1]
        assert _ready(parked, held=Held(ids=[ids[4]], keys=["b"])) == everything[2:]
        assert [_ready(parked, rows=rows) for rows in (1, 2, 3, 4)] == [everything[:rows] for rows in (1, 2, 3, 4)]
        parked.remove([ids[1], ids[2], ids[7]])
        parked.advance({"a", "b"})
        assert (parked.keys(4), _ready(parked)) == ({"b", "c"}, [(ids[4], 2), (ids[3], 1)])

    def test_a_row_that_is_gone_since_the_choice_is_not_read(
        self, outbox: Outbox, channel: Channel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leave out what a worker has removed that took the lease meanwhile."""
        ids = _appended(outbox, channel, [None, None])
        parked = Parked(channel, _NAME)
        with channel.transaction():
            parked.park(by_id({Parking(state="retry", holds=True, delay=timedelta(0)): ids}))
        chosen = parked._with_runs

        def removed_since(*found: Any) -> list[Row]:
            rows = chosen(*found)
            Parked(channel, _NAME).remove(ids[:1])
            return rows

        monkeypatch.setattr(parked, "_with_runs", removed_since)

        assert [id for id, _ in _ready(parked)] == ids[1:]

    def test_parked_copies_are_exact_and_outlive_the_log(self, outbox: Outbox, channel: Channel) -> None:
        """Copy bodies inside the database; a read brings as many as fit, one at least."""
        bodies = [bytes([n]) * 5_000 for n in range(4)]
        with outbox.begin() as session:
            outbox.send_all(session, [Message("alpha", body, key="k", headers={"n": "é"}) for body in bodies])
        sent = Log().read_on(channel, EARLIEST).messages
        parked = Parked(channel, _NAME)
        with channel.transaction():
            ids = [message.id or 0 for message in sent]
            head, behind = Parking(state="retry", holds=True, delay=timedelta(0)), Parking(state="behind", holds=True)
            parked.park(by_id({head: ids[:1], behind: ids[1:]}))
        probe.empty(channel)

        ready = [each.message for each in parked.ready([], 10, 12_000)]

        assert [(m.message_id, m.body, m.key, m.headers) for m in ready] == [
            (m.message_id, m.body, m.key, m.headers) for m in sent[:2]
        ]

    def test_delayed_messages_fall_due_in_their_order(self, outbox: Outbox, channel: Channel) -> None:
        """Order messages by when they are due, not by when they were sent; one not due stays, and holds nothing."""
        log = Log()
        soon = [timedelta(milliseconds=ms) for ms in (300, 200, 100)]
        with outbox.begin() as session:
            delayed = [Message("alpha", b"", key="a", delay=delay) for delay in (*soon, timedelta(hours=1))]
            outbox.send_all(session, delayed)
        ids = [message.id or 0 for message in log.read_on(channel, EARLIEST).messages]
        parked = Parked(channel, _NAME)
        with channel.transaction():
            parked.park(by_id({Parking(state="delayed", holds=False): ids}))
        assert parked.keys(10) == set()
        time.sleep(0.35)

        falling_due = FallingDue(channel, _NAME)
        due = falling_due.due(10)
        with channel.transaction():
            falling_due.join(due)
            parked.advance({"a"})

        assert (list(due.items()), parked.keys(10)) == ([(ids[n], "a") for n in (2, 1, 0)], {"a"})
        assert [id for id, _ in _ready(parked)] == [ids[2], ids[1], ids[0]]
        assert falling_due.due(10) == {}

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_a_partition_looks_for_its_own(self, outbox: Outbox, channel: Channel, number: int) -> None:
        """Find what waits for a turn, and what people decided on, in the slots of a partition, and of no other."""
        keys = [f"key-{n}" for n in range(25)]
        due, dead, delayed, released, waiting = (keys[n::5] for n in range(5))
        now = timedelta(0)
        states = {
            Parking(state="retry", holds=True, delay=now): due,
            Parking(state="dead", holds=True): dead,
            Parking(state="delayed", holds=False): delayed,
            Parking(state="behind", holds=True): released,
            Parking(state="waiting", holds=True, delay=timedelta(hours=1)): waiting,
        }
        with outbox.begin() as session:
            outbox.send_all(session, [Message("alpha", b"x", key=key, deliver_at=_LONG_AGO) for key in keys])
        ids = {message.key: message.id or 0 for message in Log().read_on(channel, EARLIEST).messages}
        with channel.transaction():
            parked = Parked(channel, _NAME)
            parked.park(by_id({state: [ids[key] for key in some] for state, some in states.items()}))
            parked.advance(released)
        partitions = replace(_subscription(channel), partitions=number).all_partitions()

        found = []
        for partition in partitions:
            parked = Parked(channel, _NAME, partition)
            found.append(
                [
                    parked.keys(100),
                    {each.message.key for each in parked.ready([], 100, 1_000)},
                    {key for key, ours in parked.still([ids[key] for key in dead]).values() if ours},
                    parked.waiting(100),
                    {*FallingDue(channel, _NAME, partition).due(100).values()},
                ]
            )

        def own(partition: Partition, some: Sequence[str]) -> set[str | None]:
            return {key for key in some if partition.owns(slot_of(key, outbox.database.slots))}

        assert found == [
            [
                own(each, [*due, *dead, *released, *waiting]),
                own(each, [*due, *released]),
                own(each, dead),
                len(own(each, waiting)),
                own(each, delayed),
            ]
            for each in partitions
        ]


class HalfContract:
    """The tests of half messages and verdicts, of which the first one stands."""

    def test_the_first_verdict_on_a_transaction_stands(self, outbox: Outbox, channel: Channel) -> None:
        """Commit once, with the messages; refuse what comes later: another verdict, and another half message."""
        halves, ops, message = Halves(outbox.database), Ops(outbox.database), Message("alpha", b"x", key="k")
        half = Half(transaction="t", group="g", way="listener")
        places = [_alone(outbox, halves.append(half, message, 7, '{"a":"b"}')) for _ in range(2)]

        first = _alone(outbox, ops.commit("t", by="first"))
        later = [_alone(outbox, each) for each in (ops.commit("t", by="later"), ops.roll_back("t", by="later"))]
        late = _alone(outbox, halves.append(half, message, 7, "{}"))

        found = Log().read_on(channel, EARLIEST).messages
        assert [each is not None for each in (*places, late)] == [True, True, False]
        assert (first.op, first.first, [*first.restored]) == ("commit", True, [message.message_id])
        assert [(each.op, each.first, each.by) for each in later] == [("commit", False, "first")] * 2
        assert [(each.message_id, each.topic, each.key, each.headers) for each in found] == [
            (message.message_id, "alpha", "k", {"a": "b"})
        ]

    def test_a_joined_transaction_restores_its_messages_once(self, outbox: Outbox, channel: Channel) -> None:
        """Write the verdict first, and the messages at the end; nothing is left to restore then."""
        halves, ops, message = Halves(outbox.database), Ops(outbox.database), Message("alpha", b"x")
        half = Half(transaction="t", group="g", way="join")
        _alone(outbox, halves.append(half, message, 7, "{}"))
        with outbox.engine.begin() as connection:
            joined = run(executor(connection), ops.join("t", by="business"))
            restored = [run(executor(connection), ops.restore("t")) for _ in range(2)]

        unknown = _alone(outbox, ops.roll_back("another", by="somebody"))

        assert (joined.op, joined.first, restored) == ("commit", True, [{message.message_id}, None])
        assert (unknown.op, unknown.first) == (None, False)
        assert [each.message_id for each in Log().read_on(channel, EARLIEST).messages] == [message.message_id]
        assert DecidedHalves(channel).pending(["t"], timedelta(0))["t"].op == "commit"

    def test_a_record_proves_one_outcome(self, outbox: Outbox) -> None:
        """Write a commit once; a fence finds it, and fences a transaction without one."""
        record_metadata().create_all(outbox.engine)
        records = Records(outbox.database)
        answers = [_alone(outbox, records.insert("t")) for _ in range(2)]
        with closing(outbox.database.open()) as channel:
            fenced = [records.fence(channel, each, patience=1.0) for each in ("t", "another")]

        assert (answers, fenced) == ([None, "commit"], ["commit", "rollback"])
        assert _alone(outbox, records.insert("another")) == "rollback"


class UpkeepContract:
    """The tests of what is written again and again, and of what is deleted in the end."""

    def test_what_is_over_is_pruned(self, outbox: Outbox, channel: Channel) -> None:
        """Delete dedup keys and notes of the inbox that have expired; a dedup key that has expired is free again."""
        twins = [Message("alpha", b"", dedup_key="k") for _ in range(2)]
        withdraw = Withdrawing(outbox.database).withdraw
        over, kept = (Dedup(outbox.database, timedelta(seconds=seconds), withdraw) for seconds in (-1, 60))
        claims = [_alone(outbox, each.claim(twins)) for each in (over, over, kept, kept)]
        for seconds in (-1, 60):
            rows = InboxRows(outbox.database, timedelta(seconds=seconds))
            _alone(outbox, rows.handle(f"for {seconds}", twins[0].message_id))
        _alone(outbox, over.claim([Message("alpha", b"", dedup_key="another")]))

        pruned = [each.prune(channel) for each in (dedup, inbox)]

        again = {1: twins[0].message_id}
        assert claims == [again, again, again, {0: twins[0].message_id, **again}]
        assert (pruned, [probe.count(channel, each) for each in ("dedup", "inbox")]) == ([1, 1], [1, 1])

    def test_a_delayed_message_is_withdrawn_once_it_is_there_and_not_due(self, outbox):
        """A message without a delay is not."""
        with outbox.begin() as session:
            messages = [Message("orders", b"", delay=delay) for delay in (timedelta(hours=1), None)]
            outbox.send_all(session, messages)
            answers = [outbox.withdraw(session, message.message_id) for message in messages]
        messages[0].deliver_at = datetime.now(UTC) + timedelta(hours=1)
        with closing(outbox.database.open()) as channel:
            found = Withdrawals(channel).of(messages)

        assert (answers, found.withdrawn, found.open) == ([True, False], messages[:1], [])

    def test_a_purge_deletes_what_all_have_passed(self, outbox: Outbox, channel: Channel) -> None:
        """Delete no row that a subscription lacks, and record how far the purge went."""
        partition = _declared(channel)
        _appended(outbox, channel, ["a", None, "b"])
        lease = _taken(Leases(channel), partition, "holder")
        time.sleep(0.01)
        held = Purge(channel).run(timedelta(0))
        capture = Log().now(channel)
        Subscriptions(channel).drop("relay")
        assert ProgressLog(channel).settle(lease, 1, Progress(capture.position), capture.incarnation)

        gone = Purge(channel, batch=2).run(timedelta(0))

        assert [(each.rows, each.held_by) for each in (held, gone)] == [(0, (_NAME, "relay")), (3, ())]
        assert (probe.count(channel, "message"), purged_id(channel)) == (0, 3)

    def test_workers_and_commands_are_seen_again_and_again(self, channel: Channel) -> None:
        """Write that a worker is alive, that a command wants a lease, and that a worker is refused."""
        partition, leases, workers = _declared(channel), Leases(channel), LiveWorkers(channel, _NAME)
        refused = RefusalNotice("refused")
        for _ in range(2):
            workers.seen("ann")
            leases.ask(partition, "command")
            with pytest.raises(SubscriptionError), refused.noted(channel, "ann"):
                raise SubscriptionError("no such topic")
        found = leases.look(partition)

        assert (workers.live(timedelta(minutes=1)), found is not None and found.wanted) == ({"ann"}, True)
        assert [(each.name, each.notice) for each in refused_workers(channel)] == [("refused", "no such topic")]
        workers.gone("ann")
        leases.take_back(partition, "command")
        with refused.noted(channel, "ann"):
            pass
        assert (workers.live(timedelta(minutes=1)), refused_workers(channel)) == (set(), [])

    def test_a_status_counts_what_waits(self, outbox: Outbox, channel: Channel) -> None:
        """Count the log and the parked messages of a subscription, and the half messages of a group."""
        halves, partition = Halves(outbox.database), _declared(channel)
        check = Declaration(name="check:g", kind="check", destination="check:g", topics=(HALF_TOPIC,), tags=("g",))
        Subscriptions(channel).declare(check)
        ids = _appended(outbox, channel, ["a", "b", None])
        Parked(channel, _NAME).park(by_id({Parking(state="dead", holds=True, error="no"): ids[:1]}))
        half = Half(transaction="t", group="g", way="listener")
        _alone(outbox, halves.append(half, Message("beta", b"x"), 7, "{}"))

        now, found = statuses(channel)

        own = next(each for each in found if each.name == partition.subscription)
        assert (own.unsettled, own.count("dead"), own.troubles[0].error) == (Count(3), Count(1), "no")
        told, _ = transactions(channel, now, found)
        assert [(each.group, each.topic, each.count("half")) for each in told] == [("g", "beta", Count(1))]


def _alone(outbox: Outbox, steps: Script[R]) -> R:
    """Run a script in a transaction of its own."""
    with outbox.engine.begin() as connection:
        return run(executor(connection), steps)


def _subscription(channel: Channel) -> Subscription:
    return Subscriptions(channel).declare(Declaration(name=_NAME, destination="callable:contract"))


def _declared(channel: Channel) -> Partition:
    """Declare a subscription, and return its partition; no worker holds the lease."""
    return _subscription(channel).partition(0)


def _taken(leases: Leases, partition: Partition, owner: str) -> Lease:
    """Take the lease, as from a holder that has stood still for long enough."""
    lease = leases.acquire(partition, owner, _LONG, leases.look(partition))
    assert lease is not None
    return lease


def _stored(progress: ProgressLog, partition: Partition) -> Progress:
    newest = progress.newest(partition)
    assert newest is not None
    return newest.progress


def _appended(outbox: Outbox, channel: Channel, keys: Sequence[str | None]) -> list[int]:
    with outbox.begin() as session:
        outbox.send_all(session, [Message("alpha", b"x", key=key) for key in keys])
    return [message.id or 0 for message in Log().read_on(channel, EARLIEST).messages]


def _ready(parked: Parked, *, refused: Sequence[str] = (), rows: int = 10, **more: Any) -> list[tuple[int, int]]:
    """Return the ids of what may be tried now, each with the number of its attempt."""
    found = parked.ready(refused, rows, 1_000_000, **more)
    return [(each.message.id or 0, each.message.attempt) for each in found]
