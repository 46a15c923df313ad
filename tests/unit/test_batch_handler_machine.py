"""A batch handler under everything that may happen to its calls, its lease and its batches, in any order.

The machine is its handler, its clock, the thread that steps it, and the tables that it settles in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from tenacity import wait_fixed

from outbox import LeaseLostError, Message, Reject, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.lease import Lease, Partition
from outbox.model.parking import Parking
from outbox.model.verdict import DONE
from outbox.runtime.stop import Stop
from outbox.telemetry.events import Listeners
from outbox.worker.calls import Call
from outbox.worker.handle import BatchHandler, LeasedCaller
from outbox.worker.hung import HungCalls
from outbox.worker.outcome import Outcome
from outbox.worker.policy import BEHIND, HandlerPolicy, with_one_head
from outbox.worker.waiting import Look, Wait
from tests.support.stage import EARLIER, again, messages, outages_told_to

pytestmark = pytest.mark.storm

POLICY = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(0)), deadline=timedelta(seconds=1))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = st.sampled_from(["a", "b", "c", None])
VERDICTS: st.SearchStrategy[Verdict] = st.sampled_from(
    [*[DONE] * 3, Retry("no"), Reject("never"), Unavailable("away"), Unavailable("all away", everything=True)]
)


class ScriptedCall(Call):
    """A call whose time passes when the machine says so: `age`, in deadlines. `counts`: its answer does."""

    __slots__ = ("age", "arrived", "counts")

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__(messages, deadline=1.0)
        self.age, self.arrived, self.counts = 0, False, True
        self.started = 0.0

    @property
    def seconds(self) -> float:
        """Quick, or as many deadlines as have passed."""
        return float(self.age)

    @property
    def over(self) -> bool:
        """Come back, or past its deadline."""
        return self.finished or self.age >= 1

    @property
    def hangs(self) -> bool:
        """Past three deadlines."""
        return not self.finished and self.age >= 3


class Line:
    """The way of the handler to the destination, under one lease."""

    def __init__(self, machine: Machine, lease: Lease) -> None:
        self._machine = machine
        self.concurrency = machine.concurrency
        self.caller, self.held = self, SimpleNamespace(lease=lease)

    @property
    def overdue(self) -> list[Call]:
        """All calls of the process that are past their deadline."""
        return [call for call in self._machine.calls if call.over and not call.finished]

    def may_begin(self) -> bool:
        """Yes, until the lease is lost."""
        if self._machine.lost:
            raise LeaseLostError("lost")
        return True

    def begin(self, given: Sequence[Message], *, until: float, patience: float) -> Call:
        """Begin at once."""
        self._machine.check_call(given)
        call = ScriptedCall(given)
        self._machine.calls.append(call)
        return call

    def look(self, call: Call) -> float:
        """Look again at any time."""
        return time.monotonic()

    def withdraw(self, call: Call) -> bool:
        """No call waits for a turn here."""
        return False


@dataclass
class Row:
    """A parked message."""

    message: Message
    parking: Parking


class Machine(RuleBasedStateMachine):
    """One process, one partition."""

    hanging = Bundle("hanging")

    def __init__(self) -> None:
        super().__init__()
        self.few_may_hang = ExitStack()
        for file in ("choosing", "handle"):
            self.few_may_hang.enter_context(patch(f"outbox.worker.{file}.MAX_HUNG", 3))
        self.log: list[Message] = []
        self.settled = 0
        self.parked: dict[int, Row] = {}
        self.calls: list[ScriptedCall] = []
        #: How many calls may be under way at once; and to which of them something happens next.
        self.concurrency, self.turn = 1, 0
        self.hung = HungCalls()
        self.epoch = 0
        self.lost = False
        #: Of each key, the place of the message that arrived last.
        self.last: dict[str, int] = {}
        self.arrived: set[int] = set()
        #: What was done by an answer that counts: it is not sent again, unless an earlier one of its key is.
        self.answered: set[int] = set()
        #: How many messages were accepted; and how many had been when a message last failed alone, and when it did
        #: before. `some_late`: some were accepted by a late answer, and nobody can say when.
        self.accepted, self.some_late = 0, False
        self.failed_at: dict[int, tuple[float, float]] = {}
        self._forget_run()

    # What the machine checks

    def place(self, message: Message) -> int:
        """The number of a message in its key, from 1."""
        return sum(each.key == message.key and (each.id or 0) <= (message.id or 0) for each in self.log)

    def check_call(self, given: Sequence[Message]) -> None:
        """Nothing is handed over beside a call that has it, or that has its key; keys go in their order."""
        assert given
        ids, keys = {each.id for each in given}, {each.key for each in given if each.key is not None}
        for call in self.calls:
            if not call.finished:
                assert not ids & {each.id for each in call.messages}, "beside the call that has the message"
                assert not keys & {each.key for each in call.messages}, "beside a call that has its key"
        assert len(ids) == len(given)
        numbers = [each.id or 0 for each in given]
        assert numbers == sorted(numbers)
        for message in given:
            assert message.id not in self.answered, f"message {message.id} was done, and nothing before it is repeated"
            self.answered -= {each.id or 0 for each in self.log if each.key is not None and each.key == message.key}

    def arrive(self, message: Message) -> None:
        """Each message of a key comes right behind the one before, or repeats an earlier one and what followed it."""
        self.arrived.add(message.id or 0)
        if message.key is not None:
            place, last = self.place(message), self.last.get(message.key, 0)
            assert place <= last + 1, f"message {message.id} came after place {last} of key {message.key}"
            self.last[message.key] = place

    # The log

    @initialize(keys=st.lists(KEYS, min_size=1, max_size=8), concurrency=st.integers(1, 3))
    def begin(self, keys: list[str | None], concurrency: int) -> None:
        """There are messages, and a lease."""
        self.concurrency = concurrency
        self.append(keys)
        self.take_lease()

    @rule(keys=st.lists(KEYS, min_size=1, max_size=5))
    def append(self, keys: list[str | None]) -> None:
        """More messages."""
        self.log += messages(*keys, first=len(self.log) + 1)

    # Leases

    def take_lease(self, *, others: bool = False) -> None:
        """A new one of this process; `others`: another process had one meanwhile."""
        self.epoch += 2 if others else 1
        self.lost = False
        lease = Lease(Partition("relay"), self.epoch, "us")
        self.hung.taken(lease)
        self.hung.read_from("server")
        self.stop = Stop()
        self.handler = BatchHandler(
            cast("LeasedCaller", Line(self, lease)),
            POLICY,
            stop=self.stop,
            most=4,
            outages=outages_told_to(Listeners()),
            part_seconds=self.epoch % 2,
            hung=self.hung,
        )

    @rule()
    def lose_connection(self) -> None:
        """What was not settled is kept for the next lease of the process."""
        self._drop()
        self.take_lease()

    @precondition(lambda self: not any(not call.finished and not call.arrived for call in self.calls))
    @rule(sends=st.integers(0, 4), settles=st.booleans())
    def lose_lease_to_somebody_else(self, sends: int, settles: bool) -> None:
        """Another process sends messages of the log from where it was settled, and settles them or not."""
        self._drop()
        blocked = {row.message.key for row in self.parked.values() if row.message.key is not None}
        for message in self.log[self.settled : self.settled + sends]:
            if message.key not in blocked:
                self.arrive(message)
            elif settles:
                self.parked[message.id or 0] = Row(message, BEHIND)
        self.settled = min(len(self.log), self.settled + sends * settles)
        self.answered.clear()
        for call in self.calls:
            call.counts = False
        self.take_lease(others=True)

    # A batch

    def _forget_run(self) -> None:
        self.run: Generator[Any, None, None] | None = None
        self.of_parked = False
        self.given: list[Message] = []
        self.batch: list[Message] = []
        self.outcome = Outcome()
        self.at: Wait | None = None

    def _drop(self) -> None:
        if self.run is not None:
            self.run.close()
            self.handler.keep(self.outcome.done)
        self._forget_run()

    @precondition(lambda self: self.run is None and self.settled < len(self.log))
    @rule(size=st.integers(1, 6))
    def handle(self, size: int) -> None:
        """The next messages of the log, but those whose key is held back by a parked one, or by a call."""
        self._settle_late()
        batch = self.log[self.settled : self.settled + size]
        blocked = {row.message.key for row in self.parked.values() if row.message.key is not None}
        called = self.hung.held(ordered=True)
        self.given, parkings = POLICY.sort_out(batch, NOW, held=blocked, called=called)
        self.outcome = Outcome(parked=with_one_head(parkings))
        self.batch = batch
        self._start(quota=3)

    def _settle_late(self) -> None:
        """Of calls that have come back late, and of those that hang, the parked rows get what came of them."""
        for part in self.handler.late():
            self._check_part(part)
            for message in part.done:
                self.parked.pop(message.id or 0, None)
            for message, parking in part.parked:
                if parking is not BEHIND:
                    self.parked[message.id or 0] = Row(self.parked[message.id or 0].message, parking)

    @precondition(lambda self: self.run is None and self.parked)
    @rule()
    def handle_parked(self) -> None:
        """Those that nothing holds: of each key the first, and what it blocks."""
        self._settle_late()
        held, stopped = self.hung.held(ordered=True), set[str | None]()
        self.given = []
        for _, row in sorted(self.parked.items()):
            key, state = row.message.key, row.parking.state
            if state == "dead" or held.has(row.message.id, key) or (key is not None and key in stopped):
                stopped.add(key)
            else:
                self.given.append(again(row.message, (row.parking.attempts or 0) + 1))
        self.outcome, self.of_parked = Outcome(), True
        self._start(quota=0)

    def _start(self, *, quota: int) -> None:
        self.run = self.handler.run(list(self.given), quota=quota, parked=self.of_parked)
        self._step(others=False)

    def _step(self, *, others: bool) -> None:
        """On to the next wait."""
        assert self.run is not None
        self.at = None
        try:
            for each in self.run:
                if isinstance(each, Wait):
                    self.at = each
                    return
                if isinstance(each, Look):
                    each.others = others
                else:
                    self._take(each)
        except LeaseLostError:
            self._drop()
            self.take_lease()
            return
        self._end()

    def _take(self, part: Outcome) -> None:
        """A part: nothing has two outcomes, and what is before `next` has one."""
        self.outcome.done += part.done
        self.outcome.parked += part.parked
        with_outcome = [each.id for each in (*self.outcome.done, *(each for each, _ in self.outcome.parked))]
        assert len(with_outcome) == len(set(with_outcome))
        self._check_part(part)
        if part.next is not None and not self.of_parked:
            before = {each.id for each in self.batch if self.settled < (each.id or 0) < (part.next.id or 0)}
            assert before <= set(with_outcome)
            self._settle((part.next.id or 0) - 1)
        elif self.of_parked:
            self._settle_parked()
        self.outcome.open = part.open

    def _check_part(self, part: Outcome) -> None:
        """Nothing is done that was not accepted, or blamed on a message while nothing else was accepted."""
        for message in part.done:
            assert message.id in self.arrived, f"message {message.id} was never accepted"
        for message, parking in part.parked:
            last, before_last = self.failed_at.get(message.id or 0, (math.inf, math.inf))
            if parking.state != "waiting" and parking.error in ("ValueError: cannot", "no answer within 1.0 s"):
                assert self.some_late or self.accepted > before_last, "blamed, although nothing else was accepted since"
            if parking.error == "hangs, while others are accepted":
                assert self.some_late or self.accepted > last, (
                    "blamed while it hangs, although nothing else was accepted since"
                )

    def _end(self) -> None:
        """All have an outcome, or are open after a stop or for a topic that is not accepted."""
        done = {each.id for each in self.outcome.done} | {each.id for each, _ in self.outcome.parked}
        is_open = {each.id for each in self.outcome.open}
        if not self.of_parked:
            assert not done & is_open
            assert {each.id for each in self.batch if (each.id or 0) > self.settled} == done | is_open
            if is_open:
                assert self.stop.asked or self.handler.gave_up
                handled = [each for each in done if each in {given.id for given in self.given}]
                behind = max((id or 0 for id in handled), default=self.settled)
                why = "stopped"
                before = [each for each in self.outcome.open if (each.id or 0) < behind]
                self.outcome.parked += [(each, POLICY.waiting(each, why)) for each in before]
                self._settle(behind)
            else:
                self._settle(self.batch[-1].id or 0)
        self._forget_run()
        self.stop.withdraw()

    def _settle(self, upto: int) -> None:
        for message, parking in [each for each in self.outcome.parked if (each[0].id or 0) <= upto]:
            self.parked[message.id or 0] = Row(message, parking)
        self.outcome.done = [each for each in self.outcome.done if (each.id or 0) > upto]
        self.outcome.parked = [each for each in self.outcome.parked if (each[0].id or 0) > upto]
        self.settled = max(self.settled, upto)

    def _settle_parked(self) -> None:
        for message in self.outcome.done:
            del self.parked[message.id or 0]
        for message, parking in self.outcome.parked:
            if parking is not BEHIND:
                self.parked[message.id or 0] = Row(self.parked[message.id or 0].message, parking)
        self.outcome = Outcome()

    # What happens at a wait

    @property
    def under_way(self) -> list[ScriptedCall]:
        """The calls that the batch waits for."""
        return [] if self.at is None else [cast("ScriptedCall", call) for call in self.at.calls]

    @property
    def call(self) -> ScriptedCall | None:
        """The one of them to which something happens next."""
        return self.under_way[self.turn % len(self.under_way)] if self.under_way else None

    @precondition(lambda self: len(self.under_way) > 1)
    @rule(turn=st.integers(0, 2))
    def another_is_next(self, turn: int) -> None:
        """Calls side by side come back in any order."""
        self.turn = turn

    def _answer(self, call: ScriptedCall, verdicts: Sequence[Verdict] | None) -> None:
        """It comes back with verdicts, or with an error; what it has done has arrived."""
        if verdicts is None:
            call.error = ValueError("cannot")
        else:
            call.verdicts = list(verdicts)
            for message, verdict in zip(call.messages, verdicts, strict=True):
                if verdict == DONE:
                    self.answered |= {message.id or 0} if call.counts else set()
                    self.accepted += 1
                    self.some_late |= call.age > 0
                    if not call.arrived:
                        self.arrive(message)
        call.finished = True

    def _fails(self, call: ScriptedCall) -> None:
        """A call fails, and nobody knows why: if a message is alone in it, that is remembered."""
        if len(call.messages) == 1:
            id = call.messages[0].id or 0
            self.failed_at[id] = (self.accepted, self.failed_at.get(id, (math.inf, math.inf))[0])

    def _verdicts(self, data: st.DataObject, given: Sequence[Message]) -> list[Verdict]:
        """Nothing of a key is done behind the first that is not."""
        verdicts, stopped = list[Verdict](), set[str]()
        for message in given:
            verdict: Verdict = EARLIER if message.key in stopped else data.draw(VERDICTS)
            if verdict != DONE and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts

    @precondition(lambda self: self.call is not None)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """In time, with verdicts."""
        assert self.call is not None
        verdicts = self._verdicts(data, self.call.messages)
        if len(verdicts) == 1 and isinstance(verdicts[0], Unavailable):
            # From then on it counts whether the destination has accepted something else.
            self.failed_at.setdefault(self.call.messages[0].id or 0, (self.accepted, math.inf))
        self._answer(self.call, verdicts)
        self._step(others=False)

    @precondition(lambda self: self.call is not None)
    @rule()
    def raise_error(self) -> None:
        """In time, with an error; nothing has arrived."""
        assert self.call is not None
        self._fails(self.call)
        self._answer(self.call, None)
        self._step(others=False)

    @precondition(lambda self: self.call is not None)
    @rule(arrives=st.booleans())
    def hang(self, arrives: bool) -> None:
        """Not in time. What it has may have arrived."""
        call = self.call
        assert call is not None
        call.age = 1
        self._fails(call)
        if arrives:
            call.arrived = True
            for message in call.messages:
                self.arrive(message)
        self._step(others=False)

    @precondition(lambda self: self.at is not None and self.call is None)
    @rule(others=st.booleans())
    def pause(self, others: bool) -> None:
        """The pause is over."""
        self._step(others=others)

    @precondition(lambda self: self.at is not None)
    @rule()
    def ask_to_stop(self) -> None:
        """A call is waited for all the same."""
        self.stop.ask()
        if self.call is None:
            self._step(others=False)

    @precondition(lambda self: self.run is not None)
    @rule()
    def lose_lease(self) -> None:
        """It is noticed before the next call."""
        self.lost = True

    @precondition(lambda self: any(call.age and not call.finished for call in self.calls))
    @rule(which=st.integers(0, 9), data=st.data(), error=st.booleans())
    def come_back_late(self, which: int, data: st.DataObject, error: bool) -> None:
        """A call that hung, with an error or with verdicts; what has arrived is done."""
        late = [call for call in self.calls if call.age and not call.finished]
        call = late[which % len(late)]
        if error:
            self._fails(call)
            self._answer(call, None)
        else:
            self._answer(call, [DONE] * len(call.messages) if call.arrived else self._verdicts(data, call.messages))

    @rule()
    def let_a_deadline_pass(self) -> None:
        """Calls that hang hang longer."""
        for call in self.calls:
            call.age += bool(call.age and not call.finished)

    @precondition(lambda self: any(row.parking.state == "dead" for row in self.parked.values()))
    @rule()
    def replay(self) -> None:
        """A person replays a dead letter, between two batches."""
        if self.run is None:
            id = min(id for id, row in self.parked.items() if row.parking.state == "dead")
            self.handler.hung.known.forget({id})
            self.parked[id] = Row(self.parked[id].message, replace(self.parked[id].parking, state="retry", attempts=0))

    # What always holds

    @invariant()
    def nothing_is_lost(self) -> None:
        """Each message before the position has arrived, or is parked."""
        for message in self.log[: self.settled]:
            assert message.id in self.arrived or message.id in self.parked, f"lost: message {message.id}"

    @invariant()
    def whatever_hangs_is_held(self) -> None:
        """Until it comes back, whatever became of its lease."""
        hanging = [call for call in self.calls if call.age and not call.finished and call not in self.under_way]
        held = self.hung.held(ordered=True)
        assert all(held.has(each.id, each.key) for call in hanging for each in call.messages)

    def teardown(self) -> None:
        """When the destination is well, everything arrives, and each key ends with its newest message."""
        with self.few_may_hang:
            if self.log:
                self._end_well()

    def _end_well(self) -> None:
        self._drop()
        for call in self.calls:
            if not call.finished:
                self._answer(call, [DONE] * len(call.messages) if call.arrived else None)
        self.take_lease()
        for _ in range(100):
            if self.settled == len(self.log) and not self.parked:
                break
            while any(row.parking.state == "dead" for row in self.parked.values()):
                self.replay()
            if self.parked:
                self.handle_parked()
                self._finish()
            if self.settled < len(self.log):
                self.handle(6)
                self._finish()
        assert (self.settled, self.parked) == (len(self.log), {})
        newest = {each.key: self.place(each) for each in self.log if each.key is not None}
        assert self.last == newest

    def _finish(self) -> None:
        while self.run is not None:
            if self.call is not None:
                self._answer(self.call, [DONE] * len(self.call.messages))
            self._step(others=True)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
