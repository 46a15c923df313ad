"""Any order of appends, commits, savepoints, fetches, settles, parking, crashes and lost leases, against a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, text

from outbox.errors import LeaseLostError
from outbox.message import Message
from outbox.store.cursor import Batch
from outbox.store.lease import Leases
from outbox.store.progress import ProgressLog
from outbox.store.subscription import Declaration, Subscriptions
from outbox.worker.handover import BLOCKED
from outbox.worker.settlement import Fates
from outbox.worker.tenure import _DELAYED
from tests.exactness.actors import FATES, PARTITION, CrashError, Fetched, Handed, Holder, Open
from tests.exactness.history import Event, Fault, delivery_of, judge
from tests.exactness.model import LEASE, ROWS, Model, Place, Sent, upto
from tests.exactness.worlds import World
from tests.readers import declared, delivered


class Machine(RuleBasedStateMachine):
    """Two workers and some transactions on one outbox."""

    world: World

    @initialize(topics=st.sampled_from([None, None, ["orders"]]))
    def begin_life(self, topics: list[str] | None) -> None:
        """An empty log, and a subscription to all of it or to one topic."""
        self.world.clear()
        self.model = Model(topics)
        self.open: list[Open] = []
        self.holders: list[Holder] = []
        self.history: list[Event] = []
        self.sent = 0
        self.leases = Leases(self.world.database)
        self.looker = self.world.database.open()
        Subscriptions(self.world.database).declare(self.looker, self.declared)

    @property
    def declared(self) -> Declaration:
        """What the workers say that the subscription is."""
        topics = None if self.model.topics is None else tuple(self.model.topics)
        return declared(topics=topics)

    # Transactions

    @precondition(lambda self: len(self.open) < (4 if self.world.concurrent else 1))
    @rule(early=st.booleans())
    def begin(self, early: bool) -> None:
        """One more transaction; it may draw its number long before it does anything."""
        connection = self.world.engine.connect()
        connection.begin()
        if early and self.world.concurrent:
            connection.execute(text("SELECT pg_current_xact_id()"))
        self.open.append(Open(connection))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), key=st.sampled_from([None, "a", "b"]), topic=st.sampled_from(["orders", "mails"]))
    def append(self, which: int, key: str | None, topic: str) -> None:
        """The writers of a key take turns."""
        transaction = self.open[which % len(self.open)]
        if key is not None and any(key in other.keys for other in self.open if other is not transaction):
            return  # its writer would wait
        self._append(transaction, key, topic)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), seconds=st.integers(1, 30))
    def append_delayed(self, which: int, seconds: int) -> None:
        """It blocks nothing; without a key it has no order to keep."""
        self._append(self.open[which % len(self.open)], None, "orders", delay=timedelta(seconds=seconds))

    def _append(self, transaction: Open, key: str | None, topic: str, **more: Any) -> None:
        self.sent += 1
        connection, name = transaction.connection, f"m{self.sent}"
        message_id = self.world.outbox.send(connection, topic, name, key=key, **more)
        table = self.world.database.tables.message
        id = connection.execute(table.select().where(table.c.message_id == message_id)).one().id
        transaction.frames[-1].append(Sent(id, name, key, topic))
        transaction.keys |= {key} if key else set()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3))
    def set_savepoint(self, which: int) -> None:
        """Inside a transaction, or inside another savepoint."""
        transaction = self.open[which % len(self.open)]
        transaction.savepoints.append(transaction.connection.begin_nested())
        transaction.frames.append([])

    @precondition(lambda self: any(each.savepoints for each in self.open))
    @rule(which=st.integers(0, 3), release=st.booleans())
    def end_savepoint(self, which: int, release: bool) -> None:
        """What was sent since goes on with the transaction, or is taken back."""
        inside = [each for each in self.open if each.savepoints]
        transaction = inside[which % len(inside)]
        savepoint, frame = transaction.savepoints.pop(), transaction.frames.pop()
        if release:
            savepoint.commit()
            transaction.frames[-1] += frame
        else:
            savepoint.rollback()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), commit=st.sampled_from([True, True, True, False]))
    def end(self, which: int, commit: bool) -> None:
        """In another order than the one in which they began."""
        self._end(self.open.pop(which % len(self.open)), commit=commit)

    def _end(self, transaction: Open, *, commit: bool) -> None:
        if commit:
            # Savepoints that are open are released with it.
            transaction.connection.commit()
            self.model.commit(message for frame in transaction.frames for message in frame)
        else:
            transaction.connection.rollback()
        transaction.connection.close()

    # Workers

    def writable(self) -> bool:
        """A worker would wait for the one writer that some databases have."""
        return self.world.concurrent or not self.open

    @rule(seconds=st.sampled_from([1, 4, 11]))
    def time_passes(self, seconds: int) -> None:
        """By the database's clock."""
        self.world.advance(seconds)

    @precondition(lambda self: self.writable() and len(self.holders) < 2)
    @rule()
    def take_lease(self) -> None:
        """Whoever comes gets it when nobody has it, or has had it for too long: who had it may not know."""
        channel = self.world.database.open()
        lease = self.leases.acquire(channel, PARTITION, "somebody", LEASE)
        assert (lease is not None) == self.model.may_take_lease(self.world.now)
        if lease is None:
            channel.close()
            return
        self.history += [Fault("stop", holder.lease.epoch) for holder in self.holders]
        self.model.take_lease(self.world.now)
        assert lease.epoch == self.model.epoch
        self.holders.append(Holder(self.world, self.model, lease, channel))

    @precondition(lambda self: self.writable() and self.holders)
    @rule(which=st.integers(0, 1))
    def renew(self, which: int) -> None:
        """Whoever still has the epoch keeps the lease, also when it had run out."""
        holder = self.holders[which % len(self.holders)]
        renewed = self.leases.renew(holder.channel, holder.lease, LEASE)
        assert renewed == self.model.holds(holder.lease)
        if renewed:
            self.model.lease_until = self.world.now + LEASE

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        """Everything in memory is gone; the lease stays until it runs out."""
        holder = self.holders[which % len(self.holders)]
        self._seen("crash with a batch in hand" if holder.handed and holder.handed.sent else "crash")
        self._drop(holder)
        self.history.append(Fault("kill", holder.lease.epoch))

    def _drop(self, holder: Holder) -> None:
        holder.channel.close()
        self.holders.remove(holder)

    def _some(self, which: int, fact: Callable[[Holder], bool]) -> Holder:
        """One of those that can do it."""
        able = [holder for holder in self.holders if fact(holder)]
        return able[which % len(able)]

    def _seen(self, what: str) -> None:
        self.world.seen[what] += 1

    @precondition(lambda self: any(holder.may_fetch for holder in self.holders))
    @rule(which=st.integers(0, 1), store=st.booleans())
    def fetch(self, which: int, store: bool) -> None:
        """One batch, or one more while the one before is on its way; of an idle look the position may be stored."""
        holder = self._some(which, lambda holder: holder.may_fetch)
        batch = holder.cursor.read(holder.channel)
        self._note_read(holder.place, batch)
        opened, end = self.model.read(holder.place, batch)
        if batch.seen:
            holder.place = end
            holder.ahead.append(Fetched(batch, opened, end))
        elif store and not holder.ahead and holder.handed is None:
            holder.place = end
            holder.cursor.move_to(batch.end)
            holder.handed = Handed(batch.end, end, [], cut=False)

    def _note_read(self, place: Place, batch: Batch) -> None:
        ids = [message.id or 0 for message in batch.messages]
        if ids and ids[0] < max(place.passed, default=0):
            self._seen("late arrival")
        if ids:
            self._seen("whole window" if place.left is None and batch.end.target is None else "page")

    @precondition(lambda self: any(holder.may_hand_over for holder in self.holders))
    @rule(
        which=st.integers(0, 1),
        failing=st.none() | st.integers(0, 2),
        fate=st.sampled_from(sorted(FATES)),
        stop=st.none() | st.integers(0, 1),
    )
    def hand_over(self, which: int, failing: int | None, fate: str, stop: int | None) -> None:
        """All of a batch, or as much as was handed over when a stop was asked; one message may fail."""
        holder = self._some(which, lambda holder: holder.may_hand_over)
        fetched = holder.ahead.pop(0)
        batch, messages, place = fetched.batch, fetched.batch.messages, fetched.end
        cut = stop is not None and stop + 1 < len(messages)
        if cut and stop is not None:
            messages = messages[: stop + 1]
            place = upto(fetched.opened, messages[-1].id or 0)
        held = set(holder.aside.keys.among(messages))
        self._check_held(holder, messages, held)
        to_send, fates = list[Message](), Fates()
        for message in messages:
            if message.deliver_at is not None and message.deliver_at > batch.now:
                fates.append((message, _DELAYED))
            elif message.key in held:
                fates.append((message, BLOCKED))
            else:
                to_send.append(message)
        fates += self._hand_over(holder, to_send, failing, fate)
        end = batch.upto(messages[-1].id or 0) if cut else batch.end
        holder.handed = Handed(end, place, fates, cut, sent=len(to_send))

    def _hand_over(self, holder: Holder, messages: list[Message], failing: int | None, fate: str) -> Fates:
        stub = holder.hand_over
        stub.failing, stub.fate, stub.die = failing, FATES[fate], False
        outcome = stub.run(messages)
        self._take_history(holder)
        return outcome.aside

    def _take_history(self, holder: Holder) -> None:
        self.history += holder.hand_over.history
        holder.hand_over.history.clear()

    def _check_held(self, holder: Holder, messages: list[Message], held: set[str | None]) -> None:
        """Who holds the lease knows which keys wait."""
        if self.model.holds(holder.lease):
            waiting = {each.key for each in self.model.aside.values() if each.blocks}
            keys = {message.key for message in messages}
            assert held & keys == waiting & keys

    @precondition(lambda self: self.writable() and any(holder.handed for holder in self.holders))
    @rule(which=st.integers(0, 1))
    def settle(self, which: int) -> None:
        """Whoever has lost the lease changes nothing."""
        holder = self._some(which, lambda holder: holder.handed is not None)
        handed, holder.handed = holder.handed, None
        assert handed is not None
        try:
            holder.settlement.settle(handed.end, handed.fates)
        except LeaseLostError:
            assert not self.model.holds(holder.lease)
            self._seen("settle of a zombie")
            self._drop(holder)
            self._check_stored()
            return
        assert self.model.holds(holder.lease)
        self._seen("settle")
        self.model.settle(handed.end, handed.place, handed.fates, self.world.now)
        self._check_stored()
        if handed.fates:
            holder.aside.parked(handed.fates)
        if handed.cut:
            holder.ahead.clear()
            holder.cursor.move_to(handed.end)
            holder.place = handed.place

    # What was set aside

    @precondition(lambda self: self.writable() and any(each.state == "dead" for each in self.model.aside.values()))
    @rule(which=st.integers(0, 9))
    def wish(self, which: int) -> None:
        """A person wants a dead letter to be tried again."""
        dead = sorted(id for id, each in self.model.aside.items() if each.state == "dead")
        id = dead[which % len(dead)]
        self.looker.run("UPDATE outbox_parked SET wish = 'replay' WHERE id = :id", {"id": id})
        self.model.wish(id)

    @precondition(
        lambda self: self.writable() and self.model.aside and any(not holder.handed for holder in self.holders)
    )
    @rule(which=st.integers(0, 1), failing=st.none() | st.integers(0, 2), die=st.sampled_from([False, False, True]))
    def look_aside(self, which: int, failing: int | None, die: bool) -> None:
        """Wishes, what fell due, and what is ready, all in one; the process may die when it has sent."""
        holder = self._some(which, lambda holder: holder.handed is None)
        stub, ours = holder.hand_over, self.model.holds(holder.lease)
        stub.failing, stub.fate, stub.die, stub.given = failing, FATES["retry"], die, []
        holder.aside._look_at = 0.0
        if ours:
            self.model.grant(self.world.now)
        expected = self.model.ready(holder.aside.keys.released | self.model.heads(), self.world.now)
        try:
            holder.aside.step()
        except LeaseLostError:
            assert not ours
            self._seen("look aside of a zombie")
            self._drop(holder)
        except CrashError:
            self._seen("crash while trying again")
            self._drop(holder)
            self.history.append(Fault("kill", holder.lease.epoch))
        else:
            self._seen("tried again" if stub.given else "nothing ready")
            self.model.tried(stub.given, failing, self.world.now)
        self._take_history(holder)
        if ours:
            assert stub.given == expected
        self._check_stored()

    def _check_stored(self) -> None:
        """The tables hold what the model does."""
        newest = ProgressLog(self.world.database).newest(self.looker, PARTITION)
        assert newest is not None
        assert newest.progress == self.model.progress
        rows = self.looker.rows("SELECT id, key, state, attempts, blocks FROM outbox_parked")
        stored = {id: (key, state, attempts, bool(blocks)) for id, key, state, attempts, blocks in rows}
        assert stored == {id: each.stored for id, each in self.model.aside.items()}

    @invariant()
    def who_holds_the_lease_knows_whose_turn_it_is(self) -> None:
        """Keys that nothing holds back any more are in its memory, or their messages would wait for ever."""
        for holder in self.holders:
            if self.model.holds(holder.lease):
                assert self.model.heads() <= holder.aside.keys.released

    # The end

    def teardown(self) -> None:
        """Judge the life, unless it came to an early end."""
        if sys.exception() is None:
            self._judge()
        for transaction in self.open:
            transaction.connection.rollback()
            transaction.connection.close()
        for holder in self.holders:
            holder.channel.close()
        self.looker.close()

    def _judge(self) -> None:
        """Everybody dies; one worker that lives brings what is left: all of it, and nothing that was rolled back."""
        while self.open:
            self._end(self.open.pop(), commit=False)
        for holder in [*self.holders]:
            self._drop(holder)
            self.history.append(Fault("kill", holder.lease.epoch))
        self.looker.run("UPDATE outbox_parked SET wish = 'replay' WHERE state = 'dead'")
        self.world.advance(3600)
        rest = delivered(self.world.database, topics=self.declared.topics)
        self.history += [delivery_of(message, self.model.epoch + 1) for message in rest]
        assert judge(self.model.facts, self.history, batch=ROWS).wrong == {}


def live(world: World, *, examples: int) -> None:
    """Many lives, none like the other."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        type("Machine", (Machine,), {"world": world}),
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=checks, database=None
        ),
    )


@pytest.mark.timeout(1800)
def test_whatever_happens_in_whatever_order_the_outbox_does_what_the_model_does(engine: Engine, full: bool) -> None:
    """Several transactions at once where the database lets them, two workers one of which may be a zombie."""
    world = World(engine)

    live(world, examples=2000 if full else 100)

    print(dict(world.seen.most_common()))
