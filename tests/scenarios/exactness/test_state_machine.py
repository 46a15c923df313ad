"""Any order of appends, commits, savepoints, fetches, settles, parking, crashes and lost leases, against a model."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine

from outbox.errors import LeaseLostError
from outbox.model.message import Message
from outbox.model.subscription import Declaration
from outbox.store.log.cursor import Batch
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.policy import BEHIND, DELAYED
from outbox.worker.settle import Parkings
from tests.model import rules
from tests.scenarios.exactness.actors import (
    FATES,
    PARTITION,
    WORK,
    WRITES,
    CrashError,
    Fetched,
    Handed,
    Holder,
    Work,
    Write,
)
from tests.scenarios.exactness.history import Event, Fault, delivery_of, judge
from tests.scenarios.exactness.model import LEASE, ROWS, Model, Place, headless, shown, upto
from tests.scenarios.exactness.worlds import World
from tests.scenarios.exactness.writing import Writers
from tests.support.readers import declared, delivered

pytestmark = pytest.mark.storm


class Machine(Writers):
    """Two workers and some transactions on one outbox."""

    @initialize(topics=st.sampled_from([None, None, ["orders"]]))
    def begin_life(self, topics: list[str] | None) -> None:
        """An empty log, and a subscription to all of it or to one topic."""
        self.world.clear()
        self.model = Model(topics)
        self.open, self.sent = [], 0
        self.holders: list[Holder] = []
        self.history: list[Event] = []
        self.looker = self.world.database.open()
        Subscriptions(self.looker).declare(self.declared)

    @property
    def declared(self) -> Declaration:
        """What the workers say that the subscription is."""
        topics = None if self.model.topics is None else tuple(self.model.topics)
        return declared(topics=topics)

    # Workers

    @rule(seconds=st.sampled_from([1, 4, 11]))
    def time_passes(self, seconds: int) -> None:
        """By the database's clock."""
        self.world.advance(seconds)

    @precondition(lambda self: len(self.holders) < 2)
    @rule(late=st.booleans())
    def take_lease(self, late: bool) -> None:
        """Whoever comes gets it when nobody has it, or has had it for too long: who had it may not know."""
        if late:
            self.world.advance(11)
        self._take_lease()

    def _take_lease(self) -> None:
        self._wait_for_writers()
        channel = self.world.database.open()
        seen = Leases(channel).look(PARTITION)
        stood_still = None if seen is None or seen.live else seen
        lease = Leases(channel).acquire(PARTITION, secrets.token_hex(4), LEASE, stood_still)
        assert (lease is not None) == self.model.may_take_lease(self.world.now)
        if lease is None:
            channel.close()
            return
        self.history += [Fault("stop", holder.lease.epoch) for holder in self.holders]
        self.model.take_lease(self.world.now)
        assert lease.epoch == self.model.epoch
        self.holders.append(Holder(self.world, self.model, lease, channel))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 1))
    def renew(self, which: int) -> None:
        """Whoever still has the epoch keeps the lease, also when it had run out."""
        self._wait_for_writers()
        holder = self.holders[which % len(self.holders)]
        renewed = Leases(holder.channel).renew(holder.lease, LEASE)
        assert renewed == self.model.holds(holder.lease)
        if renewed:
            self.model.lease_until = self.world.now + LEASE

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 7))
    def crash(self, which: int) -> None:
        """Everything in memory is gone; the lease stays until it runs out."""
        if which >= len(self.holders):
            return
        holder = self.holders[which]
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

    @rule(writes=st.lists(WRITES, min_size=1, max_size=4), work=WORK)
    def write_and_work(self, writes: list[Write], work: Work) -> None:
        """What goes on all day."""
        for write in writes:
            self._write(write)
        self._work(work)

    @rule(work=WORK)
    def work(self, work: Work) -> None:
        """Somebody goes on."""
        self._work(work)

    def _work(self, work: Work) -> None:
        """As far as it can: fetch, hand over, settle, and one fetch ahead of it."""
        if not self.holders:
            self._take_lease()
        if not self.holders:
            return
        holder = self.holders[work.which % len(self.holders)]
        for act in work.acts:
            if act == "fetch" and holder.may_fetch:
                self._fetch(holder)
            elif act == "hand over" and holder.may_hand_over:
                self._batch_handler(holder, work)
            elif act == "settle" and holder.handed is not None and not self._settle(holder):
                return

    def _fetch(self, holder: Holder) -> None:
        batch = holder.cursor.read(holder.channel)
        self._note_read(holder.place, batch)
        opened, end = self.model.read(holder.place, batch)
        if batch.seen:
            holder.place = end
            holder.ahead.append(Fetched(batch, opened, end))
        elif not holder.ahead and holder.handed is None:
            # Of an idle look the position may be stored.
            holder.place = end
            holder.cursor.move_to(batch.end)
            holder.handed = Handed(batch.end, end, [], cut=False)

    def _note_read(self, place: Place, batch: Batch) -> None:
        ids = [message.id or 0 for message in batch.messages]
        if ids and ids[0] < max(place.passed, default=0):
            self._seen("late arrival")
        if ids:
            self._seen("whole window" if place.left is None and batch.end.target is None else "page")

    def _batch_handler(self, holder: Holder, work: Work) -> None:
        """All of a batch, or as much as was handed over when a stop was asked; one message may fail."""
        fetched = holder.ahead.pop(0)
        batch, messages, place = fetched.batch, fetched.batch.messages, fetched.end
        cut = work.stop is not None and work.stop + 1 < len(messages)
        if cut and work.stop is not None:
            messages = messages[: work.stop + 1]
            place = upto(fetched.opened, messages[-1].id or 0)
        held = set(holder.parked._holds.among(messages))
        self._check_held(holder, messages, held)
        to_send, parkings = list[Message](), Parkings()
        for message in messages:
            if message.deliver_at is not None and message.deliver_at > batch.now:
                parkings.append((message, DELAYED))
            elif message.key in held:
                parkings.append((message, BEHIND))
            else:
                to_send.append(message)
        parkings += self._try(holder, to_send, work.failing, work.parking)
        end = batch.upto(messages[-1].id or 0) if cut else batch.end
        holder.handed = Handed(end, place, parkings, cut, sent=len(to_send))

    def _try(self, holder: Holder, messages: list[Message], failing: int | None, parking: str) -> Parkings:
        stub = holder.batch_handler
        stub.failing, stub.parking, stub.die = failing, FATES[parking], False
        outcome = next(stub.run(messages))
        self._take_history(holder)
        return outcome.parked

    def _take_history(self, holder: Holder) -> None:
        self.history += holder.batch_handler.history
        holder.batch_handler.history.clear()

    def _check_held(self, holder: Holder, messages: list[Message], held: set[str | None]) -> None:
        """Who holds the lease knows which keys wait."""
        if self.model.holds(holder.lease):
            keys = {message.key for message in messages}
            assert held & keys == rules.keys_held(self.model.parked) & keys

    def _settle(self, holder: Holder) -> bool:
        """Whoever has lost the lease changes nothing, and drops everything."""
        self._wait_for_writers()
        handed, holder.handed = holder.handed, None
        assert handed is not None
        try:
            holder.settlement.settle(handed.end, handed.parkings)
        except LeaseLostError:
            assert not self.model.holds(holder.lease)
            self._seen("settle of a zombie")
            self._drop(holder)
            self._check_stored()
            return False
        assert self.model.holds(holder.lease)
        self._seen("settle")
        self.model.settle(handed.end, handed.place, handed.parkings, self.world.now)
        self._check_stored()
        if handed.parkings:
            holder.parked.parked(handed.parkings)
        if handed.cut:
            holder.ahead.clear()
            holder.cursor.move_to(handed.end)
            holder.place = handed.place
        return True

    # What was parked

    @precondition(lambda self: any(each.state == "dead" for each in self.model.parked))
    @rule(which=st.integers(0, 9))
    def decide(self, which: int) -> None:
        """A person wants a dead letter to be tried again."""
        self._wait_for_writers()
        dead = sorted(each.id for each in self.model.parked if each.state == "dead")
        id = dead[which % len(dead)]
        with self.looker.transaction():
            Decisions(self.looker, "relay").write("replay", [id], by="test", reason=None)
        self.model.decide(id)

    @precondition(lambda self: self.model.parked and any(not holder.handed for holder in self.holders))
    @rule(which=st.integers(0, 1), failing=st.none() | st.integers(0, 2), die=st.sampled_from([False, False, True]))
    def look_at_parked(self, which: int, failing: int | None, die: bool) -> None:
        """Decisions, what fell due, and what is ready, all in one; the process may die when it has sent."""
        self._wait_for_writers()
        holder = self._some(which, lambda holder: holder.handed is None)
        stub, ours = holder.batch_handler, self.model.holds(holder.lease)
        stub.failing, stub.parking, stub.die, stub.given = failing, FATES["retry"], die, []
        holder.parked._look_at = 0.0
        if ours:
            self.model.carry_out(self.world.now)
            self.model.fall_due(self.world.now)
        expected = self.model.ready(self.world.now)
        try:
            holder.look_at_parked()
        except LeaseLostError:
            assert not ours
            self._seen("look at what is parked by a zombie")
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

    @precondition(lambda self: self.model.parked and any(holder.handed for holder in self.holders))
    @rule(which=st.integers(0, 1))
    def carry_out_meanwhile(self, which: int) -> None:
        """A batch is under way, and waits; its messages behind what is decided are not parked yet."""
        self._wait_for_writers()
        holder = self._some(which, lambda holder: holder.handed is not None)
        ours = self.model.holds(holder.lease)
        try:
            decided = holder.deciding.carry_out(None)
        except LeaseLostError:
            assert not ours
            self._drop(holder)
            return
        if ours:
            self.model.carry_out(self.world.now)
            self._seen("decided within a batch" if decided else "nothing decided")
        self._check_stored()

    def _check_stored(self) -> None:
        """The tables hold what the model does."""
        newest = ProgressLog(self.looker).newest(PARTITION)
        assert newest is not None
        assert newest.progress == self.model.progress
        rows = self.looker.rows("SELECT id, key, state, unit, place, attempts FROM outbox_parked")
        stored = {shown(*row) for row in rows}
        assert stored == self.model.stored
        assert headless(stored) == set(), "its messages would wait for ever, or not wait for each other"

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
        dead = [id for (id,) in self.looker.rows("SELECT id FROM {parked} WHERE state = 'dead'")]
        if dead:
            with self.looker.transaction():
                Decisions(self.looker, "relay").write("replay", dead, by="test", reason=None)
        self.world.advance(3600)
        # Nobody gave the lease back, and to watch it for its whole length would take ten seconds of each life.
        self.looker.run("UPDATE outbox_lease SET lease_until = NULL")
        rest = delivered(self.world.database, topics=self.declared.topics)
        self.history += [delivery_of(message, self.model.epoch + 1) for message in rest]
        assert judge(self.model.facts, self.history, batch=ROWS).wrong == {}


#: What has to have happened in any run, or it has tried nothing. A late arrival needs several writers; and a decision
#: within a batch is rare.
USUAL = {"page", "whole window", "settle", "settle of a zombie", "crash", "tried again"}


@pytest.mark.timeout(3000)
def test_whatever_happens_in_whatever_order_the_outbox_does_what_the_model_does(engine: Engine, full: bool) -> None:
    """Several transactions at once where the database lets them, two workers one of which may be a zombie."""
    world = World(engine)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    wanted = USUAL | ({"late arrival"} if world.concurrent else set())

    # In portions: chance decides after how many of them everything has happened.
    for _ in range(80):
        run_state_machine_as_test(
            type("Machine", (Machine,), {"world": world}),
            settings=settings(
                max_examples=20 if world.concurrent else 50,
                stateful_step_count=60,
                deadline=None,
                suppress_health_check=checks,
                database=None,
            ),
        )
        if not full and wanted <= set(world.seen):
            break

    print(dict(world.seen.most_common()))
    assert wanted <= set(world.seen)
