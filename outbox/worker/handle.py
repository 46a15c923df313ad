"""Calls the handler with the messages of a batch, until each has an outcome or a stop is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outbox.errors import HungHandlerError
from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.model.retry import seconds_to_wait
from outbox.model.verdict import DONE, Verdict, describe
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.stop import Stop
from outbox.telemetry.events import HandedOver, Teller
from outbox.worker import upkeep
from outbox.worker.assigned import Assigned
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, Caller, Handler, HeldLease, verdicts_of
from outbox.worker.choosing import Chooser
from outbox.worker.hung import HungCalls
from outbox.worker.judging import Judge
from outbox.worker.outages import Outages
from outbox.worker.outcome import Outcome, Pending
from outbox.worker.pace import Pace
from outbox.worker.policy import HALF_HUNG_SECONDS, MAX_HUNG, PAUSE, HandlerPolicy, Portions
from outbox.worker.portions import PortionedCall
from outbox.worker.silences import PATIENCE_SECONDS, Silences
from outbox.worker.waiting import Look, Wait

#: How often to look at a lease that does not last long enough for a call, and at a late call that is waited for.
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedCaller:
    """Makes calls under one lease.

    `needs`: for so many seconds the lease has to last when a call begins. `deadline`: of a call, in seconds. `wake`:
    wakes the thread that steps the partition. `teller`: tells of the answers; `destination`: as events name it.
    `portions`: in which a call hands its messages over; None: all at once.
    """

    caller: Caller
    handler: Handler
    held: HeldLease
    needs: float
    deadline: float
    wake: Callable[[], None]
    teller: Teller
    destination: str | None = None
    portions: Portions | None = None

    def may_begin(self) -> bool:
        """Return whether the lease lasts long enough for a call; False while a renewal may come in time.

        Raises:
            LeaseLostError: no renewal came in time.
        """
        return self.held.require(self.needs)

    def begin(self, messages: Sequence[Message], *, until: float = math.inf, patience: float = math.inf) -> Call:
        """Have the handler called with messages when the turn comes, before the moment `until`.

        `patience`: the call is past its deadline after so many seconds, at the latest.
        """
        deadline = min(self.deadline, patience)
        options: dict[str, Any] = {"needs": self.needs, "until": until, "deadline": deadline, "wake": self.wake}
        if self.portions is None:
            call = Call(messages, self.held, **options)
            self.caller.begin(call, self._call)
            return call
        portioned = PortionedCall(messages, self.held, portions=self.portions, tell=self._tell, **options)
        self.caller.begin(portioned, self.handler)
        return portioned

    def _call(self, messages: Sequence[Message]) -> list[Verdict]:
        verdicts: list[Verdict] | None = None
        error: str | None = None
        began = time.monotonic()
        try:
            crash_point("relay.before_send")
            verdicts = verdicts_of(self.handler, messages)
            crash_point("relay.after_send")
            return verdicts
        except BaseException as failed:
            error = describe(failed)
            raise
        finally:
            seconds = time.monotonic() - began
            self._tell(messages, verdicts, seconds, error)

    def _tell(
        self, messages: Sequence[Message], verdicts: Sequence[Verdict] | None, seconds: float, error: str | None = None
    ) -> None:
        answer = {"messages": messages, "verdicts": verdicts, "error": error, "seconds": seconds}
        self.teller.tell(HandedOver, destination=self.destination, **answer)


class BatchHandler:
    """Handles the batches of one lease, in turn."""

    @classmethod
    def of(cls, assigned: Assigned) -> BatchHandler:
        """Return the handler of a partition's batches."""
        job, policy = assigned.job, assigned.policy
        calls = LeasedCaller(
            caller=job.caller,
            handler=job.handler,
            held=assigned.held,
            needs=min(policy.deadline, assigned.settings.lease / 2).total_seconds(),
            deadline=policy.deadline.total_seconds(),
            wake=assigned.wake.set,
            teller=assigned.teller,
            destination=job.declared.destination,
            portions=policy.portions(upkeep.SETTLE_PARTS),
        )
        return cls(
            calls,
            policy,
            stop=assigned.held.stop,
            most=assigned.limits.rows,
            part_seconds=upkeep.SETTLE_PARTS,
            hung=assigned.hung,
            outages=assigned.outages,
            pace=assigned.pace,
        )

    def __init__(
        self,
        calls: LeasedCaller,
        policy: HandlerPolicy,
        *,
        stop: Stop,
        most: int,
        outages: Outages,
        part_seconds: float,
        hung: HungCalls,
        pace: Pace | None = None,
    ) -> None:
        """`stop`: leaves the rest of a batch open. `most`: of messages in a call. `part_seconds`: a batch that takes
        longer comes in parts. `hung`, `outages`: calls that did not come back, and topics that are not accepted, over
        all leases. `pace`: of handing messages over; None: any.
        """
        self._calls = calls
        self.policy = policy
        self._stop = stop
        self._part_seconds = part_seconds
        self.hung = hung
        self._outages = outages
        size = BatchSize(least=policy.least, most=most, deadline=policy.deadline.total_seconds())
        self._blame = blame = Blame()
        self._silences = Silences(blame)
        self._chooser = Chooser(policy, calls.caller, blame=blame, silences=self._silences, size=size)
        self._judge = Judge(policy, blame=blame, silences=self._silences, size=size, outages=outages)
        self._pace = pace
        #: The calls that have not come back, and are not past their deadline.
        self._under_way: list[Call] = []

    @property
    def gave_up(self) -> bool:
        """True when so many calls of the handler hang that only a new process helps."""
        overdue = self._calls.caller.overdue
        if len(overdue) < MAX_HUNG // 2:
            return False
        for_long = sum(call.seconds >= HALF_HUNG_SECONDS for call in overdue)
        return sum(call.hangs for call in overdue) >= MAX_HUNG or for_long >= MAX_HUNG // 2

    @property
    def stops(self) -> bool:
        """True when a stop is asked."""
        return self._stop.asked

    def keep(self, done: Sequence[Message], parkings: Sequence[tuple[Message, Parking]] = ()) -> None:
        """Remember outcomes that could not be settled, for the next lease."""
        self.hung.note(self._calls.held.lease, done, parkings)

    def late(self) -> Iterator[Outcome]:
        """Yield the outcomes of late answers, which settle parked messages.

        For a message that hangs alone while others are accepted, an attempt counts.
        """
        for call in self.hung.come_back(self._calls.held.lease, self.policy):
            batch = Pending(list(call.messages), 0, parked=True)
            self._judge.judge_late(batch, call)
            yield self._part(batch)
            self.hung.settled(call)
        if self.hung:
            yield Outcome(parked=self._judge.hanging())

    def run(
        self, messages: list[Message], *, quota: int, parked: bool = False, now: datetime | None = None
    ) -> Generator[Wait | Look | Outcome, None, None]:
        """Call the handler until every message has an outcome, or a stop is asked; yield the outcomes.

        A batch that takes long comes in parts, so that each part can be settled before the next. A `Wait` is yielded
        while there is nothing to do, and a `Look` before messages are parked because no other could be tried. While the
        destination accepts nothing of the log, the batch waits, with growing pauses; `parked` messages stay open, and
        their topics count as refused.

        `quota`: how many messages may be parked as waiting. `parked`: the messages were read from where they are
        parked. `now`: by the database's clock; messages expire meanwhile. None: they do not.
        """
        batch = Pending(messages, quota, parked=parked, now=now)
        if self.hung.known:
            batch.resolve(*self.hung.known.among(messages, ordered=self.policy.ordered))
        try:
            yield from self._work_through(batch)
            batch.keep_open()
            self._put_behind(batch)
            yield self._part(batch)
        except BaseException:
            self._leave_calls(batch)
            self.keep(batch.outcome.done, batch.outcome.parked)
            raise

    def _put_behind(self, batch: Pending) -> None:
        """Have parked messages that were tried in vain be due behind the others of their topic."""
        if batch.parked:
            errors, open = batch.findings.errors, batch.outcome.open
            tried = [message for message in open if message.id in errors]
            batch.outcome.parked += [(message, self.policy.waiting(message, errors[message.id])) for message in tried]

    def _part(self, batch: Pending, *, pauses: bool = False) -> Outcome:
        """Return the outcomes since the previous part; `pauses`: none of the remaining messages is accepted now."""
        self._tell_what_waits(batch)
        part = batch.next_part(away=pauses or batch.findings.away is not None)
        if self._outages:
            self._outages.accepted(part.accepted_topics)
        self._blame.forget(part.done)
        again = (States.RETRY, States.WAITING) if batch.parked else (States.RETRY,)
        self._blame.forget(message for message, parking in part.parked if parking.state not in again)
        return part

    def _work_through(self, batch: Pending) -> Generator[Wait | Look | Outcome, None, None]:
        # Also for messages that were left open meanwhile: the answers of calls under way are settled with this batch.
        while self._under_way or (batch.messages and not self._ends(batch) and not self.gave_up):
            call, tried = (yield from self._next_call(batch)), list[Message]()
            if call is None:
                if self._stop.asked:
                    break
                # Every remaining message was tried since the destination accepted something: start over.
                tried = [message for message in batch.messages if message.id in batch.findings.tried]
                batch.findings.tried.clear()
            elif call.late or self._judged(batch, call):
                self._park_refused(batch)
                self._let_expire(batch)
                if batch.has_part(after=self._part_seconds):
                    yield self._part(batch)
                yield from self._let_refused_pass(batch)
                continue
            elif self._under_way or self._others_untried(batch, call) or (yield from self._let_refused_pass(batch)):
                continue
            chunk = [] if call is None else list(call.messages)
            if not batch.parked:
                others_help = not chunk or self._all_refused(batch)
                yield from self._wait_for_destination(batch, others_help=others_help)
            elif self._keeps_all_open(batch, chunk, tried):
                break

    def _all_refused(self, batch: Pending) -> bool:
        """Return whether each topic of a batch of the log is refused, by a destination that may accept others."""
        findings = batch.findings
        if batch.parked or self._under_way or not findings.refused or findings.away is not None:
            return False
        return all(message.topic in findings.refused for message in batch.messages)

    def _others_untried(self, batch: Pending, call: Call) -> bool:
        """Return whether a call has shown that its topics are refused, while others of the log have not been tried."""
        findings = batch.findings
        if batch.parked or findings.away is not None or not findings.refused:
            return False
        return all(m.topic in findings.refused for m in call.messages) and self._chooser.some_untried(batch)

    def _judged(self, batch: Pending, call: Call) -> bool:
        """Judge a call; return False if no message got an outcome. A failure here loses no answer of the handler."""
        try:
            return self._judge.judge(batch, call)
        except BaseException:
            self.keep([message for message, verdict in call.answers if verdict is DONE])
            raise

    def _wait_for_destination(
        self, batch: Pending, *, others_help: bool
    ) -> Generator[Wait | Look | Outcome, None, None]:
        """Pause, after the outcomes so far. `others_help`: only other messages could be tried afterwards."""
        self._tell(batch, batch.findings.errors_by_topic(batch.messages), pauses=True)
        if batch.has_part():
            yield self._part(batch, pauses=True)
        self._blame.pauses += 1
        yield Wait(time.monotonic() + seconds_to_wait(PAUSE, self._blame.pauses), stop=self._stop)
        if not self._stop.asked:
            self._let_expire(batch)
            if others_help:
                yield from self._let_pass(batch)

    @staticmethod
    def _keeps_all_open(batch: Pending, chunk: list[Message], tried: list[Message]) -> bool:
        """Leave the topics that are not accepted; return whether no other message is worth a try."""
        if batch.findings.away is not None and len(chunk) == 1:
            # The destination accepts nothing at all: to try another message now would show nothing new.
            batch.keep_topics_open(list(batch.messages))
            return True
        if not chunk:
            batch.keep_topics_open(tried)
            return True
        if len(chunk) == 1 and batch.findings.failed_twice(chunk[0].topic, batch.messages):
            batch.keep_topics_open(chunk)
        return False

    def _park_refused(self, batch: Pending) -> None:
        """Let messages of refused topics wait, as others are accepted, and as far as the quota allows."""
        refused = batch.findings.refused
        if not refused or batch.parked or not batch.findings.some_accepted:
            return
        begun = [message for call in self._under_way for message in call.messages]
        ids = {message.id for message in begun}
        keys = {message.key for message in begun if message.key is not None}
        free = (each for each in batch.heads() if each.id not in ids and each.key not in keys)
        heads = [each for each in free if each.topic in refused][: batch.quota]
        batch.quota -= len(heads)
        batch.resolve([], [(message, self.policy.waiting(message, refused[message.topic])) for message in heads])

    def _let_expire(self, batch: Pending) -> None:
        """Park expired messages as dead, unless a call has them."""
        if timed := batch.timed():
            under_way = {message.id for call in self._under_way for message in call.messages}
            batch.expire(message for message in timed if message.id not in under_way)

    def _let_refused_pass(self, batch: Pending) -> Generator[Look, None, bool]:
        """Let a batch of refused topics wait, without a pause, because a later topic of the log may be accepted."""
        return self._all_refused(batch) and (yield from self._let_pass(batch))

    def _let_pass(self, batch: Pending) -> Generator[Look, None, bool]:
        """Park the head of each key as `waiting`, if there are other messages to try and the quota allows it.

        Every remaining message has failed alone in a call, or is of a refused topic. Later messages can show
        whether the destination accepts any, unless so many calls hang that nothing can be tried.
        """
        if len(self._calls.caller.overdue) >= MAX_HUNG:
            return False
        look = Look()
        yield look
        heads = batch.heads()
        if not look.others or len(heads) > batch.quota:
            return False
        batch.quota -= len(heads)
        error_of = batch.findings.error_of
        batch.resolve([], [(message, self.policy.waiting(message, error_of(message))) for message in heads])
        return True

    def _tell_what_waits(self, batch: Pending) -> None:
        if batch.outcome.parked or batch.outcome.refused:
            waiting = {
                m.topic: parking.error or "" for m, parking in batch.outcome.parked if parking.state == States.WAITING
            }
            refused = batch.findings.errors_by_topic(m for m in batch.outcome.open if m.topic in batch.outcome.refused)
            self._tell(batch, refused | waiting)

    def _tell(self, batch: Pending, errors: dict[str, str], *, pauses: bool = False) -> None:
        self._outages.refused(errors, by_all=batch.findings.error_of_all(errors.values()), pauses=pauses)

    def _ends(self, batch: Pending) -> bool:
        """Return whether the rest of a batch stays open."""
        return self._stop.asked or (self.policy.suspend and batch.suspended)

    def _next_call(self, batch: Pending) -> Generator[Wait, None, Call | None]:
        """Begin calls, and return the first that is over; None: no call is under way, and none could begin."""
        yield from self._begin_calls(batch)
        return (yield from self._next_over(batch)) if self._under_way else None

    def _begin_calls(self, batch: Pending) -> Generator[Wait, None, None]:
        """Begin as many calls as may be under way at once, for messages of different keys; none after a stop."""
        while (chunk := self._chooser.next(batch, self._under_way)) and not (self._under_way and self._stop.asked):
            if self._pace is not None:
                while not self._pace.free:
                    if self._stop.asked or self._under_way:
                        return
                    yield Wait(time.monotonic() + self._pace.free_in, stop=self._stop)
                chunk = chunk[: self._pace.free]
            while not self._calls.may_begin():
                if self._stop.asked or self._under_way:
                    return
                yield Wait(time.monotonic() + _LOOK_SECONDS, stop=self._stop)
            if self._pace is not None:
                self._pace.spend(len(chunk))
            self.hung.known.hand_over(chunk, ordered=self.policy.ordered)
            patience = PATIENCE_SECONDS if self._silences.is_silent(chunk[0].topic) else math.inf
            until = clock() + batch.seconds_to_expiry(chunk)
            self._under_way.append(self._calls.begin(chunk, until=until, patience=patience))

    def _next_over(self, batch: Pending) -> Generator[Wait, None, Call]:
        """Wait for a call to come back, to be left behind or to be withdrawn after a stop; return the call.

        Past the deadline, the handler may be called again beside the call, whose keys are held.
        """
        caller = self._calls.caller
        while True:
            # First, because a call past its deadline loses its turn by that.
            until = min([caller.look(call) for call in self._under_way])
            for call in self._under_way:
                if call.started is None and self._stop.asked:
                    caller.withdraw(call)
                if call.finished or (call.over and self._has_room(batch, call) and call.leave_behind()):
                    if call.left:
                        self.hung.add(call, self._calls.held.lease)
                    self._under_way.remove(call)
                    return call
            late = any(call.over for call in self._under_way)
            until = time.monotonic() + _LOOK_SECONDS if late else until
            waits = late or any(call.started is None for call in self._under_way)
            yield Wait(until, tuple(self._under_way), self._stop if waits else None)

    def _has_room(self, batch: Pending, call: Call) -> bool:
        """Return whether the messages of a call past its deadline may be parked; else the partition waits.

        Raises:
            HungHandlerError: the call hangs.
        """
        if batch.parked or self.policy.in_portions or len(call.messages) <= batch.quota or self._stop.asked:
            return True
        if call.hangs:
            raise HungHandlerError("a call of the handler never came back, and too many messages wait already")
        return False

    def _leave_calls(self, batch: Pending) -> None:
        """Hold the keys of the calls under way until the calls come back.

        Once a call has begun, its verdicts count, whether it has come back by now or not.
        """
        for call in self._under_way:
            if self._calls.caller.withdraw(call):
                continue
            if isinstance(call, PortionedCall) and call.leave_behind(overdue=False):
                self._judge.apply(batch, *call.answered)
            self.hung.add(call, self._calls.held.lease)
        self._under_way = []
